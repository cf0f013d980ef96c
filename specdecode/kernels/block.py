"""Block verification in Triton: the longest block of drafts that stands.

    c_i = min(1, c_{i-1} p(x_i) / q(x_i))    h_i = A_i / (A_i + 1 - c_i)    A_i = sum max(0, c_i p - q)

Each draft's ratio comes from its rows' statistics, as in `probabilistic`, but what fails does not stop the request: only an
impossible draft does. The accepted number is the largest i with eta_i <= h_i, and h_i <= c_i <= 1. So of all i only those
with eta_i <= c_i are candidates, which takes no reading to know; none below the largest with c_i = 1, which is sure to
stand, is considered; and if all drafts stand nothing is read again. Of a candidate's rows a few blocks are read once more,
those that hold most of p: as many as it takes to know whether A_i is large enough, which p bounds as it does residuals. Now
and then that takes all of them. Then programs that are done with their own requests help.

A program of `note_ratio_kernel` has one draft: it reads 16 bytes for each block of 1,024 and writes 36. One of `emit_kernel`
has a request, or a share of it: it reads these of every draft, of each candidate 8 bytes for each block, and 4 KB (bfloat16)
for each block of both rows that it looks at; it writes the request's output.
"""

import triton
import triton.language as tl

from specdecode.kernels.launches import SIZES, SMALL_TENSORS, admit_next_launch, await_launch
from specdecode.kernels.philox import load_key, uniform
from specdecode.kernels.probabilistic import (
    ALL,
    CLAIMED,
    KEPT,
    LOG_RATIO,
    LOG_SUM,
    NOTHING,
    PEAK,
    SCALARS,
    SUMMED,
    TAKEN,
    emit,
    load_both,
    load_scalars,
    one_minus_exp2,
    store_scalars,
    sum_residual,
    weigh,
)
from specdecode.kernels.rows import (
    INFINITY,
    LOG2_E,
    base_2_scale,
    load_statistics,
    load_temperature,
    row_at,
    sum_in_order,
)
from specdecode.kernels.search import SLACK, blocks_of, keys_of, least_of, take_leaders
from specdecode.kernels.selection import sums_relative_to
from specdecode.kernels.steps import (
    FIELDS,
    OPEN,
    count_drafts,
    is_last,
    load_drafts,
    load_stop,
    post_empty,
    post_stop,
)
from specdecode.kernels.synthetic import ACCEPT

NOT_SUMMED = tl.constexpr(-1.0)
"""In place of a block's residual, which is not negative."""

NEARBY = tl.constexpr(256)
"""Requests among which a program that is done looks for open searches; as many as it has threads, or more."""


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
        target, draft, scalars, _ = weigh(
            statistics_ptr, target_row, draft_rows, logsumexps, token, request, offset, temperature, batch,
            num_draft_tokens, num_blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, MAX_BLOCKS,
        )  # fmt: skip
        if scalars[PEAK] == -INFINITY:
            post_empty(state_ptr, request, offset, num_draft_tokens)
        if ((target > -INFINITY) & (draft > -INFINITY)) == 0:
            post_stop(state_ptr, request, offset, num_draft_tokens, 1)
        scalars_ptr += (request * num_draft_tokens + offset) * SCALARS
        store_scalars(scalars_ptr, scalars)
        tl.store(scalars_ptr + LOG_RATIO, target - draft)
        tl.store(scalars_ptr + CLAIMED, 0.0)  # which as an integer is 0 too
        tl.store(scalars_ptr + SUMMED, 0.0)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def note_ratio_kernel(
    state_ptr,  # [batch, FIELDS] int32
    scalars_ptr,  # [batch, num_draft_tokens, SCALARS] float32
    statistics_ptr,  # [batch * (num_draft_tokens + 1) + batch * num_draft_tokens, num_blocks, 2] float32
    target_ptr,  # [batch, num_draft_tokens + 1, vocab_size] any float
    target_index_ptr,  # [batch] int32 or int64, or None
    draft_ptr,  # [batch, num_draft_tokens, vocab_size] any float, or None
    draft_index_ptr,  # [batch] int32 or int64, or None
    logsumexp_ptr,  # [batch, num_draft_tokens] float32, or None
    ids_ptr,  # [batch, num_draft_tokens] int32 or int64
    temperature_ptr,  # [batch] any float, or None
    temperature,
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
    MAX_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Note the ratio of the draft at one offset of a request, whose rows have been read."""
    request = (tl.program_id(0) // num_draft_tokens).to(tl.int64)
    offset = tl.program_id(0) % num_draft_tokens
    drafts = (ids_ptr, ids_stride_request, ids_stride_offset, num_draft_tokens)
    draft_token = load_drafts(drafts, request, offset, vocab_size)
    matters = offset <= count_drafts(drafts, request, vocab_size)[0]
    t = load_temperature(temperature_ptr, temperature, request)
    await_launch(OVERLAPS)
    admit_next_launch(OVERLAPS)
    if matters:
        target_rows = (target_ptr, target_index_ptr, target_stride_request, target_stride_offset, target_stride_token)
        draft_rows = (draft_ptr, draft_index_ptr, draft_stride_request, draft_stride_offset, draft_stride_token)
        note_ratio(
            state_ptr, scalars_ptr, statistics_ptr,
            row_at(target_rows, vocab_size, request, offset, TARGET_ALIGNMENT), draft_rows,
            (logsumexp_ptr, logsumexp_stride_request, logsumexp_stride_offset), None, draft_token, request, offset, t,
            None, batch, num_draft_tokens, num_blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, MAX_BLOCKS,
        )  # fmt: skip


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
    scalars_ptr += request * num_draft_tokens * SCALARS
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


@triton.jit
def load_excess(scalars_ptr, log_c):
    """Return the scalars of max(0, p - q / c): as those of max(0, p - q), but for q's logarithm."""
    scalars, _ = load_scalars(scalars_ptr)
    peak, draft_peak, log_sum_ratio = scalars
    return peak, draft_peak, log_sum_ratio + log_c


@triton.jit
def board_at(sums_ptr, scalars_ptr, draft, num_blocks):
    """Return where programs share a search: sums of blocks, and counts of what is claimed and of what is done.

    Each candidate has its own, at the place of its draft among all: a late helper is not to write to another's.
    """
    counts_ptr = (scalars_ptr + draft * SCALARS).to(tl.pointer_type(tl.int32), bitcast=True)
    return sums_ptr + draft * num_blocks, counts_ptr + CLAIMED, counts_ptr + SUMMED


@triton.jit
def open_search_at(state_ptr, requests):
    """Return where the searches that requests have open are named; 0 is none.

    A name refers only to what was written before this launch, so nothing else has to be published with it.
    """
    return (state_ptr + requests * FIELDS + OPEN).to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def name_of(count, log_c):
    """Return all that says what is searched for, in one number: the candidate, and log c, which is not 0."""
    return (count.to(tl.int64) << 32) | (log_c.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def help_search(
    board,
    target_row,
    draft_row,
    scalars,
    num_blocks,
    temperature,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Sum what nobody has claimed of another's search, `BLOCKS` blocks a round, until all rounds are claimed."""
    sums_ptr, claimed_ptr, summed_ptr = board
    blocks = tl.arange(0, BLOCKS)
    scale = base_2_scale(temperature)
    claimed = tl.atomic_add(claimed_ptr, 1, sem="relaxed") * BLOCKS
    target, draft = load_both(target_row, draft_row, claimed + blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LANES)
    while claimed < num_blocks:
        # The next ones are claimed, and asked for, while these are awaited.
        following = tl.atomic_add(claimed_ptr, 1, sem="relaxed") * BLOCKS
        next_target, next_draft = load_both(
            target_row, draft_row, following + blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LANES
        )
        sums = sum_residual(target, draft, scalars, scale)
        tl.store(sums_ptr + claimed + blocks, sums, mask=claimed + blocks < num_blocks)
        tl.debug_barrier()  # of that write, before one of the program's threads publishes it
        tl.atomic_add(summed_ptr, 1, sem="release")
        claimed, target, draft = following, next_target, next_draft


@triton.jit
def excess_reaches(
    least,
    statistics,
    target_row,
    draft_row,
    scalars,
    board,
    team,
    search,
    num_blocks,
    temperature,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    LEADERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Return whether sum max(0, p - q / c) is `least` or more, relative to p's peak, given p's statistics.

    No block's part is more than its sum of p. So blocks are summed in the order of these, until what is found is enough, or
    would not be with all that is left. Near to `least` that takes all blocks: the answer is that of their sum.

    `team` is (this program's number, how many programs there are, their patience, whether there was one from the start).
    Each of them does the same, for as many rounds as that. If these do not tell, they share out the rest, and the last to
    finish knows. So it is returned too how many are left that know: all, 1, or 0 to those that do not. Who was alone from
    the start goes on, and opens its search, (where, its name), to others: it comes to an end, or finds that they have summed
    all, whichever is first.
    """
    sums_ptr, claimed_ptr, summed_ptr = board
    member, members, patience, alone = team
    open_ptr, name = search
    scale = base_2_scale(temperature)
    blocks = tl.arange(0, MAX_BLOCKS)
    sums = sums_relative_to(scalars[PEAK], *statistics, temperature)
    sums = tl.where(sums == sums, sums, INFINITY)  # of a block with a NaN p's sum is not known
    left = tl.sum(sums, 0)
    margin = left * SLACK  # for what is left is a difference, and rounded
    leaders, columns = take_leaders(keys_of(sums, num_blocks), LEADERS, BLOCKS)
    first = blocks_of(leaders, num_blocks, MAX_BLOCKS)
    first_target, first_draft = load_both(target_row, draft_row, first, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LANES)
    # The next ones are asked for before it is known whether they matter.
    largest = tl.max(columns, 0)
    chosen = blocks_of(largest, num_blocks, MAX_BLOCKS)
    target, draft = load_both(target_row, draft_row, chosen, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LANES)
    parts = sum_residual(first_target, first_draft, scalars, scale)
    excess = tl.max(tl.where(blocks[:, None] == first[None, :], parts[None, :], NOT_SUMMED), 1)
    excess = tl.reshape(excess, columns.shape)
    is_mine = tl.arange(0, columns.shape[0])[:, None] % members == member
    found = tl.sum(parts, 0)
    left -= tl.sum(least_of(leaders, MAX_BLOCKS), 0)
    enough, too_little = found * (1 - SLACK) >= least, (found + left + margin) * (1 + SLACK) < least
    rounds, shared, summed = 0, False, False
    all_rounds = tl.cdiv(num_blocks, BLOCKS)
    is_open = alone & (enough == 0) & (too_little == 0)
    if is_open:
        tl.atomic_xchg(open_ptr, name, sem="relaxed")
    while (tl.max(largest, 0) >= 0) & (shared | ((enough == 0) & (too_little == 0) & (summed == 0))):
        rounds += 1
        shared = (members > 1) & (rounds > patience)
        taken = (columns == largest[None, :]) & (columns >= 0)
        columns = tl.where(taken | (shared & (is_mine == 0)), -1, columns)
        next_largest = tl.max(columns, 0)
        following = blocks_of(next_largest, num_blocks, MAX_BLOCKS)
        next_target, next_draft = load_both(target_row, draft_row, following, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LANES)
        these = sum_residual(target, draft, scalars, scale)
        excess = tl.where(taken, these[None, :], excess)
        found += tl.sum(these, 0)
        left -= tl.sum(least_of(largest, MAX_BLOCKS), 0)
        enough, too_little = found * (1 - SLACK) >= least, (found + left + margin) * (1 + SLACK) < least
        largest, target, draft = next_largest, next_target, next_draft
        if is_open & (rounds % 2 == 0):  # a look costs as much as a round
            summed = tl.atomic_add(summed_ptr, 0, sem="acquire") == all_rounds
    sums = tl.reshape(excess, [MAX_BLOCKS])
    if shared:
        tl.store(sums_ptr + blocks, sums, mask=sums > NOT_SUMMED)
        members = is_last(summed_ptr, members).to(tl.int32)
        summed = members == 1
    elif is_open:
        tl.atomic_xchg(open_ptr, 0, sem="relaxed")
        tl.atomic_add(claimed_ptr, all_rounds, sem="relaxed")  # and no more are claimed
    if summed:
        sums = tl.load(sums_ptr + blocks, mask=blocks < num_blocks, other=0.0)
    if summed | ((enough == 0) & (too_little == 0)):
        enough = sum_in_order(tl.maximum(sums, 0.0)) >= least
    return enough, members


@triton.jit
def mass_suffices(
    state_ptr,
    scalars_ptr,
    sums_ptr,
    statistics_ptr,
    target_row,
    draft_rows,
    taken,
    log_uniform,
    log_c,
    team,
    request,
    count,
    num_draft_tokens,
    num_blocks,
    temperature,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    LEADERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Return whether a candidate stands, and how many of the team know: whether eta <= A / (A + 1 - c).

    That is, whether A / c = sum max(0, p - q / c) is eta / c (1 - c) / (1 - eta) or more.
    """
    _, knowing, _, _ = team
    draft = request * num_draft_tokens + count
    its_scalars_ptr = scalars_ptr + draft * SCALARS
    kept = tl.load(its_scalars_ptr + KEPT)
    least = tl.exp(log_uniform - log_c) * one_minus_exp2(log_c * LOG2_E) / one_minus_exp2(log_uniform * LOG2_E)
    # One of them is a point mass, on a token of which the other has `kept`: p, of which nothing is taken, or q.
    enough = one_minus_exp2((kept - tl.where(taken == NOTHING, log_c, 0.0)) * LOG2_E) >= least
    if draft_rows[0] is not None:
        if taken == ALL:
            index = request * (num_draft_tokens + 1) + count
            enough, knowing = excess_reaches(
                least * tl.exp(tl.load(its_scalars_ptr + LOG_SUM)),
                load_statistics(statistics_ptr, index, True, num_blocks, MAX_BLOCKS), target_row,
                row_at(draft_rows, target_row[2], request, count, DRAFT_ALIGNMENT), load_excess(its_scalars_ptr, log_c),
                board_at(sums_ptr, scalars_ptr, draft, num_blocks), team,
                (open_search_at(state_ptr, request), name_of(count, log_c)), num_blocks, temperature,
                TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LEADERS, BLOCKS, LANES, MAX_BLOCKS,
            )  # fmt: skip
    return enough, knowing


@triton.jit
def nearby(request, distance, batch):
    """Return the request at a distance from another, after the last of which comes the first."""
    return request + distance - tl.where(request + distance >= batch, batch, 0)


@triton.jit
def look_for_searches(state_ptr, request, beyond, batch):
    """Return the names of searches that are open nearby, by their distance, and which is the next one beyond a distance.

    Others may be writing them. But each is loaded by one thread, and reduced by all: so the program is of one mind.
    """
    distances = tl.arange(0, NEARBY)
    wanted = (distances > beyond) & (distances < batch)
    names = tl.load(open_search_at(state_ptr, nearby(request, distances, batch)), mask=wanted, other=0, volatile=True)
    return names, tl.min(tl.where(names != 0, distances, NEARBY), 0)


@triton.jit
def help_others(
    state_ptr,
    scalars_ptr,
    sums_ptr,
    target_rows,
    draft_rows,
    temperature_ptr,
    temperature,
    request,
    batch,
    num_draft_tokens,
    vocab_size,
    num_blocks,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Help with the searches that are open nearby: each helper from its own request on, so that they spread."""
    names, distance = look_for_searches(state_ptr, request, 0, batch)
    while distance < NEARBY:
        other, name = nearby(request, distance, batch), at(names, distance)
        count, log_c = name >> 32, name.to(tl.int32).to(tl.float32, bitcast=True)
        draft = other * num_draft_tokens + count
        help_search(
            board_at(sums_ptr, scalars_ptr, draft, num_blocks),
            row_at(target_rows, vocab_size, other, count, TARGET_ALIGNMENT),
            row_at(draft_rows, vocab_size, other, count, DRAFT_ALIGNMENT),
            load_excess(scalars_ptr + draft * SCALARS, log_c), num_blocks,
            load_temperature(temperature_ptr, temperature, other), TARGET_ALIGNMENT, DRAFT_ALIGNMENT, BLOCKS, LANES,
        )  # fmt: skip
        names, distance = look_for_searches(state_ptr, request, distance, batch)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SMALL_TENSORS)
def emit_kernel(
    token_ids_ptr,  # [batch, num_draft_tokens + 1] int64
    num_accepted_ptr,  # [batch] int32
    num_drafts_ptr,  # [batch] int32
    invalid_ptr,  # [batch] bool
    state_ptr,  # [batch, FIELDS] int32
    scalars_ptr,  # [batch, num_draft_tokens, SCALARS] float32
    sums_ptr,  # [batch, num_draft_tokens, num_blocks] float32, or None
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
    members,
    patience,
    TARGET_ALIGNMENT: tl.constexpr,
    DRAFT_ALIGNMENT: tl.constexpr,
    LEADERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Look from the largest candidate down for the first that stands, draw the token after it, write the output.

    Several programs may do this for one request, of which the last, or else the first, draws and writes. If each has a
    request of its own, those that are done help the others.
    """
    request = (tl.program_id(0) // members).to(tl.int64)
    member = tl.program_id(0) % members
    t = load_temperature(temperature_ptr, temperature, request)
    key = load_key(seeds_ptr, first_seed, positions_ptr, request)
    target_rows = (target_ptr, target_index_ptr, target_stride_request, target_stride_offset, target_stride_token)
    draft_rows = (draft_ptr, draft_index_ptr, draft_stride_request, draft_stride_offset, draft_stride_token)
    drafts = (ids_ptr, ids_stride_request, ids_stride_offset, num_draft_tokens)
    counted = count_drafts(drafts, request, vocab_size)
    log_uniforms = log_uniforms_of(key, MAX_DRAFTS)
    await_launch(OVERLAPS)
    surveyed = survey(state_ptr, scalars_ptr, request, log_uniforms, num_draft_tokens, MAX_DRAFTS)
    accepted, lowest, highest, of_counts = surveyed
    is_candidate, log_c, taken = of_counts
    all_stand = accepted >= 0

    knowing = members
    count = highest
    while (accepted < 0) & (count > lowest) & (knowing > 0):
        if at(is_candidate, count) == 1:
            enough, knowing = mass_suffices(
                state_ptr, scalars_ptr, sums_ptr, statistics_ptr,
                row_at(target_rows, vocab_size, request, count, TARGET_ALIGNMENT), draft_rows, at(taken, count),
                at(log_uniforms, count), at(log_c, count), (member, knowing, patience, members == 1), request, count,
                num_draft_tokens, num_blocks, t, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LEADERS, BLOCKS, LANES, MAX_BLOCKS,
            )  # fmt: skip
            if enough:
                accepted = count
        count -= 1
    if (knowing == 1) | ((knowing > 1) & (member == 0)):
        accepted = tl.where(accepted < 0, lowest, accepted)
        scalars, takes = (0.0, 0.0, 0.0), tl.full([], NOTHING, tl.int32)
        if all_stand == 0:
            draft = request * num_draft_tokens + accepted
            scalars, takes = load_excess(scalars_ptr + draft * SCALARS, at(log_c, accepted)), at(taken, accepted)
        output = (token_ids_ptr, num_accepted_ptr, num_drafts_ptr, invalid_ptr)
        emit(
            output, drafts, state_ptr, statistics_ptr, target_rows, draft_rows, scalars, takes, request, accepted,
            counted, key, vocab_size, num_blocks, t, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, LEADERS, BLOCKS, LANES,
            MAX_BLOCKS,
        )  # fmt: skip
    if draft_ptr is not None:
        if members == 1:
            help_others(
                state_ptr, scalars_ptr, sums_ptr, target_rows, draft_rows, temperature_ptr, temperature, request,
                tl.num_programs(0), num_draft_tokens, vocab_size, num_blocks, TARGET_ALIGNMENT, DRAFT_ALIGNMENT, BLOCKS,
                LANES,
            )  # fmt: skip
