"""Calls, samplers, schedules and statistics accept only valid arguments; an error names the wrong argument."""

import math
import sys
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference import oracle
from specdecode import AcceptanceSchedule, AcceptanceStats, RejectionSampler, SamplerOutput, sample
from specdecode.noise import BLOCK_SIZE
from tests.support.calls import METHODS
from tests.support.hostile import (
    FLOATS,
    INF,
    INT64,
    NAN,
    assert_names,
    attempt,
    compare_all,
    hostile,
    laid_out,
    make_call,
    make_row_call,
    make_sampler,
    pick,
    random_of,
    structures,
    with_logsumexp,
)

# ---------------------------------------------------------------------------------------------------------------------
# Broken arguments
# ---------------------------------------------------------------------------------------------------------------------

ANYTHING = [
    None,
    True,
    -1,
    0,
    3,
    2**63,
    10**400,
    10**5000,  # longer than Python prints
    -0.5,
    0.5,
    NAN,
    INF,
    1j,
    Fraction(1, 3),
    Fraction(10**400),
    Decimal("0.5"),
    np.float32(0.5),
    np.float64(NAN),
    np.int64(3),
    np.bool_(True),
    "",
    "strict",
    b"strict",
    [],
    [0.5],
    (0.5, 0.25),
    {},
    object(),
    len,
    np.zeros((2, 3)),
    np.array(0.5),
    np.array(["strict", "eager"]),
    torch.float32,
    torch.Size([2]),
    torch.Generator(),
    torch.tensor(0.5),
    torch.zeros(2),
    torch.zeros(2, dtype=torch.int64),
]


def converted(dtype):
    return lambda tensor: tensor.detach().to(dtype)


def nested(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls them a prototype
        return torch.nested.nested_tensor([tensor.detach().flatten()[:3]])


BREAK = {
    **{str(dtype): converted(dtype) for dtype in [*FLOATS, torch.int64, torch.int32, torch.int16, torch.bool]},
    **{str(dtype): converted(dtype) for dtype in [torch.uint8, torch.complex64, torch.float8_e4m3fn]},
    "sparse": lambda tensor: tensor.detach().to_sparse(),
    "mkldnn": lambda tensor: tensor.detach().float().contiguous().to_mkldnn(),
    "nested": nested,
    "meta": lambda tensor: tensor.to("meta"),
    "numpy": lambda tensor: tensor.detach().double().resolve_neg().cpu().numpy(),
    "list": lambda tensor: tensor.tolist(),
    "parameter": lambda tensor: torch.nn.Parameter(tensor.detach(), requires_grad=tensor.is_floating_point()),
    "one more dimension": lambda tensor: tensor[None],
    "one dimension less": lambda tensor: tensor[0],
    "no dimension": lambda tensor: tensor.sum(),
    "shorter": lambda tensor: tensor[:-1],
    "longer": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "narrower": lambda tensor: tensor[..., :-1],
    "wider": lambda tensor: torch.cat([tensor, tensor[..., :1]], dim=-1),
    "a column less": lambda tensor: tensor[:, :-1],
    "a column more": lambda tensor: torch.cat([tensor, tensor[:, :1]], dim=1),
    "empty": lambda tensor: tensor[..., :0],
}
WRONG_VALUES = [NAN, INF, -INF, -1, -2, 1, BLOCK_SIZE, 2**31 - 1, -(2**31)]


def with_value(tensor: Tensor, value: float, everywhere: bool) -> Tensor:
    """Return the tensor with a value as its first element or as all elements, rounded to its dtype."""
    if not tensor.is_floating_point():
        value = int(value) if math.isfinite(value) else -3
    wide = torch.float64 if tensor.is_floating_point() else torch.int64
    changed = torch.full(tensor.shape, value, dtype=wide, device=tensor.device).to(tensor.dtype)
    if not everywhere:
        changed.view(-1)[1:] = tensor.detach().flatten()[1:]
    return changed


def broken(value, random: np.random.Generator):
    """Return another value for an argument: an arbitrary value, or the old one changed."""
    how = pick(random, ["value", "tensor", "tensor", "anything"]) if isinstance(value, Tensor) else "anything"
    if how == "value":
        return with_value(value, pick(random, WRONG_VALUES), everywhere=random.random() < 0.5)
    if how == "tensor":
        try:
            return pick(random, list(BREAK.values()))(value)
        except (RuntimeError, IndexError, ValueError):
            return None  # impossible for a tensor of this dtype or shape
    return pick(random, ANYTHING)


def is_tensor(value, dtypes, shape=None, device=None) -> bool:
    """Return whether a value is a tensor with data, with one of the dtypes, and with the shape and device if given."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested or value.is_meta:
        return False
    return value.dtype in dtypes and shape in (None, tuple(value.shape)) and device in (None, value.device)


def is_real(value, low, high) -> bool:
    """Return whether a value is a number in [low, high], not a bool, and in the range of floats."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, Fraction, np.integer, np.floating)):
        return False
    try:
        return low <= float(value) <= high
    except OverflowError:
        return False


def is_count(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 1 <= value < 10**6


def scalars_are_valid(call: dict, batch: int, device, look: bool) -> bool:
    """Return whether temperature, seeds and positions are valid."""
    temperature, seeds, positions = call["temperature"], call["seeds"], call["positions"]
    if is_tensor(temperature, FLOATS, (batch,), device):
        if look and not all(0 <= value < INF for value in temperature.tolist()):
            return False
    elif not is_real(temperature, 0, sys.float_info.max):
        return False
    if not (seeds is None or is_tensor(seeds, [torch.int64], (batch,), device)):
        if isinstance(seeds, bool) or not isinstance(seeds, (int, np.integer)):
            return False
        if not INT64.min <= seeds <= INT64.max:
            return False
    if positions is None:
        return True
    return is_tensor(positions, [torch.int64], (batch,), device) and not (
        look and min(positions.tolist(), default=0) < 0
    )


def rows_are_valid(logits, ndim: int) -> bool:
    """Return whether logits are valid by themselves."""
    return is_tensor(logits, FLOATS) and logits.ndim == ndim and logits.shape[-1] > 0


def call_is_valid(call: dict, schedule: AcceptanceSchedule | None, look: bool) -> bool:
    """Return whether a call is valid, by a definition that is independent of the package."""
    target, ids, draft, logsumexp = (
        call[name] for name in ("target_logits", "draft_token_ids", "draft_logits", "draft_logsumexp")
    )
    if not rows_are_valid(target, 3) or target.shape[1] == 0:
        return False
    batch, drafts, vocab = target.shape[0], target.shape[1] - 1, target.shape[2]
    if not is_tensor(ids, [torch.int32, torch.int64], (batch, drafts), target.device):
        return False
    if look:
        for request in ids.tolist():
            leading = oracle.leading_drafts(request, vocab)
            if len(leading) < drafts and request[len(leading)] != -1:
                return False
    if draft is not None and not is_tensor(draft, FLOATS, (batch, drafts, vocab), target.device):
        return False
    belongs = draft is not None and is_tensor(logsumexp, [torch.float32], (batch, drafts), target.device)
    if logsumexp is not None and not belongs:
        return False
    if schedule is not None and drafts > schedule.num_draft_tokens:
        return False
    return scalars_are_valid(call, batch, target.device, look)


def break_some(call: dict, name: str, random: np.random.Generator) -> dict:
    """Break an argument of a call, and sometimes another one, too."""
    names = {name, pick(random, sorted(call))} if random.random() < 0.2 else {name}
    return call | {name: broken(call[name], random) for name in sorted(names)}


@pytest.mark.parametrize("method", METHODS)
def test_calls_are_answered_if_and_only_if_they_are_valid(place, method):
    answered, refused = [], []

    @hostile
    @given(structures)
    def run(structure):
        random = random_of(structure)
        sampler = make_sampler(random, method, place)
        good = with_logsumexp(sampler, laid_out(random, make_call(random, structure), place[1]))
        for name in good:
            call = break_some(good, name, random)
            result = attempt(sampler, call)
            if call_is_valid(call, sampler.schedule, look=place[1] == "cpu"):
                assert not isinstance(result, Exception), result
                answered.append(compare_all(sampler, call, result))
            else:
                assert isinstance(result, Exception), f"answered {result}"
                assert_names(result, call)
                refused.append(result)

    run()
    assert len(answered) > 100
    assert len(refused) > 100


def test_rows_are_sampled_if_and_only_if_they_are_valid(place):
    answered, refused = [], []

    @hostile
    @given(structures, st.sampled_from(["sample", *METHODS]))
    def run(structure, use):
        random = random_of(structure)
        draw_tokens = sample if use == "sample" else make_sampler(random, use, place).draft
        good = laid_out(random, make_row_call(random, structure), place[1])
        for name in good:
            call = break_some(good, name, random)
            result, logits = attempt(draw_tokens, call), call["logits"]
            valid = rows_are_valid(logits, 2)
            if valid and scalars_are_valid(call, len(logits), logits.device, look=place[1] == "cpu"):
                assert not isinstance(result, Exception), result
                token_ids = (result if use == "sample" else result.token_ids).tolist()
                assert len(token_ids) == len(logits)
                assert all(0 <= token < logits.shape[1] for token in token_ids)
                answered.append(result)
            else:
                assert isinstance(result, Exception), f"answered {result}"
                assert_names(result, call)
                refused.append(result)

    run()
    assert len(answered) > 100
    assert len(refused) > 100


anything = st.sampled_from(ANYTHING)


@hostile
@given(
    anything | st.sampled_from(METHODS),
    anything | st.sampled_from(["auto", "eager"]),
    anything | st.builds(AcceptanceSchedule.from_rates, st.sampled_from([[0.5], [1.0, 0.0]])) | st.none(),
)
def test_samplers_are_made_if_and_only_if_their_arguments_are_valid(method, backend, schedule):
    valid = isinstance(method, str) and method in METHODS and isinstance(backend, str) and backend in ("auto", "eager")
    valid &= (
        isinstance(schedule, AcceptanceSchedule)
        if isinstance(method, str) and method == "synthetic"
        else schedule is None
    )
    arguments = {"method": method, "backend": backend, "schedule": schedule}
    result = attempt(RejectionSampler, arguments)
    if valid:
        assert isinstance(result, RejectionSampler)
    else:
        assert isinstance(result, Exception)
        assert_names(result, arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Schedules and statistics
# ---------------------------------------------------------------------------------------------------------------------

SHAPES = ["decay", "constant", "minimum_variance"]
rates = (
    anything | st.floats(0, 1) | st.sampled_from([0, 1, -0.0, 5e-324, -5e-324, 1 - 2**-53, 1 + 2**-52, np.float16(0.3)])
)
# No huge numbers: a schedule has an entry for each draft token, without a limit.
counts = (
    st.sampled_from([value for value in ANYTHING if not isinstance(value, int) or value < 10**6])
    | st.integers(-1, 40)
    | st.sampled_from([np.int32(4), 2.0])
)
shapes = anything | st.sampled_from(SHAPES)


def assert_schedule(schedule, num_draft_tokens: int) -> None:
    joint, conditional = schedule.joint_rates, schedule.conditional_rates
    assert len(joint) == len(conditional) == num_draft_tokens
    assert all(type(rate) is float and 0 <= rate <= 1 for rate in (*joint, *conditional))
    assert list(joint) == sorted(joint, reverse=True)


def is_shape(shape) -> bool:
    return isinstance(shape, str) and shape in SHAPES


@hostile
@given(rates, counts, rates, shapes)
def test_mean_rates_are_met_or_refused(rate, num_draft_tokens, min_decay, shape):
    arguments = {"rate": rate, "num_draft_tokens": num_draft_tokens, "min_decay": min_decay, "shape": shape}
    result = attempt(AcceptanceSchedule.from_mean_rate, arguments)
    if is_real(rate, 0, 1) and is_count(num_draft_tokens) and is_real(min_decay, 0, 1) and is_shape(shape):
        assert_schedule(result, num_draft_tokens)
        assert result.mean_rate == pytest.approx(float(rate), abs=1e-9)
    else:
        assert isinstance(result, Exception), result
        assert_names(result, arguments)


@hostile
@given(rates | st.floats(1, 12), counts, rates, shapes)
def test_lengths_are_met_or_refused(length, num_draft_tokens, min_decay, shape):
    arguments = {"length": length, "num_draft_tokens": num_draft_tokens, "min_decay": min_decay, "shape": shape}
    result = attempt(AcceptanceSchedule.from_length, arguments)
    valid = is_count(num_draft_tokens) and is_real(min_decay, 0, 1) and is_shape(shape)
    if valid and is_real(length, 1, num_draft_tokens + 1):
        assert_schedule(result, num_draft_tokens)
        assert result.acceptance_length == pytest.approx(float(length), abs=1e-9)
    else:
        assert isinstance(result, Exception), result
        assert_names(result, arguments)


@hostile
@given(
    st.lists(rates, max_size=5) | st.lists(st.floats(0, 1), max_size=5).map(lambda some: sorted(some, reverse=True)),
    st.sampled_from([list, tuple, iter]),
)
def test_explicit_rates_are_kept_or_refused(joint_rates, container):
    result = attempt(AcceptanceSchedule.from_rates, {"joint_rates": container(joint_rates)})
    if joint_rates and all(is_real(rate, 0, 1) for rate in joint_rates) and joint_rates == sorted(joint_rates)[::-1]:
        assert_schedule(result, len(joint_rates))
        assert result.joint_rates == tuple(map(float, joint_rates))
    else:
        assert isinstance(result, Exception), result
        assert_names(result, ["joint_rates"])


@hostile
@given(anything)
def test_anything_else_than_rates_is_refused(joint_rates):
    result = attempt(AcceptanceSchedule.from_rates, {"joint_rates": joint_rates})
    if isinstance(joint_rates, (list, tuple)) and joint_rates and not isinstance(joint_rates, torch.Size):
        assert result.joint_rates == tuple(joint_rates)
    elif isinstance(joint_rates, np.ndarray) and joint_rates.dtype == float and joint_rates.ndim == 1:
        assert result.joint_rates == tuple(joint_rates.tolist())
    else:
        assert isinstance(result, Exception), result
        assert_names(result, ["joint_rates"])


@pytest.mark.parametrize(
    "make",
    [
        lambda count: AcceptanceSchedule.from_mean_rate(0.5, num_draft_tokens=count),
        lambda count: AcceptanceStats(count, device="cpu"),
    ],
    ids=["from_mean_rate", "AcceptanceStats"],
)
@pytest.mark.parametrize("count", [10**400, 10**5000], ids=["10^400", "10^5000"])
def test_counts_that_no_memory_could_hold_are_refused(make, count):
    result = attempt(make, {"count": count})
    assert isinstance(result, Exception), result
    assert_names(result, ["num_draft_tokens"])


@hostile
@given(counts, st.none() | st.sampled_from(["cpu", torch.device("cpu"), "nonsense", "cpu:x", 2.5, [], object()]))
def test_statistics_are_made_or_refused(num_draft_tokens, device):
    arguments = {"num_draft_tokens": num_draft_tokens, "device": device}
    result = attempt(AcceptanceStats, arguments)
    if is_count(num_draft_tokens) and (device is None or device in ("cpu", torch.device("cpu"))):
        assert result.num_draft_tokens == num_draft_tokens
        assert result.drafts == 0
        assert math.isnan(result.acceptance_rate)
    else:
        assert isinstance(result, Exception), result
        assert_names(result, arguments)


def verified(structure: dict) -> SamplerOutput:
    sampler = RejectionSampler("probabilistic", backend="eager")
    return sampler(**with_logsumexp(sampler, make_call(random_of(structure), structure)))


@hostile
@given(st.integers(1, 3), st.lists(structures.map(verified) | anything, max_size=4))
def test_statistics_count_outputs_and_refuse_the_rest(num_draft_tokens, outputs):
    stats, seen = AcceptanceStats(num_draft_tokens), []
    for output in outputs:
        result = attempt(stats.update, {"output": output})
        if isinstance(output, SamplerOutput) and output.token_ids.shape[1] <= num_draft_tokens + 1:
            assert result is None
            seen += zip(output.num_accepted.tolist(), output.num_draft_tokens.tolist())
        else:
            assert isinstance(result, Exception), result
            assert_names(result, ["output"])
        assert stats.drafts == sum(drafted > 0 for _, drafted in seen)
        assert stats.draft_tokens == sum(drafted for _, drafted in seen)
        assert stats.accepted_tokens == sum(accepted for accepted, _ in seen)
