"""Draft lengths: the measured cost of a step, and the lengths that `num_draft_tokens="auto"` plans with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from specdecode import DraftPlanner, RejectionSampler, SamplerOutput, plan
from specdecode.arguments import MOST_DRAFT_TOKENS, check_count
from specdecode.integrations.transformers.drafters import PromptLookup
from specdecode.integrations.transformers.models import CachedModel
from specdecode.sampler import Method

ROUNDS = 4
"""The number of times that each call is timed. The shortest time counts, because other programs only add to it."""

CLOCK = time.perf_counter
"""Seconds."""

FIRST_LENGTH = 4
"""The most drafts of the first step. Then a step has at most twice as many as the longest one before it."""

MEASURED: WeakKeyDictionary[Any, dict[tuple[object, ...], list[float]]] = WeakKeyDictionary()
"""Seconds of calls by model, then by everything that they depend on."""


@torch.no_grad()
def measure_cost(
    target: Any,
    draft: Any,
    *,
    num_requests: int = 1,
    num_draft_tokens: int = 16,
    method: Method | RejectionSampler = "probabilistic",
) -> Tensor:
    """Measure the seconds of a step of `generate` by its draft length: cost[1 + k] = target(k) + k draft.

    target(k) is a target call of k + 1 tokens for each request and their verification, measured at k = 0, 1, 2, 4, ... and
    `num_draft_tokens`, and interpolated. draft is a call of the draft model and the draw of a token for each request. All
    requests of a step have the same length, so with [`DraftPlanner`][specdecode.DraftPlanner] it is
    `DraftPlanner(num_draft_tokens, cost).plan(1)`.

    Times are kept for each model, so that only the first measurement takes about 30 calls of the target, and 4 of the draft
    model.

    Args:
        target: a model that `generate` takes.
        draft: such a model, or a `PromptLookup`, whose drafts cost nothing.
        num_requests: requests per step.
        num_draft_tokens: the longest length.
        method: the method or sampler that verifies.

    Returns:
        [num_draft_tokens + 2] float64 seconds on the target's device; cost[0] is not used.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument is out of range, or a model is not supported.
    """
    check_count("num_requests", num_requests)
    most = check_count("num_draft_tokens", num_draft_tokens, MOST_DRAFT_TOKENS)
    sampler = method if isinstance(method, RejectionSampler) else RejectionSampler(method)
    points = sorted({0, most} | {2**i for i in range(most.bit_length())})
    target_seconds = measured(target, "target", sampler, num_requests, points)
    draft_seconds = 0.0
    if not isinstance(draft, PromptLookup):
        (draft_seconds,) = measured(draft, "draft", sampler, num_requests, [0])
    lengths = np.arange(most + 1)
    seconds = np.interp(lengths, points, target_seconds) + lengths * draft_seconds
    return torch.tensor([seconds[0], *seconds], dtype=torch.float64, device=target.device)


def measured(model: Any, role: str, sampler: RejectionSampler, num_requests: int, lengths: list[int]) -> list[float]:
    """Return the seconds of a model's calls with these numbers of drafts, verification or drafting included."""
    cached = CachedModel(role, model)
    key = (role, sampler.method, num_requests, *lengths, model.device, model.dtype)
    times = MEASURED.setdefault(model, {})
    if key not in times:
        calls = [step(cached, sampler, num_requests, length) for length in lengths]
        rounds = [[seconds(call) for call in calls] for _ in range(1 + ROUNDS)]
        times[key] = [min(each) for each in zip(*rounds[1:])]  # the first round warms up
    return times[key]


def step(model: CachedModel, sampler: RejectionSampler, num_requests: int, num_drafts: int) -> Callable[[], object]:
    """Return a function that calls a model without context, then verifies `num_drafts` drafts, or draws one draft."""
    device = model.model.device
    tokens = torch.zeros(num_requests, num_drafts + 1, dtype=torch.int64, device=device)
    lengths = torch.full((num_requests,), num_drafts + 1, device=device)
    model.last_position = num_drafts
    options: dict[str, Any] = {"seeds": 0, "positions": torch.zeros_like(lengths)}

    def call() -> object:
        model.clear()
        logits = model.logits(tokens, lengths, keep=num_drafts + 1)
        if model.name == "draft":
            return sampler.draft(logits[:, 0], offset=0, **options).token_ids.tolist()
        return sampler(logits, tokens[:, 1:], logits[:, 1:], **options).token_ids.tolist()

    return call


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call that waits for its device."""
    start = CLOCK()
    call()
    return CLOCK() - start


class Lengths:
    """The draft length of each step, the same for all requests, planned from the steps before it.

    The first step has `num_requests` requests; `most` is the longest length.
    """

    def __init__(self, target: Any, draft: Any, sampler: RejectionSampler, num_requests: int, most: int) -> None:
        self.target, self.draft, self.sampler, self.most = target, draft, sampler, most
        self.longest = FIRST_LENGTH // 2  # so far
        self.costs: dict[int, Tensor] = {}  # by requests per step
        self.planner = DraftPlanner(most, self.cost(num_requests))

    def cost(self, num_requests: int) -> Tensor:
        """Return the cost of a step; it is measured for powers of two."""
        rounded = 1 << (num_requests - 1).bit_length()
        if rounded not in self.costs:
            self.costs[rounded] = measure_cost(
                self.target, self.draft, num_requests=rounded, num_draft_tokens=self.most, method=self.sampler
            )
        return self.costs[rounded]

    def next(self, num_requests: int) -> int:
        """Return the length of the next step."""
        cost = self.cost(num_requests)[: 2 + 2 * self.longest]
        length = int(plan(self.planner.acceptance[None], cost))
        self.longest = max(self.longest, length)
        return length

    def update(self, output: SamplerOutput) -> None:
        """Learn from a step."""
        self.planner.update(output)
