"""Greedy in Triton: the first largest raw logit, no softmax.

The block with the maximum is known from the statistics, and only that block is read again: 2 KB of bfloat16. A tie goes
to the first block with the maximum, and to its first token with the maximum.
"""

import triton
import triton.language as tl

from specdecode.kernels.rows import BLOCK_SIZE, load_logits, tokens_of


@triton.jit
def argmax(row, block_max, row_max):
    """Return the first token of a row whose logit is the row's maximum."""
    block = tl.argmax((block_max == row_max).to(tl.int32), 0)
    logits = load_logits(row, tokens_of(block), True)
    return block * BLOCK_SIZE + tl.argmax((logits == row_max).to(tl.int32), 0)
