"""From the statistics of a row's blocks to the distribution softmax(logits / T) of the row.

    M = max m_b        W_b = s_b exp((m_b - M) / T)        sumexp = sum W_b        log p(x) = (l_x - M) / T - log sumexp

A greedy row, or one with an infinite logit, is a point mass on the first largest logit.

A NaN counts as -inf, and is handled here: the launch that reads does not test for NaN, but a NaN makes the statistics of
its block non-finite, and `recompute_nonfinite` computes them again from the logits. (Where logits are read once more to
draw a token, `rows.load_logits` replaces NaN by -inf.)
"""

import triton
import triton.language as tl

from specdecode.kernels.greedy import argmax
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    WARP_BITS,
    base_2_scale,
    load_logits,
    part_of_blocks,
    scaled,
    target_row_at,
)
from specdecode.kernels.statistics import load_target_statistics, sum_blocks, sum_in_order
from specdecode.kernels.values import INFINITY, Distribution


@triton.jit
def relative_sums(row_max, statistics, temperature):
    """Return block sums relative to the row's maximum, given sums relative to each block's own maximum."""
    block_max, sumexp = statistics
    return tl.where(sumexp != 0, sumexp * tl.exp(scaled(block_max, row_max, temperature)), 0.0)


@triton.jit
def combine(statistics, row, temperature, sizes):
    """Return the distribution of a row, given the statistics of its blocks."""
    return combine_with_max(tl.max(statistics[0], 0), statistics, row, temperature, sizes)


@triton.jit
def combine_with_max(row_max, statistics, row, temperature, sizes):
    """Return the distribution of a row whose maximum is known."""
    block_sums = relative_sums(row_max, statistics, temperature)
    p = Distribution(row_max, sum_in_order(block_sums), tl.full([], -1, tl.int32), block_sums)
    if is_finite(p) == 0:
        p = combine_nonfinite(statistics, row, temperature, sizes)
    return p


@triton.jit
def target_distribution(context, inputs, workspace, sizes):
    """Return the target row at a context, and its distribution."""
    row = target_row_at(context, inputs, workspace, sizes)
    return row, combine(load_target_statistics(context, workspace, sizes), row, context.temperature, sizes)


@triton.jit
def combine_both(statistics, draft_statistics, row, draft_row, has_draft, temperature, sizes):
    """Return the distributions of a target and a draft row, reduced together; without a draft the second is undefined."""
    row_max, draft_max = tl.reduce((statistics[0], draft_statistics[0]), 0, larger_of_both)
    block_sums = relative_sums(row_max, statistics, temperature)
    draft_sums = relative_sums(draft_max, draft_statistics, temperature)
    sumexp, draft_sumexp = sum_both_in_order(block_sums, draft_sums)
    p = Distribution(row_max, sumexp, tl.full([], -1, tl.int32), block_sums)
    q = Distribution(draft_max, draft_sumexp, tl.full([], -1, tl.int32), draft_sums)
    if is_finite(p) == 0:
        p = combine_nonfinite(statistics, row, temperature, sizes)
    if has_draft & (is_finite(q) == 0):
        q = combine_nonfinite(draft_statistics, draft_row, temperature, sizes)
    return p, q


@triton.jit
def larger_of_both(a, b, c, d):
    """Return (max(a, c), max(b, d)), for a reduction of two vectors at once."""
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def add_both(a, b, c, d):
    """Return (a + c, b + d), for a reduction of two vectors at once."""
    return a + c, b + d


@triton.jit
def sum_both_in_order(weights, others):
    """Return the sums of two vectors of equal size, reduced together, each in the order of `sum_in_order`."""
    SIZE: tl.constexpr = weights.shape[0]
    for level in tl.static_range(20):
        if SIZE >> level > 1:
            pairs = tl.reshape(weights, [SIZE >> (level + 1), 2]), tl.reshape(others, [SIZE >> (level + 1), 2])
            weights, others = tl.reduce(pairs, 1, add_both)
    return tl.sum(weights, 0), tl.sum(others, 0)


@triton.jit
def is_finite(p):
    """Return whether the statistics give the distribution; not of greedy rows, nor if a NaN or an infinity matters.

    A finite largest logit adds 1 to the sum. The sum of a greedy row, or of a row of -inf, is 0; with NaN or +inf it is NaN.
    """
    return p.sumexp > 0.5  # not if it is NaN


@triton.jit
def combine_nonfinite(statistics, row, temperature, sizes):
    """Return the distribution of a row that is greedy or whose statistics are not all finite."""
    return combine_recomputed(recompute_nonfinite(statistics, row, temperature, sizes), row, temperature, sizes)


@triton.jit
def combine_recomputed(statistics, row, temperature, sizes):
    """Return the distribution of a row, given statistics that are finite except for infinite logits."""
    row_max = tl.max(statistics[0], 0)
    if (temperature > 0) & (tl.abs(row_max) < INFINITY):
        block_sums = relative_sums(row_max, statistics, temperature)
        sumexp = sum_in_order(block_sums)
        point_mass_token = tl.full([], -1, tl.int32)
    else:
        block_sums = tl.zeros([sizes.MAX_BLOCKS], tl.float32)
        sumexp = 1.0
        point_mass_token = argmax(row, statistics[0], row_max)
    return Distribution(row_max, sumexp, point_mass_token, block_sums)


@triton.jit
def recompute_nonfinite(statistics, row, temperature, sizes):
    """Compute again the statistics of blocks that a NaN or an infinity made non-finite; NaN logits count as -inf."""
    block_max, sumexp = statistics
    nonfinite = block_max != block_max
    if temperature > 0:  # a block's maximum adds 1 to its sum; with NaN or an infinity the sum is out of range
        in_range = (sumexp > 0.5) & (sumexp < 2 * BLOCK_SIZE)
        nonfinite = tl.where(block_max == -INFINITY, sumexp != 0, in_range == 0)
    nonfinite = nonfinite.to(tl.int32)
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    if tl.max(nonfinite, 0) == 1:
        scale = base_2_scale(temperature)
        for block in range(sizes.num_blocks):
            if tl.max(tl.where(blocks == block, nonfinite, 0), 0) == 1:
                maximum, total = recompute_block(row, block, scale)
                block_max = tl.where(blocks == block, maximum, block_max)
                sumexp = tl.where(blocks == block, total, sumexp)
    return block_max, sumexp


@triton.jit
def recompute_block(row, block, scale):
    """Return the statistics of a block; NaN logits count as -inf."""
    # Summed in the order of `block_statistics`, so that NaN and -inf give the same bits. A loop keeps rare code short.
    BLOCK_N: tl.constexpr = WARP_BITS // row.ptr.dtype.element_ty.primitive_bitwidth
    this = block + tl.arange(0, 1)
    maxima = tl.full([1, BLOCK_N], -INFINITY, tl.float32)
    for part in range(BLOCK_SIZE // BLOCK_N):
        maxima = tl.maximum(maxima, load_logits(row, part_of_blocks(this, part, BLOCK_SIZE, BLOCK_N), True))
    maximum = tl.max(tl.max(maxima, 1), 0)
    finite = tl.where(tl.abs(maximum) < INFINITY, maximum, 0.0)
    weights = tl.zeros([1, BLOCK_N], tl.float32)
    for part in range(BLOCK_SIZE // BLOCK_N):
        logits = load_logits(row, part_of_blocks(this, part, BLOCK_SIZE, BLOCK_N), True)
        weights += tl.exp2((logits - finite) * scale)
    return maximum, tl.sum(sum_blocks((weights,)), 0)


@triton.jit
def logprob(logit, token, normalizer, temperature):
    """Return the log-probability of a token, given its logit."""
    row_max, log_sum, point_mass_token = normalizer
    if_point_mass = tl.where(token == point_mass_token, 0.0, -INFINITY)
    return tl.where(
        point_mass_token < 0,
        scaled(logit, tl.where(point_mass_token < 0, row_max, 0.0), temperature) - log_sum,
        if_point_mass,
    )
