"""Acceptance schedules: the solver, the shapes and the errors, against the reference and against hand-made mutants."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import accumulate, pairwise, product
from operator import mul

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import synthetic as reference
from specdecode import AcceptanceSchedule

DRAFTS = [1, 2, 3, 4, 5, 7, 10]
RATES = [0.0, 1e-9, 0.05, 0.24, 0.5, 0.69, 0.83, 0.95, 0.999, 1.0]
SHAPES = ["decay", "constant", "minimum_variance"]

Maker = Callable[[float, int, float], AcceptanceSchedule]  # (rate, num_draft_tokens, min_decay)


def decay_schedule(rate: float, num_draft_tokens: int, min_decay: float = 0.85) -> AcceptanceSchedule:
    return AcceptanceSchedule.from_mean_rate(rate, num_draft_tokens=num_draft_tokens, min_decay=min_decay)


def mean_of_joint(base_rate: float, decay: float, num_draft_tokens: int) -> float:
    """Return the mean rate by the closed form, which neither implementation uses."""
    return math.fsum(base_rate ** (i + 1) * decay ** (i * (i + 1) / 2) for i in range(num_draft_tokens)) / (
        num_draft_tokens
    )


def check_decay_schedule(schedule: AcceptanceSchedule, rate: float, num_draft_tokens: int, min_decay: float) -> None:
    """Assert all promises of the decay shape."""
    base_rate, decay = schedule.base_rate, schedule.decay
    assert base_rate is not None
    assert decay is not None
    assert 0 <= base_rate <= 1
    assert min_decay <= decay <= 1
    conditional = [base_rate * decay**i for i in range(num_draft_tokens)]
    assert schedule.joint_rates == pytest.approx(list(accumulate(conditional, mul)), abs=1e-12)
    if schedule.joint_rates[-1] > 0:
        assert schedule.conditional_rates == pytest.approx(conditional, abs=1e-12)
    assert all(later <= earlier for earlier, later in pairwise(schedule.joint_rates))
    assert mean_of_joint(base_rate, decay, num_draft_tokens) == pytest.approx(rate, abs=1e-12)
    assert schedule.mean_rate == pytest.approx(rate, abs=1e-12)
    assert schedule.acceptance_length == pytest.approx(1 + num_draft_tokens * rate, abs=1e-11)
    if rate == 1:
        assert (base_rate, decay) == (1, 1)
    elif decay > min_decay:  # only because it had to be
        assert base_rate == 1
        assert mean_of_joint(1.0, decay - 1e-9, num_draft_tokens) < rate


def check_on_grid(make: Maker) -> None:
    for rate, num_draft_tokens, min_decay in product(RATES, DRAFTS, [0.0, 0.5, 0.85, 1.0]):
        check_decay_schedule(make(rate, num_draft_tokens, min_decay), rate, num_draft_tokens, min_decay)


def test_decay_schedules_keep_every_promise_on_a_grid() -> None:
    check_on_grid(decay_schedule)


@settings(derandomize=True, deadline=None)
@given(rate=st.floats(0, 1), num_draft_tokens=st.integers(1, 20), min_decay=st.floats(0.5, 1))
def test_decay_schedules_keep_every_promise(rate: float, num_draft_tokens: int, min_decay: float) -> None:
    check_decay_schedule(decay_schedule(rate, num_draft_tokens, min_decay), rate, num_draft_tokens, min_decay)


# --- Mutants: each is a plausible mistake, and the checks above must notice it ---------------------------------------


def right_joint(base_rate: float, decay: float, num_draft_tokens: int) -> list[float]:
    return [base_rate ** (i + 1) * decay ** (i * (i + 1) / 2) for i in range(num_draft_tokens)]


def right_mean(joint: list[float], base_rate: float, decay: float) -> float:
    return sum(joint) / len(joint)


def bisect(rising: Callable[[float], float], goal: float, low: float, halvings: int) -> float:
    high = 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < goal else (low, middle)
    return high


class Unchecked(AcceptanceSchedule):
    """A schedule whose numbers may be inconsistent, as a mistake may have made them."""

    def __post_init__(self) -> None: ...


def maker(
    joint: Callable[[float, float, int], list[float]] = right_joint,
    mean: Callable[[list[float], float, float], float] = right_mean,
    decays: Callable[[float], Iterator[float]] = lambda min_decay: iter((min_decay,)),
    solves_decay: bool = True,
    halvings: int = 200,
    schedule: type[Unchecked] = Unchecked,
) -> Maker:
    """Return a solver made of parts; parts that are not given are right."""

    def make(rate: float, num_draft_tokens: int, min_decay: float) -> AcceptanceSchedule:
        def reached(base_rate: float, decay: float) -> float:
            return mean(joint(base_rate, decay, num_draft_tokens), base_rate, decay)

        base_rate, decay = 1.0, next(decays(min_decay))
        if rate == 1:
            decay = 1.0
        elif reached(1.0, decay) >= rate or not solves_decay:
            base_rate = bisect(lambda base_rate: reached(base_rate, decay), rate, 0.0, halvings) if rate else 0.0
        else:
            decay = bisect(lambda decay: reached(1.0, decay), rate, decay, halvings)
        return schedule(tuple(joint(base_rate, decay, num_draft_tokens)), base_rate, decay)

    return make


class MeanOfConditionalRates(Unchecked):
    @property
    def mean_rate(self) -> float:
        return sum(self.conditional_rates) / self.num_draft_tokens


class LengthWithoutBonus(Unchecked):
    @property
    def acceptance_length(self) -> float:
        return sum(self.joint_rates)


MUTANTS = {
    "solves for the mean of the conditional rates": maker(
        mean=lambda joint, a, d: sum(a * d**i for i in range(len(joint))) / len(joint)
    ),
    "reports the mean of the conditional rates": maker(schedule=MeanOfConditionalRates),
    "length without the last token": maker(schedule=LengthWithoutBonus),
    "mean over K + 1 tokens": maker(mean=lambda joint, a, d: sum(joint) / (len(joint) + 1)),
    "mean without the first position": maker(mean=lambda joint, a, d: sum(joint[1:]) / len(joint)),
    "exponent i(i + 1)": maker(joint=lambda a, d, k: [a ** (i + 1) * d ** (i * (i + 1)) for i in range(k)]),
    "exponent i(i - 1)/2": maker(joint=lambda a, d, k: [a ** (i + 1) * d ** (i * (i - 1) / 2) for i in range(k)]),
    "exponent (i + 1)(i + 2)/2": maker(
        joint=lambda a, d, k: [a ** (i + 1) * d ** ((i + 1) * (i + 2) / 2) for i in range(k)]
    ),
    "decay not compounded": maker(joint=lambda a, d, k: [a ** (i + 1) * d**i for i in range(k)]),
    "base rate not compounded": maker(joint=lambda a, d, k: [a * d ** (i * (i + 1) / 2) for i in range(k)]),
    "decay fixed at its minimum": maker(solves_decay=False),
    "decay fixed at 1": maker(decays=lambda min_decay: iter((1.0,))),
    "decay fixed at .85": maker(decays=lambda min_decay: iter((0.85,))),
    "smallest decay ignores its minimum": maker(decays=lambda min_decay: iter((0.0,))),
    "decay larger than it need be": maker(decays=lambda min_decay: iter(((1 + min_decay) / 2,))),
    "twenty halvings": maker(halvings=20),
}


def test_the_unmutated_solver_passes() -> None:
    check_on_grid(maker())


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutants_are_caught(mutant: Maker) -> None:
    with pytest.raises(AssertionError):
        check_on_grid(mutant)


# --- Against the reference, and known values -------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", DRAFTS)
@pytest.mark.parametrize("rate", RATES)
def test_decay_agrees_with_the_reference(rate: float, num_draft_tokens: int) -> None:
    for min_decay in (0.5, 0.85, 1.0):
        schedule = decay_schedule(rate, num_draft_tokens, min_decay)
        base_rate, decay = reference.solve(rate, num_draft_tokens, min_decay)
        assert (schedule.base_rate, schedule.decay) == pytest.approx((base_rate, decay), abs=1e-10)
        conditional = reference.conditional_rates(base_rate, decay, num_draft_tokens)
        joint = reference.joint_rates(conditional)
        assert schedule.conditional_rates == pytest.approx(conditional, abs=1e-10)
        assert schedule.joint_rates == pytest.approx(joint, abs=1e-10)
        assert schedule.mean_rate == pytest.approx(reference.mean_rate(base_rate, decay, num_draft_tokens), abs=1e-12)
        assert schedule.acceptance_length == pytest.approx(reference.acceptance_length(joint), abs=1e-11)


@pytest.mark.parametrize("num_draft_tokens", DRAFTS)
def test_minimum_variance_agrees_with_the_reference(num_draft_tokens: int) -> None:
    for length in np.linspace(1, num_draft_tokens + 1, 23):
        schedule = AcceptanceSchedule.from_length(length, num_draft_tokens=num_draft_tokens)
        joint = reference.minimum_variance(length, num_draft_tokens)
        assert schedule.joint_rates == pytest.approx(joint, abs=1e-12)
        assert schedule.conditional_rates == pytest.approx(reference.conditional_from_joint(joint), abs=1e-12)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_mean_accepted_drafts_is_the_sum_of_the_joint_rates_by_enumeration(num_draft_tokens: int) -> None:
    conditional = [Fraction(9 - i, 10 + i) for i in range(num_draft_tokens)]
    mean = Fraction(0)
    for decisions in product([True, False], repeat=num_draft_tokens):
        probability = math.prod(
            rate if accepted else 1 - rate for rate, accepted in zip(conditional, decisions, strict=True)
        )
        mean += probability * sum(accumulate(decisions, lambda before, accepted: before and accepted))
    joint = reference.joint_rates([float(rate) for rate in conditional])
    assert reference.acceptance_length(joint) == pytest.approx(float(1 + mean), abs=1e-12)
    schedule = AcceptanceSchedule.from_rates(accumulate(conditional, mul))
    assert schedule.acceptance_length == pytest.approx(float(1 + mean), abs=1e-12)
    assert schedule.mean_rate == pytest.approx(float(mean / num_draft_tokens), abs=1e-12)


@pytest.mark.parametrize(
    ("rate", "num_draft_tokens", "base_rate", "decay"),
    [
        (0.0, 3, 0.0, 0.85),
        (0.24, 3, 0.469308, 0.85),
        (0.69, 3, 0.908360, 0.85),
        (1.0, 3, 1.0, 1.0),
        (1.0, 1, 1.0, 1.0),
        (0.69, 1, 0.69, 0.85),
        (0.95, 2, 1.0, 0.9),  # (1 + d)/2
        ((1 + 0.9 + 0.9**3) / 3, 3, 1.0, 0.9),  # (1 + d + d^3)/3
    ],
)
def test_known_solutions(rate: float, num_draft_tokens: int, base_rate: float, decay: float) -> None:
    schedule = decay_schedule(rate, num_draft_tokens)
    assert (schedule.base_rate, schedule.decay) == pytest.approx((base_rate, decay), abs=5e-7)
    assert reference.solve(rate, num_draft_tokens) == pytest.approx((base_rate, decay), abs=5e-7)


@pytest.mark.parametrize(
    ("rate", "measured"),
    [(0.24, (0.4692, 0.1862, 0.0641)), (0.69, (0.9086, 0.7020, 0.4613)), (1.0, (1.0, 1.0, 1.0))],
)
def test_joint_rates_are_those_measured_in_vllm_pull_request_38045(rate: float, measured: tuple[float, ...]) -> None:
    assert decay_schedule(rate, 3).joint_rates == pytest.approx(measured, abs=0.002)  # the measurement's own noise


# --- Shapes ----------------------------------------------------------------------------------------------------------


def variance(schedule: AcceptanceSchedule) -> float:
    """Return the variance of the number n of accepted drafts: E[n^2] = sum of (2 i + 1) J_i."""
    mean = math.fsum(schedule.joint_rates)
    return math.fsum((2 * i + 1) * rate for i, rate in enumerate(schedule.joint_rates)) - mean**2


@pytest.mark.parametrize("shape", SHAPES)
@settings(derandomize=True, deadline=None)
@given(rate=st.floats(0, 1), num_draft_tokens=st.integers(1, 20))
def test_every_shape_has_the_mean_asked_for(shape, rate: float, num_draft_tokens: int) -> None:
    from_rate = AcceptanceSchedule.from_mean_rate(rate, num_draft_tokens=num_draft_tokens, shape=shape)
    from_length = AcceptanceSchedule.from_length(
        1 + rate * num_draft_tokens, num_draft_tokens=num_draft_tokens, shape=shape
    )
    for schedule in (from_rate, from_length):
        assert schedule.mean_rate == pytest.approx(rate, abs=1e-12)
        assert schedule.acceptance_length == pytest.approx(1 + rate * num_draft_tokens, abs=1e-11)
        assert schedule.num_draft_tokens == len(schedule.joint_rates) == len(schedule.conditional_rates)
        assert all(later <= earlier for earlier, later in pairwise((1.0, *schedule.joint_rates, 0.0)))
        assert all(0 <= conditional <= 1 for conditional in schedule.conditional_rates)


@pytest.mark.parametrize("num_draft_tokens", DRAFTS)
@pytest.mark.parametrize("rate", RATES)
def test_constant_shape_accepts_every_position_alike(rate: float, num_draft_tokens: int) -> None:
    schedule = AcceptanceSchedule.from_mean_rate(rate, num_draft_tokens=num_draft_tokens, shape="constant")
    p = schedule.base_rate
    assert p is not None
    assert schedule.decay == 1
    assert sum(p ** (i + 1) for i in range(num_draft_tokens)) == pytest.approx(rate * num_draft_tokens, abs=1e-11)
    assert schedule.conditional_rates == pytest.approx([p] * num_draft_tokens, rel=1e-12)


def test_minimum_variance_accepts_the_mean_rounded_down_or_up() -> None:
    schedule = AcceptanceSchedule.from_mean_rate(0.65, num_draft_tokens=4, shape="minimum_variance")
    assert schedule.joint_rates == pytest.approx((1.0, 1.0, 0.6, 0.0))
    assert schedule.conditional_rates == pytest.approx((1.0, 1.0, 0.6, 0.0))
    assert (schedule.base_rate, schedule.decay) == (None, None)


@pytest.mark.parametrize("num_draft_tokens", DRAFTS)
@pytest.mark.parametrize("rate", RATES)
def test_no_shape_varies_less_than_minimum_variance(rate: float, num_draft_tokens: int) -> None:
    decay, constant, least = (
        variance(AcceptanceSchedule.from_mean_rate(rate, num_draft_tokens=num_draft_tokens, shape=shape))
        for shape in ("decay", "constant", "minimum_variance")
    )
    fraction = rate * num_draft_tokens % 1
    assert least == pytest.approx(fraction * (1 - fraction), abs=1e-12)
    assert least <= decay + 1e-12
    assert least <= constant + 1e-12


def test_default_shapes() -> None:
    rate = AcceptanceSchedule.from_mean_rate(0.5, num_draft_tokens=3)
    assert rate == AcceptanceSchedule.from_mean_rate(0.5, num_draft_tokens=3, min_decay=0.85, shape="decay")
    length = AcceptanceSchedule.from_length(2.6, num_draft_tokens=3)
    assert length == AcceptanceSchedule.from_length(2.6, num_draft_tokens=3, shape="minimum_variance")
    assert length.joint_rates == pytest.approx((1.0, 0.6, 0.0))


# --- Explicit rates --------------------------------------------------------------------------------------------------


def test_explicit_rates_are_kept_as_given() -> None:
    schedule = AcceptanceSchedule.from_rates([0.91, 0.70, 0.46])
    assert schedule.joint_rates == (0.91, 0.70, 0.46)
    assert schedule.conditional_rates == pytest.approx((0.91, 0.70 / 0.91, 0.46 / 0.70))
    assert schedule.mean_rate == pytest.approx(2.07 / 3)
    assert schedule.acceptance_length == pytest.approx(3.07)
    assert (schedule.base_rate, schedule.decay) == (None, None)
    assert schedule.num_draft_tokens == 3


def test_nothing_follows_a_rate_of_zero() -> None:
    assert AcceptanceSchedule.from_rates([0.5, 0.0, 0.0]).conditional_rates == (0.5, 0.0, 0.0)
    assert AcceptanceSchedule.from_rates([0.0]).conditional_rates == (0.0,)


@settings(derandomize=True, deadline=None)
@given(rates=st.lists(st.floats(0, 1), min_size=1, max_size=12).map(lambda rates: sorted(rates, reverse=True)))
def test_conditional_rates_multiply_up_to_the_joint_rates(rates: list[float]) -> None:
    schedule = AcceptanceSchedule.from_rates(rates)
    assert list(accumulate(schedule.conditional_rates, mul)) == pytest.approx(rates, abs=1e-12)
    assert schedule.conditional_rates == pytest.approx(reference.conditional_from_joint(rates), abs=1e-12)


@pytest.mark.parametrize("rates", [(0.5, 0.25), np.array([0.5, 0.25], dtype=np.float32), [Fraction(1, 2), 0.25]])
def test_any_iterable_of_real_numbers_becomes_python_floats(rates) -> None:
    schedule = AcceptanceSchedule.from_rates(rates)
    assert schedule.joint_rates == (0.5, 0.25)
    assert all(type(rate) is float for rate in schedule.joint_rates)
    assert schedule == AcceptanceSchedule(joint_rates=(0.5, 0.25))
    assert type(AcceptanceSchedule.from_length(2, num_draft_tokens=np.int64(1)).mean_rate) is float


def test_schedules_are_values() -> None:
    schedule = decay_schedule(0.5, 3)
    assert schedule == decay_schedule(0.5, 3)
    assert hash(schedule) == hash(decay_schedule(0.5, 3))
    assert schedule != decay_schedule(0.5, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.decay = 0.9  # type: ignore[misc]


# --- Errors ----------------------------------------------------------------------------------------------------------

from_mean_rate = AcceptanceSchedule.from_mean_rate
from_length = AcceptanceSchedule.from_length
from_rates = AcceptanceSchedule.from_rates


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        # Missing.
        (lambda: from_mean_rate(num_draft_tokens=3), TypeError, "rate"),
        (lambda: from_mean_rate(0.5), TypeError, "num_draft_tokens"),
        (lambda: from_length(num_draft_tokens=3), TypeError, "length"),
        (lambda: from_rates(), TypeError, "joint_rates"),
        (lambda: from_mean_rate(None, num_draft_tokens=3), TypeError, r"rate: expected .* got None"),
        (lambda: from_length(None, num_draft_tokens=3), TypeError, r"length: expected .* got None"),
        (lambda: from_rates(None), TypeError, "joint_rates: expected an iterable of real numbers, got None"),
        # The wrong type.
        (lambda: from_mean_rate(True, num_draft_tokens=3), TypeError, r"rate: expected .* got True \(bool\)"),
        (lambda: from_mean_rate("0.5", num_draft_tokens=3), TypeError, r"rate: expected .* got '0.5' \(str\)"),
        (lambda: from_mean_rate(torch.tensor(0.5), num_draft_tokens=3), TypeError, r"rate: expected .* \(Tensor\)"),
        (lambda: from_length(True, num_draft_tokens=3), TypeError, r"length: expected .* got True \(bool\)"),
        (lambda: from_mean_rate(0.5, num_draft_tokens=3.0), TypeError, r"num_draft_tokens: expected .* got 3\.0"),
        (lambda: from_mean_rate(0.5, num_draft_tokens=True), TypeError, "num_draft_tokens: expected .* got True"),
        (lambda: from_length(2.0, num_draft_tokens=None), TypeError, "num_draft_tokens: expected .* got None"),
        (lambda: from_mean_rate(0.5, num_draft_tokens=3, min_decay=None), TypeError, "min_decay: .* got None"),
        (lambda: from_rates(0.5), TypeError, r"joint_rates: expected an iterable of real numbers, got 0\.5"),
        (lambda: from_rates([0.5, None]), TypeError, r"joint_rates\[1\]: expected .* got None"),
        (lambda: from_rates([True]), TypeError, r"joint_rates\[0\]: expected .* got True"),
        (lambda: from_rates("10"), TypeError, r"joint_rates\[0\]: expected .* got '1'"),
        # Out of range.
        (lambda: from_mean_rate(-0.01, num_draft_tokens=3), ValueError, r"rate: .*\[0, 1\], got -0\.01"),
        (lambda: from_mean_rate(1.01, num_draft_tokens=3), ValueError, r"rate: .*\[0, 1\], got 1\.01"),
        (lambda: from_mean_rate(math.nan, num_draft_tokens=3), ValueError, r"rate: .*\[0, 1\], got nan"),
        (lambda: from_mean_rate(math.inf, num_draft_tokens=3), ValueError, r"rate: .*\[0, 1\], got inf"),
        (lambda: from_mean_rate(10**400, num_draft_tokens=3), ValueError, r"rate: .*\[0, 1\]"),
        (lambda: from_length(0.99, num_draft_tokens=3), ValueError, r"length: .*\[1, 4\], got 0\.99"),
        (lambda: from_length(4.01, num_draft_tokens=3), ValueError, r"length: .*\[1, 4\], got 4\.01"),
        (lambda: from_length(math.nan, num_draft_tokens=3), ValueError, r"length: .*\[1, 4\], got nan"),
        (lambda: from_length(-math.inf, num_draft_tokens=3), ValueError, r"length: .*\[1, 4\], got -inf"),
        (lambda: from_mean_rate(0.5, num_draft_tokens=0), ValueError, "num_draft_tokens: expected .* got 0"),
        (lambda: from_length(1.0, num_draft_tokens=-2), ValueError, "num_draft_tokens: expected .* got -2"),
        (lambda: from_mean_rate(0.5, num_draft_tokens=3, min_decay=1.1), ValueError, r"min_decay: .* got 1\.1"),
        (lambda: from_mean_rate(0.5, num_draft_tokens=3, min_decay=math.nan), ValueError, "min_decay: .* got nan"),
        (lambda: from_length(2.0, num_draft_tokens=3, min_decay=-0.1), ValueError, r"min_decay: .* got -0\.1"),
        (lambda: from_mean_rate(0.5, num_draft_tokens=3, shape="flat"), ValueError, "shape: expected .* got 'flat'"),
        (lambda: from_length(2.0, num_draft_tokens=3, shape=None), ValueError, "shape: expected .* got None"),
        (lambda: from_rates([]), ValueError, "joint_rates: expected one rate per draft position, got none"),
        (lambda: from_rates([0.5, math.nan]), ValueError, r"joint_rates\[1\]: .*\[0, 1\], got nan"),
        (lambda: from_rates([1.5]), ValueError, r"joint_rates\[0\]: .*\[0, 1\], got 1\.5"),
        (lambda: from_rates([0.5, -0.5]), ValueError, r"joint_rates\[1\]: .*\[0, 1\], got -0\.5"),
        (lambda: from_rates([0.4, 0.3, 0.31]), ValueError, r"joint_rates\[2\]: expected at most 0\.3, .* got 0\.31"),
        (lambda: from_rates([0.5, math.nextafter(0.5, 1)]), ValueError, r"joint_rates\[1\]: expected at most 0\.5, "),
        (lambda: AcceptanceSchedule((0.4, 0.5)), ValueError, r"joint_rates\[1\]: expected at most 0\.4, .* got 0\.5"),
        (lambda: AcceptanceSchedule((0.9, 0.5), "foo", 1.0), TypeError, "base_rate: expected a float, .* got 'foo'"),
        (lambda: AcceptanceSchedule((0.9, 0.5), 0.9), TypeError, "decay: expected a float, .* got None"),
        (lambda: AcceptanceSchedule((0.9, 0.5), 0.9, 1.0), ValueError, r"base_rate: expected, .* got 0\.9 and 1\.0"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
