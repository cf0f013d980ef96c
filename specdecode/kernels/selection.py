"""Selection in Triton: tokens drawn from block statistics by two-level Gumbel-max.

    W_b = s_b exp((m_b - max m) / T)        block b = argmax  log W_b + G(b)
    w(v) = exp((l_v - max m) / T)           token v = argmax  log w(v) + G'(v)  in block b

One number is drawn for each block and one for each token of a single block, of which alone logits are needed again.
With G = -log E the first is argmax W_b / E(b), the second argmax w(v) / E'(v): so they are worked out, without logarithms.

A program of `summarise_kernel` reads a few blocks of a row, 2 bytes a logit of bfloat16, and writes 8 for each block of
1,024. One of `sample_kernel` has a row: it reads these 8 and the 2 KB of one block, and writes a token and a logsumexp.
"""

import triton
import triton.language as tl

from specdecode.kernels.greedy import point_mass
from specdecode.kernels.launches import SIZES, SMALL_TENSORS, admit_next_launch, await_launch, place_in_grid
from specdecode.kernels.philox import exponential, load_key
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    INFINITY,
    base_2_scale,
    in_order,
    load_logits,
    load_row_blocks,
    load_statistics,
    load_temperature,
    mend_statistics,
    row_at,
    scaled,
    store_statistics,
    sum_both_in_order,
    sum_in_order,
    tokens_of,
)
from specdecode.kernels.search import with_blocks


@triton.jit
def sums_relative_to(peak, maxima, sums, temperature):
    """Return block sums relative to a row's largest logit, given those relative to their own largest."""
    return tl.where(sums != 0, sums * tl.exp(scaled(maxima, peak, temperature)), 0.0)


@triton.jit
def merge(statistics, row, num_blocks, temperature, ALIGNMENT: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    """Return a row's scalars and block sums, from its statistics.

    Its largest logit; its sum of exponentials relative to that; the token that it is a point mass on, -1 for none; and its
    block sums [MAX_BLOCKS]. A point mass has a sum of 1 and no block sums.
    """
    maxima, sums = statistics
    peak = tl.max(maxima, 0)
    weights = sums_relative_to(peak, maxima, sums, temperature)
    merged = peak, sum_in_order(weights), tl.full([], -1, tl.int32), weights
    if is_sound(merged) == 0:
        merged = mend(statistics, row, num_blocks, temperature, ALIGNMENT, MAX_BLOCKS)
    return merged


@triton.jit
def merge_both(
    statistics,
    others,
    row,
    other_row,
    has_other,
    num_blocks,
    temperature,
    ALIGNMENT: tl.constexpr,
    OTHER_ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Return what `merge` does of two rows, in the time of one; if there is no other, that of the other is of no use."""
    peak, other_peak = tl.reduce((statistics[0], others[0]), 0, larger_of_both)
    weights = sums_relative_to(peak, *statistics, temperature)
    other_weights = sums_relative_to(other_peak, *others, temperature)
    total, other_total = sum_both_in_order(weights, other_weights)
    merged = peak, total, tl.full([], -1, tl.int32), weights
    other = other_peak, other_total, tl.full([], -1, tl.int32), other_weights
    if is_sound(merged) == 0:
        merged = mend(statistics, row, num_blocks, temperature, ALIGNMENT, MAX_BLOCKS)
    if has_other & (is_sound(other) == 0):
        other = mend(others, other_row, num_blocks, temperature, OTHER_ALIGNMENT, MAX_BLOCKS)
    return merged, other


@triton.jit
def larger_of_both(a, b, c, d):
    """Return the larger of two numbers, twice."""
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def is_sound(merged):
    """Return whether a row's statistics say all of it: not if it is greedy, or not all its logits are finite."""
    total = merged[1]
    return (total > 0.5) & (total < INFINITY)


@triton.jit
def mend(statistics, row, num_blocks, temperature, ALIGNMENT: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    """Return what `merge` does, of a row whose statistics are not sound."""
    maxima, sums = mend_statistics(*statistics, row, num_blocks, temperature, ALIGNMENT, MAX_BLOCKS)
    peak = tl.max(maxima, 0)
    if (temperature > 0) & (tl.abs(peak) < INFINITY):
        weights = sums_relative_to(peak, maxima, sums, temperature)
        total = sum_in_order(weights)
        point = tl.full([], -1, tl.int32)
    else:
        weights = tl.zeros([MAX_BLOCKS], tl.float32)
        total = 1.0
        point = point_mass(row, maxima, peak, ALIGNMENT)
    return peak, total, point, weights


@triton.jit
def first_largest(scores):
    """Return the index of the largest of some scores, of equal ones the first; one is positive, none is negative."""
    bits = scores.to(tl.int32, bitcast=True)  # in the same order, and sooner compared
    count: tl.constexpr = scores.shape[0]
    return tl.min(tl.where(bits == tl.max(bits, 0), tl.arange(0, count), count), 0)


@triton.jit
def times_of_blocks(key, offset, domain, MAX_BLOCKS: tl.constexpr):
    """Return E of each block: it hangs on no logit, so it can be worked out while those are awaited."""
    return exponential(key, offset, tl.arange(0, MAX_BLOCKS), domain)


@triton.jit
def scores_of_blocks(sums, times):
    """Return what the race is decided by, of some blocks."""
    # 2^30: the smallest sum divided by the largest E is not to round to 0, which would make it one of the impossible.
    return sums * 2.0**30 / times


@triton.jit
def select_block(sums, times):
    """Draw a block with probability proportional to its sum, given E of each; there is one whose sum is not 0."""
    return first_largest(scores_of_blocks(sums, times))


@triton.jit
def weigh_tokens(logits, peak, temperature):
    """Return 2^60 exp((l - peak) / T): of a block that can be selected, no token that matters underflows."""
    return tl.exp2(tl.fma(logits - peak, base_2_scale(temperature), 60.0))


@triton.jit
def select_token(weights, times, block):
    """Draw a token of a block with probability proportional to its weight, given E of each."""
    return block * BLOCK_SIZE + first_largest(weights / times)


@triton.jit
def likely_block(statistics, times, scale):
    """Return the block that very likely wins the race, found by logarithms, before the row's largest logit is known."""
    maxima, sums = statistics
    MAX_BLOCKS: tl.constexpr = maxima.shape[0]
    scores = tl.fma(maxima, scale, tl.log2(sums) - tl.log2(times))
    return tl.max(with_blocks(in_order(scores.to(tl.int32, bitcast=True))), 0) & (MAX_BLOCKS - 1)


@triton.jit
def logits_and_times(row, block, key, offset, domain, ALIGNMENT: tl.constexpr):
    """Return what a draw from one block of a row takes: its logits and, worked out while those are awaited, E of each."""
    return load_logits(row, tokens_of(block), True, ALIGNMENT), exponential(key, offset, tokens_of(block), domain)


@triton.jit
def draw_from_block(prepared, block, peak, temperature):
    """Draw a token of one block of a row."""
    logits, times = prepared
    return select_token(weigh_tokens(logits, peak, temperature), times, block)


@triton.jit
def draw(
    statistics,
    times,
    row,
    num_blocks,
    temperature,
    key,
    offset,
    domain,
    ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Draw a token of a row; return it, the row's largest logit and its sum relative to that."""
    if temperature > 0:
        likely = likely_block(statistics, times, base_2_scale(temperature))
        prepared = logits_and_times(row, likely, key, offset, domain, ALIGNMENT)
        peak, total, token, sums = merge(statistics, row, num_blocks, temperature, ALIGNMENT, MAX_BLOCKS)
        if token < 0:
            block = select_block(sums, times)
            if block != likely:
                prepared = logits_and_times(row, block, key, offset, domain, ALIGNMENT)
            token = draw_from_block(prepared, block, peak, temperature)
    else:
        peak, total, token, _ = mend(statistics, row, num_blocks, temperature, ALIGNMENT, MAX_BLOCKS)
    _, _, vocab_size = row
    return tl.minimum(token, vocab_size - 1), peak, total


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def summarise_kernel(
    statistics_ptr,  # [batch, num_blocks, 2] float32
    logits_ptr,  # [batch, vocab_size] any float
    temperature_ptr,  # [batch] any float, or None
    temperature,
    stride_row: tl.int64,
    stride_token: tl.int64,
    batch,
    vocab_size,
    num_blocks,
    tiles,
    chunks,
    ALIGNMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Summarise `tiles` times `BLOCKS` blocks of one row."""
    chunk, request, _ = place_in_grid(chunks, batch, FLAT)
    t = load_temperature(temperature_ptr, temperature, request)
    row = row_at((logits_ptr, None, stride_row, 0, stride_token), vocab_size, request, 0, ALIGNMENT)
    for tile in range(tiles):
        first = (chunk * tiles + tile) * BLOCKS
        parts = load_row_blocks(row, first, True, ALIGNMENT, BLOCKS, LANES)
        if tile == tiles - 1:  # for it is soon set up, see `read_kernel`
            admit_next_launch(OVERLAPS)
        # Not AT_ONCE: where nothing is done but this, it was slower.
        store_statistics(statistics_ptr, request, parts, first, num_blocks, t, BLOCKS, AT_ONCE=False)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def sample_kernel(
    token_ids_ptr,  # [batch] int64
    logsumexp_ptr,  # [batch] float32
    statistics_ptr,  # [batch, num_blocks, 2] float32
    logits_ptr,  # [batch, vocab_size] any float
    temperature_ptr,  # [batch] any float, or None
    temperature,
    seeds_ptr,  # [batch] int64, or None
    first_seed: tl.int64,
    positions_ptr,  # [batch] int64, or None
    block_domain,
    token_domain,
    stride_row: tl.int64,
    stride_token: tl.int64,
    vocab_size,
    num_blocks,
    ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Draw the token of one row from its statistics."""
    request = tl.program_id(0).to(tl.int64)
    t = load_temperature(temperature_ptr, temperature, request)
    key = load_key(seeds_ptr, first_seed, positions_ptr, request)
    row = row_at((logits_ptr, None, stride_row, 0, stride_token), vocab_size, request, 0, ALIGNMENT)
    times = times_of_blocks(key, 0, block_domain, MAX_BLOCKS)
    await_launch(OVERLAPS)
    statistics = load_statistics(statistics_ptr, request, True, num_blocks, MAX_BLOCKS)
    token, peak, total = draw(statistics, times, row, num_blocks, t, key, 0, token_domain, ALIGNMENT, MAX_BLOCKS)
    tl.store(token_ids_ptr + request, token.to(tl.int64))
    logsumexp = 0.0
    if t > 0:
        logsumexp = peak / t + tl.log(total)
    tl.store(logsumexp_ptr + request, logsumexp)
