"""A model with its cache: what it is given, and how its cache follows the columns of the batch."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from specdecode.integrations.transformers.requests import Alignment
from specdecode.integrations.transformers.supported import POSITIONS_BY_DISTANCE, check_model, rotary_switch


class CachedModel:
    """A model with its cache: the keys and values of the columns that it was given so far."""

    def __init__(self, name: str, model: Any) -> None:
        check_model(name, model)
        text_config = model.config.get_text_config()
        self.name = name
        self.model = model
        self.layer_types = list(getattr(text_config, "layer_types", None) or ())
        self.vocab_size: int = text_config.vocab_size
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self.rotary_switch = rotary_switch(text_config)
        self.last_position = 0  # that a token can have: check_lengths sets it
        self.calls = 0
        self.clear()
        adapted = model.get_base_model() if hasattr(model, "get_base_model") else model  # by a PEFT adapter
        self.parameters = inspect.signature(adapted.forward).parameters
        # Without position_ids a model counts columns from the left, padding included.
        self.counts_padding = {"input_ids", "position_ids"} & set(self.parameters) == {
            "input_ids"
        } and text_config.model_type not in POSITIONS_BY_DISTANCE
        self.takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values())

    def logits(self, tokens: Tensor, lengths: Tensor, keep: int) -> Tensor:
        """Return the logits of the last `keep` columns. The model is given the columns that its cache lacks.

        Args:
            tokens: [requests, width] int64, right-aligned.
            lengths: [requests] int64: how many of a row's last columns are its tokens.
            keep: how many columns' logits to return.

        Returns:
            [requests, keep, vocab] any float.
        """
        width, cached, device = tokens.shape[1], self.cache.get_seq_length(), self.model.device
        positions = torch.arange(width, device=tokens.device) - (width - lengths)[:, None]
        # Columns past a request's own drafts can lie beyond its last position; their logits are not used.
        position_ids = positions[:, cached:].clamp(0, self.last_position)
        options = {"position_ids": position_ids.to(device), "logits_to_keep": keep}
        output = self.model(
            # A draft model may lack tokens of the target: another token in their place costs only acceptance.
            input_ids=tokens[:, cached:].clamp(max=self.vocab_size - 1).to(device),
            attention_mask=(positions >= 0).long().to(device),
            past_key_values=self.cache,
            use_cache=True,
            **{name: value for name, value in options.items() if self.takes_any or name in self.parameters},
        )
        self.calls += 1
        if {layer.get_seq_length() for layer in self._layers()} != {width}:
            raise ValueError(f"{self.name}: expected a model that fills its cache, got {type(self.model).__name__}")
        logits: Tensor = output.logits
        return logits[:, -keep:].to(tokens.device)

    def realign(self, alignment: Alignment) -> None:
        """Move the cached columns to their places in the next step, without those of rejected drafts.

        The model was not given the next step's last token yet. A draft model was not given the last draft either: if a
        request accepted all drafts, the next call gives that column to the model, for every request.
        """
        num_columns = min(alignment.width - 1, self.cache.get_seq_length() - alignment.max_shift)
        for layer in self._layers():
            layer.keys = alignment(layer.keys, num_columns, dim=-2)
            layer.values = alignment(layer.values, num_columns, dim=-2)
        for layer in self._convolutions():
            columns = alignment(layer.conv_states[0], num_columns, dim=-1)
            padding = alignment.is_new_padding[:, None, :num_columns].to(columns.device)
            layer.conv_states[0] = columns.masked_fill(padding, 0)  # unlike attention, a convolution sees padding

    def clear(self) -> None:
        """Forget all columns."""
        # Made without the config: sliding-window layers then keep all columns, so that rejected ones can be removed.
        self.cache = DynamicCache()
        if "conv" in self.layer_types:
            kinds: dict[bool, Any] = {True: LinearAttentionLayer, False: DynamicLayer}
            self.cache.layers = [kinds[layer_type == "conv"]() for layer_type in self.layer_types]
            for layer in self._convolutions():
                layer.activate_past_recording()  # it keeps all columns too

    def check_lengths(self, shortest_prompt: int, longest: int) -> None:
        """Refuse requests that are too long, given the shortest prompt and the most tokens of any request."""
        if self.max_positions is not None and longest > self.max_positions:
            raise ValueError(
                f"max_new_tokens: the {self.name} model has {self.max_positions} positions, but the longest request could "
                f"have {longest} tokens"
            )
        self.last_position = max(0, longest - 2)  # the last token is not given to the model
        if self.rotary_switch is not None and shortest_prompt <= self.rotary_switch <= self.last_position:
            raise ValueError(
                f"max_new_tokens: the rotary factors of the {self.name} model (longrope) change beyond "
                f"{self.rotary_switch} tokens, cached keys too: expected all requests to stay within, at most "
                f"{self.rotary_switch + 1} tokens with the last new one, or all prompts to be longer, got a prompt of "
                f"{shortest_prompt} tokens and a request of up to {longest}"
            )

    def check_vocab_size(self, target_vocab_size: int) -> None:
        if abs(self.vocab_size - target_vocab_size) > 0.01 * target_vocab_size:
            raise ValueError(
                f"{self.name}: expected a model with the target's tokenizer, whose vocabulary is within 1 % of the target's "
                f"{target_vocab_size} tokens, got {self.vocab_size} tokens"
            )

    def _layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if getattr(layer, "is_initialized", False)]

    def _convolutions(self) -> list[Any]:
        return [layer for layer, kind in zip(self.cache.layers, self.layer_types) if kind == "conv"]
