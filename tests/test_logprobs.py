"""Log-probabilities of emitted tokens: the reference against fractions, and errors."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from reference import sampling
from reference.sampling import Sampling
from specdecode import RejectionSampler
from tests.support.mutants import Mutant, assert_caught
from tests.support.truncated import kept_tokens

INF = float("inf")


def check_against_fractions(rows: int = 100) -> None:
    """For random rows of integer weights, log p' and log p equal the logarithms of exact fractions."""
    random = np.random.default_rng(0)
    for _ in range(rows):
        weights = random.integers(1, 40, size=8)
        options = {"top_k": int(random.integers(0, 9)), "top_p": float(random.choice([1.0, 0.83])), "min_p": 0.0}
        squared = [Fraction(int(weight) ** 2) for weight in weights]  # at temperature 1/2
        kept = kept_tokens([weight / sum(squared) for weight in squared], **options)
        token = int(random.choice(kept))
        logits = np.log(weights.astype(float))
        (got,) = sampling.processed_logprobs([logits], [token], Sampling(0.5, **options))
        assert abs(np.exp(got) - float(squared[token] / sum(squared[v] for v in kept))) < 1e-12
        left_out = set(range(8)) - set(kept)
        assert all(sampling.processed_logprobs([logits], [v], Sampling(0.5, **options))[0] == -INF for v in left_out)
        (got,) = sampling.raw_logprobs([logits], [token])
        assert abs(np.exp(got) - weights[token] / weights.sum()) < 1e-12
    (greedy,) = sampling.processed_logprobs([logits], [int(weights.argmax())], Sampling(0.0))
    assert greedy == 0


def test_the_reference_returns_logarithms_of_what_is_kept():
    check_against_fractions()


MUTANTS = [
    Mutant(
        "not truncated", sampling.processed_logprobs, "in zip(rows", "in zip(target_logits", check_against_fractions
    ),
    Mutant(
        "temperature 1",
        sampling.processed_logprobs,
        "row, sampling.temperature)",
        "row, 1.0)",
        check_against_fractions,
    ),
    Mutant("processed", sampling.raw_logprobs, "Sampling())", "Sampling(0.5))", check_against_fractions),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mistakes_in_the_reference_are_caught(mutant):
    assert_caught(mutant)


@pytest.mark.parametrize("wrong", ["raw_logprobs", True, 1, ["raw"]])
def test_another_value_is_an_error_that_names_the_argument(place, wrong):
    sampler, rows = RejectionSampler("strict", backend=place[0]), torch.zeros(1, 1, 5, device=place[1])
    drafts = torch.zeros(1, 0, dtype=torch.int64, device=place[1])
    for call in (sampler, sampler.warmup):
        with pytest.raises(ValueError, match=r"^logprobs: expected one of 'processed', 'raw', got"):
            call(rows, drafts, logprobs=wrong)
    assert sampler(rows, drafts).logprobs is None
