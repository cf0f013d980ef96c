"""Lists for the rows of emitted tokens in PyTorch: their likeliest tokens, and their kept sets.

Both use the row that tokens are drawn from, adjusted and truncated; the likeliest tokens can also use the raw row.
"""

from typing import Any

import torch
from torch import Tensor

from specdecode.batch import MOST_KEPT, SamplerOutput, VerificationBatch
from specdecode.eager.greedy import argmax
from specdecode.eager.inputs import Inputs
from specdecode.eager.selection import Compute, Rows, block_sums, by_greedy, exp_scaled, point_masses
from specdecode.eager.truncation import RowSampling, read


def with_lists(inputs: Inputs, raw_logits: Any, output: SamplerOutput, batch: VerificationBatch) -> SamplerOutput:
    """Return the output with the lists that the batch requests, for the rows of its tokens.

    `raw_logits` are the target's, [batch, num_draft_tokens + 1, vocab], not adjusted.
    """
    is_after_last = output.token_ids < 0
    if batch.top_logprobs > 0:
        is_raw = batch.logprobs == "raw"
        token_ids, logprobs = top_logprobs(inputs, raw_logits if is_raw else None, batch.top_logprobs)
        output = output._replace(
            top_token_ids=token_ids.masked_fill(is_after_last[..., None], -1),
            top_logprobs=logprobs.masked_fill(is_after_last[..., None], torch.nan),
        )
    if batch.kept_sets:
        num_kept, token_ids, cutoff = kept_sets(inputs)
        output = output._replace(
            num_kept=num_kept.masked_fill(is_after_last, 0),
            kept_token_ids=token_ids.masked_fill(is_after_last[..., None], -1),
            kept_cutoff=cutoff.masked_fill(is_after_last, -1),
        )
    return output


def top_logprobs(inputs: Inputs, raw_logits: Any | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of each row, and their log-probabilities.

    Args:
        inputs: the batch.
        raw_logits: [batch, num_draft_tokens + 1, vocab] for the raw rows, at temperature 1, untruncated; None for the
            sampled rows.
        count: the number of tokens.

    Returns:
        [batch, num_draft_tokens + 1, count] int64 and float32; -1 and -inf after the last possible token.
    """

    def of_rows(logits: Tensor, sampling: RowSampling, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, _ = sampled_rows(logits, sampling, greedy)
        return likeliest(rows, sampling.temperature, count)

    def of_point_mass(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        token_ids = lists_of_one(argmax(logits)[0], count)
        return token_ids, torch.zeros_like(token_ids, dtype=torch.float32).masked_fill_(token_ids < 0, -torch.inf)

    return of_all_rows(inputs, raw_logits, of_rows, of_point_mass)


def kept_sets(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of kept tokens of each row, their ids, and the last kept id.

    Returns:
        [batch, num_draft_tokens + 1] int32; [batch, num_draft_tokens + 1, MOST_KEPT] int32; [batch, num_draft_tokens + 1]
        int64, -1 for rows that are not truncated.
    """

    def of_rows(logits: Tensor, sampling: RowSampling, greedy: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rows, cutoffs = sampled_rows(logits, sampling, greedy)
        return *listed(rows.logits[0] > -torch.inf), cutoffs

    def of_point_mass(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        token_ids = argmax(logits)[0]
        return (
            torch.ones_like(token_ids, dtype=torch.int32),
            lists_of_one(token_ids, MOST_KEPT).to(torch.int32),
            token_ids,
        )

    return of_all_rows(inputs, None, of_rows, of_point_mass)


def of_all_rows(inputs: Inputs, raw_logits: Any | None, of_rows: Compute, of_point_mass: Compute) -> tuple[Any, ...]:
    """Apply `of_rows` to all rows, and `of_point_mass` to the rows of greedy requests."""
    sampling = inputs.sampling if raw_logits is None else RowSampling(torch.ones_like(inputs.temperature))
    logits, greedy = (inputs.target_logits, inputs.greedy) if raw_logits is None else (raw_logits, False)
    return by_greedy(greedy, of_rows, of_point_mass, logits.shape[1:].numel(), logits, sampling.at(slice(None), None))


def sampled_rows(logits: Tensor, sampling: RowSampling, greedy: Tensor | None) -> tuple[Rows, Tensor]:
    """Return rows with finite logits where p > 0 and -inf elsewhere, and the last kept token of each row.

    A point mass is 0 at its token, which is the last kept token.

    Args:
        logits: [..., vocab] raw or adjusted.
        sampling: [...] or broadcastable to it.
        greedy: [...] bool or broadcastable to it, None if no row is greedy.
    """
    rows, cutoffs = read((logits,), (sampling,))
    if cutoffs is None:
        cutoffs = torch.full(logits.shape[:-1], -1, device=logits.device)
    if rows.first is not None:
        is_point = rows.row_max[0, ..., 0].isinf()
        is_point = is_point if greedy is None else is_point | greedy
        cutoffs = torch.where(is_point, rows.first[0, ..., 0], cutoffs)
    return point_masses(rows, greedy), cutoffs


def likeliest(rows: Rows, temperature: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first tokens in the order (logit descending, id ascending), and their log-probabilities."""
    logits, row_max = rows.logits[0], rows.row_max[0]
    temperature = temperature[..., None].expand_as(row_max)
    values, token_ids = (each[..., :count] for each in logits.sort(dim=-1, descending=True, stable=True))
    sums = block_sums(exp_scaled(logits, row_max, temperature)).sum(dim=-1, keepdim=True)
    is_none = values == -torch.inf
    logprobs = ((values - row_max) / temperature - sums.log()).to(torch.float32)
    padding = 0, count - values.shape[-1]  # for a vocabulary of fewer tokens
    token_ids = torch.nn.functional.pad(token_ids.masked_fill(is_none, -1), padding, value=-1)
    return token_ids, torch.nn.functional.pad(logprobs, padding, value=-torch.inf)


def listed(is_kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of kept tokens, [...] int32, and their ids, [..., MOST_KEPT] int32; no ids if they do not fit."""
    ids = torch.arange(is_kept.shape[-1], dtype=torch.int32, device=is_kept.device)
    num_kept = is_kept.sum(dim=-1)
    is_listed = is_kept & (num_kept <= MOST_KEPT)[..., None]
    entries = (is_kept.cumsum(dim=-1) - 1).where(is_listed, MOST_KEPT)  # other tokens go to an extra entry
    token_ids = ids.new_full((*is_kept.shape[:-1], MOST_KEPT + 1), -1)
    return num_kept.to(torch.int32), token_ids.scatter_(-1, entries, ids.expand_as(entries))[..., :MOST_KEPT]


def lists_of_one(token_ids: Tensor, count: int) -> Tensor:
    """Return lists with one token, padded with -1, [..., count] int64, given token ids [...] int64."""
    return torch.nn.functional.pad(token_ids[..., None], (0, count - 1), value=-1)
