"""Prompt lookup: a drafter without a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode.arguments import check_count


@dataclass(frozen=True)
class PromptLookup:
    """Draft what followed the last tokens when they occurred before: a drafter without a model.

    Of all suffixes of `min_ngram` to `max_ngram` tokens that occurred before, the longest is used, and its latest
    occurrence. A continuation that reaches the end of the sequence goes on with its own first tokens, so loops are drafted
    at full length.

    Args:
        max_ngram: the longest suffix to look for, at least 1.
        min_ngram: the shortest suffix to look for, from 1 to `max_ngram`. With 1 a single repeated token is enough to draft.
            From 2 on fewer steps have drafts, and more of these are accepted.

    Raises:
        TypeError: an argument is not an int.
        ValueError: `max_ngram` or `min_ngram` is less than 1, or `min_ngram` is more than `max_ngram`.

    Example:
        >>> import torch
        >>> from specdecode.integrations.transformers import PromptLookup
        >>> tokens = torch.tensor([[5, 6, 7, 8, 5, 6], [0, 0, 1, 2, 3, 4]])
        >>> PromptLookup().propose(tokens, lengths=torch.tensor([6, 4]), num_draft_tokens=5)
        tensor([[ 7,  8,  5,  6,  7],
                [-1, -1, -1, -1, -1]])
        >>> PromptLookup(min_ngram=3).propose(tokens, lengths=torch.tensor([6, 4]), num_draft_tokens=5)[0]
        tensor([-1, -1, -1, -1, -1])

    Source: Saxena, prompt lookup decoding (2023).
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        check_count("max_ngram", self.max_ngram)
        if check_count("min_ngram", self.min_ngram) > self.max_ngram:
            raise ValueError(f"min_ngram: expected at most max_ngram = {self.max_ngram}, got {self.min_ngram}")

    def propose(self, token_ids: Tensor, lengths: Tensor, num_draft_tokens: int) -> Tensor:
        """Return the drafts of each row.

        Args:
            token_ids: [batch, width] int64, right-aligned.
            lengths: [batch] int64: how many of a row's last columns are its tokens.
            num_draft_tokens: K.

        Returns:
            [batch, K] int64: drafts, or a row of -1 where nothing was found.
        """
        width = token_ids.shape[1]
        columns = torch.arange(width, device=token_ids.device)
        source = torch.full_like(lengths, -1)  # the column after the best occurrence
        for size in range(self.min_ngram, min(self.max_ngram, width - 1) + 1):  # a longer match replaces a shorter one
            windows = token_ids[:, :-1].unfold(1, size, 1)  # [batch, width - size, size]
            starts = columns[: width - size]
            matches = (windows == token_ids[:, None, -size:]).all(-1) & (starts >= (width - lengths)[:, None])
            latest = torch.where(matches, starts, -1).amax(1)
            source = torch.where(latest >= 0, latest + size, source)
        offsets = torch.arange(num_draft_tokens, device=token_ids.device) % (width - source)[:, None]
        drafts = token_ids.gather(1, (source[:, None] + offsets).clamp(min=0))
        return torch.where(source[:, None] >= 0, drafts, -1)
