"""Truncation among few tokens in Triton: the *candidates*, tokens of a row that are likely enough to be kept.

1. A *level* is chosen from the maxima of groups of 64 tokens in the `LIKELY` likeliest blocks: the k-th largest maximum,
   for example. The launch that reads has stored the maxima. A group reaches the level if its maximum does.
2. The groups that reach the level are read, and their tokens that reach it are listed.
3. All pairs of candidates are compared. This gives the number and the mass of the tokens before each candidate, and the
   cutoff follows from the definition.

Masses are added up as integers, shares of the row's sum. A sum of integers is the same in any order, so the cutoff does
not depend on how the compiler distributes a tensor over threads.
"""

import triton
import triton.language as tl

from specdecode.kernels.rows import (
    BLOCK_SIZE,
    LAST_TOKEN,
    WARP_BITS,
    base_2_scale,
    key_of,
    load_logits,
    logit_of,
    scaled,
)
from specdecode.kernels.statistics import WARP
from specdecode.kernels.values import INFINITY

CANDIDATES, FEW = tl.constexpr(512), tl.constexpr(256)
"""The most candidates, and groups, that are listed of a row; and the most with top-p alone: for more, a search of the whole
row is faster."""

LIKELY = tl.constexpr(64)
"""The most blocks whose groups are searched: the blocks with the largest maxima."""

LANES_OF_GROUP = tl.constexpr(2)
"""The number of threads of a warp whose tokens of a block form a group."""

GROUPS = tl.constexpr(WARP.value // LANES_OF_GROUP.value)
GROUP = tl.constexpr(BLOCK_SIZE.value // GROUPS.value)
"""The number of groups of a block, and of tokens of a group."""

AT_ONCE = tl.constexpr(32)
"""Groups that are read at once."""

WAYS = tl.constexpr(8)
"""Thresholds that one iteration of a search tries at once."""

DEPTHS, DEEPEST = tl.constexpr(512), tl.constexpr(64)
"""The number of distinct levels, and the depth of the lowest below the row's maximum, in units of max(T, 0.5)."""

ALL = tl.constexpr(2.0**30)
"""The sum of a row as an integer."""

ANY_NUMBER = tl.constexpr(2**31 - 1)

NO_ORDER = tl.constexpr(2**63 - 1)
"""Larger than the `order_of` any token."""


def list_size(max_blocks: int) -> int:
    """Return the size of the lists of a row, int64: orders of candidates; then groups, or sums of blocks."""
    room: int = CANDIDATES.value
    return room + max(room, max_blocks)


list_size_of = triton.constexpr_function(list_size)


@triton.jit
def list_at(workspace, index, sizes):
    """Return a pointer to the lists of a row, given its `row_index`."""
    return workspace.candidates_ptr + index * list_size_of(sizes.MAX_BLOCKS)


@triton.jit
def second_list_at(list_ptr):
    """Return a pointer to the second list of a row."""
    return list_ptr + CANDIDATES


@triton.jit
def order_of(keys, token_ids):
    """Return the int64 order of tokens, given their keys and ids: the largest is the first token."""
    return (keys.to(tl.int64) << 32) | (token_ids ^ LAST_TOKEN)


@triton.jit
def token_of_order(order):
    """Return the logit and the id of a token, given its `order_of`."""
    return logit_of((order >> 32).to(tl.int32)), (order & LAST_TOKEN).to(tl.int32) ^ LAST_TOKEN


@triton.jit
def shares_of(logits, p, temperature):
    """Return the probabilities of tokens before truncation, as integers; `ALL` stands for 1."""
    weights = tl.exp2((logits - p.row_max) * base_2_scale(temperature))
    return (weights * (ALL / p.sumexp)).to(tl.int32)


@triton.jit
def find_threshold(values, amounts, goal, slack, low, high, from_low):
    """Return the largest x in [low, high] at which the amounts of values >= x reach a goal, or `low`; and their sum there.

    A smaller x may be returned if its sum exceeds the goal by at most `slack`. The sum at `low` is `from_low`. All are
    int32, the values at most `high`, and the goal is positive.
    """
    zero = tl.full([], 0, tl.int32)
    low, high, from_low = zero + low, zero + high, zero + from_low
    while (low < high) & (from_low - goal > slack):
        step = (high - low + WAYS - 1) // WAYS
        thresholds = low + step * (tl.arange(0, WAYS) + 1)
        sums = tl.sum(tl.where(values[None, :] >= thresholds[:, None], amounts[None, :], 0), 1)
        number = tl.sum((sums >= goal).to(tl.int32), 0)
        from_low = tl.where(number > 0, tl.min(tl.where(sums >= goal, sums, ANY_NUMBER), 0), from_low)
        low += step * number
        high = tl.minimum(high, low + step - 1)
    return low, from_low


@triton.jit
def level_reaching(maxima, amounts, goal, slack, total, most, lowest, row_max, temperature):
    """Return the highest level at which the amounts of the maxima at or above it reach a goal, and their sum.

    All amounts add up to `total`. If the sum exceeds `most`, return the next higher level, whose sum is below the goal. No
    level is below `lowest`, even if its sum is below the goal. See `find_threshold`.
    """
    scale = DEPTHS / (DEEPEST * tl.maximum(temperature, 0.5))
    depths = -tl.minimum((row_max - maxima) * scale, DEPTHS).to(tl.int32)
    amounts = tl.where(maxima >= lowest, amounts, 0)
    deepest, seen = find_threshold(depths, amounts, goal, slack, -DEPTHS, 0, total)
    deepest += (seen > most).to(tl.int32)
    depth = (1 - deepest) / scale
    margin = depth * 1e-4 + tl.abs(row_max) * 1e-6  # rounding may exceed the goal, but not `most`
    level = row_max - depth - tl.where(most < ANY_NUMBER, -margin, margin)
    return tl.where(deepest > -DEPTHS, tl.maximum(level, lowest), lowest), seen


@triton.jit
def likely_blocks(summary, list_ptr, sizes):
    """Return the blocks with the largest maxima, [LIKELY], and a level that no other block reaches."""
    block_max, floor, p = summary.block_max, summary.floor, summary.p
    if sizes.MAX_BLOCKS <= LIKELY:
        return tl.arange(0, sizes.MAX_BLOCKS), floor
    else:
        blocks_ptr = second_list_at(list_ptr)
        ones = tl.full([sizes.MAX_BLOCKS], 1, tl.int32)
        total, goal, slack = tl.sum((block_max >= floor).to(tl.int32), 0), LIKELY * 7 // 8, LIKELY // 8
        level, _ = level_reaching(block_max, ones, goal, slack, total, LIKELY, floor, p.row_max, summary.temperature)
        reaches = tl.reshape(block_max >= level, [sizes.MAX_BLOCKS // WARP, WARP])
        entries, number = compacted(reaches)
        blocks = tl.reshape(tl.arange(0, sizes.MAX_BLOCKS), reaches.shape)
        tl.store(blocks_ptr + entries, blocks, mask=reaches & (entries < LIKELY))
        tl.debug_barrier()  # the list is read by other threads than those that wrote it
        listed = tl.arange(0, LIKELY)
        blocks = tl.load(blocks_ptr + listed, mask=listed < number, other=sizes.num_blocks).to(tl.int32)
        return blocks, tl.where(number <= LIKELY, level, INFINITY)


@triton.jit
def compacted(is_listed):
    """Return the position in the list of each listed element of a [rows, columns] tensor, and the length of the list.

    Rows are counted first: two short scans are faster than one scan of all elements.
    """
    is_listed = is_listed.to(tl.int32)
    in_row = tl.sum(is_listed, 1)
    before = tl.cumsum(in_row, 0) - in_row
    return before[:, None] + tl.cumsum(is_listed, 1) - 1, tl.sum(in_row, 0)


@triton.jit
def load_maxima(pointer, statistics_ptr, blocks, row):
    """Return the groups of some blocks of a row, and their maxima: -inf beyond the last block, INFINITY in blocks with NaN.

    In a block with NaN, whose sum is NaN, the stored maxima may be wrong.
    """
    NUMBER: tl.constexpr = blocks.shape[0] * GROUPS
    groups = tl.reshape(blocks[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :], [NUMBER])
    lanes = groups[:, None] * LANES_OF_GROUP + tl.arange(0, LANES_OF_GROUP)[None, :]
    inside = groups // GROUPS * BLOCK_SIZE < row.vocab_size
    maxima = tl.max(tl.load(pointer + lanes, mask=inside[:, None], other=-INFINITY), 1)
    sums = tl.load(statistics_ptr + groups // GROUPS * 2 + 1, mask=inside, other=0.0)
    return groups, tl.where(sums == sums, maxima, INFINITY)


@triton.jit
def tokens_of_groups(groups, BLOCK_N: tl.constexpr):
    """Return the token ids of groups, [groups, GROUP]; a warp loads `BLOCK_N` tokens of a block at once."""
    each, width = tl.arange(0, GROUP)[None, :], BLOCK_N // GROUPS
    starts = groups // GROUPS * BLOCK_SIZE + groups % GROUPS * width
    return starts[:, None] + each // width * BLOCK_N + each % width


@triton.jit
def list_tokens(level, groups, maxima, most, row, list_ptr, sizes):
    """List the tokens of a row that reach a level, given groups and their maxima; return their number.

    If the number, or the number of groups, is more than `most`, the list is not complete.
    """
    BLOCK_N: tl.constexpr = WARP_BITS // row.ptr.dtype.element_ty.primitive_bitwidth
    groups_ptr = second_list_at(list_ptr)
    reaches = tl.reshape(maxima >= level, [groups.shape[0] // WARP, WARP])
    positions, num_groups = compacted(reaches)
    tl.debug_barrier()  # the earlier list may still be read
    tl.store(groups_ptr + positions, tl.reshape(groups, reaches.shape), mask=reaches & (positions < CANDIDATES))
    tl.debug_barrier()
    found, first = tl.where(num_groups > most, num_groups, 0), tl.full([], 0, tl.int32)
    while (first < num_groups) & (found <= most):
        listed = first + tl.arange(0, AT_ONCE)
        read = tl.load(groups_ptr + listed, mask=listed < num_groups, other=sizes.num_blocks * GROUPS).to(tl.int32)
        token_ids = tokens_of_groups(read, BLOCK_N)
        logits = load_logits(row, token_ids, True)
        entries, number = compacted(logits >= level)
        entries += found
        order = order_of(key_of(logits), token_ids)
        tl.store(list_ptr + entries, order, mask=(logits >= level) & (entries < CANDIDATES))
        found += number
        first += AT_ONCE
    tl.debug_barrier()
    return found


@triton.jit
def load_candidates(list_ptr, found, MOST: tl.constexpr):
    """Return the `order_of` candidates, and their logits, -inf after the last candidate."""
    listed = tl.arange(0, MOST)
    order = tl.load(list_ptr + listed, mask=listed < found, other=-NO_ORDER)
    logits, _ = token_of_order(order)
    return order, tl.where(listed < found, logits, -INFINITY)


@triton.jit
def cut_candidates(list_ptr, found, is_complete, summary, MOST: tl.constexpr):
    """Return the `order_of` the last kept candidate, and the share of the candidates that top-k and min-p keep.

    Top-p applies to that share if the candidates have all tokens that top-k and min-p keep (`is_complete`), otherwise to
    the whole row.
    """
    top_k, top_p, min_p = summary.limits
    p, temperature = summary.p, summary.temperature
    order, logits = load_candidates(list_ptr, found, MOST)
    num_before, share_before = tl.zeros_like(order).to(tl.int32), tl.zeros_like(order).to(tl.int32)
    for other in range(0, found):
        other_order = tl.load(list_ptr + other)
        other_logit, _ = token_of_order(other_order)
        is_before = other_order > order
        num_before += is_before.to(tl.int32)
        share_before += tl.where(is_before, shares_of(other_logit, p, temperature), 0)
    is_kept = (logits > -INFINITY) & (scaled(logits, p.row_max, temperature) >= tl.log(min_p)) & (num_before < top_k)
    share = tl.sum(tl.where(is_kept, shares_of(logits, p, temperature), 0), 0)
    goal = tl.ceil(tl.minimum(top_p, 1.0) * tl.where(is_complete, share.to(tl.float32), ALL)).to(tl.int32)
    is_kept &= (share_before < tl.where(top_p < 1, goal, ANY_NUMBER)) | (num_before == 0)
    return tl.min(tl.where(is_kept, order, NO_ORDER), 0), share


@triton.jit
def store_kept_candidates(statistics_ptr, last, list_ptr, found, summary, sizes):
    """Replace the statistics of a row's blocks by statistics of the kept candidates, up to `last`."""
    every_block = tl.arange(0, sizes.MAX_BLOCKS)
    inside, sums_ptr = every_block < sizes.num_blocks, second_list_at(list_ptr)
    tl.store(statistics_ptr + every_block * 2, summary.block_max, mask=inside)
    tl.store(sums_ptr + every_block, tl.zeros([sizes.MAX_BLOCKS], tl.int64), mask=inside)
    tl.debug_barrier()  # other threads change the stored statistics next
    order, logits = load_candidates(list_ptr, found, CANDIDATES)
    _, token_ids = token_of_order(order)
    is_kept, blocks = (logits > -INFINITY) & (order >= last), token_ids // BLOCK_SIZE
    block_max = tl.load(statistics_ptr + blocks * 2, mask=is_kept, other=0.0)
    weights = tl.exp2((logits - block_max) * base_2_scale(summary.temperature))
    parts = (tl.where(is_kept, weights, 0.0) * ALL).to(tl.int64)
    tl.atomic_add(sums_ptr + blocks, parts, mask=is_kept, sem="relaxed", scope="cta")
    tl.debug_barrier()
    sums = tl.load(sums_ptr + every_block, mask=inside, other=0, volatile=True)
    tl.store(statistics_ptr + every_block * 2, tl.where(sums > 0, summary.block_max, -INFINITY), mask=inside)
    tl.store(statistics_ptr + every_block * 2 + 1, sums.to(tl.float32) * (1 / ALL), mask=inside)
