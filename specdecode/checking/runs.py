"""Run a subject on models: draft, verify, and let the target alone continue what is shorter than K + 1 tokens."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from specdecode.checking import trees
from specdecode.checking.models import How, Models, draw
from specdecode.checking.subject import Arguments, Ids, Subject, given_drafts

Tick = Callable[[int], None]

MOST_REQUESTS = 8192
MOST_LOGITS = 2**24
"""Of one call."""


class Outcome(NamedTuple):
    """The output of the verifier, one row a request."""

    drafts: Ids
    """[n, K], -1 where there is none."""

    draft_states: Ids
    """[n, K + 1]: the state before each draft, and after the last."""

    tokens: Ids
    """[n, K + 1], -1 after the last."""

    completed: Ids
    """[n, K + 1]: the same, continued by the target."""

    states: Ids
    """[n, K + 2]: the state before each token, and after the last."""

    @property
    def given(self) -> Ids:
        return given_drafts(self.drafts)

    @property
    def accepted(self) -> Ids:
        return np.asarray((self.tokens != -1).sum(axis=1) - 1)

    def impossible(self, models: Models) -> int:
        """Count the requests that emitted a token of probability 0."""
        probs = [rows[self.states[:, i], self.completed[:, i]] for i, rows in enumerate(models.target_probs)]
        return int((np.stack(probs, axis=1) == 0).any(axis=1).sum())


def draft(
    subject: Subject, models: Models, how: How, seeds: Ids, positions: Ids, random: np.random.Generator
) -> tuple[Ids, Ids]:
    """Return drafts and the states that they lead through, or the tokens and the states of a tree's nodes."""
    if how.parents:
        return trees.draft(models, how, len(seeds), random)
    num_drafts, requests = models.num_draft_tokens, len(seeds)
    drafts = np.zeros((requests, num_drafts), dtype=np.int64)
    states = np.zeros((requests, num_drafts + 1), dtype=np.int64)
    for i in range(num_drafts):
        here = states[:, i]
        if how.drafts == "argmax":
            drafts[:, i] = models.draft[i].argmax(axis=1)[here]
        elif subject.draft is not None:
            options = {"temperature": models.temperature, "seeds": seeds, "positions": positions + i}
            drafts[:, i] = subject.call_draft(models.draft[i][here], i, options)
        else:
            drafts[:, i] = draw(models.draft_probs[i][here], random)
        states[:, i + 1] = models.following[i][here, np.maximum(drafts[:, i], 0)]
    given = given_drafts(drafts)
    if how.drafts == "ragged":
        given = np.minimum(given, random.integers(0, num_drafts + 1, size=requests))
    drafts[np.arange(num_drafts) >= given[:, None]] = -1
    return drafts, states


def arguments_of(models: Models, how: How, drafts: Ids, states: Ids, seeds: Ids, positions: Ids) -> Arguments:
    """Look up the rows of both models along the drafts, or at the nodes of a tree."""
    if how.parents:
        return arguments_at_nodes(models, how, drafts, states, seeds, positions)
    target = np.stack([rows[states[:, i]] for i, rows in enumerate(models.target)], axis=1)
    if not how.draft_logits:
        logits = None
    elif models.num_draft_tokens:
        logits = np.stack([rows[states[:, i]] for i, rows in enumerate(models.draft)], axis=1)
    else:
        logits = np.zeros((len(seeds), 0, models.vocab_size), dtype=np.float32)
    return Arguments(target, drafts, logits, float(models.temperature), seeds, positions)


def arguments_at_nodes(models: Models, how: How, tokens: Ids, states: Ids, seeds: Ids, positions: Ids) -> Arguments:
    """Look up the rows of both models at each node; padding has rows of node 0, and nodes at depth K draft rows of zeros."""
    depth = np.maximum(trees.depths(how.parents), 0)
    target = np.stack([models.target[d][states[:, node]] for node, d in enumerate(depth)], axis=1)
    logits = None
    if how.draft_logits:
        tables = [*models.draft, np.zeros_like(models.target[-1])]
        logits = np.stack([tables[d][states[:, node]] for node, d in enumerate(depth)], axis=1)
    parents = np.array(how.parents, dtype=np.int64)
    return Arguments(target, tokens, logits, float(models.temperature), seeds, positions, parents)


def complete(models: Models, tokens: Ids, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Let the target draw what is missing; return the tokens and their states."""
    completed = tokens.copy()
    states = np.zeros((len(tokens), tokens.shape[1] + 1), dtype=np.int64)
    for i, rows in enumerate(models.target_probs):
        here = states[:, i]
        missing = completed[:, i] == -1
        completed[missing, i] = draw(rows[here[missing]], random)
        states[:, i + 1] = models.following[i][here, completed[:, i]]
    return completed, states


def run_step(
    subject: Subject, models: Models, how: How, seeds: Ids, positions: Ids, random: np.random.Generator
) -> Outcome:
    """Verify one step of each request, in one call."""
    drafts, draft_states = draft(subject, models, how, seeds, positions, random)
    tokens = subject.call(arguments_of(models, how, drafts, draft_states, seeds, positions))
    if how.parents:  # the path of first children stands for the drafts of a chain
        path = trees.leftmost(how.parents)
        unused = ((0, 0), (0, models.num_draft_tokens - len(path)))
        drafts = np.pad(drafts[:, path], unused, constant_values=-1)
    return Outcome(drafts, draft_states, tokens, *complete(models, tokens, random))


def fresh(requests: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Return seeds that are all different, and positions."""
    seeds = random.integers(2**62) + np.arange(requests, dtype=np.int64)
    return random.permutation(seeds), random.integers(0, 10_000, size=requests)


def run(
    subject: Subject, models: Models, how: How, requests: int, random: np.random.Generator, tick: Tick | None = None
) -> Outcome:
    """Verify one step of many requests, in as few calls as memory allows."""
    parts = []
    for size in batches(requests, models, how):
        parts.append(run_step(subject, models, how, *fresh(size, random), random))
        if tick is not None:
            tick(size)
    return joined(parts)


def batches(requests: int, models: Models, how: How) -> Iterator[int]:
    """Cut requests into calls: the first is small, so that a mistake shows early."""
    rows = len(how.parents) or models.num_draft_tokens + 1
    most = max(1, min(MOST_REQUESTS, MOST_LOGITS // (rows * models.vocab_size)))
    first = min(16, requests, most)
    yield first
    for start in range(first, requests, most):
        yield min(most, requests - start)


def joined(parts: list[Outcome]) -> Outcome:
    """Put the requests of several calls together."""
    return Outcome(*(np.concatenate(arrays) for arrays in zip(*parts)))


def run_small_calls(
    subject: Subject, models: Models, how: How, calls: int, random: np.random.Generator, tick: Tick | None = None
) -> Ids:
    """Return the first tokens of the two requests of each of many calls: [calls, 2]."""
    return np.array([first_tokens(subject, models, how, 2, random, tick) for _ in range(calls)])


def run_two_calls(
    subject: Subject, models: Models, how: How, requests: int, random: np.random.Generator, tick: Tick | None = None
) -> Ids:
    """Return the first tokens of two calls of the largest size, one row a place: [size, 2]."""
    size = max(batches(requests, models, how))
    return np.stack([first_tokens(subject, models, how, size, random, tick) for _ in range(2)], axis=1)


def run_equal_sums(
    subject: Subject, models: Models, how: How, requests: int, random: np.random.Generator, tick: Tick | None = None
) -> Ids:
    """Return the first tokens of pairs of requests with equal seed + position, all in one call: [pairs, 2]."""
    pairs = max(1, max(batches(2 * requests, models, how)) // 2)
    seeds = random.integers(2**62) + 2 * np.arange(pairs, dtype=np.int64)
    positions = np.repeat(np.array([8, 7]), pairs)
    if tick is not None:
        tick(2 * pairs)
    outcome = run_step(subject, models, how, np.concatenate([seeds, seeds + 1]), positions, random)
    return outcome.tokens[:, 0].reshape(2, pairs).T


def first_tokens(
    subject: Subject, models: Models, how: How, requests: int, random: np.random.Generator, tick: Tick | None
) -> Ids:
    """Return the first token of each request of one call. All have one position, so that seeds alone tell them apart."""
    seeds, positions = fresh(requests, random)
    positions[:] = 7
    if tick is not None:
        tick(requests)
    return run_step(subject, models, how, seeds, positions, random).tokens[:, 0]


def run_two_steps(
    subject: Subject, models: Models, how: How, requests: int, random: np.random.Generator, tick: Tick | None = None
) -> Ids:
    """Return outcomes of two steps of each request, with one seed and the positions that follow: [requests, 3].

    The columns are the first token of a step, its accepted drafts and last token as one number, and the next first token.
    """
    tokens: list[Any] = []
    for size in batches(requests, models, how):
        seeds, positions = fresh(size, random)
        one = run_step(subject, models, how, seeds, positions, random)
        two = run_step(subject, models, how, seeds, positions + one.accepted + 1, random)
        last = one.accepted * models.vocab_size + one.tokens[np.arange(size), one.accepted]
        tokens.append(np.stack([one.tokens[:, 0], last, two.tokens[:, 0]], axis=1))
        if tick is not None:
            tick(size)
    return np.concatenate(tokens)
