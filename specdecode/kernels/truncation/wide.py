"""The cutoff of a wide row in Triton: a row that keeps too many tokens to compare all candidates in pairs.

The cutoff's logit is the largest logit with enough tokens at or above it: k tokens, or a mass of top_p. The search keeps
a lower logit with enough tokens and an upper logit with too few. Each pass over the row tries three logits between them:
first an estimate from a sample of the row, then points around the interpolation of the two amounts, or the middle. Logits
are compared as *ordinals*, integers in the same order, of 16, 19 or 32 bits by the row's dtype.

Of the tokens with exactly the cutoff's logit, the lowest ids are kept, as many as needed. A last pass finds them, and
stores the statistics of the kept tokens.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import add_both
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    WARP_BITS,
    base_2_scale,
    key_of,
    load_logits,
    load_stored_blocks,
    logit_of,
    logits_of_stored,
    part_of_blocks,
    scaled,
    tokens_of,
)
from specdecode.kernels.statistics import load_statistics, store_pairs, store_statistics, sum_blocks, sum_in_order
from specdecode.kernels.truncation.narrow import NO_ORDER, order_of, second_list_at, token_of_order
from specdecode.kernels.values import INFINITY, WeighedRow, ordinal_shift

LOWEST_KEY = tl.constexpr(-0x7F800000)
"""The ordinal of the smallest finite logit."""

BLOCKS = tl.constexpr(8)
"""Blocks that are read at once; one for each warp was fastest."""

SAMPLE = tl.constexpr(2048)
"""Tokens of the sample for the first estimate: some of each block, because likely tokens may be in few blocks."""

DOUBT = tl.constexpr(0.1)
"""The relative error of the estimate in most rows."""

HALVINGS = tl.constexpr(5)
"""Halvings of the interval of logits that bracket the estimate."""

ROUNDING = tl.constexpr(1e-5)
"""An upper bound of a sum's relative error."""

EVERY_TIE = tl.constexpr(2.0**31)


@triton.jit
def logit_at(ordinal, SHIFT: tl.constexpr):
    """Return the logit with an ordinal: a key, shifted."""
    ones = tl.where(ordinal < 0, (1 << SHIFT) - 1, 0)  # the dropped bits of a negative logit's key were ones
    return logit_of(((ordinal << SHIFT) | ones).to(tl.int32))


@triton.jit
def ordinal_of(logit, SHIFT: tl.constexpr):
    """Return the ordinal of a logit."""
    return (key_of(logit) >> SHIFT).to(tl.int64)


@triton.jit
def amounts(logits, row_max, scale):
    """Return the weights of tokens relative to the row's maximum, or 1 where `scale` is 0."""
    return tl.exp2((logits - row_max) * scale)


@triton.jit
def amounts_from(thresholds, row, row_max, scale, sizes):
    """Return the amounts of the tokens at or above each of three finite logits.

    Each lane of `BLOCKS` blocks is summed separately, so the order of additions is the same for any number of warps.
    """
    first, second, third = thresholds
    BLOCK_N: tl.constexpr = WARP_BITS // row.ptr.dtype.element_ty.primitive_bitwidth
    from_first = tl.zeros([BLOCKS, BLOCK_N], tl.float32)
    from_second, from_third = from_first, from_first
    raw = load_stored_blocks(row, tl.arange(0, BLOCKS), True, False, BLOCK_N)
    for block in range(0, sizes.num_blocks, BLOCKS):
        following = load_stored_blocks(row, tl.arange(0, BLOCKS) + (block + BLOCKS), True, False, BLOCK_N)  # in flight
        read = logits_of_stored(raw, row, tl.arange(0, BLOCKS) + block, BLOCK_N)
        for part in tl.static_range(len(read)):
            logits = read[part].to(tl.float32)
            each = amounts(logits, row_max, scale)
            # Neither NaN nor -inf reaches a threshold.
            from_first += tl.where(logits >= first, each, 0.0)
            from_second += tl.where(logits >= second, each, 0.0)
            from_third += tl.where(logits >= third, each, 0.0)
        raw = following
    return sum_lanes(from_first), sum_lanes(from_second), sum_lanes(from_third)


@triton.jit
def sum_lanes(weights):
    """Return the sum of [BLOCKS, BLOCK_N] weights, in the order of `sum_blocks`."""
    return sum_in_order(sum_blocks((weights,)))


@triton.jit
def suggest(weighed, by_count, goal, least, sizes):
    """Return two logits that probably bracket the logit with the amount `goal`, estimated from a sample of the row.

    Tokens with weights below `least` have together less mass than top-p excludes.
    """
    row, row_max, scale, total = weighed
    BLOCK_N: tl.constexpr = SAMPLE // sizes.MAX_BLOCKS
    logits = load_logits(row, part_of_blocks(tl.arange(0, sizes.MAX_BLOCKS), 0, BLOCK_SIZE, BLOCK_N), True)
    logits = tl.reshape(logits, [SAMPLE])
    each = tl.where(logits > -INFINITY, amounts(logits, row_max, tl.where(by_count, 0.0, scale)), 0.0)
    share = BLOCK_N / BLOCK_SIZE
    # The excluded mass spreads over many tokens, so a sample estimates it well; the kept mass may lie in few tokens.
    amount, error = tl.sum(each, 0) - (total - goal) * share, DOUBT * (total - goal) * share
    amount, error = tl.where(by_count, goal * share, amount), tl.where(by_count, 3 * tl.sqrt(goal * share) + 1, error)
    lowest = tl.min(tl.where(logits > -INFINITY, logits, row_max), 0)
    lowest = tl.where(by_count, lowest, tl.maximum(lowest, row_max + tl.log2(least) / scale))
    low_more, high_more, low_less, high_less = lowest, row_max, lowest, row_max
    for _ in range(HALVINGS):
        more, less = low_more / 2 + high_more / 2, low_less / 2 + high_less / 2
        above_more, above_less = tl.where(logits >= more, each, 0.0), tl.where(logits >= less, each, 0.0)
        from_more, from_less = tl.reduce((above_more, above_less), 0, add_both)
        is_more, is_less = from_more >= amount + error, from_less >= amount - error
        low_more, high_more = tl.where(is_more, more, low_more), tl.where(is_more, high_more, more)
        low_less, high_less = tl.where(is_less, less, low_less), tl.where(is_less, high_less, less)
    return low_more, high_less


@triton.jit
def narrow(bracket, ordinal, amount, goal):
    """Return the bracket, narrowed by the amount at an ordinal."""
    low, high, from_low, beyond_high = bracket
    is_enough = amount >= goal
    raises, lowers = is_enough & (ordinal >= low), (is_enough == 0) & (ordinal - 1 < high)
    low, from_low = tl.where(raises, ordinal, low), tl.where(raises, amount, from_low)
    high, beyond_high = tl.where(lowers, ordinal - 1, high), tl.where(lowers, amount, beyond_high)
    return low, tl.maximum(low, high), from_low, beyond_high


@triton.jit
def guess(bracket, by_count, goal, is_near, weighed, SHIFT: tl.constexpr):
    """Return three ordinals to try; the second has the amount `goal` by linear interpolation.

    A count is interpolated as its logarithm, over logits. A mass is interpolated over logits near the estimate, and over
    weights elsewhere: far from the estimate a few tokens have most of the mass.
    """
    low, high, from_low, beyond_high = bracket
    row_max, scale = weighed.row_max, weighed.scale
    lowest, highest = logit_at(low, SHIFT), tl.minimum(logit_at(high + 1, SHIFT), row_max)
    part = (from_low - goal) / tl.maximum(from_low - beyond_high, 1e-30)
    lightest, heaviest = amounts(lowest, row_max, scale), amounts(highest, row_max, scale)
    by_weight = row_max + tl.log2(tl.maximum(lightest + (heaviest - lightest) * part, 1e-30)) / scale
    most, least = tl.maximum(from_low, 1.0), tl.maximum(beyond_high, 0.5)
    part = tl.where(by_count, tl.log2(most / goal) / tl.log2(most / least), part)
    logit = tl.where(by_count | is_near, lowest + (highest - lowest) * part, by_weight)
    margin = (highest - lowest) / 16
    margin = tl.where(by_count, margin, tl.minimum(margin, 1 / scale))
    ordinal = tl.minimum(tl.maximum(ordinal_of(logit, SHIFT), low), high)
    first, third = ordinal_of(logit - margin, SHIFT), ordinal_of(logit + margin, SHIFT)
    return tl.minimum(first, ordinal - 1), ordinal, tl.maximum(third, ordinal + 1)


@triton.jit
def within(ordinals, low, high):
    """Return the three ordinals, clamped to lie between two others."""
    high = tl.maximum(high, low)
    first, second, third = ordinals
    first, second = tl.minimum(tl.maximum(first, low), high), tl.minimum(tl.maximum(second, low), high)
    return first, second, tl.minimum(tl.maximum(third, low), high)


@triton.jit
def find_cutoff_ordinal(low, by_count, goal, mass, weighed, sizes, SHIFT: tl.constexpr):
    """Return the largest ordinal with an amount >= `goal` at or above it, or `low`; this amount; and the amount above it.

    The mass at or above `low` is `mass`.
    """
    row, row_max, scale, _ = weighed
    high = tl.maximum(ordinal_of(row_max, SHIFT), low)
    least = tl.maximum(mass - goal, mass * ROUNDING) / sizes.vocab_size
    logit_more, logit_less = suggest(weighed, by_count, goal, least, sizes)
    more, less = ordinal_of(logit_more, SHIFT), ordinal_of(logit_less, SHIFT) + 1
    # Whether `low` is known to have enough; otherwise it is tried first.
    is_enough = (by_count == 0) & (mass - goal > mass * ROUNDING)
    first = tl.where(is_enough, ordinal_of(logit_more / 2 + logit_less / 2, SHIFT), low)
    ordinals = within((first, more, less), low, high)
    bracket = low, high, tl.where(is_enough, mass, 0.0), 0.0
    amount_scale, width = tl.where(by_count, 0.0, scale), tl.full([], 2**40, tl.int64)
    searching = tl.full([], True, tl.int1)
    while searching:
        first, second, third = ordinals
        logits = logit_at(first, SHIFT), logit_at(second, SHIFT), logit_at(third, SHIFT)
        from_first, from_second, from_third = amounts_from(logits, row, row_max, amount_scale, sizes)
        bracket = narrow(bracket, first, from_first, goal)
        bracket = narrow(bracket, second, from_second, goal)
        bracket = narrow(bracket, third, from_third, goal)
        low, high, from_low, beyond_high = bracket
        # Not even the lowest ordinal has enough: return it.
        searching = (low < high) & (from_low >= goal)
        is_near = (low >= more) & (high < less)
        first, second, third = guess(bracket, by_count, goal, is_near, weighed, SHIFT)
        second = tl.where((high - low) * 8 > width, (low + high + 1) >> 1, second)  # too slow: at least halve it
        ordinals, width = within((first, second, third), low + 1, high), high - low
    low, high, from_low, beyond_high = bracket
    return low, from_low, beyond_high


@triton.jit
def least_ordinal(row_max, min_p, temperature, SHIFT: tl.constexpr):
    """Return the least ordinal that min_p keeps."""
    low, high = tl.full([], LOWEST_KEY >> SHIFT, tl.int64), ordinal_of(row_max, SHIFT)  # `high` is kept
    least = tl.log(min_p)
    if min_p > 0:
        for _ in range(33 - SHIFT):
            middle = (low + high) >> 1
            is_kept = scaled(logit_at(middle, SHIFT), row_max, temperature) >= least
            high = tl.where(is_kept, middle, high)
            low = tl.minimum(tl.where(is_kept, low, middle + 1), high)
    return tl.where(min_p > 0, high, low)


@triton.jit
def kept_mass(ordinal, ties, weighed, sizes, SHIFT: tl.constexpr):
    """Return the mass of the tokens above an ordinal and of the first `ties` tokens at it."""
    row, row_max, scale, _ = weighed
    this, following = logit_at(ordinal, SHIFT), logit_at(ordinal + 1, SHIFT)
    with_ties, without, _ = amounts_from((this, following, following), row, row_max, scale, sizes)
    return tl.minimum(with_ties, without + ties * tl.exp2((this - row_max) * scale))


@triton.jit
def last_token(lowest, row, sizes):
    """Return the logit and id of the last token in the order among tokens with a logit >= `lowest`."""
    last = tl.full([BLOCKS, BLOCK_SIZE], NO_ORDER, tl.int64)
    for block in range(0, sizes.num_blocks, BLOCKS):
        token_ids = part_of_blocks(tl.arange(0, BLOCKS) + block, 0, BLOCK_SIZE, BLOCK_SIZE)
        logits = load_logits(row, token_ids, True)
        last = tl.minimum(last, tl.where(logits >= lowest, order_of(key_of(logits), token_ids), NO_ORDER))
    last = tl.min(tl.min(last, 1), 0)
    return token_of_order(last)


@triton.jit
def wide_cutoff(row, row_max, total, temperature, limits, sizes):
    """Return the lowest kept logit of a row with a finite maximum, where T > 0, and the number of kept ties with it."""
    SHIFT: tl.constexpr = ordinal_shift(row.ptr.dtype.element_ty, row.adjustments)
    top_k, top_p, min_p = limits
    scale = base_2_scale(temperature)
    weighed = WeighedRow(row, row_max, scale, total)
    ordinal = least_ordinal(row_max, min_p, temperature, SHIFT)
    ties, mass = EVERY_TIE, total
    for criterion in range(2):  # first the tokens that top-k keeps, then top-p's share of their mass
        by_count = criterion == 0
        if (by_count & (top_k < sizes.vocab_size)) | ((by_count == 0) & (top_p < 1)):
            if (by_count == 0) & ((top_k < sizes.vocab_size) | (min_p > 0)):
                mass = kept_mass(ordinal, ties, weighed, sizes, SHIFT)
            goal = tl.where(by_count, top_k.to(tl.float32), top_p * mass)
            before = ordinal
            ordinal, from_ordinal, beyond = find_cutoff_ordinal(before, by_count, goal, mass, weighed, sizes, SHIFT)
            weight = tl.where(by_count, 1.0, tl.exp2((logit_at(ordinal, SHIFT) - row_max) * scale))
            needed = tl.maximum(tl.ceil((goal - beyond) / tl.maximum(weight, 1e-30)), 1.0)
            needed = tl.where(from_ordinal >= goal, needed, EVERY_TIE)
            ties = tl.where(ordinal > before, needed, tl.minimum(needed, ties))
    return logit_at(ordinal, SHIFT), ties


@triton.jit
def find_tie(logit, nth, block, row):
    """Return the `nth` token of a block with a given logit."""
    token_ids = tokens_of(block)
    is_tie = (load_logits(row, token_ids, True) == logit).to(tl.int32)
    return tl.max(tl.where((is_tie == 1) & (tl.cumsum(is_tie, 0) == nth), token_ids, 0), 0)


@triton.jit
def store_kept(statistics_ptr, list_ptr, logit, ties, row, temperature, sizes):
    """Replace the statistics of a row's blocks by statistics of the kept tokens; return the last token's logit and id."""
    BLOCK_N: tl.constexpr = WARP_BITS // row.ptr.dtype.element_ty.primitive_bitwidth
    ties_ptr = second_list_at(list_ptr).to(tl.pointer_type(tl.float32), bitcast=True)
    raw = load_stored_blocks(row, tl.arange(0, BLOCKS), True, False, BLOCK_N)
    for block in range(0, sizes.num_blocks, BLOCKS):
        following = load_stored_blocks(row, tl.arange(0, BLOCKS) + (block + BLOCKS), True, False, BLOCK_N)  # in flight
        parts, is_tie = (), tl.zeros([BLOCKS, BLOCK_N], tl.float32)
        read = logits_of_stored(raw, row, tl.arange(0, BLOCKS) + block, BLOCK_N)
        for part in tl.static_range(len(read)):
            logits = read[part].to(tl.float32)
            parts = parts + (tl.where(logits > logit, logits, -INFINITY),)
            is_tie += (logits == logit).to(tl.float32)
        raw = following
        store_statistics(statistics_ptr, None, parts, block, temperature, sizes, BLOCKS, True)
        num_ties = tl.sum(is_tie, 1)
        store_pairs(ties_ptr, num_ties, num_ties, block, sizes, BLOCKS)
    tl.debug_barrier()  # the ties are read by other threads than those that wrote them
    _, num_ties = load_statistics(ties_ptr, True, sizes)
    most = tl.minimum(ties, tl.sum(num_ties, 0))
    kept = tl.minimum(tl.maximum(most - (tl.cumsum(num_ties, 0) - num_ties), 0.0), num_ties)
    last = tl.max(tl.where(kept > 0, tl.arange(0, kept.shape[0]), -1), 0)
    add_ties(statistics_ptr, logit, kept, temperature, sizes)
    if last < 0:
        logit, token = last_token(logit, row, sizes)
    else:
        in_last = tl.sum(tl.where(tl.arange(0, kept.shape[0]) == last, kept, 0.0), 0)
        token = find_tie(logit, in_last.to(tl.int32), last, row)
    return logit, token


@triton.jit
def add_ties(statistics_ptr, logit, ties, temperature, sizes):
    """Add `ties` tokens with a logit to each block's statistics, which cover greater logits or none."""
    blocks = tl.arange(0, ties.shape[0])
    inside = blocks < sizes.num_blocks
    block_max = tl.load(statistics_ptr + blocks * 2, mask=inside, other=-INFINITY)
    sumexp = tl.load(statistics_ptr + blocks * 2 + 1, mask=inside, other=0.0)
    with_ties = tl.where(block_max > -INFINITY, block_max, logit)
    sumexp += tl.where(ties > 0, ties * amounts(logit, with_ties, base_2_scale(temperature)), 0.0)
    tl.store(statistics_ptr + blocks * 2, tl.where(ties > 0, with_ties, block_max), mask=inside)
    tl.store(statistics_ptr + blocks * 2 + 1, sumexp, mask=inside)
