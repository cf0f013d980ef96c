"""Kernels list the likeliest tokens and the kept sets of emitted rows, in every way that calls compute."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from specdecode import RejectionSampler, kernels
from specdecode.kernels.launch import Plan
from specdecode.kernels.signature import Signature
from tests.conftest import ON_GPU, combine
from tests.support.addresses import reads_and_writes_inside
from tests.support.adjusted import adjusted_rows, adjustments_for, to
from tests.support.batches import verification_batch
from tests.support.differential import Case, case, like_a_device
from tests.support.kernels import (
    DEVICE,
    DTYPES,
    FEW,
    KINDS,
    LARGE,
    MANY,
    assert_same,
    checked,
    memory_of,
    needs_gpu,
    needs_interpreter,
    small,
)
from tests.support.logprobs import hostile
from tests.support.packing import HOSTILE_SLOTS, HOSTILE_STARTS, is_sound, packed_rows, with_counts
from tests.support.report import assert_form, assert_right
from tests.support.truncated import TRUNCATIONS, on

NAN, INF = float("nan"), float("inf")
FEW_KINDS = ["strict", "probabilistic", "block", "synthetic"]
SIZES = (60, 3, 5003) if ON_GPU else (5, 1, 1040)


def arguments_of(kind: str, batch: Case, of: str | None, options: Any, count: int, **more: Any) -> tuple:
    """A kind of call that asks for both lists."""
    method, plain, schedule = checked(kind, batch.to(DEVICE))
    numbers = plain.temperature, plain.seeds, plain.positions
    tensors = plain.target_logits, plain.draft_token_ids, plain.draft_logits, plain.draft_logsumexp, *numbers
    asked = {"logprobs": of, "top_logprobs": count, "kept_sets": True}
    return method, verification_batch(*tensors, **on(DEVICE, options), **asked, **more), schedule


def verify(kind: str, batch: Case, of: str | None, options: Any, way: dict, count: int = 5, **more: Any) -> Any:
    return kernels.verify(*arguments_of(kind, batch, of, options, count, **more), **way)


@pytest.mark.parametrize(
    ("kind", "of", "way", "dtype"),
    combine(
        KINDS if ON_GPU else FEW_KINDS,
        ["processed", "raw"],
        [FEW, LARGE, MANY] if ON_GPU else [FEW, LARGE],
        DTYPES[:3] if ON_GPU else [torch.bfloat16, torch.float32],
    ),
)
def test_lists_of_emitted_rows_are_the_references(kind, of, way, dtype):
    batch = hostile(case(*SIZES, dtype, seed=5))
    output = verify(kind, batch, of, {}, way)
    assert_right(output, batch, {}, of, "triton")


@pytest.mark.parametrize(
    ("kind", "of", "way", "options"),
    combine(
        ["probabilistic", "strict", "block", "synthetic strict"],
        ["processed", "raw"],
        [LARGE, FEW],
        list(TRUNCATIONS.values())[: 5 if ON_GPU else 2],
    ),
)
def test_lists_of_truncated_rows_are_the_references(kind, of, way, options):
    requests, drafts, _ = SIZES
    batch = case(requests if ON_GPU else 4, drafts, 1040, torch.bfloat16, greedy=0.2, seed=6)
    batch.temperature[0] = 1
    assert_right(verify(kind, batch, of, options, way), batch, options, of, "triton")


@pytest.mark.parametrize("kind", ["probabilistic", "deterministic"])
def test_rows_whose_drafts_are_accepted_without_truncation_are_truncated_for_a_kept_set(kind):
    """In a large batch; whether or not log-probabilities are asked for."""
    batch = case(60 if ON_GPU else 2, 1, 1040, torch.bfloat16, greedy=0, seed=8)
    likeliest = batch.target_logits[:, :1].argmax(2)
    batch.target_logits.scatter_(2, likeliest[..., None], 30.0)
    batch = replace(batch, draft_token_ids=likeliest, draft_logits=batch.target_logits[:, :1].clone())
    method, plain, schedule = arguments_of(kind, batch, "processed", {"top_k": 4}, 5)
    output = kernels.verify(method, plain, schedule, **LARGE)
    assert output.num_accepted.tolist() == [1] * len(output.num_accepted)
    assert_right(output, batch, {"top_k": 4}, "processed", "triton")
    without = kernels.verify(method, plain._replace(logprobs=None, top_logprobs=0), schedule, **LARGE)
    assert without[4:7] == (None,) * 3
    assert_same(without, output._replace(logprobs=None, top_token_ids=None, top_logprobs=None))


@pytest.mark.parametrize(
    ("method", "of", "options", "way"),
    combine(["probabilistic", "strict", "block"], ["processed", "raw"], [{}, {"top_k": 9, "top_p": 0.9}], [FEW, LARGE]),
)
def test_lists_of_adjusted_rows_are_of_the_adjusted_rows(method, of, options, way):
    batch = case(40 if ON_GPU else 3, 2, 1104, torch.bfloat16, seed=5)
    adjustments = adjustments_for(batch)
    output = verify(method, batch, of, options, way, adjustments=to(DEVICE, adjustments))
    rows = adjusted_rows(batch, adjustments, batch.draft_token_ids)
    assert_right(output, batch, options, of, "triton", rows)


def rows_of(logits: torch.Tensor, temperature: float = 1.0) -> Case:
    """A batch of these rows, without drafts."""
    rows, numbers = logits[:, None], torch.arange(len(logits))
    return Case(rows, numbers[:, None][:, :0], rows[:, :0], torch.full((len(rows),), temperature), numbers, numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_than_1024_kept_tokens_are_told_by_the_last_one(dtype):
    batch = rows_of(torch.randn(5, 10_000, generator=torch.Generator().manual_seed(0)).to(dtype), 1.3)
    options = {"top_k": torch.tensor([1024, 1025, 0, 9500, 0]), "top_p": torch.tensor([1.0, 1.0, 0.9, 1.0, 1.0])}
    output = verify("strict", batch, "processed", options, {}, 20)
    assert_right(output, batch, options, "processed", "triton")
    assert output.num_kept[:, 0].tolist()[:2] == [1024, 1025]
    assert (output.kept_token_ids[:, 0, 0] >= 0).tolist() == [True, False, False, False, False]
    assert (output.kept_cutoff[:, 0] >= 0).tolist() == [True] * 4 + [False]


def test_of_equal_logits_the_lowest_ids_come_first_in_any_block():
    rows = torch.zeros(4, 3000)
    rows[1, ::2] = -0.0
    rows[2, [5, 1030, 1031, 2999]], rows[2, 2500] = 2.0, 3.0
    rows[3, 2048:], rows[3, 2048], rows[3, 3] = 1.0, NAN, -INF
    output = verify("strict", rows_of(rows), "raw", {}, {}, 6)
    assert output.top_token_ids[:, 0].tolist() == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
        [2500, 5, 1030, 1031, 2999, 0],
        [2049, 2050, 2051, 2052, 2053, 2054],
    ]
    assert output.num_kept[:, 0].tolist() == [3000, 3000, 3000, 2998]


def test_a_row_may_have_fewer_tokens_than_are_asked_for():
    rows = torch.tensor([[0.0, 1.0, -INF, 2.0], [NAN, NAN, NAN, NAN], [-INF, 5.0, NAN, -INF], [1.0, INF, 0.0, INF]])
    output = verify("strict", rows_of(rows), "processed", {}, {}, 6)
    assert output.top_token_ids[:, 0].tolist() == [[3, 1, 0, -1, -1, -1], *[[each, *[-1] * 5] for each in (0, 1, 1)]]
    assert output.num_kept[:, 0].tolist() == [3, 1, 1, 1]
    assert output.top_logprobs[1:, 0].tolist() == [[0.0, *[-INF] * 5]] * 3


@pytest.mark.parametrize(("kind", "of"), [("probabilistic", "processed"), ("strict", "raw")])
def test_blocks_whose_statistics_are_not_finite_are_listed_from(kind, of):
    """NaN at all places that a thread compares with each other is what it takes for the maximum."""
    batch = case(3, 1, 2064, torch.bfloat16, greedy=0.4, seed=5)
    batch.target_logits[..., torch.arange(2064) % 256 < 2] = NAN
    assert_right(verify(kind, batch, of, {}, FEW), batch, {}, of, "triton")


@pytest.mark.parametrize(("kind", "way"), small(("probabilistic", LARGE), ("strict", FEW), ("block", FEW)))
def test_lists_take_nothing_that_was_not_stored(kind, way):
    batch = case(3, 1, 1040, torch.bfloat16, greedy=0, seed=5)
    batch.temperature[:2] = torch.tensor([1.0, 0.0])
    with memory_of(1):
        for options in ({}, {"top_k": 3}):
            for of in ("processed", "raw"):
                assert_right(verify(kind, batch, of, options, way), batch, options, of, "triton")


def made_by(call: Callable[[], Any]) -> list:
    """The launches of all steps that are made, and what each is compiled for."""
    with mock.patch.object(Plan, "run", autospec=True) as run:
        call()
    launches = [each for made in run.call_args_list for each in made.args[0].launches]
    return [(each.kernel, Signature(each.kernel.arg_names, each.bundles).key()) for each in launches]


def launches_of(batch: tuple, **way: bool) -> list:
    """Those of a call."""
    return made_by(lambda: kernels.verify(*batch, **way))


@pytest.mark.parametrize("way", [FEW, LARGE])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=["whole", "truncated"])
@pytest.mark.parametrize("kind", ["strict", "probabilistic", "block"])
def test_lists_take_one_launch_more_and_change_no_other(kind, options, way):
    method, asked, schedule = arguments_of(kind, case(2, 2, 1040, torch.bfloat16), "raw", options, 5)
    *steps, last = launches_of((method, asked, schedule), **way)
    assert launches_of((method, asked._replace(top_logprobs=0, kept_sets=False), schedule), **way) == steps
    assert launches_of((method, asked._replace(top_logprobs=9), schedule), **way) == [*steps, last]
    likeliest, kept = (
        launches_of((method, asked._replace(**one), schedule), **way)
        for one in ({"kept_sets": False}, {"top_logprobs": 0})
    )
    assert len({likeliest[-1], kept[-1], last}) == 3


def test_a_warmup_compiles_what_calls_that_list_take():
    sampler, batch = RejectionSampler("probabilistic", backend="triton"), case(2, 2, 1040, torch.bfloat16).to(DEVICE)
    rows = batch.target_logits, batch.draft_token_ids, batch.draft_logits
    for asked in ({"kept_sets": True}, {"logprobs": "raw", "top_logprobs": 3}):
        known = made_by(lambda asked=asked: sampler.warmup(*rows, seeds=0, **asked))
        for size in (1, 40, 400):
            some = [each[:1].expand(size, *each.shape[1:]) for each in rows]
            assert set(made_by(lambda some=some, asked=asked: sampler(*some, seeds=0, **asked))) <= set(known)


@pytest.mark.parametrize(
    ("method", "of", "way", "options"),
    combine(["probabilistic", "strict", "block"], ["processed", "raw"], [FEW, LARGE], [{}, {"top_p": 0.9}]),
)
def test_packed_calls_return_what_padded_ones_do(method, of, way, options):
    counts = [2, 0, 1]
    batch = with_counts(case(3, 2, 1040, torch.bfloat16, greedy=0.4, seed=7), counts).to(DEVICE)
    want = verify(method, batch, of, options, way)
    rows = packed_rows(batch, counts)
    starts, last = rows["row_starts"], rows["row_starts"][-1:]
    one_more = torch.tensor([0, 1, 2, 0], device=DEVICE)  # a request without rows, in the slot of another
    arguments = verification_batch(
        rows["target_logits"], rows["draft_token_ids"], batch.draft_logits if method != "strict" else None, None,
        batch.temperature, batch.seeds, torch.cat([batch.positions, batch.positions[:1]]), **options, logprobs=of,
        row_starts=torch.cat([starts, last]), num_draft_tokens=2, slots=one_more, top_logprobs=5, kept_sets=True,
    )  # fmt: skip
    with nullcontext() if ON_GPU else reads_and_writes_inside():
        got = kernels.verify(method, arguments, None, **way)
    assert_same(type(got)(*[each[:3] for each in got]), want)
    assert_form(got, 5)
    assert got.invalid[3]
    assert got.top_token_ids[3, 0].tolist() == [0, *[-1] * 4]
    assert got.top_logprobs[3, 0].tolist() == [0.0, *[-INF] * 4]
    assert (int(got.num_kept[3, 0]), int(got.kept_cutoff[3, 0])) == (1, 0)
    assert got.kept_token_ids[3, 0].tolist() == [0, *[-1] * 1023]


@needs_interpreter
@pytest.mark.parametrize(("truncated", "of"), [(True, "processed"), (False, "raw")])
def test_places_that_cannot_be_are_never_read(truncated, of):
    batch = case(8, 3, 40, torch.bfloat16, greedy=0, seed=4)
    for starts, slots in zip(HOSTILE_STARTS, HOSTILE_SLOTS):
        with like_a_device():
            arguments = verification_batch(
                batch.target_logits[:, 0].clone(), batch.draft_token_ids[:, 0].clamp(min=0).clone(), None, None,
                torch.linspace(0.5, 1.5, 5), batch.seeds[:5].clone(), None, top_p=0.9 if truncated else None,
                logprobs=of, row_starts=torch.tensor(starts), num_draft_tokens=3, slots=torch.tensor(slots),
                top_logprobs=5, kept_sets=True,
            )  # fmt: skip
            with reads_and_writes_inside() as launched:
                output = kernels.verify("probabilistic", arguments, None)
        assert launched
        assert_form(output, 5)
        for request in range(7):
            if not is_sound(starts, slots, request):
                assert output.top_token_ids[request, 0].tolist() == [0, *[-1] * 4]
                assert output.num_kept[request].tolist() == [1, 0, 0, 0]
                assert output.kept_token_ids[request, 0].tolist() == [0, *[-1] * 1023]


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("of", ["processed", "raw"])
@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
@pytest.mark.parametrize("requests", [16, 200])
def test_replays_of_a_captured_call_list_what_fresh_calls_do(backend, method, of, requests):
    sampler, options = RejectionSampler(method, backend=backend), {"top_p": 0.9, "top_logprobs": 20, "kept_sets": True}
    static, *fresh = [case(requests, 3, 5003, torch.bfloat16, seed=seed).to("cuda") for seed in range(3)]

    def call(batch: Case) -> Any:
        rows = batch.target_logits, batch.draft_token_ids, batch.draft_logits
        numbers = {"temperature": batch.temperature, "seeds": batch.seeds, "positions": batch.positions}
        return sampler(*rows, **numbers, **options, logprobs=of)

    call(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(static)
    for batch in fresh:
        for mine, other in zip(vars(static).values(), vars(batch).values()):
            mine.copy_(other)
        graph.replay()
        assert_same(output, call(batch))
