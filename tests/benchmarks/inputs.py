"""The inputs of the benchmarks: logits like those of serving, and the straightforward formulation."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdecode import RejectionSampler
from specdecode.batch import SamplerOutput
from specdecode.drafting import DraftOutput

VOCAB = 151_936


def peaked_rows(*shape: int, generator: torch.Generator) -> Tensor:
    """Return [*shape, VOCAB] float32 logits: normal ones, and 64 tokens of each row raised above them."""
    device = generator.device
    logits = torch.randn(*shape, VOCAB, generator=generator, device=device).mul_(2)
    peaks = torch.randint(0, VOCAB, (*shape, 64), generator=generator, device=device)
    return logits.scatter_add_(-1, peaks, 4 + 10 * torch.rand(peaks.shape, generator=generator, device=device))


def served_rows(*shape: int, generator: torch.Generator) -> Tensor:
    """Return [*shape, VOCAB] float32 logits of which top-p .97 keeps as many tokens as it does of a real model's.

    Their number is lognormal, with median 2, mean 7 and 99th percentile 82: a fit to what was measured on a small reasoning
    model (8, 2 and 82; https://github.com/PrimeIntellect-ai/prime-rl/pull/2979). The tokens are anywhere in the vocabulary.
    """
    device, most = generator.device, 1024
    logits = torch.randn(*shape, VOCAB, generator=generator, device=device).mul_(2).sub_(9)
    kept = torch.randn(*shape, 1, generator=generator, device=device).mul_(1.6).exp_().mul_(2).round_().clamp_(1, most)
    ranks = torch.arange(most, device=device).expand(*shape, most)
    likely = torch.randint(0, VOCAB, (*shape, most), generator=generator, device=device)
    raised = torch.where(ranks < kept, 10 - 3 * ranks / kept, -torch.inf)
    return logits.scatter_reduce_(
        -1, likely, raised, "amax"
    )  # a token may be chosen twice, and a GPU does that in any order


def flat_rows(*shape: int, generator: torch.Generator) -> Tensor:
    """Return [*shape, VOCAB] float32 logits of which top-p keeps tokens in every block."""
    return torch.randn(*shape, VOCAB, generator=generator, device=generator.device)


class Inputs:
    """One batch's logits: target rows, by default with few likely tokens, and draft rows near them."""

    def __init__(
        self,
        batch: int,
        num_draft_tokens: int,
        dtype: torch.dtype,
        temperature: float,
        device: str = "cpu",
        rows: Callable[..., Tensor] = peaked_rows,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        target = rows(batch, num_draft_tokens + 1, generator=generator)
        noise = torch.randn(batch, num_draft_tokens, VOCAB, generator=generator, device=device)
        draft = noise.mul_(0.6).add_(target[:, :num_draft_tokens])
        self.target_logits, self.draft_logits = target.to(dtype), draft.to(dtype)
        self.temperature = temperature

    def drafts(self, method: str, seed: int = 0, **truncation: Any) -> DraftOutput:
        """Draw drafts with the noise that a method needs: [batch, num_draft_tokens] token ids, logsumexp, and cutoff."""
        sampler = RejectionSampler(method)
        batch, num_draft_tokens, _ = self.draft_logits.shape
        positions = torch.arange(num_draft_tokens, device=self.draft_logits.device)[:, None].repeat(1, batch)
        rows = enumerate(zip(self.draft_logits.unbind(1), positions))
        steps = [
            sampler.draft(logits, self.temperature, seed, where, offset=i, **truncation) for i, (logits, where) in rows
        ]
        columns = [None if values[0] is None else torch.stack(values, dim=1) for values in zip(*steps)]
        return DraftOutput(*columns)


def with_draft_vocabulary(inputs: Inputs, size: int) -> tuple[Inputs, Tensor]:
    """Return inputs whose draft rows have `size` of the tokens, in order, and which these are; other tokens are unlikely."""
    device = inputs.target_logits.device
    chosen = torch.randperm(VOCAB, generator=torch.Generator(device).manual_seed(1), device=device)
    ids = chosen[:size].sort().values
    narrow = copy.copy(inputs)
    narrow.target_logits = inputs.target_logits.index_add(-1, ids, torch.full_like(inputs.target_logits[..., ids], 6))
    narrow.draft_logits = inputs.draft_logits[..., ids].contiguous()
    return narrow, ids


def spread(rows: Tensor, ids: Tensor) -> Tensor:
    """Return draft rows over some of the tokens as rows over all of them."""
    return rows.new_full((*rows.shape[:-1], VOCAB), -torch.inf).index_copy_(-1, ids, rows)


def describe(batch: int, num_draft_tokens: int, dtype: str) -> str:
    """Name a shape, to group benchmarks by."""
    return f"{batch} request{'s' * (batch > 1)}, {num_draft_tokens} drafts, {VOCAB:,} tokens, {dtype}"


def verification(
    inputs: Inputs, sampler: RejectionSampler, draft: DraftOutput, one_hot: bool = False, **options: Any
) -> Callable[[], SamplerOutput]:
    """Return a call that verifies the drafts, without draft logits if they are one-hot; options go to the sampler."""
    draft_logits = None if one_hot or sampler.method == "strict" else inputs.draft_logits
    logits = inputs.target_logits, draft.token_ids, draft_logits
    return functools.partial(sampler, *logits, **{"temperature": inputs.temperature, "seeds": 0, **options})


def packed_verification(
    inputs: Inputs, sampler: RejectionSampler, draft: DraftOutput, one_hot: bool = False, **options: Any
) -> Callable[[], SamplerOutput]:
    """Return a packed call that verifies the drafts; all that is by slot is in the reverse order of the requests."""
    batch, num_rows, _ = inputs.target_logits.shape
    device = inputs.target_logits.device
    draft_logits = None if one_hot or sampler.method == "strict" else inputs.draft_logits
    by_slot = {name: value.flip(0) if isinstance(value, Tensor) else value for name, value in options.items()}
    where = {name: options[name] for name in ("positions",) if name in options}
    call = functools.partial(
        sampler.packed,
        inputs.target_logits.flatten(0, 1),
        torch.nn.functional.pad(draft.token_ids, (0, 1)).flatten(),
        num_rows * torch.arange(batch + 1, dtype=torch.int32, device=device),
        None if draft_logits is None else draft_logits.flip(0),
        num_draft_tokens=num_rows - 1,
        slots=torch.arange(batch, dtype=torch.int32, device=device).flip(0),
    )
    return functools.partial(call, **{"temperature": inputs.temperature, "seeds": 0, **by_slot, **where})


def straightforward(target_logits: Tensor, token_ids: Tensor, draft_logits: Tensor, temperature: float) -> Tensor:
    """Softmax of both, gather, compare, residual, multinomial. It does not wait for the device."""
    num_draft_tokens = token_ids.shape[1]
    target = torch.softmax(target_logits.float() / temperature, dim=-1)
    draft = torch.softmax(draft_logits.float() / temperature, dim=-1)
    ratio = (target[:, :-1].gather(2, token_ids[..., None]) / draft.gather(2, token_ids[..., None])).squeeze(2)
    num_accepted = (torch.rand_like(ratio) <= ratio).cumprod(dim=1).sum(dim=1)
    last, requests = num_accepted[:, None], torch.arange(len(token_ids), device=token_ids.device)
    rejected = draft[requests, num_accepted.clamp(max=num_draft_tokens - 1)]
    rejected.masked_fill_(last == num_draft_tokens, 0)  # after full acceptance the token comes from the target itself
    weights = (target[requests, num_accepted] - rejected).clamp_(min=0)
    emitted = torch.multinomial(weights, num_samples=1)
    offsets = torch.arange(num_draft_tokens + 1, device=token_ids.device)
    padded = torch.nn.functional.pad(token_ids, (0, 1))
    return torch.where(offsets < last, padded, torch.where(offsets == last, emitted, -1))
