"""On a GPU: no call synchronises, captured calls can be replayed with new inputs, and the tokens equal those of the CPU.

Also: the kernels compile for other GPUs than that of the machine.
"""

import os
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import specdecode
from specdecode import AcceptanceSchedule, AcceptanceStats, RejectionSampler, sample
from tests.conftest import BACKENDS, HAS_TRITON, ON_GPU
from tests.support.adjusted import adjustments_for, to
from tests.support.differential import case, like_a_device

ROOT = Path(__file__).parents[1]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA_BACKENDS = [backend for backend, device in BACKENDS if device == "cuda"]
SCHEDULE = AcceptanceSchedule.from_mean_rate(0.6, num_draft_tokens=3)
SAMPLERS = {
    "strict": {"method": "strict"},
    "probabilistic": {"method": "probabilistic"},
    "block": {"method": "block"},
    "synthetic": {"method": "synthetic", "schedule": SCHEDULE},
}


def call(sampler, batch):
    return sampler(
        batch.target_logits,
        batch.draft_token_ids,
        batch.draft_logits,
        temperature=batch.temperature,
        seeds=batch.seeds,
        positions=batch.positions,
    )


def call_packed(sampler, batch, row_starts, slots):
    """Take the rows of a batch as one row after another, each with its likeliest token, and requests from its slots."""
    rows = batch.target_logits.flatten(0, 1)
    return sampler.packed(
        rows,
        rows.argmax(dim=1).index_fill(0, torch.arange(0, len(rows), 9, device=rows.device), -1),
        row_starts,
        batch.draft_logits,
        num_draft_tokens=3,
        slots=slots,
        temperature=batch.temperature,
        seeds=batch.seeds,
        positions=batch.positions,
    )


def places(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row starts and slots of 16 requests of up to three drafts, where there are 64 rows; some have no rows."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 5, (16,), generator=generator)
    row_starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to("cuda", torch.int32)
    return row_starts, torch.randint(0, 16, (16,), generator=generator).to("cuda")


@contextmanager
def synchronising_raises():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", SAMPLERS)
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("with_logits", [True, False], ids=["draft logits", "no draft logits"])
def test_masking_all_rows_gives_what_reading_those_that_matter_does(method, drafts, with_logits):
    # A host skips rows; a device, which cannot count them without waiting, computes all and masks. Shown here on the CPU.
    batch = case(60, drafts, 1500, torch.float32)
    if not with_logits:
        batch = replace(batch, draft_logits=None)
    sampler = RejectionSampler(**SAMPLERS[method])
    expected = call(sampler, batch)
    with like_a_device():
        masked = call(sampler, batch)
    for got, want in zip(masked[:4], expected):
        assert torch.equal(got, want)


@needs_cuda
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("method", SAMPLERS)
def test_no_call_waits_for_the_device(backend, method):
    batch = case(16, 3, 3000, torch.bfloat16).to("cuda")
    sampler = RejectionSampler(**SAMPLERS[method], backend=backend)
    stats = AcceptanceStats(num_draft_tokens=3, device="cuda")
    call(sampler, batch)
    with synchronising_raises():
        stats.update(call(sampler, batch))
        sampler(batch.target_logits, batch.draft_token_ids, temperature=0.0, seeds=3)
        sampler.draft(batch.draft_logits[:, 0], batch.temperature)
        sample(batch.target_logits[:, 0], 0.7)
    call_packed(sampler, batch, *(where := places(0)))
    with synchronising_raises():
        stats.update(call_packed(sampler, batch, *where))


@needs_cuda
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("method", SAMPLERS)
def test_replays_see_fresh_inputs(backend, method):
    sampler = RejectionSampler(**SAMPLERS[method], backend=backend)
    batches = [case(16, 3, 3000, torch.bfloat16, seed=seed).to("cuda") for seed in range(4)]
    static = case(16, 3, 3000, torch.bfloat16, seed=99).to("cuda")
    call(sampler, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(sampler, static)
        draft = sampler.draft(static.draft_logits[:, 0], static.temperature, static.seeds, static.positions)
    for batch in batches:
        for mine, fresh in zip(vars(static).values(), vars(batch).values()):
            mine.copy_(fresh)
        graph.replay()
        expected = call(sampler, batch)
        for got, want in zip(output[:4], expected):
            assert torch.equal(got, want)
        row = sampler.draft(batch.draft_logits[:, 0], batch.temperature, batch.seeds, batch.positions)
        assert torch.equal(draft.token_ids, row.token_ids)
        assert torch.equal(draft.logsumexp, row.logsumexp)


@needs_cuda
@pytest.mark.parametrize("number", [None, 1.3], ids=["penalties each", "one for all"])
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("method", SAMPLERS)
def test_replays_see_fresh_counts_masks_and_biases(backend, method, number):
    sampler, batch = RejectionSampler(**SAMPLERS[method], backend=backend), case(16, 3, 3000, torch.bfloat16).to("cuda")
    static, *fresh = [to("cuda", adjustments_for(batch.to("cpu"), seed=seed)) for seed in range(3)]
    if number is not None:
        static, *fresh = [each._replace(repetition_penalty=number, frequency_penalty=None) for each in (static, *fresh)]

    def adjusted(adjustments):
        options = {"temperature": batch.temperature, "seeds": batch.seeds, "logprobs": "raw"}
        return sampler(
            batch.target_logits, batch.draft_token_ids, batch.draft_logits, adjustments=adjustments, **options
        )

    adjusted(static)
    with synchronising_raises():
        adjusted(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = adjusted(static)
    for adjustments in fresh:
        for mine, other in zip(static, adjustments):
            if isinstance(mine, torch.Tensor):
                mine.copy_(other)
        graph.replay()
        for got, want in zip(output[:4], adjusted(adjustments)):
            assert torch.equal(got, want)


@needs_cuda
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("method", SAMPLERS)
def test_replays_see_fresh_lengths_and_slots(backend, method):
    sampler = RejectionSampler(**SAMPLERS[method], backend=backend)
    batch, (row_starts, slots) = case(16, 3, 3000, torch.bfloat16).to("cuda"), places(99)
    call_packed(sampler, batch, row_starts, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call_packed(sampler, batch, row_starts, slots)
    hostile = row_starts.new_tensor([0, 4, 2, -9, 3, 2**30, *range(11)]), slots.new_tensor([2**40, -1, *range(14)])
    for mine in (places(0), places(1), hostile, places(2)):
        row_starts.copy_(mine[0])
        slots.copy_(mine[1])
        graph.replay()
        for got, want in zip(output[:4], call_packed(sampler, batch, *mine)):
            assert torch.equal(got, want)
        assert ((output.token_ids >= -1) & (output.token_ids < 3000)).all()
    assert output.num_accepted.sum() > 0


@needs_cuda
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("method", ["probabilistic", "block"])
@pytest.mark.parametrize("requests", [16, 120])
def test_replays_see_a_fresh_draft_vocabulary(backend, method, requests):
    batch, sampler = case(requests, 3, 9000, torch.bfloat16).to("cuda"), RejectionSampler(method, backend=backend)
    narrow = batch.draft_logits[..., :5000].contiguous()

    def call(ids):
        numbers = {"temperature": batch.temperature, "seeds": batch.seeds, "positions": batch.positions}
        return sampler(batch.target_logits, batch.draft_token_ids, narrow, draft_vocab_ids=ids, **numbers)

    static = torch.arange(5000, device="cuda")
    call(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(static)
    shuffled = torch.randperm(9000, device="cuda")[:5000]
    hostile = torch.randint(-(2**40), 2**40, (5000,), device="cuda").where(shuffled < 3000, shuffled // 2)
    emitted = []
    for ids in (static + 3000, shuffled, hostile, static.clone()):
        static.copy_(ids)
        with synchronising_raises():
            graph.replay()
            fresh = call(ids)
        for got, want in zip(output[:4], fresh):
            assert torch.equal(got, want)
        assert ((output.token_ids >= -1) & (output.token_ids < 9000)).all()
        emitted.append(output.token_ids.clone())
    assert not any(map(torch.equal, emitted, emitted[1:]))


@needs_cuda
def test_the_gpu_says_what_the_host_says():
    batch = case(64, 3, 5003, torch.float64)
    for options in SAMPLERS.values():
        sampler = RejectionSampler(**options, backend="eager")
        for got, want in zip(call(sampler, batch.to("cuda"))[:4], call(sampler, batch)):
            assert torch.equal(got.cpu(), want)


KERNELS = {
    "strict": {"read_kernel", "truncate_kernel", "emit_kernel", "report_kernel"},
    "probabilistic": {"map_kernel", "read_kernel", "emit_kernel"},
    "block": {"read_kernel", "ratio_kernel", "decide_kernel", "sum_kernel", "emit_kernel"},
}


def compiled(folder: Path, *arguments: str) -> tuple[set[str], list[int]]:
    """Compile into a folder; return the kernels' names, and how often warps wait for each other in the reading ones."""
    script = [sys.executable, "-m", "tests.tools.portability", *arguments]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    result = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    barriers = [path.read_text().count("bar.sync") for path in folder.rglob("read_kernel.ptx")]
    return set(result.stdout.split()), barriers


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("capability", "methods"), [(80, ["probabilistic"]), (90, ["block", "strict", "probabilistic"])]
)
def test_every_kernel_compiles_for_gpus_that_are_not_here(capability, methods, tmp_path):
    # One variant of each: the one that the first of the methods takes, if it takes the kernel.
    names, barriers = compiled(tmp_path, str(capability), *methods, "once")
    files = (Path(specdecode.__file__).parent / "kernels").rglob("*.py")
    all_names = {name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)}
    assert names == (all_names if len(methods) > 1 else KERNELS["probabilistic"])
    # Where nothing is decided while reading, warps that read do not wait for each other.
    assert [count > 0 for count in barriers] == [methods[0] == "probabilistic"]


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("method", ["probabilistic", "strict"] if ON_GPU else ["strict"])
def test_kernels_with_adjustments_compile_for_gpus_that_are_not_here(method, tmp_path):
    names, barriers = compiled(tmp_path, "90", method, "adjusted")
    assert names == {"read_kernel", "emit_kernel"}
    assert barriers == [0]  # what is loaded for a token is where its logit is: no thread waits for another's


@needs_cuda
@pytest.mark.parametrize(
    ("capability", "method"), [(80, "probabilistic"), (90, "block"), (120, "strict"), (80, "strict"), (80, "block")]
)
def test_all_variants_compile_for_gpus_that_are_not_here(capability, method, tmp_path):
    names, barriers = compiled(tmp_path, str(capability), method)
    assert names == KERNELS[method]
    # Where nothing is decided, for drafts too, warps that read do not wait for each other.
    assert barriers.count(0) >= 2
    assert sum(map(bool, barriers)) == 0 if method == "block" else sum(map(bool, barriers)) >= 1


HASHES = """
import os, sys
from unittest.mock import MagicMock
import triton
from tests.tools import portability
from specdecode.kernels import launch, plan
hashes = {}
def compile(source, options):
    hashes[source.name, source.fn.cache_key] = None
    return MagicMock()
triton.compile = compile
triton.runtime.driver.set_active(portability.Driver(90))
portability.backends.obstacle = lambda device: None
launch.can_overlap = plan.can_overlap = lambda device: True
for methods in sys.argv[1:]:  # each in a process where nothing was called
    if os.fork() == 0:
        portability.compile_all(methods.split())
        print(*sorted(map(str, hashes)), sep=chr(10), end=chr(10) * 2, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_compiled_code_is_found_on_disk_in_whatever_order_kernels_are_called():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", HASHES, "strict probabilistic block", "block strict probabilistic"]
    said = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    forwards, backwards, end = said.split("\n\n")
    assert end == ""
    assert len(forwards.splitlines()) == len(KERNELS["block"] | KERNELS["strict"] | KERNELS["probabilistic"])
    assert forwards == backwards
