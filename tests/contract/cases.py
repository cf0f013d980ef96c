"""The cases of the contract: one generator of calls, and a covering array over all axes of a call.

A case is a `Parameters`: one value of each axis. `make` draws its padded call, `laid_out` converts the call to the case's
`layout`, and `run` runs it. Every two values of two axes occur together in at least one case, on a GPU every three.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import sampling as reference
from specdecode import Adjustments, RejectionSampler, SamplerOutput, Sampling
from tests.conftest import HAS_TRITON, ON_GPU, cover
from tests.support import adjusted
from tests.support.calls import ALL_METHODS as METHODS
from tests.support.calls import EAGER_ALONE
from tests.support.differential import like_a_device
from tests.support.oracle import SCHEDULE, expected_of, number, sampling_of, seed_of

NAN, INF = float("nan"), float("inf")
STRENGTH = 3 if ON_GPU else 2
NUM_TOP = 5
NOBODYS = 2
"""Rows of a packed call before the first request's and after the last request's."""


class Parameters(NamedTuple):
    """One value of each axis."""

    method: str
    backend: str
    dtype: str
    vocab: int
    numbers: str
    truncation: str
    adjustments: str
    drafts: str
    rows: str
    layout: str
    report: str

    def __str__(self) -> str:
        return "-".join(map(str, self)).replace(" ", "_")


ORDINARY = Parameters(
    "probabilistic", "eager", "float32", 1040, "by request", "none", "none", "read", "ordinary", "padded", "processed"
)

DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float64": (torch.float64, torch.float64),
    "bfloat16 and float32": (torch.bfloat16, torch.float32),
}
"""The dtypes of the target's and of the draft's logits."""

TRUNCATIONS: dict[str, dict] = {
    "none": {},
    "top-p": {
        "top_p": 0.9 if ON_GPU else 0.6
    },  # few tokens: the interpreter is slow for wide rows, which "by request" has
    "top-k": {"top_k": 5},
    "min-p": {"min_p": 0.05},
    "all three": {"top_k": 20, "top_p": 0.95, "min_p": 0.01},
    "by request": {
        "top_k": torch.tensor([0, 50, 3, 800, 7, 1]),
        "top_p": torch.tensor([1.0, 0.5, 0.99, 0.9, 1e-9, 0.3]),
        "min_p": torch.tensor([0.0, 0.2, 0.0, 0.001, 1.0, 0.0]),
    },
}

DRAFTS = ["read", "handed on", "drawn otherwise", "own vocabulary", "own vocabulary, handed on", "one-hot", "no logits"]
"""The draft inputs of a call besides ids. "handed on": with the logsumexp and cutoff of drafting steps."""

REPORTS: dict[str, dict] = {
    "nothing": {},
    "processed": {"logprobs": "processed"},
    "raw": {"logprobs": "raw"},
    "processed lists": {"logprobs": "processed", "top_logprobs": NUM_TOP, "kept_sets": True},
    "raw lists": {"logprobs": "raw", "top_logprobs": NUM_TOP, "kept_sets": True},
    "kept sets": {"kept_sets": True},
}

LAYOUTS = ["padded", "packed", "packed by slot", "inside larger tensors", "strided", "transposed and negated"]
EAGER_WAYS = ["eager", "eager like a device", *["eager on cuda"] * ON_GPU]
KERNEL_WAYS = ["triton few", "triton many", "triton large"] if HAS_TRITON else []
"""The strategies of the kernels, which otherwise depend on the number of requests and rows."""


def cases_of(backends: Sequence[str], **axes: Sequence[Any]) -> list[Parameters]:
    """Return the covering array; axes may be restricted to fewer values."""
    whole = {
        "method": METHODS,
        "backend": backends,
        "dtype": list(DTYPES),
        "vocab": [1040, 1025, 40],
        "numbers": ["by request", "one for all"],
        "truncation": ["none", *TRUNCATIONS],  # twice, so that plain rows occur with more other values
        "adjustments": ["none", "none", *adjusted.SOME],
        "drafts": DRAFTS,
        "rows": ["ordinary", "hostile", "far from 0"],
        "layout": LAYOUTS,
        "report": list(REPORTS),
    }
    return [Parameters(*case) for case in cover((whole | axes).values(), STRENGTH)] if backends else []


# ---------------------------------------------------------------------------------------------------------------------
# The padded call
# ---------------------------------------------------------------------------------------------------------------------


def make(case: Parameters, sizes: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the arguments of the padded call, by name, on the CPU; `sizes` overrides the numbers of requests and drafts."""
    seed = zlib.crc32(str(case._replace(backend="", layout="")).encode())
    generator, random = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    usual = (6 if case.vocab > 10_000 else 30, 3) if ON_GPU else (6, 3)
    if case.backend.startswith("triton") and not ON_GPU:
        usual = 4, 2 + (case.method == "block")  # three drafts, so that a capped running ratio matters
    requests, drafts = usual if sizes is None else sizes
    target = 3 * torch.randn(requests, drafts + 1, case.vocab, generator=generator)
    draft = target[:, :drafts] + 0.6 * torch.randn(requests, drafts, case.vocab, generator=generator)
    own = torch.randperm(case.vocab, generator=generator)[: case.vocab * 2 // 3] if "own" in case.drafts else None
    draft = draft if own is None else draft[..., own]
    if case.rows == "hostile":
        poison(target, draft)
    if case.rows == "far from 0":  # exponentials overflow, or are all 0, unless relative to the row's maximum
        for rows in (target, draft):
            rows[::3] += 120
            rows[1::3] -= 120
        target[..., 1024:] += 150 * (case.method == "strict")  # a residual would round to 0 in float32
    target_dtype, draft_dtype = DTYPES[case.dtype]
    arguments: dict[str, Any] = {"target_logits": target.to(target_dtype)}
    arguments |= numbers_of(case, requests, generator)
    limits = TRUNCATIONS[case.truncation]
    limits = {
        name: value.repeat(5)[:requests] if isinstance(value, Tensor) else value for name, value in limits.items()
    }
    arguments |= limits | REPORTS[case.report]
    if case.adjustments != "none":
        given = adjusted.adjustments_for(adjusted.Rows(arguments["target_logits"]), case.adjustments, seed)
        arguments["adjustments"] = given
    draft, told = draft.to(draft_dtype), how_drawn(case, arguments["temperature"], limits)
    ids = arguments["draft_token_ids"] = draw_drafts(case, arguments, draft, told, own, random)
    if case.drafts == "one-hot":
        draft = torch.full_like(draft, -INF).scatter_(2, ids.clamp(min=0)[..., None], 3.0)
    arguments["draft_logits"] = None if case.drafts == "no logits" else draft
    if case.drafts == "drawn otherwise":
        arguments["draft_sampling"] = told
    if own is not None:
        arguments["draft_vocab_ids"] = own
    if case.drafts.endswith("handed on"):
        arguments |= handed_on(arguments, limits)
    return arguments


def poison(target: Tensor, draft: Tensor) -> None:
    """Put NaN, infinities and rows without a finite logit into some requests' rows."""
    draft[0, :, 5] = NAN
    target[0, :, torch.arange(target.shape[2]) % 256 < 2] = (
        NAN  # all logits that a thread of the kernels compares first
    )
    target[2, 0, [1, 4]], draft[2, 1, 3] = INF, INF
    target[3, 0], target[1, -1] = -INF, NAN


def numbers_of(case: Parameters, requests: int, generator: torch.Generator) -> dict[str, Any]:
    """Return temperature, seeds and positions; by request, the second request is greedy."""
    if case.numbers == "one for all":
        return {"temperature": 1.0, "seeds": int(torch.randint(2**40, (), generator=generator)), "positions": None}
    temperature = 0.3 + 1.2 * torch.rand(requests, generator=generator)
    temperature[:1], temperature[1:2] = 1, 0
    limits = torch.iinfo(torch.int64)
    seeds = torch.randint(limits.min, limits.max, (requests,), generator=generator)
    positions = 1 + torch.randint(2**40, (requests,), generator=generator)  # at least one token was fed before
    return {"temperature": temperature, "seeds": seeds, "positions": positions}


def how_drawn(case: Parameters, temperature: Tensor | float, limits: dict) -> Sampling:
    """Return the sampling parameters of drafts. With truncation, the kernels allow only the target's temperature."""
    if case.drafts != "drawn otherwise":
        return Sampling(temperature, **limits)
    if not case.backend.startswith("triton"):
        temperature = temperature.flip(0) if isinstance(temperature, Tensor) else 1.2
    return Sampling(temperature, top_k=9)


def draw_drafts(
    case: Parameters, arguments: dict, draft: Tensor, told: Sampling, own: Tensor | None, random: np.random.Generator
) -> Tensor:
    """Return drafts drawn from draft or target rows; ragged, some -1, some unlikely."""
    requests, drafts, _ = draft.shape
    ids = np.full((requests, drafts), -1)
    share = 0.8 if case.method == "strict" else 0.4  # drawn from the target's rows
    with np.errstate(all="ignore"):
        for index, offset in np.ndindex(requests, drafts):
            if random.random() < share:
                ids[index, offset] = sample_of(arguments, index, ids[index, :offset].tolist())
                continue
            how, row = sampling_of(*told, index), draft[index, offset].double().numpy()
            row = reference.truncate(row, how)[0]
            token = random.choice(len(row), p=np.exp(reference.log_softmax(row, how.temperature)))
            ids[index, offset] = token if own is None else own[token]
    if case.rows == "hostile":
        ids[2:4, 0] = 1, 0  # accepted: the target's rows are point masses
    unlikely = random.random(ids.shape) < 0.05
    ids[unlikely] = random.integers(case.vocab, size=ids.shape)[unlikely]
    ids[random.random(ids.shape) < 0.03] = -1
    counts = np.where(random.random(requests) < 0.8, drafts, random.integers(0, drafts + 1, requests))
    return torch.tensor(np.where(np.arange(drafts) < counts[:, None], ids, -1))


def sample_of(arguments: dict, index: int, drafts: list[int]) -> int:
    """Return the target's own seeded sample after some drafts."""
    alone = {**arguments, "draft_token_ids": torch.tensor(drafts, dtype=torch.int64).expand(index + 1, -1)}
    alone["target_logits"] = arguments["target_logits"][:, : len(drafts) + 1]
    expected = expected_of("strict", alone, index)
    position = number(arguments["positions"], index, 0) + len(drafts)
    row = reference.truncate(expected.rows[-1], expected.sampling)[0]
    seed = seed_of(arguments["seeds"], index)
    return reference.sample(row, temperature=expected.sampling.temperature, seed=seed, position=position).index


def handed_on(arguments: dict, limits: dict) -> dict[str, Tensor]:
    """Return the logsumexp and the cutoff of drafting steps."""
    sampler, rows = RejectionSampler("probabilistic", backend="eager"), arguments["draft_logits"]
    numbers = {name: arguments[name] for name in ("temperature", "seeds")}
    steps = [sampler.draft(rows[:, i], **numbers, **limits) for i in range(rows.shape[1])]
    if len(steps) == 0:
        return {"draft_logsumexp": torch.empty(rows.shape[:2])}
    given = {"draft_logsumexp": torch.stack([step.logsumexp for step in steps], 1)}
    if steps[0].cutoff is not None:
        given["draft_cutoff"] = torch.stack([step.cutoff for step in steps], 1)
    return given


# ---------------------------------------------------------------------------------------------------------------------
# The same call in other layouts
# ---------------------------------------------------------------------------------------------------------------------


def each_tensor(change: Callable[[str, Tensor], Tensor], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with every tensor changed, also in bundles; identical tensors stay identical."""
    known: dict[int, Tensor] = {}

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, Sampling | Adjustments):
            return type(value)(*[changed(field, each) for field, each in zip(value._fields, value)])
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = change(name, value)
        return known[id(value)]

    return {name: changed(name, value) for name, value in arguments.items()}


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return each_tensor(lambda _, tensor: tensor.to(device), arguments)


def chosen(arguments: dict[str, Any], requests: Sequence[int]) -> dict[str, Any]:
    """Return the call of some of the requests, in this order."""
    picked = each_tensor(
        lambda name, tensor: tensor if name == "draft_vocab_ids" else tensor[list(requests)].clone(), arguments
    )
    if isinstance(picked["seeds"], int):
        device = picked["target_logits"].device
        picked["seeds"] = torch.tensor([picked["seeds"] + request for request in requests], device=device)
    return picked


def with_more_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the call padded for two more drafts, which no request has; their rows are poison."""
    by_row = ("target_logits", "draft_logits", "draft_token_ids", "draft_logsumexp", "draft_cutoff", "allowed_mask")

    def padded(name: str, tensor: Tensor) -> Tensor:
        if name not in by_row:
            return tensor
        more = tensor.new_full((len(tensor), 2, *tensor.shape[2:]), NAN if tensor.is_floating_point() else -1)
        return torch.cat([tensor, more], 1)

    return each_tensor(padded, arguments)


def inside_larger(tensor: Tensor) -> Tensor:
    """Return the same values as a slice of a larger tensor that is poison elsewhere, like a padded vocabulary."""
    larger = tensor.new_full([length + 3 for length in tensor.shape], NAN if tensor.is_floating_point() else -7)
    view = larger[tuple(slice(2, 2 + length) for length in tensor.shape)]
    view.copy_(tensor)
    return view


def strided(tensor: Tensor) -> Tensor:
    """Return the same values as every second element of a larger tensor."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def transposed_and_negated(tensor: Tensor) -> Tensor:
    """Return the same values with the last dimension outermost, as a view of their negatives."""
    order = list(reversed(range(tensor.ndim)))
    return torch._neg_view((-tensor).permute(order).contiguous().permute(order))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "inside larger tensors": inside_larger,
    "strided": strided,
    "transposed and negated": transposed_and_negated,
}
NEED_WHOLE_ROWS = ("prompt_mask", "output_counts", "allowed_mask")


def viewed(layout: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the call with another memory layout of its tensors."""

    def view(name: str, tensor: Tensor) -> Tensor:
        if name in NEED_WHOLE_ROWS:
            return inside_larger(tensor)
        if layout == "transposed and negated" and (name == "temperature" or not tensor.is_floating_point()):
            return strided(tensor)  # a negated temperature is copied, and then not surely equal to the drafts'
        return VIEWS[layout](tensor)

    return each_tensor(view, arguments)


def packed(arguments: dict[str, Any], by_slot: bool) -> dict[str, Any]:
    """Return the packed call: rows without gaps, state in slots, positions of fed tokens; unused values are poison."""
    target, ids = arguments["target_logits"], arguments["draft_token_ids"]
    requests, drafts, device = *ids.shape, ids.device
    lengths = (ids >= 0).cumprod(1).sum(1)
    counts = (lengths + 2 * (lengths % 2)).clamp(max=drafts).tolist()  # some have rows after a -1
    offsets = torch.arange(drafts + 1, device=device)
    starts = torch.tensor([NOBODYS, *[count + 1 for count in counts]]).cumsum(0)
    slots = torch.randperm(requests + 3, generator=torch.Generator().manual_seed(requests))[:requests]
    slots = slots.to(device) if by_slot else torch.arange(requests, device=device)
    num_slots = requests + 3 * by_slot

    def in_rows(tensor: Tensor, unused: float) -> Tensor:
        """Return [batch, rows, ...] as [num_rows, ...]."""
        nobodys = tensor.new_full((NOBODYS, *tensor.shape[2:]), unused)
        return torch.cat([nobodys, *[rows[: count + 1] for rows, count in zip(tensor, counts)], nobodys])

    def in_slots(name: str, tensor: Tensor) -> Tensor:
        if name in ("positions", "draft_vocab_ids"):
            return tensor
        if name in ("target_logits", "allowed_mask"):
            return in_rows(tensor, NAN if tensor.is_floating_point() else -1)
        if name == "draft_token_ids":
            # A request's last row judges no draft: a likely token there must be ignored.
            likely = target.nan_to_num(nan=-INF).argmax(2)
            judged = torch.nn.functional.pad(tensor, (0, 1)).masked_fill(offsets > lengths[:, None], 2**30)
            return in_rows(judged.where(offsets < torch.tensor(counts, device=device)[:, None], likely), -9)
        unused = NAN if tensor.is_floating_point() else -(2**30)
        return tensor.new_full((num_slots, *tensor.shape[1:]), unused).index_copy(0, slots, tensor)

    result = each_tensor(in_slots, arguments)
    result |= {"row_starts": starts.to(device, torch.int32), "num_draft_tokens": drafts}
    if not by_slot:
        return result
    result |= {"slots": slots, "row_starts": starts.to(device)}
    positions = result.pop("positions")
    if positions is not None:
        fed = positions.new_full((len(result["target_logits"]),), -9)
        fed[starts[:-1].to(device)] = positions - 1
        result["row_positions"] = fed
    result["draft_token_ids"] = result["draft_token_ids"][:-1]  # the last row judges none
    return result


@contextmanager
def computing(backend: str) -> Iterator[None]:
    """Compute with one of the strategies of a backend."""
    if not backend.startswith("triton"):
        with like_a_device() if backend.endswith("like a device") else nullcontext():
            yield
        return
    from specdecode import kernels
    from tests.support.kernels import memory_of

    way = {"large": backend.endswith("large"), "many": backend.endswith("many")}
    # 100 is plausible as a sum and large as a maximum: reading an unwritten statistic changes the result.
    with (
        mock.patch.object(kernels, "verify", partial(kernels.verify, **way)),
        nullcontext() if ON_GPU else memory_of(100),
    ):
        yield


def device_of(case: Parameters) -> str:
    return "cuda" if ON_GPU and case.backend.startswith(("triton", "eager on")) else "cpu"


def sampler_of(case: Parameters) -> RejectionSampler:
    schedule = SCHEDULE if case.method == "synthetic" else None
    return RejectionSampler(case.method, backend=case.backend.split()[0], schedule=schedule)


def run(case: Parameters, arguments: dict[str, Any]) -> SamplerOutput:
    """Run a call, padded or packed."""
    if case.backend.startswith("triton") and case.method in EAGER_ALONE:
        pytest.skip("the method has no kernels")
    sampler = sampler_of(case)
    with computing(case.backend):
        return (sampler.packed if "row_starts" in arguments else sampler)(**arguments)


def laid_out(case: Parameters, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the padded call in the layout of a case."""
    if case.layout.startswith("packed"):
        return packed(arguments, by_slot=case.layout == "packed by slot")
    return arguments if case.layout == "padded" else viewed(case.layout, arguments)
