"""The state of a verification step in PyTorch: which requests still stand, position by position."""

from typing import NamedTuple

import torch
from torch import Tensor

from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch, seed_each
from specdecode.eager.philox import uniform
from specdecode.noise import Domain
from specdecode.synthetic import AcceptanceSchedule


class Steps:
    """A batch with its scalars as tensors, and the running state of its requests.

    `standing` holds for the requests all of whose drafts have been accepted so far: only their next row matters.
    """

    def __init__(self, batch: VerificationBatch, schedule: AcceptanceSchedule | None = None) -> None:
        self.conditional_rates = () if schedule is None else schedule.conditional_rates
        self.target_logits = batch.target_logits
        self.draft_logits, self.draft_logsumexp = batch.draft_logits, batch.draft_logsumexp
        size, rows, self.vocab = batch.target_logits.shape
        self.seeds, self.positions = seeds_and_positions(batch, size, batch.target_logits.device)
        self.num_draft_tokens = rows - 1

        logits = (batch.target_logits,) if batch.draft_logits is None else (batch.target_logits, batch.draft_logits)
        self.temperature = row_temperature(batch.temperature, *logits)
        self.kinds = request_kinds(batch.temperature)

        valid = (batch.draft_token_ids >= 0) & (batch.draft_token_ids < self.vocab)
        self.draft_token_ids = batch.draft_token_ids.to(torch.int64).where(valid, 0)
        self.has_draft = valid.cumprod(dim=1).to(torch.bool)

        self.requests = torch.arange(size, device=self.seeds.device)
        self.standing = torch.ones(size, dtype=torch.bool, device=self.seeds.device)
        self.num_accepted = torch.zeros(size, dtype=torch.int32, device=self.seeds.device)
        self.invalid = torch.zeros_like(self.standing)

    def uniforms(self, fresh: bool = False) -> Tensor:
        """Return the accept decisions' uniforms, [batch, num_draft_tokens] float32.

        Fresh ones have the draft's offset in their counter: a later step that comes to the same positions has others.
        """
        offsets = torch.arange(self.num_draft_tokens, device=self.seeds.device)
        positions = self.positions[:, None] + offsets
        index = offsets.expand_as(positions) if fresh else torch.zeros_like(positions)
        return uniform(self.seeds[:, None], positions, index, Domain.ACCEPT)

    def advance(self, offset: int, accepted: Tensor) -> None:
        """Record which requests' drafts at `offset` are accepted."""
        self.standing &= accepted & self.has_draft[:, offset]
        self.num_accepted += self.standing

    def output(self, emitted: Tensor) -> SamplerOutput:
        """Assemble the result from the token after each request's accepted drafts, [batch] int64."""
        offsets = torch.arange(self.num_draft_tokens + 1, device=emitted.device)
        accepted = torch.nn.functional.pad(self.draft_token_ids, (0, 1))
        last = self.num_accepted[:, None]
        token_ids = torch.where(offsets < last, accepted, torch.where(offsets == last, emitted[:, None], -1))
        drafted = self.has_draft.sum(dim=1, dtype=torch.int32)
        return SamplerOutput(token_ids, self.num_accepted, drafted, self.invalid)


def seeds_and_positions(batch: RowBatch | VerificationBatch, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return every request's seed and position, [batch] int64."""
    positions = batch.positions
    if positions is None:
        positions = torch.zeros(size, dtype=torch.int64, device=device)
    return seed_each(batch.seeds, size, device), positions


class Kinds(NamedTuple):
    """Which kinds of requests there may be, so far as is known without looking at values."""

    greedy: bool
    random: bool


def request_kinds(temperature: Tensor | float) -> Kinds:
    """Return which kinds of requests a temperature makes."""
    if isinstance(temperature, Tensor):
        return Kinds(greedy=True, random=True)
    return Kinds(greedy=temperature == 0, random=temperature > 0)


def row_temperature(temperature: Tensor | float, *logits: Tensor) -> Tensor:
    """Return one temperature per request in the dtype to compute in: float64 for float64 logits, else float32.

    What the dtype cannot hold goes to its nearest positive number, so that only 0 is greedy. Values that could not be
    checked on the host are made harmless: NaN and negative ones are greedy.
    """
    dtype = torch.float64 if torch.float64 in {tensor.dtype for tensor in logits} else torch.float32
    limits = torch.finfo(dtype)
    if not isinstance(temperature, Tensor):
        if temperature > 0:
            temperature = min(max(temperature, limits.tiny), limits.max)
        return torch.full((len(logits[0]),), temperature, dtype=dtype, device=logits[0].device)
    return temperature.to(dtype).clamp(limits.tiny, limits.max).where(temperature > 0, 0)
