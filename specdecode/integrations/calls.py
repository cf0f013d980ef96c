"""What the adapters of serving engines share that needs PyTorch: calls whose arguments need no check, first calls."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdecode import RejectionSampler, SamplerOutput, Sampling, backends
from specdecode.batch import Packing, Truncation, VerificationBatch


def verify_unchecked(verifier: RejectionSampler, call: dict[str, Any]) -> SamplerOutput:
    """Verify a step as a sampler does, or its `packed`, whose arguments it has checked in a step of the same kind."""
    batch = unchecked(**call)
    backend = backends.to_verify(verifier.backend, verifier.method, batch)
    output: SamplerOutput = backend.verify(verifier.method, batch, None)
    return output


def unchecked(
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_sampling: Sampling | None = None,
    row_starts: Tensor | None = None,
    num_draft_tokens: int = 0,
    slots: Tensor | None = None,
    row_positions: Tensor | None = None,
    **others: Any,
) -> VerificationBatch:
    """Return what a sampler passes to a backend once it has checked these arguments.

    Args:
        temperature: [batch]; in a packed call, which has `row_starts`, by slot, like all that requests ask for.
        top_k: the sampler's, and so are the others.
        top_p: all three limits are given, or none.
        min_p: see there.
        draft_sampling: has a temperature alone.
        row_starts: of a packed call, and so are the next three.
        num_draft_tokens: the most that a request may have.
        slots: of requests.
        row_positions: of the tokens fed at the rows.
        **others: are passed on as they are.
    """
    absent = {"draft_logits": None, "draft_logsumexp": None, "positions": None}
    rows = None
    if row_starts is not None:
        rows = Packing(row_starts, num_draft_tokens, slots, len(temperature), False, row_positions)
    return VerificationBatch(
        **absent | others,
        temperature=temperature,
        truncation=None if top_p is None else Truncation(top_k, top_p, min_p),
        draft_temperature=None if draft_sampling is None else draft_sampling.temperature,
        packing=rows,
    )


@functools.lru_cache(maxsize=1024)
def first_integers(count: int, device: torch.device) -> Tensor:
    """Return the integers from 0 on, made once."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


@functools.lru_cache(maxsize=1024)
def zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return zeros in float32, made once."""
    with torch.inference_mode(False):
        return torch.zeros(shape, device=device)


def warm_up(
    calls: Sequence[Callable[[], object]], device: torch.device, share: Callable[[], tuple[Any, ...]] = tuple
) -> None:
    """Make calls whose kernels are to be compiled before a server needs them: on a GPU those of all calls at once.

    Args:
        calls: each makes one.
        device: where their tensors are.
        share: says which part of the kernels this process compiles, if others compile the same: a `Share`'s fields.
    """
    if calls and device.type == "cuda":
        kernels = backends.kernels()
        kernels.compile_ahead(calls, kernels.Share(*share()))
    else:
        for call in calls:
            call()
