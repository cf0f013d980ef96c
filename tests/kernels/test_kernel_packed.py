"""Packed calls of the kernels: rows in place, state in slots; nothing is read outside a tensor, whatever the places are."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from specdecode import kernels
from specdecode.kernels.methods import METHODS
from tests.conftest import ON_GPU
from tests.support import addresses
from tests.support.addresses import apart, reads_and_writes_inside
from tests.support.batches import verification_batch
from tests.support.differential import Case, case, like_a_device
from tests.support.kernels import (
    DEVICE,
    FEW,
    KINDS,
    LARGE,
    MANY,
    SCHEDULE,
    assert_same,
    given,
    in_question,
    needs_interpreter,
)
from tests.support.packing import (
    HIGH,
    HOSTILE_SLOTS,
    HOSTILE_STARTS,
    LOW,
    fed_positions,
    in_slots,
    is_sound,
    packed_rows,
    with_counts,
)

NO_LIMITS = {
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "draft_sampling": None,
    "draft_cutoff": None,
    "logprobs": None,
    "draft_vocab_ids": None,
    "adjustments": None,
    "vocab_size": None,
}


def call(kind: str, tensors: dict, numbers: dict, where: tuple, **way: bool) -> Any:
    """Run the kernels on the arguments of a call, packed or not."""
    method, schedule = kind.split()[0], SCHEDULE if kind.startswith("synthetic") else None
    method = method if method in METHODS else "probabilistic"
    drafts = tensors.get("draft_logits"), tensors.get("draft_logsumexp")
    rows = tensors["target_logits"], tensors["draft_token_ids"], *drafts
    order = "temperature", "seeds", "positions", *NO_LIMITS
    options = {**NO_LIMITS, "seeds": 4, "positions": None, **numbers}
    batch = verification_batch(*rows, *[options[name] for name in order], *where)
    return kernels.verify(method, batch, schedule, **way)


def both(kind: str, batch: Case, counts: list[int], slots: Tensor, num_slots: int, limits: dict, **way: bool) -> tuple:
    """The outputs of a packed call, and of the call that is not."""
    batch = with_counts(batch, counts)
    _, draft_logits, logsumexp = given(kind, batch)
    by_request = {"draft_logits": draft_logits, "draft_logsumexp": logsumexp}
    numbers = {"temperature": batch.temperature, "seeds": batch.seeds, **limits}
    padded = {"target_logits": batch.target_logits, "draft_token_ids": batch.draft_token_ids, **by_request}
    usual = call(kind, padded, {**numbers, "positions": batch.positions}, (), **way)
    rows = packed_rows(batch, counts, torch.int32)
    fed = fed_positions(batch.positions, rows)
    where = rows.pop("row_starts"), rows.pop("num_draft_tokens"), slots
    end = where[0][-1]  # nothing follows the rows of the last request
    positions = {"positions": batch.positions}
    if kind in ("strict", "block"):  # as engines have them
        positions, where = {}, (*where, apart(fed[:end]))
        rows["draft_token_ids"] = rows["draft_token_ids"][: end - 1]
    rows = {name: apart(value[:end]) for name, value in rows.items()}
    by_slot = {name: in_slots(value, slots, num_slots) for name, value in by_request.items()}
    by_slot = {name: value if value is None else apart(value) for name, value in by_slot.items()}
    numbers = {name: in_slots(value, slots, num_slots) for name, value in numbers.items()}
    with nullcontext() if ON_GPU else reads_and_writes_inside():
        packed = call(kind, {**rows, **by_slot}, {**numbers, **positions}, where, **way)
    return packed, usual


WAYS = list(itertools.product(KINDS, [FEW, MANY, LARGE]))
if not ON_GPU:
    WAYS = [("strict", FEW), ("probabilistic", LARGE), ("given logsumexp", MANY), ("block", FEW)]


@pytest.mark.parametrize(("kind", "way"), WAYS, ids=str)
def test_packed_is_padded_bit_for_bit(kind, way):
    vocab = 1025 if kind == "probabilistic" else 1040  # aligned or not
    batch = case(3, 2, vocab, torch.bfloat16, greedy=0.4, seed=14).to(DEVICE)
    asked = {"logprobs": "processed" if kind == "block" else "raw" if kind == "strict" else None}
    packed, usual = both(kind, batch, [2, 0, 1], torch.tensor([5, 2, 0], device=DEVICE), 7, asked, **way)
    assert_same(packed, usual)
    assert 0 < usual.num_accepted.sum() < 3 + kind.startswith("synthetic")  # whose schedule may accept all


@pytest.mark.parametrize(("kind", "way"), WAYS if ON_GPU else [("given logsumexp", FEW)], ids=str)
def test_limits_are_by_slot(kind, way):
    batch = case(2, 1, 1030, torch.bfloat16, greedy=0, seed=12).to(DEVICE)
    limits = {"top_p": torch.tensor([0.9, 0.4], device=DEVICE), "top_k": torch.tensor([3, 50], device=DEVICE)}
    if kind.endswith("given logsumexp"):
        # Only the cutoff itself is kept, which the draft is not: so it is rejected, by the cutoff alone.
        draft_token_ids = batch.target_logits[:, :1].argmax(2)
        limits["draft_cutoff"] = (draft_token_ids + 1) % 1030
        draft_logits = batch.draft_logits.scatter(2, limits["draft_cutoff"][..., None], 20.0)
        batch = replace(batch, draft_token_ids=draft_token_ids, draft_logits=draft_logits)
    packed, usual = both(kind, batch, [1, 1], torch.tensor([2, 1], device=DEVICE), 4, limits, **way)
    assert_same(packed, usual)


def test_listed_residuals_are_of_a_requests_own_rows_and_slot():
    batch = in_question(8, 2, 1040, torch.bfloat16).to(DEVICE)
    slots = torch.tensor([1, 4, 0, 6, 3, 8, 5, 2], device=DEVICE)
    packed, usual = both("block", batch, [2, 0, 2, 1, 2, 2, 2, 2], slots, 9, {}, **FEW)
    assert_same(packed, usual)


def test_rows_without_drafts_may_be_packed_too():
    batch = case(3, 0, 40, torch.float32, greedy=0, seed=12).to(DEVICE)
    packed, usual = both("strict", batch, [0, 0, 0], torch.tensor([0, 3, 1], device=DEVICE, dtype=torch.int32), 4, {})
    assert_same(packed, usual)


def eight_rows(truncated: bool) -> tuple[dict, dict]:
    """Tensors and numbers of a packed call of eight rows and five slots."""
    batch = case(8, 3, 40, torch.bfloat16, greedy=0, seed=4).to(DEVICE)
    tensors = {
        "target_logits": batch.target_logits[:, 0].contiguous(),
        "draft_token_ids": batch.draft_token_ids[:, 0].clamp(min=0).contiguous(),
        "draft_logits": batch.draft_logits[:5].contiguous(),
    }
    numbers = {"temperature": torch.linspace(0.5, 1.5, 5, device=DEVICE), "seeds": batch.seeds[:5].contiguous()}
    if truncated:
        numbers["top_p"] = torch.full((5,), 0.9, device=DEVICE)
    return tensors, numbers


@needs_interpreter
@pytest.mark.parametrize(
    ("kind", "truncated", "way"),
    [("probabilistic", True, LARGE), ("strict", False, MANY), ("block", False, LARGE)],
)
def test_places_that_cannot_be_are_never_read(kind, truncated, way):
    tensors, numbers = eight_rows(truncated)
    tensors["draft_token_ids"] = tensors["draft_token_ids"][:7].clone()  # the last row judges none
    for starts, slots in zip(HOSTILE_STARTS, HOSTILE_SLOTS):
        where = torch.tensor(starts), 3, torch.tensor(slots), torch.arange(8)
        with like_a_device(), reads_and_writes_inside() as launched:
            output = call(kind, tensors, numbers, where, **way)
        assert launched
        for request in range(7):
            if not is_sound(starts, slots, request):
                assert [field[request].tolist() for field in output[:4]] == [[0, -1, -1, -1], 0, 0, True]
        assert output.invalid.tolist() == [not is_sound(starts, slots, request) for request in range(7)]


@pytest.mark.parametrize(
    ("kind", "truncated", "logprobs", "way"),
    [("strict", False, "raw", {}), ("probabilistic", True, "processed", {}), ("block", False, "raw", LARGE)],
)
def test_there_may_be_no_rows_and_no_requests(kind, truncated, logprobs, way):
    tensors, numbers = eight_rows(truncated)
    nothing = {name: tensors[name][:0].clone() for name in ("target_logits", "draft_token_ids")}
    for requests in (0, 2):
        starts = torch.zeros(requests + 1, dtype=torch.int32, device=DEVICE)
        with nullcontext() if ON_GPU else reads_and_writes_inside():
            where = starts, 3, None, nothing["draft_token_ids"].clone()
            output = call(kind, {**tensors, **nothing}, {**numbers, "logprobs": logprobs}, where, **way)
        assert output.token_ids.tolist() == [[0, -1, -1, -1]] * requests
        assert output.logprobs.nan_to_num(nan=9).tolist() == [[0, 9, 9, 9]] * requests
        assert output.invalid.all()


@needs_interpreter
@pytest.mark.parametrize(
    ("kind", "truncated", "logprobs", "way"),
    [
        ("strict", False, "processed", {}),
        ("probabilistic", True, "raw", {}),
        ("block", False, "processed", LARGE),
        ("synthetic", False, "raw", LARGE),
        ("deterministic", True, "processed", MANY),
    ],
)
@pytest.mark.parametrize(
    ("starts", "slots"),
    [([HIGH, LOW, 5, 5, 20], [0, 1, 2, 3]), ([0, 1, 4], [5, -1])],
    ids=["rows", "slots"],
)
def test_no_logit_is_read_of_requests_that_have_none(kind, truncated, logprobs, way, starts, slots):
    """Not even of rows that others may have; and the log-probability of the token 0 that they emit is 0."""
    tensors, numbers = eight_rows(truncated)
    places_of, where = addresses.places_of, (torch.tensor(starts), 3, torch.tensor(slots))

    def places_without_logits(values: dict[str, Any]) -> Any:
        return places_of({name: value for name, value in values.items() if name not in ("target", "draft")})

    if kind == "deterministic":
        del tensors["draft_logits"]
    without_logits = mock.patch.object(addresses, "places_of", places_without_logits)
    with like_a_device(), without_logits, reads_and_writes_inside() as launched:
        output = call(kind, tensors, {**numbers, "logprobs": logprobs}, where, **way)
    assert "target" in launched[0]
    assert output.token_ids.tolist() == [[0, -1, -1, -1]] * len(slots)
    assert output.logprobs.nan_to_num(nan=9).tolist() == [[0, 9, 9, 9]] * len(slots)
    assert output.invalid.all()
