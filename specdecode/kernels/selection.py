"""Selection in Triton: tokens drawn from the statistics of blocks by two-level Gumbel-max.

    block b = argmax log W_b + G(b)        token v = argmax log w(v) + G'(v) in block b,  w(v) = exp((l_v - M) / T)

One random number is drawn for each block, and one for each token of block b, the only block that is read again. With G =
-log E, E exponential, the first is argmax W_b / E(b) and the second argmax w(v) / E'(v). This form is computed, because it
needs no logarithm of weights. (It is an *exponential race*: tokens arrive at times E(v) / w(v), and the first is taken.)

A tie goes to the lowest block, and in it to the lowest token: `first_largest`, or `block_bounds.ranked` where blocks come
in the order of their bounds.
"""

import triton
import triton.language as tl

from specdecode.kernels.block_bounds import with_blocks
from specdecode.kernels.distribution import combine, combine_nonfinite
from specdecode.kernels.logprobs import normalizer_of
from specdecode.kernels.philox import accept_uniform, exponential
from specdecode.kernels.rows import BLOCK_SIZE, base_2_scale, load_logits, ordered_bits, target_row_at, tokens_of
from specdecode.kernels.statistics import load_target_statistics
from specdecode.kernels.values import Noise


@triton.jit
def noise_at(context, requests, sizes):
    """Return a row's random numbers; the numbers of tokens are drawn once their block is known."""
    exponentials = exponential(context.key, context.offset, tl.arange(0, sizes.MAX_BLOCKS), requests.block_domain)
    return Noise(accept_uniform(context.key, context.offset), exponentials)


@triton.jit
def first_largest(scores):
    """Return the first index of the largest score. Negative scores count as smaller than all others, in no defined order."""
    bits = scores.to(tl.int32, bitcast=True)  # in the same order, and compared faster
    count: tl.constexpr = scores.shape[0]
    return tl.min(tl.where(bits == tl.max(bits, 0), tl.arange(0, count), count), 0)


@triton.jit
def block_scores(block_sums, exponentials):
    """Return the block scores W_b / E_b."""
    # 2^30: the smallest sum divided by the largest E must not round to 0, the score of impossible blocks.
    return block_sums * 2.0**30 / exponentials


@triton.jit
def select_block(block_sums, exponentials):
    """Draw a block with probability proportional to its sum; at least one sum is not 0."""
    return first_largest(block_scores(block_sums, exponentials))


@triton.jit
def token_weights(logits, row_max, temperature):
    """Return the weights 2^60 exp((l - row_max) / T): in a selected block no token that matters underflows."""
    return tl.exp2(tl.fma(logits - row_max, base_2_scale(temperature), 60.0))


@triton.jit
def select_token(weights, exponentials, block):
    """Draw a token of a block with probability proportional to its weight."""
    return block * BLOCK_SIZE + first_largest(weights / exponentials)


@triton.jit
def load_block(row, context, block, token_domain):
    """Return the logits of one block of a row and the E' of each token, computed while the loads are in flight."""
    token_ids = tokens_of(block)
    return load_logits(row, token_ids, True), exponential(context.key, context.offset, token_ids, token_domain)


@triton.jit
def draw_from_block(loaded, block, row_max, temperature):
    """Draw a token of one block of a row."""
    logits, exponentials = loaded
    return select_token(token_weights(logits, row_max, temperature), exponentials, block)


@triton.jit
def guess_block(statistics, exponentials, scale):
    """Return a guess of the selected block, nearly always right, from logarithms, before the row's maximum is known."""
    block_max, sumexp = statistics
    MAX_BLOCKS: tl.constexpr = block_max.shape[0]
    scores = tl.fma(block_max, scale, tl.log2(sumexp) - tl.log2(exponentials))
    return tl.max(with_blocks(ordered_bits(scores.to(tl.int32, bitcast=True))), 0) & (MAX_BLOCKS - 1)


@triton.jit
def sample_token(context, noise, inputs, workspace, sizes):
    """Draw a row's token; return it, and the row's normalizer."""
    row = target_row_at(context, inputs, workspace, sizes)
    statistics = load_target_statistics(context, workspace, sizes)
    token_domain = inputs.requests.token_domain
    if context.temperature > 0:
        # The logits of the likely block are loaded while the selected block is computed.
        guessed = guess_block(statistics, noise.exponentials, base_2_scale(context.temperature))
        loaded = load_block(row, context, guessed, token_domain)
        p = combine(statistics, row, context.temperature, sizes)
        token = p.point_mass_token
        if token < 0:
            block = select_block(p.block_sums, noise.exponentials)
            if block != guessed:
                loaded = load_block(row, context, block, token_domain)
            token = draw_from_block(loaded, block, p.row_max, context.temperature)
    else:
        p = combine_nonfinite(statistics, row, context.temperature, sizes)
        token = p.point_mass_token
    return tl.minimum(token, sizes.vocab_size - 1), normalizer_of(p)
