"""Run a subject on models: draft, verify, and let the target alone continue what is shorter than K + 1 tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdecode.checking import trees
from specdecode.checking.models import How, Models, pick
from specdecode.checking.subject import Arguments, Ids, Subject, given_drafts

MAX_REQUESTS = 8192
MAX_LOGITS = 2**24
"""The most requests and target logits of one call."""


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


def fresh(requests: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Return seeds that are all different, and positions."""
    seeds = random.integers(2**62) + np.arange(requests, dtype=np.int64)
    return random.permutation(seeds), random.integers(0, 10_000, size=requests)


@dataclass(frozen=True)
class Run:
    """Calls of a subject with rows of models; `tick` counts the requests of a call."""

    subject: Subject
    models: Models
    how: How
    random: np.random.Generator
    tick: Callable[[int], None] = lambda requests: None

    def draft(self, seeds: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """Return drafts and the states that they lead through, or the tokens and the states of a tree's nodes."""
        models, how, requests = self.models, self.how, len(seeds)
        if how.parents:
            return trees.draft(models, how, requests, self.random)
        num_drafts = models.num_draft_tokens
        drafts = np.zeros((requests, num_drafts), dtype=np.int64)
        states = np.zeros((requests, num_drafts + 1), dtype=np.int64)
        for i in range(num_drafts):
            here = states[:, i]
            if how.drafts == "argmax":
                drafts[:, i] = models.draft[i].argmax(axis=1)[here]
            elif self.subject.draft is not None:
                options = {"temperature": models.temperature, "seeds": seeds, "positions": positions + i}
                drafts[:, i] = self.subject.call_draft(models.draft[i][here], i, options)
            else:
                drafts[:, i] = pick(models.draft_probs[i][here], self.random.random(requests))
            states[:, i + 1] = models.following[i][here, np.maximum(drafts[:, i], 0)]
        given = given_drafts(drafts)
        if how.drafts == "ragged":
            given = np.minimum(given, self.random.integers(0, num_drafts + 1, size=requests))
        drafts[np.arange(num_drafts) >= given[:, None]] = -1
        return drafts, states

    def arguments(self, drafts: Ids, states: Ids, seeds: Ids, positions: Ids) -> Arguments:
        """Look up the rows of both models along the drafts, or at the nodes of a tree.

        Padding nodes have rows of node 0, and nodes at depth K draft rows of zeros.
        """
        models, parents = self.models, self.how.parents
        depths = np.maximum(trees.depths(parents), 0) if parents else np.arange(models.num_draft_tokens + 1)

        def rows(tables: list[NDArray[np.float32]]) -> NDArray[np.float32]:
            return np.stack([tables[depth][states[:, node]] for node, depth in enumerate(depths)], axis=1)

        target, logits = rows(models.target), None
        if self.how.draft_logits:
            logits = rows([*models.draft, np.zeros_like(models.target[-1])])
            logits = logits if parents else logits[:, :-1]
        links = np.array(parents, dtype=np.int64) if parents else None
        return Arguments(target, drafts, logits, float(models.temperature), seeds, positions, links)

    def complete(self, tokens: Ids) -> tuple[Ids, Ids]:
        """Return the tokens, continued by draws from the target to K + 1, and their states."""
        completed = tokens.copy()
        states = np.zeros((len(tokens), tokens.shape[1] + 1), dtype=np.int64)
        for i, rows in enumerate(self.models.target_probs):
            here = states[:, i]
            missing = completed[:, i] == -1
            completed[missing, i] = pick(rows[here[missing]], self.random.random(missing.sum()))
            states[:, i + 1] = self.models.following[i][here, completed[:, i]]
        return completed, states

    def step(self, seeds: Ids, positions: Ids) -> Outcome:
        """Verify one step of each request, in one call."""
        self.tick(len(seeds))
        drafts, draft_states = self.draft(seeds, positions)
        tokens = self.subject.call(self.arguments(drafts, draft_states, seeds, positions))
        if self.how.parents:  # the path of first children stands for the drafts of a chain
            path = trees.leftmost(self.how.parents)
            unused = ((0, 0), (0, self.models.num_draft_tokens - len(path)))
            drafts = np.pad(drafts[:, path], unused, constant_values=-1)
        return Outcome(drafts, draft_states, tokens, *self.complete(tokens))

    def batches(self, requests: int) -> Iterator[int]:
        """Divide requests among calls: the first is small, so that a mistake shows early."""
        rows = len(self.how.parents) or self.models.num_draft_tokens + 1
        most = max(1, min(MAX_REQUESTS, MAX_LOGITS // (rows * self.models.vocab_size)))
        first = min(16, requests, most)
        yield first
        for start in range(first, requests, most):
            yield min(most, requests - start)

    def steps(self, requests: int) -> Outcome:
        """Verify one step of many requests, in as few calls as memory allows."""
        parts = [self.step(*fresh(size, self.random)) for size in self.batches(requests)]
        return Outcome(*(np.concatenate(arrays) for arrays in zip(*parts)))

    def first_tokens(self, requests: int) -> Ids:
        """Return the first token of each request of one call. All have one position, so that seeds alone differ."""
        seeds, positions = fresh(requests, self.random)
        positions[:] = 7
        return self.step(seeds, positions).tokens[:, 0]

    def small_calls(self, calls: int) -> Ids:
        """Return the first tokens of the two requests of each of many calls: [calls, 2]."""
        return np.array([self.first_tokens(2) for _ in range(calls)])

    def two_calls(self, requests: int) -> Ids:
        """Return the first tokens of two calls of the largest size, one row a place: [size, 2]."""
        size = max(self.batches(requests))
        return np.stack([self.first_tokens(size) for _ in range(2)], axis=1)

    def equal_sums(self, requests: int) -> Ids:
        """Return the first tokens of pairs of requests with equal seed + position, all in one call: [pairs, 2]."""
        pairs = max(1, max(self.batches(2 * requests)) // 2)
        seeds = self.random.integers(2**62) + 2 * np.arange(pairs, dtype=np.int64)
        outcome = self.step(np.concatenate([seeds, seeds + 1]), np.repeat(np.array([8, 7]), pairs))
        return outcome.tokens[:, 0].reshape(2, pairs).T

    def two_steps(self, requests: int) -> Ids:
        """Return outcomes of two steps of each request, with one seed and the positions that follow: [requests, 3].

        The columns are a step's first token, its accepted drafts and last token as one number, and the next first token.
        """
        tokens: list[Ids] = []
        for size in self.batches(requests):
            seeds, positions = fresh(size, self.random)
            one = self.step(seeds, positions)
            two = self.step(seeds, positions + one.accepted + 1)
            last = one.accepted * self.models.vocab_size + one.tokens[np.arange(size), one.accepted]
            tokens.append(np.stack([one.tokens[:, 0], last, two.tokens[:, 0]], axis=1))
        return np.concatenate(tokens)
