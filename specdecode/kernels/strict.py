"""Strict in Triton: the target's own seeded sample y at every offset, compared with the draft.

`decide_by_sample` draws y from the statistics of one target row, of which it reads one block again. The last program to
finish a request, or a small launch after all of them, writes the request's line of the output.
"""

import triton
import triton.language as tl

from specdecode.kernels.launches import SIZES, SMALL_TENSORS, await_launch
from specdecode.kernels.philox import load_key
from specdecode.kernels.rows import INFINITY, load_temperature, row_at
from specdecode.kernels.selection import draw
from specdecode.kernels.steps import (
    FIELDS,
    FINISHED,
    is_last,
    load_drafts,
    load_empty,
    load_stop,
    post_empty,
    post_stop,
    store_output,
)
from specdecode.kernels.synthetic import is_scheduled
from specdecode.noise import Domain

SELECT_BLOCK = tl.constexpr(int(Domain.SELECT_BLOCK))
SELECT_TOKEN = tl.constexpr(int(Domain.SELECT_TOKEN))


@triton.jit
def decide_by_sample(
    token_ids_ptr,
    state_ptr,
    scalars_ptr,
    statistics_ptr,
    target_row,
    draft_rows,
    logsumexps,
    drafts,
    rates_ptr,
    request,
    offset,
    temperature,
    key,
    batch,
    num_blocks,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Draw y at one offset and note it; post whether the request stops there. Draft rows are of no use."""
    num_draft_tokens, vocab_size = drafts[3], target_row[2]
    index = request * (num_draft_tokens + 1) + offset
    domains = (SELECT_BLOCK, SELECT_TOKEN)
    token, peak, _ = draw(
        statistics_ptr, index, target_row, num_blocks, temperature, key, offset, domains, TARGET_ALIGNMENT, MAX_BLOCKS
    )
    tl.store(token_ids_ptr + index, token.to(tl.int64))
    if peak == -INFINITY:
        post_empty(state_ptr, request, offset, num_draft_tokens)
    if offset < num_draft_tokens:
        draft = load_drafts(drafts, request, offset, vocab_size)
        stands = draft == token if rates_ptr is None else (draft >= 0) & is_scheduled(rates_ptr, key, offset)
        if stands == 0:
            post_stop(state_ptr, request, offset, num_draft_tokens, 0)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def finish_by_sample_kernel(
    token_ids_ptr,  # [batch, num_draft_tokens + 1] int64
    num_accepted_ptr,  # [batch] int32
    num_drafts_ptr,  # [batch] int32
    invalid_ptr,  # [batch] bool
    state_ptr,  # [batch, FIELDS] int32
    statistics_ptr,  # [batch * (num_draft_tokens + 1), 2, num_blocks] float32
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
    LAZY: tl.constexpr,
    TARGET_ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Decide one offset of a request, if that has not been done; the last program of a request writes its output."""
    drafts = (ids_ptr, ids_stride_request, ids_stride_offset, num_draft_tokens)
    await_launch(OVERLAPS)
    if LAZY:
        request = tl.program_id(0).to(tl.int64)
        writes = True
    else:
        request = (tl.program_id(0) // (num_draft_tokens + 1)).to(tl.int64)
        offset = tl.program_id(0) % (num_draft_tokens + 1)
        if (offset == 0) | (load_drafts(drafts, request, offset - 1, vocab_size) >= 0):
            rows = (target_ptr, target_index_ptr, target_stride_request, target_stride_offset, target_stride_token)
            row = row_at(rows, vocab_size, request, offset, TARGET_ALIGNMENT)
            decide_by_sample(
                token_ids_ptr, state_ptr, None, statistics_ptr, row, None, None, drafts, rates_ptr, request, offset,
                load_temperature(temperature_ptr, temperature, request),
                load_key(seeds_ptr, first_seed, positions_ptr, request), 0, num_blocks, TARGET_ALIGNMENT, 0, MAX_BLOCKS,
            )  # fmt: skip
        writes = is_last(state_ptr + request * FIELDS + FINISHED, num_draft_tokens + 1)
    if writes:
        stop, _ = load_stop(state_ptr, request, num_draft_tokens)
        invalid = load_empty(state_ptr, request, num_draft_tokens) <= stop
        output = (token_ids_ptr, num_accepted_ptr, num_drafts_ptr, invalid_ptr)
        store_output(output, drafts, request, stop, invalid, vocab_size)  # y is there already
