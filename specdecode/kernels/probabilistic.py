"""Probabilistic in Triton: accept by likelihood ratio, repair with the residual.

    the draft x stands iff u <= p(x) / q(x)        else the token is drawn from max(0, p - q)

The verdict needs of each row its statistics and one logit: log p(x) = (l_x - peak) / T - log_sum. A recovered token is drawn
from the residual max(0, p - q) of its row, whose block sums would take a second read of both rows. But to know which block
wins takes only a few of them, for p bounds them all: `select_residual_block`. A point mass (greedy, a deterministic drafter,
a row with an infinite logit) needs no search: p without one token differs from p in one block.

In a large batch `decide_by_ratio` decides while rows are read, and `emit_kernel` draws, a program for each request. In a
small batch `finish_by_ratio_kernel` decides at every offset at once, a program for each, and draws where the draft does not
stand. To decide takes two logits and 16 bytes of statistics for each block of 1,024; to draw, 4 KB (bfloat16) for
each block of both rows that the search looks at, which is a few. Written are 8 bytes of token and as many of verdict.
"""

import triton
import triton.language as tl

from specdecode.kernels.launches import SIZES, SMALL_TENSORS, await_launch
from specdecode.kernels.philox import exponential, load_key
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    INFINITY,
    LOG2_E,
    base_2_scale,
    load_blocks,
    load_logits,
    load_statistics,
    load_temperature,
    row_at,
    scaled,
    sum_blocks,
    sum_in_order,
    tokens_of,
    unpack,
)
from specdecode.kernels.search import (
    block_of,
    blocks_of,
    bounds_of_residual,
    keys_of,
    most_of,
    ranked,
    score_of,
    take_leaders,
)
from specdecode.kernels.selection import (
    merge,
    merge_both,
    scores_of_blocks,
    select_block,
    select_token,
    times_of_blocks,
    weigh_tokens,
)
from specdecode.kernels.steps import (
    add_verdict,
    count_drafts,
    finish,
    hand_in,
    is_to_finish,
    load_drafts,
    load_empty,
    load_stop,
    load_verdicts,
    post_empty,
    post_stop,
    store_output,
)
from specdecode.kernels.strict import SELECT_BLOCK, SELECT_TOKEN
from specdecode.kernels.synthetic import accept_uniform, is_scheduled

LARGEST_LOGSUMEXP = tl.constexpr(256.0)
"""Beyond this a float32 logsumexp may be off by more than 1.5e-5: the row is read."""

LN_2 = tl.constexpr(0.6931471805599453)

NOTHING, ALL = tl.constexpr(-1), tl.constexpr(-2)
"""What is taken from p before the emitted token is drawn, if not one token: nothing, or all of q."""

PEAK, DRAFT_PEAK, LOG_SUM_RATIO, TAKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
LOG_SUM, KEPT, LOG_RATIO, CLAIMED, SUMMED, SCALARS = (tl.constexpr(field) for field in range(4, 10))
"""Numbers that a judged draft leaves for its residual, see `weigh`; the last five for block verification."""


@triton.jit
def is_trusted(logsumexp):
    """Return whether a given logsumexp says enough of its row (not if it is NaN)."""
    return tl.abs(logsumexp) <= LARGEST_LOGSUMEXP


@triton.jit
def load_logsumexp(logsumexps, request, offset, wanted):
    """Return the logsumexp that came with a draft; `logsumexps` is (pointer, strides of requests and offsets)."""
    logsumexp_ptr, stride_request, stride_offset = logsumexps
    return tl.load(logsumexp_ptr + request * stride_request + offset * stride_offset, mask=wanted, other=0.0)


@triton.jit
def log_quotient(a, b):
    """Return log(a / b), which keeps its relative precision where a and b nearly agree."""
    x = (a - b) / b
    near = x * (1 - x * (1 / 2 - x * (1 / 3 - x * (1 / 4))))
    return tl.where(tl.abs(x) < 1 / 64, near, tl.log(a / b))


@triton.jit
def load_logit(row, token, wanted):
    """Return the logit of one token, -inf for NaN."""
    row_ptr, stride_token, _ = row
    logit = tl.load(row_ptr + token.to(tl.int64) * stride_token, mask=wanted, other=0.0).to(tl.float32)
    return tl.where(logit == logit, logit, -INFINITY)


@triton.jit
def logprob(logit, token, peak, log_sum, point, temperature):
    """Return the log-probability of one token, given its logit and its row's scalars."""
    certain = tl.where(token == point, 0.0, -INFINITY)
    return tl.where(point < 0, scaled(logit, tl.where(point < 0, peak, 0.0), temperature) - log_sum, certain)


@triton.jit
def weigh(
    statistics_ptr,
    target_row,
    draft_rows,
    logsumexps,
    token,
    request,
    offset,
    temperature,
    batch,
    num_draft_tokens,
    num_blocks,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Weigh a draft; return log p(x), log q(x), what residuals of its row need, and p as `merge` returns it.

    What residuals need, by the names above: the peaks of p and q, log(sum of q / sum of p), what is to be taken from p,
    log(sum of p), and the log-probability of the token that the other row is a point mass on: of p where it is q, of q where
    it is p. From the row after the last draft, where the token is -1, nothing is taken.
    """
    has_draft_row = False
    # Whatever is needed is asked for before any of it has come.
    index = request * (num_draft_tokens + 1) + offset
    statistics = load_statistics(statistics_ptr, index, True, num_blocks, MAX_BLOCKS)
    logit = load_logit(target_row, token, token >= 0)
    if draft_rows[0] is not None:
        has_draft_row = (temperature > 0) & (token >= 0)
        draft_row = row_at(draft_rows, target_row[2], request, offset, DRAFT_ALIGNMENT)
        draft_logit = load_logit(draft_row, token, has_draft_row)
        summarised = has_draft_row
        if logsumexps[0] is not None:
            logsumexp = load_logsumexp(logsumexps, request, offset, has_draft_row)
            summarised = tl.where(is_trusted(logsumexp), False, summarised)
        index = batch.to(tl.int64) * (num_draft_tokens + 1) + request * num_draft_tokens + offset
        draft_statistics = load_statistics(statistics_ptr, index, summarised, num_blocks, MAX_BLOCKS)

    if draft_rows[0] is not None and logsumexps[0] is None:
        merged, draft_merged = merge_both(
            statistics, draft_statistics, target_row, draft_row, has_draft_row, num_blocks, temperature, TARGET_ALIGNMENT,
            DRAFT_ALIGNMENT, MAX_BLOCKS,
        )  # fmt: skip
    else:
        merged = merge(statistics, target_row, num_blocks, temperature, TARGET_ALIGNMENT, MAX_BLOCKS)
    peak, total, point, _ = merged
    log_sum = tl.log(total)
    target = logprob(logit, token, peak, log_sum, point, temperature)
    draft_peak, log_sum_ratio, draft = 0.0, 0.0, 0.0
    taken = token
    kept = tl.where(token == point, 0.0, -INFINITY)
    if draft_rows[0] is not None:
        if has_draft_row:
            draft_point = tl.full([], -1, tl.int32)
            draft_log_sum = 0.0
            if logsumexps[0] is not None:  # relative to a peak of 0
                draft_log_sum, log_sum_ratio = logsumexp, logsumexp - log_sum
            if summarised:
                if logsumexps[0] is not None:
                    draft_merged = merge(
                        draft_statistics, draft_row, num_blocks, temperature, DRAFT_ALIGNMENT, MAX_BLOCKS
                    )
                draft_peak, draft_total, draft_point, _ = draft_merged
                draft_log_sum, log_sum_ratio = tl.log(draft_total), log_quotient(draft_total, total)
            draft = logprob(draft_logit, token, draft_peak, draft_log_sum, draft_point, temperature)
            taken = tl.where(draft_point < 0, ALL, draft_point)
            if point >= 0:
                draft_logit = load_logit(draft_row, point, True)
                kept = logprob(draft_logit, point, draft_peak, draft_log_sum, draft_point, temperature)
    if point >= 0:
        taken = tl.full([], NOTHING, tl.int32)
    elif taken >= 0:
        kept = logprob(load_logit(target_row, taken, True), taken, peak, log_sum, point, temperature)
    return target, draft, (peak, draft_peak, log_sum_ratio, taken, log_sum, kept), merged


@triton.jit
def store_scalars(scalars_ptr, scalars):
    """Leave a row's scalars for whoever emits."""
    for field in tl.static_range(len(scalars)):
        value = scalars[field]
        tl.store(scalars_ptr + field, value.to(tl.float32, bitcast=True) if field == TAKEN else value)


@triton.jit
def load_scalars(scalars_ptr):
    """Return p's peak, q's peak and log(sum of q / sum of p); and what is taken from p."""
    taken = tl.load(scalars_ptr + TAKEN).to(tl.int32, bitcast=True)
    return (tl.load(scalars_ptr + PEAK), tl.load(scalars_ptr + DRAFT_PEAK), tl.load(scalars_ptr + LOG_SUM_RATIO)), taken


@triton.jit
def stands(target, draft, rates_ptr, offset, uniform):
    """Return whether a draft stands, given log p(x) and log q(x), or a schedule; and its uniform number."""
    if rates_ptr is None:
        possible = (target > -INFINITY) & (draft > -INFINITY)
        return possible & (tl.log(uniform) <= target - draft)
    else:
        return is_scheduled(rates_ptr, offset, uniform)


@triton.jit
def decide_by_ratio(
    state_ptr,
    scalars_ptr,
    statistics_ptr,
    target_row,
    draft_rows,
    logsumexps,
    rates_ptr,
    token,
    request,
    offset,
    temperature,
    key,
    batch,
    num_draft_tokens,
    num_blocks,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Judge the draft at one offset; post whether the request stops there, and leave what its residual will need."""
    if token < 0:  # as after the last draft
        post_stop(state_ptr, request, offset, num_draft_tokens, 0)
    else:
        target, draft, scalars, _ = weigh(
            statistics_ptr, target_row, draft_rows, logsumexps, token, request, offset, temperature, batch,
            num_draft_tokens, num_blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, MAX_BLOCKS,
        )  # fmt: skip
        if scalars[PEAK] == -INFINITY:
            post_empty(state_ptr, request, offset, num_draft_tokens)
        if stands(target, draft, rates_ptr, offset, accept_uniform(key, offset)) == 0:
            post_stop(state_ptr, request, offset, num_draft_tokens, (scalars[TAKEN] != NOTHING).to(tl.int32))
            store_scalars(scalars_ptr + (request * num_draft_tokens + offset) * SCALARS, scalars)


@triton.jit
def shortfall(target, draft, peak_difference, log_sum_ratio, scale):
    """Return 1 - q / p, which is negative where there is no residual, and 1 where q is NaN; `scale` is log2(e) / T.

    log q - log p is formed from the difference of the logits, in base 2, and 1 - q / p by a series where p and q nearly
    agree: so the residual keeps its relative precision.
    """
    # An explicit fma: of a * b + c * d the compiler would round either product, in each kernel another.
    return one_minus_exp2(tl.fma(draft - target - peak_difference, scale, -log_sum_ratio * LOG2_E))


@triton.jit
def one_minus_exp2(x):
    """Return 1 - 2^x, precise near 0 too, and 1 for NaN; for x > 0 it is only known to be negative."""
    near = x * (-LN_2 - x * (LN_2 * LN_2 / 2 + x * (LN_2 * LN_2 * LN_2 / 6)))
    power = tl.exp2(x)
    return tl.where(x > -1 / 64, near, 1 - tl.where(power > 0, power, 0.0))


@triton.jit
def load_both(
    target_row, draft_row, blocks, TARGET_ALIGNMENT: tl.constexpr, DRAFT_ALIGNMENT: tl.constexpr, LANES: tl.constexpr
):
    """Return the raw logits of some [BLOCKS] blocks of both rows."""
    # In pairs both or none, for their logits to meet.
    TARGET_PAIRS: tl.constexpr = TARGET_ALIGNMENT == 16 and target_row[0].dtype.element_ty == tl.bfloat16
    DRAFT_PAIRS: tl.constexpr = DRAFT_ALIGNMENT == 16 and draft_row[0].dtype.element_ty == tl.bfloat16
    PAIRS: tl.constexpr = TARGET_PAIRS and DRAFT_PAIRS
    target = load_blocks(target_row, blocks, True, PAIRS, TARGET_ALIGNMENT, LANES)
    return target, load_blocks(draft_row, blocks, True, PAIRS, DRAFT_ALIGNMENT, LANES)


@triton.jit
def sum_residual(target, draft, scalars, scale):
    """Return the sums of max(0, p - q), relative to p's peak, over some [BLOCKS] blocks, given their raw logits."""
    peak, draft_peak, log_sum_ratio = scalars
    sums = ()
    for part in tl.static_range(len(target)):
        p, q = unpack(target[part]), unpack(draft[part])
        added = ()
        for half in tl.static_range(len(p)):
            left = shortfall(p[half], q[half], draft_peak - peak, log_sum_ratio, scale)
            weights = tl.exp2((p[half] - peak) * scale) * left
            weights = tl.where(weights > 0, weights, 0.0)
            added = added + (weights if part == 0 else sums[half] + weights,)
        sums = added
    return sum_blocks(sums)


@triton.jit
def best_of(target, draft, blocks, scalars, key, offset, temperature):
    """Return the largest score of some [BLOCKS] blocks in the race, `ranked`, given their raw logits; 0 if there is none."""
    times = exponential(key, offset, blocks, SELECT_BLOCK)
    scores = scores_of_blocks(sum_residual(target, draft, scalars, base_2_scale(temperature)), times)
    return tl.max(tl.where(scores > 0, ranked(scores, blocks), 0), 0)


@triton.jit
def select_residual_block(
    sums,
    times,
    target_row,
    draft_row,
    scalars,
    key,
    offset,
    num_blocks,
    temperature,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    LEADERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Draw a block with probability proportional to its residual, given p's block sums; -1 if all of it rounds to nothing.

    The block is that of `select_block`, but few residuals are summed. None is more than p, so no block scores more in the
    race than its sum of p would: blocks are taken in the order of these bounds, until no bound is above the best score.
    """
    bounds = scores_of_blocks(bounds_of_residual(sums), times)
    leaders, columns = take_leaders(keys_of(bounds, num_blocks), LEADERS, BLOCKS)
    first = blocks_of(leaders, num_blocks, MAX_BLOCKS)
    first_target, first_draft = load_both(target_row, draft_row, first, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LANES)
    # The next ones are asked for before it is known whether they matter.
    largest = tl.max(columns, 0)
    chosen = blocks_of(largest, num_blocks, MAX_BLOCKS)
    target, draft = load_both(target_row, draft_row, chosen, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LANES)
    best = best_of(first_target, first_draft, first, scalars, key, offset, temperature)
    while tl.max(most_of(largest, MAX_BLOCKS), 0) > score_of(best):
        columns = tl.where(columns == largest[None, :], -1, columns)
        next_largest = tl.max(columns, 0)
        following = blocks_of(next_largest, num_blocks, MAX_BLOCKS)
        next_target, next_draft = load_both(target_row, draft_row, following, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LANES)
        best = tl.maximum(best, best_of(target, draft, chosen, scalars, key, offset, temperature))
        largest, chosen, target, draft = next_largest, following, next_target, next_draft
    return tl.where(best > 0, block_of(best), -1)


@triton.jit
def draw_residual(
    merged,
    times,
    target_row,
    draft_rows,
    scalars,
    taken,
    request,
    offset,
    key,
    num_blocks,
    temperature,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    LEADERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Draw the token at an offset from p less what is taken from it, given p as `merge` returns it and E of each block."""
    vocab_size = target_row[2]
    block = tl.full([], -1, tl.int32)
    blocks = tl.arange(0, MAX_BLOCKS)
    peak, _, token, sums = merged
    if draft_rows[0] is not None:
        draft_row = row_at(draft_rows, vocab_size, request, offset, DRAFT_ALIGNMENT)
        if taken == ALL:
            block = select_residual_block(
                sums, times, target_row, draft_row, scalars, key, offset, num_blocks, temperature, TARGET_ALIGNMENT,
                DRAFT_ALIGNMENT, LEADERS, BLOCKS, LANES, MAX_BLOCKS,
            )  # fmt: skip
            if block < 0:  # a residual that rounds to nothing falls back to p
                taken = tl.full([], NOTHING, tl.int32)
    if taken >= 0:
        its_block = taken // BLOCK_SIZE
        weights = tl.exp(
            scaled(load_logits(target_row, tokens_of(its_block), True, TARGET_ALIGNMENT), peak, temperature)
        )
        rest = sum_in_order(tl.where(tokens_of(its_block) == taken, 0.0, weights))
        without = tl.where(blocks == its_block, rest, sums)
        if tl.sum(without, 0) > 0:
            sums = without
        else:
            taken = tl.full([], NOTHING, tl.int32)
    if token < 0:
        if block < 0:
            block = select_block(sums, times)
        token_ids = tokens_of(block)
        target = load_logits(target_row, token_ids, True, TARGET_ALIGNMENT)
        if draft_rows[0] is not None:
            draft = load_logits(draft_row, token_ids, taken == ALL, DRAFT_ALIGNMENT)
        token_times = exponential(key, offset, token_ids, SELECT_TOKEN)  # while those are awaited
        weights = tl.where(token_ids == taken, 0.0, weigh_tokens(target, peak, temperature))
        if draft_rows[0] is not None:
            if taken == ALL:
                _, draft_peak, log_sum_ratio = scalars
                left = shortfall(target, draft, draft_peak - peak, log_sum_ratio, base_2_scale(temperature))
                weights = tl.where(left > 0, weights * left, 0.0)
        token = select_token(weights, token_times, block)
    return tl.minimum(token, vocab_size - 1).to(tl.int64)


@triton.jit
def emit(
    output,
    drafts,
    state_ptr,
    statistics_ptr,
    target_rows,
    draft_rows,
    scalars,
    taken,
    request,
    stop,
    counted,
    key,
    vocab_size,
    num_blocks,
    temperature,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    LEADERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Draw the token where a request stops, and write its output."""
    num_draft_tokens = drafts[3]
    index = request * (num_draft_tokens + 1) + stop
    target_row = row_at(target_rows, vocab_size, request, stop, TARGET_ALIGNMENT)
    statistics = load_statistics(statistics_ptr, index, True, num_blocks, MAX_BLOCKS)
    empty = load_empty(state_ptr, request, num_draft_tokens)
    times = times_of_blocks(key, stop, SELECT_BLOCK, MAX_BLOCKS)
    merged = merge(statistics, target_row, num_blocks, temperature, TARGET_ALIGNMENT, MAX_BLOCKS)
    token = draw_residual(
        merged, times, target_row, draft_rows, scalars, taken, request, stop, key, num_blocks, temperature,
        TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LEADERS, BLOCKS, LANES, MAX_BLOCKS,
    )  # fmt: skip
    tl.store(output[0] + index, token)
    invalid = (empty <= stop) | (merged[0] == -INFINITY).to(tl.int1)
    store_output(output, drafts, counted, request, stop, invalid, vocab_size)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def emit_kernel(
    token_ids_ptr,  # [batch, num_draft_tokens + 1] int64
    num_accepted_ptr,  # [batch] int32
    num_drafts_ptr,  # [batch] int32
    invalid_ptr,  # [batch] bool
    state_ptr,  # [batch, FIELDS] int32
    scalars_ptr,  # [batch, num_draft_tokens, SCALARS] float32, or None
    statistics_ptr,  # [batch * (num_draft_tokens + 1) + ..., num_blocks, 2] float32
    target_ptr,  # [batch, num_draft_tokens + 1, vocab_size] any float
    target_index_ptr,  # [batch] int32 or int64, or None
    draft_ptr,  # [batch, num_draft_tokens, vocab_size] any float, or None
    draft_index_ptr,  # [batch] int32 or int64, or None
    ids_ptr,  # [batch, num_draft_tokens] int32 or int64
    temperature_ptr,  # [batch] any float, or None
    temperature,
    seeds_ptr,  # [batch] int64, or None
    first_seed: tl.int64,
    positions_ptr,  # [batch] int64, or None
    target_stride_request: tl.int64,
    target_stride_offset: tl.int64,
    target_stride_token: tl.int64,
    draft_stride_request: tl.int64,
    draft_stride_offset: tl.int64,
    draft_stride_token: tl.int64,
    ids_stride_request: tl.int64,
    ids_stride_offset: tl.int64,
    num_draft_tokens,
    vocab_size,
    num_blocks,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    LEADERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Draw the token where a request stops, and write its output."""
    request = tl.program_id(0).to(tl.int64)
    t = load_temperature(temperature_ptr, temperature, request)
    key = load_key(seeds_ptr, first_seed, positions_ptr, request)
    drafts = (ids_ptr, ids_stride_request, ids_stride_offset, num_draft_tokens)
    counted = count_drafts(drafts, request, vocab_size)
    await_launch(OVERLAPS)
    stop, takes = load_stop(state_ptr, request, num_draft_tokens)
    target_rows = (target_ptr, target_index_ptr, target_stride_request, target_stride_offset, target_stride_token)
    draft_rows = (draft_ptr, draft_index_ptr, draft_stride_request, draft_stride_offset, draft_stride_token)
    scalars = (0.0, 0.0, 0.0)
    taken = tl.full([], NOTHING, tl.int32)
    if scalars_ptr is not None:
        if takes:
            scalars, taken = load_scalars(scalars_ptr + (request * num_draft_tokens + stop) * SCALARS)

    output = (token_ids_ptr, num_accepted_ptr, num_drafts_ptr, invalid_ptr)
    emit(
        output, drafts, state_ptr, statistics_ptr, target_rows, draft_rows, scalars, taken, request, stop, counted, key,
        vocab_size, num_blocks, t, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LEADERS, BLOCKS, LANES, MAX_BLOCKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def finish_by_ratio_kernel(
    token_ids_ptr,  # [batch, num_draft_tokens + 1] int64
    num_accepted_ptr,  # [batch] int32
    num_drafts_ptr,  # [batch] int32
    invalid_ptr,  # [batch] bool
    state_ptr,  # [batch, FIELDS] int32, of which the first two are verdicts, one int64
    statistics_ptr,  # [batch * (num_draft_tokens + 1) + ..., num_blocks, 2] float32
    target_ptr,  # [batch, num_draft_tokens + 1, vocab_size] any float
    target_index_ptr,  # [batch] int32 or int64, or None
    draft_ptr,  # [batch, num_draft_tokens, vocab_size] any float, or None
    draft_index_ptr,  # [batch] int32 or int64, or None
    logsumexp_ptr,  # [batch, num_draft_tokens] float32, or None
    ids_ptr,  # [batch, num_draft_tokens] int32 or int64
    rates_ptr,  # [num_draft_tokens] float32 conditional rates, or None
    temperature_ptr,  # [batch] any float, or None
    temperature,
    seeds_ptr,  # [batch] int64, or None
    first_seed: tl.int64,
    positions_ptr,  # [batch] int64, or None
    target_stride_request: tl.int64,
    target_stride_offset: tl.int64,
    target_stride_token: tl.int64,
    draft_stride_request: tl.int64,
    draft_stride_offset: tl.int64,
    draft_stride_token: tl.int64,
    logsumexp_stride_request: tl.int64,
    logsumexp_stride_offset: tl.int64,
    ids_stride_request: tl.int64,
    ids_stride_offset: tl.int64,
    batch,
    num_draft_tokens,
    vocab_size,
    num_blocks,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    LEADERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Judge the draft at one offset of a request; if it does not stand, draw what is emitted if the request stops there."""
    request = (tl.program_id(0) // (num_draft_tokens + 1)).to(tl.int64)
    offset = tl.program_id(0) % (num_draft_tokens + 1)
    drafts = (ids_ptr, ids_stride_request, ids_stride_offset, num_draft_tokens)
    draft_token = load_drafts(drafts, request, offset, vocab_size)
    t = load_temperature(temperature_ptr, temperature, request)
    key = load_key(seeds_ptr, first_seed, positions_ptr, request)
    times = times_of_blocks(key, offset, SELECT_BLOCK, MAX_BLOCKS)
    uniform = accept_uniform(key, offset)
    counted = count_drafts(drafts, request, vocab_size)
    await_launch(OVERLAPS)
    verdicts = tl.full([], 0, tl.int64)
    stops, is_empty = tl.full([], False, tl.int1), tl.full([], False, tl.int1)
    if offset <= counted[0]:
        target_rows = (target_ptr, target_index_ptr, target_stride_request, target_stride_offset, target_stride_token)
        target_row = row_at(target_rows, vocab_size, request, offset, TARGET_ALIGNMENT)
        draft_rows = (draft_ptr, draft_index_ptr, draft_stride_request, draft_stride_offset, draft_stride_token)
        logsumexps = (logsumexp_ptr, logsumexp_stride_request, logsumexp_stride_offset)
        target, draft, scalars, merged = weigh(
            statistics_ptr, target_row, draft_rows, logsumexps, draft_token, request, offset, t, batch, num_draft_tokens,
            num_blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, MAX_BLOCKS,
        )  # fmt: skip
        is_empty = scalars[PEAK] == -INFINITY
        stops = draft_token < 0
        if draft_token >= 0:
            stops = stands(target, draft, rates_ptr, offset, uniform) == 0
        if stops:
            add_verdict(state_ptr, request, offset, stops, is_empty, "relaxed")
            token = draw_residual(
                merged, times, target_row, draft_rows, scalars[:TAKEN], scalars[TAKEN], request, offset, key, num_blocks, t,
                TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LEADERS, BLOCKS, LANES, MAX_BLOCKS,
            )  # fmt: skip
            verdicts = load_verdicts(state_ptr, request)
            verdicts = hand_in(token_ids_ptr, state_ptr, request, offset, token, verdicts, num_draft_tokens)
    if stops == 0:
        verdicts = add_verdict(state_ptr, request, offset, stops, is_empty, "relaxed")
    if is_to_finish(state_ptr, request, offset, verdicts, num_draft_tokens):
        output = (token_ids_ptr, num_accepted_ptr, num_drafts_ptr, invalid_ptr)
        finish(output, drafts, counted, verdicts, request, vocab_size)
