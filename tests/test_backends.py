"""The choice of the backend: a named one runs or raises an error; "auto" takes the kernels where they can run."""

import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch

from specdecode import RejectionSampler, backends
from tests.conftest import ON_GPU


class OnGpu:
    device, is_cpu = torch.device("cuda"), False


@pytest.fixture(autouse=True)
def asked_anew():
    """Clear the cached results of other tests before, and the results of this test afterwards."""
    remembered = backends.obstacle, backends.warn_once, backends.log_once
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def test_a_backend_that_is_named_runs_or_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    logits, ids = torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"backend: 'triton' cannot run here"):
        RejectionSampler("strict", backend="triton")(logits, ids)
    with pytest.raises(ValueError, match=r"backend: 'triton' cannot run here"):
        RejectionSampler("strict", backend="triton").draft(logits[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RejectionSampler("strict")(logits, ids).token_ids.shape == (1, 2)  # eager, without a warning


def test_auto_says_why_it_does_not_take_the_kernels(monkeypatch):

    monkeypatch.setattr(backends, "obstacle", lambda device: "triton is not installed")
    with pytest.warns(RuntimeWarning, match=r"eager backend is used.*triton is not installed"):
        assert backends.choose("auto", OnGpu()) is backends.eager
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose("auto", OnGpu()) is backends.eager  # said once


def test_auto_logs_once_why_a_call_is_not_for_the_kernels(caplog, monkeypatch):
    reasons = "backend: a reason", "backend: a reason", "draft_sampling: another"
    with caplog.at_level("INFO", "specdecode"):
        for reason in reasons:
            cannot = SimpleNamespace(why_not_verified=lambda method, batch, reason=reason: reason)
            monkeypatch.setattr(backends, "choose", lambda backend, logits, cannot=cannot: cannot)
            batch = SimpleNamespace(target_logits=None)
            assert backends.verifier_of("auto", "strict", batch) is backends.eager
            with pytest.raises(ValueError, match=reason):
                backends.verifier_of("triton", "strict", batch)
    assert caplog.messages == [f"the eager backend takes a call of 'auto': {reason}" for reason in reasons[1:]]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_auto_takes_the_kernels_on_a_gpu():
    assert backends.choose("auto", torch.zeros(1, device="cuda")) is importlib.import_module("specdecode.kernels")
    assert backends.choose("auto", torch.zeros(1)) is backends.eager
