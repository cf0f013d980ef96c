"""The checker of trees: right verifiers pass, mistakes are named, and the bound on acceptance holds."""

from itertools import product

import numpy as np
import pytest

from specdecode.checking import check, trees
from specdecode.checking.cases import tree_cases
from specdecode.checking.mistakes.trees import TARGET_ONLY, TREE
from specdecode.checking.models import How
from specdecode.checking.settings import Settings
from specdecode.checking.subjects import load
from tests.support.planted import RIGHT_TREES
from tests.support.readers import softmax


def reader(bonus_row=lambda node, parents: node, count_twice=False):
    """A verifier of trees as a reader writes it, for one request at a time: a running sum of p at each node."""
    random = np.random.default_rng(0)

    def one_step(p, tokens, parents):
        path, node = [], 0
        while True:
            children = [child for child in range(1, len(parents)) if parents[child] == node]
            rest, below, u, accepted = (
                p[node if children else bonus_row(node, parents)].copy(),
                0.0,
                random.random(),
                None,
            )
            for child in children:
                below += p[node, tokens[child]] if count_twice else rest[tokens[child]]
                if u < below:
                    accepted = child
                    break
                rest[tokens[child]] = 0
            if accepted is None:
                return [*path, random.choice(len(rest), p=rest / rest.sum())]
            path.append(tokens[accepted])
            node = accepted

    def verify(target_logits, token_ids, parents):
        output = np.full((len(target_logits), max(trees.depths(parents.tolist())) + 1), -1)
        for request, (p, tokens) in enumerate(zip(softmax(target_logits), token_ids)):
            emitted = one_step(p, tokens, parents)
            output[request, : len(emitted)] = emitted
        return output

    return verify


@pytest.mark.parametrize("tree", [TREE, (-1, 0, 1), (-1, 0, 0, 0, 2, 4)], ids=["binary", "chain", "uneven"])
@pytest.mark.parametrize("name", RIGHT_TREES)
def test_right_verifiers_of_trees_pass(name, tree):
    report = check(RIGHT_TREES[name], tree=tree, requests=4_000)
    assert report.passed, str(report)
    assert {each.name.split(":")[0] for each in report.checks} >= {each.name for each in tree_cases(tree)}


def test_our_own_verifier_of_trees_passes():
    subject = load("specdecode:strict:eager")
    report = check(subject.tree, tree=TREE, requests=3_000)
    assert report.passed, str(report)
    assert report.settings["tree"] == list(TREE)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, None),
        ({"bonus_row": lambda node, parents: max(0, parents[node])}, "tree_bonus_from_another_row"),
        ({"bonus_row": lambda node, parents: len(parents) - 1}, "tree_bonus_from_another_row"),
        ({"count_twice": True}, "tree_equal_siblings_counted_twice"),
    ],
    ids=["right", "parent", "last node", "twice"],
)
def test_a_readers_mistake_in_trees_is_named_first(change, name):
    report = check(reader(**change), tree=TREE, requests=20_000)
    assert report.passed == (name is None), str(report)
    assert report.suspects[:1] == ([name] if name else [])


def test_a_path_that_is_not_in_the_tree_is_an_error():
    report = check(lambda target_logits, token_ids, parents: token_ids[:, 1:4], tree=TREE, requests=500)
    assert report.suspects == ["tree_leaves_the_path"]
    assert "np.array([-1, 0, 0, 1, 1], dtype=np.int64)" in report.checks[0].detail


@pytest.mark.parametrize("drafts", ["drawn", "top", "equal"])
def test_the_bound_on_acceptance_is_the_sum_over_texts(drafts):
    models = Settings(2, 3, 1_000, 0).models(tree_cases(TREE)[0])
    how = How(drafts, parents=TREE)
    tokens, _ = trees.draft(models, how, 20_000, np.random.default_rng(0))
    walk = best = 0.0
    for length in (1, 2):
        for text in product(range(3), repeat=length):
            p = models.target_probs[0][0, text[0]] * (models.target_probs[1][text[0], text[1]] if length == 2 else 1)
            children = (tokens[:, [3, 4]] == text[-1]).any(axis=1) & (tokens[:, 1] == text[0])
            there = children if length == 2 else (tokens[:, [1, 2]] == text[0]).any(axis=1)
            walk, best = walk + p * there.mean(), best + min(p, there.mean())
    assert trees.most_accepted(models, how) == pytest.approx((walk, best), abs=0.02)


@pytest.mark.parametrize("parents", [TREE, (-1, 0, 1, 1, 2)])
def test_padding_and_shuffled_nodes_keep_the_shape_of_the_tree(parents):
    depths = sorted(trees.depths(parents))
    assert sorted(trees.depths(trees.reversed_nodes(parents))) == depths
    assert sorted(trees.depths(trees.padded(parents))) == [-1, -1, -1, *depths]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tree": [0, 0]}, "tree: expected the parent of each node, -1 and then nodes of the tree, got [0, 0]"),
        ({"tree": [-1]}, "got [-1]"),
        ({"tree": [-1, 0, 7]}, "got [-1, 0, 7]"),
        ({"draft": lambda draft_logits: 0}, "draft: expected None with a tree"),
        ({"verify": lambda target, tokens: 0}, "verify: expected a function of (target_logits, token_ids, parents)"),
    ],
)
def test_bad_arguments_of_trees_are_refused(arguments, message):
    with pytest.raises(ValueError, match=r".*") as error:
        check(**({"verify": TARGET_ONLY, "tree": TREE} | arguments))
    assert message in str(error.value)
