"""Packed calls: the arguments that say where each request's rows and state are, and their checks.

On the CPU their values are checked. On a device they are not read, because a replayed CUDA graph may change them: there the
backends take a request whose rows or slot cannot be for one that has none.
"""

import torch
from torch import Tensor

from specdecode.batch import (
    INTEGERS,
    MOST_DRAFT_TOKENS,
    Logprobs,
    Packing,
    Sampling,
    VerificationBatch,
    check_count,
    check_device,
    check_logits,
    check_tensor,
    check_type,
    check_values,
    on_host,
    plain,
)
from specdecode.sharding import VocabShard


def check_packed(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None,
    draft_logsumexp: Tensor | None,
    temperature: Tensor | float,
    seeds: Tensor | int | None,
    positions: Tensor | None,
    top_k: Tensor | int | None,
    top_p: Tensor | float | None,
    min_p: Tensor | float | None,
    draft_sampling: Sampling | None,
    draft_cutoff: Tensor | None,
    logprobs: Logprobs | None,
    draft_vocab_ids: Tensor | None,
    shard: VocabShard | None,
    row_starts: Tensor,
    num_draft_tokens: int | None,
    slots: Tensor | None,
) -> VerificationBatch:
    """Build a batch from the arguments of a packed call.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value.
    """
    most = check_rows(target_logits, draft_token_ids, row_starts, num_draft_tokens, shard)
    truncation = top_k, top_p, min_p, draft_sampling
    by_slot = draft_logits, temperature, seeds, *truncation, draft_logsumexp, draft_cutoff
    num_slots, slots = check_slots(slots, row_starts, by_slot)
    packing = Packing(plain(row_starts), most, slots, num_slots, seeds is None)
    tensors = target_logits, draft_token_ids, draft_logits, draft_logsumexp
    others = draft_cutoff, logprobs, draft_vocab_ids, shard
    return VerificationBatch.check(*tensors, temperature, seeds, positions, *truncation, *others, packing)


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
)
"""The arguments of which some may be tensors by slot."""


def check_rows(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    row_starts: Tensor,
    num_draft_tokens: int | None,
    shard: VocabShard | None,
) -> int:
    """Raise unless logits, tokens and the rows of each request fit together; return the most drafts of a request."""
    num_rows, vocab = check_logits("target_logits", target_logits, ("num_rows", "vocab"), shard)
    device = target_logits.device
    check_tensor("draft_token_ids", draft_token_ids, INTEGERS, (num_rows,), device)
    most = check_count("num_draft_tokens", num_draft_tokens, MOST_DRAFT_TOKENS, least=0)
    check_type("row_starts", row_starts, INTEGERS)
    if row_starts.ndim != 1 or row_starts.shape[0] == 0:
        raise ValueError(f"row_starts: expected shape [batch + 1], got {list(row_starts.shape)}")
    check_device("row_starts", row_starts, device)
    if on_host(row_starts):
        check_row_starts(row_starts, num_rows, most)
        check_judged(draft_token_ids, row_starts, vocab)
    return most


def check_row_starts(row_starts: Tensor, num_rows: int, most: int) -> None:
    """Raise unless the rows of every request are rows, and no more than it may have."""
    inside = (row_starts >= 0) & (row_starts <= num_rows)
    check_values("row_starts", row_starts, inside, f"numbers in [0, {num_rows}], the number of rows")
    counts = row_starts.diff()
    check_values("row_starts", row_starts[1:], counts >= 0, "numbers that do not decrease")
    expected = f"at most num_draft_tokens + 1 = {most + 1} rows for each request"
    check_values("row_starts", counts, counts <= most + 1, expected)


def check_judged(draft_token_ids: Tensor, row_starts: Tensor, vocab: int) -> None:
    """Raise on an id outside the vocabulary that a row judges: not after a -1, and not that of a request's last row."""
    counts = row_starts.diff()
    requests = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = int(row_starts[0])
    rows = torch.arange(len(requests)) + first
    ids = draft_token_ids[rows]
    ends = (ids == -1).cumsum(0)
    before = torch.nn.functional.pad(ends, (1, 0))[(row_starts[requests] - first).long()]
    is_judged = (rows + 1 < row_starts[requests + 1]) & (ends == before)
    valid = torch.ones(len(draft_token_ids), dtype=torch.bool)
    valid[rows] = ~is_judged | ((ids >= 0) & (ids < vocab))
    check_values("draft_token_ids", draft_token_ids, valid, f"ids in [0, {vocab}), or -1 for no draft")


def check_slots(
    slots: Tensor | None, row_starts: Tensor, by_slot: tuple[Tensor | float | Sampling | None, ...]
) -> tuple[int, Tensor | None]:
    """Return how many slots there are, and slots; None if nothing is by slot, or a request's slot is the request itself."""
    batch = row_starts.shape[0] - 1
    if slots is not None:
        check_tensor("slots", slots, INTEGERS, (batch,), row_starts.device)
    for name, argument in zip(BY_SLOT, by_slot):
        for part in argument if isinstance(argument, Sampling) else (argument,):
            if isinstance(part, Tensor) and part.ndim > 0:
                return check_num_slots(name, part.shape[0], slots, row_starts)
    return batch, None


def check_num_slots(name: str, num_slots: int, slots: Tensor | None, row_starts: Tensor) -> tuple[int, Tensor | None]:
    """Return the number of slots and slots, or raise unless each request has one; the number is that of an argument."""
    batch = row_starts.shape[0] - 1
    if slots is None:
        if num_slots < batch:
            raise ValueError(
                f"{name}: expected a slot for each of {batch} requests, because slots is None, got {num_slots}"
            )
        return num_slots, None
    if num_slots == 0 and batch > 0:
        raise ValueError(f"{name}: expected at least one slot, got 0")
    if on_host(slots):
        valid = ((slots >= 0) & (slots < num_slots)) | (row_starts.diff() == 0)
        check_values("slots", slots, valid, f"numbers in [0, {num_slots}), the number of slots in {name}")
    return num_slots, plain(slots)
