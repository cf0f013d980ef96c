"""The output of a request in Triton: tokens, counts, log-probabilities, and the logsumexp of a sampled row."""

import triton
import triton.language as tl

from specdecode.kernels.first_rejected import EARLY, REJECTED_BITS, are_complete, bits_at, first_row
from specdecode.kernels.request import TILE, load_draft_ids
from specdecode.kernels.rows import LAST_TOKEN, row_index


@triton.jit
def store_token(outputs, context, token, logprob, sizes):
    """Write the token at a context."""
    tl.store(outputs.token_ids_ptr + row_index(context.request, context.offset, False, sizes), token)
    store_logprob(outputs, context, logprob, sizes)


@triton.jit
def store_logprob(outputs, context, logprob, sizes):
    """Write the log-probability of the token at a context, if it is requested."""
    if outputs.logprobs_ptr is not None:
        tl.store(outputs.logprobs_ptr + row_index(context.request, context.offset, False, sizes), logprob)


@triton.jit
def store_rejected_token(outputs, state_ptr, context, token, logprob, sizes):
    """Write the token of a rejected row, unless an earlier row is known to be rejected; return the row bits.

    If bits are missing, the first rejected row is not final: the token is written early, and the EARLY bit is set.
    """
    REPLACES: tl.constexpr = outputs.logprobs_ptr is not None  # log-probabilities after the first rejected row, by NaN
    bits = tl.atomic_or(bits_at(state_ptr, context.request), 0, sem="acquire" if REPLACES else "relaxed")
    complete = are_complete(bits, sizes)
    if (complete == 0) | (first_row(bits, REJECTED_BITS) == context.offset):
        store_token(outputs, context, token, logprob, sizes)
    if complete == 0:
        tl.debug_barrier()  # all threads must have written before one of them publishes the token
        bits = EARLY | tl.atomic_or(bits_at(state_ptr, context.request), EARLY, sem="acq_rel")
    return bits


@triton.jit
def store_output(outputs, drafts, counted, request, first_rejected, invalid, sizes):
    """Write the accepted drafts, -1 after the first rejected row, and the counts; `store_token` writes the row's token."""
    num_drafts, ids = counted
    for start in range(0, sizes.num_draft_tokens + 1, TILE):
        offsets = start + tl.arange(0, TILE)
        if start > 0:  # the first ids are already loaded: a load at the end of the program would stall it
            ids = load_draft_ids(drafts, request, offsets, sizes)
        tokens = tl.where(offsets < first_rejected, ids, -1).to(tl.int64)
        others = (offsets <= sizes.num_draft_tokens) & (offsets != first_rejected)
        index = row_index(request, offsets, False, sizes)
        tl.store(outputs.token_ids_ptr + index, tokens, mask=others)
        if outputs.logprobs_ptr is not None:
            nothing = tl.full([TILE], float("nan"), tl.float32)
            tl.store(outputs.logprobs_ptr + index, nothing, mask=others & (offsets > first_rejected))
    tl.store(outputs.num_accepted_ptr + request.index, first_rejected)
    tl.store(outputs.num_drafts_ptr + request.index, num_drafts)
    tl.store(outputs.invalid_ptr + request.index, invalid)


@triton.jit
def store_sample(outputs, context, token, logprob, is_empty, sizes):
    """Write the output of a request without drafts."""
    store_token(outputs, context, token.to(tl.int64), logprob, sizes)
    if outputs.num_accepted_ptr is not None:
        tl.store(outputs.num_accepted_ptr + context.request.index, 0)
        tl.store(outputs.num_drafts_ptr + context.request.index, 0)
        tl.store(outputs.invalid_ptr + context.request.index, is_empty)


@triton.jit
def store_normalizer(outputs, context, normalizer, workspace):
    """Write the logsumexp of the row of a request without drafts, and the last kept token, if they are requested.

    The last kept token is -1 if all are kept, and a greedy row's only token.
    """
    if outputs.logsumexp_ptr is not None:
        logsumexp = tl.where(
            context.temperature > 0, normalizer.row_max / context.temperature + normalizer.log_sum, 0.0
        )
        tl.store(outputs.logsumexp_ptr + context.request.index, logsumexp)
    if outputs.cutoff_ptr is not None:
        cutoff = normalizer.point_mass_token
        if workspace.cutoffs_ptr is not None:
            kept = tl.load(workspace.cutoffs_ptr + context.request.index * 2 + 1).to(tl.int32, bitcast=True)
            cutoff = tl.where(context.temperature > 0, tl.where(kept == LAST_TOKEN, -1, kept), cutoff)
        tl.store(outputs.cutoff_ptr + context.request.index, cutoff.to(tl.int64))
