"""Tiny models and their expected texts, for the tests of generation with Hugging Face models.

Models are random and float64, with large weights: their distributions are peaked, so rounding does not change
tokens. The oracle is `one_by_one`, which uses no cache, no batch and no padding.
"""

import copy

import pytest
import torch

from specdecode import sample

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import PromptLookup, generate  # noqa: E402

VOCAB = 8
NEW = 12
PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 1, 0], [6, 6, 2, 5, 3, 1, 4], [0, 5]]
TEMPERATURE = torch.tensor([1.0, 0.7, 0.0, 1.3, 0.0])
TRUNCATION = {
    "top_k": torch.tensor([3, 0, 2, 4, 7]),
    "top_p": torch.tensor([0.9, 0.8, 0.5, 0.6, 1.0]),
    "min_p": torch.tensor([0.0, 0.1, 0.0, 0.05, 1.0]),
}


def build(model_class, config, scale=0.35):
    model = model_class(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(scale * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        model.get_output_embeddings().weight.mul_(3)
    return model


def llama(vocab_size=VOCAB, layers=2, positions=64, scale=0.35, **options):
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=layers,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    return build(transformers.LlamaForCausalLM, config, scale)


def gpt2(positions=64):
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": positions}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    return build(transformers.GPT2LMHeadModel, config)


def mistral():
    config = transformers.MistralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        max_position_embeddings=64,
        sliding_window=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return build(transformers.MistralForCausalLM, config)


def bert(model_class, is_decoder):
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=64,
        is_decoder=is_decoder,
        pad_token_id=None,
    )
    return build(model_class, config)


def decoder(model_class, **options):
    """Return the decoder of an encoder-decoder, which takes no position_ids."""
    config = model_class.config_class(
        vocab_size=VOCAB,
        d_model=16,
        decoder_layers=2,
        decoder_ffn_dim=16,
        decoder_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=1,
        forced_eos_token_id=None,
        **options,
    )
    return build(model_class, config)


def phi3(switch):
    """Return a model whose rotary factors change by a factor of 9 beyond `switch` tokens."""
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    config = transformers.Phi3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        max_position_embeddings=64,
        original_max_position_embeddings=switch,
        rope_parameters=rotary,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return build(transformers.Phi3ForCausalLM, config)


def noisy(model, scale, seed=1):
    """Return a drafter that correlates with the target: the target's weights plus noise."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


TARGETS = {"llama": llama(), "gpt2": gpt2()}
DRAFTERS = {
    "close": lambda target: noisy(target, 0.03),
    "far": lambda target: noisy(target, 0.5),
    "other": lambda target: TARGETS["gpt2" if target is TARGETS["llama"] else "llama"],
    "itself": lambda target: target,
    "lookup": lambda target: PromptLookup(),
}


def padded(prompts):
    """Return left-padded ids and the mask; padding ids are outside every embedding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[-100] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, (ids >= 0).long()


def texts(output, prompts=PROMPTS):
    """Return prompt and new tokens of every request, without padding."""
    width = max(map(len, prompts))
    rows = zip(prompts, output.sequences.tolist(), output.num_generated.tolist())
    return [row[width - len(prompt) : width + count] for prompt, row, count in rows]


@torch.no_grad()
def one_by_one(target, prompt, new, temperature, seed, **truncation):
    ids = list(prompt)
    for _ in range(new):
        logits = target(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
        noise = {"seeds": torch.tensor([seed]), "positions": torch.tensor([len(ids)])}
        ids.append(int(sample(logits, float(temperature), **noise, **truncation)))
    return ids


def ragged(target, draft, **options):
    """Generate for all prompts at once."""
    options = {"max_new_tokens": NEW, "temperature": TEMPERATURE, "seeds": 100} | options
    return generate(target, draft, *padded(PROMPTS), **options)


HOT = 2 * TEMPERATURE
"""At these temperatures truncation changes the text of every request that is not greedy."""


def of_request(i):
    """Return the truncation of one request, as plain numbers."""
    return {name: values[i].item() for name, values in TRUNCATION.items()}


def with_config(model, **fields):
    """Return the same model with its own generation config."""
    model = copy.copy(model)
    model.generation_config = transformers.GenerationConfig(**fields)
    return model


FIELDS = {
    "repetition_penalty": {"repetition_penalty": 1.9},
    "begin_suppress_tokens": {"begin_suppress_tokens": [0, 1, 2, 4, 5]},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": [1, 2, 3, 4]},
    "min_length": {"min_length": 13, "eos_token_id": [1, 2, 3, 4]},
    "forced_bos_token_id": {"forced_bos_token_id": 6},
    "forced_eos_token_id": {"forced_eos_token_id": [6, 5]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[4], [5], [1, 2]]},
    "sequence_bias": {"sequence_bias": [[[0], 4.0], [[4, 5], -9.0]]},  # padding is 0
    "exponential_decay": {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 7},
    "several": {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [4],
        "remove_invalid_values": True,
        "renormalize_logits": True,
    },
}
"""Fields that change logits, with values that change the text of at least one prompt."""
