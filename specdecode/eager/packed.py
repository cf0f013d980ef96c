"""Packed calls in PyTorch, converted to padded ones: small tensors are gathered, and an index selects rows of logits.

All other code then works as if the call were not packed. The rows of a few requests at a time are copied when they are
computed.
"""

from typing import Any

import torch
from torch import Tensor

from specdecode.arguments import select
from specdecode.batch import Packing, SamplerOutput, VerificationBatch


class IndexedRows:
    """Rows of logits selected by an index, without a copy; used like a tensor of [..., vocab] logits."""

    def __init__(self, logits: Tensor, index: tuple[Tensor, ...]) -> None:
        """Select `logits[index]`; the tensors of the index have the same shape."""
        self.logits, self.index = logits, index
        self.shape = torch.Size((*index[0].shape, logits.shape[-1]))
        self.ndim, self.dtype, self.device = len(self.shape), logits.dtype, logits.device

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        return self.shape[0]

    def __getitem__(self, key: Any) -> "IndexedRows":
        """Return some of the rows, without a copy."""
        return IndexedRows(self.logits, tuple(index[key] for index in self.index))

    def gather(self) -> Tensor:
        """Return a copy of the rows, [..., vocab]."""
        return self.logits[self.index]


def locate(packing: Packing, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first row, number of drafts and slot of each request, [batch] int64 each.

    A request without rows, or with invalid rows or slot, has -1 drafts; its first row and its slot are 0.
    """
    starts = packing.row_starts.to(torch.int64)
    first, end = (starts, starts + 1) if packing.is_round else (starts[:-1], starts[1:])
    slots = torch.arange(len(first), device=first.device) if packing.slots is None else packing.slots.to(torch.int64)
    is_valid = (first >= 0) & (first < end) & (end <= num_rows) & (end - first <= packing.num_draft_tokens + 1)
    is_valid &= (slots >= 0) & (slots < packing.num_slots)
    return first * is_valid, torch.where(is_valid, end - first - 1, -1), slots * is_valid


def rows_of(first: Tensor, num_drafts: Tensor, most: int) -> Tensor:
    """Return the rows of each request, [batch, most + 1] int64, given its first row and number of drafts.

    Rows after a request's last are never used, so any index is valid.
    """
    offsets = torch.arange(most + 1, device=first.device)
    return torch.minimum(first[:, None] + offsets, first[:, None] + num_drafts.clamp(min=0)[:, None])


def unpack(batch: VerificationBatch, packing: Packing) -> tuple[VerificationBatch, Tensor]:
    """Return the padded form of a packed batch, and whether each request has rows, [batch] bool."""
    logits, ids = batch.target_logits, batch.draft_token_ids
    first, num_drafts, slots = locate(packing, len(logits))
    if len(logits) == 0:  # requests without rows read this row
        logits = logits.new_zeros(1, logits.shape[1])
    if len(ids) < len(logits):  # the last row may have no entry
        ids = torch.nn.functional.pad(ids, (0, 1))
    rows = rows_of(first, num_drafts, packing.num_draft_tokens)
    offsets = torch.arange(packing.num_draft_tokens, device=first.device)
    token_ids = ids[rows[:, :-1]].masked_fill(offsets >= num_drafts[:, None], -1)
    draft_logits = None
    if batch.draft_logits is not None:
        draft_logits = IndexedRows(
            batch.draft_logits, (slots[:, None].expand_as(token_ids), offsets.expand_as(token_ids))
        )

    positions = batch.positions
    if packing.row_positions is not None:
        positions = torch.nn.functional.pad(packing.row_positions, (0, 1))[first] + 1  # one after the fed token

    # The other tensors are gathered by slot. Adjustments stay by slot: `AdjustedRows` indexes them.
    left_out: Any = {"draft_logits": None, "adjustments": None, "packing": None}
    by_request = select(batch._replace(**left_out), slot=slots)
    unpacked = by_request._replace(
        target_logits=IndexedRows(logits, (rows,)),  # type: ignore[arg-type] # duck-typed as a tensor
        draft_token_ids=token_ids,
        draft_logits=draft_logits,  # type: ignore[arg-type]
        seeds=batch.seeds if packing.seeds_by_request else by_request.seeds,
        positions=positions,
    )
    return unpacked, num_drafts >= 0


def mark_invalid(output: SamplerOutput, has_rows: Tensor) -> SamplerOutput:
    """Return the output with requests without rows marked invalid: they emit token 0, the only kept token."""
    output.token_ids[:, 0].mul_(has_rows)
    if output.logprobs is not None:
        output.logprobs[:, 0].masked_fill_(~has_rows, 0)
    lists = (output.top_token_ids, -1, 0), (output.top_logprobs, -torch.inf, 0), (output.kept_token_ids, -1, 0)
    for each, nothing, first in lists:
        if each is not None:
            each[:, 0].masked_fill_(~has_rows[:, None], nothing)
            each[:, 0, 0].masked_fill_(~has_rows, first)
    for number, of_token in (output.num_kept, 1), (output.kept_cutoff, 0):
        if number is not None:
            number[:, 0].masked_fill_(~has_rows, of_token)
    return output._replace(invalid=output.invalid | ~has_rows)
