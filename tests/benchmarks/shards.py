"""Compare, on every rank, gathering the logits and verifying them with verifying the shards.

    torchrun --nproc-per-node=2 -m tests.benchmarks.shards --batch 8

measures on the GPUs through NCCL if there are enough of them, each as replays of a CUDA graph, else on CPUs through gloo. It
prints for each way the median time of a step on the slowest rank, the bytes that a step brings to each rank, and the number
of exchanges. What engines do is all-gather the shards, put them in order, and verify the whole rows on every rank. Shards
are verified by the eager backend and, on GPUs, by the Triton backend. The inputs are those of the other benchmarks.

Every way must give the same tokens: how many requests have others is printed. Of the Triton backend all outputs must be bit
for bit those of one GPU, on every rank and in a replayed graph, or the program fails.
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from specdecode import RejectionSampler, VocabShard, sharding
from tests.benchmarks.inputs import VOCAB, Inputs

BLOCK = 1024


class Traffic:
    """Counts the exchanges, and the bytes that they bring to this rank."""

    def __init__(self) -> None:
        self.exchanges = self.bytes = 0
        self.all_gather, sharding.all_gather = sharding.all_gather, self.counted

    def counted(self, tensor: Tensor, group: Any) -> Tensor:
        gathered = self.all_gather(tensor, group)
        self.exchanges += 1
        self.bytes += gathered.numel() * gathered.element_size()
        return gathered

    def of(self, step: Callable) -> tuple[int, int]:
        self.exchanges = self.bytes = 0
        step()
        return self.exchanges, self.bytes


def median_time(step: Callable, device: torch.device, rounds: int) -> float:
    """Return the median of milliseconds of a step, the largest of all ranks'."""
    for _ in range(3):
        step()
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
        step()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        distributed.barrier()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    slowest = torch.tensor(statistics.median(times), device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return slowest.item()


def replayed(step: Callable) -> Any:
    """Return the output of a step, which on a GPU a graph has written."""
    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = step()
    graph.replay()
    torch.cuda.synchronize()
    return output


def check_bits(method: str, got: Any, expected: Any, rank: int) -> None:
    """Raise unless two outputs are the same."""
    for name, mine, other in zip(expected._fields, got, expected):
        if other is not None and not torch.equal(mine.nan_to_num(nan=-7), other.nan_to_num(nan=-7)):
            raise SystemExit(f"{method}: {name} of rank {rank} is not that of one GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=None, help="truncated shards are verified by the eager backend")
    parser.add_argument(
        "--draft-logsumexp", action="store_true", help="pass what drafting returned, but not with --top-p"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--methods", nargs="+", default=["probabilistic", "strict", "block"])
    options = parser.parse_args()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    group = distributed.group.WORLD

    # Equal shards of whole blocks, so that the shards can be gathered in one call; the last one is filled up with -inf.
    local = -(-VOCAB // (size * BLOCK)) * BLOCK
    start = min(VOCAB, local * rank)
    inputs = Inputs(options.batch, options.drafts, getattr(torch, options.dtype), options.temperature, str(device))
    whole = inputs.target_logits, inputs.draft_logits
    target, draft = (logits[..., start : start + local].contiguous() for logits in whole)
    padded = [torch.nn.functional.pad(each, (0, local - each.shape[-1]), value=-torch.inf) for each in (target, draft)]

    def gathered(logits: Tensor) -> Tensor:
        """Return whole rows, as engines make them: gather, then put the shards of each row side by side."""
        shards = sharding.all_gather(logits, group)
        return shards.movedim(0, -2).reshape(*logits.shape[:-1], size * local)[..., :VOCAB]

    traffic = Traffic()
    if rank == 0:
        print(f"{size} ranks on {device.type}, {options.batch} requests, {options.drafts} drafts, {options.dtype}")
        print(f"{'':40}{'ms':>10}{'bytes':>16}{'exchanges':>12}")
    for method in options.methods:
        keywords = {"temperature": options.temperature, "seeds": torch.arange(options.batch, device=device)}
        keywords |= {"top_p": options.top_p}
        drafted, draws = inputs.drafts(method, top_p=options.top_p), method != "strict"
        if options.draft_logsumexp and draws and options.top_p is None:
            keywords |= {"draft_logsumexp": drafted.logsumexp}
        shard, plain = VocabShard(group, start, VOCAB), RejectionSampler(method)

        def gather_and_verify(plain=plain, drafted=drafted, draws=draws, keywords=keywords) -> Any:
            rows = gathered(padded[0]), drafted.token_ids, gathered(padded[1]) if draws else None
            return plain(*rows, **keywords)

        def verify_shards(sampler, drafted=drafted, draws=draws, keywords=keywords) -> Any:
            return sampler(target, drafted.token_ids, draft if draws else None, **keywords)

        ways = {"gather, then verify": gather_and_verify}
        for backend in ("eager", "triton") if on_gpu and options.top_p is None else ("eager",):
            sampler = RejectionSampler(method, backend=backend, shard=shard)
            ways[f"verify shards, {backend}"] = functools.partial(verify_shards, sampler)
        expected = gather_and_verify()
        for name, step in ways.items():
            got = step()
            different = int((expected.token_ids != got.token_ids).any(dim=1).sum())
            if name.endswith("triton"):
                check_bits(method, got, expected, rank)
                check_bits(method, replayed(step), expected, rank)
            exchanges, moved = traffic.of(step)
            milliseconds = median_time(step, device, options.rounds)
            if rank == 0:
                print(f"{f'{method}: {name}':40}{milliseconds:>10.3f}{moved:>16,}{exchanges:>12}")
                if different:
                    print(f"{method}: {different} requests have other tokens")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
