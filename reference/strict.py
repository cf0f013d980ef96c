"""Strict verification: a draft stands iff it is the token that the target itself draws there.

The target's sample y at each position is a function of its logits, the seed and the position. Accept the draft x iff
x = y, and on a mismatch emit y. So the output is, token for token, what plain seeded sampling would have said, whatever
the drafter does; exactness needs no further proof.

How often does it accept? With drafts drawn independently of y, P(x = y) = sum_j p_j q_j, which is poor. But a drafter may
use the same Gumbel noise as the target: where p and q are close, the same token wins both races. That is the Gumbel
coupling, and needs no look at q when verifying. With TV the total variation between p and q, it accepts with probability
1 - TV = sum_j min(p_j, q_j) at most, the best that anything can do, and in a single race with (1 - TV) / (1 + TV) at least;
a race of blocks followed by one of tokens may do worse.

Left out: draft logits, which are of no use here. Source: Daliri, Musco, Suresh, "Coupling without communication and
drafter-invariant speculative decoding" (2024), algorithm 2 and theorem 2.
"""

import numpy as np

from reference import Verdict, greedy, leading_drafts
from reference.selection import is_invalid, sample


def match_probabilities(target_weights, draft_weights):
    """Return, for each token j, the probability that target and draft both pick j from shared Gumbel noise.

    Gumbel-max is a race: with G_i = -log E_i and E_i exponential, the largest log p_i + G_i is the earliest arrival
    E_i / p_i. Token j wins both races iff E_i > E_j max(p_i / p_j, q_i / q_j) for every other i. Given E_j that has
    probability exp(-E_j sum_{i != j} max(...)); integrated over E_j it is 1 / sum_i max(p_i / p_j, q_i / q_j), where i = j
    adds the 1. The weights need not be normalised.

    >>> from fractions import Fraction as F
    >>> [str(m) for m in match_probabilities([F(1, 3), F(2, 3)], [F(2, 3), F(1, 3)])]
    ['1/3', '1/3']
    """
    pairs = list(zip(target_weights, draft_weights))
    return [1 / sum(max(p / pj, q / qj) for p, q in pairs) if pj and qj else 0 * pj for pj, qj in pairs]


def match_probability(target_probs, draft_probs, block_size: int | None = None):
    """Return the probability that strict verification accepts a draft which shares its noise.

    With one block this is the sum of `match_probabilities`. With two-level selection both must first pick the same block,
    and then the same token in it, by two independent couplings.

    >>> from fractions import Fraction as F
    >>> str(match_probability([F(1, 3), F(2, 3)], [F(2, 3), F(1, 3)]))
    '2/3'
    >>> third = F(1, 3)    # TV = 1/3; in a single race 1/2 is the least that can be, in two levels it is not:
    >>> [str(match_probability([third, third, 0, third], [third, 0, third, third], size)) for size in (4, 2)]
    ['1/2', '1/3']
    """
    size = block_size or len(target_probs)
    starts = range(0, len(target_probs), size)
    blocks = [(list(target_probs[s : s + size]), list(draft_probs[s : s + size])) for s in starts]
    same_block = match_probabilities([sum(p) for p, _ in blocks], [sum(q) for _, q in blocks])
    return sum(match * sum(match_probabilities(p, q)) for match, (p, q) in zip(same_block, blocks) if match)


def verify(target_logits, draft_token_ids, *, temperature: float = 1.0, seed: int = 0, position: int = 0) -> Verdict:
    """Accept drafts while each is the target's own sample; then emit the target's own sample.

    Args:
        target_logits: [num_draft_tokens + 1, vocab] raw logits.
        draft_token_ids: [num_draft_tokens] ids; the first -1 ends them.
        temperature: 0 is greedy.
        seed: the request's seed.
        position: absolute position of the first draft token.

    >>> rows = np.log([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    >>> plain = [sample(row, seed=4, position=10 + i).index for i, row in enumerate(rows)]
    >>> plain, verify(rows, plain[:2], seed=4, position=10).token_ids
    ([1, 1, 1], [1, 1, 1])
    >>> verify(rows, [1, 0], seed=4, position=10).token_ids
    [1, 1]
    """
    if temperature == 0:
        return greedy.verify(target_logits, draft_token_ids)
    drafts = leading_drafts(draft_token_ids, vocab_size=len(target_logits[0]))
    emitted, margin, invalid = [], np.inf, False
    for offset, row in enumerate(target_logits):
        token = sample(row, temperature=temperature, seed=seed, position=position + offset)
        emitted.append(token.index)
        margin = min(margin, token.margin)
        invalid |= is_invalid(row)
        if offset == len(drafts) or drafts[offset] != token.index:
            break
    return Verdict(emitted, margin, invalid)
