"""What the adapters of serving engines share that needs PyTorch: calls whose arguments need no check, first calls."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdecode import RejectionSampler, SamplerOutput, backends
from specdecode.batch import VerificationBatch


def verify_unchecked(verifier: RejectionSampler, batch: VerificationBatch) -> SamplerOutput:
    """Verify a step as a sampler does, given what it makes of arguments that it has checked in a step of the same kind."""
    backend = backends.to_verify(verifier.backend, verifier.method, batch)
    output: SamplerOutput = backend.verify(verifier.method, batch, None)
    return output


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
