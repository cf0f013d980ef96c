"""Greedy in Triton: maxima of raw logits, no softmax.

Greedy is the point mass on the first largest logit. So is, at any temperature, a row whose largest logit is not finite.
"""

import triton
import triton.language as tl

from specdecode.kernels.rows import BLOCK_SIZE, load_logits, tokens_of


@triton.jit
def point_mass(row, maxima, peak, ALIGNMENT: tl.constexpr):
    """Return the first token of a row with its largest logit, reading the first block that has it."""
    block = tl.argmax((maxima == peak).to(tl.int32), 0)
    logits = load_logits(row, tokens_of(block), True, ALIGNMENT)
    return block * BLOCK_SIZE + tl.argmax((logits == peak).to(tl.int32), 0)
