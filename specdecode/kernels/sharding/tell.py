"""What a rank tells the others of sharded rows in Triton.

It tells the statistics of its blocks, 8 bytes for 1,024 logits, and of each row one or two notes of 8 bytes. From these
follow all statistics of one GPU, and the few logits that decide and that one rank has: see `values.RowShard`. In block
verification it also tells the residual sums of blocks, 4 bytes each. How words travel is in `channel`, what is made of them
in `arrange`.

All of it is of adjusted rows, where there are adjustments. Raw log-probabilities then take one more note of a target row.
"""

import triton
import triton.language as tl

from specdecode.kernels.block import sum_share
from specdecode.kernels.distribution import recompute_nonfinite
from specdecode.kernels.greedy import argmax
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.request import (
    count_drafts,
    given_token,
    is_trusted,
    load_draft_ids,
    load_logsumexp,
    load_temperature,
    locate_program,
)
from specdecode.kernels.residual import NUM_LISTED, draft_index
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    INFINITY,
    LAST_TOKEN,
    load_logit,
    row_index,
    stored_target_row_at,
    whole_draft_row_at,
    whole_target_row_at,
)
from specdecode.kernels.sharding.channel import NEXT_STEP, open_line, tell, words_of
from specdecode.kernels.statistics import load_statistics, statistics_at
from specdecode.kernels.stops import row_finished_ptr


@triton.jit
def repaired(row, statistics, temperature, sizes):
    """Return the statistics of a row, which are finite then."""
    block_max, sumexp = recompute_nonfinite(statistics, row, temperature, sizes)
    return block_max, tl.where(temperature > 0, sumexp, 0.0)  # what is computed again has a sum of greedy rows too


@triton.jit
def first_here(row, block_max, temperature, is_read, sizes):
    """Return the first largest token that this rank has of a row, if that is read and may be a point mass; else LAST_TOKEN.

    In a packed call there is no row behind the last one of the last request.
    """
    row_max = tl.max(block_max, 0)
    token = tl.full([], LAST_TOKEN, tl.int32)
    if ((temperature == 0) | (tl.abs(row_max) == INFINITY)) & is_read & (sizes.vocab_size > 0):
        token = (argmax(row, block_max, row_max) + sizes.shard.start).to(tl.int32)
    return token


@triton.jit
def logit_here(row, token, sizes):
    """Return a token's logit, -inf if another rank has it."""
    is_here = (token >= sizes.shard.start) & (token < sizes.shard.end)
    return tl.where(is_here, load_logit(row, token - sizes.shard.start, is_here), -INFINITY)


@triton.jit
def tell_statistics(start, index, statistics, line, exchange, sizes):
    """Tell the statistics of this rank's blocks of a row; or its maximum, which is enough where none are drawn by."""
    block_max, sumexp = statistics
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    word_index, words = index * exchange.blocks_told + start, words_of(block_max, sumexp)
    wanted = blocks * BLOCK_SIZE < sizes.shard.end - sizes.shard.start
    if exchange.MAXIMA:
        wanted &= blocks == 0
        words = words_of(tl.where(blocks == 0, tl.max(block_max, 0), 0.0), tl.zeros_like(sumexp))
    tell(exchange.first, word_index + blocks, words, wanted, line, exchange)


@triton.jit
def tell_summary(row, index, statistics, temperature, is_read, line, workspace, exchange, sizes):
    """Tell the statistics of a row; return its first largest token here, as `first_here`."""
    block_max, sumexp = repaired(row, statistics, temperature, sizes)
    tell_statistics(0, index, (block_max, sumexp), line, exchange, sizes)
    if exchange.MAXIMA:  # for `offer.decide_sample_here`
        pointer, blocks = statistics_at(workspace.statistics_ptr, index, sizes), tl.arange(0, sizes.MAX_BLOCKS)
        tl.store(pointer + blocks * 2, block_max, mask=blocks < sizes.num_blocks)
        tl.store(pointer + blocks * 2 + 1, sumexp, mask=blocks < sizes.num_blocks)
    return first_here(row, block_max, temperature, is_read, sizes)


@triton.jit
def tell_note(index, draft_logit, first, line, exchange):
    """Tell the logit that this rank has of the draft at a row, and the row's first largest token here."""
    word_index = exchange.notes_start + index * exchange.NOTES
    tell(exchange.first, word_index, words_of(draft_logit, first), True, line, exchange)


@triton.jit
def tell_raw_note(row, index, draft_logit, statistics, is_read, line, exchange, sizes):
    """Tell likewise what this rank has of a row as it is in memory, where that is another one than the adjusted row."""
    first = first_here(row, statistics[0], tl.full([], 1.0, tl.float32), is_read, sizes)
    tell(exchange.first, exchange.raw_notes_start + index, words_of(draft_logit, first), True, line, exchange)


@triton.jit
def tell_other(row, index, other, of_cutoff, line, exchange, sizes):
    """Tell the logit of the first largest token of the other row at a place, and of the cutoff that came with a draft."""
    word_index = exchange.notes_start + index * exchange.NOTES + 1
    word = words_of(logit_here(row, other, sizes), of_cutoff)
    tell(exchange.first, word_index, word, True, line, exchange)


@triton.jit
def is_summarised(request, offset, inputs, sizes):
    """Return whether the draft row at an offset is read, if there is a draft, so that its statistics travel."""
    summarised = offset < sizes.num_draft_tokens
    if inputs.drafts.logsumexp_ptr is not None:
        summarised &= is_trusted(load_logsumexp(inputs.drafts, request, offset, summarised)) == 0
    return summarised


@triton.jit
def tell_kernel(inputs, workspace, exchange, sizes):
    """Tell what this rank has found in the rows at one offset of a request; sizes are those of its shard."""
    request, offset = locate_program(sizes.num_draft_tokens + 1, inputs.packing, sizes)
    temperature = load_temperature(inputs.requests, request)
    num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    token = load_draft_ids(inputs.drafts, request, offset, sizes)
    # Logits are there already: they are loaded while statistics are awaited.
    index, is_read = row_index(request, offset, False, sizes), offset <= num_drafts
    row = whole_target_row_at(request, offset, inputs, sizes)
    draft_logit = logit_here(row, token, sizes)
    if exchange.raw_notes_start is not None:
        raw_row = stored_target_row_at(request, offset, inputs)
        raw_logit = logit_here(raw_row, token, sizes)
    if inputs.draft.ptr is not None:
        summarised = is_summarised(request, offset, inputs, sizes)
        has_draft = (offset < num_drafts) & (temperature > 0)
        draft_row_index, its_token = row_index(request, offset, True, sizes), tl.where(has_draft, token, -1)
        draft_row = whole_draft_row_at(request, offset, inputs, sizes)
        its_logit = logit_here(draft_row, its_token, sizes)
        nothing = tl.full([], 0.0, tl.float32)
        of_cutoff = nothing
        if inputs.drafts.cutoff_ptr is not None:
            if has_draft:
                given, _is_known = given_token(request, offset, sizes.shard.vocab_size, inputs)
                of_cutoff = logit_here(draft_row, given, sizes)
    line = open_line(exchange)
    await_launch(exchange.OVERLAPS)
    admit_next_launch(exchange.OVERLAPS)
    if workspace.progress_ptr is not None:
        if inputs.drafts.ids_ptr is not None:
            tl.store(row_finished_ptr(workspace.state_ptr, request, offset, sizes), 0)
    statistics = load_statistics(statistics_at(workspace.statistics_ptr, index, sizes), is_read, sizes)
    if workspace.raw_statistics_ptr is not None:
        raw = load_statistics(statistics_at(workspace.raw_statistics_ptr, index, sizes), is_read, sizes)
    if inputs.draft.ptr is not None:
        draft_ptr = statistics_at(workspace.statistics_ptr, draft_row_index, sizes)
        of_draft = load_statistics(draft_ptr, has_draft & summarised, sizes)
    if exchange.peers_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(exchange.memory_ptr + NEXT_STEP, line.step + 1)
    first = tell_summary(row, index, statistics, temperature, is_read, line, workspace, exchange, sizes)
    tell_note(index, draft_logit, first, line, exchange)
    if workspace.raw_statistics_ptr is not None:
        if exchange.raw_notes_start is not None:
            raw = repaired(raw_row, raw, tl.full([], 1.0, tl.float32), sizes)
            tell_raw_note(raw_row, index, raw_logit, raw, is_read, line, exchange, sizes)
        else:
            raw = repaired(row, raw, tl.full([], 1.0, tl.float32), sizes)
        tell_statistics(exchange.raw_start, index, raw, line, exchange, sizes)
    if inputs.draft.ptr is not None:
        other = tl.full([], LAST_TOKEN, tl.int32)
        if offset < sizes.num_draft_tokens:
            if summarised:
                other = tell_summary(
                    draft_row, draft_row_index, of_draft, temperature, has_draft, line, workspace, exchange, sizes
                )
            tell_note(draft_row_index, its_logit, other, line, exchange)
            tell_other(draft_row, draft_row_index, tl.where(has_draft, first, -1), of_cutoff, line, exchange, sizes)
        tell_other(row, index, other, nothing, line, exchange, sizes)


@triton.jit
def sum_shard_kernel(inputs, workspace, exchange, sizes, tuning):
    """Tell the sums of `BLOCKS` of this rank's blocks of a listed residual, or of several in turn."""
    await_launch(tuning.OVERLAPS)
    admit_next_launch(tuning.OVERLAPS)
    line, chunks = open_line(exchange), tl.cdiv(exchange.blocks_told, tuning.BLOCKS)
    first = sizes.shard.start // BLOCK_SIZE
    for share in range(tl.program_id(0), tl.load(workspace.state_ptr + NUM_LISTED) * chunks, tl.num_programs(0)):
        request, offset, blocks, sums = sum_share(share, chunks, first, inputs, workspace, sizes, tuning)
        wanted = blocks * BLOCK_SIZE < sizes.shard.end - sizes.shard.start
        word_index = draft_index(request, offset, sizes) * exchange.blocks_told + blocks
        tell(exchange.sums, word_index, sums.to(tl.int32, bitcast=True), wanted, line, exchange)
