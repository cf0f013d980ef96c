"""Synthetic acceptance in PyTorch: the work of a real method, with scheduled accept decisions."""

import torch

from specdecode.batch import SamplerOutput
from specdecode.eager import probabilistic, strict
from specdecode.eager.inputs import Inputs


def verify(inputs: Inputs) -> SamplerOutput:
    """Accept the draft at offset i with probability `conditional_rates[i]`; emit the tokens as the real method does.

    The real method is probabilistic, or strict if there are no draft logits. Its accept decisions are computed and not
    used: a load test must cost as much as serving.
    """
    uniforms = inputs.uniforms()
    scheduled = torch.zeros_like(uniforms, dtype=torch.bool)
    for offset in range(inputs.num_draft_tokens):
        scheduled[:, offset] = uniforms[:, offset] <= inputs.conditional_rates[offset]
    if inputs.draft_logits is None:
        return strict.verify(inputs, scheduled)
    return probabilistic.verify(inputs, scheduled)
