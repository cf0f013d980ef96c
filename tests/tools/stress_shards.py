"""Verify random shards on several GPUs, with ranks that are late at random: every output is to be that of one GPU.

    torchrun --nproc-per-node=2 -m tests.tools.stress_shards --seconds 120

All ranks make the same calls: of all methods, dtypes and sizes, padded and packed, with NaN and infinities, with shards of
any whole blocks, in any order of the ranks; half of them are truncated, half adjusted, a quarter both. Words travel by
all-gather and through symmetric memory. Calls are launched, or captured in a CUDA graph that is replayed several times with
new inputs. Two groups of the same ranks work at once, on two streams. A rank sleeps now and then, on the host or on the
device, before a step. A bit that differs ends the program.
"""

import argparse
import copy
import itertools
import os
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from specdecode import Adjustments, RejectionSampler, VocabShard
from tests.benchmarks.shards import check_bits
from tests.support.adjusted import SOME, adjustments_for, columns, packed, to
from tests.support.differential import case
from tests.support.kernels import SCHEDULE, given
from tests.support.packing import in_slots, packed_rows, with_counts

KINDS = {  # kind of call: log-probabilities and dtype
    "probabilistic": ("raw", torch.bfloat16),
    "given logsumexp": (None, torch.bfloat16),
    "deterministic": ("processed", torch.float16),
    "strict": (None, torch.bfloat16),
    "synthetic": ("processed", torch.bfloat16),
    "block": (None, torch.bfloat16),
    "block deterministic": (None, torch.float32),
}
LIMITS = [{"top_p": 0.9, "top_k": 40}, {"top_p": 0.95}, {"top_k": 7}, {"min_p": 0.02}, {"top_p": 0.999}]
SHAPES = [(1, 3, 3088), (5, 2, 3088), (64, 3, 9008), (130, 3, 9008), (2, 3, 151_936), (40, 4, 151_936)]
LOGITS = ("target_logits", "draft_logits")


def bounds_of(chance: random.Random, vocab: int, ranks: int) -> list[tuple[int, int]]:
    """Return where each rank's shard starts and ends: at multiples of 1,024, some empty, in any order of the ranks."""
    blocks = -(-vocab // 1024)
    cuts = sorted(chance.choices(range(blocks + 1), k=ranks - 1))
    bounds = [0, *[min(1024 * cut, vocab) for cut in cuts], vocab]
    parts = list(itertools.pairwise(bounds))
    chance.shuffle(parts)
    return parts


def hurt(chance: random.Random, call: dict[str, Any]) -> None:
    """Put NaN and infinities in some rows."""
    for name in LOGITS:
        logits = call[name]
        if logits is not None and logits.numel() and chance.random() < 0.5:
            for _ in range(3):
                place = [chance.randrange(size) for size in logits.shape[:-1]]
                tokens = torch.tensor([chance.randrange(logits.shape[-1]) for _ in range(3)], device=logits.device)
                logits[(*place, tokens)] = chance.choice([float("nan"), float("inf"), -float("inf")])
            if chance.random() < 0.3:
                logits[(*place, slice(None))] = -float("inf")


def call_of(kind: str, seed: int, shape: tuple[int, int, int], device: torch.device) -> tuple[str, dict[str, Any]]:
    """Return the method and the arguments of a random call, the same on every rank."""
    chance = random.Random(seed)
    logprobs, dtype = KINDS[kind]
    requests, drafts, vocab = shape
    batch = case(requests, drafts, vocab, dtype, seed=seed, greedy=chance.choice([0, 0.3]))
    hurt(chance, vars(batch))
    method, draft_logits, logsumexp = given(kind, batch.to(device))
    call = vars(batch.to(device)) | {"draft_logits": draft_logits, "draft_logsumexp": logsumexp, "logprobs": logprobs}
    if seed % 2 == 0:
        call |= LIMITS[(requests + drafts + len(kind) + seed % 4) % len(LIMITS)]  # as in a graph, whose numbers stay
        if logsumexp is not None:
            call["draft_cutoff"] = call["draft_token_ids"].to(torch.int64)
    if seed % 4 in (1, 2):
        which = list(SOME)[(requests + drafts + len(kind)) % len(SOME)]
        adjustments = adjustments_for(batch, which, seed)
        if adjustments.frequency_penalty is not None and seed % 8 < 4:  # else few tokens are kept: those emitted often
            adjustments = adjustments._replace(frequency_penalty=adjustments.frequency_penalty.abs())
        call["adjustments"] = to(str(device), adjustments)
    return method, call


def packed_call(call: dict[str, Any], batch: Any, seed: int) -> dict[str, Any]:
    """Return a padded call's arguments as those of a packed one, of fewer drafts for some requests."""
    chance = random.Random(seed)
    requests, drafts = call["draft_token_ids"].shape
    counts = [chance.randint(0, drafts) for _ in range(requests)]
    slots = torch.tensor(chance.sample(range(requests + 2), requests))
    names = ["draft_logits", "draft_logsumexp", "draft_cutoff", "temperature", "seeds"]
    names = [name for name in names if call.get(name) is not None]
    by_slot = {name: in_slots(call[name], slots.to(call[name].device), requests + 2) for name in names}
    rows = packed_rows(with_counts(batch, counts), counts)
    others = {name: call[name] for name in ("positions", "logprobs", "top_p", "top_k", "min_p") if name in call}
    others["slots"] = slots.to(call["seeds"].device)
    if "adjustments" in call:
        others["adjustments"] = packed(call["adjustments"], rows, counts, others["slots"], requests + 2)
    return rows | by_slot | others


def tensors_in(call: dict[str, Any]) -> Iterator[Tensor]:
    """Return the tensors among the arguments of a call."""
    for value in call.values():
        parts = value if isinstance(value, Adjustments) else (value,)
        yield from [part for part in parts if isinstance(part, Tensor)]


class Group:
    """A process group of all ranks, with a stream of its own."""

    def __init__(self, transport: str, device: torch.device) -> None:
        self.group = distributed.new_group(backend="nccl", timeout=timedelta(seconds=20), device_id=device)
        self.transport, self.device, self.stream = transport, device, torch.cuda.Stream(device)
        self.shards: dict[tuple[int, int], tuple[VocabShard, int, int]] = {}

    def shard(self, vocab: int, which: int) -> tuple[VocabShard, int, int]:
        """Return one of the ways to shard a vocabulary, and where this rank's part starts and ends."""
        if (vocab, which) not in self.shards:
            parts = bounds_of(random.Random(vocab + which), vocab, self.group.size())
            start, end = parts[self.group.rank()]
            self.shards[vocab, which] = VocabShard(self.group, start, vocab, transport=self.transport), start, end
        return self.shards[vocab, which]


def be_late(chance: random.Random) -> None:
    """Sleep now and then; each rank has its own chance."""
    if chance.random() < 0.3:
        time.sleep(chance.random() * 2e-3)
    if chance.random() < 0.3:
        torch.cuda._sleep(chance.randrange(1_000_000))


class Step:
    """A call of a shard, launched or as a graph, whose output is compared with that of one GPU."""

    def __init__(self, group: Group, kind: str, shape: tuple[int, int, int], seed: int) -> None:
        self.what = f"{kind} {shape} {group.transport} seed {seed}"
        self.group, self.kind, self.shape, self.seed = group, kind, shape, seed
        shard, self.start, self.end = group.shard(shape[2], seed % 2)
        self.method, self.call = call_of(kind, seed, shape, group.device)
        schedule = SCHEDULE if self.method == "synthetic" else None
        self.whole = RejectionSampler(self.method, backend="triton", schedule=schedule)
        self.sampler = RejectionSampler(self.method, backend="triton", schedule=schedule, shard=shard)

    def mine(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of this rank."""
        whole = {name: call[name] for name in LOGITS if call.get(name) is not None}
        shards: dict[str, Any] = {name: rows[..., self.start : self.end].contiguous() for name, rows in whole.items()}
        if "adjustments" in call:
            shards["adjustments"] = columns(call["adjustments"], self.start, self.end)
        return call | shards

    def launched(self, chance: random.Random) -> None:
        output = self.sampler(**self.mine(self.call))
        be_late(chance)
        check_bits(self.what, output, self.whole(**self.call))

    def packed(self) -> None:
        batch = case(*self.shape, KINDS[self.kind][1], seed=self.seed).to(self.group.device)
        _, draft_logits, logsumexp = given(self.kind, batch)
        others = {"draft_logits": draft_logits, "draft_logsumexp": logsumexp}
        call = packed_call(self.call | vars(batch) | others, batch, self.seed)
        check_bits(f"packed {self.what}", self.sampler.packed(**self.mine(call)), self.whole.packed(**call))

    def replayed(self, chance: random.Random, replays: int) -> None:
        static = copy.deepcopy(self.mine(self.call))
        self.sampler(**static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.group.stream):
            output = self.sampler(**static)
        for replay in range(replays):
            _, call = call_of(self.kind, self.seed + 1000 + 4 * replay, self.shape, self.group.device)
            for tensor, value in zip(tensors_in(static), tensors_in(self.mine(call)), strict=True):
                tensor.copy_(value)
            be_late(chance)
            graph.replay()
            check_bits(f"replay {self.what}", output, self.whole(**call))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--steps", type=int, default=10**9, help="end after so many calls")
    parser.add_argument("--verbose", action="store_true", help="say what is done next")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--transports", nargs="+", default=["all_gather", "symmetric_memory"])
    options = parser.parse_args()

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    own_chance, start, steps = random.Random(rank), time.monotonic(), 0
    groups = [Group(transport, device) for transport in options.transports for _ in range(2)]
    going = torch.ones(1, device=device)
    while going.item() and steps < options.steps:
        chance = random.Random(steps)
        kind = options.kinds[steps % len(options.kinds)]
        shape, transport = chance.choice(SHAPES), chance.choice(options.transports)
        pair = chance.sample([group for group in groups if group.transport == transport], k=2)
        both = [Step(group, kind, shape, 10_000 + steps + i) for i, group in enumerate(pair)]
        if rank == 0 and options.verbose:
            print(f"{time.monotonic() - start:.1f} s: {both[0].what}", flush=True)
        torch.cuda.synchronize()
        for step in both:  # without waiting for each other
            with torch.cuda.stream(step.group.stream):
                be_late(own_chance)
                for _ in range(3):
                    step.sampler(**step.mine(step.call))
        torch.cuda.synchronize()
        with torch.cuda.stream(pair[0].stream):
            both[0].launched(own_chance)
            if chance.random() < 0.5:
                both[0].packed()
            if chance.random() < 0.3:
                both[0].replayed(own_chance, 4)
        torch.cuda.synchronize()
        steps += 1
        going.fill_(time.monotonic() - start < options.seconds)
        distributed.broadcast(going, 0)
    if rank == 0:
        print(
            f"{steps} rounds on {distributed.get_world_size()} ranks in {time.monotonic() - start:.0f} s: all bits equal"
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
