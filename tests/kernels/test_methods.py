"""A method may exist in one backend only: `"auto"` takes this backend, and the other refuses the method by name."""

from typing import Literal

import pytest
import torch

from specdecode import RejectionSampler, backends, eager, kernels, sampler
from tests.support.kernels import DEVICE

NO_KERNELS = "backend: 'triton' has no kernels for method 'mine'; use 'eager' or 'auto'"


@pytest.fixture(autouse=True)
def method_of_eager_alone(monkeypatch):
    """A contributor's additions for the method `"mine"`: a name, and an entry of the eager table."""
    monkeypatch.setattr(sampler, "Method", Literal["strict", "mine"])
    monkeypatch.setitem(eager.METHODS, "mine", eager.METHODS["strict"])
    backends.log_once.cache_clear()


def call():
    generator = torch.Generator().manual_seed(0)
    target, drafts = torch.randn(8, 4, 20, generator=generator), torch.randint(20, (8, 3), generator=generator)
    return {
        "target_logits": target.to(DEVICE), "draft_token_ids": drafts.to(DEVICE), "draft_logits": target[:, :3].to(DEVICE),
        "seeds": 0,
    }  # fmt: skip


@pytest.mark.parametrize("num_draft_tokens", [3, 0])
def test_triton_refuses_a_method_that_has_no_kernels(num_draft_tokens):
    mine, arguments = RejectionSampler("mine", backend="triton"), call()
    arguments["target_logits"] = arguments["target_logits"][:, : num_draft_tokens + 1]
    for name in ("draft_token_ids", "draft_logits"):
        arguments[name] = arguments[name][:, :num_draft_tokens]
    for refused in (mine, mine.warmup):
        with pytest.raises(ValueError, match=f"^{NO_KERNELS}$"):
            refused(**arguments)


def test_auto_is_eager_for_a_method_that_has_no_kernels_and_logs_it_once(monkeypatch, caplog):
    monkeypatch.setattr(backends, "choose", lambda backend, logits: eager if backend == "eager" else kernels)  # a GPU's
    mine, arguments = RejectionSampler("mine"), call()
    with caplog.at_level("INFO", "specdecode"):
        mine.warmup(**arguments)
        output = mine(**arguments)
    assert caplog.messages == [f"the eager backend takes a call of 'auto': {NO_KERNELS}"]
    strict = RejectionSampler("strict", backend="eager")(**arguments | {"draft_logits": None})
    assert output.token_ids.tolist() == strict.token_ids.tolist()


def test_drafts_for_a_method_that_has_no_kernels_are_drawn_by_either_backend():
    rows = call()["target_logits"][:, 0]
    drawn = [RejectionSampler("mine", backend=name).draft(rows, seeds=0).token_ids for name in ("triton", "eager")]
    assert drawn[0].tolist() == drawn[1].tolist()


def test_eager_refuses_a_method_that_it_does_not_have(monkeypatch):
    monkeypatch.delitem(eager.METHODS, "mine")
    with pytest.raises(
        ValueError, match=r"^backend: 'eager' has no method 'mine': it is not in specdecode\.eager\.METHODS$"
    ):
        RejectionSampler("mine", backend="eager")(**call())
