"""At which row a request stops, and its output, which follows from that.

A request stops at its first row whose draft is not accepted, or at the row after its last draft. Programs find out in any
order, and share it in one of two ways.

*Stops*, where one launch decides and a later one emits: a program posts its offset by an atomic maximum of
`num_draft_tokens - offset` on memory that starts as zeros, so the first stop remains. Likewise for the first target row
without a finite logit, which makes the result `invalid` if the request came that far.

*Stop bits*, where one launch decides and emits: a program adds 1, its row's stop bit and its row's empty bit to one 64-bit
number. A token that the decision has drawn is written before, and the last program to add its bits writes the rest. Else the
token is drawn afterwards. By then the bits of all rows are usually complete, and the program at whose row the request stops
writes everything: no program waits for the writes of another to be seen. If they are not complete, it writes its token
early, sets the EARLY bit and exits, and those that complete the bits write the rest. (Always early: 2 to 8 % slower for 1 to
32 requests of `probabilistic`.) Log-probabilities of accepted drafts are written before their rows' bits are added, and
published with them, because those behind the stop are then replaced by NaN.
"""

import triton
import triton.language as tl

from specdecode.kernels.rows import LAST_TOKEN, row_index

TILE = tl.constexpr(32)
STOP, EMPTY, FIELDS = (tl.constexpr(field) for field in range(3))
SURELY_ACCEPTED = tl.constexpr(-1)
NUM_LISTED = STOP
"""A request's state: its stop, its first empty row. Behind the states of all requests come the numbers of programs that have
finished each row, or that its draft is surely accepted; and, where rows are truncated after some stops were posted, each
request's stop bits. In block verification only one number is kept, at the start: how many residuals are listed."""

MOST_ROWS = 28
COUNT_BITS, ROWS = tl.constexpr((1 << 6) - 1), tl.constexpr((1 << MOST_ROWS) - 1)
STOP_BITS, EMPTY_BITS, EARLY = tl.constexpr(6), tl.constexpr(6 + MOST_ROWS), tl.constexpr(1 << (6 + 2 * MOST_ROWS))
"""Stop bits: one int64 for each request, in place of its stop and its first empty row; behind all else if stops were posted.
6 bits count rows; then come 28 stop bits, 28 empty bits and EARLY."""


@triton.jit
def clear_state(state_ptr, request):
    """Set a request's state to zeros."""
    tl.store(state_ptr + request.index * FIELDS + tl.arange(0, FIELDS), tl.zeros([FIELDS], tl.int32))


@triton.jit
def post_stop(state_ptr, request, offset, sizes):
    """Note that a request stops at an offset, if not before."""
    tl.atomic_max(state_ptr + request.index * FIELDS + STOP, sizes.num_draft_tokens - offset, sem="relaxed")


@triton.jit
def post_empty(state_ptr, request, offset, sizes):
    """Note that a request's target row has no finite logit."""
    tl.atomic_max(state_ptr + request.index * FIELDS + EMPTY, sizes.num_draft_tokens + 1 - offset, sem="relaxed")


@triton.jit
def peek_stop(state_ptr, request, sizes):
    """Return the first stop posted so far, while other programs may be posting: never less than the final one."""
    # An atomic is executed by one thread for all: plain loads could give the program's warps different answers.
    return sizes.num_draft_tokens - tl.atomic_max(state_ptr + request.index * FIELDS + STOP, 0, sem="relaxed")


@triton.jit
def load_stop(state_ptr, request, sizes):
    """Return the offset that a request stops at, when all stops are posted."""
    return sizes.num_draft_tokens - tl.load(state_ptr + request.index * FIELDS + STOP)


@triton.jit
def load_empty(state_ptr, request, sizes):
    """Return the offset of a request's first target row without a finite logit, likewise."""
    return sizes.num_draft_tokens + 1 - tl.load(state_ptr + request.index * FIELDS + EMPTY)


@triton.jit
def is_last(count_ptr, programs):
    """Count this program in; return whether it is the last one, which sees what all others have written."""
    tl.debug_barrier()  # all threads have written, before one of them counts the program in
    return tl.atomic_add(count_ptr, 1, sem="acq_rel") == programs - 1


@triton.jit
def row_finished_ptr(state_ptr, request, offset, sizes):
    """Return where programs that finish with a target row are counted."""
    return state_ptr + sizes.batch * FIELDS + row_index(request, offset, False, sizes)


@triton.jit
def post_acceptance(state_ptr, place, sizes):
    """Note that a draft is accepted whatever truncation leaves of its rows, when all programs have finished with these."""
    tl.store(row_finished_ptr(state_ptr, place.request, place.offset, sizes), SURELY_ACCEPTED)


@triton.jit
def is_surely_accepted(state_ptr, request, offset, sizes):
    """Return whether that was noted of a row."""
    return tl.load(row_finished_ptr(state_ptr, request, offset, sizes)) == SURELY_ACCEPTED


@triton.jit
def state_of_bits(state_ptr, sizes, POSTED: tl.constexpr):
    """Return where the requests' stop bits begin: behind all else, at an even index, if stops were posted before."""
    if POSTED:
        numbers = sizes.batch.to(tl.int64) * (FIELDS + sizes.num_draft_tokens + 1)
        state_ptr += numbers + numbers % 2
    return state_ptr


@triton.jit
def bits_at(state_ptr, request):
    """Return where a request's stop bits are."""
    return (state_ptr + request.index * FIELDS).to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def add_stop_bits(state_ptr, place, stops, is_empty, PUBLISHES: tl.constexpr):
    """Add what is known of one row: whether the request can stop there, and whether it has no finite logit.

    Return all bits. What is written of the row already, its token or log-probability, is published with them.
    """
    stop_bit, empty_bit = stops.to(tl.int64) << STOP_BITS, is_empty.to(tl.int64) << EMPTY_BITS
    bits = 1 + ((stop_bit + empty_bit) << place.offset)
    if PUBLISHES:
        tl.debug_barrier()  # all threads have written, before one of them publishes that
    return bits + tl.atomic_add(bits_at(state_ptr, place.request), bits, sem="acq_rel" if PUBLISHES else "relaxed")


@triton.jit
def are_complete(bits, sizes):
    """Return whether stop bits tell of every row."""
    return (bits & COUNT_BITS) == sizes.num_draft_tokens + 1


@triton.jit
def first_row(bits, FIRST_BIT: tl.constexpr):
    """Return the first row whose bit is set, 32 if there is none."""
    rows = ((bits >> FIRST_BIT) & ROWS).to(tl.int32)
    offsets = tl.arange(0, 32)
    return tl.min(tl.where(((rows >> offsets) & 1) == 1, offsets, 32), 0)


@triton.jit
def hand_in(outputs, state_ptr, place, token, logprob, sizes):
    """Write the token of a row that the request can stop at, if it does stop there; return the stop bits.

    Before all bits are there that is not known: the token is written early, and the EARLY bit set.
    """
    REPLACES: tl.constexpr = outputs.logprobs_ptr is not None  # log-probabilities of rows behind the stop
    bits = tl.atomic_or(bits_at(state_ptr, place.request), 0, sem="acquire" if REPLACES else "relaxed")
    complete = are_complete(bits, sizes)
    if (complete == 0) | (first_row(bits, STOP_BITS) == place.offset):
        store_token(outputs, place, token, logprob, sizes)
    if complete == 0:
        tl.debug_barrier()  # all threads have written, before one of them publishes the token
        bits = EARLY | tl.atomic_or(bits_at(state_ptr, place.request), EARLY, sem="acq_rel")
    return bits


@triton.jit
def is_to_finish(state_ptr, place, bits, sizes, IS_DRAWN: tl.constexpr):
    """Return whether a program is to write the output, given the stop bits that it saw last.

    It is the program at whose row the request stops. If a token was written early, every program that saw all bits is to
    write: they write the same, over tokens that turned out to be of no use.
    """
    finishes = are_complete(bits, sizes)
    if not IS_DRAWN:
        if finishes:
            finishes = first_row(bits, STOP_BITS) == place.offset
            if bits >= EARLY:
                finishes = tl.atomic_or(bits_at(state_ptr, place.request), 0, sem="acquire") > 0
    return finishes


@triton.jit
def load_draft_ids(drafts, request, offsets, sizes):
    """Return draft ids as int32, -1 for what is no token."""
    if drafts.ids_ptr is None:
        return offsets * 0 - 1
    else:
        inside = (offsets >= 0) & (offsets < request.num_drafts)
        pointers = drafts.ids_ptr + request.row * drafts.stride_request + offsets * drafts.stride_offset
        ids = tl.load(pointers, mask=inside, other=-1)
        vocab_size = sizes.vocab_size if sizes.shard.vocab_size is None else sizes.shard.vocab_size
        return tl.where((ids >= 0) & (ids < vocab_size), ids.to(tl.int32), -1)


@triton.jit
def count_drafts(drafts, request, sizes):
    """Return how many drafts a request has, and the first `TILE` ids."""
    offsets = tl.arange(0, TILE)
    first_ids = load_draft_ids(drafts, request, offsets, sizes)
    ids, num_drafts = first_ids, tl.full([], 0, tl.int32) + sizes.num_draft_tokens
    for start in range(0, sizes.num_draft_tokens, TILE):
        if start > 0:
            ids = load_draft_ids(drafts, request, start + offsets, sizes)
        num_drafts = tl.minimum(num_drafts, tl.min(tl.where(ids < 0, start + offsets, sizes.num_draft_tokens), 0))
    return num_drafts, first_ids


@triton.jit
def draft_at(counted, drafts, request, offset, sizes):
    """Return the draft id at an offset, given `count_drafts`, which has most of them; -1 for none."""
    num_drafts, first_ids = counted
    token = tl.max(tl.where(tl.arange(0, TILE) == offset, first_ids, -1), 0)
    if offset >= TILE:
        token = load_draft_ids(drafts, request, offset, sizes)
    return tl.where(offset < num_drafts, token, -1)


@triton.jit
def store_token(outputs, place, token, logprob, sizes):
    """Write the token at a place."""
    tl.store(outputs.token_ids_ptr + row_index(place.request, place.offset, False, sizes), token)
    store_logprob(outputs, place, logprob, sizes)


@triton.jit
def store_logprob(outputs, place, logprob, sizes):
    """Write the log-probability of the token at a place, if it is asked for."""
    if outputs.logprobs_ptr is not None:
        tl.store(outputs.logprobs_ptr + row_index(place.request, place.offset, False, sizes), logprob)


@triton.jit
def store_normalizer(outputs, place, normalizer, workspace):
    """Write the logsumexp of the row of a request without drafts, and the last token kept, if they are asked for.

    If all tokens are kept that is -1, and of a greedy row its only token.
    """
    if outputs.logsumexp_ptr is not None:
        logsumexp = tl.where(place.temperature > 0, normalizer.row_max / place.temperature + normalizer.log_sum, 0.0)
        tl.store(outputs.logsumexp_ptr + place.request.index, logsumexp)
    if outputs.cutoff_ptr is not None:
        cutoff = normalizer.one_hot
        if workspace.cutoffs_ptr is not None:
            kept = tl.load(workspace.cutoffs_ptr + place.request.index * 2 + 1).to(tl.int32, bitcast=True)
            cutoff = tl.where(place.temperature > 0, tl.where(kept == LAST_TOKEN, -1, kept), cutoff)
        tl.store(outputs.cutoff_ptr + place.request.index, cutoff.to(tl.int64))


@triton.jit
def store_sample(outputs, place, token, logprob, is_empty, sizes):
    """Write the output of a request without drafts."""
    store_token(outputs, place, token.to(tl.int64), logprob, sizes)
    if outputs.num_accepted_ptr is not None:
        tl.store(outputs.num_accepted_ptr + place.request.index, 0)
        tl.store(outputs.num_drafts_ptr + place.request.index, 0)
        tl.store(outputs.invalid_ptr + place.request.index, is_empty)


@triton.jit
def store_output(outputs, drafts, counted, request, stop, invalid, sizes):
    """Write the drafts before the stop, -1 after it, and the counts; the token at the stop is written by `store_token`."""
    num_drafts, ids = counted
    for start in range(0, sizes.num_draft_tokens + 1, TILE):
        offsets = start + tl.arange(0, TILE)
        if start > 0:  # the first ids are loaded already: here, at the end, a load would be waited for
            ids = load_draft_ids(drafts, request, offsets, sizes)
        tokens = tl.where(offsets < stop, ids, -1).to(tl.int64)
        others = (offsets <= sizes.num_draft_tokens) & (offsets != stop)
        index = row_index(request, offsets, False, sizes)
        tl.store(outputs.token_ids_ptr + index, tokens, mask=others)
        if outputs.logprobs_ptr is not None:
            nothing = tl.full([TILE], float("nan"), tl.float32)
            tl.store(outputs.logprobs_ptr + index, nothing, mask=others & (offsets > stop))
    tl.store(outputs.num_accepted_ptr + request.index, stop)
    tl.store(outputs.num_drafts_ptr + request.index, num_drafts)
    tl.store(outputs.invalid_ptr + request.index, invalid)
