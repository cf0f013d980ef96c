"""Pairs of small models whose output can be enumerated.

The text so far is a *state*. Row s of `target[i]` is the target's logits in state s after i tokens, and `following[i][s, v]`
is the state after token v. While there are few texts each has a state of its own, so that every row depends on the whole
history. Where there are too many, several texts share a state, chosen at random: rows still depend on all tokens before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
Shape = Callable[[Logits, Logits, np.random.Generator], tuple[Logits, Logits]]

SPREAD = 1.5
"""Standard deviation of the target's logits."""


def softmax(logits: NDArray[np.floating], temperature: float = 1.0) -> Floats:
    """Return the distribution of each row in float64; at temperature 0 the point mass on the argmax."""
    exact = logits.astype(np.float64)
    if temperature == 0:
        return point_mass(exact.argmax(axis=-1), logits.shape[-1])
    weights = np.exp((exact - exact.max(axis=-1, keepdims=True)) / temperature)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def point_mass(tokens: Ids, vocab_size: int) -> Floats:
    """Return rows that are certain."""
    return np.asarray(tokens[..., None] == np.arange(vocab_size), dtype=np.float64)


class How(NamedTuple):
    """The way in which a case calls the verifier."""

    drafts: str = "drawn"
    """"drawn" from the draft model, "argmax" of it, or "ragged": drawn, each request with a number of its own. Of a tree
    "drawn", "top": siblings are the likeliest tokens, or "equal": each is one of the two likeliest."""

    draft_logits: bool = True
    parents: tuple[int, ...] = ()
    """Of a tree; empty for a chain of drafts."""


@dataclass(frozen=True)
class Models:
    """A target and a draft model for K drafts, at one temperature."""

    target: list[Logits]
    """K + 1 tables, [states, vocab] each."""

    draft: list[Logits]
    """K tables."""

    following: list[Ids]
    """K + 1 tables: the next state."""

    temperature: float = 1.0

    @property
    def num_draft_tokens(self) -> int:
        return len(self.draft)

    @property
    def vocab_size(self) -> int:
        return int(self.target[0].shape[1])

    @cached_property
    def target_probs(self) -> list[Floats]:
        return [softmax(rows, self.temperature) for rows in self.target]

    @cached_property
    def draft_probs(self) -> list[Floats]:
        return [softmax(rows, self.temperature) for rows in self.draft]

    def final_states(self, probs: list[Floats]) -> Floats:
        """Return the distribution of the state after as many tokens as there are tables."""
        reached: Floats = np.ones(1)
        for rows, following in zip(probs, self.following):
            weights = (reached[:, None] * rows).ravel()
            reached = np.bincount(following.ravel(), weights).astype(np.float64)
        return reached

    def most_accepted(self, draft_probs: list[Floats]) -> tuple[float, float] | None:
        """Return the mean number of accepted drafts: of token verification, and the maximum over methods that see one path.

        Let Q(x) be the probability that a block x is drafted. Token verification accepts it with Q(x) prod min(1, p/q), and
        no exact method with more than the running minimum min(Q(x v), Q(x) c(x) p(v)) of block verification. None: there
        are too many blocks.
        """
        if self.vocab_size**self.num_draft_tokens > 2**20:
            return None
        states = np.zeros(1, dtype=np.int64)
        drafted, by_tokens, by_blocks = np.ones(1), np.ones(1), np.ones(1)
        mean_tokens = mean_blocks = 0.0
        for p, q, following in zip(self.target_probs, draft_probs, self.following):
            drafted = (drafted[:, None] * q[states]).ravel()
            by_tokens = (by_tokens[:, None] * np.minimum(p[states], q[states])).ravel()
            by_blocks = np.minimum(drafted, (by_blocks[:, None] * p[states]).ravel())
            mean_tokens += float(by_tokens.sum())
            mean_blocks += float(by_blocks.sum())
            states = following[states].ravel()
        return mean_tokens, mean_blocks


def pick(weights: Floats, uniform: Floats) -> Ids:
    """Return a token for each row of weights, drawn with a uniform random number."""
    sums = weights.cumsum(axis=1)
    token = (sums <= uniform[:, None] * sums[:, -1:]).sum(axis=1)
    return np.asarray(np.minimum(token, weights.shape[1] - 1), dtype=np.int64)


def count(states: Ids, tokens: Ids, shape: tuple[int, ...]) -> Ids:
    """Return the counts of the tokens in each state, [states, V]."""
    return np.bincount(states * shape[1] + tokens, minlength=shape[0] * shape[1]).reshape(shape)


def make_models(
    num_draft_tokens: int, vocab_size: int, max_states: int, shape: Shape, temperature: float, seed: int
) -> Models:
    """Return random models; `shape` changes the rows of each table."""
    random = np.random.default_rng([seed, num_draft_tokens, vocab_size])
    target, draft, following = [], [], []
    states = 1
    for _ in range(num_draft_tokens + 1):
        rows = (SPREAD * random.normal(size=(states, vocab_size))).astype(np.float32)
        others = (0.5 * rows + random.normal(size=rows.shape)).astype(np.float32)
        rows, others = shape(rows, others, random)
        texts = states * vocab_size
        next_states = min(texts, max_states)
        table = np.arange(texts)
        if texts > next_states:
            table = random.permutation(texts) % next_states
        target.append(rows)
        draft.append(others)
        following.append(table.reshape(states, vocab_size))
        states = next_states
    return Models(target, draft[:-1], following, temperature)


# --- Shapes ----------------------------------------------------------------------------------------------------------


def ordinary(target: Logits, draft: Logits, random: np.random.Generator) -> tuple[Logits, Logits]:
    """Leave both as they are: drafts are accepted about three times in five."""
    return target, draft


def unrelated(target: Logits, draft: Logits, random: np.random.Generator) -> tuple[Logits, Logits]:
    """Draw the draft's logits apart from the target's, with a larger spread: q changes much with the temperature."""
    return target, (2 * random.normal(size=target.shape)).astype(np.float32)


def zeros(target: Logits, draft: Logits, random: np.random.Generator) -> tuple[Logits, Logits]:
    """Set logits of each model to -inf at random."""
    return without(target, random.random(target.shape) < 0.3), without(draft, random.random(draft.shape) < 0.3)


def disjoint(target: Logits, draft: Logits, random: np.random.Generator) -> tuple[Logits, Logits]:
    """Divide the tokens of each row between target and draft: none is possible in both."""
    half = random.permuted(np.arange(target.shape[1]) % 2 == 0, axis=0)
    return without(target, np.broadcast_to(half, target.shape)), without(draft, np.broadcast_to(~half, draft.shape))


def equal(target: Logits, draft: Logits, random: np.random.Generator) -> tuple[Logits, Logits]:
    """Copy the target's logits to the draft."""
    return target, target.copy()


def padding(target: Logits, draft: Logits, random: np.random.Generator) -> tuple[Logits, Logits]:
    """Set the last quarter of the vocabulary, at least one token, to -inf: padding."""
    padded = np.arange(target.shape[1]) >= target.shape[1] - max(1, target.shape[1] // 4)
    return without(target, np.broadcast_to(padded, target.shape)), without(draft, np.broadcast_to(padded, draft.shape))


def large(target: Logits, draft: Logits, random: np.random.Generator) -> tuple[Logits, Logits]:
    """Add what float16 can just hold to each row, with a sign of its own: the distributions stay the same."""
    signs = random.choice([-1, 1], size=(2, len(target), 1))
    signs[0, 0] = 1  # no model is too small to have a large row
    return (target + 60_000 * signs[0]).astype(np.float32), (draft + 60_000 * signs[1]).astype(np.float32)


def star(target: Logits, draft: Logits, random: np.random.Generator) -> tuple[Logits, Logits]:
    """Make all rows p ~ (18, 19, 6, 3) and q ~ (2, 34, 54, 4): siblings in a tree are often equal, and rejected in turn."""
    rows = [np.full(target.shape, -np.inf, dtype=np.float32) for _ in range(2)]
    for row, weights in zip(rows, ([18, 19, 6, 3], [2, 34, 54, 4])):
        row[:, :4] = np.log(np.array(weights, dtype=np.float32))[: target.shape[1]]
    return rows[0], rows[1]


def doubled(target: Logits, draft: Logits, random: np.random.Generator) -> tuple[Logits, Logits]:
    """Give token 0 the probability .3 in the target and .6 in the draft, and all others equal ones.

    So each length is accepted often, and both the recovered token and the next acceptance show their random numbers.
    """
    rows = [np.full(target.shape, (1 - first) / (target.shape[1] - 1), dtype=np.float32) for first in (0.3, 0.6)]
    rows[0][:, 0], rows[1][:, 0] = 0.3, 0.6
    return np.log(rows[0]), np.log(rows[1])


def alike(target: Logits, draft: Logits, random: np.random.Generator) -> tuple[Logits, Logits]:
    """Make all rows of a model the same, the target nearly uniform, the draft nearly certain.

    So most drafts are the same and most are rejected, and the tokens show the verifier's own random numbers.
    """
    row = np.resize(np.array([0.0, 0.5, -0.5], dtype=np.float32), target.shape[1])
    other = np.where(np.arange(target.shape[1]) == 0, np.float32(np.log(20 * target.shape[1])), np.float32(0))
    return np.broadcast_to(row, target.shape).copy(), np.broadcast_to(other, draft.shape).copy()


def without(logits: Logits, mask: NDArray[np.bool_]) -> Logits:
    """Set logits to -inf where the mask says so, but never all of a row."""
    mask = mask & ~mask.all(axis=1, keepdims=True)
    return np.where(mask, np.float32(-np.inf), logits)
