"""Sampling: from a row of logits to its distribution, and to a token.

The other modules use distributions p and q. A model returns logits instead, and a request has sampling parameters.

- *Temperature*: p is the softmax of logits / T. At T = 0 it is the point mass on the argmax.
- *Rows without a distribution*: NaN counts as -inf. A row whose largest logit is not finite is the point mass on the
  first of its largest logits: on the first +inf, or on token 0 if every logit is -inf.
- *Truncation*: by the rules of [`truncation`][reference.truncation]. The logits of excluded tokens become -inf, and
  softmax then gives the truncated distribution.
- *Logarithms*: probabilities are kept as logarithms, because p(x) and q(x) can round to 0 where their ratio is still an
  ordinary number.
- *Margins*: every decision has a margin, its distance from the next best decision in nats (units of the natural
  logarithm).
"""

from typing import NamedTuple

import numpy as np

from reference import selection
from reference.greedy import argmax
from reference.philox import SELECT, gumbel
from reference.selection import BLOCK_SIZE, log_block_sums
from reference.truncation import token_order


class Sampling(NamedTuple):
    """The sampling parameters of a row of logits."""

    temperature: float = 1.0
    """0 is greedy; the other parameters are then unused."""

    top_k: int | None = None
    """None, 0, or at least the vocabulary size: all tokens."""

    top_p: float = 1.0
    min_p: float = 0.0


class Choice(NamedTuple):
    """A decision and its margin."""

    index: int
    """A token, a number of kept tokens, or an accept decision: 1 (accept) or 0 (reject)."""

    margin: float
    """The distance from the next best decision, in nats."""


def without_nan(logits):
    """Return the logits in float64, -inf in place of NaN."""
    logits = np.array(logits, dtype=np.float64)
    logits[np.isnan(logits)] = -np.inf
    return logits


def is_invalid(logits) -> bool:
    """Return whether no token of a row is possible: every logit is NaN or -inf.

    >>> is_invalid([np.nan, -np.inf]), is_invalid([np.nan, 0.0]), is_invalid([np.nan, np.inf])
    (True, False, False)
    """
    return not bool((without_nan(logits) > -np.inf).any())


def log(probs):
    """Return the logarithms of probabilities; the logarithm of 0 is -inf."""
    with np.errstate(divide="ignore"):
        return np.log(probs)


def point_mass(token: int, vocab_size: int):
    """Return log p of the distribution that gives one token probability 1."""
    return np.where(np.arange(vocab_size) == token, 0.0, -np.inf)


def log_softmax(logits, temperature: float = 1.0):
    """Return log p, where p(v) is proportional to exp(l_v / T); T = 0 is the limit.

    >>> np.exp(log_softmax([0.0, np.log(3.0)])).round(6).tolist()
    [0.25, 0.75]
    >>> np.exp(log_softmax([0.0, np.log(3.0)], temperature=0.5)).round(6).tolist()
    [0.1, 0.9]
    >>> np.exp(log_softmax([1.0, 4.0, 4.0], temperature=0)).tolist()
    [0.0, 1.0, 0.0]
    >>> np.exp(log_softmax([np.nan, np.inf, 5.0, np.inf])).tolist()
    [0.0, 1.0, 0.0, 0.0]
    """
    logits = without_nan(logits)
    top = argmax(logits)
    if temperature == 0 or not np.isfinite(logits[top]):
        return point_mass(top, len(logits))
    scaled = (logits - logits[top]) / temperature
    return scaled - np.log(np.exp(scaled).sum())


def choose_num_kept(logprobs, sampling: Sampling) -> Choice:
    """Return the number of kept tokens as a `Choice`, given the log-probabilities in the order of truncation.

    The margin is the smallest margin of the comparisons of min_p and top_p; top_k is an exact comparison of integers.

    >>> logprobs = np.log([0.4, 0.3, 0.2, 0.1])
    >>> choose_num_kept(logprobs, Sampling(min_p=0.5)).index, choose_num_kept(logprobs, Sampling(top_k=3, top_p=0.75)).index
    (3, 2)
    """
    count, margin = int(np.isfinite(logprobs).sum()), np.inf
    if sampling.min_p > 0:
        slack = logprobs[:count] - logprobs[0] - np.log(sampling.min_p)
        count, margin = int((slack >= 0).sum()), float(np.abs(slack).min())
    if sampling.top_k:
        count = min(count, sampling.top_k)
    if sampling.top_p < 1:
        probs = np.exp(logprobs[:count])
        before = np.cumsum(probs) - probs
        slack = np.log(sampling.top_p * probs.sum()) - np.log(before[1:])  # the first token is always kept
        count = 1 + int((slack > 0).sum())
        margin = min(margin, float(np.abs(slack).min(initial=np.inf)))
    return Choice(count, margin)


def truncate(logits, sampling: Sampling):
    """Return the logits with -inf for excluded tokens, and the margin of the truncation.

    >>> truncate(np.log([0.1, 0.4, 0.2, 0.3]), Sampling(top_p=0.65))[0].round(3).tolist()
    [-inf, -0.916, -inf, -1.204]
    >>> truncate([5.0, 5.0, 5.0], Sampling(top_k=2))[0].tolist()
    [5.0, 5.0, -inf]
    """
    logits = np.array(logits, dtype=np.float64)
    if sampling.temperature == 0 or sampling[1:] == Sampling()[1:]:
        return logits, np.inf
    order = token_order(without_nan(logits))
    kept = choose_num_kept(log_softmax(logits, sampling.temperature)[order], sampling)
    logits[order[kept.index :]] = -np.inf
    return logits, kept.margin


def cutoff(logits, sampling: Sampling) -> int:
    """Return the least likely kept token; of equal logits, the highest id.

    >>> cutoff(np.log([0.1, 0.4, 0.2, 0.3]), Sampling(top_k=3))
    2
    """
    order = token_order(without_nan(logits))
    kept = choose_num_kept(log_softmax(logits, sampling.temperature)[order], sampling)
    return int(order[kept.index - 1])


def spread(draft_logits, draft_vocab_ids, vocab_size: int):
    """Return a row over the draft's own vocabulary as a row over the target's tokens, with -inf for tokens not in it.

    Draft id i is the target's token draft_vocab_ids[i]. A row is truncated before it is spread.

    >>> spread([0.5, 1.5], draft_vocab_ids=[3, 1], vocab_size=4).tolist()
    [-inf, 1.5, -inf, 0.5]
    """
    row = np.full(vocab_size, -np.inf)
    row[np.asarray(draft_vocab_ids)] = draft_logits
    return row


def lead(scores) -> float:
    """Return the largest score minus the second largest; infinity if no second score is finite.

    >>> lead(np.array([1.0, 4.0, 2.5])), lead(np.array([4.0, -np.inf]))
    (1.5, inf)
    """
    best = int(np.argmax(scores))
    runner_up = np.delete(scores, best).max(initial=-np.inf)
    return np.inf if runner_up == -np.inf else float(scores[best] - runner_up)


class TokenGumbels:
    """The Gumbel numbers of tokens, computed on access because only the selected block needs them."""

    def __init__(self, seed: int, position: int, domain: int) -> None:
        self.seed, self.position, self.domain = seed, position, domain

    def __getitem__(self, token_ids):
        """Return the Gumbel numbers of some tokens."""
        return gumbel(self.seed, self.position, token_ids, self.domain)


def select(log_weights, seed: int, position: int, domains=SELECT, block_size: int = BLOCK_SIZE) -> Choice:
    """Draw one token with a probability proportional to its weight.

    Args:
        log_weights: [vocab] log w, -inf for weight 0; at least one is finite. They need not be normalised.
        seed: the request's seed.
        position: the absolute position of the token to be drawn.
        domains: the noise domains for selecting the block and for selecting the token.
        block_size: tokens per block; the package uses `BLOCK_SIZE`.

    >>> draws = [select(np.log([0.2, 0.3, 0.5]), seed, 0, block_size=2).index for seed in range(2000)]
    >>> [draws.count(token) for token in range(3)]
    [381, 581, 1038]
    """
    log_sums = log_block_sums(log_weights, block_size)
    block_gumbels = gumbel(seed, position, np.arange(len(log_sums)), domains[0])
    token_gumbels = TokenGumbels(seed, position, domains[1])
    token = selection.select(log_weights, block_gumbels, token_gumbels, block_size)
    token_ids = np.arange(len(log_weights))[token // block_size * block_size :][:block_size]
    token_margin = lead(log_weights[token_ids] + token_gumbels[token_ids])
    return Choice(token, min(lead(log_sums + block_gumbels), token_margin))


def sample(logits, *, temperature: float = 1.0, seed: int = 0, position: int = 0, domains=SELECT) -> Choice:
    """Draw one token from softmax(logits / temperature): plain seeded sampling, or one step of a drafter.

    >>> sample([0.0, 2.0, 1.0], seed=3, position=5).index
    1
    >>> sample([0.0, 1.0, 2.0], temperature=0, seed=3, position=5).index
    2
    """
    return select(log_softmax(logits, temperature), seed, position, domains)


def processed_logprobs(target_logits, token_ids, sampling: Sampling):
    """Return log p'(y) of each emitted token y, where p' is the target's scaled and truncated distribution.

    Every exact method emits y with this very probability, whether y was accepted, recovered or a bonus token. So the
    residual, from which a recovered token is drawn after a rejection, does not appear: it is the distribution of y given the
    draft that was rejected. At temperature 0 the target samples from a point mass: 0 for the argmax. The result is -inf for
    a token that the target never emits: only synthetic verification accepts such drafts.

    Args:
        target_logits: [rows, vocab] raw logits, a row for each emitted token or more.
        token_ids: [num_tokens] emitted tokens.
        sampling: how the target samples.

    >>> row = np.log([0.5, 0.3, 0.2])
    >>> np.exp(processed_logprobs([row], [1], Sampling(top_k=2))).round(6).tolist()  # 0.3 / (0.5 + 0.3)
    [0.375]
    >>> np.exp(processed_logprobs([row], [1], Sampling(temperature=0.5))).round(6).tolist()  # 0.09 / (0.25 + 0.09 + 0.04)
    [0.236842]
    """
    rows = [truncate(row, sampling)[0] for row in target_logits[: len(token_ids)]]
    return np.array([log_softmax(row, sampling.temperature)[token] for row, token in zip(rows, token_ids)])


def raw_logprobs(target_logits, token_ids):
    """Return log p(y) of each emitted token y, where p = softmax(logits) for any sampling parameters.

    >>> np.exp(raw_logprobs(np.log([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]), [1, 2])).round(6).tolist()
    [0.3, 0.8]
    """
    return processed_logprobs(target_logits, token_ids, Sampling())


def top_logprobs(logits, count: int, sampling: Sampling) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a row, in descending order, each with its log p'.

    Of equal logits the lowest id comes first. If fewer than `count` tokens are kept, the rest is (-1, -inf). At
    temperature 0 there is one token: the argmax, with log p' = 0.

    Args:
        logits: [vocab] raw logits.
        count: how many tokens.
        sampling: how the target samples; `Sampling()` for the model's own distribution, at temperature 1, untruncated.

    >>> row = np.log([0.2, 0.3, 0.3, 0.2])
    >>> [(token, round(float(np.exp(logprob)), 6)) for token, logprob in top_logprobs(row, 3, Sampling(top_p=0.5))]
    [(1, 0.5), (2, 0.5), (-1, 0.0)]
    >>> [token for token, _ in top_logprobs(row, 3, Sampling())], top_logprobs(row, 2, Sampling(0.0))
    ([1, 2, 0], [(1, 0.0), (-1, -inf)])
    """
    row = truncate(logits, sampling)[0]
    logprobs = log_softmax(row, sampling.temperature)
    kept = [
        (int(token), float(logprobs[token])) for token in token_order(without_nan(row)) if logprobs[token] > -np.inf
    ]
    return [*kept, *[(-1, -np.inf)] * count][:count]


def kept_tokens(logits, sampling: Sampling) -> list[int]:
    """Return the tokens that the target may emit at a row, in the order of their ids.

    A row that nothing truncates keeps every token with a finite logit; a point mass, such as at temperature 0, keeps one.

    >>> row = [3.0, -np.inf, 2.0, 4.0, np.nan]
    >>> kept_tokens(row, Sampling()), kept_tokens(row, Sampling(top_k=2)), kept_tokens(row, Sampling(0.0))
    ([0, 2, 3], [0, 3], [3])
    """
    logprobs = log_softmax(truncate(logits, sampling)[0], sampling.temperature)
    return np.flatnonzero(logprobs > -np.inf).tolist()
