"""Trees of drafts: the drafts and rows of the nodes, and the most that an exact verifier accepts.

Node 0 is the last token of the text. Node n > 0 is a draft after node `parents[n]`; it is padding if that is no node. Row n
of both models belongs to the text that ends in node n: a node of depth d has a state of table d of the models.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdecode.checking.models import Floats, How, Ids, Models, pick, point_mass, softmax

MAX_TEXTS = 2**20


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node, -1 for padding.

    >>> depths([-1, 2, 0, 7])
    [0, 2, 1, -1]
    """
    found = [0] + [-1] * (len(parents) - 1)
    for _ in parents:
        for node, parent in enumerate(parents[1:], 1):
            if 0 <= parent < len(parents) and found[parent] >= 0:
                found[node] = found[parent] + 1
    return found


def children(parents: Sequence[int]) -> list[list[int]]:
    """Return the children of each node, the lowest first."""
    return [[child for child in range(1, len(parents)) if parents[child] == node] for node in range(len(parents))]


def leftmost(parents: Sequence[int]) -> list[int]:
    """Return the path of first children from below node 0."""
    path, below = [0], children(parents)
    while below[path[-1]]:
        path.append(below[path[-1]][0])
    return path[1:]


def padded(parents: Sequence[int]) -> tuple[int, ...]:
    """Put a padding node after node 0 and two at the end: the second one follows the first."""
    moved = [-1, -1, *(parent + (parent > 0) for parent in parents[1:])]
    return (*moved, -1, len(moved))


def reversed_nodes(parents: Sequence[int]) -> tuple[int, ...]:
    """Number the nodes after node 0 backwards: every child comes before its parent."""
    count = len(parents)
    return (-1, *((count - parent) % count if parent > 0 else parent for parent in reversed(parents[1:])))


def chances(models: Models, how: How, depth: int, rank: int) -> Floats:
    """Return the distribution of a node's token in each state of its parent: [states, V]. Rank 0 is the first sibling."""
    q = softmax(models.draft[depth], models.temperature or 1.0)
    if how.drafts == "drawn":
        return q
    order = (-q).argsort(axis=1, kind="stable")
    if how.drafts == "top":
        return point_mass(order[:, rank % q.shape[1]], q.shape[1])
    return np.asarray((point_mass(order[:, 0], q.shape[1]) + point_mass(order[:, 1], q.shape[1])) / 2)


def draft(models: Models, how: How, requests: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Return the tokens and the states of all nodes, [n, N] each."""
    depth, below = depths(how.parents), children(how.parents)
    tokens = random.integers(models.vocab_size, size=(requests, len(depth)))
    states = np.zeros_like(tokens)
    for node in sorted(range(1, len(depth)), key=lambda each: depth[each]):
        if depth[node] > 0:
            parent, level = how.parents[node], depth[node] - 1
            probs = chances(models, how, level, below[parent].index(node))
            tokens[:, node] = pick(probs[states[:, parent]], random.random(requests))
            states[:, node] = models.following[level][states[:, parent], tokens[:, node]]
    return tokens, states


def most_accepted(models: Models, how: How) -> tuple[float, float] | None:
    """Return the mean number of accepted drafts of the walk, and the maximum over exact methods.

    A method accepts the text x only if x is in the tree, and if it is exact, it emits x with probability p(x). So it accepts
    x with at most min(p(x), P(x in the tree)); the walk does so with their product. None: there are too many texts.
    """
    if models.vocab_size**models.num_draft_tokens > MAX_TEXTS:
        return None
    below = children(how.parents)
    states, target = np.zeros(1, dtype=np.int64), np.ones(1)
    drafted: list[list[Floats]] = []  # by depth and rank: the probability of that token of each text
    walk = best = 0.0
    width = max(map(len, below))
    for level, (p, following) in enumerate(zip(models.target_probs, models.following[: models.num_draft_tokens])):
        vocab = models.vocab_size
        target = (target[:, None] * p[states]).ravel()
        drafted = [[np.repeat(each, vocab) for each in ranks] for ranks in drafted]
        drafted.append([chances(models, how, level, rank)[states].ravel() for rank in range(width)])
        states = following[states].ravel()
        in_tree = contained(drafted, below, 0)
        walk += float((target * in_tree).sum())
        best += float(np.minimum(target, in_tree).sum())
    return walk, best


def contained(drafted: list[list[Floats]], below: list[list[int]], node: int) -> Floats:
    """Return the probability that each text is a path of drafts below a node; `drafted` has its tokens by depth and rank."""
    if not drafted:
        return np.ones(1)
    missing: Floats = np.ones(len(drafted[0][0]))
    for probability, child in zip(drafted[0], below[node]):
        missing = missing * (1 - probability * contained(drafted[1:], below, child))
    return 1 - missing


def on_a_path(ids: Ids, tokens: Ids, parents: Ids) -> NDArray[np.bool_]:
    """Return whether all tokens of each request but the last are a path of drafts from below node 0."""
    count = len(parents)
    inside = (parents >= 0) & (parents < count) & (np.arange(count) > 0)
    reached = np.zeros(tokens.shape, dtype=bool)
    reached[:, 0] = True
    accepted = (ids != -1).sum(axis=1) - 1
    right = np.ones(len(ids), dtype=bool)
    for i in range(ids.shape[1] - 1):
        reached = reached[:, np.where(inside, parents, 0)] & inside & (tokens == ids[:, i, None])
        right &= (i >= accepted) | reached.any(axis=1)
    return right
