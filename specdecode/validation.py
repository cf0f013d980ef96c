"""An opt-in check of values: probabilities passed as logits, which otherwise raise no error.

Probabilities p differ by less than 1, so softmax(p / T) is nearly flat, and the text becomes noise without an error. A
row of probabilities has no negative number and sums to 1, unlike almost every row of logits. Log-probabilities are
correct logits: softmax(log p) is p.
"""

from typing import Literal

import torch
from torch import Tensor

from specdecode.batch import RowBatch, TreeBatch, VerificationBatch
from specdecode.eager import tree
from specdecode.eager.packed import IndexedRows, unpack
from specdecode.sharding import VocabShard, all_gather

Validate = Literal["values"]
"""The checks of logits in addition to type, shape and device."""

TOLERANCE = 0.01
"""The largest deviation from 1 of a sum of rounded probabilities: 1/256 in bfloat16, and 1/128 in float16 of 262,144
tokens."""


def check_step(batch: VerificationBatch, shard: VocabShard | None) -> None:
    """Raise if target logits or draft logits are probabilities in all rows that a step may read.

    Raises:
        ValueError: all rows are probabilities, or a CUDA graph is being captured.
    """
    vocab = batch.target_logits.shape[-1] if shard is None else shard.vocab_size
    packing, has_rows = batch.packing, None
    if packing is not None:
        batch, has_rows = unpack(batch, packing)
    ids = torch.nn.functional.pad(batch.draft_token_ids, (1, 0))  # 0 before the first draft: the first row is read
    matters = ((ids >= 0) & (ids < vocab)).cumprod(dim=1).bool()
    if has_rows is not None:
        matters &= has_rows[:, None]
    refuse_probabilities("target_logits", batch.target_logits, matters, shard)
    if batch.draft_logits is not None:
        of_columns = shard if batch.draft_vocab_ids is None else None
        refuse_probabilities("draft_logits", batch.draft_logits, matters[:, 1:], of_columns)


def check_tree(batch: TreeBatch) -> None:
    """Raise if target logits are probabilities at all nodes that are not padding, as `check_step` does."""
    walk, nodes = tree.start(batch), torch.arange(batch.parents.shape[1], device=batch.parents.device)
    matters = walk.parents >= 0
    matters[:, 0] = walk.row >= 0
    last_row = max(0, len(batch.rows.target_logits) - 1)
    rows = IndexedRows(batch.rows.target_logits, ((walk.first_row[:, None] + nodes).clamp(max=last_row),))
    refuse_probabilities("target_logits", rows, matters, None)


def check_rows(batch: RowBatch, shard: VocabShard | None) -> None:
    """Raise if logits are probabilities in all rows, as `check_step` does."""
    matters = torch.ones(len(batch.logits), dtype=torch.bool, device=batch.logits.device)
    refuse_probabilities("logits", batch.logits, matters, shard)


def refuse_probabilities(name: str, logits: Tensor | IndexedRows, matters: Tensor, shard: VocabShard | None) -> None:
    """Raise if all rows that matter are probabilities; this waits for the device.

    Args:
        name: of the argument.
        logits: [..., vocab], of this rank.
        matters: [...] bool, whether the row matters.
        shard: the part of the vocabulary that the logits cover; None: the whole vocabulary.
    """
    refuse_capture(matters.device)
    sums, least = sums_and_minima(logits, shard)
    sums, least, matters = torch.stack([sums, least, matters.to(sums.dtype)]).cpu()
    sums, least = sums[matters == 1], least[matters == 1]
    if len(sums) > 0 and bool(((least >= 0) & ((sums - 1).abs() <= TOLERANCE)).all()):
        found = f"no number is negative, and each of {len(sums)} rows sums to 1 ({sums.min():.4f} to {sums.max():.4f})"
        instead = "pass the model's logits, before softmax, or log-probabilities"
        raise ValueError(f"{name}: expected raw logits, got probabilities: {found}; {instead}")


def refuse_capture(device: torch.device) -> None:
    """Raise while a CUDA graph is captured, when waiting is impossible."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        expected = "None while a CUDA graph is captured, because the check waits for the device"
        raise ValueError(f"validate: expected {expected}, got 'values'")


def sums_and_minima(logits: Tensor | IndexedRows, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Return the sum and the least number of each row, [...] float32 or float64 each."""
    if isinstance(logits, IndexedRows):  # reduce before the gather, so that no row is copied
        sums, least = sums_and_minima(logits.logits, shard)
        return sums[logits.index], least[logits.index]
    sums = logits.sum(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    least = logits.amin(dim=-1).to(sums.dtype) if logits.shape[-1] > 0 else torch.zeros_like(sums)
    if shard is None or sums.numel() == 0 or shard.are_whole(logits):  # without rows no rank exchanges
        return sums, least
    of_ranks = all_gather(torch.stack([sums, least]), shard.group)
    return of_ranks[:, 0].sum(dim=0), of_ranks[:, 1].amin(dim=0)
