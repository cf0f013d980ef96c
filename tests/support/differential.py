"""Random batches, and the comparison of a backend's tokens with the reference's, one request at a time."""

import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.oracle import Outcome

FLOAT32_BAND, FLOAT64_BAND = 1e-4, 1e-9
"""A backend may differ from the reference only where the reference's margin, in nats, is at most this.

The eager backend computes float64 rows in float64. All other rows, and all rows of the Triton backend, are computed in
float32, whose rounding changes a score of size 40 by about 1e-5. About one request in 2,000 has a margin below 1e-4. The
tests count the requests that differ.
"""


def band_of(dtype: torch.dtype, backend: str) -> float:
    """Return the band for logits of a dtype."""
    return FLOAT64_BAND if dtype == torch.float64 and backend == "eager" else FLOAT32_BAND


@dataclass(frozen=True)
class Case:
    """The arguments of one call."""

    target_logits: Tensor
    draft_token_ids: Tensor
    draft_logits: Tensor
    temperature: Tensor
    seeds: Tensor
    positions: Tensor

    def band(self, backend: str) -> float:
        return band_of(self.target_logits.dtype, backend)

    def to(self, device: str) -> "Case":
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()})

    def request(self, index: int) -> dict:
        """Return one request for the reference: float64 rows and plain numbers."""
        return {
            "temperature": float(self.temperature[index]),
            "seed": int(self.seeds[index]),
            "position": int(self.positions[index]),
        }

    def rows(self, index: int) -> tuple:
        """Return (target_logits, draft_token_ids, draft_logits) of one request."""
        return (
            self.target_logits[index].double().cpu().numpy(),
            self.draft_token_ids[index].tolist(),
            self.draft_logits[index].double().cpu().numpy(),
        )


def case(batch: int, drafts: int, vocab: int, dtype: torch.dtype, *, greedy: float = 0.25, seed: int = 0) -> Case:
    """Return a batch with likely drafts, ragged -1 padding, and some greedy requests."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def chance(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    target = 3 * normal(batch, drafts + 1, vocab)
    draft = target[:, :drafts] + 0.6 * normal(batch, drafts, vocab)
    noise = -torch.log(-torch.log(chance(batch, drafts, vocab).clamp(1e-6, 1 - 1e-6)))
    token_ids = (draft + noise).argmax(dim=2)
    token_ids[chance(batch, drafts) < 0.1] = -1
    temperature = 0.3 + 1.2 * chance(batch)
    temperature[chance(batch) < greedy] = 0
    limits = torch.iinfo(torch.int64)
    seeds = torch.randint(limits.min, limits.max, (batch,), generator=generator)
    positions = torch.randint(0, 2**40, (batch,), generator=generator)
    return Case(target.to(dtype), token_ids, draft.to(dtype), temperature, seeds, positions)


def assert_same(one: Any, other: Any) -> None:
    """Assert that two outputs, or tuples of tensors, are equal bit for bit; a NaN is equal to itself."""
    names = getattr(one, "_fields", range(len(one)))
    for name, got, want in zip(names, one, other, strict=True):
        if got is not want:  # absent fields are None
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=str(name))


def assert_same_tokens(token_ids: Tensor, outcomes: list[Outcome], band: float) -> None:
    """Check that each request's tokens are the reference's, except where the reference's margin is within the band."""
    excused = 0
    for got, outcome in zip(token_ids.tolist(), outcomes):
        padded = outcome.token_ids + [-1] * (len(got) - len(outcome.token_ids))
        if got != padded:
            assert outcome.margin <= band, f"{got} != {padded}, decided by {outcome.margin:.2e} nats"
            excused += 1
    assert excused <= 1 + len(outcomes) // 100


@contextmanager
def like_a_device():
    """Make the CPU compute like a device without synchronisation: no value is read on the host, all rows are masked."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("specdecode") and hasattr(module, "on_host"):
                patch.setattr(module, "on_host", lambda tensor: False)
        yield
