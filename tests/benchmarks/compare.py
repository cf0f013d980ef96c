"""Compare checkouts on a GPU, cell by cell, interleaved: `python tests/benchmarks/compare.py BASE CHANGED`.

Each checkout runs in its own process, so that both can be timed in turns on one GPU: a change of the GPU's clock or of
the host's load then affects both. A cell is a method, a shape, a temperature, the size of the vocabulary, the kind of
rows and their truncation. Its time is the median of replays of a graph of ten calls, the minimum over rounds; its tokens
must be the same in all checkouts. Rows are made by the code beside this file for all checkouts. Rows of SmolLM2, `--rows
real --vocab 49152`, come from the file that SPECDECODE_ROWS names.

    python tests/benchmarks/compare.py ../base . --methods prob,strict --shapes 1x3,256x7 --temperatures 0.7,1 --rounds 3
    python tests/benchmarks/compare.py ../base . --vocab 49152,151936 --truncations none,top_p=.95,top_k=20:top_p=.95
    python tests/benchmarks/compare.py ../base . --stages --methods block    # after the first launch, the first two, ...

All kernels are compiled first, in many processes at once.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

METHODS = {  # name: method, with draft logits, with their logsumexp
    "prob": ("probabilistic", True, False),
    "lse": ("probabilistic", True, True),
    "deterministic": ("probabilistic", False, False),
    "strict": ("strict", False, False),
    "block": ("block", True, False),
    "block-lse": ("block", True, True),
    "sample": ("sample", False, False),
}
CALLS, REPLAYS = 10, 24


class Worker:
    """A process that runs one checkout, and answers each line with a line."""

    def __init__(self, checkout: str) -> None:
        command = [sys.executable, __file__, "--worker", checkout]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.checkout = checkout

    def ask(self, question: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer or answer.startswith("error"):
            raise RuntimeError(f"{self.checkout}: {question}: {answer or 'the process ended'}")
        return answer


def work(checkout: str) -> None:
    """Answer requests on standard input: `compile CELL`, `tokens CELL`, `time CELL` or `stages CELL`."""
    sys.path.insert(0, checkout)
    import specdecode

    assert Path(specdecode.__file__).is_relative_to(Path(checkout).resolve()), specdecode.__file__
    sys.path.insert(
        0, str(Path(__file__).resolve().parents[2])
    )  # `tests` from this checkout; `specdecode` from the other
    answers = {"compile": tokens, "tokens": tokens, "time": lambda call: f"{microseconds(call):.3f}", "stages": stages}
    for line in sys.stdin:
        question, cell = line.split(maxsplit=1)
        try:
            print(answers[question](call_of(cell)), flush=True)
        except Exception as error:
            print(f"error {type(error).__name__}: {error}".replace("\n", " "), flush=True)


@functools.lru_cache(maxsize=1)
def inputs_of(batch: int, num_draft_tokens: int, temperature: float, vocab: int, rows: str) -> Any:
    import torch

    from tests.benchmarks.inputs import Inputs

    device = "cuda" if torch.cuda.is_available() else "cpu"  # Triton's interpreter
    return Inputs(batch, num_draft_tokens, torch.bfloat16, temperature, device, rows, vocab)


def limits_of(truncation: str) -> dict[str, float]:
    """Return the options of a call, parsed from text such as `top_k=20:top_p=.95`."""
    pairs = [pair.split("=") for pair in truncation.split(":") if pair != "none"]
    return {name: int(value) if name == "top_k" else float(value) for name, value in pairs}


def call_of(cell: str) -> Callable[[], Any]:
    """Return the call that a cell names: `METHOD BATCH DRAFTS TEMPERATURE VOCAB ROWS TRUNCATION`."""
    from specdecode import RejectionSampler, sample

    name, *numbers, rows, truncation = cell.split()
    batch, num_draft_tokens, temperature = int(numbers[0]), int(numbers[1]), float(numbers[2])
    inputs, limits = inputs_of(batch, num_draft_tokens, temperature, int(numbers[3]), rows), limits_of(truncation)
    method, with_draft, with_logsumexp = METHODS[name]
    if method == "sample":
        return functools.partial(sample, inputs.target_logits[:, 0].contiguous(), temperature, seeds=0, **limits)
    draft = inputs.drafts(method, **limits)
    given = {"draft_logsumexp": draft.logsumexp} if with_logsumexp else {}
    if with_logsumexp and limits:
        given["draft_cutoff"] = draft.cutoff
    return functools.partial(
        RejectionSampler(method, backend="triton"),
        inputs.target_logits,
        draft.token_ids,
        inputs.draft_logits if with_draft else None,
        temperature=temperature,
        seeds=0,
        **given,
        **limits,
    )


def tokens(call: Callable[[], Any]) -> str:
    """Return a hash of the tokens that a call returns."""
    output = call()
    return hashlib.md5(getattr(output, "token_ids", output).cpu().numpy().tobytes()).hexdigest()


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call on the device."""
    import torch

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for _ in range(4):
        graph.replay()
    for before, after in events:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events) * 1000 / CALLS


def stages(call: Callable[[], Any]) -> str:
    """Return the time after each launch of a call; omitted launches have no result."""
    from specdecode.kernels.launch import Plan

    plans: list[Any] = []
    run = Plan.run
    Plan.run = lambda plan, *arguments: (plans.append(plan), run(plan, *arguments))[1]
    try:
        call()
    finally:
        Plan.run = run
    plan, ready, after = plans[0], plans[0].ready, []
    try:
        for count, launch in enumerate(plan.launches, start=1):
            plan.ready = ready[:count]
            after.append(f"{launch.kernel.fn.__name__} {microseconds(call):.2f}")
    finally:
        plan.ready = ready
    return ", ".join(after)


def cells(options: argparse.Namespace) -> list[str]:
    shapes = [shape.split("x") for shape in options.shapes.split(",")]
    names = (getattr(options, name).split(",") for name in ("temperatures", "vocab", "rows", "truncations", "methods"))
    products = itertools.product(shapes, *names)
    return [f"{method} {' '.join(shape)} {' '.join(numbers)}" for shape, *numbers, method in products]


def compile_all(checkouts: list[str], options: argparse.Namespace) -> None:
    """Compile the kernels of the cells into Triton's cache on disk."""

    def compile_one(job: tuple[str, str, str]) -> None:
        checkout, method, truncation = job
        worker = Worker(checkout)
        for cell in cells(options):
            if cell.split()[0] == method and cell.split()[-1] == truncation:
                worker.ask(f"compile {cell}")
        worker.process.kill()

    started = time.time()
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        jobs = itertools.product(checkouts, options.methods.split(","), options.truncations.split(","))
        list(threads.map(compile_one, jobs))
    print(f"compiled in {time.time() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", help="folders; the first is what the others are compared with")
    parser.add_argument("--methods", default=",".join(METHODS), help=", ".join(METHODS))
    parser.add_argument("--shapes", default="1x3,8x3,32x3,128x3,256x3,256x7", help="requests x drafts")
    parser.add_argument("--temperatures", default="0.7,1", help="0 is greedy")
    parser.add_argument("--vocab", default="151936", help="sizes of the vocabulary")
    parser.add_argument("--rows", default="realistic", help="realistic, flat, real")
    parser.add_argument("--truncations", default="none", help="none, or like top_k=20:top_p=.95")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", action="store_true", help="say when each launch of a step ends")
    options = parser.parse_args()
    checkouts = [str(Path(checkout).resolve()) for checkout in options.checkouts]
    compile_all(checkouts, options)
    workers = [Worker(checkout) for checkout in checkouts]
    for cell in cells(options):
        if options.stages:
            for worker in workers:
                print(f"{cell:56} {worker.checkout}: {worker.ask(f'stages {cell}')}", flush=True)
            continue
        same = len({worker.ask(f"tokens {cell}") for worker in workers}) == 1
        rounds = [[float(worker.ask(f"time {cell}")) for worker in workers] for _ in range(options.rounds)]
        base, *others = [min(times) for times in zip(*rounds)]
        changes = "".join(f"{time:9.2f} {100 * (time / base - 1):+6.1f} %" for time in others)
        print(f"{cell:56}{base:9.2f}{changes}{'' if same else '  OTHER TOKENS'}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
