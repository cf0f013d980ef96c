"""Block verification in Triton: the longest block of drafts that stands.

    c_i = min(1, c_{i-1} p(x_i) / q(x_i))    h_i = A_i / (A_i + 1 - c_i)    A_i = sum max(0, c_i p - q)

Each draft's ratio comes from its rows' statistics, as in `probabilistic`, but what fails does not stop the request: only an
impossible draft does. The accepted number is the largest i with eta_i <= h_i, and h_i <= c_i <= 1. So of all i only those
with eta_i <= c_i are candidates, which takes no reading to know; none below the largest with c_i = 1, which is sure to
stand, is considered; and if all drafts stand nothing is read again. The candidates' rows are read once more, for the sums
of max(0, c_i p - q) over each block, from which both A_i and the recovered token come.
"""

import triton
import triton.language as tl

from specdecode.kernels.launches import SIZES, SMALL_TENSORS, admit_next_launch, await_launch
from specdecode.kernels.philox import load_key, uniform
from specdecode.kernels.probabilistic import (
    ALL,
    KEPT,
    LOG_C,
    LOG_RATIO,
    LOG_SUM,
    NOTHING,
    SCALARS,
    TAKEN,
    draw_residual,
    load_both,
    load_scalars,
    one_minus_exp2,
    store_scalars,
    sum_residual,
    weigh,
)
from specdecode.kernels.rows import INFINITY, LOG2_E, base_2_scale, load_temperature, row_at, sum_in_order
from specdecode.kernels.steps import (
    FIELDS,
    FINISHED,
    JOBS,
    count_drafts,
    is_last,
    load_empty,
    load_stop,
    post_empty,
    post_stop,
    store_output,
)
from specdecode.kernels.synthetic import ACCEPT


@triton.jit
def note_ratio(
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
    """Leave the ratio of the draft at one offset and what its row's residual needs; post where the drafts end.

    They end where there is none, or (1 is posted) at one that p or q makes impossible.
    """
    if token < 0:  # as after the last draft
        post_stop(state_ptr, request, offset, num_draft_tokens, 0)
    else:
        target, draft, scalars = weigh(
            statistics_ptr, target_row, draft_rows, logsumexps, token, request, offset, temperature, batch,
            num_draft_tokens, num_blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, MAX_BLOCKS,
        )  # fmt: skip
        if scalars[0] == -INFINITY:
            post_empty(state_ptr, request, offset, num_draft_tokens)
        if ((target > -INFINITY) & (draft > -INFINITY)) == 0:
            post_stop(state_ptr, request, offset, num_draft_tokens, 1)
        scalars_ptr += (request * num_draft_tokens + offset) * SCALARS
        store_scalars(scalars_ptr, scalars)
        tl.store(scalars_ptr + LOG_RATIO, target - draft)


@triton.jit
def at(values, index):
    """Return the value at an index."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@triton.jit
def running_ratios(log_ratios, last, MAX_DRAFTS: tl.constexpr):
    """Return log c_i for i = 0 to `last`, and 0 beyond, [MAX_DRAFTS]."""
    counts = tl.arange(0, MAX_DRAFTS)
    log_c = tl.zeros([MAX_DRAFTS], tl.float32)
    running = tl.sum(log_c, 0)
    for count in range(1, last + 1):
        running = tl.minimum(running + at(log_ratios, count), 0.0)
        log_c = tl.where(counts == count, running, log_c)
    return log_c


@triton.jit
def log_uniforms_of(key, MAX_DRAFTS: tl.constexpr):
    """Return log eta_i for each number of drafts i, -inf for 0."""
    counts = tl.arange(0, MAX_DRAFTS)
    return tl.where(counts > 0, tl.log(uniform(key, counts - 1, counts - 1, ACCEPT)), -INFINITY)


@triton.jit
def survey(state_ptr, scalars_ptr, request, log_uniforms, num_draft_tokens, MAX_DRAFTS: tl.constexpr):
    """Return all that can be known of a request without reading its rows again.

    The number of drafts if all stand, else -1; the least number that is sure to stand, and the largest that can; and for
    each number i, as [MAX_DRAFTS] tensors: whether it is a candidate, log c_i, what is taken from p at row i.
    """
    counts = tl.arange(0, MAX_DRAFTS)
    last, is_impossible = load_stop(state_ptr, request, num_draft_tokens)
    log_ratios = tl.load(
        scalars_ptr + (counts - 1) * SCALARS + LOG_RATIO, mask=(counts > 0) & (counts <= last), other=0.0
    )
    taken = tl.load(scalars_ptr + counts * SCALARS + TAKEN, mask=counts < last + is_impossible, other=0.0)
    log_c = running_ratios(log_ratios, last, MAX_DRAFTS)
    # After the last draft there is no residual; before an impossible one there is.
    highest = tl.where(is_impossible, last, last - 1)
    all_stand = (is_impossible == 0) & (at(log_uniforms, last) <= at(log_c, last))
    lowest = tl.max(tl.where((log_c == 0) & (counts <= highest), counts, 0), 0)
    is_candidate = (log_uniforms <= log_c) & (counts >= lowest) & (counts <= highest) & (all_stand == 0)
    taken = tl.where(is_candidate, taken.to(tl.int32, bitcast=True), NOTHING)
    return tl.where(all_stand, last, -1), lowest, highest, (is_candidate.to(tl.int32), log_c, taken)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def plan_kernel(
    jobs_ptr,  # [batch * num_draft_tokens] int32
    state_ptr,  # [batch, FIELDS] int32
    scalars_ptr,  # [batch, num_draft_tokens, SCALARS] float32
    seeds_ptr,  # [batch] int64, or None
    first_seed: tl.int64,
    positions_ptr,  # [batch] int64, or None
    num_draft_tokens,
    MAX_DRAFTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """List the rows of a request whose residual must be summed, behind those of requests that were sooner."""
    request = tl.program_id(0).to(tl.int64)
    key = load_key(seeds_ptr, first_seed, positions_ptr, request)
    counts = tl.arange(0, MAX_DRAFTS)
    scalars_ptr += request * num_draft_tokens * SCALARS
    log_uniforms = log_uniforms_of(key, MAX_DRAFTS)
    await_launch(OVERLAPS)
    admit_next_launch(OVERLAPS)
    _, _, _, of_counts = survey(state_ptr, scalars_ptr, request, log_uniforms, num_draft_tokens, MAX_DRAFTS)
    _, log_c, taken = of_counts
    is_job = (taken == ALL).to(tl.int32)
    first = tl.atomic_add(state_ptr + JOBS, tl.sum(is_job, 0), sem="relaxed")
    places = first + tl.cumsum(is_job, 0) - is_job
    tl.store(jobs_ptr + places, request.to(tl.int32) * num_draft_tokens + counts, mask=is_job == 1)
    tl.store(scalars_ptr + counts * SCALARS + LOG_C, log_c, mask=is_job == 1)


@triton.jit
def load_excess(scalars_ptr, log_c):
    """Return the scalars of max(0, p - q / c): as those of max(0, p - q), but for q's logarithm."""
    scalars, _ = load_scalars(scalars_ptr)
    peak, draft_peak, log_sum_ratio = scalars
    return peak, draft_peak, log_sum_ratio + log_c


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def sum_kernel(
    residual_sums_ptr,  # [batch, num_draft_tokens, num_blocks] float32
    jobs_ptr,  # [batch * num_draft_tokens] int32
    state_ptr,  # [batch, FIELDS] int32
    scalars_ptr,  # [batch, num_draft_tokens, SCALARS] float32
    target_ptr,  # [batch, num_draft_tokens + 1, vocab_size] any float
    target_index_ptr,  # [batch] int32 or int64, or None
    draft_ptr,  # [batch, num_draft_tokens, vocab_size] any float
    draft_index_ptr,  # [batch] int32 or int64, or None
    temperature_ptr,  # [batch] any float, or None
    temperature,
    target_stride_request: tl.int64,
    target_stride_offset: tl.int64,
    target_stride_token: tl.int64,
    draft_stride_request: tl.int64,
    draft_stride_offset: tl.int64,
    draft_stride_token: tl.int64,
    num_draft_tokens,
    vocab_size,
    num_blocks,
    tiles,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum `tiles` times `BLOCKS` blocks of the residual of a listed row, or of several."""
    chunks = tl.cdiv(num_blocks, tiles * BLOCKS)
    target_rows = (target_ptr, target_index_ptr, target_stride_request, target_stride_offset, target_stride_token)
    draft_rows = (draft_ptr, draft_index_ptr, draft_stride_request, draft_stride_offset, draft_stride_token)
    await_launch(OVERLAPS)
    admit_next_launch(OVERLAPS)
    for item in range(tl.program_id(0), tl.load(state_ptr + JOBS) * chunks, tl.num_programs(0)):
        index = tl.load(jobs_ptr + item // chunks).to(tl.int64)
        request, count = index // num_draft_tokens, index % num_draft_tokens
        scale = base_2_scale(load_temperature(temperature_ptr, temperature, request))
        scalars_of_row_ptr = scalars_ptr + index * SCALARS
        scalars = load_excess(scalars_of_row_ptr, tl.load(scalars_of_row_ptr + LOG_C))
        target_row = row_at(target_rows, vocab_size, request, count, TARGET_ALIGNMENT)
        draft_row = row_at(draft_rows, vocab_size, request, count, DRAFT_ALIGNMENT)
        for tile in range(tiles):
            blocks = (item % chunks * tiles + tile) * BLOCKS + tl.arange(0, BLOCKS)
            target, draft = load_both(target_row, draft_row, blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LANES)
            sums = sum_residual(target, draft, scalars, scale)
            tl.store(residual_sums_ptr + index * num_blocks + blocks, sums, mask=blocks < num_blocks)


@triton.jit
def log_residual_mass(scalars_ptr, sums_ptr, row, log_c, taken, num_blocks, MAX_BLOCKS: tl.constexpr):
    """Return log A = log sum max(0, c p - q) of a row, from its block sums or, of a point mass, in closed form."""
    kept, log_sum = tl.load(scalars_ptr + KEPT), tl.load(scalars_ptr + LOG_SUM)
    blocks = tl.arange(0, MAX_BLOCKS)
    if sums_ptr is not None:  # asked for before it is known whether they are needed
        sums = tl.load(sums_ptr + row * num_blocks + blocks, mask=(taken == ALL) & (blocks < num_blocks), other=0.0)
    if taken == NOTHING:  # p is a point mass, on a token of which q has `kept`
        log_mass = log_c + tl.log(tl.maximum(one_minus_exp2((kept - log_c) * LOG2_E), 0.0))
    else:  # q is a point mass, on a token of which p has `kept`
        log_mass = log_c + tl.log(one_minus_exp2(kept * LOG2_E))
    if sums_ptr is not None:
        if taken == ALL:  # the sums are of max(0, p - q / c), relative to p's peak
            log_mass = log_c - log_sum + tl.log(sum_in_order(sums))
    return log_mass


@triton.jit
def stands_by_mass(log_uniform, log_c, log_mass):
    """Return whether eta <= A / (A + 1 - c)."""
    return log_uniform <= log_mass - tl.log(tl.exp(log_mass) + one_minus_exp2(log_c * LOG2_E))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def emit_kernel(
    token_ids_ptr,  # [batch, num_draft_tokens + 1] int64
    num_accepted_ptr,  # [batch] int32
    num_drafts_ptr,  # [batch] int32
    invalid_ptr,  # [batch] bool
    residual_sums_ptr,  # [batch, num_draft_tokens, num_blocks] float32, or None
    state_ptr,  # [batch, FIELDS] int32
    scalars_ptr,  # [batch, num_draft_tokens, SCALARS] float32
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
    LAZY: tl.constexpr,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Look from the largest candidate down for the first that stands, draw the token after it, write the output.

    In a small batch a program first sums a few blocks of one row's residual, and the last one to do so goes on.
    """
    SUMS: tl.constexpr = draft_ptr is not None and not LAZY
    chunks = tl.cdiv(num_blocks, BLOCKS) if SUMS else 1
    slots = num_draft_tokens if SUMS else 1
    request = (tl.program_id(0) // (chunks * slots)).to(tl.int64)
    t = load_temperature(temperature_ptr, temperature, request)
    key = load_key(seeds_ptr, first_seed, positions_ptr, request)
    target_rows = (target_ptr, target_index_ptr, target_stride_request, target_stride_offset, target_stride_token)
    draft_rows = (draft_ptr, draft_index_ptr, draft_stride_request, draft_stride_offset, draft_stride_token)
    first_row = request * num_draft_tokens
    scalars_ptr += first_row * SCALARS
    drafts = (ids_ptr, ids_stride_request, ids_stride_offset, num_draft_tokens)
    num_drafts = count_drafts(drafts, request, vocab_size)
    log_uniforms = log_uniforms_of(key, MAX_DRAFTS)
    await_launch(OVERLAPS)
    accepted, lowest, highest, of_counts = survey(
        state_ptr, scalars_ptr, request, log_uniforms, num_draft_tokens, MAX_DRAFTS
    )
    is_candidate, log_c, taken = of_counts
    all_stand = accepted >= 0

    decides = tl.program_id(0) % (chunks * slots) == 0
    if SUMS:
        rows = tl.sum((taken == ALL).to(tl.int32), 0)
        if rows > 0:
            count = tl.program_id(0) // chunks % slots
            decides = at(taken, count) == ALL
            if decides:
                target_row = row_at(target_rows, vocab_size, request, count, TARGET_ALIGNMENT)
                draft_row = row_at(draft_rows, vocab_size, request, count, DRAFT_ALIGNMENT)
                scalars = load_excess(scalars_ptr + count * SCALARS, at(log_c, count))
                blocks = tl.program_id(0) % chunks * BLOCKS + tl.arange(0, BLOCKS)
                target, draft = load_both(target_row, draft_row, blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LANES)
                sums = sum_residual(target, draft, scalars, base_2_scale(t))
                tl.store(residual_sums_ptr + (first_row + count) * num_blocks + blocks, sums, mask=blocks < num_blocks)
                decides = is_last(state_ptr + request * FIELDS + FINISHED, rows * chunks)

    if decides:
        count = highest
        while (accepted < 0) & (count > lowest):
            if at(is_candidate, count) == 1:
                log_mass = log_residual_mass(
                    scalars_ptr + count * SCALARS, residual_sums_ptr, first_row + count, at(log_c, count),
                    at(taken, count), num_blocks, MAX_BLOCKS,
                )  # fmt: skip
                if stands_by_mass(at(log_uniforms, count), at(log_c, count), log_mass):
                    accepted = count
            count -= 1
        accepted = tl.where(accepted < 0, lowest, accepted)
        scalars, takes = (0.0, 0.0, 0.0), tl.full([], NOTHING, tl.int32)
        if all_stand == 0:
            scalars, takes = load_excess(scalars_ptr + accepted * SCALARS, at(log_c, accepted)), at(taken, accepted)
        index = request * (num_draft_tokens + 1) + accepted
        token, peak = draw_residual(
            statistics_ptr, residual_sums_ptr, first_row + accepted, index,
            row_at(target_rows, vocab_size, request, accepted, TARGET_ALIGNMENT), draft_rows, scalars, takes, request,
            accepted, key, num_blocks, t, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, BLOCKS, LANES, MAX_BLOCKS,
        )  # fmt: skip
        tl.store(token_ids_ptr + index, token)
        invalid = (load_empty(state_ptr, request, num_draft_tokens) <= accepted) | (peak == -INFINITY).to(tl.int1)
        output = (token_ids_ptr, num_accepted_ptr, num_drafts_ptr, invalid_ptr)
        store_output(output, drafts, request, num_drafts, accepted, invalid, vocab_size)
