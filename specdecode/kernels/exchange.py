"""What ranks tell each other of sharded rows in Triton, and how it is put together.

A rank sends the statistics of its blocks, 8 bytes for 1,024 logits, and of each row up to three notes: 12 bytes. From these
follow all statistics of one GPU, and the few logits that decide and that one rank has: see `values.ShardedRow`. In block
verification a second exchange has the residual sums of blocks, 4 bytes each.
"""

import triton
import triton.language as tl

from specdecode.kernels.block import listed_residual
from specdecode.kernels.distribution import recompute_nonfinite
from specdecode.kernels.greedy import argmax
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.packed import locate_program
from specdecode.kernels.probabilistic import is_trusted, load_both, load_logsumexp, residual_sums
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    INFINITY,
    KNOWN,
    LAST_TOKEN,
    load_logit,
    load_temperature,
    row_index,
    whole_draft_row_at,
    whole_target_row_at,
)
from specdecode.kernels.state import LISTED, count_drafts, load_draft_ids
from specdecode.kernels.statistics import load_statistics, statistics_at

FIRST, DRAFT_LOGIT, OTHER_LOGIT, NOTES = (tl.constexpr(number) for number in range(4))
"""What a rank notes of a row: its first token with the largest logit here, where the row may be a point mass; the logit of
the draft; and the logit of the token that is `FIRST` of the other row at the same place."""


# ---- what this rank tells of its part of a row


@triton.jit
def repair(row, pointer, is_read, temperature, sizes):
    """Make the statistics of a row finite, and return the maxima; those of a row that was not read are -inf."""
    statistics = load_statistics(pointer, is_read, sizes)
    block_max, sumexp = recompute_nonfinite(statistics, row, temperature, sizes)
    sumexp = tl.where(temperature > 0, sumexp, 0.0)  # what is computed again has a sum of greedy rows too
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    tl.store(pointer + blocks * 2, block_max, mask=blocks < sizes.num_blocks)
    tl.store(pointer + blocks * 2 + 1, sumexp, mask=blocks < sizes.num_blocks)
    return block_max


@triton.jit
def first_here(row, block_max, temperature, sizes):
    """Return the first largest token that this rank has of a row, if the row may be a point mass; else LAST_TOKEN."""
    row_max = tl.max(block_max, 0)
    token = tl.full([], LAST_TOKEN, tl.int32)
    if ((temperature == 0) | (tl.abs(row_max) == INFINITY)) & (sizes.vocab_size > 0):
        token = (argmax(row, block_max, row_max) + sizes.shard.start).to(tl.int32)
    return token


@triton.jit
def logit_here(row, token, sizes):
    """Return a token's logit, -inf if another rank has it."""
    is_here = (token >= sizes.shard.start) & (token < sizes.shard.end)
    return tl.where(is_here, load_logit(row, token - sizes.shard.start, is_here), -INFINITY)


@triton.jit
def note_row(row, index, is_read, token, temperature, workspace, exchange, sizes):
    """Make a row's statistics finite; note its first largest token, and return it; note the draft's logit."""
    pointer = statistics_at(workspace.statistics_ptr, index, sizes)
    block_max = repair(row, pointer, is_read, temperature, sizes)
    first = first_here(row, block_max, temperature, sizes)
    tl.store(exchange.notes_ptr + index * NOTES + FIRST, first.to(tl.float32, bitcast=True))
    tl.store(exchange.notes_ptr + index * NOTES + DRAFT_LOGIT, logit_here(row, token, sizes))
    if exchange.maxima_ptr is not None:
        tl.store(exchange.maxima_ptr + index * 2, tl.max(block_max, 0))
        tl.store(exchange.maxima_ptr + index * 2 + 1, 0.0)
    return first


@triton.jit
def note_kernel(inputs, workspace, exchange, sizes):
    """Note what this rank tells of the rows at one offset of a request; sizes are those of its shard."""
    request, offset = locate_program(sizes.num_draft_tokens + 1, inputs.packing, sizes)
    temperature = load_temperature(inputs.requests, request)
    token, num_drafts = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32)
    if inputs.drafts.ids_ptr is not None:
        num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
        token = load_draft_ids(inputs.drafts, request, offset, sizes)
    await_launch(exchange.OVERLAPS)
    index, is_read = row_index(request, offset, False, sizes), offset <= num_drafts
    row = whole_target_row_at(request, offset, inputs)
    first = note_row(row, index, is_read, token, temperature, workspace, exchange, sizes)
    if workspace.raw_statistics_ptr is not None:
        raw_ptr = statistics_at(workspace.raw_statistics_ptr, index, sizes)
        repair(row, raw_ptr, is_read, tl.full([], 1.0, tl.float32), sizes)
    other = tl.full([], -1, tl.int32)
    if inputs.draft.ptr is not None:
        if offset < sizes.num_draft_tokens:
            draft_index = row_index(request, offset, True, sizes)
            draft_row = whole_draft_row_at(request, offset, inputs, sizes)
            has_draft = (offset < num_drafts) & (temperature > 0)
            is_read = has_draft
            if inputs.drafts.logsumexp_ptr is not None:
                is_read &= is_trusted(load_logsumexp(inputs.drafts, request, offset, has_draft)) == 0
            token = tl.where(has_draft, token, -1)
            other = note_row(draft_row, draft_index, is_read, token, temperature, workspace, exchange, sizes)
            of_target = logit_here(draft_row, tl.where(has_draft, first, -1), sizes)
            tl.store(exchange.notes_ptr + draft_index * NOTES + OTHER_LOGIT, of_target)
    tl.store(exchange.notes_ptr + index * NOTES + OTHER_LOGIT, logit_here(row, other, sizes))


# ---- what all ranks told


@triton.jit
def rank_of(block, exchange):
    """Return which rank has a block."""
    return (tl.load(exchange.sources_ptr + block) // exchange.most_blocks).to(tl.int64)


@triton.jit
def place_blocks(index, exchange, sizes):
    """Return where the blocks of a row are in what was received, counted from where such rows begin."""
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    sources = tl.load(exchange.sources_ptr + blocks, mask=blocks < sizes.num_blocks, other=0)
    rank, block = (sources // exchange.most_blocks).to(tl.int64), sources % exchange.most_blocks
    return rank * exchange.length, index * exchange.most_blocks + block


@triton.jit
def arrange_statistics(start, index, pointer, exchange, sizes):
    """Put the statistics of a row in the order of the vocabulary; return its maximum and the first block that has it."""
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    inside = blocks < sizes.num_blocks
    of_rank, place = place_blocks(index, exchange, sizes)
    source = exchange.received_ptr + of_rank + start + place * 2
    block_max = tl.load(source, mask=inside, other=-INFINITY)
    destination = statistics_at(pointer, index, sizes) + blocks * 2
    tl.store(destination, block_max, mask=inside)
    sumexp = tl.load(source + 1, mask=inside, other=0.0)
    tl.store(destination + 1, sumexp, mask=inside)
    row_max = tl.max(block_max, 0)
    return row_max, tl.argmax((block_max == row_max).to(tl.int32), 0)


@triton.jit
def told(NOTE: tl.constexpr, index, block, exchange):
    """Return what the rank that has a block noted of a row."""
    start = rank_of(block, exchange) * exchange.length + exchange.notes_start
    return tl.load(exchange.received_ptr + start + index * NOTES + NOTE)


@triton.jit
def keep_known(index, row_max, largest, token, has_other, other_index, other_largest, workspace, exchange):
    """Keep what is known of a row: its maximum and the token, its draft, and the first largest token of the other row."""
    other = told(FIRST, other_index, other_largest, exchange).to(tl.int32, bitcast=True)
    known_ptr = workspace.notes_ptr + index * KNOWN
    tl.store(known_ptr, row_max)
    tl.store(known_ptr + 1, told(FIRST, index, largest, exchange))
    tl.store(known_ptr + 2, token.to(tl.float32, bitcast=True))
    draft_logit = -INFINITY  # where the rest of the row is not known it is of no use
    if exchange.maxima_ptr is None:
        draft_logit = told(DRAFT_LOGIT, index, tl.maximum(token, 0) // BLOCK_SIZE, exchange)
    tl.store(known_ptr + 3, draft_logit)
    tl.store(known_ptr + 4, tl.where(has_other, other, -1).to(tl.float32, bitcast=True))
    tl.store(known_ptr + 5, told(OTHER_LOGIT, index, other_largest, exchange))


@triton.jit
def arrange_kernel(inputs, workspace, exchange, sizes):
    """Put what ranks told of the rows at one offset of a request where later launches look for it."""
    admit_next_launch(exchange.OVERLAPS)
    request, offset = locate_program(sizes.num_draft_tokens + 1, inputs.packing, sizes)
    token = tl.full([], -1, tl.int32)
    if inputs.drafts.ids_ptr is not None:
        token = load_draft_ids(inputs.drafts, request, offset, sizes)
    index = row_index(request, offset, False, sizes)
    row_max, largest = arrange_statistics(0, index, workspace.statistics_ptr, exchange, sizes)
    if workspace.raw_statistics_ptr is not None:
        arrange_statistics(exchange.raw_start, index, workspace.raw_statistics_ptr, exchange, sizes)
    has_other, other, other_largest = tl.full([], False, tl.int1), index, largest
    if inputs.draft.ptr is not None:
        has_other = offset < sizes.num_draft_tokens
        if has_other:
            other = row_index(request, offset, True, sizes)
            other_max, other_largest = arrange_statistics(0, other, workspace.statistics_ptr, exchange, sizes)
            keep_known(other, other_max, other_largest, token, has_other, index, largest, workspace, exchange)
    keep_known(index, row_max, largest, token, has_other, other, other_largest, workspace, exchange)


# ---- the sums of block verification


@triton.jit
def sum_shard_kernel(inputs, workspace, exchange, sizes, tuning):
    """Sum `BLOCKS` of this rank's blocks of a listed residual, or of several in turn, if there are more than programs."""
    await_launch(tuning.OVERLAPS)
    chunks = tl.cdiv(exchange.most_blocks, tuning.BLOCKS)
    for share in range(tl.program_id(0), tl.load(workspace.state_ptr + LISTED) * chunks, tl.num_programs(0)):
        entry = tl.load(workspace.listed_ptr + share // chunks)
        _, _, residual, temperature, row, draft_row = listed_residual(entry, inputs, workspace, sizes)
        blocks = share % chunks * tuning.BLOCKS + tl.arange(0, tuning.BLOCKS)
        target, draft = load_both(inputs, row, draft_row, sizes.shard.start // BLOCK_SIZE + blocks, tuning.LANES)
        sums = residual_sums(target, draft, residual, temperature)
        sums_ptr = exchange.sums_ptr + entry.to(tl.int64) * exchange.most_blocks
        tl.store(sums_ptr + blocks, sums, mask=blocks < exchange.most_blocks)


@triton.jit
def arrange_sums_kernel(workspace, exchange, sizes):
    """Put the residual sums of one draft's row in the order of the vocabulary."""
    admit_next_launch(exchange.OVERLAPS)
    entry, blocks = tl.program_id(0).to(tl.int64), tl.arange(0, sizes.MAX_BLOCKS)
    of_rank, place = place_blocks(entry, exchange, sizes)
    inside = blocks < sizes.num_blocks
    sums = tl.load(exchange.received_ptr + of_rank + place, mask=inside, other=0.0)
    tl.store(workspace.residual_sums_ptr + entry * sizes.num_blocks + blocks, sums, mask=inside)
