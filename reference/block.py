"""Block verification: judge the drafts together, not one by one.

Token verification stops at the first draft that fails, and forgets how much better than needed those before it did. Here a
*running ratio* remembers. With p and q given the drafts so far, p_0 = 1 and

    p_i = min(1, p_{i-1} p(x_i) / q(x_i))

Accept i drafts or more with probability p_i, given the first i; draws from q then take the next token v further with

    q(v) min(1, p_i p(v) / q(v)) = min(p_i p(v), q(v)),  in all  p_i - A_i,
    where  A_i = sum_v max(0, p_i p(v) - q(v)).

So exactly i must be accepted with probability A_i. Look at the longest block first; then i is reached with probability
1 - (p_i - A_i), and must be accepted with

    h_i = A_i / (A_i + 1 - p_i)  for i < K,  h_K = p_K.

1. For each i draw a uniform number eta_i. Accept the largest i with eta_i <= h_i: what fails at i does not stop the search.
2. If i < K, draw the recovered token from max(0, p_i p - q), normalised; else the bonus token from p.

Of those that accept i drafts or more, token v then comes next with min(p_i p(v), q(v)) + max(0, p_i p(v) - q(v)) = p_i p(v):
the target's law. And no other exact method that sees one draft path accepts more in the mean. K is the request's own.

The uniforms of all drafts are looked at, those beyond the accepted length too, and the next step drafts and judges the same
positions again. Were the numbers the same as well, what the first step did not accept would be known to the next one, and
its law would not be the target's. So every step has fresh ones: the draft's offset in the step goes into the counter of its
accept noise, as the index, and of its own noise, by [`draft_domains`][reference.block.draft_domains].

A deterministic drafter, q(x) = 1, needs no residual mass: A_i = p_i (1 - p(x_{i+1})), and the accepted length has the law of
token verification. Left out: several draft paths. Source: Sun et al., "Block verification accelerates speculative decoding"
(2024), algorithm 2.
"""

import numpy as np

from reference import Verdict, greedy, leading_drafts
from reference.philox import Domain, uniform
from reference.probabilistic import draft_log_softmax
from reference.selection import DRAFT, Choice, is_invalid, log_softmax, sample, select


def draft_domains(offset: int) -> tuple[int, int]:
    """Return the domains of the draft that is the step's `offset`-th, counted from 0: new noise for each step.

    >>> draft_domains(0) == DRAFT, draft_domains(2)
    (True, (515, 516))
    """
    block_domain, token_domain = DRAFT
    return block_domain + (offset << 8), token_domain + (offset << 8)


def running_ratio(before, target_prob, draft_prob):
    """Return p_i = min(1, p_{i-1} p(x_i) / q(x_i)), and 0 where p(x_i) or q(x_i) is.

    A draft that did well makes up for one that did badly, before it but not after it:

    >>> running_ratio(0.25, 0.75, 0.25), running_ratio(1, 0.75, 0.25)
    (0.75, 1)
    """
    if target_prob == 0 or draft_prob == 0:
        return 0
    return min(1, before * target_prob / draft_prob)


def residual_mass(ratio, target_probs, draft_probs):
    """Return A_i = sum max(0, p_i p - q), of the row after i drafts.

    >>> float(residual_mass(0.5, np.array([0.75, 0.25]), np.array([0.25, 0.75])))
    0.125
    """
    return np.maximum(0, ratio * target_probs - draft_probs).sum()


def residual(ratio, target_probs, draft_probs):
    """Return max(0, p_i p - q), normalised; p itself where nothing is left.

    >>> p, q = np.array([0.5, 0.375, 0.125]), np.array([0.125, 0.125, 0.75])
    >>> residual(0.5, p, q).round(6).tolist()
    [0.666667, 0.333333, 0.0]
    """
    weights = np.maximum(0, ratio * target_probs - draft_probs)
    total = weights.sum()
    return weights / total if total > 0 else target_probs


def acceptance_probability(ratio, mass):
    """Return h_i = A_i / (A_i + 1 - p_i), with 0/0 = 1. It is never above p_i.

    >>> acceptance_probability(0.5, 0.125), acceptance_probability(1, 0.0)
    (0.2, 1)
    """
    return 1 if ratio == 1 else mass / (mass + 1 - ratio)


def log_critical_ratio(log_uniform: float, target_probs, draft_probs) -> float:
    """Return the logarithm of the running ratio from which on the drafts before a row are accepted: h(c) = u.

    h(c) >= u iff (1 - u) sum max(0, c p - q) >= u (1 - c). That sum is the largest c P(S) - Q(S) of any set S of tokens, so
    iff c >= (u + (1 - u) Q(S)) / (u + (1 - u) P(S)) for some S, and the best S are those of the tokens with the least q/p.

    >>> c = np.exp(log_critical_ratio(np.log(0.2), np.array([0.75, 0.25]), np.array([0.25, 0.75])))
    >>> round(float(c), 12)
    0.5
    """
    u = np.exp(log_uniform)
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(draft_probs / target_probs)  # what is impossible goes to the end
    target_sums, draft_sums = (np.cumsum([0.0, *probs[order]]) for probs in (target_probs, draft_probs))
    return float(np.log(((u + (1 - u) * draft_sums) / (u + (1 - u) * target_sums)).min()))


def accepts(log_uniform: float, log_ratio: float, next_row=None) -> Choice:
    """Decide whether to accept so many drafts: log eta <= log h.

    The margin is that of the running ratio: how far log p_i may move before the decision falls the other way.

    Args:
        log_uniform: log eta_i.
        log_ratio: log p_i before it was cut at 0, which tells how far that is from being less.
        next_row: (p, q) of the row after them, or None if there are no drafts after them.

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
    target_logits, draft_token_ids, draft_logits=None, *, temperature: float = 1.0, seed: int = 0, position: int = 0
) -> Verdict:
    """Accept the longest block of drafts that stands; then emit a recovered or a bonus token.

    Args:
        target_logits: [num_draft_tokens + 1, vocab] raw logits.
        draft_token_ids: [num_draft_tokens] ids; the first -1 ends them.
        draft_logits: [num_draft_tokens, vocab] raw logits that the drafts were drawn from, or None for a deterministic
            drafter. Scaled by the same temperature.
        temperature: 0 is greedy.
        seed: the request's seed.
        position: absolute position of the first draft token.

    The target rows that decided a token are those of the tokens emitted; the flag for invalid ones looks at no others.

    >>> target = np.log([[0.2, 0.8], [0.9, 0.1], [0.5, 0.5]])
    >>> draft = np.log([[0.5, 0.5], [0.3, 0.7]])
    >>> verify(target, [0, 0], draft, seed=1).token_ids  # 0.2 / 0.5, times 0.9 / 0.3: 1.2 stands
    [0, 0, 0]
    >>> verify(target, [0, 1], draft, seed=1).token_ids  # 0.4 * 0.1 / 0.7; row 0 leaves token 1
    [1]
    """
    if temperature == 0:
        return greedy.verify(target_logits, draft_token_ids)
    vocab_size = len(target_logits[0])
    drafts = leading_drafts(draft_token_ids, vocab_size)
    log_ratios, rows = [0.0], []
    for offset, token in enumerate(drafts):
        target_logprobs = log_softmax(target_logits[offset], temperature)
        draft_logprobs = draft_log_softmax(draft_logits, offset, token, vocab_size, temperature)
        rows.append((np.exp(target_logprobs), np.exp(draft_logprobs)))
        if target_logprobs[token] == -np.inf or draft_logprobs[token] == -np.inf:
            break  # a running ratio of 0 stays there: neither this draft nor any after it can stand
        log_ratios.append(min(0.0, log_ratios[-1]) + target_logprobs[token] - draft_logprobs[token])

    accepted, margin = 0, np.inf
    for count in range(len(log_ratios) - 1, 0, -1):
        log_uniform = np.log(uniform(seed, position + count - 1, count - 1, Domain.ACCEPT))
        stands = accepts(log_uniform, log_ratios[count], rows[count] if count < len(drafts) else None)
        margin = min(margin, stands.margin)
        if stands.index:
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
    return Verdict([*drafts[:accepted], emitted.index], min(margin, emitted.margin), invalid)
