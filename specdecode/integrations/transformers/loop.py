"""The loop: each step drafts, verifies all drafts in one call of the target, and removes the rejected ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode import AcceptanceStats, RejectionSampler, SamplerOutput
from specdecode.integrations.transformers.drafters import Drafter, Drafts
from specdecode.integrations.transformers.lengths import Lengths
from specdecode.integrations.transformers.models import CachedModel
from specdecode.integrations.transformers.outputs import GenerationOutput, Step
from specdecode.integrations.transformers.processors import Processors
from specdecode.integrations.transformers.requests import Alignment, Batch, Request, map_tensors
from specdecode.integrations.transformers.stops import Stops


@dataclass
class Loop:
    """The state that stays the same from step to step."""

    target: CachedModel
    drafter: Drafter
    sampler: RejectionSampler
    num_draft_tokens: int
    stops: Stops
    processors: Processors
    stats: AcceptanceStats | None
    on_step: Callable[[Step], object] | None
    lengths: Lengths | None  # plans the number of drafts, at most num_draft_tokens

    def step(self, batch: Batch) -> Batch:
        """Draft, verify and advance. Return the requests that are not finished, right-aligned again."""
        before = [request.length for request in batch.requests]
        # Each request drafts at most one token less than its own limit allows, because a token follows the drafts. What
        # a request emits must not depend on the limits of the others.
        length = self.num_draft_tokens if self.lengths is None else self.lengths.next(len(batch.requests))
        most = [min(length, request.limit - request.length - 1) for request in batch.requests]
        drafts = self.drafter.draft(batch, torch.tensor(most, device=batch.tokens.device), max(most))
        output = self.verify(batch, drafts)
        num_tokens = []
        for step in self.advance(batch, output, drafts.token_ids):
            num_tokens.append(len(step.token_ids))
            if self.on_step is not None:
                self.on_step(step)
        if self.stats is not None:
            device = output.token_ids.device
            rows = torch.tensor([request.row for request in batch.requests], device=device)
            self.stats.update(output, torch.tensor(num_tokens, device=device), rows)
        if self.lengths is not None:
            self.lengths.update(output)
        return self.realigned(batch, before, output.token_ids)

    def verify(self, batch: Batch, drafts: Drafts) -> SamplerOutput:
        """Score all drafts with the target in one call, and verify them."""
        num_drafts = drafts.token_ids.shape[1]
        candidates = torch.cat([batch.tokens, drafts.token_ids.clamp(min=0)], dim=1)
        logits = self.target.logits(candidates, batch.lengths + num_drafts, keep=num_drafts + 1)
        return self.sampler(
            self.processors.process_step(logits, candidates, batch, drafts.token_ids),
            drafts.token_ids,
            drafts.logits,
            **batch.sampling._asdict(),
            seeds=batch.seeds,
            positions=batch.lengths,
            draft_logsumexp=drafts.logsumexp,
            draft_cutoff=drafts.cutoff,
        )

    def advance(self, batch: Batch, output: SamplerOutput, draft_token_ids: Tensor) -> Iterator[Step]:
        """Append the emitted tokens to each request, and yield each request's step. This waits for the device."""
        ends = self.stops(batch.tokens, batch.lengths, output.token_ids)
        columns = (output.invalid, output.token_ids, output.num_draft_tokens, draft_token_ids, ends)
        for request, invalid, *step in zip(batch.requests, *(column.tolist() for column in columns)):
            if invalid:
                raise ValueError(
                    f"target: expected finite logits, got only NaN or -inf for request {request.row}, logits processors "
                    "included"
                )
            yield request.advance(*step)

    def realigned(self, batch: Batch, before: list[int], new_token_ids: Tensor) -> Batch:
        """Return the unfinished requests with their new tokens; the columns of all caches move in the same way."""
        rows = [row for row, request in enumerate(batch.requests) if not request.finished]
        requests = [batch.requests[row] for row in rows]
        if not requests:
            return batch._replace(requests=[])
        device, after = batch.tokens.device, [request.length for request in requests]
        alignment = Alignment(rows, before, after, batch.tokens.shape[1], device)
        for model in (self.target, *self.drafter.models):
            model.realign(alignment)
        return Batch(
            requests,
            alignment(torch.cat([batch.tokens, new_token_ids], dim=1), alignment.width, dim=1),
            torch.tensor(after, device=device),
            map_tensors(alignment.select, batch.sampling),
            alignment.select(batch.seeds),
        )

    def output(self, input_ids: Tensor, requests: list[Request], pad_id: int) -> GenerationOutput:
        """Return the result, padded on the right."""
        device = input_ids.device
        generated = padded([request.token_ids for request in requests], pad_id, torch.int64)
        return GenerationOutput(
            sequences=torch.cat([input_ids, generated.to(device)], dim=1),
            num_generated=torch.tensor([len(request.token_ids) for request in requests], device=device),
            token_kinds=padded([request.kinds for request in requests], -1, torch.int8).to(device),
            stats=self.stats,
            target_calls=self.target.calls,
            draft_calls=sum(model.calls for model in self.drafter.models),
        )


def padded(rows: Sequence[Sequence[int]], value: int, dtype: torch.dtype) -> Tensor:
    """Return rows of several lengths as one tensor, [rows, longest row], filled up with `value`."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype, device="cpu")
