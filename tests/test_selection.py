"""Two-level selection: the distribution of `sample`, its tail, and its tokens against the reference."""

import numpy as np
import pytest
import torch
from scipy.stats import poisson

from reference.sampling import sample as sample_row
from specdecode import RejectionSampler, sample
from specdecode.eager.selection import block_sums, read, select
from specdecode.noise import BLOCK_SIZE, SELECT
from tests.support.differential import band_of
from tests.support.distributions import FALSE_ALARM, REQUESTS, assert_distribution, softmax

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("vocab", [1, 2, 7, 1000, BLOCK_SIZE, BLOCK_SIZE + 1, 5003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_sample_equals_the_reference_token_for_token(place, vocab, dtype, temperature):
    backend, device = place
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(40, vocab, generator=generator)).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
    positions = torch.randint(0, 2**62, (40,), generator=generator)
    # The drafts of "strict" are the tokens of `sample`, which takes no backend.
    draw = RejectionSampler("strict", backend=backend).draft
    tokens = draw(logits.to(device), temperature, seeds.to(device), positions.to(device)).token_ids.tolist()
    band = band_of(dtype, backend)
    for token, row, seed, position in zip(tokens, logits.double().numpy(), seeds.tolist(), positions.tolist()):
        choice = sample_row(row, temperature=temperature, seed=seed, position=position)
        assert token == choice.index or choice.margin <= band


@pytest.mark.parametrize(("vocab", "temperature"), [(2, 0.5), (2, 1.0), (8, 1.0), (8, 2.0), (2 * BLOCK_SIZE + 3, 2.0)])
def test_sample_has_the_distribution_of_the_softmax(place, vocab, temperature):
    _, device = place
    requests = REQUESTS if vocab < 100 else 20_000
    # With several blocks, only a few tokens around each block's end have weight.
    logits = np.full(vocab, -np.inf)
    spread = np.arange(vocab) if vocab < 100 else np.array([0, 1, 1023, 1024, 1025, 2047, 2048, vocab - 1])
    logits[spread] = np.random.default_rng(vocab).normal(size=len(spread))
    rows = torch.tensor(logits, dtype=torch.float32, device=device).expand(requests, vocab)
    counts = np.bincount(sample(rows, temperature, seeds=0).cpu(), minlength=vocab)
    assert_distribution(counts, softmax(logits / temperature))


def test_rare_tokens_are_drawn_as_often_as_they_should(place):
    # One token, and 262,144 others 20.5 nats below it. Together the others have probability 3.3e-4: 32.8 hits in 100,000
    # draws, two-sided Poisson bounds at 1e-6. Gumbel noise of 24 bits for each token would never hit one of them.
    # All draws are from one row, so its block sums are computed once and `select` is called as `sample` calls it.
    _, device = place
    vocab, draws, step = 262_145, 100_000, 50
    logits = torch.full((1, vocab), -20.5, device=device).index_fill_(1, torch.tensor(77, device=device), 0)
    weights = read((logits,), torch.float32).logits[0].exp()
    rows, sums = weights.expand(step, -1), block_sums(weights).expand(step, -1)
    positions = torch.zeros(step, dtype=torch.int64, device=device)
    tokens = torch.cat(
        [
            select(rows, sums, positions + torch.arange(seed, seed + step, device=device), positions, SELECT)
            for seed in range(0, draws, step)
        ]
    )
    hits = tokens[tokens != 77]
    tail = 262_144 * np.exp(-20.5)
    expected = draws * tail / (1 + tail)
    low, high = poisson.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], expected)
    assert 32.7 < expected < 32.9
    assert low <= len(hits) <= high
    assert len(hits.unique()) >= len(hits) - 1  # spread over the tail, not a single token


def test_a_last_block_of_one_token_counts_as_any_other(place):
    # One token after whole blocks, as likely as all others together: it must count in the row's sum, and be drawn.
    backend, device = place
    vocab, requests = 2 * BLOCK_SIZE + 1, 2_000
    logits = torch.zeros(vocab, device=device)
    logits[-1] = np.log(vocab - 1)
    draft = RejectionSampler("strict", backend=backend).draft(logits.expand(requests, vocab), seeds=0)
    assert torch.allclose(draft.logsumexp.double().cpu(), torch.tensor(np.log(2 * (vocab - 1))), atol=1e-5)
    is_last = np.bincount((draft.token_ids == vocab - 1).cpu(), minlength=2)
    assert_distribution(is_last, np.array([0.5, 0.5]))
