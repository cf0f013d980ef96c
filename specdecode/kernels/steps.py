"""What the methods' steps share in Triton: a request's drafts, its state, its line of the output.

A request stops at the first offset whose draft does not stand (in block verification: is impossible), or after its last one.
Programs find out in any order, so each posts its offset, as `num_draft_tokens - offset`, with an atomic maximum on memory
that starts as zeros: the request's first stop wins. Likewise for the first target row without a finite logit, which makes
the result `invalid` if the request came that far.

Where one launch both decides and emits, one atomic says all: it adds a program's verdict to a number that has a bit for each
row. In `probabilistic` nothing else is passed on, so nobody waits for writes to be seen; and tokens are drawn meanwhile.
"""

import triton
import triton.language as tl

TILE = tl.constexpr(32)
STOP, EMPTY, OPEN, FIELDS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
"""A request's state: where it stops, what is empty; and, 64 bits, a search that is open to the help of others."""

MOST_ROWS = 28
COUNT, ROWS = tl.constexpr((1 << 6) - 1), tl.constexpr((1 << MOST_ROWS) - 1)
STOPS, EMPTIES, EARLY = tl.constexpr(6), tl.constexpr(6 + MOST_ROWS), tl.constexpr(1 << (6 + 2 * MOST_ROWS))
"""Or, in the place of the first two, its verdicts, one number of 64 bits: how many there are; from which bit on it says at
which of up to 28 rows the request can stop, and which have no finite logit; and the bit for tokens written before all this
was known."""


@triton.jit
def clear_state(state_ptr, request):
    """Set a request's state to zeros."""
    tl.store(state_ptr + request * FIELDS + tl.arange(0, FIELDS), tl.zeros([FIELDS], tl.int32))


@triton.jit
def post_stop(state_ptr, request, offset, num_draft_tokens, takes):
    """Note that a request goes no further than an offset, and (1 or 0) whether its token is drawn from less than p."""
    tl.atomic_max(state_ptr + request * FIELDS + STOP, (num_draft_tokens - offset) * 2 + takes, sem="relaxed")


@triton.jit
def post_empty(state_ptr, request, offset, num_draft_tokens):
    """Note that a request's target row has no finite logit."""
    tl.atomic_max(state_ptr + request * FIELDS + EMPTY, num_draft_tokens + 1 - offset, sem="relaxed")


@triton.jit
def peek_stop(state_ptr, request, num_draft_tokens):
    """Return the offset that a request stops at, so far as is known while others may be posting: never too small."""
    # By an atomic, which one thread does for all: plain loads could give the program's warps different answers.
    return num_draft_tokens - tl.atomic_max(state_ptr + request * FIELDS + STOP, 0, sem="relaxed") // 2


@triton.jit
def peek_stop_again(state_ptr, request, num_draft_tokens):
    """Return the same by a plain load, so perhaps not the same to each warp: for masks alone, and no warp waits for it."""
    return num_draft_tokens - tl.load(state_ptr + request * FIELDS + STOP, volatile=True) // 2


@triton.jit
def load_stop(state_ptr, request, num_draft_tokens):
    """Return the offset that a request stops at, and whether its token is drawn from less than p, once all is posted."""
    posted = tl.load(state_ptr + request * FIELDS + STOP)
    return num_draft_tokens - posted // 2, posted % 2 == 1


@triton.jit
def load_empty(state_ptr, request, num_draft_tokens):
    """Return the offset of a request's first target row without a finite logit, likewise."""
    return num_draft_tokens + 1 - tl.load(state_ptr + request * FIELDS + EMPTY)


@triton.jit
def is_last(count_ptr, programs):
    """Count this program in; return whether it is the last one, which sees what all others have written."""
    tl.debug_barrier()  # of this program's writes, before one of its threads publishes them
    return tl.atomic_add(count_ptr, 1, sem="acq_rel") == programs - 1


@triton.jit
def load_drafts(drafts, request, offsets, vocab_size):
    """Return draft ids as int32, -1 for what is no token.

    `drafts` is (pointer, strides of requests and offsets, number of offsets).
    """
    ids_ptr, stride_request, stride_offset, num_draft_tokens = drafts
    inside = (offsets >= 0) & (offsets < num_draft_tokens)
    ids = tl.load(ids_ptr + request * stride_request + offsets * stride_offset, mask=inside, other=-1)
    return tl.where((ids >= 0) & (ids < vocab_size), ids.to(tl.int32), -1)


@triton.jit
def count_drafts(drafts, request, vocab_size):
    """Return how many drafts a request has, and the first `TILE` ids, for `store_output`."""
    num_draft_tokens = drafts[3]
    offsets = tl.arange(0, TILE)
    first_drafts = load_drafts(drafts, request, offsets, vocab_size)
    ids, num_drafts = first_drafts, num_draft_tokens
    for start in range(0, num_draft_tokens, TILE):
        if start > 0:
            ids = load_drafts(drafts, request, start + offsets, vocab_size)
        num_drafts = tl.minimum(num_drafts, tl.min(tl.where(ids < 0, start + offsets, num_draft_tokens), 0))
    return num_drafts, first_drafts


@triton.jit
def store_output(output, drafts, counted, request, stop, invalid, vocab_size):
    """Write the drafts before the stop, -1 after it, and the counts; the token at the stop is another's to write.

    `output` is (token_ids, num_accepted, num_draft_tokens, invalid), as pointers; `counted` is from `count_drafts`.
    """
    token_ids_ptr, num_accepted_ptr, num_drafts_ptr, invalid_ptr = output
    num_draft_tokens = drafts[3]
    num_drafts, ids = counted
    for start in range(0, num_draft_tokens + 1, TILE):
        offsets = start + tl.arange(0, TILE)
        if start > 0:  # the first were asked for in time: now it would be one more trip to memory, at the very end
            ids = load_drafts(drafts, request, offsets, vocab_size)
        tokens = tl.where(offsets < stop, ids, -1).to(tl.int64)
        theirs = (offsets <= num_draft_tokens) & (offsets != stop)
        tl.store(token_ids_ptr + request * (num_draft_tokens + 1) + offsets, tokens, mask=theirs)
    tl.store(num_accepted_ptr + request, stop)
    tl.store(num_drafts_ptr + request, num_drafts)
    tl.store(invalid_ptr + request, invalid)


@triton.jit
def verdicts_at(state_ptr, request):
    """Return where a request's verdicts are."""
    return (state_ptr + request * FIELDS).to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def add_verdict(state_ptr, request, offset, stops, is_empty, ORDER: tl.constexpr):
    """Add the verdict on one row: whether the request can stop there, and whether it has no finite logit. Return all."""
    verdict = 1 + (stops.to(tl.int64) << (STOPS + offset)) + (is_empty.to(tl.int64) << (EMPTIES + offset))
    return verdict + tl.atomic_add(verdicts_at(state_ptr, request), verdict, sem=ORDER)


@triton.jit
def are_complete(verdicts, num_draft_tokens):
    """Return whether there is a verdict on each row."""
    return (verdicts & COUNT) == num_draft_tokens + 1


@triton.jit
def first_row(verdicts, FIELD: tl.constexpr):
    """Return the first row that a field of verdicts has, 32 if it has none."""
    rows = ((verdicts >> FIELD) & ROWS).to(tl.int32)
    offsets = tl.arange(0, 32)
    return tl.min(tl.where(((rows >> offsets) & 1) == 1, offsets, 32), 0)


@triton.jit
def load_verdicts(state_ptr, request):
    """Return the verdicts so far."""
    return tl.atomic_or(verdicts_at(state_ptr, request), 0, sem="relaxed")


@triton.jit
def hand_in(token_ids_ptr, state_ptr, request, offset, token, verdicts, num_draft_tokens):
    """Write the token of a row that the request can stop at, if it does stop there; return the verdicts, given those seen.

    While that is not known the token is written too, and so noted: who knows in the end writes over it, if need be.
    """
    complete = are_complete(verdicts, num_draft_tokens)
    if (complete == 0) | (first_row(verdicts, STOPS) == offset):
        tl.store(token_ids_ptr + request * (num_draft_tokens + 1) + offset, token)
    if complete == 0:
        tl.debug_barrier()  # of that write, before one of the program's threads publishes it
        verdicts = EARLY | tl.atomic_or(verdicts_at(state_ptr, request), EARLY, sem="acq_rel")
    return verdicts


@triton.jit
def is_to_finish(state_ptr, request, offset, verdicts, num_draft_tokens):
    """Return whether a program is to write the output, given the verdicts that it saw last.

    The one at whose row the request stops is, and if a token was written early, so is everyone that has seen all verdicts:
    they write the same.
    """
    finishes = False
    if are_complete(verdicts, num_draft_tokens):
        finishes = first_row(verdicts, STOPS) == offset
        if verdicts >= EARLY:
            finishes = tl.atomic_or(verdicts_at(state_ptr, request), 0, sem="acquire") > 0
    return finishes


@triton.jit
def finish(output, drafts, counted, verdicts, request, vocab_size):
    """Write a request's output, but for its last token, given the verdicts on all its rows."""
    stop = first_row(verdicts, STOPS)
    store_output(output, drafts, counted, request, stop, first_row(verdicts, EMPTIES) <= stop, vocab_size)
