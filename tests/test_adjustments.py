"""Biases, penalties and masks: `sample`, neutral values, drafts before a row, errors."""

import pytest
import torch

from reference import sampling
from reference.adjustments import adjust
from specdecode import Adjustments, RejectionSampler, sample
from tests.support.adjusted import (
    adjustments_for,
    all_of,
    of_request,
    to,
    words_of,
)
from tests.support.calls import METHODS
from tests.support.differential import assert_same, case
from tests.support.oracle import SCHEDULE

NAN = float("nan")


def sampler_of(method: str, **options) -> RejectionSampler:
    return RejectionSampler(method, schedule=SCHEDULE if method == "synthetic" else None, **options)


def call(method, batch, adjustments, *, with_logits=True, backend="eager", **options):
    draft_logits = batch.draft_logits if with_logits else None
    numbers = {"temperature": batch.temperature, "seeds": batch.seeds, "positions": batch.positions, **options}
    arguments = batch.target_logits, batch.draft_token_ids, draft_logits
    return sampler_of(method, backend=backend)(*arguments, adjustments=adjustments, **numbers)


# ---------------------------------------------------------------------------------------------------------------------
# Against the reference
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.8}])
def test_sample_draws_from_adjusted_rows(options):
    batch = case(12, 0, 1100, torch.bfloat16, seed=4)
    adjustments = adjustments_for(batch)
    logits, numbers = batch.target_logits[:, 0], (batch.temperature, batch.seeds, batch.positions)
    tokens = sample(logits, *numbers, adjustments=adjustments, **options)
    for index, token in enumerate(tokens.tolist()):
        row = adjust(logits[index].float().numpy(), [], of_request(adjustments, index, 1100))
        how = {**options, **batch.request(index)}
        row, margin = sampling.truncate(row, sampling.Sampling(how["temperature"], *options.values()))
        choice = sampling.sample(row, **batch.request(index))
        assert token == choice.index or min(margin, choice.margin) < batch.band("eager")
    one_row = adjustments._replace(allowed_mask=adjustments.allowed_mask[:, 0])
    assert torch.equal(sample(logits, *numbers, adjustments=one_row, **options), tokens)


# ---------------------------------------------------------------------------------------------------------------------
# What they mean
# ---------------------------------------------------------------------------------------------------------------------


def test_neutral_values_change_no_bit():
    batch = case(8, 3, 1100, torch.bfloat16, seed=6)
    given = all_of(batch)
    for neutral in (
        Adjustments(1.0, 0.0, 0, given["prompt_mask"], given["output_counts"]),
        Adjustments(torch.ones(8), torch.zeros(8), torch.zeros(8), given["prompt_mask"], given["output_counts"]),
        Adjustments(bias_ids=torch.full((8, 3), -1), bias=torch.full((8, 3), NAN)),
        Adjustments(bias_ids=given["bias_ids"], bias=torch.zeros(8, 9)),
        Adjustments(allowed_mask=torch.full((8, 4, 35), -1, dtype=torch.int32)),
        Adjustments(),
    ):
        for method in METHODS:
            options = {"logprobs": "processed", "top_p": 0.9}
            assert_same(call(method, batch, neutral, **options), call(method, batch, None, **options))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_drafts_before_a_row_count_as_emitted(any_place, method):
    """The target repeats token 0 until the penalty of what it has emitted makes token 1 better, in the middle of a step."""
    backend, device = any_place
    logits = torch.tensor([2.0, 1.5, 0.0], device=device).expand(1, 6, 3)
    drafts, before = torch.tensor([[0, 0, 1, 0, 1]]), torch.tensor([[1, 0, 0]], dtype=torch.int32)
    sampler = RejectionSampler(method, backend=backend)
    for penalties, tokens in (
        (Adjustments(frequency_penalty=0.4), [0, 0, 1, 0, 1, 0]),
        (Adjustments(frequency_penalty=0.4, output_counts=before), [0, 1, -1, -1, -1, -1]),
        (Adjustments(presence_penalty=0.6), [0, 1, -1, -1, -1, -1]),
    ):
        output = sampler(logits, drafts.to(device), temperature=0.0, adjustments=to(device, penalties))
        assert output.token_ids.tolist() == [tokens]


def test_everything_forbidden_but_one():
    """And with all tokens forbidden: then the request is invalid, like a request with only -inf."""
    logits, drafts = torch.randn(2, 3, 70), torch.tensor([[64, 64], [64, 3]])
    allowed = torch.zeros(2, 3, 70, dtype=torch.bool)
    allowed[:, :, 64] = True
    allowed[1, 1] = False
    for method in METHODS:
        adjustments = Adjustments(allowed_mask=words_of(allowed))
        output = sampler_of(method)(logits, drafts, seeds=0, adjustments=adjustments)
        if method != "synthetic":
            assert output.token_ids.tolist() == [[64, 64, 64], [64, 0, -1]]
            assert output.invalid.tolist() == [False, True]


def test_the_largest_count_does_not_overflow():
    batch = case(6, 2, 100, torch.float32, seed=7)
    most = Adjustments(frequency_penalty=1e-9, output_counts=torch.full((6, 100), 2**31 - 1, dtype=torch.int32))
    assert not call("strict", batch, most).invalid.any()


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------

WRONG = {
    "repetition_penalty: expected a finite float > 0": {"repetition_penalty": 0.0},
    "repetition_penalty: expected a finite float > 0, got nan": {"repetition_penalty": NAN},
    "repetition_penalty: expected a finite float > 0, got 1e-40": {"repetition_penalty": 1e-40},  # denormal in float32
    "frequency_penalty: expected a finite float": {"frequency_penalty": 10**400},
    "presence_penalty: expected a finite float or a": {"presence_penalty": "1"},
    "repetition_penalty: expected finite numbers > 0": {"repetition_penalty": torch.tensor([1.0, -2.0])},
    r"repetition_penalty: expected shape \[2\]": {"repetition_penalty": torch.ones(3)},
    r"prompt_mask: expected shape \[2, 3\]": {"prompt_mask": torch.zeros(2, 70, dtype=torch.int32)},
    "prompt_mask: expected dtype int32": {"prompt_mask": torch.zeros(2, 3, dtype=torch.int64)},
    "output_counts: expected numbers >= 0": {"output_counts": torch.full((2, 70), -1, dtype=torch.int32)},
    "output_counts: expected a stride of 1": {"output_counts": torch.zeros(70, 2, dtype=torch.int32).T},
    r"bias_ids: given without the adjustments.bias": {"bias_ids": torch.zeros(2, 1, dtype=torch.int32)},
    r"bias: given without the adjustments.bias_ids": {"bias": torch.zeros(2, 1)},
    r"bias_ids: expected ids in \[0, 70\)": {"bias_ids": torch.full((2, 1), 70), "bias": torch.zeros(2, 1)},
    "bias: expected numbers": {"bias_ids": torch.zeros(2, 1, dtype=torch.int32), "bias": torch.full((2, 1), NAN)},
    r"bias: expected shape \[2, 1\]": {"bias_ids": torch.zeros(2, 1, dtype=torch.int32), "bias": torch.zeros(2)},
    r"allowed_mask: expected shape \[2, 3, 3\]": {"allowed_mask": torch.zeros(2, 3, dtype=torch.int32)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_values_are_errors_that_name_the_argument(message):
    logits, drafts = torch.zeros(2, 3, 70), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match=f"^adjustments.{message}"):
        RejectionSampler("strict")(logits, drafts, adjustments=Adjustments(**WRONG[message]))


def test_other_things_are_no_adjustments():
    logits, drafts = torch.zeros(2, 3, 70), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"^adjustments: expected Adjustments, got dict"):
        RejectionSampler("strict")(logits, drafts, adjustments={"frequency_penalty": 1.0})
    starts = torch.tensor([0, 3])
    with pytest.raises(TypeError, match=r"^adjustments: expected Adjustments, got tuple"):
        RejectionSampler("strict").packed(logits[0], drafts[0], starts, num_draft_tokens=2, adjustments=())
