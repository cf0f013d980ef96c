"""Greedy requests: maxima only, in every method."""

from contextlib import nullcontext

import pytest
import torch

from reference import oracle
from specdecode import AcceptanceSchedule, RejectionSampler
from specdecode.eager import truncation
from tests.support.differential import assert_same_tokens, case, like_a_device

METHODS = {
    "strict": RejectionSampler("strict"),
    "probabilistic": RejectionSampler("probabilistic"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab", [1, 2, 7, 1000, 5003])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_greedy_equals_the_reference_token_for_token(place, method, vocab, dtype):
    backend, device = place
    batch = case(60, 3, vocab, dtype, seed=vocab)
    moved = batch.to(device)
    output = RejectionSampler(method, backend=backend)(
        moved.target_logits, moved.draft_token_ids, moved.draft_logits, temperature=0
    )
    verdicts = [oracle.verify(method, *batch.rows(index), temperature=0) for index in range(60)]
    assert_same_tokens(output.token_ids, verdicts, band=0)


def test_half_precision_ties_go_to_the_lowest_id(place):
    backend, device = place
    logits = torch.zeros(1, 2, 3000, dtype=torch.bfloat16, device=device)
    logits[0, :, [5, 6, 2500]] = 1
    output = RejectionSampler("strict", backend=backend)(logits, torch.tensor([[5]], device=device), temperature=0)
    assert output.token_ids.tolist() == [[5, 5]]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_compute_no_softmax_on_the_host(method, monkeypatch):
    batch = case(40, 3, 500, torch.float32, greedy=0.5)
    random = int((batch.temperature > 0).sum())
    rows_read = []
    read = truncation.read

    def counting(models, samplings):
        rows_read.extend(logits.shape[:-1].numel() for logits in models)
        return read(models, samplings)

    for room in ("strict", "probabilistic", "residual"):
        monkeypatch.setattr(f"specdecode.eager.{room}.read", counting)
    RejectionSampler(method)(
        batch.target_logits, batch.draft_token_ids, batch.draft_logits, temperature=batch.temperature, seeds=0
    )
    # A random request reads at most 3 rows of each model, and 2 rows more to emit.
    assert 0 < sum(rows_read) <= 8 * random


@pytest.mark.parametrize("method", METHODS)
def test_a_greedy_batch_computes_no_softmax_on_any_device(method, monkeypatch):
    for room in ("strict", "probabilistic", "residual"):
        monkeypatch.setattr(f"specdecode.eager.{room}.read", lambda *_: pytest.fail("a softmax"))
    batch = case(10, 3, 50, torch.float32)
    with like_a_device():
        RejectionSampler(method)(batch.target_logits, batch.draft_token_ids, batch.draft_logits, temperature=0)


def test_a_synthetic_schedule_rules_over_greedy_requests_too(place):
    backend, device = place
    schedule = AcceptanceSchedule.from_rates([1.0, 1.0, 0.0])
    target = torch.eye(4, device=device)[None].repeat(2, 1, 1)
    output = RejectionSampler("synthetic", backend=backend, schedule=schedule)(
        target, torch.tensor([[3, 3, 3], [3, -1, 3]], device=device), temperature=0
    )
    assert output.token_ids.tolist() == [[3, 3, 2, -1], [3, 1, -1, -1]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("masked", [False, True], ids=["as it is", "like a device"])
def test_temperatures_too_small_for_float32_are_not_greedy(method, masked):
    # Rows are computed in float32, where 1e-300 is 0. Both tokens are equally likely at any temperature but 0.
    requests = 100
    target = torch.tensor([1.0, 3.0, 3.0]).expand(requests, 1, 3)
    no_drafts = torch.zeros(requests, 0, dtype=torch.int64), torch.zeros(requests, 0, 3)
    temperature = torch.full((requests,), 1e-300, dtype=torch.float64)
    temperature[::2] = 0
    with like_a_device() if masked else nullcontext():
        tokens = METHODS[method](target, *no_drafts, temperature=temperature, seeds=0).token_ids[:, 0]
    assert set(tokens[::2].tolist()) == {1}
    assert set(tokens[1::2].tolist()) == {1, 2}
