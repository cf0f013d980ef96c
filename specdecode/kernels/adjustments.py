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
LAST_TOKEN = tl.constexpr(2**31 - 1)
BIASES = tl.constexpr(128)
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
        start = request.slot * given.num_biases
        return Biases(given.bias_ids_ptr + start, given.bias_ptr + start, given.num_biases)


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
        inverse = tl.div_rn(tl.full([], 1.0, tl.float32), repetition)
        return Penalties(is_any, repetition, inverse, frequency, presence, prompt, counts, before)


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
def span_of(token_ids, adjustments):
    """Return the first and the last of some tokens, or what surely is before and after them."""
    first, last = tl.full([], 0, tl.int32), tl.full([], LAST_TOKEN, tl.int32)
    if exists(adjustments.biases):
        flat = tl.ravel(token_ids)
        first, last = tl.min(flat, 0), tl.max(flat, 0)
    return first, last


@triton.jit
def biases_in(biases, span, start):
    """Return which of `BIASES` biases from a place on are of tokens in a span, and how many these are."""
    places = start + tl.arange(0, BIASES)
    ids = tl.load(biases.ids_ptr + places, mask=places < biases.num_biases, other=-1)
    is_here = ((ids >= span[0]) & (ids <= span[1])).to(tl.int32)
    return is_here, tl.sum(is_here, 0)


@triton.jit
def add_biases(parts, tokens, span, biases):
    """Return l + b; the biases of equal ids are added in their order."""
    lanes = tl.arange(0, BIASES)
    for start in range(0, biases.num_biases, BIASES):
        is_here, num_left = biases_in(biases, span, start)
        while num_left > 0:
            index = tl.min(tl.where(is_here > 0, lanes, BIASES), 0)
            token, bias = tl.load(biases.ids_ptr + start + index), tl.load(biases.ptr + start + index).to(tl.float32)
            bias = tl.where(bias == bias, bias, 0.0)
            changed = ()
            for part in tl.static_range(len(parts)):
                is_biased = tokens.ids[part] == token
                changed = changed + (tl.where(is_biased, parts[part] + bias, parts[part]),)
            parts = changed
            is_here = tl.where(lanes == index, 0, is_here)
            num_left -= 1
    return parts


@triton.jit
def load_bits(words_ptr, tokens, part: tl.constexpr):
    """Return whether the tokens of a part are in a mask."""
    if exists(tokens.octets):  # a thread loads one byte for the eight tokens whose logits it has
        octets = tokens.octets[part]
        bytes_ptr = words_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        masks = tl.load(bytes_ptr + octets, mask=octets * 8 < tokens.end, other=0).to(tl.int32)
        bits = masks[:, :, None] & (1 << tl.arange(0, 8))[None, None, :]
        return tl.reshape(bits, [octets.shape[0], octets.shape[1] * 8]) != 0
    else:
        token_ids = tokens.ids[part]
        words = tl.load(words_ptr + (token_ids >> 5), mask=tokens.inside[part], other=0)
        return ((words >> (token_ids & 31).to(tl.int32)) & 1) != 0


@triton.jit
def load_counts(tokens, part: tl.constexpr, penalties):
    """Return how often the tokens of a part were emitted before the step; negative: never."""
    if exists(penalties.counts):
        counts_ptr = penalties.counts[0]
        IN_OCTETS: tl.constexpr = exists(tokens.octets) and tokens.ids[part].shape[1] > 128
        if IN_OCTETS:  # a thread loads twice 16 bytes: the counts of the eight tokens whose logits it has
            ids = tl.trans(tokens.octets[part])[:, :, None] * 8 + tl.arange(0, 4)[None, None, :]
            low = tl.load(counts_ptr + ids, mask=ids < tokens.end, other=0)
            high = tl.load(counts_ptr + ids + 4, mask=ids + 4 < tokens.end, other=0)
            counts = tl.reshape(tl.trans(tl.join(low, high), 1, 0, 3, 2), tokens.ids[part].shape)
        else:
            counts = tl.load(counts_ptr + tokens.ids[part], mask=tokens.inside[part], other=0)
        return tl.minimum(counts, MOST_COUNTED)
    else:
        return (tokens.ids[part] * 0).to(tl.int32)


@triton.jit
def count_drafts(counts, tokens, span, drafts):
    """Return counts with the drafts before the row."""
    ids_ptr, stride, num_before = drafts
    for offset in range(num_before):
        draft = tl.load(ids_ptr + offset * stride)
        if (draft >= span[0]) & (draft <= span[1]):
            changed = ()
            for part in tl.static_range(len(counts)):
                is_draft = tokens.ids[part] == draft
                changed = changed + (tl.where(is_draft, tl.maximum(counts[part], 0) + 1, counts[part]),)
            counts = changed
    return counts


@triton.jit
def penalize(logits, counts, in_prompt, penalties):
    """Return penalised logits, given how often their tokens were emitted and whether they are in the prompt."""
    is_emitted = counts > 0
    factor = tl.where(logits > 0, penalties.inverse, penalties.repetition)
    logits = tl.where(is_emitted | in_prompt, tl.fma(logits, factor, 0.0), logits)
    less = logits - tl.fma(counts.to(tl.float32), penalties.frequency, 0.0) - penalties.presence
    return tl.where(is_emitted, less, logits)


@triton.jit
def penalized(parts, tokens, span, penalties):
    """Return penalised logits; all loads come first."""
    counts, in_prompt = (), ()
    for part in tl.static_range(len(parts)):
        counts = counts + (load_counts(tokens, part, penalties),)
        if exists(penalties.prompt):
            in_prompt = in_prompt + (load_bits(penalties.prompt[0], tokens, part),)
        else:
            in_prompt = in_prompt + (tokens.ids[part] < 0,)
    if exists(penalties.drafts):
        counts = count_drafts(counts, tokens, span, penalties.drafts)
    changed = ()
    for part in tl.static_range(len(parts)):
        changed = changed + (penalize(parts[part], counts[part], in_prompt[part], penalties),)
    return changed


@triton.jit
def allowed(parts, tokens, words_ptr):
    """Return logits, -inf of tokens that are not in a mask."""
    changed = ()
    for part in tl.static_range(len(parts)):
        changed = changed + (tl.where(load_bits(words_ptr, tokens, part), parts[part], -INFINITY),)
    return changed


@triton.jit
def adjusted(parts, tokens, span, adjustments):
    """Return float32 logits, adjusted: a tuple of parts, given the tokens of each, and the first and the last of all."""
    if exists(adjustments.biases):
        parts = add_biases(parts, tokens, span, adjustments.biases)
    if exists(adjustments.penalties):
        if adjustments.penalties.is_any:
            parts = penalized(parts, tokens, span, adjustments.penalties)
    if exists(adjustments.allowed):
        parts = allowed(parts, tokens, adjustments.allowed[0])
    return parts


@triton.jit
def may_change(adjustments, span):
    """Return whether adjustments may change logits of tokens from the first to the last of a span."""
    if exists(adjustments.allowed):
        return True
    else:
        changes = tl.full([], False, tl.int1)
        if exists(adjustments.penalties):
            changes = adjustments.penalties.is_any
        if exists(adjustments.biases):
            for start in range(0, adjustments.biases.num_biases, BIASES):
                changes |= biases_in(adjustments.biases, span, start)[1] > 0
        return changes
