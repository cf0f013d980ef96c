"""The likeliest tokens and the kept sets of emitted rows: what they are, in the reference and in the eager backend."""

from fractions import Fraction

import numpy as np
import pytest

from reference import sampling
from reference.sampling import Sampling
from tests.support.mutants import Mutant, assert_caught
from tests.support.truncated import kept_tokens

INF = float("inf")


# ---------------------------------------------------------------------------------------------------------------------
# The reference
# ---------------------------------------------------------------------------------------------------------------------


def check_against_fractions(rows: int = 60) -> None:
    """Of random rows of whole numbers as weights, both are what a sort of fractions and a sum of them say."""
    random = np.random.default_rng(0)
    for _ in range(rows):
        weights = random.integers(0, 12, size=8)
        weights[random.integers(8)] += 1  # one at least is not 0; many are equal
        options = {"top_k": int(random.integers(0, 9)), "top_p": float(random.choice([1.0, 0.83])), "min_p": 0.0}
        squared = [Fraction(int(weight) ** 2) for weight in weights]  # at temperature 1/2
        kept = kept_tokens([weight / sum(squared) for weight in squared], **options)
        logits = sampling.log(weights.astype(float))
        assert sampling.kept_tokens(logits, Sampling(0.5, **options)) == sorted(kept)
        got = sampling.top_logprobs(logits, 5, Sampling(0.5, **options))
        assert [token for token, _ in got] == [*kept, *[-1] * 5][:5]
        want = [squared[token] / sum(squared[v] for v in kept) for token in kept]
        assert np.abs(np.exp([each for _, each in got]) - np.array([*map(float, want), *[0.0] * 5][:5])).max() < 1e-12
        raw = sampling.top_logprobs(logits, 8, Sampling())
        order = sorted(np.flatnonzero(weights).tolist(), key=lambda token: (-weights[token], token))
        assert [token for token, _ in raw if token >= 0] == order
        assert abs(sum(np.exp(each) for _, each in raw) - 1) < 1e-12
        assert sampling.kept_tokens(logits, Sampling(0.0, **options)) == order[:1]
        assert sampling.top_logprobs(logits, 2, Sampling(0.0, **options)) == [(order[0], 0.0), (-1, -INF)]


def test_the_reference_lists_what_fractions_say():
    check_against_fractions()


@pytest.mark.parametrize(
    ("row", "token"),
    [([-INF, np.nan, INF, 0.0, INF], 2), ([np.nan, -INF], 0), ([-INF, -INF], 0)],
)
def test_the_reference_keeps_one_token_of_a_row_that_is_a_point_mass(row, token):
    for options in (Sampling(), Sampling(0.0), Sampling(top_p=0.5)):
        assert sampling.kept_tokens(row, options) == [token]
        assert sampling.top_logprobs(row, 2, options) == [(token, 0.0), (-1, -INF)]


MUTANTS = [
    Mutant(
        "not truncated",
        sampling.kept_tokens,
        "truncate(logits, sampling)[0]",
        "without_nan(logits)",
        check_against_fractions,
    ),
    Mutant(
        "by the order of ids",
        sampling.top_logprobs,
        "in token_order(without_nan(row))",
        "in range(len(row))",
        check_against_fractions,
    ),
    Mutant("tokens of mass 0", sampling.top_logprobs, "if logprobs[token] > -np.inf", "", check_against_fractions),
    Mutant("temperature 1", sampling.top_logprobs, "row, sampling.temperature)", "row, 1.0)", check_against_fractions),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mistakes_in_the_reference_are_caught(mutant):
    assert_caught(mutant)
