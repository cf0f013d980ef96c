"""Load a request's values in Triton: its row and slot, temperature, seed and position, drafts, and limits.

A call that is not packed has all values at the request's own index. In a packed call, every program first loads three
integers: the request's entry of `row_starts`, the next entry, and its entry of `slots`.

These integers are unchecked. A request is valid if it has 1 to num_draft_tokens + 1 rows, all inside the tensor, and a slot
that exists. An invalid request gets no drafts and one row with vocabulary size 0: nothing is read for it, the row has no
finite logit, and the request emits token 0 and is marked invalid.

Values of other tensors are unchecked, too: they are made harmless here when they are loaded.
"""

import triton
import triton.language as tl

from specdecode.kernels.rows import SMALLEST
from specdecode.kernels.values import RequestIndex, RowContext

TILE = tl.constexpr(32)
"""The number of draft ids that are loaded at once."""

LARGEST_TEMPERATURE = tl.constexpr(2.0**126)
"""The largest T that is used: beyond it 1 / T would be denormal, which a GPU treats as 0. Only logits of 1e34 and more
are affected."""

LARGEST_LOGSUMEXP = tl.constexpr(256.0)
"""The largest logsumexp that is used: beyond it float32 rounds by more than 1.5e-5, so the row is read instead."""


@triton.jit
def locate(index, packing, sizes):
    """Return the `RequestIndex` of a request, given its index in the batch (int64)."""
    row, slot, num_drafts, vocab_size = index, index, sizes.num_draft_tokens, sizes.vocab_size
    if packing.row_starts_ptr is not None:
        row = tl.load(packing.row_starts_ptr + index).to(tl.int64)
        end = row + 1
        if not packing.IS_ROUND:  # in a round of a tree a request has one row
            end = tl.load(packing.row_starts_ptr + index + 1).to(tl.int64)
        is_valid = (row >= 0) & (row < end) & (end <= packing.num_rows) & (end - row <= sizes.num_draft_tokens + 1)
        if packing.slots_ptr is not None:
            slot = tl.load(packing.slots_ptr + index).to(tl.int64)
            is_valid &= (slot >= 0) & (slot < packing.num_slots)
            slot = tl.where(is_valid, slot, 0)
        num_drafts = tl.where(is_valid, end - row - 1, 0).to(tl.int32)
        row = tl.where(is_valid, row, 0)
        vocab_size = tl.where(is_valid, sizes.vocab_size, 0)
    return RequestIndex(index, row, slot, num_drafts, vocab_size)


@triton.jit
def locate_program(programs, packing, sizes):
    """Return a program's request, and its offset there, in a grid of `programs` programs (one for each offset) a request."""
    return locate((tl.program_id(0) // programs).to(tl.int64), packing, sizes), tl.program_id(0) % programs


@triton.jit
def load_temperature(requests, request):
    """Return a request's temperature; NaN and negative values of a tensor, which could not be checked, are greedy."""
    temperature = requests.temperature
    if requests.temperature_ptr is not None:
        given = tl.load(requests.temperature_ptr + request.slot)
        # Only 0 is greedy: a temperature outside float32's range becomes the nearest number in the range.
        clamped = tl.minimum(tl.maximum(given.to(tl.float32), SMALLEST), LARGEST_TEMPERATURE)
        temperature = tl.where(given > 0, clamped, 0.0)
    return temperature


@triton.jit
def load_key(requests, request):
    """Return a request's (seed, position of its token at offset 0), both int64."""
    index = request.index
    slot = index if requests.SEEDS_BY_REQUEST else request.slot
    seed = requests.first_seed + index if requests.seeds_ptr is None else tl.load(requests.seeds_ptr + slot)
    # index * 0 is an int64 zero.
    position = index * 0 if requests.positions_ptr is None else tl.load(requests.positions_ptr + index)
    if requests.row_positions_ptr is not None:
        # A row's position belongs to the token that the model read there; the draft that it judges is one further.
        has_rows = request.vocab_size > 0
        position = tl.load(requests.row_positions_ptr + request.row, mask=has_rows, other=0) + 1
    return seed, position


@triton.jit
def load_draft_ids(drafts, request, offsets, sizes):
    """Return the draft ids at some offsets as int32, -1 for none and for ids outside the vocabulary."""
    if drafts.ids_ptr is None:
        return offsets * 0 - 1
    else:
        inside = (offsets >= 0) & (offsets < request.num_drafts)
        pointers = drafts.ids_ptr + request.row * drafts.stride_request + offsets * drafts.stride_offset
        ids = tl.load(pointers, mask=inside, other=-1)
        return tl.where((ids >= 0) & (ids < sizes.vocab_size), ids.to(tl.int32), -1)


@triton.jit
def count_drafts(drafts, request, sizes):
    """Return the number of drafts of a request before its first -1, and the first `TILE` ids."""
    offsets = tl.arange(0, TILE)
    first_ids = load_draft_ids(drafts, request, offsets, sizes)
    # A tensor even if num_draft_tokens is a constant, because the loop changes it.
    ids, num_drafts = first_ids, tl.full([], 0, tl.int32) + sizes.num_draft_tokens
    for start in range(0, sizes.num_draft_tokens, TILE):
        if start > 0:
            ids = load_draft_ids(drafts, request, start + offsets, sizes)
        num_drafts = tl.minimum(num_drafts, tl.min(tl.where(ids < 0, start + offsets, sizes.num_draft_tokens), 0))
    return num_drafts, first_ids


@triton.jit
def draft_at(counted, drafts, request, offset, sizes):
    """Return the draft id at an offset, -1 for none, given the result of `count_drafts`."""
    num_drafts, first_ids = counted
    token = tl.max(tl.where(tl.arange(0, TILE) == offset, first_ids, -1), 0)
    if offset >= TILE:
        token = load_draft_ids(drafts, request, offset, sizes)
    return tl.where(offset < num_drafts, token, -1)


@triton.jit
def with_draft(context, offset, token):
    """Return the context at another offset of the same request, with its draft."""
    return RowContext(context.request, offset, token, context.key, context.temperature)


@triton.jit
def load_logsumexp(drafts, request, offset, wanted):
    """Return a draft row's logsumexp as the caller gave it; 0 if it is not wanted."""
    index = request.slot * drafts.logsumexp_stride_request + offset * drafts.logsumexp_stride_offset
    return tl.load(drafts.logsumexp_ptr + index, mask=wanted, other=0.0)


@triton.jit
def is_trusted(logsumexp):
    """Return whether a given logsumexp is precise enough (not if it is NaN)."""
    return tl.abs(logsumexp) <= LARGEST_LOGSUMEXP


@triton.jit
def load_given_cutoff(request, offset, vocab_size, inputs):
    """Return the given cutoff of a draft row, -1 if all tokens are kept, and whether the row's logsumexp is trusted."""
    drafts = inputs.drafts
    index = request.slot * drafts.cutoff_stride_request + offset * drafts.cutoff_stride_offset
    token = tl.load(drafts.cutoff_ptr + index)
    logsumexp = load_logsumexp(drafts, request, offset, True)
    leaves_out = (token >= 0) & (token < vocab_size)
    return tl.where(leaves_out, token, -1).to(tl.int32), is_trusted(logsumexp)


@triton.jit
def load_limits(limits, request, sizes):
    """Return a request's top_k, top_p and min_p; values of a tensor, which could not be checked, are made harmless."""
    top_k, top_p, min_p = limits.top_k, limits.top_p, limits.min_p
    if limits.top_k_ptr is not None:
        top_k = tl.load(limits.top_k_ptr + request.slot)
    if limits.top_p_ptr is not None:
        top_p = tl.load(limits.top_p_ptr + request.slot).to(tl.float32)
    if limits.min_p_ptr is not None:
        min_p = tl.load(limits.min_p_ptr + request.slot).to(tl.float32)
    top_k = tl.where(top_k > 0, tl.minimum(top_k, sizes.vocab_size), sizes.vocab_size).to(tl.int32)
    # 2 keeps all tokens, however their sum is rounded; also for NaN.
    top_p = tl.where(top_p < 1, tl.maximum(top_p, 0.0), 2.0)
    return top_k, top_p, tl.where(min_p > 0, tl.minimum(min_p, 1.0), 0.0)


@triton.jit
def load_draft_limits(inputs, request, sizes):
    """Return (top_k, top_p, min_p) of a request's drafts; top_k is the target's vocabulary size if it keeps all tokens."""
    top_k, top_p, min_p = load_limits(inputs.draft_limits, request, sizes)
    if inputs.draft_vocabulary.ids_ptr is not None:
        top_k = tl.where(top_k < inputs.draft_vocabulary.size, top_k, sizes.vocab_size)
    return top_k, top_p, min_p
