"""What all ranks told of sharded rows in Triton, put together as one GPU has it after reading."""

import triton
import triton.language as tl

from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.read import decide
from specdecode.kernels.request import load_draft_ids, load_temperature, locate_program
from specdecode.kernels.residual import NUM_LISTED, draft_index, listed_residual, residual_sums_at
from specdecode.kernels.rows import INFINITY, KNOWN, RAW_KNOWN, row_index
from specdecode.kernels.sharding.channel import awaited, hear, high_of, listen, load_step, low_of
from specdecode.kernels.sharding.cut import GIVEN, PROGRESS
from specdecode.kernels.sharding.tell import is_summarised
from specdecode.kernels.statistics import at, statistics_at


@triton.jit
def sources_of(exchange, sizes):
    """Return which rank has each block, [MAX_BLOCKS], and which of its blocks that is."""
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    sources = tl.load(exchange.sources_ptr + blocks, mask=blocks < sizes.num_blocks, other=0)
    return (sources // exchange.blocks_told).to(tl.int64), sources % exchange.blocks_told


@triton.jit
def listen_to_statistics(start, index, is_row, sources, step, exchange, sizes):
    """Return what has come of a row's statistics, in the order of the vocabulary, and of what to `hear`."""
    holders, theirs = sources
    # Not by &: Triton's interpreter spreads a scalar condition as integers, which are no mask in Triton 3.9.
    wanted = tl.where(tl.arange(0, sizes.MAX_BLOCKS) < sizes.num_blocks, is_row, False)
    word_index = start + index * exchange.blocks_told + theirs
    words, pointers = listen(exchange.first, holders, word_index, wanted, step, exchange, tl.int64)
    return words, pointers, wanted


@triton.jit
def listen_to_notes(which, index, is_row, step, exchange):
    """Return likewise what has come of the first or the second note of each rank on a row, [LANES]."""
    return listen_to_each(exchange.notes_start + index * exchange.NOTES + which, is_row, step, exchange)


@triton.jit
def listen_to_each(word_index, is_row, step, exchange):
    """Return likewise what has come of a word of each rank, [LANES]."""
    ranks = tl.arange(0, exchange.LANES)
    wanted = tl.where(ranks < exchange.RANKS, is_row, False)
    words, pointers = listen(exchange.first, ranks, word_index, wanted, step, exchange, tl.int64)
    return words, pointers, wanted


@triton.jit
def hear_statistics(listened, index, pointer, temperature, sources, exchange, sizes):
    """Store the statistics of a row in the order of the vocabulary; return its maximum, and a rank.

    It is the rank that has the first block with that maximum, if the row may be a point mass, so that it matters.
    """
    words, pointers, wanted = listened
    words = hear(words, pointers, exchange.first, wanted, exchange)
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    destination = statistics_at(pointer, index, sizes).to(tl.pointer_type(tl.int64), bitcast=True)
    tl.store(destination + blocks, words, mask=wanted)
    block_max = tl.where(wanted, low_of(words), -INFINITY)
    row_max, rank = tl.max(block_max, 0), tl.full([], 0, tl.int64)
    if (temperature == 0) | (tl.abs(row_max) == INFINITY):
        holders, _ = sources
        largest = tl.argmax((block_max == row_max).to(tl.int32), 0)
        rank = tl.max(tl.where(blocks == largest, holders, 0), 0)
    return row_max, rank


@triton.jit
def hear_notes(listened, others, exchange):
    """Return what each rank noted of a row, [LANES]: the logit of its draft, its first largest token, two other logits."""
    words, pointers, wanted = listened
    words = hear(words, pointers, exchange.first, wanted, exchange)
    other_words = words
    if exchange.NOTES == 2:
        other_words, pointers, _ = others
        other_words = hear(other_words, pointers, exchange.first, wanted, exchange)
    of_cutoff = tl.where(wanted, high_of(other_words).to(tl.float32, bitcast=True), -INFINITY)
    return tl.where(wanted, low_of(words), -INFINITY), high_of(words), low_of(other_words), of_cutoff


@triton.jit
def keep_known(index, largest, notes, token, other, other_rank, workspace, exchange):
    """Keep what is known of a row: its maximum and the token, its draft, and the first largest token of the other row.

    Given the maximum and the rank that has it, what each rank noted of the row, and which has the other row's maximum.
    """
    row_max, rank = largest
    draft_logits, firsts, other_logits, _ = notes
    known_ptr = workspace.known_ptr + index * KNOWN
    tl.store(known_ptr, row_max)
    tl.store(known_ptr + 1, at(firsts, rank).to(tl.float32, bitcast=True))
    tl.store(known_ptr + 2, token.to(tl.float32, bitcast=True))
    draft_logit = tl.max(draft_logits, 0)  # all ranks but one say -inf
    if exchange.MAXIMA:  # where the rest of the row is not known it is of no use
        draft_logit = -INFINITY
    tl.store(known_ptr + 3, draft_logit)
    tl.store(known_ptr + 4, other.to(tl.float32, bitcast=True))
    tl.store(known_ptr + 5, at(other_logits, other_rank))


@triton.jit
def keep_raw(index, rank, listened, workspace, exchange):
    """Keep what is known of a row as it is in memory: its first largest token, given which rank has it, and its draft."""
    words, pointers, wanted = listened
    words = hear(words, pointers, exchange.first, wanted, exchange)
    known_ptr = workspace.raw_known_ptr + index * RAW_KNOWN
    tl.store(known_ptr, at(high_of(words), rank).to(tl.float32, bitcast=True))
    tl.store(known_ptr + 1, tl.max(tl.where(wanted, low_of(words), -INFINITY), 0))


@triton.jit
def arrange(request, offset, temperature, sources, step, inputs, workspace, exchange, sizes):
    """Put what ranks told of the rows at one offset of a request where later launches look for it; return the draft.

    As soon as nothing is waited for any more, the next launch is admitted.
    """
    token = load_draft_ids(inputs.drafts, request, offset, sizes)
    index, is_row = row_index(request, offset, False, sizes), offset >= 0
    # All is listened to before anything is waited for.
    statistics = listen_to_statistics(0, index, is_row, sources, step, exchange, sizes)
    notes = listen_to_notes(0, index, is_row, step, exchange)
    others = notes
    if workspace.raw_statistics_ptr is not None:
        raw = listen_to_statistics(exchange.raw_start, index, is_row, sources, step, exchange, sizes)
        if exchange.raw_notes_start is not None:
            raw_notes = listen_to_each(exchange.raw_notes_start + index, is_row, step, exchange)
    if inputs.draft.ptr is not None:
        others = listen_to_notes(1, index, is_row, step, exchange)
        draft_row_index, is_draft_row = row_index(request, offset, True, sizes), offset < sizes.num_draft_tokens
        summarised = is_summarised(request, offset, inputs, sizes)
        of_draft = listen_to_statistics(0, draft_row_index, summarised, sources, step, exchange, sizes)
        draft_notes = listen_to_notes(0, draft_row_index, is_draft_row, step, exchange)
        draft_others = listen_to_notes(1, draft_row_index, is_draft_row, step, exchange)
    row_max, rank = hear_statistics(statistics, index, workspace.statistics_ptr, temperature, sources, exchange, sizes)
    noted = hear_notes(notes, others, exchange)
    if workspace.raw_statistics_ptr is not None:
        raw_ptr = workspace.raw_statistics_ptr
        _, raw_rank = hear_statistics(raw, index, raw_ptr, temperature, sources, exchange, sizes)
        if exchange.raw_notes_start is not None:
            keep_raw(index, raw_rank, raw_notes, workspace, exchange)
    other, other_rank = tl.full([], -1, tl.int32), rank
    if inputs.draft.ptr is not None:
        draft_max, draft_rank = tl.full([], -INFINITY, tl.float32), tl.full([], 0, tl.int64)
        if summarised:
            draft_max, draft_rank = hear_statistics(
                of_draft, draft_row_index, workspace.statistics_ptr, temperature, sources, exchange, sizes
            )
        draft_noted = hear_notes(draft_notes, draft_others, exchange)
        if is_draft_row:
            first = at(noted[1], rank)
            keep_known(draft_row_index, (draft_max, draft_rank), draft_noted, token, first, rank, workspace, exchange)
            if inputs.drafts.cutoff_ptr is not None:
                tl.store(workspace.progress_ptr + draft_row_index * PROGRESS + GIVEN, tl.max(draft_noted[3], 0))
            other, other_rank = at(draft_noted[1], draft_rank), draft_rank
    # Nothing is waited for any more. Before, a large launch that does not fit would keep all launches of other groups back.
    admit_next_launch(exchange.OVERLAPS)
    keep_known(index, (row_max, rank), noted, token, other, other_rank, workspace, exchange)
    return token


@triton.jit
def wait_kernel(exchange, sizes):
    """Wait until all ranks tell of all target rows: then no program of the next launch waits long, so there may be many."""
    step, rows = load_step(exchange), sizes.batch * (sizes.num_draft_tokens + 1)
    await_launch(exchange.OVERLAPS)
    for first in range(tl.program_id(0) * exchange.LANES, rows, tl.num_programs(0) * exchange.LANES):
        index = first + tl.arange(0, exchange.LANES)
        wanted, word_index = index < rows, exchange.notes_start + index.to(tl.int64) * exchange.NOTES
        for rank in range(exchange.RANKS):
            words, pointers = listen(exchange.first, rank, word_index, wanted, step, exchange, tl.int64)
            awaited(words, pointers, wanted, exchange)
    admit_next_launch(exchange.OVERLAPS)


@triton.jit
def arrange_kernel(inputs, workspace, exchange, sizes, tuning):
    """Arrange what ranks told of the rows at one offset of a request, and decide about its draft if that is wanted."""
    request, offset = locate_program(sizes.num_draft_tokens + 1, inputs.packing, sizes)
    temperature, step = load_temperature(inputs.requests, request), load_step(exchange)
    sources = sources_of(exchange, sizes)
    await_launch(exchange.OVERLAPS)
    token = arrange(request, offset, temperature, sources, step, inputs, workspace, exchange, sizes)
    if tuning.DECIDE is not None:
        tl.debug_barrier()  # what was arranged is read by other threads than wrote it
        if offset < sizes.num_draft_tokens:
            decide(request, offset, token, temperature, inputs, workspace, sizes, tuning)


@triton.jit
def arrange_sums_kernel(workspace, exchange, sizes):
    """Put the residual sums that ranks told in the order of the vocabulary, a listed draft's row at a time."""
    step, blocks = load_step(exchange), tl.arange(0, sizes.MAX_BLOCKS)
    ranks, theirs = sources_of(exchange, sizes)
    await_launch(exchange.OVERLAPS)
    inside = blocks < sizes.num_blocks
    for share in range(tl.program_id(0), tl.load(workspace.state_ptr + NUM_LISTED), tl.num_programs(0)):
        request, offset = listed_residual(share, workspace, sizes)
        word_index = draft_index(request, offset, sizes) * exchange.blocks_told + theirs
        words, pointers = listen(exchange.sums, ranks, word_index, inside, step, exchange, tl.int32)
        sums = hear(words, pointers, exchange.sums, inside, exchange)
        sums_ptr = residual_sums_at(workspace, request, offset, sizes)
        tl.store(sums_ptr + blocks, sums.to(tl.float32, bitcast=True), mask=inside)
    admit_next_launch(exchange.OVERLAPS)
