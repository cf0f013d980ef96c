"""Log-probabilities of emitted tokens in Triton.

    processed: log p'(y) = (l_y - M) / T - log sumexp        raw: log p(y) = l_y - M - log sum exp(l - M)

Whoever decides about a draft has its row's distribution, from which the processed one takes the draft's logit and nothing
else; whoever draws a token has it too. So no launch is added: decisions made in an earlier launch leave the draft's
log-probability in the output, and the launch that emits writes the last token's, and NaN behind it.

Raw ones take sums of exponentials at temperature 1. The launch that reads leaves them beside the others: 8 bytes for each
block of a target row, its maximum again, because truncation replaces the others. Where T is 1 and nothing
truncates rows they are the processed ones. Reading the emitted rows again afterwards would need nothing of that launch, but
in a large batch most of its time again.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import combine_below, logprob
from specdecode.kernels.rows import load_logit, row_index, stored_target_row_at, target_row_at
from specdecode.kernels.statistics import load_statistics, raw_statistics
from specdecode.kernels.values import Normalizer


@triton.jit
def normalizer_of(p):
    """Return the normalizer of log-probabilities under a distribution."""
    return Normalizer(p.row_max, tl.log(p.sumexp), p.point_mass_token)


@triton.jit
def load_raw_statistics(context, inputs, workspace, sizes):
    """Return the statistics at temperature 1 of the target row at a context, if raw log-probabilities are asked for."""
    if workspace.raw_statistics_ptr is None:
        return 0.0, 0.0
    else:
        pointer = raw_statistics(workspace, context.request, context.offset, sizes)
        return load_statistics(pointer, differs_from_raw(context, inputs, workspace), sizes)


@triton.jit
def differs_from_raw(context, inputs, workspace):
    """Return whether a row's distribution may differ from the raw one: at temperature 1, not truncated, not adjusted."""
    differs = True
    if workspace.cutoffs_ptr is None and not inputs.adjustments.EXIST:
        differs = context.temperature != 1
    return differs


@triton.jit
def normalizer_asked(context, normalizer, raw, inputs, workspace, sizes):
    """Return the normalizer of the requested log-probabilities: as given, or of the `raw` statistics of the row."""
    if workspace.raw_statistics_ptr is not None:
        if differs_from_raw(context, inputs, workspace):
            row = stored_target_row_at(context.request, context.offset, inputs)
            row_max, one = normalizer.row_max, tl.full([], 1.0, tl.float32)
            if inputs.adjustments.EXIST:
                row_max = tl.max(raw[0], 0)
            normalizer = normalizer_of(combine_below(row_max, raw, row, one, sizes))
    return normalizer


@triton.jit
def logprob_asked(context, token, normalizer, inputs, workspace, sizes):
    """Return the log-probability of a token at a context, given what `normalizer_asked` returns."""
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
    normalizer = normalizer_asked(context, normalizer, raw, inputs, workspace, sizes)
    value = logprob_asked(context, context.token, normalizer, inputs, workspace, sizes)
    tl.store(workspace.logprobs_ptr + row_index(context.request, context.offset, False, sizes), value)
