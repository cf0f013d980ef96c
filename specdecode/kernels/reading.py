"""The launch that reads: every logits row that matters, once, each block leaving its statistics.

A program reads a few blocks of the target row at one offset of one request, and the same blocks of the draft row there. It
reads 2 bytes a logit of bfloat16, and writes 8 for each block of 1,024.

In a large batch rows after a rejection need not be read. There the last program to finish an offset decides it, programs
run in the order of the offsets, and one whose request is known to have stopped before its offset leaves at once, or reads no
further. None ever waits for another: a verdict that comes late only costs the reading of a row. A small batch is read whole,
for its last rows are under way before its first verdict could be known, and decided by the next launch.

How a method decides, by `DECIDE`, is its own affair: `decide_by_sample`, `decide_by_ratio`, `block.note_ratio`.
"""

import triton
import triton.language as tl

from specdecode.kernels.launches import SIZES, SMALL_TENSORS, admit_next_launch, place_in_grid
from specdecode.kernels.philox import load_key
from specdecode.kernels.probabilistic import is_trusted, load_logsumexp
from specdecode.kernels.rows import load_row_blocks, load_temperature, row_at, store_statistics
from specdecode.kernels.steps import FIELDS, clear_state, is_last, load_drafts, peek_stop, peek_stop_again


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def read_kernel(
    state_ptr,  # [batch, FIELDS] int32, then [batch, num_draft_tokens + 1] int32: programs that have finished an offset
    scalars_ptr,  # [batch, num_draft_tokens, SCALARS] float32, or None
    statistics_ptr,  # [batch * (num_draft_tokens + 1) + batch * num_draft_tokens, num_blocks, 2] float32
    target_ptr,  # [batch, num_draft_tokens + 1, vocab_size] any float
    target_index_ptr,  # [batch] int32 or int64, or None
    draft_ptr,  # [batch, num_draft_tokens, vocab_size] any float, or None
    draft_index_ptr,  # [batch] int32 or int64, or None
    logsumexp_ptr,  # [batch, num_draft_tokens] float32, or None
    ids_ptr,  # [batch, num_draft_tokens] int32 or int64
    rates_ptr,  # [num_draft_tokens] float32 conditional rates, or None
    temperature_ptr,  # [batch] any float, or None
    temperature,
    seeds_ptr,  # [batch] int64, or None
    first_seed: tl.int64,
    positions_ptr,  # [batch] int64, or None
    target_stride_request: tl.int64,
    target_stride_offset: tl.int64,
    target_stride_token: tl.int64,
    draft_stride_request: tl.int64,
    draft_stride_offset: tl.int64,
    draft_stride_token: tl.int64,
    logsumexp_stride_request: tl.int64,
    logsumexp_stride_offset: tl.int64,
    ids_stride_request: tl.int64,
    ids_stride_offset: tl.int64,
    batch,
    num_draft_tokens,
    vocab_size,
    num_blocks,
    tiles,
    chunks,
    DECIDE: tl.constexpr,
    LAZY: tl.constexpr,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    TARGET_LANES: tl.constexpr,
    DRAFT_LANES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Summarise `tiles` times `BLOCKS` blocks at one offset of one request."""
    WITH_DRAFT: tl.constexpr = draft_ptr is not None and logsumexp_ptr is None
    AT_ONCE: tl.constexpr = not LAZY or draft_ptr is None  # else there are no registers left for it
    # The next launch is admitted early, to be set up in time. But one that emits without draft rows is soon set up, and was
    # slower for having waited long: it is admitted when a program's last logits are asked for, if greedy before them.
    ADMITS_LATE: tl.constexpr = LAZY and draft_ptr is None
    LOOKS_AGAIN: tl.constexpr = LAZY and logsumexp_ptr is None  # else there are no registers left for it either
    if not ADMITS_LATE:
        admit_next_launch(OVERLAPS)
    chunk, request, offset = place_in_grid(chunks, batch, FLAT)
    drafts = (ids_ptr, ids_stride_request, ids_stride_offset, num_draft_tokens)
    logsumexps = (logsumexp_ptr, logsumexp_stride_request, logsumexp_stride_offset)
    # Asked for before it is known whether the row matters.
    if WITH_DRAFT:
        reads_draft = load_drafts(drafts, request, offset, vocab_size) >= 0
    if logsumexp_ptr is not None:
        logsumexp = load_logsumexp(logsumexps, request, offset, offset < num_draft_tokens)
    t = load_temperature(temperature_ptr, temperature, request)
    matters = True
    if offset > 0:
        matters = load_drafts(drafts, request, offset - 1, vocab_size) >= 0  # to count them all was slower
        if LAZY:
            matters &= offset <= peek_stop(state_ptr, request, num_draft_tokens)
    elif not LAZY:
        if chunk == 0:
            clear_state(state_ptr, request)
    if matters:
        target_rows = (target_ptr, target_index_ptr, target_stride_request, target_stride_offset, target_stride_token)
        target_row = row_at(target_rows, vocab_size, request, offset, TARGET_ALIGNMENT)
        draft_rows = (draft_ptr, draft_index_ptr, draft_stride_request, draft_stride_offset, draft_stride_token)
        if draft_ptr is not None:
            draft_row = row_at(draft_rows, vocab_size, request, offset, DRAFT_ALIGNMENT)
            if WITH_DRAFT:
                reads_draft &= t > 0
        index = request * (num_draft_tokens + 1) + offset
        draft_index = batch.to(tl.int64) * (num_draft_tokens + 1) + request * num_draft_tokens + offset
        if ADMITS_LATE:
            if (t > 0) == 0:
                admit_next_launch(OVERLAPS)
        for tile in range(tiles):
            first = (chunk * tiles + tile) * BLOCKS
            target = load_row_blocks(target_row, first, matters, TARGET_ALIGNMENT, BLOCKS, TARGET_LANES)
            if WITH_DRAFT:
                # Asked for before the target's logits are needed: both rows' loads are under way at once.
                wanted = matters & reads_draft
                draft = load_row_blocks(draft_row, first, wanted, DRAFT_ALIGNMENT, BLOCKS, DRAFT_LANES)
            if LOOKS_AGAIN:  # while logits are under way; if not, what is left of the row is not asked for
                matters = offset <= peek_stop_again(state_ptr, request, num_draft_tokens)
            if ADMITS_LATE:
                if tile == tiles - 1:
                    admit_next_launch(OVERLAPS)
            store_statistics(statistics_ptr, index, target, first, num_blocks, t, BLOCKS, AT_ONCE)
            if WITH_DRAFT:
                if reads_draft:
                    store_statistics(statistics_ptr, draft_index, draft, first, num_blocks, t, BLOCKS, AT_ONCE)
        if logsumexp_ptr is not None:
            if is_trusted(logsumexp) == 0:  # seldom, so all that hangs on it may come afterwards
                if (load_drafts(drafts, request, offset, vocab_size) >= 0) & (t > 0):
                    for tile in range(tiles):
                        first = (chunk * tiles + tile) * BLOCKS
                        draft = load_row_blocks(draft_row, first, True, DRAFT_ALIGNMENT, BLOCKS, DRAFT_LANES)
                        store_statistics(
                            statistics_ptr, draft_index, draft, first, num_blocks, t, BLOCKS, AT_ONCE=False
                        )
        if LAZY:
            if offset < num_draft_tokens:
                # Loaded again, not kept in a register for as long as rows are read; but before programs are counted.
                draft_token = load_drafts(drafts, request, offset, vocab_size)
                if is_last(state_ptr + batch * FIELDS + index, chunks):
                    DECIDE(
                        state_ptr, scalars_ptr, statistics_ptr, target_row, draft_rows, logsumexps, rates_ptr,
                        draft_token, request, offset, t, load_key(seeds_ptr, first_seed, positions_ptr, request), batch,
                        num_draft_tokens, num_blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, MAX_BLOCKS,
                    )  # fmt: skip
