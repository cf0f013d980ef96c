"""Synthetic acceptance in Triton: the work of a real method, with scheduled decisions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode.synthetic import AcceptanceSchedule


@triton.jit
def is_scheduled(context, uniform, drafts):
    """Return whether the schedule accepts a row's draft."""
    return uniform <= tl.load(drafts.rates_ptr + context.offset, mask=context.token >= 0, other=-1.0)


_rates: dict[tuple[object, ...], Tensor] = {}


def conditional_rates(schedule: AcceptanceSchedule, device: torch.device) -> Tensor:
    """Return a schedule's conditional rates on a device, [num_draft_tokens] float32.

    The first call of a schedule waits until the copy is complete, so that any stream may use it. The tensor is never
    freed, because graphs may hold its address. During capture a wait is impossible, so kernels fill the tensor at each
    replay, unless a call or a warm-up came before.
    """
    key = schedule.conditional_rates, device
    if key not in _rates:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            rates = torch.empty(schedule.num_draft_tokens, dtype=torch.float32, device=device)
            for rate, value in zip(rates, schedule.conditional_rates):
                rate.fill_(value)
            return rates
        _rates[key] = torch.tensor(schedule.conditional_rates, dtype=torch.float32, device=device)
    return _rates[key]
