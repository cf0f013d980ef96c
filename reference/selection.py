"""Selection: from logits to one token, by two-level Gumbel-max.

The Gumbel-max trick: if the G(v) are independent standard Gumbel numbers, then the v with the largest log w(v) + G(v)
is a given token with probability w(v) / W, where W is the sum of all w. The weights need not be normalised, but every
token of the vocabulary, 150,000 of them, needs its own random number.

Two levels need far fewer random numbers. Cut the vocabulary into blocks of `BLOCK_SIZE` consecutive tokens, and let W_b
be the sum of w over block b.

1. Select the block b with the largest log W_b + G(b).
2. In that block, select the token v with the largest log w(v) + G'(v), where G' is independent of G.

P(v) = (W_b / W) * (w(v) / W_b) = w(v) / W, exactly as before.

Ties go to the lowest index. Left out: top-k, top-p and min-p, which [`truncation`][reference.truncation] has. Sources:
Gumbel-max in Maddison, Tarlow, Minka, "A* sampling" (2014); the two levels are the chain rule of probability applied to it.
"""

from typing import NamedTuple

import numpy as np

from reference.philox import Domain, gumbel

BLOCK_SIZE = 1024
"""Tokens per block. Seeded tokens depend on it: another size gives other tokens, with the same distribution."""

SELECT = (Domain.SELECT_BLOCK, Domain.SELECT_TOKEN)
"""Domains of a token that the target emits."""

DRAFT = (Domain.DRAFT_BLOCK, Domain.DRAFT_TOKEN)
"""Domains of a draft token, for methods whose drafts must not share noise with the tokens that the target emits."""


class Choice(NamedTuple):
    """The result of a decision: which index was selected, and by how much."""

    index: int
    """The selected token or block; for an accept decision 1 (accept) or 0 (reject)."""

    margin: float
    """How far the decision was from the next best one, in nats."""


def log_softmax(logits, temperature: float = 1.0):
    """Return log p, where p(v) is proportional to exp(l_v / T).

    T = 0 means the limit: the point mass on the largest logit, the first one on ties. NaN counts as -inf. If the
    largest logit is not finite, the result is a point mass at any T: on the first +inf, or on token 0 if every logit is
    -inf.

    >>> np.exp(log_softmax([0.0, np.log(3.0)])).round(6).tolist()
    [0.25, 0.75]
    >>> np.exp(log_softmax([0.0, np.log(3.0)], temperature=0.5)).round(6).tolist()
    [0.1, 0.9]
    >>> np.exp(log_softmax([1.0, 4.0, 4.0], temperature=0)).tolist()
    [0.0, 1.0, 0.0]
    >>> np.exp(log_softmax([np.nan, np.inf, 5.0, np.inf])).tolist()
    [0.0, 1.0, 0.0, 0.0]
    """
    logits = np.array(logits, dtype=np.float64)
    logits[np.isnan(logits)] = -np.inf
    top = int(logits.argmax())
    row_max = logits[top]
    if temperature == 0 or not np.isfinite(row_max):
        return np.where(np.arange(len(logits)) == top, 0.0, -np.inf)
    scaled = (logits - row_max) / temperature
    return scaled - np.log(np.exp(scaled).sum())


def is_invalid(logits) -> bool:
    """Return whether no token of a row is possible: every logit is NaN or -inf.

    >>> is_invalid([np.nan, -np.inf]), is_invalid([np.nan, 0.0]), is_invalid([np.nan, np.inf])
    (True, False, False)
    """
    return not bool((np.asarray(logits, dtype=np.float64) > -np.inf).any())


def first_maximum(scores) -> Choice:
    """Return the lowest index of the largest score.

    >>> first_maximum(np.array([1.0, 4.0, 4.0, 2.5]))
    Choice(index=1, margin=0.0)
    """
    best = int(np.argmax(scores))
    others = np.delete(scores, best)
    runner_up = others.max() if len(others) else -np.inf
    return Choice(best, np.inf if runner_up == -np.inf else float(scores[best] - runner_up))


def log_sum(log_weights) -> float:
    """Return log(sum(exp(log_weights))), which is -inf if every weight is 0.

    >>> round(float(np.exp(log_sum(np.log([0.25, 0.5])))), 12)
    0.75
    """
    largest = log_weights.max()
    return -np.inf if largest == -np.inf else float(largest + np.log(np.exp(log_weights - largest).sum()))


def select(log_weights, seed: int, position: int, domains=SELECT, block_size: int = BLOCK_SIZE) -> Choice:
    """Draw one token with probability proportional to its weight.

    Args:
        log_weights: [vocab] log w, -inf for weight 0; at least one is finite. They need not be normalised.
        seed: the request's seed.
        position: the absolute position of the token to be drawn.
        domains: the domains of the noise that selects the block, and of the noise that selects the token.
        block_size: tokens per block; the package uses `BLOCK_SIZE`.

    >>> select(np.log([0.2, 0.3, 0.5]), seed=7, position=0).index
    1
    >>> draws = [select(np.log([0.2, 0.3, 0.5]), seed, 0, block_size=2).index for seed in range(2000)]
    >>> [draws.count(token) for token in range(3)]
    [381, 581, 1038]
    """
    starts = range(0, len(log_weights), block_size)
    block_sums = np.array([log_sum(log_weights[start : start + block_size]) for start in starts])
    block = first_maximum(block_sums + gumbel(seed, position, np.arange(len(block_sums)), domains[0]))

    token_ids = np.arange(len(log_weights))[block.index * block_size :][:block_size]
    token = first_maximum(log_weights[token_ids] + gumbel(seed, position, token_ids, domains[1]))
    return Choice(int(token_ids[token.index]), min(block.margin, token.margin))


def sample(logits, *, temperature: float = 1.0, seed: int = 0, position: int = 0, domains=SELECT) -> Choice:
    """Draw one token from softmax(logits / temperature): plain seeded sampling, or one step of a drafter.

    >>> sample([0.0, 2.0, 1.0], seed=3, position=5).index
    1
    >>> sample([0.0, 1.0, 2.0], temperature=0, seed=3, position=5).index
    2
    """
    return select(log_softmax(logits, temperature), seed, position, domains)
