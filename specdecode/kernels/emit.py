"""The launch that emits: from the statistics of all rows to tokens.

In block verification, and in a large batch without truncation, whose first rejected rows are known, a program has one
request. Otherwise it has one row: it decides about the row's draft, draws the token of a rejected row, and adds its row
bits; from these bits `first_rejected` chooses the program that writes the request's output.

A program reads the statistics of one or two rows, 8 bytes for each block of 1,024, and a few blocks of logits again. It
writes 8 bytes for each token.
"""

import triton
import triton.language as tl

from specdecode.kernels.block import find_first_rejected
from specdecode.kernels.first_rejected import (
    EMPTY_BITS,
    REJECTED_BITS,
    add_row_bits,
    first_row,
    is_surely_accepted,
    load_first_rejected,
    state_of_bits,
    writes_output,
)
from specdecode.kernels.launch import await_launch
from specdecode.kernels.logprobs import load_raw_statistics, requested_logprob, requested_normalizer
from specdecode.kernels.output import (
    store_logprob,
    store_normalizer,
    store_output,
    store_rejected_token,
    store_sample,
    store_token,
)
from specdecode.kernels.request import (
    count_drafts,
    draft_at,
    load_draft_ids,
    load_key,
    load_temperature,
    locate_program,
    with_draft,
)
from specdecode.kernels.selection import noise_at, sample_token
from specdecode.kernels.values import INFINITY, RowContext


@triton.jit
def emit_sample(context, inputs, outputs, workspace, sizes, config):
    """Draw the token of a request without drafts."""
    noise = noise_at(context, inputs.requests, sizes)
    await_launch(config.OVERLAPS)
    raw = load_raw_statistics(context, inputs, workspace, sizes)
    token, normalizer = sample_token(context, noise, inputs, workspace, sizes)
    store_normalizer(outputs, context, normalizer, workspace)
    logprob = 0.0
    if outputs.logprobs_ptr is not None:
        requested = requested_normalizer(context, normalizer, raw, inputs, workspace, sizes)
        logprob = requested_logprob(context, token, requested, inputs, workspace, sizes)
    store_sample(outputs, context, token, logprob, normalizer.row_max == -INFINITY, sizes)


@triton.jit
def emit_row(context, inputs, outputs, workspace, sizes, config, policy):
    """Decide about one row's draft; if it is rejected, draw the token that is emitted if no earlier row is rejected."""
    IS_DRAWN: tl.constexpr = policy.DRAW is None
    HAS_LOGPROBS: tl.constexpr = outputs.logprobs_ptr is not None
    request, offset = context.request, context.offset
    context = with_draft(context, offset, load_draft_ids(inputs.drafts, request, offset, sizes))
    noise = noise_at(context, inputs.requests, sizes)
    counted = count_drafts(inputs.drafts, request, sizes)
    await_launch(config.OVERLAPS)
    bits_ptr = state_of_bits(workspace.state_ptr, sizes, config.PUBLISHED)
    rejected, is_empty = tl.full([], False, tl.int1), tl.full([], False, tl.int1)
    bits = tl.full([], 0, tl.int64)
    last = counted[0]
    matters = offset <= last
    if config.PUBLISHED:
        last = tl.minimum(last, load_first_rejected(workspace.state_ptr, request, sizes))
        if not HAS_LOGPROBS:  # a log-probability needs the truncated sum
            matters &= is_surely_accepted(workspace.state_ptr, request, offset, sizes) == 0
        matters &= offset <= last
    if matters:
        raw = load_raw_statistics(context, inputs, workspace, sizes)  # in flight during the decision
        accepted, normalizer, source = policy.DECIDE(context, noise, inputs, workspace, sizes)
        rejected, is_empty = accepted == 0, normalizer.row_max == -INFINITY
        if config.PUBLISHED:
            rejected |= offset == last
        logprob = 0.0
        if HAS_LOGPROBS:
            requested = requested_normalizer(context, normalizer, raw, inputs, workspace, sizes)
        if rejected:
            if IS_DRAWN:
                if HAS_LOGPROBS:
                    logprob = requested_logprob(context, source, requested, inputs, workspace, sizes)
                store_token(outputs, context, source, logprob, sizes)
            else:
                add_row_bits(bits_ptr, context, rejected, is_empty, IS_DRAWN)  # nothing waits for its result
                token = policy.DRAW(context, noise, source, inputs, workspace, sizes, config)
                if HAS_LOGPROBS:
                    logprob = requested_logprob(context, token, requested, inputs, workspace, sizes)
                bits = store_rejected_token(outputs, bits_ptr, context, token, logprob, sizes)
        elif HAS_LOGPROBS:
            of_draft = requested_logprob(context, context.token, requested, inputs, workspace, sizes)
            store_logprob(outputs, context, of_draft, sizes)
    if IS_DRAWN or rejected == 0:
        bits = add_row_bits(bits_ptr, context, rejected, is_empty, IS_DRAWN or HAS_LOGPROBS)
    if writes_output(bits_ptr, context, bits, sizes, IS_DRAWN):
        first_rejected = first_row(bits, REJECTED_BITS)
        is_invalid = first_row(bits, EMPTY_BITS) <= first_rejected
        store_output(outputs, inputs.drafts, counted, request, first_rejected, is_invalid, sizes)


@triton.jit
def emit_request(context, inputs, outputs, workspace, sizes, config, policy):
    """Draw the token of a request's first rejected row, and write its output."""
    request = context.request
    counted = count_drafts(inputs.drafts, request, sizes)
    await_launch(config.OVERLAPS)
    first_rejected, is_empty = find_first_rejected(request, counted[0], inputs, workspace, sizes, config)
    context = with_draft(context, first_rejected, draft_at(counted, inputs.drafts, request, first_rejected, sizes))
    noise = noise_at(context, inputs.requests, sizes)
    raw = load_raw_statistics(context, inputs, workspace, sizes)  # in flight during the decision
    # Acceptance is known: only the normalizer and the source are used.
    _, normalizer, source = policy.DECIDE(context, noise, inputs, workspace, sizes)
    token = source
    if policy.DRAW is not None:
        token = policy.DRAW(context, noise, source, inputs, workspace, sizes, config)
    logprob = 0.0
    if outputs.logprobs_ptr is not None:
        requested = requested_normalizer(context, normalizer, raw, inputs, workspace, sizes)
        logprob = requested_logprob(context, token, requested, inputs, workspace, sizes)
    store_token(outputs, context, token, logprob, sizes)
    is_invalid = is_empty | (normalizer.row_max == -INFINITY)
    store_output(outputs, inputs.drafts, counted, request, first_rejected, is_invalid, sizes)


@triton.jit
def emit_kernel(inputs, outputs, workspace, sizes, config, policy):
    """Emit one request, or one row of it."""
    programs = 1
    if config.PER_ROW:
        programs = sizes.num_draft_tokens + 1
    request, offset = locate_program(programs, inputs.packing, sizes)
    temperature = load_temperature(inputs.requests, request)
    context = RowContext(request, offset, -1, load_key(inputs.requests, request), temperature)
    if inputs.drafts.ids_ptr is None:
        emit_sample(context, inputs, outputs, workspace, sizes, config)
    elif config.PER_ROW:
        emit_row(context, inputs, outputs, workspace, sizes, config, policy)
    else:
        emit_request(context, inputs, outputs, workspace, sizes, config, policy)
