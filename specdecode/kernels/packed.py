"""Packed calls in Triton: where the rows of a request are, and which slot holds its state.

A call that is not packed has everything at the request's own index. In a packed call three numbers on the device say where
it is: the request's entry of `row_starts`, the next one, and its entry of `slots`. Every program loads them first.

Nothing has checked these numbers, so a request is accepted only if its rows are within the tensor and no more than it may
have, and its slot is one of the slots. Any other request, and one that has no rows, is given no drafts and a row of no
tokens: what follows finds no finite logit there, as in a row of NaN, and so emits token 0 and marks it invalid. Nothing of
it is ever read.
"""

import triton
import triton.language as tl

from specdecode.kernels.values import Request


@triton.jit
def locate(index, packing, sizes):
    """Return a request, given its index (int64)."""
    row, slot, num_drafts, vocab_size = index, index, sizes.num_draft_tokens, sizes.vocab_size
    if packing.row_starts_ptr is not None:
        row = tl.load(packing.row_starts_ptr + index).to(tl.int64)
        end = tl.load(packing.row_starts_ptr + index + 1).to(tl.int64)
        is_valid = (row >= 0) & (row < end) & (end <= packing.num_rows) & (end - row <= sizes.num_draft_tokens + 1)
        if packing.slots_ptr is not None:
            slot = tl.load(packing.slots_ptr + index).to(tl.int64)
            is_valid &= (slot >= 0) & (slot < packing.num_slots)
            slot = tl.where(is_valid, slot, 0)
        num_drafts = tl.where(is_valid, end - row - 1, 0).to(tl.int32)
        row = tl.where(is_valid, row, 0)
        vocab_size = tl.where(is_valid, sizes.vocab_size, 0)
    return Request(index, row, slot, num_drafts, vocab_size)


@triton.jit
def locate_program(programs, packing, sizes):
    """Return a program's request and its offset, in a grid that has so many programs for each request."""
    return locate((tl.program_id(0) // programs).to(tl.int64), packing, sizes), tl.program_id(0) % programs
