"""Hugging Face models with recurrent layers: after a rejection their states are those of the last accepted token.

Models are tiny, random and float32. The oracles are transformers' own greedy `generate`, and
`one_by_one`, which uses no cache.
"""

import copy

import pytest
import torch

from specdecode import sample

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import PromptLookup, generate  # noqa: E402
from specdecode.integrations.transformers.models import CachedModel  # noqa: E402
from specdecode.integrations.transformers.supported import CONTINUES_FROM_STATE, STEPS_FROM_STATE  # noqa: E402

VOCAB, NEW, K = 8, 10, 3
PROMPTS = [[3, 1, 4], [7, 1, 5], [2], [1, 2, 3], [6, 6, 2, 5]]

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ALONE = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, **NO_TOKENS}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES = {**ALONE, **HEADS, "intermediate_size": 16}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 1}
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    **LINEAR_FIRST,
}
LATENT = {
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_local_experts": 2,
    **EXPERTS,
    **LINEAR_FIRST,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
QWEN = {"head_dim": 8, **DELTA}
QWEN_MOE = {**QWEN, **EXPERTS, "num_experts": 2, "shared_expert_intermediate_size": 8}

CONFIGS = {
    "bailing_hybrid": ("BailingHybrid", SIZES | LATENT | {"n_group": 1, "topk_group": 1, "head_dim": 8}),
    "bamba": ("Bamba", SIZES | MAMBA2 | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", SIZES | MAMBA2 | {"mamba_d_ssm": 32}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        SIZES
        | MAMBA2
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 8}
        | {"layer_types": ["mamba", "attention"]},
    ),
    "inkling_text": (
        "Inkling",
        ALONE
        | EXPERTS
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16}
        | {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 8, "sliding_window_size": 4}
        | {"n_routed_experts": 2, "n_shared_experts": 1, "d_rel": 4, "rel_extent": 16},
    ),
    "kimi_linear": ("KimiLinear", SIZES | LATENT | {"linear_head_dim": 8, "linear_num_heads": 2}),
    "mamba2": ("Mamba2", ALONE | {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4}),
    "nemotron_h": (
        "NemotronH",
        {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["mamba", "attention", "mlp"], "head_dim": 8, "ssm_state_size": 8}
        | {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    "olmo_hybrid": ("OlmoHybrid", SIZES | DELTA),
    "qwen3_5_moe_text": (
        "Qwen3_5Moe",
        {name: value for name, value in (SIZES | QWEN_MOE).items() if name != "intermediate_size"},
    ),
    "qwen3_5_text": ("Qwen3_5", SIZES | QWEN),
    "qwen3_next": ("Qwen3Next", SIZES | QWEN_MOE),
    "zamba2": (
        "Zamba2",
        SIZES
        | {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 4}
        | {"num_mem_blocks": 1, "adapter_rank": 4},
    ),
    "zaya": (
        "Zaya",
        {name: value for name, value in SIZES.items() if name != "intermediate_size"}
        | {
            "moe_intermediate_size": 8,
            "num_experts": 2,
            "head_dim": 8,
            "router_hidden_size": 8,
            "num_key_value_heads": 1,
        },
    ),
    "falcon_mamba": ("FalconMamba", ALONE | {"state_size": 4, "time_step_rank": 4}),
    "jamba": (
        "Jamba",
        SIZES
        | {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"mamba_d_state": 4, "mamba_dt_rank": 4},
    ),
    "mamba": ("Mamba", ALONE | {"state_size": 4, "time_step_rank": 4}),
    "zamba": (
        "Zamba",
        SIZES
        | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2}
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    ),
    "llama": ("Llama", SIZES),
}
"""By model type: the name of the classes, and what goes into the config."""


def build(model_type, **options):
    """A model of this type with large weights: it is sure of its tokens, so that rounding does not change them."""
    name, sizes = CONFIGS[model_type]
    model_class = getattr(transformers, f"{name}ForCausalLM", None)
    if model_class is None:
        pytest.skip("of a newer transformers")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes, **options)).eval()
    assert model.config.get_text_config().model_type == model_type
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    return model


def noisy(model, scale):
    """A drafter that correlates with the target: its weights plus noise."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=generator))
    return model


def padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def greedy(target, stop=None):
    """What transformers generates for all prompts at once."""
    ids, mask = padded(PROMPTS)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    return target.generate(ids, **options, eos_token_id=stop)


@torch.no_grad()
def one_by_one(model, prompt, new, temperature, seed):
    ids = list(prompt)
    for _ in range(new):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
        ids.append(int(sample(logits, temperature, seeds=torch.tensor([seed]), positions=torch.tensor([len(ids)]))))
    return ids


class Scripted(PromptLookup):
    """Drafts a known text with one wrong token, whose place differs from step to step and from request to request."""

    def propose(self, token_ids, lengths, num_draft_tokens):
        rows = []
        for row, length in zip(token_ids, lengths.tolist()):
            matches = (i for i, text in enumerate(self.texts) if text[:length] == row[-length:].tolist())
            request = next(matches, 0)  # none matches if the model left the text
            drafts = (self.texts[request][length:] + [0] * K)[:num_draft_tokens]
            wrong = (7 * length // 2 + request % 3) % (K + 1)  # K: none
            rows.append([(token + (i == wrong)) % VOCAB for i, token in enumerate(drafts)])
        return torch.tensor(rows)


def scripted(sequences):
    """Draft these sequences, which may be padded on the left."""
    width = sequences.shape[1] - NEW
    drafter = Scripted()
    object.__setattr__(
        drafter, "texts", [row.tolist()[width - len(prompt) :] for row, prompt in zip(sequences, PROMPTS)]
    )
    return drafter


class TestTargets:
    @pytest.mark.parametrize("model_type", sorted(CONTINUES_FROM_STATE))
    def test_greedy_tokens_are_those_of_transformers_wherever_drafts_are_rejected(self, model_type):
        target, steps = build(model_type), []
        text = greedy(target)
        options = {"temperature": 0, "max_new_tokens": NEW, "num_draft_tokens": K, "on_step": steps.append}
        output = generate(target, scripted(text), *padded(PROMPTS), **options)
        assert torch.equal(output.sequences, text)
        # Drafts were rejected at every place, and once none was.
        full = [step for step in steps if len(step.draft_token_ids) == K]
        assert {step.kinds.count(1) for step in full} == set(range(K + 1))
        # A stop token ends some of the requests before the others.
        stop = text[0, -NEW + 4].item()
        output = generate(target, scripted(text), *padded(PROMPTS), **options, eos_token_id=stop)
        expected = greedy(target, stop)
        assert torch.equal(output.sequences.masked_fill(padding(output), 0), expected)

    @pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "mamba2"])
    @pytest.mark.parametrize("drafter", ["close", "lookup"])
    def test_sampled_tokens_of_strict_do_not_depend_on_the_drafter(self, model_type, drafter):
        target = build(model_type)
        draft = noisy(target, 0.05) if drafter == "close" else PromptLookup()
        options = {"temperature": 2.0, "seeds": 100, "max_new_tokens": 8}
        output = generate(target, draft, *padded(PROMPTS), method="strict", **options)
        assert torch.equal(output.sequences, generate(target, None, *padded(PROMPTS), **options).sequences)
        assert 0 < output.stats.acceptance_rate < 1

    def test_a_request_that_rejected_a_draft_costs_one_more_call(self):
        target, steps = build("mamba2"), []
        text, prompt = greedy(target), torch.tensor(PROMPTS[1:2])
        options = {"temperature": 0, "max_new_tokens": NEW, "num_draft_tokens": K, "on_step": steps.append}
        output = generate(target, scripted(text), prompt, **options)
        assert output.sequences[0].tolist() == text[1, -NEW - 3 :].tolist()
        rejected = sum(len(step.token_ids) <= len(step.draft_token_ids) for step in steps[:-1])
        assert 0 < rejected < len(steps) - 1
        assert output.target_calls == 1 + len(steps) + rejected  # the prompt, then each step
        assert generate(target, None, prompt, temperature=0, max_new_tokens=NEW).target_calls == 1 + NEW

    def test_states_that_do_not_go_back_are_caught(self, monkeypatch):
        target = build("qwen3_next")
        text, options = greedy(target), {"temperature": 0, "max_new_tokens": NEW, "num_draft_tokens": K}
        original = CachedModel.states_after
        forward = lambda self, end, *rest: original(self, self.cache.num_columns, *rest)  # noqa: E731
        monkeypatch.setattr(CachedModel, "states_after", forward)
        assert not torch.equal(generate(target, scripted(text), *padded(PROMPTS), **options).sequences, text)


def padding(output):
    """Where the sequences are padded on the right."""
    padding = torch.zeros_like(output.sequences, dtype=torch.bool)
    padding[:, -output.token_kinds.shape[1] :] = output.token_kinds == -1
    return padding


class TestDraftModels:
    @pytest.mark.parametrize("model_type", sorted(STEPS_FROM_STATE | {"qwen3_next", "falcon_h1"}))
    def test_drafts_are_what_the_draft_model_says_without_a_cache(self, model_type):
        target, draft = build("llama"), build(model_type)
        if model_type == "falcon_h1":
            target = noisy(draft, 0.02)  # most drafts are accepted, often all
        texts, steps = dict(enumerate(PROMPTS)), []
        options = {"temperature": 2.0, "seeds": 100, "max_new_tokens": NEW, "num_draft_tokens": K}
        output = generate(target, draft, *padded(PROMPTS), method="strict", on_step=steps.append, **options)
        assert 0 < output.stats.acceptance_rate < 1
        assert {0, K} <= {step.kinds.count(1) for step in steps}
        for row, token_ids, _, draft_ids in steps:
            assert one_by_one(draft, texts[row], len(draft_ids), 2.0, 100 + row) == texts[row] + draft_ids
            texts[row] = texts[row] + token_ids


class TestRefused:
    @pytest.mark.parametrize("model_type", sorted(STEPS_FROM_STATE))
    def test_targets_that_go_on_with_one_token_at_a_time(self, model_type):
        with pytest.raises(
            ValueError, match=r"^target: expected a decoder that scores several drafts in one call, got"
        ):
            generate(build(model_type), None, torch.tensor([[1]]), max_new_tokens=2)

    @pytest.mark.parametrize("name", ["RecurrentGemma", "Rwkv", "XLSTM"])
    @pytest.mark.parametrize("who", ["target", "draft"])
    def test_models_whose_states_cannot_be_put_back(self, name, who):
        name = {"XLSTM": "xLSTM"}.get(name, name)
        sizes = {"num_heads": 2} if name == "xLSTM" else HEADS if name == "RecurrentGemma" else {}
        sizes = {key: value for key, value in sizes.items() if key != "max_position_embeddings"}
        model_class = getattr(transformers, f"{name}ForCausalLM")
        model = model_class(model_class.config_class(**ALONE, **sizes)).eval()
        models = (
            {"target": model, "draft": build("llama")}
            if who == "target"
            else {"target": build("llama"), "draft": model}
        )
        with pytest.raises(
            ValueError, match=rf"^{who}: expected a decoder whose cache can go back .* got {name}ForCausalLM.*: "
        ):
            generate(**models, input_ids=torch.tensor([[1]]), max_new_tokens=2)
