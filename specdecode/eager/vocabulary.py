"""Draft rows over their own vocabulary, in PyTorch: truncated over that vocabulary, and spread chunk by chunk.

Draft rows stay short until they are computed. Then the rows of a chunk are truncated in the order of the draft's ids, and
their logits are moved to the target's ids, with -inf for tokens that the draft lacks: softmax gives 0 there.
"""

from typing import Any

import torch
from torch import Tensor

from specdecode.arguments import on_host
from specdecode.eager.packed import IndexedRows


class DraftVocabRows:
    """Raw logits over the draft's own vocabulary, [..., draft_vocab], and the map from target tokens to draft ids."""

    def __init__(self, logits: Tensor | IndexedRows, draft_ids: Tensor) -> None:
        """Take rows, and the draft id of each target token, [vocab] int64, -1 for tokens that the draft lacks."""
        self.logits, self.draft_ids = logits, draft_ids
        self.dtype = logits.dtype

    def __getitem__(self, key: Any) -> "DraftVocabRows":
        """Return some of the rows."""
        return DraftVocabRows(self.logits[key], self.draft_ids)

    def gather(self) -> "DraftVocabRows":
        """Copy the rows, if they are still an index."""
        return DraftVocabRows(self.logits.gather(), self.draft_ids) if isinstance(self.logits, IndexedRows) else self

    @property
    def tensor(self) -> Tensor:
        """The logits of rows that have been gathered."""
        assert isinstance(self.logits, Tensor)
        return self.logits

    def spread(self, logits: Tensor, width: int) -> Tensor:
        """Move [..., draft_vocab or more] logits to the target's tokens, [..., width], with -inf for all other tokens."""
        rows = logits.new_full((*logits.shape[:-1], width), -torch.inf)
        of_target = logits.index_select(-1, self.draft_ids.clamp(min=0)).masked_fill_(self.draft_ids < 0, -torch.inf)
        rows[..., : len(self.draft_ids)] = of_target
        return rows

    def weight_outside(self, logits: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor | None:
        """Return sum(exp((l - row_max) / T)) over the draft logits that belong to no target token, [...].

        Such logits exist only if ids could not be checked: on the CPU the result is None.
        """
        if on_host(self.draft_ids):
            return None
        size = logits.shape[-1]
        found = torch.zeros(size + 1, dtype=torch.bool, device=logits.device)
        found.index_fill_(0, torch.where(self.draft_ids < 0, size, self.draft_ids), True)
        weights = ((logits - row_max) / temperature[..., None]).exp()
        return weights.masked_fill_(found[:size], 0).sum(dim=-1)


def target_to_draft(draft_vocab_ids: Tensor, vocab: int) -> Tensor:
    """Return the draft id of each target token, [vocab] int64, -1 for tokens that the draft lacks.

    Values that could not be checked on the host are made harmless: an id outside the vocabulary is ignored, and of equal
    ids the first counts. The probabilities of other tokens do not change: the ignored mass belongs to no token.
    """
    ids = draft_vocab_ids.to(torch.int64)
    size = len(ids)
    inside = torch.where((ids >= 0) & (ids < vocab), ids, vocab)  # one more entry, removed at the end
    draft_ids = torch.full((vocab + 1,), size, dtype=torch.int64, device=ids.device)
    draft_ids.scatter_reduce_(0, inside, torch.arange(size, device=ids.device), "amin")
    return torch.where(draft_ids < size, draft_ids, -1)[:vocab]
