"""Synthetic acceptance in Triton: a real method's work, its verdicts replaced by scheduled ones."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode.kernels.philox import uniform
from specdecode.noise import Domain
from specdecode.synthetic import AcceptanceSchedule

ACCEPT = tl.constexpr(int(Domain.ACCEPT))


@triton.jit
def accept_uniform(key, offset):
    """Return the uniform number of the accept decision at an offset."""
    return tl.max(uniform(key, offset, tl.zeros([1], tl.int32), ACCEPT), 0)


@triton.jit
def is_scheduled(rates_ptr, offset, uniform):
    """Return whether the schedule says that the draft at an offset stands."""
    return uniform <= tl.load(rates_ptr + offset)


_rates: dict[tuple[object, ...], Tensor] = {}


def conditional_rates(schedule: AcceptanceSchedule, device: torch.device) -> Tensor:
    """Return a schedule's conditional rates on a device, [num_draft_tokens] float32.

    Filled by kernels, not copied from the host, so that a graph being captured can hold it too. Kept for each stream, for
    another one could use it before it is filled.
    """
    on_cuda = device.type == "cuda"
    key = (schedule.conditional_rates, device, torch.cuda.current_stream(device) if on_cuda else None)
    if key not in _rates:
        rates = torch.empty(schedule.num_draft_tokens, device=device)
        for rate, value in zip(rates, schedule.conditional_rates):
            rate.fill_(value)
        if on_cuda and torch.cuda.is_current_stream_capturing():
            return rates  # which is filled when the graph runs, and not before
        _rates[key] = rates
    return _rates[key]
