"""Trees of drafts: several candidates for each position, verified in one call of the target.

Node 0 is the last token of the text. Every other node is a draft: node n has the token `token_ids[n]` and comes after node
`parents[n]`. The nodes may have any order. The path of a node is the drafts from below node 0 to the node itself. Row n of
the target is p given the text and the path of node n, so the drafts that continue node n, its *children*, are judged by row
n. Nodes that do not lead back to node 0 are padding. Every rule below returns the accepted nodes, which form a path from
below node 0, and the token after them or its distribution.

*Walk.* Draw the target's own token y at node 0, go to the child that is y, and so on. Where no child is y, emit y and stop.

The walk is exact for every tree, however it was drawn, cut or ordered, even if it depends on the random numbers that draw
y. Proof, as in [`greedy`][reference.greedy]: the row of a node on the walk was computed after the tokens that plain
sampling would have emitted, and the token drawn from it, with the noise of that position, is the next of them. The drafts
decide only where the step ends. So the text equals plain sampling, token for token, and q is not needed.

*No rule that is exact for a fixed tree accepts more of its drafts on average.* Let siblings be distinct. A rule that accepts
the path of node n emits that path, and an exact rule emits it with probability p(path). So node n is accepted with at most
p(path), and the mean number of accepted drafts is at most the sum of p(path) over the nodes. The walk reaches this bound: it
emits a path that is in the tree by accepting its nodes. (The two rules below that use q are exact on average over the trees
that q draws, not for each tree. So they may accept more.)

*Target-only* verification has the distribution of the walk, with one uniform number u a node: accept the first child at
which the sum of p over the children so far reaches u. Child k is accepted with probability S_k - S_{k-1} = p(x_k). If none
is, the token comes from p without the tried tokens. An equal sibling must not be added again: it was tried already.

*Rejection*, with the q that siblings were drawn from: try one after the other by min(1, p / q), and after each failure
replace p by the residual of p - q. The proof of [`probabilistic`][reference.probabilistic] applies again to the
residual: with the next sibling as its draft, the residual is emitted exactly. If siblings are drawn *without replacement*,
the next one was drawn from q without the tried tokens, and is judged by this distribution.

*Traversal* is [`block`][reference.block] verification of a tree: it tries the subtree of a node before it rejects the
node. A node has a state (r, p): its subtree is to be accepted with probability r, so that token v follows the node with
probability r p(v). Node 0 has r = 1. Each child in turn gets the ratio min(1, r p(x) / q(x)). If its subtree fails, let A
= sum max(0, r p - q), and replace p by max(0, r p - q) / A and r by A / (A + 1 - r). After the last child the node is
accepted itself with probability r.

Proof, by induction over the nodes of a subtree. A node without children is accepted with r, and its token comes from p.
Otherwise the first child x is drawn from q, and its subtree is accepted with min(1, r p(x) / q(x)), by induction. So v
follows as this child with probability q(v) min(1, r p(v) / q(v)) = min(q(v), r p(v)), and the child fails with
1 - sum min(q, r p) = 1 - r + A. A node in the new state with one child less is left. By induction v follows it with
probability A / (A + 1 - r) times max(0, r p(v) - q(v)) / A, whatever the first child was. Multiply by 1 - r + A:
max(0, r p(v) - q(v)). Together r p(v). On a chain this is block verification.

*Siblings that share the target's noise.* Let the children of a node be the first k tokens of the drafter's exponential race,
run with the numbers that will draw y: see [`siblings`][reference.tree.siblings]. The first is the draft that
[`strict`][reference.strict] verifies. The tree then depends on the noise that draws y. The walk is exact all the same, and
the bound for a fixed tree does not apply.

Sources: SGLang's kernel `tree_speculative_sampling_target_only`, for trees of the likeliest tokens. Rejection: Miao et al.,
"SpecInfer" (2024), multi-step speculative sampling; without replacement Jeon et al., "Recursive speculative decoding"
(2024), recursive rejection sampling. Traversal: Weng et al., "Traversal verification for speculative tree decoding" (2025).
Left out: merging the children of equal siblings.
"""

import numpy as np

from reference import block
from reference.probabilistic import acceptance_probability, residual
from reference.selection import BLOCK_SIZE, log_block_sums


def children(parents, node: int) -> list[int]:
    """Return the children of a node in ascending order. Node 0 is never a child; its entry in `parents` is ignored.

    Node 3 is its own parent, and node 4 has none: both are padding.

    >>> children([-1, 0, 0, 3, -1], 0), children([-1, 0, 0, 3, -1], 1)
    ([1, 2], [])
    """
    return [child for child in range(1, len(parents)) if parents[child] == node]


def paths(parents) -> list[list[int]]:
    """Return the path from node 0 to each node that is not padding, shorter paths first.

    >>> paths([-1, 2, 0, 3, 0, 1])
    [[0], [0, 2], [0, 4], [0, 2, 1], [0, 2, 1, 5]]
    """
    found, level = [], [[0]]
    while level:
        found += level
        level = [[*path, child] for path in level for child in children(parents, path[-1])]
    return found


def walk(sample, token_ids, parents, max_depth: int | None = None) -> tuple[list[int], list[int]]:
    """Return the accepted nodes, and the emitted tokens: the tokens of these nodes and one more.

    Args:
        sample: a function of a node and its depth, the length of its path: the target's own token after that node. The noise
            belongs to the position, so nodes of one depth share it.
        token_ids: [nodes] ids; the id of node 0 is ignored.
        parents: [nodes], in any order. Of equal siblings the lowest node is followed.
        max_depth: the most drafts that may be accepted; None: no limit.

    Nodes 1 and 2, tokens 5 and 7, follow node 0. Nodes 3 and 4 follow node 2. The target's own token is 7 after node 0, and
    8 after node 2, which is none of its children:

    >>> own = {0: 7, 2: 8}
    >>> walk(lambda node, depth: own[node], [0, 5, 7, 6, 9], [-1, 0, 0, 2, 2])
    ([2], [7, 8])
    >>> own = {0: 7, 2: 9, 4: 1}
    >>> walk(lambda node, depth: own[node], [0, 5, 7, 6, 9], [-1, 0, 0, 2, 2])
    ([2, 4], [7, 9, 1])
    """
    node, nodes, tokens = 0, [], []
    while True:
        tokens.append(sample(node, len(nodes)))
        equal = [child for child in children(parents, node) if token_ids[child] == tokens[-1]]
        if not equal or len(nodes) == max_depth:
            return nodes, tokens
        node = equal[0]
        nodes.append(node)


def target_only(target_probs, token_ids, parents, uniforms):
    """Return the accepted nodes, and the distribution of the token after them.

    Args:
        target_probs: [nodes, vocab] p of each row.
        token_ids: [nodes] ids.
        parents: [nodes], in any order.
        uniforms: [nodes] independent random numbers, uniform on (0, 1): one for all children of a node.

    The sums after the children 0 and 1 are 0.5 and 0.8. 0.6 accepts the second; 0.9 none, which leaves token 2.

    >>> p = np.array([0.5, 0.3, 0.2])
    >>> target_only([p, p, p], [9, 0, 1], [-1, 0, 0], uniforms=[0.6, 0.5, 0.5])
    ([2], array([0.5, 0.3, 0.2]))
    >>> target_only([p, p, p], [9, 0, 1], [-1, 0, 0], uniforms=[0.9, 0.5, 0.5])
    ([], array([0., 0., 1.]))
    """
    node, nodes = 0, []
    while True:
        left, tried = np.array(target_probs[node]), 0
        for child in children(parents, node):
            tried += left[token_ids[child]]
            if uniforms[node] <= tried:
                break
            left[token_ids[child]] = 0  # an equal sibling adds nothing
        else:
            return nodes, left / left.sum()
        node = child
        nodes.append(node)


def rejection(target_probs, draft_probs, token_ids, parents, uniforms, replacement: bool = True):
    """Return the accepted nodes, and the distribution of the token after them.

    Args:
        target_probs: [nodes, vocab] p of each row.
        draft_probs: [nodes, vocab] q that the children of each node were drawn from; the rows of leaves are ignored.
        token_ids: [nodes] ids.
        parents: [nodes]; siblings are in the order in which they were drawn.
        uniforms: [nodes] independent random numbers, uniform on (0, 1).
        replacement: whether siblings were drawn independently; if not, each was drawn from q without the siblings before
            it.

    Sibling 2 has p / q = 1/3 and fails. The residual is (3/4, 1/4, 0). Sibling 0 then has 0.75 / 0.2 > 1 by q, and
    0.75 / 0.5 > 1 by q without token 2: accepted either way. Another sibling 2 has 0 / 0.6 and fails. Then the residual of
    (3/4, 1/4, 0) and q is left: (0.55, 0.05, 0) / 0.6.

    >>> p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    >>> rejection([p, p, p], [q, q, q], [9, 2, 0], [-1, 0, 0], uniforms=[0.5, 0.5, 0.5])
    ([2], array([0.5, 0.3, 0.2]))
    >>> nodes, probs = rejection([p, p, p], [q, q, q], [9, 2, 2], [-1, 0, 0], uniforms=[0.5, 0.5, 0.5])
    >>> nodes, probs.round(6).tolist()
    ([], [0.916667, 0.083333, 0.0])
    """
    node, nodes = 0, []
    while True:
        target, draft = target_probs[node], draft_probs[node]
        for child in children(parents, node):
            token = token_ids[child]
            if uniforms[child] <= acceptance_probability(target[token], draft[token]):
                break
            target = residual(target, draft)
            draft = draft if replacement else without(draft, token)
        else:
            return nodes, target
        node = child
        nodes.append(node)


def without(probs, token: int):
    """Return a distribution without a token, normalised; 0 everywhere if nothing is left.

    >>> without(np.array([0.25, 0.25, 0.5]), 2).tolist()
    [0.5, 0.5, 0.0]
    """
    left = np.array(probs)
    left[token] = 0
    return left / left.sum() if left.any() else left


def traversal(target_probs, draft_probs, token_ids, parents, uniforms, replacement: bool = True):
    """Return the accepted nodes, and the distribution of the token after them. Takes the arguments of `rejection`.

    The chain 0, 1 has p / q = 1/2 and 3, so its nodes have r = 1/2 and min(1, 3/2) = 1: always accepted. The chain 0, 0 has
    1/2 and 1/4. Its leaf fails, as 0.5 > 1/4. Then r p - q = (-0.6, 0.1), so A = 0.1 and r = 0.1 / (0.1 + 0.5) = 1/6: node 1
    fails, too. p - q = (-0.4, 0.4) leaves token 1 at node 0.

    >>> p, q = np.array([0.4, 0.6]), np.array([0.8, 0.2])
    >>> traversal([p, p, p], [q, q, q], [9, 0, 1], [-1, 0, 1], uniforms=[0.5, 0.9, 0.5])
    ([1, 2], array([0.4, 0.6]))
    >>> traversal([p, p, p], [q, q, q], [9, 0, 0], [-1, 0, 1], uniforms=[0.5, 0.9, 0.5])
    ([], array([0., 1.]))
    """

    def visit(node, ratio):  # returns None if the whole subtree fails
        target, draft = target_probs[node], draft_probs[node]
        for child in children(parents, node):
            token = token_ids[child]
            found = visit(child, block.running_ratio(ratio, target[token], draft[token]))
            if found:
                return [child, *found[0]], found[1]
            mass = block.residual_mass(ratio, target, draft)
            target, ratio = block.residual(ratio, target, draft), block.acceptance_probability(ratio, mass)
            draft = draft if replacement else without(draft, token)
        return ([], target) if uniforms[node] <= ratio else None

    return visit(0, 1)


def siblings(log_weights, block_gumbels, token_gumbels, width: int, block_size: int = BLOCK_SIZE) -> list[int]:
    """Return the `width` tokens with the smallest `lags` of a race on two levels; fewer if fewer have a weight.

    With one block, a lag is the logarithm of E(v) / w(v) divided by its smallest value. So the tokens come in the order
    of the exponential race: they are a sample without replacement. With more blocks they are not, but the first token is
    the token of [`select`][reference.selection.select].

    >>> weights, G, G_tokens = np.log([1.0, 2.0, 3.0, 4.0]), np.array([1.2, 0.1]), np.array([0.9, 0.1, 0.5, 0.5])
    >>> siblings(weights, G, G_tokens, width=3, block_size=2)  # see the lags of `lags`
    [0, 1, 3]
    """
    behind = lags(log_weights, block_gumbels, token_gumbels, width, block_size)
    order = np.argsort(behind, kind="stable")[:width]
    return [int(token) for token in order if behind[token] < np.inf]


def lags(log_weights, block_gumbels, token_gumbels, width: int, block_size: int = BLOCK_SIZE):
    """Return the lag of each token, [vocab]: (best block score - its block's score) + (best score in its block - its own).

    The selected token has lag 0. The first k tokens are in the k best blocks, because the best token of a block has the
    lag of its block. So the tokens of other blocks get infinity.

    The blocks have the scores log 3 + 1.2 = 2.30 and log 7 + 0.1 = 2.05, so block 1 is 0.25 behind. In block 0 the tokens
    have 0.9 and log 2 + 0.1 = 0.79; in block 1 log 3 + 0.5 = 1.60 and log 4 + 0.5 = 1.89.

    >>> weights, G, G_tokens = np.log([1.0, 2.0, 3.0, 4.0]), np.array([1.2, 0.1]), np.array([0.9, 0.1, 0.5, 0.5])
    >>> lags(weights, G, G_tokens, width=2, block_size=2).round(2).tolist()
    [0.0, 0.11, 0.54, 0.25]
    """
    block_scores = log_block_sums(log_weights, block_size) + block_gumbels
    behind = np.full(len(log_weights), np.inf)
    for best in np.argsort(-block_scores, kind="stable")[:width]:
        if block_scores[best] > -np.inf:
            token_ids = np.arange(len(log_weights))[best * block_size :][:block_size]
            scores = log_weights[token_ids] + token_gumbels[token_ids]
            behind[token_ids] = block_scores.max() - block_scores[best] + scores.max() - scores
    return behind
