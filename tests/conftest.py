"""The devices of the tests: every backend on every device of the machine; without a GPU, kernels in Triton's interpreter."""

import gc
import importlib.util
import itertools
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

if "--benchmark-only" not in sys.argv:
    gc.disable()  # imported modules and collected tests stay, so there is no garbage until `pytest_collection_finish`
    # Idle threads of PyTorch must not spin: they would take cores from the other test processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch

from tests.support.interpreter import speed_up

ON_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    if "SPECDECODE_PLAIN_INTERPRETER" not in os.environ:
        speed_up()

BACKENDS = [("eager", "cpu")]
if ON_GPU:
    BACKENDS += [("eager", "cuda"), ("triton", "cuda")]


def combine(*axes: Sequence[Any]) -> list[tuple]:
    """Return the cases of a test that has several parameters: all combinations on a GPU, elsewhere all pairs.

    Elsewhere every two values of two parameters occur together in at least one case. These are far fewer cases, and a
    mistake that needs three values at once is found on a GPU only.

    >>> if not ON_GPU:
    ...     print(combine([1, 2], "ab", "xy"))
    [(1, 'a', 'x'), (1, 'b', 'y'), (2, 'a', 'y'), (2, 'b', 'x')]
    """
    if ON_GPU:
        return list(itertools.product(*axes))
    return cover(axes, 2)


def cover(axes: Iterable[Sequence[Any]], strength: int) -> list[tuple]:
    """Return cases in which any `strength` values of different parameters occur together at least once.

    Each case starts with a missing combination. Every other parameter takes the value with the most missing combinations
    with the values so far; ties go to the value used least.
    """
    axes = list(axes)
    missing = {
        combination
        for chosen in itertools.combinations(range(len(axes)), strength)
        for combination in itertools.product(*[[(axis, i) for i in range(len(axes[axis]))] for axis in chosen])
    }
    cases, uses = [], Counter[tuple[int, int]]()
    while missing:
        case = list(min(missing))
        for axis in set(range(len(axes))) - {axis for axis, _ in case}:
            others = list(itertools.combinations(sorted(case), strength - 1))

            def gain(value: tuple[int, int], others: list = others) -> tuple[int, int]:
                return sum(tuple(sorted([*other, value])) in missing for other in others), -uses[value]

            case.append(max([(axis, i) for i in range(len(axes[axis]))], key=gain))
        case.sort()
        uses.update(case)
        missing.difference_update(itertools.combinations(case, strength))
        cases.append(tuple(i for _, i in case))
    return [tuple(axis[i] for axis, i in zip(axes, case)) for case in sorted(cases)]


def pytest_configure(config):
    if config.getoption("benchmark_only"):
        # Collect benchmarks only: all other tests would be skipped one by one.
        if config.args_source != pytest.Config.ArgsSource.ARGS:
            config.args = [str(Path(__file__).parent / "benchmarks")]
        # tests/benchmarks/conftest.py prints a table; with --benchmark-verbose the plugin prints its own tables, too.
        config.option.benchmark_quiet = True
    else:
        torch.set_num_threads(1)  # tests compute with small tensors, for which a second thread costs more than it gains
    # Without Triton, as on macOS, modules that import it have no doctests. Elsewhere a failed import is an error.
    if not HAS_TRITON:
        config.option.doctest_ignore_import_errors = True


def pytest_collection_finish():
    """Search for garbage again, but only among what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_report_header():
    """Report the tested versions, and the device of the kernels."""
    kernels = "not at all" if not HAS_TRITON else torch.cuda.get_device_name() if ON_GPU else "in Triton's interpreter"
    triton = f"triton {version('triton')}" if HAS_TRITON else "no triton"
    tested = f"python {platform.python_version()}, torch {torch.__version__}, {triton}, numpy {version('numpy')}"
    return f"tested with: {tested}; kernels run {'on ' * ON_GPU}{kernels}"


@pytest.fixture(params=BACKENDS, ids="-".join)
def place(request):
    """A (backend, device) pair to run on."""
    return request.param


@pytest.fixture(params=[*BACKENDS, *[("triton", "cpu")] * (HAS_TRITON and not ON_GPU)], ids="-".join)
def any_place(request):
    """A (backend, device) pair to run on, including the kernels in the interpreter."""
    return request.param
