"""Strict in PyTorch: the target's own seeded sample at every position, compared with the draft."""

import torch
from torch import Tensor

from specdecode.batch import SamplerOutput
from specdecode.eager.greedy import argmax
from specdecode.eager.selection import Requests, block_sums, by_kind, exp_scaled, point_masses, read, select
from specdecode.eager.steps import Steps
from specdecode.noise import SELECT


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor | bool,
    domains: tuple[int, int] = SELECT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row: the argmax for greedy requests, else from softmax(logits / temperature).

    Args:
        logits: [requests, ..., vocab] any float.
        temperature: [requests, ...] or what broadcasts to it, > 0 and in the dtype to compute in.
        seeds: [requests, ...] or what broadcasts to it, int64.
        positions: [requests, ...] int64.
        greedy: [requests] bool, or one for all.
        domains: of the noise.

    Returns:
        [requests, ...] each: int64 token ids; logsumexp(logits / temperature), 0 for greedy requests, which have no
        softmax; bool, whether the row has no finite logit.
    """

    def draw(
        logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = read((logits,), temperature.dtype)
        row_max = rows.row_max[0].squeeze(-1)
        rows = point_masses(rows, greedy)
        weights = exp_scaled(rows.logits[0], rows.row_max[0], temperature[..., None])
        sums = block_sums(weights)
        token_ids = select(weights, sums, seeds, positions, domains)
        logsumexp = row_max / temperature + sums.sum(dim=-1).log()
        return token_ids, logsumexp if greedy is None else logsumexp.masked_fill(greedy, 0), row_max == -torch.inf

    def pick(logits: Tensor, temperature: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        token_ids, is_empty = argmax(logits)
        return token_ids, token_ids.new_zeros(token_ids.shape, dtype=temperature.dtype), is_empty

    tensors = (logits, temperature, seeds, positions)
    token_ids, logsumexp, is_empty = by_kind(greedy, draw, pick, logits.shape[1:].numel(), *tensors)
    return token_ids, logsumexp, is_empty


def verify(steps: Steps, scheduled: Tensor | None = None) -> SamplerOutput:
    """Accept drafts while each is the target's own sample; then emit the target's own sample.

    Args:
        steps: the batch.
        scheduled: [batch, num_draft_tokens] which drafts to accept instead, or None.
    """
    drafts = torch.nn.functional.pad(steps.draft_token_ids, (0, 1), value=-1)
    accepts = None if scheduled is None else torch.nn.functional.pad(scheduled, (0, 1))

    def draw(rows: Requests, offsets: slice) -> tuple[Tensor, Tensor, Tensor]:
        token_ids, _, is_empty = sample(
            steps.target_logits[rows, offsets],
            steps.temperature[rows, None],
            steps.seeds[rows, None],
            steps.positions[rows, None] + steps.offsets[offsets],
            steps.greedy_among(rows),
        )
        accepted = token_ids == drafts[rows, offsets] if accepts is None else accepts[rows, offsets]
        return accepted, token_ids, is_empty

    accepted, token_ids, is_empty = steps.scan(steps.num_drafts + 1, steps.num_draft_tokens + 1, draw)
    num_accepted = steps.leading(accepted[:, :-1]).minimum(steps.num_drafts)
    emitted, emitted_empty = (at.gather(1, num_accepted[:, None]).squeeze(1) for at in (token_ids, is_empty))
    return steps.output(num_accepted, emitted, is_empty[:, :-1], emitted_empty)
