"""The tests behind `check_server`: sampled tokens against rows of log-probabilities.

Given the text before it, a token of a right server is a draw from its row. So a function of row and token, minus its
expectation under the row, has mean 0; its sums are martingales, close to normal. Bets multiply a wealth by numbers with mean
1: a right server's wealth ever reaches 1 / p with probability p at most (Ville's inequality), whenever sampling stops.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc, ndtr

from specdecode.checking.statistics import Fit, Floats, goodness_of_fit, homogeneity

EDGES = np.array([1, 2, 3, 5, 10, 20])
RANKS = ("1", "2", "3", "4-5", "6-10", "11-20", "others")
UNLIKELY = -18.0
"""Log-probability: all tokens below it together have less than 0.004, in a vocabulary of 256,000."""

REST = -1
"""Stands for all tokens that the row does not list."""

Context = tuple[int, ...]
"""The number of a prompt, and the tokens after it."""


class Row(NamedTuple):
    """The likeliest tokens and their probabilities, in descending order; the last entry is REST."""

    tokens: tuple[int, ...]
    probs: Floats

    def place(self, token: int) -> int:
        """Return the token's index."""
        return self.tokens.index(token if token in self.tokens else REST)

    def surprise(self) -> Floats:
        """Return -log p of each entry."""
        return np.asarray(-np.log(np.maximum(self.probs, 1e-12)))


def make_row(listed: Mapping[int, float], count: int, temperature: float = 1.0) -> Row:
    """Return the row of the `count` likeliest listed tokens, from log-probabilities at temperature 1.

    At another temperature the share of the other tokens is unknown: REST has probability 0, and the row is conditional.

    >>> make_row({7: np.log(0.6), 9: np.log(0.3)}, 20).probs.round(2).tolist()
    [0.6, 0.3, 0.1]
    """
    likeliest = sorted(listed.items(), key=lambda item: -item[1])[:count]
    logs = np.array([value for _, value in likeliest])
    probs = np.append(np.exp(logs), max(1e-9, 1 - np.exp(logs).sum()))
    if temperature != 1:
        probs = np.append(np.exp((logs - logs[0]) / temperature), 0.0)
    return Row((*(token for token, _ in likeliest), REST), probs / probs.sum())


class Ranks(NamedTuple):
    """Ranks of tokens, compared with their rows."""

    observed: NDArray[np.int64]
    expected: Floats
    fit: Fit
    excess: float  # of the statistic over its expectation; it grows with the variance
    variance: float


class Judged(NamedTuple):
    """A token beside its row: its bin, the bins' probabilities, -log p minus the entropy, and the variance of -log p."""

    temperature: float
    position: int
    seen: int
    bins: Floats
    surprise: float
    variance: float


class Evidence:
    """Tokens beside their rows, and bets on them."""

    def __init__(self) -> None:
        self.judged: list[Judged] = []
        self.unlikely = 0
        self.wealth, self.best = np.zeros(2), 0.0  # logarithms: bets on ranks and on tokens; the largest mean so far
        self.cells: dict[tuple[Context, int], list[float]] = defaultdict(lambda: [0.0, 0.0])  # observed, expected

    def add(self, row: Row, token: int, context: Context, temperature: float, logprob: float = 0.0) -> None:
        """Add a token, if its row says anything about it, and its log-probability, if the server reports that."""
        self.unlikely += logprob < UNLIKELY
        place = row.place(token)
        if not row.probs[place]:
            return
        ranks = np.append(np.searchsorted(EDGES, np.arange(1, len(row.probs))), len(EDGES))  # the bin of each entry
        surprise = row.surprise()
        bins, mean = np.bincount(ranks, row.probs, len(RANKS)).astype(float), row.probs @ surprise
        seen, variance = int(ranks[place]), float(row.probs @ (surprise - mean) ** 2)
        self.judged.append(Judged(temperature, len(context) - 1, seen, bins, float(surprise[place] - mean), variance))
        self.wealth[0] += self.bet([((), rank) for rank in range(len(RANKS))], bins, seen, 200.0)
        self.wealth[1] += self.bet([(context, name) for name in row.tokens], row.probs, place, 5.0)
        self.best = max(self.best, float(np.logaddexp(*self.wealth) - np.log(2)))

    def bet(self, names: Sequence[tuple[Context, int]], probs: Floats, seen: int, prior: float) -> float:
        """Return log(w(seen) / E[w]) for the odds w = (observed + prior) / (expected + prior) of earlier tokens."""
        cells = [self.cells[name] for name in names]
        odds = [(observed + prior) / (expected + prior) for observed, expected in cells]
        for cell, prob in zip(cells, probs):
            cell[1] += prob
        cells[seen][0] += 1
        return float(np.log(odds[seen] / (probs @ np.array(odds))))

    def surprisal(self) -> tuple[float, float]:
        """Return the p-value, and surprisal minus entropy in nats a token."""
        total, variance = sum(each.surprise for each in self.judged), sum(each.variance for each in self.judged)
        return float(2 * ndtr(-abs(total) / max(1e-9, variance) ** 0.5)), total / max(1, len(self.judged))

    def ranks(self, judged: Sequence[Judged] | None = None) -> Ranks:
        """Test the ranks of all tokens, or of some: d^T C^-1 d, where small bins join the largest."""
        judged = self.judged if judged is None else judged
        expected = np.array([each.bins for each in judged]).reshape(-1, len(RANKS))
        observed = np.bincount([each.seen for each in judged], minlength=len(RANKS))
        difference = observed - expected.sum(axis=0)
        covariance = np.diag(expected.sum(axis=0)) - expected.T @ expected
        kept = covariance.diagonal() > 5
        kept[covariance.diagonal().argmax()] = False
        degrees, part = int(kept.sum()), difference[kept]
        statistic = float(part @ np.linalg.solve(covariance[np.ix_(kept, kept)], part))
        fit = Fit(float(chdtrc(degrees, statistic)) if degrees else 1.0, degrees, len(judged))
        return Ranks(observed, expected.sum(axis=0), fit, statistic - degrees, max(1.0, covariance.trace()))

    def suspects(self) -> list[str]:
        """Return the ids of the known mistakes that ranks and positions tell."""
        plain = [each for each in self.judged if each.temperature == 1]
        ranks, other = self.ranks(plain), self.ranks([each for each in self.judged if each.temperature != 1])
        share = (ranks.observed - ranks.expected) / max(1, len(plain))
        if share[0] > 0.1 and ranks.observed[0] > 0.97 * len(plain):
            return ["always_greedy"]
        flat = self.unlikely > 0.01 * len(self.judged)
        if flat or share[-1] > 0.3 or (ranks.fit.p_value > 1e-3 and other.fit.p_value < 1e-6):
            return ["temperature_ignored"]
        if ranks.fit.p_value > 1e-4:
            return []
        last = max(each.position for each in plain)
        if any(self.alone(plain, set(range(1, end))) for end in range(2, last + 1)):
            return ["bonus_from_another_row"]  # the first step's drafts are judged rightly, and a later token is wrong
        if any(self.alone(plain, set(range(step, last + 1, step))) for step in range(2, last + 1)):
            return ["accept_everything"]  # every draft is wrong, and only the bonus token after them is right
        # p in place of the residual emits min(p, q) + (1 - acceptance) p: less than 2 p
        return ["recovered_from_target"] if (ranks.observed < 2.1 * ranks.expected + 10).all() else []

    def alone(self, judged: Sequence[Judged], positions: set[int]) -> bool:
        """Return whether these positions fit, and would not if they deviated as the others do."""
        inside = self.ranks([each for each in judged if each.position in positions])
        others = self.ranks([each for each in judged if each.position not in positions])
        expected = others.excess / others.variance * inside.variance
        return expected > 30 and inside.excess < 0.25 * expected


def prefix_fit(counts: Mapping[Context, Counter[int]], rows: Mapping[Context, Row]) -> tuple[Fit, str]:
    """Test the tokens after each context against its row; return the test, and the largest difference in words."""
    width = max((len(row.probs) for row in rows.values()), default=1)
    observed, expected = np.zeros((len(rows), width), dtype=np.int64), np.zeros((len(rows), width))
    worst = 0.0, ""
    for seen, probs, (context, row) in zip(observed, expected, rows.items()):
        probs[: len(row.probs)] = row.probs
        for token, count in counts[context].items():
            seen[row.place(token)] += count
        seen[probs == 0] = 0  # nothing is known of them
        size = max(1, seen.sum())
        gaps = abs(seen - size * probs) / size**0.5
        at = int(gaps.argmax())
        name = "other tokens" if row.tokens[at] == REST else f"token {row.tokens[at]}"
        found = f"{name}: {seen[at] / size:.4f}, expected {probs[at]:.4f} ({seen[at]} of {size})"
        worst = max(worst, (float(gaps[at]), f"after prompt {context[0]} and tokens {list(context[1:])}, {found}"))
    return goodness_of_fit(observed, expected), worst[1]


def two_samples(one: Sequence[Context], other: Sequence[Context]) -> Fit:
    """Test whether two servers give equal texts of two, three and four tokens: the smallest p-value times three."""
    fits = []
    for length in (3, 4, 5):
        numbers = {text: i for i, text in enumerate(sorted({text[:length] for text in [*one, *other]}))}
        fits.append(homogeneity(*(np.array([numbers[text[:length]] for text in each]) for each in (one, other))))
    fit = min(fits)
    return fit._replace(p_value=min(1.0, 3 * fit.p_value), size=fit.size // 2)
