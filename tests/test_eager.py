"""The eager backend's noise, whose C++ for GPUs computes what PyTorch does; of equal numbers the first counts."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdecode.eager import philox, selection
from tests.test_philox import EXTREMES, counter_of

INF = torch.inf
DOMAIN = 515
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
FOR_A_CPU = """
#include <cmath>
#include <cstring>
static long long __double_as_longlong(double x) { long long bits; std::memcpy(&bits, &x, 8); return bits; }
%s
extern "C" void run(long long *output, long long **inputs, long count, long long domain) {
    for (long i = 0; i < count; ++i) output[i] = uniform_bits<long long>(inputs[0][i], inputs[1][i], inputs[2][i], domain);
}
"""


def compiled(source: str, folder: Path) -> Callable[..., torch.Tensor]:
    """The C++ compiled for the CPU."""
    code, library = folder / "noise.cpp", folder / "noise.so"
    code.write_text(FOR_A_CPU % source)
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, code], check=True)
    run = ctypes.CDLL(str(library)).run

    def call(*tensors: torch.Tensor, domain: int) -> torch.Tensor:
        output = torch.empty_like(tensors[0])
        inputs = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        run(ctypes.c_void_p(output.data_ptr()), inputs, ctypes.c_long(output.numel()), ctypes.c_longlong(domain))
        return output

    return call


def counters() -> tuple[torch.Tensor, ...]:
    """Seeds, positions and indices."""
    generator, limits = torch.Generator().manual_seed(0), torch.iinfo(torch.int64)
    seeds, positions = torch.randint(limits.min, limits.max, (2, 4096), generator=generator)
    return seeds, positions, torch.randint(0, 2**32, (4096,), generator=generator)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_the_source_for_gpus_computes_the_noise(tmp_path):
    bits = compiled(philox.UNIFORM_BITS, tmp_path)
    got = bits(*counters(), domain=DOMAIN).view(torch.float64)
    assert torch.equal(got, philox.uniform(*counters(), DOMAIN).double())
    for words in EXTREMES:
        *counter, domain = counter_of(words)
        index, position, seed = (torch.tensor([number]) for number in (*counter, 0))
        got = bits(seed, position, index, domain=domain).view(torch.float64)
        assert torch.equal(got, philox.uniform(seed, position, index, domain).double())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_the_noise_in_one_kernel_and_without_it():
    on_gpu, expected = [tensor.cuda() for tensor in counters()], philox.uniform(*counters(), DOMAIN)
    assert philox.compiled(on_gpu[0].device) is not None
    assert torch.equal(philox.uniform(*on_gpu, DOMAIN).cpu(), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(philox, "compiled", lambda device: None)
        assert torch.equal(philox.uniform(*on_gpu, DOMAIN).cpu(), expected)


@pytest.mark.parametrize("width", [7, 1024, 5 * 1024])
def test_of_equal_maxima_the_first_counts(place, width):
    logits = torch.randint(0, 3, (2, 4, width), generator=torch.Generator().manual_seed(0)).float()
    logits[0, :2], logits[0, 2, width // 2 :], logits[1, 0, [3, -1]] = -INF, -INF, INF
    row_max, first = (found.cpu().numpy() for found in selection.row_maxima(logits.to(place[1])))
    assert (row_max == logits.amax(dim=-1, keepdim=True).numpy()).all()
    assert (first == logits.numpy().argmax(axis=-1, keepdims=True)).all()


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
