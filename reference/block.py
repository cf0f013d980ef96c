"""Block verification: decide on the drafts together, not one by one.

Token verification stops at the first draft that it rejects. It does not look at the drafts after that one, although
they may be so much more likely under p than under q that the drafts up to them need not be rejected. Block verification
looks at them: it follows a *running ratio*. Count drafts from 0: x_0 ... x_{K-1}. Let p and q be the distributions given the
text and the drafts so far. Start with c_0 = 1, and after draft x_i let

    c_{i+1} = min(1, c_i p(x_i) / q(x_i)).

Let tau be the number of accepted drafts. The rule is: P(tau >= i, given the first i drafts) = c_i. For i < K the next token
v is drafted from q, so tau >= i + 1 has the probability

    sum_v q(v) min(1, c_i p(v) / q(v)) = sum_v min(c_i p(v), q(v)) = c_i - A_i,
    where  A_i = sum_v max(0, c_i p(v) - q(v)).

So tau = i must have the probability A_i. The longest block is tried first: then length i is tried with probability
1 - (c_i - A_i), and must be accepted with probability

    h_i = A_i / (A_i + 1 - c_i)  for i < K,  h_K = c_K.

1. For each i from 1 to K draw a uniform number eta_i. Accept tau drafts, where tau is the largest i with eta_i <= h_i, or
   0 if there is none. A failure at i does not stop the search.
2. If tau < K, draw the recovered token from max(0, c_tau p - q), normalised. Otherwise draw the bonus token from p.

Why this is exact: given the first i drafts, tau >= i and the next token is v with the probability

    min(c_i p(v), q(v)) + max(0, c_i p(v) - q(v)) = c_i p(v).

So given these drafts and tau >= i, the next token is distributed as p. No method accepts more drafts on average, if it is
exact, sees one draft path drawn from q, and emits one token after the accepted drafts. K is the request's own number of
drafts.

The noise needs care. The uniform numbers of all drafts are compared, also those beyond the accepted length, and the
next step drafts and decides on the same positions again. If it used the same numbers, its drafts would depend on what
the first step rejected, and the output would not be distributed as the target. So each step has new numbers: the
draft's offset in the step is part of the counter, as the index of the accept noise and in the domains of the draft's
own noise ([`draft_domains`][reference.block.draft_domains]).

For a deterministic drafter, q(x) = 1, no sum is needed: A_i = c_i (1 - p(x_i)), and the number of accepted drafts
has the same distribution as in token verification. Left out: several draft paths. Source: Sun et al., "Block
verification accelerates speculative decoding" (2024), algorithm 2, where drafts count from 1 and c_i is called p_i.
"""

import numpy as np

from reference import Outcome, greedy, leading_drafts
from reference.philox import Domain, uniform
from reference.probabilistic import draft_log_softmax
from reference.selection import DRAFT, Choice, is_invalid, log_softmax, sample, select
from reference.truncation import Sampling, truncate_rows


def draft_domains(offset: int) -> tuple[int, int]:
    """Return the noise domains of the draft at an offset (counted from 0) in its step: new noise for each step.

    >>> draft_domains(0) == DRAFT, draft_domains(2)
    (True, (515, 516))
    """
    block_domain, token_domain = DRAFT
    return block_domain + (offset << 8), token_domain + (offset << 8)


def running_ratio(before, target_prob, draft_prob):
    """Return c_{i+1} = min(1, c_i p(x_i) / q(x_i)), and 0 if p(x_i) or q(x_i) is 0; `before` is c_i.

    A draft with p > q makes up for earlier drafts with p < q, but not for later ones, because of the minimum:

    >>> running_ratio(0.25, 0.75, 0.25), running_ratio(1, 0.75, 0.25)
    (0.75, 1)
    """
    if target_prob == 0 or draft_prob == 0:
        return 0
    return min(1, before * target_prob / draft_prob)


def residual_mass(ratio, target_probs, draft_probs):
    """Return A_i = sum max(0, c_i p - q), of the row after i drafts.

    >>> float(residual_mass(0.5, np.array([0.75, 0.25]), np.array([0.25, 0.75])))
    0.125
    """
    return np.maximum(0, ratio * target_probs - draft_probs).sum()


def residual(ratio, target_probs, draft_probs):
    """Return max(0, c_i p - q), normalised, or p itself if c_i p - q is positive nowhere.

    >>> p, q = np.array([0.5, 0.375, 0.125]), np.array([0.125, 0.125, 0.75])
    >>> residual(0.5, p, q).round(6).tolist()
    [0.666667, 0.333333, 0.0]
    """
    weights = np.maximum(0, ratio * target_probs - draft_probs)
    total = weights.sum()
    return weights / total if total > 0 else target_probs


def acceptance_probability(ratio, mass):
    """Return h_i = A_i / (A_i + 1 - c_i), with 0/0 = 1. It is never above c_i.

    >>> acceptance_probability(0.5, 0.125), acceptance_probability(1, 0.0)
    (0.2, 1)
    """
    return 1 if ratio == 1 else mass / (mass + 1 - ratio)


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


def accepts(log_uniform: float, log_ratio: float, next_row=None) -> Choice:
    """Decide whether to accept i drafts: log eta_i <= log h_i.

    The margin is how far log c_i can move before the decision changes.

    Args:
        log_uniform: log eta_i.
        log_ratio: log c_i before the minimum with 0. The margin needs it: log c_i stays 0 until this value is below 0.
        next_row: (p, q) of the row after the i drafts, or None if these are all drafts.

    >>> row = np.array([0.75, 0.25]), np.array([0.25, 0.75])
    >>> accepts(np.log(0.19), np.log(0.5), row).index, accepts(np.log(0.21), np.log(0.5), row).index
    (1, 0)
    >>> accepts(np.log(0.49), np.log(0.5)).index, accepts(np.log(0.51), np.log(0.5)).index
    (1, 0)
    """
    if next_row is None:
        slack = min(0.0, log_ratio) - log_uniform
        return Choice(int(slack >= 0), abs(log_ratio - log_uniform))
    ratio = np.exp(min(0.0, log_ratio))
    with np.errstate(divide="ignore"):
        slack = np.log(acceptance_probability(ratio, residual_mass(ratio, *next_row))) - log_uniform
    return Choice(int(slack >= 0), abs(log_ratio - log_critical_ratio(log_uniform, *next_row)))


def verify(
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
) -> Outcome:
    """Accept the longest block of drafts that passes its test, then emit a recovered or a bonus token.

    Args:
        target_logits: [num_draft_tokens + 1, vocab] raw logits.
        draft_token_ids: [num_draft_tokens] ids; the first -1 ends them.
        draft_logits: [num_draft_tokens, vocab] raw logits that the drafts were drawn from; None for a deterministic drafter.
        temperature: 0 is greedy.
        top_k: see [`truncation`][reference.truncation].
        top_p: likewise.
        min_p: likewise.
        draft_sampling: how the drafts were drawn; None: as the target samples.
        seed: the request's seed.
        position: absolute position of the first draft token.

    The flag for invalid rows looks only at the rows of the emitted tokens.

    >>> target = np.log([[0.2, 0.8], [0.9, 0.1], [0.5, 0.5]])
    >>> draft = np.log([[0.5, 0.5], [0.3, 0.7]])
    >>> verify(target, [0, 0], draft, seed=1).token_ids  # c_1 = 0.2 / 0.5 = 0.4, c_2 = min(1, 0.4 * 0.9 / 0.3) = 1
    [0, 0, 0]
    >>> verify(target, [0, 1], draft, seed=1).token_ids  # c_2 = 0.4 * 0.1 / 0.7; the residual of row 0 is token 1
    [1]
    """
    if temperature == 0:
        return greedy.verify(target_logits, draft_token_ids)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    draft_sampling = draft_sampling or sampling
    target_logits, margins = truncate_rows(target_logits, sampling)
    draft_logits, draft_margins = truncate_rows(draft_logits, draft_sampling)
    vocab_size = len(target_logits[0])
    drafts = leading_drafts(draft_token_ids, vocab_size)
    log_ratios, rows = [0.0], []
    for offset, token in enumerate(drafts):
        target_logprobs = log_softmax(target_logits[offset], temperature)
        draft_logprobs = draft_log_softmax(draft_logits, offset, token, vocab_size, draft_sampling.temperature)
        rows.append((np.exp(target_logprobs), np.exp(draft_logprobs)))
        if target_logprobs[token] == -np.inf or draft_logprobs[token] == -np.inf:
            break  # the running ratio is 0 from here on: neither this draft nor a later one can be accepted
        log_ratios.append(min(0.0, log_ratios[-1]) + target_logprobs[token] - draft_logprobs[token])

    accepted, margin = 0, min([*margins[: len(drafts) + 1], *draft_margins[: len(drafts)]])
    for count in range(len(log_ratios) - 1, 0, -1):
        log_uniform = np.log(uniform(seed, position + count - 1, count - 1, Domain.ACCEPT))
        decision = accepts(log_uniform, log_ratios[count], rows[count] if count < len(drafts) else None)
        margin = min(margin, decision.margin)
        if decision.index:
            accepted = count
            break

    if accepted == len(drafts):
        last_row = target_logits[accepted]
        emitted = sample(last_row, temperature=temperature, seed=seed, position=position + accepted)
    else:
        probs = residual(np.exp(min(0.0, log_ratios[accepted])), *rows[accepted])
        with np.errstate(divide="ignore"):
            emitted = select(np.log(probs), seed, position + accepted)
    invalid = any(is_invalid(row) for row in target_logits[: accepted + 1])
    return Outcome([*drafts[:accepted], emitted.index], min(margin, emitted.margin), invalid)
