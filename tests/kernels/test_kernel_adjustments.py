"""Adjustments in the kernels: the reference's tokens, in every method, way of reading and kind of row."""

from dataclasses import replace

import pytest
import torch

from specdecode import RejectionSampler, eager, kernels
from specdecode.batch import RowBatch, VerificationBatch
from specdecode.noise import SELECT
from tests.conftest import ON_GPU, combine
from tests.support.adjusted import SOME, adjusted_rows, adjustments_for, to
from tests.support.differential import FLOAT32_BAND, assert_same_tokens, case
from tests.support.kernels import DEVICE, FEW, LARGE, MANY, assert_same
from tests.support.truncated import SCHEDULE, expected

METHODS = ["strict", "probabilistic", "block", "synthetic"]
WAYS = {"few": FEW, "large": LARGE, "many": MANY}


def verify(method, batch, adjustments, with_logits=True, logprobs=None, way=FEW, **options):
    draft_logits = batch.draft_logits if with_logits else None
    numbers = batch.temperature, batch.seeds, batch.positions
    adjustments = None if adjustments is None else to(DEVICE, adjustments)
    arguments = VerificationBatch.check(
        batch.target_logits, batch.draft_token_ids, draft_logits, None, *numbers, logprobs=logprobs,
        adjustments=adjustments, **options,
    )  # fmt: skip
    return kernels.verify(method, arguments, SCHEDULE if method == "synthetic" else None, **way)


@pytest.mark.parametrize(
    ("method", "kind", "dtype", "way", "options"),
    combine(
        METHODS,
        list(SOME),
        [torch.bfloat16, torch.float32, torch.float16],
        list(WAYS),
        [{}, {"top_k": 9, "top_p": 0.9}, {"top_p": 0.97}],
    ),
)
def test_tokens_are_the_references(method, kind, dtype, way, options):
    requests, vocab = (40, 151_936) if ON_GPU else (4, 1100)
    batch = case(requests, 3, vocab, dtype, seed=len(kind))
    adjustments = adjustments_for(batch, kind)
    for with_logits in (True, False):
        output = verify(method, batch.to(DEVICE), adjustments, with_logits, way=WAYS[way], **options)
        outcomes = expected(method, batch, options, None, with_logits, adjustments)
        assert_same_tokens(output.token_ids, outcomes, FLOAT32_BAND)
        assert output.invalid.tolist() == [outcome.invalid for outcome in outcomes]
