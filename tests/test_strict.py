"""Strict verification: every emitted token is the token of plain sampling."""

import numpy as np
import torch

from reference.strict import match_probabilities
from specdecode import RejectionSampler
from tests.support.differential import case


def test_every_emitted_token_is_what_plain_sampling_says(place):
    backend, device = place
    batch = case(200, 5, 700, torch.float32).to(device)
    sampler = RejectionSampler("strict", backend=backend)
    drafts = torch.stack(
        [
            sampler.draft(batch.draft_logits[:, i], batch.temperature, batch.seeds, batch.positions + i).token_ids
            for i in range(5)
        ],
        dim=1,
    )
    output = sampler(
        batch.target_logits, drafts, temperature=batch.temperature, seeds=batch.seeds, positions=batch.positions
    )
    # `sample` takes no backend; the drafts of "strict" are the same tokens.
    plain = torch.stack(
        [
            sampler.draft(batch.target_logits[:, i], batch.temperature, batch.seeds, batch.positions + i).token_ids
            for i in range(6)
        ],
        dim=1,
    )
    emitted = output.token_ids != -1
    assert torch.equal(output.token_ids[emitted], plain[emitted])
    assert output.num_accepted.float().mean() > 2  # shared noise makes drafts agree, so many positions are tested


def test_the_dtype_of_draft_logits_does_not_matter(place):
    # In float64 these seeds would draw other tokens: the first two scores are that close.
    backend, device = place
    target = torch.tensor([[[0.3, 0.1, 0.2]]], device=device).expand(3, 1, 3)
    seeds = torch.tensor([782353, 21752820, 35925371], device=device)
    nothing = (
        torch.zeros(3, 0, dtype=torch.int64, device=device),
        torch.zeros(3, 0, 3, dtype=torch.float64, device=device),
    )
    output = RejectionSampler("strict", backend=backend)(target, *nothing, temperature=0.7, seeds=seeds)
    assert torch.equal(
        output.token_ids[:, 0], RejectionSampler("strict", backend=backend).draft(target[:, 0], 0.7, seeds)[0]
    )


def test_a_drafts_token_and_its_cutoff_are_tensors_of_their_own(place):
    sampler, logits = RejectionSampler("strict", backend=place[0]), torch.randn(3, 40, device=place[1])
    zeros, mixed = torch.zeros(3, device=place[1]), torch.tensor([0.0, 0.5, 1.0], device=place[1])
    for temperature in (0.0, zeros, mixed, 0.7):
        for options in ({"top_k": 2}, {"top_k": 1}, {"top_p": 0.9}, {"min_p": zeros}):
            draft = sampler.draft(logits, temperature, seeds=0, **options)
            expected = draft.cutoff.clone()
            draft.token_ids.fill_(-7)
            assert torch.equal(draft.cutoff, expected), (temperature, options)


def test_shared_noise_is_near_the_bound_at_the_size_of_a_vocabulary():
    """The table of the page on strict verification, by `reference.strict.match_probabilities` with one sort."""

    def matches(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        order = np.argsort(-p / q)
        p, q = p[order], q[order]
        match = np.empty_like(p)
        match[order] = 1 / (np.cumsum(p) / p + (q.sum() - np.cumsum(q)) / q)
        return match

    def two_levels(p: np.ndarray, q: np.ndarray, size: int) -> float:
        starts = np.arange(0, len(p), size)
        blocks = matches(np.add.reduceat(p, starts), np.add.reduceat(q, starts))
        tokens = (matches(p[start : start + size], q[start : start + size]).sum() for start in starts)
        return sum(match * of_block for match, of_block in zip(blocks, tokens))

    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    np.testing.assert_allclose(matches(p, q), match_probabilities(list(p), list(q)))
    random = np.random.default_rng(0)
    target = 2 * random.normal(size=151_936)
    target[random.choice(151_936, 64, replace=False)] += random.uniform(4, 14, size=64)
    draft = target + 0.6 * random.normal(size=151_936)
    for temperature, expected in ((0.7, [0.64, 0.63, 0.63, 0.61, 0.41]), (1.0, [0.73, 0.71, 0.71, 0.68, 0.32])):
        p, q = (np.exp((row - row.max()) / temperature) for row in (target, draft))
        p, q = p / p.sum(), q / q.sum()
        levels = matches(p, q).sum(), two_levels(p, q, 1024), two_levels(p, q, 4096)
        assert [round(float(rate), 2) for rate in (np.minimum(p, q).sum(), *levels, p @ q)] == expected
