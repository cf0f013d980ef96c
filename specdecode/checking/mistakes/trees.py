"""A right verifier of trees in parts, and its mistakes.

Read `TreeVerifier.__call__` first: at a node, try one child x after the other by min(1, w / q) with weights w that begin as
p and become the residual of w - q after each failure. Without q, a draft is a point mass, and the residual is w without it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from specdecode.checking.mistakes.record import wrong
from specdecode.checking.models import Floats, Logits, pick, point_mass, softmax
from specdecode.checking.subject import Ids
from specdecode.checking.trees import children, depths
from specdecode.checking.verifiers import Use, hashed

TREE = (-1, 0, 0, 1, 1)


class Node(NamedTuple):
    """The node that each request has reached, and the child that it tries."""

    target: Floats
    """[n, V] p of the row that judges the children."""

    draft: Floats
    """[n, V] q of the children: 0 without draft logits."""

    tried: Ids
    """[n, V]: how often each token was tried."""

    weights: Floats
    """[n, V] w: p, or what is left of it after failed siblings."""

    token: Ids
    """[n] x."""

    def of_token(self, rows: Floats) -> Floats:
        """Return the entry of x in rows [n, V]."""
        return np.asarray(rows[np.arange(len(self.token)), self.token])


def ratio(node: Node, draft: Floats) -> Floats:
    """Return w(x) / q(x)."""
    w, q = node.of_token(node.weights), node.of_token(draft)
    return np.asarray(np.divide(w, q, out=np.zeros_like(w), where=q > 0))


def ratio_of_row(node: Node, draft: Floats) -> Floats:
    """Return p(x) / q(x) of the whole row, also after other siblings failed."""
    return ratio(node._replace(weights=node.target), draft)


def running_sum(node: Node, draft: Floats) -> Floats:
    """Return the sum of p over the siblings that were tried and this one."""
    return np.asarray((node.tried * node.target).sum(axis=1) + node.of_token(node.target))


def normalised(weights: Floats, otherwise: Floats) -> Floats:
    """Return weights divided by their sum; rows that are 0 everywhere are replaced."""
    sums = weights.sum(axis=1, keepdims=True)
    sums_used = np.where(sums > 0, sums, otherwise.sum(axis=1, keepdims=True))
    return np.asarray(np.where(sums > 0, weights, otherwise) / sums_used)


def residual(weights: Floats, draft: Floats) -> Floats:
    """Return norm(max(0, w - q)), or w if that is 0 everywhere."""
    return normalised(np.maximum(0, weights - draft), weights)


@dataclass(frozen=True)
class TreeVerifier:
    """Multi-round rejection (Miao et al. 2024), and target-only verification where no q is given."""

    row: Callable[[int, list[int]], int] = lambda node, parents: node
    """The row that judges the children of a node."""

    last_row: Callable[[int, list[int]], int] = lambda node, parents: node
    """The row of the token after a node without children."""

    accept: Callable[[Node, Floats], Floats] = ratio
    """The probability to accept the child, by q."""

    q: Callable[[Node], Floats] = lambda node: node.draft
    """The distribution that the next sibling is judged by."""

    final: Callable[[Node], Floats] = lambda node: node.weights
    """The weights of the token after all siblings failed."""

    sorts_siblings: bool = False
    """Whether drawn siblings are tried in the order of q."""

    skip_equal: bool = True
    """Whether a sibling equal to one that failed is skipped where no q is given."""

    skip_drawn: bool = False
    """Whether it is skipped where q is given."""

    coin: Callable[[int], int] = lambda rank: rank
    """The uniform number that each sibling is compared with."""

    same_coin_last: bool = False
    """Whether the number that rejected the last sibling draws the token, too."""

    uses_q: bool = True

    def __call__(
        self,
        target_logits: Logits,
        token_ids: Ids,
        parents: Ids,
        *,
        draft_logits: Logits | None = None,
        temperature: float = 1.0,
        seeds: Ids,
        positions: Ids,
    ) -> Ids:
        """Return [n, depth + 1] ids."""
        links = parents.tolist()
        p = softmax(target_logits, temperature)
        draft_logits = draft_logits if self.uses_q else None
        q = np.zeros_like(p) if draft_logits is None else softmax(draft_logits, temperature)
        below, rows, vocab = children(links), np.arange(len(p)), p.shape[2]
        width = max(map(len, below))
        table = np.array([each + [-1] * (width - len(each)) for each in below])
        judging = np.array([self.row(node, links) for node in range(len(links))])
        ending = np.array([self.last_row(node, links) for node in range(len(links))])
        output = np.full((len(p), max(depths(links)) + 1), -1)
        at, alive = np.zeros(len(p), dtype=np.int64), np.ones(len(p), dtype=bool)
        for depth in range(output.shape[1]):
            target, tried = p[rows, judging[at]], np.zeros((len(p), vocab), dtype=np.int64)
            here, siblings = Node(target, q[rows, at], tried, target, at), table[at]
            if self.sorts_siblings and draft_logits is not None:
                keys = np.take_along_axis(here.draft, token_ids[rows[:, None], siblings], axis=1)
                order = np.where(siblings >= 0, -keys, 1).argsort(axis=1, kind="stable")
                siblings = np.take_along_axis(siblings, order, axis=1)
            accepted = np.full(len(p), -1)
            coin = np.zeros(len(p))
            for rank in range(width):
                child = siblings[:, rank]
                here = here._replace(token=token_ids[rows, child])
                trying = alive & (accepted < 0) & (child >= 0)
                if self.skip_drawn if draft_logits is not None else self.skip_equal:
                    trying &= tried[rows, here.token] == 0
                draft = self.q(here) if draft_logits is not None else point_mass(here.token, vocab)
                coin = np.where(trying, hashed(seeds, positions, depth, Use.ACCEPT + 8 * self.coin(rank)), coin)
                hit = trying & (coin < self.accept(here, draft))
                failed = trying & ~hit
                here = here._replace(weights=np.where(failed[:, None], residual(here.weights, draft), here.weights))
                tried[rows, here.token] += failed
                accepted = np.where(hit, child, accepted)
            leaf = (table[at, 0] < 0)[:, None]
            weights = np.where(leaf, p[rows, ending[at]], self.final(here))
            fresh = hashed(seeds, positions, depth, Use.EMIT)
            last = pick(weights, np.where(leaf[:, 0] | (not self.same_coin_last), fresh, coin))
            emitted = np.where(accepted >= 0, token_ids[rows, accepted], last)
            output[:, depth] = np.where(alive, emitted, -1)
            alive, at = alive & (accepted >= 0), np.maximum(accepted, 0)
        return output


REJECTION = TreeVerifier()
TARGET_ONLY = TreeVerifier(accept=running_sum, coin=lambda rank: 0, uses_q=False)


of_trees = partial(wrong, of_trees=True)


def of_both(**parts: Any) -> tuple[TreeVerifier, TreeVerifier]:
    """Replace parts of rejection and of target-only verification."""
    return replace(REJECTION, **parts), replace(TARGET_ONLY, **parts)


def parent_of(node: int, parents: list[int]) -> int:
    return max(0, parents[node])


TREES = {
    "tree_accepts_everything": of_trees(
        "tree: the first child of every node is accepted.",
        "Compare a uniform number with p / q at every node.",
        TreeVerifier(accept=lambda node, draft: np.ones(len(node.token))),
    ),
    "tree_row_of_the_parent": of_trees(
        "tree: children are judged by the row of their grandparent.",
        "The row of a node judges its children: row n follows node n.",
        *of_both(row=parent_of),
        *of_both(row=parent_of, last_row=parent_of),
    ),
    "tree_bonus_from_another_row": of_trees(
        "tree: the token after a node without children comes from another row: of its parent, or of the last node.",
        "Draw it from the row of the last accepted node.",
        *of_both(last_row=parent_of),
        *of_both(last_row=lambda node, parents: len(parents) - 1),
    ),
    "tree_last_token_from_target": of_trees(
        "tree: after all siblings failed the token is drawn from p, not from the residual.",
        "Draw it from what is left of p after the failed siblings.",
        *of_both(final=lambda node: node.target),
    ),
    "tree_siblings_by_the_whole_row": of_trees(
        "tree: each sibling is judged by p / q of the whole row, with one residual at the end or none.",
        "After a failed sibling replace p by the residual; siblings that were not drawn are judged without q.",
        TreeVerifier(accept=ratio_of_row, final=lambda node: residual(node.target, node.draft)),
        TreeVerifier(accept=ratio_of_row, final=lambda node: node.target),
        source="TensorRT-LLM pull request 12588",
    ),
    "tree_siblings_in_the_order_of_q": of_trees(
        "tree: drawn siblings are tried in the order of q, not as they were drawn.",
        "Try them in an order that does not depend on their tokens.",
        TreeVerifier(sorts_siblings=True),
    ),
    "tree_equal_siblings_counted_twice": of_trees(
        "tree: a running sum of p counts an equal sibling again.",
        "Skip a sibling whose token has failed already.",
        replace(TARGET_ONLY, skip_equal=False),
        source="SGLang's tree_speculative_sampling_target_only",
    ),
    "tree_equal_siblings_skipped": of_trees(
        "tree: a drawn sibling that equals a failed one is skipped.",
        "Judge it by the residual, and update that again: it was drawn, too.",
        TreeVerifier(skip_drawn=True),
    ),
    "tree_judged_as_without_replacement": of_trees(
        "tree: siblings are drawn independently, and judged as if drawn without replacement.",
        "Leave the failed siblings in q.",
        TreeVerifier(q=lambda node: normalised(np.where(node.tried > 0, 0, node.draft), node.draft)),
    ),
    "tree_one_uniform_for_siblings": of_trees(
        "tree: one uniform number decides about all siblings of a node.",
        "Draw a number for each sibling, or compare one with the running sum of p.",
        *(replace(each, accept=ratio, coin=lambda rank: 0) for each in (REJECTION, TARGET_ONLY)),
    ),
    "tree_target_drawn_again": of_trees(
        "tree: the target's token is drawn again for each sibling that it is compared with, and again at the end.",
        "Draw one token from the target's row at each node, compare it with all siblings, and emit it.",
        TreeVerifier(
            accept=lambda node, draft: node.of_token(node.target),
            final=lambda node: node.target,
            skip_equal=False,
            uses_q=False,
        ),
    ),
    "tree_coin_used_again": of_trees(
        "tree: the number that rejected the siblings draws the token after them.",
        "Use a number of its own for each decision.",
        replace(TARGET_ONLY, same_coin_last=True),
    ),
}
