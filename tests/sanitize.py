"""Run every variant of the kernels once, small, for NVIDIA's checkers of memory and barriers.

`compute-sanitizer --tool memcheck|initcheck|synccheck python tests/sanitize.py` on a GPU; most of the time goes into
compiling, so `python tests/sanitize.py 0/4` to `3/4` make a quarter of the calls each. Results are not compared: the
checker reports errors. Half of each batch is bad input: rows of NaN and infinities, ids outside the vocabulary.
"""

import inspect
import itertools
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

from specdecode import AcceptanceSchedule, RejectionSampler, backends, sample
from specdecode.batch import VerificationBatch
from specdecode.kernels import plan as planning
from specdecode.kernels.launch import Plan
from tests.differential import Case, case
from tests.packing import in_slots, packed_rows, with_counts

BATCH, DRAFTS = 6, 3
VOCABS = [2048, 1025, 7, 33_001]
"""Aligned; odd; less than a block; and enough blocks for several programs a row, of which the last to finish decides."""

TILES = 2
METHODS = ["strict", "probabilistic", "synthetic", "block"]
SCHEDULE = AcceptanceSchedule.from_mean_rate(0.6, num_draft_tokens=DRAFTS)
NAN, INF = math.nan, math.inf
OTHERS = "top_k", "top_p", "min_p", "draft_cutoff", "logprobs", "draft_vocab_ids"


def with_hostile_half(batch: Case) -> Case:
    """Put NaN, infinities and ids that are no tokens into the first half of the requests, on the host."""
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


def run_in_parts(plan: Plan, tensors: dict[str, Tensor | None], numbers: dict[str, float]) -> None:
    """Run a plan with a workspace that is not one piece: so what is written beyond a part is seen."""
    parts = {name: torch.empty(size, dtype=dtype, device=plan.device) for name, (dtype, size) in plan.parts.items()}
    if plan.zeros:
        assert plan.zeros == len(parts["state"])
        parts["state"].zero_()
    if not plan.ready:
        plan.prepare([*tensors, *parts, *numbers])
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in (*tensors.values(), *parts.values())]
    plan.launch((*addresses, *numbers.values()))


class Calls:
    """Make calls on a device, or every `parts`-th of them from the `part`-th on, and count them."""

    def __init__(self, device: str, part: int = 0, parts: int = 1) -> None:
        self.device, self.part, self.parts = device, part, parts
        self.count = 0

    def is_due(self) -> bool:
        """Count a call; return whether it is one of those to make."""
        self.count += 1
        return self.count % self.parts == self.part

    def sampler(self, method: str) -> RejectionSampler:
        schedule = SCHEDULE if method == "synthetic" else None
        return RejectionSampler(method, backend="triton", schedule=schedule)

    def draft(self, method: str, logits: Tensor, *scalars: Tensor | float) -> Tensor:
        """Draw a token per row; return the logsumexp."""
        self.count += 1
        return self.sampler(method).draft(logits, *scalars).logsumexp

    def verify(self, method: str, batch: Case, with_draft: bool = True, **options: Tensor | bool | str) -> None:
        """Verify a batch on the device, by the kernels' own entry; `options` are its."""
        if not self.is_due():
            return
        logsumexp = options.pop("draft_logsumexp", None)
        others = {name: options.pop(name) for name in OTHERS if name in options}
        scalars = options.pop("temperature", batch.temperature), batch.seeds, batch.positions
        draft = batch.draft_logits if with_draft else None
        tensors = batch.target_logits, batch.draft_token_ids, draft, logsumexp
        checked = VerificationBatch.check(*tensors, *scalars, **others)
        kernels = backends.choose("triton", batch.target_logits)
        kernels.verify(method, checked, self.sampler(method).schedule, **options)

    def all_variants(self, vocab: int) -> None:
        """Every method, with and without what is optional, deciding while reading and after it."""
        batch = with_hostile_half(case(BATCH, DRAFTS, vocab, torch.bfloat16, seed=vocab)).to(self.device)
        for temperature in (0.7, batch.temperature):  # the tensor holds zeros
            scalars = temperature, batch.seeds, batch.positions
            columns = [self.draft("probabilistic", batch.draft_logits[:, i], *scalars) for i in range(DRAFTS)]
            logsumexp = torch.stack(columns, dim=1)
            self.draft("strict", batch.draft_logits[:, 0], *scalars)
            if self.is_due():
                sample(batch.target_logits[:, 0], *scalars)
            for logsumexps in (None, logsumexp):  # the others have but one way to search
                self.verify(
                    "probabilistic", batch, draft_logsumexp=logsumexps, temperature=temperature, large=False, many=True
                )
            for method, large in itertools.product(METHODS, (False, True)):
                options = {"temperature": temperature, "large": large}
                self.verify(method, batch, **options)
                self.verify(method, batch, draft_logsumexp=logsumexp, **options)
                self.verify(method, batch, with_draft=False, **options)
                self.verify(method, batch, top_k=5, top_p=0.9, **options)
                for logprobs in ("processed", "raw"):
                    self.verify(method, batch, logprobs=logprobs, **options)
                    self.verify(method, batch, with_draft=False, top_k=5, logprobs=logprobs, **options)
                cutoffs = {"draft_cutoff": batch.draft_token_ids.long()}
                self.verify(method, batch, top_k=300, draft_logsumexp=logsumexp, **cutoffs, **options)
                self.verify(method, batch, min_p=torch.full((BATCH,), 0.1, device=self.device), **options)

    def other_shapes(self) -> None:
        """No drafts, drafts like the target, other dtypes, greedy alone, rows that are not dense, large vocabularies."""
        for large in (False, True):
            for dtype in (torch.float16, torch.float32, torch.float64):
                batch = with_hostile_half(case(BATCH, DRAFTS, 1040, dtype, seed=1)).to(self.device)
                self.verify("strict", batch, large=large)
                self.verify("probabilistic", batch, large=large)
            batch = with_hostile_half(case(BATCH, DRAFTS, 1025, torch.float32, seed=2)).to(self.device)
            columns = replace(
                batch,
                target_logits=batch.target_logits.transpose(0, 2).contiguous().transpose(0, 2),
                draft_logits=batch.draft_logits.transpose(0, 2).contiguous().transpose(0, 2),
                draft_token_ids=batch.draft_token_ids.t().contiguous().t().to(torch.int32),
            )
            no_drafts = with_hostile_half(case(BATCH, 0, 2048, torch.bfloat16, seed=3)).to(self.device)
            wide = case(2, 2, 270_001, torch.bfloat16, seed=4).to(self.device)
            alike = case(BATCH, DRAFTS, 20_000, torch.bfloat16, greedy=0, seed=6).to(self.device)
            alike = replace(alike, draft_logits=alike.target_logits[:, :DRAFTS].contiguous())
            self.verify("synthetic", alike, large=large)  # a residual of nothing, of which every block is looked at
            for method in METHODS:
                self.verify(method, columns, large=large)
                self.verify(method, batch, temperature=0.0, large=large)
                self.verify(method, no_drafts, large=large)
                self.verify(method, no_drafts, large=large, logprobs="raw")
                self.verify(method, wide, large=large)

    def many_requests(self) -> None:
        """Requests of which block verification has many residuals to sum."""
        for vocab in (32_768, 33_001):
            batch = with_hostile_half(case(128, DRAFTS, vocab, torch.bfloat16, greedy=0, seed=vocab)).to(self.device)
            scalars = batch.temperature, batch.seeds, batch.positions
            columns = [self.draft("block", batch.draft_logits[:, i], *scalars) for i in range(DRAFTS)]
            for large in (False, True):
                self.verify("block", batch, large=large)
                self.verify("block", batch, draft_logsumexp=torch.stack(columns, dim=1), large=large)

    def draft_vocabularies(self, vocab: int) -> None:
        """Draft rows over tokens of their own, of whose ids some are none or there before."""
        batch = with_hostile_half(case(BATCH, DRAFTS, vocab, torch.bfloat16, seed=7)).to(self.device)
        for size, dtype in ((vocab - vocab // 3, torch.int64), (min(vocab, 16), torch.int32)):
            rows = batch.draft_logits[..., :size].contiguous()
            ids = torch.randperm(vocab, device=self.device)[:size].to(dtype)
            ids[1::5], ids[2::7], ids[3::11] = ids[0].clone(), vocab, torch.iinfo(dtype).min
            narrow, vocabulary = replace(batch, draft_logits=rows), {"draft_vocab_ids": ids}
            scalars = batch.temperature, batch.seeds, batch.positions
            columns = [self.draft("probabilistic", rows[:, i], *scalars) for i in range(DRAFTS)]
            given = {"draft_logsumexp": torch.stack(columns, dim=1)}
            cutoffs = {"draft_cutoff": batch.draft_token_ids.long()}
            for method, large in itertools.product(("probabilistic", "synthetic", "block"), (False, True)):
                self.verify(method, narrow, large=large, logprobs="raw", **vocabulary)
                self.verify(method, narrow, large=large, **vocabulary, **given)
                self.verify(method, narrow, large=large, top_p=0.9, **vocabulary)
                self.verify(method, narrow, large=large, top_k=3, **vocabulary, **given, **cutoffs)
            self.verify("probabilistic", narrow, large=False, many=True, **vocabulary)

    def packed(self, methods: list[str]) -> None:
        """Rows of a ragged batch packed without gaps, state in slots; in every second call both are no such places."""
        for vocab, dtype in ((2048, torch.int32), (1025, torch.int64)):
            batch = case(BATCH, DRAFTS, vocab, torch.bfloat16, seed=5)
            counts = [i % (DRAFTS + 1) for i in range(BATCH)]
            slots = torch.tensor([2 * BATCH - 1 - 2 * i for i in range(BATCH)])
            batch.draft_token_ids.clamp_(min=0)
            rows = packed_rows(with_counts(batch, counts), counts, dtype)
            by_slot = {name: in_slots(getattr(batch, name), slots, 2 * BATCH) for name in BY_SLOT}
            rows, by_slot = on(rows, self.device), on(by_slot, self.device)
            wrong = torch.tensor([-1, 2, 10**6, 3, 9, 9, 8], dtype=dtype), torch.tensor([99, -1, 0, 3, 2**31 - 1, 0])
            hostile = dict(zip(("row_starts", "slots"), (each.to(self.device) for each in wrong)))
            nothing = rows["target_logits"][:0].clone(), rows["draft_token_ids"][:0].clone()
            none = dict(zip(("target_logits", "draft_token_ids"), nothing))
            limits = {"top_p": torch.full((2 * BATCH,), 0.9, device=self.device)}
            numbers = {"positions": batch.positions.to(self.device), "slots": slots.to(self.device)}
            for method, large in itertools.product(methods, (False, True)):
                sound = {**rows, **by_slot, **numbers}
                for call in (sound, {**sound, **hostile}, {**sound, **hostile, **none}, {**sound, **hostile, **limits}):
                    self.verify_packed(method, call, large)
                    self.verify_packed(method, {**call, "draft_logits": None}, large)
                few = {"draft_logits": by_slot["draft_logits"][..., :100].clone()}
                ids = {"draft_vocab_ids": torch.arange(-9, 91, device=self.device)}
                self.verify_packed(method, {**sound, **hostile, **limits, **few, **ids}, large)

    def verify_packed(self, method: str, call: dict[str, Any], large: bool) -> None:
        """Make a packed call, by the kernels' own entry."""
        if not self.is_due():
            return
        arguments = {**dict.fromkeys(inspect.signature(VerificationBatch.check).parameters), **call}
        kernels = backends.choose("triton", call["target_logits"])
        kernels.verify(method, VerificationBatch.check(**arguments), self.sampler(method).schedule, large=large)


BY_SLOT = "draft_logits", "temperature", "seeds"


def on(tensors: dict[str, Any], device: str) -> dict[str, Any]:
    """Each tensor on a device, in memory of its own."""
    return {name: each.to(device).clone() if isinstance(each, Tensor) else each for name, each in tensors.items()}


def main(device: str, vocabs: list[int], part: int = 0, parts: int = 1) -> int:
    """Make all calls, or a part of them; return how many there are."""
    calls = Calls(device, part, parts)
    for vocab in vocabs:
        calls.all_variants(vocab)
        calls.draft_vocabularies(vocab)
    calls.other_shapes()
    calls.many_requests()
    calls.packed(METHODS)
    planning.SUM_PROGRAMS = 1  # as if there were many requests
    planning.plan_step.cache_clear()
    calls.packed(["block"])
    return calls.count


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    # Each tensor in memory of its own: in a pool, what lies beyond its end is mapped, and has been written before.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    Plan.run = run_in_parts
    # Programs that go round several times, and the last of a row beyond its end, as in batches too large to check.
    planning.reading_tiles = lambda *sizes: TILES
    part, parts = map(int, sys.argv[1].split("/")) if len(sys.argv) > 1 else (0, 1)
    count = main("cuda", VOCABS, part, parts)
    torch.cuda.synchronize()
    print(f"{count} calls" if parts == 1 else f"part {part} of {parts} of {count} calls")
