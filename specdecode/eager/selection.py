"""Two-level selection in PyTorch: from rows of logits to tokens, many rows at once.

Rows are copied to float32 (float64 stays float64) a few requests at a time, so that no copy of all logits ever exists.
The copies are padded to whole blocks with -inf. Reductions run along one row or one block, so on the CPU a row's result
does not depend on other rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdecode.arguments import on_host
from specdecode.eager.adjustments import AdjustedRows
from specdecode.eager.packed import IndexedRows
from specdecode.eager.philox import race
from specdecode.eager.vocabulary import DraftVocabRows
from specdecode.noise import BLOCK_SIZE

CHUNK_LOGITS = {"cpu": 2**19, "cuda": 2**26}
"""Logits copied at a time: few enough for a core's cache, or enough to keep a GPU busy."""

Requests = Tensor | slice
Compute = Callable[..., tuple[Tensor, ...]]


def gathered(logits: Any) -> Any:
    """Return logits as a tensor: indexed rows are copied now, also inside a named tuple.

    `vocabulary.DraftVocabRows` keep their type; their logits become a tensor.
    """
    if isinstance(logits, tuple):
        return type(logits)(*map(gathered, logits))
    return logits.gather() if isinstance(logits, IndexedRows | AdjustedRows | DraftVocabRows) else logits


def rows_at(logits: Any, requests: Tensor, offsets: Tensor) -> Any:
    """Copy one row of each request, [requests, vocab], given [batch, rows, vocab] logits."""
    return gathered(logits[requests, offsets])


def take(tensors: tuple[Any, ...], rows: Requests) -> tuple[Any, ...]:
    """Return some rows of each tensor, also of tensors inside named tuples."""
    return tuple(
        None if tensor is None else type(tensor)(*take(tensor, rows)) if isinstance(tensor, tuple) else tensor[rows]
        for tensor in tensors
    )


def by_chunks(compute: Compute, logits_each: int, *tensors: Any) -> tuple[Tensor, ...]:
    """Apply `compute` to a few requests of the tensors at a time and concatenate the results.

    Args:
        compute: a function of the tensors.
        logits_each: the number of logits that it copies for each request.
        tensors: [requests, ...] each, or named tuples of such tensors; all except the first may be None.
    """
    first = tensors[0]
    assert first is not None
    step = max(1, CHUNK_LOGITS.get(first.device.type, 2**22) // max(1, logits_each))
    starts = range(0, max(1, len(first)), step)
    parts = [compute(*map(gathered, take(tensors, slice(start, start + step)))) for start in starts]
    return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts))


def by_case(case: Tensor, compute: Compute, otherwise: Compute, *tensors: Any) -> tuple[Tensor, ...]:
    """Apply `compute` to the requests in `case` and `otherwise` to the others; return the results in the requests' order.

    Args:
        case: [requests] bool, on the host.
        compute: a function of the tensors.
        otherwise: a function of the tensors, whose results have the same shapes and dtypes.
        tensors: [requests, ...] each, or None.
    """
    for every, function in ((case, compute), (~case, otherwise)):
        if every.all():
            return function(*tensors)
    some, others = case.nonzero().squeeze(1), (~case).nonzero().squeeze(1)
    parts = compute(*take(tensors, some)), otherwise(*take(tensors, others))
    order = torch.cat([some, others]).argsort()
    return tuple(torch.cat(pair)[order] for pair in zip(*parts))


def by_greedy(
    greedy: Tensor | bool, draw: Compute, pick: Compute, logits_each: int, logits: Tensor, *tensors: Any
) -> tuple[Tensor, ...]:
    """Apply `pick` to greedy requests, and `draw` to the others; `draw` also receives a mask of greedy rows, or None.

    On a device `draw` receives all requests if some may be greedy, because counting them would require waiting.
    """
    drawn, picked = (functools.partial(by_chunks, compute, logits_each) for compute in (draw, pick))
    if isinstance(greedy, bool):
        return (picked if greedy else drawn)(logits, *tensors, None)
    if on_host(greedy):
        return by_case(greedy, picked, drawn, logits, *tensors, None)
    return drawn(logits, *tensors, greedy.view(-1, *[1] * (logits.ndim - 2)))


class Rows(NamedTuple):
    """Rows of one or two models, copied to the dtype of computation."""

    logits: Tensor
    """[models, ..., padded vocab]."""

    row_max: Tensor
    """[models, ..., 1] the maximum; -inf if the row is empty, that is, has only NaN and -inf.

    A row with an infinite maximum is the point mass on the first entry that equals it.
    """

    first: Tensor | None
    """[models, ..., 1] int64, the first entry that equals the maximum; None if all maxima are finite."""

    outside: Tensor | None = None
    """[...] additional weight of the last model's row that belongs to no token, relative to its maximum; None: 0."""


def read(models: tuple[Tensor, ...], dtype: torch.dtype) -> Rows:
    """Copy rows of raw logits, [..., vocab] of each model, and find their maxima. NaN counts as -inf."""
    logits = copy(models, dtype)
    if on_host(logits):
        row_max = logits.amax(dim=-1, keepdim=True)
        if bool(row_max.isfinite().all()):
            return Rows(logits, row_max, None)
    logits.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return Rows(logits, *logits.max(dim=-1, keepdim=True))


def copy(models: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return [models, ..., padded vocab] logits in `dtype`, contiguous."""
    vocab, device = models[0].shape[-1], models[0].device
    padded = vocab if vocab <= BLOCK_SIZE else -(-vocab // BLOCK_SIZE) * BLOCK_SIZE
    logits = torch.empty(len(models), *models[0].shape[:-1], padded, dtype=dtype, device=device)
    logits[..., vocab:] = -torch.inf
    for rows, raw in zip(logits, models):
        rows[..., :vocab] = raw
    return logits


def mark_greedy(rows: Rows, greedy: Tensor | None) -> Rows:
    """Make the maxima of greedy rows infinite.

    With an infinite maximum, the weights from `exp_scaled` sum to 0 or NaN, and a row whose sum is not positive draws
    `first`. Writing the weights of a point mass would need a pass over all rows.

    Args:
        rows: [models, ..., vocab].
        greedy: [...] bool, or None if no row is.
    """
    return rows if greedy is None else rows._replace(row_max=rows.row_max.masked_fill(greedy[..., None], torch.inf))


def or_first(token_ids: Tensor, total: Tensor, first: Tensor | None) -> Tensor:
    """Return token ids, [...], replaced by `first` in rows whose total weight, [..., 1], is not positive."""
    return token_ids if first is None else torch.where(total > 0, token_ids, first.squeeze(-1))


def point_masses(rows: Rows, greedy: Tensor | None = None) -> Rows:
    """Make rows that are greedy, or have an infinite maximum, point masses on their first largest entry, in place.

    A point mass is 0 at that entry and -inf elsewhere.

    Args:
        rows: [models, ..., vocab].
        greedy: [...] bool, or None if no row is.
    """
    if rows.first is None:
        return rows
    is_point = rows.row_max.abs() == torch.inf
    row_max = rows.row_max.nan_to_num(posinf=0, neginf=0)
    if greedy is not None:
        is_point |= greedy[..., None]
        row_max.masked_fill_(greedy[..., None], 0)
    rows.logits.masked_fill_(is_point, -torch.inf).scatter_(-1, rows.first, row_max)
    return rows._replace(row_max=row_max)


def exp_scaled(logits: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((l - max) / T); may overwrite the logits."""
    return logits.sub_(row_max).div_(temperature).exp_()


def in_blocks(rows: Tensor) -> Tensor:
    """View [..., padded vocab] rows as [..., num_blocks, block size]."""
    size = min(BLOCK_SIZE, rows.shape[-1])
    return rows.view(*rows.shape[:-1], rows.shape[-1] // size, size)


def block_sums(weights: Tensor) -> Tensor:
    """Return the sum of each block of [..., padded vocab] weights, [..., num_blocks]."""
    return in_blocks(weights).sum(dim=-1)


def select(
    weights: Tensor,
    sums: Tensor,
    seeds: Tensor,
    positions: Tensor,
    domains: tuple[int, int],
    otherwise: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Draw one token per row with probability proportional to its weight.

    Gumbel-max is computed as an exponential race: with Gumbel numbers G = -log E, log w + G and w / E have the same argmax.

    Args:
        weights: [..., padded vocab] w >= 0.
        sums: [..., num_blocks] block sums of w.
        seeds: [...] int64 or broadcastable to it.
        positions: [...] int64, of the drawn tokens.
        domains: of the noise for the block and for the token.
        otherwise: (weights, block sums) for rows whose w are all 0; None if there are no such rows.

    Returns:
        [...] int64 token ids; undefined for a row with NaN among its weights.
    """
    size, num_blocks = min(BLOCK_SIZE, weights.shape[-1]), sums.shape[-1]
    seeds, positions = seeds[..., None], positions[..., None]
    rows: tuple[Tensor, ...] = (weights,)
    if otherwise is not None:
        weighs = sums.any(dim=-1, keepdim=True)
        if not on_host(weighs) or not weighs.all():
            rows, sums = (weights, otherwise[0]), torch.where(weighs, sums, otherwise[1])
    ids = torch.arange(max(size, num_blocks), device=sums.device)
    token_ids = ids[:size]
    if num_blocks > 1:
        block = race(sums, seeds, positions, ids[:num_blocks], domains[0])
        token_ids = torch.add(token_ids, block, alpha=size)
        rows = tuple(each.gather(-1, token_ids) for each in rows)
    weights = rows[0] if len(rows) == 1 else torch.where(weighs, rows[0], rows[1])
    best = race(weights, seeds, positions, token_ids, domains[1])
    return token_ids.expand_as(weights).gather(-1, best).squeeze(-1)
