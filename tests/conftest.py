"""Where the tests run: every backend on every device that is here."""

import pytest
import torch

BACKENDS = [("eager", device) for device in ("cpu", "cuda") if device == "cpu" or torch.cuda.is_available()]


@pytest.fixture(params=BACKENDS, ids="-".join)
def place(request):
    """(backend, device) to run on."""
    return request.param
