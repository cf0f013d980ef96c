"""Philox4x32-10 in PyTorch, bit for bit the noise of `reference.philox`.

PyTorch has no unsigned 32-bit arithmetic on every device, so words live in int64. The product of two words wraps, but its
bits are the right ones: `>> 32` and a mask give the high word.
"""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Scramble counters of four words under keys of two words; all int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = (product1 >> 32) & MASK ^ c1 ^ k0
        c2 = (product0 >> 32) & MASK ^ c3 ^ k1
        c1, c3 = product1 & MASK, product0 & MASK
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & MASK, (k1 + KEY_INCREMENTS[1]) & MASK
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor, index: Tensor, domain: int) -> Tensor:
    """Return float32 uniforms in (0, 1) for int64 seeds, positions and indices that broadcast."""
    counter = (index, positions & MASK, (positions >> 32) & MASK, torch.full_like(positions, domain))
    high, low, _, _ = philox4x32(counter, key=(seeds & MASK, (seeds >> 32) & MASK))
    number = high.to(torch.float32) * 2.0**-32 + low.to(torch.float32) * 2.0**-64
    return number.clamp(2.0**-65, 1 - 2.0**-24)


def gumbel(seeds: Tensor, positions: Tensor, index: Tensor, domain: int, dtype: torch.dtype) -> Tensor:
    """Return standard Gumbel numbers, computed in `dtype`."""
    return -torch.log(-torch.log1p(-uniform(seeds, positions, index, domain).to(dtype)))
