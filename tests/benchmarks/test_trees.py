"""Trees of drafts: the walk beside PyTorch's way, all rows softened and then walked, and SGLang's; what siblings cost.

`pytest --benchmark-only tests/benchmarks/test_trees.py`. Times are taken as in `test_gpu`, on realistic rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specdecode import RejectionSampler
from tests.benchmarks import test_gpu
from tests.benchmarks.bandwidth import Recording
from tests.benchmarks.inputs import VOCAB, draft_rows, realistic_rows
from tests.benchmarks.providers import sglang_tree
from tests.benchmarks.test_gpu import measure

WHY_NOT, pytestmark = test_gpu.WHY_NOT, test_gpu.pytestmark
environment, bytes_per_second = test_gpu.environment, test_gpu.bytes_per_second  # fixtures

TEMPERATURE, MOST_CHILDREN = 0.7, 8
TREES = [(1, 64, 8), (32, 16, 5), (256, 8, 3), (256, 64, 8)]  # requests, nodes, depth


class Tree(NamedTuple):
    target_logits: Tensor
    token_ids: Tensor
    parents: Tensor


def tree_of(requests: int, nodes: int, depth: int, device: str) -> Tree:
    """Make trees with about the same number of nodes on each level, and siblings drawn from rows near the target's."""
    level = torch.cat([torch.zeros(1), 1 + torch.arange(nodes - 1) * depth // (nodes - 1)]).long()
    parents, rank = torch.full((nodes,), -1), torch.zeros(nodes, dtype=torch.int64)
    for d in range(1, depth + 1):
        before, here = (level == d - 1).nonzero()[:, 0], (level == d).nonzero()[:, 0]
        parents[here] = before[torch.arange(len(here)) % len(before)]
        rank[here] = torch.arange(len(here)) // len(before)
    generator = torch.Generator(device).manual_seed(0)
    target = torch.empty(requests, nodes, VOCAB, dtype=torch.bfloat16, device=device)
    siblings = torch.empty(requests, nodes, MOST_CHILDREN, dtype=torch.int64, device=device)
    sampler = RejectionSampler("strict")
    seeds = torch.arange(requests, device=device)
    for node in range(nodes):
        rows = realistic_rows(requests, vocab=VOCAB, generator=generator)
        target[:, node] = rows
        draft = draft_rows(rows, 0.6, generator).bfloat16()
        positions = torch.full_like(seeds, int(level[node]))
        siblings[:, node] = sampler.draft(draft, TEMPERATURE, seeds, positions, width=MOST_CHILDREN).token_ids
    token_ids = siblings[:, parents.clamp(min=0), rank.clamp(max=MOST_CHILDREN - 1)]
    return Tree(target, token_ids, parents.to(device))


def softened_and_walked(tree: Tree, depth: int, top_p: float | None) -> Callable[[], Tensor]:
    """Return a call that samples from the softmax of all rows, then walks, in PyTorch; it does not wait for the device."""

    def call() -> Tensor:
        logits = tree.target_logits.float() / TEMPERATURE
        if top_p is not None:
            values, ids = logits.sort(dim=-1, descending=True)
            probs = values.softmax(dim=-1)
            values = values.masked_fill_(probs.cumsum(dim=-1) - probs >= top_p, -torch.inf)
            logits = torch.empty_like(logits).scatter_(-1, ids, values)
        probs = logits.softmax(dim=-1)
        drawn = (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)
        node, tokens = torch.zeros_like(drawn[:, :1]), []
        for _ in range(depth + 1):
            tokens.append(drawn.gather(1, node.clamp(min=0)).masked_fill_(node < 0, -1))
            is_next = (tree.parents == node) & (tree.token_ids == tokens[-1])
            found, child = is_next.max(dim=1, keepdim=True)
            node = child.where(found, -1)
        return torch.cat(tokens, dim=1)

    return call


def check_sglang(output: tuple[Tensor, Tensor, Tensor], tree: Tree, accepted: Tensor) -> Tensor:
    """Check the tokens of SGLang's verification, and its mean of accepted drafts beside the walk's; return its numbers."""
    predicts, accept_index, num_accepted = output
    emitted = predicts[accept_index[accept_index >= 0]]
    assert len(emitted) == (num_accepted + 1).sum()
    assert ((emitted >= 0) & (emitted < VOCAB)).all()
    counts = torch.stack([num_accepted, accepted]).double()
    if len(tree.token_ids) > 1:
        error = (counts.var(dim=1).sum() / len(tree.token_ids)).sqrt()
        assert counts.mean(dim=1).diff().abs() < 5 * error
    return num_accepted


SGLANG = pytest.param("SGLang", marks=pytest.mark.filterwarnings("default"))  # of code that is not this package's


@pytest.mark.parametrize("truncation", ["plain", "top-p .95"])
@pytest.mark.parametrize("provider", ["tree", "softmax, then walk", SGLANG])
@pytest.mark.parametrize(("requests", "nodes", "depth"), TREES)
def test_trees_on_the_gpu(benchmark, requests, nodes, depth, provider, truncation, environment):
    if provider == "softmax, then walk" and requests * nodes > 2048:
        pytest.skip("not run, for its memory")
    benchmark.group = (
        f"trees of {nodes} nodes and depth {depth}, {requests} requests, {VOCAB:,} tokens, bfloat16, T = 0.7"
    )
    benchmark.extra_info |= {"provider": f"{provider}, {truncation}", "environment": environment}
    if provider == "SGLang" and truncation != "plain" and requests * nodes * VOCAB > 2**31:
        pytest.skip("ends with an illegal memory access")
    tree, top_p = tree_of(requests, nodes, depth, "cuda"), 0.95 if truncation != "plain" else None
    if provider == "softmax, then walk":
        measure(benchmark, Recording(softened_and_walked(tree, depth, top_p), calls=2))
        return
    options: dict[str, Any] = {"max_depth": depth, "temperature": TEMPERATURE, "top_p": top_p}
    call, expected = (
        lambda seeds=0, backend=backend: RejectionSampler("strict", backend=backend).tree(*tree, seeds=seeds, **options)
        for backend in ("triton", "eager")
    )
    if provider == "SGLang":
        try:
            recording = Recording(sglang_tree(*tree, depth, TEMPERATURE, {"top_p": top_p} if top_p else None), calls=2)
        except Exception as error:
            pytest.skip(f"{provider}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        seeds = torch.arange(requests, 2 * requests, device="cuda")  # none that a draft was drawn with
        num_accepted = check_sglang(recording.output, tree, call(seeds).num_accepted)
        benchmark.extra_info["accepted"] = round(float(num_accepted.double().mean()), 2)
        measure(benchmark, recording)
        return
    got, want = call(), expected()
    assert (got.token_ids == want.token_ids).all(dim=1).double().mean() >= 0.98
    assert requests == 1 or got.num_accepted.double().mean() > 0.5
    benchmark.extra_info["accepted"] = round(float(got.num_accepted.double().mean()), 2)
    measure(benchmark, Recording(call))


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.95}], ids=["plain", "top-p"])
@pytest.mark.parametrize("width", [None, 1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 32, 256])
def test_siblings_on_the_gpu(benchmark, rows, width, truncation, environment):
    benchmark.group = f"siblings, {rows} rows, {VOCAB:,} tokens, bfloat16, T = 0.7"
    provider = f"{'one token' if width is None else f'{width} siblings'}{', top-p .95' * bool(truncation)}"
    benchmark.extra_info |= {"provider": provider, "environment": environment}
    generator = torch.Generator("cuda").manual_seed(0)
    logits = realistic_rows(rows, vocab=VOCAB, generator=generator).bfloat16()
    sampler = RejectionSampler("strict", backend="triton")
    measure(benchmark, Recording(lambda: sampler.draft(logits, TEMPERATURE, 0, width=width, **truncation)))
