"""Trees of drafts: one draft call for each level, one target call for all nodes.

The nodes of a step are columns after the text, level by level. Node 0 is the last token of the text:

    text 0 | 1 2 | 3 4 5 6     widths (2, 2): nodes 1 and 2 follow node 0, nodes 3 and 4 follow 1, nodes 5 and 6 follow 2

Nodes of one depth have the same position, and the mask of a node shows the text, its ancestors and itself. After
verification the caches keep only the columns of the accepted path. Then a step ends as it does with chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdecode import AcceptanceStats, SamplerOutput
from specdecode.arguments import MOST_SIBLINGS, check_count, shown
from specdecode.integrations.transformers.drafters import Drafts, ModelDrafter
from specdecode.integrations.transformers.loop import Loop
from specdecode.integrations.transformers.models import CachedModel
from specdecode.integrations.transformers.processors import writable
from specdecode.integrations.transformers.requests import Batch, map_tensors
from specdecode.integrations.transformers.stops import Stops


class Tree:
    """A tree, given the number of children of each node by level.

    Example:
        >>> tree = Tree([2, 1])
        >>> tree.parents, tree.levels, tree.paths
        ([-1, 0, 0, 1, 2], [range(0, 1), range(1, 3), range(3, 5)], [[], [1], [2], [1, 3], [2, 4]])
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = widths
        self.parents = [-1]
        self.levels = [range(1)]
        self.paths: list[list[int]] = [[]]  # to each node, without node 0
        for width in widths:
            first = len(self.parents)
            self.parents += [parent for parent in self.levels[-1] for _ in range(width)]
            self.levels.append(range(first, len(self.parents)))
            self.paths += [[*self.paths[self.parents[node]], node] for node in self.levels[-1]]

    def mask(self, num_nodes: int) -> Tensor:
        """Return whether each of the first nodes attends to each of them, [num_nodes, num_nodes] bool."""
        mask = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
        for node, path in enumerate(self.paths[:num_nodes]):
            mask[node, [0, *path]] = True
        return mask

    def texts(self, batch: Batch, node_ids: Tensor, level: range) -> Batch:
        """Return one request for each node of a level, with the text up to the node; nodes of a request are adjacent.

        `node_ids` are [requests, nodes] int64, -1 = no node.
        """
        repeat = partial(torch.repeat_interleave, repeats=len(level), dim=0)
        paths = torch.tensor([self.paths[node] for node in level], dtype=torch.int64, device=node_ids.device)
        drafts = node_ids.clamp(min=0)[:, paths].flatten(0, 1)
        return Batch(
            [request for request in batch.requests for _ in level],
            torch.cat([repeat(batch.tokens), drafts], dim=1),
            repeat(batch.lengths) + drafts.shape[1],
            map_tensors(repeat, batch.sampling),
            repeat(batch.seeds),
        )


def read_nodes(model: CachedModel, batch: Batch, tree: Tree, node_ids: Tensor, keep: int) -> Tensor:
    """Return the logits after the last `keep` nodes, [requests, keep, vocab]; the model reads the columns it has not cached.

    `node_ids`, [requests, nodes] int64, are the first nodes of the tree, -1 = no node.
    """
    device, num_nodes, num_cached = batch.tokens.device, node_ids.shape[1], model.num_columns
    num_before = batch.tokens.shape[1] - 1  # columns before node 0
    tokens = torch.cat([batch.tokens, node_ids[:, 1:].clamp(min=0)], dim=1)
    columns = torch.arange(tokens.shape[1], device=device)
    depths = torch.tensor([len(path) for path in tree.paths[:num_nodes]], device=device)
    padding = num_before + 1 - batch.lengths[:, None]
    positions = torch.cat([columns[:num_before] - padding, batch.lengths[:, None] - 1 + depths], dim=1)

    is_visible = columns <= columns[num_cached:, None]  # [new columns, columns]
    first = max(num_cached - num_before, 0)  # the first new node
    is_visible[num_before + first - num_cached :, num_before:] = tree.mask(num_nodes)[first:].to(device)
    is_itself = columns == columns[num_cached:, None]  # a softmax over nothing would be NaN in padding
    mask = (is_visible & (columns >= padding)[:, None] | is_itself)[:, None]
    if model.model.config.get_text_config()._attn_implementation == "eager":  # which adds the mask to the scores
        zeros = torch.zeros(mask.shape, dtype=model.model.dtype, device=device)
        mask = zeros.masked_fill(~mask, torch.finfo(zeros.dtype).min)
    return model.forward(tokens, positions[:, num_cached:], mask, keep)


def keep_path(model: CachedModel, width: int, path: Tensor) -> None:
    """Move the cached columns of the accepted nodes directly after the text, and remove the columns of other nodes.

    The text, node 0 included, has `width` columns. `path`, [requests, depth] int32, has the accepted nodes, then -1; the
    cache holds them.
    """
    columns = width - 1 + path.clamp(min=0).long()  # after the path any column will do: `realign` removes it
    for layer in model.filled_layers():
        for name in ("keys", "values"):
            entries = getattr(layer, name)
            shape = [1] * entries.ndim
            shape[0], shape[-2] = columns.shape
            accepted = entries.take_along_dim(columns.view(shape).to(entries.device), dim=-2)
            setattr(layer, name, torch.cat([entries.narrow(-2, 0, width), accepted], dim=-2))
    model.num_columns = width + path.shape[1]


def is_open(stops: Stops, texts: Batch, token_ids: Tensor) -> Tensor:
    """Return whether each text ends with a draft, `token_ids` >= 0, that does not end the text, [texts] bool."""
    return (token_ids >= 0) & ~stops(texts.tokens[:, :-1], texts.lengths - 1, token_ids[:, None])[:, 0]


@dataclass
class TreeDrafter(ModelDrafter):
    """Drafts a tree with a draft model, level by level."""

    tree: Tree

    def draft(self, batch: Batch, most: Tensor, num_draft_tokens: int) -> Drafts:
        """Return the nodes of each request without node 0; `most` is the depth of its tree."""
        tree, node_ids = self.tree, batch.tokens[:, -1:]
        for depth, (level, width) in enumerate(zip(tree.levels, tree.widths[:num_draft_tokens])):
            texts = tree.texts(batch, node_ids, level)
            drafts = (most > depth).repeat_interleave(len(level))  # whether each node gets children
            if depth > 0:  # a prompt may end with a stop token
                drafts &= is_open(self.stops, texts, node_ids[:, level.start :].flatten())
            rows = self.fitted(read_nodes(self.model, batch, tree, node_ids, keep=len(level)).flatten(0, 1))
            rows = self.processors.process_row(rows, texts.tokens, texts, depth, drafts)
            if self.processors:
                drafts &= (rows > -torch.inf).any(dim=1)  # processors may have left nothing
            drawn = self.sampler.draft(
                rows, **texts.sampling._asdict(), seeds=texts.seeds, positions=texts.lengths, width=width
            )
            children = drawn.token_ids.masked_fill(~drafts[:, None], -1)
            node_ids = torch.cat([node_ids, children.view(len(node_ids), -1)], dim=1)
        return Drafts(node_ids[:, 1:])


@dataclass
class TreeLoop(Loop):
    """The loop with trees: drafts are the nodes of a tree, and accepted drafts are a path."""

    trees: dict[int, Tree]  # by the number of nodes; near the end of the texts trees are less deep

    def verify(self, batch: Batch, drafts: Drafts) -> SamplerOutput:
        """Score all nodes with the target in one call, verify them, and reduce the caches to the accepted path."""
        node_ids, width = torch.cat([batch.tokens[:, -1:], drafts.token_ids], dim=1), batch.tokens.shape[1]
        tree = self.trees[node_ids.shape[1]]
        logits = read_nodes(self.target, batch, tree, node_ids, keep=node_ids.shape[1])
        output = self.sampler.tree(
            self.process(logits, batch, tree, node_ids),
            node_ids,
            torch.tensor(tree.parents, device=node_ids.device),
            max_depth=len(tree.widths),
            **batch.sampling._asdict(),
            seeds=batch.seeds,
            positions=batch.lengths,
        )
        keep_path(self.target, width, output.nodes)
        for model in self.drafter.models if tree.widths else []:
            keep_path(model, width, output.nodes[:, :-1])  # the draft model has not read the last level
        return SamplerOutput(output.token_ids, output.num_accepted, output.num_draft_tokens, output.invalid)

    def process(self, logits: Tensor, batch: Batch, tree: Tree, node_ids: Tensor) -> Tensor:
        """Return the target's processed rows, [requests, nodes, vocab].

        Processors see a row only if the target may emit each draft on its path, and no draft there ends the text.
        """
        if not self.processors:
            return logits
        levels: list[Tensor] = []  # [requests * nodes, vocab] each
        used = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        for depth, level in enumerate(tree.levels):
            texts, nodes = tree.texts(batch, node_ids, level), slice(level.start, level.stop)
            if depth > 0:
                repeat = partial(torch.repeat_interleave, repeats=tree.widths[depth - 1], dim=0)
                used = repeat(used) & is_open(self.stops, texts, node_ids[:, nodes].flatten())
                used = used & self.processors.is_possible(repeat(levels[-1]), texts.tokens[:, -1], texts)
            levels.append(writable(logits[:, nodes].flatten(0, 1)))
            self.processors.apply(levels[-1], texts.tokens, texts, depth, used)
        return torch.cat([rows.view(len(logits), -1, rows.shape[-1]) for rows in levels], dim=1)


def with_tree(loop: Loop, widths: Sequence[int]) -> TreeLoop:
    """Return the loop that drafts trees in place of chains, or raise if an argument of `generate` does not allow it."""
    if not isinstance(widths, list | tuple) or not widths:
        raise TypeError(f"tree: expected a tuple of widths, one for each level, such as (4, 2, 1), got {shown(widths)}")
    widths = [check_count(f"tree[{level}]", width, MOST_SIBLINGS) for level, width in enumerate(widths)]
    if loop.sampler.method != "strict":
        raise ValueError(
            f"method: {loop.sampler.method!r} verifies chains; with a tree use method='strict', which is greedy at "
            "temperature 0"
        )
    if not isinstance(loop.drafter, ModelDrafter):
        raise ValueError("draft: expected a draft model, because prompt lookup finds no siblings; leave out the tree")
    for model in (loop.target, loop.drafter.model):
        check_model(model)
    trees = [Tree(widths[:depth]) for depth in range(len(widths) + 1)]
    drafter = TreeDrafter(**vars(loop.drafter), tree=trees[-1])
    stats = AcceptanceStats(len(widths), per_request=True)
    options = vars(loop) | {"drafter": drafter, "stats": stats, "num_draft_tokens": len(widths)}
    return TreeLoop(**options, trees={len(tree.parents): tree for tree in trees})


def check_model(model: CachedModel) -> None:
    """Raise unless a model takes a 4-D attention mask and needs nothing more to read a tree."""
    config, got = model.model.config.get_text_config(), type(model.model).__name__
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("eager", "sdpa"):
        expected = "attn_implementation 'sdpa' or 'eager', because others take no mask of a tree"
        raise ValueError(f"{model.name}: expected {expected}, got {got} with {attention!r}")
    # Transformers itself passes such masks to models that can be compiled. With ALiBi columns are distances.
    is_alibi = config.model_type == "bloom" or getattr(config, "alibi", False)
    if is_alibi or not getattr(model.model, "_can_compile_fullgraph", False):
        raise ValueError(f"{model.name}: expected a model that can read a tree by its attention mask, got {got}")
    window, longest = attention_window(config), model.last_position + 1
    if window is not None and window < longest:
        expected = f"an attention window of at least {longest} tokens, the longest text, because a tree's mask has none"
        raise ValueError(f"{model.name}: expected {expected}, got {got} with {window}")


def attention_window(text_config: Any) -> int | None:
    """Return the number of tokens in the shortest window or chunk of a model's layers, None without any."""
    types = set(getattr(text_config, "layer_types", None) or ())
    if types == {"full_attention"}:
        return None
    sizes = [getattr(text_config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((size for size in sizes if size is not None), default=0 if types else None)
