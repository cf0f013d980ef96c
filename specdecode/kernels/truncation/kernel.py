"""Truncation in Triton: the last token that top-k, top-p and min-p keep of a row, and the statistics of the kept tokens.

The kept tokens are the first in the order (logit descending, id ascending), through the *cutoff*, the last kept token. A
program has one row. It searches for the cutoff among few candidates (`narrow`), in up to `ATTEMPTS` attempts, and then in
the whole row (`wide`).

The program stores the cutoff, and replaces the statistics of each block by statistics of its kept tokens. So later
launches compute with the truncated distribution: where logits are read again, `rows` returns -inf beyond the cutoff.
"""

import triton
import triton.language as tl

from specdecode.kernels.adjustments import call_out_of_line
from specdecode.kernels.distribution import combine_recomputed, recompute_nonfinite
from specdecode.kernels.first_rejected import is_surely_accepted, load_first_rejected
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.request import (
    count_drafts,
    load_draft_limits,
    load_given_cutoff,
    load_limits,
    load_temperature,
    locate,
)
from specdecode.kernels.rows import (
    LARGEST,
    LAST_TOKEN,
    load_logit,
    whole_draft_row_at,
    whole_row,
    whole_target_row_at,
)
from specdecode.kernels.statistics import load_statistics, maxima_at, statistics_at
from specdecode.kernels.truncation.narrow import (
    ALL,
    ANY_NUMBER,
    CANDIDATES,
    FEW,
    LIKELY,
    cut_candidates,
    level_reaching,
    likely_blocks,
    list_at,
    list_tokens,
    load_maxima,
    shares_of,
    store_kept_candidates,
    token_of_order,
)
from specdecode.kernels.truncation.wide import store_kept, wide_cutoff
from specdecode.kernels.values import INFINITY, Summary

ATTEMPTS = tl.constexpr(2)
"""The most attempts to find the cutoff of top-p among few tokens."""

CAUTION = tl.constexpr(0.6)
"""An attempt excludes this part of the mass that top-p excludes. It is less than 1, because the maxima of groups weigh less
than all their tokens."""


@triton.jit
def floor_of(row_max, temperature, limits):
    """Return a logit a little below the least that min-p keeps."""
    _, _, min_p = limits
    return tl.maximum(row_max + tl.log(min_p) * temperature * 1.0001 - tl.abs(row_max) * 1e-5, -LARGEST)


@triton.jit
def next_level(maxima, lowest, seen, share, summary, sizes):
    """Return a logit level that all kept tokens reach, and with top-p alone the share of the group maxima that reach it.

    With top-p alone the level is probably low enough, not surely. At the level of the last attempt the maxima had the share
    `seen`, and the candidates `share`. A lower level is assumed to add the same fraction of the remaining share to both.
    """
    top_k, top_p, min_p = summary.limits
    amounts, goal, slack = tl.full([maxima.shape[0]], 1, tl.int32), top_k, top_k // 16
    # With top-k the number of groups is not needed. With min-p alone no level has enough: the lowest is returned.
    total = tl.where(top_k < sizes.vocab_size, ANY_NUMBER, 0)
    if (top_k == sizes.vocab_size) & (min_p == 0):
        amounts = tl.where(maxima < INFINITY, shares_of(maxima, summary.p, summary.temperature), 0)
        total = tl.sum(amounts, 0)
        left_out, unseen = (1 - top_p) * ALL, (total - seen).to(tl.float32)
        beyond = 0.0  # share of the groups that were found
        if sizes.MAX_BLOCKS > LIKELY:
            of_others = tl.where(summary.block_max < lowest, summary.p.block_sums, 0.0)
            beyond = tl.sum(of_others, 0) / summary.p.sumexp * ALL
        to_leave = tl.maximum(left_out * CAUTION - beyond, 0.0) / (ALL - beyond - share.to(tl.float32))
        aim = seen + unseen * (1 - tl.minimum(to_leave, 1.0))
        goal = tl.maximum(tl.where(seen == 0, tl.minimum(aim, top_p * ALL), aim).to(tl.int32), 1)
        slack = (left_out / 16).to(tl.int32)
    row_max, temperature = summary.p.row_max, summary.temperature
    return level_reaching(
        tl.minimum(maxima, row_max), amounts, goal, slack, total, ANY_NUMBER, lowest, row_max, temperature
    )


@triton.jit
def cut(row, every_maximum, maxima_ptr, summary, statistics_ptr, list_ptr, sizes):
    """Return the cutoff of a row with a finite maximum, where T > 0; store the statistics of the kept tokens."""
    p, temperature, limits = summary.p, summary.temperature, summary.limits
    top_k, top_p, min_p = limits
    has_k = top_k < sizes.vocab_size
    most = tl.where(has_k | (min_p > 0), CANDIDATES, FEW)
    blocks, lowest = likely_blocks(summary, list_ptr, sizes)
    if sizes.MAX_BLOCKS > LIKELY:
        groups, maxima = load_maxima(maxima_ptr, statistics_ptr, blocks, row)
    else:
        groups, maxima = every_maximum
    seen, share, found = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    resolved, last = tl.full([], False, tl.int1), tl.full([], 0, tl.int64)
    is_hopeless = (has_k & (top_k > CANDIDATES)) | (lowest == INFINITY)
    attempt = tl.where(is_hopeless, ATTEMPTS, 0)
    while attempt < ATTEMPTS:
        level, seen = next_level(maxima, lowest, seen, share, summary, sizes)
        found = list_tokens(level, groups, maxima, most, row, list_ptr, sizes)
        is_complete = (level <= summary.floor) | (found >= top_k)
        if found <= most:
            if found <= FEW:
                last, share = cut_candidates(list_ptr, found, is_complete, summary, FEW)
            else:
                last, share = cut_candidates(list_ptr, found, is_complete, summary, CANDIDATES)
            resolved = is_complete | ((has_k == 0) & (share.to(tl.float32) >= top_p * ALL))
        attempt = tl.where(resolved | has_k | (level <= lowest) | (found > most), ATTEMPTS, attempt + 1)
    logit, token = token_of_order(last)
    if resolved:
        store_kept_candidates(statistics_ptr, last, list_ptr, found, summary, sizes)
    else:
        rest = p.row_max, p.sumexp, temperature, limits, statistics_ptr, list_ptr
        logit, token = call_out_of_line(cut_wide, row, rest, sizes)
    return logit, token


@triton.jit
def cut_wide(row, row_max, total, temperature, limits, statistics_ptr, list_ptr, sizes):
    """Return the cutoff of a row for `cut`, found by reading the whole row."""
    logit, ties = wide_cutoff(row, row_max, total, temperature, limits, sizes)
    return store_kept(statistics_ptr, list_ptr, logit, ties, row, temperature, sizes)


@triton.jit
def locate_row(index, inputs, sizes):
    """Return the request and offset of a row, and whether it is a draft row, given its index: target rows come first."""
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
def truncate_row(row, index, temperature, limits, workspace, sizes):
    """Return the cutoff of a row, and store the statistics of the kept tokens."""
    statistics_ptr = statistics_at(workspace.statistics_ptr, index, sizes)
    maxima_ptr, list_ptr = maxima_at(workspace, index, sizes), list_at(workspace, index, sizes)
    every_maximum = ()
    if sizes.MAX_BLOCKS <= LIKELY:  # in flight while statistics are combined
        every_maximum = load_maxima(maxima_ptr, statistics_ptr, tl.arange(0, sizes.MAX_BLOCKS), row)
    statistics = load_statistics(statistics_ptr, True, sizes)
    statistics = recompute_nonfinite(statistics, row, temperature, sizes)
    p = combine_recomputed(statistics, row, temperature, sizes)
    logit, token = p.row_max, p.point_mass_token
    if token < 0:
        summary = Summary(statistics[0], p, temperature, limits, floor_of(p.row_max, temperature, limits))
        logit, token = cut(row, every_maximum, maxima_ptr, summary, statistics_ptr, list_ptr, sizes)
    return logit, token


@triton.jit
def limits_at(request, offset, of_draft, inputs, sizes):
    """Return the limits of a row, and whether it was read, provided that no earlier row was rejected."""
    num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    limits, is_read = load_limits(inputs.limits, request, sizes), offset <= num_drafts
    if inputs.draft.ptr is not None:
        if of_draft:
            limits, is_read = load_draft_limits(inputs, request, sizes), offset < num_drafts
    return limits, is_read


@triton.jit
def is_to_cut(request, offset, is_read, temperature, limits, workspace, sizes, PUBLISHED: tl.constexpr):
    """Return whether a row that was read has to be truncated: not if it cannot matter, or its limits are neutral."""
    if PUBLISHED:
        is_read &= offset <= load_first_rejected(workspace.state_ptr, request, sizes)
        if workspace.logprobs_ptr is None:  # log-probabilities are after truncation
            is_read &= is_surely_accepted(workspace.state_ptr, request, offset, sizes) == 0
    top_k, top_p, min_p = limits
    return is_read & (temperature > 0) & ((top_k < sizes.vocab_size) | (top_p < 1) | (min_p > 0))


@triton.jit
def truncate_kernel(inputs, workspace, sizes, config):
    """Truncate one row, if it was read and its limits are not neutral."""
    index = tl.program_id(0).to(tl.int64)
    if config.OF_DRAFTS:  # draft rows have a separate launch
        index += sizes.batch * (sizes.num_draft_tokens + 1).to(tl.int64)
    request, offset, of_draft = locate_row(index, inputs, sizes)
    temperature = load_temperature(inputs.requests, request)
    limits, is_read = limits_at(request, offset, of_draft, inputs, sizes)
    row = whole_target_row_at(request, offset, inputs, sizes)
    await_launch(config.OVERLAPS)
    admit_next_launch(config.OVERLAPS)
    is_truncated = is_to_cut(request, offset, is_read, temperature, limits, workspace, sizes, config.PUBLISHED)
    logit, token = -INFINITY, tl.full([], LAST_TOKEN, tl.int32)
    if inputs.drafts.cutoff_ptr is not None:
        if of_draft & is_truncated:
            draft_row = whole_draft_row_at(request, offset, inputs, sizes)
            given, is_known = load_given_cutoff(request, offset, draft_row.vocab_size, inputs)
            is_truncated = is_known == 0
            if given >= 0:
                logit, token = load_logit(draft_row, given, True), given
    if is_truncated:
        if config.OF_DRAFTS:
            draft_row = whole_draft_row_at(request, offset, inputs, sizes)
            logit, token = truncate_row(draft_row, index, temperature, limits, workspace, sizes)
        else:
            if inputs.draft.ptr is not None:  # rows of both models have the same layout: one copy of the code is faster
                draft_row = whole_draft_row_at(request, offset, inputs, sizes)
                vocab_size = request.vocab_size
                if inputs.draft_vocabulary.ids_ptr is not None:
                    vocab_size = tl.where(of_draft, draft_row.vocab_size, vocab_size)
                row = whole_row(tl.where(of_draft, draft_row.ptr, row.ptr), inputs.target.stride_token, vocab_size)
            logit, token = truncate_row(row, index, temperature, limits, workspace, sizes)
    tl.store(workspace.cutoffs_ptr + index * 2, logit)
    tl.store(workspace.cutoffs_ptr + index * 2 + 1, token.to(tl.float32, bitcast=True))
