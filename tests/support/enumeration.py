"""Exact distributions by enumeration: run the code under test once for every possible outcome of its random numbers.

`distribution(experiment)` runs `experiment(chance)` along every path of random outcomes and adds up the paths'
probabilities. The experiment may call `chance.draw(probabilities)` itself. Inside `ideal_noise(chance)` the reference
does so too: its noise functions `uniform` and `gumbel` are replaced by ideal random numbers. These have no value. They
are *decided only as far as the code needs*:

- Of a uniform number u only an interval is known. To compare a monotone f(u) with a threshold splits the interval in two.
  Each side is enumerated with its share of the interval.
- Gumbel numbers G(v) may be added to log w(v) and given to argmax, which then selects v with probability w(v) / W. Each v
  is enumerated with that probability.

Decisions are stored by (seed, position, index, domain). If the code uses the same number twice, the second result agrees
with the first: a uniform number keeps its remaining interval; a second selection with other weights from the same Gumbel
numbers has its distribution given the first selection (`shared_selection`). So noise that is wrongly shared is found, and
its effect is exact. Three different selections from the same Gumbel numbers are not handled: they raise an error.

Left out: margins, which have no meaning here, and the finite resolution of real noise: it has 2^64 values, ideal noise a
continuum.
"""

import pkgutil
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib import import_module
from itertools import pairwise

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

import reference
from reference import oracle, philox
from reference import sampling as reference_sampling

ROOMS = [reference, *(import_module(f"reference.{room.name}") for room in pkgutil.iter_modules(reference.__path__))]

NEGLIGIBLE = 1e-14
"""Smaller probabilities are rounding errors of the code under test: their paths are not run."""

Key = tuple[int, int, int]  # (seed, position, domain)
Domains = tuple[int, int] | Callable[[int], tuple[int, int]]


class Chance:
    """The choices of one run: first the choices of `plan`, then always the first possible one.

    The plans of the other runs are put into `pending`.
    """

    def __init__(self, plan: tuple[int, ...] = ()) -> None:
        self.plan = plan
        self.choices: tuple[int, ...] = ()
        self.pending: list[tuple[int, ...]] = []
        self.probability: Fraction | float = 1

    def draw(self, probabilities: Sequence) -> int:
        """Return an index of `probabilities`, which must be a distribution."""
        assert all(probability >= -NEGLIGIBLE for probability in probabilities), f"no distribution: {probabilities}"
        assert abs(sum(probabilities) - 1) < 1e-12, f"no distribution, the sum is {sum(probabilities)}"
        if len(self.choices) < len(self.plan):
            choice = self.plan[len(self.choices)]
        else:
            choice, *others = (index for index, probability in enumerate(probabilities) if probability > NEGLIGIBLE)
            self.pending += [(*self.choices, other) for other in others]
        self.choices += (choice,)
        self.probability *= probabilities[choice]
        return choice


def distribution(experiment: Callable[[Chance], Hashable]) -> dict:
    """Return the probability of each outcome of the experiment: a fraction if it drew from fractions only.

    >>> fair, biased = [Fraction(1, 2), Fraction(1, 2)], [Fraction(2, 3), Fraction(1, 3)]
    >>> heads = distribution(lambda chance: chance.draw(fair) + chance.draw(biased))
    >>> {number: str(probability) for number, probability in sorted(heads.items())}
    {0: '1/3', 1: '1/2', 2: '1/6'}
    """
    outcomes: dict = defaultdict(int)
    plans: list[tuple[int, ...]] = [()]
    while plans:
        chance = Chance(plans.pop())
        outcome = experiment(chance)
        outcomes[outcome] += chance.probability
        plans += chance.pending
    return dict(outcomes)


def marginal(joint: Mapping, part: Callable) -> dict:
    """Return the distribution of `part(outcome)`."""
    outcomes: dict = defaultdict(int)
    for outcome, probability in joint.items():
        outcomes[part(outcome)] += probability
    return dict(outcomes)


def total_variation(one: Mapping, other: Mapping) -> Fraction | float:
    """Return half the sum of the absolute differences: 0 if and only if the distributions are equal."""
    return sum(abs(one.get(outcome, 0) - other.get(outcome, 0)) for outcome in {*one, *other}) / 2


def shared_selection(first: Sequence, second: Sequence) -> list[list]:
    """Return joint[i][j]: with the same Gumbel numbers, i is selected at the weights `first` and j at `second`.

    A Gumbel number is -log E_v with E_v exponential, so the selected v is the one with the smallest E_v / w_v (an
    exponential race). Let i be selected at the weights `first`, with the smallest value s, and j != i at `second`, with
    the smallest value r s. Then first[j] / second[j] < r < first[i] / second[i], and no E_v is below
    max(first[v], r second[v]) s.
    The integral over s is first[i] second[j] / A(r)^2, where A(r) is the sum of max(first[v], r second[v]) over all v.
    A(r) is linear in r between the ratios first[v] / second[v], and the integral of 1 / (a + b r)^2 is
    -1 / (b (a + b r)). Finally joint[i][i] is the rest of P(i is selected at `first`).

    >>> for row in shared_selection([Fraction(1, 3), Fraction(2, 3)], [Fraction(2, 3), Fraction(1, 3)]):
    ...     print(*row)
    1/3 0
    1/3 1/3
    """
    first, second = ([weight / sum(weights) for weight in weights] for weights in (first, second))
    ratios = [p / q if q else np.inf for p, q in zip(first, second)]
    joint = [[0 * p for _ in second] for p in first]
    for i, j in np.ndindex(len(first), len(second)):
        if i == j or not first[i] or not second[j]:
            continue
        corners = sorted({ratio for ratio in ratios if ratios[j] <= ratio <= ratios[i]})
        for start, end in pairwise(corners):
            constant = sum(p for p, ratio in zip(first, ratios) if ratio >= end)
            slope = sum(q for q, ratio in zip(second, ratios) if ratio <= start)
            below, above = (0 if r == np.inf else 1 / (slope * (constant + slope * r)) for r in (end, start))
            joint[i][j] += first[i] * second[j] * (above - below)
    for i, row in enumerate(joint):
        row[i] = first[i] - sum(row)
    return joint


class Noise:
    """The decisions so far about the ideal random numbers of one run."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.intervals: dict[tuple[Key, int], tuple[float, float]] = {}
        self.selections: dict[Key, list[tuple[dict[int, float], int]]] = {}

    def uniform(self, seed: int, position: int, index: int, domain: int) -> "Uniform":
        """Replace `reference.philox.uniform`."""
        return Uniform(self, ((seed, position, domain), int(index)))

    def gumbel(self, seed: int, position: int, index: np.ndarray, domain: int) -> "Gumbels":
        """Replace `reference.philox.gumbel`."""
        return Gumbels(self, (seed, position, domain), [int(i) for i in index])

    def is_below(self, number: tuple[Key, int], threshold: float) -> bool:
        """Decide whether a uniform number is below the threshold."""
        if number[0] in self.selections:
            raise NotImplementedError(f"{number} is both a uniform and a Gumbel number")
        low, high = self.intervals.get(number, (0.0, 1.0))
        middle = min(max(float(threshold), low), high)
        share = (middle - low) / (high - low)
        below = bool(self.chance.draw([1 - share, share]))
        self.intervals[number] = (low, middle) if below else (middle, high)
        return below

    def selected(self, key: Key, weights: dict[int, float]) -> int:
        """Decide which index the key's Gumbel numbers select at these weights."""
        if any(key == other for other, _ in self.intervals):
            raise NotImplementedError(f"{key} is both a uniform and a Gumbel number")
        made_before = self.selections.setdefault(key, [])
        if len(weights) == 1:  # nothing is decided
            return next(iter(weights))
        total = sum(weights.values())
        weights = {index: weight / total for index, weight in weights.items()}
        earlier = [made for made in made_before if not weights.keys().isdisjoint(made[0])]
        for before, index in earlier:
            if before.keys() == weights.keys() and all(abs(before[i] - weights[i]) < NEGLIGIBLE for i in weights):
                return index
        indices = sorted(weights)
        if not earlier:
            probabilities = [weights[i] for i in indices]
        elif len(earlier) == 1:
            before, index = earlier[0]
            indices = sorted({*before, *weights})
            joint = shared_selection(*([float(side.get(i, 0)) for i in indices] for side in (before, weights)))
            given = joint[indices.index(index)]
            probabilities = [probability / sum(given) for probability in given]
        else:
            raise NotImplementedError(f"three different selections from the Gumbel numbers {key}")
        index = indices[self.chance.draw(probabilities)]
        made_before.append((weights, index))
        return index


class ExactUniform:
    """A uniform number that is compared once, with a fraction (0 and 1 may be of any type)."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance

    def __le__(self, threshold: Fraction | float) -> bool:
        """Decide whether it is at most the threshold."""
        return bool(self.chance.draw([1 - Fraction(threshold), Fraction(threshold)]))

    def __gt__(self, threshold: Fraction | float) -> bool:
        """Decide whether it is above the threshold."""
        return not self <= threshold


class Uniform(NDArrayOperatorsMixin):
    """A monotone function of a uniform number. Only comparisons decide it."""

    def __init__(self, noise: Noise, number, inverse: Callable = lambda value: value, rising: bool = True) -> None:
        self.noise, self.number, self.inverse, self.rising = noise, number, inverse, rising

    def __array_ufunc__(self, ufunc, method, *inputs):
        """Support log, differences with numbers and comparisons with numbers, and nothing else."""
        left, right = (*inputs, None)[:2]
        if ufunc is np.log:
            return Uniform(self.noise, self.number, lambda value: self.inverse(np.exp(value)), self.rising)
        if ufunc is np.absolute:
            return np.inf  # a margin
        if ufunc is np.subtract and right is self:
            return Uniform(self.noise, self.number, lambda value: self.inverse(left - value), not self.rising)
        if ufunc is np.subtract and left is self:
            return Uniform(self.noise, self.number, lambda value: self.inverse(value + right), self.rising)
        less, greater = (np.less, np.less_equal), (np.greater, np.greater_equal)
        if ufunc not in (*less, *greater):
            return NotImplemented
        asked_below = (ufunc in less) == (left is self)
        threshold = self.inverse(right if left is self else left)
        below = self.noise.is_below(self.number, threshold)
        return np.bool_(below == (asked_below == self.rising))

    def __float__(self) -> float:
        """Return a margin."""
        return np.inf

    __hash__ = None


class Gumbels(NDArrayOperatorsMixin):
    """Gumbel numbers that can be added to log-weights and given to argmax."""

    def __init__(self, noise: Noise, key: Key, indices: list[int], log_weights: np.ndarray | None = None) -> None:
        self.noise, self.key, self.indices, self.log_weights = noise, key, indices, log_weights

    def __array_ufunc__(self, ufunc, method, *inputs):
        """Support one addition, and nothing else."""
        (log_weights,) = (part for part in inputs if part is not self)
        if ufunc is not np.add or self.log_weights is not None or len(log_weights) != len(self.indices):
            return NotImplemented
        return Gumbels(self.noise, self.key, self.indices, np.asarray(log_weights))

    def __array_function__(self, function, types, args, kwargs):
        """Support argmax, and nothing else."""
        if function is not np.argmax:
            return NotImplemented
        weights = np.exp(self.log_weights - self.log_weights.max())
        return self.indices.index(self.noise.selected(self.key, dict(zip(self.indices, weights.tolist()))))

    __hash__ = None


@contextmanager
def ideal_noise(chance: Chance) -> Iterator[Noise]:
    """Replace the noise functions in every module of the reference that uses them, while the context lasts."""
    noise = Noise(chance)
    replacements: list[tuple[Callable, Callable]] = [
        (philox.uniform, noise.uniform),
        (philox.gumbel, noise.gumbel),
        # Used only for margins, and need the values of random numbers.
        (oracle.log_critical_ratio, lambda *_: -np.inf),
        (reference_sampling.lead, lambda scores: np.inf),
    ]
    replaced = [
        (room, function, replacement)
        for function, replacement in replacements
        for room in rooms_that_use(function)
        if room is not philox  # the module that defines them
    ]
    for room, function, replacement in replaced:
        setattr(room, function.__name__, replacement)
    try:
        yield noise
    finally:
        for room, function, _ in replaced:
            setattr(room, function.__name__, function)


def rooms_that_use(function: Callable) -> list:
    """Return the modules of the reference that define or import the function."""
    return [room for room in ROOMS if getattr(room, function.__name__, None) is function]


# --- Language models as tables, and decoding with them ---------------------------------------------------------------

Table = Callable[[tuple[int, ...]], list[Fraction]]
"""The probabilities of the next token, given the tokens so far."""


def normalised(weights: Sequence) -> list[Fraction]:
    """Return the weights as fractions of their sum."""
    return [Fraction(int(weight), int(sum(weights))) for weight in weights]


def iid(*weights: int) -> Table:
    """Return a model that ignores the text so far."""
    return lambda prefix: normalised(weights)


def history(seed: int, vocab_size: int, zeros: int = 0) -> Table:
    """Return a model with a different random row after every prefix; in each row `zeros` probabilities are 0."""

    @cache
    def row(prefix: tuple[int, ...]) -> list[Fraction]:
        random = np.random.default_rng([seed, *(token + 1 for token in prefix)])
        weights = random.integers(1, 10, size=vocab_size)
        weights[random.permutation(vocab_size)[:zeros]] = 0
        return normalised(weights)

    return row


def most_likely(model: Table) -> Table:
    """Return the model that is the point mass on the given model's most likely token."""

    def row(prefix: tuple[int, ...]) -> list[Fraction]:
        probabilities = model(prefix)
        best = probabilities.index(max(probabilities))
        return normalised([int(token == best) for token in range(len(probabilities))])

    return row


def logits(probabilities: Sequence[Fraction], temperature: float = 1.0) -> np.ndarray:
    """Return raw logits whose softmax at the temperature is the probabilities. They are not normalised."""
    with np.errstate(divide="ignore"):
        return temperature * (1.5 + np.log(np.array(probabilities, dtype=np.float64)))


@cache
def logits_after(model: Table, prefix: tuple[int, ...], temperature: float) -> np.ndarray:
    """Return the logits after a text; every path of an enumeration reads the same array, which cannot be written to."""
    row = logits(model(prefix), temperature)
    row.setflags(write=False)
    return row


def sequence_distribution(model: Table, num_tokens: int) -> dict[tuple[int, ...], Fraction]:
    """Return the probability of every sequence of tokens that the model alone can generate."""
    sequences: dict[tuple[int, ...], Fraction] = {(): Fraction(1)}
    for _ in range(num_tokens):
        sequences = {
            (*prefix, token): probability * share
            for prefix, probability in sequences.items()
            for token, share in enumerate(model(prefix))
            if share
        }
    return sequences


@dataclass(frozen=True)
class Case:
    """A pair of models, and the parameters of generation."""

    target: Table
    draft: Table
    drafts: tuple[int, ...]
    """Draft tokens of each speculative step. After the last step the target continues alone."""

    num_tokens: int
    """The number of tokens to compare; further tokens of the last step are dropped."""

    temperature: float = 1.0
    slots: int = 0
    """Width of a ragged batch: the step's arrays have at least this many draft slots. Unused ones hold arbitrary values."""

    truncation: Mapping[str, float] = field(default_factory=dict)
    """The target's top_k, top_p, min_p."""

    draft_truncation: Mapping[str, float] | None = None
    """The drafts' top_k, top_p, min_p; None: the target's."""

    draft_vocab_ids: tuple[int, ...] | None = None
    """The target id of each draft token, if the draft's table has its own vocabulary; None: the target's."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return len(self.target(()))


def decode(chance: Chance, case: Case, verify: Callable, domains: Domains, seed: int = 11, position: int = 7) -> tuple:
    """Generate tokens speculatively with ideal noise; return (tokens, accepted drafts of each step).

    Args:
        chance: decides the random outcomes.
        case: the models.
        verify: (target_logits, draft_token_ids, draft_logits, *, temperature, seed, position) -> Outcome.
        domains: of the drafts' noise, or a function of a draft's offset in its step that returns them.
        seed: the request's seed.
        position: absolute position of the first token.
    """
    tokens: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    keywords = {"temperature": case.temperature, "seed": seed}
    sampling = reference_sampling.Sampling(case.temperature, **case.truncation)
    draft_sampling = sampling
    of_verify: dict = dict(case.truncation)
    if case.draft_truncation is not None:
        draft_sampling = of_verify["draft_sampling"] = reference_sampling.Sampling(
            case.temperature, **case.draft_truncation
        )

    names = case.draft_vocab_ids
    if names is not None:  # these rows are already truncated
        of_verify["draft_sampling"] = reference_sampling.Sampling(case.temperature)

    def row(model: Table, prefix: tuple[int, ...]) -> np.ndarray:
        return logits_after(model, prefix, case.temperature)

    def draft_row(prefix: tuple[int, ...]) -> np.ndarray:
        if names is None:
            return row(case.draft, prefix)
        kept, _ = reference_sampling.truncate(row(case.draft, prefix), draft_sampling)
        return reference_sampling.spread(kept, names, case.vocab_size)

    with ideal_noise(chance):
        for num_drafts in case.drafts:
            drafts: tuple[int, ...] = ()
            for offset in range(num_drafts):
                here = position + len(tokens) + offset
                proposal = reference_sampling.sample(
                    reference_sampling.truncate(row(case.draft, tokens + drafts), draft_sampling)[0],
                    **keywords,
                    position=here,
                    domains=domains(offset) if callable(domains) else domains,
                )
                drafts += (proposal.index if names is None else names[proposal.index],)
            padding = max(case.slots - num_drafts, 0)
            unused = [np.full(case.vocab_size, np.nan)] * padding
            outcome = verify(
                [*(row(case.target, tokens + drafts[:offset]) for offset in range(num_drafts + 1)), *unused],
                [*drafts, -1, *([0] * padding)][: num_drafts + padding],
                [*(draft_row(tokens + drafts[:offset]) for offset in range(num_drafts)), *unused],
                **keywords,
                **of_verify,
                position=position + len(tokens),
            )
            assert not outcome.invalid, "a row was read that must not be"
            tokens += tuple(outcome.token_ids)
            accepted += (outcome.num_accepted,)
        while len(tokens) < case.num_tokens:
            last_row, _ = reference_sampling.truncate(row(case.target, tokens), sampling)
            tokens += (reference_sampling.sample(last_row, **keywords, position=position + len(tokens)).index,)
    return tokens[: case.num_tokens], accepted
