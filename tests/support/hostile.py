"""Valid calls with hostile values, conditions of any call, and the comparison with the reference."""

import math
import re
import warnings
import zlib
from fractions import Fraction

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import oracle
from reference.sampling import log_softmax
from specdecode import AcceptanceSchedule, RejectionSampler, SamplerOutput
from specdecode.noise import BLOCK_SIZE
from tests.conftest import ON_GPU

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
# Valid calls with hostile values
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
    """Return flat or random rows, with some special values, and some rows filled with them."""
    values, rows = random.normal(size=shape) * scale, (*shape[:-1], 1)
    values = np.where(random.random(shape) < trouble, random.choice(LOGITS, shape), values)
    values = np.where(random.random(rows) < trouble / 2, random.choice(LOGITS, rows), values)
    return torch.tensor(values).to(dtype)


def make_scalars(random: np.random.Generator, batch: int) -> dict:
    """Return temperature, seeds and positions, each as a tensor or in another allowed form."""
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
    """Return valid arguments for `sample` and `draft`."""
    shape = structure["batch"], structure["vocab"]
    logits = make_logits(random, shape, structure["dtypes"][0], structure["scale"], structure["trouble"])
    return {"logits": logits} | make_scalars(random, structure["batch"])


def make_call(random: np.random.Generator, structure: dict) -> dict:
    """Return valid arguments for a sampler. Half of the drafts are the target's likeliest, so that some are accepted."""
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
    """Return the same values on a device, each tensor in a random layout."""
    return {
        name: pick(random, LAYOUTS)(value.to(device)) if isinstance(value, Tensor) else value
        for name, value in call.items()
    }


def make_sampler(random: np.random.Generator, method: str, place) -> RejectionSampler:
    joint = sorted(random.choice([0.0, 0.3, 0.7, 1.0], size=random.integers(3, 6)), reverse=True)
    schedule = AcceptanceSchedule.from_rates(joint) if method == "synthetic" else None
    return RejectionSampler(method, backend=place[0], schedule=schedule)


def with_logsumexp(sampler: RejectionSampler, call: dict) -> dict:
    """Add the results of the sampler's own `draft`, if the call needs them."""
    if not isinstance(call["draft_logsumexp"], str):
        return call
    draft, temperature = call["draft_logits"], call["temperature"]
    columns = [sampler.draft(draft[:, i], temperature, seeds=0).logsumexp for i in range(draft.shape[1])]
    shape, device = call["draft_token_ids"].shape, draft.device
    known = torch.stack(columns, dim=1) if columns else torch.zeros(shape, dtype=torch.float32, device=device)
    return call | {"draft_logsumexp": known}


# ---------------------------------------------------------------------------------------------------------------------
# Conditions of any call
# ---------------------------------------------------------------------------------------------------------------------


def bits(value) -> object:
    """Return the bits of a tensor or an array, as integers, so that NaNs compare by their payload."""
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
    """Check that the error's message starts with the name of an argument."""
    assert type(error) in (TypeError, ValueError)
    named = re.match(r"(\w+)(\[\d+\])?: ", str(error))
    assert named is not None, f"names no argument: {error}"
    assert named[1] in names, f"names an argument that does not exist: {error}"


def assert_well_formed(output: SamplerOutput, call: dict) -> None:
    """Check the form of an output: accepted drafts, one more token, then -1; dtypes and shapes of the contract."""
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
    """One request of a call for the reference: float64 rows and plain numbers.

    Triton computes in float32, so for Triton the reference receives the logits rounded to float32.
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
        """Whether logits / temperature is in the range of float32."""
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
    """Compare one request's tokens with the reference's. Return the comparison: "same", "close", ..."""
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
        return []  # the given logsumexp is wrong: any token of the vocabulary is allowed
    rates = None if sampler.schedule is None else sampler.schedule.conditional_rates
    with np.errstate(all="ignore"):
        single = sampler.backend == "triton"
        return [compare(sampler.method, rates, call, output, index, single) for index in range(len(output.token_ids))]
