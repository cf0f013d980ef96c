"""The adjustments of a target row in Triton: pointers to its request's biases, penalties, counts and masks."""

import triton
import triton.language as tl

from specdecode import adjustments
from specdecode.kernels.values import INFINITY, Biases, Penalties, RowAdjustments, exists

SMALLEST_FACTOR = tl.constexpr(adjustments.SMALLEST_FACTOR)
WORD = tl.constexpr(adjustments.WORD)


@triton.jit
def load_penalty(ptr, number, slot, IS_FACTOR: tl.constexpr):
    """Return a request's penalty; invalid values of a tensor become neutral, because the host has not checked them."""
    penalty = number
    if ptr is not None:
        given = tl.load(ptr + slot).to(tl.float32)
        if IS_FACTOR:
            penalty = tl.where((given >= SMALLEST_FACTOR) & (given < INFINITY), given, 1.0)
        else:
            penalty = tl.where(tl.abs(given) < INFINITY, given, 0.0)
    return penalty


@triton.jit
def biases_of(request, given):
    """Return a request's biases, or () if there are none."""
    if given.bias_ids_ptr is None:
        return ()
    else:
        start = request.slot * given.num_biases
        return Biases(given.bias_ids_ptr + start, given.bias_ptr + start, given.num_biases)


@triton.jit
def penalties_of(request, given):
    """Return a request's penalties, or () if there are none."""
    if given.repetition is None:
        return ()
    else:
        repetition = load_penalty(given.repetition_ptr, given.repetition, request.slot, True)
        frequency = load_penalty(given.frequency_ptr, given.frequency, request.slot, False)
        presence = load_penalty(given.presence_ptr, given.presence, request.slot, False)
        is_any = (repetition != 1) | (frequency != 0) | (presence != 0)
        prompt, counts = (), ()
        if given.prompt_ptr is not None:
            prompt = (given.prompt_ptr + request.slot * given.prompt_stride,)
        if given.counts_ptr is not None:
            counts = (given.counts_ptr + request.slot * given.counts_stride,)
        inverse = tl.div_rn(tl.full([], 1.0, tl.float32), repetition)
        return Penalties(is_any, repetition, inverse, frequency, presence, prompt, counts)


@triton.jit
def load_drafts(before, sizes):
    """Return a 1-tuple of the ids of the drafts before a row, [MAX_DRAFTS], -1 for none; () if drafts do not count.

    `before` locates them: a pointer to the first id, its stride, the number of drafts and the vocabulary size; or ().
    """
    if exists(before):
        ids_ptr, stride, num_drafts, vocab_size = before
        offsets = tl.arange(0, sizes.MAX_DRAFTS)
        ids = tl.load(ids_ptr + offsets * stride, mask=offsets < num_drafts, other=-1)
        return (tl.where((ids >= 0) & (ids < vocab_size), ids, -1).to(tl.int32),)
    else:
        return ()


@triton.jit
def allowed_at(request, offset, given):
    """Return a 1-tuple of a pointer to the row of the allowed mask; () if there is no mask."""
    if given.allowed_ptr is None:
        return ()
    else:
        start = request.row * given.allowed_stride_request + offset * given.allowed_stride_offset
        return (given.allowed_ptr + start,)


@triton.jit
def adjustments_at(request, offset, inputs, sizes):
    """Return the adjustments of the target row at an offset of a request, or () if there are none."""
    if inputs.adjustments.EXIST:
        given, drafts, before = inputs.adjustments, inputs.drafts, ()
        if given.repetition is not None and drafts.ids_ptr is not None:
            ids_ptr = drafts.ids_ptr + request.row * drafts.stride_request
            num_drafts = tl.minimum(offset, request.num_drafts)
            before = ids_ptr, drafts.stride_offset, num_drafts, request.vocab_size
        packing = inputs.packing
        if given.repetition is not None and packing.path_ptr is not None:
            before = packing.path_ptr + request.index * packing.path_stride, 1, packing.depth, request.vocab_size
        biases, penalties = biases_of(request, given), penalties_of(request, given)
        return RowAdjustments(biases, penalties, allowed_at(request, offset, given), before, load_drafts(before, sizes))
    else:
        return ()
