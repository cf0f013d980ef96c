"""Drafters: a draft model, prompt lookup, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdecode import RejectionSampler
from specdecode.arguments import check_count
from specdecode.batch import TARGET_ONLY
from specdecode.integrations.transformers.models import CachedModel
from specdecode.integrations.transformers.processors import Processors
from specdecode.integrations.transformers.requests import Batch
from specdecode.integrations.transformers.stops import Stops


@dataclass(frozen=True)
class PromptLookup:
    """Draft what followed the last tokens when they occurred before: a drafter without a model.

    Of all suffixes of `min_ngram` to `max_ngram` tokens that occurred before, the longest is used, and its latest
    occurrence. A continuation that reaches the end of the sequence goes on with its own first tokens, so loops are drafted
    at full length.

    Args:
        max_ngram: the longest suffix to look for, at least 1.
        min_ngram: the shortest suffix to look for, from 1 to `max_ngram`. With 1 a single repeated token is enough to draft.
            From 2 on fewer steps have drafts, and more of these are accepted.

    Raises:
        TypeError: an argument is not an int.
        ValueError: `max_ngram` or `min_ngram` is less than 1, or `min_ngram` is more than `max_ngram`.

    Example:
        >>> import torch
        >>> from specdecode.integrations.transformers import PromptLookup
        >>> tokens = torch.tensor([[5, 6, 7, 8, 5, 6], [0, 0, 1, 2, 3, 4]])
        >>> PromptLookup().propose(tokens, lengths=torch.tensor([6, 4]), num_draft_tokens=5)
        tensor([[ 7,  8,  5,  6,  7],
                [-1, -1, -1, -1, -1]])
        >>> PromptLookup(min_ngram=3).propose(tokens, lengths=torch.tensor([6, 4]), num_draft_tokens=5)[0]
        tensor([-1, -1, -1, -1, -1])

    Source: Saxena, prompt lookup decoding (2023).
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        check_count("max_ngram", self.max_ngram)
        if check_count("min_ngram", self.min_ngram) > self.max_ngram:
            raise ValueError(f"min_ngram: expected at most max_ngram = {self.max_ngram}, got {self.min_ngram}")

    def propose(self, token_ids: Tensor, lengths: Tensor, num_draft_tokens: int) -> Tensor:
        """Return the drafts of each row.

        Args:
            token_ids: [batch, width] int64, right-aligned.
            lengths: [batch] int64: how many of a row's last columns are its tokens.
            num_draft_tokens: K.

        Returns:
            [batch, K] int64: drafts, or a row of -1 where nothing was found.
        """
        width = token_ids.shape[1]
        columns = torch.arange(width, device=token_ids.device)
        source = torch.full_like(lengths, -1)  # the column after the best occurrence
        for size in range(self.min_ngram, min(self.max_ngram, width - 1) + 1):  # a longer match replaces a shorter one
            windows = token_ids[:, :-1].unfold(1, size, 1)  # [batch, width - size, size]
            starts = columns[: width - size]
            matches = (windows == token_ids[:, None, -size:]).all(-1) & (starts >= (width - lengths)[:, None])
            latest = torch.where(matches, starts, -1).amax(1)
            source = torch.where(latest >= 0, latest + size, source)
        offsets = torch.arange(num_draft_tokens, device=token_ids.device) % (width - source)[:, None]
        drafts = token_ids.gather(1, (source[:, None] + offsets).clamp(min=0))
        return torch.where(source[:, None] >= 0, drafts, -1)


class Drafts(NamedTuple):
    """The drafts of a step."""

    token_ids: Tensor  # [requests, drafts] int64, -1 = none
    logits: Tensor | None = None  # [requests, drafts, vocab]; None = a deterministic drafter, or not needed
    logsumexp: Tensor | None = None  # [requests, drafts] float32
    cutoff: Tensor | None = None  # [requests, drafts] int64; None = rows that are not truncated


class Drafter:
    """No drafter, and the interface of the others."""

    @property
    def models(self) -> list[CachedModel]:
        """The draft model, if there is one."""
        return []

    def draft(self, batch: Batch, most: Tensor, num_draft_tokens: int) -> Drafts:
        """Return drafts for each request.

        Args:
            batch: the requests.
            most: [requests] int64: the most drafts of each. Drafts end earlier where the text would end.
            num_draft_tokens: the largest of these numbers.
        """
        return Drafts(batch.tokens[:, :0])


@dataclass
class LookupDrafter(Drafter):
    """Drafts by prompt lookup; where nothing is found for any request, it returns no drafts."""

    lookup: PromptLookup
    vocab_size: int  # of the target; a prompt may hold other tokens, which are not drafted
    stops: Stops
    with_stop: bool  # whether a token that ends the text may be drafted

    def draft(self, batch: Batch, most: Tensor, num_draft_tokens: int) -> Drafts:
        found = self.lookup.propose(batch.tokens, batch.lengths, num_draft_tokens)
        ends = self.stops(batch.tokens, batch.lengths, found)
        is_past = (ends.cumsum(1) > (ends if self.with_stop else 0)) | ((found >= self.vocab_size).cumsum(1) > 0)
        is_past |= torch.arange(num_draft_tokens, device=most.device) >= most[:, None]
        found = found.masked_fill(is_past, -1)
        return Drafts(found if (found >= 0).any() else batch.tokens[:, :0])


@dataclass
class ModelDrafter(Drafter):
    """Drafts with a draft model, token by token."""

    model: CachedModel
    sampler: RejectionSampler  # which will verify the drafts
    processors: Processors
    vocab_size: int  # of the target
    stops: Stops
    with_stop: bool  # whether a token that ends the text may be drafted
    stop_below: float | None  # a request stops drafting at a row in which no token has this probability

    @property
    def models(self) -> list[CachedModel]:
        return [self.model]

    def draft(self, batch: Batch, most: Tensor, num_draft_tokens: int) -> Drafts:
        tokens, rows, drawn, kept = batch.tokens, [], [], []
        drafts = most > 0  # whether each request goes on drafting
        for i in range(num_draft_tokens):
            row = self.row(tokens, batch, i, drafts)
            if self.processors:
                drafts = drafts & (row > -torch.inf).any(dim=1)  # processors may have left nothing
            if self.stop_below is not None:  # before the draw: then the output stays exact
                drafts = drafts & (row.float().softmax(dim=1).amax(dim=1) >= self.stop_below)
                if not drafts.any():
                    break
            lengths = batch.lengths + i
            drawn.append(
                self.sampler.draft(row, **batch.sampling._asdict(), seeds=batch.seeds, positions=lengths, offset=i)
            )
            token = drawn[-1].token_ids[:, None]
            ends = self.stops(tokens, lengths, token)[:, 0]
            kept.append(token[:, 0].masked_fill(~(drafts if self.with_stop else drafts & ~ends), -1))
            drafts = drafts & ~ends & (most > i + 1)
            tokens = torch.cat([tokens, token], dim=1)
            rows.append(row)
        token_ids = torch.stack(kept, dim=1) if kept else tokens[:, :0]
        if not rows or self.sampler.method in TARGET_ONLY:
            return Drafts(token_ids)
        logsumexp = torch.stack([step.logsumexp for step in drawn], dim=1)
        cutoffs = [step.cutoff for step in drawn if step.cutoff is not None]
        cutoff = torch.stack(cutoffs, dim=1) if cutoffs else None
        return Drafts(token_ids, torch.stack(rows, dim=1), logsumexp, cutoff)

    def row(self, tokens: Tensor, batch: Batch, num_drafts: int, used: Tensor) -> Tensor:
        """Return the draft model's processed rows that follow `tokens`, [requests, target vocab]."""
        row = self.fitted(self.model.logits(tokens, batch.lengths + num_drafts, keep=1)[:, 0])
        return self.processors.process_row(row, tokens, batch, num_drafts, used)

    def fitted(self, rows: Tensor) -> Tensor:
        """Return rows of the draft model with the target's tokens, [rows, target vocab].

        A token that the draft model lacks has logit -inf: it is never drafted.
        """
        missing = self.vocab_size - rows.shape[-1]
        return F.pad(rows, (0, missing), value=-torch.inf) if missing > 0 else rows[:, : self.vocab_size]
