"""Which models can be used, and why others are refused."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin

POSITIONS_BY_DISTANCE = {"bloom", "mpt"}
"""Model types that take no position_ids and need none: only distances between columns matter (ALiBi)."""

CACHED_BY_COLUMN = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types, as model configs name them, that keep keys and values per token."""

if hasattr(DynamicCache, "is_recording_past"):  # before, caches of short convolutions could not keep all columns
    CACHED_BY_COLUMN.add("conv")

CONTINUES_FROM_STATE = {
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "inkling_text",
    "kimi_linear",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
    "zaya",
}
"""Model types with recurrent states from which several tokens can go on in one call."""

STEPS_FROM_STATE = {"falcon_mamba", "jamba", "mamba", "zamba"}
"""Model types with recurrent states from which one token can go on: a scan of several starts from zero instead."""

POSITION_TABLES = {
    "embed_positions",
    "pos_encoding",
    "position_embedding",
    "position_embeddings",
    "positions_embed",
    "wpe",
}
"""Names of modules and buffers with one row for each position that a model has."""

OTHER_INPUTS = {"audio", "image", "speech", "vision", "visual"}
"""What else than text some models read, by parts with such words in their names."""

WITHOUT_POSITIONS = {"falcon_mamba", "mamba", "mamba2"}
"""Model types of recurrent layers alone, where there are no positions."""

REFUSED = {
    "minimax": "it takes only a cache of its own class, which cannot go back",
    "recurrent_gemma": "what goes on from its state has other logits than without a cache",
    "rwkv": "its state is not in a cache of transformers",
    "xlstm": "its state is not in a cache of transformers",
}
"""Why model types with recurrent states are refused, as target and as draft model."""


def check_model(name: str, model: Any) -> None:
    """Refuse models whose caches cannot be put back after rejected drafts, or whose rows are not those of a decoder.

    Raises:
        TypeError: not a Hugging Face causal language model, or one that reads the states of another model.
        ValueError: such a model is not supported. The message starts with `name` and says why.
    """
    config: Any = getattr(model, "config", None)
    if not callable(model) or not hasattr(config, "get_text_config"):
        raise TypeError(f"{name}: expected a Hugging Face causal language model, got {type(model).__name__}")
    text_config = config.get_text_config()
    check_cache(name, model, text_config)
    can_generate = getattr(model, "can_generate", None)
    if "shared_kv_states" in inspect.signature(getattr(model, "forward", model)).parameters:
        raise TypeError(
            f"{name}: expected a Hugging Face causal language model, got {type(model).__name__}, which reads the states of "
            "another model"
        )
    if attends_ahead(model, text_config):
        raise ValueError(
            f"{name}: expected a causal model, got {type(model).__name__} that attends in both directions: set "
            "is_decoder=True in its config if it was trained as a decoder"
        )
    if can_generate is not None and not can_generate():
        raise TypeError(
            f"{name}: expected a Hugging Face causal language model, got {type(model).__name__}, which cannot generate"
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
    model_type, got = text_config.model_type, type(model).__name__
    if name == "target" and model_type in STEPS_FROM_STATE:
        raise ValueError(
            f"{name}: expected a decoder that scores several drafts in one call, got {got}, whose recurrent layers, as "
            "transformers has them, go on from a state with one token at a time only: it can be the draft model"
        )
    if is_recurrent(text_config):
        return
    others = set(getattr(text_config, "layer_types", None) or ()) - CACHED_BY_COLUMN
    if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False) or others:
        layers = f" with layers of type {', '.join(sorted(others))}" if others else ""
        reason = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
        raise ValueError(
            f"{name}: expected a decoder whose cache can go back to the last accepted token: keys and values, or the "
            f"recurrent states of the model types that the documentation lists, got {got}{layers}{reason}"
        )


def is_recurrent(text_config: Any) -> bool:
    """Return whether layers keep a state of all columns so far, from which the model goes on."""
    return text_config.model_type in CONTINUES_FROM_STATE | STEPS_FROM_STATE


def sees_padding(text_config: Any) -> bool:
    """Return whether padding before a prompt may leave something in a state, or in a convolution."""
    return is_recurrent(text_config) or bool(getattr(text_config, "conv_bias", False))


def counts_columns(text_config: Any, parameters: Collection[str]) -> bool:
    """Return whether positions are those of columns, padding included: so it is without position_ids."""
    counts = "input_ids" in parameters and "position_ids" not in parameters
    return counts and text_config.model_type not in POSITIONS_BY_DISTANCE | WITHOUT_POSITIONS


def cache_name(parameters: Collection[str]) -> str:
    """Return the name by which a model takes its cache, which is `cache` from transformers 5.24 on.

    A wrapper that hands on any arguments does not say; what it wraps takes the name that others take.
    """
    usual = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    known = [
        name for names in (parameters, usual) for name in ("cache", "cache_params", "past_key_values") if name in names
    ]
    return known[0]


def attends_ahead(model: Any, text_config: Any) -> bool:
    """Return whether tokens attend to later ones, as in BERT without is_decoder."""
    if getattr(text_config, "use_bidirectional_attention", None) in (True, "all"):
        return True
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    encodes = any(getattr(module, "is_decoder", None) is False for module in modules)
    return encodes and not any(getattr(module, "is_causal", False) is True for module in modules)


def logits_width(model: Any) -> int:
    """Return how many tokens a model can emit: as its output embedding says, or else its config."""
    return int(num_rows(model, "get_output_embeddings") or model.config.get_text_config().vocab_size)


def num_rows(model: Any, getter: str) -> int | None:
    """Return how many tokens an embedding of a model has, None if the model does not say."""
    try:
        layer = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():
        return weight.shape[0]
    return getattr(layer, "out_features", getattr(layer, "num_embeddings", None))  # of packed weights


def num_positions(model: Any) -> int | None:
    """Return how many positions a model has a table of, None if it has no such table and goes on without end."""
    text_config = model.config.get_text_config()
    if text_config.model_type == "mpt":  # whose table is made in each pass
        return int(text_config.max_seq_len)
    if not isinstance(model, torch.nn.Module):
        return None
    modules = (
        (name, module.num_embeddings - getattr(module, "offset", 0))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    )
    buffers = ((name, len(buffer)) for name, buffer in model.named_buffers() if buffer.ndim == 2)
    rows = [
        count
        for name, count in (*modules, *buffers)
        if name.rpartition(".")[2] in POSITION_TABLES and not any(word in name for word in OTHER_INPUTS)
    ]
    return min(rows, default=None)


def rotary_switch(text_config: Any) -> int | None:
    """Return the number of tokens beyond which other rotary factors are used, None if they stay the same."""
    own = getattr(text_config, "original_max_position_embeddings", None)
    switches = [rope.get("original_max_position_embeddings") or own for rope in rotary(text_config, "longrope")]
    return min((switch for switch in switches if switch is not None), default=None)


def rotary_growth(text_config: Any) -> int | None:
    """Return the number of tokens beyond which rotary factors grow with every token, None if they do not."""
    return text_config.max_position_embeddings if rotary(text_config, "dynamic") else None


def rotary(text_config: Any, rope_type: str) -> list[dict[str, Any]]:
    """Return the parameters of rotary embeddings of a type: those of all layers, or of some."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return [rope for rope in [parameters, *per_layer_type] if rope.get("rope_type") == rope_type]
