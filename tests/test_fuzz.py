"""Calls with random, often bad, arguments: the result is right, or an error names the wrong argument."""

import math
import re
import sys
import warnings
import zlib
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import oracle
from reference.philox import DRAFT, SELECT
from reference.sampling import log_softmax
from reference.sampling import sample as sample_row
from specdecode import AcceptanceSchedule, AcceptanceStats, RejectionSampler, SamplerOutput, sample
from specdecode.noise import BLOCK_SIZE
from tests.conftest import ON_GPU
from tests.support.differential import like_a_device

METHODS = ["strict", "probabilistic", "block", "synthetic"]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
INT64 = torch.iinfo(torch.int64)
NAN, INF = math.nan, math.inf

# Derandomised: the same examples in every run, so a pass stays a pass.
hostile = settings(
    max_examples=300 if ON_GPU else 150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# ---------------------------------------------------------------------------------------------------------------------
# Valid calls made of hostile values
# ---------------------------------------------------------------------------------------------------------------------

LOGITS = [0.0, -0.0, 1.0, -1.0, NAN, INF, -INF, 1e-40, -1e-40, 6e4, 3e38, -3e38, 1e30, 1e300, -1e300, 20.0, -90.0]
TEMPERATURES = [0.0, -0.0, 1.0, 0.7, 1e-3, 1e-10, 1e-30, 1e-40, 5e-324, 30.0, 1e4, 1e30, 3e38, 1e39, 1e300]
SEEDS = [0, 1, -1, 2**32 - 1, 2**32, -(2**32), INT64.max, INT64.min]
POSITIONS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**62, INT64.max]
LOGSUMEXPS = [0.0, NAN, INF, -INF, 1e38, -1e38, 1.0]


def resident(tensor: Tensor) -> Tensor:
    return tensor.clone()


def transposed(tensor: Tensor) -> Tensor:
    order = list(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def strided(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def padded(tensor: Tensor) -> Tensor:
    larger = torch.full([n + 2 for n in tensor.shape], -3, dtype=tensor.dtype, device=tensor.device)
    view = larger[tuple(slice(1, n + 1) for n in tensor.shape)]
    view.copy_(tensor)
    return view


def differentiable(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor.clone()


def made_in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def negated_lazily(tensor: Tensor) -> Tensor:
    return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor.clone()


LAYOUTS = [resident, transposed, strided, padded, differentiable, made_in_inference_mode, negated_lazily]
# Hypothesis chooses the structure of a call. NumPy draws its values, seeded by the whole structure: if Hypothesis changes
# one part of it, all values change.
structures = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([4, 3, 2, 1, 0]),
        "drafts": st.sampled_from([2, 1, 3, 0]),
        "vocab": st.sampled_from([3, 1, 2, 7, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 3]),
        "dtypes": st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
        "scale": st.sampled_from([1, 0, 3, 30]),
        "trouble": st.sampled_from([0.0, 0.03, 0.4]),
        "alike": st.sampled_from(["unlike", "near", "shifted", "equal"]),
        "given": st.sampled_from(["draft logits", "no draft logits", "logsumexp", "hostile logsumexp"]),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def random_of(structure: dict) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(sorted(structure.items())).encode()))


def pick(random: np.random.Generator, values):
    return values[random.integers(len(values))]


def make_logits(random: np.random.Generator, shape, dtype, scale: float, trouble: float) -> Tensor:
    """Flat or random rows, with special values in some places, and some rows filled with them."""
    values, rows = random.normal(size=shape) * scale, (*shape[:-1], 1)
    values = np.where(random.random(shape) < trouble, random.choice(LOGITS, shape), values)
    values = np.where(random.random(rows) < trouble / 2, random.choice(LOGITS, rows), values)
    return torch.tensor(values).to(dtype)


def make_scalars(random: np.random.Generator, batch: int) -> dict:
    """Temperature, seeds and positions, each as a tensor or in another allowed form."""
    temperatures = np.where(
        random.random(batch) < 0.5, random.choice(TEMPERATURES, batch), random.uniform(0.1, 3, batch)
    )
    dtype = pick(random, FLOATS)
    seeds = torch.tensor(random.choice(SEEDS, batch) ^ random.integers(0, 2**20, batch), dtype=torch.int64)
    positions = torch.tensor(random.choice(POSITIONS, batch), dtype=torch.int64)
    number = pick(random, [*TEMPERATURES, 0, 1, 10**30, Fraction(1, 3), np.float32(0.5), np.int8(1)])
    return {
        "temperature": pick(random, [torch.tensor(temperatures).clamp(max=torch.finfo(dtype).max).to(dtype), number]),
        "seeds": pick(random, [seeds, seeds, seeds, pick(random, SEEDS), random.choice(SEEDS), None]),
        "positions": pick(random, [positions, None]),
    }


def make_row_call(random: np.random.Generator, structure: dict) -> dict:
    """Valid arguments for `sample` and `draft`."""
    shape = structure["batch"], structure["vocab"]
    logits = make_logits(random, shape, structure["dtypes"][0], structure["scale"], structure["trouble"])
    return {"logits": logits} | make_scalars(random, structure["batch"])


def make_call(random: np.random.Generator, structure: dict) -> dict:
    """Valid arguments for a sampler. Half of the drafts are the target's most likely tokens, so that some are accepted."""
    batch, drafts, vocab = structure["batch"], structure["drafts"], structure["vocab"]
    target_dtype, draft_dtype = structure["dtypes"]
    scale, trouble, alike = structure["scale"], structure["trouble"], structure["alike"]
    target = make_logits(random, (batch, drafts + 1, vocab), target_dtype, scale, trouble)
    draft = make_logits(random, (batch, drafts, vocab), draft_dtype, scale, trouble)
    if alike != "unlike":
        change = {"near": 0.3 * torch.tensor(random.normal(size=draft.shape)), "shifted": 1.0, "equal": 0.0}[alike]
        draft = (target[:, :drafts].double() + change).to(draft_dtype)
    likely = target[:, :drafts].double().nan_to_num(nan=-INF).argmax(dim=2).numpy()
    ids = np.where(random.random((batch, drafts)) < 0.5, likely, random.integers(0, vocab, (batch, drafts)))
    ids[random.random((batch, drafts)) < 0.1] = -1
    after_the_end = (ids == -1).cumsum(axis=1) - (ids == -1) > 0
    ids = np.where(after_the_end, random.choice([-1, 0, -7, vocab, 2**31 - 1, -(2**31)], (batch, drafts)), ids)
    hostile_logsumexp = torch.tensor(random.choice(LOGSUMEXPS, (batch, drafts)), dtype=torch.float32)
    known = {"logsumexp": "from draft", "hostile logsumexp": hostile_logsumexp}
    return {
        "target_logits": target,
        "draft_token_ids": torch.tensor(ids, dtype=pick(random, [torch.int32, torch.int64])),
        "draft_logits": None if structure["given"] == "no draft logits" else draft,
        "draft_logsumexp": known.get(structure["given"]),
    } | make_scalars(random, batch)


def laid_out(random: np.random.Generator, call: dict, device: str) -> dict:
    """The same values on a device, each tensor in a random layout."""
    return {
        name: pick(random, LAYOUTS)(value.to(device)) if isinstance(value, Tensor) else value
        for name, value in call.items()
    }


def make_sampler(random: np.random.Generator, method: str, place) -> RejectionSampler:
    joint = sorted(random.choice([0.0, 0.3, 0.7, 1.0], size=random.integers(3, 6)), reverse=True)
    schedule = AcceptanceSchedule.from_rates(joint) if method == "synthetic" else None
    return RejectionSampler(method, backend=place[0], schedule=schedule)


def with_logsumexp(sampler: RejectionSampler, call: dict) -> dict:
    """Put in what the sampler's own `draft` returns, if the call asks for it."""
    if not isinstance(call["draft_logsumexp"], str):
        return call
    draft, temperature = call["draft_logits"], call["temperature"]
    columns = [sampler.draft(draft[:, i], temperature, seeds=0).logsumexp for i in range(draft.shape[1])]
    shape, device = call["draft_token_ids"].shape, draft.device
    known = torch.stack(columns, dim=1) if columns else torch.zeros(shape, dtype=torch.float32, device=device)
    return call | {"draft_logsumexp": known}


# ---------------------------------------------------------------------------------------------------------------------
# What must hold of any call
# ---------------------------------------------------------------------------------------------------------------------


def bits(value) -> object:
    """The bits of a tensor or an array, which must not change. As integers, so that NaNs compare by their payload."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested or value.is_meta:
        return None
    plain = value.detach().resolve_neg().resolve_conj().contiguous()
    return (
        (torch.view_as_real(plain) if plain.is_complex() else plain)
        .view(BITS.get(plain.element_size(), plain.dtype))
        .tolist()
    )


def attempt(use, call: dict):
    """Call with warnings as errors, check that no argument has changed, and return the result or the error."""
    before = {name: bits(value) for name, value in call.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            result = use(**call)
        except (TypeError, ValueError) as error:
            result = error
    assert {name: bits(value) for name, value in call.items()} == before
    return result


def assert_names(error: Exception, names) -> None:
    """The error's message starts with the name of an argument."""
    assert type(error) in (TypeError, ValueError)
    named = re.match(r"(\w+)(\[\d+\])?: ", str(error))
    assert named is not None, f"names no argument: {error}"
    assert named[1] in names, f"names an argument that does not exist: {error}"


def assert_well_formed(output: SamplerOutput, call: dict) -> None:
    """Accepted drafts, one more token of the vocabulary, then -1; the dtypes and shapes of the contract."""
    batch, rows, vocab = call["target_logits"].shape
    assert isinstance(output, SamplerOutput)
    assert (tuple(output.token_ids.shape), output.token_ids.dtype) == ((batch, rows), torch.int64)
    assert (tuple(output.num_accepted.shape), output.num_accepted.dtype) == ((batch,), torch.int32)
    assert (tuple(output.num_tokens.shape), output.num_tokens.dtype) == ((batch,), torch.int32)
    assert (tuple(output.invalid.shape), output.invalid.dtype) == ((batch,), torch.bool)
    assert not any(value.requires_grad for value in output if value is not None)
    drafted = [oracle.leading_drafts(request, vocab) for request in call["draft_token_ids"].tolist()]
    for tokens, drafts, accepted in zip(output.token_ids.tolist(), drafted, output.num_accepted.tolist()):
        assert 0 <= accepted <= len(drafts)
        assert tokens[:accepted] == drafts[:accepted]
        assert 0 <= tokens[accepted] < vocab
        assert tokens[accepted + 1 :] == [-1] * (rows - accepted - 1)
    assert output.num_tokens.tolist() == [accepted + 1 for accepted in output.num_accepted.tolist()]


# ---------------------------------------------------------------------------------------------------------------------
# Agreement with the reference
#
# A decision may differ where the reference's margin is within the rounding of the dtype that is computed in: 1e-4 nats in
# float32 and 1e-9 in float64. Log-probabilities of a thousand nats and more round by a millionth of their size, and a
# logsumexp that is given in float32 is rounded, too.
# ---------------------------------------------------------------------------------------------------------------------


class Request:
    """One request of a call as the reference takes it: float64 rows and plain numbers.

    Triton computes in float32, so for it the reference is given the logits rounded to float32.
    """

    def __init__(self, call: dict, index: int, single: bool = False) -> None:
        call = {name: value.detach() if isinstance(value, Tensor) else value for name, value in call.items()}
        seeds, positions, temperature = call["seeds"], call["positions"], call["temperature"]
        tensors = [value for name, value in call.items() if name.endswith("logits") and value is not None]
        if single:
            tensors = [tensor.float() for tensor in tensors]
        self.double = all(tensor.dtype == torch.float64 for tensor in tensors)
        self.seed = int(seeds[index]) if isinstance(seeds, Tensor) else int(seeds) + index
        self.position = 0 if positions is None else int(positions[index])
        self.temperature = float(temperature[index] if isinstance(temperature, Tensor) else temperature)
        if not self.temperature >= 0:
            self.temperature = 0.0  # on a device invalid temperatures count as 0
        rows = [tensor[index].double().resolve_neg().cpu().numpy() for tensor in tensors]
        self.target, self.draft = rows[0], (rows[1] if len(rows) == 2 else None)

    @property
    def arguments(self) -> dict:
        return {"temperature": self.temperature, "seed": self.seed, "position": self.position}

    @property
    def band(self) -> float:
        return 1e-9 if self.double else 1e-4

    def comparable(self) -> bool:
        """Whether the quotients of logits and temperature are in the range of float32."""
        if self.temperature == 0 or self.double:
            return True
        rows = self.target if self.draft is None else np.concatenate([self.target, self.draft])
        size = np.abs(rows[np.isfinite(rows) & (rows != 0)])
        if self.temperature < 1e-37:
            return not ((size < 1e-30).any() or self.temperature == INF)
        return self.temperature < 1e38 or not (size > 1e25).any()


def logprobs(rows: np.ndarray, offset: int, request: Request) -> np.ndarray:
    return log_softmax(rows[offset], request.temperature)


def compare(method: str, rates, call: dict, output: SamplerOutput, index: int, single: bool) -> str:
    """Compare one request's tokens with the reference's. Return how they compare: "same", "close", ..."""
    request = Request(call, index, single)
    ids, known = call["draft_token_ids"][index].tolist(), call["draft_logsumexp"]
    drafts = oracle.leading_drafts(ids, request.target.shape[1])
    if not request.comparable():
        return "incomparable"
    outcome = oracle.verify(method, request.target, ids, request.draft, conditional_rates=rates, **request.arguments)
    tokens = output.token_ids[index].tolist()[: int(output.num_tokens[index])]
    if (tokens, bool(output.invalid[index])) == (outcome.token_ids, outcome.invalid):
        return "same"
    assert request.temperature > 0, f"greedy rounds nothing: {tokens} != {outcome}"

    band, log_ratio_before = request.band, 0.0
    if method in ("probabilistic", "block") and request.draft is not None:
        roundings = [0.0]
        for offset, token in enumerate(drafts if method == "block" else drafts[: outcome.num_accepted + 1]):
            sides = [logprobs(rows, offset, request)[token] for rows in (request.target, request.draft)]
            for rows, side in zip((request.target, request.draft), sides):
                if side < -1e30 and np.isfinite(rows[offset][token]):
                    return "incomparable"  # its log-probability is outside the range of floats
                roundings.append(abs(side) * (1e-13 if request.double else 1e-6) if side > -INF else 0.0)
            if known is not None:
                roundings.append(1e-6 * abs(float(known[index, offset])))
            if method == "block" and offset < outcome.num_accepted:
                log_ratio_before = min(0.0, log_ratio_before + sides[0] - sides[1])
        # The running ratio of a block adds up the roundings of all drafts.
        band = max(band, sum(roundings) if method == "block" else max(roundings))
    if outcome.margin <= band:
        return "close"

    # Where p and q are nearly equal everywhere, rounding decides where p - q is positive; c p - q for the running ratio c.
    recovered = outcome.num_accepted < len(drafts) and request.draft is not None and method != "strict"
    assert recovered, f"{tokens} != {outcome}"
    assert tokens[:-1] == outcome.token_ids[:-1], f"{tokens} != {outcome}"
    target, draft = (logprobs(rows, outcome.num_accepted, request) for rows in (request.target, request.draft))
    log_ratio = np.where(target > -INF, draft - target - log_ratio_before, INF)
    near = 1e-6 if request.double else 0.05
    assert (np.abs(log_ratio[target > -700]) < near).any(), f"{tokens} != {outcome}"
    assert log_ratio[tokens[-1]] <= (1e-12 if request.double else 1e-5), (
        f"emitted a token that p says less often: {tokens}"
    )
    return "near-empty residual"


def compare_all(sampler: RejectionSampler, call: dict, output: SamplerOutput) -> list[str]:
    assert_well_formed(output, call)
    if call["seeds"] is None:
        return []
    if call["draft_logsumexp"] is not None and not torch.equal(
        call["draft_logsumexp"], with_logsumexp(sampler, call | {"draft_logsumexp": "from draft"})["draft_logsumexp"]
    ):
        return []  # the given logsumexp is wrong: any token of the vocabulary is right
    rates = None if sampler.schedule is None else sampler.schedule.conditional_rates
    with np.errstate(all="ignore"):
        single = sampler.backend == "triton"
        return [compare(sampler.method, rates, call, output, index, single) for index in range(len(output.token_ids))]


@pytest.mark.parametrize("masked", [False, True], ids=["as it is", "like a device"])
@pytest.mark.parametrize("method", METHODS)
def test_hostile_values_give_the_tokens_of_the_reference(place, method, masked):
    if masked and place != ("eager", "cpu"):
        pytest.skip("only the eager backend on the CPU computes in two ways")
    outcomes = []

    @hostile
    @given(structures)
    def run(structure):
        random = random_of(structure)
        sampler = make_sampler(random, method, place)
        call = laid_out(random, make_call(random, structure), place[1])
        with like_a_device() if masked else nullcontext():
            call = with_logsumexp(sampler, call)
            output = attempt(sampler, call)
            assert not isinstance(output, Exception), output
            outcomes.extend(compare_all(sampler, call, output))

    run()
    assert outcomes.count("same") >= 0.8 * len(outcomes) > 100


@pytest.mark.parametrize("masked", [False, True], ids=["as it is", "like a device"])
def test_hostile_rows_are_sampled_as_by_the_reference(place, masked):
    if masked and place != ("eager", "cpu"):
        pytest.skip("only the eager backend on the CPU computes in two ways")
    compared = []

    @hostile
    @given(structures, st.sampled_from(["sample", *METHODS]))
    def run(structure, use):
        random = random_of(structure)
        draw_tokens = sample if use == "sample" else make_sampler(random, use, place).draft
        domains = SELECT if use in ("sample", "strict") else DRAFT
        call = laid_out(random, make_row_call(random, structure), place[1])
        with like_a_device() if masked else nullcontext():
            result = attempt(draw_tokens, call)
        assert not isinstance(result, Exception), result
        batch, vocab = call["logits"].shape
        token_ids = result if use == "sample" else result.token_ids
        assert (tuple(token_ids.shape), token_ids.dtype, token_ids.requires_grad) == ((batch,), torch.int64, False)
        assert all(0 <= token < vocab for token in token_ids.tolist())
        if use != "sample":
            assert (tuple(result.logsumexp.shape), result.logsumexp.dtype) == ((batch,), torch.float32)
            assert not result.logsumexp.requires_grad
        if call["seeds"] is None:
            return
        for index, token in enumerate(token_ids.tolist()):
            # `sample` takes no backend: on a GPU it is Triton's.
            single = place[0] == "triton" or (use == "sample" and place[1] == "cuda")
            request = Request(call, index, single)
            if not request.comparable():
                continue
            compared.append(token)
            with np.errstate(all="ignore"):
                choice = sample_row(request.target, **request.arguments, domains=domains)
            assert token == choice.index or choice.margin <= request.band, (token, choice)

    run()
    assert len(compared) > 100


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
    """The tensor with a value in its first place or in all, rounded to its dtype."""
    if not tensor.is_floating_point():
        value = int(value) if math.isfinite(value) else -3
    wide = torch.float64 if tensor.is_floating_point() else torch.int64
    changed = torch.full(tensor.shape, value, dtype=wide, device=tensor.device).to(tensor.dtype)
    if not everywhere:
        changed.view(-1)[1:] = tensor.detach().flatten()[1:]
    return changed


def broken(value, random: np.random.Generator):
    """Another value for an argument: any value at all, or the old one changed."""
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
    """Whether it is a tensor with data, of one of the dtypes, and of the shape and on the device if these are given."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested or value.is_meta:
        return False
    return value.dtype in dtypes and shape in (None, tuple(value.shape)) and device in (None, value.device)


def is_real(value, low, high) -> bool:
    """Whether it is a number in [low, high], not a bool, and in the range of floats."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, Fraction, np.integer, np.floating)):
        return False
    try:
        return low <= float(value) <= high
    except OverflowError:
        return False


def is_count(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 1 <= value < 10**6


def scalars_are_valid(call: dict, batch: int, device, look: bool) -> bool:
    """Whether temperature, seeds and positions are valid."""
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
    """Whether logits are valid by themselves."""
    return is_tensor(logits, FLOATS) and logits.ndim == ndim and logits.shape[-1] > 0


def call_is_valid(call: dict, schedule: AcceptanceSchedule | None, look: bool) -> bool:
    """Whether a call is valid: the contract, written independently of the package."""
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
# No huge ones: a schedule has a number for each draft token, and there is no limit on how many.
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
