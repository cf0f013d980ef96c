"""All variants of a call give the same bits: plans, grids, numbers of tiles; and more drafts than one iteration handles."""

from dataclasses import replace

import pytest
import torch

from reference import oracle
from specdecode import RejectionSampler, kernels
from specdecode.kernels import call, plan
from specdecode.kernels.request import LARGEST_TEMPERATURE
from specdecode.kernels.rows import SMALLEST
from specdecode.noise import SELECT
from tests.conftest import ON_GPU
from tests.support.batches import row_batch
from tests.support.differential import FLOAT32_BAND, assert_same, assert_same_tokens, case
from tests.support.kernels import (
    DEVICE,
    FEW,
    FEW_KINDS,
    KINDS,
    LARGE,
    MANY,
    expected,
    planned_with,
    small,
    verify,
)


@pytest.mark.parametrize("kind", KINDS if ON_GPU else [*FEW_KINDS, "probabilistic"])
@pytest.mark.parametrize("vocab", small(1025, 2048, 50257))
def test_the_ways_of_few_and_of_many_requests_give_the_same_bits(kind, vocab):
    batch = case(200 if ON_GPU else 3, 4 if ON_GPU else 2, vocab, torch.bfloat16, greedy=0.1).to(DEVICE)
    few = verify(kind, batch, **FEW)
    assert_same(verify(kind, batch, **LARGE), few)
    if ON_GPU or kind == "probabilistic":
        assert_same(verify(kind, batch, **MANY), few)


@pytest.mark.parametrize(("kind", "drafts", "stop"), [("deterministic", 35, 33), ("block", 34, 34), ("strict", 28, 28)])
def test_drafts_beyond_those_that_are_handled_at_once_are_verified_too(kind, drafts, stop):
    """32 ids are loaded at once, row bits hold 28 rows, and block verification handles up to 32 rows at once."""
    batch = case(1, drafts, 40, torch.float32, greedy=1, seed=3)
    batch.draft_token_ids[:] = batch.target_logits[:, :drafts].argmax(2)
    batch.draft_token_ids[:, stop:] += 1
    output = verify(kind, batch.to(DEVICE))
    assert (output.num_draft_tokens.item(), output.num_accepted.item()) == (drafts, stop)
    assert_same_tokens(output.token_ids, expected(kind, batch), band=0)


def test_greedy_is_the_references():
    batch = case(40 if ON_GPU else 3, 2, 2060, torch.bfloat16).to(DEVICE)
    batch.target_logits[:, :, [5, 1030, 2059]] = 20  # ties in several blocks, and in the last one
    batch.target_logits[:, 1, 5] = 0
    outcomes = [oracle.verify("strict", *batch.rows(index), temperature=0) for index in range(len(batch.seeds))]
    for method in ("strict", "probabilistic"):
        sampler = RejectionSampler(method, backend="triton")
        output = sampler(batch.target_logits, batch.draft_token_ids, batch.draft_logits, temperature=0)
        assert_same_tokens(output.token_ids, outcomes, band=0)


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("vocab", small(9221, 9232, 151_936))
def test_how_much_a_program_reads_does_not_matter(kind, vocab):
    batch = case(70 if ON_GPU else 2, 1, vocab, torch.bfloat16, greedy=0, seed=4).to(DEVICE)
    for large in (False, True) if ON_GPU else (kind != "strict",):
        usual = verify(kind, batch, large=large)
        for tiles in (1, 2, 3, 8) if ON_GPU else (2,):  # tiles of four blocks; also more blocks than the row has
            with planned_with(plan, reading_tiles=lambda *sizes, tiles=tiles: tiles):
                assert_same(verify(kind, batch, large=large), usual)


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_grid_of_one_dimension_does_as_well(kind, monkeypatch):
    batch = case(70 if ON_GPU else 2, 2, 5000, torch.bfloat16, seed=5).to(DEVICE)
    row = (batch.target_logits[:, 0], batch.temperature, batch.seeds)
    drawn = RejectionSampler("probabilistic", backend="triton").draft(*row)
    ways = (False, True) if ON_GPU else (kind == "strict",)
    usual = [verify(kind, batch, large=large) for large in ways]
    monkeypatch.setattr(call, "MOST_PROGRAMS", 1)  # as if there were more requests than a second dimension takes
    for large, output in zip(ways, usual):
        assert_same(verify(kind, batch, large=large), output)
    assert_same(RejectionSampler("probabilistic", backend="triton").draft(*row), drawn)


@pytest.mark.parametrize("kind", ["strict", "probabilistic", "block"])
@pytest.mark.parametrize("large", [False, True])
def test_a_row_without_a_finite_logit_counts_only_if_a_request_came_that_far(kind, large):
    """The empty row is at offset 1; first rejected rows are before it, at it, and after it."""
    batch = case(3, 2, 40, torch.float32, greedy=0, seed=2)
    batch.target_logits[:, 1] = torch.nan
    batch.draft_token_ids[:] = batch.target_logits[:, :2].nan_to_num().argmax(2)
    batch.draft_token_ids[:, 1] = 0  # the token of an empty row
    batch.draft_logits[:, 1, 1:] = -torch.inf
    batch.draft_token_ids[0, 0], batch.draft_token_ids[1, 1] = -1, -1
    batch = replace(batch, temperature=torch.full((3,), 0.02), draft_logits=batch.draft_logits)
    outcomes = expected(kind, batch)
    output = verify(kind, batch.to(DEVICE), large=large)
    assert_same_tokens(output.token_ids, outcomes, FLOAT32_BAND)
    assert output.num_accepted.tolist() == [0, 1, 2]
    assert output.invalid.tolist() == [False, True, True] == [outcome.invalid for outcome in outcomes]


@pytest.mark.parametrize("form", ["number", "tensor"])
@pytest.mark.parametrize(
    ("extreme", "limit", "logit"),
    [
        (1e300, LARGEST_TEMPERATURE.value, 3e38),
        (2.0**127, LARGEST_TEMPERATURE.value, 3e38),
        (1e-300, SMALLEST.value, 15),
    ],
)
def test_temperatures_that_float32_cannot_hold_become_the_nearest_that_it_can(extreme, limit, logit, form):
    logits = torch.zeros(8, 40, device=DEVICE)
    logits[:, 7] = logits[:, 30] = logit  # greedy would always take the first

    def run(temperature):
        if form == "tensor":
            temperature = torch.full((8,), temperature, dtype=torch.float64, device=DEVICE)
        return kernels.sample_rows(row_batch(logits, temperature, 0, None), SELECT)[:2]

    token_ids, logsumexp = run(extreme)
    wanted = (logits.double() / limit).logsumexp(1).float()  # infinite for the smallest
    torch.testing.assert_close(logsumexp, wanted, rtol=1e-6, atol=0)
    assert len(set(token_ids.tolist())) > 1
    for got, want in zip((token_ids, logsumexp), run(limit)):
        assert torch.equal(got, want)


def draw(logits, temperature, seeds, positions=None):
    return RejectionSampler("strict", backend="triton").draft(logits, temperature, seeds, positions).token_ids


@pytest.mark.parametrize("first", [5, 2**63 - 2])
def test_one_seed_means_the_seeds_from_there_on(first):
    logits = torch.zeros(4, 50, device=DEVICE)
    seeds = torch.arange(4, device=DEVICE) + first
    one = draw(logits, 1.0, first)
    assert torch.equal(one, draw(logits, 1.0, seeds, torch.zeros_like(seeds)))
    assert not torch.equal(one, draw(logits, 1.0, seeds, torch.ones_like(seeds)))
