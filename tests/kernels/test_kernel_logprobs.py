"""Kernels return the log-probabilities of the tokens that they emit, in every way that calls compute."""

from typing import Any

import pytest
import torch

from specdecode import kernels
from tests.conftest import ON_GPU
from tests.conftest import combine as pairs
from tests.support.batches import verification_batch
from tests.support.differential import Case, case
from tests.support.kernels import DEVICE, DTYPES, KINDS, assert_same, checked, memory_of, small
from tests.support.logprobs import assert_invalid_have_that_of_token_0, assert_right, hostile, with_invalid_requests
from tests.support.truncated import TRUNCATIONS, on

FEW_KINDS = ["strict", "probabilistic", "block", "synthetic strict"]
SIZES = (60, 3, 5003) if ON_GPU else (5, 1, 1040)


def verify(kind: str, batch: Case, of: str | None, options: Any, large: bool) -> Any:
    method, plain, schedule = checked(kind, batch.to(DEVICE))
    numbers = plain.temperature, plain.seeds, plain.positions
    tensors = plain.target_logits, plain.draft_token_ids, plain.draft_logits, plain.draft_logsumexp, *numbers
    arguments = verification_batch(*tensors, **on(DEVICE, options), logprobs=of)
    return kernels.verify(method, arguments, schedule, large=large)


@pytest.mark.parametrize(
    ("kind", "of", "large", "dtype"),
    pairs(
        KINDS if ON_GPU else FEW_KINDS,
        ["processed", "raw"],
        [False, True],
        DTYPES if ON_GPU else [torch.bfloat16, torch.float32],
    ),
)
def test_logprobs_of_the_emitted_tokens_are_the_references(kind, of, large, dtype):
    requests, drafts, vocab = SIZES
    batch = hostile(case(requests, drafts, vocab, dtype, seed=5))
    output = verify(kind, batch, of, {}, large)
    assert_right(output, batch, {}, of, "triton")
    if ON_GPU or (kind, of) == ("probabilistic", "raw"):  # what is asked for changes nothing else
        assert_same(output._replace(logprobs=None), verify(kind, batch, None, {}, large))


@pytest.mark.parametrize(
    ("kind", "of", "large", "options"),
    small(
        ("synthetic strict", "processed", True, {"top_k": 3}),  # which accepts drafts that are not kept
        *pairs(
            ["strict", "probabilistic", "block"], ["processed", "raw"], [False, True], list(TRUNCATIONS.values())[:5]
        ),
    ),
)
def test_processed_logprobs_are_of_what_is_kept_and_raw_ones_of_all(kind, of, large, options):
    requests, drafts, _ = SIZES
    # Of 5,003 tokens top-p's last lies within the rounding band in four rows of ten, of 1,040 in one of eleven.
    batch = case(requests if ON_GPU else 2, drafts, 1040, torch.bfloat16, greedy=0, seed=5)
    batch.temperature[0] = 1  # at which only truncation tells processed sums from raw ones
    for each in (of,) if ON_GPU else ("processed", "raw"):
        assert_right(verify(kind, batch, each, options, large), batch, options, each, "triton")


@pytest.mark.parametrize("large", [False, True])
def test_raw_logprobs_change_no_token(large):
    batch = case(12, 2, 3100, torch.bfloat16, greedy=0, seed=6)
    raw, without = (verify("probabilistic", batch, of, {}, large) for of in ("raw", None))
    assert_same(raw._replace(logprobs=None), without)


@pytest.mark.parametrize(("kind", "large"), small(("probabilistic", False), ("strict", True), ("block", False)))
def test_raw_logprobs_take_nothing_that_was_not_stored(kind, large):
    batch = case(3, 1, 1040, torch.bfloat16, greedy=0, seed=5)
    batch.temperature[:2] = torch.tensor([1.0, 0.0])
    with memory_of(1):
        for options in ({}, {"top_k": 3}):
            assert_right(verify(kind, batch, "raw", options, large), batch, options, "raw", "triton")


@pytest.mark.parametrize("of", ["processed", "raw"])
def test_logprobs_of_rows_far_from_0_are_the_references(of):
    """Exponentials relative to anything but the largest logit would overflow, or all be 0."""
    batch = case(3, 1, 1040, torch.float32, greedy=0, seed=5)
    batch.target_logits[..., 1024:] += 150
    batch.target_logits[0] += 500
    batch.target_logits[1] -= 500
    assert_right(verify("strict", batch, of, {}, False), batch, {}, of, "triton")


@pytest.mark.parametrize(
    ("method", "of", "large", "options", "with_logits"),
    pairs(["strict", "probabilistic", "block"], ["processed", "raw"], [False, True], [{}, {"top_k": 3}], [True, False]),
)
def test_tokens_of_invalid_requests_have_a_log_probability_of_0(method, of, large, options, with_logits):
    call, first_two = with_invalid_requests(DEVICE)
    target, drafts, draft_logits = call.values()
    arguments = target, drafts, draft_logits if with_logits else None, None, 0.7, 0, None
    output = kernels.verify(method, verification_batch(*arguments, **options, logprobs=of), None, large=large)
    assert_invalid_have_that_of_token_0(output, first_two)
    assert not output.invalid[3]
