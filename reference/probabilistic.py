"""Probabilistic verification: accept by likelihood ratio, and after a rejection draw from the residual.

The draft x was drawn from q. The output must be distributed as p.

1. Accept x with probability min(1, p(x) / q(x)). Go on with the next draft and the next row.
2. After a rejection, draw the *recovered* token from the residual, which is proportional to max(0, p - q).
3. If every draft was accepted, draw a *bonus* token from p of the last row.

Proof for one draft. Token v is emitted as an accepted draft with probability q(v) min(1, p(v) / q(v)) = min(p(v), q(v)).
A rejection has probability Z = 1 - sum min(p, q) = sum max(0, p - q), and then v is emitted with probability
max(0, p(v) - q(v)) / Z. In all, v is emitted with probability min(p(v), q(v)) + max(0, p(v) - q(v)) = p(v): the output is
exact for every p and q. For several drafts apply this along the chain: p and q of row i are given the text and the drafts
before, and after a rejection the target alone goes on. No exact method accepts a single draft drawn from q more often,
because a token v that is both drafted and emitted has probability min(p(v), q(v)) at most.

The proof multiplies the probabilities of the draft, of the accept decision and of the recovered token. So their random
numbers must be independent.

A deterministic drafter (n-gram look-up, greedy) is the point mass q(x) = 1. Then x is accepted with probability p(x), and
the residual is p without x, normalised. If the draft model lacks some of the target's tokens, q(v) = 0 for them, and
nothing else changes.

Sources: Leviathan, Kalman, Matias (2023), algorithm 1; Chen et al., "Accelerating large language model decoding with
speculative sampling" (2023), algorithm 2. Left out: drafting several candidates per position.
"""

import numpy as np


def verify(target_probs, draft_probs, draft_token_ids, uniforms):
    """Return the number of accepted drafts, and the distribution that the token after them is drawn from.

    Args:
        target_probs: [num_draft_tokens + 1, vocab] p of each row.
        draft_probs: [num_draft_tokens, vocab] q that each draft was drawn from.
        draft_token_ids: [num_draft_tokens] ids.
        uniforms: [num_draft_tokens] independent random numbers, uniform on (0, 1).

    Draft 0 has p / q = 2.5 and is always accepted. Draft 2 has p / q = 1/3: accepted iff its u is at most 1/3. After a
    rejection p - q = (0.3, 0.1, -0.4), so the residual is (3/4, 1/4, 0).

    >>> p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    >>> count, probs = verify([p, p, p], [q, q], [0, 2], uniforms=[0.9, 0.5])
    >>> count, probs.round(6).tolist()
    (1, [0.75, 0.25, 0.0])
    >>> count, probs = verify([p, p, p], [q, q], [0, 2], uniforms=[0.9, 0.3])
    >>> count, probs.tolist()
    (2, [0.5, 0.3, 0.2])
    """
    for offset, (token, uniform) in enumerate(zip(draft_token_ids, uniforms)):
        target, draft = target_probs[offset], draft_probs[offset]
        if uniform > acceptance_probability(target[token], draft[token]):
            return offset, residual(target, draft)
    return len(draft_token_ids), target_probs[len(draft_token_ids)]


def acceptance_probability(target_prob, draft_prob):
    """Return min(1, p(x) / q(x)), and 0 if p(x) or q(x) is 0.

    >>> [acceptance_probability(p, q) for p, q in ((0.2, 0.5), (0.5, 0.2), (0.5, 0.0))]
    [0.4, 1, 0]
    """
    if target_prob == 0 or draft_prob == 0:
        return 0
    return min(1, target_prob / draft_prob)


def residual(target_probs, draft_probs):
    """Return max(0, p - q), normalised, or p itself if p - q is positive nowhere.

    >>> residual(np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.6, 0.3])).tolist()
    [1.0, 0.0, 0.0]
    >>> residual(np.array([0.5, 0.5]), np.array([0.5, 0.5])).tolist()
    [0.5, 0.5]
    """
    weights = np.maximum(0, target_probs - draft_probs)
    total = weights.sum()
    return weights / total if total > 0 else target_probs


def acceptance_rate(target_probs, draft_probs):
    """Return alpha = sum min(p, q), the probability that a draft drawn from q is accepted.

    >>> round(float(acceptance_rate(np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.6, 0.3]))), 12)
    0.6
    """
    return np.minimum(target_probs, draft_probs).sum()


def expected_tokens(alpha, num_draft_tokens: int):
    """Return the mean number of tokens that a step emits if each draft is accepted with probability alpha, independently.

    It is 1 + alpha + ... + alpha^K = (1 - alpha^(K+1)) / (1 - alpha); Leviathan et al. (2023), equation 1.

    >>> round(expected_tokens(0.8, 5), 2)
    3.69
    """
    return sum(alpha**i for i in range(num_draft_tokens + 1))
