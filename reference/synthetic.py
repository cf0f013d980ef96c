"""Synthetic acceptance: accept drafts at chosen rates, regardless of the models.

Load tests need a serving system that behaves as if its drafter had a given acceptance rate. So each draft is accepted
or rejected by a schedule, not by the models. A draft can be accepted only if all drafts before it were accepted. So
there are two rates for position i (counted from 0) of K:

    conditional   a_i   draft i is accepted, given that all drafts before it were accepted
    joint         J_i = a_0 * a_1 * ... * a_i   all drafts through i are accepted

The number of accepted drafts is greater than i with probability J_i, so its mean is the sum of the J_i. Therefore the
acceptance rate that a benchmark reports, accepted / drafted tokens, is the mean of the joint rates, and the acceptance
length, emitted tokens per step, is 1 plus their sum.

The token after the accepted drafts is drawn as the imitated method would: a recovered token from the residual of
[`probabilistic`][reference.probabilistic] verification, or, if it imitates [`strict`][reference.strict] verification, the
target's own token. So a step reads and computes the same as a step of the imitated method. Its output is not distributed
as the target: the method is for measuring speed, not for producing text.

`solve` finds rates a, a d, a d^2, ... whose joint rates a^(i+1) d^(i(i+1)/2) have a given mean, with a wanted decay d if
that can reach the mean, and otherwise with the smallest decay that can. There is exactly one solution. Proof: the mean
M(a, d) rises strictly with a, as J_0 = a does and no other term falls. So for a decay d with M(1, d) at or above the
given mean, exactly one a gives it, by continuity. For K > 1 the largest mean M(1, d) rises strictly with d, up to M(1, 1)
= 1. So if the wanted decay cannot reach the given mean, the smallest that can has M(1, d) equal to it, and with that
decay a = 1.

Sources: vLLM pull request 38045 for the base rate and decay; llama.cpp for the constant rate (decay 1); vLLM's
acceptance-length option for `minimum_variance`.
"""

import numpy as np

from reference.probabilistic import residual


def verify(target_probs, draft_probs, conditional_rates, uniforms):
    """Return the number of accepted drafts, and the distribution that the token after them is drawn from.

    Args:
        target_probs: [num_draft_tokens + 1, vocab] p of each row.
        draft_probs: [num_draft_tokens, vocab] q of each draft; None imitates strict verification, which draws from p.
        conditional_rates: [num_draft_tokens] a_i.
        uniforms: [num_draft_tokens] independent random numbers, uniform on (0, 1).

    The first draft is accepted, as 0.5 is at most 0.9; the second is rejected, as 0.4 is more than 0.3.

    >>> p, q = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    >>> verify([p, p, p], [q, q], conditional_rates=[0.9, 0.3], uniforms=[0.5, 0.4])
    (1, array([1., 0.]))
    >>> verify([p, p, p], None, conditional_rates=[0.9, 0.3], uniforms=[0.5, 0.4])
    (1, array([0.5, 0.5]))
    """
    for offset, (uniform, rate) in enumerate(zip(uniforms, conditional_rates)):
        if uniform > rate:
            target = target_probs[offset]
            return offset, target if draft_probs is None else residual(target, draft_probs[offset])
    return len(uniforms), target_probs[len(uniforms)]


def conditional_rates(base_rate, decay, num_draft_tokens):
    """Return the conditional rates a_i = a d^i: the base rate a, multiplied by the decay d from position to position.

    >>> conditional_rates(0.8, 0.5, 3).tolist()
    [0.8, 0.4, 0.2]
    """
    return base_rate * decay ** np.arange(num_draft_tokens, dtype=np.float64)


def joint_rates(conditional):
    """Return the joint rates J_i = a_0 * a_1 * ... * a_i.

    With a_i = a d^i, J_i = a^(i+1) d^(0+1+...+i) = a^(i+1) d^(i(i+1)/2).

    >>> joint_rates([0.5, 0.25, 0.5]).tolist()
    [0.5, 0.125, 0.0625]
    """
    return np.cumprod(conditional)


def conditional_from_joint(joint):
    """Return the conditional rates a_i = J_i / J_{i-1} of given joint rates, where J_{-1} = 1 and 0/0 = 0.

    >>> conditional_from_joint([0.5, 0.125, 0.0, 0.0]).tolist()
    [0.5, 0.25, 0.0, 0.0]
    """
    joint = np.asarray(joint, dtype=np.float64)
    before = np.concatenate([[1.0], joint[:-1]])
    return np.divide(joint, before, out=np.zeros_like(joint), where=before > 0)


def mean_rate(base_rate, decay, num_draft_tokens):
    """Return M(a, d), the mean of the joint rates: accepted / drafted tokens.

    For K = 2 it is (a + a^2 d) / 2; in the example (1/2 + 1/4 * 1/2) / 2.

    >>> mean_rate(0.5, 0.5, 2)
    0.3125
    """
    return float(np.mean(joint_rates(conditional_rates(base_rate, decay, num_draft_tokens))))


def acceptance_length(joint):
    """Return the mean number of emitted tokens per step: the accepted drafts, and one recovered or bonus token.

    >>> acceptance_length([0.5, 0.25])
    1.75
    """
    return 1.0 + float(np.sum(joint))


def solve(rate, num_draft_tokens, min_decay=0.85):
    """Return (base_rate, decay) with M(base_rate, decay) = rate, where M is the mean of the joint rates.

    1. M increases in both arguments. There are two unknowns and one equation: use the decay `min_decay` if possible.
    2. With that decay the mean is at most M(1, min_decay). If this is enough, solve for the base rate.
    3. If not, the base rate is 1, its maximum. Solve for the decay, between `min_decay` and 1.
    4. If every draft is to be accepted, there is nothing to solve: both are 1.

    For K = 1 the mean is a for every decay:

    >>> [round(x, 9) for x in solve(0.3, 1)]
    [0.3, 0.85]

    K = 2, decay 1/2, mean 0.3125: (a + a^2/2) / 2 = 0.3125 gives a = 1/2.

    >>> [round(x, 9) for x in solve(0.3125, 2, min_decay=0.5)]
    [0.5, 0.5]

    K = 2, mean 0.9: with decay 1/2 even a = 1 gives only (1 + 0.5) / 2 = 0.75, but (1 + d) / 2 = 0.9 for d = 0.8.

    >>> [round(x, 9) for x in solve(0.9, 2, min_decay=0.5)]
    [1.0, 0.8]

    The two rates of vLLM's pull request, K = 3:

    >>> [round(x, 6) for x in solve(0.24, 3)], [round(x, 6) for x in solve(0.69, 3)]
    ([0.469308, 0.85], [0.90836, 0.85])
    """
    if rate == 1.0:
        return 1.0, 1.0
    if mean_rate(1.0, min_decay, num_draft_tokens) >= rate:
        return bisect(lambda a: mean_rate(a, min_decay, num_draft_tokens), rate, 0.0), min_decay
    return 1.0, bisect(lambda d: mean_rate(1.0, d, num_draft_tokens), rate, min_decay)


def bisect(increasing, goal, low):
    """Return the x in [low, 1] at which an increasing function reaches the goal: halve the interval 60 times.

    >>> round(bisect(lambda x: x * x, 0.25, 0.0), 12)
    0.5
    """
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if increasing(middle) < goal:
            low = middle
        else:
            high = middle
    # The solution may be an end of the interval, which the middle never reaches: compare both ends.
    return min((low, high), key=lambda x: abs(increasing(x) - goal))


def minimum_variance(length, num_draft_tokens):
    """Return joint rates with the acceptance length L and the least variance: floor(L - 1) ones, the fraction, then zeros.

    Each step then accepts floor(L - 1) drafts or one more. No distribution on whole numbers with that mean has a smaller
    variance.

    >>> minimum_variance(2.5, 3).tolist()
    [1.0, 0.5, 0.0]
    """
    accepted = length - 1.0
    return np.clip(accepted - np.arange(num_draft_tokens), 0.0, 1.0)
