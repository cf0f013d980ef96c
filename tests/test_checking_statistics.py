"""The checker's tests hold far out in the tail, and what it compares with is what the reference enumerates."""

from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binom

from specdecode.checking import check, statistics
from specdecode.checking.cases import CASES, MAIN
from specdecode.checking.settings import Settings
from specdecode.checking.verifiers import BLOCKS, TOKENS
from tests.support.enumeration import Case, sequence_distribution
from tests.support.exactness import accepted_distribution, accepted_distribution_of_blocks, overlap


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5])
def test_p_values_hold_far_out_in_the_tail(probability):
    """All outcomes of a binomial number, with their exact probabilities. Cells of fewer than 10 are pooled."""
    size = 2_000
    counts = np.arange(size + 1)
    exact = binom.pmf(counts, size, probability)
    spread = np.sqrt(size * probability)
    near = counts[abs(counts - size * probability) < 12 * spread + 30]
    shares = np.array([[probability, 1 - probability]])
    p_values = np.array([statistics.goodness_of_fit(np.array([[n, size - n]]), shares).p_value for n in near])
    for limit in (1e-3, 1e-5, 1e-7, 1e-8):
        assert exact[near][p_values <= limit].sum() < 1.5 * limit


def test_what_a_run_would_have_seen_is_what_it_sees():
    """A distribution that is wrong by just that much, 300 times."""
    random, cells, size, threshold = np.random.default_rng(0), 20, 20_000, 1e-6
    right = random.dirichlet(np.full(cells, 5.0))
    distance = statistics.detectable(cells - 1, size, threshold)
    order = np.argsort(right)
    wrong = right.copy()
    wrong[order[-5:]] += distance / 5
    wrong[order[:-5]] -= distance * right[order[:-5]] / right[order[:-5]].sum()
    counts = random.multinomial(size, wrong, size=300)
    seen = [statistics.goodness_of_fit(row[None], right[None]).p_value < threshold for row in counts]
    assert sum(seen) >= 297


def test_facts_about_sizes_are_reproduced():
    """N = lambda / (4 TV^2) with lambda = 68, 82, 142 at 2, 7, 63 degrees of freedom, threshold 1e-6, power .999."""
    for degrees, noncentrality in [(2, 68), (7, 82), (63, 142)]:
        got = 4 * statistics.detectable(degrees, 10**6, 1e-6) ** 2 * 10**6
        assert abs(got - noncentrality) < 1


@pytest.mark.parametrize("case", [each for each in CASES if each.how.drafts == "drawn"], ids=lambda case: case.name)
def test_right_is_what_the_reference_enumerates(case):
    pair = Settings(2, 3, 1, 0).models(case._replace(max_states=1000))

    def model(tables):
        def row(prefix):
            state = 0
            for length, token in enumerate(prefix):
                state = pair.following[length][state, token]
            return [Fraction(float(each)) for each in tables[len(prefix)][state]]

        return row

    drafts = pair.num_draft_tokens
    exact = Case(model(pair.target_probs), model(pair.draft_probs), (drafts,), drafts + 1)
    sequences = sequence_distribution(exact.target, drafts + 1)
    states = np.zeros(3 ** (drafts + 1))
    for tokens, probability in sequences.items():
        states[int(sum(token * 3**i for i, token in enumerate(reversed(tokens))))] = probability
    assert np.abs(states - pair.final_states(pair.target_probs)).max() < 1e-12
    for accepted, got in zip(
        (accepted_distribution(exact, overlap), accepted_distribution_of_blocks(exact)),
        pair.most_accepted(pair.draft_probs),
    ):
        assert abs(float(sum(n * share for n, share in accepted.items())) - got) < 1e-9


def test_where_states_are_few_rows_still_depend_on_every_token_before():
    pair = Settings(4, 5, 1, 0).models(MAIN._replace(max_states=12))
    assert [len(rows) for rows in pair.target] == [1, 5, 12, 12, 12]
    for following in pair.following[1:]:
        assert all(len(set(row)) > 1 for row in following)  # the last token
        assert all(len(set(column)) > 1 for column in following.T)  # and the state before it


def test_no_exact_method_accepts_more_than_the_bound():
    pair = Settings(3, 5, 1, 0).models(MAIN)
    by_tokens, best = pair.most_accepted(pair.draft_probs)
    for verifier, expected in ((TOKENS, by_tokens), (BLOCKS, best)):
        detail = check(verifier, requests=100_000, only="acceptance").checks[0].detail
        assert abs(float(detail.split()[0]) - expected) < 0.03
