"""The eager backend's elementwise functions: the C++ that a GPU compiles computes what the definitions in PyTorch do."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdecode.eager import philox, probabilistic, residual, selection
from tests.support.philox import EXTREMES, counter_of

FUSED = {
    "negated_uniform_bits": philox.negated_uniform_bits,
    "log_uniform_bits": philox.log_uniform_bits,
    "exp_scaled": selection.exp_scaled,
    "logprob": probabilistic.logprob,
    "logprob_difference": probabilistic.logprob_difference,
    "log_sum_ratio": residual.log_sum_ratio,
    "log_difference": residual.log_difference,
    "weight_change": residual.weight_change,
    "weight_left": residual.weight_left,
    "most_left": residual.most_left,
}
NOISE = ("negated_uniform_bits", "log_uniform_bits")
INF = torch.inf
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
PRELUDE = """
#include <cmath>
#include <cstring>
static long long __double_as_longlong(double x) { long long bits; std::memcpy(&bits, &x, 8); return bits; }
"""


def arguments(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Ordinary numbers and the extreme ones that may come: every function is elementwise, so all have one length."""
    generator = torch.Generator().manual_seed(0)
    if name in NOISE:
        limits = torch.iinfo(torch.int64)
        seeds, positions = torch.randint(limits.min, limits.max, (2, 4096), generator=generator)
        return [seeds, positions, torch.randint(0, 2**32, (4096,), generator=generator)]
    normal = 5 * torch.randn(5, 4096, generator=generator, dtype=torch.float64)
    first, second, temperature = normal[0], normal[1], normal[2].abs() + 0.1
    if name == "exp_scaled":
        first[:4] = torch.tensor([-INF, 0, -3e38, -1e-38])
        logits, row_max = first, first.clamp(min=0) + second.abs()
        numbers = [logits, row_max, temperature]
    elif name == "logprob":
        row_max = first + second.abs()
        row_max[:4], first[:4] = torch.tensor([INF, INF, -INF, 3e38]), torch.tensor([INF, 2, -INF, -INF])
        return [*(each.to(dtype) for each in (first, row_max, temperature, 1 + normal[3].abs())), normal[4] > 0]
    elif name == "logprob_difference":
        first[:5], second[:5] = torch.tensor([-INF, -INF, 0, INF, torch.nan]), torch.tensor([-INF, 0, -INF, -3, 1])
        numbers = [first, second]
    elif name == "log_sum_ratio":
        second = second.abs() + 1
        first[:4], second[:6] = torch.nan, torch.tensor([3, 0, torch.nan, INF, 0, 1e-6])
        numbers = [1 + normal[3].abs(), second, first.abs()]
    elif name == "log_difference":
        first[:6] = torch.tensor([-INF, -INF, 1, 3e38, -3e38, 2])
        second[:6] = torch.tensor([-INF, 1, -INF, -3e38, 3e38, 2])
        numbers = [first, second, first.clamp(min=9), second.clamp(min=8), temperature]
    elif name == "weight_change":
        second[:8] = torch.tensor([0, 1, -1, 1.0001, -1.0001, 3e38, -3e38, 1e-6])
        numbers = [normal[3].abs(), second]
    elif name == "most_left":
        second[:4], first[:4] = torch.tensor([INF, INF, INF, 1]), torch.tensor([INF, 0, -3, INF])
        numbers = [second, first]
    else:
        second[:4], first[:4] = torch.tensor([3e38, -3e38, 3e38, 1e-6]), torch.tensor([INF, INF, 0, 0])
        numbers = [normal[3].abs(), second, first, normal[4].abs()]
    return [tensor.to(dtype) for tensor in numbers]


def numbers_of(name: str) -> list[dict[str, int]]:
    """What a function takes besides tensors."""
    if name not in NOISE:
        return [{}]
    if "is_double" not in FUSED[name].numbers:
        return [{"domain": 515}]
    return [{"domain": 515, "is_double": 0}, {"domain": 515, "is_double": 1}]


def assert_same(name: str, got: torch.Tensor, expected: torch.Tensor, is_double: int = 1, **_: int) -> None:
    if name == "negated_uniform_bits":
        assert torch.equal(got, expected)
    else:  # two libraries' exponentials and logarithms may differ in the last bits
        if name in NOISE:
            got, expected = got.view(torch.float64), expected.view(torch.float64)
        eps = torch.finfo(got.dtype if is_double else torch.float32).eps
        assert torch.allclose(got, expected, rtol=16 * eps, atol=torch.finfo(got.dtype).tiny, equal_nan=True)


DTYPES = {name: (torch.int64,) if name in NOISE else (torch.float32, torch.float64) for name in FUSED}
CASES = [(name, dtype) for name, dtypes in DTYPES.items() for dtype in dtypes]
each_case = pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)


def compiled(name: str, dtype: torch.dtype, folder: Path) -> Callable[..., torch.Tensor]:
    """Compile a function's C++ for the CPU."""
    function, kind = FUSED[name], {torch.int64: "long long", torch.float32: "float", torch.float64: "double"}[dtype]
    values = [*(f"inputs[{i}][place]" for i in range(len(arguments(name, dtype)))), *function.numbers]
    numbers = "".join(f", long long {number}" for number in function.numbers)
    loop = f"for (long place = 0; place < count; ++place) output[place] = {name}<{kind}>({', '.join(values)});"
    entry = f'extern "C" void run({kind} *output, {kind} **inputs, long count{numbers}) {{ {loop} }}'
    source, library = folder / "fused.cpp", folder / "fused.so"
    source.write_text(PRELUDE + function.source + entry)
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    run = ctypes.CDLL(str(library)).run

    def call(*tensors: torch.Tensor, **numbers: int) -> torch.Tensor:
        tensors = tuple(tensor.to(dtype) for tensor in tensors)  # as `torch.cuda.jiterator` promotes them
        output = torch.empty_like(tensors[0])
        inputs = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        values = (ctypes.c_longlong(numbers[number]) for number in function.numbers)
        run(ctypes.c_void_p(output.data_ptr()), inputs, ctypes.c_long(output.numel()), *values)
        return output

    return call


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@each_case
def test_the_source_for_gpus_computes_the_definition(name, dtype, tmp_path):
    function = FUSED[name]
    assert function.kernel.kernel_name == name  # what `torch.cuda.jiterator` takes for the function's name
    run = compiled(name, dtype, tmp_path)
    for numbers in numbers_of(name):
        tensors = arguments(name, dtype)
        got = run(*tensors, **numbers)
        assert_same(name, got, function.definition(*(tensor.clone() for tensor in tensors), **numbers), **numbers)
    for words in EXTREMES if name in NOISE else ():
        *counter, domain = counter_of(words)
        index, position, seed = (torch.tensor([number]) for number in (*counter, 0))
        for numbers in numbers_of(name):
            each = numbers | {"domain": domain}
            got, expected = (make(seed, position, index, **each) for make in (run, function.definition))
            assert_same(name, got, expected, **numbers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_case
def test_a_gpu_computes_the_definition_in_one_kernel(name, dtype):
    function = FUSED[name]
    for numbers in numbers_of(name):
        tensors = [tensor.cuda() for tensor in arguments(name, dtype)]
        got = function(*(tensor.clone() for tensor in tensors), **numbers)
        assert function.compiles
        assert_same(name, got, function.definition(*(tensor.clone() for tensor in tensors), **numbers), **numbers)


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
