"""The reference's output is distributed as the target: checked by exact enumeration of small cases.

`tests.support.enumeration` runs the oracle's `verify` along every path of drafts, accept decisions and emitted tokens. Only
the noise is replaced, by ideal random numbers. Distributions are compared to 1e-12. The text-book algorithms, on
probabilities, take fractions, and are compared exactly.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from scipy.stats import chi2, ncx2

from reference import block, greedy, oracle, philox, probabilistic, sampling, strict, synthetic
from tests.support.distributions import FALSE_ALARM, assert_distribution
from tests.support.enumeration import (
    Case,
    Chance,
    ExactUniform,
    decode,
    distribution,
    history,
    ideal_noise,
    iid,
    logits,
    marginal,
    most_likely,
    sequence_distribution,
    total_variation,
)
from tests.support.exactness import (
    CASES,
    METHODS,
    NOT_ENUMERABLE,
    accepted_blocks,
    accepted_distribution,
    accepted_distribution_of_blocks,
    agreement,
    assert_same_distribution,
    check_method,
    fresh_domains,
    overlap,
    verify_block,
    verify_block_without_draft_logits,
    verify_probabilistic,
    verify_without_draft_logits,
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_the_joint_distribution_of_the_tokens_is_the_targets(method, case):
    if (method, case) in NOT_ENUMERABLE:
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
    """With models that ignore the text, the number of accepted drafts is a geometric number, truncated at K."""
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
"""Rows with ties; the lowest ids win."""

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
    """With real noise, the output equals plain sampling token for token, for all drafts."""
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
"""Several steps of one request with one seed: later steps draft positions again after rejections."""


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
    """A draft with p(x) = 0 or q(x) = 0 is rejected with all drafts after it, however likely they are."""
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
    """The margin is exactly the change of the running ratio that changes the decision."""
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
    # An error of total variation TV gives a chi-square of noncentrality 4 TV^2 N or more.
    joint = distribution(lambda chance: decode(chance, GOLDEN, verify_probabilistic, philox.SELECT))
    wrong = float(total_variation(marginal(joint, lambda outcome: outcome[0]), sequence_distribution(GOLDEN.target, 2)))
    assert 0.089 < wrong < 0.091
    # A rejection, u > 1/3, also means that the exponential of token 0 is large: it is selected with 1/3, not 1/2.
    for distance, degrees in [(wrong, 3), (1 / 9, 8)]:
        threshold = chi2.isf(FALSE_ALARM, degrees)
        assert ncx2.cdf(threshold, degrees, 4 * distance**2 * REAL_SEEDS) < 0.001
