"""Adjustments in Triton: biases, penalties and masks, applied in float32 to each target logit as it is loaded.

    bias: l + b        repetition: l / r if l > 0 else l r        then l - f n - g [n > 0]        not allowed: -inf

No adjusted copy is written. Counts and masks are loaded with the logits (`load_adjustments`) and then applied
(`adjusted`). Several launches read the same logit and must compute the same number, so every operation is rounded
separately (a compiler may round a * b + c once or twice), and l / r is computed as l times the rounded 1 / r.

For each logit, 2 bytes in bfloat16, a penalised request also reads a count of 4 bytes, which the rows of a request share,
and one bit of the prompt mask; an allowed mask adds one bit. In the launch that reads, one branch (`may_change`) skips the
work for requests without penalties and for programs whose tokens have no bias. In other launches such requests load no
counts, and the zeros in their place change nothing.
"""

import triton
import triton.language as tl

from specdecode import adjustments
from specdecode.kernels.row_adjustments import load_drafts
from specdecode.kernels.values import INFINITY, Loaded, Row, RowAdjustments, exists

BIASES = tl.constexpr(32)
"""Bias ids that are compared at once."""
MOST_COUNTED = tl.constexpr(adjustments.MOST_COUNTED)


@triton.jit
def span_of(token_ids, adjustments):
    """Return the first and the last token id, if adjustments need them."""
    if exists(adjustments.biases) or exists(adjustments.penalties):
        if exists(token_ids.shape):
            flat = tl.ravel(token_ids)
            return tl.min(flat, 0), tl.max(flat, 0)
        else:
            return token_ids, token_ids
    else:
        return ()


@triton.jit
def load_masks(words_ptr, tokens, part: tl.constexpr, wanted):
    """Return the mask words of the tokens of a part, or the mask bytes if the tokens come in octets; see `bits_of`."""
    if exists(tokens.octets):  # a thread loads one byte for the eight tokens whose logits it has
        octets = tokens.octets[part]
        bytes_ptr = words_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        return tl.load(bytes_ptr + octets, mask=tl.where(wanted, octets * 8 < tokens.end, False), other=0)
    else:
        return tl.load(words_ptr + (tokens.ids[part] >> 5), mask=tl.where(wanted, tokens.inside[part], False), other=0)


@triton.jit
def bits_of(masks, tokens, part: tl.constexpr):
    """Return the mask bits of the tokens of a part."""
    if exists(tokens.octets):
        bits = masks.to(tl.int32)[:, :, None] & (1 << tl.arange(0, 8))[None, None, :]
        return tl.reshape(bits, tokens.ids[part].shape) != 0
    else:
        return ((masks >> (tokens.ids[part] & 31).to(tl.int32)) & 1) != 0


@triton.jit
def load_counts(counts_ptr, tokens, part: tl.constexpr, wanted):
    """Return the output counts before the step of the tokens of a part; negative counts become 0."""
    IN_OCTETS: tl.constexpr = exists(tokens.octets) and tokens.ids[part].shape[1] > 128
    if IN_OCTETS:  # a thread loads twice 16 bytes: the counts of the eight tokens whose logits it has
        quads = tokens.quads[part]
        low = tl.load(counts_ptr + quads, mask=tl.where(wanted, quads < tokens.end, False), other=0)
        high = tl.load(counts_ptr + quads + 4, mask=tl.where(wanted, quads + 4 < tokens.end, False), other=0)
        both = tl.reshape(tl.join(low, high), [quads.shape[0], quads.shape[1] // 4, 4, 2])
        return tl.reshape(tl.trans(both, 0, 1, 3, 2), tokens.ids[part].shape)
    else:
        return tl.load(counts_ptr + tokens.ids[part], mask=tl.where(wanted, tokens.inside[part], False), other=0)


@triton.jit
def load_adjustments(tokens, adjustments):
    """Return the counts and masks of tokens, for `adjusted`. They may be loaded early, and used after other work."""
    counts, in_prompt, allowed = (), (), ()
    for part in tl.static_range(len(tokens.ids)):
        if exists(adjustments.penalties):
            penalties = adjustments.penalties
            if exists(penalties.counts):
                counts = counts + (load_counts(penalties.counts[0], tokens, part, penalties.is_any),)
            if exists(penalties.prompt):
                in_prompt = in_prompt + (load_masks(penalties.prompt[0], tokens, part, penalties.is_any),)
        if exists(adjustments.allowed):
            allowed = allowed + (load_masks(adjustments.allowed[0], tokens, part, True),)
    return Loaded(counts, in_prompt, allowed)


@triton.jit
def in_span(token_ids, span):
    """Return 1 for tokens inside a span, 0 for others; the token -1 is in no span."""
    return ((token_ids >= tl.maximum(span[0], 0)) & (token_ids <= span[1])).to(tl.int32)


@triton.jit
def biases_in(span, adjustments, start):
    """Return 1 for each of the `BIASES` biases from `start` on whose token is in a span, 0 for the others."""
    biases, places = adjustments.biases, start + tl.arange(0, BIASES)
    ids = tl.load(biases.ids_ptr + places, mask=places < biases.num_biases, other=-1)
    return in_span(ids, span)


@triton.jit
def add_biases(parts, tokens, span, adjustments):
    """Return l + b; the biases of equal ids are added in their order."""
    biases, lanes = adjustments.biases, tl.arange(0, BIASES)
    for start in range(0, biases.num_biases, BIASES):
        is_here = biases_in(span, adjustments, start)
        while tl.max(is_here, 0) > 0:
            index = tl.min(tl.where(is_here > 0, lanes, BIASES), 0)
            token, bias = tl.load(biases.ids_ptr + start + index), tl.load(biases.ptr + start + index).to(tl.float32)
            bias = tl.where(bias == bias, bias, 0.0)
            changed = ()
            for part in tl.static_range(len(parts)):
                is_biased = tokens.ids[part] == token
                changed = changed + (tl.where(is_biased, parts[part] + bias, parts[part]),)
            parts = changed
            is_here = tl.where(lanes == index, 0, is_here)
    return parts


@triton.jit
def count_drafts(counts, tokens, span, drafts):
    """Return the counts, increased by the drafts before the row."""
    lanes = tl.arange(0, drafts.shape[0])
    is_here = in_span(drafts, span)
    while tl.max(is_here, 0) > 0:
        index = tl.min(tl.where(is_here > 0, lanes, drafts.shape[0]), 0)
        draft = tl.max(tl.where(lanes == index, drafts, -1), 0)
        changed = ()
        for part in tl.static_range(len(counts)):
            is_draft = tokens.ids[part] == draft
            changed = changed + (tl.where(is_draft, tl.maximum(counts[part], 0) + 1, counts[part]),)
        counts = changed
        is_here = tl.where(lanes == index, 0, is_here)
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
def penalized(parts, loaded, tokens, span, adjustments):
    """Return penalised logits."""
    penalties = adjustments.penalties
    counts = ()
    for part in tl.static_range(len(parts)):
        if exists(penalties.counts):
            counts = counts + (tl.minimum(loaded.counts[part], MOST_COUNTED),)
        else:
            counts = counts + ((tokens.ids[part] * 0).to(tl.int32),)
    if exists(adjustments.drafts):
        counts = count_drafts(counts, tokens, span, adjustments.drafts[0])
    changed = ()
    for part in tl.static_range(len(parts)):
        if exists(penalties.prompt):
            in_prompt = bits_of(loaded.in_prompt[part], tokens, part)
        else:
            in_prompt = counts[part] != counts[part]
        changed = changed + (penalize(parts[part], counts[part], in_prompt, penalties),)
    return changed


@triton.jit
def adjusted(parts, loaded, tokens, span, adjustments):
    """Return adjusted float32 logits, in parts, given the result of `load_adjustments` and the span of all tokens."""
    if exists(adjustments.biases):
        parts = add_biases(parts, tokens, span, adjustments)
    if exists(adjustments.penalties):
        parts = penalized(parts, loaded, tokens, span, adjustments)
    if exists(adjustments.allowed):
        changed = ()
        for part in tl.static_range(len(parts)):
            is_allowed = bits_of(loaded.allowed[part], tokens, part)
            changed = changed + (tl.where(is_allowed, parts[part], -INFINITY),)
        parts = changed
    return parts


@triton.jit
def may_change(adjustments, span):
    """Return whether adjustments may change logits of the tokens in a span."""
    if exists(adjustments.allowed):
        # Not the constant True: without a branch the compiler adjusts each part before it loads the next.
        return span[0] <= span[1]
    else:
        changes = tl.full([], False, tl.int1)
        if exists(adjustments.penalties):
            changes = adjustments.penalties.is_any
        if exists(adjustments.biases):
            for start in range(0, adjustments.biases.num_biases, BIASES):
                changes |= tl.max(biases_in(span, adjustments, start), 0) > 0
        return changes


@triton.jit
def without_drafts(row):
    """Return an adjusted row without the loaded ids of the drafts before it."""
    biases, penalties, allowed, before, _ = row.adjustments
    adjustments = RowAdjustments(biases, penalties, allowed, before, ())
    return Row(row.ptr, row.stride_token, row.vocab_size, row.cutoff, row.draft_id_of_token, adjustments)


@triton.jit
def with_drafts(row, sizes):
    """Return an adjusted row with the loaded ids of the drafts before it."""
    # Not one function of a row and drafts: Triton 3.6 names functions after the flat sequence of their arguments'
    # elements, so two calls that differ in nesting alone would be confused.
    biases, penalties, allowed, before, _ = row.adjustments
    adjustments = RowAdjustments(biases, penalties, allowed, before, load_drafts(before, sizes))
    return Row(row.ptr, row.stride_token, row.vocab_size, row.cutoff, row.draft_id_of_token, adjustments)


@triton.jit
def call_out_of_line(FUNCTION: tl.constexpr, row, arguments, sizes):
    """Call a function with a row, a tuple of other arguments and sizes; for rows with adjustments without inlining it.

    It is for functions that rarely run: Triton's compile time grows with the cube of a function's length. Beside the row
    they take and return scalars only.
    """
    if exists(row.adjustments):
        return out_of_line(FUNCTION, without_drafts(row), arguments, sizes)
    else:
        return FUNCTION(row, *arguments, sizes)


@triton.jit(noinline=True)
def out_of_line(FUNCTION: tl.constexpr, row, arguments, sizes):
    """Call a function with an adjusted row, which is passed without its tensor of drafts; return its result."""
    return FUNCTION(with_drafts(row, sizes), *arguments, sizes)
