"""The eager backend's noise, which a GPU compiles from C++, and selection among equals."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from specdecode.eager import philox, selection
from tests.support.philox import EXTREMES, counter_of

INF = torch.inf
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
PRELUDE = """
#include <cmath>
#include <cstring>
static long long __double_as_longlong(double x) { long long bits; std::memcpy(&bits, &x, 8); return bits; }
"""
ENTRY = """
extern "C" void run(long long *output, long long **inputs, long count) {
    for (long i = 0; i < count; ++i)
        output[i] = negated_uniform_bits<long long>(inputs[0][i], inputs[1][i], inputs[2][i], inputs[3][i]);
}
"""


def counters() -> list[torch.Tensor]:
    """Seeds, positions, indices and domains: ordinary numbers, then the extreme ones."""
    generator, limits = torch.Generator().manual_seed(0), torch.iinfo(torch.int64)
    seeds, positions = torch.randint(limits.min, limits.max, (2, 4096), generator=generator)
    columns = seeds, positions, torch.randint(0, 2**32, (4096,), generator=generator), torch.full((4096,), 515)
    extreme = [counter_of(words) for words in EXTREMES]
    index, position, domain = (torch.tensor(each) for each in zip(*extreme))
    return [torch.cat(pair) for pair in zip(columns, (torch.zeros_like(index), position, index, domain))]


def expected(seeds: torch.Tensor, positions: torch.Tensor, index: torch.Tensor, domains: torch.Tensor) -> torch.Tensor:
    """The numbers as PyTorch computes them on the CPU, one domain after the other."""
    found = torch.empty_like(seeds)
    for domain in domains.unique().tolist():
        rows = domains == domain
        found[rows] = philox.negated_uniform_bits(seeds[rows], positions[rows], index[rows], domain)
    return found


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_the_source_for_gpus_computes_the_same_noise(tmp_path):
    source, library, tensors = tmp_path / "fused.cpp", tmp_path / "fused.so", counters()
    source.write_text(PRELUDE + philox.FUSED + ENTRY)
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    output = torch.empty_like(tensors[0])
    inputs = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    ctypes.CDLL(str(library)).run(ctypes.c_void_p(output.data_ptr()), inputs, ctypes.c_long(output.numel()))
    assert torch.equal(output, expected(*tensors))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_the_same_noise_in_one_kernel():
    seeds, positions, index, _ = (tensor.cuda() for tensor in counters())
    assert philox.fused() is not None
    on_gpu = philox.negated_uniform_bits(seeds, positions, index, 515).cpu()
    assert torch.equal(on_gpu, philox.negated_uniform_bits(seeds.cpu(), positions.cpu(), index.cpu(), 515))


@pytest.mark.parametrize("width", [7, 1024, 5 * 1024])
def test_of_equal_maxima_the_first_counts(place, width):
    logits = torch.randint(0, 3, (2, 4, width), generator=torch.Generator().manual_seed(0)).float()
    logits[0, :2], logits[0, 2, width // 2 :], logits[1, 0, [3, -1]] = -INF, -INF, INF
    rows = selection.read((logits.to(place[1]),), torch.float32)
    assert (rows.row_max[0].cpu() == logits.amax(dim=-1, keepdim=True)).all()
    assert (rows.first[0].cpu().numpy() == logits.numpy().argmax(axis=-1, keepdims=True)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_ratio_wins_a_race_and_of_equal_ones_the_first(place, dtype):
    weights = torch.rand(64, 300, dtype=dtype, generator=torch.Generator().manual_seed(0))
    weights[:2], weights[2:4, :200] = 0, 0
    seeds, positions = torch.arange(64)[:, None], torch.tensor([[5]])
    numbers = [tensor.to(place[1]) for tensor in (seeds, positions, torch.arange(300))]
    winners = philox.race(weights.to(place[1]), *numbers, 3).cpu()
    ratios = weights / philox.exponential(*numbers, 3).cpu()
    assert (winners.numpy() == ratios.numpy().argmax(axis=-1, keepdims=True)).all()
    assert winners[:2].tolist() == [[0], [0]]
