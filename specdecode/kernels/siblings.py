"""The launch that draws siblings, the children of a node: the target's own token, and the tokens next in the same draw.

    lag of token v in block b  =  log S_top - log S_b + log s_top - log s_v,     S_b = W_b / E(b),  s_v = w(v) / E'(v)

`selection` draws a token by these scores: w(v) is the token's weight, W_b the sum of the weights of block b, and E(b) and
E'(v) are exponential random numbers. S_top is the largest S, and s_top the largest s in block b, so the drawn token has lag
0. The siblings are the `WIDTH` tokens with the smallest lags. They lie in the `WIDTH` blocks with the largest S, since the
top token of a block has the lag of its block. Logarithms here have base 2.

A program has one row. It reads the row's statistics, 8 bytes for each block of 1,024 tokens, and the logits of `WIDTH`
blocks again. Siblings of a greedy request are the tokens with the largest logits.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import combine, recompute_nonfinite
from specdecode.kernels.launch import await_launch
from specdecode.kernels.philox import exponential
from specdecode.kernels.request import load_key, load_temperature, locate_program
from specdecode.kernels.rows import BLOCK_SIZE, base_2_scale, load_logits, target_row_at
from specdecode.kernels.selection import block_scores, first_largest, noise_at
from specdecode.kernels.statistics import load_target_statistics
from specdecode.kernels.top_logprobs import NO_TOKEN, next_token
from specdecode.kernels.truncation.narrow import NO_ORDER, token_of_order
from specdecode.kernels.values import INFINITY, RowContext


@triton.jit
def best_blocks(scores, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """Return the blocks with the `WIDTH` largest scores and their lags, [RANKS] each; unused lags are infinity."""
    ranks, indices = tl.arange(0, RANKS), tl.arange(0, scores.shape[0])
    best = tl.max(scores, 0)
    blocks, lags = tl.zeros([RANKS], tl.int32), tl.full([RANKS], INFINITY, tl.float32)
    for rank in tl.static_range(WIDTH):
        score, block = tl.max(scores, 0), first_largest(scores)
        lag = tl.where(score > 0, tl.log2(best / tl.where(score > 0, score, 1.0)), INFINITY)
        blocks, lags = tl.where(ranks == rank, block, blocks), tl.where(ranks == rank, lag, lags)
        scores = tl.where(indices == block, -1.0, scores)  # this block has its rank
    return blocks, lags


@triton.jit
def store_sampled(context, row, p, noise, drawn, siblings_ptr, token_domain, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """Store the tokens with the smallest lags, the drawn token first; the row is not a point mass."""
    blocks, lags = best_blocks(block_scores(p.block_sums, noise.exponentials), WIDTH, RANKS)
    ids = blocks[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    logits = load_logits(row, ids, lags[:, None] < INFINITY)
    exponentials = exponential(context.key, context.offset, ids, token_domain)
    scores = tl.fma(logits - p.row_max, base_2_scale(context.temperature), -tl.log2(exponentials))
    lags = lags[:, None] + (tl.max(scores, 1)[:, None] - scores)
    lags = tl.where((scores > -INFINITY) & (ids != drawn), lags, INFINITY)
    tl.store(siblings_ptr, drawn)  # first even if rounding gives another token the smallest lag
    for nth in range(1, WIDTH):
        least = tl.min(lags)
        token = tl.min(tl.where(lags == least, ids, 2**31 - 1))
        tl.store(siblings_ptr + nth, tl.where(least < INFINITY, token, -1).to(tl.int64))
        lags = tl.where(ids == token, INFINITY, lags)


@triton.jit
def store_likeliest(row, block_max, drawn, siblings_ptr, sizes, WIDTH: tl.constexpr):
    """Store the tokens with the largest logits, the drawn token first."""
    last = tl.full([], NO_ORDER, tl.int64)
    for nth in range(WIDTH):
        last, block_max = next_token(row, block_max, last, sizes)
        _, token = token_of_order(last)
        token = tl.where(last > NO_TOKEN, token, -1)
        tl.store(siblings_ptr + nth, tl.where(nth == 0, drawn, token.to(tl.int64)))


@triton.jit
def siblings_kernel(inputs, outputs, workspace, sizes, siblings):
    """Draw the siblings of one row."""
    request, offset = locate_program(1, inputs.packing, sizes)
    temperature = load_temperature(inputs.requests, request)
    context = RowContext(request, offset, -1, load_key(inputs.requests, request), temperature)
    noise = noise_at(context, inputs.requests, sizes)
    siblings_ptr = siblings.ids_ptr + request.index * siblings.WIDTH
    await_launch(siblings.OVERLAPS)
    row = target_row_at(context, inputs, workspace, sizes)
    statistics = load_target_statistics(context, workspace, sizes)
    drawn = tl.load(outputs.token_ids_ptr + request.index)
    p = combine(statistics, row, temperature, sizes)
    if temperature > 0:
        if p.point_mass_token < 0:
            token_domain = inputs.requests.token_domain
            RANKS: tl.constexpr = triton.next_power_of_2(siblings.WIDTH)
            store_sampled(context, row, p, noise, drawn, siblings_ptr, token_domain, siblings.WIDTH, RANKS)
        else:
            for nth in range(siblings.WIDTH):
                tl.store(siblings_ptr + nth, tl.where(nth == 0, drawn, -1))
    else:
        block_max, _ = recompute_nonfinite(statistics, row, temperature, sizes)
        store_likeliest(row, block_max, drawn, siblings_ptr, sizes, siblings.WIDTH)
