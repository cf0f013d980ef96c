"""Which models can be used, and why others are refused."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

POSITIONS_BY_DISTANCE = {"bloom", "mpt"}
"""Model types that take no position_ids and need none: only distances between columns matter (ALiBi)."""

CACHED_BY_COLUMN = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types, as model configs name them, that keep keys and values per token."""

if hasattr(DynamicCache, "is_recording_past"):  # before, caches of short convolutions could not keep all columns
    CACHED_BY_COLUMN.add("conv")


def check_model(name: str, model: Any) -> None:
    """Refuse models whose caches cannot be put back after rejected drafts, or whose rows are not those of a decoder.

    Raises:
        TypeError: not a Hugging Face causal language model.
        ValueError: such a model is not supported. The message starts with `name` and says why.
    """
    config: Any = getattr(model, "config", None)
    if not callable(model) or not hasattr(config, "get_text_config"):
        raise TypeError(f"{name}: expected a Hugging Face causal language model, got {type(model).__name__}")
    text_config = config.get_text_config()
    check_cache(name, model, text_config)
    if attends_ahead(model, text_config):
        raise ValueError(
            f"{name}: expected a causal model, got {type(model).__name__} that attends in both directions: set "
            "is_decoder=True in its config if it was trained as a decoder"
        )
    if getattr(model, "training", False):
        raise ValueError(
            f"{name}: expected a model in evaluation mode, got {type(model).__name__} in training mode, where dropout "
            "changes its distribution: call .eval() on it"
        )
    if getattr(text_config, "use_learned_position_embeddings", True) is False:
        raise ValueError(
            f"{name}: expected a model whose positions are those of its columns, got {type(model).__name__} with "
            "use_learned_position_embeddings=False, where they depend on which tokens equal the padding token"
        )


def check_cache(name: str, model: Any, text_config: Any) -> None:
    """Refuse models that keep what cannot be put back after rejected drafts."""
    layer_types = list(getattr(text_config, "layer_types", None) or ())
    others = set(layer_types) - CACHED_BY_COLUMN
    if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False) or others:
        layers = f" with layers of type {', '.join(sorted(others))}" if others else ""
        raise ValueError(
            f"{name}: expected a decoder that caches only keys and values, so that rejected drafts can be removed, "
            f"got {type(model).__name__}{layers}"
        )
    if "conv" in layer_types and getattr(text_config, "conv_bias", False):
        raise ValueError(
            f"{name}: expected convolutions without a bias, got {type(model).__name__} with conv_bias=True, whose "
            "padding is not zero to them"
        )


def attends_ahead(model: Any, text_config: Any) -> bool:
    """Return whether tokens attend to later ones, as in BERT without is_decoder."""
    if getattr(text_config, "use_bidirectional_attention", None) in (True, "all"):
        return True
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    encodes = any(getattr(module, "is_decoder", None) is False for module in modules)
    return encodes and not any(getattr(module, "is_causal", False) is True for module in modules)


def rotary_switch(text_config: Any) -> int | None:
    """Return the number of tokens beyond which rotary factors change, None if they do not."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    own = getattr(text_config, "original_max_position_embeddings", None)
    switches = [
        rope.get("original_max_position_embeddings") or own
        for rope in [parameters, *per_layer_type]
        if rope.get("rope_type") == "longrope"
    ]
    return min((switch for switch in switches if switch is not None), default=None)
