"""The sampler under torch.compile: two operators that the compiler does not look into, one to verify and one to draw.

Compiled code that calls the sampler calls such an operator, which then checks the arguments and runs the backend as usual.
Calls that are not being compiled never come here.

An argument of an operator is either a tensor or a number, so temperature and seeds are two arguments each, of which one is
used. Seeds that the caller does not give are drawn outside the operator: the compiler may replace two equal calls of an
operator by one, and does not do that to PyTorch's own random numbers.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from specdecode import backends
from specdecode.backends import Backend
from specdecode.batch import INT64, RowBatch, SamplerOutput, check_logits
from specdecode.synthetic import AcceptanceSchedule


def verify(
    method: str,
    backend: Backend,
    schedule: AcceptanceSchedule | None,
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None,
    draft_logsumexp: Tensor | None,
    temperature: float | Tensor,
    seeds: int | Tensor | None,
    positions: Tensor | None,
) -> SamplerOutput:
    """Verify one step of drafts in code that is being compiled; arguments are those of a call of the sampler."""
    joint_rates = [] if schedule is None else list(schedule.joint_rates)
    with torch.no_grad():
        return SamplerOutput(
            *_verify(
                method,
                backend,
                joint_rates,
                target_logits,
                draft_token_ids,
                draft_logits,
                draft_logsumexp,
                *_tensor_or_number(temperature),
                *_tensor_or_number(_seeds_for(target_logits, seeds)),
                positions,
            )
        )


def sample(
    backend: Backend,
    domains: tuple[int, int],
    logits: Tensor,
    temperature: float | Tensor,
    seeds: int | Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row in code that is being compiled; return what a backend's `sample` returns."""
    with torch.no_grad():
        token_ids, logsumexp = _sample(
            backend,
            int(domains[0]),
            int(domains[1]),
            logits,
            *_tensor_or_number(temperature),
            *_tensor_or_number(_seeds_for(logits, seeds)),
            positions,
        )
        return token_ids, logsumexp


def _tensor_or_number(value: float | Tensor) -> tuple[Tensor | None, float]:
    return (value, 0) if isinstance(value, Tensor) else (None, value)


def _seeds_for(logits: Tensor, seeds: int | Tensor | None) -> int | Tensor:
    if seeds is None:
        return torch.randint(INT64.min, INT64.max, logits.shape[:1], dtype=torch.int64, device=logits.device)
    return seeds


@torch.library.custom_op("specdecode::verify", mutates_args=())
def _verify(
    method: str,
    backend: str,
    joint_rates: Sequence[float],
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None,
    draft_logsumexp: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    seeds: Tensor | None,
    first_seed: int,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from specdecode.sampler import RejectionSampler  # which imports this module

    schedule = AcceptanceSchedule.from_rates(joint_rates) if joint_rates else None
    return RejectionSampler(cast("Any", method), backend=cast("Backend", backend), schedule=schedule)(
        target_logits,
        draft_token_ids,
        draft_logits,
        temperature=temperature if temperatures is None else temperatures,
        seeds=first_seed if seeds is None else seeds,
        positions=positions,
        draft_logsumexp=draft_logsumexp,
    )


@_verify.register_fake
def _(method: str, backend: str, joint_rates: Sequence[float], target_logits: Tensor, *_: object) -> SamplerOutput:
    batch, rows, _vocab = check_logits("target_logits", target_logits, ("batch", "num_draft_tokens + 1", "vocab"))
    return SamplerOutput(
        target_logits.new_empty((batch, rows), dtype=torch.int64),
        target_logits.new_empty(batch, dtype=torch.int32),
        target_logits.new_empty(batch, dtype=torch.int32),
        target_logits.new_empty(batch, dtype=torch.bool),
    )


@torch.library.custom_op("specdecode::sample", mutates_args=())
def _sample(
    backend: str,
    block_domain: int,
    token_domain: int,
    logits: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    seeds: Tensor | None,
    first_seed: int,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch = RowBatch.check(
        logits,
        temperature if temperatures is None else temperatures,
        first_seed if seeds is None else seeds,
        positions,
    )
    outputs: tuple[Tensor, Tensor]
    outputs = backends.choose(cast("Backend", backend), logits).sample(batch, (block_domain, token_domain))
    return outputs


@_sample.register_fake
def _(backend: str, block_domain: int, token_domain: int, logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, _vocab = check_logits("logits", logits, ("batch", "vocab"))
    return logits.new_empty(batch, dtype=torch.int64), logits.new_empty(batch, dtype=torch.float32)
