"""The generation config: each field is honoured as transformers' `generate` would, or refused by name, or has no effect.

Temperature, top-k, top-p and min-p go to the sampler. Other fields that change logits become logits processors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdecode import Sampling
from specdecode.arguments import check_count, shown

# fmt: off
HONOURED = {
    "bad_words_ids", "begin_suppress_tokens", "do_sample", "eos_token_id", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_return_sequences", "pad_token_id", "remove_invalid_values", "renormalize_logits",
    "repetition_penalty", "sequence_bias", "stop_strings", "suppress_tokens", "temperature", "top_k", "top_p",
}
"""Fields that are used here, or by the logits processors that transformers builds."""

WITHOUT_EFFECT = {
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "bos_token_id", "cache_config",
    "cache_implementation", "compile_config", "continuous_batching_config", "decoder_start_token_id", "disable_compile",
    "early_stopping", "length_penalty", "low_memory", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "prefill_chunk_size", "prompt_lookup_num_tokens", "return_dict_in_generate",
    "speculation_type", "target_lookbehind", "transformers_version", "use_cache", "use_mtp",
}
"""Fields that are not read. They change speed, memory or the form of the output, or belong to refused features."""
# fmt: on

REFUSED: dict[str, tuple[object, str]] = {
    "num_beams": (1, "beam search has no speculative form here"),
    "num_beam_groups": (1, "beam search has no speculative form here"),
    "diversity_penalty": (0, "beam search has no speculative form here"),
    "constraints": (None, "beam search has no speculative form here"),
    "force_words_ids": (None, "beam search has no speculative form here"),
    "penalty_alpha": (0, "contrastive search has no speculative form here"),
    "dola_layers": (None, "DoLa has no speculative form here"),
    "guidance_scale": (1, "classifier-free guidance keeps a second cache"),
    "watermarking_config": (None, "a watermark is applied after truncation"),
    "token_healing": (False, "it changes the prompt: heal the prompt first"),
    "encoder_repetition_penalty": (1, "use repetition_penalty"),
    "encoder_no_repeat_ngram_size": (0, "use no_repeat_ngram_size"),
    "assistant_ensemble_weight": (None, "it changes the distribution of the output"),
    "is_assistant": (False, "it ends texts where the model is not sure of a token"),
    "max_time": (None, "raise an exception from on_step to stop early"),
    "output_scores": (False, "the output holds no scores"),
    "output_logits": (False, "the output holds no logits"),
    "output_attentions": (False, "the output holds no attentions"),
    "output_hidden_states": (False, "the output holds no hidden states"),
}
"""Fields that are not supported: the neutral value besides None, and a reason or an alternative."""

REFUSED_IN_SAMPLING: dict[str, tuple[object, str]] = {
    "typical_p": (1, "use top_k, top_p or min_p"),
    "top_h": (None, "use top_k, top_p or min_p"),
    "epsilon_cutoff": (0, "use top_k, top_p or min_p"),
    "eta_cutoff": (0, "use top_k, top_p or min_p"),
}
"""Fields that are not supported in sampling; greedy decoding does not use them."""


def merged_config(target: Any, given: GenerationConfig | None) -> GenerationConfig:
    """Return a copy of the given config; the target's own config fills in fields that are None.

    Raises:
        TypeError: `given` is not a GenerationConfig.
        ValueError: nothing was given and the model's config holds fields that belong into a generation config.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise TypeError(f"generation_config: expected a GenerationConfig or None, got {type(given).__name__}")
    find_misplaced = getattr(target.config, "_get_generation_parameters", None)
    misplaced = find_misplaced() if given is None and find_misplaced is not None else None
    if misplaced:
        raise ValueError(f"target.config: {misplaced} would have no effect: set it in target.generation_config")
    merged = copy.deepcopy(given) if given is not None else GenerationConfig()  # type: ignore[no-untyped-call]
    own = getattr(target, "generation_config", None)
    for name, value in vars(own).items() if own is not None else ():
        if not name.startswith("_") and getattr(merged, name, None) is None:
            setattr(merged, name, copy.deepcopy(value))
    return merged


def check_config(config: GenerationConfig, sampling: Sampling) -> None:
    """Refuse fields that are not supported, and fields that a later version of transformers has added.

    Raises:
        ValueError: such a field has a value that is not neutral.
    """
    known = HONOURED | WITHOUT_EFFECT | REFUSED.keys() | REFUSED_IN_SAMPLING.keys()
    refused = {
        name: (default, "this version of specdecode does not know it")
        for name, default in vars(GenerationConfig()).items()  # type: ignore[no-untyped-call]
        if not name.startswith("_") and name not in known
    }
    refused |= REFUSED if is_greedy(sampling) else REFUSED | REFUSED_IN_SAMPLING
    if config.cache_implementation == "quantized":
        refused["cache_implementation"] = (None, "rounded keys and values change the distribution of the output")
    for name, (neutral, hint) in refused.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise ValueError(
                f"generation_config: {name} = {value!r} is not supported: {hint}. Set it to {neutral!r} in "
                f"{'target.generation_config' if neutral is None else 'generation_config'} to generate without it"
            )


def merged_sampling(config: GenerationConfig, given: Sampling) -> Sampling:
    """Return the sampling parameters: the arguments, with None filled in from the config.

    A config with `do_sample=False` is greedy. One without `do_sample` is sampled from: see the documentation.

    Raises:
        ValueError: `min_p` and `top_p` come together and the config has one of them: transformers has another order.
    """
    temperature, *truncation = given
    if temperature is None:
        samples = config.do_sample is None or bool(config.do_sample)
        temperature = 0.0 if not samples else 1.0 if config.temperature is None else config.temperature
    names = ("top_k", "top_p", "min_p")
    values: Any = [getattr(config, name) if value is None else value for name, value in zip(names, truncation)]
    sampling = Sampling(temperature, *values)
    both = is_active(sampling.top_p, 1) and is_active(sampling.min_p, 0)
    if both and None in truncation[1:] and not is_greedy(sampling):
        raise ValueError(
            f"generation_config: min_p = {sampling.min_p} and top_p = {sampling.top_p} together are not supported, because "
            "transformers applies min_p after top_p, and the sampler before it: pass both as arguments for the sampler's "
            "order, or switch one off with min_p=0.0 or top_p=1.0"
        )
    return sampling


def is_active(value: float | Tensor | None, neutral: float) -> bool:
    """Return whether a truncation parameter can leave tokens out."""
    return isinstance(value, Tensor) or (value is not None and value != neutral)


def is_greedy(sampling: Sampling) -> bool:
    """Return whether all requests are greedy."""
    return not isinstance(sampling.temperature, Tensor) and sampling.temperature == 0


def merged_max_new_tokens(
    config: GenerationConfig, max_new_tokens: int | None, max_length: int | None, prompt_width: int
) -> int:
    """Return the most new tokens: from the arguments or else the config, whose max_new_tokens comes first."""
    if max_new_tokens is None and max_length is None:
        max_new_tokens = config.max_new_tokens
        max_length = config.max_length if max_new_tokens is None else None
    if max_new_tokens is not None and max_length is None:
        return check_count("max_new_tokens", max_new_tokens)
    if max_length is None or max_new_tokens is not None:
        raise ValueError(
            f"max_new_tokens: expected exactly one of it and max_length, got {max_new_tokens} and {max_length}"
        )
    if check_count("max_length", max_length) <= prompt_width:
        raise ValueError(f"max_length: expected more than the {prompt_width} columns of input_ids, got {max_length}")
    return max_length - prompt_width


def merged_num_return_sequences(config: GenerationConfig, given: int | None, sampling: Sampling) -> int:
    """Return the number of continuations of each prompt."""
    copies = given if given is not None else config.num_return_sequences
    copies = 1 if copies is None else check_count("num_return_sequences", copies)
    if copies > 1 and is_greedy(sampling):
        raise ValueError(
            f"num_return_sequences: expected 1 with greedy decoding, where all would be the same, got {copies}: pass a "
            "temperature, or do_sample=True in generation_config"
        )
    return copies


def find_stop_ids(config: GenerationConfig, eos_token_id: int | Sequence[int] | None, vocab_size: int) -> list[int]:
    """Return the stop tokens: the argument's, or the config's without ids outside the vocabulary."""
    if eos_token_id is None:
        return [token for token in read_ids(config, "eos_token_id") if 0 <= token < vocab_size]
    is_id = isinstance(eos_token_id, Integral) and not isinstance(eos_token_id, bool)
    stop_ids: Any = [eos_token_id] if is_id else eos_token_id
    if not isinstance(stop_ids, Sequence) or any(not isinstance(token, Integral) for token in stop_ids):
        raise TypeError(f"eos_token_id: expected an int, a sequence of ints or None, got {shown(eos_token_id)}")
    unknown = [token for token in stop_ids if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(f"eos_token_id: expected ids in [0, {vocab_size}), got {unknown[0]}")
    return [int(token) for token in stop_ids]


def find_pad_id(config: GenerationConfig, stop_ids: list[int]) -> int:
    """Return the padding token of the output: the config's, where -1 means none, else the first stop token, else 0."""
    own = read_ids(config, "pad_token_id")
    if len(own) > 1:
        raise TypeError(f"generation_config: expected pad_token_id to be one id, got {shown(config.pad_token_id)}")
    return own[0] if own and own[0] != -1 else stop_ids[0] if stop_ids else 0


def read_ids(config: GenerationConfig, name: str) -> list[int]:
    """Return the token ids of a field: a number, a sequence, an array or a tensor, as transformers takes them."""
    value = getattr(config, name)
    try:
        ids = torch.as_tensor([] if value is None else value, dtype=torch.float64, device="cpu").flatten().tolist()
        if all(map(float.is_integer, ids)):
            return list(map(int, ids))
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"generation_config: expected {name} to be an int, a sequence of ints or None, got {shown(value)}")
