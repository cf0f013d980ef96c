"""Packed calls: errors that name the argument, fresh seeds, statistics, warm-up."""

from dataclasses import replace

import pytest
import torch

from specdecode import AcceptanceStats, RejectionSampler
from tests.conftest import HAS_TRITON, ON_GPU
from tests.support.differential import assert_same, case
from tests.support.packing import (
    packed_rows,
    sampler_of,
    with_counts,
)


def eight_rows(device: str) -> dict:
    """Return a call with at most three drafts, eight rows and five slots."""
    batch = case(8, 3, 50, torch.float32).to(device)
    return {
        "target_logits": batch.target_logits[:, 0],
        "draft_token_ids": batch.draft_token_ids[:, 0].clamp(min=0),
        "draft_logits": batch.draft_logits[:5],
        "temperature": batch.temperature[:5],
        "seeds": batch.seeds[:5],
        "num_draft_tokens": 3,
    }


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("row_starts", [0, 5, 3, 6, 8], r"row_starts: expected numbers that do not decrease, got 3 at \[2\]"),
        (
            "row_starts",
            [-1, 1, 3, 6, 8],
            r"row_starts: expected numbers in \[0, 8\], the number of rows, got -1 at \[0\]",
        ),
        (
            "row_starts",
            [0, 1, 3, 6, 9],
            r"row_starts: expected numbers in \[0, 8\], the number of rows, got 9 at \[4\]",
        ),
        (
            "row_starts",
            [0, 1, 6, 6, 8],
            r"row_starts: expected at most num_draft_tokens \+ 1 = 4 rows for each request, got 5 for request 1",
        ),
        ("row_starts", torch.empty(0, dtype=torch.int64), r"row_starts: expected shape \[batch \+ 1\], got \[0\]"),
        ("row_starts", [[0, 1]], r"row_starts: expected shape \[batch \+ 1\], got \[1, 2\]"),
        ("row_starts", [0.0, 1.0], r"row_starts: expected dtype int32, int64, got float32"),
        ("row_starts", None, r"row_starts: expected a torch.Tensor, got NoneType"),
        (
            "slots",
            [4, 0, 5, 1],
            r"slots: expected numbers in \[0, 5\), the number of slots in draft_logits, got 5 at \[2\]",
        ),
        ("slots", [4, 0, -1, 1], r"slots: expected numbers in \[0, 5\), .* got -1 at \[2\]"),
        ("slots", [0, 1, 2], r"slots: expected shape \[4\], got \[3\]"),
        ("num_draft_tokens", -1, r"num_draft_tokens: expected an int >= 0, got -1"),
        ("num_draft_tokens", None, r"num_draft_tokens: expected an int >= 0, got None"),
        ("num_draft_tokens", 2, r"row_starts: expected at most num_draft_tokens \+ 1 = 3 rows"),
        (
            "draft_token_ids",
            [3, 50, 0, 0, 0, 0, 0, 0],
            r"draft_token_ids: expected ids in \[0, 50\), .* got 50 at \[1\]",
        ),
        ("draft_token_ids", [3, -1, 99, 0, 0, 50, 0, 0], r"draft_token_ids: expected ids in .* got 50 at \[5\]"),
        ("draft_token_ids", [[3] * 8], r"draft_token_ids: expected shape \[8\], got \[1, 8\]"),
        ("target_logits", [[0.0]], r"draft_token_ids: expected shape \[1\], got \[8\]"),
        ("temperature", [1.0] * 4, r"temperature: expected shape \[5\], got \[4\]"),
        ("temperature", [1.0, 1.0, -1.0, 1.0, 1.0], r"temperature: expected finite numbers >= 0, got -1.0 at \[2\]"),
        ("positions", [0] * 5, r"positions: expected shape \[4\], got \[5\]"),
        ("row_positions", [0] * 4, r"row_positions: expected shape \[8\], got \[4\]"),
        ("row_positions", [0.0] * 8, r"row_positions: expected dtype int64, got float32"),
        ("row_positions", [5, -1, -1, -1, -2, 0, 0, 0], r"row_positions: expected numbers >= 0 .* got -2 at \[4\]"),
    ],
    ids=str,
)
def test_errors_name_the_argument(argument, value, error):
    call = {**eight_rows("cpu"), "row_starts": torch.tensor([0, 4, 4, 5, 8]), "slots": torch.tensor([4, 99, 2, 1])}
    call["draft_token_ids"][3] = call["draft_token_ids"][7] = 10**6  # ids of unused rows and of last rows
    call["temperature"][3] = -1  # nobody's
    sampler_of("block").packed(**call)
    call[argument] = torch.tensor(value) if isinstance(value, list) else value
    with pytest.raises((TypeError, ValueError), match="^" + error):
        sampler_of("block").packed(**call)


def test_positions_are_given_once():
    call = {**eight_rows("cpu"), "row_starts": torch.tensor([0, 4, 4, 5, 8]), "row_positions": torch.arange(8)}
    sampler_of("block").packed(**call)
    with pytest.raises(ValueError, match=r"^row_positions: given beside positions"):
        sampler_of("block").packed(**call, positions=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^row_starts: needed beside slots, num_draft_tokens and row_positions"):
        sampler_of("block").warmup(torch.zeros(1, 1, 9), torch.zeros(1, 0).long(), row_positions=torch.zeros(1).long())


def test_checks_do_not_depend_on_the_default_device():
    call = {**eight_rows("cpu"), "row_starts": torch.tensor([0, 4, 4, 8])}
    expected = sampler_of("block").packed(**call)
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RejectionSampler, "_verify", lambda sampler, batch: batch)
        checked = sampler_of("block").packed(**call)
    assert checked.packing.row_starts.shape[0] == len(expected.num_accepted) + 1


def test_without_slots_there_must_be_one_for_each_request():
    call = {**eight_rows("cpu"), "row_starts": torch.arange(7)}
    with pytest.raises(
        ValueError, match=r"^draft_logits: expected a slot for each of 6 requests, because slots is None, got 5"
    ):
        sampler_of("block").packed(**call)
    with pytest.raises(ValueError, match=r"^temperature: expected at least one slot, got 0"):
        slots = torch.zeros(6, dtype=torch.int64)
        sampler_of("block").packed(**{**call, "temperature": torch.ones(0), "draft_logits": None}, slots=slots)


def test_seeds_that_are_not_given_are_drawn_for_each_request(place):
    """Not for each slot: requests with a common slot draw different tokens."""
    batch = case(6, 0, 40, torch.float32, greedy=0).to(place[1])
    even, slots = torch.zeros_like(batch.target_logits), torch.zeros(6, dtype=torch.int64, device=place[1])
    sampler, temperature = sampler_of("strict", backend=place[0]), torch.ones(1, device=place[1])
    torch.manual_seed(3)
    expected = sampler(even, batch.draft_token_ids)
    torch.manual_seed(3)
    rows = packed_rows(replace(batch, target_logits=even), [0] * 6)
    assert_same(sampler.packed(**rows, slots=slots, temperature=temperature), expected)
    assert len(set(expected.token_ids[:, 0].tolist())) > 1


def test_statistics_count_packed_output(place):
    counts = [3, 0, 2, 1] * 20
    batch = with_counts(case(80, 3, 40, torch.float32), counts).to(place[1])
    sampler, stats = sampler_of("probabilistic", backend=place[0]), [AcceptanceStats(3), AcceptanceStats(3)]
    stats[0].update(sampler(batch.target_logits, batch.draft_token_ids, batch.draft_logits, seeds=0))
    stats[1].update(sampler.packed(**packed_rows(batch, counts), draft_logits=batch.draft_logits, seeds=0))
    no_rows = torch.zeros(81, dtype=torch.int64, device=place[1])
    no_logits = batch.target_logits[:0, 0]
    stats[1].update(sampler.packed(no_logits, no_rows[:0], no_rows, num_draft_tokens=3))  # these count as no requests
    assert str(stats[0]) == str(stats[1])
    assert stats[1].accepted_tokens > 0


def test_warm_up_takes_what_a_packed_call_takes():
    call = {**eight_rows("cpu"), "row_starts": torch.tensor([0, 4, 8]), "slots": torch.tensor([4, 0])}
    sampler_of("block").warmup(**call)
    with pytest.raises(ValueError, match=r"^slots: expected numbers in"):
        sampler_of("block").warmup(**{**call, "slots": torch.tensor([4, 5])})
    with pytest.raises(ValueError, match=r"^row_starts: needed beside"):
        sampler_of("block").warmup(torch.zeros(1, 1, 9), torch.zeros(1, 0, dtype=torch.int64), slots=torch.tensor([0]))


@pytest.mark.skipif(not HAS_TRITON, reason="the eager backend warms nothing up")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
@pytest.mark.parametrize("num_rows", [0, 8])
@pytest.mark.parametrize("starts", [[0], [0, 0]], ids=["no requests", "no rows"])
def test_warm_up_takes_batches_without_requests_or_rows(starts, num_rows):
    device = "cuda" if ON_GPU else "cpu"
    call = {**eight_rows(device), "row_starts": torch.tensor(starts, device=device)}
    call |= {name: call[name][:num_rows] for name in ("target_logits", "draft_token_ids")}
    sampler = sampler_of("strict", backend="triton")
    sampler.warmup(**call, positions=torch.zeros(len(starts) - 1, dtype=torch.int64, device=device))
    sampler.warmup(**call, row_positions=torch.zeros(num_rows, dtype=torch.int64, device=device))
