"""Kernels compile for GPUs that are not here; on a GPU drafting, sampling and statistics do not wait, and are captured."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specdecode
from specdecode import AcceptanceStats, RejectionSampler, sample
from tests.conftest import HAS_TRITON, ON_GPU
from tests.support.cuda import captured, synchronising_raises
from tests.support.differential import case

ROOT = Path(__file__).parents[1]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_drafting_sampling_and_statistics_do_not_wait_for_the_device_and_are_captured(backend, method):
    static, fresh = (case(16, 3, 3000, torch.bfloat16, seed=seed).to("cuda") for seed in (0, 1))
    sampler, stats = RejectionSampler(method, backend=backend), AcceptanceStats(num_draft_tokens=3, device="cuda")

    def step(batch):
        numbers = batch.temperature, batch.seeds, batch.positions
        draft = sampler.draft(batch.draft_logits[:, 0], *numbers, top_p=0.9)
        stats.update(sampler(batch.target_logits, batch.draft_token_ids, batch.draft_logits, seeds=batch.seeds))
        return [*draft, sample(batch.target_logits[:, 0], *numbers)]

    step(static)
    with synchronising_raises():
        expected = step(fresh)
        sampler.draft(fresh.draft_logits[:, 0], 0.7)  # with seeds of its own
    graph, output = captured(lambda: step(static))
    for mine, other in zip(vars(static).values(), vars(fresh).values()):
        mine.copy_(other)
    graph.replay()
    assert all(map(torch.equal, output, expected))


KERNELS = {
    "strict": {"read_kernel", "truncate_kernel", "emit_kernel", "top_logprobs_kernel", "siblings_kernel"},
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
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path):
    # One variant of each: the one that the first of the methods takes, if it takes the kernel.
    names, barriers = compiled(tmp_path, "90", "block", "strict", "probabilistic", "once")
    files = (Path(specdecode.__file__).parent / "kernels").rglob("*.py")
    all_names = {name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)}
    assert names == all_names
    assert barriers == [0]  # where nothing is decided while reading, warps that read do not wait for each other


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("method", ["probabilistic", "strict"] if ON_GPU else ["strict"])
def test_kernels_with_adjustments_compile_for_older_gpus_that_are_not_here(method, tmp_path):
    names, barriers = compiled(tmp_path, "80", method, "adjusted")
    assert names == {"read_kernel", "emit_kernel"}
    assert barriers == [0]  # what is loaded for a token is where its logit is: no thread waits for another's


@needs_cuda
@pytest.mark.parametrize(
    ("capability", "method"), [(80, "probabilistic"), (90, "block"), (120, "strict"), (80, "strict"), (80, "block")]
)
def test_all_variants_compile_for_gpus_that_are_not_here(capability, method, tmp_path):
    names, barriers = compiled(tmp_path, str(capability), method)
    assert names == KERNELS[method] | ({"start_kernel", "walk_kernel"} if method == "strict" else set())
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
