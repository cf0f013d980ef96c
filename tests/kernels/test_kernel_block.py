"""Block verification decides without reading, and by sums that are shared between programs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from reference.oracle import accepts_block
from reference.philox import Domain, uniform
from reference.sampling import log_softmax, point_mass
from specdecode.kernels import block, plan, residual
from tests.conftest import ON_GPU
from tests.support.differential import FLOAT32_BAND, Case, assert_same, assert_same_tokens, case
from tests.support.kernels import (
    DEVICE,
    PlannedCall,
    expected,
    in_question,
    in_reverse,
    needs_interpreter,
    planned_with,
    small,
    verify,
)

REJECTED, OPEN, ACCEPTED = (value.value for value in (block.REJECTED, block.OPEN, block.ACCEPTED))


def terms_of(planned: PlannedCall, field: Any) -> np.ndarray:
    """Return a field of the workspace's terms for each number of drafts, [batch, num_draft_tokens + 1]."""
    sizes = planned.bundle("sizes")
    shape = sizes.batch, sizes.num_draft_tokens + 1, block.TERMS.value
    return planned.parts["terms"].view(shape)[..., field.value].cpu().double().numpy()


def reference_choices(batch: Case, request: int, with_logits: bool) -> list[tuple[Any, float, bool]]:
    """Return for each number of drafts the reference's decision, log c, and whether a residual of two rows decides."""
    target, ids, draft = batch.rows(request)
    numbers = batch.request(request)
    temperature, seed, position = numbers["temperature"], numbers["seed"], numbers["position"]
    ids = ids[: ids.index(-1)] if -1 in ids else ids

    def draft_logprobs(offset: int) -> np.ndarray:
        return log_softmax(draft[offset], temperature) if with_logits else point_mass(ids[offset], target.shape[1])

    choices, log_ratio = [], 0.0
    for count in range(len(ids) + 1):
        if count > 0:
            p = log_softmax(target[count - 1], temperature)
            q = draft_logprobs(count - 1)
            log_ratio = min(0.0, log_ratio) + p[ids[count - 1]] - q[ids[count - 1]]
        log_uniform = np.log(uniform(seed, position + count - 1, count - 1, Domain.ACCEPT)) if count > 0 else -np.inf
        row, is_open = None, False
        if count < len(ids):
            row = np.exp(log_softmax(target[count], temperature)), np.exp(draft_logprobs(count))
            is_open = with_logits and log_uniform <= log_ratio < 0 and max(row[0].max(), row[1].max()) < 1
        choices.append((accepts_block(log_uniform, log_ratio, row), min(0.0, log_ratio), is_open))
    return choices


@pytest.mark.parametrize("kind", ["block", "block deterministic", "block given logsumexp"])
def test_what_is_decided_without_reading_is_what_the_reference_decides(kind):
    requests = 300 if ON_GPU else 16
    batch = in_question(requests, 4, 50)
    batch.draft_token_ids[0, 3] = -1
    batch.target_logits[1::2, 2, 7] = torch.inf  # point masses, whose residual mass is known
    batch.draft_logits[1::2, 2, 7] += 7
    batch.draft_logits[2::4, 1, 5] = torch.inf
    batch.draft_token_ids[2::4, 1] = 5
    planned = PlannedCall(kind, batch.to(DEVICE), large=False)
    planned.run(*planned.launches[:3])
    decisions, log_ratios = terms_of(planned, block.DECISION), terms_of(planned, block.LOG_C)
    counts = dict.fromkeys((REJECTED, OPEN, ACCEPTED), 0)
    for request in range(requests):
        choices = reference_choices(batch, request, kind != "block deterministic")
        for count, (choice, log_ratio, is_open) in enumerate(choices):
            decision = decisions[request, count]
            counts[decision] += 1
            if np.isfinite(log_ratio):
                assert abs(log_ratios[request, count] - log_ratio) < FLOAT32_BAND
            if choice.margin > FLOAT32_BAND:
                assert (decision == OPEN) == is_open, (request, count)
                if decision != OPEN:
                    assert (decision == ACCEPTED) == choice.index, (request, count)
    assert min(counts[REJECTED], counts[ACCEPTED]) > 0
    assert (counts[OPEN] > 0) == (kind != "block deterministic")


def planned_call(batch: Case, *, large: bool, programs: int = 7) -> PlannedCall:
    """Return the launches of a step, with this number of programs for sums."""
    with planned_with(plan, SUM_PROGRAMS=programs):
        return PlannedCall("block", batch.to(DEVICE), large=large)


def output_of(batch: Case, **way: Any) -> Any:
    planned = planned_call(batch, **way)
    return planned.run(*planned.launches).output


@pytest.mark.parametrize("dtype", small(torch.bfloat16, torch.float32))
def test_however_many_programs_share_the_sums_they_give_the_same_bits(dtype):
    requests, vocab = (200, 50_000) if ON_GPU else (3, 5 * 1024 + 16)
    batch = in_question(requests, 3, vocab, dtype)
    # One program, several, one for each share; and the token drawn by a sum or by a search.
    ways = [(False, 1), (True, 2), (False, 1000), (True, 3)]
    ways += [(True, 1), (True, 7), (False, 2), (True, 100_000)] if ON_GPU else []
    first, *others = (output_of(batch, large=large, programs=programs) for large, programs in ways)
    for other in others:
        assert_same(other, first)
    assert_same_tokens(first.token_ids, expected("block", batch), FLOAT32_BAND)
    assert len(set(first.num_accepted.tolist())) > 1


@needs_interpreter
@pytest.mark.parametrize("large", [False, True])
def test_they_may_finish_in_any_order(large):
    batch = in_question(3, 3, 2 * 1024 + 16)
    usual = output_of(batch, large=large, programs=2)
    with in_reverse():
        assert_same(output_of(batch, large=large, programs=2), usual)


@pytest.mark.parametrize("large", [False, True])
def test_the_list_names_the_residuals_whose_sum_is_wanted_and_no_others(large):
    """These are the residuals of open decisions and, in a small batch, residuals that a token may be drawn from."""
    batch = in_question(100 if ON_GPU else 6, 4, 50)
    batch.target_logits[::2, :, 7] += 30
    planned = planned_call(batch, large=large)
    planned.run(*planned.launches[:3])
    decision, offsets = terms_of(planned, block.DECISION), np.arange(5)
    accepted = np.where(decision == ACCEPTED, offsets, 0).max(1)[:, None]
    wanted = (decision == OPEN) & (offsets > accepted)
    if not large:
        wanted |= (offsets == accepted) & (offsets < 4)
    queued = planned.parts["queue"].view(-1, residual.QUEUE_FIELDS.value)[: planned.parts["state"][0]].tolist()
    assert sorted(queued) == [[request, request, request, offset] for request, offset in np.argwhere(wanted).tolist()]
    assert len(queued) > 0


@pytest.mark.parametrize("large", [True, False])
def test_a_mass_is_found_in_a_block_whose_sum_a_nan_made_nonfinite(large):
    requests = 48 if ON_GPU else 6
    batch = case(requests, 3, 3072, torch.float32, greedy=0)
    target = batch.target_logits.clone()
    target[..., 1024:2048] += 6  # it holds most of p
    generator = torch.Generator().manual_seed(2)
    draft = target[:, :3] + torch.randn(requests, 3, 3072, generator=generator)
    ids = torch.multinomial(draft.flatten(0, 1).softmax(-1), 1, generator=generator).view(requests, 3)
    target[..., 1500] = -torch.nan  # negative: small as an integer
    batch = replace(
        batch, target_logits=target, draft_logits=draft, draft_token_ids=ids, temperature=torch.ones(requests)
    )
    output = output_of(batch, large=large)
    assert len(set(output.num_accepted.tolist())) > 1
    assert_same_tokens(output.token_ids, expected("block", batch), FLOAT32_BAND)


@pytest.mark.parametrize("large", [True, False])
def test_a_residual_that_rounds_to_nothing_falls_back_to_the_target(large):
    """P and q differ by a millionth at one token, and the uniforms of these positions are still closer to 1."""
    positions = [35_853, 769_517, 1_720_060, 2_957_302]
    requests, vocab, token = len(positions), 2064, 1100
    target = torch.zeros(requests, 2, vocab)
    target[:, 0, token] = -2e-6
    batch = Case(
        target,
        torch.full((requests, 1), token),
        torch.zeros(requests, 1, vocab),
        torch.ones(requests),
        torch.ones(requests, dtype=torch.int64),
        torch.tensor(positions),
    )
    planned = planned_call(batch, large=large)
    output = planned.run(*planned.launches).output
    assert (output.num_accepted == 0).all()
    if not large:
        assert (planned.parts["residual_sums"] == 0).all()
    assert torch.equal(output.token_ids[:, :1], verify("strict", batch.to(DEVICE)).token_ids[:, :1])
