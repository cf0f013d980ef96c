"""The loop: every step drafts, verifies all drafts in one call of the target, and makes room for the next step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdecode import AcceptanceStats, RejectionSampler, SamplerOutput, Sampling
from specdecode.eager.truncation import is_kept
from specdecode.integrations.transformers.drafters import Drafter, Drafts
from specdecode.integrations.transformers.generation_config import Processors
from specdecode.integrations.transformers.models import CachedModel
from specdecode.integrations.transformers.outputs import GenerationOutput, Step, padded
from specdecode.integrations.transformers.requests import Alignment, Batch, Request, map_tensors
from specdecode.integrations.transformers.stops import Stops


@dataclass
class Loop:
    """What stays the same from step to step, for all requests."""

    target: CachedModel
    drafter: Drafter
    sampler: RejectionSampler
    num_draft_tokens: int
    stops: Stops
    processors: Processors
    stats: AcceptanceStats | None
    on_step: Callable[[Step], object] | None

    def decode_all(self, requests: list[Request], tokens: Tensor, sampling: Sampling, seeds: Tensor) -> None:
        """Generate the tokens of all requests: at once if padding changes nothing.

        One by one if a model would count padding. If one would only see that of the prompts, then those of the same length
        at once: later padding is in no state.
        """
        models = [self.target, *self.drafter.models]
        counts_padding = any(model.counts_padding for model in models)
        sees_padding = any(model.sees_padding for model in models)
        groups: dict[int, list[int]] = defaultdict(list)
        for row, request in enumerate(requests):
            groups[row if counts_padding else request.length if sees_padding else 0].append(row)
        for rows in groups.values():
            members = [requests[row] for row in rows]
            select = partial(torch.index_select, dim=0, index=torch.tensor(rows, device=tokens.device))
            width = max(request.length for request in members)
            lengths = torch.tensor([request.length for request in members], device=tokens.device)
            self.decode(
                Batch(members, select(tokens)[:, -width:], lengths, map_tensors(select, sampling), select(seeds))
            )

    def decode(self, batch: Batch) -> None:
        """Generate the tokens of these requests, with empty caches at first."""
        for model in (self.target, *self.drafter.models):
            model.clear()
        while batch.requests:
            batch = self.step(batch)

    def step(self, batch: Batch) -> Batch:
        """Draft, verify and advance. Return the requests that are not finished, right-aligned again."""
        before = [request.length for request in batch.requests]
        # Each request drafts at most one token less than its own limit allows, because a token follows the drafts. What
        # a request emits must not depend on the limits of the others.
        most = [
            min(self.num_draft_tokens, request.limit - request.length - 1, self.target.most_drafts(request.length))
            for request in batch.requests
        ]
        drafts = self.drafter.draft(batch, torch.tensor(most, device=batch.tokens.device), max(most))
        output = self.verify(batch, drafts)
        num_tokens = []
        for step in self.advance(batch, output, drafts.token_ids):
            num_tokens.append(len(step.token_ids))
            if self.on_step is not None:
                self.on_step(step)
        if self.stats is not None:
            self.stats.update(output, torch.tensor(num_tokens, device=output.token_ids.device))
        return self.realigned(batch, before, output.token_ids)

    def verify(self, batch: Batch, drafts: Drafts) -> SamplerOutput:
        """Score all drafts with the target, and let the sampler decide."""
        num_drafts = drafts.token_ids.shape[1]
        candidates = torch.cat([batch.tokens, drafts.token_ids.clamp(min=0)], dim=1)
        logits = self.target.logits(candidates, batch.lengths + num_drafts, keep=num_drafts + 1)
        adjustments = None
        if self.processors.adjuster is None:
            logits = self.processed(logits, candidates, batch, drafts.token_ids)
        else:
            logits, adjustments = self.processors.adjuster(logits, batch.tokens, batch, num_drafts=0)
        return self.sampler(
            logits,
            drafts.token_ids,
            drafts.logits,
            **batch.sampling._asdict(),
            seeds=batch.seeds,
            positions=batch.lengths,
            draft_logsumexp=drafts.logsumexp,
            draft_cutoff=drafts.cutoff,
            adjustments=adjustments,
        )

    def processed(self, logits: Tensor, candidates: Tensor, batch: Batch, draft_ids: Tensor) -> Tensor:
        """Return the rows of the target with the logits processors applied to those that can matter.

        A row can matter while every draft before it is a token that the target may emit there, and that does not end the
        text. So rows are processed in order: whether a draft is possible shows in the processed row before it.
        """
        if not self.processors:
            return logits
        rows, num_drafts = [], draft_ids.shape[1]
        goes_on = (draft_ids >= 0) & ~self.stops(batch.tokens, batch.lengths, draft_ids)
        used = torch.ones_like(batch.lengths, dtype=torch.bool)
        for i in range(num_drafts + 1):
            tokens = candidates[:, : batch.width + i]
            rows.append(self.processors(logits[:, i], tokens, batch, i, used))
            if i < num_drafts:
                used = used & goes_on[:, i] & self.is_possible(rows[-1], draft_ids[:, i].clamp(min=0), batch)
        return torch.stack(rows, dim=1)

    def is_possible(self, row: Tensor, token_ids: Tensor, batch: Batch) -> Tensor:
        """Return whether each request may emit a token, given its processed row, [requests] bool."""
        if self.sampler.method == "synthetic":  # which accepts any draft
            return torch.ones_like(token_ids, dtype=torch.bool)
        drawn = self.sampler.draft(row, **batch.sampling._asdict(), seeds=batch.seeds)
        possible = row.gather(1, token_ids[:, None])[:, 0] > -torch.inf
        if drawn.cutoff is not None:
            possible &= is_kept(row, token_ids, drawn.cutoff)
        is_greedy = torch.as_tensor(batch.sampling.temperature, device=row.device) == 0
        return torch.where(is_greedy, token_ids == drawn.token_ids, possible)

    def advance(self, batch: Batch, output: SamplerOutput, draft_ids: Tensor) -> Iterator[Step]:
        """Append what a step emitted to each request, and yield each request's step. This waits for the device."""
        ends = self.stops(batch.tokens, batch.lengths, output.token_ids)
        columns = (output.invalid, output.token_ids, draft_ids, ends)
        for request, invalid, *step in zip(batch.requests, *(column.tolist() for column in columns)):
            if invalid:
                raise ValueError(
                    f"target: expected finite logits, got only NaN or -inf for request {request.row}, logits processors "
                    "included"
                )
            yield request.advance(*step)

    def realigned(self, batch: Batch, before: list[int], new_token_ids: Tensor) -> Batch:
        """Return the requests that are not finished with their new tokens, and move the columns of the caches alike."""
        rows = [row for row, request in enumerate(batch.requests) if not request.finished]
        requests = [batch.requests[row] for row in rows]
        if not requests:
            return batch._replace(requests=[])
        device, after = batch.tokens.device, [request.length for request in requests]
        alignment = Alignment(rows, before, after, batch.width, device)
        self.target.realign(alignment)
        self.drafter.realign(alignment)
        return Batch(
            requests,
            alignment(torch.cat([batch.tokens, new_token_ids], dim=1), alignment.width, dim=1),
            torch.tensor(after, device=device),
            map_tensors(alignment.select, batch.sampling),
            alignment.select(batch.seeds),
        )

    def output(self, input_ids: Tensor, requests: list[Request], pad_id: int) -> GenerationOutput:
        """Return what was generated."""
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
