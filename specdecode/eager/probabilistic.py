"""Probabilistic in PyTorch: accept by likelihood ratio, and after a rejection draw from the residual."""

import functools
from typing import Any

import torch
from torch import Tensor

from specdecode.arguments import on_host
from specdecode.batch import SamplerOutput
from specdecode.eager.greedy import argmax
from specdecode.eager.inputs import Inputs
from specdecode.eager.residual import residual
from specdecode.eager.selection import block_sums, by_case, by_chunks, by_greedy, exp_scaled, rows_at
from specdecode.eager.strict import sample
from specdecode.eager.truncation import RowSampling, read


def logprob(logit: Tensor, row_max: Tensor, temperature: Tensor, sums: Tensor, is_first: Tensor | None) -> Tensor:
    """Return log p = (l - max) / T - log(sum); of a point mass, where this is NaN, log of `is_first`."""
    result = (logit - row_max) / temperature - sums.log()
    return result if is_first is None else torch.where(result.isnan(), is_first.log(), result)


def logprobs(
    models: tuple[Tensor, ...], token_ids: Tensor, samplings: tuple[RowSampling, ...], greedy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of one token per row for each model, and whether the target row has no finite logit.

    Args:
        models: [..., vocab] raw logits of the target, and of the draft if it is needed.
        token_ids: [...] int64.
        samplings: [...] or broadcastable to it, of each model.
        greedy: [...] bool or broadcastable to it, None if no row is greedy.

    Returns:
        [models, ...] and [...].
    """
    rows, _ = read(models, samplings)
    temperature = samplings[0].temperature[..., None].expand_as(rows.row_max)
    token_ids = token_ids[None, ..., None].expand(rows.row_max.shape)
    logit = rows.logits.gather(-1, token_ids)
    sums = block_sums(exp_scaled(rows.logits, rows.row_max, temperature)).sum(dim=-1, keepdim=True)
    if rows.outside is not None:
        sums[-1, ..., 0] += rows.outside
    is_first = None if rows.first is None else (rows.first == token_ids).to(rows.row_max.dtype)
    result, is_empty = logprob(logit, rows.row_max, temperature, sums, is_first), rows.row_max[0, ..., 0] == -torch.inf
    if greedy is not None and is_first is not None:
        result = torch.where(greedy[..., None], is_first.log(), result)
    return result.squeeze(-1), is_empty


def log_ratio(
    target: Tensor,
    draft: Tensor | None,
    token_ids: Tensor,
    sampling: RowSampling,
    draft_sampling: RowSampling,
    greedy: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return log(p(x) / q(x)) of each row's draft x, -inf where p(x) or q(x) is 0, and whether the target row is empty.

    For a deterministic drafter and for greedy requests q(x) = 1.
    """
    if draft is None:
        (target_logprob,), is_empty = logprobs((target,), token_ids, (sampling,), greedy)
        return target_logprob, is_empty
    (target_logprob, draft_logprob), is_empty = logprobs((target, draft), token_ids, (sampling, draft_sampling), greedy)
    if greedy is not None:
        draft_logprob = draft_logprob.masked_fill(greedy, 0)
    ratio = target_logprob - draft_logprob
    return ratio.nan_to_num_(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf), is_empty


def log_ratios(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return `log_ratio` of all drafts, [batch, num_draft_tokens] each."""

    def match(
        target: Tensor, _: Tensor | None, token_ids: Tensor, sampling: RowSampling, *__: Any
    ) -> tuple[Tensor, Tensor]:
        best, is_empty = argmax(target)
        return (best == token_ids).to(sampling.temperature.dtype).log(), is_empty

    target, draft = inputs.target_logits[:, :-1], inputs.draft_logits
    samplings = inputs.sampling.at(slice(None), None), inputs.draft_sampling.at(slice(None), None)
    logits_each = target.shape[1:].numel() * (1 if draft is None else 2)
    tensors = target, draft, inputs.draft_token_ids, *samplings
    ratios, is_empty = by_greedy(inputs.greedy, log_ratio, match, logits_each, *tensors)
    return ratios, is_empty


def accepts(log_uniform: Tensor, log_ratio: Tensor) -> Tensor:
    """Decide whether drafts are accepted: log u <= log(p(x) / q(x))."""
    return log_uniform <= log_ratio


def recover(
    inputs: Inputs,
    requests: Tensor,
    offsets: Tensor,
    log_running_ratio: Tensor,
    sampling: RowSampling,
    draft_sampling: RowSampling,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens from max(0, c p - q), or from p where c is infinite, at one offset of each request."""
    # After all drafts there is no draft row. The last row is read instead; with an infinite c it does not matter.
    at_draft = requests, offsets.clamp(max=inputs.num_draft_tokens - 1)
    draft = None if inputs.draft_logits is None else rows_at(inputs.draft_logits, *at_draft)
    target, token_ids = rows_at(inputs.target_logits, requests, offsets), None
    if draft is None:
        token_ids = inputs.draft_token_ids[at_draft]
    found, is_empty = residual(target, draft, token_ids, sampling, draft_sampling, log_running_ratio, greedy)
    return found.draw(seeds, positions), is_empty


def emit(inputs: Inputs, num_accepted: Tensor, log_running_ratio: Tensor | None = None) -> tuple[Tensor, ...]:
    """Draw the token after each request's accepted drafts: a recovered token after a rejection, otherwise a bonus token.

    A bonus token is a recovered token with an infinite c, so a GPU draws all tokens in one way. The CPU reads no draft row
    for a bonus token.

    Args:
        inputs: the batch.
        num_accepted: [batch] int64.
        log_running_ratio: [batch] log c; recovered tokens are drawn from max(0, c p - q); None: c = 1.

    Returns:
        [batch] int64 token ids; [batch] bool, whether the target row has no finite logit.
    """

    def bonus(requests: Tensor, offsets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        token_ids, _logsumexp, is_empty, *_cutoff = sample(
            inputs.target_logits[requests, offsets],
            inputs.sampling.at(requests),
            inputs.seeds[requests],
            inputs.positions[requests] + offsets,
            inputs.greedy if isinstance(inputs.greedy, bool) else inputs.greedy[requests],
        )
        return token_ids, is_empty

    is_bonus = num_accepted >= inputs.num_drafts
    if isinstance(inputs.greedy, Tensor):
        is_bonus |= inputs.greedy
    if log_running_ratio is None:
        log_running_ratio = torch.zeros_like(inputs.temperature)
    greedy = None if isinstance(inputs.greedy, bool) or on_host(inputs.greedy) else inputs.greedy
    scalars = (inputs.sampling, inputs.draft_sampling, inputs.seeds, inputs.positions + num_accepted, greedy)
    tensors = (inputs.requests, num_accepted, log_running_ratio.masked_fill(is_bonus, torch.inf), *scalars)
    recovered = functools.partial(by_chunks, functools.partial(recover, inputs), 2 * inputs.vocab)
    if inputs.num_draft_tokens == 0 or inputs.greedy is True:
        return bonus(*tensors)
    if on_host(is_bonus):
        return by_case(is_bonus, bonus, recovered, *tensors)
    return recovered(*tensors)


def verify(inputs: Inputs, scheduled: Tensor | None = None) -> SamplerOutput:
    """Accept drafts by likelihood ratio up to the first rejection; then emit a recovered or bonus token.

    `scheduled`, [batch, num_draft_tokens] bool, replaces the computed accept decisions.
    """
    ratios, is_empty = log_ratios(inputs)
    accepted = accepts(inputs.log_uniforms(), ratios) if scheduled is None else scheduled
    num_accepted = inputs.leading(accepted).minimum(inputs.num_drafts)
    emitted, emitted_is_empty = emit(inputs, num_accepted)
    return inputs.output(num_accepted, emitted, is_empty, emitted_is_empty)
