"""Every bad argument is refused by an error that names it."""

import re
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specdecode import AcceptanceSchedule, RejectionSampler, sample
from tests.support.calls import (
    INF,
    INT64,
    NAN,
    SAMPLING_NAMES,
    assert_well_formed,
    each_method,
    make,
    make_call,
)

BATCH, DRAFTS, VOCAB = 2, 3, 5


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def nested(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls them a prototype
        return torch.nested.nested_tensor(list(tensor))


FLOAT_ROWS = {  # for logits of any shape
    "None": lambda good: None,
    "list": lambda good: good.tolist(),
    "numpy": lambda good: good.cpu().numpy(),
    "str": lambda good: "logits",
    "int64": lambda good: good.long(),
    "bool": lambda good: good.bool(),
    "complex64": lambda good: good.to(torch.complex64),
    "float8": lambda good: good.to(torch.float8_e4m3fn),
    "sparse": lambda good: good.to_sparse(),
    "nested": nested,
    "meta": meta,
    "a dimension less": lambda good: good[0],
    "a dimension more": lambda good: good[None],
    "no dimension": lambda good: good.sum(),
    "no vocabulary": lambda good: good[..., :0],
}
BAD = {
    "target_logits": FLOAT_ROWS | {"no rows": lambda good: good[:, :0]},
    "draft_logits": {name: bad for name, bad in FLOAT_ROWS.items() if name != "None"}
    | {
        "another batch": lambda good: good[:1],
        "a row more": lambda good: good.repeat(1, 2, 1)[:, : DRAFTS + 1],
        "another vocabulary": lambda good: good[..., :-1],
    },
    "draft_token_ids": {
        "None": lambda good: None,
        "list": lambda good: good.tolist(),
        "numpy": lambda good: good.cpu().numpy(),
        "int": lambda good: 3,
        "float32": lambda good: good.float(),
        "int16": lambda good: good.to(torch.int16),
        "uint8": lambda good: good.to(torch.uint8),
        "bool": lambda good: good.bool(),
        "sparse": lambda good: good.to_sparse(),
        "meta": meta,
        "a dimension less": lambda good: good[0],
        "a dimension more": lambda good: good[None],
        "another batch": lambda good: good[:1],
        "a draft more": lambda good: good.repeat(1, 2)[:, : DRAFTS + 1],
        "a draft less": lambda good: good[:, 1:],
        "VALUE vocab": lambda good: good + VOCAB - 1,
        "VALUE -2": lambda good: good.clone().fill_(-2),
        "VALUE int64 max": lambda good: good.clone().fill_(INT64.max),
        "VALUE int32 min": lambda good: good.int().fill_(-(2**31)),
        "VALUE late": lambda good: torch.tensor([[0, 1, 2], [0, 1, VOCAB]]).to(good.device),
    },
    "draft_logsumexp": {
        "list": lambda good: good.tolist(),
        "float": lambda good: 1.0,
        "float64": lambda good: good.double(),
        "float16": lambda good: good.half(),
        "int64": lambda good: good.long(),
        "meta": meta,
        "a dimension less": lambda good: good[0],
        "another batch": lambda good: good[:1],
        "a draft more": lambda good: good.repeat(1, 2)[:, : DRAFTS + 1],
    },
    "temperature": {
        "None": lambda good: None,
        "str": lambda good: "1.0",
        "bool": lambda good: True,
        "list": lambda good: [1.0, 1.0],
        "numpy": lambda good: good.cpu().numpy(),
        "complex": lambda good: 1 + 0j,
        "negative": lambda good: -1e-30,
        "NaN": lambda good: NAN,
        "inf": lambda good: INF,
        "beyond float": lambda good: 10**400,
        "below float": lambda good: -(10**400),
        "too small for a float": lambda good: Fraction(1, 10**400),
        "int64 tensor": lambda good: good.long(),
        "bool tensor": lambda good: good.bool(),
        "meta": meta,
        "no dimension": lambda good: good[0],
        "a dimension more": lambda good: good[:, None],
        "another batch": lambda good: good.repeat(2),
        "VALUE negative": lambda good: -good,
        "VALUE NaN": lambda good: good * NAN,
        "VALUE inf": lambda good: good * INF,
    },
    "seeds": {
        "str": lambda good: "0",
        "float": lambda good: 0.0,
        "bool": lambda good: False,
        "list": lambda good: [0, 1],
        "65 bits": lambda good: 2**63,
        "65 bits below": lambda good: -(2**63) - 1,
        "longer than Python prints": lambda good: 10**5000,
        "int32": lambda good: good.int(),
        "float64": lambda good: good.double(),
        "meta": meta,
        "no dimension": lambda good: good[0],
        "a dimension more": lambda good: good[:, None],
        "another batch": lambda good: good.repeat(2),
        "generator": lambda good: torch.Generator(),
    },
    "positions": {
        "str": lambda good: "0",
        "int": lambda good: 0,
        "list": lambda good: [0, 1],
        "int32": lambda good: good.int(),
        "float32": lambda good: good.float(),
        "meta": meta,
        "no dimension": lambda good: good[0],
        "a dimension more": lambda good: good[:, None],
        "another batch": lambda good: good[:1],
        "VALUE -1": lambda good: good.clone().fill_(-1),
        "VALUE negative": lambda good: good - 5,
        "VALUE int64 min": lambda good: good.clone().fill_(INT64.min),
    },
}
BAD_CASES = [(name, case) for name, cases in BAD.items() for case in cases]
BAD_ROW_CASES = [
    ("logits" if name == "target_logits" else name, case)
    for name, case in BAD_CASES
    if name in ("target_logits", *SAMPLING_NAMES) and case != "no rows"
]
case_ids = {"ids": lambda value: value.replace(" ", "_")}


def good_call(place) -> dict:
    call = make_call(place, BATCH, DRAFTS, VOCAB)
    call["draft_token_ids"] = torch.ones(BATCH, DRAFTS, dtype=torch.int64, device=place[1])
    call["draft_logsumexp"] = torch.ones(BATCH, DRAFTS, device=place[1])
    call["temperature"] = torch.ones(BATCH, device=place[1])
    call["positions"] = torch.arange(BATCH, device=place[1])
    return call


def refused(name: str, use) -> None:
    """Assert that the use raises a TypeError or ValueError whose message starts with the argument's name."""
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: ") as caught:
        use()
    assert type(caught.value) in (TypeError, ValueError)


@each_method
@pytest.mark.parametrize(("name", "case"), BAD_CASES, **case_ids)
def test_bad_arguments_of_a_call_are_named(place, method, name, case):
    if "VALUE" in case and place[1] != "cpu":
        pytest.skip("looking at values would wait for the device")
    call = good_call(place)
    sampler = make(method, place)
    assert_well_formed(sampler(**call), call)
    call[name] = BAD[name][case](call[name])
    refused(name, lambda: sampler(**call))


@pytest.mark.parametrize(("name", "case"), BAD_ROW_CASES, **case_ids)
@pytest.mark.parametrize("use", ["draft", "sample"])
def test_bad_arguments_of_draft_and_sample_are_named(place, use, name, case):
    if "VALUE" in case and place[1] != "cpu":
        pytest.skip("looking at values would wait for the device")
    call = good_call(place)
    call = {"logits": call["target_logits"][:, 0]} | {argument: call[argument] for argument in SAMPLING_NAMES}
    function = sample if use == "sample" else make("probabilistic", place).draft
    function(**call)
    call[name] = BAD["target_logits" if name == "logits" else name][case](call[name])
    refused(name, lambda: function(**call))


@pytest.mark.parametrize("name", sorted(set(BAD) - {"target_logits"}))
def test_arguments_on_another_device_are_named(place, name):
    call = good_call(place)
    other = "cpu" if place[1] == "cuda" else "cuda"
    with FakeTensorMode():  # which has tensors on devices that are not there
        elsewhere = torch.empty(call[name].shape, dtype=call[name].dtype, device=other)
    message = rf"^{name}: expected on {place[1]}.*, where the logits are, got {other}"
    with pytest.raises(ValueError, match=message):
        make("probabilistic", place)(**call | {name: elsewhere})


def test_a_wrong_number_of_target_rows_is_blamed_on_the_target(place):
    call = good_call(place)
    message = "expected 4 rows per request, one more than draft_token_ids has drafts (3), got"
    for rows in (1, 2, 3):  # 3: the row of the bonus token is missing
        short = call | {"target_logits": call["target_logits"][:, :rows]}
        for without in ((), ("draft_logsumexp",), ("draft_logits", "draft_logsumexp")):
            with pytest.raises(ValueError, match=f"^target_logits: {re.escape(message)} {rows}$"):
                make("probabilistic", place)(**short | dict.fromkeys(without))
    # Where draft_logits has as many rows as the target's imply, draft_token_ids is wrong.
    for ids in (call["draft_token_ids"][:, 1:], call["draft_token_ids"].repeat(1, 2)):
        refused("draft_token_ids", lambda ids=ids: make("probabilistic", place)(**call | {"draft_token_ids": ids}))


def test_draft_logsumexp_without_its_logits_is_named(place):
    refused("draft_logsumexp", lambda: make("probabilistic", place)(**good_call(place) | {"draft_logits": None}))


def test_drafts_beyond_the_schedule_are_named(place):
    call = good_call(place)
    refused("draft_token_ids", lambda: make("synthetic", place, rates=[0.5] * (DRAFTS - 1))(**call))
    assert_well_formed(make("synthetic", place, rates=[0.5] * DRAFTS)(**call), call)


OFFSETS = {
    "str": "0",
    "float": 0.0,
    "bool": True,
    "None": None,
    "tensor": torch.tensor(0),
    "negative": -1,
    "many": 4096,
}


@each_method
@pytest.mark.parametrize("bad", OFFSETS.values(), ids=OFFSETS)
def test_bad_offsets_of_a_draft_are_named(place, method, bad):
    logits, sampler = torch.zeros(2, 5, device=place[1]), make(method, place)
    sampler.draft(logits, offset=4095)
    refused("offset", lambda: sampler.draft(logits, offset=bad))


SCHEDULE = AcceptanceSchedule.from_rates([0.5])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("method", {"method": "greedy"}),
        ("method", {"method": "Strict"}),
        ("method", {"method": ""}),
        ("method", {"method": None}),
        ("method", {"method": 1}),
        ("method", {"method": ["strict"]}),
        ("method", {"method": np.array(["strict", "strict"])}),
        ("method", {"method": torch.zeros(2)}),
        ("backend", {"method": "strict", "backend": "cuda"}),
        ("backend", {"method": "strict", "backend": None}),
        ("backend", {"method": "strict", "backend": ["eager"]}),
        ("backend", {"method": "strict", "backend": np.array(["eager", "eager"])}),
        ("schedule", {"method": "synthetic"}),
        ("schedule", {"method": "synthetic", "schedule": 0.5}),
        ("schedule", {"method": "synthetic", "schedule": [0.5]}),
        ("schedule", {"method": "synthetic", "schedule": AcceptanceSchedule}),
        ("schedule", {"method": "strict", "schedule": SCHEDULE}),
        ("schedule", {"method": "probabilistic", "schedule": SCHEDULE}),
    ],
    ids=repr,
)
def test_bad_arguments_of_the_constructor_are_named(name, arguments):
    refused(name, lambda: RejectionSampler(**arguments))


def test_errors_say_what_was_given_and_what_should_be(place):
    call = good_call(place)
    for name, bad, words in [
        ("target_logits", call["target_logits"].long(), ["int64", "float32"]),
        (
            "draft_logits",
            call["draft_logits"][:, :, 1:],
            [str([BATCH, DRAFTS, VOCAB - 1]), str([BATCH, DRAFTS, VOCAB])],
        ),
        ("draft_token_ids", call["draft_token_ids"].float(), ["float32", "int64"]),
        ("seeds", 0.5, ["float", "int"]),
        ("temperature", -2.0, ["-2.0", ">= 0"]),
    ]:
        with pytest.raises((TypeError, ValueError)) as caught:
            make("probabilistic", place)(**call | {name: bad})
        assert all(word in str(caught.value) for word in words), caught.value
