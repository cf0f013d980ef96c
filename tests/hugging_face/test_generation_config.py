"""Generation configs and other arguments of `generate`: effects, and refused values."""

import copy
import re
from pathlib import Path

import pytest
import torch

from tests.hugging_face.common import (
    FIELDS,
    NEW,
    PROMPTS,
    TARGETS,
    VOCAB,
    llama,
    noisy,
    padded,
    ragged,
    texts,
    with_config,
)

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import PromptLookup, generate, generation_config  # noqa: E402
from specdecode.integrations.transformers.generation_config import (  # noqa: E402
    HONOURED,
    REFUSED,
    REFUSED_IN_SAMPLING,
    WITHOUT_EFFECT,
)


class Ban(transformers.LogitsProcessor):
    """A user's processor: no token may follow itself, or the token before it in the vocabulary."""

    def __call__(self, input_ids, scores):
        scores = scores.scatter(1, input_ids[:, -1:], -torch.inf)
        return scores.scatter(1, (input_ids[:, -1:] + 1) % VOCAB, -torch.inf)


GIVEN = {
    "of a user": [Ban()],
    "of transformers": [
        transformers.RepetitionPenaltyLogitsProcessor(1.9),
        transformers.SequenceBiasLogitsProcessor([[[4], 4.0], [[5, 5], -9.0]]),
    ],
}


class TestGenerationConfig:
    def expected(self, target, alone=False):
        """Return transformers' greedy new tokens of every request, for all prompts at once or one by one."""
        options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
        prompts = [padded([prompt]) for prompt in PROMPTS] if alone else [padded(PROMPTS)]
        rows = [
            target.generate(ids.clamp(min=0), attention_mask=mask, **options)[:, ids.shape[1] :]
            for ids, mask in prompts
        ]
        return torch.cat(rows)

    @pytest.mark.parametrize("field", FIELDS)
    def test_greedy_tokens_are_those_of_transformers(self, field):
        target = with_config(TARGETS["llama"], do_sample=False, **FIELDS[field])
        # In a padded batch transformers treats padding as tokens, and bans n-grams that occur in it.
        alone = {"no_repeat_ngram_size", "forced_bos_token_id"} & FIELDS[field].keys()
        expected = self.expected(target, alone)
        assert not torch.equal(expected, self.expected(TARGETS["llama"])[:, : expected.shape[1]])  # the field matters
        for draft in (None, noisy(target, 0.05), PromptLookup()):
            output = ragged(target, draft, temperature=None)
            generated = output.sequences[:, -output.token_kinds.shape[1] :]
            assert torch.equal(generated.masked_fill(output.token_kinds == -1, 0), expected)

    @pytest.mark.parametrize("field", FIELDS)
    def test_strict_tokens_do_not_depend_on_the_drafter(self, field):
        target = with_config(TARGETS["gpt2"], **FIELDS[field])
        plain = texts(ragged(target, None))
        for draft in (noisy(target, 0.03), target, PromptLookup()):
            assert texts(ragged(target, draft, method="strict")) == plain

    def test_a_given_config_wins_over_the_target_and_arguments_win_over_both(self):
        target = with_config(TARGETS["llama"], do_sample=True, temperature=0.5, top_k=2, suppress_tokens=[1, 3])
        given_config = transformers.GenerationConfig(temperature=2.0, suppress_tokens=[4])
        options = {"temperature": None, "generation_config": given_config, "max_new_tokens": 8}
        bare, new = TARGETS["llama"], {"max_new_tokens": 8}
        four = transformers.GenerationConfig(suppress_tokens=[4])
        expected = texts(ragged(bare, None, temperature=2.0, top_k=2, generation_config=four, **new))
        assert texts(ragged(target, None, **options)) == expected
        expected = texts(ragged(bare, None, temperature=0.9, generation_config=four, **new))
        assert texts(ragged(target, None, **options | {"temperature": 0.9, "top_k": 0})) == expected
        assert given_config.top_k is None  # the config is unchanged

    def test_the_config_decides_how_tokens_are_drawn(self):
        bare = TARGETS["llama"]
        for fields, same in [
            ({"do_sample": True, "temperature": 1.4, "top_k": 3}, {"temperature": 1.4, "top_k": 3}),
            ({"top_p": 0.6}, {"temperature": 1.0, "top_p": 0.6}),
            ({"do_sample": True, "min_p": 0.3}, {"temperature": 1.0, "min_p": 0.3}),
            ({"do_sample": False, "top_k": 3}, {"temperature": 0.0}),
            ({"do_sample": 0}, {"temperature": 0.0}),
            ({"do_sample": torch.tensor(False)}, {"temperature": 0.0}),
            ({}, {"temperature": 1.0}),
        ]:
            target = with_config(bare, **fields)
            assert texts(ragged(target, None, temperature=None)) == texts(ragged(bare, None, **same))

    def test_lengths_come_from_the_config(self):
        target, none = TARGETS["llama"], {"max_new_tokens": None}
        for fields, new in [({"max_new_tokens": 3, "max_length": 30}, 3), ({"max_length": 12}, 5)]:
            assert ragged(with_config(target, **fields), None, **none).num_generated.tolist() == [new] * len(PROMPTS)
        longer = with_config(target, max_new_tokens=3)
        assert ragged(longer, None, max_new_tokens=None, max_length=11).num_generated.tolist() == [4] * len(PROMPTS)

    @pytest.mark.parametrize("name", GIVEN)
    def test_processors_that_are_given_see_their_own_prefix(self, name):
        target, prompt = TARGETS["llama"], torch.tensor(PROMPTS[:1])
        options = {"max_new_tokens": NEW, "logits_processor": transformers.LogitsProcessorList(GIVEN[name])}
        expected = target.generate(prompt, do_sample=False, pad_token_id=0, **options)
        assert not torch.equal(expected, target.generate(prompt, do_sample=False, pad_token_id=0, max_new_tokens=NEW))
        for draft in (None, noisy(target, 0.05), PromptLookup()):
            assert torch.equal(generate(target, draft, prompt, temperature=0, **options).sequences, expected)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"top_p": 0.9, "min_p": 0.1}, "min_p = 0.1 and top_p = 0.9 together"),
            (
                {"exponential_decay_length_penalty": (2, 1.5)},
                "exponential_decay_length_penalty = .* needs a stop token",
            ),
        ],
    )
    def test_what_cannot_be_honoured_is_refused_by_name(self, fields, message):
        with pytest.raises(ValueError, match=f"^generation_config: {message}"):
            ragged(with_config(TARGETS["llama"], **fields), None)

    def test_fields_in_the_config_of_the_model_are_refused_as_by_transformers(self):
        target = copy.deepcopy(TARGETS["llama"])
        target.config.repetition_penalty = 1.5
        with pytest.raises(
            ValueError, match=r"^target.config: .*repetition_penalty.* set it in target.generation_config"
        ):
            ragged(target, None)

    @pytest.mark.parametrize("field", REFUSED | REFUSED_IN_SAMPLING)
    def test_fields_that_are_not_supported_are_refused_by_name_unless_neutral(self, field):
        target = with_config(TARGETS["llama"])
        setattr(target.generation_config, field, 7)
        neutral, hint = (REFUSED | REFUSED_IN_SAMPLING)[field]
        message = f"generation_config: {field} = 7 is not supported: {hint}. Set it to {neutral!r} in "
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            ragged(target, None)
        if field in REFUSED_IN_SAMPLING:
            ragged(target, None, max_new_tokens=1, temperature=0)
        setattr(target.generation_config, field, neutral)
        ragged(target, None, max_new_tokens=1)

    def test_the_order_of_top_p_and_min_p_does_not_matter_if_one_is_neutral_or_both_are_arguments(self):
        ragged(with_config(TARGETS["llama"], top_p=1.0, min_p=0.1), None, max_new_tokens=1)
        both = with_config(TARGETS["llama"], top_p=0.9, min_p=0.1)
        ragged(both, None, max_new_tokens=1, top_p=0.9, min_p=0.1)

    def test_processors_with_state_and_other_things_are_refused(self):
        state = transformers.PrefixConstrainedLogitsProcessor(lambda *_: [1], 1)
        with pytest.raises(ValueError, match=r"^logits_processor: PrefixConstrainedLogitsProcessor is not supported"):
            ragged(TARGETS["llama"], None, logits_processor=[state])
        with pytest.raises(TypeError, match=r"^logits_processor: expected scores to be returned, got NoneType"):
            ragged(TARGETS["llama"], None, logits_processor=[lambda ids, scores: None])
        with pytest.raises(TypeError, match=r"^logits_processor: expected a list of functions"):
            ragged(TARGETS["llama"], None, logits_processor=Ban())
        with pytest.raises(TypeError, match=r"^generation_config: expected a GenerationConfig or None, got dict"):
            ragged(TARGETS["llama"], None, generation_config={"top_k": 3})
        with pytest.raises(ValueError, match=r"^logits_processor: expected scores of shape"):
            ragged(TARGETS["llama"], None, logits_processor=[lambda ids, scores: scores[:, :3]])
        with pytest.raises(ValueError, match="got only NaN or -inf for request 0, logits processors included"):
            ragged(with_config(TARGETS["llama"], suppress_tokens=list(range(VOCAB))), None)


class TestFields:
    def test_every_field_of_transformers_is_honoured_refused_or_without_effect(self):
        known = [*HONOURED, *REFUSED, *REFUSED_IN_SAMPLING, *WITHOUT_EFFECT]
        assert len(known) == len(set(known))
        assert {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")} <= set(known)

    def test_the_page_says_of_every_field_what_happens(self):
        page = (Path(__file__).parents[2] / "docs" / "use" / "transformers.md").read_text(encoding="utf-8")
        section = page.split("## The generation config")[1].split("\n## ")[0]
        said = {"honoured": [], "refused": [], "no effect": []}
        for fields, what in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", section, re.MULTILINE):
            kind = next((kind for kind in said if what.startswith(kind)), "honoured")
            said[kind] += re.findall(r"`(\w+)`", fields)
        expected = [HONOURED, [*REFUSED, *REFUSED_IN_SAMPLING], WITHOUT_EFFECT]
        assert list(map(sorted, said.values())) == list(map(sorted, expected))

    def test_fields_without_effect_change_no_text(self):
        target = with_config(TARGETS["llama"])
        for name in WITHOUT_EFFECT:
            setattr(target.generation_config, name, "static" if name == "cache_implementation" else 1)
        assert texts(ragged(target, noisy(target, 0.05))) == texts(ragged(TARGETS["llama"], noisy(target, 0.05)))

    def test_a_quantized_cache_and_fields_that_are_not_known_are_refused_by_name(self, monkeypatch):
        target = with_config(TARGETS["llama"], cache_implementation="quantized")
        with pytest.raises(
            ValueError, match=r"^generation_config: cache_implementation = 'quantized' is not supported"
        ):
            ragged(target, None)
        monkeypatch.setattr(generation_config, "WITHOUT_EFFECT", WITHOUT_EFFECT - {"low_memory"})
        ragged(TARGETS["llama"], None, max_new_tokens=1)
        with pytest.raises(ValueError, match=r"^generation_config: low_memory = True is not supported: this version"):
            ragged(with_config(TARGETS["llama"], low_memory=True), None)

    def test_a_least_number_of_new_tokens_wins_over_a_least_length_even_if_0(self):
        target = with_config(TARGETS["llama"], min_new_tokens=0, min_length=13, eos_token_id=[1, 2, 3, 4])
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        expected = target.generate(torch.tensor([PROMPTS[1]]), **options)
        assert expected.shape[1] < 13
        assert torch.equal(
            generate(target, None, torch.tensor([PROMPTS[1]]), max_new_tokens=NEW, temperature=0).sequences, expected
        )


class TestErrors:
    @pytest.mark.parametrize(
        ("message", "options"),
        [
            ("max_new_tokens: expected exactly one of .* got None and None", {"max_new_tokens": None}),
            (
                "max_new_tokens: expected exactly one of .* got 3 and 4",
                {"max_new_tokens": 3, "max_length": 4},
            ),
            ("max_new_tokens: expected a positive int, got 0", {"max_new_tokens": 0}),
            (
                "max_length: expected more than the 3 columns of input_ids, got 3",
                {"max_new_tokens": None, "max_length": 3},
            ),
            ("num_draft_tokens: expected a positive int, got 0", {"num_draft_tokens": 0}),
            ("method: expected one of .* got 'greedy'", {"method": "greedy"}),
            ("temperature: expected a finite float >= 0, got -1", {"temperature": -1.0}),
            (r"temperature: expected shape \[1\], got \[2\]", {"temperature": torch.ones(2)}),
            ("^top_k: expected an int >= 0, got -1", {"top_k": -1}),
            (r"^top_k: expected shape \[1\], got \[2\]", {"top_k": torch.tensor([1, 2])}),
            (r"^top_p: expected a float in \(0, 1\], got 0.0", {"top_p": 0.0}),
            (r"^min_p: expected a float in \[0, 1\], got 1.5", {"min_p": 1.5}),
            (r"seeds: expected shape \[1\], got \[2\]", {"seeds": torch.zeros(2, dtype=torch.int64)}),
            (r"attention_mask: expected shape \[1, 3\]", {"attention_mask": torch.ones(1, 2, dtype=torch.int64)}),
            (r"eos_token_id: expected ids in \[0, 8\), got -1", {"eos_token_id": -1}),
            ("attention_mask: expected 0 or 1", {"attention_mask": torch.tensor([[0, 1, 2]])}),
            (r"padding on the left only, .* got \[1, 1, 0\] in row 0", {"attention_mask": torch.tensor([[1, 1, 0]])}),
            (r"padding on the left only, .* got \[1, 0, 1\] in row 0", {"attention_mask": torch.tensor([[1, 0, 1]])}),
            (r"at least one token, got \[0, 0, 0\] in row 0", {"attention_mask": torch.tensor([[0, 0, 0]])}),
            (r"input_ids: expected ids in \[0, 8\), got 8", {"input_ids": torch.tensor([[1, 8, 2]])}),
            (r"input_ids: expected ids in \[0, 8\), got -100", {"input_ids": torch.tensor([[-100, 1]])}),
            (r"input_ids: expected shape \[batch, prompt\]", {"input_ids": torch.tensor([1, 2])}),
            (r"input_ids: expected shape \[batch, prompt\]", {"input_ids": torch.zeros(1, 0, dtype=torch.int64)}),
            ("draft: expected a model with the target's tokenizer, .* 8 tokens, got 9", {"draft": llama(9)}),
        ],
    )
    def test_values(self, message, options):
        target = copy.deepcopy(TARGETS["llama"])
        target.register_forward_pre_hook(lambda *_: pytest.fail("the target was called"))
        options = {"draft": PromptLookup(), "input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 4} | options
        with pytest.raises(ValueError, match=message):
            generate(target, **options)

    def test_types(self):
        ids = torch.tensor([[1, 2, 3]])
        with pytest.raises(TypeError, match="draft: expected a Hugging Face causal language model, got str"):
            generate(TARGETS["llama"], "lookup", ids, max_new_tokens=4)
        with pytest.raises(TypeError, match="input_ids: expected dtype int64, got float32"):
            generate(TARGETS["llama"], None, ids.float(), max_new_tokens=4)
        for eos_token_id in ("2", 3.0, [1, None], torch.tensor(2)):
            with pytest.raises(TypeError, match="eos_token_id: expected an int"):
                generate(TARGETS["llama"], None, ids, max_new_tokens=4, eos_token_id=eos_token_id)
        with pytest.raises(TypeError, match=r"^top_p: expected a float .* got str"):
            generate(TARGETS["llama"], None, ids, max_new_tokens=4, top_p="0.9")
        with pytest.raises(TypeError, match="on_step: expected a function of a Step, got int"):
            generate(TARGETS["llama"], None, ids, max_new_tokens=4, on_step=5)
        with pytest.raises(TypeError, match=r"num_draft_tokens: expected a positive int, got 2\.0"):
            generate(TARGETS["llama"], None, ids, num_draft_tokens=2.0, max_new_tokens=4)

    def test_token_types_are_refused_where_a_model_reads_them(self):
        tokenized = {"input_ids": torch.tensor([[1, 2, 3]]), "token_type_ids": torch.zeros(1, 3, dtype=torch.int64)}
        for models in ((TARGETS["gpt2"], None), (TARGETS["llama"], TARGETS["gpt2"])):
            with pytest.raises(ValueError, match=r"^token_type_ids: expected None for a .* GPT2LMHeadModel: pass only"):
                generate(*models, **tokenized, max_new_tokens=4)
        for draft in (None, PromptLookup(), noisy(TARGETS["llama"], 0.1)):
            assert generate(TARGETS["llama"], draft, **tokenized, max_new_tokens=4).num_generated == 4

    def test_ngrams(self):
        with pytest.raises(ValueError, match="max_ngram: expected a positive int, got 0"):
            PromptLookup(0)
        with pytest.raises(ValueError, match="min_ngram: expected a positive int, got 0"):
            PromptLookup(min_ngram=0)
        with pytest.raises(ValueError, match="min_ngram: expected at most max_ngram = 3, got 4"):
            PromptLookup(min_ngram=4)
