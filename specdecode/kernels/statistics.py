"""The statistics of blocks in Triton: the summary of a logits row after reading it once.

A block of `BLOCK_SIZE` logits is summarised by its maximum m and by s = sum exp((l - m) / T): 8 bytes for 2,048 of bfloat16.
Methods need only these pairs, some single logits, and a few blocks that are read again, such as the block that a token is
drawn from. The sums of greedy requests are 0.

NaN and infinities are not handled here: they make the statistics of their block non-finite, and
`distribution.recompute_nonfinite` computes these statistics again when they are combined.
"""

import triton
import triton.language as tl

from specdecode.kernels.rows import LOG2_E, base_2_scale, ordered_bits, row_index, unpack
from specdecode.kernels.values import INFINITY

WARP = tl.constexpr(32)


@triton.jit
def block_statistics(parts, temperature, INTEGER_MAX: tl.constexpr):
    """Return the maximum of each block and its sum of exponentials (0 if greedy), given its parts."""
    block_max = largest_logits(parts, INTEGER_MAX)
    sumexp = tl.zeros_like(block_max)
    if temperature > 0:
        sumexp = sums_of_exponentials(parts, block_max, (base_2_scale(temperature),))[0]
    return block_max, sumexp


@triton.jit
def block_statistics_and_raw(parts, temperature, INTEGER_MAX: tl.constexpr):
    """Return each block's maximum, its sum of exponentials, and its sum at temperature 1, computed in one pass."""
    block_max = largest_logits(parts, INTEGER_MAX)
    if (temperature > 0) & (temperature != 1):
        sumexp, raw = sums_of_exponentials(parts, block_max, (base_2_scale(temperature), LOG2_E))
    else:
        raw = sums_of_exponentials(parts, block_max, (LOG2_E,))[0]
        sumexp = tl.where(temperature > 0, raw, 0.0)
    return block_max, sumexp, raw


@triton.jit
def maxima_of_parts(parts):
    """Return the largest logits of blocks over their parts, [BLOCKS, BLOCK_N]; NaN is ignored."""
    logits = unpack(parts[0])
    maxima = logits[0] if len(logits) == 1 else tl.maximum(logits[0], logits[1])
    for part in tl.static_range(1, len(parts)):
        logits = unpack(parts[part])
        for half in tl.static_range(len(logits)):
            maxima = tl.maximum(maxima, logits[half])
    return maxima


@triton.jit
def lane_maxima(parts):
    """Return the largest logit that each thread of a warp has loaded of a block, [BLOCKS, WARP], given the parts."""
    maxima = maxima_of_parts(parts)
    return tl.max(tl.reshape(maxima, [maxima.shape[0], WARP, maxima.shape[1] // WARP]), 2)


@triton.jit
def largest_logits(parts, INTEGER_MAX: tl.constexpr):
    """Return the maximum of each block, given its parts."""
    maxima = maxima_of_parts(parts)
    if INTEGER_MAX:
        # One instruction for each comparison instead of five; a NaN becomes non-finite or is ignored.
        return ordered_bits(tl.max(ordered_bits(maxima.to(tl.int32, bitcast=True)), 1)).to(tl.float32, bitcast=True)
    else:
        return tl.max(maxima, 1)


@triton.jit
def sums_of_exponentials(parts, block_max, scales):
    """Return each block's sum of exp2((l - max) * scale) for each of one or two scales, given its parts."""
    finite = tl.where(tl.abs(block_max) < INFINITY, block_max, 0.0)[:, None]
    sums = ()
    for part in tl.static_range(len(parts)):
        logits = unpack(parts[part])
        added = ()
        for half in tl.static_range(len(logits)):
            below = logits[half] - finite
            for each in tl.static_range(len(scales)):
                weights = tl.exp2(below * scales[each])
                added = added + (weights if part == 0 else sums[half * len(scales) + each] + weights,)
        sums = added
    totals = ()
    for each in tl.static_range(len(scales)):
        halves = (sums[each],) if len(sums) == len(scales) else (sums[each], sums[len(scales) + each])
        totals = totals + (sum_blocks(halves),)
    return totals


@triton.jit
def sum_blocks(weights):
    """Return the sums of [BLOCKS, BLOCK_N] weights over the lanes, as a tree: pairs of neighbours, pairs of sums, ...

    This order does not depend on the layout of lanes over threads, which the compiler chooses by the row's layout. The
    weights are a tuple: one tensor, or two [BLOCKS, BLOCK_N // 2], of even and of odd lanes.
    """
    sums = weights[0] if len(weights) == 1 else weights[0] + weights[1]
    BLOCKS: tl.constexpr = sums.shape[0]
    BLOCK_N: tl.constexpr = sums.shape[1]
    for level in tl.static_range(20):
        if BLOCK_N >> level > 1:
            sums = tl.sum(tl.reshape(sums, [BLOCKS, BLOCK_N >> (level + 1), 2]), 2)
    return tl.reshape(sums, [BLOCKS])


@triton.jit
def sum_in_order(weights):
    """Return the sum of a vector, in the order of `sum_blocks`."""
    return tl.sum(sum_blocks((tl.reshape(weights, [1, weights.shape[0]]),)), 0)


@triton.jit
def statistics_at(statistics_ptr, index, sizes):
    """Return a pointer to the statistics of a row, given its `row_index`."""
    return statistics_ptr + index * sizes.num_blocks * 2


@triton.jit
def target_statistics(workspace, request, offset, sizes):
    """Return a pointer to the statistics of a target row."""
    return statistics_at(workspace.statistics_ptr, row_index(request, offset, False, sizes), sizes)


@triton.jit
def raw_statistics(workspace, request, offset, sizes):
    """Return a pointer to the statistics at temperature 1 of a target row, if they are kept."""
    return statistics_at(workspace.raw_statistics_ptr, row_index(request, offset, False, sizes), sizes)


@triton.jit
def draft_statistics(workspace, request, offset, sizes):
    """Return a pointer to the statistics of a draft row."""
    return statistics_at(workspace.statistics_ptr, row_index(request, offset, True, sizes), sizes)


@triton.jit
def maxima_at(workspace, index, sizes):
    """Return a pointer to the lane maxima of a row, given its `row_index`."""
    return workspace.maxima_ptr + index * sizes.num_blocks * WARP


@triton.jit
def store_statistics(
    pointer, maxima_ptr, parts, first, temperature, sizes, BLOCKS: tl.constexpr, INTEGER_MAX: tl.constexpr
):
    """Store the statistics of `BLOCKS` consecutive blocks of a row, and their lane maxima if wanted, given their parts."""
    store_maxima(maxima_ptr, parts, first, sizes, BLOCKS)
    block_max, sumexp = block_statistics(parts, temperature, INTEGER_MAX)
    store_pairs(pointer, block_max, sumexp, first, sizes, BLOCKS)


@triton.jit
def store_statistics_and_raw(pointer, raw_pointer, maxima_ptr, parts, first, temperature, sizes, config):
    """Store the statistics of a program's blocks, and the raw statistics (T = 1) if they differ or are always kept."""
    store_maxima(maxima_ptr, parts, first, sizes, config.BLOCKS)
    block_max, sumexp, raw = block_statistics_and_raw(parts, temperature, config.INTEGER_MAX)
    store_pairs(pointer, block_max, sumexp, first, sizes, config.BLOCKS)
    if config.KEEPS_RAW or temperature != 1:
        store_pairs(raw_pointer, block_max, raw, first, sizes, config.BLOCKS)


@triton.jit
def store_pairs(pointer, block_max, sumexp, first, sizes, BLOCKS: tl.constexpr):
    """Store two numbers for each of `BLOCKS` consecutive blocks, such as its maximum and its sum."""
    # Each warp has a block, and its first lane stores. To store a [BLOCKS] vector would need a barrier between warps.
    blocks, lanes = first + tl.arange(0, BLOCKS)[:, None], tl.arange(0, WARP)[None, :]
    pointers = pointer + blocks * 2 + lanes
    wanted = (blocks < sizes.num_blocks) & (lanes == 0)
    tl.store(pointers, tl.broadcast_to(block_max[:, None], [BLOCKS, WARP]), mask=wanted)
    tl.store(pointers + 1, tl.broadcast_to(sumexp[:, None], [BLOCKS, WARP]), mask=wanted)


@triton.jit
def store_maxima(pointer, parts, first, sizes, BLOCKS: tl.constexpr):
    """Store the lane maxima of consecutive blocks, if they are wanted."""
    if pointer is not None:
        blocks, lanes = first + tl.arange(0, BLOCKS)[:, None], tl.arange(0, WARP)[None, :]
        tl.store(pointer + blocks * WARP + lanes, lane_maxima(parts), mask=blocks < sizes.num_blocks)


@triton.jit
def load_statistics(pointer, wanted, sizes):
    """Return the maxima and sums of all blocks of a row, [MAX_BLOCKS], as stored; -inf and 0 beyond the last."""
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    inside = tl.where(wanted, blocks < sizes.num_blocks, False)
    block_max = tl.load(pointer + blocks * 2, mask=inside, other=-INFINITY)
    return block_max, tl.load(pointer + blocks * 2 + 1, mask=inside, other=0.0)


@triton.jit
def load_target_statistics(context, workspace, sizes):
    """Return the statistics of the target row at a context."""
    return load_statistics(target_statistics(workspace, context.request, context.offset, sizes), True, sizes)


@triton.jit
def load_draft_statistics(context, wanted, workspace, sizes):
    """Return the statistics of the draft row at a context, if they are wanted."""
    return load_statistics(draft_statistics(workspace, context.request, context.offset, sizes), wanted, sizes)


@triton.jit
def at(values, index):
    """Return the value at an index."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)
