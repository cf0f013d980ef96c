"""Small language models as tables, the distributions that verification must have on them, and the chi-square test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from scipy.stats import chi2

from specdecode import RejectionSampler, Sampling, sample
from tests.conftest import ON_GPU

REQUESTS = 200_000
FALSE_ALARM = 1e-6
"""Each chi-square rejects a right distribution once in a million (pseudo-random) runs; seeds are fixed, so a pass stays one.

With 200,000 requests it rejects a distribution that is wrong by a total variation of 0.009, 0.010 and 0.013 at 2, 7 and 63
degrees of freedom 999 times in 1,000: N = lambda / (4 TV^2), lambda = 68, 82, 142.
"""


@dataclass
class Tables:
    """Target and draft logits for every prefix: `target[i]` and `draft[i]` are [vocab**i, vocab]."""

    target: list[np.ndarray]
    draft: list[np.ndarray]

    @property
    def vocab(self) -> int:
        return self.target[0].shape[1]

    @property
    def num_draft_tokens(self) -> int:
        return len(self.target) - 1


def tables(vocab: int, num_draft_tokens: int, history: bool, seed: int = 0, scale: float = 1.5) -> Tables:
    """Random tables; without `history` every row of both models is the same."""
    random = np.random.default_rng(seed)
    target, draft = [], []
    for length in range(num_draft_tokens + 1):
        rows = vocab**length
        target.append(
            scale * random.normal(size=(rows, vocab)) if history or not length else target[0][:1].repeat(rows, 0)
        )
        fresh = target[-1] + random.normal(size=(rows, vocab))
        draft.append(fresh if history or not length else draft[0][:1].repeat(rows, 0))
    return Tables(target, draft)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@dataclass
class Run:
    """The result of many requests."""

    tokens: np.ndarray  # [requests, num_draft_tokens + 1]: the step's tokens, then the target's own
    num_accepted: np.ndarray  # [requests]


def run(
    sampler: RejectionSampler,
    model: Tables,
    device: str,
    *,
    own_drafts: bool,
    draft_logits: bool = True,
    temperature: float = 1.0,
    draft_rows: list[np.ndarray] | None = None,
    truncation: Mapping[str, float] | None = None,
    draft_truncation: Mapping[str, float] | None = None,
    requests: int = REQUESTS,
    first_seed: int = 0,
) -> Run:
    """Verify one step of many requests with different seeds; sample the rest of the K + 1 tokens from the target alone.

    Drafts come from `sampler.draft`, truncated by `draft_truncation` (None: as the target is), or from a generator that is
    independent of the sampler's noise, not truncated.
    """
    truncation = truncation or {}
    of_drafts = truncation if draft_truncation is None else draft_truncation
    vocab, drafts = model.vocab, model.num_draft_tokens
    seeds = torch.arange(requests, device=device) + first_seed
    target = [torch.tensor(rows, dtype=torch.float32, device=device) for rows in model.target]
    draft = [torch.tensor(rows, dtype=torch.float32, device=device) for rows in (draft_rows or model.draft)]
    generator = torch.Generator(device=device).manual_seed(12345)

    prefix = torch.zeros(requests, dtype=torch.int64, device=device)
    target_logits, logits, token_ids = [target[0][prefix]], [], []
    for offset in range(drafts):
        rows = draft[offset][prefix]
        if own_drafts:
            tokens = sampler.draft(rows, temperature, seeds, torch.full_like(seeds, offset), offset=offset, **of_drafts)
            tokens = tokens.token_ids
        else:
            tokens = torch.multinomial(torch.softmax(rows / temperature, 1), 1, generator=generator).squeeze(1)
        prefix = prefix * vocab + tokens
        target_logits.append(target[offset + 1][prefix])
        logits.append(rows)
        token_ids.append(tokens)
    stack = torch.stack(token_ids, 1) if drafts else torch.zeros(requests, 0, dtype=torch.int64, device=device)
    output = sampler(
        torch.stack(target_logits, 1),
        stack,
        torch.stack(logits, 1) if draft_logits and drafts else None,
        temperature=temperature,
        seeds=seeds,
        draft_sampling=None if draft_truncation is None else Sampling(temperature, **draft_truncation),
        **truncation,
    )
    assert not output.invalid.any()

    tokens, prefix = output.token_ids.clone(), torch.zeros_like(prefix)
    for offset in range(drafts + 1):
        missing = tokens[:, offset] == -1
        own = sample(target[offset][prefix], temperature, seeds, torch.full_like(seeds, offset), **truncation)
        tokens[:, offset] = torch.where(missing, own, tokens[:, offset])
        prefix = prefix * vocab + tokens[:, offset]
    return Run(tokens.cpu().numpy(), output.num_accepted.cpu().numpy())


def joint_distribution(model: Tables, temperature: float = 1.0) -> np.ndarray:
    """Return the target's probability of every sequence of K + 1 tokens, by its code in base `vocab`."""
    distribution = np.ones(1)
    for rows in model.target:
        distribution = (distribution[:, None] * softmax(rows / temperature)).reshape(-1)
    return distribution


def accepted_distribution(
    model: Tables, accepted_draft: Callable[[np.ndarray, np.ndarray], np.ndarray], temperature: float = 1.0
) -> np.ndarray:
    """Return P(num_accepted = n); `accepted_draft(p, q)[j]` is the probability that the draft is j and is accepted."""
    reached, at_least = np.ones(1), [1.0]
    for target, draft in zip(model.target[:-1], model.draft):
        joint = [accepted_draft(p, q) for p, q in zip(softmax(target / temperature), softmax(draft / temperature))]
        reached = (reached[:, None] * np.array(joint)).reshape(-1)
        at_least.append(float(reached.sum()))
    return -np.diff([*at_least, 0.0])


def accepted_distribution_of_blocks(model: Tables, temperature: float = 1.0) -> np.ndarray:
    """Return P(num_accepted = n) of block verification.

    A block x of i drafts is drafted, and i drafts or more are accepted, with probability Q(x) c_i(x), where Q(x) is the
    probability that it is drafted and c_i the running ratio.
    """
    drafted, accepted, at_least = np.ones(1), np.ones(1), [1.0]
    for target, draft in zip(model.target[:-1], model.draft):
        drafted = (drafted[:, None] * softmax(draft / temperature)).reshape(-1)
        accepted = np.minimum(drafted, (accepted[:, None] * softmax(target / temperature)).reshape(-1))
        at_least.append(float(accepted.sum()))
    return -np.diff([*at_least, 0.0])


def counts_of_tokens(model: Tables, result: Run) -> np.ndarray:
    powers = model.vocab ** np.arange(model.num_draft_tokens, -1, -1)
    return np.bincount(result.tokens @ powers, minlength=model.vocab ** (model.num_draft_tokens + 1))


def p_value(counts: np.ndarray, distribution: np.ndarray) -> float:
    """Return the p-value of Pearson's chi-square. Cells that expect fewer than 5 are pooled, impossible ones must be 0."""
    assert counts[distribution == 0].sum() == 0
    expected = distribution * counts.sum()
    rare = expected < 5
    observed, expected = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), max(1, len(expected) - 1)))


def assert_distribution(counts: np.ndarray, distribution: np.ndarray) -> None:
    assert abs(distribution.sum() - 1) < 1e-9
    assert p_value(counts, distribution) > FALSE_ALARM


# A model without history is a special case, in which rows of other positions could be used and nobody would see it.
SHAPES = [(2, 4), (3, 3), (5, 2), (8, 1)]
CASES = [(*shape, history) for shape, history in product(SHAPES, [False, True]) if history or shape == (3, 3) or ON_GPU]
IDS = [f"V{vocab}-K{drafts}-{'history' if history else 'iid'}" for vocab, drafts, history in CASES]
