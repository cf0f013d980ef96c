"""Stress: random calls on several streams at once; outputs are well-formed, repeatable, and equal to the eager backend's.

`SPECDECODE_STRESS_SECONDS=600 python -m pytest -s tests/test_stress.py` on a GPU. A failure names its case;
`SPECDECODE_STRESS_CASE=<seed>` runs that one alone.
"""

import faulthandler
import math
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specdecode import AcceptanceSchedule, RejectionSampler, SamplerOutput, backends
from tests.conftest import ON_GPU
from tests.support.batches import verification_batch

STREAMS = 4
MOST_BYTES = 300_000_000
"""The most bytes of logits in one case."""

ALIKE = 30
"""The number of consecutive cases with the same compiled kernels; otherwise compilation would take nearly all of the
time."""

FEWEST_AGREE = 0.97
"""The tolerated share of requests that differ. Rounding changes about one in 2,000; a wrong kernel far more."""

MEAN_RATE = 0.7
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAN, INF = math.nan, math.inf

# ---------------------------------------------------------------------------------------------------------------------
# Layouts. Memory between and around the values is poison: NaN, or a token id.
# ---------------------------------------------------------------------------------------------------------------------


def embedded(tensor: Tensor, around: int) -> Tensor:
    """Put the values into a larger tensor, `around` elements from its ends in the last dimension and one in the others."""
    margins = [1] * (tensor.ndim - 1) + [around]
    shape = [size + 2 * margin for size, margin in zip(tensor.shape, margins)]
    larger = tensor.new_full(shape, NAN if tensor.is_floating_point() else 0)
    view = larger[tuple(slice(margin, margin + size) for size, margin in zip(tensor.shape, margins))]
    return view.copy_(tensor)


def dense(tensor: Tensor) -> Tensor:
    return tensor


def sliced(tensor: Tensor) -> Tensor:
    return embedded(tensor, 1)


def sliced_at_16(tensor: Tensor) -> Tensor:
    return embedded(tensor, 16)


def offsets_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def reversed_order(tensor: Tensor) -> Tensor:
    order = list(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def every_other(tensor: Tensor) -> Tensor:
    larger = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), NAN if tensor.is_floating_point() else 0)
    return larger[..., ::2].copy_(tensor)


LOGITS_LAYOUTS = [dense, dense, sliced_at_16, offsets_first, sliced, reversed_order, every_other]
TABLE_LAYOUTS = [dense, sliced, reversed_order, every_other]
VECTOR_LAYOUTS = [dense, sliced, every_other]

# ---------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    method: str
    schedule: AcceptanceSchedule | None
    arguments: dict
    finite: bool


def kind_of(seed: int) -> dict:
    """Return the properties that compiled kernels depend on, equal for `ALIKE` consecutive seeds."""
    pick = random.Random(f"kind {seed // ALIKE}")
    dtype = pick.choice(FLOATS)
    given = pick.choice(["draft logits", "logsumexp", "no draft logits"])
    return {
        "method": pick.choice(["strict", "probabilistic", "synthetic", "block"]),
        "target_dtype": dtype,
        "draft_dtype": pick.choice([dtype, dtype, *FLOATS]),
        "with_draft_logits": given != "no draft logits",
        "with_logsumexp": given == "logsumexp",
        "target_layout": pick.choice(LOGITS_LAYOUTS),
        "draft_layout": pick.choice(LOGITS_LAYOUTS),
        "whole_lines": pick.random() < 0.5,
        "temperature_dtype": pick.choice([None, None, torch.float32, *FLOATS]),
        "ids_dtype": pick.choice([torch.int32, torch.int64]),
        "with_seeds": pick.random() < 0.5,
        "with_positions": pick.random() < 0.5,
    }


def log_uniform(pick: random.Random, most: int) -> int:
    return min(most, int(math.exp(pick.uniform(0, math.log(most + 1)))))


def make_case(seed: int, device: str, most_bytes: int) -> Case:
    """Draw the arguments of one call; all follow from the seed."""
    kind, pick = kind_of(seed), random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    def chance(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    def mix(tensor: Tensor, share: float, values: list) -> Tensor:
        choices = torch.tensor(values, device=device).to(tensor.dtype)
        return torch.where(chance(*tensor.shape) < share, choices[integers(0, len(values), *tensor.shape)], tensor)

    hostile = pick.random() < 0.3
    vocab = pick.choice([32_003, 128_256, 151_936]) if pick.random() < 0.3 else log_uniform(pick, 160_000)
    if kind["whole_lines"]:
        vocab = math.ceil(vocab / 16) * 16
    batch, drafts = log_uniform(pick, 300), pick.randint(0, 16)
    token_bytes = (drafts + 1) * kind["target_dtype"].itemsize
    if kind["with_draft_logits"]:
        token_bytes += drafts * kind["draft_dtype"].itemsize
    vocab = min(vocab, max(1, most_bytes // token_bytes))
    batch = min(batch, max(1, most_bytes // (token_bytes * vocab)))

    def spoil(logits: Tensor) -> None:
        entries, flat = pick.choice([0, 1, batch, max(1, logits.numel() // 1000)]), logits.view(-1)
        rows = pick.choice([0.0, 0.0, 0.1])
        for value in (NAN, -INF, INF):  # one after another: the order of several writes to one element is undefined
            if logits.numel() > 0:
                flat.index_fill_(0, integers(0, flat.numel(), entries), value)
            logits.masked_fill_(chance(*logits.shape[:2], 1) < rows, value)
        if pick.random() < 0.3:  # as after a filter of the likeliest tokens: whole blocks of -inf
            logits[..., vocab // 3 :] = -INF

    target = pick.choice([0.3, 1.0, 3.0, 10.0]) * normal(batch, drafts + 1, vocab, dtype=kind["target_dtype"])
    if hostile:
        spoil(target)
    draft = None
    if kind["with_draft_logits"]:
        away = pick.choice([0.0, 0.1, 0.6, 3.0]) * normal(batch, drafts, vocab, dtype=kind["draft_dtype"])
        draft = away.add_(target[:, :drafts])
        if hostile:
            spoil(draft)
        draft = kind["draft_layout"](draft)
    target = kind["target_layout"](target)

    temperature = 0.0 if pick.random() < 0.2 else pick.uniform(0.3, 1.5)
    if kind["temperature_dtype"] is not None:
        temperature = mix(0.3 + 1.2 * chance(batch), 0.25, [0.0])
        if hostile:
            temperature = mix(temperature, 0.2, [NAN, -1.0, -INF, 1e-30, 1e30])
        temperature = pick.choice(VECTOR_LAYOUTS)(temperature.to(kind["temperature_dtype"]))
    seeds = pick.randrange(-(2**63), 2**63 - batch)
    if kind["with_seeds"]:
        seeds = pick.choice(VECTOR_LAYOUTS)(integers(-(2**62), 2**62, batch) * 2)
    positions = integers(0, 2**40, batch) if kind["with_positions"] else None

    schedule = None
    if kind["method"] == "synthetic":
        schedule = AcceptanceSchedule.from_mean_rate(MEAN_RATE, num_draft_tokens=max(1, drafts))
    sampler = RejectionSampler(kind["method"], backend="triton", schedule=schedule)
    token_ids = torch.zeros(batch, drafts, dtype=torch.int64, device=device)
    logsumexp = torch.zeros(batch, drafts, device=device)
    source = target if draft is None else draft
    for offset in range(drafts):
        where = (positions if positions is not None else torch.zeros_like(token_ids[:, 0])) + offset
        calls = [sampler.draft(source[:, offset], temperature, seeds, where, offset=offset) for _ in range(2)]
        assert torch.equal(calls[0].token_ids, calls[1].token_ids), f"draft {offset} drawn again differs"
        assert torch.equal(*(call.logsumexp.view(torch.int32) for call in calls)), f"logsumexp {offset} again differs"
        token_ids[:, offset], logsumexp[:, offset] = calls[0].token_ids, calls[0].logsumexp
    assert ((token_ids >= 0) & (token_ids < vocab)).all(), "a draft drawn is no token"

    token_ids = torch.where(chance(batch, drafts) < 0.15, integers(0, vocab, batch, drafts), token_ids)
    token_ids = mix(token_ids, pick.choice([0.0, 0.1, 0.5]), [-1])
    if hostile:
        strange = [vocab, -7, 2**31 - 1, -(2**31)]
        token_ids = mix(token_ids, 0.1, strange if kind["ids_dtype"] == torch.int32 else [*strange, 2**40, -(2**40)])
        logsumexp = mix(logsumexp, 0.2, [NAN, INF, -INF, 1e38, 0.0])
    arguments = {
        "target_logits": target,
        "draft_token_ids": pick.choice(TABLE_LAYOUTS)(token_ids.to(kind["ids_dtype"])),
        "draft_logits": draft,
        "draft_logsumexp": pick.choice(TABLE_LAYOUTS)(logsumexp) if kind["with_logsumexp"] else None,
        "temperature": temperature,
        "seeds": seeds,
        "positions": None if positions is None else pick.choice(VECTOR_LAYOUTS)(positions),
    }
    return Case(kind["method"], schedule, arguments, finite=not hostile)


# ---------------------------------------------------------------------------------------------------------------------
# Conditions
# ---------------------------------------------------------------------------------------------------------------------


def check_form(output: SamplerOutput, arguments: dict) -> None:
    """Check that each line is given drafts, one token, then -1, with the documented shapes and dtypes."""
    batch, rows, vocab = arguments["target_logits"].shape
    ids = arguments["draft_token_ids"].to(torch.int64)
    dtypes = {
        "token_ids": torch.int64,
        "num_accepted": torch.int32,
        "num_draft_tokens": torch.int32,
        "invalid": torch.bool,
    }
    for name, dtype in dtypes.items():
        tensor, shape = getattr(output, name), (batch, rows) if name == "token_ids" else (batch,)
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), f"{name}: {tensor.dtype}, {list(tensor.shape)}"
        assert tensor.device == ids.device, name
    tokens, last = output.token_ids, output.num_accepted.to(torch.int64)
    assert ((tokens >= -1) & (tokens < vocab)).all(), "a token outside the vocabulary"
    had = ((ids >= 0) & (ids < vocab)).cumprod(dim=1).sum(dim=1)
    assert torch.equal(output.num_draft_tokens.to(torch.int64), had), "num_draft_tokens is not what was given"
    assert ((last >= 0) & (last <= had)).all(), "more accepted than the request's own drafts"
    emitted = tokens.gather(1, last[:, None])
    assert (emitted >= 0).all(), "no token after the accepted drafts"
    offsets = torch.arange(rows, device=ids.device)
    drafted = torch.nn.functional.pad(ids, (0, 1))
    line = torch.where(offsets < last[:, None], drafted, torch.where(offsets == last[:, None], emitted, -1))
    assert torch.equal(tokens, line), "a line is not accepted drafts, one token, -1"


def check_case(seed: int, device: str = "cuda", most_bytes: int = MOST_BYTES) -> tuple[int, int | None]:
    """Run one case in every way; return the number of requests, and of requests with eager's tokens (None: not compared)."""
    case = make_case(seed, device, most_bytes)
    sampler = RejectionSampler(case.method, backend="triton", schedule=case.schedule)
    kernels = backends.choose("triton", case.arguments["target_logits"])
    batch = verification_batch(**case.arguments)
    outputs = {"called": sampler(**case.arguments)}  # all are launched before any is checked
    for large in (False, True):
        for again in ("", ", again"):
            outputs[f"large={large}{again}"] = kernels.verify(case.method, batch, case.schedule, large=large)
    outputs["called again"] = sampler(**case.arguments)

    output = outputs["called"]
    check_form(output, case.arguments)
    for how, other in outputs.items():
        for name, got, want in zip(output._fields, other, output[:4]):
            assert torch.equal(got, want), f"{name}: {how} differs at {(got != want).nonzero()[:5].tolist()}"

    requests = len(output.token_ids)
    if not case.finite:
        return requests, None
    assert not output.invalid.any(), "invalid, though all logits are finite"
    expected = RejectionSampler(case.method, backend="eager", schedule=case.schedule)(**case.arguments)
    check_form(expected, case.arguments)
    agreed = int((output.token_ids == expected.token_ids).all(dim=1).sum())
    # An error in a single kind of case would be invisible in the total.
    assert requests - agreed <= 2 + requests // 5, f"only {agreed} of {requests} requests agree with eager"
    return requests, agreed


def described(seed: int) -> str:
    kind = {name: getattr(value, "__name__", value) for name, value in kind_of(seed).items()}
    return f"SPECDECODE_STRESS_CASE={seed} runs this case again: {kind}"


def work(index: int, until: float, stop: threading.Event) -> dict[int, tuple[int, int | None]]:
    """Check cases on a stream of this thread, until the time is over or another thread has failed."""
    generator = torch.Generator().manual_seed(index)
    results = {}
    with torch.cuda.stream(torch.cuda.Stream()):
        while True:
            first = int(torch.randint(2**40, (), generator=generator)) * ALIKE
            for seed in range(first, first + ALIKE):
                try:
                    results[seed] = check_case(seed)
                except Exception as error:
                    stop.set()
                    error.add_note(described(seed))
                    raise
                if stop.is_set() or time.monotonic() > until:
                    torch.cuda.current_stream().synchronize()
                    return results


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_calls_on_several_streams_are_right_and_repeatable(capsys):
    """Random cases, for `SPECDECODE_STRESS_SECONDS` (5).

    A hanging kernel cannot be interrupted, so 120 seconds later a watchdog ends the whole run, with every thread's
    traceback on stderr.
    """
    seconds = float(os.environ.get("SPECDECODE_STRESS_SECONDS", "5"))
    only = os.environ.get("SPECDECODE_STRESS_CASE")
    with capsys.disabled():
        stderr = os.dup(2)  # captured output would be lost when the watchdog ends the run
    faulthandler.dump_traceback_later(seconds + 120, exit=True, file=stderr)
    try:
        if only is not None:
            results = {int(only): check_case(int(only))}
        else:
            until, stop = time.monotonic() + seconds, threading.Event()
            with ThreadPoolExecutor(STREAMS) as pool:
                futures = [pool.submit(work, index, until, stop) for index in range(STREAMS)]
            errors = [future.exception() for future in futures if future.exception() is not None]
            if errors:
                raise errors[0] if len(errors) == 1 else ExceptionGroup("several threads failed", errors)
            results = {seed: result for future in futures for seed, result in future.result().items()}
        torch.cuda.synchronize()
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(stderr)

    finite = {seed: (requests, agreed) for seed, (requests, agreed) in results.items() if agreed is not None}
    compared, agreed = (sum(counts) for counts in zip(*finite.values(), (0, 0)))
    otherwise = [seed for seed, (requests, agreed) in finite.items() if agreed < requests]
    summary = (
        f"{len(results)} cases, {sum(requests for requests, _ in results.values())} requests; of {compared} with finite "
        f"logits {agreed} agree with eager ({agreed / max(1, compared):.3%}); cases with others: {otherwise[:10]}"
    )
    print(f"\n{summary}")
    assert compared - agreed <= 1 + (1 - FEWEST_AGREE) * compared, summary  # allow one in short runs
