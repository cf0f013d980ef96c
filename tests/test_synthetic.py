"""Synthetic verification: acceptance at the scheduled rates, and rows whose residual is empty."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import oracle
from reference.sampling import Sampling as ReferenceSampling
from reference.sampling import spread, truncate
from specdecode import AcceptanceSchedule, AcceptanceStats, RejectionSampler, SamplerOutput, Sampling, VocabShard
from tests.conftest import HAS_TRITON, ON_GPU, combine
from tests.support import distributions
from tests.support.differential import Case, assert_same_tokens, case, like_a_device
from tests.support.packing import in_slots
from tests.support.ranks import Ranks

NEVER = AcceptanceSchedule.from_rates([0.0])


PERCENTAGES = {0.24: (46.92, 18.62, 6.41), 0.69: (90.86, 70.20, 46.13), 1.0: (100, 100, 100), 0.0: (0, 0, 0)}


@pytest.mark.parametrize(("rate", "with_logits", "temperature"), combine(list(PERCENTAGES), [True, False], [0.0, 1.0]))
def test_positions_are_accepted_as_scheduled(place, rate, with_logits, temperature):
    # The percentages are those that vLLM's pull request 38045 measured, itself within its sampling error of the schedule.
    backend, device = place
    requests = distributions.REQUESTS
    schedule = AcceptanceSchedule.from_mean_rate(rate, num_draft_tokens=3)
    sampler = RejectionSampler("synthetic", backend=backend, schedule=schedule)
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(requests, 4, 6, generator=generator).to(device)
    draft_logits = torch.randn(requests, 3, 6, generator=generator).to(device)
    token_ids = torch.randint(0, 6, (requests, 3), generator=generator).to(device)
    output = sampler(target, token_ids, draft_logits if with_logits else None, temperature=temperature, seeds=0)

    distribution = -np.diff([1.0, *schedule.joint_rates, 0.0])
    counts = np.bincount(output.num_accepted.cpu(), minlength=4)
    distributions.assert_distribution(counts, np.where(distribution < 1e-12, 0, distribution))
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(output)
    # Five standard errors of a proportion are at most 0.56 percentage points; the pull request rounds to 0.01.
    assert np.allclose(100 * np.array(stats.per_position), PERCENTAGES[rate], atol=0.57)
    assert abs(stats.acceptance_rate - rate) < 0.0057


def test_an_acceptance_costs_the_work_of_the_method_it_imitates(monkeypatch):
    # A load test without the statistics would measure less work. Every judged row is read.
    rows = []

    def counting(room):
        module = pytest.importorskip(f"specdecode.eager.{room}")
        read = module.read

        def counted(models, dtype):
            rows.extend(logits.shape[:-1].numel() for logits in models)
            return read(models, dtype)

        monkeypatch.setattr(module, "read", counted)

    counting("strict")
    counting("probabilistic")
    batch = case(50, 4, 30, torch.float32, greedy=0)
    token_ids = batch.draft_token_ids.clamp(min=0)
    all_stand = AcceptanceSchedule.from_rates([1.0] * 4)
    sampler = RejectionSampler("synthetic", schedule=all_stand)
    sampler(batch.target_logits, token_ids, batch.draft_logits, seeds=0)
    assert sum(rows) == 50 * (4 + 4 + 1)  # target and draft rows of each draft, and the bonus row
    rows.clear()
    sampler(batch.target_logits, token_ids, seeds=0)
    assert sum(rows) == 50 * 5  # strict samples every target row


# ---------------------------------------------------------------------------------------------------------------------
# Equal distributions, without a residual
# ---------------------------------------------------------------------------------------------------------------------

HOTTER = {"not said": None, "equal": 1.0, "half": 0.5, "twice": 2.0, "a fraction": 41 / 32}
"""The temperature of the drafts relative to the target's; their logits are multiplied by the same factor."""

LIMITS = {"nothing": {}, "top-k": {"top_k": 5}, "top-p": {"top_p": 0.8}, "both": {"top_k": 30, "min_p": 0.001}}
LAYOUTS = ["padded", "like a device", "packed", "vocabulary of its own", "sharded"]


def alike(requests: int, vocab: int, dtype: torch.dtype, hotter: float | None) -> Case:
    """Return a batch of one draft per request with the target's own rows, at the drafts' temperature."""
    batch = case(requests, 1, vocab, dtype, greedy=0, seed=vocab)
    target, temperature = batch.target_logits, batch.temperature.bfloat16().float()
    draft_logits = target[:, :1]
    if hotter is not None and hotter != 1:
        target = (target * 64).round() / 64 if hotter == 41 / 32 else target  # so that the product is not rounded
        draft_logits = hotter * target[:, :1].to(torch.promote_types(dtype, torch.float32))
    ids = batch.draft_token_ids.clamp(min=0)
    return replace(batch, target_logits=target, draft_logits=draft_logits, draft_token_ids=ids, temperature=temperature)


def rejected(layout: str, place: tuple[str, str], **call: Any) -> SamplerOutput:
    """Return a verification that rejects all drafts by schedule."""

    def sampler_of(shard: VocabShard | None = None) -> RejectionSampler:
        return RejectionSampler("synthetic", backend=place[0], schedule=NEVER, shard=shard)

    requests, _, vocab = call["target_logits"].shape
    if layout == "packed":
        slots = torch.arange(requests, device=place[1]).flip(0)
        by_slot = ("draft_logits", "temperature", "seeds", "draft_sampling")
        call |= {name: in_slots(call[name], slots, requests) for name in by_slot}
        rows = call["target_logits"].flatten(0, 1), torch.nn.functional.pad(call["draft_token_ids"], (0, 1)).flatten()
        call |= {"target_logits": rows[0], "draft_token_ids": rows[1], "num_draft_tokens": 1, "slots": slots}
        return sampler_of().packed(**call, row_starts=2 * torch.arange(requests + 1, device=place[1]))
    if layout == "sharded":
        first, second = Ranks([0, vocab // 3, vocab]).run(sampler_of, call)
        assert torch.equal(first.token_ids, second.token_ids)
        return first
    with like_a_device() if layout == "like a device" else nullcontext():
        return sampler_of()(**call)


def of_own_vocabulary(batch: Case, in_order: bool) -> tuple[Case, Tensor]:
    """Return the batch with draft rows over half of the tokens, and the target ids of these tokens."""
    vocab = batch.target_logits.shape[2]
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[: vocab // 2]
    ids = ids.sort().values if in_order else ids
    target = torch.full_like(batch.target_logits, -torch.inf)
    target[..., ids] = batch.target_logits[..., ids]
    return replace(batch, target_logits=target, draft_logits=batch.draft_logits[..., ids]), ids


def check_equal_rows(
    place: tuple[str, str],
    size: tuple[int, int],
    hotter: str,
    limits: str,
    layout: str,
    dtype: torch.dtype,
    by_request: bool,
) -> None:
    """Check that recovered tokens are the target's own samples, in the reference and in a backend."""
    of_drafts, options, ids = HOTTER[hotter], LIMITS[limits], None
    batch = alike(*size, dtype, of_drafts)
    if not by_request:
        batch = replace(batch, temperature=torch.full_like(batch.temperature, 0.75))
    if layout == "vocabulary of its own":
        batch, ids = of_own_vocabulary(batch, in_order=len(options) > 0)  # of equal logits the lower id is kept
    outcomes = []
    for index in range(size[0]):
        (target, token_ids, draft), request = batch.rows(index), batch.request(index)
        how = ReferenceSampling(request["temperature"] * (of_drafts or 1), **options)
        if ids is not None:  # truncated before it is spread
            row, _ = truncate(draft[0], how)
            draft, how = [spread(row, ids.numpy(), size[1])], ReferenceSampling(how.temperature)
        told = {"conditional_rates": NEVER.conditional_rates, "draft_sampling": how}
        outcomes.append(oracle.verify("synthetic", target, token_ids, draft, **told, **options, **request))
        assert outcomes[-1].token_ids == oracle.verify("strict", target[:1], [], **options, **request).token_ids
    moved = batch.to(place[1])
    temperature = moved.temperature if by_request else 0.75
    output = rejected(
        layout,
        place,
        target_logits=moved.target_logits,
        draft_token_ids=moved.draft_token_ids,
        draft_logits=moved.draft_logits,
        temperature=temperature,
        seeds=moved.seeds,
        positions=moved.positions,
        draft_sampling=None if of_drafts is None else Sampling(temperature * of_drafts, **options),
        draft_vocab_ids=None if ids is None else ids.to(place[1]),
        **options,
    )
    assert output.num_accepted.tolist() == [0] * size[0]
    assert_same_tokens(output.token_ids, outcomes, batch.band(place[0]))


ROWS = [
    ("nothing", torch.float32, 50, False),
    ("top-k", torch.bfloat16, 7, True),
    ("top-p", torch.float64, 1100, True),
    ("both", torch.float32, 60, True),
]
"""Limits of the target, dtype, vocabulary, and whether each request has its own limits."""


@pytest.mark.parametrize(
    ("where", "hotter", "rows"),
    combine([*product(["cpu"], LAYOUTS), *[*product(["cuda"], LAYOUTS[:-1])] * ON_GPU], list(HOTTER), ROWS),
)
def test_of_equal_rows_nothing_is_left_however_the_drafts_were_drawn(where, hotter, rows):
    (device, layout), (limits, dtype, vocab, by_request) = where, rows
    check_equal_rows(("eager", device), (40, vocab), hotter, limits, layout, dtype, by_request)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
@pytest.mark.parametrize(
    ("hotter", "limits", "layout", "dtype"),
    combine(
        ["not said", "equal"],
        ["nothing", "top-k", "top-p"],
        ["padded", "packed", "vocabulary of its own"],
        [torch.float32, torch.bfloat16],
    ),
)
def test_of_equal_rows_nothing_is_left_in_the_kernels(hotter, limits, layout, dtype):
    place, requests = ("triton", "cuda" if ON_GPU else "cpu"), 40 if ON_GPU else 3
    check_equal_rows(place, (requests, 1100), hotter, limits, layout, dtype, by_request=hotter == "not said")


@pytest.mark.parametrize("masked", [False, True], ids=["as it is", "like a device"])
@pytest.mark.parametrize("limits", LIMITS)
def test_to_say_that_drafts_were_drawn_as_the_target_samples_changes_nothing(limits, masked):
    """No bit changes, even for nearly equal rows."""
    batch = case(200, 2, 60, torch.float32, greedy=0)
    near = batch.target_logits[:, :2] + 1e-6 * torch.randn(200, 2, 60, generator=torch.Generator().manual_seed(0))
    rows = batch.target_logits, batch.draft_token_ids, near
    for method, schedule in (("synthetic", AcceptanceSchedule.from_rates([0.3, 0.0])), ("block", None)):
        sampler = RejectionSampler(method, schedule=schedule, backend="eager")
        how = Sampling(batch.temperature, **LIMITS[limits])
        with like_a_device() if masked else nullcontext():
            usual, said = (
                sampler(*rows, **how._asdict(), seeds=batch.seeds, draft_sampling=told) for told in (None, how)
            )
        assert all(torch.equal(one, other) for one, other in zip(usual[:4], said[:4]))


def test_temperatures_whose_ratio_is_no_float32_leave_no_row_undefined():
    batch = case(60, 1, 30, torch.float32, greedy=0)
    batch.target_logits[..., 3:9] = batch.draft_logits[..., 5:12] = -torch.inf
    sampler = RejectionSampler("probabilistic", backend="eager")
    for target_temperature, draft_temperature in ((1e-30, 1e30), (1e30, 1e-30)):
        options = {"temperature": target_temperature, "draft_sampling": ReferenceSampling(draft_temperature)}
        drafted = sampler.draft(batch.draft_logits[:, 0], draft_temperature, seeds=0).token_ids[:, None]
        rows = [(batch.rows(index)[0], drafted[index].tolist(), batch.rows(index)[2]) for index in range(60)]
        outcomes = [oracle.verify("probabilistic", *each, **options, seed=seed) for seed, each in enumerate(rows)]
        options["draft_sampling"] = Sampling(draft_temperature)
        output = sampler(batch.target_logits, drafted, batch.draft_logits, **options, seeds=0)
        assert_same_tokens(output.token_ids, outcomes, batch.band("eager"))
