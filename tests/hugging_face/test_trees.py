"""Trees of drafts with Hugging Face models: the text equals plain seeded sampling, and caches keep accepted paths."""

import copy

import pytest
import torch

from specdecode.demo import DRAFT, TARGET
from tests.conftest import combine
from tests.hugging_face.common import (
    DRAFTERS,
    FIELDS,
    HOT,
    NEW,
    PROMPTS,
    TARGETS,
    TEMPERATURE,
    TRUNCATION,
    VOCAB,
    build,
    gpt2,
    llama,
    mistral,
    noisy,
    one_by_one,
    ragged,
    texts,
)
from tests.hugging_face.test_processors import CHAINS, STOP, Grammar

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import PromptLookup, TokenKind, generate  # noqa: E402

TREE = (4, 2, 1)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


def qwen2():
    return build(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SIZES, num_key_value_heads=1))


def gpt_neox():
    return build(transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**SIZES, pad_token_id=None))


def gemma2():
    sizes = SIZES | {"head_dim": 8, "num_key_value_heads": 1, "pad_token_id": None, "sliding_window": 32}
    return build(transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**sizes))


def eager_llama():
    return llama(attn_implementation="eager")


def falcon():
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "alibi": True}
    return build(transformers.FalconForCausalLM, transformers.FalconConfig(**sizes, eos_token_id=None))


def bloom():
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "n_head": 2, "n_layer": 1, "bos_token_id": None}
    return build(transformers.BloomForCausalLM, transformers.BloomConfig(**sizes, eos_token_id=None))


def with_attention(name):
    model = llama(layers=1)
    model.config._attn_implementation = name
    return model


def by_tree(target, draft, tree=TREE, **options):
    return ragged(target, draft, method="strict", tree=tree, **options)


@pytest.mark.parametrize(
    ("name", "drafter", "tree"),
    combine(list(TARGETS), ["close", "far", "other", "itself"], [TREE, (2, 2, 2), (8,)]),
    ids=str,
)
def test_the_text_is_that_of_plain_sampling(name, drafter, tree, plain, truncated):
    target, draft = TARGETS[name], DRAFTERS[drafter](TARGETS[name])
    output = by_tree(target, draft, tree)
    assert texts(output) == plain[name]
    assert texts(by_tree(target, draft, tree, temperature=HOT, **TRUNCATION)) == truncated[name]
    if drafter == "itself":
        assert output.target_calls == -(-NEW // (len(tree) + 1))


@pytest.mark.parametrize("build_model", [eager_llama, qwen2, gpt_neox, gemma2])
def test_other_architectures_read_trees(build_model):
    target = build_model()
    expected = [one_by_one(target, prompt, NEW, TEMPERATURE[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
    output = by_tree(target, noisy(target, 0.03))
    assert texts(output) == expected
    assert output.stats.acceptance_length > 1.5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_of_half_precision_take_the_mask(attention):
    target = llama(attn_implementation=attention).to(torch.bfloat16)
    output = by_tree(target, copy.deepcopy(target))
    assert output.num_generated.tolist() == [NEW] * len(PROMPTS)
    assert output.stats.acceptance_rate > 0.8  # less than 1 by rounding alone


@pytest.mark.parametrize("drafter", ["close", "other"])
def test_a_tree_of_one_node_a_level_is_a_chain(drafter):
    target = TARGETS["llama"]
    draft, steps = DRAFTERS[drafter](target), {"tree": [], "chain": []}
    tree = by_tree(target, draft, (1, 1, 1), on_step=steps["tree"].append)
    chain = ragged(target, draft, method="strict", num_draft_tokens=3, on_step=steps["chain"].append)
    assert torch.equal(tree.sequences, chain.sequences)
    assert torch.equal(tree.token_kinds, chain.token_kinds)
    assert (tree.target_calls, tree.draft_calls) == (chain.target_calls, chain.draft_calls)
    assert str(tree.stats) == str(chain.stats)
    assert steps["tree"] == steps["chain"]


def test_a_tree_accepts_more_than_a_chain_of_its_depth():
    target, draft = (transformers.AutoModelForCausalLM.from_pretrained(each).eval() for each in (TARGET, DRAFT))
    tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET, padding_side="left")
    prompts = ["class Lock:\n", "def read_file(path):\n", "import os\n", "async def connect(self,"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    options = {"method": "strict", "max_new_tokens": 32, "seeds": 0, "eos_token_id": [], "num_return_sequences": 2}
    plain, chain, tree = (
        generate(target, drafter, **batch, **options, **shape)
        for drafter, shape in ((None, {}), (draft, {"num_draft_tokens": 3}), (draft, {"tree": TREE}))
    )
    assert torch.equal(tree.sequences, plain.sequences)
    assert tree.stats.acceptance_length > 1.1 * chain.stats.acceptance_length
    assert tree.target_calls < chain.target_calls
    assert tree.draft_calls <= 3 * tree.target_calls


class TestEnds:
    def test_stop_tokens_end_texts_and_branches(self, plain):
        target = TARGETS["llama"]
        stop = plain["llama"][0][len(PROMPTS[0]) + 3]
        cut = [row[: ([*row, stop]).index(stop, len(prompt)) + 1] for row, prompt in zip(plain["llama"], PROMPTS)]
        for draft in (noisy(target, 0.03), target):
            steps = []
            output = by_tree(target, draft, (2, 2), eos_token_id=stop, on_step=steps.append)
            assert texts(output) == cut
            nodes = {1: [3, 4], 2: [5, 6]}
            full = [step.draft_token_ids for step in steps if len(step.draft_token_ids) == 6]
            assert full
            assert all(ids[node - 1] != stop for ids in full for node in nodes)  # its node has no children

    def test_stop_strings_may_begin_on_the_path(self):
        target, draft = (transformers.AutoModelForCausalLM.from_pretrained(each).eval() for each in (TARGET, DRAFT))
        tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET)
        ids = tokenizer("def read_file(path):\n", return_tensors="pt").input_ids
        options = {"max_new_tokens": 48, "seeds": 4, "stop_strings": ["self.", "return"], "tokenizer": tokenizer}
        plain = generate(target, None, ids, **options)
        assert plain.num_generated < 48
        output = generate(target, draft, ids, **options, method="strict", tree=(3, 2, 2))
        assert torch.equal(output.sequences, plain.sequences)

    @pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
    def test_never_a_token_nor_a_call_too_many(self, new):
        target = TARGETS["llama"]
        output = by_tree(target, target, max_new_tokens=new)
        assert output.num_generated.tolist() == [new] * len(PROMPTS)
        assert output.target_calls == -(-new // 4)
        assert output.draft_calls == new - output.target_calls

    @pytest.mark.parametrize("build_model", [llama, gpt2])
    def test_the_last_position_of_a_model_can_be_used(self, build_model):
        target = build_model(positions=7 + NEW)
        assert texts(by_tree(target, noisy(target, 0.03))) == texts(ragged(target, None))

    def test_a_prompt_may_end_with_a_stop_token(self):
        target, prompt = TARGETS["llama"], torch.tensor(PROMPTS[:1])
        options = {"max_new_tokens": 6, "seeds": 100, "eos_token_id": PROMPTS[0][-1]}
        output = generate(target, target, prompt, **options, method="strict", tree=(1, 1))
        assert torch.equal(output.sequences, generate(target, None, prompt, **options).sequences)
        assert output.stats.accepted_tokens > 0


def test_caches_keep_the_accepted_path():
    target = copy.deepcopy(TARGETS["llama"])
    draft = noisy(target, 0.1)
    lengths = dict(enumerate(map(len, PROMPTS)))  # of requests that go on
    calls, kinds = {target: [], draft: []}, set()

    def on_call(model, _args, options, _output):
        cache = options["cache" if "cache" in options else "past_key_values"]
        (columns,) = {layer.keys.shape[-2] for layer in cache.layers}
        fed = options["input_ids"].shape[1]
        calls[model].append(
            (columns - fed - max(lengths.values()), fed)
        )  # before the call, against the longest request

    def on_step(step):
        kinds.update(step.kinds)
        lengths[step.request] += len(step.token_ids)
        if lengths[step.request] == len(PROMPTS[step.request]) + NEW:
            del lengths[step.request]

    for model in calls:
        model.register_forward_hook(on_call, with_kwargs=True)
    output = by_tree(target, draft, on_step=on_step)
    assert kinds >= {TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS}
    assert calls[target][0] == (-7, 7 + 4 + 8 + 8)  # the prompt, and all nodes but node 0, which is its last token
    assert all(before == -1 for before, _ in calls[target][1:])  # the cache holds the text without its last token
    assert {fed for _, fed in calls[target][1:]} <= {1, 1 + 4, 1 + 4 + 8, 1 + 4 + 8 + 8}
    assert calls[draft][:3] == [(-7, 7), (0, 4), (4, 8)]
    assert all(-2 <= before <= -1 for before, fed in calls[draft][3:] if fed <= 2)  # the last draft may not be cached
    assert {(before, fed) for before, fed in calls[draft][3:] if fed > 2} == {(0, 4), (4, 8)}
    assert (output.target_calls, output.draft_calls) == (len(calls[target]), len(calls[draft]))


class TestProcessors:
    @pytest.mark.parametrize("field", ["several", "min_new_tokens"])
    def test_each_row_is_processed_with_the_text_before_it(self, field):
        target, config = TARGETS["llama"], transformers.GenerationConfig(**FIELDS[field])
        expected = texts(ragged(target, None, generation_config=config))
        for drafter in ("close", "itself"):
            output = by_tree(target, DRAFTERS[drafter](target), generation_config=config)
            assert texts(output) == expected
            assert output.stats.accepted_tokens > 0

    def test_a_grammar_sees_only_texts_that_a_request_can_have(self):
        target = TARGETS["llama"]
        width = max(map(len, CHAINS))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in CHAINS])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in CHAINS])
        options = {"max_new_tokens": 9, "seeds": 5, "eos_token_id": STOP, "attention_mask": mask}
        plain = generate(target, None, ids, **options, logits_processor=[Grammar(CHAINS)])
        for drafter in ("close", "other"):
            draft, processors = DRAFTERS[drafter](target), [Grammar(CHAINS)]
            output = generate(target, draft, ids, **options, logits_processor=processors, method="strict", tree=TREE)
            assert torch.equal(output.sequences, plain.sequences)


@pytest.mark.parametrize("draft_vocab", [198, 202])
def test_tokens_that_only_one_model_has_are_not_drafted(draft_vocab):
    target, drafted = llama(200), []
    draft, ids = llama(draft_vocab, layers=1), torch.tensor([[1, 5, 199]])
    options = {"max_new_tokens": NEW, "seeds": 1, "temperature": 3.0}
    output = generate(
        target,
        draft,
        ids,
        **options,
        method="strict",
        tree=TREE,
        on_step=lambda step: drafted.extend(step.draft_token_ids),
    )
    assert torch.equal(output.sequences, generate(target, None, ids, **options).sequences)
    assert max(drafted) < min(200, draft_vocab)


REFUSED = {
    "method: 'probabilistic' .* use method='strict'": {"method": "probabilistic"},
    "draft: expected a draft model, because prompt lookup": {"draft": PromptLookup()},
    "draft: expected a draft model": {"draft": None},
    r"tree\[1\]: expected a positive int": {"tree": (2, 0)},
    r"tree\[0\]: expected at most 8, got 9": {"tree": (9,)},
    "tree: expected a tuple of widths": {"tree": 3},
    r"tree: expected a tuple of widths, .* got \(\)": {"tree": ()},
    "target: expected a model that can read a tree .* got BloomForCausalLM": {"target": bloom},
    "target: expected a model that can read a tree .* got FalconForCausalLM": {"target": falcon},
    "draft: expected an attention window of at least 18 tokens, .* with 4": {"draft": mistral},
    "draft: expected attn_implementation 'sdpa' or 'eager', .* got LlamaForCausalLM with 'flash_attention_2'": {
        "draft": lambda: with_attention("flash_attention_2")
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_trees_that_cannot_be_read_or_verified_are_refused_before_anything_is_computed(message):
    def fail(*_):
        raise AssertionError("computed")

    options = {"target": llama, "draft": llama, "method": "strict", "tree": TREE} | REFUSED[message]
    models = {name: options.pop(name) for name in ("target", "draft")}
    models = {name: each() if callable(each) else each for name, each in models.items()}
    for model in models.values():
        if isinstance(model, torch.nn.Module):
            model.register_forward_pre_hook(fail)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        ragged(*models.values(), **options)


def test_windows_that_no_text_reaches_are_no_limit():
    target = mistral()
    target.config.sliding_window = 7 + NEW - 1
    expected = [one_by_one(target, prompt, NEW, TEMPERATURE[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
    assert texts(by_tree(target, noisy(target, 0.03))) == expected
