"""The cutoff of a wide row in Triton: one of which too much is kept to compare all candidates in pairs.

The cutoff's logit is the largest from which on the tokens are enough: k of them, or a mass of top_p. It is searched for
between two logits, of which the lower is known to be enough and the upper not; each pass over the row tries three between
them: at first what a few blocks suggest, then around where a straight line between the two amounts would be enough, and the
middle. Logits are counted off as integers in their order: as many as the row's dtype has, 16 bits or 19 or 32.

Of the tokens with the cutoff's own logit those with the lowest ids are kept, as many as it takes: a last pass finds these,
and leaves the statistics of what is kept.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import add_both
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    INFINITY,
    LAST_TOKEN,
    base_2_scale,
    key_of,
    load_blocks,
    load_logits,
    load_raw,
    logit_of,
    part_of_blocks,
    scaled,
    up_to_cutoff,
)
from specdecode.kernels.statistics import store_statistics, sum_in_order
from specdecode.kernels.values import TruncatedRow

LOWEST_KEY = tl.constexpr(-0x7F800000)
"""Of the smallest finite logit."""

SAMPLE = tl.constexpr(4)
"""Blocks that suggest where to begin."""

DOUBT = tl.constexpr(0.1)
"""By how much what these suggest may be wrong, relatively, in most rows."""

NEIGHBOURS = tl.constexpr(8)
EVERY_TIE = tl.constexpr(2.0**31)


@triton.jit
def logit_at(number, SHIFT: tl.constexpr):
    """Return the logit with a number: a key, shifted."""
    ones = tl.where(number < 0, (1 << SHIFT) - 1, 0)  # a negative logit's lowest bits are zeros, its key's are ones
    return logit_of(((number << SHIFT) | ones).to(tl.int32))


@triton.jit
def number_of(logit, SHIFT: tl.constexpr):
    """Return the number of a logit."""
    return (key_of(logit) >> SHIFT).to(tl.int64)


@triton.jit
def tokens_of_tile(first, BLOCKS: tl.constexpr):
    """Return the tokens of `BLOCKS` blocks."""
    return part_of_blocks(tl.arange(0, BLOCKS) + first, 0, BLOCK_SIZE, BLOCK_SIZE)


@triton.jit
def amounts(logits, row_max, scale):
    """Return what each token adds to an amount: its weight relative to the row's maximum, or 1 where `scale` is 0."""
    return tl.exp2((logits - row_max) * scale)


@triton.jit
def sum_neighbours(values):
    """Return the sums of `NEIGHBOURS` neighbours each, in the order of `sum_blocks`, as a vector."""
    count: tl.constexpr = values.shape[0] * values.shape[1]
    values = tl.reshape(values, [count])
    for level in tl.static_range(3):
        values = tl.sum(tl.reshape(values, [count >> (level + 1), 2]), 1)
    return values


@triton.jit
def amounts_from(first, second, third, row, row_max, scale, sizes, BLOCKS: tl.constexpr):
    """Return the amounts from three finite logits on."""
    from_first = tl.zeros([BLOCKS * BLOCK_SIZE // NEIGHBOURS], tl.float32)
    from_second, from_third = from_first, from_first
    raw = load_raw(row, tokens_of_tile(0, BLOCKS), True)
    for block in range(0, sizes.num_blocks, BLOCKS):
        logits = raw.to(tl.float32)
        raw = load_raw(row, tokens_of_tile(block + BLOCKS, BLOCKS), True)  # in flight meanwhile
        each = amounts(logits, row_max, scale)
        # No comparison holds of NaN, nor of -inf.
        from_first += sum_neighbours(tl.where(logits >= first, each, 0.0))
        from_second += sum_neighbours(tl.where(logits >= second, each, 0.0))
        from_third += sum_neighbours(tl.where(logits >= third, each, 0.0))
    return sum_in_order(from_first), sum_in_order(from_second), sum_in_order(from_third)


@triton.jit
def suggest(row, row_max, by_count, goal, total, low, high, scale, sizes, SHIFT: tl.constexpr):
    """Return two numbers between which a logit with the amount `goal` probably is, by a few blocks of the row."""
    blocks = tl.arange(0, SAMPLE) * sizes.num_blocks // SAMPLE
    logits = load_logits(row, part_of_blocks(blocks, 0, BLOCK_SIZE, BLOCK_SIZE), True)
    logits = tl.reshape(logits, [SAMPLE * BLOCK_SIZE])
    each = tl.where(logits > -INFINITY, amounts(logits, row_max, scale), 0.0)
    share = SAMPLE / sizes.num_blocks
    # Of a mass, what is left out is in many tokens, of which a few blocks have their share. What is kept may be in few.
    amount, error = tl.sum(each, 0) - (total - goal) * share, DOUBT * (total - goal) * share
    amount, error = tl.where(by_count, goal * share, amount), tl.where(by_count, 3 * tl.sqrt(goal * share) + 1, error)
    low_more, high_more, low_less, high_less = low, high, low, high
    for _ in range(33 - SHIFT):
        more, less = (low_more + high_more + 1) >> 1, (low_less + high_less + 1) >> 1
        above_more = tl.where(logits >= logit_at(more, SHIFT), each, 0.0)
        above_less = tl.where(logits >= logit_at(less, SHIFT), each, 0.0)
        from_more, from_less = tl.reduce((above_more, above_less), 0, add_both)
        is_more, is_less = from_more >= amount + error, from_less >= amount - error
        low_more, high_more = tl.where(is_more, more, low_more), tl.where(is_more, high_more, more - 1)
        low_less, high_less = tl.where(is_less, less, low_less), tl.where(is_less, high_less, less - 1)
        high_more, high_less = tl.maximum(low_more, high_more), tl.maximum(low_less, high_less)
    return low_more, low_less + 1


@triton.jit
def narrow(bracket, number, amount, goal):
    """Return the bracket, narrowed by the amount from a number on."""
    low, high, from_low, beyond_high = bracket
    is_enough = amount >= goal
    raises, lowers = is_enough & (number >= low), (is_enough == 0) & (number - 1 < high)
    low, from_low = tl.where(raises, number, low), tl.where(raises, amount, from_low)
    high, beyond_high = tl.where(lowers, number - 1, high), tl.where(lowers, amount, beyond_high)
    return low, tl.maximum(low, high), from_low, beyond_high


@triton.jit
def search(low, by_count, goal, row, row_max, total, scale, sizes, SHIFT: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the largest number from which on the amount is `goal` or more, else `low`; that amount; and the one beyond."""
    high = tl.maximum(number_of(row_max, SHIFT), low)
    scale = tl.where(by_count, 0.0, scale)
    more, less = suggest(row, row_max, by_count, goal, total, low, high, scale, sizes, SHIFT)
    first, second, third = low, tl.minimum(tl.maximum(more, low), high), tl.minimum(tl.maximum(less, low), high)
    bracket = low, high, 0.0, 0.0
    searching = tl.full([], True, tl.int1)
    while searching:
        from_first, from_second, from_third = amounts_from(
            logit_at(first, SHIFT),
            logit_at(second, SHIFT),
            logit_at(third, SHIFT),
            row,
            row_max,
            scale,
            sizes,
            BLOCKS,
        )
        bracket = narrow(bracket, first, from_first, goal)
        bracket = narrow(bracket, second, from_second, goal)
        bracket = narrow(bracket, third, from_third, goal)
        low, high, from_low, beyond_high = bracket
        # Not enough from the lowest on: then that is it.
        searching = (low < high) & (from_low >= goal)
        lowest, highest = logit_at(low, SHIFT), logit_at(high + 1, SHIFT)
        part = (from_low - goal) / tl.maximum(from_low - beyond_high, 1e-30)
        guess = number_of(lowest + (highest - lowest) * part, SHIFT)
        guess = tl.minimum(tl.maximum(guess, low), high)
        step = tl.maximum((high - low) >> 4, 1)
        first = tl.minimum(tl.maximum(guess - step + 1, low + 1), tl.maximum(high, low))
        second = tl.minimum(tl.maximum(guess + step, low + 1), tl.maximum(high, low))
        third = (low + high + 1) >> 1
    low, high, from_low, beyond_high = bracket
    return low, from_low, beyond_high


@triton.jit
def least_number(row_max, min_p, temperature, SHIFT: tl.constexpr):
    """Return the least number that min_p keeps."""
    low, high = tl.full([], LOWEST_KEY >> SHIFT, tl.int64), number_of(row_max, SHIFT)  # `high` is kept
    least = tl.log(min_p)
    if min_p > 0:
        for _ in range(33 - SHIFT):
            middle = (low + high) >> 1
            is_kept = scaled(logit_at(middle, SHIFT), row_max, temperature) >= least
            high = tl.where(is_kept, middle, high)
            low = tl.minimum(tl.where(is_kept, low, middle + 1), high)
    return tl.where(min_p > 0, high, low)


@triton.jit
def kept_mass(number, ties, row, row_max, scale, sizes, SHIFT: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the mass from a number on, of whose own tokens so many are kept."""
    this, following = logit_at(number, SHIFT), logit_at(number + 1, SHIFT)
    with_ties, without, _ = amounts_from(this, following, following, row, row_max, scale, sizes, BLOCKS)
    return tl.minimum(with_ties, without + ties * tl.exp2((this - row_max) * scale))


@triton.jit
def last_token(lowest, row, sizes, BLOCKS: tl.constexpr):
    """Return the last token in the order, of those with a logit from `lowest` on: its logit and its id."""
    last = tl.full([BLOCKS, BLOCK_SIZE], 2**63 - 1, tl.int64)
    for block in range(0, sizes.num_blocks, BLOCKS):
        token_ids = tokens_of_tile(block, BLOCKS)
        logits = load_logits(row, token_ids, True)
        order = (key_of(logits).to(tl.int64) << 32) | (token_ids ^ LAST_TOKEN)
        last = tl.minimum(last, tl.where(logits >= lowest, order, 2**63 - 1))
    last = tl.min(tl.min(last, 1), 0)
    return logit_of((last >> 32).to(tl.int32)), (last & LAST_TOKEN).to(tl.int32) ^ LAST_TOKEN


@triton.jit
def wide_cutoff(row, row_max, total, temperature, limits, sizes, BLOCKS: tl.constexpr):
    """Return from which logit on tokens are kept of a row with a finite maximum, where T > 0; and how many that have it.

    `BLOCKS` are read at once: one by each warp is best.
    """
    dtype: tl.constexpr = row.ptr.dtype.element_ty
    # By so many bits keys can be shifted: those of different logits remain different.
    SHIFT: tl.constexpr = 16 if dtype == tl.bfloat16 else 13 if dtype == tl.float16 else 0
    top_k, top_p, min_p = limits
    scale = base_2_scale(temperature)
    number = least_number(row_max, min_p, temperature, SHIFT)
    ties, mass = EVERY_TIE, total
    for criterion in range(2):  # the number that top-k keeps, then top-p's share of the mass of that
        by_count = criterion == 0
        if (by_count & (top_k < sizes.vocab_size)) | ((by_count == 0) & (top_p < 1)):
            if (by_count == 0) & ((top_k < sizes.vocab_size) | (min_p > 0)):
                mass = kept_mass(number, ties, row, row_max, scale, sizes, SHIFT, BLOCKS)
            goal = tl.where(by_count, top_k.to(tl.float32), top_p * mass)
            before = number
            number, from_number, beyond = search(
                before, by_count, goal, row, row_max, total, scale, sizes, SHIFT, BLOCKS
            )
            weight = tl.where(by_count, 1.0, tl.exp2((logit_at(number, SHIFT) - row_max) * scale))
            needed = tl.maximum(tl.ceil((goal - beyond) / tl.maximum(weight, 1e-30)), 1.0)
            needed = tl.where(from_number >= goal, needed, EVERY_TIE)
            ties = tl.where(number > before, needed, tl.minimum(needed, ties))
    return logit_at(number, SHIFT), ties


@triton.jit
def find_tie(logit, number, first, row, BLOCKS: tl.constexpr):
    """Return the `number`-th token of a tile that has a logit."""
    token_ids = tokens_of_tile(first, BLOCKS)
    is_tie = tl.reshape((load_logits(row, token_ids, True) == logit).to(tl.int32), [BLOCKS * BLOCK_SIZE])
    is_it = (is_tie == 1) & (tl.cumsum(is_tie, 0) == number)
    return tl.max(tl.where(is_it, tl.reshape(token_ids, [BLOCKS * BLOCK_SIZE]), 0), 0)


@triton.jit
def store_kept(statistics_ptr, logit, ties, row, temperature, sizes, BLOCKS: tl.constexpr):
    """Replace the statistics of a row's blocks by those of what is kept; return the last token's logit and id."""
    LANES: tl.constexpr = 4096 // row.ptr.dtype.element_ty.primitive_bitwidth  # 16 bytes a thread, a block each warp
    raw = load_blocks(row, tl.arange(0, BLOCKS), True, False, LANES)
    seen, token = 0.0, tl.full([], LAST_TOKEN, tl.int32)
    for first in range(0, sizes.num_blocks, BLOCKS):
        if token == LAST_TOKEN:
            number = 0
            for part in tl.static_range(len(raw)):
                number += (raw[part].to(tl.float32) == logit).to(tl.int32)
            number = tl.sum(tl.sum(number, 1), 0)
            if seen + number >= ties:
                token = find_tie(logit, (ties - seen).to(tl.int32), first, row, BLOCKS)
            seen += number
        kept = TruncatedRow(row.ptr, row.stride_token, row.vocab_size, logit, token)
        blocks = first + tl.arange(0, BLOCKS)
        parts = ()
        for part in tl.static_range(len(raw)):
            token_ids = part_of_blocks(blocks, part, BLOCK_SIZE, LANES)
            parts = parts + (up_to_cutoff(raw[part].to(tl.float32), token_ids, kept),)
        raw = load_blocks(row, blocks + BLOCKS, True, False, LANES)  # in flight meanwhile
        store_statistics(statistics_ptr, parts, first, temperature, sizes, BLOCKS, True)
    if token == LAST_TOKEN:  # all that have the logit are kept, of which there may be none
        logit, token = last_token(logit, row, sizes, BLOCKS)
    return logit, token
