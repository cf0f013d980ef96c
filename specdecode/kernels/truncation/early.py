"""Decisions about truncated drafts while rows are read, before any cutoff is known, in Triton.

The statistics of its blocks bound the kept mass of a row, and so p'(x) / q'(x). If a draft is surely rejected, later rows
need not be read; if it is surely accepted, its own rows need not be truncated.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import add_both
from specdecode.kernels.first_rejected import publish_acceptance
from specdecode.kernels.logprobs import normalizer_of
from specdecode.kernels.probabilistic import acceptance_terms, accepts, is_possible
from specdecode.kernels.request import load_draft_limits, load_limits
from specdecode.kernels.rows import scaled
from specdecode.kernels.statistics import load_draft_statistics, load_target_statistics
from specdecode.kernels.synthetic import is_scheduled
from specdecode.kernels.values import INFINITY

ERROR = tl.constexpr(1e-3)
"""An upper bound of the rounding error of decisions before truncation."""


@triton.jit
def weights_of_maxima(block_max, row_max, temperature):
    """Return the weights of the blocks' largest tokens, relative to the row's largest."""
    return tl.where(block_max > -INFINITY, tl.exp(scaled(block_max, row_max, temperature)), 0.0)


@triton.jit
def sum_rounded_down(masses):
    """Return the sum of masses of at most 1 each, rounded down: it is computed in integers."""
    ONE: tl.constexpr = 2**30 // masses.shape[0]  # no sum overflows int32
    return tl.sum((masses * ONE).to(tl.int32), 0).to(tl.float32) * (1 / ONE)


@triton.jit
def log_least_kept(block_max, row_max, sumexp, temperature, limits, sizes):
    """Return the logarithm of a lower bound of a row's kept mass.

    The k likeliest tokens weigh at least as much as the largest tokens of any k blocks. Top-p keeps at least its share of
    this mass, or of the whole row.
    """
    top_k, top_p, min_p = limits
    least = 1.0
    if (top_k < sizes.vocab_size) | (min_p > 0):
        sorted_max = tl.sort(block_max, descending=True)
        weights = weights_of_maxima(sorted_max, row_max, temperature)
        is_kept = (tl.arange(0, sizes.MAX_BLOCKS) < top_k) & (weights >= min_p * (1 + ERROR))  # surely kept by min-p
        mass = sum_rounded_down(tl.where(is_kept, weights, 0.0))
        least = tl.maximum(mass, 1.0) / sumexp  # the likeliest token is always kept
    return tl.log(tl.minimum(top_p, 1.0) * tl.minimum(least, 1.0))


@triton.jit
def is_surely_kept(log_share, log_sum, limits, sizes):
    """Return whether a token is surely kept, given its log-probability before truncation.

    Fewer than 1 / p(x) tokens are more likely than x, and all others together weigh 1 - p(x).
    """
    top_k, top_p, min_p = limits
    share = tl.exp(log_share) * (1 - ERROR)
    in_top_k = (top_k == sizes.vocab_size) | (share * top_k.to(tl.float32) >= 1)
    return in_top_k & (share > 1 - top_p + ERROR) & (share * tl.exp(log_sum) >= min_p)


@triton.jit
def may_be_kept(log_share, block_max, p, temperature, limits):
    """Return whether a token may be kept; not if the largest tokens of the blocks alone exclude it."""
    top_k, top_p, min_p = limits
    shares = weights_of_maxima(block_max, p.row_max, temperature) / p.sumexp
    share = tl.exp(log_share)
    is_above = shares > share * (1 + ERROR)
    above, mass_above = tl.reduce((is_above.to(tl.int32), tl.where(is_above, shares, 0.0)), 0, add_both)
    is_kept = (above == 0) | ((above < top_k) & (mass_above < top_p * (1 + ERROR)))
    return is_kept & (share * p.sumexp >= min_p * (1 - ERROR))


@triton.jit
def may_accept(context, noise, inputs, workspace, sizes):
    """Return whether a row's draft may be accepted after truncation, in the form of `probabilistic.decide`.

    The kept masses of both rows are bounded, and so is p'(x) / q'(x). A draft that is surely accepted is published, so that
    its rows are not truncated.
    """
    terms = acceptance_terms(context, inputs, workspace, sizes)
    accepted, is_sure = context.token >= 0, context.token >= 0
    temperature = context.temperature
    if inputs.drafts.rates_ptr is not None:
        accepted = is_scheduled(context, noise.uniform, inputs.drafts)
        is_sure = accepted
    elif (terms.p.point_mass_token >= 0) | (accepted == 0):
        accepted = accepts(terms, context, noise.uniform, inputs.drafts)
        is_sure = accepted & (temperature == 0)
    else:
        limits = load_limits(inputs.limits, context.request, sizes)
        block_max, _ = load_target_statistics(context, workspace, sizes)
        log_ratio = terms.log_p - terms.log_q - tl.log(noise.uniform)
        log_kept = log_least_kept(block_max, terms.p.row_max, terms.p.sumexp, temperature, limits, sizes)
        accepted = is_possible(terms) & (log_ratio >= log_kept - ERROR)
        accepted &= may_be_kept(terms.log_p, block_max, terms.p, temperature, limits)
        is_sure = accepted & is_surely_kept(terms.log_p, tl.log(terms.p.sumexp), limits, sizes)
        log_draft_kept = 0.0
        if inputs.draft.ptr is not None:
            limits = load_draft_limits(inputs, context.request, sizes)
            is_sure &= is_surely_kept(terms.log_q, terms.draft_normalizer.log_sum, limits, sizes)
            if inputs.drafts.logsumexp_ptr is None:
                if is_sure:
                    block_max, _ = load_draft_statistics(context, True, workspace, sizes)
                    draft_max, draft_sumexp = terms.draft_normalizer.row_max, tl.exp(terms.draft_normalizer.log_sum)
                    log_draft_kept = log_least_kept(block_max, draft_max, draft_sumexp, temperature, limits, sizes)
            else:  # a given logsumexp tells the kept mass, not the kept tokens
                is_sure = tl.full([], False, tl.int1)
        is_sure &= log_ratio + log_draft_kept >= ERROR
    if is_sure & (terms.p.row_max > -INFINITY):  # an empty row must still be marked in the output
        publish_acceptance(workspace.state_ptr, context, sizes)
    return accepted, normalizer_of(terms.p), context.token
