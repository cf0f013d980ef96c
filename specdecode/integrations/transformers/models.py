"""A model with its cache: what it is given, and how it goes back to the last accepted token."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from specdecode.integrations.transformers.caches import ModelCache
from specdecode.integrations.transformers.requests import Alignment
from specdecode.integrations.transformers.supported import (
    cache_name,
    check_model,
    counts_columns,
    logits_width,
    num_positions,
    num_rows,
    rotary_growth,
    rotary_switch,
    sees_padding,
)


class CachedModel:
    """A model with its cache.

    Args:
        name: what it is used as, "target" or "draft".
        model: a Hugging Face causal language model.

    Raises:
        TypeError: not such a model.
        ValueError: such a model is not supported.
    """

    def __init__(self, name: str, model: Any) -> None:
        check_model(name, model)
        text_config = model.config.get_text_config()
        adapted = model.get_base_model() if hasattr(model, "get_base_model") else model  # by a PEFT adapter
        self.name = name
        self.model = model
        self.parameters = inspect.signature(adapted.forward).parameters
        self.cache_name = cache_name(self.parameters)
        self.takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values())
        self.counts_columns = counts_columns(text_config, self.parameters)
        self.sees_padding = sees_padding(text_config)
        # What a model emits and what it takes can differ from each other and from its config.
        self.vocab_size = logits_width(model)
        self.num_embeddings: int = num_rows(model, "get_input_embeddings") or self.vocab_size
        self.max_positions = num_positions(model)
        self.rotary_switch = rotary_switch(text_config)
        self.rotary_growth = rotary_growth(text_config)
        self.last_position = 0  # that a token can have: check_lengths sets it
        self.counts_padding = self.counts_columns
        self.calls = 0
        self.clear()

    def clear(self) -> None:
        """Forget all columns."""
        self.cache = ModelCache(self.model.config)

    def logits(self, tokens: Tensor, lengths: Tensor, keep: int) -> Tensor:
        """Return the logits of the last `keep` columns. The model is given the columns that its cache lacks.

        Args:
            tokens: [requests, width] int64, right-aligned.
            lengths: [requests] int64: how many of a row's last columns are its tokens.
            keep: how many columns' logits to return.

        Returns:
            [requests, keep, vocab] any float.
        """
        if self.cache.recurrent and tokens.shape[1] - keep > self.cache.num_columns:
            # The prompt comes in a pass of its own, so that there are states to go back to after it.
            self.forward(self.cache, tokens[:, :-keep], lengths - keep, keep=1)
        self.fed = tokens, lengths
        self.cache.snapshot()
        return self.forward(self.cache, tokens, lengths, keep)

    def forward(self, cache: ModelCache, tokens: Tensor, lengths: Tensor, keep: int) -> Tensor:
        """Give the model the columns that a cache lacks. Return the logits of the last `keep` of them."""
        width, device = tokens.shape[1], self.model.device
        positions = torch.arange(width, device=tokens.device) - (width - lengths)[:, None]
        # Columns past a request's own drafts can lie beyond its last position; their logits are not used.
        position_ids = positions[:, cache.num_columns :].clamp(0, self.last_position)
        options = {"position_ids": position_ids.to(device), "logits_to_keep": keep}
        options = {name: value for name, value in options.items() if self.takes_any or name in self.parameters}
        if cache.has_attention:  # nothing else ever has padding
            options["attention_mask"] = (positions >= 0).long().to(device)
        output = self.model(
            # A draft model may lack tokens of the target: another token in their place costs only acceptance.
            input_ids=tokens[:, cache.num_columns :].clamp(max=self.num_embeddings - 1).to(device),
            use_cache=True,
            **{self.cache_name: cache.past},
            **options,
        )
        self.calls += 1
        cache.num_columns = width
        if not cache.is_filled():
            raise ValueError(f"{self.name}: expected a model that fills its cache, got {type(self.model).__name__}")
        return self.check_logits(output, len(tokens))[:, -keep:].to(tokens.device)

    def check_logits(self, output: Any, num_requests: int) -> Tensor:
        """Return the logits of a pass, [requests, columns, vocab]."""
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or len(logits) != num_requests:
            got = f"logits of shape {list(logits.shape)}" if isinstance(logits, Tensor) else "no logits"
            raise TypeError(
                f"{self.name}: expected a Hugging Face causal language model, whose logits have shape [requests, tokens, "
                f"vocab], got {type(self.model).__name__} with {got}"
            )
        if logits.shape[2] != self.vocab_size:
            raise ValueError(
                f"{self.name}: expected logits of {self.vocab_size} tokens, as its output embedding or else its config "
                f"says, got logits of {logits.shape[2]} tokens"
            )
        return logits

    def realign(self, alignment: Alignment) -> None:
        """Move what is cached to its place in the next step, without rejected drafts.

        The model was not given the next step's last token yet.
        """
        self.cache.realign(alignment, self.states_at_ends(alignment) if self.cache.recurrent else [])

    def states_at_ends(self, alignment: Alignment) -> list[Tensor]:
        """Return the recurrent states of each request that goes on, after its last accepted draft."""
        groups = defaultdict(list)  # requests that accepted equally many drafts are computed in one pass
        for row, end in enumerate(alignment.ends):
            groups[end].append(row)
        states = [self.states_after(end, alignment, rows) for end, rows in groups.items()]
        order = torch.tensor([row for rows in groups.values() for row in rows], device="cpu").argsort()
        return [torch.cat(parts)[order.to(parts[0].device)] for parts in zip(*states)]

    def states_after(self, end: int, alignment: Alignment, rows: list[int]) -> list[Tensor]:
        """Return the recurrent states of some of the requests that go on, after their first `end` columns."""

        def pick(values: Tensor) -> Tensor:
            return alignment.select(values)[torch.tensor(rows, device=values.device)]

        if end == self.cache.num_columns:
            return [pick(state) for state in self.cache.states()]
        start = max(columns for columns in self.cache.snapshots if columns <= end)
        part = self.cache.part(pick, start)
        if start < end:
            tokens, lengths = map(pick, self.fed)
            self.forward(part, tokens[:, :end], lengths - (tokens.shape[1] - end), keep=1)
        return part.states()

    def check_lengths(self, shortest_prompt: int, longest: int) -> None:
        """Refuse requests that are too long, given the shortest prompt and the most tokens of any request."""
        if self.max_positions is not None and longest > self.max_positions:
            raise ValueError(
                f"max_new_tokens: the {self.name} model has {self.max_positions} positions, but the longest request could "
                f"have {longest} tokens"
            )
        self.last_position = max(0, longest - 2)  # the last token is not given to the model
        grows = self.rotary_growth is not None and longest > self.rotary_growth
        # Whether what a request is given depends on the columns of the others: they are generated one by one then.
        self.counts_padding = self.counts_columns or grows
        if self.rotary_switch is not None and shortest_prompt <= self.rotary_switch <= self.last_position:
            raise ValueError(
                f"max_new_tokens: the rotary factors of the {self.name} model (longrope) change beyond "
                f"{self.rotary_switch} tokens, cached keys too: expected all requests to stay within, at most "
                f"{self.rotary_switch + 1} tokens with the last new one, or all prompts to be longer, got a prompt of "
                f"{shortest_prompt} tokens and a request of up to {longest}"
            )

    def most_drafts(self, length: int) -> int:
        """Return the most drafts with which a request of so many tokens is scored as without any.

        Rotary factors that grow with the longest position of a pass would be larger with drafts.
        """
        return sys.maxsize if self.rotary_growth is None else max(0, self.rotary_growth - length)

    def check_vocab_size(self, target_vocab_size: int) -> None:
        if self.name == "target" and self.num_embeddings < self.vocab_size:
            raise ValueError(
                f"{self.name}: expected an input embedding for each of the {self.vocab_size} tokens of its logits, got "
                f"{self.num_embeddings} embeddings"
            )
        if abs(self.vocab_size - target_vocab_size) > 0.01 * target_vocab_size:
            raise ValueError(
                f"{self.name}: expected a model with the target's tokenizer, whose vocabulary is within 1 % of the target's "
                f"{target_vocab_size} tokens, got {self.vocab_size} tokens"
            )
