"""The residual max(0, p - q) in Triton: weights of tokens, block sums, and the draw of a block.

    max(0, p - q) = p max(0, 1 - q / p)

All block sums would require a second read of both rows. But p bounds every sum, so a few of them suffice to select a
block: `select_residual_block` reads 4 KB (bfloat16) for each block that it sums. Block verification draws from the
residual max(0, c p - q) = c max(0, p - q / c): a `Residual` with log c in its ratio.
"""

import triton
import triton.language as tl

from specdecode.kernels.adjustments import call_out_of_line
from specdecode.kernels.block_bounds import (
    block_of,
    blocks_of,
    keys_of,
    ranked,
    residual_bounds,
    score_of,
    take_top,
    upper_bound,
)
from specdecode.kernels.philox import exponential
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    LOG2_E,
    base_2_scale,
    load_blocks,
    load_logits,
    logits_of,
    scaled,
    tokens_of,
    unpack,
)
from specdecode.kernels.selection import block_scores, select_block
from specdecode.kernels.statistics import sum_blocks, sum_in_order
from specdecode.kernels.values import RequestIndex, exists

NUM_QUEUED, QUEUE_FIELDS = tl.constexpr(0), tl.constexpr(4)
"""The entry of the state that counts the queued residuals, and the fields of a queued residual: the index, row and slot of
its request, and the offset. So summing needs no lookup of the request."""

LN_2 = tl.constexpr(0.6931471805599453)

NONE, ROW = tl.constexpr(-1), tl.constexpr(-2)
"""The part of q that is subtracted from p: NONE, ROW (all of q), or the id of the only token of q, which is >= 0."""


@triton.jit
def shortfall(target, draft, residual, scale):
    """Return 1 - q / p of tokens, negative where there is no residual and 1 where q is NaN; `scale` is log2(e) / T.

    log2(q / p) is computed from the difference of the logits, and 1 - q / p by a series where p and q nearly agree, so that
    the residual keeps its relative precision.
    """
    # An explicit fma: in a * b + c * d the compiler may fuse either product, and kernels would round differently.
    differences = draft - target - (residual.draft_max - residual.row_max)
    return one_minus_exp2(tl.fma(differences, scale, -residual.log_sum_ratio * LOG2_E))


@triton.jit
def one_minus_exp2(x):
    """Return 1 - 2^x, precise near 0 too, and 1 for NaN; for x > 0 only the sign is right."""
    # With y = x ln 2: 1 - exp(y) = -y - y^2 / 2 - y^3 / 6 - ...
    near = x * (-LN_2 - x * (LN_2 * LN_2 / 2 + x * (LN_2 * LN_2 * LN_2 / 6)))
    power = tl.exp2(x)
    # Large positive x take the series too: only its sign is used. The comparison power > 0 replaces NaN by 0.
    return tl.where(x > -1 / 64, near, 1 - tl.where(power > 0, power, 0.0))


@triton.jit
def load_both(inputs, rows, blocks, BLOCK_N: tl.constexpr):
    """Return the given [BLOCKS] blocks of a target row and of a draft row, in the form of `load_blocks`."""
    row, draft_row = rows
    # Load both as pairs or neither, so that lanes align.
    dtype: tl.constexpr = inputs.target.ptr.dtype.element_ty
    draft_dtype: tl.constexpr = inputs.draft.ptr.dtype.element_ty
    BFLOAT16: tl.constexpr = dtype == tl.bfloat16 and draft_dtype == tl.bfloat16
    ALIGNED: tl.constexpr = inputs.target.ALIGNED and inputs.draft.ALIGNED
    IS_ADJUSTED: tl.constexpr = exists(row.adjustments)
    AS_STORED: tl.constexpr = not exists(row.cutoff) and not exists(draft_row.draft_id_of_token) and not IS_ADJUSTED
    PAIRS: tl.constexpr = BFLOAT16 and ALIGNED and AS_STORED
    return load_blocks(row, blocks, PAIRS, BLOCK_N), load_blocks(draft_row, blocks, PAIRS, BLOCK_N)


@triton.jit
def residual_sums(target, draft, residual, temperature):
    """Return the sums of max(0, p - q), relative to p's maximum, over some [BLOCKS] blocks, given their raw logits."""
    scale = base_2_scale(temperature)
    sums = ()
    for part in tl.static_range(len(target)):
        logits, draft_logits = unpack(target[part]), unpack(draft[part])
        added = ()
        for half in tl.static_range(len(logits)):
            weights = tl.exp2((logits[half] - residual.row_max) * scale)
            weights *= shortfall(logits[half], draft_logits[half], residual, scale)
            weights = tl.where(weights > 0, weights, 0.0)
            added = added + (weights if part == 0 else sums[half] + weights,)
        sums = added
    return sum_blocks(sums)


@triton.jit
def queue_residual(request, offset, workspace):
    """Add the residual at an offset of a request to the queue of residuals to sum."""
    fields_ptr = workspace.queue_ptr + tl.atomic_add(workspace.state_ptr + NUM_QUEUED, 1, sem="relaxed") * QUEUE_FIELDS
    tl.store(fields_ptr, request.index)
    tl.store(fields_ptr + 1, request.row)
    tl.store(fields_ptr + 2, request.slot)
    tl.store(fields_ptr + 3, offset.to(tl.int64))


@triton.jit
def load_queued_residual(index, workspace, sizes):
    """Return the request and the offset of a queued residual."""
    fields_ptr = workspace.queue_ptr + index * QUEUE_FIELDS
    request_index, row, slot = tl.load(fields_ptr), tl.load(fields_ptr + 1), tl.load(fields_ptr + 2)
    # An upper bound of the number of drafts is enough: only drafts that exist are queued.
    request = RequestIndex(request_index, row, slot, sizes.num_draft_tokens, sizes.vocab_size)
    return request, tl.load(fields_ptr + 3).to(tl.int32)


@triton.jit
def residual_sums_at(workspace, request, offset, sizes):
    """Return a pointer to the block sums of a draft's residual in the workspace."""
    return workspace.residual_sums_ptr + (request.index * sizes.num_draft_tokens + offset) * sizes.num_blocks


@triton.jit
def load_residual_sums(workspace, request, offset, sizes):
    """Return the block sums of a draft's residual, [MAX_BLOCKS], 0 beyond the last block."""
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    sums_ptr = residual_sums_at(workspace, request, offset, sizes)
    return tl.load(sums_ptr + blocks, mask=blocks < sizes.num_blocks, other=0.0)


@triton.jit
def best_of(target, draft, blocks, context, residual, row, block_domain, BLOCK_N: tl.constexpr):
    """Return the largest score of the given [BLOCKS] loaded blocks as a `ranked` value; 0 if none has a residual."""
    exponentials = exponential(context.key, context.offset, blocks, block_domain)
    sums = residual_sums(logits_of(target, row, blocks, BLOCK_N), draft, residual, context.temperature)
    scores = block_scores(sums, exponentials)
    return tl.max(tl.where(scores > 0, ranked(scores, blocks), 0), 0)


@triton.jit
def select_residual_block(context, exponentials, source, rows, inputs, sizes, config):
    """Draw a block with probability proportional to its residual; return it, or -1 if all residuals round to 0.

    `select_block` on all residual sums gives the same result; here few sums are computed. No residual is more than p, so the
    score of p's block sum bounds a block's score. Blocks are searched in the order of these bounds, until no bound exceeds
    the best score.
    """
    p, residual = source
    row, _ = rows
    block_domain = inputs.requests.block_domain
    bounds = block_scores(residual_bounds(p.block_sums), exponentials)
    keys = keys_of(bounds, sizes)
    if exists(row.cutoff):  # a block without kept tokens has no residual
        keys = tl.where(p.block_sums > 0, keys, -1)
    top, remaining = take_top(keys, config)
    first = blocks_of(top, sizes)
    first_target, first_draft = load_both(inputs, rows, first, config.BLOCK_N)
    # The next blocks are loaded before the search decides whether it needs them.
    largest = tl.max(remaining, 0)
    blocks = blocks_of(largest, sizes)
    target, draft = load_both(inputs, rows, blocks, config.BLOCK_N)
    best = best_of(first_target, first_draft, first, context, residual, row, block_domain, config.BLOCK_N)
    while tl.max(upper_bound(largest, sizes), 0) > score_of(best):
        remaining = tl.where(remaining == largest[None, :], -1, remaining)
        next_largest = tl.max(remaining, 0)
        next_blocks = blocks_of(next_largest, sizes)
        next_target, next_draft = load_both(inputs, rows, next_blocks, config.BLOCK_N)
        this = best_of(target, draft, blocks, context, residual, row, block_domain, config.BLOCK_N)
        best = tl.maximum(best, this)
        largest, blocks, target, draft = next_largest, next_blocks, next_target, next_draft
    return tl.where(best > 0, block_of(best), -1)


@triton.jit
def select_summed_block(context, exponentials, workspace, sizes):
    """Draw a block from the residual's block sums in the workspace; return it, -1 if all are 0."""
    sums = load_residual_sums(workspace, context.request, context.offset, sizes)
    return tl.where(tl.max(sums, 0) > 0, select_block(sums, exponentials), -1)


@triton.jit
def block_sums_without(token, p, row, temperature, inputs, sizes):
    """Return the block sums of p without one token."""
    if inputs.draft.ptr is not None:  # rare: q is a point mass although it has logits
        rest = call_out_of_line(weight_of_block_without, row, (token, p.row_max, temperature), sizes)
    else:
        rest = weight_of_block_without(row, token, p.row_max, temperature, sizes)
    return tl.where(tl.arange(0, sizes.MAX_BLOCKS) == token // BLOCK_SIZE, rest, p.block_sums)


@triton.jit
def weight_of_block_without(row, token, row_max, temperature, sizes):
    """Return the weight of a token's block without the token, relative to the row's maximum."""
    token_ids = tokens_of(token // BLOCK_SIZE)
    weights = tl.exp(scaled(load_logits(row, token_ids, True), row_max, temperature))
    return sum_in_order(tl.where(token_ids == token, 0.0, weights))
