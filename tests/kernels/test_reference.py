"""Tokens equal the reference's, and all variants of a call give the same bits."""

import itertools
from dataclasses import replace

import pytest
import torch

from reference import oracle
from specdecode import RejectionSampler, kernels
from specdecode.batch import VerificationBatch
from specdecode.kernels import call, plan
from specdecode.kernels.request import LARGEST_TEMPERATURE
from specdecode.kernels.rows import SMALLEST
from specdecode.noise import SELECT
from tests.conftest import ON_GPU, combine
from tests.support.batches import row_batch
from tests.support.differential import FLOAT32_BAND, assert_same_tokens, case
from tests.support.kernels import (
    DEVICE,
    DTYPES,
    FEW,
    FEW_KINDS,
    KINDS,
    LARGE,
    MANY,
    assert_same,
    expected,
    planned_with,
    small,
    verify,
)

if ON_GPU:
    CASES = list(itertools.product(KINDS, [1, 2, 7, 1000], [0, 1, 3, 7, 16], DTYPES, [FEW, LARGE]))
    CASES += itertools.product(
        KINDS, [32003, 128256, 151936, 152064], [3], [torch.bfloat16, torch.float32], [FEW, LARGE]
    )
    CASES += itertools.product(KINDS, [151936], [16], [torch.bfloat16], [FEW, LARGE])
else:
    CASES = [
        case if case[1] > 1 or case[2] == 0 else (*case[:2], 1, *case[3:])
        for case in combine(KINDS, [1025, 1, 2064], [2, 0], DTYPES, [LARGE, FEW])
    ]


def name(kind, vocab, drafts, dtype, way):
    dtype = str(dtype).removeprefix("torch.")
    return f"{kind}-V{vocab}-K{drafts}-{dtype}-{'large' if way['large'] else 'few'}"


@pytest.mark.parametrize(("kind", "vocab", "drafts", "dtype", "way"), CASES, ids=[name(*case) for case in CASES])
def test_tokens_are_the_references(kind, vocab, drafts, dtype, way):
    requests = 3 if not ON_GPU or vocab > 10_000 else 20
    batch = case(requests, drafts, vocab, dtype, seed=vocab + drafts)
    output = verify(kind, batch.to(DEVICE), **way)
    outcomes = expected(kind, batch)
    assert_same_tokens(output.token_ids, outcomes, FLOAT32_BAND)
    lengths = (batch.draft_token_ids >= 0).long().cumprod(1).sum(1)
    assert output.num_draft_tokens.tolist() == lengths.tolist()
    for tokens, count in zip(output.token_ids.tolist(), output.num_accepted.tolist()):
        assert tokens.index(-1) == count + 1 if -1 in tokens else count == drafts


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
    """32 ids are loaded at once, 28 rows have row bits, and block verification handles 32 rows at once where it can."""
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
        for tiles in (1, 2, 3, 8) if ON_GPU else (2,):  # of four blocks each: more than there are too
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


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("vocab", small(1040, 1025, 50257))
def test_a_request_does_not_depend_on_the_batch(kind, vocab):
    batch = case(260 if ON_GPU else 3, 2, vocab, torch.bfloat16, seed=3).to(DEVICE)
    whole = verify(kind, batch)
    order = torch.randperm(len(batch.seeds), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for part in (order, order[:3], order[:1]) if ON_GPU else (order[:2],):
        chosen = replace(batch, **{name: value[part] for name, value in vars(batch).items()})
        for field, got, want in zip(whole._fields, verify(kind, chosen), whole[:4]):
            assert torch.equal(got, want[part]), field
    # Nor on padding: more offsets, none of them a draft.
    wider = replace(
        batch,
        target_logits=torch.cat([batch.target_logits, batch.target_logits[:, :2]], 1),
        draft_logits=torch.cat([batch.draft_logits, batch.draft_logits[:, :2]], 1),
        draft_token_ids=torch.nn.functional.pad(batch.draft_token_ids, (0, 2), value=-1),
    )
    padded = verify(kind, wider)
    assert torch.equal(padded.token_ids[:, :3], whole.token_ids)
    assert (padded.token_ids[:, 3:] == -1).all()
    assert torch.equal(padded.num_draft_tokens, whole.num_draft_tokens)


@pytest.mark.parametrize(
    ("kind", "large"),
    [
        (kind, large)
        for i, kind in enumerate(KINDS)
        for large in (False, True)
        if ON_GPU or (large == i % 2 and "synthetic" not in kind)
    ],
)
def test_nan_and_infinities_count_as_they_should(kind, large):
    vocab = 1100
    batch = case(8, 1, vocab, torch.float32, greedy=0.3, seed=2)
    target, draft = batch.target_logits, batch.draft_logits
    target[0], draft[1] = torch.nan, torch.nan
    target[2], draft[2] = -torch.inf, -torch.inf
    target[3, :, 1030:1033] = torch.inf
    draft[4, :, [5, 1050]] = torch.inf
    target[5, :, ::3] = torch.nan
    draft[5, :, ::2] = torch.nan
    target[6, :, :1024] = -torch.inf
    draft[6, :, 1024:] = -torch.inf
    target[7, :, 3], draft[7, :, 2] = torch.nan, -torch.inf
    outcomes = expected(kind, batch)
    output = verify(kind, batch.to(DEVICE), large=large)
    assert_same_tokens(output.token_ids, outcomes, FLOAT32_BAND)
    assert output.invalid.tolist() == [outcome.invalid for outcome in outcomes]


@pytest.mark.parametrize("kind", ["strict", "probabilistic", "block"])
@pytest.mark.parametrize("large", [False, True])
def test_a_row_without_a_finite_logit_counts_only_if_a_request_came_that_far(kind, large):
    """The empty row is at offset 1; requests stop before it, at it, and after it."""
    batch = case(3, 2, 40, torch.float32, greedy=0, seed=2)
    batch.target_logits[:, 1] = torch.nan
    batch.draft_token_ids[:] = batch.target_logits[:, :2].nan_to_num().argmax(2)
    batch.draft_token_ids[:, 1] = 0  # what such a row emits
    batch.draft_logits[:, 1, 1:] = -torch.inf
    batch.draft_token_ids[0, 0], batch.draft_token_ids[1, 1] = -1, -1
    batch = replace(batch, temperature=torch.full((3,), 0.02), draft_logits=batch.draft_logits)
    outcomes = expected(kind, batch)
    output = verify(kind, batch.to(DEVICE), large=large)
    assert_same_tokens(output.token_ids, outcomes, FLOAT32_BAND)
    assert output.num_accepted.tolist() == [0, 1, 2]
    assert output.invalid.tolist() == [False, True, True] == [outcome.invalid for outcome in outcomes]


def test_ids_and_temperatures_that_make_no_sense_are_harmless():
    batch = case(3, 2, 40, torch.bfloat16, greedy=0).to(DEVICE)
    ids = batch.draft_token_ids.clone()
    ids[0, 1], ids[1, 0], ids[2, 1] = 40, 2**40, -7
    sane = ids.where((ids >= 0) & (ids < 40), -1)
    strange = torch.tensor([torch.nan, -1.0, torch.inf], device=DEVICE)
    harmless = torch.tensor([0, 0, torch.finfo(torch.float32).max], device=DEVICE)

    def run(ids, temperature):
        fields = (batch.target_logits, ids, batch.draft_logits, None, temperature, batch.seeds, batch.positions)
        return kernels.verify("probabilistic", VerificationBatch(*fields))

    assert_same(run(ids, strange), run(sane, harmless))


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


def test_strict_emits_what_sample_draws():
    batch = case(40 if ON_GPU else 4, 2, 2064, torch.bfloat16).to(DEVICE)
    assert 0 < (batch.temperature == 0).sum() < len(batch.seeds)
    output = verify("strict", batch)
    numbers = batch.temperature, batch.seeds
    drawn = [draw(batch.target_logits[:, i], *numbers, batch.positions + i) for i in range(3)]
    emitted = output.token_ids != -1
    assert torch.equal(output.token_ids[emitted], torch.stack(drawn, 1)[emitted])


@pytest.mark.parametrize("first", [5, 2**63 - 2])
def test_one_seed_means_the_seeds_from_there_on(first):
    logits = torch.zeros(4, 50, device=DEVICE)
    seeds = torch.arange(4, device=DEVICE) + first
    one = draw(logits, 1.0, first)
    assert torch.equal(one, draw(logits, 1.0, seeds, torch.zeros_like(seeds)))
    assert not torch.equal(one, draw(logits, 1.0, seeds, torch.ones_like(seeds)))


def test_empty_batches_launch_nothing():
    output = verify("probabilistic", case(0, 3, 10, torch.float32).to(DEVICE))
    assert [tuple(field.shape) for field in output[:4]] == [(0, 4), (0,), (0,), (0,)]
    tokens, *_ = kernels.sample_rows(row_batch(torch.zeros(0, 10, device=DEVICE), 1.0, 0, None), (1, 2))
    assert tokens.shape == (0,)
