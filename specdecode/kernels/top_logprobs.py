"""The launch that lists, for the rows of emitted tokens, the likeliest tokens and the kept set.

A program has one row. If the row's token was emitted, it combines the row's statistics from earlier launches, which cover
the kept tokens only.

Likeliest tokens: the first n in the order (logit descending, id ascending) are found one after the other. The next token
is in the block with the largest maximum of the remaining tokens, the first of equal blocks; only that block is read. Proof:
an earlier token would have a larger logit, or an equal logit and a lower id. So its block would have a larger maximum, or
an equal maximum and a lower index.

Kept tokens are in the blocks with a finite maximum. These blocks are read in the order of ids.

A program reads 8 bytes for each block of 1,024, one block for each likely token (from the cache if it is the same block),
and each block with kept tokens for a kept set. It writes 12 bytes for each likely token, and 4,108 for a kept set.
"""

import triton
import triton.language as tl

from specdecode import batch as limits
from specdecode.kernels.distribution import combine, logprob, recompute_nonfinite
from specdecode.kernels.launch import await_launch
from specdecode.kernels.logprobs import differs_from_raw, load_raw_statistics, normalizer_of
from specdecode.kernels.request import load_temperature, locate_program
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    LAST_TOKEN,
    key_of,
    load_logits,
    part_of_blocks,
    row_index,
    stored_target_row_at,
    target_row_at,
    tokens_of,
)
from specdecode.kernels.statistics import load_target_statistics
from specdecode.kernels.truncation.narrow import NO_ORDER, order_of, token_of_order
from specdecode.kernels.values import INFINITY, RowContext

MOST_KEPT = tl.constexpr(limits.MOST_KEPT)
TOP_LANES = tl.constexpr(triton.next_power_of_2(limits.MOST_TOP_LOGPROBS))
AT_ONCE = tl.constexpr(8)
"""Blocks that are read at once to list kept tokens."""

NO_TOKEN = tl.constexpr(-(2**63))
"""Smaller than the `order_of` any token."""


@triton.jit
def raw_statistics_of(context, inputs, workspace, sizes):
    """Return the statistics of the unmodified row at temperature 1; the row's own statistics if they are the same."""
    block_max, sumexp = load_raw_statistics(context, inputs, workspace, sizes)
    if differs_from_raw(context, inputs, workspace) == 0:
        block_max, sumexp = load_target_statistics(context, workspace, sizes)
    return block_max, sumexp


@triton.jit
def distribution_of(row, statistics, temperature, sizes):
    """Return the distribution of a row, and the maximum of each block; all -inf for a point mass."""
    p = combine(statistics, row, temperature, sizes)
    block_max, _ = recompute_nonfinite(statistics, row, temperature, sizes)
    return p, tl.where(p.point_mass_token < 0, block_max, -INFINITY)


@triton.jit
def next_token(row, block_max, last, sizes):
    """Return the `order_of` the next token after `last`, `NO_TOKEN` if there is none, and the block maxima after that token.

    `block_max` are the block maxima of the tokens after `last`.
    """
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    largest = tl.max(block_max, 0)
    block = tl.min(tl.where(block_max == largest, blocks, sizes.MAX_BLOCKS - 1), 0)
    token_ids = tokens_of(block)
    logits = load_logits(row, token_ids, largest > -INFINITY)
    order = order_of(key_of(logits), token_ids)
    order = tl.where((logits > -INFINITY) & (order < last), order, NO_TOKEN)
    first = tl.max(order, 0)
    second = tl.max(tl.where(order < first, order, NO_TOKEN), 0)
    logit, _ = token_of_order(second)
    return first, tl.where(blocks == block, tl.where(second > NO_TOKEN, logit, -INFINITY), block_max)


@triton.jit
def store_top_logprobs(row, p, block_max, temperature, index, lists, sizes):
    """Write the likeliest tokens of a row and their log-probabilities."""
    normalizer, last = normalizer_of(p), tl.full([], NO_ORDER, tl.int64)
    for rank in range(lists.num_top):
        token, value = tl.where(rank == 0, p.point_mass_token, -1), tl.where(rank == 0, 0.0, -INFINITY)
        if p.point_mass_token < 0:
            last, block_max = next_token(row, block_max, last, sizes)
            logit, token = token_of_order(last)
            value = logprob(logit, token, normalizer, temperature)
            token, value = tl.where(last > NO_TOKEN, token, -1), tl.where(last > NO_TOKEN, value, -INFINITY)
        tl.store(lists.top_ids_ptr + index * lists.num_top + rank, token.to(tl.int64))
        tl.store(lists.top_logprobs_ptr + index * lists.num_top + rank, value)


@triton.jit
def list_kept(row, block_max, ids_ptr, sizes):
    """Write the ids of a row's kept tokens in ascending order, up to MOST_KEPT; return the number of kept tokens."""
    blocks, kept_blocks = tl.arange(0, sizes.MAX_BLOCKS)[None, :], (block_max > -INFINITY).to(tl.int32)
    nth = tl.where(kept_blocks == 1, tl.cumsum(kept_blocks, 0) - 1, -1)[None, :]
    num_kept = tl.full([], 0, tl.int32)
    for first in range(0, tl.sum(kept_blocks, 0), AT_ONCE):
        wanted = (first + tl.arange(0, AT_ONCE))[:, None]
        listed = tl.min(tl.where(nth == wanted, blocks, sizes.num_blocks), 1)  # blocks beyond the last are empty
        token_ids = part_of_blocks(listed, 0, BLOCK_SIZE, BLOCK_SIZE)
        is_kept = tl.reshape((load_logits(row, token_ids, True) > -INFINITY).to(tl.int32), [AT_ONCE * BLOCK_SIZE])
        entries = num_kept + tl.cumsum(is_kept, 0) - is_kept
        token_ids = tl.reshape(token_ids, [AT_ONCE * BLOCK_SIZE])
        tl.store(ids_ptr + entries, token_ids, mask=(is_kept == 1) & (entries < MOST_KEPT))
        num_kept += tl.sum(is_kept, 0)
    return num_kept


@triton.jit
def store_kept_set(row, p, block_max, index, workspace, lists, sizes):
    """Write the number of kept tokens of a row, their ids, and the last one."""
    ids_ptr = lists.kept_ids_ptr + index * MOST_KEPT
    num_listed = list_kept(row, block_max, ids_ptr, sizes)  # 0 for a point mass
    tl.debug_barrier()  # other threads overwrite listed ids by -1 if there are too many
    entries, start = tl.arange(0, MOST_KEPT), tl.where(num_listed <= MOST_KEPT, num_listed, 0)
    tl.store(ids_ptr + entries, tl.where(entries == 0, p.point_mass_token, -1), mask=entries >= start)
    cutoff = p.point_mass_token
    if workspace.cutoffs_ptr is not None:
        token = tl.load(workspace.cutoffs_ptr + index * 2 + 1).to(tl.int32, bitcast=True)
        cutoff = tl.where(token != LAST_TOKEN, token, cutoff)
    tl.store(lists.num_kept_ptr + index, tl.where(p.point_mass_token < 0, num_listed, 1))
    tl.store(lists.cutoff_ptr + index, cutoff.to(tl.int64))


@triton.jit
def store_padding(index, lists):
    """Write the padding after a request's last token."""
    if lists.top_ids_ptr is not None:
        ranks = tl.arange(0, TOP_LANES)
        there = index * lists.num_top + ranks
        tl.store(lists.top_ids_ptr + there, tl.full([TOP_LANES], -1, tl.int64), mask=ranks < lists.num_top)
        nothing = tl.full([TOP_LANES], float("nan"), tl.float32)
        tl.store(lists.top_logprobs_ptr + there, nothing, mask=ranks < lists.num_top)
    if lists.num_kept_ptr is not None:
        tl.store(lists.kept_ids_ptr + index * MOST_KEPT + tl.arange(0, MOST_KEPT), tl.full([MOST_KEPT], -1, tl.int32))
        tl.store(lists.num_kept_ptr + index, 0)
        tl.store(lists.cutoff_ptr + index, tl.full([], -1, tl.int64))


@triton.jit
def top_logprobs_kernel(inputs, outputs, workspace, sizes, lists):
    """List the likely and kept tokens of one row."""
    IS_RAW: tl.constexpr = workspace.raw_statistics_ptr is not None
    request, offset = locate_program(sizes.num_draft_tokens + 1, inputs.packing, sizes)
    temperature = load_temperature(inputs.requests, request)
    context = RowContext(request, offset, -1, None, temperature)
    index = row_index(request, offset, False, sizes)
    await_launch(lists.OVERLAPS)
    if tl.load(outputs.token_ids_ptr + index) >= 0:
        if lists.num_kept_ptr is not None or not IS_RAW:
            row = target_row_at(context, inputs, workspace, sizes)
            statistics = load_target_statistics(context, workspace, sizes)
            p, block_max = distribution_of(row, statistics, temperature, sizes)
            if lists.num_kept_ptr is not None:
                store_kept_set(row, p, block_max, index, workspace, lists, sizes)
            if lists.top_ids_ptr is not None and not IS_RAW:
                store_top_logprobs(row, p, block_max, temperature, index, lists, sizes)
        if lists.top_ids_ptr is not None and IS_RAW:
            raw_row, one = stored_target_row_at(context.request, context.offset, inputs), tl.full([], 1.0, tl.float32)
            raw = raw_statistics_of(context, inputs, workspace, sizes)
            raw_p, raw_max = distribution_of(raw_row, raw, one, sizes)
            store_top_logprobs(raw_row, raw_p, raw_max, one, index, lists, sizes)
    else:
        store_padding(index, lists)
