"""Rows in Triton: a row of logits is read 1,024 tokens at a time, and log(sum of exp(l_v / T)) is computed.

With l the logits of a row and T the temperature, log p(x) = l_x / T - log(sum of exp(l_v / T)). Probabilities are never
written: the logits and the logarithm of this sum define the distribution.
"""

import triton
import triton.language as tl

BLOCK_SIZE = tl.constexpr(1024)
"""The number of tokens in a block. The tokens that a seed draws depend on it."""
MAX_BLOCKS = tl.constexpr(256)
"""The most blocks of a row; a power of two, as Triton's vectors require."""
NOTHING = tl.constexpr(-1e30)
"""The logarithm of an empty sum: effectively -inf, but finite, so that differences of two are not NaN."""


@triton.jit
def load_block(row_ptr, block, vocab_size):
    """Return the logits of a block of a row, [1,024], -inf beyond the vocabulary."""
    token_ids = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    return tl.load(row_ptr + token_ids, mask=token_ids < vocab_size, other=-float("inf"))


@triton.jit
def log_sum(log_weights):
    """Return log(sum(exp(log_weights))) of a vector, -1e30 if all weights are 0.

    The largest term is factored out, so nothing overflows, and the remaining sum is at least 1, unless all weights are 0.
    """
    largest = tl.maximum(tl.max(log_weights, 0), NOTHING)
    return largest + tl.log(tl.maximum(tl.sum(tl.exp(log_weights - largest), 0), 1e-30))


@triton.jit
def log_row_sum(row_ptr, vocab_size, temperature):
    """Return log(sum(exp(l / T))) of a row, in one program that reads the whole row."""
    total = NOTHING
    for block in range(tl.cdiv(vocab_size, BLOCK_SIZE)):
        added = log_sum(load_block(row_ptr, block, vocab_size) / temperature)
        largest = tl.maximum(total, added)
        total = largest + tl.log(tl.exp(total - largest) + tl.exp(added - largest))
    return total


@triton.jit
def load_per_block(values_ptr, row, vocab_size):
    """Return the number that the first launch stored for each block of a row, [MAX_BLOCKS], -inf beyond the last block."""
    num_blocks, blocks = tl.cdiv(vocab_size, BLOCK_SIZE), tl.arange(0, MAX_BLOCKS)
    return tl.load(values_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-float("inf"))


@triton.jit
def row_statistics(rows, row, size, temperature):
    """Return (pointer, size, log(sum(exp(l / T)))) of a row; size 0 makes its probabilities 0.

    `rows` is a pointer to the logits of all rows, and a pointer to the logarithms of their block sums, or None.
    """
    rows_ptr, sums_ptr = rows
    if sums_ptr is None:
        total = log_row_sum(rows_ptr + row * size, size, temperature)
    else:
        total = log_sum(load_per_block(sums_ptr, row, size))
    return rows_ptr + row * size, size, total


@triton.jit
def log_prob(row, token, temperature):
    """Return log p(x), or 0 if x is -1; `row` comes from `row_statistics`."""
    row_ptr, _, total = row
    return tl.where(token >= 0, tl.load(row_ptr + token, mask=token >= 0, other=0.0) / temperature - total, 0.0)
