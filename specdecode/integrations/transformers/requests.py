"""The requests of a batch, and the movement of their columns from step to step.

The tokens of a batch are right-aligned in one tensor, and the caches hold the same columns:

    one step    . . a b c | x y z      three drafts each: the first request keeps x, then emits u;
                d e f g h | x y z      the second keeps all three, then emits v
    the next    . . . . a b c x u      both are right-aligned again, and the columns of the caches were moved
                d e f g h x y z v      in the same way: rejected columns are gone, no gaps are left to mask

So a request's columns are consecutive, whatever the other requests accept, and masks that count columns (sliding windows,
ALiBi) stay correct. The caches are never longer than the longest request needs. For one request, or if all requests accept
equally many drafts, moving is only a crop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from specdecode import Sampling
from specdecode.integrations.transformers.outputs import Step, TokenKind


@dataclass
class Request:
    """The state of one row of `input_ids`. It leaves the batch when it is finished."""

    row: int
    prompt_length: int  # padding not counted
    limit: int  # the most tokens that it may have, prompt included
    token_ids: list[int] = field(default_factory=list)  # new tokens
    kinds: list[TokenKind] = field(default_factory=list)
    finished: bool = False

    @property
    def length(self) -> int:
        """The number of tokens so far, prompt included."""
        return self.prompt_length + len(self.token_ids)

    def advance(self, token_ids: list[int], num_drafts: int, draft_token_ids: list[int], ends: list[bool]) -> Step:
        """Append the tokens that a step emitted, up to the first token that ends the text.

        Args:
            token_ids: the emitted tokens, then -1.
            num_drafts: the number of drafts that the step verified.
            draft_token_ids: the drafts, and -1 where there is none.
            ends: whether each of `token_ids` ends the text.
        """
        emitted = list(takewhile(lambda token: token >= 0, token_ids))
        drafted = [token for token in draft_token_ids if token >= 0]
        num_accepted = len(emitted) - 1
        last_of_all = TokenKind.BONUS if drafted else TokenKind.PLAIN
        last = TokenKind.RECOVERED if num_accepted < num_drafts else last_of_all
        end = next((i + 1 for i, is_end in enumerate(ends) if is_end), None)
        step = Step(self.row, emitted[:end], [*[TokenKind.ACCEPTED] * num_accepted, last][:end], drafted)
        self.token_ids += step.token_ids
        self.kinds += step.kinds
        self.finished = end is not None or self.length >= self.limit
        return step


class Batch(NamedTuple):
    """The requests that are not finished, and their tensors."""

    requests: list[Request]
    tokens: Tensor  # [requests, width] int64, right-aligned
    lengths: Tensor  # [requests] int64: the number of tokens in each row, which are its last columns
    sampling: Sampling
    seeds: Tensor  # [requests] int64


class Alignment:
    """The columns of unfinished requests that the next step keeps, right-aligned again.

    A row's padding on the left changes from old_width - before to width - after columns. So its new column j is column
    j + (old_width - before) - (width - after) of the old row, in the tokens and in every cache.

    Args:
        rows: the rows that are not finished.
        before: the length of every row before the step.
        after: the lengths of the rows that are not finished, after the step.
        old_width: the number of columns without drafts, before the step.
        device: where the tokens are.
    """

    def __init__(
        self, rows: list[int], before: list[int], after: list[int], old_width: int, device: torch.device
    ) -> None:
        self.width = max(after)
        shifts = [(old_width - before[row]) - (self.width - length) for row, length in zip(rows, after)]
        self.max_shift = max(shifts)
        self.is_crop = min(shifts) == self.max_shift
        self.rows = None if len(rows) == len(before) else torch.tensor(rows, device=device)
        columns = torch.arange(self.width, device=device) + torch.tensor(shifts, device=device)[:, None]
        self.columns = columns.clamp(min=0)  # padding may hold any column

    def select(self, values: Tensor) -> Tensor:
        """Return the rows of requests that are not finished."""
        return values if self.rows is None else values[self.rows.to(values.device)]

    def __call__(self, values: Tensor, num_columns: int, dim: int) -> Tensor:
        """Return the first `num_columns` new columns, along dimension `dim`; dimension 0 is the requests."""
        values = self.select(values)
        if self.is_crop:
            return values.narrow(dim, self.max_shift, num_columns)
        columns = self.columns[:, :num_columns].to(values.device)
        shape = [1] * values.ndim
        shape[0], shape[dim] = columns.shape
        return values.take_along_dim(columns.view(shape), dim)


def map_tensors(function: Callable[[Tensor], Tensor], sampling: Sampling) -> Sampling:
    """Return the sampling parameters with `function` applied to tensors; numbers stay as they are."""
    return Sampling._make(function(value) if isinstance(value, Tensor) else value for value in sampling)
