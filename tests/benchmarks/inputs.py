"""The inputs of the benchmarks: logits as in serving, and the straightforward formulation."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdecode import RejectionSampler
from specdecode.batch import SamplerOutput
from specdecode.drafting import DraftOutput
from tests.benchmarks.realistic import draft_rows, load_rows, realistic_rows

VOCAB = 151_936
"""The default of `Inputs`. Functions take the size from their tensors."""


def flat_rows(*shape: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Make [*shape, vocab] float32 logits; top-p keeps tokens of every block."""
    return torch.randn(*shape, vocab, generator=generator, device=generator.device)


ROWS = {"realistic": realistic_rows, "flat": flat_rows}
"""The kinds of generated rows. One more kind, "real", is loaded: rows of SmolLM2."""


class Inputs:
    """The logits of one batch: target rows, by default realistic, and draft rows near them."""

    def __init__(
        self,
        batch: int,
        num_draft_tokens: int,
        dtype: torch.dtype,
        temperature: float,
        device: str = "cpu",
        rows: str = "realistic",
        vocab: int = VOCAB,
    ) -> None:
        if rows == "real":
            target, draft = load_rows(batch, num_draft_tokens, device)
            if target.shape[-1] != vocab:
                raise ValueError(f"real rows have {target.shape[-1]} tokens, not {vocab}")
        else:
            generator = torch.Generator(device).manual_seed(0)
            target = ROWS[rows](batch, num_draft_tokens + 1, vocab=vocab, generator=generator)
            draft = draft_rows(target[:, :num_draft_tokens], 0.6, generator)
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
    """Return inputs with draft rows over `size` of the tokens, and their sorted ids; other tokens are unlikely.

    The target's logits of these tokens are raised by 12, because realistic rows have single tokens that lead by more than
    6.
    """
    device, vocab = inputs.target_logits.device, inputs.target_logits.shape[-1]
    chosen = torch.randperm(vocab, generator=torch.Generator(device).manual_seed(1), device=device)
    ids = chosen[:size].sort().values
    narrow = copy.copy(inputs)
    narrow.target_logits = inputs.target_logits.index_add(-1, ids, torch.full_like(inputs.target_logits[..., ids], 12))
    narrow.draft_logits = inputs.draft_logits[..., ids].contiguous()
    return narrow, ids


def spread(rows: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Return draft rows over some tokens as rows over all tokens."""
    return rows.new_full((*rows.shape[:-1], vocab), -torch.inf).index_copy_(-1, ids, rows)


def describe(batch: int, num_draft_tokens: int, dtype: str, vocab: int = VOCAB) -> str:
    """Return the name of a shape, for grouping benchmarks."""
    return f"{batch} request{'s' * (batch > 1)}, {num_draft_tokens} drafts, {vocab:,} tokens, {dtype}"


def verification(
    inputs: Inputs, sampler: RejectionSampler, draft: DraftOutput, deterministic: bool = False, **options: Any
) -> Callable[[], SamplerOutput]:
    """Return a call that verifies the drafts; `deterministic` ones without draft logits. Options go to the sampler."""
    draft_logits = None if deterministic or sampler.method == "strict" else inputs.draft_logits
    logits = inputs.target_logits, draft.token_ids, draft_logits
    return functools.partial(sampler, *logits, **{"temperature": inputs.temperature, "seeds": 0, **options})


def packed_verification(
    inputs: Inputs, sampler: RejectionSampler, draft: DraftOutput, deterministic: bool = False, **options: Any
) -> Callable[[], SamplerOutput]:
    """Return a packed call that verifies the drafts; tensors by slot are in the reverse order of the requests."""
    batch, num_rows, _ = inputs.target_logits.shape
    device = inputs.target_logits.device
    draft_logits = None if deterministic or sampler.method == "strict" else inputs.draft_logits
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
