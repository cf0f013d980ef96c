"""Adjustments in Triton: biases, penalties and masks, applied in float32 to whatever is loaded of a target row.

    bias: l + b        repetition: l / r if l > 0 else l r        then l - f n - g [n > 0]        not allowed: -inf

Nothing is written: `rows` calls `adjusted` after each load of a row that has adjustments. A logit is read by several
launches, and must be the same number in each: so every operation is rounded by itself. (Of a * b + c a compiler may round
once or twice.)

Beside 2 bytes of a bfloat16 logit a penalised request reads 4 of its count, which the rows of a request share, and a bit of
the prompt; a mask adds one bit. A request without penalties and biases in a batch with others leaves by one branch.
"""

import triton
import triton.language as tl

from specdecode import adjustments
from specdecode.kernels.values import Biases, Penalties, RowAdjustments, exists

INFINITY = tl.constexpr(float("inf"))
SMALLEST_PENALTY = tl.constexpr(1.1754944e-38)
BIASES = tl.constexpr(32)
"""Ids of biases that are looked at at once."""
MOST_COUNTED = tl.constexpr(adjustments.MOST_COUNTED)


@triton.jit
def load_penalty(ptr, number, slot, IS_FACTOR: tl.constexpr):
    """Return a request's penalty; in a tensor, whose values could not be checked, what makes no sense is neutral."""
    penalty = number
    if ptr is not None:
        given = tl.load(ptr + slot).to(tl.float32)
        if IS_FACTOR:
            penalty = tl.where((given >= SMALLEST_PENALTY) & (given < INFINITY), given, 1.0)
        else:
            penalty = tl.where(tl.abs(given) < INFINITY, given, 0.0)
    return penalty


@triton.jit
def biases_of(request, given):
    """Return a request's biases."""
    if given.bias_ids_ptr is None:
        return ()
    else:
        ids_ptr, ptr = given.bias_ids_ptr, given.bias_ptr
        ids_ptr += request.slot * given.num_biases
        count = tl.full([], 0, tl.int32)
        for start in range(0, given.num_biases, BIASES):
            places = start + tl.arange(0, BIASES)
            ids = tl.load(ids_ptr + places, mask=places < given.num_biases, other=-1)
            count = tl.maximum(count, tl.max(tl.where(ids >= 0, places + 1, 0), 0))
        return Biases(ids_ptr, ptr + request.slot * given.num_biases, count)


@triton.jit
def penalties_of(request, offset, given, drafts):
    """Return the penalties of the row at an offset of a request."""
    if given.repetition is None:
        return ()
    else:
        repetition = load_penalty(given.repetition_ptr, given.repetition, request.slot, True)
        frequency = load_penalty(given.frequency_ptr, given.frequency, request.slot, False)
        presence = load_penalty(given.presence_ptr, given.presence, request.slot, False)
        is_any = (repetition != 1) | (frequency != 0) | (presence != 0)
        prompt, counts, before = (), (), ()
        if given.prompt_ptr is not None:
            prompt = (given.prompt_ptr + request.slot * given.prompt_stride,)
        if given.counts_ptr is not None:
            counts = (given.counts_ptr + request.slot * given.counts_stride,)
        if drafts.ids_ptr is not None:
            before = drafts.ids_ptr + request.row * drafts.stride_request, drafts.stride_offset, offset
        return Penalties(is_any, repetition, frequency, presence, prompt, counts, before)


@triton.jit
def allowed_at(request, offset, given):
    """Return a pointer to the row of a mask."""
    if given.allowed_ptr is None:
        return ()
    else:
        start = request.row * given.allowed_stride_request + offset * given.allowed_stride_offset
        return (given.allowed_ptr + start,)


@triton.jit
def adjustments_at(request, offset, inputs):
    """Return what is added to the target row at an offset of a request."""
    if inputs.adjustments.EXIST:
        biases = biases_of(request, inputs.adjustments)
        penalties = penalties_of(request, offset, inputs.adjustments, inputs.drafts)
        return RowAdjustments(biases, penalties, allowed_at(request, offset, inputs.adjustments))
    else:
        return ()


@triton.jit
def bit_at(words_ptr, token_ids, inside):
    """Return whether tokens are in a mask."""
    words = tl.load(words_ptr + (token_ids >> 5), mask=inside, other=0)
    return ((words >> (token_ids & 31).to(tl.int32)) & 1) == 1


@triton.jit
def add_biases(logits, token_ids, biases, SCALAR: tl.constexpr):
    """Return l + b."""
    first, last = token_ids, token_ids
    if not SCALAR:
        flat = tl.ravel(token_ids)
        first, last = tl.min(flat, 0), tl.max(flat, 0)
    for place in range(biases.count):
        token = tl.load(biases.ids_ptr + place)
        if (token >= first) & (token <= last):
            bias = tl.load(biases.ptr + place).to(tl.float32)
            logits = tl.where(token_ids == token, logits + tl.where(bias == bias, bias, 0.0), logits)
    return logits


@triton.jit
def penalize(logits, token_ids, inside, penalties):
    """Return penalised logits; the drafts before the row count as emitted."""
    counts = (token_ids * 0).to(tl.int32)
    if exists(penalties.counts):
        counts = tl.load(penalties.counts[0] + token_ids, mask=inside, other=0)
        counts = tl.minimum(tl.maximum(counts, 0), MOST_COUNTED)
    if exists(penalties.drafts):
        ids_ptr, stride, num_before = penalties.drafts
        for offset in range(num_before):
            counts += (token_ids == tl.load(ids_ptr + offset * stride)).to(tl.int32)
    is_seen = counts > 0
    if exists(penalties.prompt):
        is_seen |= bit_at(penalties.prompt[0], token_ids, inside)
    factor = penalties.repetition + tl.zeros_like(logits)
    repeated = tl.where(logits > 0, tl.div_rn(logits, factor), tl.fma(logits, factor, 0.0))
    logits = tl.where(is_seen, repeated, logits) - tl.fma(counts.to(tl.float32), penalties.frequency, 0.0)
    return tl.where(counts > 0, logits - penalties.presence, logits)


@triton.jit
def adjusted(logits, token_ids, inside, adjustments, SCALAR: tl.constexpr):
    """Return float32 logits of some tokens, or of one, adjusted; those that are `inside` are loaded."""
    if exists(adjustments.biases):
        if adjustments.biases.count > 0:
            logits = add_biases(logits, token_ids, adjustments.biases, SCALAR)
    if exists(adjustments.penalties):
        if adjustments.penalties.is_any:
            logits = penalize(logits, token_ids, inside, adjustments.penalties)
    if exists(adjustments.allowed):
        logits = tl.where(bit_at(adjustments.allowed[0], token_ids, inside), logits, -INFINITY)
    return logits
