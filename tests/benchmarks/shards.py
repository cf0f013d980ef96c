"""Compare verifying the shards with exchanging logits and verifying whole rows, on several ranks.

    torchrun --nproc-per-node=2 -m tests.benchmarks.shards --shapes 1x3 256x3 --json shards.json

measures on the GPUs through NCCL if there are enough of them, else on CPUs through gloo. The inputs are those of the other
benchmarks. Engines verify whole rows, in one of two ways:

* *gather, verify*: all-gather the shards, put them side by side, and verify all requests on every rank;
* *all-to-all, verify own, gather results*: every rank gets the whole rows of some requests, verifies these, and gets the
  results of the others, see `batch_sharded`.

Both are measured twice where there are draft logits. First a rank holds its columns of the draft rows, as of the target
rows, and both are exchanged. With *whole draft rows* each rank holds all of these, and only target rows are exchanged: vLLM
gathers draft logits as it drafts, and keeps them. That exchange is not in the time. Verifying shards is the same in both
cases: it reads a rank's columns and exchanges no rows, or those that truncation needs.

A time is that of one step. On a GPU it comes from a CUDA graph of ten steps that is replayed twice without a pause: events
measure the second replay, so that no rank waits for another's start. It is the median of the rounds on the slowest rank. On
CPUs it is the host's time of one step. Beside it are the bytes that a step brings to each rank (to the first, which has the
most requests of its own), and the number of exchanges.

Every way must give the same tokens: how many requests have others is printed. Of the Triton backend all outputs must be bit
for bit those of one GPU, on every rank and in a replayed graph, or the program fails.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from specdecode import RejectionSampler, VocabShard, transports
from tests.benchmarks.batch_sharded import BatchSharded, side_by_side
from tests.benchmarks.inputs import VOCAB, Inputs

BLOCK, STEPS = 1024, 10
GATHER, ALL_TO_ALL, WHOLE = "gather, verify", "all-to-all, verify own, gather results", ", whole draft rows"
METHODS = {  # name: method, with draft logits, with their logsumexp, temperature if not the given one
    "probabilistic": ("probabilistic", True, False, None),
    "probabilistic with draft_logsumexp": ("probabilistic", True, True, None),
    "block": ("block", True, False, None),
    "strict": ("strict", False, False, None),
    "greedy": ("strict", False, False, 0.0),
}


class Traffic:
    """Counts the exchanges, and the bytes that they bring to this rank."""

    def __init__(self) -> None:
        self.exchanges = self.bytes = 0
        self.all_gather, transports.all_gather = transports.all_gather, self.counted_all_gather
        self.all_to_all, distributed.all_to_all_single = distributed.all_to_all_single, self.counted_all_to_all
        memory, exchange = transports.SymmetricMemory.memory, transports.SymmetricMemory.exchange

        def counted_memory(transport: Any, words: int) -> Any:
            self.bytes += 8 * words
            return memory(transport, words)

        def counted_exchange(transport: Any, words: Any) -> Any:
            self.exchanges += 1
            return exchange(transport, words)

        transports.SymmetricMemory.memory, transports.SymmetricMemory.exchange = counted_memory, counted_exchange

    def counted_all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        gathered = self.all_gather(tensor, group)
        self.count(gathered)
        return gathered

    def counted_all_to_all(self, received: Tensor, *arguments: Any, **keywords: Any) -> Any:
        self.count(received)
        return self.all_to_all(received, *arguments, **keywords)

    def count(self, received: Tensor) -> None:
        self.exchanges += 1
        self.bytes += received.numel() * received.element_size()

    def of(self, step: Callable) -> tuple[int, int]:
        self.exchanges = self.bytes = 0
        step()
        return self.exchanges, self.bytes


def captured(step: Callable, steps: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of some steps, and the output that the last of them writes."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            output = step()
    return graph, output


def times_on_gpu(step: Callable, rounds: int) -> list[float]:
    """Return the milliseconds of a step in each round."""
    graph, _ = captured(step, STEPS)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        distributed.barrier()
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / STEPS)
    return times


def times_on_host(step: Callable, rounds: int) -> list[float]:
    """Return the milliseconds of a step in each round."""
    times = []
    for _ in range(rounds):
        distributed.barrier()
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def median_time(step: Callable, device: torch.device, rounds: int) -> float:
    """Return the median of milliseconds of a step, the largest of all ranks'."""
    for _ in range(3):
        step()
    times = (times_on_gpu if device.type == "cuda" else times_on_host)(step, rounds)
    slowest = torch.tensor(statistics.median(times), device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return slowest.item()


def check_bits(name: str, got: Any, expected: Any) -> None:
    """Raise unless two outputs are the same."""
    for field, mine, other in zip(expected._fields, got, expected):
        if other is not None and not torch.equal(mine.nan_to_num(nan=-7), other.nan_to_num(nan=-7)):
            raise SystemExit(f"{name}: {field} of rank {distributed.get_rank()} is not that of one GPU")


def different_requests(got: Any, expected: Any) -> int:
    """Return how many requests have other tokens or another number of accepted drafts, of all ranks' the most."""
    others = (got.token_ids != expected.token_ids).any(dim=1) | (got.num_accepted != expected.num_accepted)
    most = others.sum()
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return int(most)


@functools.cache
def shard_of(start: int, transport: str) -> VocabShard:
    """Return this rank's shard, the same for all cases: each has memory of its own."""
    return VocabShard(None, start, VOCAB, transport=transport)


class Case:
    """The shards of one batch on this rank, and the ways to verify them."""

    def __init__(self, batch: int, drafts: int, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device, self.batch = options, device, batch
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        # Equal shards of whole blocks, so that the shards can be gathered in one call; the last one is filled up with -inf.
        self.local = -(-VOCAB // (self.size * BLOCK)) * BLOCK
        self.start = min(VOCAB, self.local * self.rank)
        self.inputs = Inputs(batch, drafts, getattr(torch, options.dtype), options.temperature, str(device))
        whole = self.inputs.target_logits, self.inputs.draft_logits
        self.shards = [rows[..., self.start : self.start + self.local].contiguous() for rows in whole]
        self.padded = [
            torch.nn.functional.pad(rows, (0, self.local - rows.shape[-1]), value=-torch.inf) for rows in self.shards
        ]

    def gathered(self, rows: Tensor) -> Tensor:
        """Return whole rows, as engines make them: gather, then put the shards of each row side by side."""
        return side_by_side(transports.all_gather(rows, distributed.group.WORLD))[..., :VOCAB]

    def ways(self, name: str, transports: list[str]) -> dict[str, Callable]:
        """Return the ways to verify by a method: the first is what the others are compared with."""
        method, draws, has_logsumexp, temperature = METHODS[name]
        truncation = {"top_k": self.options.top_k, "top_p": self.options.top_p}
        temperature = self.options.temperature if temperature is None else temperature
        keywords: dict[str, Any] = {"temperature": temperature, **truncation}
        keywords["seeds"] = torch.arange(self.batch, device=self.device)
        draft = self.inputs.drafts(method, **truncation)
        if has_logsumexp:
            keywords |= {"draft_logsumexp": draft.logsumexp, "draft_cutoff": draft.cutoff}
        drafts, whole = draft.token_ids, self.inputs.draft_logits if draws else None
        plain, sharded = RejectionSampler(method), BatchSharded(distributed.group.WORLD, self.batch)
        own_drafts, own_whole = drafts[sharded.own], whole[sharded.own] if draws else None
        own = {key: value[sharded.own] if isinstance(value, Tensor) else value for key, value in keywords.items()}

        def gather_and_verify(exchanges_drafts: bool) -> Any:
            target_rows = self.gathered(self.padded[0])
            return plain(target_rows, drafts, self.gathered(self.padded[1]) if exchanges_drafts else whole, **keywords)

        def verify_own(exchanges_drafts: bool) -> Any:
            target_rows = sharded.own_rows(self.padded[0])[..., :VOCAB]
            draft_rows = sharded.own_rows(self.padded[1])[..., :VOCAB] if exchanges_drafts else own_whole
            output = plain(target_rows, own_drafts, draft_rows, **own) if sharded.count else None
            return sharded.gather(output, drafts)

        ways = {
            "verify whole rows": functools.partial(plain, self.inputs.target_logits, drafts, whole, **keywords),
            GATHER: functools.partial(gather_and_verify, draws),
            ALL_TO_ALL: functools.partial(verify_own, draws),
        }
        if draws:
            ways[GATHER + WHOLE] = functools.partial(gather_and_verify, False)
            ways[ALL_TO_ALL + WHOLE] = functools.partial(verify_own, False)
        mine = self.shards[0], drafts, self.shards[1] if draws else None
        for backend in self.options.backends:
            for transport in transports if backend == "triton" else transports[:1]:
                sampler = RejectionSampler(method, backend=backend, shard=shard_of(self.start, transport))
                ways[f"shards, {backend}, {transport}"] = functools.partial(sampler, *mine, **keywords)
        return ways


def measure(case: Case, name: str, traffic: Traffic, transports: list[str]) -> list[dict[str, Any]]:
    """Check and time all ways of a method; return a result for each."""
    results: list[dict[str, Any]] = []
    ways = case.ways(name, transports)
    expected = next(iter(ways.values()))()
    for way, step in ways.items():
        outputs = [step()]
        if case.device.type == "cuda":
            graph, replayed = captured(step, 1)
            graph.replay()
            torch.cuda.synchronize()
            outputs.append(replayed)
        different = max(different_requests(got, expected) for got in outputs)
        if "triton" in way:
            for got in outputs:
                check_bits(name, got, expected)
        exchanges, moved = traffic.of(step)
        milliseconds = median_time(step, case.device, case.options.rounds)
        result = {
            "method": name,
            "way": way,
            "us": round(1e3 * milliseconds, 2),
            "bytes": moved,
            "exchanges": exchanges,
        }
        results.append({"batch": case.batch, "drafts": case.inputs.draft_logits.shape[1]} | result)
        if case.rank == 0:
            print(f"{case.batch:>4}{name:>36}  {way:57}{result['us']:>10.1f}{moved:>14,}{exchanges:>4}", flush=True)
            if different:
                print(f"{name}, {way}: {different} requests have other tokens")
    return results


def environment(device: torch.device) -> dict[str, Any]:
    """Return what the times depend on."""
    if device.type == "cpu":
        return {"torch": torch.__version__}
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    names = {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return names | {"nccl": nccl, "torch": torch.__version__, "triton": triton.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1x3"], help="requests x drafts")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--backends", nargs="+", default=None, help="eager, triton")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-k", type=int, default=None, help="of target rows and draft rows")
    parser.add_argument("--top-p", type=float, default=None, help="of target rows and draft rows")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    options.backends = options.backends or ["triton" if on_gpu else "eager"]

    record: dict[str, Any] = environment(device) | {"ranks": size, "results": []}
    traffic, ways = Traffic(), ["all_gather"]
    if on_gpu:
        ways.append("symmetric_memory")
    for shape in options.shapes:
        batch, drafts = map(int, shape.split("x"))
        case = Case(batch, drafts, options, device)
        for name in options.methods:
            record["results"] += measure(case, name, traffic, ways)
            if options.json and rank == 0:
                options.json.write_text(json.dumps(record, indent=1))
        del case
    shard_of.cache_clear()  # a group of gloo that outlives this aborts the process
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
