"""Early ends of texts: stop tokens, and stop strings by transformers' own criterion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StopStringCriteria

from specdecode.arguments import shown

NO_TOKEN = torch.iinfo(torch.int32).max
"""In place of padding: the criterion takes ids beyond its vocabulary for tokens that are in no string."""


class Stops:
    """The stop tokens and stop strings of a call.

    Args:
        stop_ids: the stop tokens.
        criterion: finds stop strings, None if there are none.
        device: where tokens are compared.
    """

    def __init__(self, stop_ids: list[int], criterion: StopStringCriteria | None, device: torch.device) -> None:
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        self.criterion = criterion

    def __call__(self, tokens: Tensor, lengths: Tensor, new_token_ids: Tensor) -> Tensor:
        """Return the mask of new tokens that end the text.

        A stop string ends a text with the token that completes it. It may have begun in the prompt.

        Args:
            tokens: [requests, width] int64, right-aligned.
            lengths: [requests] int64: how many of a row's last columns are its tokens.
            new_token_ids: [requests, new] int64: what follows, -1 = no token.

        Returns:
            [requests, new] bool.
        """
        ends = torch.isin(new_token_ids, self.stop_ids)
        if self.criterion is None or not new_token_ids.numel():
            return ends
        num_new, size = new_token_ids.shape[1], self.criterion.maximum_token_len
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        texts = tokens.masked_fill(columns < (tokens.shape[1] - lengths)[:, None], NO_TOKEN)
        texts = torch.cat([texts, new_token_ids.masked_fill(new_token_ids < 0, NO_TOKEN)], dim=1)
        texts = torch.nn.functional.pad(texts, (max(0, size - tokens.shape[1] - 1), 0), value=NO_TOKEN)
        windows = texts.unfold(1, size, 1)[:, -num_new:]  # [requests, new, size]: up to each new token
        matches: Tensor = self.criterion(windows.flatten(0, 1), None)
        return ends | (matches.view_as(new_token_ids) & (new_token_ids >= 0))


def find_stop_strings(
    config: GenerationConfig, stop_strings: str | Sequence[str] | None, tokenizer: Any
) -> StopStringCriteria | None:
    """Return transformers' criterion for the stop strings, from the argument or the config; None without any.

    Raises:
        TypeError: `stop_strings` is not a string or a sequence of strings, or `tokenizer` is no tokenizer.
        ValueError: a stop string is empty or in no token, or there is no tokenizer.
    """
    given = config.stop_strings if stop_strings is None else stop_strings
    strings = [given] if isinstance(given, str) else given or []
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise TypeError(f"stop_strings: expected a string, a sequence of strings or None, got {shown(given)}")
    if tokenizer is not None and not callable(getattr(tokenizer, "get_vocab", None)):
        raise TypeError(f"tokenizer: expected a tokenizer of transformers or None, got {type(tokenizer).__name__}")
    if not strings:
        return None
    if "" in strings:
        raise ValueError(f"stop_strings: expected strings of at least one character, got {shown(given)}")
    if tokenizer is None:
        raise ValueError(
            f"tokenizer: expected the target's tokenizer, to look for stop_strings = {shown(given)}, got None"
        )
    try:
        with torch.device("cpu"):  # the default device may be one without data
            return StopStringCriteria(tokenizer, list(strings))
    except ValueError as error:
        raise ValueError(
            f"stop_strings: expected strings that tokens can spell, got {shown(given)}: {error}"
        ) from error
