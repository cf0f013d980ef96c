"""Make random calls with shards of the vocabulary on several GPUs; every bit has to equal one GPU's.

    torchrun --nproc-per-node=2 -m tests.tools.stress_shards --seconds 120

All ranks make the same calls as the tests: of every method and option, padded and packed, with NaN and infinities,
with shards of any lengths, in any order of the ranks, some of them empty. Half of the padded calls are captured in a CUDA
graph and replayed with other inputs. A different bit ends the program. Without GPUs, or with `--cpu`, ranks are processes
of a gloo group. `--backend eager` makes many calls at once; the kernels of each kind of call are compiled first.
"""

import argparse
import os
import random
import time
from typing import Any

import torch
from torch import Tensor, distributed

from specdecode import RejectionSampler, VocabShard
from tests.support.packing import sampler_of
from tests.support.sharded_calls import columns, differences, random_call, verified

VOCABULARIES = (900, 2051, 9008, 151_936)


def shard_of(vocab: int, variant: int) -> tuple[VocabShard, int, int]:
    """Return one of the divisions of a vocabulary, with the start and end of this rank's shard."""
    chance, ranks = random.Random(vocab + variant), distributed.get_world_size()
    cuts = sorted(chance.choices(range(vocab + 1), k=ranks - 1))
    parts = list(zip([0, *cuts], [*cuts, vocab]))
    chance.shuffle(parts)
    start, end = parts[distributed.get_rank()]
    return VocabShard(None, start, vocab), start, end


def replayed(sampler: RejectionSampler, call: dict[str, Any], fill: dict[str, Any]) -> Any:
    """Return the output of a captured call, replayed with the values of another call in its tensors."""
    sampler(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sampler(**call)
    for name, value in fill.items():
        if isinstance(value, Tensor):
            call[name].copy_(value)
    graph.replay()
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--backend", choices=("auto", "eager"), default="auto")
    options = parser.parse_args()
    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available() and not options.cpu
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    shards = {(vocab, variant): shard_of(vocab, variant) for vocab in VOCABULARIES for variant in range(3)}
    start, calls, replays, going = time.monotonic(), 0, 0, torch.ones(1, device=device)
    while going.item():
        for seed in range(10 * calls, 10 * calls + 10):
            vocab, chance = VOCABULARIES[seed % 4], random.Random(seed)
            shard, first, end = shards[vocab, chance.randrange(3)]
            method, call = random_call(seed, vocab, str(device))
            whole, sampler = (sampler_of(method, each, options.backend) for each in (None, shard))
            mine = columns(call, first, end, vocab, whole_drafts=chance.random() < 0.3)
            bad = differences(verified(sampler, mine), verified(whole, call))
            if not bad and on_gpu and "row_starts" not in call and chance.random() < 0.5:
                other = call | {"target_logits": call["target_logits"].flip(0)}
                static = {n: v.clone() if isinstance(v, Tensor) else v for n, v in mine.items()}
                fill = {"target_logits": mine["target_logits"].flip(0)}
                bad, replays = differences(replayed(sampler, static, fill), verified(whole, other)), replays + 1
            if bad:
                raise SystemExit(f"seed {seed}, {method}: {bad} of rank {rank} are not those of one process")
        calls += 1
        going.fill_(time.monotonic() - start < options.seconds)
        distributed.broadcast(going, 0)
    if rank == 0:
        seconds, ranks = time.monotonic() - start, distributed.get_world_size()
        print(f"{10 * calls} calls, {replays} replays on {ranks} ranks in {seconds:.0f} s: all bits equal")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
