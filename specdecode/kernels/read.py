"""The launch that reads every logits row that matters once, and stores the statistics of each block.

A program reads a few blocks of the target row at one offset of one request, and the same blocks of the draft row there: 2
bytes a logit of bfloat16. It writes 8 bytes for each block of 1,024.

Rows after a rejection need not be read. In a large batch this launch also decides: programs run in the order of the
offsets, the last program to finish a row decides about its draft, and a program exits if an earlier row of its request is
known to be rejected. No program waits for another: a rejection that is published late only costs the reading of a row.

A small batch reads all rows through the row after a request's last draft, because all loads are in flight before the first
decision. So do `block`, which needs the rows of all drafts, and truncated batches of `strict`, or of `synthetic` without
draft logits.
"""

import triton
import triton.language as tl

from specdecode.kernels.adjustments import may_change
from specdecode.kernels.first_rejected import (
    clear_state,
    is_last,
    peek_first_rejected,
    publish_empty,
    publish_rejection,
    row_finished_ptr,
)
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.logprobs import load_raw_statistics, store_draft_logprob
from specdecode.kernels.request import is_trusted, load_draft_ids, load_key, load_logsumexp, load_temperature, locate
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    WARP_BITS,
    load_stored_blocks,
    logits_of_stored,
    row_index,
    whole_draft_row_at,
    whole_target_row_at,
)
from specdecode.kernels.selection import noise_at
from specdecode.kernels.statistics import (
    draft_statistics,
    maxima_at,
    raw_statistics,
    store_pairs,
    store_statistics,
    store_statistics_and_raw,
    target_statistics,
)
from specdecode.kernels.values import INFINITY, RowContext


@triton.jit
def locate_in_grid(inputs, sizes, config):
    """Return a program's chunk (its share of a row's blocks), its request and its offset."""
    if config.FLAT:
        chunk = tl.program_id(0) % config.chunks
        request = tl.program_id(0) // config.chunks % sizes.batch
        offset = tl.program_id(0) // config.chunks // sizes.batch
    else:  # without divisions, which would delay the first load
        chunk, request, offset = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if inputs.drafts.ids_ptr is None:
        offset = 0  # known to the compiler
    return chunk, locate(request.to(tl.int64), inputs.packing, sizes), offset


@triton.jit
def load_row_blocks(rows, row, first, wanted, BLOCKS: tl.constexpr):
    """Return the stored logits of `BLOCKS` consecutive blocks of a row; a warp loads a block, 16 bytes a thread."""
    PAIRS: tl.constexpr = rows.ALIGNED and rows.ptr.dtype.element_ty == tl.bfloat16
    BLOCK_N: tl.constexpr = WARP_BITS // rows.ptr.dtype.element_ty.primitive_bitwidth
    return load_stored_blocks(row, first + tl.arange(0, BLOCKS), wanted, PAIRS, BLOCK_N)


@triton.jit
def store_adjusted(pointer, maxima_ptr, stored, row, first, temperature, sizes, config):
    """Store the statistics of a program's blocks of an adjusted row, given the blocks as stored, in parts.

    Blocks that no adjustment can change are not adjusted.
    """
    span = first * BLOCK_SIZE, tl.minimum((first + config.BLOCKS) * BLOCK_SIZE, row.vocab_size) - 1
    if may_change(row.adjustments, span):
        BLOCK_N: tl.constexpr = WARP_BITS // row.ptr.dtype.element_ty.primitive_bitwidth
        parts = logits_of_stored(stored, row, first + tl.arange(0, config.BLOCKS), BLOCK_N)
        store_statistics(pointer, maxima_ptr, parts, first, temperature, sizes, config.BLOCKS, config.INTEGER_MAX)
    else:
        store_statistics(pointer, maxima_ptr, stored, first, temperature, sizes, config.BLOCKS, config.INTEGER_MAX)


@triton.jit
def summarise(chunk, context, logsumexp, inputs, workspace, sizes, config):
    """Store the statistics of a program's blocks of a target row, and of the draft row at the same offset if it is needed.

    The context's token is None (at compile time) if there are no draft rows, or if `logsumexp` is given. With a token, the
    draft row is read if the token is a draft and the request is not greedy. With `logsumexp`, it is read if this number is
    too imprecise to use.
    """
    request, offset, token, _, temperature = context
    row = whole_target_row_at(request, offset, inputs, sizes)
    statistics = target_statistics(workspace, request, offset, sizes)
    maxima_ptr, draft_maxima = None, None
    if workspace.maxima_ptr is not None:
        maxima_ptr = maxima_at(workspace, row_index(request, offset, False, sizes), sizes)
    if workspace.raw_statistics_ptr is not None:
        raw = raw_statistics(workspace, request, offset, sizes)
    if inputs.draft.ptr is not None:
        draft_row = whole_draft_row_at(request, offset, inputs, sizes)
        draft_pointer = draft_statistics(workspace, request, offset, sizes)
        if workspace.maxima_ptr is not None:
            draft_maxima = maxima_at(workspace, row_index(request, offset, True, sizes), sizes)
    if token is not None:
        reads_draft = (token >= 0) & (temperature > 0)
    for tile in range(config.tiles):
        first = (chunk * config.tiles + tile) * config.BLOCKS
        target = load_row_blocks(inputs.target, row, first, True, config.BLOCKS)
        if token is not None:  # the loads of both rows are in flight at once
            has_blocks = reads_draft
            if workspace.draft_id_of_token_ptr is not None:  # the draft's vocabulary may end before the target's
                has_blocks = reads_draft & (first * BLOCK_SIZE < draft_row.vocab_size)
            draft = load_row_blocks(inputs.draft, draft_row, first, has_blocks, config.BLOCKS)
        if config.ADMITS_LATE:
            if tile == config.tiles - 1:
                admit_next_launch(config.OVERLAPS)
        if inputs.adjustments.EXIST:
            if workspace.raw_statistics_ptr is not None:
                ONE = tl.full([], 1.0, tl.float32)
                store_statistics(raw, None, target, first, ONE, sizes, config.BLOCKS, config.INTEGER_MAX)
            store_adjusted(statistics, maxima_ptr, target, row, first, temperature, sizes, config)
        elif workspace.raw_statistics_ptr is None:
            store_statistics(
                statistics, maxima_ptr, target, first, temperature, sizes, config.BLOCKS, config.INTEGER_MAX
            )
        else:
            store_statistics_and_raw(statistics, raw, maxima_ptr, target, first, temperature, sizes, config)
        if token is not None:
            if has_blocks:
                store_statistics(
                    draft_pointer,
                    draft_maxima,
                    draft,
                    first,
                    temperature,
                    sizes,
                    config.BLOCKS,
                    config.INTEGER_MAX,
                )
            elif workspace.draft_id_of_token_ptr is not None:
                if reads_draft:  # a draft row has empty blocks up to the target's last one
                    nothing = tl.zeros([config.BLOCKS], tl.float32)
                    store_pairs(draft_pointer, nothing - INFINITY, nothing, first, sizes, config.BLOCKS)
    if logsumexp is not None:
        if is_trusted(logsumexp) == 0:  # rare, so maxima are computed on floats, which takes fewer registers
            if (load_draft_ids(inputs.drafts, request, offset, sizes) >= 0) & (temperature > 0):
                for tile in range(config.tiles):
                    first = (chunk * config.tiles + tile) * config.BLOCKS
                    draft = load_row_blocks(inputs.draft, draft_row, first, True, config.BLOCKS)
                    store_statistics(
                        draft_pointer, draft_maxima, draft, first, temperature, sizes, config.BLOCKS, False
                    )


@triton.jit
def may_matter(request, offset, inputs, workspace, sizes, DECIDES: tl.constexpr):
    """Return whether the row at an offset > 0 may still matter, given the rejections published so far."""
    if inputs.packing.row_starts_ptr is not None:
        # No id is loaded: after an invalid id, which is rare, rows are read in vain.
        matters = offset <= request.num_drafts
    else:
        # Only the previous draft is loaded: counting the drafts in every program was slower.
        matters = load_draft_ids(inputs.drafts, request, offset - 1, sizes) >= 0
    if DECIDES:
        matters &= offset <= peek_first_rejected(workspace.state_ptr, request, sizes)
    return matters


@triton.jit
def decide(request, offset, token, temperature, inputs, workspace, sizes, policy):
    """Decide about the draft at an offset, after all programs have read its rows, and publish the decision."""
    accepted = tl.full([], False, tl.int1)
    if token >= 0:
        context = RowContext(request, offset, token, load_key(inputs.requests, request), temperature)
        noise = noise_at(context, inputs.requests, sizes)
        accepted, normalizer, _ = policy.DECIDE(context, noise, inputs, workspace, sizes)
        if normalizer.row_max == -INFINITY:
            publish_empty(workspace.state_ptr, request, offset, sizes)
        if workspace.logprobs_ptr is not None:
            if accepted:
                raw = load_raw_statistics(context, inputs, workspace, sizes)
                store_draft_logprob(context, normalizer, raw, inputs, workspace, sizes)
    if accepted == 0:
        publish_rejection(workspace.state_ptr, request, offset, sizes)


@triton.jit
def read_kernel(inputs, workspace, sizes, config, policy):
    """Store the statistics of `tiles` times `BLOCKS` blocks at one offset of one request.

    With `policy.DECIDE`, the last program to finish a row also decides about its draft.
    """
    DECIDES: tl.constexpr = policy.DECIDE is not None
    HAS_LOGSUMEXP: tl.constexpr = inputs.drafts.logsumexp_ptr is not None
    READS_DRAFT: tl.constexpr = inputs.draft.ptr is not None and not HAS_LOGSUMEXP
    if not config.ADMITS_LATE:
        admit_next_launch(config.OVERLAPS)
    chunk, request, offset = locate_in_grid(inputs, sizes, config)
    # These loads overlap with the test whether the row matters.
    token = load_draft_ids(inputs.drafts, request, offset, sizes) if READS_DRAFT else None
    logsumexp = None
    if HAS_LOGSUMEXP:
        logsumexp = load_logsumexp(inputs.drafts, request, offset, offset < request.num_drafts)
    temperature = load_temperature(inputs.requests, request)
    matters = True
    if inputs.drafts.ids_ptr is not None:
        if offset > 0:
            matters = may_matter(request, offset, inputs, workspace, sizes, DECIDES)
        elif not DECIDES:
            if chunk == 0:  # for the launches that follow; with DECIDES the state was zeroed before this launch
                clear_state(workspace.state_ptr, request)
    if matters:
        context = RowContext(request, offset, token, None, temperature)
        summarise(chunk, context, logsumexp, inputs, workspace, sizes, config)
        if workspace.draft_id_of_token_ptr is not None:  # the map must be complete when the next launch starts
            await_launch(config.OVERLAPS)
        if DECIDES:
            if offset < sizes.num_draft_tokens:
                # Without draft rows the draft is loaded only now, because it would occupy a register.
                draft = token if READS_DRAFT else load_draft_ids(inputs.drafts, request, offset, sizes)
                if is_last(row_finished_ptr(workspace.state_ptr, request, offset, sizes), config.chunks):
                    decide(request, offset, draft, temperature, inputs, workspace, sizes, policy)
