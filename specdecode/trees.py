"""Trees of drafts: conversion between an engine's form of a tree and its parents.

`parents` has the node before each node, int64. Node 0, the last token of the text, and padding have -1.

- `from_links`, `to_links`: first child and next sibling, as in SGLang (`retrieve_next_token`, `retrieve_next_sibling`) and
  TensorRT-LLM. Parents do not keep the order of siblings.
- `from_mask`: the attention mask among the nodes, as in EAGLE (`tree_mask.bool()`) and SGLang (`QLEN_ONLY`).
- `from_paths`: the nodes on the path to each leaf, as in EAGLE and Medusa (`retrieve_indices`).
- `from_choices`: the ranks on the path to each node, as in Medusa (`medusa_choices`), TensorRT-LLM (`eagle_choices`) and
  vLLM (`speculative_token_tree`).

All except the last take tensors on any device and do not wait for the device. If the input is not a tree, they still return
nodes and -1 only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdecode.arguments import INTEGERS, check_count, check_type


def from_links(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Return the parents, [..., nodes], given first children and next siblings.

    Args:
        next_token: [..., nodes] int32 or int64, the first child of each node, -1 for none.
        next_sibling: [..., nodes] of the same dtype, the next child of the node's parent, -1 for none.

    Example:
        >>> import torch
        >>> from_links(torch.tensor([1, 3, -1, -1]), torch.tensor([-1, 2, -1, -1]))
        tensor([-1,  0,  0,  1])
    """
    check_nodes("next_token", next_token)
    check_type("next_sibling", next_sibling, (next_token.dtype,))
    if next_sibling.shape != next_token.shape or next_sibling.device != next_token.device:
        expected, got = (f"shape {list(each.shape)} on {each.device}" for each in (next_token, next_sibling))
        raise ValueError(f"next_sibling: expected {expected}, as next_token has, got {got}")
    count = next_token.shape[-1]
    nodes = torch.arange(count, device=next_token.device).expand_as(next_token)
    parents_of_first, previous = (place(links.long(), nodes, count) for links in (next_token, next_sibling))
    first = torch.where(previous < 0, nodes, previous)
    for _ in range(count.bit_length()):  # each round doubles the number of siblings that `first` goes back
        first = first.gather(-1, first)
    return parents_of_first.gather(-1, first)


def to_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return first children and next siblings, [..., nodes] int64, -1 for none; siblings in the order of their nodes.

    Args:
        parents: [..., nodes] int32 or int64; a node without a parent in the tree is padding.

    Example:
        >>> import torch
        >>> to_links(torch.tensor([-1, 0, 0, 1]))
        (tensor([ 1,  3, -1, -1]), tensor([-1,  2, -1, -1]))
    """
    check_nodes("parents", parents)
    count = parents.shape[-1]
    nodes = torch.arange(count, device=parents.device)
    is_draft = (parents >= 0) & (parents < count) & (parents != nodes) & (nodes > 0)
    of_child, of_node = torch.where(is_draft, parents, -1)[..., None, :], torch.where(is_draft, parents, -2)[..., None]
    is_child, is_later_sibling = of_child == nodes[:, None], (of_child == of_node) & (nodes > nodes[:, None])
    next_token, next_sibling = (torch.where(each, nodes, count).amin(-1) for each in (is_child, is_later_sibling))
    return next_token.masked_fill(next_token == count, -1), next_sibling.masked_fill(next_sibling == count, -1)


def from_mask(mask: Tensor) -> Tensor:
    """Return the parents, [..., nodes], given an attention mask: a node's parent is its deepest ancestor.

    Args:
        mask: [..., nodes, nodes] bool; row i is True at node i and at its ancestors.

    Example:
        >>> import torch
        >>> from_mask(torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]).bool())
        tensor([-1,  0,  1,  0])
    """
    check_type("mask", mask, (torch.bool,))
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] == 0:
        raise ValueError(f"mask: expected shape [..., nodes, nodes], got {list(mask.shape)}")
    depth = mask.sum(-1)
    is_parent = mask & (depth[..., None, :] == depth[..., None] - 1)
    return torch.where(is_parent, torch.arange(mask.shape[-1], device=mask.device), -1).amax(-1)


def from_paths(paths: Tensor, num_nodes: int) -> Tensor:
    """Return the parents, [..., num_nodes], given the path to each leaf.

    Args:
        paths: [..., leaves, depth + 1] int32 or int64, the nodes from node 0 to each leaf, then -1.
        num_nodes: the number of nodes of the tree, node 0 included.

    Example:
        >>> import torch
        >>> from_paths(torch.tensor([[0, 1, 3], [0, 2, -1]]), num_nodes=4)
        tensor([-1,  0,  0,  1])
    """
    check_type("paths", paths, INTEGERS)
    if paths.ndim < 2:
        raise ValueError(f"paths: expected shape [..., leaves, depth + 1], got {list(paths.shape)}")
    before, after = (part.flatten(-2).long() for part in (paths[..., :-1], paths[..., 1:]))
    is_edge = (before >= 0) & (before < check_count("num_nodes", num_nodes)) & (after > 0)
    return place(torch.where(is_edge, after, -1), before, num_nodes)


def from_choices(choices: Sequence[Sequence[int]]) -> Tensor:
    """Return the parents, [len(choices) + 1], of drafts that are numbered by depth and then in lexicographic order.

    Args:
        choices: for each draft the ranks among their siblings, from 0, of its ancestors and itself; in any order.

    Example:
        >>> from_choices([(0,), (1,), (0, 0), (0, 1)])
        tensor([-1,  0,  0,  1,  1])
    """
    nodes = sorted({(), *map(tuple, choices)}, key=lambda ranks: (len(ranks), ranks))
    numbers = {ranks: number for number, ranks in enumerate(nodes)}
    for ranks in nodes[1:]:
        if ranks[:-1] not in numbers:
            raise ValueError(f"choices: expected {ranks[:-1]}, too, the parent of {ranks}")
    return torch.tensor([-1, *(numbers[ranks[:-1]] for ranks in nodes[1:])])


def check_nodes(name: str, tensor: Tensor) -> None:
    """Raise unless the tensor has an integer for each node."""
    check_type(name, tensor, INTEGERS)
    if tensor.ndim == 0 or tensor.shape[-1] == 0:
        raise ValueError(f"{name}: expected shape [..., nodes], got {list(tensor.shape)}")


def place(index: Tensor, values: Tensor, count: int) -> Tensor:
    """Return [..., count] with the values at their index, -1 elsewhere; values with an index out of range are dropped."""
    index = torch.where((index >= 0) & (index < count), index, count)
    return torch.full((*index.shape[:-1], count + 1), -1, device=index.device).scatter(-1, index, values)[..., :count]
