"""The likeliest tokens and the kept sets of rows: the reference against fractions, ties, point masses, long lists."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import sampling
from reference.sampling import Sampling
from specdecode import RejectionSampler, SamplerOutput
from tests.support.mutants import Mutant, assert_caught
from tests.support.oracle import assert_equals_oracle
from tests.support.truncated import kept_tokens

NAN, INF = float("nan"), float("inf")

# ---------------------------------------------------------------------------------------------------------------------
# The reference
# ---------------------------------------------------------------------------------------------------------------------


def check_against_fractions(rows: int = 60) -> None:
    """For random rows of integer weights, both lists equal the results of sorting and adding exact fractions."""
    random = np.random.default_rng(0)
    for _ in range(rows):
        weights = random.integers(0, 12, size=8)
        weights[random.integers(8)] += 1  # at least one is not 0; many are equal
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
# The package
# ---------------------------------------------------------------------------------------------------------------------


def listed(place: tuple[str, str], logits: Tensor, **options: Any) -> SamplerOutput:
    """Return the output of a step without drafts for some rows, after comparing it with the oracle's."""
    requests = len(logits)
    call = {
        "target_logits": logits[:, None],
        "draft_token_ids": torch.zeros(requests, 0, dtype=torch.int64),
        "seeds": 0,
    }
    call |= {"kept_sets": True, **options}
    call = {name: value.to(place[1]) if isinstance(value, Tensor) else value for name, value in call.items()}
    output = RejectionSampler("strict", backend=place[0])(**call)
    assert_equals_oracle("strict", call, output, place[0])
    return output


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_of_equal_logits_the_lowest_ids_come_first_in_any_block(any_place, temperature):
    rows = torch.zeros(4, 3000)
    rows[1, ::2] = -0.0
    rows[2, [5, 1030, 1031, 2999]], rows[2, 2500] = 2.0, 3.0
    rows[3, 2048:], rows[3, 2048], rows[3, 3] = 1.0, NAN, -INF
    output = listed(any_place, rows, temperature=temperature, logprobs="raw", top_logprobs=6)
    assert output.top_token_ids[:, 0].tolist() == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
        [2500, 5, 1030, 1031, 2999, 0],
        [2049, 2050, 2051, 2052, 2053, 2054],
    ]
    assert output.num_kept[:, 0].tolist() == ([3000, 3000, 3000, 2998] if temperature else [1] * 4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_may_have_fewer_tokens_than_are_asked_for(any_place):
    rows = torch.tensor([[0.0, 1.0, -INF, 2.0], [NAN, NAN, NAN, NAN], [-INF, 5.0, NAN, -INF], [1.0, INF, 0.0, INF]])
    output = listed(any_place, rows, logprobs="processed", top_logprobs=6)
    assert output.top_token_ids[:, 0].tolist() == [[3, 1, 0, -1, -1, -1], *[[each, *[-1] * 5] for each in (0, 1, 1)]]
    assert output.num_kept[:, 0].tolist() == [3, 1, 1, 1]
    assert output.top_logprobs[1:, 0].tolist() == [[0.0, *[-INF] * 5]] * 3
    assert output.kept_cutoff[:, 0].tolist() == [-1, 0, -1, 1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_than_1024_kept_tokens_are_told_by_the_last_one(any_place, dtype):
    limits = {"top_k": torch.tensor([1024, 1025, 0, 9500, 0]), "top_p": torch.tensor([1.0, 1.0, 0.9, 1.0, 1.0])}
    rows = torch.randn(5, 10_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    output = listed(any_place, rows, temperature=1.3, logprobs="processed", top_logprobs=20, **limits)
    assert output.num_kept[:, 0].tolist()[:2] == [1024, 1025]
    assert (output.kept_token_ids[:, 0, 0] >= 0).tolist() == [True, False, False, False, False]
    assert (output.kept_cutoff[:, 0] >= 0).tolist() == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_logprobs": 5}, ValueError, "top_logprobs: needs logprobs="),
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
