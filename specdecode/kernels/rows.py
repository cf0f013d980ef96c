"""Logits rows in Triton: addresses and loads.

A row is read in one of two ways. `load_blocks` returns whole blocks as they are stored. It runs at the speed of memory,
which leaves few instructions for each element, so a NaN remains NaN. `load_logits` and `load_logit` return float32, and
-inf for NaN. In both ways a token that the row lacks reads as -inf: beyond the vocabulary, beyond the row's cutoff, or
not in the draft's vocabulary.
"""

import triton
import triton.language as tl

from specdecode import noise
from specdecode.kernels.adjustments import adjusted, load_adjustments, span_of
from specdecode.kernels.row_adjustments import adjustments_at
from specdecode.kernels.values import INFINITY, Cutoff, Row, Tokens, exists
from specdecode.kernels.vocabulary import by_target, draft_ids_of

BLOCK_SIZE = tl.constexpr(noise.BLOCK_SIZE)
PAIR_OF_INFINITIES = tl.constexpr(-0x007F_0080)
"""The bits of two -inf in bfloat16."""
WARP_BITS = tl.constexpr(4096)
"""Bits that a warp loads at once: 16 bytes a thread."""
LAST_TOKEN = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234e38)
SMALLEST = tl.constexpr(1.1754944e-38)


@triton.jit
def base_2_scale(temperature):
    """Return log2(e) / T, the scale of exp(l / T) = exp2(l * scale); any number where T is 0."""
    # Never denormal: a GPU would flush it to 0, and 0 times -inf is NaN.
    return tl.maximum(tl.minimum(1 / tl.where(temperature > 0, temperature, 1.0) * LOG2_E, LARGEST), SMALLEST)


@triton.jit
def scaled(logits, row_max, temperature):
    """Return (l - row_max) / T, where row_max is finite and T > 0."""
    return (logits - row_max) * tl.maximum(1 / tl.where(temperature > 0, temperature, 1.0), SMALLEST)


@triton.jit
def whole_row(ptr, stride_token, vocab_size):
    """Return a row over the whole vocabulary, without cutoff, draft ids or adjustments."""
    return Row(ptr, stride_token, vocab_size, (), (), ())


@triton.jit
def row_at(rows, index, offset, vocab_size):
    """Return the row at an offset of a request, given the index of its rows, see `arguments.Rows`."""
    start = index * rows.stride_request + offset * rows.stride_offset
    return whole_row(rows.ptr + start, rows.stride_token, vocab_size)


@triton.jit
def stored_target_row_at(request, offset, inputs):
    """Return the target row at an offset of a request as stored: not adjusted, without cutoff."""
    return row_at(inputs.target, request.row, offset, request.vocab_size)


@triton.jit
def whole_target_row_at(request, offset, inputs, sizes):
    """Return the target row at an offset of a request, adjusted."""
    row = stored_target_row_at(request, offset, inputs)
    adjustments = adjustments_at(request, offset, inputs, sizes)
    return Row(row.ptr, row.stride_token, row.vocab_size, (), (), adjustments)


@triton.jit
def whole_draft_row_at(request, offset, inputs, sizes):
    """Return the draft row at an offset of a request, indexed by the draft's own ids."""
    vocab_size = sizes.vocab_size
    if inputs.draft_vocabulary.ids_ptr is not None:
        vocab_size = inputs.draft_vocabulary.size
    return row_at(inputs.draft, request.slot, offset, vocab_size)


@triton.jit
def row_index(request, offset, OF_DRAFT: tl.constexpr, sizes):
    """Return the index of a row: draft rows come after all target rows."""
    index = request.index * (sizes.num_draft_tokens + 1) + offset
    if OF_DRAFT:
        index = (
            sizes.batch.to(tl.int64) * (sizes.num_draft_tokens + 1) + request.index * sizes.num_draft_tokens + offset
        )
    return index


@triton.jit
def with_cutoff(row, workspace, index, sizes):
    """Return a row with its cutoff, if rows are truncated, given the row's index."""
    if workspace.cutoffs_ptr is None:
        return row
    else:
        pointer = workspace.cutoffs_ptr + index * 2
        cutoff = Cutoff(tl.load(pointer), tl.load(pointer + 1).to(tl.int32, bitcast=True))
        return Row(row.ptr, row.stride_token, row.vocab_size, cutoff, row.draft_id_of_token, row.adjustments)


@triton.jit
def target_row_at(context, inputs, workspace, sizes):
    """Return the target row at a context, up to its cutoff."""
    row = whole_target_row_at(context.request, context.offset, inputs, sizes)
    return with_cutoff(row, workspace, row_index(context.request, context.offset, False, sizes), sizes)


@triton.jit
def own_draft_row_at(context, inputs, workspace, sizes):
    """Return the draft row at a context, up to its cutoff, indexed by its own ids; not valid after the last draft."""
    inside = tl.minimum(context.offset, sizes.num_draft_tokens - 1)
    row = whole_draft_row_at(context.request, context.offset, inputs, sizes)
    return with_cutoff(row, workspace, row_index(context.request, inside, True, sizes), sizes)


@triton.jit
def draft_row_at(context, inputs, workspace, sizes):
    """Return the draft row at a context, up to its cutoff, indexed by the target's tokens."""
    return by_target(own_draft_row_at(context, inputs, workspace, sizes), workspace, sizes)


@triton.jit
def both_rows_at(context, inputs, workspace, sizes):
    """Return the target row and the draft row at a context, both indexed by the target's tokens."""
    return target_row_at(context, inputs, workspace, sizes), draft_row_at(context, inputs, workspace, sizes)


@triton.jit
def load_raw(row, token_ids, wanted):
    """Return logits as they are stored, -inf beyond the vocabulary.

    Adjusted logits and logits of a row with a cutoff are float32; beyond the cutoff they are -inf.
    """
    if exists(row.draft_id_of_token):
        token_ids, wanted = draft_ids_of(row.draft_id_of_token, token_ids, wanted), True
    pointers = row.ptr + token_ids * row.stride_token
    inside = tl.where(wanted, token_ids < row.vocab_size, False)
    logits = tl.load(pointers, mask=inside, other=-INFINITY)
    if exists(row.adjustments):
        tokens, span = Tokens((token_ids,), (inside,), (), (), 0), span_of(token_ids, row.adjustments)
        loaded = load_adjustments(tokens, row.adjustments)
        logits = adjusted((logits.to(tl.float32),), loaded, tokens, span, row.adjustments)[0]
    if exists(row.cutoff):
        return up_to_cutoff(logits.to(tl.float32), token_ids, row.cutoff)
    else:
        return logits


@triton.jit
def up_to_cutoff(logits, token_ids, cutoff):
    """Return float32 logits, with -inf for NaN and beyond a row's cutoff."""
    is_kept = (logits > cutoff.logit) | ((logits == cutoff.logit) & (token_ids <= cutoff.token))
    return tl.where(is_kept, logits, -INFINITY)


@triton.jit
def load_logits(row, token_ids, wanted):
    """Return logits as float32, -inf for NaN and beyond the vocabulary."""
    logits = load_raw(row, token_ids, wanted).to(tl.float32)
    return tl.where(logits == logits, logits, -INFINITY)


@triton.jit
def load_logit(row, token, wanted):
    """Return the logit of one token < vocab_size as float32, -inf for NaN; undefined for a negative or unwanted token."""
    if exists(row.draft_id_of_token):
        token = draft_ids_of(row.draft_id_of_token, token, wanted)
        wanted = token < row.vocab_size
    is_there = wanted
    wanted &= token >= 0
    pointer = row.ptr + token.to(tl.int64) * row.stride_token
    logit = tl.load(pointer, mask=wanted, other=0.0).to(tl.float32)
    if exists(row.adjustments):
        tokens = Tokens((token,), (wanted,), (), (), 0)
        loaded = load_adjustments(tokens, row.adjustments)
        logit = adjusted((logit,), loaded, tokens, (token, token), row.adjustments)[0]
    if exists(row.cutoff):
        logit = tl.where(wanted, up_to_cutoff(logit, token, row.cutoff), logit)
    logit = tl.where(logit == logit, logit, -INFINITY)
    if exists(row.draft_id_of_token):
        logit = tl.where(is_there, logit, -INFINITY)
    return logit


@triton.jit
def tokens_of(block):
    """Return the token ids of one block."""
    return block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)


@triton.jit
def part_of_blocks(blocks, part, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the token ids of one part of each of [BLOCKS] blocks, [BLOCKS, BLOCK_N]."""
    return blocks[:, None] * SIZE + part * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def load_stored_blocks(row, blocks, wanted, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the logits of some [BLOCKS] blocks, as a tuple of parts to `unpack`; adjustments are not applied.

    With PAIRS, two aligned bfloat16 logits are loaded as one int32, which takes half the instructions to unpack.
    """
    if exists(row.adjustments):
        row = whole_row(row.ptr, row.stride_token, row.vocab_size)
    parts = ()
    for part in tl.static_range(BLOCK_SIZE // BLOCK_N):
        if PAIRS:
            pairs = part_of_blocks(blocks, part, BLOCK_SIZE // 2, BLOCK_N // 2)
            pointers = row.ptr.to(tl.pointer_type(tl.int32), bitcast=True) + pairs
            inside = pairs < row.vocab_size // 2
            parts = parts + (tl.load(pointers, mask=tl.where(wanted, inside, False), other=PAIR_OF_INFINITIES),)
        else:
            parts = parts + (load_raw(row, part_of_blocks(blocks, part, BLOCK_SIZE, BLOCK_N), wanted),)
    return parts


@triton.jit
def tokens_of_blocks(blocks, row, BLOCK_N: tl.constexpr):
    """Return the tokens of some [BLOCKS] blocks of a row, in parts."""
    token_ids, inside, octets, quads = (), (), (), ()
    lanes = tl.arange(0, BLOCK_N // 2)[None, :]
    for part in tl.static_range(BLOCK_SIZE // BLOCK_N):
        token_ids = token_ids + (part_of_blocks(blocks, part, BLOCK_SIZE, BLOCK_N),)
        inside = inside + (token_ids[part] < row.vocab_size,)
        octets = octets + (part_of_blocks(blocks, part, BLOCK_SIZE // 8, BLOCK_N // 8),)
        quads = quads + (blocks[:, None] * BLOCK_SIZE + part * BLOCK_N + lanes // 4 * 8 + lanes % 4,)
    return Tokens(token_ids, inside, octets, quads, row.vocab_size)


@triton.jit
def load_blocks(row, blocks, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return some [BLOCKS] blocks of a row as stored, with their loaded adjustments, for `logits_of`."""
    return with_adjustments(load_stored_blocks(row, blocks, True, PAIRS, BLOCK_N), row, blocks, BLOCK_N)


@triton.jit
def with_adjustments(parts, row, blocks, BLOCK_N: tl.constexpr):
    """Return the stored parts of some blocks of a row and their loaded adjustments, if any."""
    if exists(row.adjustments):
        return parts, load_adjustments(tokens_of_blocks(blocks, row, BLOCK_N), row.adjustments)
    else:
        return parts


@triton.jit
def logits_of(loaded, row, blocks, BLOCK_N: tl.constexpr):
    """Return loaded blocks as a tuple of parts to `unpack`: raw logits, or adjusted ones in float32."""
    if exists(row.adjustments):
        return adjusted_blocks(loaded[0], loaded[1], row, blocks, BLOCK_N)
    else:
        return loaded


@triton.jit
def logits_of_stored(parts, row, blocks, BLOCK_N: tl.constexpr):
    """Return the logits of stored blocks, see `load_stored_blocks`, and load their adjustments now."""
    return logits_of(with_adjustments(parts, row, blocks, BLOCK_N), row, blocks, BLOCK_N)


@triton.jit
def adjusted_blocks(parts, loaded, row, blocks, BLOCK_N: tl.constexpr):
    """Return blocks of a row as adjusted float32 logits, -inf beyond its cutoff, given their stored parts."""
    tokens = tokens_of_blocks(blocks, row, BLOCK_N)
    span = tl.min(blocks, 0) * BLOCK_SIZE, tl.max(blocks, 0) * BLOCK_SIZE + BLOCK_SIZE - 1
    logits = ()
    for part in tl.static_range(len(parts)):
        logits = logits + (unpack_joined(parts[part]),)
    logits = adjusted(logits, loaded, tokens, span, row.adjustments)
    if exists(row.cutoff):
        kept = ()
        for part in tl.static_range(len(parts)):
            kept = kept + (up_to_cutoff(logits[part], tokens.ids[part], row.cutoff),)
        logits = kept
    return logits


@triton.jit
def unpack_joined(part):
    """Return the logits of a part as float32, in the order of tokens, [BLOCKS, BLOCK_N]."""
    if part.dtype == tl.int32:
        even, odd = unpack(part)
        return tl.reshape(tl.join(even, odd), [part.shape[0], 2 * part.shape[1]])
    else:
        return part.to(tl.float32)


@triton.jit
def unpack(part):
    """Return the logits of a part as a tuple of float32 tensors: of even and odd tokens, or of all tokens."""
    if part.dtype == tl.int32:
        return (part << 16).to(tl.float32, bitcast=True), (part & -65536).to(tl.float32, bitcast=True)
    else:
        return (part.to(tl.float32),)


@triton.jit
def ordered_bits(bits):
    """Return integers in the order of float32 numbers, given their bits; the function is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(logit):
    """Return an integer in the order of logits; 0 and -0 have the same integer."""
    return ordered_bits((logit + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def logit_of(key):
    """Return the logit of a key."""
    return ordered_bits(key).to(tl.float32, bitcast=True)
