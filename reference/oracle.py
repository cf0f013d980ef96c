"""The oracle: every method on raw logits, with every option, the real noise, and the margin of each decision.

The PyTorch and the Triton version are compared with it, token for token. It is put together from the other modules, which
have the algorithms on probabilities and their proofs; read those first. [`sampling`][reference.sampling] turns a row of
logits into a distribution, in logarithms, and draws from it. This module adds the rest:

- *Noise*: each random number belongs to a seed, a position and a use, see [`philox`][reference.philox].
- *Logarithms*: u <= p(x) / q(x) is decided as log u <= log p(x) - log q(x).
- *Temperature 0* is greedy in every method; only synthetic verification keeps its schedule.
- *Adjustments*: each target row is adjusted first, see [`adjustments`][reference.adjustments]. This is done in float32
  for rows of float32 or less, so that adjusted logits are the same numbers as in the other versions.
- *Ragged drafts*: the first id that is not a token ends a request's drafts.
- *Margins*: the margin of a step is the smallest margin of its decisions. An implementation whose score differences all
  have smaller errors must return the same tokens.
"""

from typing import NamedTuple

import numpy as np

from reference import block, greedy, probabilistic, tree
from reference.adjustments import Adjustments, adjust
from reference.philox import SELECT, Domain, gumbel, uniform
from reference.sampling import (
    Choice,
    Sampling,
    TokenGumbels,
    is_invalid,
    log,
    log_softmax,
    point_mass,
    select,
    truncate,
    without_nan,
)
from reference.selection import log_block_sums
from reference.truncation import token_order


class Outcome(NamedTuple):
    """The result of one verification step for one request."""

    token_ids: list[int]
    """Accepted drafts, then one recovered or bonus token."""

    margin: float
    """The distance of the closest decision of the step from the opposite decision, in nats."""

    invalid: bool = False
    """Whether the target row of an emitted token had no finite logit and no `+inf`."""

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.token_ids) - 1


def accepts(log_uniform: float, target_logprob: float, draft_logprob: float) -> Choice:
    """Decide whether to accept a draft: log u <= log p(x) - log q(x).

    >>> [accepts(np.log(u), np.log(0.2), np.log(0.5)).index for u in (0.3, 0.5)]
    [1, 0]
    >>> accepts(np.log(1e-9), np.log(0.5), -np.inf).index
    0
    """
    if target_logprob == -np.inf or draft_logprob == -np.inf:
        return Choice(0, np.inf)
    slack = target_logprob - draft_logprob - log_uniform
    return Choice(int(slack >= 0), abs(slack))


def accepts_block(log_uniform: float, log_ratio: float, next_row=None) -> Choice:
    """Decide whether to accept i drafts: log eta_i <= log h_i.

    The margin is the change of log c_i that changes the decision.

    Args:
        log_uniform: log eta_i.
        log_ratio: log c_i before the minimum with 0. The margin needs it: log c_i stays 0 until this value is below 0.
        next_row: (p, q) of the row after the i drafts, or None if these are all drafts.

    >>> row = np.array([0.75, 0.25]), np.array([0.25, 0.75])
    >>> [accepts_block(np.log(u), np.log(0.5), row).index for u in (0.19, 0.21)]
    [1, 0]
    >>> [accepts_block(np.log(u), np.log(0.5)).index for u in (0.49, 0.51)]
    [1, 0]
    """
    if next_row is None:
        slack = min(0.0, log_ratio) - log_uniform
        return Choice(int(slack >= 0), abs(log_ratio - log_uniform))
    ratio = np.exp(min(0.0, log_ratio))
    slack = log(block.acceptance_probability(ratio, block.residual_mass(ratio, *next_row))) - log_uniform
    return Choice(int(slack >= 0), abs(log_ratio - log_critical_ratio(log_uniform, *next_row)))


def log_critical_ratio(log_uniform: float, target_probs, draft_probs) -> float:
    """Return the logarithm of the smallest running ratio c at which the drafts before a row are accepted: h(c) = u.

    h(c) >= u if and only if (1 - u) sum max(0, c p - q) >= u (1 - c). That sum is the largest c P(S) - Q(S) over all
    sets S of tokens. So the condition is c >= (u + (1 - u) Q(S)) / (u + (1 - u) P(S)) for some S. The smallest bound is
    reached by one of the sets of the tokens with the smallest q/p: no token, the first in this order, the first two, ...

    >>> c = np.exp(log_critical_ratio(np.log(0.2), np.array([0.75, 0.25]), np.array([0.25, 0.75])))
    >>> round(float(c), 12)
    0.5
    """
    u = np.exp(log_uniform)
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(draft_probs / target_probs)  # tokens with p = 0 come last
    target_sums, draft_sums = (np.cumsum([0.0, *probs[order]]) for probs in (target_probs, draft_probs))
    return float(np.log(((u + (1 - u) * draft_sums) / (u + (1 - u) * target_sums)).min()))


class Request:
    """One request of a step: its drafts, its rows by offset, its noise, and the smallest margin of its decisions so far."""

    def __init__(
        self, target_logits, draft_token_ids, draft_logits, sampling: Sampling, draft_sampling: Sampling, seed, position
    ) -> None:
        self.target_logits, self.draft_logits = target_logits, draft_logits
        self.sampling, self.draft_sampling = sampling, draft_sampling
        self.seed, self.position = seed, position
        self.vocab_size = len(target_logits[0])
        self.drafts = leading_drafts(draft_token_ids, self.vocab_size)
        self.margin = np.inf

    def decide(self, choice: Choice) -> int:
        """Return the decision; the request's margin becomes the smaller of its own and the decision's."""
        self.margin = min(self.margin, choice.margin)
        return choice.index

    def logprobs(self, logits, sampling: Sampling):
        """Return the log-probabilities of a row, truncated."""
        logits, margin = truncate(logits, sampling)
        self.margin = min(self.margin, margin)
        return log_softmax(logits, sampling.temperature)

    def target(self, offset: int):
        """Return log p."""
        return self.logprobs(self.target_logits[offset], self.sampling)

    def draft(self, offset: int):
        """Return log q: the point mass on the draft if the drafter gave no logits."""
        if self.draft_logits is None:
            return point_mass(self.drafts[offset], self.vocab_size)
        return self.logprobs(self.draft_logits[offset], self.draft_sampling)

    def log_uniform(self, offset: int, index: int = 0) -> float:
        """Return log u of an accept decision."""
        return np.log(uniform(self.seed, self.position + offset, index, Domain.ACCEPT))

    def draw(self, offset: int, log_weights) -> int:
        """Return a token drawn at an offset."""
        return self.decide(select(log_weights, self.seed, self.position + offset))

    def emit(self, offset: int, log_weights) -> list[int]:
        """Return the drafts before an offset, and a token drawn there."""
        return [*self.drafts[:offset], self.draw(offset, log_weights)]


def leading_drafts(draft_token_ids, vocab_size: int) -> list[int]:
    """Return the drafts before the first id that is not a token of the vocabulary (-1 pads ragged batches).

    >>> leading_drafts([4, 2, -1, 3], vocab_size=5)
    [4, 2]
    >>> leading_drafts([4, 5], vocab_size=5)
    [4]
    """
    drafts = []
    for token in draft_token_ids:
        if not 0 <= token < vocab_size:
            break
        drafts.append(int(token))
    return drafts


def adjusted_rows(target_logits, drafts, adjustments: Adjustments) -> list:
    """Return the target rows, each adjusted for the text and the drafts before it.

    >>> adjusted_rows(np.zeros((2, 2), np.float32), [1], Adjustments(presence_penalty=1.0))[1].tolist()
    [0.0, -1.0]
    """
    rows = [np.asarray(row) for row in target_logits]
    rows = [row.astype(np.promote_types(row.dtype, np.float32)) for row in rows]
    with np.errstate(invalid="ignore", over="ignore"):
        return [adjust(row, drafts[:i], adjustments, i) for i, row in enumerate(rows)]


def verify_greedy(request: Request) -> list[int]:
    """Return the tokens of greedy verification. Comparisons of logits do not round: the margin stays infinite."""
    return greedy.verify(map(without_nan, request.target_logits), request.drafts)


def verify_strict(request: Request) -> list[int]:
    """Return the tokens of strict verification."""
    offsets = range(len(request.drafts) + 1)
    return greedy.compare((request.draw(offset, request.target(offset)) for offset in offsets), request.drafts)


def verify_probabilistic(request: Request) -> list[int]:
    """Return the tokens of probabilistic verification."""
    for offset, token in enumerate(request.drafts):
        target, draft = request.target(offset), request.draft(offset)
        if not request.decide(accepts(request.log_uniform(offset), target[token], draft[token])):
            return request.emit(offset, log(probabilistic.residual(np.exp(target), np.exp(draft))))
    return request.emit(len(request.drafts), request.target(len(request.drafts)))


def verify_block(request: Request) -> list[int]:
    """Return the tokens of block verification."""
    length = len(request.drafts)
    rows = [(request.target(offset), request.draft(offset)) for offset in range(length)]
    last_row = request.target(length)
    log_ratios = [0.0]
    for token, (target, draft) in zip(request.drafts, rows):
        if target[token] == -np.inf or draft[token] == -np.inf:
            break  # the running ratio is 0 from here on: neither this draft nor a later one can be accepted
        log_ratios.append(min(0.0, log_ratios[-1]) + target[token] - draft[token])

    probs = [(np.exp(target), np.exp(draft)) for target, draft in rows]
    accepted = 0
    for i in range(len(log_ratios) - 1, 0, -1):
        next_row = probs[i] if i < length else None
        if request.decide(accepts_block(request.log_uniform(i - 1, index=i - 1), log_ratios[i], next_row)):
            accepted = i
            break
    if accepted == length:
        return request.emit(length, last_row)
    ratio = np.exp(min(0.0, log_ratios[accepted]))
    return request.emit(accepted, log(block.residual(ratio, *probs[accepted])))


def verify_synthetic(request: Request, conditional_rates) -> list[int]:
    """Return the tokens of synthetic verification."""
    offset = 0
    while offset < len(request.drafts):
        if not request.decide(accepts(request.log_uniform(offset), log(conditional_rates[offset]), 0.0)):
            break
        offset += 1
    target = request.target(offset)
    if offset == len(request.drafts) or request.draft_logits is None or request.sampling.temperature == 0:
        return request.emit(offset, target)
    return request.emit(offset, log(probabilistic.residual(np.exp(target), np.exp(request.draft(offset)))))


def verify(
    method: str,
    target_logits,
    draft_token_ids,
    draft_logits=None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    draft_sampling: Sampling | None = None,
    seed: int = 0,
    position: int = 0,
    conditional_rates=None,
    adjustments: Adjustments | None = None,
) -> Outcome:
    """Verify one request's drafts.

    Args:
        method: "strict", "probabilistic", "block" or "synthetic".
        target_logits: [num_draft_tokens + 1, vocab] raw logits.
        draft_token_ids: [num_draft_tokens] ids; the first id outside the vocabulary, such as -1, ends them.
        draft_logits: [num_draft_tokens, vocab] raw logits that the drafts were drawn from; None for a deterministic drafter.
        temperature: 0 is greedy.
        top_k: see [`truncation`][reference.truncation].
        top_p: see [`truncation`][reference.truncation].
        min_p: see [`truncation`][reference.truncation].
        draft_sampling: how the drafts were drawn; None: as the target samples.
        seed: the request's seed.
        position: absolute position of the first draft token.
        conditional_rates: [num_draft_tokens] a_i, of synthetic verification.
        adjustments: the request's changes of the target's rows; None: no changes.

    >>> target, draft = np.log([[0.9, 0.1], [0.5, 0.5]]), np.log([[0.5, 0.5]])
    >>> verify("probabilistic", target, [0], draft, seed=1).token_ids  # 0.9 / 0.5 > 1: always accepted
    [0, 1]
    >>> verify("probabilistic", target, [1], draft, seed=1).token_ids  # accepted one time in five; here rejected
    [0]
    >>> plain = [select(row, seed=1, position=10 + i).index for i, row in enumerate(target)]
    >>> plain, verify("strict", target, plain[:1], seed=1, position=10).token_ids
    ([0, 1], [0, 1])
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    if adjustments is not None:
        drafts = leading_drafts(draft_token_ids, len(target_logits[0]))
        target_logits = adjusted_rows(target_logits, drafts, adjustments)
    request = Request(
        target_logits, draft_token_ids, draft_logits, sampling, draft_sampling or sampling, seed, position
    )
    if method == "synthetic":
        token_ids = verify_synthetic(request, conditional_rates)
    elif temperature == 0:
        token_ids = verify_greedy(request)
    else:
        verifiers = {"strict": verify_strict, "probabilistic": verify_probabilistic, "block": verify_block}
        token_ids = verifiers[method](request)
    invalid = any(is_invalid(row) for row in target_logits[: len(token_ids)])
    return Outcome(token_ids, request.margin, invalid)


class TreeOutcome(NamedTuple):
    """The result of verifying one request's tree."""

    token_ids: list[int]
    """Accepted drafts, then one more token."""

    nodes: list[int]
    """The accepted nodes."""

    num_draft_tokens: int
    """The depth of the tree without padding, at most `max_depth`."""

    margin: float
    """The distance of the closest decision of the step from the opposite decision, in nats."""

    invalid: bool = False
    """Whether the target row of an emitted token had no finite logit and no `+inf`."""

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.nodes)


def without_invalid(token_ids, parents, vocab_size: int) -> list[int]:
    """Return the parents, with -1 for nodes whose id is not a token: these nodes and their descendants become padding.

    >>> without_invalid([7, 4, -1, 9], [-1, 0, 0, 2], vocab_size=5)
    [-1, 0, -1, -1]
    """
    return [int(parent) if 0 <= token < vocab_size else -1 for token, parent in zip(token_ids, parents)]


def adjusted_path(target_logits, token_ids, nodes, adjustments: Adjustments) -> list:
    """Return the rows of node 0 and of the nodes of a path, each adjusted for the text and the drafts before it.

    The mask has one row per node. Node 0 is part of the text, so its token is counted there already.

    >>> rows, masks = np.zeros((3, 2), np.float32), np.array([[True, True], [True, True], [False, True]])
    >>> adjusted_path(rows, [1, 0, 1], [2], Adjustments(presence_penalty=1.0, allowed=masks))[1].tolist()
    [-inf, -1.0]
    """
    drafts = [int(token_ids[node]) for node in nodes]
    rows = [np.asarray(target_logits[node]) for node in (0, *nodes)]
    rows = [row.astype(np.promote_types(row.dtype, np.float32)) for row in rows]
    with np.errstate(invalid="ignore", over="ignore"):
        return [adjust(row, drafts[:i], adjustments, node) for i, (row, node) in enumerate(zip(rows, (0, *nodes)))]


def verify_tree(
    target_logits,
    token_ids,
    parents,
    *,
    max_depth: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
    adjustments: Adjustments | None = None,
) -> TreeOutcome:
    """Verify one request's tree of drafts by the walk, see [`tree`][reference.tree].

    [`sampling`][reference.sampling] has log-probabilities, for the rows of node 0 and of the accepted nodes.

    Args:
        target_logits: [nodes, vocab] raw logits; row n is the row after node n.
        token_ids: [nodes] ids; the id of node 0 is ignored.
        parents: [nodes], in any order. A node is padding if its parent is not a node, its id is not a token, or its
            ancestors do not include node 0.
        max_depth: the most drafts that may be accepted.
        temperature: 0 is greedy.
        top_k: see [`truncation`][reference.truncation].
        top_p: see `top_k`.
        min_p: see `top_k`.
        seed: the request's seed.
        position: absolute position of the first token after node 0. A node at depth d has its token at position + d - 1.
        adjustments: the request's changes of the target's rows; the mask has a row for each node. None: no changes.

    >>> target = np.log([[0.6, 0.4], [0.5, 0.5], [0.5, 0.5]])
    >>> plain = [select(target[node], seed=1, position=10 + depth).index for depth, node in enumerate([0, 2])]
    >>> outcome = verify_tree(target, [0, 1 - plain[0], plain[0]], [-1, 0, 0], max_depth=2, seed=1, position=10)
    >>> outcome.token_ids == plain, outcome.nodes, outcome.num_draft_tokens
    (True, [2], 1)
    """
    parents = without_invalid([0, *token_ids[1:]], parents, len(target_logits[0]))
    sampling = Sampling(temperature, top_k, top_p, min_p)
    rows = list(target_logits)
    paths = tree.paths(parents)
    if adjustments is not None:
        for path in paths:
            rows[path[-1]] = adjusted_path(target_logits, token_ids, path[1:], adjustments)[-1]
    request = Request(rows, [], None, sampling, sampling, seed, position)

    def sample(node: int, depth: int) -> int:
        if temperature == 0:
            return greedy.argmax(without_nan(rows[node]))
        return request.draw(depth, request.target(node))

    nodes, emitted = tree.walk(sample, token_ids, parents, max_depth)
    depth = min(max_depth, len(paths[-1]) - 1)
    invalid = any(is_invalid(rows[node]) for node in (0, *nodes))
    return TreeOutcome(emitted, nodes, depth, request.margin, invalid)


class Siblings(NamedTuple):
    """The result of drafting one node's children."""

    token_ids: list[int]
    """[width] ids, the likeliest to be the target's own token first, then -1 if fewer tokens are possible."""

    margin: float
    """The distance of the closest decision from the opposite decision, in nats."""


def draft_siblings(
    logits,
    width: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> Siblings:
    """Draw a node's children with the noise of the target's own token, see [`siblings`][reference.tree.siblings].

    At temperature 0 they are the tokens with the largest logits. This is the limit of small temperatures: temperature
    times lag tends to the largest logit minus the token's. The first sibling is the token that a drafter of one token
    draws.

    >>> row = np.log([0.1, 0.2, 0.3, 0.4])
    >>> draft_siblings(row, 3, seed=5).token_ids[0] == select(row, seed=5, position=0).index
    True
    >>> draft_siblings(row, 3, temperature=0).token_ids, sorted(draft_siblings(row, 3, top_k=2).token_ids)
    ([3, 2, 1], [-1, 2, 3])
    """
    if temperature == 0:
        row, margin = without_nan(logits), np.inf
        token_ids = [int(token) for token in token_order(row) if row[token] > -np.inf] or [0]
    else:
        row, margin = truncate(logits, Sampling(temperature, top_k, top_p, min_p))
        log_weights = log_softmax(row, temperature)
        block_gumbels = gumbel(seed, position, np.arange(len(log_block_sums(log_weights))), SELECT[0])
        race = log_weights, block_gumbels, TokenGumbels(seed, position, SELECT[1]), width + 1
        token_ids = tree.siblings(*race)
        margin = min(margin, float(np.diff(tree.lags(*race)[token_ids]).min(initial=np.inf)))
    return Siblings([*token_ids, *[-1] * width][:width], margin)
