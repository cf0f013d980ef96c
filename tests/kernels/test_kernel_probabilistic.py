"""Acceptance by ratio, and the residual: precise for small residual masses; no impossible token is emitted."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from specdecode import AcceptanceSchedule, RejectionSampler, kernels
from specdecode.kernels.arguments import Pointer
from specdecode.kernels.probabilistic import log_ratio
from specdecode.kernels.request import is_trusted
from specdecode.kernels.residual import one_minus_exp2
from tests.conftest import ON_GPU, combine
from tests.support import distributions
from tests.support.batches import verification_batch
from tests.support.differential import FLOAT32_BAND, assert_same_tokens, case
from tests.support.kernels import (
    DEVICE,
    NEVER,
    checked,
    expected,
    impossible_drafts,
    needs_gpu,
    run_kernel,
    verify,
)


class Numbers(NamedTuple):
    """Numbers, and the results of functions."""

    x_ptr: Pointer  # [64] float32
    trusted_ptr: Pointer  # [64] int32
    made_ptr: Pointer  # [2, 64] float32: 1 - 2^-|x|, and log((3 + x) / 3)


@triton.jit
def numbers_kernel(numbers):
    places = tl.arange(0, 64)
    x = tl.load(numbers.x_ptr + places)
    tl.store(numbers.trusted_ptr + places, is_trusted(x).to(tl.int32))
    tl.store(numbers.made_ptr + places, one_minus_exp2(-tl.abs(x)))
    tl.store(numbers.made_ptr + 64 + places, log_ratio(3 + x, x * 0 + 3))


def made_of(values: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = torch.tensor(values + [0.0] * (64 - len(values)), device=DEVICE)
    numbers = Numbers(x, torch.full((64,), -1, dtype=torch.int32, device=DEVICE), torch.zeros(2, 64, device=DEVICE))
    run_kernel(numbers_kernel, 1, numbers)
    count = len(values)
    made = numbers.made_ptr.cpu().double().numpy()[:, :count]
    return numbers.trusted_ptr.cpu().numpy()[:count], made, x.cpu().double().numpy()[:count]


def test_small_differences_keep_their_relative_precision():
    _, (shortfalls, log_ratios), x = made_of([2.0**-k for k in range(1, 22)] + [-(2.0**-k) for k in range(1, 22)])
    np.testing.assert_allclose(shortfalls, -np.expm1(-abs(x) * np.log(2)), rtol=2**-17)
    np.testing.assert_allclose(log_ratios, np.log1p(x / 3), rtol=2**-17)


def test_a_logsumexp_is_trusted_only_if_float32_holds_it_to_a_hundred_thousandth():
    values = [0.0, 255.0, -255.0, 256.0, -256.0, 257.0, -257.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan]
    trusted, _, _ = made_of(values)
    assert trusted.tolist() == [1] * 5 + [0] * 7


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_a_logsumexp_that_says_too_little_is_not_used(method, large):
    """Rows are shifted by 4,096: their logsumexp is too imprecise in float32, so the rows are read."""
    batch = case(20 if ON_GPU else 3, 2, 1040, torch.float32, greedy=0, seed=4)
    batch = replace(batch, draft_logits=(batch.draft_logits * 4096).round() / 4096)
    shifts = torch.tensor([4096.0, -4096.0, 0.0]).repeat(7)[: len(batch.seeds), None, None]
    _, arguments, _ = checked(method, replace(batch, draft_logits=batch.draft_logits + shifts).to(DEVICE))
    logsumexp = (arguments.draft_logits.double() / arguments.temperature[:, None, None]).logsumexp(2)
    wrong = torch.where(shifts[..., 0].to(DEVICE) == 0, logsumexp, shifts[..., 0].to(DEVICE) * 1000).float()
    output = kernels.verify(method, arguments._replace(draft_logsumexp=wrong), large=large)
    assert_same_tokens(output.token_ids, expected(method, batch), FLOAT32_BAND)


@pytest.mark.parametrize(("large", "given"), [(False, False), (True, True), (True, False)])
def test_a_token_that_the_draft_could_not_say_is_rejected(large, given):
    """For any target probability: the draft cannot have been drawn from these logits."""
    batch = case(3, 1, 40, torch.float32, greedy=0, seed=4).to(DEVICE)
    batch.draft_token_ids.clamp_(min=0)
    batch.draft_logits.scatter_(2, batch.draft_token_ids[..., None], -torch.inf)
    kind = "given logsumexp" if given else "probabilistic"
    output = verify(kind, batch, large=large)
    assert (output.num_accepted == 0).all()
    assert_same_tokens(output.token_ids, expected(kind, batch), FLOAT32_BAND)


@pytest.mark.parametrize("closeness", [0.0, 0.3])
@pytest.mark.parametrize("large", [False, True])
def test_a_rejected_deterministic_draft_is_not_emitted_again(large, closeness):
    """The draft has most of p; half of the requests accept it by chance."""
    requests = 40 if ON_GPU else 8
    target = torch.randn(requests, 2, 1100, generator=torch.Generator().manual_seed(1))
    target[:, 0, 50] = 9.0
    batch = replace(
        case(requests, 1, 1100, torch.float32, greedy=0),
        target_logits=target,
        draft_token_ids=torch.full((requests, 1), 50),
        temperature=torch.ones(requests),
    )
    if closeness > 0:  # and a draft distribution that is a point mass in effect
        draft = torch.full((requests, 1, 1100), -torch.inf)
        draft[..., 50] = 3.0
        batch = replace(batch, draft_logits=draft)
    kind = "probabilistic" if closeness > 0 else "deterministic"
    output = verify(kind, batch.to(DEVICE), large=large)
    assert 0 < output.num_accepted.sum() < requests
    assert (output.token_ids[output.num_accepted == 0, 0] != 50).all()
    assert_same_tokens(output.token_ids, expected(kind, batch), FLOAT32_BAND)


@pytest.mark.parametrize(("gap", "large"), [(85.0, False), (95.0, True), (101.0, False), (103.0, True)])
def test_no_impossible_token_is_drawn_where_what_is_left_is_tiny(gap, large):
    # max(0, p - q) has one token, e^-gap below the other: almost 0, or 0, in float32.
    requests = 6 if ON_GPU else 2
    target = torch.full((requests, 2, 2064), -torch.inf)
    target[..., 3], target[..., 1500] = 0, -gap
    draft = torch.full((requests, 1, 2064), -torch.inf)
    draft[..., 3] = 0
    ids = torch.full((requests, 1), 3)
    for draft_logits in (draft.to(DEVICE), None):
        method, schedule = ("synthetic", NEVER) if draft_logits is not None else ("probabilistic", None)
        batch = verification_batch(target.to(DEVICE), ids.to(DEVICE), draft_logits, None, 1.0, 0, None)
        output = kernels.verify(method, batch, schedule, large=large)
        assert set(output.token_ids.unique().tolist()) <= {3, 1500, -1}


@pytest.mark.parametrize("large", [False, True])
def test_where_nothing_is_left_of_p_it_is_drawn_from(large):
    """The draft is the only token of p, so no residual is left, but a schedule rejects the draft."""
    target, draft = torch.full((2, 2, 2064), -torch.inf, device=DEVICE), torch.zeros(2, 1, 2064, device=DEVICE)
    target[..., 1500], draft[..., 1500] = 0, torch.inf
    ids = torch.full((2, 1), 1500, device=DEVICE)
    batch = verification_batch(target, ids, draft, None, 1.0, 0, None)
    assert kernels.verify("synthetic", batch, NEVER, large=large).token_ids.tolist() == [[1500, -1]] * 2


def test_a_residual_is_precise_where_all_logits_are_shifted_and_cold():
    # No term of size 1 / T may be rounded and then cancelled between p and q.
    requests = 64 if ON_GPU else 8
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(requests, 1, 40, generator=generator).expand(requests, 2, 40).contiguous()
    draft = target[:, :1] + 0.001 * torch.randn(requests, 1, 40, generator=generator)
    batch = replace(
        case(requests, 1, 40, torch.float32, greedy=0),
        target_logits=target,
        draft_logits=(draft * 4096).round() / 4096 + 1024,  # which float32 holds exactly
        draft_token_ids=torch.zeros(requests, 1, dtype=torch.int64),
        temperature=torch.full((requests,), 0.05),
    )
    shifted = verify("block", batch.to(DEVICE)).token_ids
    unshifted = replace(batch, draft_logits=batch.draft_logits - 1024)
    assert torch.equal(shifted, verify("block", unshifted.to(DEVICE)).token_ids)
    assert_same_tokens(shifted, expected("block", batch), FLOAT32_BAND)


@pytest.mark.parametrize("large", [False, True])
def test_a_residual_that_is_nothing_falls_back_to_the_target(large):
    batch = impossible_drafts(4 if ON_GPU else 2, 4112, 0.0)
    batch = replace(batch, draft_logits=batch.target_logits[:, :1])  # then p = q
    kind, arguments, _ = checked("synthetic", batch.to(DEVICE))
    output = kernels.verify(kind, arguments, NEVER, large=large)
    assert torch.equal(output.token_ids, verify("strict", batch.to(DEVICE), large=large).token_ids)


@pytest.mark.parametrize(("large", "with_draft"), combine([False, True], [True, False]))
def test_a_schedule_decides_whatever_the_logits_say(large, with_draft):
    """A draft is accepted by schedule even if it is impossible."""
    batch = case(3, 3, 40, torch.float32, greedy=0.4, seed=5)
    batch.draft_token_ids[:] = batch.draft_token_ids.clamp(min=0)
    batch.draft_token_ids[2, 0] = -1
    batch.target_logits[1].scatter_(1, batch.draft_token_ids[1, :1, None].expand(1, 1), -torch.inf)
    kind, arguments, _ = checked("synthetic" if with_draft else "synthetic strict", batch.to(DEVICE))
    for rates, accepted in (([1.0, 0.0, 0.0], [1, 1, 0]), ([1.0, 1.0, 1.0], [3, 3, 0])):
        schedule = AcceptanceSchedule.from_rates(rates)
        output = kernels.verify(kind, arguments, schedule, large=large)
        assert output.num_accepted.tolist() == accepted


def recovered_near_agreement(closeness: float, given: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw only from max(0, p - q), where p and q nearly agree; return counts of tokens, and max(0, p - q).

    A schedule that accepts nothing draws every token from the residual.
    """
    vocab, requests = 12, distributions.REQUESTS
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(vocab, generator=generator)
    draft = target + closeness * torch.randn(vocab, generator=generator)
    sampler = RejectionSampler("synthetic", backend="triton", schedule=NEVER)
    rows = [logits.to("cuda").expand(requests, 1, vocab) for logits in (target, draft)]
    output = sampler(
        rows[0].expand(requests, 2, vocab),
        torch.zeros(requests, 1, dtype=torch.int64, device="cuda"),
        rows[1],
        seeds=torch.arange(requests, device="cuda"),
        draft_logsumexp=draft.double().logsumexp(0).float().to("cuda").expand(requests, 1) if given else None,
    )
    p, q = (distributions.softmax(logits.double().numpy()) for logits in (target, draft))
    return np.bincount(output.token_ids[:, 0].cpu(), minlength=vocab), (p - q).clip(min=0)


@needs_gpu
@pytest.mark.parametrize(("closeness", "given"), [(1e-1, False), (1e-1, True), (1e-2, True), (1e-3, False)])
def test_the_residual_keeps_its_distribution_where_target_and_draft_nearly_agree(closeness, given):
    counts, residual = recovered_near_agreement(closeness, given)
    distributions.assert_distribution(counts, residual / residual.sum())


@needs_gpu
@pytest.mark.parametrize("closeness", [1e-4, 1e-5, 1e-6])
def test_what_rounding_leaves_of_the_residual_cannot_be_seen_in_the_output(closeness):
    # Log-sums in float32 are off by about 1e-7. This changes the recovered token's distribution by 1e-7 / A, where A is
    # the mass of max(0, p - q), but happens with probability A. Counting 200,000 tokens has an error of 0.4 percent.
    counts, residual = recovered_near_agreement(closeness, given=False)
    moved = np.abs(counts / counts.sum() - residual / residual.sum()).sum() / 2
    assert residual.sum() * (moved - 0.004) < 3e-7
