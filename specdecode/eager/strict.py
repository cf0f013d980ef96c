"""Strict in PyTorch: the target's own seeded sample at every position, compared with the draft."""

import torch
from torch import Tensor

from specdecode.batch import SamplerOutput
from specdecode.eager.greedy import argmax
from specdecode.eager.inputs import Inputs
from specdecode.eager.selection import block_sums, by_greedy, exp_scaled, mark_greedy, or_first, select
from specdecode.eager.truncation import RowSampling, read
from specdecode.noise import SELECT


def sample(
    logits: Tensor,
    sampling: RowSampling,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor | bool,
    domains: tuple[int, int] = SELECT,
) -> tuple[Tensor, ...]:
    """Draw one token per row: the argmax for greedy requests, otherwise from softmax(logits / temperature), truncated.

    Args:
        logits: [requests, ..., vocab] any float.
        sampling: [requests, ...] or broadcastable to it.
        seeds: [requests, ...] int64 or broadcastable to it.
        positions: [requests, ...] int64.
        greedy: [requests] bool, or one bool for all.
        domains: of the noise.

    Returns:
        [requests, ...] each: int64 token ids; logsumexp(logits / temperature) of the kept tokens, 0 for greedy requests,
        which have no softmax; bool, whether the row has no finite logit; and, if rows are truncated, int64 the last kept
        token.
    """

    def draw(
        logits: Tensor, sampling: RowSampling, seeds: Tensor, positions: Tensor, greedy: Tensor | None
    ) -> tuple[Tensor, ...]:
        temperature = sampling.temperature
        rows, cutoffs = read((logits,), (sampling,))
        row_max = rows.row_max[0].squeeze(-1)
        weights = exp_scaled(rows.logits[0], mark_greedy(rows, greedy).row_max[0], temperature[..., None])
        sums = block_sums(weights)
        total = sums.sum(dim=-1)
        token_ids, logsumexp = select(weights, sums, seeds, positions, domains), row_max / temperature + total.log()
        if rows.first is not None:
            token_ids, logsumexp = or_first(token_ids, total, rows.first[0]), torch.where(total > 0, logsumexp, row_max)
        if greedy is not None:
            logsumexp = logsumexp.masked_fill(greedy, 0)
            cutoffs = None if cutoffs is None else torch.where(greedy, token_ids, cutoffs)
        result = token_ids, logsumexp, row_max == -torch.inf
        return result if cutoffs is None else (*result, cutoffs)

    def pick(logits: Tensor, sampling: RowSampling, *_: Tensor | None) -> tuple[Tensor, ...]:
        token_ids, is_empty = argmax(logits)
        result = token_ids, token_ids.new_zeros(token_ids.shape, dtype=sampling.temperature.dtype), is_empty
        return (*result, token_ids.clone()) if sampling.truncates else result

    return by_greedy(greedy, draw, pick, logits.shape[1:].numel(), logits, sampling, seeds, positions)


def verify(inputs: Inputs, scheduled: Tensor | None = None) -> SamplerOutput:
    """Accept drafts while each is the target's own sample; then emit the target's own sample.

    `scheduled`, [batch, num_draft_tokens] bool, replaces the computed accept decisions.
    """
    token_ids, _, is_empty, *_ = sample(
        inputs.target_logits,
        inputs.sampling.at(slice(None), None),
        inputs.seeds[:, None],
        inputs.positions[:, None] + inputs.offsets,
        inputs.greedy,
    )
    accepted = token_ids[:, :-1] == inputs.draft_token_ids if scheduled is None else scheduled
    num_accepted = inputs.leading(accepted).minimum(inputs.num_drafts)
    emitted, emitted_empty = (at.gather(1, num_accepted[:, None]).squeeze(1) for at in (token_ids, is_empty))
    return inputs.output(num_accepted, emitted, is_empty[:, :-1], emitted_empty)
