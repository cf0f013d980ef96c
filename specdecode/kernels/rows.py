"""Logits rows in Triton: where they lie, how they are read, and the statistics that each block leaves.

A block of `BLOCK_SIZE` logits is summarised by its largest logit m and by s = sum exp((l - m) / T): 8 bytes for 2,048 of
bfloat16. Everything that any method needs of a row follows from these pairs, but for single logits and for a few blocks,
such as that which a token is drawn from: they are read again. Greedy requests leave sums of 0.

The rows are read at memory speed, at which an element may cost a handful of instructions. So nothing is done about NaN and
infinities on the way: they spoil their block's statistics, and whoever reads those sees it and mends them.
"""

import triton
import triton.language as tl

from specdecode import noise

BLOCK_SIZE = tl.constexpr(noise.BLOCK_SIZE)
WARP = tl.constexpr(32)
INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
PAIR_OF_INFINITIES = tl.constexpr(-0x007F_0080)
"""The bits of two -inf in bfloat16."""
LARGEST = tl.constexpr(3.4028234e38)
SMALLEST = tl.constexpr(1.1754944e-38)
LARGEST_TEMPERATURE = tl.constexpr(2.0**126)
"""Beyond it 1 / T would be a denormal number, which is 0 to a GPU; only logits of 1e34 and more could tell."""


@triton.jit
def load_temperature(temperature_ptr, temperature, request):
    """Return a request's temperature, from a tensor where there is one; what could not be checked is made harmless."""
    if temperature_ptr is not None:
        given = tl.load(temperature_ptr + request)
        # Only 0 is greedy: what float32 cannot hold goes to the nearest number that it can. NaN and negatives are greedy.
        temperature = tl.where(
            given > 0, tl.minimum(tl.maximum(given.to(tl.float32), SMALLEST), LARGEST_TEMPERATURE), 0.0
        )
    return temperature


@triton.jit
def base_2_scale(temperature):
    """Return log2(e) / T: exp(l / T) = exp2(l times this). T of a greedy request is of no consequence."""
    # Not 0, which a denormal number is to a GPU: 0 times -inf would be NaN.
    return tl.maximum(tl.minimum(1 / tl.where(temperature > 0, temperature, 1.0) * LOG2_E, LARGEST), SMALLEST)


@triton.jit
def scaled(logits, peak, temperature):
    """Return (l - peak) / T, where the peak is finite and T > 0."""
    # One division for all logits. 1 / T of the smallest T is finite in float32.
    return (logits - peak) * tl.maximum(1 / tl.where(temperature > 0, temperature, 1.0), SMALLEST)


@triton.jit
def row_at(rows, vocab_size, request, offset, ALIGNMENT: tl.constexpr):
    """Return the row at an offset of a request, as (pointer, stride of tokens, vocabulary size).

    `rows` is (pointer, index pointer, strides of requests, offsets and tokens). Where there is an index, the request's rows
    lie at another place of a larger cache. The alignment is 16 for dense rows that start and end at multiples of 16
    logits, so that a thread can load 16 bytes at once, 1 for other dense rows, and 0 for rows that are not dense.
    """
    rows_ptr, index_ptr, stride_request, stride_offset, stride_token = rows
    index = request
    if index_ptr is not None:
        index = tl.load(index_ptr + request).to(tl.int64)
    start = index * stride_request + offset * stride_offset
    if ALIGNMENT == 16:
        # Which they are already: this tells the compiler.
        start = start // 16 * 16
        vocab_size = vocab_size // 16 * 16
    return rows_ptr + start, stride_token, vocab_size


@triton.jit
def load_raw(row, token_ids, wanted, ALIGNMENT: tl.constexpr):
    """Return logits as they are stored, -inf beyond the vocabulary."""
    row_ptr, stride_token, vocab_size = row
    pointers = row_ptr + token_ids if ALIGNMENT else row_ptr + token_ids * stride_token
    return tl.load(pointers, mask=wanted & (token_ids < vocab_size), other=-INFINITY)


@triton.jit
def load_logits(row, token_ids, wanted, ALIGNMENT: tl.constexpr):
    """Return logits as float32, -inf for NaN and beyond the vocabulary."""
    logits = load_raw(row, token_ids, wanted, ALIGNMENT).to(tl.float32)
    return tl.where(logits == logits, logits, -INFINITY)


@triton.jit
def tokens_of(block):
    """Return the token ids of one block."""
    return block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)


@triton.jit
def part_of_blocks(blocks, part, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Return the places of one part of each of some [BLOCKS] blocks of a size, [BLOCKS, LANES].

    `LANES` logits of an aligned row are one load of one warp, 16 bytes a thread.
    """
    return blocks[:, None] * SIZE + part * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def load_blocks(row, blocks, wanted, PAIRS: tl.constexpr, ALIGNMENT: tl.constexpr, LANES: tl.constexpr):
    """Return the raw logits of some [BLOCKS] blocks, as a tuple of parts to `unpack`.

    Aligned bfloat16 can be loaded in pairs, which compilers would take twice the instructions to unpack by themselves.
    """
    row_ptr, _, vocab_size = row
    parts = ()
    for part in tl.static_range(BLOCK_SIZE // LANES):
        if PAIRS:
            pairs = part_of_blocks(blocks, part, BLOCK_SIZE // 2, LANES // 2)
            pointers = row_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + pairs
            parts = parts + (tl.load(pointers, mask=wanted & (pairs < vocab_size // 2), other=PAIR_OF_INFINITIES),)
        else:
            parts = parts + (load_raw(row, part_of_blocks(blocks, part, BLOCK_SIZE, LANES), wanted, ALIGNMENT),)
    return parts


@triton.jit
def load_row_blocks(row, first, wanted, ALIGNMENT: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    """Return the raw logits of a few consecutive blocks, in the way that is best for their row alone."""
    PAIRS: tl.constexpr = ALIGNMENT == 16 and row[0].dtype.element_ty == tl.bfloat16
    return load_blocks(row, first + tl.arange(0, BLOCKS), wanted, PAIRS, ALIGNMENT, LANES)


@triton.jit
def unpack(part):
    """Return the logits of a part as float32: those of even and of odd tokens, or all."""
    if part.dtype == tl.int32:
        return (part << 16).to(tl.float32, bitcast=True), (part & -65536).to(tl.float32, bitcast=True)
    else:
        return (part.to(tl.float32),)


@triton.jit
def in_order(bits):
    """Return the bits of float32 numbers as integers in the same order; and of such integers, the bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def largest(values, axis: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return the largest of float32 values along an axis; NaN counts as above all, as below all, or not at all.

    As integers in the same order they are compared by one instruction, in place of five. It takes registers.
    """
    if AT_ONCE:
        return in_order(tl.max(in_order(values.to(tl.int32, bitcast=True)), axis)).to(tl.float32, bitcast=True)
    else:
        return tl.max(values, axis)


@triton.jit
def summarise(parts, temperature, AT_ONCE: tl.constexpr):
    """Return the largest logit of each block and its sum of exponentials (0 if greedy), given its parts."""
    logits = unpack(parts[0])
    peaks = logits[0] if len(logits) == 1 else tl.maximum(logits[0], logits[1])
    for part in tl.static_range(1, len(parts)):
        logits = unpack(parts[part])
        for half in tl.static_range(len(logits)):
            peaks = tl.maximum(peaks, logits[half])
    maxima = largest(peaks, 1, AT_ONCE)
    sums = tl.zeros_like(maxima)
    if temperature > 0:
        scale = base_2_scale(temperature)
        finite = tl.where(tl.abs(maxima) < INFINITY, maxima, 0.0)[:, None]
        weights = ()
        for part in tl.static_range(len(parts)):
            logits = unpack(parts[part])
            added = ()
            for half in tl.static_range(len(logits)):
                exponentials = tl.exp2((logits[half] - finite) * scale)
                added = added + (exponentials if part == 0 else weights[half] + exponentials,)
            weights = added
        sums = sum_blocks(weights)
    return maxima, sums


@triton.jit
def sum_blocks(weights):
    """Return the sums of [BLOCKS, LANES] weights over the lanes: of pairs of neighbours, of pairs of these, and so on.

    That is the same order however the compiler spreads the lanes over threads, which hangs on how a row lies in memory.
    The weights are a tuple: one tensor, or two [BLOCKS, LANES // 2], of even and of odd lanes.
    """
    sums = weights[0] if len(weights) == 1 else weights[0] + weights[1]
    BLOCKS: tl.constexpr = sums.shape[0]
    LANES: tl.constexpr = sums.shape[1]
    for level in tl.static_range(20):
        if LANES >> level > 1:
            sums = tl.sum(tl.reshape(sums, [BLOCKS, LANES >> (level + 1), 2]), 2)
    return tl.reshape(sums, [BLOCKS])


@triton.jit
def sum_in_order(weights):
    """Return the sum of a vector, in the order of `sum_blocks`."""
    return tl.sum(sum_blocks((tl.reshape(weights, [1, weights.shape[0]]),)), 0)


@triton.jit
def add_both(a, b, c, d):
    """Return two sums."""
    return a + c, b + d


@triton.jit
def sum_both_in_order(weights, others):
    """Return the sums of two vectors of a size, each as `sum_in_order` does, in the time of one."""
    SIZE: tl.constexpr = weights.shape[0]
    for level in tl.static_range(20):
        if SIZE >> level > 1:
            pairs = tl.reshape(weights, [SIZE >> (level + 1), 2]), tl.reshape(others, [SIZE >> (level + 1), 2])
            weights, others = tl.reduce(pairs, 1, add_both)
    return tl.sum(weights, 0), tl.sum(others, 0)


@triton.jit
def store_statistics(
    statistics_ptr, index, parts, first, num_blocks, temperature, BLOCKS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Leave the statistics of a few blocks of the row that has this index."""
    maxima, sums = summarise(parts, temperature, AT_ONCE)
    # Each warp has a block and stores for it, by its first lane. As a vector of blocks the numbers would first change warps,
    # for which all of them would have to wait for each other.
    blocks, lanes = first + tl.arange(0, BLOCKS)[:, None], tl.arange(0, WARP)[None, :]
    places = statistics_ptr + (index * num_blocks + blocks) * 2 + lanes
    wanted = (blocks < num_blocks) & (lanes == 0)
    tl.store(places, tl.broadcast_to(maxima[:, None], [BLOCKS, WARP]), mask=wanted)
    tl.store(places + 1, tl.broadcast_to(sums[:, None], [BLOCKS, WARP]), mask=wanted)


@triton.jit
def load_statistics(statistics_ptr, index, wanted, num_blocks, MAX_BLOCKS: tl.constexpr):
    """Return the maxima and sums of all blocks of a row, [MAX_BLOCKS], as they were left; -inf and 0 beyond the last."""
    blocks = tl.arange(0, MAX_BLOCKS)
    maxima_ptr = statistics_ptr + (index * num_blocks + blocks) * 2
    wanted = tl.where(wanted, blocks < num_blocks, False)
    return tl.load(maxima_ptr, mask=wanted, other=-INFINITY), tl.load(maxima_ptr + 1, mask=wanted, other=0.0)


@triton.jit
def mend_statistics(maxima, sums, row, num_blocks, temperature, ALIGNMENT: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    """Summarise again the blocks whose statistics were spoilt; NaN logits count as -inf."""
    # The largest logit adds 1 to a sound sum. What a NaN or an infinity makes of it is NaN or infinite.
    spoilt = maxima != maxima
    if temperature > 0:
        spoilt = tl.where(maxima == -INFINITY, sums != 0, ((sums > 0.5) & (sums < 2 * BLOCK_SIZE)) == 0)
    spoilt = spoilt.to(tl.int32)
    blocks = tl.arange(0, MAX_BLOCKS)
    if tl.max(spoilt, 0) == 1:
        # As `summarise` does it, so that a NaN and a -inf give the same bits; but this seldom runs, and is to stay small.
        LANES: tl.constexpr = 4096 // row[0].dtype.element_ty.primitive_bitwidth
        scale = base_2_scale(temperature)
        for block in range(num_blocks):
            if tl.max(tl.where(blocks == block, spoilt, 0), 0) == 1:
                this = block + tl.arange(0, 1)
                peaks = tl.full([1, LANES], -INFINITY, tl.float32)
                for part in range(BLOCK_SIZE // LANES):
                    logits = load_logits(row, part_of_blocks(this, part, BLOCK_SIZE, LANES), True, ALIGNMENT)
                    peaks = tl.maximum(peaks, logits)
                peak = tl.max(tl.max(peaks, 1), 0)
                finite = tl.where(tl.abs(peak) < INFINITY, peak, 0.0)
                weights = tl.zeros([1, LANES], tl.float32)
                for part in range(BLOCK_SIZE // LANES):
                    logits = load_logits(row, part_of_blocks(this, part, BLOCK_SIZE, LANES), True, ALIGNMENT)
                    weights += tl.exp2((logits - finite) * scale)
                maxima = tl.where(blocks == block, peak, maxima)
                sums = tl.where(blocks == block, tl.sum(sum_blocks((weights,)), 0), sums)
    return maxima, sums
