"""Selection in PyTorch: logits rows to tokens by two-level Gumbel-max, many rows at once.

The vocabulary-sized work is done on a few rows at a time, so that no float32 copy of all logits ever exists. Reductions
run along one row or one block, so a row's result does not depend on the rows beside it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdecode.batch import on_host
from specdecode.eager.philox import gumbel
from specdecode.noise import BLOCK_SIZE

CHUNK_LOGITS = {"cpu": 2**19, "cuda": 2**26}
"""Logits upcast at a time: what stays in a core's cache, or what keeps a GPU busy."""

CHUNK_NOISE = {"cpu": 2**16, "cuda": 2**26}
"""Numbers drawn at a time, likewise: Philox makes many temporaries of int64."""

Rows = Tensor | slice


def rows_where(mask: Tensor) -> Rows:
    """Return the rows that matter: those where `mask` holds, or all where counting them would wait for the device."""
    if not on_host(mask) or (len(mask) and bool(mask.all())):
        return slice(None)
    return mask.nonzero().squeeze(1)


def fill(outputs: tuple[Tensor, ...], mask: Tensor, compute: Callable[[Rows], tuple[Tensor, ...]]) -> None:
    """Set each output where `mask` holds to what `compute` returns for those rows."""
    rows = rows_where(mask)
    if mask[rows].numel() == 0:
        return
    for output, values in zip(outputs, compute(rows)):
        output[rows] = torch.where(mask[rows], values.to(output.dtype), output[rows])


def by_chunks(compute: Callable[..., tuple[Tensor, ...]], vocab: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply `compute` to a few rows of the tensors at a time and concatenate what it returns."""
    device = tensors[0].device.type
    most_logits, most_noise = CHUNK_LOGITS.get(device, 2**22), CHUNK_NOISE.get(device, 2**22)
    step = max(1, min(most_logits // vocab, most_noise // min(vocab, BLOCK_SIZE)))
    starts = range(0, len(tensors[0]), step)
    parts = [compute(*(tensor[start : start + step] for tensor in tensors)) for start in starts]
    return tuple(torch.cat(column) for column in zip(*parts))


def centre(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return (l - max l) / T for each row, and max l.

    NaN counts as -inf. A row whose maximum is not finite becomes the point mass on its first largest entry.

    Args:
        logits: [rows, vocab] any float.
        temperature: [rows], in the dtype to compute in, > 0.
    """
    # Contiguous whatever the layout of the logits: it decides in which order PyTorch adds.
    scaled = logits.to(temperature.dtype, copy=True, memory_format=torch.contiguous_format)
    scaled.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    peak = scaled.amax(dim=1, keepdim=True)
    finite = peak.isfinite()
    if on_host(peak) and bool(finite.all()):
        return scaled.sub_(peak).div_(temperature[:, None]), peak.squeeze(1)
    index = scaled.argmax(dim=1, keepdim=True)
    scaled.sub_(peak.where(finite, 0)).div_(temperature[:, None])
    scaled.masked_fill_(~finite, -torch.inf).scatter_(1, index, 0)
    return scaled, peak.squeeze(1)


def block_sums(weights: Tensor) -> Tensor:
    """Return the sum of each block of each row, [rows, num_blocks]; the last block may be short."""
    rows, vocab = weights.shape
    whole = vocab // BLOCK_SIZE
    sums = weights[:, : whole * BLOCK_SIZE].view(rows, whole, BLOCK_SIZE).sum(dim=2)
    rest = weights[:, whole * BLOCK_SIZE :]
    return sums if rest.shape[1] == 0 else torch.cat([sums, rest.sum(dim=1, keepdim=True)], dim=1)


def log_sum(weights: Tensor) -> Tensor:
    """Return the logarithm of each row's sum, [rows], adding block by block as `select` does."""
    return block_sums(weights).sum(dim=1).log()


def select(weights: Tensor, sums: Tensor, seeds: Tensor, positions: Tensor, domains: tuple[int, int]) -> Tensor:
    """Draw one token per row with probability proportional to its weight.

    Args:
        weights: [rows, vocab] w >= 0.
        sums: [rows, num_blocks] block sums of w, not all 0.
        seeds: [rows] int64.
        positions: [rows] int64, of the tokens drawn.
        domains: of the block's and of the token's noise.

    Returns:
        [rows] int64 token ids.
    """
    seeds, positions = seeds[:, None], positions[:, None]
    num_blocks = sums.shape[1]
    block = torch.zeros_like(seeds)
    if num_blocks > 1:
        block_noise = gumbel(seeds, positions, torch.arange(num_blocks, device=sums.device), domains[0], sums.dtype)
        block = (sums.log() + block_noise).argmax(dim=1, keepdim=True)

    vocab = weights.shape[1]
    token_ids = block * BLOCK_SIZE + torch.arange(min(BLOCK_SIZE, vocab), device=sums.device)
    token_noise = gumbel(seeds, positions, token_ids, domains[1], sums.dtype)
    token_weights = weights.gather(1, token_ids.clamp(max=vocab - 1)).masked_fill_(token_ids >= vocab, 0)
    return token_ids.gather(1, (token_weights.log() + token_noise).argmax(dim=1, keepdim=True)).squeeze(1)
