"""Run the kernels' variants once, small, for NVIDIA's checkers of memory and barriers.

`compute-sanitizer --tool memcheck|initcheck|synccheck python -m tests.tools.sanitize` on a GPU. Most of the time is
compilation. `python -m tests.tools.sanitize 0/15` to `14/15` run a fifteenth of the calls each, and may run in parallel:
all of them, with memcheck, took seven minutes on 16 cores and one H100. Every combination of three options occurs in a
call. Results are not compared: the checker reports errors. Half of each batch is bad input: rows of NaN and infinities,
ids outside the vocabulary, invalid rows and slots.
"""

import itertools
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdecode import AcceptanceSchedule, Adjustments, RejectionSampler, backends, sample
from specdecode.kernels import plan as planning
from specdecode.kernels import tree as kernels_of_trees
from specdecode.kernels.call import plan_of
from specdecode.kernels.launch import Plan
from tests import test_tree_sampler
from tests.benchmarks.realistic import realistic_rows
from tests.support.adjusted import SOME, adjustments_for
from tests.support.batches import verification_batch
from tests.support.differential import Case, case
from tests.support.packing import fed_positions, in_slots, packed_rows, with_counts

BATCH, DRAFTS = 6, 3
SCHEDULE = AcceptanceSchedule.from_mean_rate(0.6, num_draft_tokens=DRAFTS)
NAN, INF = math.nan, math.inf
TILES = 2

CHOICES = {
    # Aligned; odd; less than a block; and enough blocks for several programs a row, where the last to finish decides.
    "vocab": (2048, 1025, 7, 33_001),
    "method_and_drafts": (
        ("strict", "no rows"),
        *itertools.product(("probabilistic", "synthetic", "block"), ("rows", "logsumexp", "own vocabulary", "no rows")),
    ),
    "way": ({"large": False}, {"large": False, "many": True}, {"large": True}),
    "temperature": ("a number", "each"),  # some of each are 0
    "limits": ("none", "top_k and top_p", "top_p each", "min_p each"),
    "logprobs": (None, "processed", "raw"),
    "layout": ("padded", "packed", "packed hostile", "packed empty"),
}


def with_all_triples(choices: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return combinations of one choice of each kind that cover any three choices of three kinds."""

    def triples(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), 3))

    everything = list(itertools.product(*[range(len(each)) for each in choices]))
    random.Random(0).shuffle(everything)
    seen: set[tuple[tuple[int, int], ...]] = set()
    taken = []
    for least_new in range(math.comb(len(choices), 3), 0, -1):  # first the combinations with many new triples
        for one in everything:
            if len(triples(one) - seen) >= least_new:
                seen |= triples(one)
                taken.append(tuple(each[i] for each, i in zip(choices, one)))
    return taken


def with_hostile_half(batch: Case) -> Case:
    """Put NaN, infinities and invalid ids into the first half of the requests, on the host."""
    target, draft, token_ids = batch.target_logits, batch.draft_logits, batch.draft_token_ids
    if len(target) < 3:
        return batch
    target[0, 0], target[0, -1] = NAN, -INF
    target[1, :, 1::2], target[1, 0, -1] = NAN, INF
    target[2, :, 0] = -INF
    if token_ids.shape[1] > 0:
        draft[0, 0], draft[1, :, 2::3], draft[2, :, -1] = -INF, NAN, INF
        token_ids[0, 0], token_ids[1, -1], token_ids[2, -1] = target.shape[2], -7, 2**31 - 1
    return batch


RUN = Plan.run
APART: dict[Plan, Plan] = {}
"""For each plan, a plan of the same launches that takes its workspace as tensors of the call."""


def run_in_parts(plan: Plan, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Run a plan with separate memory for each part of the workspace, to detect writes beyond a part."""
    values = plan.values(tensors, numbers)
    parts = {
        name: torch.empty(eval(length, plan.functions, values), dtype=dtype, device=plan.device)
        for name, (dtype, length) in plan.parts.items()
    }
    if values["zeros"]:
        assert values["zeros"] == len(parts["state"])
        parts["state"].zero_()
    if plan not in APART:
        APART[plan] = Plan(plan.device, plan.definitions, {})
        APART[plan].functions, APART[plan].launches = plan.functions, plan.launches
    RUN(APART[plan], tensors | parts, numbers)


def own_vocabulary(rows: Tensor, vocab: int) -> dict[str, Tensor]:
    """Return the rows as if over fewer tokens, and the ids of these tokens, some of them invalid or repeated."""
    size, dtype = (vocab - vocab // 3, torch.int64) if vocab % 2 else (16, torch.int32)
    ids = torch.randperm(vocab)[:size].to(dtype)
    ids[1::5], ids[2::7], ids[3::11] = ids[0].clone(), vocab, torch.iinfo(dtype).min
    return {"draft_logits": rows[..., :size].contiguous(), "draft_vocab_ids": ids}


def limits_of(kind: str) -> dict[str, Tensor | float]:
    """Return the truncation of a kind in `CHOICES`."""
    return {
        "none": {},
        "top_k and top_p": {"top_k": 3, "top_p": 0.9},
        "top_p each": {"top_p": torch.full((BATCH,), 0.9)},
        "min_p each": {"min_p": torch.full((BATCH,), 0.1)},
    }[kind]


def packed(call: dict[str, Any], batch: Case, layout: str) -> dict[str, Any]:
    """Return a call's arguments for a packed call: ragged rows and state in slots; or invalid row starts and slots."""
    counts = [i % (DRAFTS + 1) for i in range(BATCH)]
    slots = torch.tensor([2 * BATCH - 1 - 2 * i for i in range(BATCH)])
    dtype = torch.int32 if batch.target_logits.shape[2] % 2 else torch.int64
    rows = packed_rows(with_counts(batch, counts), counts, dtype)
    of_requests = {name: value for name, value in call.items() if name not in ("positions", "draft_vocab_ids")}
    result = call | {name: in_slots(value, slots, 2 * BATCH) for name, value in of_requests.items()} | rows
    result |= {"slots": slots, "positions": None, "row_positions": fed_positions(batch.positions, rows)}
    result["draft_token_ids"] = rows["draft_token_ids"][:-1]
    if layout != "packed":
        result["row_starts"] = torch.tensor([-1, 2, 10**6, 3, 9, 9, 8], dtype=dtype)
        result["slots"] = torch.tensor([99, -1, 0, 3, 2**31 - 1, 0])
    if layout == "packed empty":
        result |= {name: result[name][:0] for name in ("target_logits", "draft_token_ids", "row_positions")}
    return result


def packed_trees(given: Any, adjustments: Adjustments | None) -> dict[str, Any]:
    """Return the arguments of packed trees, one with rows and one with a slot that are none."""
    result = test_tree_sampler.packed(given, adjustments)
    result["row_starts"][1], result["slots"][3] = 2**40, -1
    return result


class Calls:
    """Runs calls on a device, or every `parts`-th call from the `part`-th on, and counts them."""

    def __init__(self, device: str, part: int = 0, parts: int = 1) -> None:
        self.device, self.part, self.parts = device, part, parts
        self.count = 0

    def is_due(self) -> bool:
        """Count a call; return whether it has to run."""
        self.count += 1
        return self.count % self.parts == self.part

    def on(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return each tensor on the device, in separate memory."""
        is_tensor = {name: isinstance(each, Tensor) for name, each in tensors.items()}
        return {name: each.to(self.device).clone() if is_tensor[name] else each for name, each in tensors.items()}

    def verify(self, method: str, call: dict[str, Any], **way: bool) -> None:
        """Verify a batch on the device, with the kernels' own function."""
        if not self.is_due():
            return
        checked = verification_batch(**{**OPTIONAL, **self.on(call)})
        schedule = SCHEDULE if method == "synthetic" else None
        backends.choose("triton", checked.target_logits).verify(method, checked, schedule, **way)

    def all_choices(self) -> None:
        """Run calls that cover every three compatible choices, and draws from their rows."""
        for vocab, (method, drafts), way, temperature, limits, logprobs, layout in with_all_triples(
            [*CHOICES.values()]
        ):
            batch = with_hostile_half(case(BATCH, DRAFTS, vocab, torch.bfloat16, seed=vocab))
            call = arguments(batch) | limits_of(limits) | {"logprobs": logprobs}
            if temperature == "a number":
                call["temperature"] = 0.7
            if drafts == "no rows":
                call["draft_logits"] = None
            if drafts == "own vocabulary":
                call |= own_vocabulary(batch.draft_logits, vocab)
            if drafts == "logsumexp":
                call["draft_logsumexp"] = torch.randn(BATCH, DRAFTS)
                call["draft_cutoff"] = None if limits == "none" else batch.draft_token_ids.long()
            self.verify(method, call if layout == "padded" else packed(call, batch, layout), **way)

    def adjusted(self) -> None:
        """Run calls with penalties, biases and masks, in each layout, large and small; and draws."""
        for vocab, kind, layout in itertools.product((1040, 1025), SOME, ("padded", "packed", "packed hostile")):
            batch = with_hostile_half(case(BATCH, DRAFTS, vocab, torch.bfloat16, seed=vocab))
            adjustments = adjustments_for(batch, kind)
            call = arguments(batch) | limits_of("top_k and top_p" if kind == "all" else "none")
            if layout != "padded":
                call = packed(call, batch, layout)
                by_slot = [in_slots(each, torch.arange(BATCH), 2 * BATCH) for each in adjustments[:-1]]
                mask = adjustments.allowed_mask
                rows = None if mask is None else mask[:1, :1].expand(1, len(call["target_logits"]), -1)[0].contiguous()
                adjustments = Adjustments(*by_slot, rows)
            for method, large in itertools.product(("strict", "probabilistic", "block"), (False, True)):
                moved = [each.to(self.device).clone() if isinstance(each, Tensor) else each for each in adjustments]
                self.verify(method, call | {"adjustments": Adjustments(*moved)}, large=large)

    def reported(self) -> None:
        """Run calls that list likeliest tokens and kept sets, with both kinds of log-probabilities."""
        choices = itertools.product(("strict", "probabilistic", "block"), ("none", "top_p each"), ("processed", "raw"))
        for (method, limits, logprobs), vocab in itertools.product(choices, (2048, 1025)):
            batch = with_hostile_half(case(BATCH, DRAFTS, vocab, torch.bfloat16, seed=vocab))
            asked = {"logprobs": logprobs, "top_logprobs": 20, "kept_sets": True}
            for layout, large in (("padded", False), ("packed hostile", True)):
                call = arguments(batch) | limits_of(limits)
                call = call if layout == "padded" else packed(call, batch, layout)
                self.verify(method, call | asked, large=large)

    def draws(self) -> None:
        """Run draws from rows, truncated or not."""
        for vocab, limits in itertools.product(CHOICES["vocab"], CHOICES["limits"]):
            batch = with_hostile_half(case(BATCH, DRAFTS, vocab, torch.bfloat16, seed=vocab))
            logits = batch.target_logits[:, 0].contiguous()
            call = self.on(
                {"logits": logits, "temperature": batch.temperature, "seeds": batch.seeds, **limits_of(limits)}
            )
            if self.is_due():
                RejectionSampler("strict", backend="triton").draft(**call)
            if self.is_due():
                sample(**call)

    def other_shapes(self) -> None:
        """Run no drafts, drafts like the target, other dtypes, only greedy, strided rows, large vocabularies."""
        others = {
            dtype: case(BATCH, DRAFTS, 1040, dtype, seed=1) for dtype in (torch.float16, torch.float32, torch.float64)
        }
        odd = with_hostile_half(case(BATCH, DRAFTS, 1025, torch.float32, seed=2))
        columns = replace(
            odd,
            target_logits=odd.target_logits.transpose(0, 2).contiguous().transpose(0, 2),
            draft_logits=odd.draft_logits.transpose(0, 2).contiguous().transpose(0, 2),
            draft_token_ids=odd.draft_token_ids.t().contiguous().t().to(torch.int32),
        )
        no_drafts = with_hostile_half(case(BATCH, 0, 2048, torch.bfloat16, seed=3))
        wide = case(2, 2, 270_001, torch.bfloat16, seed=4)
        alike = case(BATCH, DRAFTS, 20_000, torch.bfloat16, greedy=0, seed=6)
        alike = replace(alike, draft_logits=alike.target_logits[:, :DRAFTS].contiguous())
        for large in (False, True):
            for batch in others.values():
                self.verify("strict", arguments(with_hostile_half(batch)), large=large)
                self.verify("probabilistic", arguments(with_hostile_half(batch)), large=large)
            # An empty residual, for which every block is searched.
            self.verify("synthetic", arguments(alike), large=large)
            for method in ("strict", "probabilistic", "synthetic", "block"):
                self.verify(method, arguments(columns), large=large)
                self.verify(method, arguments(odd) | {"temperature": 0.0}, large=large)
                self.verify(method, arguments(no_drafts), large=large)
                self.verify(method, arguments(no_drafts) | {"logprobs": "raw"}, large=large)
                self.verify(method, arguments(wide), large=large)
                self.verify(method, arguments(wide) | {"top_p": 0.9}, large=large)

    def realistic(self) -> None:
        """Run truncated realistic rows: cutoffs among equal logits; few and many kept tokens."""
        kept = {"top_k": 20, "top_p": 0.95}, {"top_k": 50}, {"top_k": 600}, {"top_p": 0.95}, {"min_p": 0.05}
        for vocab, dtype in itertools.product((49_152, 70_001), (torch.bfloat16, torch.float16, torch.float32)):
            target = realistic_rows(2, DRAFTS + 1, vocab=vocab, generator=torch.Generator().manual_seed(0)).bfloat16()
            draft = target[:, :DRAFTS].roll(1, 0)
            call = {"target_logits": target.to(dtype), "draft_logits": draft.to(dtype), "temperature": 1.0, "seeds": 0}
            call["draft_token_ids"] = draft.argmax(-1)
            for limits, large in itertools.product(kept, (False, True)):
                self.verify("probabilistic", call | limits, large=large)

    def trees(self) -> None:
        """Trees with padding, cycles and ids out of range, in rounds and all rows at once; and siblings."""
        ways, limits = (0, 10**12), ({}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.01})
        choices = itertools.product((1040, 1025), ways, (test_tree_sampler.call, packed_trees), ("none", "all", "mask"))
        for vocab, most, layout, kind in choices:
            given = test_tree_sampler.trees(vocab, torch.bfloat16, seed=vocab)
            given.target_logits[0, 0], given.target_logits[1, :, ::2], given.target_logits[2, 0, 5] = NAN, -INF, INF
            adjustments = test_tree_sampler.adjustments_of(given, kind)
            kernels_of_trees.LOGITS_A_ROUND = dict.fromkeys(kernels_of_trees.LOGITS_A_ROUND, most)
            for truncation in limits:
                if self.is_due():
                    call = self.on(layout(given, adjustments))
                    RejectionSampler("strict", backend="triton").tree(**call, **truncation)
        for vocab, width, truncation in itertools.product(CHOICES["vocab"], (1, 2, 5, 8), limits):
            batch = with_hostile_half(case(BATCH, DRAFTS, vocab, torch.bfloat16, seed=vocab))
            if self.is_due():
                call = self.on({"logits": batch.target_logits[:, 0].contiguous(), "temperature": batch.temperature})
                RejectionSampler("strict", backend="triton").draft(**call, seeds=0, width=width, **truncation)

    def many_requests(self) -> None:
        """Run requests with many residuals for block verification to sum."""
        for vocab, large in itertools.product((32_768, 33_001), (False, True)):
            batch = with_hostile_half(case(128, DRAFTS, vocab, torch.bfloat16, greedy=0, seed=vocab))
            self.verify("block", arguments(batch), large=large)
            self.verify("block", arguments(batch) | {"draft_logsumexp": torch.randn(128, DRAFTS)}, large=large)


OPTIONAL = dict.fromkeys(("draft_logsumexp", "positions"))
NAMES = "target_logits", "draft_token_ids", "draft_logits", "temperature", "seeds", "positions"


def arguments(batch: Case) -> dict[str, Any]:
    """Return the arguments of a call."""
    return {name: getattr(batch, name) for name in NAMES}


def main(device: str, part: int = 0, parts: int = 1) -> int:
    """Run all calls, or a part of them; return their number."""
    calls = Calls(device, part, parts)
    calls.all_choices()
    calls.adjusted()
    calls.reported()
    calls.draws()
    calls.other_shapes()
    calls.realistic()
    calls.trees()
    calls.many_requests()
    planning.SUM_PROGRAMS = 1  # as if there were many requests
    plan_of.cache_clear()
    calls.many_requests()
    return calls.count


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    # Each tensor in separate memory: in a pool, memory beyond its end is mapped and initialised.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    Plan.run = run_in_parts
    # Programs with several tiles, the last beyond a row's end, as in batches too large to check.
    planning.reading_tiles = lambda *sizes: TILES
    part, parts = map(int, sys.argv[1].split("/")) if len(sys.argv) > 1 else (0, 1)
    count = main("cuda", part, parts)
    torch.cuda.synchronize()
    print(f"{count} calls" if parts == 1 else f"part {part} of {parts} of {count} calls")
