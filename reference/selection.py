"""Selection: draw a token with a probability proportional to its weight, by two-level Gumbel-max.

*Gumbel-max.* Let w(v) >= 0 be the weights of the tokens and W their sum. Let the E(v) be independent exponential numbers of
mean 1. Then G(v) = -log E(v) is a standard Gumbel number. Take the token with the largest log w + G. It is token v with
probability w(v) / W.

Proof. log w(v) + G(v) = -log(E(v) / w(v)) is largest where E(v) / w(v) is smallest. Read E(v) / w(v) as the time of token
v in an *exponential race*. It is later than t with probability P(E(v) > w(v) t) = exp(-w(v) t), so it has the density
w(v) exp(-w(v) t). Token v wins at time t if all others are later. So it wins with probability

    integral of w(v) exp(-w(v) t) prod_{j != v} exp(-w(j) t) dt = w(v) * integral of exp(-W t) dt = w(v) / W.

The weights need not be normalised. But every token of the vocabulary, 150,000 of them, needs its own random number.

*Two levels* need far fewer. Cut the vocabulary into blocks of consecutive tokens, and let W_b be the sum of w over block b.

1. Take the block b with the largest log W_b + G(b).
2. In that block take the token v with the largest log w(v) + G'(v), where G' is independent of G.

P(v) = (W_b / W) * (w(v) / W_b) = w(v) / W, by the chain rule of probability.

Source: Gumbel-max in Maddison, Tarlow, Minka, "A* sampling" (2014). Ties, which have probability 0, go to the
lowest index. Left out: the random numbers, see [`philox`][reference.philox].
"""

import numpy as np

BLOCK_SIZE = 1024
"""Tokens per block. Seeded tokens depend on it: another size gives other tokens, with the same distribution."""


def select(log_weights, block_gumbels, token_gumbels, block_size: int = BLOCK_SIZE) -> int:
    """Draw one token with a probability proportional to its weight.

    Args:
        log_weights: [vocab] log w, -inf for weight 0; at least one is finite.
        block_gumbels: [blocks] G(b).
        token_gumbels: [vocab] G'(v); only the selected block's are used.
        block_size: tokens per block.

    Blocks of two tokens have the weights 3 and 7. log 3 + 1.2 = 2.3 is more than log 7 + 0.1 = 2.0: block 0. In it,
    log 1 + 0.9 = 0.9 is more than log 2 + 0.1 = 0.8: token 0.

    >>> select(np.log([1.0, 2.0, 3.0, 4.0]), np.array([1.2, 0.1]), np.array([0.9, 0.1, 5.0, 5.0]), block_size=2)
    0
    """
    block = gumbel_max(log_block_sums(log_weights, block_size), block_gumbels)
    token_ids = np.arange(len(log_weights))[block * block_size :][:block_size]
    return int(token_ids[gumbel_max(log_weights[token_ids], token_gumbels[token_ids])])


def gumbel_max(log_weights, gumbels) -> int:
    """Return the index of the largest log w + G.

    >>> gumbel_max(np.log([0.5, 0.3, 0.2]), np.array([0.0, 0.9, 0.2]))  # -0.69, -0.30, -1.41
    1
    """
    return int(np.argmax(log_weights + gumbels))


def log_block_sums(log_weights, block_size: int = BLOCK_SIZE):
    """Return log W_b of each block; the last block may be shorter.

    >>> np.exp(log_block_sums(np.log([1.0, 2.0, 3.0, 4.0, 5.0]), block_size=2)).round(12).tolist()
    [3.0, 7.0, 5.0]
    """
    starts = range(0, len(log_weights), block_size)
    return np.array([log_sum(log_weights[start : start + block_size]) for start in starts])


def log_sum(log_weights) -> float:
    """Return log(sum(exp(log_weights))), which is -inf if every weight is 0.

    >>> round(float(np.exp(log_sum(np.log([0.25, 0.5])))), 12)
    0.75
    """
    largest = log_weights.max()
    return -np.inf if largest == -np.inf else float(largest + np.log(np.exp(log_weights - largest).sum()))
