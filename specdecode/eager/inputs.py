"""The inputs of a verification step in PyTorch, as tensors."""

import torch
from torch import Tensor

from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch
from specdecode.eager.philox import log_uniform, uniform
from specdecode.eager.truncation import of_drafts, row_sampling
from specdecode.eager.vocabulary import DraftVocabRows, target_to_draft
from specdecode.noise import Domain
from specdecode.synthetic import AcceptanceSchedule


class Inputs:
    """A batch with every option as a tensor, including options given as one number for all requests."""

    def __init__(self, batch: VerificationBatch, schedule: AcceptanceSchedule | None = None) -> None:
        size, rows, self.vocab = batch.target_logits.shape
        self.target_logits, self.draft_logits = batch.target_logits, batch.draft_logits
        if batch.draft_logits is not None and batch.draft_vocab_ids is not None:
            draft_id_of_token = target_to_draft(batch.draft_vocab_ids, self.vocab)
            # Duck-typed as a tensor; only reading rows checks the type.
            self.draft_logits = DraftVocabRows(batch.draft_logits, draft_id_of_token)  # type: ignore[assignment]
        self.conditional_rates = () if schedule is None else schedule.conditional_rates
        counts = torch.arange(max(size, rows), device=batch.target_logits.device)
        self.requests, self.offsets = counts[:size], counts[:rows]
        self.seeds, self.positions = seeds_and_positions(batch, self.requests)

        logits = (batch.target_logits,) if batch.draft_logits is None else (batch.target_logits, batch.draft_logits)
        self.temperature, self.greedy = row_temperature(batch.temperature, *logits)
        self.sampling = self.draft_sampling = row_sampling(self.temperature, batch.truncation, self.vocab)
        if batch.draft_temperature is not None:
            draft_temperature, draft_greedy = row_temperature(batch.draft_temperature, *logits)
            drawn = row_sampling(draft_temperature, batch.draft_truncation, self.vocab)
            self.draft_sampling = of_drafts(drawn, draft_greedy, self.temperature)

        self.num_draft_tokens = rows - 1
        self.draft_token_ids = batch.draft_token_ids.clamp(0, self.vocab - 1).to(torch.int64)
        self.num_drafts = self.leading(self.draft_token_ids == batch.draft_token_ids)

    def leading(self, accepted: Tensor) -> Tensor:
        """Count the entries before the first False, [batch], given [batch, num_draft_tokens] bool."""
        if self.num_draft_tokens == 0:
            return torch.zeros_like(self.seeds)
        return torch.add(self.offsets[:-1], accepted, alpha=self.num_draft_tokens).amin(dim=1)

    def uniforms(self) -> Tensor:
        """Return the uniforms of the accept decisions, [batch, num_draft_tokens] float32."""
        return uniform(*self._accept_counters(), Domain.ACCEPT)

    def log_uniforms(self, fresh: bool = False) -> Tensor:
        """Return the logarithms of `uniforms`, computed in the dtype of computation, as float64.

        If `fresh`, the counter contains the draft's offset, so that a later step at the same positions has other numbers.
        """
        return log_uniform(*self._accept_counters(fresh), Domain.ACCEPT, self.temperature.dtype)

    def _accept_counters(self, fresh: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        offsets = self.offsets[:-1]
        return self.seeds[:, None], self.positions[:, None] + offsets, offsets if fresh else self.offsets[:1]

    def output(
        self, num_accepted: Tensor, emitted: Tensor, accepted_empty: Tensor, emitted_empty: Tensor
    ) -> SamplerOutput:
        """Assemble the result.

        Args:
            num_accepted: [batch] int64.
            emitted: [batch] int64, the token after each request's accepted drafts.
            accepted_empty: [batch, num_draft_tokens] bool, whether the target row of a draft has no finite logit.
            emitted_empty: [batch] bool, whether the target row of `emitted` has no finite logit.
        """
        last = num_accepted[:, None]
        is_after_last = self.offsets > last
        token_ids = torch.cat([self.draft_token_ids, emitted[:, None]], dim=1).masked_fill_(is_after_last, -1)
        token_ids.scatter_(1, last, emitted[:, None])
        is_accepted = ~is_after_last[:, 1:]
        invalid = (accepted_empty & is_accepted).any(dim=1) | emitted_empty
        return SamplerOutput(token_ids, num_accepted.to(torch.int32), self.num_drafts.to(torch.int32), invalid)


def seeds_and_positions(batch: RowBatch | VerificationBatch, requests: Tensor) -> tuple[Tensor, Tensor]:
    """Return the seed and position of each request, [batch] int64, given `requests` 0, 1, ..."""
    seeds = batch.seeds if isinstance(batch.seeds, Tensor) else requests + batch.seeds
    if batch.positions is None:
        return seeds, requests[:1].expand_as(requests)  # zeros without a launch on a GPU
    return seeds, batch.positions


def row_temperature(temperature: Tensor | float, *logits: Tensor) -> tuple[Tensor, Tensor | bool]:
    """Return the temperature of each request, > 0 and in the dtype of computation, and whether the request is greedy.

    The dtype is float64 for float64 logits, float32 otherwise. A temperature outside its range becomes the nearest
    positive number, so that only 0 is greedy. A greedy request's temperature is not used. Values that could not be
    checked on the host are made harmless: NaN and negative temperatures are greedy.

    Returns:
        [batch] temperatures; [batch] bool, or one bool for all.
    """
    dtype = torch.float64 if torch.float64 in {tensor.dtype for tensor in logits} else torch.float32
    limits = torch.finfo(dtype)
    if isinstance(temperature, Tensor):
        return temperature.to(dtype).nan_to_num(nan=0).clamp(limits.tiny, limits.max), ~(temperature > 0)
    number = min(max(temperature, limits.tiny), limits.max)
    return torch.full((1,), number, dtype=dtype, device=logits[0].device).expand(len(logits[0])), temperature == 0
