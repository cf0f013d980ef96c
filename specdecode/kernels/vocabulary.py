"""Draft rows over their own vocabulary, in Triton: reading by draft ids, and lookup by target tokens.

A draft row is read, summarised and truncated by its own ids, in their order. Where p and q are compared token by token,
q(v) is looked up: a map has the draft's id of each target token v, and tokens that the draft lacks read as -inf.

`map_kernel` computes the map in each call, because the ids may have changed in memory, for example before the next replay
of a graph. It overlaps with the launch that reads logits.
"""

import triton
import triton.language as tl

from specdecode.kernels.launch import admit_next_launch
from specdecode.kernels.values import DraftIdOfToken, Row

NO_ID = tl.constexpr(2**31 - 1)
"""Stands for a missing draft id, or a missing token. It is larger than any id, so loads by it are masked, and a minimum
over several ids of a token gives the first."""

SPAN = tl.constexpr(4096)
"""The number of target tokens whose ids a program finds."""

IDS = tl.constexpr(8192)
"""Ids that a program compares at once."""


@triton.jit
def map_kernel(inputs, workspace, sizes, config):
    """Store the draft's id of each of `SPAN` tokens of the target.

    Of equal ids the first counts; ids outside the target's vocabulary are ignored. A program scans all ids for its own
    tokens, and clears its own entries first, which saves a separate launch.
    """
    admit_next_launch(config.OVERLAPS)
    vocabulary, draft_id_of_token_ptr = inputs.draft_vocabulary, workspace.draft_id_of_token_ptr
    first = tl.program_id(0) * SPAN
    end = tl.minimum(first + SPAN, sizes.vocab_size)
    mine = first + tl.arange(0, SPAN)
    tl.store(draft_id_of_token_ptr + mine, tl.full([SPAN], NO_ID, tl.int32), mask=mine < end)
    tl.debug_barrier()  # all threads must have cleared before one of them finds an id
    for start in range(0, vocabulary.size, IDS):
        ids = start + tl.arange(0, IDS)
        tokens = tl.load(vocabulary.ids_ptr + ids, mask=ids < vocabulary.size, other=-1)
        is_mine = (tokens >= first) & (tokens < end)
        tl.atomic_min(draft_id_of_token_ptr + tokens, ids, mask=is_mine, sem="relaxed")


@triton.jit
def by_target(row, workspace, sizes):
    """Return a draft row indexed by the target's tokens, given the row indexed by the draft's ids."""
    if workspace.draft_id_of_token_ptr is None:
        return row
    else:
        draft_id_of_token = DraftIdOfToken(workspace.draft_id_of_token_ptr, sizes.vocab_size)
        return Row(row.ptr, row.stride_token, row.vocab_size, row.cutoff, draft_id_of_token, ())


@triton.jit
def draft_ids_of(draft_id_of_token, token_ids, wanted):
    """Return the draft's ids of target tokens; `NO_ID` for tokens that the draft lacks, and for negative ones."""
    inside = tl.where(wanted, (token_ids >= 0) & (token_ids < draft_id_of_token.vocab_size), False)
    return tl.load(draft_id_of_token.ptr + token_ids, mask=inside, other=NO_ID)


@triton.jit
def token_of(draft_id, inputs, workspace, sizes):
    """Return the target token of a draft id, `NO_ID` if there is none; negative ids are unchanged."""
    if workspace.draft_id_of_token_ptr is None:
        return draft_id
    else:
        token = tl.load(inputs.draft_vocabulary.ids_ptr + draft_id, mask=draft_id >= 0, other=-1)
        draft_id_of_token = DraftIdOfToken(workspace.draft_id_of_token_ptr, sizes.vocab_size)
        is_token = draft_ids_of(draft_id_of_token, token, True) == draft_id
        return tl.where(draft_id < 0, draft_id, tl.where(is_token, token.to(tl.int32), NO_ID))
