"""Packed calls: the arguments that say where each request's rows and state are, and their checks.

On the CPU their values are checked. On a device they are not read, because a replayed CUDA graph may change them: there the
backends take a request whose rows or slot cannot be for one that has none.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdecode.checks import (
    INTEGERS,
    MOST_DRAFT_TOKENS,
    Extent,
    check_count,
    check_device,
    check_logits,
    check_tensor,
    check_type,
    check_values,
    on_host,
    plain,
)


class Packing(NamedTuple):
    """Where the rows and the state of each request of a packed call are. Their values are checked only on the CPU."""

    row_starts: Tensor  # [batch + 1] int32 or int64
    num_draft_tokens: int  # the most that a request may have
    slots: Tensor | None  # [batch] int32 or int64; None: the request itself, or nothing is by slot
    num_slots: int
    seeds_by_request: bool  # seeds are not by slot, because they were drawn for this call
    row_positions: Tensor | None  # [num_rows] int64, of the tokens fed at the rows; in place of the batch's positions


BySlot = Tensor | float | tuple[Tensor | float | None, ...] | None
BY_SLOT = (
    "draft_logits",
    "temperature",
    "seeds",
    "top_k",
    "top_p",
    "min_p",
    "draft_sampling",
    "draft_logsumexp",
    "draft_cutoff",
    "adjustments",
)
"""The arguments of which some may be tensors by slot."""


def check_packed(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    row_starts: Tensor,
    num_draft_tokens: int | None,
    slots: Tensor | None,
    by_slot: tuple[BySlot, ...],
    seeds_by_request: bool,
    row_positions: Tensor | None,
    vocab_size: int | None,
) -> tuple[Extent, Packing]:
    """Raise unless rows, drafts and slots fit together; return how much there is, and where it is.

    Args:
        target_logits: as for a packed call.
        draft_token_ids: likewise.
        row_starts: likewise.
        num_draft_tokens: likewise.
        slots: likewise.
        by_slot: the arguments that `BY_SLOT` names.
        seeds_by_request: whether seeds are to be drawn, one for each request.
        row_positions: as for a packed call.
        vocab_size: of the whole vocabulary, if the logits are a shard of it.
    """
    num_rows, vocab = check_logits("target_logits", target_logits, ("num_rows", "vocab"), vocab_size)
    device = target_logits.device
    check_draft_token_ids(draft_token_ids, num_rows, device)
    most = check_count("num_draft_tokens", num_draft_tokens, MOST_DRAFT_TOKENS, least=0)
    check_starts(row_starts)
    if row_starts.device != device:  # without a call where it is right
        check_device("row_starts", row_starts, device)
    batch = row_starts.shape[0] - 1
    if slots is not None:
        check_tensor("slots", slots, INTEGERS, (batch,), device)
        slots = plain(slots)
    name, num_slots = count_slots(by_slot, batch, slots)
    if name is None:
        slots = None  # not looked at
    if row_positions is not None:
        check_tensor("row_positions", row_positions, (torch.int64,), (num_rows,), device)
        row_positions = plain(row_positions)
    used: tuple[Tensor, ...] = ()
    if on_host(row_starts):
        check_row_starts(row_starts, num_rows, most)
        check_judged(draft_token_ids, row_starts, vocab)
        used = check_slots(slots, row_starts, name, num_slots)
        if row_positions is not None:
            check_row_positions(row_positions, row_starts)
    packing = Packing(plain(row_starts), most, slots, num_slots, seeds_by_request, row_positions)
    return Extent(batch, num_slots, most, vocab, device, *used), packing


def count_slots(by_slot: tuple[BySlot, ...], batch: int, slots: Tensor | None) -> tuple[str | None, int]:
    """Return the name of an argument that is by slot, None if there is none, and how many slots it has."""
    for name, argument in zip(BY_SLOT, by_slot):
        for part in argument if isinstance(argument, tuple) else (argument,):
            if isinstance(part, Tensor) and part.ndim > 0:
                num_slots = part.shape[0]
                if slots is None and num_slots < batch:
                    expected = f"a slot for each of {batch} requests, because slots is None"
                    raise ValueError(f"{name}: expected {expected}, got {num_slots}")
                if num_slots == 0 < batch:
                    raise ValueError(f"{name}: expected at least one slot, got 0")
                return name, num_slots
    return None, batch


def check_starts(row_starts: Tensor) -> None:
    """Raise unless they are of a type and a shape that says how many requests there are."""
    check_type("row_starts", row_starts, INTEGERS)
    if row_starts.ndim != 1 or row_starts.shape[0] == 0:
        raise ValueError(f"row_starts: expected shape [batch + 1], got {list(row_starts.shape)}")


def check_draft_token_ids(draft_token_ids: Tensor, num_rows: int, device: torch.device) -> None:
    """Raise unless there is an id for each row, or for all but the last, which judges no draft."""
    all_but_last = isinstance(draft_token_ids, Tensor) and draft_token_ids.shape == (num_rows - 1,)
    check_tensor("draft_token_ids", draft_token_ids, INTEGERS, (num_rows - all_but_last,), device)


def check_row_positions(row_positions: Tensor, row_starts: Tensor) -> None:
    """Raise on a negative position at the first row of a request that has rows; others are not looked at."""
    first_rows = row_starts[:-1][row_starts.diff() > 0].long()
    valid = torch.ones_like(row_positions, dtype=torch.bool)
    valid[first_rows] = row_positions[first_rows] >= 0
    check_values("row_positions", row_positions, valid, "numbers >= 0 at the first row of each request")


def check_row_starts(row_starts: Tensor, num_rows: int, most: int) -> None:
    """Raise unless the rows of every request are rows, and no more than it may have."""
    inside = (row_starts >= 0) & (row_starts <= num_rows)
    check_values("row_starts", row_starts, inside, f"numbers in [0, {num_rows}], the number of rows")
    follows = row_starts.diff(prepend=row_starts[:1]) >= 0
    check_values("row_starts", row_starts, follows, "numbers that do not decrease")
    counts = row_starts.diff()
    if (counts > most + 1).any():
        request, expected = int(counts.argmax()), f"at most num_draft_tokens + 1 = {most + 1} rows for each request"
        raise ValueError(f"row_starts: expected {expected}, got {int(counts[request])} for request {request}")


def check_judged(draft_token_ids: Tensor, row_starts: Tensor, vocab: int) -> None:
    """Raise on an id outside the vocabulary that a row judges: not after a -1, and not that of a request's last row."""
    counts = row_starts.diff()
    requests = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    first = int(row_starts[0])
    rows = torch.arange(len(requests), device=counts.device) + first
    draft_token_ids = torch.nn.functional.pad(draft_token_ids, (0, 1))  # the last row may have none
    ids = draft_token_ids[rows]
    ends = (ids == -1).cumsum(0)
    before = torch.nn.functional.pad(ends, (1, 0))[(row_starts[requests] - first).long()]
    is_judged = (rows + 1 < row_starts[requests + 1]) & (ends == before)
    valid = torch.ones(len(draft_token_ids), dtype=torch.bool, device=counts.device)
    valid[rows] = ~is_judged | ((ids >= 0) & (ids < vocab))
    check_values("draft_token_ids", draft_token_ids, valid, f"ids in [0, {vocab}), or -1 for no draft")


def check_slots(slots: Tensor | None, row_starts: Tensor, of: str | None, num_slots: int) -> tuple[Tensor, Tensor]:
    """Raise unless each request that has rows has a slot, as many as there are `of` an argument.

    Returns:
        Which slots are used, [num_slots] bool, and which requests have rows, [batch] bool.
    """
    has_rows = row_starts.diff() > 0
    if slots is None:
        slots = torch.arange(len(has_rows), device=has_rows.device)
    else:
        valid = ((slots >= 0) & (slots < num_slots)) | ~has_rows
        check_values("slots", slots, valid, f"numbers in [0, {num_slots}), the number of slots in {of}")
    used = torch.zeros(num_slots, dtype=torch.bool, device=has_rows.device)
    used[slots[has_rows].long()] = True
    return used, has_rows
