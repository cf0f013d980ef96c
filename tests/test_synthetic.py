"""Synthetic verification: tokens against the reference, and acceptance at the scheduled rates."""

import numpy as np
import pytest
import torch

from reference import oracle
from specdecode import AcceptanceSchedule, AcceptanceStats, RejectionSampler
from tests import distributions
from tests.differential import assert_same_tokens, case

SCHEDULE = AcceptanceSchedule.from_mean_rate(0.69, num_draft_tokens=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 1025])
@pytest.mark.parametrize("with_logits", [True, False], ids=["like probabilistic", "like strict"])
def test_synthetic_equals_the_reference_token_for_token(place, with_logits, vocab, dtype):
    backend, device = place
    batch = case(60, 4, vocab, dtype, seed=vocab)
    moved = batch.to(device)
    output = RejectionSampler("synthetic", backend=backend, schedule=SCHEDULE)(
        moved.target_logits,
        moved.draft_token_ids,
        moved.draft_logits if with_logits else None,
        temperature=moved.temperature,
        seeds=moved.seeds,
        positions=moved.positions,
    )
    verdicts = []
    for index in range(60):
        target, token_ids, draft = batch.rows(index)
        rates = {"conditional_rates": SCHEDULE.conditional_rates}
        draft = draft if with_logits else None
        verdicts.append(oracle.verify("synthetic", target, token_ids, draft, **rates, **batch.request(index)))
    assert_same_tokens(output.token_ids, verdicts, batch.band(backend))


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "random"])
@pytest.mark.parametrize("with_logits", [True, False], ids=["like probabilistic", "like strict"])
@pytest.mark.parametrize(
    ("rate", "percentages"),
    [(0.24, (46.92, 18.62, 6.41)), (0.69, (90.86, 70.20, 46.13)), (1.0, (100, 100, 100)), (0.0, (0, 0, 0))],
)
def test_positions_are_accepted_as_scheduled(place, rate, percentages, with_logits, temperature):
    # The percentages are those that vLLM's pull request 38045 measured, itself within its sampling error of the schedule.
    backend, device = place
    requests = distributions.REQUESTS
    schedule = AcceptanceSchedule.from_mean_rate(rate, num_draft_tokens=3)
    sampler = RejectionSampler("synthetic", backend=backend, schedule=schedule)
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(requests, 4, 6, generator=generator).to(device)
    draft_logits = torch.randn(requests, 3, 6, generator=generator).to(device)
    token_ids = torch.randint(0, 6, (requests, 3), generator=generator).to(device)
    output = sampler(target, token_ids, draft_logits if with_logits else None, temperature=temperature, seeds=0)

    distribution = -np.diff([1.0, *schedule.joint_rates, 0.0])
    counts = np.bincount(output.num_accepted.cpu(), minlength=4)
    distributions.assert_distribution(counts, np.where(distribution < 1e-12, 0, distribution))
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(output)
    # Five standard errors of a proportion are at most 0.56 percentage points; the pull request rounds to 0.01.
    assert np.allclose(100 * np.array(stats.per_position), percentages, atol=0.57)
    assert abs(stats.acceptance_rate - rate) < 0.0057


def test_an_acceptance_costs_the_work_of_the_method_it_imitates(monkeypatch):
    # A load test that skipped the statistics would measure something else. Every row that a verdict is about is read.
    rows = []

    def counting(room):
        module = pytest.importorskip(f"specdecode.eager.{room}")
        read = module.read

        def counted(models, dtype):
            rows.extend(logits.shape[:-1].numel() for logits in models)
            return read(models, dtype)

        monkeypatch.setattr(module, "read", counted)

    counting("strict")
    counting("probabilistic")
    batch = case(50, 4, 30, torch.float32, greedy=0)
    token_ids = batch.draft_token_ids.clamp(min=0)
    all_stand = AcceptanceSchedule.from_rates([1.0] * 4)
    sampler = RejectionSampler("synthetic", schedule=all_stand)
    sampler(batch.target_logits, token_ids, batch.draft_logits, seeds=0)
    assert sum(rows) == 50 * (4 + 4 + 1)  # target and draft rows of each draft, and the bonus row
    rows.clear()
    sampler(batch.target_logits, token_ids, seeds=0)
    assert sum(rows) == 50 * 5  # strict samples every target row
