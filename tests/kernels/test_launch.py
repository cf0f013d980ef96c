"""Plans and launches: signatures and arguments of kernels, and the state that calls share."""

import gc
import itertools
import statistics
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import triton

from specdecode import RejectionSampler, kernels
from specdecode.kernels import launch
from specdecode.kernels.arguments import AlignedPointer, Constant, Float32, Int32, Int64, Pointer, Stride
from specdecode.kernels.call import plan_of
from specdecode.kernels.launch import Launch, Part, Plan
from specdecode.kernels.signature import Signature, Symbol, with_values
from tests.support.batches import verification_batch
from tests.support.differential import case
from tests.support.kernels import DEVICE, KINDS, PlannedCall, checked, forget_plans, strided, verify

STREAM = 7


class Inner(NamedTuple):
    """A bundle in a bundle."""

    ptr: AlignedPointer
    stride: Stride
    ALIGNED: Constant


class Outer(NamedTuple):
    """A kernel's bundle."""

    inner: Inner
    other_ptr: Pointer
    count: Int32
    large: Int64
    scale: Float32
    SIZE: Constant


def outer(ptr=torch.bfloat16, stride=1, aligned=True, other=None, count=3, large=2**40, size=8) -> Outer:
    inner = Inner(Symbol("logits", ptr), stride, aligned)
    return Outer(inner, other and Symbol("other", other), count, large, Symbol("scale"), size)


def test_a_signature_says_types_constants_and_what_is_aligned():
    signature = Signature(["bundle"], (outer(),))
    assert signature.types == {
        "bundle": Outer(Inner("*bf16", "constexpr", "constexpr"), "constexpr", "i32", "i64", "fp32", "constexpr")
    }
    assert signature.constants == {(0, 0, 1): 1, (0, 0, 2): True, (0, 1): None, (0, 5): 8}
    assert signature.attributes == {(0, 0, 0): [["tt.divisibility", 16]]}
    strided_rows = Signature(["bundle"], (outer(stride=2, aligned=False, other=torch.int64),))
    assert strided_rows.types["bundle"].inner == Inner("*bf16", "i64", "constexpr")
    assert strided_rows.types["bundle"].other_ptr == "*i64"
    assert strided_rows.attributes == {}
    assert (signature.num_arguments, strided_rows.num_arguments) == (4, 6)


def test_a_variant_depends_on_types_constants_and_alignment_and_on_no_number():
    key = Signature(["bundle"], (outer(),)).key()
    assert Signature(["bundle"], (outer(count=4, large=5),)).key() == key
    changes = {"ptr": torch.float16}, {"stride": 2}, {"aligned": False}, {"other": torch.int32}, {"size": 16}
    keys = {Signature(["bundle"], (outer(**change),)).key() for change in changes}
    assert len(keys) == len(changes)
    assert key not in keys


def test_what_compiled_kernels_are_given_follows_the_bundles(recorded):
    tensors = {"other": torch.zeros(1, dtype=torch.int32), "logits": torch.zeros(2)}
    parts = {"first": Part(torch.int32, "3 * rows"), "second": Part(torch.int64, "rows")}
    plan = Plan(torch.device("cpu"), {"twice": "rows * 2"}, parts, zeros="rows")
    bundles = outer(other=torch.int32, count=Symbol("twice + 1"), size=8), Inner(plan.part("second"), 1, False)
    plan.add(mock.Mock(arg_names=["a", "b"]), ("twice", "rows", "1"), bundles, num_warps=4)
    other, logits = (tensor.data_ptr() for tensor in tensors.values())
    for rows in (3, 50):
        memory = torch.zeros(1000, dtype=torch.int32)
        with mock.patch.object(plan, "allocate", return_value=memory) as allocate:
            plan.run(tensors, {"scale": 0.7, "rows": rows})
        second = -(-3 * rows // 32) * 32  # in cache lines
        allocate.assert_called_once_with(second + -(-2 * rows // 32) * 32, rows)
        assert recorded.made[-1].grid == (2 * rows, rows, 1)
        inner, outside = (logits, 1, True), (memory.data_ptr() + 4 * second, 1, False)
        assert recorded.made[-1].values == ((inner, other, 2 * rows + 1, 2**40, 0.7, 8), outside)


class Recorded:
    """Replaces the compiled kernel of a launch: records its arguments, and launches nothing."""

    def __init__(self, compiled: Launch, launches: list) -> None:
        self.compiled, self.launches = compiled, launches

    def __getitem__(self, grid):
        def run(*values, stream):
            assert stream == STREAM
            self.launches.append(SimpleNamespace(kernel=self.compiled.kernel, grid=grid, values=values))

        return run


@pytest.fixture
def recorded(monkeypatch):
    """The launches of compiled kernels, in order; `compiled` lists the compiled kernels."""
    launches = SimpleNamespace(made=[], compiled=[])

    def compile_nothing(self, device):
        launches.compiled.append(self)
        return Recorded(self, launches.made)

    monkeypatch.setattr(Launch, "compile", compile_nothing)
    monkeypatch.setattr(triton, "JITFunction", object)  # as if kernels were not interpreted
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_stream=lambda index: STREAM))
    forget_plans()
    yield launches
    forget_plans()


def flat(values) -> list:
    """Return the fields of nested bundles as a flat list."""
    return [field for value in values for field in (flat(value) if isinstance(value, tuple) else [value])]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_kernel_is_given_what_an_interpreted_one_is(recorded, kind, drafts, large):
    """Addresses replace tensors. Both the first call with a plan and later calls of other sizes are tested."""
    for requests, vocab in ((2, 2064), (2, 2064), (150, 4112), (1, 16)):
        planned = PlannedCall(kind, case(requests, drafts, vocab, torch.bfloat16).to(DEVICE), large=large)
        plan, numbers, values = planned.plan, planned.numbers, planned.values
        recorded.made.clear()
        recorded.compiled.clear()
        workspace = torch.zeros(values["length"], dtype=torch.int32, device=DEVICE)
        with mock.patch.object(torch, "empty", return_value=workspace) as empty:
            plan.run(planned.tensors, numbers)
        assert empty.call_args.args == (len(workspace),)
        interpreted = values | plan.views(workspace, values)
        assert [made.kernel for made in recorded.made] == [each.kernel for each in planned.launches]
        for made, each in zip(recorded.made, planned.launches):
            assert made.grid == tuple(eval(number, plan.functions, interpreted) for number in each.grid)
            wanted, got = flat(with_values(bundle, interpreted) for bundle in each.bundles), flat(made.values)
            assert len(got) == len(wanted)
            for value, other in zip(got, wanted):
                if isinstance(other, torch.Tensor):
                    assert value == other.data_ptr()
                elif not isinstance(other, triton.language.constexpr):
                    assert value == other
    assert not recorded.compiled  # except by the first call


def test_only_what_programs_count_starts_as_zeros(recorded, monkeypatch):
    arguments = checked("probabilistic", case(5, 3, 2064, torch.bfloat16).to(DEVICE))
    memory, empty = torch.empty(10_000, dtype=torch.int32, device=DEVICE), torch.empty

    def allocate(*size, **options):
        return memory if len(size) == 1 and size[0] > 5 else empty(*size, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    for large, zeros in ((False, 0), (True, 5 * (2 + 4))):
        memory.fill_(-1)
        kernels.verify(*arguments, large=large)
        assert (memory[:zeros] == 0).all()
        assert (memory[zeros:] == -1).all()


def test_a_plan_is_found_by_what_its_kernels_are_compiled_for_and_by_no_size(recorded):
    batch = case(4, 3, 2064, torch.bfloat16).to(DEVICE)

    def makes_a_plan(**changes) -> bool:
        recorded.compiled.clear()
        verify("probabilistic", SimpleNamespace(**{**vars(batch), **changes}))
        return bool(recorded.compiled)

    wider = torch.zeros(4, 4, 2064 + 16, dtype=torch.bfloat16, device=DEVICE)
    ids, target = batch.draft_token_ids, batch.target_logits
    assert makes_a_plan()
    assert not makes_a_plan()
    for change in (
        {"target_logits": wider[..., 1:2065]},  # not at a multiple of 16 bytes
        {"target_logits": strided(target)},
        {"target_logits": target[..., :2056], "draft_logits": batch.draft_logits[..., :2056]},  # no multiple of 16
        {"target_logits": target.float()},
        {"target_logits": target.half(), "draft_logits": batch.draft_logits.half()},
        {"draft_token_ids": ids.int()},
        {"temperature": batch.temperature.half()},
        {"temperature": 0.7},
        {"seeds": 5},
        {"positions": None},
    ):
        assert makes_a_plan(**change), change.keys()
        assert not makes_a_plan(**change), change.keys()
    of_drafts = {name: getattr(batch, name)[:, :2] for name in ("draft_token_ids", "draft_logits")}
    for change in (
        {"target_logits": target.clone(), "draft_token_ids": ids.clone()},
        {"target_logits": wider[..., :2064]},  # other strides
        {"target_logits": target.transpose(0, 1).contiguous().transpose(0, 1)},
        {"draft_token_ids": ids.T.contiguous().T},
        {"target_logits": target[..., :2048], "draft_logits": batch.draft_logits[..., :2048]},
        {"target_logits": target[:, :3], **of_drafts},
        {name: value[:3] for name, value in vars(batch).items()},
        {"seeds": strided(batch.seeds), "positions": strided(batch.positions)},
        {"temperature": 0.3},
        {"seeds": 6},
    ):
        assert not makes_a_plan(**change), change.keys()


def calls_of(method: str, most: int, packed: bool, **options) -> dict:
    """Return calls of kernels with checked arguments, for each number of requests up to `most`."""
    drafts, vocab = 3, 16
    target = torch.zeros(most, drafts + 1, vocab, dtype=torch.bfloat16, device=DEVICE)
    draft, ids = target[:, 1:].contiguous(), torch.zeros(most, drafts, dtype=torch.int64, device=DEVICE)
    numbers = torch.ones(most, device=DEVICE), torch.arange(most, device=DEVICE), None
    starts = torch.arange(most + 1, device=DEVICE) * (drafts + 1)
    calls = {}
    for n in range(1, most + 1):
        if packed:
            rows = n * (drafts + 1)
            tensors = target.view(-1, vocab)[:rows], torch.zeros(rows, dtype=torch.int64, device=DEVICE), draft, None
            where = {"row_starts": starts[: n + 1], "num_draft_tokens": drafts, "slots": starts[:n] // (drafts + 1)}
        else:
            tensors, where = (target[:n], ids[:n], draft[:n], None), {}
        of_requests = numbers if packed else [None if number is None else number[:n] for number in numbers]
        batch = verification_batch(*tensors, *of_requests, **options, **where)
        calls[n] = partial(kernels.verify, method, batch)
    return calls


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_a_size_never_seen_before_plans_and_compiles_nothing(recorded, method, packed, options):
    calls = calls_of(method, 200, packed, **options)
    for large, many in itertools.product((False, True), repeat=2):
        calls[7](large=large, many=many)
    known, compiled = plan_of.cache_info().currsize, len(recorded.compiled)
    with mock.patch.object(Plan, "prepare", side_effect=AssertionError("a plan is prepared")):
        for call in calls.values():
            call()
    assert (plan_of.cache_info().currsize, len(recorded.compiled)) == (known, compiled)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_a_size_never_seen_before_takes_no_more_time_than_a_repeated_one(recorded, method, options):
    """At most 10 us, also for a thousand sizes.

    The measured value is the additional time of a call over the same call right after it, at the median of the sizes. In
    the first pass the size is new, in the second it is not. Making a plan took 1,300 us or more.
    """
    calls = calls_of(method, 1000, packed=False, **options)
    for large, many in itertools.product((False, True), repeat=2):
        calls[7](large=large, many=many)

    def microseconds(call) -> float:
        begin = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - begin) / 1000

    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).add(1).tolist()
    passes = []
    for _ in range(2):
        recorded.made.clear()
        times = [(microseconds(calls[n]), microseconds(calls[n])) for n in order]
        passes.append(statistics.median(first - again for first, again in times))
    assert passes[0] - passes[1] < 10
    assert max(passes) < 100


def test_plans_keep_no_tensor_alive(recorded, monkeypatch):
    allocated, empty = [], torch.empty

    def allocate(*size, **options):
        tensor = empty(*size, **options)
        allocated.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "empty", allocate)
    sampler = RejectionSampler("block", backend="triton")
    for _ in range(2):
        batch = case(2, 3, 2064, torch.bfloat16).to(DEVICE)
        output = sampler(batch.target_logits, batch.draft_token_ids, batch.draft_logits)
        drawn = sampler.draft(batch.draft_logits[:, 0])
    held = [weakref.ref(tensor) for tensor in (*vars(batch).values(), *output, *drawn) if tensor is not None]
    held += allocated
    assert len(allocated) > 10
    del batch, output, drawn
    gc.collect()
    assert [tensor() for tensor in held if tensor() is not None] == []
    assert plan_of.cache_info().currsize == 2


def test_kernels_with_more_arguments_are_compiled_first_and_returned_in_their_place(monkeypatch):
    begun, one_thread = [], partial(launch.concurrent.futures.ThreadPoolExecutor, 1)
    launches = [Launch(mock.Mock(arg_names=["a"]), ("1", "1", "1"), (outer(stride=n),), {}) for n in (1, 2)]
    monkeypatch.setattr(Launch, "compile", lambda each, device: begun.append(each) or each)
    monkeypatch.setattr(launch.concurrent.futures, "ThreadPoolExecutor", lambda _: one_thread())
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    assert launch.compile_all(launches, "gpu") == begun == launches
    begun.clear()
    launch.compile_ahead([lambda: launch.collect(SimpleNamespace(device="gpu", launches=launches))])
    assert begun == launches[::-1]


@pytest.mark.parametrize(("rank", "compiled"), [(0, "ac"), (1, "b")])
def test_what_several_calls_launch_is_compiled_before_the_first_of_them_each_kernel_by_one_process(
    rank, compiled, monkeypatch
):
    """The interpreter compiles nothing, so letters replace the launches of plans."""
    events = []

    def run(letters):
        plan = SimpleNamespace(
            device="gpu",
            launches=[SimpleNamespace(key=lambda _, each=each: each, num_arguments=0) for each in letters],
        )
        if not launch.collect(plan):
            events.append(f"{letters} runs")

    def compile_all(launches, device):
        events.append("".join(each.key(device) for each in launches))

    def call_of_another_thread():
        thread = threading.Thread(target=run, args=("e",))
        thread.start()
        thread.join()

    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(launch, "compile_all", compile_all)
    share = launch.Share(rank, 2, lambda: events.append("all have come"))
    launch.compile_ahead([partial(run, "ab"), lambda: launch.compile_ahead([partial(run, "bc")])], share)
    assert events[:3] == [compiled, "all have come", "ab runs"]
    assert events[-1] == "bc runs"
    events.clear()
    launch.compile_ahead([partial(run, "ab"), call_of_another_thread])
    assert events == ["e runs", "ab", "ab runs", "e runs"]
    with pytest.raises(ZeroDivisionError):
        launch.compile_ahead([lambda: 1 / 0])
    run("d")
    assert events[-1] == "d runs"
