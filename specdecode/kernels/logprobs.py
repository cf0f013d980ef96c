"""Log-probabilities of emitted tokens in Triton.

    processed: log p'(y) = (l_y - M) / T - log sumexp        raw: log p(y) = l_y - M - log sum exp(l - M)

The program that decides about a draft, or draws a token, has the distribution of the row, so the processed
log-probability needs only one more logit. No launch is added: a decision in an earlier launch stores the draft's
log-probability in the output, and the launch that emits stores the last token's, and NaN after it.

Raw log-probabilities need sums of exponentials at temperature 1. The launch that reads stores them beside the other
statistics: 8 bytes for each block of a target row, with the maximum repeated, because truncation replaces the other
statistics. If T is 1 and rows are neither truncated nor adjusted, raw and processed are the same. (To read the emitted rows
again afterwards would repeat most of the time of the first read in a large batch.)
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import combine_with_max, logprob
from specdecode.kernels.rows import load_logit, row_index, stored_target_row_at, target_row_at
from specdecode.kernels.statistics import load_statistics, raw_statistics
from specdecode.kernels.values import Normalizer


@triton.jit
def normalizer_of(p):
    """Return the normalizer of log-probabilities under a distribution."""
    return Normalizer(p.row_max, tl.log(p.sumexp), p.point_mass_token)


@triton.jit
def load_raw_statistics(context, inputs, workspace, sizes):
    """Return the raw statistics (T = 1) of the target row at a context, if raw log-probabilities are requested."""
    if workspace.raw_statistics_ptr is None:
        return 0.0, 0.0
    else:
        pointer = raw_statistics(workspace, context.request, context.offset, sizes)
        return load_statistics(pointer, differs_from_raw(context, inputs, workspace), sizes)


@triton.jit
def differs_from_raw(context, inputs, workspace):
    """Return whether a row's distribution may differ from softmax(logits): by temperature, truncation or adjustments."""
    differs = True
    if workspace.cutoffs_ptr is None and not inputs.adjustments.EXIST:
        differs = context.temperature != 1
    return differs


@triton.jit
def requested_normalizer(context, normalizer, raw, inputs, workspace, sizes):
    """Return the normalizer of the requested log-probabilities: `normalizer`, or the normalizer of the `raw` statistics."""
    if workspace.raw_statistics_ptr is not None:
        if differs_from_raw(context, inputs, workspace):
            row = stored_target_row_at(context.request, context.offset, inputs)
            row_max, one = normalizer.row_max, tl.full([], 1.0, tl.float32)
            if inputs.adjustments.EXIST:
                row_max = tl.max(raw[0], 0)
            normalizer = normalizer_of(combine_with_max(row_max, raw, row, one, sizes))
    return normalizer


@triton.jit
def requested_logprob(context, token, normalizer, inputs, workspace, sizes):
    """Return the log-probability of a token at a context, given the result of `requested_normalizer`."""
    is_there = token < context.request.vocab_size  # a request without rows emits token 0, without a logit
    if workspace.raw_statistics_ptr is None:
        row, temperature = target_row_at(context, inputs, workspace, sizes), context.temperature
    else:
        row = stored_target_row_at(context.request, context.offset, inputs)
        temperature = tl.full([], 1.0, tl.float32)
    return logprob(load_logit(row, token, is_there), token, normalizer, temperature)


@triton.jit
def store_draft_logprob(context, normalizer, raw, inputs, workspace, sizes):
    """Write the log-probability of a row's draft into the output, for the case that it is emitted."""
    normalizer = requested_normalizer(context, normalizer, raw, inputs, workspace, sizes)
    value = requested_logprob(context, context.token, normalizer, inputs, workspace, sizes)
    tl.store(workspace.logprobs_ptr + row_index(context.request, context.offset, False, sizes), value)
