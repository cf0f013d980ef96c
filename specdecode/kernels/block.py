"""Block verification in Triton: accept the longest block of drafts that passes.

    c_{i+1} = min(1, c_i p(x_i) / q(x_i))    h_i = A_i / (A_i + 1 - c_i)    A_i = sum max(0, c_i p - q)

The number of accepted drafts is the largest i with eta_i <= h_i, where h_i <= c_i <= 1. Most i are decided without reading
logits: i is rejected if eta_i > c_i, and accepted if c_i = 1, or if no draft follows and eta_i <= c_i; and A_i is known if
p or q is a point mass. An undecided i is *open*. It matters only if it is larger than every accepted i.

1. `ratio_kernel`, a program for each draft: p(x) / q(x) from the statistics of both rows, and its row's `Residual`.
2. `decide_kernel`, a program for each number of drafts: decides without reading, or queues the residual.
3. `sum_kernel`: programs share the blocks of all queued residuals, 4 KB (bfloat16) a block for both rows.
4. `decide_block`, at the start of the launch that emits: makes the open decisions from the sums. `probabilistic.draw`
   then draws the token after the accepted drafts.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import combine, logprob
from specdecode.kernels.first_rejected import load_empty, load_first_rejected
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.logprobs import load_raw_statistics, normalizer_of, store_draft_logprob
from specdecode.kernels.philox import ACCEPT, uniform
from specdecode.kernels.probabilistic import acceptance_terms, is_possible
from specdecode.kernels.request import count_drafts, load_draft_ids, load_key, load_temperature, locate_program
from specdecode.kernels.residual import (
    NONE,
    NUM_QUEUED,
    ROW,
    load_both,
    load_queued_residual,
    load_residual_sums,
    one_minus_exp2,
    queue_residual,
    residual_sums,
    residual_sums_at,
)
from specdecode.kernels.rows import (
    LOG2_E,
    both_rows_at,
    draft_row_at,
    load_logit,
    logits_of,
    row_index,
    target_row_at,
)
from specdecode.kernels.statistics import at, load_target_statistics, sum_in_order
from specdecode.kernels.values import INFINITY, Residual, RowContext
from specdecode.kernels.vocabulary import NO_ID

LOG_RATIO, ROW_MAX, DRAFT_MAX, LOG_SUM_RATIO, SUBTRACTED, LOG_SUM, SHARED = (tl.constexpr(field) for field in range(7))
LOG_C, LEAST, DECISION, TERMS = (tl.constexpr(field) for field in range(7, 11))
"""The fields of the workspace's terms at each offset i of a request: of the draft there, log p(x) / q(x); of the row, the
four fields of the `Residual`, log(sum of p), and `shared_logprob`; of the i drafts before it, log c_i, the least residual
mass at which they are accepted, and the decision, `OPEN` if it needs block sums."""

REJECTED, OPEN, ACCEPTED = tl.constexpr(0.0), tl.constexpr(1.0), tl.constexpr(2.0)


@triton.jit
def terms_at(workspace, request, offset, sizes):
    """Return a pointer to the terms of an offset."""
    return workspace.terms_ptr + row_index(request, offset, False, sizes) * TERMS


@triton.jit
def shared_logprob(context, terms, inputs, workspace, sizes):
    """Return log sum min(p, q) if p or q is a point mass: the log-probability of its token in the other distribution."""
    shared = 0.0
    _, _, p, draft_normalizer, residual = terms
    if p.point_mass_token >= 0:
        logit = 0.0
        if inputs.draft.ptr is not None:
            draft_row = draft_row_at(context, inputs, workspace, sizes)
            logit = load_logit(draft_row, p.point_mass_token, draft_normalizer.point_mass_token < 0)
        shared = logprob(logit, p.point_mass_token, draft_normalizer, context.temperature)
    elif residual.subtracted >= 0:
        row = target_row_at(context, inputs, workspace, sizes)
        is_token = True
        if workspace.draft_id_of_token_ptr is not None:
            is_token = residual.subtracted != NO_ID
        logit = load_logit(row, residual.subtracted, is_token)
        shared = logprob(logit, residual.subtracted, normalizer_of(p), context.temperature)
        if workspace.draft_id_of_token_ptr is not None:
            shared = tl.where(is_token, shared, -INFINITY)
    return shared


@triton.jit
def store_terms(terms_ptr, terms, shared):
    """Store the fields from LOG_RATIO to SHARED of an offset."""
    row_max, draft_max, log_sum_ratio, subtracted = terms.residual
    log_ratio = tl.where(is_possible(terms), terms.log_p - terms.log_q, -INFINITY)
    tl.store(terms_ptr + LOG_RATIO, log_ratio)
    tl.store(terms_ptr + ROW_MAX, row_max)
    tl.store(terms_ptr + DRAFT_MAX, draft_max)
    tl.store(terms_ptr + LOG_SUM_RATIO, log_sum_ratio)
    tl.store(terms_ptr + SUBTRACTED, subtracted.to(tl.float32, bitcast=True))
    tl.store(terms_ptr + LOG_SUM, tl.log(terms.p.sumexp))
    tl.store(terms_ptr + SHARED, shared)


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
    """Return the smallest A / c = sum max(0, p - q / c) with eta <= A / (A + 1 - c): eta/c (1 - c) / (1 - eta)."""
    return tl.exp(log_uniform - log_c) * one_minus_exp2(log_c * LOG2_E) / one_minus_exp2(log_uniform * LOG2_E)


@triton.jit
def decide_without_reading(request, num_drafts, log_uniform, workspace, sizes):
    """Return the decision about each number of drafts without reading logits, [MAX_DRAFTS].

    Also, [MAX_DRAFTS] each: log c_i, the least residual mass for accepting (relative to p's maximum), and `SUBTRACTED`.
    """
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    terms_ptr = terms_at(workspace, request, counts, sizes)
    has_draft = counts < num_drafts
    is_count = counts <= num_drafts
    before = tl.where((counts > 0) & is_count, terms_ptr - TERMS, terms_ptr)
    log_ratios = tl.load(before + LOG_RATIO, mask=(counts > 0) & is_count, other=0.0)
    subtracted = tl.load(terms_ptr + SUBTRACTED, mask=has_draft, other=0.0).to(tl.int32, bitcast=True)
    shared = tl.load(terms_ptr + SHARED, mask=has_draft, other=0.0)
    log_sum = tl.load(terms_ptr + LOG_SUM, mask=has_draft, other=0.0)
    log_c = running_ratio(log_ratios, num_drafts, sizes)
    least = least_mass(log_uniform, log_c)
    # Where p is a point mass, nothing is subtracted from it; then c matters: A / c = 1 - q(token) / c.
    known_mass = one_minus_exp2((shared - tl.where(subtracted == NONE, log_c, 0.0)) * LOG2_E)
    decision = tl.where(known_mass >= least, ACCEPTED, REJECTED)
    decision = tl.where(subtracted == ROW, OPEN, decision)
    decision = tl.where((log_c == 0) | (has_draft == 0), ACCEPTED, decision)
    decision = tl.where((log_uniform <= log_c) & is_count, decision, REJECTED)
    return decision, log_c, least * tl.exp(log_sum), subtracted


@triton.jit
def undecided(decision, counts):
    """Return the largest number of drafts known to be accepted, and for each number 1 if it is larger and open, else 0."""
    accepted = tl.max(tl.where(decision == ACCEPTED, counts, 0), 0)
    return accepted, ((decision == OPEN) & (counts > accepted)).to(tl.int32)


@triton.jit
def ratio_kernel(inputs, workspace, sizes, config):
    """Store log p(x) / q(x) of the draft at one offset of a request, and its row's `Residual`."""
    request, offset = locate_program(sizes.num_draft_tokens, inputs.packing, sizes)
    token = load_draft_ids(inputs.drafts, request, offset, sizes)
    num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    temperature = load_temperature(inputs.requests, request)
    admit_next_launch(config.OVERLAPS)
    await_launch(config.OVERLAPS)
    if offset < num_drafts:
        context = RowContext(request, offset, token, load_key(inputs.requests, request), temperature)
        raw = load_raw_statistics(context, inputs, workspace, sizes)  # in flight while the terms are computed
        terms = acceptance_terms(context, inputs, workspace, sizes)
        store_terms(
            terms_at(workspace, request, offset, sizes), terms, shared_logprob(context, terms, inputs, workspace, sizes)
        )
        if workspace.logprobs_ptr is not None:
            store_draft_logprob(context, normalizer_of(terms.p), raw, inputs, workspace, sizes)


@triton.jit
def decide_kernel(inputs, workspace, sizes, config):
    """Decide about one number of drafts of a request; if the decision needs block sums, list the residual."""
    request, offset = locate_program(sizes.num_draft_tokens + 1, inputs.packing, sizes)
    num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    uniforms = uniform(load_key(inputs.requests, request), counts - 1, counts - 1, ACCEPT)
    log_uniform = tl.where(counts > 0, tl.log(uniforms), -INFINITY)  # the number 0 is always accepted
    admit_next_launch(config.OVERLAPS)
    await_launch(config.OVERLAPS)
    if offset <= num_drafts:
        decisions, log_c, least, subtracted = decide_without_reading(request, num_drafts, log_uniform, workspace, sizes)
        accepted, is_open = undecided(decisions, counts)
        terms_ptr = terms_at(workspace, request, offset, sizes)
        tl.store(terms_ptr + LOG_C, at(log_c, offset))
        tl.store(terms_ptr + LEAST, at(least, offset))
        tl.store(terms_ptr + DECISION, at(decisions, offset))
        if inputs.draft.ptr is not None:
            wanted = at(is_open, offset) == 1
            if config.SUMS:  # if nothing more is accepted, the token comes from this row
                wanted |= (offset == accepted) & (offset < num_drafts) & (at(subtracted, offset) == ROW)
            if wanted:
                queue_residual(request, offset, workspace)


@triton.jit
def load_residual(terms_ptr, log_c):
    """Return the `Residual` of max(0, p - q / c): log c is added to the ratio of max(0, p - q)."""
    row_max, draft_max = tl.load(terms_ptr + ROW_MAX), tl.load(terms_ptr + DRAFT_MAX)
    log_sum_ratio = tl.load(terms_ptr + LOG_SUM_RATIO) + log_c
    return Residual(row_max, draft_max, log_sum_ratio, tl.load(terms_ptr + SUBTRACTED).to(tl.int32, bitcast=True))


@triton.jit
def sum_kernel(inputs, workspace, sizes, config):
    """Sum `BLOCKS` blocks of a queued residual; a program takes several such shares if there are more than programs."""
    admit_next_launch(config.OVERLAPS)
    await_launch(config.OVERLAPS)
    chunks = tl.cdiv(sizes.num_blocks, config.BLOCKS)
    for share in range(tl.program_id(0), tl.load(workspace.state_ptr + NUM_QUEUED) * chunks, tl.num_programs(0)):
        request, offset = load_queued_residual(share // chunks, workspace, sizes)
        terms_ptr = terms_at(workspace, request, offset, sizes)
        residual = load_residual(terms_ptr, tl.load(terms_ptr + LOG_C))
        context = RowContext(request, offset, None, None, load_temperature(inputs.requests, request))
        blocks = share % chunks * config.BLOCKS + tl.arange(0, config.BLOCKS)
        rows = both_rows_at(context, inputs, workspace, sizes)
        target, draft = load_both(inputs, rows, blocks, config.BLOCK_N)
        sums = residual_sums(logits_of(target, rows[0], blocks, config.BLOCK_N), draft, residual, context.temperature)
        tl.store(residual_sums_at(workspace, request, offset, sizes) + blocks, sums, mask=blocks < sizes.num_blocks)


@triton.jit
def decide_block(request, num_drafts, inputs, workspace, sizes):
    """Return the number of accepted drafts of a request, and whether a row up to that offset has no finite logit."""
    counts = tl.arange(0, sizes.MAX_DRAFTS)
    terms_ptr = terms_at(workspace, request, counts, sizes)
    decision = tl.load(terms_ptr + DECISION, mask=counts <= num_drafts, other=REJECTED)
    row_max = tl.load(terms_ptr + ROW_MAX, mask=counts < num_drafts, other=0.0)
    accepted, is_open = undecided(decision, counts)
    if inputs.draft.ptr is not None:
        for offset in range(accepted + 1, num_drafts):
            if at(is_open, offset) == 1:
                least = tl.load(terms_at(workspace, request, offset, sizes) + LEAST)
                mass = sum_in_order(load_residual_sums(workspace, request, offset, sizes))
                accepted = tl.where(mass >= least, offset, accepted)
    return accepted, tl.max(tl.where((counts <= accepted) & (row_max == -INFINITY), 1, 0), 0) == 1


@triton.jit
def find_first_rejected(request, num_drafts, inputs, workspace, sizes, config):
    """Return a request's first rejected row, and whether a row up to it has no finite logit; its drafts are decided."""
    if config.DECIDES_BLOCK:
        return decide_block(request, num_drafts, inputs, workspace, sizes)
    else:
        first_rejected = load_first_rejected(workspace.state_ptr, request, sizes)
        return first_rejected, load_empty(workspace.state_ptr, request, sizes) <= first_rejected


@triton.jit
def decide(context, noise, inputs, workspace, sizes):
    """Return (False, the row's normalizer, the source of its token: max(0, p - q / c)); acceptance was decided earlier."""
    row = target_row_at(context, inputs, workspace, sizes)
    statistics = load_target_statistics(context, workspace, sizes)
    residual = Residual(0.0, 0.0, 0.0, tl.full([], NONE, tl.int32))
    if context.token >= 0:
        terms_ptr = terms_at(workspace, context.request, context.offset, sizes)
        residual = load_residual(terms_ptr, tl.load(terms_ptr + LOG_C))
    p = combine(statistics, row, context.temperature, sizes)
    return False, normalizer_of(p), (p, residual)
