"""Adjustments in PyTorch: biases, penalties and masks, applied to rows of logits when they are copied for computation.

An index of rows replaces the tensor of logits. The rows of a few requests at a time are copied, in float32 (float64 stays
float64), and the adjustments are applied to the copy.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdecode.adjustments import MOST_COUNTED, SMALLEST_FACTOR, WORD, Adjustments
from specdecode.arguments import select
from specdecode.batch import Packing, RowBatch, VerificationBatch
from specdecode.eager.packed import IndexedRows, locate, rows_of


class RowIndex(NamedTuple):
    """The indices of rows into the adjustments: tensors of one shape, [...] int64."""

    slots: Tensor  # into tensors by slot: penalties, prompt masks, counts and biases
    requests: Tensor  # into the draft tokens, and masks by request
    offsets: Tensor  # the number of drafts before the row
    masks: Tensor  # into masks by row, in packed calls


class AdjustedRows:
    """Rows of logits that are adjusted when they are copied; used like a tensor of [..., vocab] logits.

    Args:
        logits: [..., vocab] raw logits.
        adjustments: the adjustments of all requests.
        draft_token_ids: [batch, num_draft_tokens] int, -1 for none.
        index: the slot, request, offset and mask of each row, [...] each.
    """

    def __init__(
        self, logits: Tensor | IndexedRows, adjustments: Adjustments, draft_token_ids: Tensor, index: RowIndex
    ) -> None:
        self.logits, self.adjustments, self.draft_token_ids = logits, adjustments, draft_token_ids
        self.index = index
        self.shape, self.ndim, self.device = logits.shape, logits.ndim, logits.device
        self.dtype = torch.promote_types(logits.dtype, torch.float32)

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        return self.shape[0]

    def __getitem__(self, key: Any) -> "AdjustedRows":
        """Return some of the rows, without a copy."""
        index = RowIndex(*(each[key] for each in self.index))
        return AdjustedRows(self.logits[key], self.adjustments, self.draft_token_ids, index)

    def gather(self) -> Tensor:
        """Return an adjusted copy of the rows, [..., vocab]."""
        rows = self.logits.gather() if isinstance(self.logits, IndexedRows) else self.logits
        rows = rows.to(self.dtype, copy=True)
        if self.adjustments.bias_ids is not None:
            rows = add_bias(rows, self.adjustments, self.index.slots)
        if self.adjustments.penalizes:
            rows = penalize(rows, self.adjustments, self.index, self.counts(rows))
        allowed_mask = self.adjustments.allowed_mask
        if allowed_mask is not None:
            index = self.index
            words = allowed_mask[index.masks] if allowed_mask.ndim == 2 else allowed_mask[index.requests, index.offsets]
            rows.masked_fill_(~bits_of(words, rows.shape[-1]), -torch.inf)
        return rows

    def counts(self, rows: Tensor) -> Tensor:
        """Return the counts of tokens before each row, including the drafts before it, [..., vocab] int32."""
        slots, requests, offsets, _ = self.index
        if self.adjustments.output_counts is None:
            counts = torch.zeros_like(rows, dtype=torch.int32)
        else:
            counts = self.adjustments.output_counts[slots].clamp(0, MOST_COUNTED)
        num_draft_tokens = self.draft_token_ids.shape[1]
        if num_draft_tokens == 0:
            return counts
        ids = self.draft_token_ids[requests].to(torch.int64)
        is_before = torch.arange(num_draft_tokens, device=rows.device) < offsets[..., None]
        is_before &= (ids >= 0) & (ids < counts.shape[-1])
        return counts.scatter_add(-1, ids.masked_fill(~is_before, 0), is_before.to(counts.dtype))


def add_bias(rows: Tensor, adjustments: Adjustments, slots: Tensor) -> Tensor:
    """Return l + b of [..., vocab] rows; a NaN bias, or one whose id is not a token, is 0."""
    assert adjustments.bias_ids is not None
    assert adjustments.bias is not None
    ids = adjustments.bias_ids[slots].to(torch.int64)
    bias = adjustments.bias[slots].to(rows.dtype)
    is_here = (ids >= 0) & (ids < rows.shape[-1]) & ~bias.isnan()
    return rows.scatter_add(-1, ids.masked_fill(~is_here, 0), bias.masked_fill(~is_here, 0))


def penalize(rows: Tensor, adjustments: Adjustments, index: RowIndex, counts: Tensor) -> Tensor:
    """Return penalized rows, [..., vocab], given the counts of emitted tokens."""
    repetition, frequency, presence = (
        None if penalty is None else row_penalties(penalty, float(neutral), index.slots, rows.dtype)
        for penalty, neutral in zip(adjustments[:3], (1, 0, 0))
    )
    is_emitted = counts > 0
    if repetition is not None:
        is_seen = is_emitted
        if adjustments.prompt_mask is not None:
            is_seen = is_emitted | bits_of(adjustments.prompt_mask[index.slots], rows.shape[-1])
        factor = torch.where(rows > 0, 1 / repetition, repetition)
        rows = torch.where(is_seen, rows * factor, rows)
    if frequency is not None:
        rows = rows - frequency * counts.to(rows.dtype)
    return rows if presence is None else rows - presence * is_emitted.to(rows.dtype)


def row_penalties(penalty: Tensor | float, neutral: float, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the penalty of each row, [..., 1], or [] if all rows have the same.

    Invalid values become neutral: the host does not read tensors on a device, so they were not checked.
    """
    if not isinstance(penalty, Tensor):
        return torch.full((), penalty, dtype=dtype, device=slots.device)  # avoids a copy from the host
    given = penalty.to(torch.float32).to(dtype)[slots][..., None]
    valid = given.isfinite()
    if neutral == 1:
        valid &= given >= SMALLEST_FACTOR
    return given.where(valid, neutral)


def bits_of(words: Tensor, width: int) -> Tensor:
    """Return the first `width` bits of masks, [..., width] bool; masks are [..., words] int32, lowest bits first."""
    shifts = torch.arange(WORD, device=words.device, dtype=words.dtype)
    return ((words[..., None] >> shifts) & 1).flatten(-2)[..., :width].bool()


def rows_and_slots(packing: Packing, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a packed call's requests, [batch, num_draft_tokens + 1] int64, and their slots, [batch] int64."""
    first, num_drafts, slots = locate(packing, num_rows)
    return rows_of(first, num_drafts, packing.num_draft_tokens), slots


def row_index(packing: Packing | None, num_rows: int, shape: torch.Size, device: torch.device) -> RowIndex:
    """Return the `RowIndex` of [batch, num_draft_tokens + 1] rows; a packed call has `num_rows` rows in all."""
    requests, offsets = (torch.arange(size, device=device) for size in shape)
    requests, offsets = requests[:, None].expand(shape), offsets.expand(shape)
    if packing is None:
        return RowIndex(requests, requests, offsets, requests)
    rows, slots = rows_and_slots(packing, num_rows)
    return RowIndex(slots[:, None].expand(shape), requests, offsets, rows)


def adjusted(batch: VerificationBatch, unpacked: VerificationBatch) -> VerificationBatch:
    """Return the unpacked batch with target rows that are adjusted when they are copied.

    `batch` is the call before unpacking; the two are the same if it is not packed.
    """
    logits, adjustments = unpacked.target_logits, batch.adjustments
    assert adjustments is not None
    index = row_index(batch.packing, len(batch.target_logits), logits.shape[:2], logits.device)
    draft_token_ids = unpacked.draft_token_ids
    if batch.packing is not None and batch.packing.path is not None:  # a round of a tree: all tokens on the path count
        draft_token_ids = batch.packing.path
        index = index._replace(offsets=index.offsets + draft_token_ids.shape[1])
    rows = AdjustedRows(logits, with_a_mask(adjustments), draft_token_ids, index)
    return unpacked._replace(target_logits=rows, adjustments=None)  # type: ignore[arg-type]


def adjusted_rows(batch: RowBatch) -> Any:
    """Return the rows of a batch without drafts, adjusted when they are copied."""
    if batch.adjustments is None:
        return batch.logits
    requests = torch.arange(len(batch.logits), device=batch.logits.device)
    index = RowIndex(requests, requests, torch.zeros_like(requests), requests)
    no_drafts = requests[:, None][:, :0]
    return AdjustedRows(batch.logits, batch.adjustments, no_drafts, index)


def with_a_mask(adjustments: Adjustments) -> Adjustments:
    """Return adjustments with at least one row of masks, if there are masks: requests without rows read the first."""
    mask = adjustments.allowed_mask
    if mask is None or len(mask) > 0:
        return adjustments
    return adjustments._replace(allowed_mask=mask.new_zeros(1, *mask.shape[1:]))


def by_request(batch: VerificationBatch, packing: Packing, requests: slice) -> Adjustments | None:
    """Return the adjustments of some requests of a packed batch, indexed by request instead of slot and row."""
    if batch.adjustments is None:
        return None
    rows, slots = (each[requests] for each in rows_and_slots(packing, len(batch.target_logits)))
    mask = with_a_mask(batch.adjustments).allowed_mask
    by_slot = select(batch.adjustments._replace(allowed_mask=None), slot=slots)
    return by_slot._replace(allowed_mask=None if mask is None else mask[rows])
