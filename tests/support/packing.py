"""Packed calls that say what a padded call says: rows without gaps, state in slots, all that is unused poisoned."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdecode import AcceptanceSchedule, RejectionSampler, SamplerOutput, Sampling
from tests.support.differential import Case

NAN = float("nan")
SCHEDULE = AcceptanceSchedule.from_mean_rate(0.6, num_draft_tokens=8)
NOBODYS = 2  # rows before the first request's and after the last one's


def with_counts(batch: Case, counts: Sequence[int]) -> Case:
    """The batch with so many drafts at most of each request."""
    token_ids = batch.draft_token_ids.clone()
    for ids, count in zip(token_ids, counts):
        ids[count:] = -1
    return replace(batch, draft_token_ids=token_ids)


def packed_rows(batch: Case, counts: Sequence[int], dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    """The rows and draft tokens of a batch as a packed call takes them, [num_rows, ...], and where they start.

    What nobody looks at is NaN or no token: rows of no request, ids after a -1. The id of a last row is a likely token.
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
    """`row_positions` of the rows of a packed call, given [batch] positions of first drafts; only a first row's is right."""
    result = positions.new_full((len(rows["target_logits"]),), -9)
    result[rows["row_starts"][:-1].long()] = positions - 1
    return result


def in_slots(value: Any, slots: Tensor, num_slots: int) -> Any:
    """What is by request as it is by slot, the unused ones holding what is no valid value; numbers stay as they are."""
    if isinstance(value, Sampling):
        return Sampling(*[in_slots(part, slots, num_slots) for part in value])
    if not isinstance(value, Tensor):
        return value
    by_slot = value.new_full((num_slots, *value.shape[1:]), NAN if value.is_floating_point() else -(2**30))
    by_slot[slots.long()] = value
    return by_slot


LOW, HIGH = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
HOSTILE_STARTS = [
    [
        HIGH,
        LOW,
        1,
        4,
        3,
        8,
        8,
        10,
    ],  # decreasing, from far before the first, sound, decreasing, five rows, none, too far
    [0, 1, 2, 3, 5, 6, 7, 8],
]
"""Of seven requests of three drafts at most, where there are eight rows and five slots."""

HOSTILE_SLOTS = [[4, 0, 1, 2, 3, 2, 2], [0, 5, -1, HIGH, LOW, 2**31, 4]]


def is_sound(starts: Sequence[int], slots: Sequence[int], request: int) -> bool:
    """Whether a request of those has rows and a slot."""
    first, end = starts[request : request + 2]
    return 0 <= first < end <= 8 and end - first <= 4 and 0 <= slots[request] < 5


def in_one_slot(value: Any, slots: Tensor) -> Any:
    """What is by request as it is if requests with the same slot share what the first of them has."""
    if isinstance(value, Sampling):
        return Sampling(*[in_one_slot(part, slots) for part in value])
    firsts = [slots.tolist().index(slot) for slot in slots.tolist()]
    return value[firsts] if isinstance(value, Tensor) else value


def numbers_of(batch: Case, draw: random.Random, method: str, place: tuple[str, str]) -> dict:
    """Options of a call, each a number, a tensor by request, or not given, and with draft logits what comes with them."""
    requests, device = len(batch.seeds), place[1]

    def limit(*values: float, dtype: torch.dtype = torch.float32) -> float | Tensor | None:
        each = torch.tensor([draw.choice(values) for _ in range(requests)], dtype=dtype, device=device)
        return draw.choice([None, values[0], each])

    options = {
        "temperature": draw.choice([0.7, 0.0, batch.temperature, batch.temperature]),
        "seeds": draw.choice([5, batch.seeds, batch.seeds]),
        "positions": draw.choice([None, batch.positions]),
        "logprobs": draw.choice([None, "processed", "raw"]),
    }
    if draw.random() < 0.5:
        options |= {
            "top_k": limit(5, 0, 20, dtype=torch.int32),
            "top_p": limit(0.9, 1.0, 0.3),
            "min_p": limit(0.05, 0.0),
        }
    if draw.random() < 0.7:
        options["draft_logits"] = batch.draft_logits
        kind = draw.choice(["read", "given", "otherwise"])
        if kind == "otherwise" and place[0] == "eager":
            options["draft_sampling"] = Sampling(
                draw.choice([1.2, batch.temperature.clamp(min=0.5)]), limit(9, 4, dtype=torch.int64)
            )
        if kind == "given":
            with_draft = {name: options.get(name) for name in ("top_k", "top_p", "min_p")}
            drafts = [
                sampler_of(method, place[0]).draft(
                    batch.draft_logits[:, i], options["temperature"], options["seeds"], offset=i, **with_draft
                )
                for i in range(batch.draft_logits.shape[1])
            ]
            if drafts:
                options["draft_logsumexp"] = torch.stack([draft.logsumexp for draft in drafts], 1)
                if drafts[0].cutoff is not None:
                    options["draft_cutoff"] = torch.stack([draft.cutoff for draft in drafts], 1)
    return options


METHODS = ["strict", "probabilistic", "block", "synthetic"]


def sampler_of(method: str, backend: str = "eager") -> RejectionSampler:
    return RejectionSampler(method, backend=backend, schedule=SCHEDULE if method == "synthetic" else None)


def assert_same(one: SamplerOutput, other: SamplerOutput) -> None:
    for name, got, want in zip(one._fields, one, other):
        if got is not want:  # what is absent is None
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=name)
