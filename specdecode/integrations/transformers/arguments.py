"""The checks of `generate`'s arguments, and what holds where an argument does not say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from specdecode import RejectionSampler, Sampling
from specdecode.arguments import Sizes, check_count, check_number, check_tensor, check_truncation, check_type, shown
from specdecode.integrations.transformers.generation_config import is_greedy
from specdecode.integrations.transformers.models import CachedModel
from specdecode.integrations.transformers.outputs import Step


def check_options(
    sampler: RejectionSampler, num_draft_tokens: int, on_step: Callable[[Step], object] | None, accept_stop_tokens: bool
) -> None:
    """Check what depends on no model."""
    check_count("num_draft_tokens", num_draft_tokens)
    rates = num_draft_tokens if sampler.schedule is None else len(sampler.schedule.joint_rates)
    if num_draft_tokens > rates:
        raise ValueError(
            f"num_draft_tokens: expected at most {rates}, as many as the method's schedule has rates, got {num_draft_tokens}"
        )
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step: expected a function of a Step, got {type(on_step).__name__}")
    if not accept_stop_tokens and sampler.method != "synthetic":
        raise ValueError(f"accept_stop_tokens: False is only for method 'synthetic', got method {sampler.method!r}")


def check_max_new_tokens(
    max_new_tokens: int | None, max_length: int | None, config: GenerationConfig, prompt_width: int
) -> int:
    """Return the most new tokens: what an argument says, else the config, whose max_new_tokens comes first."""
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


def check_num_return_sequences(given: int | None, config: GenerationConfig, sampling: Sampling) -> int:
    copies = given if given is not None else config.num_return_sequences
    copies = 1 if copies is None else check_count("num_return_sequences", copies)
    if copies > 1 and is_greedy(sampling):
        raise ValueError(
            f"num_return_sequences: expected 1 with greedy decoding, where all would be the same, got {copies}: pass a "
            "temperature, or do_sample=True in generation_config"
        )
    return copies


def streaming(
    streamer: BaseStreamer | None, input_ids: Tensor, on_step: Callable[[Step], object] | None
) -> Callable[[Step], object] | None:
    """Give the prompt to the streamer, and return an `on_step` that gives it the new tokens too."""
    if streamer is None:
        return on_step
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer: expected one with the methods put and end, got {type(streamer).__name__}")
    if len(input_ids) > 1:
        raise ValueError(f"streamer: expected one request, got {len(input_ids)}: use on_step")
    put: Any = streamer.put
    put(input_ids.cpu())

    def stream(step: Step) -> None:
        for token in step.token_ids:
            put(torch.tensor([token], device="cpu"))
        if on_step is not None:
            on_step(step)

    return stream


def check_prompts(input_ids: Tensor, attention_mask: Tensor | None, num_embeddings: int) -> Tensor:
    """Return which columns are tokens, [batch, prompt] bool."""
    check_type("input_ids", input_ids, (torch.int64,))
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: expected shape [batch, prompt], neither of them 0, got {list(input_ids.shape)}")
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        dtypes = (torch.bool, torch.int32, torch.int64)
        check_tensor("attention_mask", attention_mask, dtypes, tuple(input_ids.shape), input_ids.device)
        mask = attention_mask.bool()
        if (attention_mask != mask).any():
            raise ValueError("attention_mask: expected 0 or 1 everywhere, got other numbers")
        wrong = ~(mask[:, -1] & (mask[:, 1:] >= mask[:, :-1]).all(1))
        if wrong.any():
            row = int(wrong.nonzero()[0])
            got = f"{attention_mask[row].tolist()} in row {row}"
            raise ValueError(f"attention_mask: expected padding on the left only, then at least one token, got {got}")
    unknown = mask & ((input_ids < 0) | (input_ids >= num_embeddings))
    if unknown.any():
        raise ValueError(f"input_ids: expected ids in [0, {num_embeddings}), got {int(input_ids[unknown][0])}")
    return mask


def check_token_types(token_type_ids: Tensor | None, models: Sequence[CachedModel]) -> None:
    """Refuse token types if a model reads them. Other models do not need them."""
    for model in models if token_type_ids is not None else ():
        if "token_type_ids" in model.parameters:
            raise ValueError(
                f"token_type_ids: expected None for a {model.name} model that reads them, {type(model.model).__name__}: "
                "pass only input_ids and attention_mask"
            )


def check_sampling(sampling: Sampling, batch: int, vocab_size: int, device: torch.device) -> Sampling:
    """Return how tokens are drawn, on the device of the target, with None for what keeps all tokens."""
    sampling = Sampling._make(on(device, value) for value in sampling)
    sizes = Sizes({"slot": batch}, device)
    temperature = check_number("temperature", sampling.temperature, sizes)
    return Sampling(temperature, *(check_truncation(sampling, sizes, vocab_size) or ()))


def on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def find_stop_ids(config: GenerationConfig, eos_token_id: int | Sequence[int] | None, vocab_size: int) -> list[int]:
    """Return the stop tokens: those of the argument, or else those of the config without ids outside the vocabulary."""
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


def find_pad_id(config: GenerationConfig, stop_ids: list[int], num_embeddings: int, is_written: bool) -> int:
    """Return the padding token: that of the config, where -1 means none, else the first stop token, else 0.

    Raises:
        TypeError: the config has no single id.
        ValueError: its id is outside the vocabulary, and padding may be written.
    """
    own = read_ids(config, "pad_token_id")
    if len(own) > 1:
        raise TypeError(f"generation_config: expected pad_token_id to be one id, got {shown(config.pad_token_id)}")
    if not own or own[0] == -1:
        return stop_ids[0] if stop_ids else 0
    if is_written and not 0 <= own[0] < num_embeddings:
        raise ValueError(
            f"generation_config: expected pad_token_id to be in [0, {num_embeddings}), because texts of several requests "
            f"are padded, got {own[0]}"
        )
    return own[0]


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
