"""Choose the block size of two-level selection: how fast can rows be read if every block leaves its statistics?

`python tests/benchmarks/block_size.py RECORD.json` on a GPU. One warp for each 1,024 logits; a program streams through a few
blocks of one row and stores the log-sum-exp of each. 1,792 rows are a batch of 256 requests with 3 drafts; 7 rows a batch
of one. Medians over replays of a graph of 20 launches, in microseconds a launch.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

VOCAB = 151_936


@triton.jit
def block_statistics(out_ptr, logits_ptr, vocab, num_blocks, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    for index in tl.range(BLOCKS):
        block = tl.program_id(0) * BLOCKS + index
        offsets = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        logits = tl.load(logits_ptr + row * vocab + offsets, mask=offsets < vocab, other=-float("inf")).to(tl.float32)
        peak = tl.max(logits, 0)
        if block < num_blocks:
            tl.store(out_ptr + row * num_blocks + block, peak + tl.log(tl.sum(tl.exp(logits - peak), 0)))


def replay_time(function, launches: int = 20, rounds: int = 20) -> float:
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            function()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / launches)
    return statistics.median(times)


def measure(rows: int, block_size: int, blocks: int) -> float:
    logits = (2 * torch.randn(rows, VOCAB, device="cuda")).to(torch.bfloat16)
    num_blocks = triton.cdiv(VOCAB, block_size)
    out = torch.full((rows, num_blocks), float("nan"), device="cuda")
    grid = (triton.cdiv(num_blocks, blocks), rows)

    def launch():
        block_statistics[grid](out, logits, VOCAB, num_blocks, block_size, blocks, num_warps=block_size // 1024)

    time = replay_time(launch)
    padded = torch.nn.functional.pad(logits.float(), (0, num_blocks * block_size - VOCAB), value=-float("inf"))
    torch.testing.assert_close(out, padded.view(rows, num_blocks, block_size).logsumexp(2), rtol=0, atol=1e-5)
    return time


def main(record: str) -> None:
    results = {}
    for rows in (1792, 7):
        for block_size in (1024, 2048, 4096):
            times = {blocks: round(measure(rows, block_size, blocks), 1) for blocks in (1, 2, 4, 8)}
            best = min(times.values())
            rate = round(rows * VOCAB * 2 / best / 1e6, 2)
            results[f"{rows} rows, blocks of {block_size}"] = {"by blocks per program": times, "best TB/s": rate}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    about = {
        "unit": "microseconds",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": driver,
        "vocabulary": VOCAB,
        "dtype": "bfloat16",
        "results": results,
    }
    Path(record).write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
