"""The likeliest tokens and the kept sets of emitted rows: what they are, in the reference and in the eager backend."""

from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from reference import sampling
from reference.sampling import Sampling
from specdecode import Adjustments, RejectionSampler, SamplerOutput
from tests.conftest import combine
from tests.support.adjusted import adjusted_rows, adjustments_for, to
from tests.support.differential import Case, case, like_a_device
from tests.support.logprobs import hostile, verify
from tests.support.mutants import Mutant, assert_caught
from tests.support.packing import METHODS, assert_same, packed_rows, sampler_of, with_counts
from tests.support.report import assert_form, assert_right
from tests.support.truncated import SCHEDULE, TRUNCATIONS, kept_tokens

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


# ---------------------------------------------------------------------------------------------------------------------
# The reference
# ---------------------------------------------------------------------------------------------------------------------


def check_against_fractions(rows: int = 60) -> None:
    """Of random rows of whole numbers as weights, both are what a sort of fractions and a sum of them say."""
    random = np.random.default_rng(0)
    for _ in range(rows):
        weights = random.integers(0, 12, size=8)
        weights[random.integers(8)] += 1  # one at least is not 0; many are equal
        options = {"top_k": int(random.integers(0, 9)), "top_p": float(random.choice([1.0, 0.83])), "min_p": 0.0}
        squared = [Fraction(int(weight) ** 2) for weight in weights]  # at temperature 1/2
        kept = kept_tokens([weight / sum(squared) for weight in squared], **options)
        logits = sampling.log(weights.astype(float))
        assert sampling.kept_tokens(logits, Sampling(0.5, **options)) == sorted(kept)
        got = sampling.top_logprobs(logits, 5, Sampling(0.5, **options))
        assert [token for token, _ in got] == [*kept, *[-1] * 5][:5]
        want = [squared[token] / sum(squared[v] for v in kept) for token in kept]
        assert np.abs(np.exp([each for _, each in got]) - np.array([*map(float, want), *[0.0] * 5][:5])).max() < 1e-12
        raw = sampling.top_logprobs(logits, 8, Sampling())
        order = sorted(np.flatnonzero(weights).tolist(), key=lambda token: (-weights[token], token))
        assert [token for token, _ in raw if token >= 0] == order
        assert abs(sum(np.exp(each) for _, each in raw) - 1) < 1e-12
        assert sampling.kept_tokens(logits, Sampling(0.0, **options)) == order[:1]
        assert sampling.top_logprobs(logits, 2, Sampling(0.0, **options)) == [(order[0], 0.0), (-1, -INF)]


def test_the_reference_lists_what_fractions_say():
    check_against_fractions()


@pytest.mark.parametrize(
    ("row", "token"),
    [([-INF, np.nan, INF, 0.0, INF], 2), ([np.nan, -INF], 0), ([-INF, -INF], 0)],
)
def test_the_reference_keeps_one_token_of_a_row_that_is_a_point_mass(row, token):
    for options in (Sampling(), Sampling(0.0), Sampling(top_p=0.5)):
        assert sampling.kept_tokens(row, options) == [token]
        assert sampling.top_logprobs(row, 2, options) == [(token, 0.0), (-1, -INF)]


MUTANTS = [
    Mutant(
        "not truncated",
        sampling.kept_tokens,
        "truncate(logits, sampling)[0]",
        "without_nan(logits)",
        check_against_fractions,
    ),
    Mutant(
        "by the order of ids",
        sampling.top_logprobs,
        "in token_order(without_nan(row))",
        "in range(len(row))",
        check_against_fractions,
    ),
    Mutant("tokens of mass 0", sampling.top_logprobs, "if logprobs[token] > -np.inf", "", check_against_fractions),
    Mutant("temperature 1", sampling.top_logprobs, "row, sampling.temperature)", "row, 1.0)", check_against_fractions),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mistakes_in_the_reference_are_caught(mutant):
    assert_caught(mutant)


# ---------------------------------------------------------------------------------------------------------------------
# The eager backend
# ---------------------------------------------------------------------------------------------------------------------


ASKED = {"top_logprobs": 7, "kept_sets": True}


@pytest.mark.parametrize(
    ("method", "of", "options", "dtype", "masked", "with_logits"),
    combine(METHODS, ["processed", "raw"], ["nothing", *TRUNCATIONS], DTYPES, [False, True], [False, True]),
)
def test_lists_of_emitted_rows_are_the_references(method, of, options, dtype, masked, with_logits):
    batch, options = hostile(case(6, 3, 1040, dtype, seed=5)), {"nothing": {}, **TRUNCATIONS}[options]
    with like_a_device() if masked else nullcontext():
        output = verify(method, batch, "cpu", "eager", with_logits, **options, **ASKED, logprobs=of)
    assert_right(output, batch, options, of, "eager")


@pytest.mark.parametrize(
    ("method", "of", "options", "masked"),
    combine(METHODS, ["processed", "raw"], [{}, {"top_k": 9, "top_p": 0.9}], [False, True]),
)
def test_lists_of_adjusted_rows_are_of_the_adjusted_rows(method, of, options, masked):
    batch = case(6, 3, 1040, torch.bfloat16, seed=5)
    adjustments = adjustments_for(batch)
    with like_a_device() if masked else nullcontext():
        output = verify(method, batch, "cpu", "eager", **options, **ASKED, logprobs=of, adjustments=adjustments)
    rows = adjusted_rows(batch, adjustments, batch.draft_token_ids)
    assert_right(output, batch, options, of, "eager", rows)


def test_what_is_asked_for_changes_nothing_else_and_is_absent_otherwise(place):
    batch = case(6, 3, 1040, torch.float32, seed=5)
    plain, with_lists = (
        verify("block", batch, place[1], place[0], **more, top_p=0.9) for more in ({}, {"kept_sets": True})
    )
    assert plain[4:] == (None,) * 6
    assert with_lists[4:7] == (None,) * 3
    assert_same(with_lists._replace(num_kept=None, kept_token_ids=None, kept_cutoff=None), plain)
    tops = [
        verify("block", batch, place[1], place[0], top_p=0.9, logprobs="raw", top_logprobs=n) for n in (None, 0, 1, 20)
    ]
    assert [top.top_logprobs is None for top in tops] == [True, True, False, False]
    assert tops[0][4] is not None
    for top in tops[1:]:
        assert_same(top._replace(top_token_ids=None, top_logprobs=None), tops[0])
    assert torch.equal(tops[2].top_token_ids, tops[3].top_token_ids[..., :1])


@pytest.mark.parametrize("of", ["processed", "raw"])
def test_an_emitted_token_has_in_the_list_the_log_probability_that_is_returned_of_it(place, of):
    batch = case(60, 2, 1500, torch.float32, greedy=0, seed=3)
    output = verify("probabilistic", batch, place[1], place[0], top_p=0.8, logprobs=of, top_logprobs=20)
    is_it = (output.top_token_ids == output.token_ids[..., None]) & (output.token_ids >= 0)[..., None]
    assert is_it.any(-1).sum() > 50
    emitted = output.logprobs[..., None].expand_as(is_it)[is_it]
    torch.testing.assert_close(output.top_logprobs[is_it], emitted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_of_equal_logits_the_lowest_ids_come_first(place, temperature):
    rows = torch.zeros(3, 1, 2049, device=place[1])
    rows[1] = torch.where(torch.arange(2049) % 2 == 0, -0.0, 0.0)
    rows[2, 0, [3, 1030, 2048]] = 2.0
    drafts = torch.zeros(3, 0, dtype=torch.int64, device=place[1])
    options = {"temperature": temperature, "logprobs": "raw", "top_logprobs": 5, "seeds": 0}
    output = RejectionSampler("strict", backend=place[0])(rows, drafts, **options)
    assert output.top_token_ids[:, 0].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [3, 1030, 2048, 0, 1]]


@pytest.mark.parametrize("of", ["processed", "raw"])
def test_rows_that_are_point_masses_keep_one_token(place, of):
    """The first +inf, or token 0 of a row without a finite logit; and a row may have fewer tokens than are asked for."""
    rows = torch.zeros(4, 2, 5, device=place[1])
    rows[0, :, [2, 3]], rows[1], rows[2, 0, 3], rows[3, 0, 0] = INF, NAN, NAN, -INF
    drafts = torch.tensor([[3], [0], [1], [1]], device=place[1])
    sampler = RejectionSampler("synthetic", backend=place[0], schedule=SCHEDULE.from_rates([1.0]))
    output = sampler(rows, drafts, seeds=0, logprobs=of, top_logprobs=6, kept_sets=True)
    assert output.top_token_ids[:2, 0].tolist() == [[2, *[-1] * 5], [0, *[-1] * 5]]
    assert output.top_logprobs[:2, 0].tolist() == [[0.0, *[-INF] * 5]] * 2
    assert output.top_token_ids[2:, 0].tolist() == [[0, 1, 2, 4, -1, -1], [1, 2, 3, 4, -1, -1]]
    assert output.num_kept.tolist() == [[1, 1], [1, 1], [4, 5], [4, 5]]
    assert output.kept_token_ids[:, 0, :5].tolist() == [
        [2, *[-1] * 4],
        [0, *[-1] * 4],
        [0, 1, 2, 4, -1],
        [1, 2, 3, 4, -1],
    ]
    assert output.kept_cutoff.tolist() == [[2, 2], [0, 0], [-1, -1], [-1, -1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_than_1024_kept_tokens_are_told_by_the_last_one(place, dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 1, 3100, generator=generator).to(dtype).to(place[1])
    batch = Case(rows, torch.zeros(5, 0, dtype=torch.int64), rows[:, :0], *[torch.ones(5, dtype=torch.int64)] * 3)
    batch = replace(batch, temperature=torch.full((5,), 1.3))
    options = {
        "top_k": torch.tensor([1024, 1025, 0, 3000, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 1.0, 1.0]),
    }
    output = verify("strict", batch, place[1], place[0], **options, logprobs="processed", **ASKED)
    assert_right(output, batch, options, "processed", place[0])
    assert output.num_kept[:, 0].tolist()[:2] == [1024, 1025]
    assert (output.kept_token_ids[:, 0, 0] >= 0).tolist() == [True, False, False, False, False]
    assert (output.kept_cutoff[:, 0] >= 0).tolist() == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("method", "of", "adjusts", "masked"), combine(METHODS, ["processed", "raw"], [False, True], [False, True])
)
def test_packed_calls_return_what_padded_ones_do(place, method, of, adjusts, masked):
    counts = [2, 0, 1, 2]
    batch = with_counts(case(4, 2, 1100, torch.bfloat16, greedy=0.4, seed=7), counts).to(place[1])
    options = {"logprobs": of, "top_p": 0.9, "seeds": batch.seeds, "temperature": batch.temperature, **ASKED}
    sampler, tensors = sampler_of(method, place[0]), {}
    if adjusts:  # masks of a packed call are by row
        tensors = {"adjustments": to(place[1], adjustments_for(batch.to("cpu"), "penalties"))}
    with like_a_device() if masked else nullcontext():
        want = sampler(batch.target_logits, batch.draft_token_ids, batch.draft_logits, **options, **tensors)
        rows = packed_rows(batch, counts)
        rows["row_starts"] = torch.cat([rows["row_starts"], rows["row_starts"][-1:]])  # a request without rows
        numbers = {name: padded_by_one(value) for name, value in {**options, **tensors}.items()}
        got = sampler.packed(**rows, draft_logits=padded_by_one(batch.draft_logits), **numbers)
    assert_same(SamplerOutput(*[each[:4] for each in got]), want)
    assert got.invalid[4]
    assert got.top_token_ids[4, 0].tolist() == [0, *[-1] * 6]
    assert got.top_logprobs[4, 0].tolist() == [0.0, *[-INF] * 6]
    assert (int(got.num_kept[4, 0]), int(got.kept_cutoff[4, 0])) == (1, 0)
    assert got.kept_token_ids[4, 0].tolist() == [0, *[-1] * 1023]
    assert_form(got, 7)


def padded_by_one(value: Any) -> Any:
    """What is by request with one more of it, a copy of the first; other values as they are."""
    if isinstance(value, Adjustments):
        return Adjustments(*map(padded_by_one, value))
    return torch.cat([value, value[:1]]) if isinstance(value, torch.Tensor) else value


def test_steps_without_requests(place):
    batch = case(3, 2, 40, torch.float32)
    nothing = Case(*(value[:0] for value in vars(batch).values()))
    output = verify("strict", nothing, place[1], place[0], logprobs="raw", **ASKED)
    assert_form(output, 7)
    assert len(output.num_kept) == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_logprobs": 5}, ValueError, "top_logprobs: given without logprobs, which says of which distribution"),
        ({"top_logprobs": 21, "logprobs": "raw"}, ValueError, "top_logprobs: expected at most 20, got 21"),
        ({"top_logprobs": -1, "logprobs": "raw"}, ValueError, "top_logprobs: expected an int >= 0, got -1"),
        ({"top_logprobs": 2.0, "logprobs": "raw"}, TypeError, r"top_logprobs: expected an int >= 0, got 2.0 \(float\)"),
        ({"top_logprobs": True, "logprobs": "raw"}, TypeError, "top_logprobs: expected an int >= 0, got True"),
        ({"kept_sets": 1}, TypeError, "kept_sets: expected a bool, got int"),
        ({"kept_sets": None}, TypeError, "kept_sets: expected a bool, got NoneType"),
    ],
)
def test_another_value_is_an_error_that_names_the_argument(place, options, error, message):
    sampler, rows = RejectionSampler("strict", backend=place[0]), torch.zeros(1, 1, 5, device=place[1])
    drafts = torch.zeros(1, 0, dtype=torch.int64, device=place[1])
    packed = {"row_starts": torch.tensor([0, 1], device=place[1]), "num_draft_tokens": 0}
    for call in (sampler, sampler.warmup):
        with pytest.raises(error, match=f"^{message}"):
            call(rows, drafts, **options)
    with pytest.raises(error, match=f"^{message}"):
        sampler.packed(rows[0], drafts[0], **packed, **options)
