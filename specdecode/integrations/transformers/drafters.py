"""What drafts: a draft model, prompt lookup, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdecode import RejectionSampler
from specdecode.integrations.transformers.generation_config import Processors
from specdecode.integrations.transformers.lookup import PromptLookup
from specdecode.integrations.transformers.models import CachedModel
from specdecode.integrations.transformers.requests import Alignment, Batch
from specdecode.integrations.transformers.stops import Stops


class Drafts(NamedTuple):
    """The drafts of a step."""

    token_ids: Tensor  # [requests, drafts] int64, -1 = none
    logits: Tensor | None = None  # [requests, drafts, vocab]; None = a deterministic drafter, or not needed
    logsumexp: Tensor | None = None  # [requests, drafts] float32
    cutoff: Tensor | None = None  # [requests, drafts] int64; None = rows that are not truncated


class Drafter:
    """Drafts nothing; the others do."""

    models: Sequence[CachedModel] = ()

    def draft(self, batch: Batch, most: Tensor, num_draft_tokens: int) -> Drafts:
        """Return drafts for each request.

        Args:
            batch: the requests.
            most: [requests] int64: the most drafts that each may have. Drafts end earlier where the text would end.
            num_draft_tokens: the largest of these numbers.
        """
        return Drafts(batch.tokens[:, :0])

    def realign(self, alignment: Alignment) -> None:
        """Move cached columns to their places in the next step."""


class LookupDrafter(Drafter):
    """Drafts by prompt lookup; where nothing is found for any request, it returns no drafts.

    Args:
        lookup: how it looks.
        vocab_size: how many tokens the target has. A prompt may hold others, which are not drafted.
        stops: what ends a text.
        with_stop: whether a token that ends the text may be drafted.
    """

    def __init__(self, lookup: PromptLookup, vocab_size: int, stops: Stops, with_stop: bool) -> None:
        self.lookup = lookup
        self.vocab_size = vocab_size
        self.stops = stops
        self.with_stop = with_stop

    def draft(self, batch: Batch, most: Tensor, num_draft_tokens: int) -> Drafts:
        found = self.lookup.propose(batch.tokens, batch.lengths, num_draft_tokens)
        ends = self.stops(batch.tokens, batch.lengths, found)
        is_past = (ends.cumsum(1) > (ends if self.with_stop else 0)) | ((found >= self.vocab_size).cumsum(1) > 0)
        is_past |= torch.arange(num_draft_tokens, device=most.device) >= most[:, None]
        found = found.masked_fill(is_past, -1)
        return Drafts(found if (found >= 0).any() else batch.tokens[:, :0])


class ModelDrafter(Drafter):
    """Drafts with a draft model, token by token.

    Args:
        model: the draft model.
        sampler: the sampler that will verify the drafts.
        processors: the logits processors, or the adjustments in their place, which are applied to rows of both models.
        vocab_size: how many tokens the target has.
        stops: what ends a text.
        with_stop: whether a token that ends the text may be drafted.
    """

    def __init__(
        self,
        model: CachedModel,
        sampler: RejectionSampler,
        processors: Processors,
        vocab_size: int,
        stops: Stops,
        with_stop: bool,
    ) -> None:
        self.model = model
        self.models = [model]
        self.sampler = sampler
        self.processors = processors
        self.vocab_size = vocab_size
        self.stops = stops
        self.with_stop = with_stop

    def draft(self, batch: Batch, most: Tensor, num_draft_tokens: int) -> Drafts:
        tokens, logits, drawn, kept = batch.tokens, [], [], []
        drafts = most > 0  # which requests draft on
        for i in range(num_draft_tokens):
            row = self.row(tokens, batch, i, drafts)
            if self.processors:
                drafts = drafts & (row > -torch.inf).any(dim=1)  # processors may have left nothing
            lengths = batch.lengths + i
            drawn.append(
                self.sampler.draft(row, **batch.sampling._asdict(), seeds=batch.seeds, positions=lengths, offset=i)
            )
            token = drawn[-1].token_ids[:, None]
            ends = self.stops(tokens, lengths, token)[:, 0]
            kept.append(token[:, 0].masked_fill(~(drafts if self.with_stop else drafts & ~ends), -1))
            drafts = drafts & ~ends & (most > i + 1)
            tokens = torch.cat([tokens, token], dim=1)
            logits.append(row)
        self.drafted = tokens, batch.lengths + num_draft_tokens
        token_ids = torch.stack(kept, dim=1) if kept else tokens[:, :0]
        if not logits or self.sampler.method == "strict":  # which does not use them
            return Drafts(token_ids)
        logsumexp = torch.stack([step.logsumexp for step in drawn], dim=1)
        cutoffs = [step.cutoff for step in drawn if step.cutoff is not None]
        cutoff = torch.stack(cutoffs, dim=1) if cutoffs else None
        return Drafts(token_ids, torch.stack(logits, dim=1), logsumexp, cutoff)

    def row(self, tokens: Tensor, batch: Batch, num_drafts: int, drafts: Tensor) -> Tensor:
        """Return the rows that follow these tokens, [requests, vocab].

        They are padded or cut to the target's vocabulary, then processed, as verification will do with the same rows. A
        token that the draft model lacks has logit -inf: it is never drafted.
        """
        row = self.model.logits(tokens, batch.lengths + num_drafts, keep=1)[:, 0]
        missing = self.vocab_size - row.shape[-1]
        row = F.pad(row, (0, missing), value=-torch.inf) if missing > 0 else row[:, : self.vocab_size]
        return self.processors(row, tokens, batch, num_drafts, drafts)

    def realign(self, alignment: Alignment) -> None:
        if self.model.cache.recurrent and max(alignment.ends) > self.model.cache.num_columns:
            self.model.logits(*self.drafted, keep=1)  # the last draft was accepted: its state is needed
        self.model.realign(alignment)
