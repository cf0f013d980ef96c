"""Checked bundles for tests that call a backend's functions themselves."""

from typing import Any

from torch import Tensor

from specdecode.arguments import check_rows, check_verification
from specdecode.batch import RowBatch, VerificationBatch


def verification_batch(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    seeds: Tensor | int | None = None,
    positions: Tensor | None = None,
    top_k: Tensor | int | None = None,
    **options: Any,
) -> VerificationBatch:
    rows: Any = {"draft_logsumexp": draft_logsumexp, "temperature": temperature, "seeds": seeds, "positions": positions}
    return check_verification(target_logits, draft_token_ids, draft_logits, **rows, top_k=top_k, **options)


def row_batch(
    logits: Tensor,
    temperature: Tensor | float,
    seeds: Tensor | int | None = None,
    positions: Tensor | None = None,
    **options: Any,
) -> RowBatch:
    return check_rows(logits, temperature, seeds, positions, **options)
