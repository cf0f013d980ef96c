"""Block verification in Triton: accept the longest block of drafts that passes.

    c_i = min(1, c_{i-1} p(x_i) / q(x_i))    h_i = A_i / (A_i + 1 - c_i)    A_i = sum max(0, c_i p - q)

The accepted number is the largest i with eta_i <= h_i, and h_i <= c_i <= 1. So about most i it takes no reading to decide:
i is rejected if eta_i > c_i, accepted if c_i = 1, accepted if it is the last and eta_i <= c_i; and A_i is known if p or q is
a point mass. An i that is left *open* matters only above the largest accepted one.

1. `ratio_kernel`, a program for each draft: p(x) / q(x) from the statistics of both rows, and what the residual of its row
   takes. The last program of a request to finish makes these decisions.
2. `bound_kernel`, in a large batch, a program for each draft: the few blocks that hold most of p bound A_i from both sides,
   which decides about most that are open.
3. `settle`, at the start of the launch that emits: the programs of a request sum all blocks of the residuals that are still
   open, 4 KB (bfloat16) a block for both rows, and the last of them to finish decides, draws and writes.
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
    target_statistics,
)
from specdecode.kernels.search import SLACK, blocks_of, keys_of, least_of, take_top
from specdecode.kernels.state import FIELDS, RATIOS, SHARES, count_drafts, is_last, load_draft_ids

LOG_RATIO, ROW_MAX, DRAFT_MAX, LOG_SUM_RATIO, SUBTRACTED, LOG_SUM, SHARED, LOG_C, LEAST, KNOWN, DECISION, NUMBERS = (
    tl.constexpr(number) for number in range(12)
)
"""What the workspace keeps at each offset i of a request: of its draft log p(x) / q(x); of its row the four fields of the
`Residual`, log(sum of p) and `shared_logprob`; and of accepting the i drafts before it log c_i, the residual mass that takes
at least, what is known without reading, and the decision."""

REJECTED, OPEN, ACCEPTED = tl.constexpr(0.0), tl.constexpr(1.0), tl.constexpr(2.0)


@triton.jit
def numbers_at(workspace, request, offset, sizes):
    """Return where the numbers of an offset are kept."""
    return workspace.candidates_ptr + (request * (sizes.num_draft_tokens + 1) + offset) * NUMBERS


@triton.jit
def shared_logprob(place, terms, inputs, sizes):
    """Return log sum min(p, q) where p or q is a point mass: the log-probability of its token under the other."""
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
        logit = load_logit(row, residual.subtracted, True)
        shared = logprob(logit, residual.subtracted, (p.row_max, tl.log(p.sumexp), p.one_hot), place.temperature)
    return shared


@triton.jit
def store_terms(numbers_ptr, terms, shared):
    """Keep what decides about a draft, and what the residual of its row takes."""
    row_max, draft_max, log_sum_ratio, subtracted = terms.residual
    log_ratio = tl.where(is_possible(terms), terms.log_p - terms.log_q, -INFINITY)
    tl.store(numbers_ptr + LOG_RATIO, log_ratio)
    tl.store(numbers_ptr + ROW_MAX, row_max)
    tl.store(numbers_ptr + DRAFT_MAX, draft_max)
    tl.store(numbers_ptr + LOG_SUM_RATIO, log_sum_ratio)
    tl.store(numbers_ptr + SUBTRACTED, subtracted.to(tl.float32, bitcast=True))
    tl.store(numbers_ptr + LOG_SUM, tl.log(terms.p.sumexp))
    tl.store(numbers_ptr + SHARED, shared)


@triton.jit
def at(values, index):
    """Return the value at an index."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@triton.jit
def running_ratio(log_ratios, num_drafts, sizes):
    """Return log c_i for each number of drafts i, [MAX_DRAFTS]; 0 beyond the last."""
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    log_c = tl.zeros([sizes.MAX_DRAFTS], tl.float32)
    running = tl.sum(log_c, 0)
    for count in range(1, num_drafts + 1):
        running = tl.minimum(running + at(log_ratios, count), 0.0)
        log_c = tl.where(counts == count, running, log_c)
    return log_c


@triton.jit
def least_mass(log_uniform, log_c):
    """Return what A / c = sum max(0, p - q / c) must be at least for eta <= A / (A + 1 - c): eta/c (1 - c) / (1 - eta)."""
    return tl.exp(log_uniform - log_c) * one_minus_exp2(log_c * LOG2_E) / one_minus_exp2(log_uniform * LOG2_E)


@triton.jit
def decide_without_reading(request, num_drafts, log_uniform, workspace, sizes):
    """Decide about each number of drafts as far as that takes no reading."""
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    numbers_ptr = numbers_at(workspace, request, counts, sizes)
    has_draft = counts < num_drafts
    is_count = counts <= num_drafts
    before = tl.where((counts > 0) & is_count, numbers_ptr - NUMBERS, numbers_ptr)
    log_ratios = tl.load(before + LOG_RATIO, mask=(counts > 0) & is_count, other=0.0)
    subtracted = tl.load(numbers_ptr + SUBTRACTED, mask=has_draft, other=0.0).to(tl.int32, bitcast=True)
    shared = tl.load(numbers_ptr + SHARED, mask=has_draft, other=0.0)
    log_sum = tl.load(numbers_ptr + LOG_SUM, mask=has_draft, other=0.0)
    log_c = running_ratio(log_ratios, num_drafts, sizes)
    least = least_mass(log_uniform, log_c)
    # Where p is a point mass nothing is subtracted from it, and its token is less likely under q / c than under q.
    known_mass = one_minus_exp2((shared - tl.where(subtracted == NONE, log_c, 0.0)) * LOG2_E)
    decision = tl.where(known_mass >= least, ACCEPTED, REJECTED)
    decision = tl.where(subtracted == ROW, OPEN, decision)
    decision = tl.where((log_c == 0) | (has_draft == 0), ACCEPTED, decision)
    decision = tl.where((log_uniform <= log_c) & is_count, decision, REJECTED)
    tl.store(numbers_ptr + LOG_C, log_c, mask=is_count)
    tl.store(numbers_ptr + LEAST, least * tl.exp(log_sum), mask=is_count)
    tl.store(numbers_ptr + KNOWN, decision, mask=is_count)
    tl.store(numbers_ptr + DECISION, decision, mask=is_count)


@triton.jit
def ratio_kernel(inputs, workspace, sizes, tuning):
    """Keep the ratio of the draft at one offset of a request; the last program of a request decides what it can."""
    num_rows = sizes.num_draft_tokens + 1
    request = (tl.program_id(0) // num_rows).to(tl.int64)
    offset = tl.program_id(0) % num_rows
    token = load_draft_ids(inputs.drafts, request, offset, sizes)
    num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    temperature = load_temperature(inputs.requests, request)
    key = load_key(inputs.requests, request)
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    uniforms = uniform(key, counts - 1, counts - 1, ACCEPT)
    log_uniform = tl.where(counts > 0, tl.log(uniforms), -INFINITY)  # no drafts are always accepted
    await_launch(tuning.OVERLAPS)
    admit_next_launch(tuning.OVERLAPS)
    if offset < num_drafts:
        place = Place(request, offset, token, key, temperature)
        terms = acceptance_terms(place, inputs, workspace, sizes)
        store_terms(numbers_at(workspace, request, offset, sizes), terms, shared_logprob(place, terms, inputs, sizes))
    if is_last(workspace.state_ptr + request * FIELDS + RATIOS, num_rows):
        decide_without_reading(request, num_drafts, log_uniform, workspace, sizes)


@triton.jit
def load_residual(numbers_ptr):
    """Return what max(0, p - q / c) takes: as max(0, p - q), but for the logarithm of q."""
    row_max, draft_max = tl.load(numbers_ptr + ROW_MAX), tl.load(numbers_ptr + DRAFT_MAX)
    log_sum_ratio = tl.load(numbers_ptr + LOG_SUM_RATIO) + tl.load(numbers_ptr + LOG_C)
    return Residual(row_max, draft_max, log_sum_ratio, tl.load(numbers_ptr + SUBTRACTED).to(tl.int32, bitcast=True))


@triton.jit
def decide_by_bounds(least, residual, request, offset, temperature, inputs, workspace, sizes, tuning):
    """Compare sum max(0, p - q / c), relative to p's maximum, with `least`, by the blocks that hold most of p.

    No block's part is more than its sum of p. So blocks are summed in the order of these, until what is found is enough, or
    would not be with all that is left. If `rounds` of them do not decide, it stays open.
    """
    row = row_at(inputs.target, request, offset, sizes)
    draft_row = row_at(inputs.draft, request, offset, sizes)
    statistics = load_statistics(target_statistics(workspace, request, offset, sizes), True, sizes)
    block_sums = relative_sums(residual.row_max, statistics, temperature)
    block_sums = tl.where(block_sums == block_sums, block_sums, INFINITY)  # of a block with a NaN the sum is not known
    left = tl.sum(block_sums, 0)
    margin = left * SLACK  # `left` becomes a difference, and is rounded
    top, remaining = take_top(keys_of(block_sums, sizes), tuning)
    top_target, top_draft = load_both(inputs, row, draft_row, blocks_of(top, sizes), tuning.LANES)
    # The next blocks are loaded before it is known whether they matter.
    largest = tl.max(remaining, 0)
    blocks = blocks_of(largest, sizes)
    target, draft = load_both(inputs, row, draft_row, blocks, tuning.LANES)
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
        next_target, next_draft = load_both(inputs, row, draft_row, blocks, tuning.LANES)
        found += tl.sum(residual_sums(target, draft, residual, temperature), 0)
        enough, too_little = found * (1 - SLACK) >= least, (found + left + margin) * (1 + SLACK) < least
        target, draft = next_target, next_draft
    return tl.where(enough, ACCEPTED, tl.where(too_little, REJECTED, OPEN))


@triton.jit
def bound_kernel(inputs, workspace, sizes, tuning):
    """Decide about one number of drafts of a request, if that is open and a few blocks can tell."""
    request = (tl.program_id(0) // sizes.num_draft_tokens).to(tl.int64)
    offset = tl.program_id(0) % sizes.num_draft_tokens
    temperature = load_temperature(inputs.requests, request)
    num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    await_launch(tuning.OVERLAPS)
    admit_next_launch(tuning.OVERLAPS)
    # What other programs of this launch decide is not looked at: warps could see it at different times.
    _, is_open, _ = load_decisions(request, num_drafts, KNOWN, workspace, sizes)
    if at(is_open, offset) == 1:
        numbers_ptr = numbers_at(workspace, request, offset, sizes)
        least, residual = tl.load(numbers_ptr + LEAST), load_residual(numbers_ptr)
        decision = decide_by_bounds(least, residual, request, offset, temperature, inputs, workspace, sizes, tuning)
        tl.store(numbers_ptr + DECISION, decision)


@triton.jit
def load_decisions(request, num_drafts, FIELD: tl.constexpr, workspace, sizes):
    """Return the largest number of drafts that is accepted so far, and what is open above it.

    And, likewise as [MAX_DRAFTS] int32, which target rows have no finite logit.
    """
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    numbers_ptr = numbers_at(workspace, request, counts, sizes)
    decision = tl.load(numbers_ptr + FIELD, mask=counts <= num_drafts, other=REJECTED)
    row_max = tl.load(numbers_ptr + ROW_MAX, mask=counts < num_drafts, other=0.0)
    largest_accepted = tl.max(tl.where(decision == ACCEPTED, counts, 0), 0)
    is_open = (decision == OPEN) & (counts > largest_accepted)
    return largest_accepted, is_open.to(tl.int32), (row_max == -INFINITY).to(tl.int32)


@triton.jit
def sum_share(request, offset, program, residual, temperature, inputs, workspace, sizes, tuning):
    """Sum this program's share of the blocks of one residual."""
    row = row_at(inputs.target, request, offset, sizes)
    draft_row = row_at(inputs.draft, request, offset, sizes)
    sums_ptr = residual_sums_at(workspace, request, offset, sizes)
    for first in range(program * tuning.BLOCKS, sizes.num_blocks, tuning.programs * tuning.BLOCKS):
        blocks = first + tl.arange(0, tuning.BLOCKS)
        target, draft = load_both(inputs, row, draft_row, blocks, tuning.LANES)
        sums = residual_sums(target, draft, residual, temperature)
        tl.store(sums_ptr + blocks, sums, mask=blocks < sizes.num_blocks)


@triton.jit
def settle(request, program, num_drafts, temperature, inputs, workspace, sizes, tuning):
    """Return how many drafts are accepted, whether a row up to there has no finite logit, and whether this program emits."""
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    accepted, is_open, is_empty = load_decisions(request, num_drafts, DECISION, workspace, sizes)
    emits = program == 0
    if inputs.draft.ptr is not None:
        is_wanted = is_open
        if tuning.SUMMED:  # the token is drawn from sums
            residual = load_residual(numbers_at(workspace, request, accepted, sizes))
            if (accepted < num_drafts) & (residual.subtracted == ROW):
                is_wanted = tl.where(counts == accepted, 1, is_wanted)
        if tl.max(is_wanted, 0) == 1:
            for offset in range(accepted, num_drafts):
                if at(is_wanted, offset) == 1:
                    residual = load_residual(numbers_at(workspace, request, offset, sizes))
                    sum_share(request, offset, program, residual, temperature, inputs, workspace, sizes, tuning)
            emits = is_last(workspace.state_ptr + request * FIELDS + SHARES, tuning.programs)
            if emits:
                for offset in range(accepted + 1, num_drafts):
                    if at(is_open, offset) == 1:
                        least = tl.load(numbers_at(workspace, request, offset, sizes) + LEAST)
                        mass = sum_in_order(load_residual_sums(workspace, request, offset, sizes))
                        accepted = tl.where(mass >= least, offset, accepted)
    return accepted, tl.max(tl.where(counts <= accepted, is_empty, 0), 0) == 1, emits


@triton.jit
def decide(place, noise, inputs, workspace, sizes):
    """Return that the draft at a place is not accepted, the row's maximum, and what is drawn from: max(0, p - q / c)."""
    row = row_at(inputs.target, place.request, place.offset, sizes)
    statistics = load_statistics(target_statistics(workspace, place.request, place.offset, sizes), True, sizes)
    residual = Residual(0.0, 0.0, 0.0, tl.full([], NONE, tl.int32))
    if place.token >= 0:
        residual = load_residual(numbers_at(workspace, place.request, place.offset, sizes))
    p = combine(statistics, row, place.temperature, sizes)
    return False, p.row_max, (p, residual)
