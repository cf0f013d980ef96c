"""Truncation in PyTorch: logits that top-k, top-p and min-p exclude become -inf, by sorting each row."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdecode.arguments import on_host
from specdecode.batch import Truncation
from specdecode.eager.selection import Rows, point_masses
from specdecode.eager.selection import read as read_whole
from specdecode.eager.vocabulary import DraftVocabRows

ALL = torch.iinfo(torch.int64).max


class RowSampling(NamedTuple):
    """The sampling parameters of rows; each field is [...] or broadcastable to it."""

    temperature: Tensor
    """> 0 and in the dtype of computation."""

    target_temperature: Tensor | None = None
    """Of draft rows, the target's temperature; their logits are rescaled to it for comparison. None: the same."""

    top_k: Tensor | None = None
    """int64, at least 1; None: all tokens."""

    top_p: Tensor | None = None
    """float64; above 1: all tokens."""

    min_p: Tensor | None = None
    """In the dtype of the temperature."""

    @property
    def truncates(self) -> bool:
        """Whether any token may be excluded."""
        return any(field is not None for field in self[2:])

    def at(self, *index: Any) -> "RowSampling":
        """Return the fields at an index."""
        others = (None if field is None else field[index] for field in self[1:])
        return RowSampling(self.temperature[index], *others)


def row_sampling(temperature: Tensor, truncation: Truncation | None, vocab: int) -> RowSampling:
    """Return the sampling parameters as [batch] tensors, given [batch] temperatures > 0.

    Values that could not be checked on the host are made harmless: a top_k below 1, and a top_p or min_p that is NaN,
    keep all tokens; a top_p of 0 or less keeps one token; a min_p above 1 keeps the most likely tokens.
    """
    if truncation is None:
        return RowSampling(temperature)

    def each(value: Tensor | float | None, dtype: torch.dtype) -> Tensor | None:
        if value is None or isinstance(value, Tensor):
            return None if value is None else value.to(dtype)
        return torch.full_like(temperature, value, dtype=dtype)

    top_k, top_p = each(truncation.top_k, torch.int64), each(truncation.top_p, torch.float64)
    min_p = each(truncation.min_p, temperature.dtype)
    return RowSampling(
        temperature,
        None,
        None if top_k is None else top_k.masked_fill((top_k < 1) | (top_k >= vocab), ALL),
        None if top_p is None else top_p.masked_fill(~(top_p < 1), 2.0),
        None if min_p is None else min_p.nan_to_num(nan=0.0).clamp(0, 1),
    )


def of_drafts(sampling: RowSampling, greedy: Tensor | bool, target_temperature: Tensor) -> RowSampling:
    """Return the drafts' sampling parameters with the target's temperature; greedy drafts have a top_k of 1."""
    whole = torch.full_like(target_temperature, ALL, dtype=torch.int64)
    top_k = whole if sampling.top_k is None else sampling.top_k
    top_k = top_k.masked_fill(greedy, 1) if isinstance(greedy, Tensor) else torch.ones_like(top_k) if greedy else top_k
    return sampling._replace(target_temperature=target_temperature, top_k=top_k)


def truncate(logits: Tensor, row_max: Tensor, sampling: RowSampling) -> Tensor:
    """Replace truncated logits by -inf, in place; return the last kept token of each row, [...] int64.

    It is -1 for rows with neutral limits.

    Args:
        logits: [..., vocab] without NaN.
        row_max: [..., 1] their maxima.
        sampling: how tokens are drawn from each row.
    """
    top_k, top_p, min_p = (None if field is None else field[..., None] for field in sampling[2:])
    values, token_ids = logits.sort(dim=-1, descending=True, stable=True)  # of equal logits the lowest id first
    scaled = (values - row_max) / sampling.temperature[..., None]
    kept = scaled > -torch.inf
    if min_p is not None:
        kept &= scaled >= min_p.log()
    if top_k is not None:
        kept &= torch.arange(logits.shape[-1], device=logits.device) < top_k
    if top_p is not None:
        probs = torch.where(kept, scaled.exp(), 0).to(torch.float64)
        mass = probs.cumsum(dim=-1)
        kept &= mass - probs < top_p * mass[..., -1:]
    kept[..., 0] = True
    logits.scatter_(-1, token_ids, values.masked_fill(~kept, -torch.inf))
    cutoffs = token_ids.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
    return cutoffs.squeeze(-1).masked_fill(is_whole(sampling) & row_max.squeeze(-1).isfinite(), -1)


def is_whole(sampling: RowSampling) -> Tensor:
    """Return the mask of rows with neutral limits, in the shape of the sampling parameters, bool."""
    neutral = zip(sampling[2:], (ALL, 2.0, 0.0))
    return functools.reduce(torch.logical_and, [limit == value for limit, value in neutral if limit is not None])


def read(models: tuple[Tensor, ...], samplings: tuple[RowSampling, ...]) -> tuple[Rows, Tensor | None]:
    """Copy rows of raw logits, each truncated by its own parameters and rescaled to the temperature of the first model.

    Args:
        models: [..., vocab] raw logits of the target, and of the draft if it is needed, possibly as `DraftVocabRows`.
        samplings: the sampling parameters of each model's rows.

    Returns:
        The rows, and the cutoffs of the first model, [...] int64; None if it is not truncated.
    """
    if isinstance(models[-1], DraftVocabRows):
        return read_and_spread(*models, *samplings)
    cutoffs = None
    rows = read_whole(models, samplings[0].temperature.dtype)
    for model, (logits, row_max, sampling) in enumerate(zip(rows.logits, rows.row_max, samplings)):
        if sampling.truncates:
            kept_to = truncate(logits, row_max, sampling)
            cutoffs = kept_to if model == 0 else cutoffs
    return rows._replace(row_max=to_one_temperature(rows.logits, rows.row_max, samplings)), cutoffs


def to_one_temperature(logits: Tensor, row_max: Tensor, samplings: tuple[RowSampling, ...]) -> Tensor:
    """Rescale the last model's rows to the temperature T of the first, in place; return the rows' maxima.

    softmax(l / T') = softmax(l' / T) where l' = ((l - max) / T') T. This rounds, so where T' differs from T, the target's
    rows are rounded in the same way. Equal distributions then stay equal, and rounding is not mistaken for a residual. A
    row with an infinite maximum is a point mass, and remains as it is.

    Args:
        logits: [models, ..., vocab].
        row_max: [models, ..., 1] their maxima.
        samplings: of each model.
    """
    if samplings[-1].target_temperature is None:
        return row_max
    common = samplings[-1].target_temperature[..., None]
    is_rescaled = row_max.isfinite() & (samplings[-1].temperature[..., None] != common)
    if on_host(is_rescaled) and not is_rescaled.any():
        return row_max
    logits.sub_(row_max.masked_fill(~is_rescaled, 0))
    for rows, where, sampling in zip(logits, is_rescaled, samplings):
        rows.div_(sampling.temperature[..., None].where(where, 1)).mul_(common.where(where, 1))
    return row_max.masked_fill(is_rescaled, 0)


def read_and_spread(
    target: Tensor, draft: DraftVocabRows, sampling: RowSampling, draft_sampling: RowSampling
) -> tuple[Rows, Tensor | None]:
    """Read rows of a target, and of a draft with its own vocabulary; draft rows are truncated first and then spread."""
    rows, cutoffs = read((target,), (sampling,))
    drafts, _ = read((draft.tensor,), (draft_sampling._replace(target_temperature=None),))
    drafts = point_masses(drafts)  # ties are broken by draft ids
    spread = draft.spread(drafts.logits, rows.logits.shape[-1])
    first = None if rows.first is None else torch.cat([rows.first, spread.argmax(dim=-1, keepdim=True)])
    outside = draft.weight_outside(drafts.logits, drafts.row_max, draft_sampling.temperature)
    outside = None if outside is None else outside[0]
    logits = torch.cat([rows.logits, spread])
    row_max = torch.cat([rows.row_max, drafts.row_max])
    row_max = to_one_temperature(logits, row_max, (sampling, draft_sampling))
    return Rows(logits, row_max, first, outside), cutoffs


def is_kept(logits: Tensor, token_ids: Tensor, cutoffs: Tensor) -> Tensor:
    """Return whether tokens come before the cutoff, or are the cutoff, in the order of truncation.

    Args:
        logits: [..., vocab] raw logits.
        token_ids: [...] int64.
        cutoffs: [...] int64, the last kept token of each row, -1 if all tokens are kept.
    """
    inside = cutoffs.clamp(0, logits.shape[-1] - 1)
    logit, least = (logits.gather(-1, ids[..., None]).squeeze(-1) for ids in (token_ids, inside))
    return (cutoffs < 0) | (logit > least) | ((logit == least) & (token_ids <= cutoffs))
