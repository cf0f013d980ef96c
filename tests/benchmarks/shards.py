"""Compare gathering shards of the vocabulary with the exchange of whole rows, on several ranks.

    torchrun --nproc-per-node=2 -m tests.benchmarks.shards --shapes 1x3 256x3 --json shards.json

measures on the GPUs through NCCL if there are enough of them, otherwise on CPUs through gloo. The inputs are the same as
in other benchmarks. The ways to verify:

* *one GPU*: it has all rows, and nothing is exchanged;
* *gather*: all-gather and concatenate the shards, and verify all requests on every rank, as engines do by default;
* *exchange*: [`VocabShard`][specdecode.VocabShard], an all-to-all of rows and an all-gather of results.

Both are measured twice where there are draft logits: with the rank's columns of draft rows, and with *whole draft rows* on
every rank, as in vLLM, which gathers draft logits as it drafts. The time of that gather is not included.

A time is for one step. On a GPU it comes from a CUDA graph of ten steps that is replayed twice without a pause: events
measure the second replay, so that no rank waits for another's start. The median of rounds on the slowest rank counts. On
CPUs it is the host's time of one step. The program fails unless all outputs equal one GPU's bit for bit, on every rank
and in a replayed graph.
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

from specdecode import RejectionSampler, VocabShard
from specdecode.sharding import all_gather
from tests.benchmarks.inputs import Inputs
from tests.support.sharded_calls import differences

STEPS = 10
METHODS = {  # name: method, with draft logits, with their logsumexp, temperature if fixed
    "probabilistic": ("probabilistic", True, False, None),
    "probabilistic with draft_logsumexp": ("probabilistic", True, True, None),
    "block": ("block", True, False, None),
    "strict": ("strict", False, False, None),
    "greedy": ("strict", False, False, 0.0),
}
ONE, GATHER, EXCHANGE, WHOLE = "one GPU", "gather", "exchange", ", whole draft rows"


def captured(step: Callable, steps: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of some steps, and the output of the last step."""
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
    """Return the median milliseconds of a step, the maximum over ranks."""
    for _ in range(3):
        step()
    times = (times_on_gpu if device.type == "cuda" else times_on_host)(step, rounds)
    slowest = torch.tensor(statistics.median(times), device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return slowest.item()


def side_by_side(shards: Tensor) -> Tensor:
    """Return whole rows, [..., ranks * columns], given each rank's columns, [ranks, ..., columns]."""
    return shards.movedim(0, -2).flatten(-2)


class Case:
    """The shards of one batch on this rank, and the ways to verify them."""

    def __init__(self, batch: int, drafts: int, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device, self.batch = options, device, batch
        rank, size = distributed.get_rank(), distributed.get_world_size()
        self.inputs = Inputs(batch, drafts, getattr(torch, options.dtype), options.temperature, str(device))
        vocab = self.inputs.target_logits.shape[-1]
        local = vocab // size  # equal shards, so that they can be gathered in one call
        if vocab % size:
            raise SystemExit(f"the vocabulary of {vocab} tokens has no {size} equal shards")
        whole = self.inputs.target_logits, self.inputs.draft_logits
        self.columns = [rows[..., local * rank : local * (rank + 1)].contiguous() for rows in whole]
        self.shard = VocabShard(None, local * rank, vocab)

    def ways(self, name: str) -> dict[str, Callable]:
        """Return the ways to verify by a method; the others are compared with the first."""
        method, draws, has_logsumexp, temperature = METHODS[name]
        truncation = {"top_k": self.options.top_k, "top_p": self.options.top_p}
        temperature = self.options.temperature if temperature is None else temperature
        keywords: dict[str, Any] = {"temperature": temperature, **truncation}
        keywords["seeds"] = torch.arange(self.batch, device=self.device)
        draft = self.inputs.drafts(method, **truncation)
        if has_logsumexp:
            keywords |= {"draft_logsumexp": draft.logsumexp, "draft_cutoff": draft.cutoff}
        drafts, whole = draft.token_ids, self.inputs.draft_logits if draws else None
        columns, plain = self.columns[1] if draws else None, RejectionSampler(method)
        sharded = RejectionSampler(method, shard=self.shard)

        def gathered(rows: Tensor) -> Tensor:
            return side_by_side(all_gather(rows, distributed.group.WORLD))

        def gather(draft_rows: Callable[[], Tensor | None]) -> Any:
            return plain(gathered(self.columns[0]), drafts, draft_rows(), **keywords)

        ways = {
            ONE: functools.partial(plain, self.inputs.target_logits, drafts, whole, **keywords),
            GATHER: functools.partial(gather, lambda: None if columns is None else gathered(columns)),
            EXCHANGE: functools.partial(sharded, self.columns[0], drafts, columns, **keywords),
        }
        if draws:
            ways[GATHER + WHOLE] = functools.partial(gather, lambda: whole)
            ways[EXCHANGE + WHOLE] = functools.partial(sharded, self.columns[0], drafts, whole, **keywords)
        return ways


def measure(case: Case, name: str) -> list[dict[str, Any]]:
    """Check and time all ways of a method; return a result for each."""
    ways, results = case.ways(name), []
    expected = ways[ONE]()
    for way, step in ways.items():
        outputs = [step()]
        if case.device.type == "cuda":
            graph, replayed = captured(step, 1)
            graph.replay()
            torch.cuda.synchronize()
            outputs.append(replayed)
        for got in outputs:
            if fields := differences(got, expected):
                raise SystemExit(f"{name}, {way}: {fields} of rank {distributed.get_rank()} are not those of one GPU")
        us = round(1e3 * median_time(step, case.device, case.options.rounds), 2)
        drafts = case.inputs.draft_logits.shape[1]
        results.append({"batch": case.batch, "drafts": drafts, "method": name, "way": way, "us": us})
        if distributed.get_rank() == 0:
            print(f"{case.batch:>4}{name:>36}  {way:30}{us:>10.1f}", flush=True)
    return results


def environment(device: torch.device) -> dict[str, Any]:
    """Return the environment of the times: torch, GPU, driver, NCCL."""
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

    record: dict[str, Any] = environment(device) | {"ranks": size, "results": []}
    for shape in options.shapes:
        batch, drafts = map(int, shape.split("x"))
        case = Case(batch, drafts, options, device)
        for name in options.methods:
            record["results"] += measure(case, name)
            if options.json and rank == 0:
                options.json.write_text(json.dumps(record, indent=1))
        del case
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
