"""The sampler in functions compiled by torch.compile: a call breaks the graph, runs uncompiled, and returns equal bits."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode import AcceptanceSchedule, AcceptanceStats, RejectionSampler, VocabShard, sample
from tests.support.calls import each_method
from tests.support.differential import assert_same
from tests.support.ranks import groups

BATCH, DRAFTS, VOCAB = 4, 3, 1100


def make(method: str, place, shard: VocabShard | None = None) -> RejectionSampler:
    schedule = AcceptanceSchedule.from_rates([0.9, 0.5, 0.3, 0.1]) if method == "synthetic" else None
    return RejectionSampler(method, backend=place[0], schedule=schedule, shard=shard)


class Compiled:
    """A function compiled by torch.compile, and the names of the operations in its graphs."""

    def __init__(self, function: Callable, **options: bool) -> None:
        torch._dynamo.reset()  # all tests share the code of a call, and the compiler compiles one code only a few times
        self.compiled = torch.compile(function, backend=self.record, **options)
        self.operations: set[str] = set()

    def record(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        calls = [node.target for node in graph.graph.nodes if node.op.startswith("call")]
        self.operations.update(target if isinstance(target, str) else target.__name__ for target in calls)
        return graph.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


def inputs(place) -> dict[str, Tensor]:
    """Return rows and drafts, some accepted, some rejected; request 1 has one draft."""
    generator = torch.Generator().manual_seed(0)
    target = 3 * torch.randn(BATCH, DRAFTS + 1, VOCAB, generator=generator)
    draft = target[:, :DRAFTS] + torch.randn(BATCH, DRAFTS, VOCAB, generator=generator)
    ids = draft.argmax(dim=2)
    ids[1, 1] = -1
    call = {"target_logits": target, "draft_token_ids": ids, "draft_logits": draft}
    return {name: value.to(place[1]) for name, value in call.items()}


@each_method
def test_calls_run_uncompiled_between_the_graphs_of_compiled_code(place, method):
    sampler, call = make(method, place), inputs(place)
    starts = torch.arange(0, 17, 4, device=place[1])

    def step(target_logits: Tensor, draft_token_ids: Tensor, draft_logits: Tensor, seeds: int | Tensor) -> tuple:
        rows, fed = target_logits.flatten(0, 1), target_logits.argmax(dim=2).flatten()
        drawn = sampler.draft(rows, 0.7, seeds=0, offset=2, top_p=0.9)
        output = sampler(target_logits * 2, draft_token_ids, draft_logits, seeds=seeds, temperature=0.7, logprobs="raw")
        packed = sampler.packed(rows, fed, starts, num_draft_tokens=DRAFTS, seeds=output.num_tokens.long())
        return *drawn, *output, *packed, sample(rows / 3, seeds=drawn.token_ids)

    compiled = Compiled(step)
    for seeds in (5, torch.tensor([3, -(2**63), 2**63 - 1, 0], device=place[1])):
        expected = step(**call, seeds=seeds)
        assert_same(compiled(**call, seeds=seeds), expected)
        num_accepted, num_drafts = (
            expected[4],
            expected[5],
        )  # `drawn` has three fields, then come `output`'s token_ids and these
        assert 0 < int(num_accepted.sum()) < int(num_drafts.sum())
    assert compiled.operations == {"flatten", "argmax", "mul", "add", "long", "truediv"}  # the step's own


def test_a_call_with_a_shard_runs_uncompiled(place):
    if place[1] != "cpu":
        pytest.skip("the group has no GPU")
    call, sampler = inputs(place), make("block", place, VocabShard(groups(1)[0], 0, VOCAB))
    assert_same(Compiled(lambda: sampler(**call, seeds=0))(), make("block", place)(**call, seeds=0))


def test_calls_run_uncompiled_after_more_kinds_than_the_compiler_caches(place):
    sampler, call = make("probabilistic", place), inputs(place)
    kinds = [{"temperature": 0.5 + i / 10, "logprobs": "raw"} for i in range(10)]
    kinds += [{"top_k": 5 + i, "min_p": torch.full((BATCH,), 0.01 * i, device=place[1])} for i in range(10)]
    compiled = Compiled(lambda kind: sampler(**call | {"target_logits": call["target_logits"] * 2}, **kind))
    torch._dynamo.config.cache_size_limit, limit = 2, torch._dynamo.config.cache_size_limit
    try:
        for kind in kinds:
            assert_same(
                compiled(kind | {"seeds": 3}),
                sampler(**call | {"target_logits": 2 * call["target_logits"]}, **kind, seeds=3),
            )
    finally:
        torch._dynamo.config.cache_size_limit = limit
    assert compiled.operations == {"mul"}


def test_compiled_calls_without_seeds_draw_the_seeds_of_uncompiled_calls(place):
    even = torch.zeros(8, 1, 2048, device=place[1])  # two draws of 8 tokens agree with probability 2,048^-8
    no_drafts = torch.zeros(8, 0, dtype=torch.int64, device=place[1])
    sampler = make("strict", place)

    def step(logits: Tensor) -> tuple[Tensor, ...]:
        calls = sampler(logits, no_drafts).token_ids[:, 0], sampler(logits, no_drafts).token_ids[:, 0]
        return *calls, sampler.draft(logits[:, 0]).token_ids, sample(logits[:, 0])

    compiled = Compiled(step)
    torch.manual_seed(1)
    draws = [tokens.tolist() for _ in range(2) for tokens in compiled(even)]
    assert len(set(map(str, draws))) == 8
    torch.manual_seed(1)
    assert [tokens.tolist() for _ in range(2) for tokens in step(even)] == draws


def test_a_compiled_step_counts_its_acceptance(place):
    call, sampler = inputs(place), make("probabilistic", place)
    stats, expected = (AcceptanceStats(DRAFTS, device=place[1]) for _ in range(2))

    def step(stats: AcceptanceStats, seeds: Tensor) -> Tensor:
        output = sampler(**call, seeds=seeds)
        stats.update(output)
        return output.token_ids

    compiled = Compiled(step)
    for first in (0, 50):
        seeds = torch.arange(first, first + BATCH, device=place[1])
        assert torch.equal(compiled(stats, seeds), step(expected, seeds))
    assert stats.draft_tokens == 2 * 10  # two steps; three requests have 3 drafts, one has 1
    assert str(stats) == str(expected)


def test_errors_of_compiled_calls_are_those_of_uncompiled_calls(place):
    call, sampler = inputs(place), make("block", place)
    compiled = Compiled(lambda seeds: sampler(**call, seeds=seeds).token_ids * 2)
    with pytest.raises(TypeError, match=r"^seeds: expected an int, .*, got float"):
        compiled(1.5)
    with pytest.raises(ValueError, match=r"^seeds: expected shape \[4\], got \[3\]"):
        compiled(torch.arange(3, device=place[1]))


def test_one_graph_is_an_error_that_says_why(place):
    call, sampler = inputs(place), make("block", place)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="specdecode break the graph: compile without fullgraph=True"
    ):
        Compiled(lambda: sampler(**call, seeds=0), fullgraph=True)()


def test_calls_that_are_not_compiled_do_not_import_the_compiler():
    code = (
        "import sys, torch, specdecode; specdecode.sample(torch.zeros(1, 2), seeds=0); "
        "specdecode.RejectionSampler('block')(torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=torch.int64)); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
