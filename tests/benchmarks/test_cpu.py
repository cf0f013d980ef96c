"""Speed on the CPU against the straightforward formulation: `pytest --benchmark-only tests/benchmarks/test_cpu.py`.

Inputs are as in serving: a vocabulary of 151,936, realistic rows, draft rows near the target's, and drafts sampled
from them. Every provider gets raw logits and returns tokens.
"""

import pytest
import torch
from torch import Tensor

from specdecode import RejectionSampler
from specdecode.drafting import DraftOutput
from tests.benchmarks.inputs import Inputs, describe, verification
from tests.benchmarks.inputs import straightforward as straightforward_formulation

DRAFTS, TEMPERATURE = 3, 0.7


def straightforward(inputs: Inputs, draft: DraftOutput) -> Tensor:
    return straightforward_formulation(inputs.target_logits, draft.token_ids, inputs.draft_logits, inputs.temperature)


def eager(inputs: Inputs, draft: DraftOutput) -> Tensor:
    return verification(inputs, RejectionSampler("probabilistic", backend="eager"), draft)().token_ids


def block(inputs: Inputs, draft: DraftOutput) -> Tensor:
    return verification(inputs, RejectionSampler("block", backend="eager"), draft)().token_ids


def strict(inputs: Inputs, draft: DraftOutput) -> Tensor:
    return verification(inputs, RejectionSampler("strict", backend="eager"), draft)().token_ids


def greedy(inputs: Inputs, draft: DraftOutput) -> Tensor:
    return verification(inputs, RejectionSampler("strict", backend="eager"), draft, temperature=0)().token_ids


PROVIDERS = [straightforward, eager, block, strict, greedy]


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.__name__)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verification_on_the_cpu(benchmark, batch, dtype, provider):
    benchmark.extra_info["provider"] = provider.__name__
    benchmark.group = f"{describe(batch, DRAFTS, dtype)}, realistic rows"
    inputs = Inputs(batch, DRAFTS, getattr(torch, dtype), TEMPERATURE)
    token_ids = benchmark.pedantic(provider, (inputs, inputs.drafts("probabilistic")), rounds=15, warmup_rounds=3)
    assert token_ids.shape == (batch, DRAFTS + 1)
    assert ((token_ids >= -1) & (token_ids < inputs.target_logits.shape[-1])).all()
