"""Strict in Triton: the target's own seeded sample y at every offset, compared with the draft.

    y = argmax  log p(v) + G(v), drawn in two levels as in `selection`        the draft x stands iff x = y

In a large batch `decide_by_sample` compares while rows are read. It draws no more of y than it takes to tell that it is not
the draft: its block may say so. Where the request stops, y is drawn by the launch that emits. In a small batch
`finish_by_sample_kernel` draws it at every offset at once, compares, and emits. A program of that has one offset of one
request: it reads the row's statistics, 8 bytes for each block of 1,024, and 2 KB (bfloat16) of one block; it writes a token,
and adds a verdict of 8 bytes.
"""

import triton
import triton.language as tl

from specdecode.kernels.launches import SIZES, SMALL_TENSORS, await_launch
from specdecode.kernels.philox import load_key
from specdecode.kernels.rows import BLOCK_SIZE, INFINITY, load_statistics, load_temperature, row_at
from specdecode.kernels.selection import draw, draw_from_block, logits_and_times, merge, select_block, times_of_blocks
from specdecode.kernels.steps import (
    add_verdict,
    are_complete,
    count_drafts,
    finish,
    load_drafts,
    post_empty,
    post_stop,
)
from specdecode.kernels.synthetic import accept_uniform, is_scheduled
from specdecode.noise import Domain

SELECT_BLOCK = tl.constexpr(int(Domain.SELECT_BLOCK))
SELECT_TOKEN = tl.constexpr(int(Domain.SELECT_TOKEN))


@triton.jit
def decide_by_sample(
    state_ptr,
    scalars_ptr,
    statistics_ptr,
    target_row,
    draft_rows,
    logsumexps,
    rates_ptr,
    token,
    request,
    offset,
    temperature,
    key,
    batch,
    num_draft_tokens,
    num_blocks,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Tell whether the draft at one offset is y; post whether the request stops there. Draft rows are of no use."""
    stands = token >= 0
    if stands:
        index = request * (num_draft_tokens + 1) + offset
        statistics = load_statistics(statistics_ptr, index, True, num_blocks, MAX_BLOCKS)
        times = times_of_blocks(key, offset, SELECT_BLOCK, MAX_BLOCKS)
        peak, _, point, sums = merge(statistics, target_row, num_blocks, temperature, TARGET_ALIGNMENT, MAX_BLOCKS)
        if peak == -INFINITY:
            post_empty(state_ptr, request, offset, num_draft_tokens)
        if rates_ptr is not None:
            stands = is_scheduled(rates_ptr, offset, accept_uniform(key, offset))
        elif point >= 0:
            stands = token == point
        else:
            block = select_block(sums, times)
            stands = block == token // BLOCK_SIZE
            if stands:
                prepared = logits_and_times(target_row, block, key, offset, SELECT_TOKEN, TARGET_ALIGNMENT)
                stands = token == draw_from_block(prepared, block, peak, temperature)
    if stands == 0:
        post_stop(state_ptr, request, offset, num_draft_tokens, 0)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def finish_by_sample_kernel(
    token_ids_ptr,  # [batch, num_draft_tokens + 1] int64
    num_accepted_ptr,  # [batch] int32
    num_drafts_ptr,  # [batch] int32
    invalid_ptr,  # [batch] bool
    state_ptr,  # [batch, FIELDS] int32, of which the first two are verdicts, one int64
    statistics_ptr,  # [batch * (num_draft_tokens + 1), num_blocks, 2] float32
    target_ptr,  # [batch, num_draft_tokens + 1, vocab_size] any float
    target_index_ptr,  # [batch] int32 or int64, or None
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
    ids_stride_request: tl.int64,
    ids_stride_offset: tl.int64,
    num_draft_tokens,
    vocab_size,
    num_blocks,
    TARGET_ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Draw y at one offset of a request and compare; the last program of a request writes its output."""
    request = (tl.program_id(0) // (num_draft_tokens + 1)).to(tl.int64)
    offset = tl.program_id(0) % (num_draft_tokens + 1)
    drafts = (ids_ptr, ids_stride_request, ids_stride_offset, num_draft_tokens)
    draft = load_drafts(drafts, request, offset, vocab_size)
    t = load_temperature(temperature_ptr, temperature, request)
    key = load_key(seeds_ptr, first_seed, positions_ptr, request)
    times = times_of_blocks(key, offset, SELECT_BLOCK, MAX_BLOCKS)
    counted = count_drafts(drafts, request, vocab_size)
    await_launch(OVERLAPS)
    stops, is_empty = tl.full([], False, tl.int1), tl.full([], False, tl.int1)
    if offset <= counted[0]:
        rows = (target_ptr, target_index_ptr, target_stride_request, target_stride_offset, target_stride_token)
        row = row_at(rows, vocab_size, request, offset, TARGET_ALIGNMENT)
        index = request * (num_draft_tokens + 1) + offset
        statistics = load_statistics(statistics_ptr, index, True, num_blocks, MAX_BLOCKS)
        token, peak, _ = draw(
            statistics, times, row, num_blocks, t, key, offset, SELECT_TOKEN, TARGET_ALIGNMENT, MAX_BLOCKS
        )
        tl.store(token_ids_ptr + index, token.to(tl.int64))
        is_empty = peak == -INFINITY
        stops = draft != token
        if rates_ptr is not None:
            stops = draft < 0
            if draft >= 0:
                stops = is_scheduled(rates_ptr, offset, accept_uniform(key, offset)) == 0
    tl.debug_barrier()  # of the token's write, before one of the program's threads publishes it
    verdicts = add_verdict(state_ptr, request, offset, stops, is_empty, "acq_rel")
    if are_complete(verdicts, num_draft_tokens):
        output = (token_ids_ptr, num_accepted_ptr, num_drafts_ptr, invalid_ptr)
        finish(output, drafts, counted, verdicts, request, vocab_size)
