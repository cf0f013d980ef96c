"""The kernels of trees and siblings read and write only inside their tensors, for all trees, rows and slots."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from specdecode import Adjustments, RejectionSampler
from specdecode.kernels import tree
from tests.support.addresses import apart, inside, reads_and_writes_inside
from tests.support.differential import assert_same, like_a_device
from tests.support.kernels import needs_interpreter
from tests.test_tree_sampler import adjustments_of, call, packed, trees

pytestmark = [needs_interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


class Checked:
    """A kernel whose launches are counted, and fail if they read or write outside their tensors."""

    launches = 0

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            Checked.launches += 1
            with inside(dict(enumerate(arguments))):
                self.kernel[grid](*arguments, **constants)

        return launch


@pytest.fixture(autouse=True)
def checked_launches():
    Checked.launches = 0
    kernels = {name: Checked(getattr(tree, name)) for name in ("start_kernel", "advance_kernel", "walk_kernel")}
    with mock.patch.multiple(tree, **kernels), reads_and_writes_inside(), like_a_device():
        yield


def apart_from_each_other(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with every tensor in memory of its own, so that accesses outside of it are seen."""

    def moved(value: Any) -> Any:
        if isinstance(value, Adjustments):
            return Adjustments(*[moved(each) for each in value])
        return apart(value) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in arguments.items()}


HIGH, LOW = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min


# All rows are read at once if they have at most LOGITS_A_ROUND logits for each round that this saves.
@pytest.mark.parametrize("limit", [0, 10**9], ids=["by rounds", "all at once"])
@pytest.mark.parametrize(
    ("seed", "kind", "layout", "truncation"),
    [
        (0, "none", "padded", {}),
        (1, "all", "packed", {"top_k": 3, "top_p": 0.8}),
        (2, "mask", "packed", {}),
        (3, "none", "packed", {"top_p": 0.9}),
    ],
)
def test_random_calls_read_and_write_inside_their_tensors(monkeypatch, limit, seed, kind, layout, truncation):
    monkeypatch.setattr(tree, "LOGITS_A_ROUND", dict.fromkeys(tree.LOGITS_A_ROUND, limit))
    given = trees(1100, torch.bfloat16, seed, requests=4)
    arguments = (call if layout == "padded" else packed)(given, adjustments_of(given, kind))
    if layout == "packed":  # the rows of requests 0 and 1 and the slot of request 2 are invalid
        for name, at, wrong in (
            ("row_starts", 1, [HIGH, LOW, -3][seed % 3]),
            ("slots", 2, [HIGH, -1, 10**6][seed % 3]),
        ):
            arguments[name][at] = wrong
    arguments = apart_from_each_other(arguments) | truncation
    output = RejectionSampler("strict", backend="triton").tree(**arguments)
    assert Checked.launches >= 2
    expected = RejectionSampler("strict", backend="eager").tree(**arguments)
    assert_same(output[:5], expected[:5])


@pytest.mark.parametrize(("vocab", "width"), [(3, 8), (1025, 3), (9300, 8)])
def test_siblings_are_read_and_written_inside_their_tensors(vocab, width):
    rows = apart(torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)))
    rows[1, 1:] = -torch.inf
    options: dict[str, Any] = {"temperature": torch.tensor([0.7, 0.7, 0.0]), "seeds": 5, "width": width}
    drafts = [RejectionSampler("strict", backend=backend).draft(rows, **options) for backend in ("triton", "eager")]
    assert torch.equal(drafts[0].token_ids, drafts[1].token_ids)


def test_a_tree_with_more_nodes_than_a_block_is_walked(monkeypatch):
    """The target draws token 3 everywhere: its path is node 0, the last node, then node 1."""
    monkeypatch.setattr(tree, "BLOCK", 4)
    nodes = 9
    rows = torch.full((1, nodes, 8), -9.0)
    rows[0, :, 3] = 30.0
    token_ids, parents = torch.full((1, nodes), 4), torch.zeros(1, nodes, dtype=torch.int64)
    token_ids[0, [nodes - 1, 1]], parents[0, 1] = 3, nodes - 1
    for limit in (0, 10**9):
        monkeypatch.setattr(tree, "LOGITS_A_ROUND", dict.fromkeys(tree.LOGITS_A_ROUND, limit))
        sampler = RejectionSampler("strict", backend="triton")
        output = sampler.tree(rows, token_ids, parents, max_depth=3, seeds=0)
        assert output.token_ids.tolist() == [[3, 3, 3, -1]]
        assert output.nodes.tolist() == [[nodes - 1, 1, -1]]
