"""The tests behind the checks: p-values that hold at one in a billion, and how small an error a test sees.

G = 2 sum O ln(O / E) is compared with chi-square. Far out in the tail it is much closer to it than Pearson's statistic,
whose terms (O - E)^2 / E give a small E too much weight. Cells that expect fewer than 10 are pooled, and Williams'
correction takes away what is left at small sizes. An outcome that is impossible needs no test: one is proof.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc, chdtri, chndtrinc

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

MIN_EXPECTED = 10
"""Cells that expect fewer are pooled."""

POWER = 0.999
"""The power: the probability of finding an error that a test of this size "would have seen"."""


class Fit(NamedTuple):
    """The fit of counts to a distribution."""

    p_value: float
    degrees: int
    size: int
    impossible: int = 0
    """The number of impossible outcomes that were seen."""


def goodness_of_fit(counts: Counts, probabilities: Floats) -> Fit:
    """Test rows of counts against a distribution for each row; the rows' totals are taken as given.

    >>> goodness_of_fit(np.array([[480, 520]]), np.array([[0.5, 0.5]]))  # p-value: chi-square of 1.6003 with 1 degree
    Fit(p_value=0.2059..., degrees=1, size=1000, impossible=0)
    >>> goodness_of_fit(np.array([[999, 1]]), np.array([[1.0, 0.0]])).p_value
    0.0
    """
    impossible = int(counts[probabilities == 0].sum())
    statistic, degrees, size = 0.0, 0, 0
    for row, probability in zip(counts, probabilities):
        observed, expected = pooled(row[probability > 0], probability[probability > 0] * row.sum())
        if len(observed) < 2:
            continue
        total = observed.sum()
        correction = 1 + ((total / expected).sum() - 1) / (6 * total * (len(observed) - 1))
        statistic += deviance(observed, expected) / correction
        degrees += len(observed) - 1
        size += int(total)
    p_value = 0.0 if impossible else float(chdtrc(degrees, statistic)) if degrees else 1.0
    return Fit(p_value, degrees, size, impossible)


def homogeneity(one: Counts, other: Counts) -> Fit:
    """Test whether two samples of cells, given by their numbers, are from one distribution."""
    cell, numbers = np.unique(np.concatenate([one, other]), return_inverse=True)
    table = np.array([np.bincount(part, minlength=len(cell)) for part in (numbers[: len(one)], numbers[len(one) :])])
    together = table.sum(axis=0)
    order = np.argsort(together, kind="stable")
    small = int((together < 2 * MIN_EXPECTED).sum())
    groups = np.concatenate(
        [together[order][:small].cumsum() // (2 * MIN_EXPECTED), len(cell) + np.arange(small, len(cell))]
    )
    _, group = np.unique(groups, return_inverse=True)
    pooled_table = np.array([np.bincount(group, weights) for weights in table[:, order]])
    return independence(pooled_table, keep_rows=True)._replace(size=len(one))


def independence(table: Counts | Floats, keep_rows: bool = False) -> Fit:
    """Test whether the rows of a table of counts have one distribution: the totals are taken as given.

    Rows and columns that expect too little are added up; rows only if they need not be kept.

    >>> independence(np.array([[30, 20], [20, 30]]))  # p-value: chi-square of 4.0271 / 1.015 with 1 degree
    Fit(p_value=0.0463..., degrees=1, size=100, impossible=0)
    """
    table = np.asarray(table, dtype=np.float64)
    total = table.sum()
    while min(table.shape) > 1 and table.sum(axis=1).min() * table.sum(axis=0).min() < MIN_EXPECTED * total:
        by_rows = not keep_rows and table.sum(axis=1).min() < table.sum(axis=0).min()
        table = smallest_joined(table) if by_rows else smallest_joined(table.T).T
    if min(table.shape) < 2:
        return Fit(1.0, 0, int(total))
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    degrees = (len(rows) - 1) * (len(columns) - 1)
    statistic = deviance(table, np.outer(rows, columns) / total)
    correction = 1 + ((total / rows).sum() - 1) * ((total / columns).sum() - 1) / (6 * total * degrees)
    return Fit(float(chdtrc(degrees, statistic / correction)), degrees, int(total))


def smallest_joined(table: Floats) -> Floats:
    """Add up the two smallest rows."""
    table = table[np.argsort(table.sum(axis=1), kind="stable")]
    return np.concatenate([table[:1] + table[1:2], table[2:]])


def deviance(observed: Floats, expected: Floats) -> float:
    """Return G; cells where nothing was observed add nothing."""
    seen = observed > 0
    return 2 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())


def pooled(observed: Counts, expected: Floats) -> tuple[Floats, Floats]:
    """Add up the cells that expect the least until none expects too little."""
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    small = int((expected < MIN_EXPECTED).sum())
    while small and small < len(expected) and expected[:small].sum() < MIN_EXPECTED:
        small += 1
    if not small:
        return observed.astype(np.float64), expected
    return tuple(np.append(cells[small:], cells[:small].sum()).astype(np.float64) for cells in (observed, expected))  # type: ignore[return-value]


def p_value_of_mean(mean: float, bound: float, size: int) -> float:
    """Bound the probability that the mean of `size` numbers in [0, 1] is this large, if its expectation is `bound` or less.

    Hoeffding (1963), theorem 1: exp(-size KL(mean || bound)).

    >>> round(p_value_of_mean(0.6, 0.5, 1000), 12)
    1.8e-09
    """
    if mean <= bound:
        return 1.0
    if bound <= 0:
        return 0.0
    divergence = mean * np.log(mean / bound)
    if mean < 1:
        divergence += (1 - mean) * np.log((1 - mean) / (1 - bound))
    return float(np.exp(-size * divergence))


def lower_bound(mean: float, size: int, error: float = 1e-3) -> float:
    """Return the lower confidence bound of an expectation, from the mean of `size` numbers in [0, 1].

    >>> round(lower_bound(0.6, 1000), 4)
    0.5417
    """
    low, high = 0.0, mean
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if p_value_of_mean(mean, middle, size) > error else (middle, high)
    return high


def distance(counts: Counts, probabilities: Floats) -> tuple[float, float]:
    """Return the total variation of rows of counts, and its mean if they are drawn from the probabilities.

    Rows are weighted by their totals. The mean of |O - E| is sqrt(2 / pi) standard deviations.
    """
    totals = counts.sum(axis=1, keepdims=True)
    deviations = np.sqrt(totals * probabilities * (1 - probabilities))
    scale = 2 * max(1, int(totals.sum()))
    return float(abs(counts - totals * probabilities).sum() / scale), float(
        (2 / np.pi) ** 0.5 * deviations.sum() / scale
    )


def detectable(degrees: int, size: int, threshold: float) -> float:
    """Return the total variation that a test of this size sees with probability .999: sqrt(lambda / (4 size)).

    >>> round(detectable(7, 200_000, 1e-6), 4)
    0.0101
    """
    if not degrees or not size:
        return 1.0
    noncentrality = chndtrinc(chdtri(degrees, threshold), degrees, 1 - POWER)
    return min(1.0, float(np.sqrt(noncentrality / (4 * size))))
