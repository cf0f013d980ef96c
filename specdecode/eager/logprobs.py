"""Log-probabilities of emitted tokens in PyTorch, under the sampled distribution or under softmax(logits)."""

from typing import Any

import torch
from torch import Tensor

from specdecode.batch import Logprobs
from specdecode.eager.greedy import argmax
from specdecode.eager.inputs import Inputs
from specdecode.eager.probabilistic import logprobs
from specdecode.eager.selection import by_greedy
from specdecode.eager.truncation import RowSampling


def emitted_logprobs(inputs: Inputs, raw_logits: Any, token_ids: Tensor, of: Logprobs) -> Tensor:
    """Return the log-probability of each emitted token, [batch, num_draft_tokens + 1] float32, NaN where the id is -1.

    `raw_logits` are the target's, [batch, num_draft_tokens + 1, vocab], not adjusted.
    """
    is_raw = of == "raw"
    sampling = RowSampling(torch.ones_like(inputs.temperature)) if is_raw else inputs.sampling

    def by_softmax(logits: Tensor, token_ids: Tensor, sampling: RowSampling, greedy: Tensor | None) -> tuple[Tensor]:
        (result,), _ = logprobs((logits,), token_ids, (sampling,), greedy)
        return (result,)

    def of_point_mass(logits: Tensor, token_ids: Tensor, sampling: RowSampling, *_: Any) -> tuple[Tensor]:
        return ((argmax(logits)[0] == token_ids).to(sampling.temperature.dtype).log(),)

    logits, greedy = (raw_logits, False) if is_raw else (inputs.target_logits, inputs.greedy)
    tensors = logits, token_ids.clamp(min=0), sampling.at(slice(None), None)
    (result,) = by_greedy(greedy, by_softmax, of_point_mass, logits.shape[1:].numel(), *tensors)
    return result.masked_fill(token_ids < 0, torch.nan).to(torch.float32)
