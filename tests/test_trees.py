"""Converters of draft trees: every form of a tree gives its parents, and invalid inputs do no harm."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import tree
from specdecode.trees import from_choices, from_links, from_mask, from_paths, to_links

TREES = 60


def random_parents(random: np.random.Generator, size: int, shuffled: bool, padded: bool) -> list[int]:
    places = [0, *(1 + random.permutation(size - 1)).tolist()] if shuffled else list(range(size))
    parents = [-1] * size
    for i in range(1, size):
        if not padded or random.random() < 0.8:
            parents[places[i]] = places[int(random.integers(i))]
    reached = {path[-1] for path in tree.paths(parents)}
    return [parent if node in reached else -1 for node, parent in enumerate(parents)]


def batches(shuffled: bool = True, padded: bool = False) -> list[list[list[int]]]:
    """Yield batches of trees with the same number of nodes."""
    random = np.random.default_rng(0)
    sizes = random.integers(1, 24, TREES).tolist()
    return [[random_parents(random, size, shuffled, padded) for _ in range(3)] for size in sizes]


def links_of(parents: list[int]) -> tuple[list[int], list[int]]:
    """Return first children and next siblings, one node after the other."""
    next_token, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents)):
        kids = tree.children(parents, node)
        next_token[node] = kids[0] if kids else -1
        for one, other in pairwise(kids):
            next_sibling[one] = other
    return next_token, next_sibling


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padded", [False, True])
def test_links_and_parents_convert_into_each_other(place, padded, dtype):
    for batch in batches(padded=padded):
        expected = torch.tensor(batch, device=place[1])
        links = [torch.tensor(each, dtype=dtype, device=place[1]) for each in zip(*map(links_of, batch))]
        assert torch.equal(from_links(*links), expected)
        for one, other in zip(to_links(expected.to(dtype)), links):
            assert torch.equal(one, other.long())
        assert torch.equal(from_links(links[0][0], links[1][0]), expected[0])


def test_links_in_any_order_of_siblings_give_the_parents(place):
    # From the highest sibling to the lowest, with one parent of many: the most links to follow.
    count = 37
    next_token = torch.full((count,), -1, device=place[1])
    next_token[0] = count - 1
    next_sibling = torch.arange(-1, count - 1, device=place[1])
    next_sibling[:2] = -1
    assert from_links(next_token, next_sibling).tolist() == [-1, *[0] * (count - 1)]


def walked(candidates: list, next_token: list, next_sibling: list, samples: list) -> list[int]:
    """Return the nodes that a walk over links accepts, as in engines."""
    node, accepted = 0, []
    while True:
        child = next_token[node]
        while child != -1 and candidates[child] != samples[node]:
            child = next_sibling[child]
        if child == -1:
            return accepted
        node = child
        accepted.append(node)


def test_the_walk_accepts_what_a_walk_over_the_links_accepts():
    random, accepted = np.random.default_rng(1), 0
    for batch in batches(padded=True):
        for parents in batch:
            candidates, samples = random.integers(0, 3, (2, len(parents))).tolist()
            links = [each.tolist() for each in to_links(torch.tensor(parents))]
            nodes, _ = tree.walk(lambda node, depth, samples=samples: samples[node], candidates, parents)
            assert walked(candidates, *links, samples) == nodes
            accepted += len(nodes)
    assert accepted > 100


def ancestors_of(parents: list[int]) -> list[list[bool]]:
    mask = np.eye(len(parents), dtype=bool)
    for path in tree.paths(parents):
        mask[path[-1], path] = True
    return mask.tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_of_ancestors_gives_the_parents(place, padded):
    for batch in batches(padded=padded):
        masks = torch.tensor([ancestors_of(parents) for parents in batch], device=place[1])
        expected = torch.tensor(batch, device=place[1])
        assert torch.equal(from_mask(masks), expected)
        assert torch.equal(from_mask(masks[:, None]), expected[:, None])


def test_the_paths_to_the_leaves_give_the_parents(place):
    for batch in batches():
        for parents in batch:
            leaves = [path for path in tree.paths(parents) if not tree.children(parents, path[-1])]
            width = max(map(len, leaves))
            paths = torch.tensor([path + [-1] * (width - len(path)) for path in leaves], device=place[1])
            assert from_paths(paths, len(parents)).tolist() == parents
            assert from_paths(paths[None].int(), len(parents) + 2).tolist() == [[*parents, -1, -1]]


def test_choices_give_the_parents_in_the_order_of_depth():
    for batch in batches(shuffled=False):
        for parents in batch:
            ranks: list[tuple] = [()]
            for node in range(1, len(parents)):
                ranks.append((*ranks[parents[node]], tree.children(parents, parents[node]).index(node)))
            order = sorted(range(len(parents)), key=lambda node: (len(ranks[node]), ranks[node]))
            expected = [-1, *(order.index(parents[node]) for node in order[1:])]
            choices = [ranks[node] for node in order[1:]]
            assert from_choices(choices).tolist() == from_choices(choices[::-1]).tolist() == expected


def test_what_is_no_tree_gives_parents_that_are_nodes_or_none(place):
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 12, shape, generator=generator).to(place[1])

    for _ in range(20):
        mask = integers(5, 8, 8) > 4
        links = integers(2, 5, 8)
        for parents in (
            from_links(*links),
            from_mask(mask),
            from_paths(integers(5, 4, 3), 8),
            *to_links(integers(5, 8)),
        ):
            assert parents.shape == (5, 8)
            assert bool(((parents >= -1) & (parents < 8)).all())


def test_wrong_arguments_are_named():
    nodes = torch.tensor([-1, 0])
    for message, call in {
        "next_token: expected a torch.Tensor": lambda: from_links([1], nodes),
        "next_sibling: expected": lambda: from_links(nodes, nodes.float()),
        r"next_sibling: expected shape \[2\] on cpu": lambda: from_links(nodes, nodes[:1]),
        r"parents: expected shape \[..., nodes\], got \[\]": lambda: to_links(nodes[0]),
        "mask: expected": lambda: from_mask(nodes),
        r"mask: expected shape \[..., nodes, nodes\], got \[2\]": lambda: from_mask(nodes > 0),
        r"paths: expected shape \[..., leaves, depth \+ 1\], got \[2\]": lambda: from_paths(nodes, 2),
        "num_nodes: expected a positive int": lambda: from_paths(nodes[None], 0),
        r"choices: expected \(1,\), too, the parent of \(1, 0\)": lambda: from_choices([(0,), (1, 0)]),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()
