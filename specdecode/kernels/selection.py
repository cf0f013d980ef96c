"""Selection in Triton: tokens drawn from block statistics by two-level Gumbel-max.

    W_b = s_b exp((m_b - max m) / T)        block b = argmax  log W_b + G(b)
    w(v) = exp((l_v - max m) / T)           token v = argmax  log w(v) + G'(v)  in block b

One number is drawn for each block and one for each token of a single block, which is the only one that is read again.
"""

import triton
import triton.language as tl

from specdecode.kernels.greedy import point_mass
from specdecode.kernels.launches import SIZES, SMALL_TENSORS, admit_next_launch, await_launch
from specdecode.kernels.philox import gumbel, load_key
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    INFINITY,
    load_logits,
    load_row_blocks,
    load_statistics,
    load_temperature,
    mend_statistics,
    row_at,
    scaled,
    store_statistics,
    sum_in_order,
    tokens_of,
)


@triton.jit
def load_row(statistics_ptr, index, row, num_blocks, temperature, ALIGNMENT: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    """Return a row's scalars and block sums.

    Its largest logit; its sum of exponentials relative to that; the token that it is a point mass on, -1 for none; and its
    block sums [MAX_BLOCKS]. A point mass has a sum of 1 and no block sums.
    """
    maxima, sums = load_statistics(statistics_ptr, index, num_blocks, temperature, MAX_BLOCKS)
    peak = tl.max(maxima, 0)
    weights = tl.where(sums != 0, sums * tl.exp(scaled(maxima, peak, temperature)), 0.0)
    total = sum_in_order(weights)
    point = tl.full([], -1, tl.int32)
    if ((total > 0.5) & (total < INFINITY)) == 0:  # greedy, or not all logits are finite
        maxima, sums = mend_statistics(maxima, sums, row, num_blocks, temperature, ALIGNMENT, MAX_BLOCKS)
        peak = tl.max(maxima, 0)
        if (temperature > 0) & (tl.abs(peak) < INFINITY):
            weights = tl.where(sums != 0, sums * tl.exp(scaled(maxima, peak, temperature)), 0.0)
            total = sum_in_order(weights)
        else:
            weights = tl.zeros([MAX_BLOCKS], tl.float32)
            total = 1.0
            point = point_mass(row, maxima, peak, ALIGNMENT)
    return peak, total, point, weights


@triton.jit
def select_block(sums, key, offset, domain):
    """Draw a block with probability proportional to its sum."""
    blocks = tl.arange(0, sums.shape[0])
    scores = tl.log(tl.where(sums > 0, sums, 1.0)) + gumbel(key, offset, blocks, domain)
    return tl.argmax(tl.where(sums > 0, scores, -INFINITY), 0)


@triton.jit
def select_token(log_weights, block, key, offset, domain):
    """Draw a token of a block with probability proportional to its weight."""
    return block * BLOCK_SIZE + tl.argmax(log_weights + gumbel(key, offset, tokens_of(block), domain), 0)


@triton.jit
def draw(
    statistics_ptr,
    index,
    row,
    num_blocks,
    temperature,
    key,
    offset,
    domains,
    ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Draw a token of a row; return it, the row's largest logit and its sum relative to that."""
    peak, total, token, sums = load_row(statistics_ptr, index, row, num_blocks, temperature, ALIGNMENT, MAX_BLOCKS)
    if token < 0:
        block = select_block(sums, key, offset, domains[0])
        log_weights = scaled(load_logits(row, tokens_of(block), ALIGNMENT), peak, temperature)
        token = select_token(log_weights, block, key, offset, domains[1])
    _, _, vocab_size = row
    return tl.minimum(token, vocab_size - 1), peak, total


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def summarise_kernel(
    statistics_ptr,  # [batch, 2, num_blocks] float32
    logits_ptr,  # [batch, vocab_size] any float
    temperature_ptr,  # [batch] any float, or None
    temperature,
    stride_row: tl.int64,
    stride_token: tl.int64,
    vocab_size,
    num_blocks,
    tiles,
    ALIGNMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Summarise `tiles` times `BLOCKS` blocks of one row."""
    admit_next_launch(OVERLAPS)
    chunks = tl.cdiv(num_blocks, tiles * BLOCKS)
    request = (tl.program_id(0) // chunks).to(tl.int64)
    t = load_temperature(temperature_ptr, temperature, request)
    row = row_at((logits_ptr, None, stride_row, 0, stride_token), vocab_size, request, 0, ALIGNMENT)
    for tile in range(tiles):
        first = (tl.program_id(0) % chunks * tiles + tile) * BLOCKS
        parts = load_row_blocks(row, first, True, ALIGNMENT, BLOCKS, LANES)
        store_statistics(statistics_ptr, request, parts, first, num_blocks, t, BLOCKS)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def sample_kernel(
    token_ids_ptr,  # [batch] int64
    logsumexp_ptr,  # [batch] float32
    statistics_ptr,  # [batch, 2, num_blocks] float32
    logits_ptr,  # [batch, vocab_size] any float
    temperature_ptr,  # [batch] any float, or None
    temperature,
    seeds_ptr,  # [batch] int64, or None
    first_seed: tl.int64,
    positions_ptr,  # [batch] int64, or None
    block_domain,
    token_domain,
    stride_row: tl.int64,
    stride_token: tl.int64,
    vocab_size,
    num_blocks,
    ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Draw the token of one row from its statistics."""
    request = tl.program_id(0).to(tl.int64)
    t = load_temperature(temperature_ptr, temperature, request)
    key = load_key(seeds_ptr, first_seed, positions_ptr, request)
    row = row_at((logits_ptr, None, stride_row, 0, stride_token), vocab_size, request, 0, ALIGNMENT)
    domains = (block_domain, token_domain)
    await_launch(OVERLAPS)
    token, peak, total = draw(statistics_ptr, request, row, num_blocks, t, key, 0, domains, ALIGNMENT, MAX_BLOCKS)
    tl.store(token_ids_ptr + request, token.to(tl.int64))
    logsumexp = 0.0
    if t > 0:
        logsumexp = peak / t + tl.log(total)
    tl.store(logsumexp_ptr + request, logsumexp)
