"""Models with state other than keys and values are refused by name, before any computation."""

import pytest
import torch

from tests.hugging_face.common import TARGETS

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import generate  # noqa: E402

ALONE = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None}
SIZES = {**ALONE, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_d_ssm": 32}

CONFIGS = {
    "FalconH1": SIZES | MAMBA,  # Mamba-2 beside attention
    "Lfm2": SIZES | {"layer_types": ["conv", "full_attention"]},  # short convolutions among attention layers
    "Mamba": ALONE | {"state_size": 4, "time_step_rank": 4},
    "MiniMax": SIZES | LINEAR,
    "Qwen3_5": SIZES | DELTA | LINEAR | {"head_dim": 8},
    "Qwen3Next": SIZES | DELTA | LINEAR | {"head_dim": 8, "num_experts": 2, "moe_intermediate_size": 8},
    "RecurrentGemma": ALONE | {"num_attention_heads": 2, "num_key_value_heads": 2},
    "Rwkv": ALONE,
}
"""By the name of the class: the arguments of its config."""


@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("name", CONFIGS)
def test_models_with_another_state_are_refused_before_a_model_is_called(name, who):
    model_class = getattr(transformers, f"{name}ForCausalLM", None)
    if model_class is None:
        pytest.skip("of a newer transformers")
    model = model_class(model_class.config_class(**CONFIGS[name])).eval()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was called"))
    models = (model, None) if who == "target" else (TARGETS["llama"], model)
    message = rf"^{who}: expected a decoder whose cache holds only keys and values, .* got {name}ForCausalLM"
    with pytest.raises(ValueError, match=message):
        generate(*models, torch.tensor([[1]]), max_new_tokens=2)
