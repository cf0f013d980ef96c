"""Draft rows over their own vocabulary, in PyTorch: truncated by the draft's ids, then spread to the target's ids.

Only the rows of one chunk have the target's width at a time: they are truncated in the order of the draft's ids, then their
logits move to the target's ids. Tokens that the draft lacks get -inf, so that q = 0.
"""

from typing import Any

import torch
from torch import Tensor

from specdecode.arguments import on_host
from specdecode.eager.packed import IndexedRows


class DraftVocabRows:
    """Raw logits over the draft's own vocabulary, [..., draft_vocab], and the map from target tokens to draft ids."""

    def __init__(self, logits: Tensor | IndexedRows, draft_id_of_token: Tensor) -> None:
        """Initialise from rows and the draft id of each target token, [vocab] int64, -1 for tokens that the draft lacks."""
        self.logits, self.draft_id_of_token = logits, draft_id_of_token
        self.dtype = logits.dtype

    def __getitem__(self, key: Any) -> "DraftVocabRows":
        """Return some of the rows."""
        return DraftVocabRows(self.logits[key], self.draft_id_of_token)

    def gather(self) -> "DraftVocabRows":
        """Return the rows as a tensor, copied if they were given as indices into another tensor (`IndexedRows`)."""
        if isinstance(self.logits, Tensor):
            return self
        return DraftVocabRows(self.logits.gather(), self.draft_id_of_token)

    @property
    def tensor(self) -> Tensor:
        """The logits, after `gather`."""
        assert isinstance(self.logits, Tensor)
        return self.logits

    def spread(self, logits: Tensor, width: int) -> Tensor:
        """Return logits [..., draft_vocab or more] by the target's tokens, [..., width], with -inf for all other tokens."""
        rows = logits.new_full((*logits.shape[:-1], width), -torch.inf)
        ids = self.draft_id_of_token
        rows[..., : len(ids)] = logits.index_select(-1, ids.clamp(min=0)).masked_fill_(ids < 0, -torch.inf)
        return rows

    def weight_outside(self, logits: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor | None:
        """Return sum(exp((l - row_max) / T)) over the draft logits that belong to no target token, [...].

        Such logits exist only if ids could not be checked, on a device. On the CPU the result is None.
        """
        if on_host(self.draft_id_of_token):
            return None
        size = logits.shape[-1]
        ids = torch.where(self.draft_id_of_token < 0, size, self.draft_id_of_token)
        found = torch.zeros(size + 1, dtype=torch.bool, device=logits.device)  # the last entry: tokens without an id
        found.index_fill_(0, ids, True)
        weights = ((logits - row_max) / temperature[..., None]).exp()
        return weights.masked_fill_(found[:size], 0).sum(dim=-1)


def target_to_draft(draft_vocab_ids: Tensor, vocab: int) -> Tensor:
    """Return the draft id of each target token, [vocab] int64, -1 for tokens that the draft lacks.

    Values that could not be checked on the host are made harmless: an id outside the vocabulary is ignored, and of equal
    ids the first counts. The probabilities of other tokens do not change: the ignored mass belongs to no token.
    """
    ids = draft_vocab_ids.to(torch.int64)
    size = len(ids)
    inside = torch.where((ids >= 0) & (ids < vocab), ids, vocab)  # one entry more, for ids that are no tokens
    draft_id_of_token = torch.full((vocab + 1,), size, dtype=torch.int64, device=ids.device)
    draft_id_of_token.scatter_reduce_(0, inside, torch.arange(size, device=ids.device), "amin")
    return torch.where(draft_id_of_token < size, draft_id_of_token, -1)[:vocab]
