"""Truncation in Triton: the last token that top-k, top-p and min-p keep of a row, and the statistics of what is kept.

Kept are the first tokens in the order (logit descending, id ascending), up to the *cutoff*. A program has one row:

1. A *level* is chosen, given the maxima of the blocks: as high as it can be if what is kept is to lie above it. (A block
   whose maximum is above it has at least that one token there.) Only blocks that reach the level are read.
2. Their tokens above it, the *candidates*, are listed. Of each candidate it is computed how many tokens come before it,
   and their mass; so which are kept follows from the definition.
3. If that does not tell (there are too many candidates, or the mass of what top-k keeps is known too roughly) a second,
   lower level is tried, then `widecut` searches the whole row.

The program leaves the cutoff, and in place of the statistics of each block those of what is kept of it. So everything that
follows computes with the truncated distribution: where logits are read again, `rows` makes -inf of those beyond the cutoff.
"""

import triton
import triton.language as tl

from specdecode.kernels.arguments import Row
from specdecode.kernels.distribution import add_both, combine, recompute_nonfinite
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.probabilistic import (
    acceptance_terms,
    accepts,
    is_possible,
    is_trusted,
    load_logsumexp,
)
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    INFINITY,
    LARGEST,
    LAST_TOKEN,
    base_2_scale,
    key_of,
    load_logit,
    load_logits,
    load_statistics,
    load_temperature,
    logit_of,
    row_at,
    scaled,
    target_statistics,
)
from specdecode.kernels.state import count_drafts, load_stop
from specdecode.kernels.synthetic import is_scheduled
from specdecode.kernels.widecut import store_kept, wide_cutoff

STEPS = tl.constexpr(8)
"""By which a level is found, each halving what is left."""

DEPTH = tl.constexpr(16.0)
"""The lowest level is where a token is so many natural logarithms less likely than the first."""

CANDIDATES = tl.constexpr(128)
"""So many at most: all pairs of them are compared."""

LISTS = tl.constexpr(3)
"""In the workspace of a row: groups of tokens; keys and ids of candidates."""

GROUP = tl.constexpr(8)
"""Neighbouring tokens, of which the largest logit shows whether any is a candidate."""

TOGETHER = tl.constexpr(16)
"""Candidates that all others are compared with at once."""

FEW_BLOCKS, MORE_BLOCKS, AT_ONCE = tl.constexpr(16), tl.constexpr(64), tl.constexpr(8)
"""That are read at most for a level: where a mass decides, at first; else. And how many at once."""

ANY_NUMBER = tl.constexpr(2**31 - 1)
ERROR = tl.constexpr(1e-3)
"""More than what is decided before truncation may be off by rounding."""


@triton.jit
def load_limits(limits, request, sizes):
    """Return a request's top_k, top_p and min_p; values of a tensor, which could not be checked, are made harmless."""
    top_k, top_p, min_p = limits.top_k, limits.top_p, limits.min_p
    if limits.top_k_ptr is not None:
        top_k = tl.load(limits.top_k_ptr + request)
    if limits.top_p_ptr is not None:
        top_p = tl.load(limits.top_p_ptr + request).to(tl.float32)
    if limits.min_p_ptr is not None:
        min_p = tl.load(limits.min_p_ptr + request).to(tl.float32)
    top_k = tl.where(top_k > 0, tl.minimum(top_k, sizes.vocab_size), sizes.vocab_size).to(tl.int32)
    top_p = tl.where(top_p < 1, tl.maximum(top_p, 0.0), 2.0)
    return top_k, top_p, tl.where(min_p > 0, tl.minimum(min_p, 1.0), 0.0)


@triton.jit
def may_accept(place, noise, inputs, workspace, sizes):
    """Return whether the draft at a place may be accepted after truncation, as `probabilistic.decide` does before it.

    After top_p, p(x) is at most p(x) / top_p. The k largest tokens weigh k / n of the largest ones of n blocks at least. And
    a draft is left out if enough blocks have a more likely token.
    """
    terms = acceptance_terms(place, inputs, workspace, sizes)
    accepted = place.token >= 0
    if inputs.drafts.rates_ptr is not None:
        accepted = is_scheduled(place, noise.uniform, inputs.drafts)
    elif terms.p.one_hot >= 0:
        accepted = accepts(terms, place, noise.uniform, inputs.drafts)
    else:
        top_k, top_p, min_p = load_limits(inputs.limits, place.request, sizes)
        block_max, _ = load_statistics(target_statistics(workspace, place.request, place.offset, sizes), True, sizes)
        shares = tl.exp(scaled(block_max, terms.p.row_max, place.temperature))
        shares = tl.where((shares >= min_p) & (block_max > -INFINITY), shares / terms.p.sumexp, 0.0)
        share = tl.exp(terms.log_p)
        is_above = (shares > share * (1 + ERROR)).to(tl.int32)
        above, mass_above = tl.reduce((is_above, tl.where(is_above == 1, shares, 0.0)), 0, add_both)
        blocks, mass = tl.reduce(((shares > 0).to(tl.int32), shares), 0, add_both)
        least = mass * tl.minimum(top_k.to(tl.float32) / tl.maximum(blocks, 1).to(tl.float32), 1.0)
        least = tl.where((top_k < sizes.vocab_size) | (min_p > 0), tl.minimum(least, 1.0), 1.0)
        log_kept = tl.log(tl.minimum(top_p, 1.0) * least)
        is_kept = (above == 0) | ((above < top_k) & (mass_above < top_p * (1 + ERROR)))
        is_kept &= share * terms.p.sumexp >= min_p * (1 - ERROR)
        is_likely = tl.log(noise.uniform) <= terms.log_p - terms.log_q - log_kept + ERROR
        accepted = accepted & is_possible(terms) & is_kept & is_likely
    return accepted, terms.p.row_max, place.token


@triton.jit
def reached(level, block_max, weights):
    """Return how many blocks reach a level, and what their largest tokens weigh."""
    reach = block_max >= level
    return tl.reduce((reach.to(tl.int32), tl.where(reach, weights, 0.0)), 0, add_both)


@triton.jit
def choose_level(block_max, weights, row_max, floor, temperature, count, mass, most):
    """Return the highest level that `count` blocks or a `mass` reach, if at most `most` blocks reach it.

    Else the lowest that at most so many reach; and how many reach it, and their mass. If more blocks than that have a token
    as likely as the first, it is infinite. The floor comes first: with few blocks above it, no token need be left out.
    """
    chosen, chosen_blocks, chosen_mass = INFINITY, tl.full([], 0, tl.int32), 0.0
    has_enough = tl.full([], False, tl.int1)
    high, low, level = 0.0, 1.0, floor  # the square roots of how deep levels lie that are not enough, and that are
    step = 0
    while step <= STEPS:
        blocks, found = reached(level, block_max, weights)
        is_enough, is_beyond = (blocks >= count) | (found >= mass), blocks > most
        if (is_beyond == 0) & (is_enough | (has_enough == 0)):
            chosen, chosen_blocks, chosen_mass, has_enough = level, blocks, found, is_enough
        middle = (low + high) / 2
        if step > 0:
            low, high = tl.where(is_enough | is_beyond, middle, low), tl.where(is_enough | is_beyond, high, middle)
            middle = (low + high) / 2
        level = tl.maximum(row_max - DEPTH * middle * middle * temperature, floor)
        step = tl.where((step == 0) & (is_enough == 0) & (is_beyond == 0), STEPS, step) + 1  # the floor will do
    return chosen, chosen_blocks, chosen_mass


@triton.jit
def list_groups(level, num_blocks, row, block_max, list_ptr, sizes):
    """List the groups of tokens that reach a level: the first token of each; return how many there are.

    Beyond the first `CANDIDATES` they are only counted.
    """
    GROUPS: tl.constexpr = AT_ONCE * BLOCK_SIZE // GROUP
    reach = (block_max >= level).to(tl.int32)
    blocks, places = tl.arange(0, sizes.MAX_BLOCKS), tl.cumsum(reach, 0) - reach
    places = tl.where(reach == 1, places, -1)
    found = tl.full([], 0, tl.int32)
    for first in range(0, num_blocks, AT_ONCE):
        is_it = places[:, None] == first + tl.arange(0, AT_ONCE)[None, :]
        tile = tl.min(tl.where(is_it, blocks[:, None], sizes.num_blocks), 0) * BLOCK_SIZE
        logits = load_logits(row, tile[:, None] + tl.arange(0, BLOCK_SIZE)[None, :], True)
        is_listed = (tl.max(tl.reshape(logits, [GROUPS, GROUP]), 1) >= level).to(tl.int32)
        group_ids = tl.reshape(tile[:, None] + tl.arange(0, BLOCK_SIZE // GROUP)[None, :] * GROUP, [GROUPS])
        slots = found + tl.cumsum(is_listed, 0) - is_listed
        tl.store(list_ptr + slots, group_ids, mask=(is_listed == 1) & (slots < CANDIDATES))
        found += tl.sum(is_listed, 0)
    tl.debug_barrier()  # the list is read by other threads than wrote it
    return found


@triton.jit
def list_candidates(level, num_groups, row, list_ptr):
    """List the tokens that reach a level, given the groups they are in: their keys and ids; return how many there are."""
    slots = tl.arange(0, CANDIDATES)
    group_ids = tl.load(list_ptr + slots, mask=slots < num_groups, other=LAST_TOKEN - GROUP)
    token_ids = group_ids[:, None] + tl.arange(0, GROUP)[None, :]
    logits = load_logits(row, token_ids, True)
    is_candidate = tl.reshape((logits >= level).to(tl.int32), [CANDIDATES * GROUP])
    places = tl.cumsum(is_candidate, 0) - is_candidate
    is_listed = (is_candidate == 1) & (places < CANDIDATES)
    candidates_ptr = list_ptr + CANDIDATES
    tl.store(candidates_ptr + places, tl.reshape(key_of(logits), [CANDIDATES * GROUP]), mask=is_listed)
    tl.store(candidates_ptr + CANDIDATES + places, tl.reshape(token_ids, [CANDIDATES * GROUP]), mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_candidate, 0)


@triton.jit
def load_candidates(list_ptr, first, found, COUNT: tl.constexpr):
    """Return the logits and ids of `COUNT` listed tokens, and numbers of which the largest is the first token in order."""
    slots = first + tl.arange(0, COUNT)
    keys = tl.load(list_ptr + CANDIDATES + slots, mask=slots < found, other=-ANY_NUMBER - 1)
    token_ids = tl.load(list_ptr + 2 * CANDIDATES + slots, mask=slots < found, other=LAST_TOKEN)
    logits = tl.where(slots < found, logit_of(keys), -INFINITY)
    return logits, token_ids, (keys.to(tl.int64) << 32) | (token_ids ^ LAST_TOKEN)


@triton.jit
def rank_candidates(order, list_ptr, found, row_max, scale):
    """Return how many candidates come before each, and what these weigh, given their numbers in order."""
    rank = tl.zeros([TOGETHER, CANDIDATES], tl.int32)
    mass = tl.zeros([TOGETHER, CANDIDATES], tl.float32)
    for first in range(0, tl.minimum(found, CANDIDATES), TOGETHER):
        logits, _, others = load_candidates(list_ptr, first, found, TOGETHER)
        is_before = others[:, None] > order[None, :]
        rank += is_before.to(tl.int32)
        mass += tl.where(is_before, tl.exp2((logits - row_max) * scale)[:, None], 0.0)
    return tl.sum(rank, 0), tl.sum(mass, 0)


@triton.jit
def bounds_on_mass(kept, missing, unseen, level_weight, total, limits, sizes):
    """Return what the tokens that top-k and min-p keep weigh at least and at most.

    Given what those among the candidates weigh, how many are missing to k, and what so many of the others weigh at least
    if none is left out by min-p.
    """
    top_k, _, min_p = limits
    lower, upper = kept, kept
    if missing > 0:
        lower = kept + unseen
        upper = tl.minimum(total, kept + missing.to(tl.float32) * level_weight)
        if (top_k == sizes.vocab_size) & (min_p == 0):
            lower = total
    return lower, tl.maximum(lower, upper)


@triton.jit
def cut_candidates(list_ptr, found, level, is_floor, unseen, row_max, total, temperature, limits, sizes):
    """Return the last candidate that is kept, a number in their order, and whether that is all that is kept."""
    top_k, top_p, min_p = limits
    scale = base_2_scale(temperature)
    logits, _, order = load_candidates(list_ptr, 0, found, CANDIDATES)
    rank, mass_before = rank_candidates(order, list_ptr, found, row_max, scale)
    passed = (logits > -INFINITY) & (scaled(logits, row_max, temperature) >= tl.log(min_p))
    in_top_k = passed & (rank < top_k)
    weights = tl.where(in_top_k, tl.exp2((logits - row_max) * scale), 0.0)
    number, mass = tl.reduce((passed.to(tl.int32), weights), 0, add_both)
    is_complete = is_floor | (number < found) | (number >= top_k)
    missing = tl.where(is_complete, 0, top_k - number)
    level_weight = tl.exp2((level - row_max) * scale)
    lower, upper = bounds_on_mass(mass, missing, unseen, level_weight, total, limits, sizes)
    kept = in_top_k & ((mass_before < top_p * lower) | (rank == 0))
    kept_at_most = in_top_k & ((mass_before < top_p * upper) | (rank == 0))
    num_kept, most = tl.reduce((kept.to(tl.int32), kept_at_most.to(tl.int32)), 0, add_both)
    is_known = num_kept == most
    is_all = is_complete | (num_kept < number) | (mass >= top_p * upper)
    last = tl.min(tl.where(kept, order, 2**63 - 1), 0)
    return last, (found <= CANDIDATES) & (found > 0) & is_known & is_all


@triton.jit
def store_kept_candidates(statistics_ptr, last, list_ptr, found, temperature, sizes):
    """Replace the statistics of a row's blocks by those of the candidates up to the last that is kept."""
    scale = base_2_scale(temperature)
    logits, token_ids, order = load_candidates(list_ptr, 0, found, CANDIDATES)
    blocks = token_ids // BLOCK_SIZE
    sums = tl.zeros([TOGETHER, CANDIDATES], tl.float32)
    before = tl.zeros([TOGETHER, CANDIDATES], tl.int32)
    for first in range(0, found, TOGETHER):
        other_logits, others_ids, others = load_candidates(list_ptr, first, found, TOGETHER)
        is_with = ((others_ids // BLOCK_SIZE)[:, None] == blocks[None, :]) & (others >= last)[:, None]
        sums += tl.where(is_with, tl.exp2((other_logits[:, None] - logits[None, :]) * scale), 0.0)
        before += (is_with & (others[:, None] > order[None, :])).to(tl.int32)
    every_block = tl.arange(0, sizes.MAX_BLOCKS)
    inside = every_block < sizes.num_blocks
    tl.store(statistics_ptr + every_block * 2, tl.full([sizes.MAX_BLOCKS], -INFINITY, tl.float32), mask=inside)
    tl.store(statistics_ptr + every_block * 2 + 1, tl.zeros([sizes.MAX_BLOCKS], tl.float32), mask=inside)
    tl.debug_barrier()  # else another thread might store what is kept of a block first
    is_first = (order >= last) & (tl.sum(before, 0) == 0)  # in its block, whose maximum it is
    tl.store(statistics_ptr + blocks * 2, logits, mask=is_first)
    tl.store(statistics_ptr + blocks * 2 + 1, tl.sum(sums, 0), mask=is_first)


@triton.jit
def cut(row, statistics, p, statistics_ptr, list_ptr, temperature, limits, sizes):
    """Return the cutoff of a row with a finite maximum, where T > 0; leave the statistics of what is kept."""
    top_k, top_p, min_p = limits
    block_max, row_max, total = statistics[0], p.row_max, p.sumexp
    weights = tl.where(block_max > -INFINITY, tl.exp(scaled(block_max, row_max, temperature)), 0.0)
    has_k, has_p = top_k < sizes.vocab_size, top_p < 1
    # A little below the least logit that min-p keeps.
    floor = tl.maximum(row_max + tl.log(min_p) * temperature * 1.0001 - tl.abs(row_max) * 1e-5, -LARGEST)
    resolved, attempt = tl.full([], False, tl.int1), 0
    logit, token = row_max, tl.full([], LAST_TOKEN, tl.int32)
    while (resolved == 0) & (attempt < 2):
        is_by_count = has_k & ((attempt == 1) | (has_p == 0))
        count = tl.where(is_by_count, top_k, ANY_NUMBER)
        mass = tl.where(has_p & (has_k == 0), top_p * total, INFINITY)
        most = tl.where((attempt == 1) | (has_p == 0), MORE_BLOCKS, FEW_BLOCKS)
        level, blocks, found_mass = choose_level(block_max, weights, row_max, floor, temperature, count, mass, most)
        num_groups = list_groups(level, blocks, row, block_max, list_ptr, sizes)
        found = list_candidates(level, num_groups, row, list_ptr)
        found = tl.where(num_groups > CANDIDATES, CANDIDATES + 1, found)
        unseen = 0.0
        if has_k & (min_p == 0) & (found < top_k):
            missing = blocks + top_k - found
            _, _, mass = choose_level(block_max, weights, row_max, floor, temperature, ANY_NUMBER, INFINITY, missing)
            unseen = tl.maximum(mass - found_mass, 0.0)
        last, resolved = cut_candidates(
            list_ptr, found, level, level <= floor, unseen, row_max, total, temperature, limits, sizes
        )
        if resolved:
            logit, token = logit_of((last >> 32).to(tl.int32)), (last & LAST_TOKEN).to(tl.int32) ^ LAST_TOKEN
            store_kept_candidates(statistics_ptr, last, list_ptr, found, temperature, sizes)
        attempt += 1
    if resolved == 0:
        logit, token = wide_cutoff(row, row_max, total, temperature, limits, sizes)
        store_kept(statistics_ptr, logit, token, row, temperature, sizes)
    return logit, token


@triton.jit
def place_of(index, inputs, sizes):
    """Return which row a program has, by request and offset, and whether it is a draft row: those follow the target rows."""
    num_rows = sizes.num_draft_tokens + 1
    request, offset = index // num_rows, (index % num_rows).to(tl.int32)
    of_draft = False
    if inputs.draft.ptr is not None:
        draft = index - sizes.batch * num_rows
        of_draft = draft >= 0
        request = tl.where(of_draft, draft // sizes.num_draft_tokens, request)
        offset = tl.where(of_draft, (draft % sizes.num_draft_tokens).to(tl.int32), offset)
    return request, offset, of_draft


@triton.jit
def truncate_row(row, index, temperature, limits, workspace, sizes):
    """Return the cutoff of a row, and leave the statistics of what is kept."""
    statistics_ptr = workspace.statistics_ptr + index * sizes.num_blocks * 2
    statistics = load_statistics(statistics_ptr, True, sizes)
    statistics = recompute_nonfinite(statistics, row, temperature, sizes)
    p = combine(statistics, row, temperature, sizes)
    logit, token = p.row_max, p.one_hot
    if token < 0:
        list_ptr = workspace.kept_ptr + index * LISTS * CANDIDATES
        logit, token = cut(row, statistics, p, statistics_ptr, list_ptr, temperature, limits, sizes)
    return logit, token


@triton.jit
def given_cutoff(row, request, offset, inputs, sizes):
    """Return the cutoff that came with a draft, and whether it can be used: its logsumexp, too."""
    drafts = inputs.drafts
    place = request * drafts.cutoff_stride_request + offset * drafts.cutoff_stride_offset
    token = tl.load(drafts.cutoff_ptr + place)
    logsumexp = load_logsumexp(drafts, request, offset, True)
    leaves_out = (token >= 0) & (token < sizes.vocab_size)
    token = tl.where(leaves_out, token, LAST_TOKEN).to(tl.int32)
    logit = tl.where(leaves_out, load_logit(row, token, leaves_out), -INFINITY)
    return logit, token, is_trusted(logsumexp)


@triton.jit
def truncate_kernel(inputs, workspace, sizes, tuning):
    """Truncate one row, if it was read and anything truncates it."""
    index = tl.program_id(0).to(tl.int64)
    request, offset, of_draft = place_of(index, inputs, sizes)
    temperature = load_temperature(inputs.requests, request)
    num_drafts = tl.full([], 0, tl.int32)
    if inputs.drafts.ids_ptr is not None:
        num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    limits = load_limits(inputs.limits, request, sizes)
    row = row_at(inputs.target, request, offset, sizes)
    is_read = offset <= num_drafts
    if inputs.draft.ptr is not None:
        if of_draft:
            limits = load_limits(inputs.draft_limits, request, sizes)
            is_read = offset < num_drafts
    await_launch(tuning.OVERLAPS)
    admit_next_launch(tuning.OVERLAPS)
    if tuning.POSTED:
        is_read &= offset <= load_stop(workspace.state_ptr, request, sizes)
    top_k, top_p, min_p = limits
    is_truncated = is_read & (temperature > 0) & ((top_k < sizes.vocab_size) | (top_p < 1) | (min_p > 0))
    logit, token = -INFINITY, tl.full([], LAST_TOKEN, tl.int32)
    if inputs.drafts.cutoff_ptr is not None:
        if of_draft & is_truncated:
            draft_row = row_at(inputs.draft, request, offset, sizes)
            logit, token, is_known = given_cutoff(draft_row, request, offset, inputs, sizes)
            is_truncated = is_known == 0
    if is_truncated:
        if inputs.draft.ptr is None:
            logit, token = truncate_row(row, index, temperature, limits, workspace, sizes)
        else:
            draft_row = row_at(inputs.draft, request, offset, sizes)
            if tuning.ALIKE:  # so the code is there once, which is faster
                row = Row(tl.where(of_draft, draft_row.ptr, row.ptr), inputs.target.stride_token, sizes.vocab_size)
                logit, token = truncate_row(row, index, temperature, limits, workspace, sizes)
            elif of_draft:
                logit, token = truncate_row(draft_row, index, temperature, limits, workspace, sizes)
            else:
                logit, token = truncate_row(row, index, temperature, limits, workspace, sizes)
    tl.store(workspace.cutoffs_ptr + index * 2, logit)
    tl.store(workspace.cutoffs_ptr + index * 2 + 1, token.to(tl.float32, bitcast=True))
