"""Packed calls equivalent to a padded call: rows without gaps, state in slots, unused values poisoned."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdecode import AcceptanceSchedule, RejectionSampler, Sampling, VocabShard
from tests.support.differential import Case

NAN = float("nan")
SCHEDULE = AcceptanceSchedule.from_mean_rate(0.6, num_draft_tokens=8)
NOBODYS = 2  # rows before the first request's and after the last request's


def with_counts(batch: Case, counts: Sequence[int]) -> Case:
    """Return the batch with at most `counts` drafts of each request."""
    token_ids = batch.draft_token_ids.clone()
    for ids, count in zip(token_ids, counts):
        ids[count:] = -1
    return replace(batch, draft_token_ids=token_ids)


def packed_rows(batch: Case, counts: Sequence[int], dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    """Return the rows and draft tokens of a batch for a packed call, [num_rows, ...], and the row starts.

    Unused values are NaN or invalid: rows of no request, ids after a -1. The id of a last row is a likely token.
    """
    device = batch.target_logits.device
    none = [batch.target_logits.new_full((NOBODYS, batch.target_logits.shape[2]), NAN)]
    rows = [logits[: count + 1] for logits, count in zip(batch.target_logits, counts)]
    ids = [torch.tensor([-9, -9])]
    for request, (token_ids, count) in enumerate(zip(batch.draft_token_ids.cpu(), counts)):
        ended = (token_ids[:count] == -1).cumsum(0) > 1
        likely = batch.target_logits[request, count].argmax().cpu()
        ids += [token_ids[:count].masked_fill(ended, 2**30), likely[None]]
    starts = [NOBODYS]
    for count in counts:
        starts.append(starts[-1] + count + 1)
    return {
        "target_logits": torch.cat(none + rows + none),
        "draft_token_ids": torch.cat([*ids, ids[0]]).to(device, batch.draft_token_ids.dtype),
        "row_starts": torch.tensor(starts, dtype=dtype, device=device),
        "num_draft_tokens": batch.draft_token_ids.shape[1],
    }


def fed_positions(positions: Tensor, rows: dict[str, Any]) -> Tensor:
    """Return the `row_positions` of a packed call, right only for first rows, given [batch] positions of first drafts."""
    result = positions.new_full((len(rows["target_logits"]),), -9)
    result[rows["row_starts"][:-1].long()] = positions - 1
    return result


def in_slots(value: Any, slots: Tensor, num_slots: int) -> Any:
    """Return a tensor by request as a tensor by slot, with invalid values in unused slots; numbers are unchanged."""
    if isinstance(value, Sampling):
        return Sampling(*[in_slots(part, slots, num_slots) for part in value])
    if not isinstance(value, Tensor):
        return value
    by_slot = value.new_full((num_slots, *value.shape[1:]), NAN if value.is_floating_point() else -(2**30))
    by_slot[slots.long()] = value
    return by_slot


def sampler_of(method: str, shard: VocabShard | None = None, backend: str = "auto") -> RejectionSampler:
    schedule = SCHEDULE if method == "synthetic" else None
    return RejectionSampler(method, backend=backend, schedule=schedule, shard=shard)
