"""Acceptance schedules: how often synthetic verification accepts each draft.

Position i of a step (counted from 0) is accepted, given that all drafts before it were, with the conditional rate a_i,
so all drafts through i are accepted with the joint rate J_i = a_0 * ... * a_i. The mean number of accepted drafts is
J_0 + ... + J_{K-1}, which relates the two numbers that benchmarks quote:

    mean rate r = mean(J_0 .. J_{K-1})        acceptance length L = 1 + K * r

This file only converts r, L or measured rates to a schedule; the sampler uses it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Real
from operator import mul
from typing import Literal, cast, get_args

from specdecode.arguments import MOST_DRAFT_TOKENS, check_choice, check_count, shown

Shape = Literal["decay", "constant", "minimum_variance"]


@dataclass(frozen=True)
class AcceptanceSchedule:
    """The acceptance rates of synthetic verification at each position of a step.

    Build one with `from_mean_rate`, `from_length` or `from_rates`. The first two have three shapes. All have the same mean
    number of accepted drafts, m; they differ in the variation of this number between steps:

    | shape | conditional rate at position i | as in |
    |---|---|---|
    | `"decay"` | `base_rate * decay**i`: later drafts are harder, as real drafters show | vLLM |
    | `"constant"` | `base_rate` at every position (decay 1) | llama.cpp |
    | `"minimum_variance"` | 1 at the first floor(m) positions, m - floor(m) at the next, then 0 | vLLM |

    With `"minimum_variance"` every step accepts m drafts, rounded down or up.

    Attributes:
        joint_rates: one float in [0, 1] per draft position, non-increasing: the probability that every draft through
            that position is accepted.
        base_rate: conditional rate of the first position; None where no base rate and decay were solved for (explicit
            rates and `"minimum_variance"`).
        decay: factor from one conditional rate to the next; None if and only if `base_rate` is None.

    Raises:
        TypeError: a rate is not a real number.
        ValueError: a rate is NaN or outside [0, 1], the rates increase, or there are none; or `base_rate` and `decay` are
            given, but give other joint rates.

    Example:
        >>> from specdecode import AcceptanceSchedule
        >>> schedule = AcceptanceSchedule.from_mean_rate(0.69, num_draft_tokens=3)
        >>> [round(rate, 4) for rate in schedule.joint_rates]
        [0.9084, 0.7014, 0.4603]
        >>> round(schedule.acceptance_length, 6)
        3.07

    Source: vLLM pull request 38045 (base rate and decay).
    """

    joint_rates: tuple[float, ...]
    base_rate: float | None = None
    decay: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "joint_rates", _checked_rates(self.joint_rates))
        if self.base_rate is None and self.decay is None:
            return
        for name, number in (("base_rate", self.base_rate), ("decay", self.decay)):
            if isinstance(number, bool) or not isinstance(number, Real):
                raise TypeError(
                    f"{name}: expected a float, since base_rate and decay are given together, got {shown(number)}"
                )
        rates = _joint_rates(cast(float, self.base_rate), cast(float, self.decay), len(self.joint_rates))
        if not all(math.isclose(*each, rel_tol=1e-9, abs_tol=1e-12) for each in zip(rates, self.joint_rates)):
            got = f"{shown(self.base_rate)} and {shown(self.decay)}"
            raise ValueError(f"base_rate: expected, together with decay, to give the joint_rates, got {got}")

    @classmethod
    def from_mean_rate(
        cls,
        rate: float,
        *,
        num_draft_tokens: int,
        min_decay: float = 0.85,
        shape: Shape = "decay",
    ) -> "AcceptanceSchedule":
        """Build the schedule whose joint rates have the mean `rate`.

        With `"decay"`, `J_i = base_rate**(i + 1) * decay**(i * (i + 1) / 2)`. The decay is the smallest number in
        [min_decay, 1] with which a base rate of at most 1 reaches the mean. So it is above `min_decay` only if necessary;
        at `rate` 1 both are 1.

        Args:
            rate: mean of the joint rates, that is accepted / drafted tokens, in [0, 1].
            num_draft_tokens: K, the drafts per step, at least 1.
            min_decay: the smallest decay allowed, in [0, 1]. Only the shape `"decay"` uses it.
            shape: `"decay"`, `"constant"` or `"minimum_variance"`; see the class.

        Returns:
            A schedule whose `mean_rate` is `rate` to within rounding (1e-12 at any common K).

        Raises:
            TypeError: an argument is not a number of the right kind (bool is not one).
            ValueError: an argument is out of range, or `shape` is unknown.

        Example:
            >>> from specdecode import AcceptanceSchedule
            >>> schedule = AcceptanceSchedule.from_mean_rate(0.24, num_draft_tokens=3)
            >>> round(schedule.base_rate, 6), schedule.decay
            (0.469308, 0.85)
            >>> schedule = AcceptanceSchedule.from_mean_rate(0.95, num_draft_tokens=2)
            >>> schedule.base_rate, round(schedule.decay, 6)  # (1 + decay) / 2 = 0.95
            (1.0, 0.9)

        Source: vLLM pull request 38045.
        """
        rate = _checked_real("rate", rate, 0, 1)
        num_draft_tokens = check_count("num_draft_tokens", num_draft_tokens, MOST_DRAFT_TOKENS)
        return cls._with_mean(rate * num_draft_tokens, num_draft_tokens, min_decay, shape)

    @classmethod
    def from_length(
        cls,
        length: float,
        *,
        num_draft_tokens: int,
        min_decay: float = 0.85,
        shape: Shape = "minimum_variance",
    ) -> "AcceptanceSchedule":
        """Build the schedule that emits `length` tokens per step on average.

        Equal to `from_mean_rate((length - 1) / num_draft_tokens, ...)`, except for the default shape. It is vLLM's default
        for lengths: each step emits `length` tokens, rounded down or up, so the variation is the smallest possible.

        Args:
            length: mean emitted tokens per step, the recovered or bonus token counted, in [1, num_draft_tokens + 1].
            num_draft_tokens: K, the drafts per step, at least 1.
            min_decay: the smallest decay allowed, in [0, 1]. Only the shape `"decay"` uses it.
            shape: `"decay"`, `"constant"` or `"minimum_variance"`; see the class.

        Returns:
            A schedule whose `acceptance_length` is `length` to within rounding.

        Raises:
            TypeError: an argument is not a number of the right kind (bool is not one).
            ValueError: an argument is out of range, or `shape` is unknown.

        Example:
            >>> from specdecode import AcceptanceSchedule
            >>> schedule = AcceptanceSchedule.from_length(2.5, num_draft_tokens=3)
            >>> schedule.joint_rates
            (1.0, 0.5, 0.0)
            >>> schedule = AcceptanceSchedule.from_length(1.75, num_draft_tokens=2, shape="constant")
            >>> schedule.conditional_rates  # 1/2 + 1/4 = 0.75
            (0.5, 0.5)

        Source: vLLM's acceptance length option; llama.cpp for `"constant"`.
        """
        num_draft_tokens = check_count("num_draft_tokens", num_draft_tokens, MOST_DRAFT_TOKENS)
        length = _checked_real("length", length, 1, num_draft_tokens + 1)
        return cls._with_mean(length - 1, num_draft_tokens, min_decay, shape)

    @classmethod
    def from_rates(cls, joint_rates: Iterable[float]) -> "AcceptanceSchedule":
        """Build the schedule with these joint rates, for example those that a benchmark reports per position.

        Args:
            joint_rates: one number in [0, 1] per draft position, non-increasing: position i's is the probability that
                all drafts through i are accepted.

        Returns:
            The schedule, with `base_rate` and `decay` None.

        Raises:
            TypeError: not an iterable of real numbers.
            ValueError: a rate is NaN or outside [0, 1], the rates increase, or there are none.

        Example:
            >>> from specdecode import AcceptanceSchedule
            >>> AcceptanceSchedule.from_rates([0.8, 0.4, 0.0]).conditional_rates
            (0.8, 0.5, 0.0)
        """
        return cls(cast("tuple[float, ...]", joint_rates))

    @property
    def num_draft_tokens(self) -> int:
        """The number of draft positions, K."""
        return len(self.joint_rates)

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """The probability that each draft is accepted given that all before it were: `J_i / J_(i-1)`, with 0/0 = 0."""
        pairs = pairwise((1.0, *self.joint_rates))
        return tuple(joint / before if before else 0.0 for before, joint in pairs)

    @property
    def mean_rate(self) -> float:
        """The mean joint rate, which is the expected acceptance rate: accepted / drafted tokens."""
        return math.fsum(self.joint_rates) / self.num_draft_tokens

    @property
    def acceptance_length(self) -> float:
        """The mean emitted tokens per step, the recovered or bonus token counted: 1 + the sum of the joint rates."""
        return 1 + math.fsum(self.joint_rates)

    @classmethod
    def _with_mean(cls, accepted: float, num_draft_tokens: int, min_decay: float, shape: Shape) -> "AcceptanceSchedule":
        """Build the schedule of `shape` that accepts `accepted` drafts per step on average."""
        min_decay = _checked_real("min_decay", min_decay, 0, 1)
        check_choice("shape", shape, get_args(Shape))
        if shape == "minimum_variance":
            return cls(tuple(min(1.0, max(0.0, accepted - i)) for i in range(num_draft_tokens)))
        if shape == "constant":
            min_decay = 1.0
        base_rate, decay = _solve(accepted, num_draft_tokens, min_decay)
        return cls(_joint_rates(base_rate, decay, num_draft_tokens), base_rate, decay)


def _joint_rates(base_rate: float, decay: float, num_draft_tokens: int) -> tuple[float, ...]:
    return tuple(accumulate((base_rate * decay**i for i in range(num_draft_tokens)), mul))


def _solve(accepted: float, num_draft_tokens: int, min_decay: float) -> tuple[float, float]:
    """Return (base rate, decay) whose joint rates sum to `accepted`.

    The sum increases with the base rate and with the decay, so both are found by bisection: first the smallest decay that
    reaches the sum with a base rate of 1, then the base rate.
    """
    if accepted >= num_draft_tokens:
        return 1.0, 1.0  # every draft is accepted, so there is no decay

    def reached(base_rate: float, decay: float) -> bool:
        return math.fsum(_joint_rates(base_rate, decay, num_draft_tokens)) >= accepted

    decay = _smallest(lambda decay: reached(1.0, decay), min_decay, 1.0)
    if decay > min_decay:
        return 1.0, decay
    return _smallest(lambda base_rate: reached(base_rate, decay), 0.0, 1.0), decay


def _smallest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the smallest float in [low, high] at which a condition holds; it must hold at all larger floats too."""
    if holds(low):
        return low
    while low < (middle := (low + high) / 2) < high:  # ends when low and high are neighbouring floats
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _checked_real(name: str, value: object, low: int, high: int) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(
            f"{name}: expected a real number in [{low}, {high}], got {shown(value)} ({type(value).__name__})"
        )
    number = cast("float", value)  # any Real can be compared, which mypy does not know
    if not low <= number <= high:  # NaN is refused too
        raise ValueError(f"{name}: expected a real number in [{low}, {high}], got {shown(value)}")
    return float(number)


def _checked_rates(joint_rates: object) -> tuple[float, ...]:
    try:
        values = tuple(cast("Iterable[object]", joint_rates))
    except TypeError:
        kind = type(joint_rates).__name__
        raise TypeError(
            f"joint_rates: expected an iterable of real numbers, got {shown(joint_rates)} ({kind})"
        ) from None
    rates = tuple(_checked_real(f"joint_rates[{i}]", rate, 0, 1) for i, rate in enumerate(values))
    if not rates:
        raise ValueError("joint_rates: expected one rate per draft position, got none")
    for i, (before, rate) in enumerate(pairwise(rates), start=1):
        if rate > before:
            raise ValueError(
                f"joint_rates[{i}]: expected at most {shown(before)}, the rate before it, got {shown(rate)}"
            )
    return rates
