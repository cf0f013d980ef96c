"""Block verification in Triton: accept the longest block of drafts that passes.

    c_i = min(1, c_{i-1} p(x_i) / q(x_i))    h_i = A_i / (A_i + 1 - c_i)    A_i = sum max(0, c_i p - q)

The accepted number is the largest i with eta_i <= h_i, and h_i <= c_i <= 1. So only those i with eta_i <= c_i are *candidates*,
which takes no reading to know; the largest with c_i = 1 is accepted for certain, so none below it matters; and if all drafts
are accepted nothing is read again.

1. `ratio_kernel`, a program for each draft: p(x) / q(x) from the statistics of both rows, and what its residual takes.
2. `bound_kernel`, in a large batch, a program for each draft: a candidate's A_i is bounded from both sides by the few blocks
   that hold most of p, which decides about most of them.
3. `settle`, at the start of the launch that emits: the programs of a request sum all blocks of the candidates that are still
   open, 4 KB (bfloat16) a block for both rows, and the last of them decides, draws and writes.
"""

import triton
import triton.language as tl

from specdecode.kernels.arguments import Place, Residual
from specdecode.kernels.distribution import combine, logprob, relative_sums
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.philox import ACCEPT, load_key, uniform
from specdecode.kernels.probabilistic import (
    NONE,
    ROW,
    acceptance_terms,
    is_possible,
    load_both,
    load_residual_sums,
    one_minus_exp2,
    residual_sums,
    residual_sums_at,
)
from specdecode.kernels.rows import (
    INFINITY,
    LOG2_E,
    load_logit,
    load_statistics,
    load_temperature,
    row_at,
    sum_in_order,
    target_index,
)
from specdecode.kernels.search import SLACK, blocks_of, keys_of, least_of, take_top
from specdecode.kernels.state import (
    count_drafts,
    finished_ptr,
    is_last,
    load_draft_ids,
    load_stop,
    post_empty,
    post_stop,
)

LOG_RATIO, ROW_MAX, DRAFT_MAX, LOG_SUM_RATIO, SUBTRACTED, LOG_SUM, SHARED, DECISION, NUMBERS = (
    tl.constexpr(number) for number in range(9)
)
"""What is kept of each draft: log p(x) / q(x), the four fields of its row's `Residual`, log(sum of p), `shared_logprob`, and
what is decided about accepting the drafts before it."""

OPEN, ACCEPTED, REJECTED = tl.constexpr(0.0), tl.constexpr(1.0), tl.constexpr(2.0)


@triton.jit
def numbers_at(workspace, request, offset, sizes):
    """Return where the numbers of a draft are kept."""
    return workspace.candidates_ptr + (request * sizes.num_draft_tokens + offset) * NUMBERS


@triton.jit
def shared_logprob(place, terms, inputs, sizes):
    """Where one of p and q is a point mass, return the log-probability of its token under the other: all that they share."""
    shared = 0.0
    _, _, p, q, residual = terms
    if p.one_hot >= 0:
        logit = 0.0
        if inputs.draft.ptr is not None:
            draft_row = row_at(inputs.draft, place.request, place.offset, sizes)
            logit = load_logit(draft_row, p.one_hot, q.one_hot < 0)
        shared = logprob(logit, p.one_hot, q, place.temperature)
    elif residual.subtracted >= 0:
        row = row_at(inputs.target, place.request, place.offset, sizes)
        shared = scaled_logprob(load_logit(row, residual.subtracted, True), p, place.temperature)
    return shared


@triton.jit
def scaled_logprob(logit, p, temperature):
    """Return the log-probability of a token under p, which is no point mass, given its logit."""
    return logprob(logit, 0, (p.row_max, tl.log(p.sumexp), -1), temperature)


@triton.jit
def ratio_kernel(inputs, workspace, sizes, tuning):
    """Keep the ratio of the draft at one offset of a request and what its row's residual takes."""
    request = (tl.program_id(0) // sizes.num_draft_tokens).to(tl.int64)
    offset = tl.program_id(0) % sizes.num_draft_tokens
    token = load_draft_ids(inputs.drafts, request, offset, sizes)
    num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    temperature = load_temperature(inputs.requests, request)
    await_launch(tuning.OVERLAPS)
    admit_next_launch(tuning.OVERLAPS)
    if offset < num_drafts:
        place = Place(request, offset, token, (request, request), temperature, 0.0)
        terms = acceptance_terms(place, inputs, workspace, sizes)
        if terms.p.row_max == -INFINITY:
            post_empty(workspace.state_ptr, request, offset, sizes)
        if is_possible(terms) == 0:  # c is 0 from here on
            post_stop(workspace.state_ptr, request, offset, sizes)
        row_max, draft_max, log_sum_ratio, subtracted = terms.residual
        numbers_ptr = numbers_at(workspace, request, offset, sizes)
        tl.store(numbers_ptr + LOG_RATIO, terms.log_p - terms.log_q)
        tl.store(numbers_ptr + ROW_MAX, row_max)
        tl.store(numbers_ptr + DRAFT_MAX, draft_max)
        tl.store(numbers_ptr + LOG_SUM_RATIO, log_sum_ratio)
        tl.store(numbers_ptr + SUBTRACTED, subtracted.to(tl.float32, bitcast=True))
        tl.store(numbers_ptr + LOG_SUM, tl.log(terms.p.sumexp))
        tl.store(numbers_ptr + SHARED, shared_logprob(place, terms, inputs, sizes))
        tl.store(numbers_ptr + DECISION, OPEN)


@triton.jit
def at(values, index):
    """Return the value at an index."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@triton.jit
def running_ratio(log_ratios, last, sizes):
    """Return log c_i for i = 0 to `last`, and 0 beyond, [MAX_DRAFTS]."""
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    log_c = tl.zeros([sizes.MAX_DRAFTS], tl.float32)
    running = tl.sum(log_c, 0)
    for count in range(1, last + 1):
        running = tl.minimum(running + at(log_ratios, count), 0.0)
        log_c = tl.where(counts == count, running, log_c)
    return log_c


@triton.jit
def log_uniforms(key, sizes):
    """Return log eta_i for each number of drafts i, -inf for 0, [MAX_DRAFTS]."""
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    return tl.where(counts > 0, tl.log(uniform(key, counts - 1, counts - 1, ACCEPT)), -INFINITY)


@triton.jit
def candidates_of(request, num_drafts, log_uniform, workspace, sizes):
    """Return what is known of a request without reading its rows again.

    The number of drafts if all are accepted, else -1; the least number that is accepted for certain; and for each number of
    drafts, as [MAX_DRAFTS] tensors: log c, what is subtracted from p in its row (NONE if it is no candidate), whether it is
    a candidate, and what is decided.
    """
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    numbers_ptr = numbers_at(workspace, request, counts, sizes)
    last = tl.minimum(load_stop(workspace.state_ptr, request, sizes), num_drafts)
    is_ratio = (counts > 0) & (counts <= last)
    log_ratios = tl.load(numbers_ptr - NUMBERS + LOG_RATIO, mask=is_ratio, other=0.0)
    subtracted = tl.load(numbers_ptr + SUBTRACTED, mask=counts < num_drafts, other=0.0)
    decision = tl.load(numbers_ptr + DECISION, mask=counts < num_drafts, other=OPEN)
    # An impossible draft ends the block before it, and leaves a residual there; the last draft leaves none behind it.
    is_impossible = last < num_drafts
    highest = tl.where(is_impossible, last, last - 1)
    log_c = running_ratio(log_ratios, last, sizes)
    all_accepted = (is_impossible == 0) & (at(log_uniform, last) <= at(log_c, last))
    lowest = tl.max(tl.where((log_c == 0) & (counts <= highest), counts, 0), 0)
    is_candidate = (log_uniform <= log_c) & (counts >= lowest) & (counts <= highest) & (all_accepted == 0)
    subtracted = tl.where(is_candidate, subtracted.to(tl.int32, bitcast=True), NONE)
    return tl.where(all_accepted, last, -1), lowest, log_c, subtracted, is_candidate, decision


@triton.jit
def load_residual(numbers_ptr, log_c):
    """Return what max(0, p - q / c) takes: as max(0, p - q), but for the logarithm of q."""
    row_max, draft_max = tl.load(numbers_ptr + ROW_MAX), tl.load(numbers_ptr + DRAFT_MAX)
    subtracted = tl.load(numbers_ptr + SUBTRACTED).to(tl.int32, bitcast=True)
    return Residual(row_max, draft_max, tl.load(numbers_ptr + LOG_SUM_RATIO) + log_c, subtracted)


@triton.jit
def least_mass(log_uniform, log_c):
    """Return what A / c = sum max(0, p - q / c) must be at least for eta <= A / (A + 1 - c): eta/c (1 - c) / (1 - eta)."""
    return tl.exp(log_uniform - log_c) * one_minus_exp2(log_c * LOG2_E) / one_minus_exp2(log_uniform * LOG2_E)


@triton.jit
def decide_by_bounds(least, statistics, residual, request, count, temperature, inputs, sizes, tuning):
    """Compare sum max(0, p - q / c), relative to p's maximum, with `least`, by the blocks that hold most of p.

    No block's part is more than its sum of p. So blocks are summed in the order of these, until what is found is enough, or
    would not be with all that is left. If `rounds` of them do not decide, the candidate is left open.
    """
    row = row_at(inputs.target, request, count, sizes)
    draft_row = row_at(inputs.draft, request, count, sizes)
    block_sums = relative_sums(residual.row_max, statistics, temperature)
    block_sums = tl.where(block_sums == block_sums, block_sums, INFINITY)  # of a block with a NaN the sum is not known
    left = tl.sum(block_sums, 0)
    margin = left * SLACK  # `left` becomes a difference, and is rounded
    top, remaining = take_top(keys_of(block_sums, sizes), tuning)
    top_target, top_draft = load_both(
        inputs.target, inputs.draft, row, draft_row, blocks_of(top, sizes), tuning.LANES
    )
    # The next blocks are loaded before it is known whether they matter.
    largest = tl.max(remaining, 0)
    blocks = blocks_of(largest, sizes)
    target, draft = load_both(inputs.target, inputs.draft, row, draft_row, blocks, tuning.LANES)
    found = tl.sum(residual_sums(top_target, top_draft, residual, temperature), 0)
    left -= tl.sum(least_of(top, sizes), 0)
    enough, too_little = found * (1 - SLACK) >= least, (found + left + margin) * (1 + SLACK) < least
    rounds = 0
    while (tl.max(largest, 0) >= 0) & (enough == 0) & (too_little == 0) & (rounds < tuning.rounds):
        rounds += 1
        left -= tl.sum(least_of(largest, sizes), 0)
        remaining = tl.where(remaining == largest[None, :], -1, remaining)
        largest = tl.max(remaining, 0)
        blocks = blocks_of(largest, sizes)
        next_target, next_draft = load_both(inputs.target, inputs.draft, row, draft_row, blocks, tuning.LANES)
        found += tl.sum(residual_sums(target, draft, residual, temperature), 0)
        enough, too_little = found * (1 - SLACK) >= least, (found + left + margin) * (1 + SLACK) < least
        target, draft = next_target, next_draft
    return tl.where(enough, ACCEPTED, tl.where(too_little, REJECTED, OPEN))


@triton.jit
def bound_kernel(inputs, workspace, sizes, tuning):
    """Decide about accepting the drafts before one offset of a request, if a few blocks can tell."""
    request = (tl.program_id(0) // sizes.num_draft_tokens).to(tl.int64)
    count = tl.program_id(0) % sizes.num_draft_tokens
    temperature = load_temperature(inputs.requests, request)
    log_uniform = log_uniforms(load_key(inputs.requests, request), sizes)
    num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    await_launch(tuning.OVERLAPS)
    admit_next_launch(tuning.OVERLAPS)
    known = candidates_of(request, num_drafts, log_uniform, workspace, sizes)
    _, lowest, log_c, subtracted, _, _ = known
    if (at(subtracted, count) == ROW) & (count > lowest):
        numbers_ptr = numbers_at(workspace, request, count, sizes)
        log_c_here = at(log_c, count)
        statistics = load_statistics(workspace.statistics_ptr, target_index(request, count, sizes), True, sizes)
        least = least_mass(at(log_uniform, count), log_c_here) * tl.exp(tl.load(numbers_ptr + LOG_SUM))
        residual = load_residual(numbers_ptr, log_c_here)
        decision = decide_by_bounds(
            least, statistics, residual, request, count, temperature, inputs, sizes, tuning
        )
        tl.store(numbers_ptr + DECISION, decision)


@triton.jit
def sum_share(request, count, program, log_c, temperature, inputs, workspace, sizes, tuning):
    """Sum this program's share of the blocks of one candidate's residual."""
    row = row_at(inputs.target, request, count, sizes)
    draft_row = row_at(inputs.draft, request, count, sizes)
    residual = load_residual(numbers_at(workspace, request, count, sizes), log_c)
    sums_ptr = residual_sums_at(workspace, request, count, sizes)
    for first in range(program * tuning.BLOCKS, sizes.num_blocks, tuning.programs * tuning.BLOCKS):
        blocks = first + tl.arange(0, tuning.BLOCKS)
        target, draft = load_both(inputs.target, inputs.draft, row, draft_row, blocks, tuning.LANES)
        sums = residual_sums(target, draft, residual, temperature)
        tl.store(sums_ptr + blocks, sums, mask=blocks < sizes.num_blocks)


@triton.jit
def residual_mass_suffices(request, count, log_uniform, log_c, subtracted, decision, workspace, sizes):
    """Return whether a candidate is accepted: whether A / c is `least_mass` or more."""
    numbers_ptr = numbers_at(workspace, request, count, sizes)
    least = least_mass(log_uniform, log_c)
    # If one of p and q is a point mass:
    shared = tl.load(numbers_ptr + SHARED) - tl.where(subtracted == NONE, log_c, 0.0)
    enough = one_minus_exp2(shared * LOG2_E) >= least
    if workspace.residual_sums_ptr is not None:
        if subtracted == ROW:
            enough = decision == ACCEPTED
            if decision == OPEN:
                sums = load_residual_sums(workspace, request, count, sizes)
                enough = sum_in_order(sums) >= least * tl.exp(tl.load(numbers_ptr + LOG_SUM))
    return enough


@triton.jit
def settle(request, program, num_drafts, log_uniform, temperature, inputs, workspace, sizes, tuning):
    """Return how many drafts are accepted, log c of them, and whether this program is the one to emit."""
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    accepted, lowest, log_c, subtracted, is_candidate, decision = candidates_of(
        request, num_drafts, log_uniform, workspace, sizes
    )
    emits = program == 0
    if inputs.draft.ptr is not None:
        largest_accepted = tl.max(tl.where(is_candidate & (decision == ACCEPTED), counts, 0), 0)
        is_open = (subtracted == ROW) & (decision == OPEN) & (counts > largest_accepted)
        if tuning.SUMMED:  # the token is drawn from these sums
            is_open |= (subtracted == ROW) & (counts == lowest)
        else:
            is_open &= counts > lowest
        if tl.max(is_open.to(tl.int32), 0) == 1:
            for count in range(lowest, num_drafts):
                if at(is_open.to(tl.int32), count) == 1:
                    sum_share(
                        request, count, program, at(log_c, count), temperature, inputs, workspace, sizes, tuning
                    )
            emits = is_last(finished_ptr(workspace.state_ptr, request), tuning.programs)
    count = num_drafts
    while emits & (accepted < 0) & (count > lowest):
        if at(is_candidate.to(tl.int32), count) == 1:
            if residual_mass_suffices(
                request, count, at(log_uniform, count), at(log_c, count), at(subtracted, count), at(decision, count),
                workspace, sizes,
            ):  # fmt: skip
                accepted = count
        count -= 1
    accepted = tl.where(accepted < 0, lowest, accepted)
    return accepted, tl.where(accepted < num_drafts, at(log_c, accepted), 0.0), emits


@triton.jit
def decide(place, noise, inputs, workspace, sizes):
    """Return (False, for it is decided), the row's maximum, and what is drawn from where a request stops."""
    row = row_at(inputs.target, place.request, place.offset, sizes)
    index = target_index(place.request, place.offset, sizes)
    statistics = load_statistics(workspace.statistics_ptr, index, True, sizes)
    residual = Residual(0.0, 0.0, 0.0, tl.full([], NONE, tl.int32))
    if place.token >= 0:
        residual = load_residual(numbers_at(workspace, place.request, place.offset, sizes), place.log_ratio)
    p = combine(statistics, row, place.temperature, sizes)
    return False, p.row_max, (p, residual)
