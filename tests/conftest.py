"""Where the tests run: every backend on every device that is here; kernels in Triton's interpreter where there is no GPU."""

import importlib.util
import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported

collect_ignore = ["benchmarks/block_size.py"]  # a script for a GPU, which needs Triton to be imported

BACKENDS = [("eager", "cpu")]
if ON_GPU:
    BACKENDS += [("eager", "cuda"), ("triton", "cuda")]


def pytest_configure(config):
    # Tests work on small tensors, where a second thread costs more than it gives; benchmarks are to use all.
    if not config.getoption("benchmark_only"):
        torch.set_num_threads(1)
    # Where there is no Triton, as on macOS, modules that import it have no doctests. Elsewhere a failed import is an error.
    if not HAS_TRITON:
        config.option.doctest_ignore_import_errors = True


@pytest.fixture(params=BACKENDS, ids="-".join)
def place(request):
    """(backend, device) to run on."""
    return request.param
