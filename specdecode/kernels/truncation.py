"""Truncation in Triton: the last token that top-k, top-p and min-p keep of a row, and the statistics of what is kept.

Kept are the tokens up to the cutoff in the order (logit descending, id ascending). Logits are compared as integers, their
*keys*. The key t of the cutoff is the largest one such that the tokens with keys >= t are enough: k of them, or a mass of
top_p; it is found by bisection, 32 passes over the blocks whose maximum may still matter. Of the tokens with key t itself
those with the lowest ids are kept, as many as it takes.

A program has one row. It leaves the cutoff, and in place of the statistics of each block those of what is kept of it. So
everything that follows computes with the truncated distribution: where logits are read again, `rows` makes -inf of those
beyond the cutoff.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import combine, recompute_nonfinite
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    INFINITY,
    LAST_TOKEN,
    base_2_scale,
    cutoff_at,
    draft_statistics,
    in_order,
    load_logits,
    load_statistics,
    load_temperature,
    row_at,
    scaled,
    sum_blocks,
    target_statistics,
)
from specdecode.kernels.state import count_drafts

LOWEST_KEY = tl.constexpr(-0x7F800000)
"""Of the smallest finite logit."""


@triton.jit
def keys_of_logits(logits):
    """Return integers in the order of the logits; 0 and -0 are equal."""
    return in_order((logits + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def logit_of(key):
    """Return the logit that has a key."""
    return in_order(key).to(tl.float32, bitcast=True)


@triton.jit
def load_limits(limits, request, sizes):
    """Return a request's top_k, top_p and min_p; values of a tensor, which could not be checked, are made harmless."""
    top_k, top_p, min_p = limits.top_k, limits.top_p, limits.min_p
    if limits.top_k_ptr is not None:
        top_k = tl.load(limits.top_k_ptr + request)
    if limits.top_p_ptr is not None:
        top_p = tl.load(limits.top_p_ptr + request).to(tl.float32)
    if limits.min_p_ptr is not None:
        min_p = tl.load(limits.min_p_ptr + request).to(tl.float32)
    top_k = tl.where(top_k > 0, tl.minimum(top_k, sizes.vocab_size), sizes.vocab_size).to(tl.int32)
    top_p = tl.where(top_p < 1, tl.maximum(top_p, 0.0), 2.0)
    return top_k, top_p, tl.where(min_p > 0, tl.minimum(min_p, 1.0), 0.0)


@triton.jit
def load_tile(row, first, BLOCKS: tl.constexpr):
    """Return the tokens of `BLOCKS` blocks and their logits, [BLOCKS, BLOCK_SIZE] each."""
    token_ids = (first + tl.arange(0, BLOCKS))[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    return token_ids, load_logits(row, token_ids, True)


@triton.jit
def matters(block_max, first, key, sizes, BLOCKS: tl.constexpr):
    """Return whether a tile of blocks has a token with a key, or a larger one."""
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    in_tile = (blocks >= first) & (blocks < first + BLOCKS)
    return tl.max((in_tile & (keys_of_logits(block_max) >= key)).to(tl.int32), 0) == 1


@triton.jit
def at_least(key, row, block_max, row_max, scale, sizes, BLOCKS: tl.constexpr):
    """Return how many tokens have a key or a larger one, and their mass relative to the row's maximum."""
    count, mass = tl.full([], 0, tl.int32), 0.0
    for first in range(0, sizes.num_blocks, BLOCKS):
        if matters(block_max, first, key, sizes, BLOCKS):
            _, logits = load_tile(row, first, BLOCKS)
            chosen = keys_of_logits(logits) >= key
            weights = tl.exp2((logits - row_max) * scale)
            count += tl.sum(tl.sum(chosen.to(tl.int32), 1), 0)
            mass += tl.sum(sum_blocks((tl.where(chosen, weights, 0.0),)), 0)
    return count, mass


@triton.jit
def min_p_key(row_max, min_p, temperature):
    """Return the least key that min_p keeps."""
    low, high = tl.full([], LOWEST_KEY, tl.int64), keys_of_logits(row_max).to(tl.int64)  # `high` is kept
    least = tl.log(min_p)
    for _ in range(32):
        middle = (low + high) >> 1
        is_kept = scaled(logit_of(middle.to(tl.int32)), row_max, temperature) >= least
        high = tl.where(is_kept, middle, high)
        low = tl.where(is_kept, low, middle + 1)
        low = tl.minimum(low, high)
    return high.to(tl.int32)


@triton.jit
def largest_key(low, count, mass, row, block_max, row_max, scale, sizes, BLOCKS: tl.constexpr):
    """Return the largest key from `low` on such that the tokens with it or a larger one number `count` and weigh `mass`."""
    low, high = low.to(tl.int64), keys_of_logits(row_max).to(tl.int64)
    for _ in range(32):
        if low < high:
            middle = (low + high + 1) >> 1
            found, found_mass = at_least(middle.to(tl.int32), row, block_max, row_max, scale, sizes, BLOCKS)
            is_enough = (found >= count) & (found_mass >= mass)
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def token_of_tie(key, number, row, block_max, sizes, BLOCKS: tl.constexpr):
    """Return the token with a key that has `number - 1` tokens of the same key before it."""
    seen, token = tl.full([], 0, tl.int32), tl.full([], -1, tl.int32)
    for first in range(0, sizes.num_blocks, BLOCKS):
        if (token < 0) & matters(block_max, first, key, sizes, BLOCKS):
            token_ids, logits = load_tile(row, first, BLOCKS)
            ties = tl.reshape((keys_of_logits(logits) == key).to(tl.int32), [BLOCKS * BLOCK_SIZE])
            counted = seen + tl.cumsum(ties, 0)
            found = (ties == 1) & (counted == number)
            token = tl.max(tl.where(found, tl.reshape(token_ids, [BLOCKS * BLOCK_SIZE]), -1), 0)
            seen += tl.sum(ties, 0)
    return token


@triton.jit
def find_cutoff(row, block_max, row_max, temperature, limits, sizes, BLOCKS: tl.constexpr):
    """Return the key and the token of the cutoff of a row with a finite maximum, where T > 0."""
    top_k, top_p, min_p = limits
    scale = base_2_scale(temperature)
    key = tl.full([], LOWEST_KEY, tl.int32)
    if min_p > 0:
        key = min_p_key(row_max, min_p, temperature)
    count, mass = at_least(key, row, block_max, row_max, scale, sizes, BLOCKS)
    kept = tl.minimum(count, top_k)
    if top_k < count:
        key = largest_key(key, top_k, 0.0, row, block_max, row_max, scale, sizes, BLOCKS)
    above, mass_above = at_least(key + 1, row, block_max, row_max, scale, sizes, BLOCKS)
    if top_k < count:
        weight = tl.exp2((logit_of(key) - row_max) * scale)
        mass = mass_above + (kept - above) * weight
    if top_p < 1:
        last_key = key
        key = largest_key(last_key, 0, top_p * mass, row, block_max, row_max, scale, sizes, BLOCKS)
        if key > last_key:
            kept, _ = at_least(key, row, block_max, row_max, scale, sizes, BLOCKS)
            above, mass_above = at_least(key + 1, row, block_max, row_max, scale, sizes, BLOCKS)
        weight = tl.exp2((logit_of(key) - row_max) * scale)
        ties = tl.ceil((top_p * mass - mass_above) / tl.maximum(weight, 1e-30))
        ties = tl.minimum(tl.maximum(ties, 1.0), (kept - above).to(tl.float32))
        kept = above + ties.to(tl.int32)
    return key, token_of_tie(key, kept - above, row, block_max, sizes, BLOCKS)


@triton.jit
def store_kept(pointer, key, token, row, block_max, temperature, sizes, BLOCKS: tl.constexpr):
    """Replace the statistics of a row's blocks by those of what is kept."""
    scale = base_2_scale(temperature)
    for first in range(0, sizes.num_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        maxima, sums = tl.full([BLOCKS], -INFINITY, tl.float32), tl.zeros([BLOCKS], tl.float32)
        if matters(block_max, first, key, sizes, BLOCKS):
            token_ids, logits = load_tile(row, first, BLOCKS)
            keys = keys_of_logits(logits)
            kept = (keys > key) | ((keys == key) & (token_ids <= token))
            maxima = tl.max(tl.where(kept, logits, -INFINITY), 1)
            sums = sum_blocks((tl.where(kept, tl.exp2((logits - maxima[:, None]) * scale), 0.0),))
        tl.store(pointer + blocks * 2, maxima, mask=blocks < sizes.num_blocks)
        tl.store(pointer + blocks * 2 + 1, sums, mask=blocks < sizes.num_blocks)


@triton.jit
def truncate_kernel(inputs, workspace, sizes, tuning):
    """Find the cutoff of one row, and leave the statistics of what is kept."""
    num_rows = sizes.num_draft_tokens + (0 if tuning.OF_DRAFTS else 1)
    request = (tl.program_id(0) // num_rows).to(tl.int64)
    offset = tl.program_id(0) % num_rows
    temperature = load_temperature(inputs.requests, request)
    num_drafts = tl.full([], 0, tl.int32)
    if inputs.drafts.ids_ptr is not None:
        num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    limits = load_limits(inputs.draft_limits if tuning.OF_DRAFTS else inputs.limits, request, sizes)
    await_launch(tuning.OVERLAPS)
    admit_next_launch(tuning.OVERLAPS)
    if tuning.OF_DRAFTS:
        is_read = offset < num_drafts
        row = row_at(inputs.draft, request, offset, sizes)
        statistics_ptr = draft_statistics(workspace, request, offset, sizes)
    else:
        is_read = offset <= num_drafts
        row = row_at(inputs.target, request, offset, sizes)
        statistics_ptr = target_statistics(workspace, request, offset, sizes)
    logit, token = -INFINITY, tl.full([], LAST_TOKEN, tl.int32)
    top_k, top_p, min_p = limits
    if is_read & (temperature > 0) & ((top_k < sizes.vocab_size) | (top_p < 1) | (min_p > 0)):
        statistics = load_statistics(statistics_ptr, True, sizes)
        statistics = recompute_nonfinite(statistics, row, temperature, sizes)
        p = combine(statistics, row, temperature, sizes)
        if p.one_hot >= 0:
            logit, token = p.row_max, p.one_hot
        else:
            key, token = find_cutoff(row, statistics[0], p.row_max, temperature, limits, sizes, tuning.BLOCKS)
            logit = logit_of(key)
            store_kept(statistics_ptr, key, token, row, statistics[0], temperature, sizes, tuning.BLOCKS)
    cutoff_ptr = cutoff_at(workspace, request, offset, tuning.OF_DRAFTS, sizes)
    tl.store(cutoff_ptr, logit)
    tl.store(cutoff_ptr + 1, token.to(tl.float32, bitcast=True))
