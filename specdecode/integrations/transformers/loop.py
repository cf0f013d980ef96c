"""The loop: every step drafts, verifies all drafts in one call of the target, and makes room for the next step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdecode import AcceptanceStats, RejectionSampler, SamplerOutput, Sampling
from specdecode.integrations.transformers.drafters import Drafter, Drafts
from specdecode.integrations.transformers.generation_config import Processors
from specdecode.integrations.transformers.models import CachedModel
from specdecode.integrations.transformers.outputs import GenerationOutput, Step, padded
from specdecode.integrations.transformers.requests import Alignment, Batch, Request, map_tensors


@dataclass
class Loop:
    """What stays the same from step to step, for all requests."""

    target: CachedModel
    drafter: Drafter
    sampler: RejectionSampler
    num_draft_tokens: int
    stop_ids: list[int]
    accept_stop_tokens: bool
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
        most = [min(self.num_draft_tokens, request.limit - request.length - 1) for request in batch.requests]
        drafts = self.drafter.draft(batch, max(most))
        allowed = torch.tensor(most, device=batch.tokens.device)
        draft_ids = cut(drafts.token_ids, allowed, self.stop_ids, self.accept_stop_tokens)
        output = self.verify(batch, drafts, draft_ids)
        for step in advance(batch.requests, output, draft_ids, self.stop_ids):
            if self.on_step is not None:
                self.on_step(step)
        return self.realigned(batch, before, output.token_ids)

    def verify(self, batch: Batch, drafts: Drafts, draft_ids: Tensor) -> SamplerOutput:
        """Score all drafts with the target, and let the sampler decide."""
        num_drafts = draft_ids.shape[1]
        candidates = torch.cat([batch.tokens, drafts.token_ids.clamp(min=0)], dim=1)
        logits = self.target.logits(candidates, batch.lengths + num_drafts, keep=num_drafts + 1)
        output = self.sampler(
            self.processors.of_batch(logits, candidates, batch),
            draft_ids,
            drafts.logits,
            **batch.sampling._asdict(),
            seeds=batch.seeds,
            positions=batch.lengths,
            draft_logsumexp=drafts.logsumexp,
            draft_cutoff=drafts.cutoff,
        )
        if self.stats is not None:
            self.stats.update(output)
        return output

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


def cut(draft_ids: Tensor, allowed: Tensor, stop_ids: list[int], with_stop: bool) -> Tensor:
    """End each request's drafts (with -1) at the number allowed, and after a stop token or before it."""
    columns = torch.arange(draft_ids.shape[1], device=draft_ids.device)
    stops = torch.isin(draft_ids, torch.tensor(stop_ids, dtype=torch.int64, device=draft_ids.device))
    stopped = stops.cumsum(1) > (stops if with_stop else 0)
    return draft_ids.masked_fill(stopped | (columns >= allowed[:, None]), -1)


def advance(requests: list[Request], output: SamplerOutput, draft_ids: Tensor, stop_ids: list[int]) -> Iterator[Step]:
    """Append what a step emitted to each request, and yield each request's step. This waits for the device."""
    num_drafts = draft_ids.shape[1]
    columns = torch.cat([output.invalid[:, None], output.token_ids, draft_ids], dim=1)
    for request, (invalid, *ids) in zip(requests, columns.tolist()):
        if invalid:
            raise ValueError(
                f"target: expected finite logits, got only NaN or -inf for request {request.row}, logits processors included"
            )
        yield request.advance(ids[: num_drafts + 1], ids[num_drafts + 1 :], stop_ids)
