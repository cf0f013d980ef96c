"""Probabilistic in Triton: accept by likelihood ratio, draw from the residual after a rejection.

    the draft x is accepted iff u <= p(x) / q(x)        otherwise the token is drawn from max(0, p - q)

`decide` decides from the statistics and one logit of each row. `draw` draws the token after a rejection from the residual
(`residual`), and the token after all drafts from p. If p or q is a point mass (greedy, a deterministic drafter, an
infinite logit), no search is needed: p without one token differs from p in one block.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import combine, combine_both, logprob
from specdecode.kernels.logprobs import normalizer_of
from specdecode.kernels.philox import exponential
from specdecode.kernels.request import is_trusted, load_logsumexp
from specdecode.kernels.residual import (
    NONE,
    ROW,
    block_sums_without,
    select_residual_block,
    select_summed_block,
    shortfall,
)
from specdecode.kernels.rows import (
    base_2_scale,
    draft_row_at,
    load_logit,
    load_logits,
    own_draft_row_at,
    target_row_at,
    tokens_of,
)
from specdecode.kernels.selection import select_block, select_token, token_weights
from specdecode.kernels.statistics import load_draft_statistics, load_target_statistics
from specdecode.kernels.synthetic import is_scheduled
from specdecode.kernels.values import INFINITY, Normalizer, Residual, Terms
from specdecode.kernels.vocabulary import by_target, token_of


@triton.jit
def log_ratio(a, b):
    """Return log(a / b), with full relative precision where a and b nearly agree."""
    x = (a - b) / b
    near = x * (1 - x * (1 / 2 - x * (1 / 3 - x * (1 / 4))))
    return tl.where(tl.abs(x) < 1 / 64, near, tl.log(a / b))


@triton.jit
def acceptance_terms(context, inputs, workspace, sizes):
    """Return the `Terms` of a row's draft: the terms of its decision, and the residual.

    Without a draft nothing is subtracted from p. Without draft logits, q is the point mass on the draft.
    """
    request, offset, token, _, temperature = context
    has_draft_row = False
    # All loads come before the first use.
    row = target_row_at(context, inputs, workspace, sizes)
    statistics = load_target_statistics(context, workspace, sizes)
    logit = load_logit(row, token, token >= 0)
    if inputs.draft.ptr is not None:
        has_draft_row = (temperature > 0) & (token >= 0)
        draft_row = own_draft_row_at(context, inputs, workspace, sizes)
        draft_logit = load_logit(by_target(draft_row, workspace, sizes), token, has_draft_row)
        summarised = has_draft_row
        if inputs.drafts.logsumexp_ptr is not None:
            logsumexp = load_logsumexp(inputs.drafts, request, offset, has_draft_row)
            summarised = tl.where(is_trusted(logsumexp), False, summarised)
        summary = load_draft_statistics(context, summarised, workspace, sizes)

    if inputs.draft.ptr is not None and inputs.drafts.logsumexp_ptr is None:
        p, q = combine_both(statistics, summary, row, draft_row, has_draft_row, temperature, sizes)
    else:
        p = combine(statistics, row, temperature, sizes)
    normalizer = normalizer_of(p)
    log_sum = normalizer.log_sum
    log_p = logprob(logit, token, normalizer, temperature)

    log_q, draft_max, draft_log_sum, log_sum_ratio = 0.0, 0.0, 0.0, 0.0
    draft_point_mass = token  # without draft logits q is the point mass on the draft; without a draft -1, which is NONE
    if inputs.draft.ptr is not None:
        if has_draft_row:
            draft_point_mass = tl.full([], -1, tl.int32)
            if inputs.drafts.logsumexp_ptr is not None:  # relative to a maximum of 0
                draft_log_sum, log_sum_ratio = logsumexp, logsumexp - log_sum
            if summarised:
                if inputs.drafts.logsumexp_ptr is not None:
                    q = combine(summary, draft_row, temperature, sizes)
                draft_max, draft_point_mass = q.row_max, token_of(q.point_mass_token, inputs, workspace, sizes)
                draft_log_sum, log_sum_ratio = tl.log(q.sumexp), log_ratio(q.sumexp, p.sumexp)
            log_q = logprob(draft_logit, token, Normalizer(draft_max, draft_log_sum, draft_point_mass), temperature)
    subtracted = tl.where((draft_point_mass < 0) & (token >= 0), ROW, draft_point_mass)
    subtracted = tl.where(p.point_mass_token >= 0, NONE, subtracted)
    residual = Residual(p.row_max, draft_max, log_sum_ratio, subtracted)
    return Terms(log_p, log_q, p, Normalizer(draft_max, draft_log_sum, draft_point_mass), residual)


@triton.jit
def is_possible(terms):
    """Return whether the draft is possible under both models."""
    return (terms.log_p > -INFINITY) & (terms.log_q > -INFINITY)


@triton.jit
def accepts(terms, context, uniform, drafts):
    """Return whether a row's draft is accepted: u <= p(x) / q(x), or by a schedule."""
    if drafts.rates_ptr is None:
        return (context.token >= 0) & is_possible(terms) & (tl.log(uniform) <= terms.log_p - terms.log_q)
    else:
        return is_scheduled(context, uniform, drafts)


@triton.jit
def draw(context, noise, source, inputs, workspace, sizes, config):
    """Draw the recovered or bonus token at a context: from the residual, or from p if the residual rounds to nothing."""
    p, residual = source
    row = target_row_at(context, inputs, workspace, sizes)
    block = tl.full([], -1, tl.int32)
    token, block_sums, subtracted = p.point_mass_token, p.block_sums, residual.subtracted
    if inputs.draft.ptr is not None:
        draft_row = draft_row_at(context, inputs, workspace, sizes)
        rows = row, draft_row
        if subtracted == ROW:
            if config.SUMS:
                block = select_summed_block(context, noise.exponentials, workspace, sizes)
            else:
                block = select_residual_block(context, noise.exponentials, source, rows, inputs, sizes, config)
            if block < 0:
                subtracted = tl.full([], NONE, tl.int32)
    if subtracted >= 0:
        without = block_sums_without(subtracted, p, row, context.temperature, inputs, sizes)
        if tl.sum(without, 0) > 0:
            block_sums = without
        else:
            subtracted = tl.full([], NONE, tl.int32)
    if token < 0:
        if block < 0:
            block = select_block(block_sums, noise.exponentials)
        token_ids = tokens_of(block)
        target = load_logits(row, token_ids, True)
        if inputs.draft.ptr is not None:
            draft = load_logits(draft_row, token_ids, subtracted == ROW)
        token_exponentials = exponential(context.key, context.offset, token_ids, inputs.requests.token_domain)
        weights = tl.where(token_ids == subtracted, 0.0, token_weights(target, p.row_max, context.temperature))
        if inputs.draft.ptr is not None:
            if subtracted == ROW:
                left = shortfall(target, draft, residual, base_2_scale(context.temperature))
                weights = tl.where(left > 0, weights * left, 0.0)
        token = select_token(weights, token_exponentials, block)
    return tl.minimum(token, sizes.vocab_size - 1).to(tl.int64)


@triton.jit
def decide(context, noise, inputs, workspace, sizes):
    """Return (is the row's draft accepted, the row's normalizer, the source of the token after a rejection)."""
    terms = acceptance_terms(context, inputs, workspace, sizes)
    accepted = accepts(terms, context, noise.uniform, inputs.drafts)
    return accepted, normalizer_of(terms.p), (terms.p, terms.residual)
