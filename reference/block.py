"""Block verification: decide on the drafts together, not one by one.

Token verification stops at the first draft that it rejects. It ignores the drafts after that one, although they may be so
much more likely under p than under q that the drafts before them need not be rejected. Block verification uses all
drafts: it computes a *running ratio*. Count drafts from 0: x_0 ... x_{K-1}. Let p and q be the distributions given the
text and the drafts so far. Start with c_0 = 1, and after draft x_i let

    c_{i+1} = min(1, c_i p(x_i) / q(x_i)).

Let A_i = sum_v max(0, c_i p(v) - q(v)), of the row after i drafts, and

    h_i = A_i / (A_i + 1 - c_i)  for i < K,  h_K = c_K.

1. For each i from 1 to K draw a uniform number eta_i. Accept tau drafts, where tau is the largest i with eta_i <= h_i, or
   0 if there is none. A failure at i does not stop the search.
2. If tau < K, draw the recovered token from max(0, c_tau p - q), normalised. Otherwise draw the bonus token from p.

Proof. First, P(tau >= i, given the first i drafts) = c_i. For i = K this is h_K = c_K. Suppose that it holds for i + 1. The
next token v is drafted from q, so tau >= i + 1 has the probability

    sum_v q(v) min(1, c_i p(v) / q(v)) = sum_v min(c_i p(v), q(v)) = c_i - A_i.

Otherwise length i is tried, and accepted with probability h_i, since eta_i is independent of the earlier failures. So tau
= i has the probability (1 - c_i + A_i) h_i = A_i, and tau >= i has c_i - A_i + A_i = c_i. (If 1 - c_i + A_i is 0, length
i is never tried and A_i = 0.)

Second, given the first i drafts, tau >= i and the next token is v with the probability

    min(c_i p(v), q(v)) + max(0, c_i p(v) - q(v)) = c_i p(v):

either v is the next draft and tau >= i + 1, or tau = i and v is the recovered token. (For i = K it is the bonus token.)
So if the first i tokens of the output are accepted drafts, the next one is distributed as p. If one of them was recovered,
the target alone has gone on, with tokens from p too. By induction the output is exact.

No method accepts more drafts on average, if it is exact, sees one draft path drawn from q, and emits one token after the
accepted drafts. The site has that proof.

Two rules about the random numbers. A step's numbers must be independent of earlier emitted tokens: since this method looks
at all drafts, numbers that decided about drafts after tau must not be used again for the same positions
([`draft_domains`][reference.philox.draft_domains]). And K is the request's own number of drafts.

For a deterministic drafter, q(x) = 1, no sum is needed: A_i = c_i (1 - p(x_i)), and the number of accepted drafts
has the same distribution as in token verification. Source: Sun et al., "Block verification accelerates speculative
decoding" (2024), algorithm 2, where drafts count from 1 and c_i is called p_i. Left out: several draft paths.
"""

import numpy as np


def verify(target_probs, draft_probs, draft_token_ids, uniforms):
    """Return the number of accepted drafts, and the distribution that the token after them is drawn from.

    Args:
        target_probs: [num_draft_tokens + 1, vocab] p of each row.
        draft_probs: [num_draft_tokens, vocab] q that each draft was drawn from.
        draft_token_ids: [num_draft_tokens] ids.
        uniforms: [num_draft_tokens] independent random numbers, uniform on (0, 1): eta_1 ... eta_K.

    The drafts 0, 1 have p / q = 1/2 and 3, so c_1 = 1/2 and c_2 = min(1, 3/2) = 1: always accepted, though eta_1 is large.
    The drafts 0, 0 have c_2 = 1/4, which is below eta_2. Then h_1 decides: c_1 p - q = (-0.6, 0.1), so A_1 = 0.1 and
    h_1 = 0.1 / (0.1 + 0.5) = 1/6. It is below eta_1, so no draft is accepted. p - q = (-0.4, 0.4) leaves token 1.

    >>> p, q = np.array([0.4, 0.6]), np.array([0.8, 0.2])
    >>> verify([p, p, p], [q, q], [0, 1], uniforms=[0.9, 0.5])
    (2, array([0.4, 0.6]))
    >>> verify([p, p, p], [q, q], [0, 0], uniforms=[0.9, 0.5])
    (0, array([0., 1.]))
    """
    ratios = [1]
    for target, draft, token in zip(target_probs, draft_probs, draft_token_ids):
        ratios.append(running_ratio(ratios[-1], target[token], draft[token]))
    length = len(draft_token_ids)
    if length == 0 or uniforms[length - 1] <= ratios[length]:
        return length, target_probs[length]
    for i in range(length - 1, 0, -1):
        mass = residual_mass(ratios[i], target_probs[i], draft_probs[i])
        if uniforms[i - 1] <= acceptance_probability(ratios[i], mass):
            return i, residual(ratios[i], target_probs[i], draft_probs[i])
    return 0, residual(1, target_probs[0], draft_probs[0])


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


def acceptance_probability(ratio, mass):
    """Return h_i = A_i / (A_i + 1 - c_i), with 0/0 = 1. It is never above c_i.

    >>> acceptance_probability(0.5, 0.125), acceptance_probability(1, 0.0)
    (0.2, 1)
    """
    return 1 if ratio == 1 else mass / (mass + 1 - ratio)


def residual(ratio, target_probs, draft_probs):
    """Return max(0, c_i p - q), normalised, or p itself if c_i p - q is positive nowhere.

    >>> p, q = np.array([0.5, 0.375, 0.125]), np.array([0.125, 0.125, 0.75])
    >>> residual(0.5, p, q).round(6).tolist()
    [0.666667, 0.333333, 0.0]
    """
    weights = np.maximum(0, ratio * target_probs - draft_probs)
    total = weights.sum()
    return weights / total if total > 0 else target_probs
