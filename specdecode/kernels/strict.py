"""Strict in Triton: the target's own seeded sample y at every offset, compared with the draft.

    y = argmax log p(v) + G(v), drawn in two levels as in `selection`        the draft x is accepted iff x = y

So the token after a rejection is y. A decision reads a row's statistics, 8 bytes for each block of 1,024, and again one
block, 2 KB of bfloat16; two in the rare case that the block guessed first is not the selected one.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import target_distribution
from specdecode.kernels.logprobs import normalizer_of
from specdecode.kernels.rows import BLOCK_SIZE
from specdecode.kernels.selection import draw_from_block, load_block, sample_token, select_block
from specdecode.kernels.synthetic import is_scheduled


@triton.jit
def decide_while_reading(context, noise, inputs, workspace, sizes):
    """Return (is the draft accepted, the row's normalizer, the draft).

    Without a schedule, a draft outside the selected block is rejected without drawing y.
    """
    row, p = target_distribution(context, inputs, workspace, sizes)
    if inputs.drafts.rates_ptr is not None:
        accepted = is_scheduled(context, noise.uniform, inputs.drafts)
    elif p.point_mass_token >= 0:
        accepted = context.token == p.point_mass_token
    else:
        block = select_block(p.block_sums, noise.exponentials)
        accepted = block == context.token // BLOCK_SIZE
        if accepted:
            loaded = load_block(row, context, block, inputs.requests.token_domain)
            accepted = context.token == draw_from_block(loaded, block, p.row_max, context.temperature)
    return accepted, normalizer_of(p), context.token


@triton.jit
def decide(context, noise, inputs, workspace, sizes):
    """Return whether a row's draft is accepted, the row's normalizer, and y."""
    token, normalizer = sample_token(context, noise, inputs, workspace, sizes)
    accepted = context.token == token
    if inputs.drafts.rates_ptr is not None:
        accepted = is_scheduled(context, noise.uniform, inputs.drafts)
    return accepted, normalizer, token.to(tl.int64)
