"""Synthetic acceptance, the text-book version: accept drafts at a chosen rate, whatever the models say.

Load tests want a serving system to behave as if its drafter had a given acceptance rate. So the verdict on each draft
is drawn from a schedule instead of from the models. A draft only counts if all before it were accepted too, which
leaves two rates for position i (counted from 0) of K:

    conditional   c_i   accepted, given that the drafts before it were
    joint         J_i = c_0 * c_1 * ... * c_i, all drafts through i accepted

The number of accepted drafts exceeds i with probability J_i, so its mean is the sum of the J_i. The acceptance rate
that a benchmark reports, accepted / drafted tokens, is therefore the mean of the joint rates; the acceptance length,
emitted tokens per step, is 1 plus their sum.

Left out: batches, argument checks, and any claim about the text that comes out. It is not the target model's.

Sources: vLLM pull request 38045 for the base rate and decay; llama.cpp for the constant rate (decay 1); vLLM's
acceptance-length option for `minimum_variance`.
"""

import numpy as np

from reference import Verdict, greedy, leading_drafts, probabilistic
from reference.philox import Domain, uniform
from reference.selection import is_invalid, log_softmax, sample


def conditional_rates(base_rate, decay, num_draft_tokens):
    """The conditional rate starts at the base rate and decays from position to position: c_i = a d^i.

    >>> conditional_rates(0.8, 0.5, 3).tolist()
    [0.8, 0.4, 0.2]
    """
    return base_rate * decay ** np.arange(num_draft_tokens, dtype=np.float64)


def joint_rates(conditional):
    """All drafts through i are accepted with the product of the conditional rates through i.

    With c_i = a d^i that is a^(i+1) d^(0+1+...+i) = a^(i+1) d^(i(i+1)/2).

    >>> joint_rates([0.5, 0.25, 0.5]).tolist()
    [0.5, 0.125, 0.0625]
    """
    return np.cumprod(conditional)


def conditional_from_joint(joint):
    """Back from joint to conditional rates: c_i = J_i / J_{i-1}, where J_{-1} = 1 and 0/0 = 0.

    >>> conditional_from_joint([0.5, 0.125, 0.0, 0.0]).tolist()
    [0.5, 0.25, 0.0, 0.0]
    """
    joint = np.asarray(joint, dtype=np.float64)
    before = np.concatenate([[1.0], joint[:-1]])
    return np.divide(joint, before, out=np.zeros_like(joint), where=before > 0)


def mean_rate(base_rate, decay, num_draft_tokens):
    """M(a, d), the mean of the joint rates: accepted / drafted tokens.

    With K = 2 it is (a + a^2 d) / 2; here (1/2 + 1/4 * 1/2) / 2.

    >>> mean_rate(0.5, 0.5, 2)
    0.3125
    """
    return float(np.mean(joint_rates(conditional_rates(base_rate, decay, num_draft_tokens))))


def acceptance_length(joint):
    """Mean emitted tokens per step: the accepted drafts, then one recovered or bonus token.

    >>> acceptance_length([0.5, 0.25])
    1.75
    """
    return 1.0 + float(np.sum(joint))


def solve(rate, num_draft_tokens, min_decay=0.85):
    """Find (base_rate, decay) with M(base_rate, decay) = rate, the mean of the joint rates.

    1. M rises in both arguments. Two unknowns and one equation: prefer the decay `min_decay`.
    2. With that decay the mean goes no higher than M(1, min_decay). If this is enough, solve for the base rate.
    3. If not, the base rate stays at its limit of 1: solve for the decay, between `min_decay` and 1.
    4. If every draft is to be accepted there is nothing to solve: both are 1.

    K = 1 has the mean a, whatever the decay:

    >>> [round(x, 9) for x in solve(0.3, 1)]
    [0.3, 0.85]

    K = 2, decay 1/2, mean 0.3125: (a + a^2/2) / 2 = 0.3125 gives a = 1/2.

    >>> [round(x, 9) for x in solve(0.3125, 2, min_decay=0.5)]
    [0.5, 0.5]

    K = 2, mean 0.9: even a = 1 reaches only (1 + 0.5) / 2 = 0.75 there, but (1 + d) / 2 = 0.9 at d = 0.8.

    >>> [round(x, 9) for x in solve(0.9, 2, min_decay=0.5)]
    [1.0, 0.8]

    The two rates of the pull request, K = 3:

    >>> [round(x, 6) for x in solve(0.24, 3)], [round(x, 6) for x in solve(0.69, 3)]
    ([0.469308, 0.85], [0.90836, 0.85])
    """
    if rate == 1.0:
        return 1.0, 1.0
    if mean_rate(1.0, min_decay, num_draft_tokens) >= rate:
        return _bisect(lambda a: mean_rate(a, min_decay, num_draft_tokens), rate, 0.0), min_decay
    return 1.0, _bisect(lambda d: mean_rate(1.0, d, num_draft_tokens), rate, min_decay)


def _bisect(rising, goal, low):
    """The x in [low, 1] at which a rising function meets its goal: halve the interval 60 times.

    >>> round(_bisect(lambda x: x * x, 0.25, 0.0), 12)
    0.5
    """
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < goal:
            low = middle
        else:
            high = middle
    # The goal may lie at either end of the interval, which halving only approaches.
    return min((low, high), key=lambda x: abs(rising(x) - goal))


def minimum_variance(length, num_draft_tokens):
    """Joint rates of the given mean length that vary least: 1 for floor(L - 1) positions, the fraction, then 0.

    Each step then accepts floor(L - 1) drafts or one more, and no law on whole numbers with that mean varies less.

    >>> minimum_variance(2.5, 3).tolist()
    [1.0, 0.5, 0.0]
    """
    accepted = length - 1.0
    return np.clip(accepted - np.arange(num_draft_tokens), 0.0, 1.0)


def verify(
    target_logits,
    draft_token_ids,
    draft_logits=None,
    *,
    conditional_rates,
    temperature: float = 1.0,
    seed: int = 0,
    position: int = 0,
) -> Verdict:
    """Accept the draft at offset i iff u_i <= c_i; then emit what the method that is imitated would emit there.

    With draft logits that method is probabilistic, which draws a recovered token from the residual; without, it is strict,
    which emits the target's own sample. Temperature 0 is greedy and emits the argmax. After all drafts every method emits
    a bonus token.

    Args:
        target_logits: [num_draft_tokens + 1, vocab] raw logits.
        draft_token_ids: [num_draft_tokens] ids; the first -1 ends them.
        draft_logits: [num_draft_tokens, vocab] raw logits that the drafts were drawn from, or None.
        conditional_rates: [num_draft_tokens] c_i.
        temperature: 0 is greedy.
        seed: the request's seed.
        position: absolute position of the first draft token.

    >>> rows = np.zeros((3, 4))
    >>> verify(rows, [1, 2], conditional_rates=[1.0, 0.0], temperature=0.0).token_ids
    [1, 0]
    """
    drafts = leading_drafts(draft_token_ids, vocab_size=len(target_logits[0]))
    margin, offset = np.inf, 0
    while offset < len(drafts):
        with np.errstate(divide="ignore"):
            log_rate = np.log(conditional_rates[offset])
        log_uniform = np.log(uniform(seed, position + offset, 0, Domain.ACCEPT))
        accepted = probabilistic.accepts(log_uniform, log_rate, 0.0)
        margin = min(margin, accepted.margin)
        if not accepted.index:
            break
        offset += 1

    row, where = target_logits[offset], {"seed": seed, "position": position + offset}
    if temperature == 0:
        emitted = greedy.argmax(row)
    elif offset == len(drafts) or draft_logits is None:
        emitted = sample(row, temperature=temperature, **where)
    else:
        logprobs = log_softmax(row, temperature), log_softmax(draft_logits[offset], temperature)
        emitted = probabilistic.recover(*logprobs, **where)
    invalid = any(is_invalid(read) for read in target_logits[: offset + 1])
    return Verdict([*drafts[:offset], emitted.index], min(margin, emitted.margin), invalid)
