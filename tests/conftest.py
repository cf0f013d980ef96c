"""Where the tests run: every backend on every device of the machine; without a GPU, kernels in Triton's interpreter."""

import importlib.util
import itertools
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

if "--benchmark-only" not in sys.argv:
    # Threads of PyTorch that wait for work must not spin: they would take the cores from the other test processes.
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

    Elsewhere every two values of two parameters are together in at least one case. There are far fewer of these, and a
    mistake that needs three values at once is left to the GPU.

    >>> if not ON_GPU:
    ...     print(combine([1, 2], "ab", "xy"))
    [(1, 'a', 'x'), (1, 'b', 'y'), (2, 'a', 'y'), (2, 'b', 'x')]
    """
    if ON_GPU:
        return list(itertools.product(*axes))
    sizes = [range(len(axis)) for axis in axes]
    pairs = {
        ((one, i), (two, j))
        for one, two in itertools.combinations(range(len(axes)), 2)
        for i, j in itertools.product(sizes[one], sizes[two])
    }
    cases = []
    while pairs:
        # Of the combinations that hold the first missing pair, take the one that holds the most missing pairs.
        first = min(pairs)
        holders = (case for case in itertools.product(*sizes) if all(case[axis] == i for axis, i in first))
        cases.append(max(holders, key=lambda case: len(pairs.intersection(itertools.combinations(enumerate(case), 2)))))
        pairs.difference_update(itertools.combinations(enumerate(cases[-1]), 2))
    return [tuple(axis[i] for axis, i in zip(axes, case)) for case in sorted(cases)]


def pytest_configure(config):
    if config.getoption("benchmark_only"):
        # Look for benchmarks where they are. All else would be collected, and skipped one by one.
        if config.args_source != pytest.Config.ArgsSource.ARGS:
            config.args = [str(Path(__file__).parent / "benchmarks")]
        # tests/benchmarks/conftest.py prints a table; with --benchmark-verbose the plugin prints its own tables, too.
        config.option.benchmark_quiet = True
    else:
        torch.set_num_threads(1)  # tests compute with small tensors, for which a second thread costs more than it gains
    # Where there is no Triton, as on macOS, modules that import it have no doctests. Elsewhere a failed import is an error.
    if not HAS_TRITON:
        config.option.doctest_ignore_import_errors = True


def pytest_report_header():
    """Say which versions are tested, and where the kernels run."""
    kernels = "not at all" if not HAS_TRITON else torch.cuda.get_device_name() if ON_GPU else "in Triton's interpreter"
    triton = f"triton {version('triton')}" if HAS_TRITON else "no triton"
    tested = f"python {platform.python_version()}, torch {torch.__version__}, {triton}, numpy {version('numpy')}"
    return f"tested with: {tested}; kernels run {'on ' * ON_GPU}{kernels}"


@pytest.fixture(params=BACKENDS, ids="-".join)
def place(request):
    """(backend, device) to run on."""
    return request.param
