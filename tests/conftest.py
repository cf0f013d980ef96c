"""Where the tests run: every backend on every device that is here."""

import pytest
import torch

collect_ignore = ["benchmarks/block_size.py"]  # a script for a GPU, which needs Triton to be imported

BACKENDS = [("eager", device) for device in ("cpu", "cuda") if device == "cpu" or torch.cuda.is_available()]


def pytest_configure(config):
    # Tests work on small tensors, where a second thread costs more than it gives; benchmarks are to use all.
    if not config.getoption("benchmark_only"):
        torch.set_num_threads(1)


@pytest.fixture(params=BACKENDS, ids="-".join)
def place(request):
    """(backend, device) to run on."""
    return request.param
