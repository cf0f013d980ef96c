"""The reference's output is distributed as the target: checked by exact enumeration of small cases.

`tests.support.enumeration` runs the oracle's `verify` along every path of drafts, accept decisions and emitted tokens. Only
the noise is replaced, by ideal random numbers. Distributions are compared to 1e-12. The text-book algorithms, on
probabilities, take fractions, and are compared exactly. Each check is then run against *mutants*: the reference with one
piece of its source replaced by a mistake that people make. A check must fail on its mutants, or it would show nothing.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import binom, chi2, ncx2

from reference import block, greedy, oracle, philox, probabilistic, sampling, selection, strict, synthetic
from tests.support.distributions import FALSE_ALARM, assert_distribution
from tests.support.enumeration import (
    Case,
    Chance,
    Domains,
    ExactUniform,
    decode,
    distribution,
    history,
    ideal_noise,
    iid,
    logits,
    marginal,
    most_likely,
    normalised,
    sequence_distribution,
    shared_selection,
    total_variation,
)
from tests.support.mutants import Mutant, assert_caught

EXACT = 1e-12
"""Distributions that the float64 code gives agree with the fractions to this; the largest difference seen is about 3e-16."""

CASES = {
    "iid-V3-K2": Case(iid(1, 2, 3), iid(3, 1, 1), (2,), 3),
    "iid-V2-K3": Case(iid(1, 3), iid(2, 1), (3,), 4),
    "iid-V4-K1": Case(iid(1, 2, 3, 4), iid(4, 1, 1, 1), (1,), 2),
    "history-V3-K2": Case(history(1, 3), history(2, 3), (2,), 3),
    "history-V2-K3": Case(history(3, 2), history(4, 2), (3,), 4),
    "history-V3-K3": Case(history(5, 3, zeros=1), history(6, 3, zeros=1), (3,), 4),
    "history-V4-K1": Case(history(7, 4), history(8, 4), (1,), 2),
    "same-models": Case(history(1, 3), history(1, 3), (2,), 3),
    "disjoint-supports": Case(iid(1, 2, 0, 0), iid(0, 0, 1, 2), (2,), 3),
    "truncated-supports": Case(history(1, 4, zeros=2), history(2, 4, zeros=1), (2,), 3),
    "point-mass-draft": Case(history(1, 3), most_likely(history(2, 3)), (2,), 3),
    "point-mass-target": Case(most_likely(history(1, 3)), history(2, 3), (2,), 3),
    "ragged-1-of-3": Case(history(1, 3), history(2, 3), (1,), 3, slots=3),
    "ragged-2-of-4": Case(history(1, 3), history(2, 3), (2,), 3, slots=4),
    "ragged-0-of-2": Case(history(1, 3), history(2, 3), (0,), 2, slots=2),
    "temperature-0.6": Case(history(1, 3), history(2, 3), (2,), 3, temperature=0.6),
    "temperature-2": Case(history(1, 3), history(2, 3), (2,), 3, temperature=2.0),
    "one-more-token": Case(history(1, 3), history(2, 3), (1,), 3),
    "steps-history": Case(history(1, 3), history(2, 3), (2, 1), 4),
    "steps-iid": Case(iid(1, 2), iid(3, 1), (2, 2), 4),
}


# --- Verification methods, and the acceptance that each promises -------------------------------------------------------


class Method(NamedTuple):
    """A way to verify: a method of the oracle, which noise its drafts are drawn with, and how many drafts it accepts."""

    verify: Callable
    domains: Domains
    accepted_distribution: Callable[[Case], dict]
    """The distribution of the number of drafts that the first step accepts."""


def overlap(target_row: list, draft_row: list) -> list:
    return [min(p, q) for p, q in zip(target_row, draft_row)]


def agreement(target_row: list, draft_row: list) -> list:
    return [p * q for p, q in zip(target_row, draft_row)]


def coupled(target_row: list, draft_row: list) -> list:
    joint = shared_selection(target_row, draft_row)
    return [joint[token][token] for token in range(len(target_row))]


def accepted_distribution(case: Case, accepted_draft: Callable) -> dict[int, Fraction]:
    """Return the distribution of the number of accepted drafts.

    `accepted_draft` takes a target and a draft row, and returns for each token: P(it is drafted and accepted).
    """
    reached, at_least = {(): Fraction(1)}, [Fraction(1)]
    for _ in range(case.drafts[0]):
        reached = {
            (*prefix, token): probability * share
            for prefix, probability in reached.items()
            for token, share in enumerate(accepted_draft(case.target(prefix), case.draft(prefix)))
        }
        at_least.append(sum(reached.values()))
    return {n: here - after for n, (here, after) in enumerate(zip(at_least, [*at_least[1:], 0]))}


def accepted_blocks(case: Case) -> list[dict]:
    """Return, for each length i and each block of i drafts: P(it is drafted, and i drafts or more are accepted).

    It is Q(x) c_i(x), where Q(x) is the probability that the block x is drafted and c_i the running ratio. By
    c_{i+1} = min(1, c_i p(v) / q(v)), the block followed by the token v has the probability min(Q q(v), Q c_i p(v)).
    """
    drafted, accepted = {(): Fraction(1)}, [{(): Fraction(1)}]
    for _ in range(case.drafts[0]):
        longer = {}
        for prefix, probability in accepted[-1].items():
            for token, (p, q) in enumerate(zip(case.target(prefix), case.draft(prefix))):
                drafted[*prefix, token] = drafted[prefix] * q
                longer[*prefix, token] = min(drafted[prefix] * q, probability * p)
        accepted.append(longer)
    return accepted


def accepted_distribution_of_blocks(case: Case) -> dict[int, Fraction]:
    at_least = [sum(blocks.values()) for blocks in accepted_blocks(case)]
    return {n: here - after for n, (here, after) in enumerate(zip(at_least, [*at_least[1:], 0]))}


def verify_probabilistic(target_logits, draft_token_ids, draft_logits, **keywords):
    return oracle.verify("probabilistic", target_logits, draft_token_ids, draft_logits, **keywords)


def verify_without_draft_logits(target_logits, draft_token_ids, draft_logits, **keywords):
    return oracle.verify("probabilistic", target_logits, draft_token_ids, **keywords)


def verify_block(target_logits, draft_token_ids, draft_logits, **keywords):
    return oracle.verify("block", target_logits, draft_token_ids, draft_logits, **keywords)


def verify_block_without_draft_logits(target_logits, draft_token_ids, draft_logits, **keywords):
    return oracle.verify("block", target_logits, draft_token_ids, **keywords)


def fresh_domains(offset: int) -> tuple[int, int]:
    return philox.draft_domains(offset)  # looked up at each call, so that a mutant of it takes effect


def verify_strict(target_logits, draft_token_ids, draft_logits, **keywords):
    return oracle.verify("strict", target_logits, draft_token_ids, **keywords)


METHODS = {
    "probabilistic": Method(verify_probabilistic, philox.DRAFT, partial(accepted_distribution, accepted_draft=overlap)),
    # To treat the draft as certain is exact for every drafter. It is then accepted as often as by strict.
    "no-draft-logits": Method(
        verify_without_draft_logits, philox.DRAFT, partial(accepted_distribution, accepted_draft=agreement)
    ),
    "block": Method(verify_block, fresh_domains, accepted_distribution_of_blocks),
    "block-no-draft-logits": Method(
        verify_block_without_draft_logits, fresh_domains, partial(accepted_distribution, accepted_draft=agreement)
    ),
    "strict": Method(verify_strict, philox.DRAFT, partial(accepted_distribution, accepted_draft=agreement)),
    "strict-shared-noise": Method(verify_strict, philox.SELECT, partial(accepted_distribution, accepted_draft=coupled)),
}

BEYOND = {("strict-shared-noise", "steps-history")}
"""Three different selections from the same Gumbel numbers: the enumeration raises, because it handles two."""


def assert_same_distribution(got: dict, expected: dict) -> None:
    assert abs(sum(got.values()) - 1) < EXACT
    distance = float(total_variation(got, expected))
    assert distance < EXACT, f"the distribution is wrong by a total variation of {distance:.3g}"


def check_method(name: str, case: Case) -> None:
    """The joint distribution of the tokens is the target's, and the number of accepted drafts is distributed as promised."""
    method = METHODS[name]
    joint = distribution(lambda chance: decode(chance, case, method.verify, method.domains))
    assert_same_distribution(
        marginal(joint, lambda outcome: outcome[0]), sequence_distribution(case.target, case.num_tokens)
    )
    accepted = marginal(joint, lambda outcome: outcome[1][0])
    assert_same_distribution(accepted, method.accepted_distribution(case))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_the_joint_distribution_of_the_tokens_is_the_targets(method, case):
    if (method, case) in BEYOND:
        with pytest.raises(NotImplementedError, match="three different selections"):
            check_method(method, CASES[case])
    else:
        check_method(method, CASES[case])


# --- The text-book algorithms, in fractions ----------------------------------------------------------------------------


def text_book_step(chance: Chance, case: Case, num_drafts: int, verify: Callable) -> tuple:
    """A step of an algorithm on probabilities; return (its tokens, accepted drafts)."""
    drafts: tuple = ()
    draft_rows = []
    while len(drafts) < num_drafts:
        draft_rows.append(np.array(case.draft(drafts), dtype=object))
        drafts += (chance.draw(draft_rows[-1]),)
    target_rows = [np.array(case.target(drafts[:offset]), dtype=object) for offset in range(num_drafts + 1)]
    uniforms = [ExactUniform(chance) for _ in drafts]
    accepted, probs = verify(target_rows, draft_rows, drafts, uniforms)
    return (*drafts[:accepted], chance.draw(probs)), accepted


def completed_step(chance: Chance, case: Case, num_drafts: int, verify: Callable) -> tuple:
    """The same, and the target alone generates what is missing of the tokens."""
    tokens, accepted = text_book_step(chance, case, num_drafts, verify)
    return completed(chance, case, num_drafts, tokens), accepted


def completed(chance: Chance, case: Case, num_drafts: int, tokens: tuple) -> tuple:
    while len(tokens) <= num_drafts:
        tokens += (chance.draw(case.target(tokens)),)
    return tokens


def check_formulas(case: Case) -> None:
    """Algorithm 1 of Leviathan et al."""
    num_drafts = case.drafts[0]
    joint = distribution(lambda chance: completed_step(chance, case, num_drafts, probabilistic.verify))
    tokens = marginal(joint, lambda outcome: outcome[0])
    assert tokens == sequence_distribution(case.target, num_drafts + 1)
    accepted = marginal(joint, lambda outcome: outcome[1])
    expected = accepted_distribution(case, overlap)
    assert accepted == {n: probability for n, probability in expected.items() if probability}


@pytest.mark.parametrize("case", CASES)
def test_the_formulas_are_exact_in_fractions(case):
    check_formulas(CASES[case])


def check_closed_forms(target_weights: tuple, draft_weights: tuple, num_drafts: int) -> None:
    """With models that ignore the text the number of accepted drafts is a geometric number, cut off at K."""
    case = Case(iid(*target_weights), iid(*draft_weights), (num_drafts,), num_drafts + 1)
    pair = (np.array(model(()), dtype=object) for model in (case.target, case.draft))
    alpha = probabilistic.acceptance_rate(*pair)
    joint = distribution(lambda chance: text_book_step(chance, case, num_drafts, probabilistic.verify))
    accepted = marginal(joint, lambda outcome: outcome[1])
    geometric = {n: alpha**n * (1 - alpha) for n in range(num_drafts)} | {num_drafts: alpha**num_drafts}
    assert accepted == {n: probability for n, probability in geometric.items() if probability}
    mean_tokens = 1 + sum(n * probability for n, probability in accepted.items())
    assert mean_tokens == probabilistic.expected_tokens(alpha, num_drafts)
    if alpha != 1:
        assert mean_tokens == (1 - alpha ** (num_drafts + 1)) / (1 - alpha)


CLOSED_FORMS = [
    ((1, 2, 3), (3, 1, 1), 1),
    ((1, 2, 3), (3, 1, 1), 3),
    ((1, 2), (2, 1), 5),
    ((1, 2), (1, 2), 3),
    ((1, 0), (0, 1), 3),
    ((1, 2, 3, 4), (0, 3, 2, 1), 2),
]


@pytest.mark.parametrize(("target_weights", "draft_weights", "num_drafts"), CLOSED_FORMS)
def test_the_accepted_length_has_its_closed_forms(target_weights, draft_weights, num_drafts):
    check_closed_forms(target_weights, draft_weights, num_drafts)


def check_published_speedups() -> None:
    """Table 1 of Leviathan et al.: alpha, K, cost factor in operations, tokens per call of the target."""
    for alpha, num_drafts, operations, speedup in [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ]:
        tokens = probabilistic.expected_tokens(alpha, num_drafts)
        assert abs(tokens - speedup) < 0.005 + 1e-9
        assert abs((num_drafts + 1) / tokens - operations) < 0.005 + 1e-9


def test_expected_tokens_are_the_published_speedups():
    check_published_speedups()


# --- Deterministic drafters, zeros, and greedy -------------------------------------------------------------------------


def check_deterministic(case: Case) -> None:
    """A drafter that always proposes its most likely token and gives no logits: x is accepted with probability p(x)."""
    certain = replace(case, draft=most_likely(case.draft))
    check_method("no-draft-logits", certain)
    with_logits = distribution(lambda chance: decode(chance, certain, verify_probabilistic, philox.DRAFT))
    without = distribution(lambda chance: decode(chance, certain, verify_without_draft_logits, philox.DRAFT))
    assert_same_distribution(without, with_logits)


@pytest.mark.parametrize("case", CASES)
def test_a_deterministic_drafter_needs_no_logits(case):
    check_deterministic(CASES[case])


def check_impossible_drafts() -> None:
    """A draft with p(x) = 0 or q(x) = 0 is never accepted."""
    possible, impossible = [Fraction(1, 2), Fraction(1, 2)], [Fraction(0), Fraction(1)]
    for target_row, draft_row in product([possible, impossible], repeat=2):
        if target_row is draft_row is possible:
            continue
        assert probabilistic.acceptance_probability(target_row[0], draft_row[0]) == 0
        target_logits, draft_logits = [logits(target_row)] * 2, [logits(draft_row)]

        def step(chance: Chance, target_logits=target_logits, draft_logits=draft_logits) -> int:
            with ideal_noise(chance):
                return oracle.verify("probabilistic", target_logits, [0], draft_logits).num_accepted

        assert_same_distribution(distribution(step), {0: 1})


def test_impossible_drafts_are_never_accepted():
    check_impossible_drafts()


GREEDY_ROWS = [
    [1.0, 1.0, 0.0],
    [0.0, 2.0, 2.0],
    [3.0, 1.0, 3.0],
    [np.nan, 1.0, 1.0],
    [-np.inf, -np.inf, 0.5],
    [7.0] * 3,
]
"""Rows with ties, whose lowest ids win."""

VERIFIERS = {
    "greedy": lambda logits, drafts: greedy.verify(map(sampling.without_nan, logits), drafts),
    "strict": lambda logits, drafts: oracle.verify("strict", logits, drafts, temperature=0).token_ids,
    "probabilistic": lambda logits, drafts: (
        oracle.verify("probabilistic", logits, drafts, logits, temperature=0).token_ids
    ),
    "block": lambda logits, drafts: oracle.verify("block", logits, drafts, logits, temperature=0).token_ids,
}


def most_likely_token(row: list[float]) -> int:
    return min(range(len(row)), key=lambda token: (-row[token] if row[token] == row[token] else math.inf, token))


def check_greedy(name: str, num_drafts: int = 2) -> None:
    """Every draft path, over targets whose rows depend on the whole path, gives the tokens of greedy decoding."""
    for start in range(len(GREEDY_ROWS)):
        check_greedy_from(start, VERIFIERS[name], num_drafts)


def check_greedy_from(start: int, verify: Callable, num_drafts: int) -> None:
    def row(prefix: tuple) -> list[float]:
        return GREEDY_ROWS[(start + sum((token + 1) * 5**i for i, token in enumerate(prefix))) % len(GREEDY_ROWS)]

    alone: tuple = ()
    while len(alone) <= num_drafts:
        alone += (most_likely_token(row(alone)),)
    for drafts in product(range(3), repeat=num_drafts):
        target = [row(drafts[:offset]) for offset in range(num_drafts + 1)]
        agreed = next((n for n in range(num_drafts) if drafts[n] != alone[n]), num_drafts)
        assert verify(target, list(drafts)) == list(alone[: agreed + 1])
        # A ragged request: its first `n` drafts, then -1 and arbitrary values.
        for n in range(num_drafts):
            padded = [*drafts[:n], -1, *alone[n + 1 : num_drafts]]
            ragged = [*target[: n + 1], *([[9.0, 0.0, 0.0]] * (num_drafts - n))]
            assert verify(ragged, padded) == list(alone[: min(agreed, n) + 1])


@pytest.mark.parametrize("name", VERIFIERS)
def test_temperature_0_emits_what_the_target_alone_would_emit(name):
    check_greedy(name)


def check_strict_is_plain_sampling(num_drafts: int = 3) -> None:
    """With real noise, token for token: whatever the drafts are, the output is that of plain sampling."""
    model = history(9, 3)
    for seed, position in [(0, 0), (1, 5), (-3, 2**40)]:
        where = {"seed": seed, "temperature": 0.8}
        alone: tuple = ()
        while len(alone) <= num_drafts:
            alone += (sampling.sample(logits(model(alone)), position=position + len(alone), **where).index,)
        for drafts in product(range(3), repeat=num_drafts):
            target = [logits(model(drafts[:offset])) for offset in range(num_drafts + 1)]
            agreed = next((n for n in range(num_drafts) if drafts[n] != alone[n]), num_drafts)
            got = oracle.verify("strict", target, list(drafts), position=position, **where)
            assert got.token_ids == list(alone[: agreed + 1])


def test_strict_emits_token_for_token_what_plain_sampling_emits():
    check_strict_is_plain_sampling()


def check_strict_formulas(case: Case) -> None:
    """With ideal Gumbel numbers, and drafts that are independent of them."""
    num_drafts = case.drafts[0]

    def step(chance: Chance) -> tuple:
        drafts: tuple = ()
        while len(drafts) < num_drafts:
            drafts += (chance.draw(case.draft(drafts)),)
        target_logprobs = [logits(case.target(drafts[:offset])) for offset in range(num_drafts + 1)]
        with ideal_noise(chance) as noise:
            token_ids = np.arange(case.vocab_size)
            gumbels = [
                noise.gumbel(0, offset, token_ids, philox.Domain.SELECT_TOKEN) for offset in range(num_drafts + 1)
            ]
            tokens = tuple(strict.verify(target_logprobs, drafts, gumbels))
        return completed(chance, case, num_drafts, tokens), len(tokens) - 1

    joint = distribution(step)
    assert_same_distribution(
        marginal(joint, lambda outcome: outcome[0]), sequence_distribution(case.target, num_drafts + 1)
    )
    accepted = marginal(joint, lambda outcome: outcome[1])
    assert_same_distribution(accepted, accepted_distribution(case, agreement))


@pytest.mark.parametrize("case", CASES)
def test_the_formulas_of_strict_are_exact(case):
    check_strict_formulas(CASES[case])


# --- Block verification ------------------------------------------------------------------------------------------------


def check_block_formulas(case: Case) -> None:
    """Algorithm 2 of Sun et al. The joint distribution is the target's, and P(accepted >= i, i drafts = x) = Q(x) c_i(x)."""
    num_drafts = case.drafts[0]
    joint = distribution(lambda chance: completed_step(chance, case, num_drafts, block.verify))
    assert marginal(joint, lambda outcome: outcome[0]) == sequence_distribution(case.target, num_drafts + 1)
    for length, blocks in enumerate(accepted_blocks(case)):
        reached = dict.fromkeys(blocks, 0)
        for (tokens, accepted), probability in joint.items():
            reached[tokens[:length]] += probability if accepted >= length else 0
        assert reached == blocks


@pytest.mark.parametrize("case", CASES)
def test_the_formulas_of_blocks_are_exact_in_fractions(case):
    check_block_formulas(CASES[case])


SEVERAL_STEPS = {
    "V2-K2-2": Case(iid(1, 2), iid(3, 1), (2, 2), 5),
    "V2-K3-2": Case(history(3, 2), history(4, 2), (3, 2), 5),
    "V3-K2-2": Case(history(1, 3), history(2, 3), (2, 2), 4),
    "V2-K2-2-2": Case(history(3, 2), history(4, 2), (2, 2, 2), 5),
    "V2-K2-1-2": Case(iid(1, 3), iid(2, 1), (2, 1, 2), 5),
}
"""Several steps of one request with one seed: later steps draft positions again whose drafts an earlier step rejected."""


@pytest.mark.parametrize("case", SEVERAL_STEPS)
def test_several_steps_with_one_seed_are_distributed_as_the_target(case):
    check_method("block", SEVERAL_STEPS[case])


def mean(accepted: dict) -> Fraction:
    return sum(n * probability for n, probability in accepted.items())


@pytest.mark.parametrize("case", CASES)
def test_block_verification_accepts_no_less_than_token_verification_on_average(case):
    by_blocks, by_tokens = accepted_distribution_of_blocks(CASES[case]), accepted_distribution(CASES[case], overlap)
    assert mean(by_blocks) >= mean(by_tokens)
    for certain in ("target", "draft"):
        model = most_likely(getattr(CASES[case], certain))
        one_sided = replace(CASES[case], **{certain: model})
        assert accepted_distribution_of_blocks(one_sided) == accepted_distribution(one_sided, overlap)


def test_the_toy_example_accepts_11_drafts_of_18_by_blocks_and_10_by_tokens():
    toy = Case(iid(1, 2), iid(2, 1), (2,), 3)
    assert mean(accepted_distribution_of_blocks(toy)) == Fraction(11, 9)
    assert mean(accepted_distribution(toy, overlap)) == Fraction(10, 9)
    check_method("block", toy)
    check_method("probabilistic", toy)


def check_deterministic_blocks(case: Case) -> None:
    """A drafter that always proposes its most likely token: with or without its logits, as in token verification."""
    certain = replace(case, draft=most_likely(case.draft))
    check_method("block-no-draft-logits", certain)
    distributions = [
        distribution(lambda chance, verify=verify: decode(chance, certain, verify, fresh_domains))
        for verify in (verify_block, verify_block_without_draft_logits, verify_probabilistic)
    ]
    assert_same_distribution(distributions[0], distributions[2])
    assert_same_distribution(distributions[1], distributions[2])


@pytest.mark.parametrize("case", CASES)
def test_a_deterministic_drafter_is_accepted_by_blocks_as_by_tokens(case):
    check_deterministic_blocks(CASES[case])


def check_impossible_blocks() -> None:
    """A draft with p(x) = 0 or q(x) = 0 is rejected, and so are all drafts after it, however likely they are."""
    fair, certain = [Fraction(1, 2), Fraction(1, 2)], [Fraction(1), Fraction(0)]
    for target_row, draft_row in [(certain, fair), (fair, certain), (certain, certain)]:
        assert block.running_ratio(1, target_row[1], draft_row[1]) == 0
        target_logits, draft_logits = (
            [logits(row) for row in (fair, target_row, fair, fair)],
            [logits(row) for row in (fair, draft_row, [Fraction(1, 9), Fraction(8, 9)])],
        )

        def step(chance: Chance, target_logits=target_logits, draft_logits=draft_logits) -> bool:
            with ideal_noise(chance):
                return oracle.verify("block", target_logits, [0, 1, 0], draft_logits).num_accepted <= 1

        assert_same_distribution(distribution(step), {True: 1})


def test_no_block_with_an_impossible_draft_is_accepted():
    check_impossible_blocks()


def check_margins() -> None:
    """The margin is how far the running ratio can move before the decision changes, and no further."""
    random = np.random.default_rng(0)
    flipped = 0
    for _ in range(2000):
        vocab = int(random.integers(1, 6))
        target_row, draft_row = random.dirichlet(np.ones(vocab), size=2) * random.choice([1, 1e-3], size=(2, 1))
        target_row[0], draft_row[0] = 1 - target_row[1:].sum(), 1 - draft_row[1:].sum()
        row = None if random.random() < 0.2 else (target_row, draft_row)
        log_ratio, log_uniform = -random.exponential(2) + 0.5, np.log(random.uniform(1e-9, 1))
        decided = oracle.accepts_block(log_uniform, log_ratio, row)
        for away, same in [(0.999, True), (1.001, False)]:
            moved = log_ratio + decided.margin * away * (-1 if decided.index else 1)
            assert (oracle.accepts_block(log_uniform, moved, row).index == decided.index) == same
            flipped += not same
    assert flipped == 2000


def test_margins_of_blocks_are_how_far_the_running_ratio_can_move():
    check_margins()


# --- Synthetic acceptance ----------------------------------------------------------------------------------------------

RATES = [Fraction(9, 10), Fraction(1, 3), Fraction(1, 2)]


def scheduled_distribution(case: Case, with_draft_logits: bool) -> dict:
    """Return the joint distribution of (tokens, accepted drafts) of a step that accepts by a schedule."""
    (num_drafts,) = case.drafts
    outcomes: dict = {}
    for drafts, probability in sequence_distribution(case.draft, num_drafts).items():
        reached = probability
        for n in range(num_drafts + 1):
            target_row = case.target(drafts[:n])
            emitted = target_row
            if n < num_drafts and with_draft_logits:
                left = [max(Fraction(0), p - q) for p, q in zip(target_row, case.draft(drafts[:n]))]
                emitted = [weight / sum(left) for weight in left] if any(left) else target_row
            stops = 1 - RATES[n] if n < num_drafts else 1
            for token, share in enumerate(emitted):
                outcome = (*drafts[:n], token), (n,)
                outcomes[outcome] = outcomes.get(outcome, 0) + reached * stops * share
            reached *= 1 - stops
    return outcomes


def check_synthetic(case: Case, with_draft_logits: bool) -> None:
    def verify(target_logits, draft_token_ids, draft_logits, **keywords):
        draft_logits = draft_logits if with_draft_logits else None
        rates = [float(rate) for rate in RATES]
        return oracle.verify(
            "synthetic", target_logits, draft_token_ids, draft_logits, conditional_rates=rates, **keywords
        )

    def step(chance: Chance) -> tuple:
        tokens, accepted = decode(chance, replace(case, num_tokens=1 + case.drafts[0]), verify, philox.DRAFT)
        return tokens[: accepted[0] + 1], accepted

    assert_same_distribution(distribution(step), scheduled_distribution(case, with_draft_logits))


def check_synthetic_formulas(case: Case, with_draft_logits: bool) -> None:
    def verify(target_rows, draft_rows, drafts, uniforms):
        return synthetic.verify(target_rows, draft_rows if with_draft_logits else None, RATES, uniforms)

    def step(chance: Chance) -> tuple:
        tokens, accepted = text_book_step(chance, case, case.drafts[0], verify)
        return tokens, (accepted,)

    expected = scheduled_distribution(case, with_draft_logits)
    assert distribution(step) == {outcome: share for outcome, share in expected.items() if share}


@pytest.mark.parametrize("case", [name for name in CASES if "steps" not in name])
@pytest.mark.parametrize("with_draft_logits", [True, False], ids=["draft-logits", "no-draft-logits"])
def test_synthetic_accepts_on_schedule_and_emits_what_the_real_method_would(case, with_draft_logits):
    check_synthetic(CASES[case], with_draft_logits)
    check_synthetic_formulas(CASES[case], with_draft_logits)


def check_synthetic_greedy() -> None:
    """Temperature 0 keeps the schedule, and emits the argmax."""
    target = [GREEDY_ROWS[0], GREEDY_ROWS[1], GREEDY_ROWS[2]]
    options = {"conditional_rates": [0.75, 0.5], "temperature": 0}

    def step(chance: Chance) -> tuple:
        with ideal_noise(chance):
            return tuple(oracle.verify("synthetic", target, [2, 0], target, **options).token_ids)

    assert_same_distribution(distribution(step), {(0,): 0.25, (2, 1): 0.375, (2, 0, 0): 0.375})


def test_synthetic_at_temperature_0_keeps_the_schedule_and_emits_the_argmax():
    check_synthetic_greedy()


# --- Two-level selection and the Gumbel coupling -----------------------------------------------------------------------

PAIRS = {
    "toy": ((1, 2), (2, 1)),
    "V3": ((1, 2, 3), (3, 1, 1)),
    "V4": ((1, 2, 3, 4), (4, 1, 1, 1)),
    "V5": ((5, 1, 3, 1, 2), (1, 1, 4, 2, 2)),
    "zeros": ((0, 2, 3, 4, 0), (4, 0, 1, 1, 0)),
    "disjoint": ((1, 2, 0, 0), (0, 0, 1, 2)),
    "same": ((1, 2, 3, 4), (1, 2, 3, 4)),
    "close": ((10, 20, 30, 40), (11, 19, 31, 39)),
}


@contextmanager
def blocks_of(size: int):
    """Make `select` cut the vocabulary into blocks of this size."""
    with mock.patch.object(sampling.select, "__defaults__", (philox.SELECT, size)):
        yield


def check_selection(weights: tuple, block_size: int) -> None:
    """`select`, on weights that are not normalised, emits v with probability w(v) / W."""

    def draw(chance: Chance) -> int:
        with ideal_noise(chance), np.errstate(divide="ignore"):
            return sampling.select(np.log(np.array(weights, dtype=float)), 3, 5, block_size=block_size).index

    assert_same_distribution(distribution(draw), dict(enumerate(normalised(weights))))


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 1024])
@pytest.mark.parametrize("pair", PAIRS)
def test_selection_by_blocks_of_any_size_is_proportional_to_the_weights(pair, block_size):
    for weights in PAIRS[pair]:
        check_selection(weights, block_size)
        # The chain rule, in fractions.
        blocks = [weights[start : start + block_size] for start in range(0, len(weights), block_size)]
        shares = normalised([sum(block) for block in blocks])
        chain = [share * inside for share, block in zip(shares, blocks) if share for inside in normalised(block)]
        assert [p for p in chain if p] == [p for p in normalised(weights) if p]


def check_coupling(target_weights: tuple, draft_weights: tuple, block_size: int | None) -> None:
    """Target and draft, drawn by `sample` with the same noise, are equal as often as the formula says."""
    target_row, draft_row = normalised(target_weights), normalised(draft_weights)

    def draw(chance: Chance) -> tuple[int, int]:
        with ideal_noise(chance), blocks_of(block_size or len(target_row)):
            picks = [sampling.sample(logits(row), seed=3, position=5).index for row in (draft_row, target_row)]
        return tuple(picks)

    joint = distribution(draw)
    for side, row in enumerate((draft_row, target_row)):  # the coupling does not change either distribution
        assert_same_distribution(marginal(joint, lambda picks, side=side: picks[side]), dict(enumerate(row)))
    match = strict.match_probability(target_row, draft_row, block_size)
    assert abs(sum(share for (x, y), share in joint.items() if x == y) - match) < EXACT
    distance = total_variation(dict(enumerate(target_row)), dict(enumerate(draft_row)))
    assert match <= 1 - distance
    if block_size is None:
        assert match >= (1 - distance) / (1 + distance)
        assert match == sum(coupled(target_row, draft_row))  # in fractions, by an independent derivation
        assert strict.match_probabilities(target_weights, draft_weights) == pytest.approx(
            coupled(target_row, draft_row)
        )


@pytest.mark.parametrize("block_size", [None, 1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_shared_noise_matches_as_often_as_the_formula_says(pair, block_size):
    check_coupling(*PAIRS[pair], block_size)


@pytest.mark.parametrize("pair", PAIRS)
def test_selecting_twice_from_shared_noise_keeps_both_distributions(pair):
    first, second = map(normalised, PAIRS[pair])
    joint = shared_selection(first, second)
    assert [sum(row) for row in joint] == first
    assert [sum(column) for column in zip(*joint)] == second
    assert all(share >= 0 for row in joint for share in row)
    assert [list(row) for row in zip(*shared_selection(second, first))] == joint


@pytest.mark.parametrize("pair", PAIRS)
def test_the_match_formula_is_the_integral_over_the_selected_exponential(pair):
    # Token j, with the exponential number e, is selected by both iff every other E_i is above max(p_i / p_j, q_i / q_j) e.
    target_row, draft_row = (np.array(normalised(weights), dtype=float) for weights in PAIRS[pair])
    formula = strict.match_probabilities(target_row.tolist(), draft_row.tolist())
    for token, (p, q) in enumerate(zip(target_row, draft_row)):
        if not p or not q:
            assert formula[token] == 0
            continue
        factors = np.delete(np.maximum(target_row / p, draft_row / q), token)
        integral, _ = quad(lambda e, factors=factors: np.exp(-e) * np.exp(-factors * e).prod(), 0, np.inf)
        assert abs(integral - formula[token]) < 1e-8


@pytest.mark.parametrize("block_size", [None, 2, 3])
def test_the_match_formula_holds_in_a_simulation_of_exponentials(block_size):
    # 400,000 draws; a two-sided false alarm of 1e-6 (4.9 standard deviations) sees an error of about 0.004.
    draws, random = 400_000, np.random.default_rng(0)
    weights = [np.array(row, dtype=float) for row in PAIRS["V5"]]
    size = block_size or 5
    starts = np.arange(0, 5, size)
    block_exponentials = random.exponential(size=(draws, len(starts)))
    exponentials = random.exponential(size=(draws, 5))
    picks = []
    for row in weights:
        block = (block_exponentials / np.add.reduceat(row, starts)).argmin(axis=1)
        outside = np.arange(5) // size != block[:, None]
        picks.append(np.where(outside, np.inf, exponentials / row).argmin(axis=1))
    match = strict.match_probability(*weights, block_size=block_size)
    low, high = binom.ppf([5e-7, 1 - 5e-7], draws, match)
    assert low <= (picks[0] == picks[1]).sum() <= high


@pytest.mark.parametrize("block_size", [5, 2])
def test_the_match_formula_holds_for_real_noise(block_size):
    # 2,000 seeds; a two-sided false alarm of 1e-6 sees an error of about 0.06. Agreement is 0.64 with
    # one block and 0.58 with blocks of 2; independent noise would agree 0.20 of the time.
    seeds = 2_000
    pair = [np.log(np.array(row)) for row in PAIRS["V5"]]
    with blocks_of(block_size):
        matches = sum(len({sampling.sample(row, seed=seed).index for row in pair}) == 1 for seed in range(seeds))
    match = strict.match_probability(*PAIRS["V5"], block_size=block_size)
    low, high = binom.ppf([5e-7, 1 - 5e-7], seeds, match)
    assert low <= matches <= high


rows_of_five = st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any).map(normalised)


@settings(derandomize=True, deadline=None)
@given(target_row=rows_of_five, draft_row=rows_of_five)
def test_matches_are_bounded_by_the_total_variation(target_row, draft_row):
    distance = sum(map(abs, np.subtract(target_row, draft_row))) / 2
    assert sum(coupled(target_row, draft_row)) == strict.match_probability(target_row, draft_row)
    assert strict.match_probability(target_row, draft_row) >= (1 - distance) / (1 + distance)
    for block_size in (None, 1, 2, 3, 4):
        assert strict.match_probability(target_row, draft_row, block_size) <= 1 - distance


# --- Real noise --------------------------------------------------------------------------------------------------------

GOLDEN = Case(iid(5, 0, 3), iid(3, 5, 0), (1,), 2)
"""Recovered tokens that use the draft's noise are wrong by a total variation of 0.09 here."""

CERTAIN = Case(iid(1, 1, 1), iid(0, 1, 0), (1,), 2)
"""Recovered tokens that use the accept noise are wrong by a total variation of 1/9 here, see the power check below."""

REAL_SEEDS = 2_300


def check_real_noise(case: Case) -> None:
    """The joint distribution of two tokens with the real noise, over 2,300 seeds; the false-alarm rate is 1e-6."""
    target_row, draft_row = (logits(model(())) for model in (case.target, case.draft))
    counts = dict.fromkeys(product(range(3), repeat=2), 0)
    for seed in range(REAL_SEEDS):
        draft = sampling.sample(draft_row, seed=seed, domains=philox.DRAFT).index
        tokens = oracle.verify("probabilistic", [target_row] * 2, [draft], [draft_row], seed=seed).token_ids
        if len(tokens) == 1:
            tokens.append(sampling.sample(target_row, seed=seed, position=1).index)
        counts[tuple(tokens)] += 1
    expected = sequence_distribution(case.target, 2)
    assert_distribution(np.array([*counts.values()]), np.array([float(expected.get(tokens, 0)) for tokens in counts]))


@pytest.mark.parametrize("case", [GOLDEN, CERTAIN], ids=["golden", "certain"])
def test_the_joint_distribution_holds_with_real_noise(case):
    check_real_noise(case)


def test_shared_noise_is_wrong_by_more_than_the_statistical_check_sees():
    # A distribution that is wrong by a total variation TV has a chi-square of noncentrality 4 TV^2 N or more.
    joint = distribution(lambda chance: decode(chance, GOLDEN, verify_probabilistic, philox.SELECT))
    wrong = float(total_variation(marginal(joint, lambda outcome: outcome[0]), sequence_distribution(GOLDEN.target, 2)))
    assert 0.089 < wrong < 0.091
    # A rejection, u > 1/3, also means that the exponential of token 0 is large: it is selected with 1/3, not 1/2.
    for distance, degrees in [(wrong, 3), (1 / 9, 8)]:
        threshold = chi2.isf(FALSE_ALARM, degrees)
        assert ncx2.cdf(threshold, degrees, 4 * distance**2 * REAL_SEEDS) < 0.001


def check_real_selection() -> None:
    """A token with the weight of 64 others together is drawn half of the time.

    With 500 seeds and a false-alarm rate of 1e-6 an error of 0.17 is seen. Gumbel noise of the wrong sign would draw the
    token 9 times in 10.
    """
    weights = np.ones(65)
    weights[30] = 64
    heavy = sum(sampling.select(np.log(weights), seed, position=1).index == 30 for seed in range(500))
    assert_distribution(np.array([heavy, 500 - heavy]), np.array([0.5, 0.5]))


def test_real_noise_has_the_right_sign():
    check_real_selection()


# --- Mutants -----------------------------------------------------------------------------------------------------------


def method_on(method: str, *cases: str) -> Callable[[], None]:
    def check() -> None:
        for case in cases:
            check_method(method, CASES[case])

    return check


def formulas() -> None:
    check_formulas(CASES["history-V3-K2"])


def strict_formulas() -> None:
    check_strict_formulas(CASES["iid-V3-K2"])


def synthetic_formulas() -> None:
    check_synthetic_formulas(CASES["history-V3-K2"], with_draft_logits=True)


def closed_forms() -> None:
    check_closed_forms(*CLOSED_FORMS[1])


def deterministic() -> None:
    check_deterministic(CASES["history-V3-K2"])


def synthetic_cases() -> None:
    check_synthetic(CASES["history-V3-K2"], with_draft_logits=True)
    check_synthetic(CASES["history-V3-K2"], with_draft_logits=False)
    check_synthetic(CASES["ragged-1-of-3"], with_draft_logits=True)


def selection_cases() -> None:
    check_selection((5, 1, 3, 1, 2), block_size=2)


def coupling() -> None:
    check_coupling(*PAIRS["V5"], block_size=None)
    check_coupling(*PAIRS["V5"], block_size=2)


def greedy_everywhere() -> None:
    for name in VERIFIERS:
        check_greedy(name)


def greedy_alone() -> None:
    check_greedy("greedy")


def golden() -> None:
    check_real_noise(GOLDEN)


def certain() -> None:
    check_real_noise(CERTAIN)


def block_formulas() -> None:
    check_block_formulas(CASES["history-V2-K3"])
    check_block_formulas(CASES["truncated-supports"])


def deterministic_blocks() -> None:
    check_deterministic_blocks(CASES["history-V3-K2"])


def several_steps() -> None:
    check_method("block", SEVERAL_STEPS["V2-K2-2"])


def accepted_by_blocks() -> None:
    """The number of accepted drafts alone. The output is exact without it, but it is the purpose of the method."""
    for case in (CASES["history-V2-K3"], CASES["ragged-1-of-3"]):
        joint = distribution(lambda chance, case=case: decode(chance, case, verify_block, fresh_domains))
        assert_same_distribution(marginal(joint, lambda outcome: outcome[1][0]), accepted_distribution_of_blocks(case))


blocks = method_on("block", "history-V3-K2", "history-V3-K3")
ragged_blocks = method_on("block", "ragged-1-of-3", "ragged-2-of-4")
warm_blocks = method_on("block", "temperature-0.6")
joint = method_on("probabilistic", "history-V3-K2")
ragged = method_on("probabilistic", "ragged-1-of-3", "ragged-0-of-2")
warm = method_on("probabilistic", "temperature-0.6")
one_more = method_on("probabilistic", "one-more-token")
strict_joint = method_on("strict", "history-V3-K2")
strict_iid = method_on("strict", "iid-V3-K2")
strict_warm = method_on("strict", "temperature-0.6")

B, P, S = block, probabilistic, selection
RECOVER = "return step.emit(offset, log(probabilistic.residual(np.exp(target), np.exp(draft))))"
BONUS = "return step.emit(len(step.drafts), step.target(len(step.drafts)))"
RECOVER_BLOCK = "return step.emit(accepted, log(block.residual(ratio, *probs[accepted])))"
SAMPLES = "(step.draw(offset, step.target(offset)) for offset in offsets)"

MUTANTS = [
    # The formulas.
    Mutant("accept with q/p", P.acceptance_probability, "target_prob / draft_prob", "draft_prob / target_prob", formulas),
    Mutant("accept with p/q, not cut at 1", P.acceptance_probability, "min(1, target_prob / draft_prob)",
           "target_prob / draft_prob", formulas),
    Mutant("accept with p", P.acceptance_probability, "target_prob / draft_prob)", "target_prob)", formulas),
    Mutant("residual |p - q|", P.residual, "np.maximum(0, target_probs - draft_probs)", "abs(target_probs - draft_probs)",
           formulas),
    Mutant("residual q - p", P.residual, "target_probs - draft_probs", "draft_probs - target_probs", formulas),
    Mutant("residual not normalised", P.residual, "weights / total if", "weights if", formulas),
    Mutant("residual p", P.residual, "weights / total if total > 0 else target_probs", "target_probs", formulas),
    Mutant("alpha from maxima", P.acceptance_rate, "np.minimum(", "np.maximum(", closed_forms),
    Mutant("no bonus token in the average", P.expected_tokens, "range(num_draft_tokens + 1)", "range(num_draft_tokens)",
           closed_forms),
    Mutant("no bonus token in table 1", P.expected_tokens, "range(num_draft_tokens + 1)", "range(num_draft_tokens)",
           check_published_speedups),
    # The text-book algorithms.
    Mutant("accept the complement", P.verify, "uniform > acceptance", "uniform <= acceptance", formulas),
    Mutant("resample from p", P.verify, "residual(target, draft)", "target", formulas),
    Mutant("target row of the next position", P.verify, "target_probs[offset], draft", "target_probs[offset + 1], draft",
           formulas),
    Mutant("bonus from the last draft's row", P.verify, "target_probs[len(draft_token_ids)]",
           "target_probs[len(draft_token_ids) - 1]", formulas),
    Mutant("one draft too few accepted", P.verify, "return offset, residual", "return max(offset - 1, 0), residual",
           formulas),
    Mutant("stop at the first failure", B.verify, "range(length - 1, 0, -1)", "range(length - 1, length - 2, -1)",
           block_formulas),
    Mutant("first success, not last", B.verify, "range(length - 1, 0, -1)", "range(1, length)", block_formulas),
    Mutant("stale ratio", B.verify, "residual_mass(ratios[i],", "residual_mass(ratios[i - 1],", block_formulas),
    Mutant("residual of the last ratio", B.verify, "residual(ratios[i], target_probs[i]",
           "residual(ratios[-1], target_probs[i]", block_formulas),
    Mutant("the last length with a mass, too", B.verify, "<= ratios[length]:",
           "<= acceptance_probability(ratios[-1], residual_mass(ratios[-1], target_probs[-1], draft_probs[-1])):",
           block_formulas),
    Mutant("accept the complement", synthetic.verify, "uniform > rate", "uniform <= rate", synthetic_formulas),
    Mutant("emit from p after a rejection", synthetic.verify, "target if draft_probs is None else", "target if True else",
           synthetic_formulas),
    # The accept decision.
    Mutant("accept with q/p", oracle.accepts, "slack = target_logprob - draft_logprob - log_uniform",
           "slack = draft_logprob - target_logprob - log_uniform", joint),
    Mutant("accept the complement", oracle.accepts, "int(slack >= 0)", "int(slack <= 0)", joint),
    Mutant("accept with p", oracle.accepts, "target_logprob - draft_logprob - log_uniform", "target_logprob - log_uniform",
           joint),
    Mutant("accept p/q >= 1 only", oracle.accepts, "target_logprob - draft_logprob - log_uniform",
           "target_logprob - draft_logprob", joint),
    Mutant("accept where q is 0", oracle.accepts, " or draft_logprob == -np.inf", "", check_impossible_drafts),
    Mutant("accept uniform without logarithm", oracle.Step.log_uniform,
           "np.log(uniform(self.seed, self.position + offset, index, Domain.ACCEPT))",
           "uniform(self.seed, self.position + offset, index, Domain.ACCEPT)", joint),
    Mutant("same accept noise at every position", oracle.Step.log_uniform, "self.position + offset, index",
           "self.position, index", joint),
    # The recovered token.
    Mutant("resample from p", oracle.verify_probabilistic, "probabilistic.residual(np.exp(target), np.exp(draft))",
           "np.exp(target)", joint),
    Mutant("residual |p - q|", oracle.verify_probabilistic, "probabilistic.residual(np.exp(target), np.exp(draft))",
           "abs(np.exp(target) - np.exp(draft))", joint),
    Mutant("residual of logarithms", oracle.verify_probabilistic, "probabilistic.residual(np.exp(target), np.exp(draft))",
           "probabilistic.residual(target - target.min(), draft - draft.min())", joint),
    Mutant("recover with the draft's noise", oracle.Step.draw, "self.position + offset)",
           "self.position + offset, (Domain.DRAFT_BLOCK, Domain.DRAFT_TOKEN))", joint),
    Mutant("recover with the draft's noise, seen in real noise", oracle.Step.draw, "self.position + offset)",
           "self.position + offset, (Domain.DRAFT_BLOCK, Domain.DRAFT_TOKEN))", golden),
    Mutant("recover with the accept noise, seen in real noise", oracle.Step.draw, "self.position + offset)",
           "self.position + offset, (Domain.SELECT_BLOCK, Domain.ACCEPT))", certain),
    Mutant("recover with the next position's noise", oracle.verify_probabilistic, RECOVER,
           RECOVER.replace("step.emit(offset,", "[*step.drafts[:offset], step.draw(offset + 1,") + "]", joint),
    Mutant("bonus with the next position's noise", oracle.verify_probabilistic, BONUS,
           "return [*step.drafts, step.draw(len(step.drafts) + 1, step.target(len(step.drafts)))]", one_more),
    Mutant("recover from the residual of the first row", oracle.verify_probabilistic,
           "probabilistic.residual(np.exp(target),", "probabilistic.residual(np.exp(step.target(0)),", joint),
    # The loop.
    Mutant("target row of the next position", oracle.verify_probabilistic, "target, draft = step.target(offset),",
           "target, draft = step.target(offset + 1),", joint),
    Mutant("draft row of the first position", oracle.Step.draft, "self.draft_logits[offset]", "self.draft_logits[0]", joint),
    Mutant("go on after a rejection", oracle.verify_probabilistic, "return step.emit(offset,",
           "step.drafts[offset] = step.draw(offset,", joint),
    Mutant("emit the rejected draft", oracle.verify_probabilistic, RECOVER, "return step.drafts[: offset + 1]", joint),
    Mutant("bonus from the last draft's row", oracle.verify_probabilistic, "step.target(len(step.drafts))",
           "step.target(len(step.drafts) - 1)", joint),
    Mutant("bonus from the last slot's row", oracle.verify_probabilistic, "step.target(len(step.drafts))", "step.target(-1)",
           ragged),
    Mutant("-1 skipped, later slots used", oracle.leading_drafts, "break", "continue", ragged),
    Mutant("-1 used as an index", oracle.leading_drafts, "0 <= token", "-1 <= token", ragged),
    # Temperature.
    Mutant("draft rows not scaled", oracle.Step.draft, "self.draft_sampling)",
           "self.draft_sampling._replace(temperature=1.0))", warm),
    Mutant("target rows not scaled", oracle.Step.target, "self.sampling)", "self.sampling._replace(temperature=1.0))", warm),
    Mutant("bonus row not scaled", oracle.verify_probabilistic, "step.target(len(step.drafts))",
           "log_softmax(step.target_logits[len(step.drafts)])", warm),
    Mutant("temperature multiplied", sampling.log_softmax, "/ temperature", "* temperature", warm),
    # Drafters without logits.
    Mutant("x left in the residual", oracle.verify_probabilistic, "np.exp(draft)))",
           "np.exp(draft) * (step.draft_logits is not None)))", deterministic),
    Mutant("uniform draft assumed", oracle.Step.draft, "point_mass(self.drafts[offset], self.vocab_size)",
           "np.full(self.vocab_size, -np.log(self.vocab_size))", deterministic),
    # Blocks: the formulas.
    Mutant("ratio q/p", B.running_ratio, "target_prob / draft_prob", "draft_prob / target_prob", block_formulas),
    Mutant("ratio not cut at 1", B.running_ratio, "min(1, before * target_prob / draft_prob)",
           "before * target_prob / draft_prob", block_formulas),
    Mutant("ratio that forgets", B.running_ratio, "before * target_prob", "target_prob", block_formulas),
    Mutant("residual mass |c p - q|", B.residual_mass, "np.maximum(0, ratio * target_probs - draft_probs)",
           "abs(ratio * target_probs - draft_probs)", block_formulas),
    Mutant("unscaled residual mass", B.residual_mass, "ratio * target_probs", "target_probs", block_formulas),
    Mutant("unscaled residual", B.residual, "ratio * target_probs", "target_probs", block_formulas),
    Mutant("residual q - c p", B.residual, "ratio * target_probs - draft_probs", "draft_probs - ratio * target_probs",
           block_formulas),
    Mutant("accept with the ratio", B.acceptance_probability, "mass / (mass + 1 - ratio)", "ratio", block_formulas),
    Mutant("accept with the mass", B.acceptance_probability, "mass / (mass + 1 - ratio)", "mass", block_formulas),
    Mutant("accept with the mass over the ratio", B.acceptance_probability, "mass / (mass + 1 - ratio)",
           "mass / ratio if ratio else 0", block_formulas),
    # Blocks: the search.
    Mutant("stop at the first failure", oracle.verify_block, "            accepted = i\n            break",
           "            accepted = max(accepted, i)\n        else:\n            accepted = 0", blocks),
    Mutant("first success, not last", oracle.verify_block, "range(len(log_ratios) - 1, 0, -1)", "range(1, len(log_ratios))",
           blocks),
    Mutant("all or nothing", oracle.verify_block, "range(len(log_ratios) - 1, 0, -1)",
           "range(len(log_ratios) - 1, max(len(log_ratios) - 2, 0), -1)", accepted_by_blocks),
    Mutant("stale ratio", oracle.verify_block, "log_ratios[i], next_row", "log_ratios[i - 1], next_row", blocks),
    Mutant("residual of a stale ratio", oracle.verify_block, "log_ratios[accepted])",
           "log_ratios[max(accepted - 1, 0)])", blocks),
    Mutant("residual of the last ratio", oracle.verify_block, "log_ratios[accepted])", "log_ratios[-1])", blocks),
    Mutant("unscaled residual", oracle.verify_block, "np.exp(min(0.0, log_ratios[accepted]))", "1.0", blocks),
    Mutant("unscaled residual mass", oracle.accepts_block, "residual_mass(ratio,", "residual_mass(1.0,", blocks),
    Mutant("ratio not cut at 1", oracle.verify_block, "min(0.0, log_ratios[-1]) +", "log_ratios[-1] +", blocks),
    Mutant("ratio that forgets", oracle.verify_block, "min(0.0, log_ratios[-1]) +", "0.0 +", blocks),
    Mutant("mass of the row before", oracle.verify_block, "probs[i] if", "probs[i - 1] if", blocks),
    Mutant("residual of the row before", oracle.verify_block, "*probs[accepted])", "*probs[max(accepted - 1, 0)])", blocks),
    Mutant("mass after the last draft, too", oracle.verify_block, "if i < length else None", "if i < length else probs[-1]",
           blocks),
    Mutant("K of the padded width", oracle.verify_block, "probs[i] if i < length else None",
           "probs[min(i, length - 1)] if i < len(step.draft_logits) else None", ragged_blocks),
    Mutant("K of the padded width, where a bonus token is due", oracle.verify_block, "if accepted == length:",
           "if accepted == len(step.draft_logits) or not probs or accepted == length and probs.append(probs[-1]):",
           ragged_blocks),
    Mutant("-1 skipped, later slots used", oracle.leading_drafts, "break", "continue", ragged_blocks),
    Mutant("go on after an impossible draft", oracle.verify_block, "== -np.inf:\n            break",
           "== np.inf:\n            break", check_impossible_blocks),
    Mutant("accept the complement", oracle.accepts_block, "slack = log(", "slack = -log(", blocks),
    Mutant("rows not scaled", oracle.Step.target, "self.sampling)", "self.sampling._replace(temperature=1.0))", warm_blocks),
    Mutant("bonus row not scaled", oracle.verify_block, "step.target(length)", "log_softmax(step.target_logits[length])",
           warm_blocks),
    Mutant("x left in the residual", oracle.verify_block, "*probs[accepted])",
           "probs[accepted][0], probs[accepted][1] * (step.draft_logits is not None))", deterministic_blocks),
    # Blocks: the noise.
    Mutant("same accept noise at every position", oracle.verify_block, "step.log_uniform(i - 1, index=i - 1)",
           "step.log_uniform(0)", blocks),
    Mutant("accept noise used again by later steps", oracle.verify_block, "step.log_uniform(i - 1, index=i - 1)",
           "step.log_uniform(i - 1)", several_steps),
    Mutant("drafts' noise used again by later steps", philox.draft_domains,
           "block_domain + (offset << 8), token_domain + (offset << 8)", "block_domain, token_domain", several_steps),
    Mutant("recover with the draft's noise", oracle.Step.draw, "self.position + offset)",
           "self.position + offset, (Domain.DRAFT_BLOCK + (offset << 8), Domain.DRAFT_TOKEN + (offset << 8)))", blocks),
    Mutant("recover with the next position's noise", oracle.verify_block, RECOVER_BLOCK,
           RECOVER_BLOCK.replace("step.emit(accepted,", "[*step.drafts[:accepted], step.draw(accepted + 1,") + "]", blocks),
    # Blocks: margins.
    Mutant("margin of what was cut", oracle.accepts_block, "abs(log_ratio - log_critical_ratio",
           "abs(min(0.0, log_ratio) - log_critical_ratio", check_margins),
    Mutant("margin from the total mass alone", oracle.log_critical_ratio, "np.cumsum([0.0, *probs[order]])",
           "np.array([0.0, probs.sum()])", check_margins),
    # Strict.
    Mutant("compare with the argmax", oracle.verify_strict, f"return greedy.compare({SAMPLES}, step.drafts)",
           "same = greedy.compare((greedy.argmax(step.target(offset)) for offset in offsets), step.drafts)\n"
           "    return [step.draw(offset, step.target(offset)) for offset, _ in enumerate(same)]", strict_joint),
    Mutant("compare with the argmax, where only the number accepted shows it", oracle.verify_strict,
           f"return greedy.compare({SAMPLES}, step.drafts)",
           "same = greedy.compare((greedy.argmax(step.target(offset)) for offset in offsets), step.drafts)\n"
           "    return [step.draw(offset, step.target(offset)) for offset, _ in enumerate(same)]", strict_iid),
    Mutant("go on after a mismatch", greedy.compare, "if token != draft:", "if draft is None:", strict_joint),
    Mutant("go on after a mismatch, on probabilities", greedy.compare, "if token != draft:", "if draft is None:",
           strict_formulas),
    Mutant("same noise at every row, on probabilities", strict.verify, "gumbel_max(row, noise)",
           "gumbel_max(row, gumbels[0])", strict_formulas),
    Mutant("same noise at every position", oracle.verify_strict, "step.draw(offset,", "step.draw(0,", strict_iid),
    Mutant("same noise at every position, plain sampling", oracle.verify_strict, "step.draw(offset,", "step.draw(0,",
           check_strict_is_plain_sampling),
    Mutant("off by one position", oracle.verify_strict, "step.draw(offset,", "step.draw(offset + 1,",
           check_strict_is_plain_sampling),
    Mutant("rows not scaled", oracle.Step.target, "self.sampling)", "self.sampling._replace(temperature=1.0))", strict_warm),
    # Greedy.
    Mutant("ties to the right", greedy.argmax, "int(np.argmax(logits))",
           "len(logits) - 1 - int(np.argmax(np.asarray(logits)[::-1]))", greedy_everywhere),
    Mutant("NaN wins", sampling.without_nan, "logits[np.isnan(logits)] = -np.inf", "logits[np.isnan(logits)] = np.inf",
           greedy_everywhere),
    Mutant("go on after a mismatch", greedy.compare, "if token != draft:", "if draft is None:", greedy_alone),
    Mutant("stop before the bonus token", greedy.compare, "zip_longest(", "zip(", greedy_alone),
    Mutant("-1 skipped, later slots used", oracle.leading_drafts, "break", "continue", greedy_everywhere),
    # Selection.
    Mutant("block by its maximum, not its sum", S.log_block_sums, "log_sum(log_weights[start : start + block_size])",
           "log_weights[start : start + block_size].max()", selection_cases),
    Mutant("block by its unnormalised mean", S.log_block_sums, "log_sum(log_weights[start : start + block_size])",
           "log_sum(log_weights[start : start + block_size]) - np.log(len(log_weights[start : start + block_size]))",
           selection_cases),
    Mutant("block noise used again for tokens", sampling.select, "domains[1]", "domains[0]", selection_cases),
    Mutant("first block always", S.select, "[block * block_size :]", "[0:]", selection_cases),
    Mutant("wrong sign in the noise, seen in real noise", philox.gumbel, "-np.log(-np.log1p", "np.log(-np.log1p",
           check_real_selection),
    Mutant("drafts share the target's noise", sampling.sample, "log_softmax(logits, temperature), seed, position, domains)",
           "log_softmax(logits, temperature), seed, position)", joint),
    Mutant("match by minima", strict.match_probabilities, "max(p / pj, q / qj)", "min(p / pj, q / qj)", coupling),
    Mutant("match without blocks", strict.match_probability, "size = block_size or len(target_probs)",
           "size = len(target_probs)", coupling),
    # Synthetic.
    Mutant("accept the complement", oracle.verify_synthetic, "if not step.decide(", "if step.decide(", synthetic_cases),
    Mutant("first rate at every position", oracle.verify_synthetic, "conditional_rates[offset]", "conditional_rates[0]",
           synthetic_cases),
    Mutant("same accept noise at every position", oracle.verify_synthetic, "step.log_uniform(offset)", "step.log_uniform(0)",
           synthetic_cases),
    Mutant("joint for conditional rates", oracle.verify_synthetic, "log(conditional_rates[offset])",
           "log(np.prod(conditional_rates[: offset + 1]))", synthetic_cases),
    Mutant("emit from p after a rejection", oracle.verify_synthetic, "or step.draft_logits is None", "or True",
           synthetic_cases),
    Mutant("draft row of the first position", oracle.verify_synthetic, "step.draft(offset)", "step.draft(0)",
           synthetic_cases),
    Mutant("draw at temperature 0", oracle.verify_synthetic, "target = step.target(offset)",
           "target = log_softmax(step.target_logits[offset])", check_synthetic_greedy),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_caught(mutant):
    assert_caught(mutant)


def test_checks_that_catch_mutants_pass_on_the_reference():
    for check in {mutant.check for mutant in MUTANTS} - {golden, certain}:  # these two have a test of their own
        check()
