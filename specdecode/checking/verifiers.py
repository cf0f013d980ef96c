"""A right verifier, in parts that a mistake can replace one at a time.

Read `Verifier.__call__` first: accept some drafts, then draw one token with weights that depend on whether a draft was
rejected. The parts are functions of a `Step`, which has everything that is known. Random numbers are a hash of seed,
position, offset and use, so that each use has numbers of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdecode.checking.models import Floats, Logits, pick, point_mass, softmax
from specdecode.checking.subject import Ids, given_drafts

Bools = NDArray[np.bool_]


class Use(IntEnum):
    """The use of a random number."""

    ACCEPT = 1
    EMIT = 2
    DRAFT = 3
    OWN = 4


class Step(NamedTuple):
    """One step of n requests."""

    target_logits: Logits
    draft_logits: Logits | None
    target: Floats
    """[n, K + 1, V] p of each row."""

    draft: Floats
    """[n, K, V] q of each row: a point mass on the draft where there are no draft logits."""

    drafts: Ids
    """[n, K]; 0 where there is none."""

    given: Ids
    """[n]: how many drafts each request has."""

    temperature: float
    seeds: Ids
    positions: Ids

    @property
    def requests(self) -> Ids:
        return np.arange(len(self.drafts))

    @property
    def num_drafts(self) -> int:
        return int(self.drafts.shape[1])

    def of_drafts(self, rows: Floats) -> Floats:
        """Return the entry of each draft in rows [n, K or more, V]: [n, K]."""
        return np.asarray(np.take_along_axis(rows[:, : self.num_drafts], self.drafts[:, :, None], axis=2)[:, :, 0])

    def draft_at(self, offsets: Ids) -> Ids:
        """Return each request's draft in a place: [n]; offsets beyond the drafts mean the last one."""
        return self.row(self.drafts[:, :, None].astype(np.float64), offsets)[:, 0].astype(np.int64)

    def uniform(self, offset: int, use: int) -> Floats:
        """Return a uniform random number for each request, [n], of an offset in the step and a use."""
        return hashed(self.seeds, self.positions, offset, use)

    def uniforms(self, use: int = Use.ACCEPT) -> Floats:
        """Return a uniform random number for each draft, [n, K]."""
        columns = [self.uniform(i, use) for i in range(self.num_drafts)]
        return np.stack(columns, axis=1) if columns else np.zeros(self.drafts.shape)

    def row(self, rows: Floats, offsets: Ids | int) -> Floats:
        """Return a row of each request: [n, V]; offsets beyond the rows mean the last one."""
        if not rows.shape[1]:
            return np.zeros((len(rows), rows.shape[2]))
        return np.asarray(rows[self.requests, np.clip(offsets, 0, rows.shape[1] - 1)])


def hashed(seeds: Ids, positions: Ids, offset: int, use: int) -> Floats:
    """Return a uniform number for each request: the finaliser of SplitMix64, one word after the other."""
    state = np.zeros(len(seeds), dtype=np.uint64)
    for word in (seeds, positions, np.full_like(seeds, offset), np.full_like(seeds, use)):
        state = (state ^ word.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53


def log(probs: Floats) -> Floats:
    """Return logarithms, -inf of 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(probs))


def pick_by_gumbel(weights: Floats, uniform: Callable[[int], Floats], use: int) -> Ids:
    """Draw the token with the largest log weight + Gumbel noise; each token's noise has a use of its own."""
    uses = [use + len(Use) * token for token in range(1, weights.shape[1] + 1)]
    noise = -np.log(-np.log(np.stack([uniform(each) for each in uses], axis=1)))
    return np.asarray((log(weights) + noise).argmax(axis=1))


# --- The parts of token verification -----------------------------------------------------------------------------------


def ratio(step: Step) -> Floats:
    """Return p / q of each draft."""
    p, q = step.of_drafts(step.target), step.of_drafts(step.draft)
    return np.asarray(np.divide(p, q, out=np.zeros_like(p), where=q > 0))


def accept_by_ratio(step: Step) -> Bools:
    """Accept with probability min(1, p / q)."""
    return np.asarray(step.uniforms() < ratio(step))


def leading(step: Step, accepts: Bools) -> Ids:
    """Count accepted drafts up to the first rejection."""
    return np.asarray(np.minimum(np.cumprod(accepts, axis=1).sum(axis=1), step.given))


def residual(step: Step, accepted: Ids) -> Floats:
    """Return max(0, p - q) of the row of the rejected draft, or p if that is 0 everywhere."""
    return or_target(step, accepted, np.maximum(0, step.row(step.target, accepted) - step.row(step.draft, accepted)))


def or_target(step: Step, accepted: Ids, weights: Floats) -> Floats:
    """Replace weights that are all 0 by p."""
    return np.where(weights.sum(axis=1, keepdims=True) > 0, weights, step.row(step.target, accepted))


def last_row(step: Step) -> Floats:
    """Return p of the row after the last draft."""
    return step.row(step.target, step.given)


# --- The parts of block verification -----------------------------------------------------------------------------------


def running_ratios(step: Step, most: float = 1) -> Floats:
    """Return c_0 ... c_K, [n, K + 1]: c_i = min(most, c_{i - 1} p / q)."""
    ratios, each = [np.ones(len(step.drafts))], ratio(step)
    for i in range(step.num_drafts):
        ratios.append(np.minimum(most, ratios[-1] * each[:, i]))
    return np.stack(ratios, axis=1)


def block_acceptance(step: Step, most: float = 1) -> Floats:
    """Return h_1 ... h_K, [n, K]."""
    ratios = running_ratios(step, most)
    result = ratios[:, 1:].copy()
    for i in range(1, step.num_drafts):
        mass = np.maximum(0, ratios[:, i, None] * step.target[:, i] - step.draft[:, i]).sum(axis=1)
        h = np.where(ratios[:, i] >= 1, 1, mass / np.maximum(mass + 1 - ratios[:, i], 1e-300))
        result[:, i - 1] = np.where(i < step.given, h, ratios[:, i])
    return result


def longest(step: Step, accepts: Bools) -> Ids:
    """Return the largest length that is accepted."""
    lengths = np.arange(1, step.num_drafts + 1)
    return np.asarray(np.max(np.where(accepts & (lengths <= step.given[:, None]), lengths, 0), axis=1, initial=0))


def block_residual(step: Step, accepted: Ids, most: float = 1) -> Floats:
    """Return max(0, c p - q) of the row after the accepted drafts."""
    ratios = running_ratios(step, most)[step.requests, accepted]
    weights = ratios[:, None] * step.row(step.target, accepted) - step.row(step.draft, accepted)
    return or_target(step, accepted, np.maximum(0, weights))


# --- All together ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verifier:
    """Token verification (Leviathan et al. 2023); replace parts for other methods, and for mistakes."""

    target_probs: Callable[[Logits, float], Floats] = softmax
    draft_probs: Callable[[Logits, float], Floats] = softmax
    draft_probs_without_logits: Callable[[Ids, int], Floats] = point_mass
    changes: Callable[[Step], Step] = lambda step: step
    """Before anything is decided."""

    accepts: Callable[[Step], Bools] = accept_by_ratio
    count: Callable[[Step, Bools], Ids] = leading
    recovered: Callable[[Step, Ids], Floats] = residual
    bonus: Callable[[Step], Floats] = last_row
    emit: Callable[[Step, Floats, Ids], Ids] = lambda step, weights, accepted: pick(weights, step.uniform(0, Use.EMIT))

    def __call__(
        self,
        target_logits: Logits,
        draft_token_ids: Ids,
        draft_logits: Logits | None = None,
        *,
        temperature: float = 1.0,
        seeds: Ids,
        positions: Ids,
    ) -> Ids:
        """Return [n, K + 1] ids."""
        drafts, vocab_size = np.maximum(draft_token_ids, 0), target_logits.shape[2]
        target = self.target_probs(target_logits, temperature)
        if draft_logits is None:
            draft = self.draft_probs_without_logits(drafts, vocab_size)
        else:
            draft = self.draft_probs(draft_logits, temperature)
        given = given_drafts(draft_token_ids)
        step = Step(target_logits, draft_logits, target, draft, drafts, given, temperature, seeds, positions)
        step = self.changes(step)
        accepted = self.count(step, self.accepts(step))
        weights = np.where((accepted < step.given)[:, None], self.recovered(step, accepted), self.bonus(step))
        last = self.emit(step, weights, accepted)
        slots, count = np.arange(step.num_drafts + 1), accepted[:, None]
        padded = np.pad(draft_token_ids, ((0, 0), (0, 1)))
        return np.where(slots < count, padded, np.where(slots == count, last[:, None], -1))


@dataclass(frozen=True)
class Drafter:
    """Draws from the softmax of the draft logits; replace parts for mistakes."""

    probs: Callable[[Logits, float], Floats] = softmax
    use: int = Use.DRAFT
    draw: Callable[[Floats, Callable[[int], Floats], int], Ids] = lambda probs, uniform, use: pick(probs, uniform(use))
    left_out: Callable[[Floats, Ids], Bools] | None = None
    """The drafts to leave out after they were drawn."""

    def __call__(self, draft_logits: Logits, *, temperature: float, seeds: Ids, positions: Ids, offset: int) -> Ids:
        """Return [n] ids."""
        probs = self.probs(draft_logits, temperature)
        tokens = self.draw(probs, lambda use: hashed(seeds, positions - offset, offset, use), self.use)
        return tokens if self.left_out is None else np.where(self.left_out(probs, tokens), -1, tokens)


def block_verifier(most: float = 1) -> Verifier:
    """Return block verification (Sun et al. 2024), whose running ratio is at most `most`: 1, but for a mistake."""
    return Verifier(
        accepts=lambda step: step.uniforms() < block_acceptance(step, most),
        count=longest,
        recovered=lambda step, accepted: block_residual(step, accepted, most),
    )


def strict_verifier(sample: Callable[[Step, int], Ids]) -> Verifier:
    """Return strict verification: a draft is accepted if it equals `sample(step, i)`, the target's own sample of row i."""

    def samples(step: Step) -> Ids:
        return np.stack([sample(step, i) for i in range(step.num_drafts + 1)], axis=1)

    def emitted(step: Step, places: Ids) -> Floats:
        return point_mass(samples(step)[step.requests, places], step.target.shape[2])

    return Verifier(
        accepts=lambda step: samples(step)[:, :-1] == step.drafts,
        recovered=emitted,
        bonus=lambda step: emitted(step, step.given),
    )


TOKENS = Verifier()
BLOCKS = block_verifier()
STRICT = strict_verifier(lambda step, i: pick(step.target[:, i], step.uniform(i, Use.OWN)))
