"""Small language models as tables, the expected distributions of verification, and the chi-square test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import chi2

from specdecode import RejectionSampler, Sampling, sample

REQUESTS = 200_000
FALSE_ALARM = 1e-6
"""The probability that a chi-square test rejects a right distribution; seeds are fixed, so results do not change.

With N = 200,000 requests a test rejects with probability 0.999 an error of total variation TV = 0.009, 0.010 and 0.013 at
2, 7 and 63 degrees of freedom: TV^2 = lambda / (4 N), where lambda = 68, 82 and 142 is the noncentrality that the
noncentral chi-square distribution needs for this probability.
"""


@dataclass
class Tables:
    """Logits for every prefix: `target[i]` and `draft[i]` are [vocab**i, vocab]; the draft has one entry less."""

    target: list[np.ndarray]
    draft: list[np.ndarray]

    @property
    def vocab(self) -> int:
        return self.target[0].shape[1]

    @property
    def num_draft_tokens(self) -> int:
        return len(self.target) - 1


def tables(vocab: int, num_draft_tokens: int, seed: int = 0) -> Tables:
    """Return random tables: every row depends on all tokens before it."""
    random = np.random.default_rng(seed)
    target = [1.5 * random.normal(size=(vocab**length, vocab)) for length in range(num_draft_tokens + 1)]
    return Tables(target, [rows + random.normal(size=rows.shape) for rows in target[:-1]])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def run(
    sampler: RejectionSampler,
    model: Tables,
    device: str,
    temperature: float,
    truncation: Mapping[str, float],
    draft_truncation: Mapping[str, float] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Verify one step of REQUESTS requests with different seeds; `sample` draws the rest of K + 1 tokens from the target.

    Drafts come from `sampler.draft`, truncated by `draft_truncation`; None: by `truncation`, as the target.

    Returns:
        The tokens, [REQUESTS, K + 1], and the numbers of accepted drafts, [REQUESTS].
    """
    seeds = torch.arange(REQUESTS, device=device)
    target, draft = (
        [torch.tensor(rows, dtype=torch.float32, device=device) for rows in side]
        for side in (model.target, model.draft)
    )
    prefix = torch.zeros_like(seeds)  # the tokens so far as digits in base `vocab`: an index of rows
    target_logits, draft_logits, token_ids = [target[0][prefix]], [], []
    for offset in range(model.num_draft_tokens):
        draft_logits.append(draft[offset][prefix])
        where = {"seeds": seeds, "positions": torch.full_like(seeds, offset), "offset": offset}
        limits = truncation if draft_truncation is None else draft_truncation
        token_ids.append(sampler.draft(draft_logits[-1], temperature, **where, **limits).token_ids)
        prefix = prefix * model.vocab + token_ids[-1]
        target_logits.append(target[offset + 1][prefix])
    output = sampler(
        *(torch.stack(rows, 1) for rows in (target_logits, token_ids, draft_logits)),
        temperature=temperature,
        seeds=seeds,
        draft_sampling=None if draft_truncation is None else Sampling(temperature, **draft_truncation),
        **truncation,
    )
    assert not output.invalid.any()

    tokens, prefix = output.token_ids.clone(), torch.zeros_like(prefix)
    for offset, rows in enumerate(target):
        own = sample(rows[prefix], temperature, seeds, torch.full_like(seeds, offset), **truncation)
        tokens[:, offset] = torch.where(tokens[:, offset] == -1, own, tokens[:, offset])
        prefix = prefix * model.vocab + tokens[:, offset]
    return tokens.cpu().numpy(), output.num_accepted.cpu().numpy()


def joint_distribution(model: Tables, temperature: float = 1.0) -> np.ndarray:
    """Return the target's probability of every sequence of K + 1 tokens, [vocab^(K + 1)]; tokens are digits of the index."""
    distribution = np.ones(1)
    for rows in model.target:
        distribution = (distribution[:, None] * softmax(rows / temperature)).reshape(-1)
    return distribution


def accepted_distribution(
    model: Tables, accepted_draft: Callable[[np.ndarray, np.ndarray], np.ndarray], temperature: float = 1.0
) -> np.ndarray:
    """Return P(num_accepted = n), [K + 1]; `accepted_draft(p, q)[v]` is P(token v is drafted and accepted)."""
    reached, at_least = np.ones(1), [1.0]
    for target, draft in zip(model.target[:-1], model.draft):
        joint = [accepted_draft(p, q) for p, q in zip(softmax(target / temperature), softmax(draft / temperature))]
        reached = (reached[:, None] * np.array(joint)).reshape(-1)
        at_least.append(float(reached.sum()))
    return -np.diff([*at_least, 0.0])


def accepted_distribution_of_blocks(model: Tables, temperature: float = 1.0) -> np.ndarray:
    """Return P(num_accepted = n) of block verification, [K + 1].

    A block x of i drafts is drafted, and i drafts or more are accepted, with probability Q(x) c_i(x), where Q(x) is the
    probability that it is drafted and c_i the running ratio.
    """
    drafted, accepted, at_least = np.ones(1), np.ones(1), [1.0]
    for target, draft in zip(model.target[:-1], model.draft):
        drafted = (drafted[:, None] * softmax(draft / temperature)).reshape(-1)
        accepted = np.minimum(drafted, (accepted[:, None] * softmax(target / temperature)).reshape(-1))
        at_least.append(float(accepted.sum()))
    return -np.diff([*at_least, 0.0])


def counts_of_tokens(model: Tables, tokens: np.ndarray) -> np.ndarray:
    """Return the counts of sequences, [vocab^(K + 1)], in the order of `joint_distribution`."""
    powers = model.vocab ** np.arange(model.num_draft_tokens, -1, -1)
    return np.bincount(tokens @ powers, minlength=model.vocab ** (model.num_draft_tokens + 1))


def p_value(counts: np.ndarray, distribution: np.ndarray) -> float:
    """Return the p-value of Pearson's chi-square test; raise if an impossible cell has counts. Cells below 5 are pooled."""
    assert counts[distribution == 0].sum() == 0
    expected = distribution * counts.sum()
    rare = expected < 5
    observed, expected = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), max(1, len(expected) - 1)))


def assert_distribution(counts: np.ndarray, distribution: np.ndarray) -> None:
    assert abs(distribution.sum() - 1) < 1e-9
    assert p_value(counts, distribution) > FALSE_ALARM
