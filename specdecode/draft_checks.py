"""Checks of what a caller gives of the draft rows: their logits, their vocabulary, and what came with each."""

import torch
from torch import Tensor

from specdecode.checks import (
    FLOATS,
    INTEGERS,
    Extent,
    check_device,
    check_tensor,
    check_type,
    check_values,
    on_host,
)
from specdecode.sampling import Truncation


def check_draft_rows(draft_logits: Tensor | None, draft_logsumexp: Tensor | None, width: int, extent: Extent) -> None:
    """Raise unless there is a row of logits for each draft, and a logsumexp for each row, if there are any."""
    if draft_logits is not None:
        check_tensor("draft_logits", draft_logits, FLOATS, (*extent.drafts, width), extent.device)
    if draft_logsumexp is not None:
        check_tensor("draft_logsumexp", draft_logsumexp, (torch.float32,), extent.drafts, extent.device)
        if draft_logits is None:
            raise ValueError("draft_logsumexp: given without the draft_logits that it belongs to")


def check_draft_vocab_ids(
    draft_vocab_ids: Tensor, draft_logits: Tensor | None, vocab: int, device: torch.device
) -> int:
    """Raise unless they are distinct ids of the target's tokens, one for each of draft_logits; return how many.

    Their values are checked only on the CPU.
    """
    name = "draft_vocab_ids"
    if draft_logits is None:
        raise ValueError(f"{name}: given without the draft_logits whose tokens they are")
    check_type("draft_logits", draft_logits, FLOATS)
    size = draft_logits.shape[-1] if draft_logits.ndim > 0 else 0
    if size == 0:
        expected = "a last dimension of at least one token, those of draft_vocab_ids"
        raise ValueError(f"draft_logits: expected {expected}, got shape {list(draft_logits.shape)}")
    check_type(name, draft_vocab_ids, INTEGERS)
    if draft_vocab_ids.shape != (size,):
        expected = f"shape [{size}], one id for each token of draft_logits"
        raise ValueError(f"{name}: expected {expected}, got {list(draft_vocab_ids.shape)}")
    check_device(name, draft_vocab_ids, device)
    if size > vocab:
        raise ValueError(f"{name}: expected at most {vocab} ids, as many as the target has tokens, got {size}")
    if on_host(draft_vocab_ids):
        inside = (draft_vocab_ids >= 0) & (draft_vocab_ids < vocab)
        check_values(name, draft_vocab_ids, inside, f"ids in [0, {vocab})")
        is_only = draft_vocab_ids.bincount()[draft_vocab_ids.long()] == 1
        check_values(name, draft_vocab_ids, is_only, "distinct ids")
    return size


def check_draft_cutoff(
    draft_cutoff: Tensor | None, draft_logsumexp: Tensor | None, draft_truncation: Truncation | None, extent: Extent
) -> None:
    """Raise unless a cutoff comes with each logsumexp of truncated draft rows, and with nothing else."""
    if draft_cutoff is not None:
        check_tensor("draft_cutoff", draft_cutoff, (torch.int64,), extent.drafts, extent.device)
        if draft_logsumexp is None:
            raise ValueError("draft_cutoff: given without the draft_logsumexp that it belongs to")
        if draft_truncation is None:
            raise ValueError("draft_cutoff: given, but the drafts were drawn without top_k, top_p and min_p")
    elif draft_logsumexp is not None and draft_truncation is not None:
        raise ValueError(
            "draft_cutoff: needed beside draft_logsumexp, because the drafts were drawn from truncated rows"
        )
