"""Greedy requests: a schedule decides about their drafts, and tiny temperatures are not greedy."""

from contextlib import nullcontext

import pytest
import torch

from specdecode import AcceptanceSchedule, RejectionSampler
from tests.support.differential import like_a_device

METHODS = {
    "strict": RejectionSampler("strict"),
    "probabilistic": RejectionSampler("probabilistic"),
}


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
