"""Truncation in Triton: the last token that top-k, top-p and min-p keep of a row, and the statistics of what is kept.

Kept are the first tokens in the order (logit descending, id ascending), up to the *cutoff*: of equal logits the lower ids. A
program has one row. It looks for the cutoff among few candidates (`narrow`), several times at most, and if it is not there,
in the whole row (`wide`).

The program leaves the cutoff, and instead of the statistics of each block those of what is kept of it. So everything that
follows computes with the truncated distribution: where logits are read again, `rows` makes -inf of those beyond the cutoff.
"""

import triton
import triton.language as tl

from specdecode.kernels.adjustments import rarely
from specdecode.kernels.distribution import combine_recomputed, recompute_nonfinite
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.request import (
    count_drafts,
    given_token,
    load_draft_limits,
    load_limits,
    load_temperature,
    locate,
)
from specdecode.kernels.rows import (
    INFINITY,
    LARGEST,
    LAST_TOKEN,
    load_logit,
    scaled,
    whole_draft_row_at,
    whole_row,
    whole_target_row_at,
)
from specdecode.kernels.statistics import at, load_statistics, statistics_at, sum_in_order
from specdecode.kernels.stops import is_surely_accepted, load_stop
from specdecode.kernels.truncation.narrow import (
    CANDIDATES,
    DEPTH,
    FEW,
    FEW_BLOCKS,
    MORE_BLOCKS,
    cut_candidates,
    level_at,
    list_at,
    list_tokens,
    store_kept_candidates,
    sum_rounded_down,
    token_in_order,
)
from specdecode.kernels.truncation.wide import ROUNDING, store_kept, wide_cutoff
from specdecode.kernels.values import Summary

ATTEMPTS = tl.constexpr(4)
"""To find a cutoff among few tokens, at most: two, and more once there were too many."""


@triton.jit
def weights_of_maxima(block_max, row_max, temperature):
    """Return what the largest token of each block weighs, relative to the row's."""
    return tl.where(block_max > -INFINITY, tl.exp(scaled(block_max, row_max, temperature)), 0.0)


@triton.jit
def floor_of(row_max, temperature, limits):
    """Return a logit a little below the least that min-p keeps."""
    _, _, min_p = limits
    return tl.maximum(row_max + tl.log(min_p) * temperature * 1.0001 - tl.abs(row_max) * 1e-5, -LARGEST)


@triton.jit
def summary_of(block_max, p, temperature, limits, floor):
    """Return what is known of a row with a finite maximum, where T > 0, before its cutoff is."""
    num_blocks = tl.sum((block_max >= floor).to(tl.int32), 0)
    return Summary(block_max, tl.sort(block_max, descending=True), p, temperature, limits, floor, num_blocks)


@triton.jit
def first_attempt(summary, sizes):
    """Return which attempt is the first to make: `ATTEMPTS` if none is of use; 0 where a mass decides, else 1.

    And 0 where there are few blocks.
    """
    top_k, top_p, _ = summary.limits
    has_k, has_p = top_k < sizes.vocab_size, top_p < 1
    is_hopeless = has_k & (has_p == 0) & (top_k > CANDIDATES) & (summary.num_blocks > MORE_BLOCKS)
    is_first = (has_p & (top_k > 2 * FEW_BLOCKS)) | (summary.num_blocks < FEW_BLOCKS)
    return tl.where(is_hopeless, ATTEMPTS, tl.where(is_first, 0, 1))


@triton.jit
def blocks_with_mass(mass, summary):
    """Return how many blocks' largest tokens weigh so much, if any do; a sum of integers is the same in any order."""
    weights = weights_of_maxima(summary.sorted_max, summary.p.row_max, summary.temperature)
    ONE: tl.constexpr = 2**30 // weights.shape[0]  # so that no sum overflows
    masses = tl.cumsum((weights * ONE).to(tl.int32), 0).to(tl.float32) * (1 / ONE)
    return tl.minimum(tl.sum((masses < mass).to(tl.int32), 0) + 1, weights.shape[0])


@triton.jit
def level_of(attempt, summary, sizes):
    """Return the level of an attempt: a logit that 16 blocks reach, then as many as have k tokens, and 64 at most.

    With top-p alone as few as have the mass, if these are fewer. If there are not so many, it is one at some depth, then the
    floor; and never less than that.
    """
    top_k, top_p, _min_p = summary.limits
    blocks = tl.where(attempt == 0, FEW_BLOCKS, tl.minimum(top_k, MORE_BLOCKS))
    if (top_p < 1) & (top_k == sizes.vocab_size):
        blocks = tl.minimum(blocks, blocks_with_mass(top_p * summary.p.sumexp, summary))
    lowest = tl.where(attempt == 0, summary.p.row_max - summary.temperature * (DEPTH / 2), summary.floor)
    logit = tl.where(summary.num_blocks < blocks, lowest, at(summary.sorted_max, blocks - 1))
    return level_at(tl.maximum(logit, summary.floor), summary.block_max)


@triton.jit
def may_decide(level, summary, sizes):
    """Return whether the cutoff may be among the candidates of a level: top-p's is not if their blocks weigh too little.

    And there are too many candidates if there are too many blocks.
    """
    top_k, top_p, min_p = summary.limits
    within_reach = sum_in_order(tl.where(summary.block_max >= level.logit, summary.p.block_sums, 0.0))
    is_within_reach = within_reach >= top_p * summary.p.sumexp * (1 - ROUNDING)
    may = (top_k < sizes.vocab_size) | (min_p > 0) | (level.logit <= summary.floor) | is_within_reach
    return may & (level.blocks <= CANDIDATES)


@triton.jit
def cut_listed(list_ptr, found, level, summary, sizes):
    """Return what `cut_candidates` does, given the list of a level's candidates and how many were found."""
    top_k, _top_p, min_p = summary.limits
    unseen = 0.0
    if (top_k < sizes.vocab_size) & (min_p == 0) & (found < top_k):
        weights = weights_of_maxima(summary.sorted_max, summary.p.row_max, summary.temperature)
        below = tl.arange(0, sizes.MAX_BLOCKS) - level.blocks
        unseen = sum_rounded_down(tl.where((below >= 0) & (below < top_k - found), weights, 0.0))
    if found <= FEW:
        last, is_known, is_few = cut_candidates(list_ptr, found, level, unseen, summary, sizes, FEW)
    else:
        last, is_known, is_few = cut_candidates(list_ptr, found, level, unseen, summary, sizes, CANDIDATES)
    return last, is_known, is_few


@triton.jit
def cut(row, summary, statistics_ptr, list_ptr, sizes, WARPS: tl.constexpr):
    """Return the cutoff of a row with a finite maximum, where T > 0; leave the statistics of what is kept."""
    p, temperature, limits = summary.p, summary.temperature, summary.limits
    top_k, top_p, _ = limits
    too_high, too_low = p.row_max, summary.floor  # levels from which on there are too few candidates, and too many
    overflows, resolved = tl.full([], False, tl.int1), tl.full([], False, tl.int1)
    attempt = first_attempt(summary, sizes)
    logit, token = p.row_max, tl.full([], LAST_TOKEN, tl.int32)
    while (resolved == 0) & (attempt < ATTEMPTS):
        level = level_of(attempt, summary, sizes)
        if overflows:
            level = level_at(too_high / 2 + too_low / 2, summary.block_max)
        found, is_few = tl.full([], 0, tl.int32), tl.full([], True, tl.int1)
        if may_decide(level, summary, sizes):
            found = list_tokens(level.logit, level.blocks, row, summary.block_max, list_ptr, sizes)
            last, resolved, is_few = cut_listed(list_ptr, found, level, summary, sizes)
            if resolved:
                logit, token = token_in_order(last)
                store_kept_candidates(statistics_ptr, last, list_ptr, found, temperature, sizes)
        if found > CANDIDATES:
            overflows, too_low = tl.full([], True, tl.int1), tl.maximum(level.logit, p.row_max - temperature * DEPTH)
        elif overflows:
            too_high = level.logit
        goes_on = tl.where(overflows, (top_p < 1) | (top_k <= CANDIDATES), (attempt == 0) & is_few)
        attempt = tl.where(goes_on, attempt + 1, ATTEMPTS)
    if resolved == 0:
        logit, token = rarely(cut_wide, row, (p.row_max, p.sumexp, temperature, limits, statistics_ptr, WARPS), sizes)
    return logit, token


@triton.jit
def cut_wide(row, row_max, total, temperature, limits, statistics_ptr, WARPS: tl.constexpr, sizes):
    """Return what `cut` does, whose cutoff is not among few tokens."""
    logit, ties = wide_cutoff(row, row_max, total, temperature, limits, sizes, WARPS)
    return store_kept(statistics_ptr, logit, ties, row, temperature, sizes, WARPS)


@triton.jit
def locate_row(index, inputs, sizes):
    """Return which row a program has, by request and offset, and whether it is a draft row: those follow the target rows."""
    num_rows = sizes.num_draft_tokens + 1
    request, offset = index // num_rows, (index % num_rows).to(tl.int32)
    of_draft = False
    if inputs.draft.ptr is not None:
        draft = index - sizes.batch * num_rows
        of_draft = draft >= 0
        request = tl.where(of_draft, draft // sizes.num_draft_tokens, request)
        offset = tl.where(of_draft, (draft % sizes.num_draft_tokens).to(tl.int32), offset)
    return locate(request, inputs.packing, sizes), offset, of_draft


@triton.jit
def truncate_row(row, index, temperature, limits, workspace, sizes, WARPS: tl.constexpr):
    """Return the cutoff of a row, and leave the statistics of what is kept."""
    statistics_ptr = statistics_at(workspace.statistics_ptr, index, sizes)
    statistics = load_statistics(statistics_ptr, True, sizes)
    statistics = recompute_nonfinite(statistics, row, temperature, sizes)
    p = combine_recomputed(statistics, row, temperature, sizes)
    logit, token = p.row_max, p.one_hot
    if token < 0:
        list_ptr = list_at(workspace, index)
        floor = floor_of(p.row_max, temperature, limits)
        summary = summary_of(statistics[0], p, temperature, limits, floor)
        logit, token = cut(row, summary, statistics_ptr, list_ptr, sizes, WARPS)
    return logit, token


@triton.jit
def limits_at(request, offset, of_draft, inputs, sizes):
    """Return what truncates a row, and whether the row was read, as far as that is known without its request's stop."""
    num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    limits, is_read = load_limits(inputs.limits, request, sizes), offset <= num_drafts
    if inputs.draft.ptr is not None:
        if of_draft:
            limits, is_read = load_draft_limits(inputs, request, sizes), offset < num_drafts
    return limits, is_read


@triton.jit
def row_to_cut(index, inputs, sizes):
    """Return where the row with an index is, as `locate_row`; its temperature; and what `limits_at` says of it."""
    request, offset, of_draft = locate_row(index, inputs, sizes)
    temperature = load_temperature(inputs.requests, request)
    limits, is_read = limits_at(request, offset, of_draft, inputs, sizes)
    return request, offset, of_draft, temperature, limits, is_read


@triton.jit
def is_to_cut(request, offset, is_read, temperature, limits, workspace, sizes, POSTED: tl.constexpr):
    """Return whether a row that was read is to be truncated: not if it does not matter, or nothing truncates it."""
    if POSTED:
        is_read &= offset <= load_stop(workspace.state_ptr, request, sizes)
        if workspace.logprobs_ptr is None:  # they are of what truncation leaves
            is_read &= is_surely_accepted(workspace.state_ptr, request, offset, sizes) == 0
    top_k, top_p, min_p = limits
    return is_read & (temperature > 0) & ((top_k < sizes.vocab_size) | (top_p < 1) | (min_p > 0))


@triton.jit
def keep_cutoff(workspace, index, logit, token):
    """Keep the cutoff of a row, given the row's index."""
    tl.store(workspace.cutoffs_ptr + index * 2, logit)
    tl.store(workspace.cutoffs_ptr + index * 2 + 1, token.to(tl.float32, bitcast=True))


@triton.jit
def row_of_program(OF_DRAFTS: tl.constexpr, sizes):
    """Return the index of a program's row: of all rows; or of draft rows, if they have a launch."""
    index = tl.program_id(0).to(tl.int64)
    if OF_DRAFTS:
        index += sizes.batch * (sizes.num_draft_tokens + 1).to(tl.int64)
    return index


@triton.jit
def truncate_kernel(inputs, workspace, sizes, tuning):
    """Truncate one row, if it was read and anything truncates it: of all rows; or of draft rows, if they have a launch."""
    index = row_of_program(tuning.OF_DRAFTS, sizes)
    request, offset, of_draft, temperature, limits, is_read = row_to_cut(index, inputs, sizes)
    row = whole_target_row_at(request, offset, inputs, sizes)
    await_launch(tuning.OVERLAPS)
    admit_next_launch(tuning.OVERLAPS)
    is_truncated = is_to_cut(request, offset, is_read, temperature, limits, workspace, sizes, tuning.POSTED)
    logit, token = -INFINITY, tl.full([], LAST_TOKEN, tl.int32)
    if inputs.drafts.cutoff_ptr is not None:
        if of_draft & is_truncated:
            draft_row = whole_draft_row_at(request, offset, inputs, sizes)
            given, is_known = given_token(request, offset, draft_row.vocab_size, inputs)
            is_truncated = is_known == 0
            if given >= 0:
                logit, token = load_logit(draft_row, given, True), given
    if is_truncated:
        if tuning.OF_DRAFTS:
            draft_row = whole_draft_row_at(request, offset, inputs, sizes)
            logit, token = truncate_row(draft_row, index, temperature, limits, workspace, sizes, tuning.WARPS)
        else:
            if inputs.draft.ptr is not None:  # the code is there once for rows that are read alike, which is faster
                draft_row = whole_draft_row_at(request, offset, inputs, sizes)
                vocab_size = request.vocab_size
                if inputs.draft_vocabulary.ids_ptr is not None:
                    vocab_size = tl.where(of_draft, draft_row.vocab_size, vocab_size)
                row = whole_row(tl.where(of_draft, draft_row.ptr, row.ptr), inputs.target.stride_token, vocab_size)
            logit, token = truncate_row(row, index, temperature, limits, workspace, sizes, tuning.WARPS)
    keep_cutoff(workspace, index, logit, token)
