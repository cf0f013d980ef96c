"""Log-probabilities of emitted tokens: what they are, in the reference and in the eager backend."""

from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import sampling
from reference.sampling import Sampling
from specdecode import RejectionSampler
from tests.conftest import combine
from tests.support.differential import Case, case, like_a_device
from tests.support.logprobs import (
    FLOAT32_TOLERANCE,
    assert_invalid_have_that_of_token_0,
    assert_right,
    hostile,
    verify,
    with_invalid_requests,
)
from tests.support.mutants import Mutant, assert_caught
from tests.support.truncated import SCHEDULE, TRUNCATIONS, kept_tokens

NAN, INF = float("nan"), float("inf")
METHODS = ["strict", "probabilistic", "block", "synthetic"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


# ---------------------------------------------------------------------------------------------------------------------
# The reference
# ---------------------------------------------------------------------------------------------------------------------


def check_against_fractions(rows: int = 100) -> None:
    """Of random rows of whole numbers as weights, log p' and log p are the logarithms of the fractions that they are."""
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


# ---------------------------------------------------------------------------------------------------------------------
# The eager backend
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "of", "options", "dtype", "masked", "with_logits"),
    combine(METHODS, ["processed", "raw"], ["nothing", *TRUNCATIONS], DTYPES, [False, True], [False, True]),
)
def test_logprobs_of_the_emitted_tokens_are_the_references(method, of, options, dtype, masked, with_logits):
    batch, options = hostile(case(6, 3, 1040, dtype, seed=5)), {"nothing": {}, **TRUNCATIONS}[options]
    with like_a_device() if masked else nullcontext():
        output = verify(method, batch, "cpu", "eager", with_logits, **options, logprobs=of)
    assert_right(output, batch, options, of, "eager")


@pytest.mark.parametrize("of", ["processed", "raw"])
def test_rows_that_are_point_masses(place, of):
    """The first +inf, or token 0 of a row without a finite logit, has all the probability."""
    rows: Tensor = torch.zeros(4, 2, 5, device=place[1])
    rows[0, :, [2, 3]], rows[1], rows[2, 0, 3], rows[3, 0, 0] = INF, NAN, NAN, -INF
    drafts = torch.tensor([[3], [0], [1], [1]], device=place[1])
    sampler = RejectionSampler("synthetic", backend=place[0], schedule=SCHEDULE.from_rates([1.0]))
    output = sampler(rows, drafts, seeds=0, logprobs=of)
    assert output.token_ids[:, 0].tolist() == [3, 0, 1, 1]
    assert output.logprobs[0].tolist() == [-INF, 0.0]
    assert output.logprobs[1].tolist() == [0.0, 0.0]
    torch.testing.assert_close(output.logprobs[2:, 0].exp().cpu(), torch.full((2,), 0.25))
    assert output.invalid.tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("method", "of", "options", "temperature", "with_logits", "masked"),
    combine(
        ["strict", "probabilistic", "block"],
        ["processed", "raw"],
        [{}, {"top_k": 3, "top_p": 0.9}],
        [0.7, 0.0],
        [True, False],
        [True, False],
    ),
)
def test_tokens_of_invalid_requests_have_a_log_probability_of_0(
    place, method, of, options, temperature, with_logits, masked
):
    """Rows without a finite logit are the point mass on token 0; so is what a packed request without rows draws from."""
    call, first_two = with_invalid_requests(place[1])
    target, drafts, draft_logits = call.values()
    sampler, draft_logits = RejectionSampler(method, backend=place[0]), draft_logits if with_logits else None
    options = {"temperature": temperature, "seeds": 0, "logprobs": of, **options}
    with like_a_device() if masked else nullcontext():
        padded = sampler(target, drafts, draft_logits, **options)
        row_starts = torch.tensor([0, 3, 6, 9, 12, 12, 12], device=place[1])
        if draft_logits is not None:
            draft_logits = torch.nn.functional.pad(draft_logits, (0, 0, 0, 0, 0, 2), value=NAN)
        rows = target.flatten(0, 1), torch.nn.functional.pad(drafts, (0, 1)).flatten(), row_starts
        packed = sampler.packed(*rows, draft_logits, num_draft_tokens=2, **options)
    for output in (padded, packed):
        assert_invalid_have_that_of_token_0(output, first_two)
        assert not output.invalid[3]
    assert packed.invalid[4:].all()
    assert packed.token_ids[4:].tolist() == [[0, -1, -1]] * 2
    assert packed.logprobs[4:].nan_to_num(nan=9).tolist() == [[0, 9, 9]] * 2


@pytest.mark.parametrize("of", ["processed", "raw"])
def test_a_schedule_may_accept_what_a_row_without_a_finite_logit_never_emits(place, of):
    call, _ = with_invalid_requests(place[1])
    sampler = RejectionSampler("synthetic", backend=place[0], schedule=SCHEDULE.from_rates([1.0, 1.0]))
    for draft_logits in (call["draft_logits"], None):
        output = sampler(call["target_logits"], call["draft_token_ids"], draft_logits, seeds=0, logprobs=of)
        assert output.token_ids[:2].tolist() == [[0, 3, 0], [5, 0, 0]]
        assert output.logprobs[:2].tolist() == [[0, -INF, 0], [-INF, 0, 0]]
        assert output.invalid.tolist() == [True, True, True, False]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_have_0_or_the_rows_own_log_softmax(place, method):
    batch = case(6, 2, 40, torch.float32, greedy=1)
    processed, raw = (verify(method, batch, place[1], place[0], logprobs=of) for of in ("processed", "raw"))
    emitted = processed.token_ids >= 0
    argmax = batch.target_logits.argmax(dim=2).to(place[1])
    is_argmax = (processed.token_ids == argmax)[emitted]
    assert torch.equal(processed.logprobs[emitted] == 0, is_argmax)
    assert is_argmax.all() == (method != "synthetic")
    want = batch.target_logits.to(place[1]).log_softmax(2).gather(2, raw.token_ids.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(raw.logprobs[emitted], want[emitted], rtol=1e-6, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("of", ["processed", "raw"])
def test_steps_without_drafts_or_without_requests(place, of):
    batch = case(3, 0, 40, torch.float32, greedy=0.5, seed=1)
    assert_right(verify("strict", batch, place[1], place[0], logprobs=of), batch, {}, of, place[0])
    nothing = Case(*(value[:0] for value in vars(batch).values()))
    assert verify("strict", nothing, place[1], place[0], logprobs=of).logprobs.shape == (0, 1)


@pytest.mark.parametrize("wrong", ["raw_logprobs", True, 1, ["raw"]])
def test_another_value_is_an_error_that_names_the_argument(place, wrong):
    sampler, rows = RejectionSampler("strict", backend=place[0]), torch.zeros(1, 1, 5, device=place[1])
    drafts = torch.zeros(1, 0, dtype=torch.int64, device=place[1])
    for call in (sampler, sampler.warmup):
        with pytest.raises(ValueError, match=r"^logprobs: expected one of 'processed', 'raw', got"):
            call(rows, drafts, logprobs=wrong)
    assert sampler(rows, drafts).logprobs is None
