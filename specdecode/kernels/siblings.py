"""The launch that draws siblings: the children of a node, ordered by how likely each is the target's own token.

    lag of token v in block b  =  log S_best - log S_b + log s_first - log s_v,     S_b = W_b / E(b),  s_v = w(v) / E'(v)

S and s are the scores by which `selection` draws one token, the token with lag 0. The siblings are the `WIDTH` tokens
with the smallest lags. They lie in the `WIDTH` best blocks, since the first token of a block has the lag of its block.
The block of rank i, counted from 0, holds at most `WIDTH` - i siblings, because the first tokens of i other blocks come
before its first token.

A program has one row. It reads the row's statistics, 8 bytes for each block of 1,024, and `WIDTH` blocks of logits again.
Siblings of a greedy request are the tokens with the largest logits.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import combine, recompute_nonfinite
from specdecode.kernels.launch import await_launch
from specdecode.kernels.request import load_key, load_temperature, locate_program
from specdecode.kernels.rows import BLOCK_SIZE, base_2_scale, target_row_at
from specdecode.kernels.selection import block_scores, first_largest, load_block, noise_at
from specdecode.kernels.statistics import load_target_statistics
from specdecode.kernels.top_logprobs import NO_TOKEN, next_in_order
from specdecode.kernels.truncation.narrow import NO_ORDER, token_in_order
from specdecode.kernels.values import INFINITY, RowContext

MOST_CANDIDATES = tl.constexpr(64)  # 36 for 8 siblings


@triton.jit
def candidates_of(context, row, p, noise, token_domain, WIDTH: tl.constexpr):
    """Return the lags and ids of the first tokens of the best blocks, [MOST_CANDIDATES] each; the lag is infinity for
    none.
    """
    slots, lanes = tl.arange(0, MOST_CANDIDATES), tl.arange(0, BLOCK_SIZE)
    lags, ids = tl.full([MOST_CANDIDATES], INFINITY, tl.float32), tl.full([MOST_CANDIDATES], -1, tl.int32)
    scores, blocks = block_scores(p.block_sums, noise.exponentials), tl.arange(0, noise.exponentials.shape[0])
    best = tl.max(scores, 0)
    scale = base_2_scale(context.temperature)
    for rank in tl.static_range(WIDTH):
        score, block = tl.max(scores, 0), first_largest(scores)
        scores = tl.where(blocks == block, -1.0, scores)
        logits, exponentials = load_block(row, context, block, token_domain)
        token_scores = tl.fma(logits - p.row_max, scale, -tl.log2(exponentials))
        first = tl.max(token_scores, 0)
        for nth in range(WIDTH - rank):
            token_score = tl.max(token_scores, 0)
            lane = tl.min(tl.where(token_scores == token_score, lanes, BLOCK_SIZE - 1), 0)
            is_possible = (score > 0) & (token_score > -INFINITY)
            lag = tl.where(
                is_possible, tl.log2(best / tl.where(score > 0, score, 1.0)) + (first - token_score), INFINITY
            )
            is_slot = slots == rank * WIDTH - rank * (rank - 1) // 2 + nth
            lags, ids = tl.where(is_slot, lag, lags), tl.where(is_slot, block * BLOCK_SIZE + lane, ids)
            token_scores = tl.where(lanes == lane, -INFINITY, token_scores)
    return lags, ids


@triton.jit
def store_race(context, row, p, noise, drawn, siblings_ptr, token_domain, WIDTH: tl.constexpr):
    """Store the siblings of a row that is not a point mass, the drawn token first."""
    lags, ids = candidates_of(context, row, p, noise, token_domain, WIDTH)
    lags = tl.where(ids == drawn, INFINITY, lags)
    tl.store(siblings_ptr, drawn)  # even if its lag is rounded
    for nth in range(1, WIDTH):
        least = tl.min(lags, 0)
        token = tl.min(tl.where(lags == least, ids, 2**31 - 1), 0)
        tl.store(siblings_ptr + nth, tl.where(least < INFINITY, token, -1).to(tl.int64))
        lags = tl.where((lags == least) & (ids == token), INFINITY, lags)


@triton.jit
def store_likeliest(row, block_max, drawn, siblings_ptr, sizes, WIDTH: tl.constexpr):
    """Store the tokens with the largest logits, the drawn token first."""
    last = tl.full([], NO_ORDER, tl.int64)
    for nth in range(WIDTH):
        last, block_max = next_in_order(row, block_max, last, sizes)
        _, token = token_in_order(last)
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
    row, statistics = (
        target_row_at(context, inputs, workspace, sizes),
        load_target_statistics(context, workspace, sizes),
    )
    drawn = tl.load(outputs.token_ids_ptr + request.index)
    p = combine(statistics, row, temperature, sizes)
    if temperature > 0:
        if p.point_mass_token < 0:
            token_domain = inputs.requests.token_domain
            store_race(context, row, p, noise, drawn, siblings_ptr, token_domain, siblings.WIDTH)
        else:
            for nth in range(siblings.WIDTH):
                tl.store(siblings_ptr + nth, tl.where(nth == 0, drawn, -1))
    else:
        block_max, _ = recompute_nonfinite(statistics, row, temperature, sizes)
        store_likeliest(row, block_max, drawn, siblings_ptr, sizes, siblings.WIDTH)
