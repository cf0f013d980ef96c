"""Strict verification: a draft is accepted iff it is the token that the target itself draws at that position.

1. At each row draw the target's own token y, with noise that depends on the position alone.
2. Accept drafts as long as each equals the y of its row. At the first draft that does not, emit y instead. After all
   drafts emit the y of the last row.

So the output equals plain sampling with the same noise, token for token, whatever the drafter does. The proof in
[`greedy`][reference.greedy] applies, with y in place of the argmax. Plain sampling is exact, so strict verification is, too.

How often does it accept? If the drafts are drawn independently of y, P(x = y) = sum_j p(j) q(j), which is small. But a
drafter may draw x from q with the same Gumbel noise as the target draws y from p. Where p and q are close, the same token
then has the largest score in both: this is the *Gumbel coupling*. Verification does not need q for it.

Let TV be the total variation between p and q. For every joint distribution of x ~ q and y ~ p, P(x = y = j) is at most
min(p(j), q(j)), so P(x = y) is at most sum_j min(p(j), q(j)) = 1 - TV. With one Gumbel-max over all tokens the coupling
reaches at least (1 - TV) / (1 + TV). Proof: by `match_probabilities`, P(x = y = j) = 1 / sum_i max(p(i) / p(j), q(i) /
q(j)). Each term is at most max(p(i), q(i)) / min(p(j), q(j)), and sum_i max(p(i), q(i)) = 1 + TV. So P(x = y = j) >=
min(p(j), q(j)) / (1 + TV). Sum over j.

With [two levels][reference.selection], a block and then a token in it, each level has this bound, but their product may
not.

Source: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding" (2024), the
protocol of Gumbel sampling.
"""

from reference.greedy import compare
from reference.selection import gumbel_max


def verify(target_logprobs, draft_token_ids, gumbels) -> list[int]:
    """Return the emitted tokens: the target's own, through the first that differs from the draft at its position.

    Args:
        target_logprobs: [num_draft_tokens + 1, vocab] log p of each row.
        draft_token_ids: [num_draft_tokens] ids, drawn in any way.
        gumbels: [num_draft_tokens + 1, vocab] Gumbel numbers.

    With this noise the target draws token 1, as log p + G is -0.69, -0.30, -1.41, and then token 0:

    >>> import numpy as np
    >>> rows, noise = np.log([[0.5, 0.3, 0.2], [0.8, 0.1, 0.1]]), np.array([[0.0, 0.9, 0.2], [0.1, 0.0, 0.3]])
    >>> verify(rows, [1], noise), verify(rows, [2], noise)
    ([1, 0], [1])
    """
    samples = (gumbel_max(row, noise) for row, noise in zip(target_logprobs, gumbels))
    return compare(samples, draft_token_ids)


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
