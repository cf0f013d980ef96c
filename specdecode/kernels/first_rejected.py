"""The first rejected row of a request, in Triton, which determines the request's output.

It is the first row whose draft is not accepted, or the row after the last draft. The request's last token is drawn from
it. Programs decide in any order, and share their decisions in one of two ways.

*First rejections*, where one launch decides and a later one emits: a program publishes its offset by an atomic maximum of
`num_draft_tokens - offset` on memory that starts as zeros, so the first one remains. The first target row without a finite
logit is published in the same way; the result is `invalid` unless this row comes after the first rejected row.

*Row bits*, where one launch decides and emits: a program adds 1, its row's rejected bit and its row's empty bit to one
64-bit number. If the decision itself draws the token, the token is written before the bits are added, and the last
program to add its bits writes the rest. If the token is drawn after the decision, the bits of all rows are usually
complete by then, and the program of the first rejected row writes everything without waiting for another program's
writes. If the bits are not complete, this program writes its token early, sets the EARLY bit and exits, and the programs
that see all bits write the rest. (Always writing early was 2 to 8 % slower for 1 to 32 requests of `probabilistic`.)
Log-probabilities of accepted drafts are written before the bits are added and published with them, because the program
that finishes sets those after the first rejected row to NaN.
"""

import triton
import triton.language as tl

from specdecode.kernels.rows import row_index

FIRST_REJECTED, EMPTY, FIELDS = (tl.constexpr(field) for field in range(3))
SURELY_ACCEPTED = tl.constexpr(-1)
"""A request's state: its first rejected row and its first empty row. After the states of all requests come one counter per
row (programs finished, or SURELY_ACCEPTED) and, for rows that are truncated after first rejections were published, the row
bits of each request. Block verification keeps one number instead, see `residual.NUM_QUEUED`."""

MOST_ROWS = 28
COUNT_BITS, ROWS = tl.constexpr((1 << 6) - 1), tl.constexpr((1 << MOST_ROWS) - 1)
REJECTED_BITS, EMPTY_BITS, EARLY = tl.constexpr(6), tl.constexpr(6 + MOST_ROWS), tl.constexpr(1 << (6 + 2 * MOST_ROWS))
"""Row bits: one int64 for each request, in place of the two fields above, or at the end of the state if these are
published. 6 bits count rows; then come 28 rejected bits, 28 empty bits and EARLY."""


@triton.jit
def clear_state(state_ptr, request):
    """Set a request's state to zeros."""
    tl.store(state_ptr + request.index * FIELDS + tl.arange(0, FIELDS), tl.zeros([FIELDS], tl.int32))


@triton.jit
def publish_rejection(state_ptr, request, offset, sizes):
    """Publish that the row at an offset is rejected."""
    tl.atomic_max(state_ptr + request.index * FIELDS + FIRST_REJECTED, sizes.num_draft_tokens - offset, sem="relaxed")


@triton.jit
def publish_empty(state_ptr, request, offset, sizes):
    """Publish that the target row at an offset has no finite logit."""
    tl.atomic_max(state_ptr + request.index * FIELDS + EMPTY, sizes.num_draft_tokens + 1 - offset, sem="relaxed")


@triton.jit
def peek_first_rejected(state_ptr, request, sizes):
    """Return the first rejected row published so far; the final first rejected row is not later."""
    # An atomic is executed by one thread for all: plain loads could give the program's warps different answers.
    return sizes.num_draft_tokens - tl.atomic_max(state_ptr + request.index * FIELDS + FIRST_REJECTED, 0, sem="relaxed")


@triton.jit
def load_first_rejected(state_ptr, request, sizes):
    """Return the offset of a request's first rejected row, once all rejections are published."""
    return sizes.num_draft_tokens - tl.load(state_ptr + request.index * FIELDS + FIRST_REJECTED)


@triton.jit
def load_empty(state_ptr, request, sizes):
    """Return the offset of a request's first target row without a finite logit, once all such rows are published."""
    return sizes.num_draft_tokens + 1 - tl.load(state_ptr + request.index * FIELDS + EMPTY)


@triton.jit
def is_last(count_ptr, programs):
    """Count this program; return whether it is the last one, which sees everything that the others have written."""
    tl.debug_barrier()  # all threads must have written before one of them counts the program
    return tl.atomic_add(count_ptr, 1, sem="acq_rel") == programs - 1


@triton.jit
def row_finished_ptr(state_ptr, request, offset, sizes):
    """Return a pointer to the number of programs that have finished with a target row."""
    return state_ptr + sizes.batch * FIELDS + row_index(request, offset, False, sizes)


@triton.jit
def publish_acceptance(state_ptr, context, sizes):
    """Publish that a draft is accepted for any truncation of its rows, which all programs have finished."""
    tl.store(row_finished_ptr(state_ptr, context.request, context.offset, sizes), SURELY_ACCEPTED)


@triton.jit
def is_surely_accepted(state_ptr, request, offset, sizes):
    """Return whether a row's draft was published as surely accepted."""
    return tl.load(row_finished_ptr(state_ptr, request, offset, sizes)) == SURELY_ACCEPTED


@triton.jit
def state_of_bits(state_ptr, sizes, PUBLISHED: tl.constexpr):
    """Return a pointer to the row bits: after all counters, at an even index, if first rejections were published."""
    if PUBLISHED:
        length = sizes.batch.to(tl.int64) * (FIELDS + sizes.num_draft_tokens + 1)
        state_ptr += length + length % 2
    return state_ptr


@triton.jit
def bits_at(state_ptr, request):
    """Return a pointer to a request's row bits."""
    return (state_ptr + request.index * FIELDS).to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def add_row_bits(state_ptr, context, rejected, is_empty, PUBLISHES: tl.constexpr):
    """Add the bits of one row (rejected; no finite logit) and return the bits of all rows.

    A token or log-probability of the row that has been written is published with the bits.
    """
    rejected_bit, empty_bit = rejected.to(tl.int64) << REJECTED_BITS, is_empty.to(tl.int64) << EMPTY_BITS
    bits = 1 + ((rejected_bit + empty_bit) << context.offset)
    if PUBLISHES:
        tl.debug_barrier()  # all threads must have written before one of them publishes
    return bits + tl.atomic_add(bits_at(state_ptr, context.request), bits, sem="acq_rel" if PUBLISHES else "relaxed")


@triton.jit
def are_complete(bits, sizes):
    """Return whether the bits of all rows have been added."""
    return (bits & COUNT_BITS) == sizes.num_draft_tokens + 1


@triton.jit
def first_row(bits, FIRST_BIT: tl.constexpr):
    """Return the first row whose bit is set, 32 if there is none."""
    rows = ((bits >> FIRST_BIT) & ROWS).to(tl.int32)
    offsets = tl.arange(0, 32)
    return tl.min(tl.where(((rows >> offsets) & 1) == 1, offsets, 32), 0)


@triton.jit
def writes_output(state_ptr, context, bits, sizes, IS_DRAWN: tl.constexpr):
    """Return whether a program writes the output, given the row bits that it saw last.

    The program of the first rejected row does. If a token was written early, every program that saw all bits does: they
    write the same values, and overwrite tokens that are not emitted.
    """
    finishes = are_complete(bits, sizes)
    if not IS_DRAWN:
        if finishes:
            finishes = first_row(bits, REJECTED_BITS) == context.offset
            if bits >= EARLY:
                # Always true: it acquires what the other programs have written.
                finishes = tl.atomic_or(bits_at(state_ptr, context.request), 0, sem="acquire") > 0
    return finishes
