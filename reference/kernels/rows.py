"""Rows in Triton: reading a row of logits, 1,024 tokens at a time, and its statistics.

With l the logits of a row and T the temperature, log p(x) = l_x / T - log(sum of exp(l_v / T)). The probabilities are
never written: a row of logits and one more number define the distribution.
"""

import triton
import triton.language as tl

BLOCK_SIZE = tl.constexpr(1024)
"""Tokens of a block. Seeded tokens depend on it."""
MAX_BLOCKS = tl.constexpr(256)
"""At least the number of a row's blocks; a power of two, as Triton's vectors require."""
NOTHING = tl.constexpr(-1e30)
"""The logarithm of an empty sum: effectively -inf, but finite, so that differences of two are not NaN."""


@triton.jit
def load_block(row_ptr, block, vocab_size):
    """Return one block of a row, [1,024], -inf beyond the vocabulary."""
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
    """Return log(sum(exp(l / T))) of a row, read by one program."""
    total = NOTHING
    for block in range(tl.cdiv(vocab_size, BLOCK_SIZE)):
        added = log_sum(load_block(row_ptr, block, vocab_size) / temperature)
        largest = tl.maximum(total, added)
        total = largest + tl.log(tl.exp(total - largest) + tl.exp(added - largest))
    return total


@triton.jit
def load_per_block(values_ptr, row, vocab_size):
    """Return the first launch's result for each block of a row, [MAX_BLOCKS], -inf beyond the last block."""
    num_blocks, blocks = tl.cdiv(vocab_size, BLOCK_SIZE), tl.arange(0, MAX_BLOCKS)
    return tl.load(values_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-float("inf"))


@triton.jit
def load_row(rows, row, size, temperature):
    """Return a row's pointer, size, and log(sum(exp(l / T))); a row of size 0 stands for q = 0.

    `rows` are the logits of all rows, and their block sums or None.
    """
    rows_ptr, sums_ptr = rows
    if sums_ptr is None:
        total = log_row_sum(rows_ptr + row * size, size, temperature)
    else:
        total = log_sum(load_per_block(sums_ptr, row, size))
    return rows_ptr + row * size, size, total


@triton.jit
def log_prob(row, token, temperature):
    """Return log p(x), and 0 if x is -1."""
    row_ptr, _, total = row
    return tl.where(token >= 0, tl.load(row_ptr + token, mask=token >= 0, other=0.0) / temperature - total, 0.0)
