"""The cache of a model, which follows the columns of the batch: what is kept, and how rejected drafts leave it again.

Three kinds of layers keep something:

    attention           keys and values by column: rejected columns are cut off
    short convolutions  what they are over, by column too (LFM2)
    recurrent layers    one state per request, that of all columns so far (Mamba-2, gated delta rule, ...)

No column can be taken out of a state again. So the states before each pass are kept until the step has ended:

    columns    0 ... s | last x y z      a pass over the last token and three drafts
    states           ^ kept      ^ now   the request accepts x alone: its new state is that after "last x",
                                         which the model computes again from the state that was kept

A request that accepts all its drafts has its state already. A draft model makes one pass per draft, so all its states are
kept and nothing is computed again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from specdecode.integrations.transformers.requests import Alignment
from specdecode.integrations.transformers.supported import is_recurrent


class ModelCache:
    """What a model keeps of the columns that it was given so far.

    Args:
        config: the model's config, which names the types of its layers.
    """

    def __init__(self, config: Any) -> None:
        text_config = config.get_text_config()
        self.config = config
        self.recurrent = is_recurrent(text_config)
        self.num_columns = 0
        self.snapshots: dict[int, list[Tensor]] = {}  # the recurrent states after so many columns
        layer_types = list(getattr(text_config, "layer_types", None) or ())
        self.past = with_states(config) if self.recurrent else by_column(layer_types)
        self.has_attention = not self.past.layers or any(isinstance(layer, DynamicLayer) for layer in self.past.layers)

    @property
    def layers(self) -> list[Any]:
        """What each layer keeps; no layers before the first pass, if all are attention."""
        return self.past.layers

    def attention_layers(self) -> list[Any]:
        """Return the layers that hold keys and values."""
        return [layer for layer in self.layers if getattr(layer, "keys", None) is not None]

    def linear_layers(self) -> list[Any]:
        """Return the layers that hold states, what convolutions are over, or both."""
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    def is_filled(self) -> bool:
        """Return whether every layer that holds keys has all columns, and whether there are such layers or states."""
        columns = {layer.keys.shape[-2] for layer in self.attention_layers()}
        return columns == {self.num_columns} or (not self.has_attention and bool(self.states()))

    def states(self) -> list[Tensor]:
        """Return all recurrent states and what the convolutions before them are over, [requests, ...] each."""
        return [states[i] for states, i in self._places()]

    def put(self, states: list[Tensor]) -> None:
        """Replace the recurrent states."""
        for (old, i), state in zip(self._places(), states):
            old[i] = state

    def _places(self) -> list[tuple[dict[int, Tensor], int]]:
        layers = self.linear_layers() if self.recurrent else []
        dicts = [states for layer in layers for states in (layer.conv_states, layer.recurrent_states)]
        return [(states, i) for states in dicts for i in states if states[i] is not None]

    def snapshot(self) -> None:
        """Keep the recurrent states as they are before a pass, which writes to them."""
        if self.recurrent:
            self.snapshots[self.num_columns] = [state.clone() for state in self.states()]

    def part(self, pick: Callable[[Tensor], Tensor], num_columns: int) -> ModelCache:
        """Return a cache of the rows that `pick` copies, after so many columns; there must be a snapshot of these."""
        part = ModelCache(self.config)
        if num_columns == 0:
            return part
        part.num_columns = num_columns
        part.past.layers = [copy.copy(layer) for layer in self.past.layers]
        for layer in part.attention_layers():
            layer.keys, layer.values = (pick(kept[..., :num_columns, :]) for kept in (layer.keys, layer.values))
        for layer in part.linear_layers():
            layer.conv_states, layer.recurrent_states = dict(layer.conv_states), dict(layer.recurrent_states)
        part.put([pick(state) for state in self.snapshots[num_columns]])
        return part

    def realign(self, alignment: Alignment, states: list[Tensor]) -> None:
        """Move the columns to their places in the next step, and put each request's recurrent states.

        The cache lacks the next step's last token. That of a draft model may lack the last draft too: if a request accepted
        all drafts, columns are cut off up to there, for every request.
        """
        num_columns = min(alignment.width - 1, self.num_columns - alignment.max_shift)
        for layer in self.attention_layers():
            layer.keys = alignment(layer.keys, num_columns, dim=-2)
            layer.values = alignment(layer.values, num_columns, dim=-2)
        for layer in [] if self.recurrent else self.linear_layers():
            columns = alignment(layer.conv_states[0], num_columns, dim=-1)
            padding = alignment.is_new_padding[:, None, :num_columns].to(columns.device)
            layer.conv_states[0] = columns.masked_fill(padding, 0)  # unlike attention, a convolution sees padding
        self.put(states)
        self.snapshots.clear()
        self.num_columns = num_columns


def by_column(layer_types: list[str]) -> DynamicCache:
    """Return a cache whose layers keep all columns.

    It is made without the config: sliding-window layers then keep all columns, so that rejected ones can be removed.
    """
    cache = DynamicCache()
    if "conv" in layer_types:
        kinds: dict[bool, Any] = {True: LinearAttentionLayer, False: DynamicLayer}
        cache.layers = [kinds[layer_type == "conv"]() for layer_type in layer_types]
        for layer in cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                layer.activate_past_recording()  # type: ignore[no-untyped-call]  # it keeps all columns too
    return cache


def with_states(config: Any) -> DynamicCache:
    """Return a cache with recurrent layers. Attention layers keep all columns here too, in place of sliding windows."""
    cache = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for i, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer):
            layers[i] = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return cache
