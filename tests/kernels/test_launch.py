"""Plans and launches: what a kernel is compiled for, what it is given, what is shared between calls and what is not."""

import gc
import weakref
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import triton

from specdecode import RejectionSampler, kernels
from specdecode.kernels import launch, plan
from specdecode.kernels.arguments import AlignedPointer, Constant, Float32, Int32, Int64, Pointer, Stride
from specdecode.kernels.launch import Argument, Launch, Signature
from tests.support.differential import case
from tests.support.kernels import DEVICE, KINDS, Steps, checked, forget_plans, strided, verify

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
    inner = Inner(Argument("logits", ptr), stride, aligned)
    return Outer(inner, other and Argument("other", other), count, large, Argument("scale"), size)


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


def test_a_variant_depends_on_types_constants_and_alignment_and_on_no_number():
    key = Signature(["bundle"], (outer(),)).key()
    assert Signature(["bundle"], (outer(count=4, large=5),)).key() == key
    changes = {"ptr": torch.float16}, {"stride": 2}, {"aligned": False}, {"other": torch.int32}, {"size": 16}
    keys = {Signature(["bundle"], (outer(**change),)).key() for change in changes}
    assert len(keys) == len(changes)
    assert key not in keys


def test_what_compiled_kernels_are_given_follows_the_bundles():
    names = ["other", "logits", "scale"]
    bundles = outer(other=torch.int32, count=3, size=8), Inner(None, 1, False)
    arguments_of = eval(f"lambda v: {launch.expression(bundles, names)}")
    assert arguments_of((1024, 4096, 0.7)) == (((4096, 1, True), 1024, 3, 2**40, 0.7, 8), (None, 1, False))


class Recorded:
    """Stands in for the compiled variant of a launch: notes what it is given, and launches nothing."""

    function, packed_metadata = object(), object()

    def __init__(self, compiled: Launch, launches: list) -> None:
        self.compiled, self.launches = compiled, launches

    def __getitem__(self, grid):
        def run(*values, stream):
            assert stream == STREAM
            self.note("by Triton", grid, values)

        return run

    def run(self, *values):
        grid, (stream, function, metadata, *hooks), values = values[:3], values[3:9], values[9:]
        assert (stream, function, metadata, hooks) == (STREAM, self.function, self.packed_metadata, [None] * 3)
        self.note("directly", grid, values)

    def note(self, how: str, grid: tuple, values: tuple) -> None:
        self.launches.append(SimpleNamespace(how=how, kernel=self.compiled.kernel, grid=grid, values=values))


@pytest.fixture
def recorded(monkeypatch):
    """The launches of compiled kernels that are made, in order; `compiled` lists what is compiled."""
    launches = SimpleNamespace(made=[], compiled=[])

    def compile_nothing(self, device):
        launches.compiled.append(self)
        return Recorded(self, launches.made)

    monkeypatch.setattr(Launch, "compile", compile_nothing)
    monkeypatch.setattr(triton, "JITFunction", object)  # as if kernels were not interpreted
    monkeypatch.setattr(launch, "IS_KNOWN", True)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_stream=lambda index: STREAM))
    forget_plans()
    yield launches
    forget_plans()


def flat(values) -> list:
    """The fields of bundles in bundles."""
    return [field for value in values for field in (flat(value) if isinstance(value, tuple) else [value])]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_kernel_is_given_what_an_interpreted_one_is(recorded, kind, drafts, large):
    """Addresses in place of tensors; by the first call with a plan and by those after it."""
    steps = Steps(kind, case(2, drafts, 2064, torch.bfloat16).to(DEVICE), large=large)
    for _ in range(2):
        recorded.made.clear()
        recorded.compiled.clear()
        workspace = torch.zeros(steps.plan.length, dtype=torch.int32, device=DEVICE)
        with mock.patch.object(torch, "empty", return_value=workspace):
            steps.plan.run(steps.tensors, steps.numbers)
        interpreted = {**steps.tensors, **steps.plan.views(workspace), **steps.numbers}
        assert [made.kernel for made in recorded.made] == [each.kernel for each in steps.launches]
        for made, each in zip(recorded.made, steps.launches):
            assert made.grid == each.grid
            wanted, got = flat(launch.filled(bundle, interpreted) for bundle in each.bundles), flat(made.values)
            assert len(got) == len(wanted)
            for value, other in zip(got, wanted):
                if isinstance(other, torch.Tensor):
                    assert value == other.data_ptr()
                elif not isinstance(other, triton.language.constexpr):
                    assert value == other
    assert not recorded.compiled  # but by the first call


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


def test_calls_that_are_alike_share_a_plan(recorded):
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
        {"target_logits": wider[..., :2064]},  # other strides
        {"target_logits": wider[..., 1:2065]},  # the same strides, at no multiple of 16 bytes
        {"target_logits": target.float()},
        {"target_logits": target.half(), "draft_logits": batch.draft_logits.half()},
        {"target_logits": target[..., :2048], "draft_logits": batch.draft_logits[..., :2048]},
        {"draft_token_ids": ids.int()},
        {"draft_token_ids": ids.T.contiguous().T},
        {"temperature": batch.temperature.half()},
        {"temperature": 0.7},
        {"seeds": 5},
        {"positions": None},
        {name: value[:3] for name, value in vars(batch).items()},
    ):
        assert makes_a_plan(**change), change.keys()
        assert not makes_a_plan(**change), change.keys()
    for change in (
        {"target_logits": target.clone(), "draft_token_ids": ids.clone()},
        {"seeds": strided(batch.seeds), "positions": strided(batch.positions)},
        {"temperature": 0.3},
        {"seeds": 6},
    ):
        assert not makes_a_plan(**change), change.keys()


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
    assert plan.plan_step.cache_info().currsize == 2


def test_launches_are_told_to_hooks(recorded, monkeypatch):
    batch = case(2, 3, 2064, torch.bfloat16).to(DEVICE)
    verify("probabilistic", batch)
    assert [made.how for made in recorded.made] == ["directly"] * 2
    recorded.made.clear()
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    verify("probabilistic", batch)
    assert [made.how for made in recorded.made] == ["by Triton"] * 2


def test_a_kernel_of_another_triton_is_launched_as_tritons_users_do(recorded, monkeypatch):
    monkeypatch.setattr(launch, "IS_KNOWN", False)
    verify("probabilistic", case(2, 3, 2064, torch.bfloat16).to(DEVICE))
    assert [made.how for made in recorded.made] == ["by Triton"] * 2
