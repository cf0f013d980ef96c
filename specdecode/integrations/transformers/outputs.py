"""The output of `generate`, and the `Step` that it passes to `on_step`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from specdecode import AcceptanceStats


class TokenKind(IntEnum):
    """The origin of a generated token."""

    PLAIN = 0
    """Sampled from the target where nothing was drafted."""
    ACCEPTED = 1
    """An accepted draft."""
    RECOVERED = 2
    """Emitted in place of a rejected draft."""
    BONUS = 3
    """Emitted after drafts that were all accepted."""


class Step(NamedTuple):
    """The tokens that one step emitted for one request: the argument of `on_step`."""

    request: int
    """Row of `sequences`: the row of `input_ids`, times `num_return_sequences`, plus the number of the continuation."""

    token_ids: list[int]
    """New tokens, a stop token included: accepted drafts, then at most one other."""

    kinds: list[TokenKind]
    """The kind of each new token."""

    draft_token_ids: list[int]
    """All drafts, accepted or rejected; drafts of a tree level by level."""


@dataclass(frozen=True)
class GenerationOutput:
    """The result of `generate`, with tensors on the device of `input_ids`."""

    sequences: Tensor
    """[batch, prompt + most new tokens] int64: the prompts as given, new tokens, then padding: the config's pad token, else
    the first stop token, else 0. With `num_return_sequences`, each prompt has as many consecutive rows, here and below."""

    num_generated: Tensor
    """[batch] int64: new tokens, a stop token included."""

    token_kinds: Tensor
    """[batch, most new tokens] int8: the `TokenKind` of each new token, -1 in the padding."""

    stats: AcceptanceStats | None
    """Acceptance of the drafts that were verified, None without a drafter. Drafts past the length limit or after the end of
    the text are not verified. Tokens after the end of the text count neither as accepted nor in the acceptance length."""

    target_calls: int
    """Forward passes of the target."""

    draft_calls: int
    """Forward passes of the draft model; 0 where there is none."""
