"""Probabilistic verification: precision, residuals that are nearly or entirely empty."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from reference.probabilistic import acceptance_rate
from reference.truncation import truncate
from specdecode import RejectionSampler
from specdecode.eager.residual import residual
from specdecode.eager.selection import select
from specdecode.eager.truncation import RowSampling
from specdecode.noise import SELECT
from tests.support import distributions
from tests.support.differential import like_a_device


@pytest.mark.parametrize(("temperature", "height"), [(1e-6, 20.0), (1e-4, 20.0), (1.0, 1e5)])
def test_a_logsumexp_too_large_for_float32_does_not_change_the_distribution(place, temperature, height):
    # Both draft tokens are equally likely, and the target's differ by a rounding of the height. log q = -log 2 is the
    # difference of two numbers of size height / temperature; in float32 its error would be up to a nat.
    backend, device = place
    requests = 20_000
    above = float(np.nextafter(np.float32(height), np.float32(np.inf)))
    target = torch.tensor([[above, height], [0, 0]], device=device).expand(requests, 2, 2)
    draft_logits = torch.full((requests, 2), height, device=device)
    sampler = RejectionSampler("probabilistic", backend=backend)
    draft = sampler.draft(draft_logits, temperature, seeds=0)
    output = sampler(
        target,
        draft.token_ids[:, None],
        draft_logits[:, None],
        temperature=temperature,
        seeds=0,
        draft_logsumexp=draft.logsumexp[:, None],
    )
    counts = np.bincount(output.token_ids[:, 0].cpu(), minlength=2)
    distributions.assert_distribution(
        counts, distributions.softmax(np.array([above, height], dtype=np.float64) / temperature)
    )


@pytest.mark.parametrize("closeness", [1e-1, 1e-3, 1e-5])
def test_residuals_stay_accurate_where_target_and_draft_nearly_agree(closeness):
    generator = torch.Generator().manual_seed(0)
    target = 2 * torch.randn(4, 3000, generator=generator)
    draft = target + closeness * torch.randn(4, 3000, generator=generator)
    one, precisely = RowSampling(torch.ones(4)), RowSampling(torch.ones(4, dtype=torch.float64))
    rejected, log_ratio = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    weights = residual(target, draft, rejected, one, one, log_ratio)[0].weights.double()
    exact = residual(target.double(), draft.double(), rejected, precisely, precisely, log_ratio.double())[0].weights
    distribution, expected = (w / w.sum(dim=1, keepdim=True) for w in (weights, exact))
    assert ((distribution - expected).abs().sum(dim=1) / 2).max() < 2e-6


def test_residuals_of_the_largest_logits_do_not_overflow():
    # The logits of the two models are further apart than the largest float32.
    target, draft = torch.tensor([[3e38, 2.9e38, 2.5e38]]), torch.tensor([[-3.3e38, -3e38, -3.1e38]])
    sampling, rejected, log_ratio = RowSampling(torch.tensor([1e38])), torch.tensor([1]), torch.zeros(1)
    weights = residual(target, draft, rejected, sampling, sampling, log_ratio)[0].weights.double()
    scaled = [(row - row.max()).double() / 1e38 for row in (target.double(), draft.double())]
    expected = (scaled[0].softmax(dim=1) - scaled[1].softmax(dim=1)).clamp(min=0)
    assert torch.allclose(weights / weights.sum(), expected / expected.sum(), atol=1e-6)


@pytest.mark.parametrize("masked", [False, True], ids=["as it is", "like a device"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["draft logits", "deterministic"])
def test_a_residual_that_is_empty_is_the_target_itself(deterministic, masked):
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(3, 2000, generator=generator)
    one, rejected, log_ratio = RowSampling(torch.ones(3)), torch.tensor([5, 6, 7]), torch.zeros(3)
    draft = None if deterministic else target.clone()
    if deterministic:  # all of the target's mass is on the rejected draft
        target.fill_(-torch.inf).scatter_(1, rejected[:, None], 1.0)
    seeds = torch.arange(3)
    with like_a_device() if masked else nullcontext():
        found, _ = residual(target, draft, rejected, one, one, log_ratio)
        drawn = found.draw(seeds, seeds)
    assert not found.weights.any()
    if deterministic:
        assert torch.equal(drawn, rejected)
    else:
        weights, sums = found.target
        assert torch.allclose(weights[:, :2000] / sums.sum(dim=1)[:, None], target.softmax(dim=1), atol=1e-7)
        assert torch.equal(drawn, select(weights, sums, seeds, seeds, SELECT))


@pytest.mark.parametrize(
    ("temperature", "rules", "expected"),
    [
        (0.7, {"top_p": 0.95}, [0.790, 0.783]),
        (1.0, {"top_k": 20, "top_p": 0.95}, [0.817, 0.800]),
        (1.0, {"min_p": 0.05}, [0.808, 0.781]),
        (1.0, {"top_k": 1}, [0.770, 0.433]),
    ],
)
def test_truncated_drafts_are_accepted_more_often_on_average(temperature, rules, expected):
    """The table of the page on truncation: drafts truncated as the target, and not truncated."""
    vocab, random, rates = 16_384, np.random.default_rng(0), []
    for _ in range(100):
        target = 2 * random.standard_normal(vocab)
        np.add.at(target, random.integers(vocab, size=64), random.uniform(4, 14, size=64))
        draft = target + 0.6 * random.standard_normal(vocab)
        weights = [np.exp((logits - logits.max()) / temperature) for logits in (target, draft)]
        p, q = (each / each.sum() for each in weights)
        rates.append([acceptance_rate(truncate(p, **rules), row) for row in (truncate(q, **rules), q)])
    np.testing.assert_allclose(np.mean(rates, axis=0), expected, atol=5e-4)
