"""Speed of probabilistic verification against the straightforward formulation: `pytest --benchmark-only`.

Inputs are those that serving sees: a vocabulary of 151,936, peaked rows, a draft model near the target, drafts sampled from
it. Every provider gets raw logits and returns tokens.
"""

import pytest
import torch
from torch import Tensor

from specdecode import RejectionSampler

VOCAB, DRAFTS, TEMPERATURE = 151_936, 3, 0.7


class Inputs:
    """One batch's tensors."""

    def __init__(self, batch: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        target = 2 * torch.randn(batch, DRAFTS + 1, VOCAB, generator=generator)
        peaks = torch.randint(0, VOCAB, (batch, DRAFTS + 1, 64), generator=generator)
        target.scatter_add_(2, peaks, 4 + 10 * torch.rand(peaks.shape, generator=generator))
        draft = target[:, :DRAFTS] + 0.6 * torch.randn(batch, DRAFTS, VOCAB, generator=generator)
        self.target_logits, self.draft_logits = target.to(dtype), draft.to(dtype)
        sampler = RejectionSampler("probabilistic")
        steps = [sampler.draft(self.draft_logits[:, i], TEMPERATURE, 0, torch.full((batch,), i)) for i in range(DRAFTS)]
        self.draft_token_ids = torch.stack([step.token_ids for step in steps], dim=1)
        self.draft_logsumexp = torch.stack([step.logsumexp for step in steps], dim=1)


def straightforward(inputs: Inputs) -> Tensor:
    """Softmax both, gather, compare, residual, multinomial: the formulation that everybody writes first."""
    target = torch.softmax(inputs.target_logits.float() / TEMPERATURE, dim=-1)
    draft = torch.softmax(inputs.draft_logits.float() / TEMPERATURE, dim=-1)
    token_ids = inputs.draft_token_ids
    ratio = (target[:, :-1].gather(2, token_ids[..., None]) / draft.gather(2, token_ids[..., None])).squeeze(2)
    num_accepted = (torch.rand_like(ratio) <= ratio).cumprod(dim=1).sum(dim=1)
    requests = torch.arange(len(token_ids))
    rejected = draft[requests, num_accepted.clamp(max=DRAFTS - 1)]
    rejected[num_accepted == DRAFTS] = 0  # after full acceptance the token comes from the target itself
    weights = (target[requests, num_accepted] - rejected).clamp_(min=0)
    emitted = torch.multinomial(weights, num_samples=1)
    offsets, last = torch.arange(DRAFTS + 1), num_accepted[:, None]
    padded = torch.nn.functional.pad(token_ids, (0, 1))
    return torch.where(offsets < last, padded, torch.where(offsets == last, emitted, -1))


def eager(inputs: Inputs) -> Tensor:
    sampler = RejectionSampler("probabilistic", backend="eager")
    logits = (inputs.target_logits, inputs.draft_token_ids, inputs.draft_logits)
    return sampler(*logits, temperature=TEMPERATURE, seeds=0).token_ids


def eager_with_logsumexp(inputs: Inputs) -> Tensor:
    sampler = RejectionSampler("probabilistic", backend="eager")
    logits = (inputs.target_logits, inputs.draft_token_ids, inputs.draft_logits)
    return sampler(*logits, temperature=TEMPERATURE, seeds=0, draft_logsumexp=inputs.draft_logsumexp).token_ids


def strict(inputs: Inputs) -> Tensor:
    sampler = RejectionSampler("strict", backend="eager")
    return sampler(inputs.target_logits, inputs.draft_token_ids, temperature=TEMPERATURE, seeds=0).token_ids


def greedy(inputs: Inputs) -> Tensor:
    sampler = RejectionSampler("strict", backend="eager")
    return sampler(inputs.target_logits, inputs.draft_token_ids, temperature=0).token_ids


PROVIDERS = [straightforward, eager, eager_with_logsumexp, strict, greedy]


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.__name__)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verification_on_the_cpu(benchmark, batch, dtype, provider):
    benchmark.extra_info["provider"] = provider.__name__
    benchmark.group = f"{batch} requests, {DRAFTS} drafts, {VOCAB:,} tokens, {str(dtype).removeprefix('torch.')}"
    inputs = Inputs(batch, dtype)
    token_ids = benchmark.pedantic(provider, (inputs,), rounds=15, warmup_rounds=3)
    assert token_ids.shape == (batch, DRAFTS + 1)
    assert ((token_ids >= -1) & (token_ids < VOCAB)).all()
