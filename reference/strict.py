"""Strict verification: a draft is accepted if and only if it is the token that the target itself draws at that position.

The target's sample y at each position is a function of its logits, the seed and the position. Accept the draft x if it
equals y. Otherwise reject it and emit y. So the output equals, token for token, the output of plain seeded sampling,
whatever the drafter does. Exactness follows at once.

How often does it accept? If the drafts are drawn independently of y, P(x = y) = sum_j p(j) q(j), which is small. But a
drafter may use the same Gumbel noise as the target. Where p and q are close, the same token then has the largest score
in both: this is the Gumbel coupling. Verification does not need q for it. Let TV be the total variation between p and q.
However x is drawn from q and y from p, the probability that they are equal is at most 1 - TV = sum_j min(p(j), q(j)).
With one block, the Gumbel coupling reaches at least (1 - TV) / (1 + TV). With two levels, a block and then a token in it, it
may be less.

Left out: draft logits, which this method does not use. Source: Daliri, Musco, Suresh, "Coupling without communication and
drafter-invariant speculative decoding" (2024), the protocol of Gumbel sampling.
"""

import numpy as np

from reference import Outcome, greedy, leading_drafts
from reference.selection import is_invalid, sample
from reference.truncation import Sampling, truncate_rows


def match_probabilities(target_weights, draft_weights):
    """Return, for each token j, the probability that target and draft both select j with shared Gumbel noise.

    A Gumbel number is G_i = -log E_i with E_i exponential, so the token with the largest log p(i) + G_i is the one with
    the smallest E_i / p(i) (an exponential race). Token j is selected by both if and only if E_i > E_j max(p(i) / p(j),
    q(i) / q(j)) for every other i. Given E_j, this has probability exp(-E_j sum_{i != j} max(...)). Integrated over the
    exponential E_j it is 1 / sum_i max(p(i) / p(j), q(i) / q(j)), where the term of i = j is 1. The weights need not be
    normalised.

    >>> from fractions import Fraction as F
    >>> [str(m) for m in match_probabilities([F(1, 3), F(2, 3)], [F(2, 3), F(1, 3)])]
    ['1/3', '1/3']
    """
    pairs = list(zip(target_weights, draft_weights))
    return [1 / sum(max(p / pj, q / qj) for p, q in pairs) if pj and qj else 0 * pj for pj, qj in pairs]


def match_probability(target_probs, draft_probs, block_size: int | None = None):
    """Return the probability that strict verification accepts a draft that was drawn with the same noise.

    With one block this is the sum of `match_probabilities`. With two-level selection both must first select the same
    block, and then the same token in it. The two levels use independent noise, so their probabilities multiply.

    >>> from fractions import Fraction as F
    >>> str(match_probability([F(1, 3), F(2, 3)], [F(2, 3), F(1, 3)]))
    '2/3'
    >>> third = F(1, 3)    # TV = 1/3: with one block 1/2 is the least possible, with two levels it may be less
    >>> [str(match_probability([third, third, 0, third], [third, 0, third, third], size)) for size in (4, 2)]
    ['1/2', '1/3']
    """
    size = block_size or len(target_probs)
    starts = range(0, len(target_probs), size)
    blocks = [(list(target_probs[s : s + size]), list(draft_probs[s : s + size])) for s in starts]
    same_block = match_probabilities([sum(p) for p, _ in blocks], [sum(q) for _, q in blocks])
    return sum(match * sum(match_probabilities(p, q)) for match, (p, q) in zip(same_block, blocks) if match)


def verify(
    target_logits,
    draft_token_ids,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> Outcome:
    """Accept drafts while each is the target's own sample; then emit the target's own sample.

    Args:
        target_logits: [num_draft_tokens + 1, vocab] raw logits.
        draft_token_ids: [num_draft_tokens] ids; the first -1 ends them.
        temperature: 0 is greedy.
        top_k: see [`truncation`][reference.truncation].
        top_p: likewise.
        min_p: likewise.
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
    target_logits, margins = truncate_rows(target_logits, Sampling(temperature, top_k, top_p, min_p))
    drafts = leading_drafts(draft_token_ids, vocab_size=len(target_logits[0]))
    emitted, margin, invalid = [], np.inf, False
    for offset, row in enumerate(target_logits):
        token = sample(row, temperature=temperature, seed=seed, position=position + offset)
        emitted.append(token.index)
        margin = min(margin, margins[offset], token.margin)
        invalid |= is_invalid(row)
        if offset == len(drafts) or drafts[offset] != token.index:
            break
    return Outcome(emitted, margin, invalid)
