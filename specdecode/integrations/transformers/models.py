"""A target or draft model with its cache: which models are supported, and how rejected drafts leave the cache.

The cache holds keys and values by column, so rejected drafts are removed by cutting their columns off. Models that keep
anything else, such as the state of a recurrent layer, are refused: no column can be taken out of a state again.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin

from specdecode.integrations.transformers.requests import Alignment

CACHED_BY_COLUMN = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types, as model configs name them, that keep keys and values per token."""


class CachedModel:
    """A model with its cache.

    Args:
        name: its role, "target" or "draft".
        model: a Hugging Face causal language model.

    Raises:
        TypeError: not such a model.
        ValueError: the model is not supported.
    """

    def __init__(self, name: str, model: Any) -> None:
        if not callable(model) or not hasattr(getattr(model, "config", None), "get_text_config"):
            raise TypeError(f"{name}: expected a Hugging Face causal language model, got {type(model).__name__}")
        adapted = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside a PEFT adapter
        self.name = name
        self.model = model
        self.parameters = inspect.signature(adapted.forward).parameters
        self.takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values())
        self.cache_name = cache_name(self.parameters)
        check_model(name, model, self.parameters)
        # The sizes of the two embeddings can differ from each other and from the config.
        self.vocab_size = logits_width(model)
        self.num_embeddings: int = num_rows(model, "get_input_embeddings") or self.vocab_size
        self.clear()
        self.last_position = 0  # the last position that the model reads, set by check_lengths
        self.calls = 0

    def clear(self) -> None:
        """Empty the cache."""
        self.cache = DynamicCache()  # without the config: sliding-window layers then keep all columns
        self.num_columns = 0

    def logits(self, tokens: Tensor, lengths: Tensor, keep: int) -> Tensor:
        """Return the logits of the last `keep` columns; the model reads the columns that its cache lacks.

        Args:
            tokens: [requests, width] int64, right-aligned.
            lengths: [requests] int64: how many of a row's last columns are its tokens.
            keep: number of columns.

        Returns:
            [requests, keep, vocab] any float.
        """
        width = tokens.shape[1]
        positions = torch.arange(width, device=tokens.device) - (width - lengths)[:, None]
        return self.forward(tokens, positions[:, self.num_columns :], (positions >= 0).long(), keep)

    def forward(self, tokens: Tensor, positions: Tensor, attention_mask: Tensor, keep: int) -> Tensor:
        """Return the logits of the last `keep` columns, [requests, keep, vocab], given positions and mask.

        Args:
            tokens: [requests, width] int64, right-aligned.
            positions: [requests, columns that the cache lacks] int64; padding may be out of range.
            attention_mask: as the model takes it.
            keep: number of columns.
        """
        width, device = tokens.shape[1], self.model.device
        # Columns past a request's own drafts can lie beyond its last position; their logits are not used.
        options = {"position_ids": positions.clamp(0, self.last_position).to(device), "logits_to_keep": keep}
        output = self.model(
            # A draft model may lack tokens of the target: another token in their place costs only acceptance.
            input_ids=tokens[:, self.num_columns :].clamp(max=self.num_embeddings - 1).to(device),
            attention_mask=attention_mask.to(device),
            use_cache=True,
            **{self.cache_name: self.cache},
            **{name: value for name, value in options.items() if self.takes_any or name in self.parameters},
        )
        self.calls += 1
        self.num_columns = width
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or len(logits) != len(tokens):
            raise TypeError(
                f"{self.name}: expected a Hugging Face causal language model, with logits of shape [requests, tokens, "
                f"vocab], got {type(self.model).__name__}"
            )
        if logits.shape[2] != self.vocab_size:
            raise ValueError(
                f"{self.name}: expected logits of {self.vocab_size} tokens, the size of its output embedding, got logits "
                f"of {logits.shape[2]} tokens"
            )
        if {layer.keys.shape[-2] for layer in self.filled_layers()} != {width}:
            raise ValueError(f"{self.name}: expected a model that fills its cache, got {type(self.model).__name__}")
        return logits[:, -keep:].to(tokens.device)

    def filled_layers(self) -> list[Any]:
        """Return the layers of the cache that hold keys and values; some models share them between layers."""
        return [layer for layer in self.cache.layers if getattr(layer, "keys", None) is not None]

    def realign(self, alignment: Alignment) -> None:
        """Move the cached columns to their places in the next step, without rejected drafts.

        The cache lacks the next step's last token. The cache of a draft model may lack the last draft too, and all tokens
        of steps without drafts: columns that one request lacks are cut off for every request.
        """
        if self.num_columns <= alignment.max_shift:  # it has only columns of finished requests, or none
            self.clear()
            return
        self.num_columns = min(alignment.width - 1, self.num_columns - alignment.max_shift)
        for layer in self.filled_layers():
            layer.keys = alignment(layer.keys, self.num_columns, dim=-2)
            layer.values = alignment(layer.values, self.num_columns, dim=-2)

    def check_lengths(self, longest: int) -> None:
        """Raise if the longest request could have more tokens than the model has positions."""
        most = num_positions(self.model.config.get_text_config())
        if most is not None and longest > most:
            raise ValueError(
                f"max_new_tokens: the {self.name} model has {most} positions, or its rotary factors change beyond them, but "
                f"the longest request could have {longest} tokens"
            )
        self.last_position = max(0, longest - 2)  # the model does not read the last token

    def check_token_types(self, token_type_ids: Tensor | None) -> None:
        """Raise if the model reads token types; other models do not need them."""
        if token_type_ids is not None and "token_type_ids" in self.parameters:
            raise ValueError(
                f"token_type_ids: expected None for a {self.name} model that reads them, {type(self.model).__name__}: pass "
                "only input_ids and attention_mask"
            )

    def check_vocab_size(self, target_vocab_size: int) -> None:
        """Raise if the vocabulary differs too much from the target's, or the target lacks embeddings."""
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


def check_model(name: str, model: Any, parameters: Collection[str]) -> None:
    """Refuse models whose caches cannot drop rejected drafts, or whose logits depend on more than the tokens before.

    Raises:
        TypeError: the model cannot generate text.
        ValueError: the model is not supported. The message starts with `name` and says why.
    """
    text_config, got = model.config.get_text_config(), type(model).__name__
    others = sorted(set(getattr(text_config, "layer_types", None) or ()) - CACHED_BY_COLUMN)
    if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False) or others:
        layers = f" with layers of type {', '.join(others)}" if others else ""
        raise ValueError(
            f"{name}: expected a decoder whose cache holds only keys and values, because rejected drafts cannot be removed "
            f"from any other state, got {got}{layers}"
        )
    if attends_ahead(model, text_config):
        raise ValueError(
            f"{name}: expected a causal model, got {got} that attends in both directions: set is_decoder=True in its "
            "config if it was trained as a decoder"
        )
    if "shared_kv_states" in parameters or not getattr(model, "can_generate", lambda: True)():
        raise TypeError(
            f"{name}: expected a Hugging Face causal language model, got {got}, which cannot generate by itself"
        )
    if getattr(model, "training", False):
        raise ValueError(
            f"{name}: expected a model in evaluation mode, got {got} in training mode, where dropout changes its "
            "distribution: call .eval() on it"
        )
    # Without position_ids a model counts padding as positions, except in BLOOM, where only distances matter (ALiBi).
    if "input_ids" in parameters and "position_ids" not in parameters and text_config.model_type != "bloom":
        raise ValueError(f"{name}: expected a model that takes position_ids, because requests are padded, got {got}")


def cache_name(parameters: Collection[str]) -> str:
    """Return the name of the cache argument: `cache` from transformers 5.24 on.

    A wrapper that passes on any arguments does not name it; the model inside takes the usual name.
    """
    usual = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next(name for names in (parameters, usual) for name in ("cache", "past_key_values") if name in names)


def attends_ahead(model: Any, text_config: Any) -> bool:
    """Return whether tokens attend to later ones, as in BERT without is_decoder."""
    if getattr(text_config, "use_bidirectional_attention", None) in (True, "all"):
        return True
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    encodes = any(getattr(module, "is_decoder", None) is False for module in modules)
    return encodes and not any(getattr(module, "is_causal", False) is True for module in modules)


def logits_width(model: Any) -> int:
    """Return the number of tokens in a model's logits: the rows of its output embedding, or its config's number."""
    return int(num_rows(model, "get_output_embeddings") or model.config.get_text_config().vocab_size)


def num_rows(model: Any, getter: str) -> int | None:
    """Return the number of tokens in an embedding of a model, None if unknown."""
    try:
        layer = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():
        return weight.shape[0]
    return getattr(layer, "out_features", getattr(layer, "num_embeddings", None))  # packed weights have another shape


def num_positions(text_config: Any) -> int | None:
    """Return the number of positions of a model, None if unlimited: rotary factors or distances (ALiBi).

    Rotary factors of the types "dynamic" and "longrope" change beyond a length, where cached keys would keep the old ones.
    """
    table: int | None = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None)
    if not rope:
        return table
    own = getattr(text_config, "original_max_position_embeddings", None)
    limits = []
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for each in (rope, *by_layer_type):
        if each.get("rope_type") == "dynamic":
            limits.append(table)
        elif each.get("rope_type") == "longrope":
            limits.append(each.get("original_max_position_embeddings") or own or table)
    return min((limit for limit in limits if limit is not None), default=None)
