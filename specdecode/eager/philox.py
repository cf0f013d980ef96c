"""Philox4x32-10 in PyTorch, bit for bit the noise of `reference.philox`.

PyTorch has no unsigned 32-bit arithmetic on every device, so words are kept in int64. The product of two words wraps, but
its bits are the right ones: `>> 32` and a mask give the high word.
"""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Turn counters of four words into four random words, under keys of two words; all int64 tensors that broadcast."""
    k0, k1 = torch.broadcast_tensors(*key)  # type: ignore[no-untyped-call]
    c0, c1, c2, c3, _ = torch.broadcast_tensors(*counter, k0)  # type: ignore[no-untyped-call]
    # Both halves of a round are computed at once: words 0 and 2 of the counter, words 1 and 3, and both words of the key.
    even, odd, keys = torch.stack((c0, c2)), torch.stack((c1, c3)), torch.stack((k0, k1))
    keys = keys.view(2, *[1] * (c0.ndim - k0.ndim), *k0.shape)
    which = torch.arange(2, device=even.device).view(2, *[1] * c0.ndim)
    multipliers, increments = (first + which * (second - first) for first, second in (MULTIPLIERS, KEY_INCREMENTS))
    rounds = torch.arange(10, device=even.device).view(10, *[1] * keys.ndim)
    for round_keys in (rounds * increments).add(keys).unbind():
        products = even.mul_(multipliers).flip(0)
        even = (products >> 32).bitwise_xor_(odd).bitwise_xor_(round_keys).bitwise_and_(MASK)
        odd = products.bitwise_and_(MASK)
    return even[0], odd[0], even[1], odd[1]


def uniform(seeds: Tensor, positions: Tensor, index: Tensor, domain: int) -> Tensor:
    """Return float32 uniforms in (0, 1) for int64 seeds, positions and indices that broadcast."""
    counter = (index, positions & MASK, (positions >> 32) & MASK, torch.full_like(positions, int(domain)))
    high, low, _, _ = philox4x32(counter, key=(seeds & MASK, (seeds >> 32) & MASK))
    number = high.to(torch.float32) * 2.0**-32 + low.to(torch.float32) * 2.0**-64
    return number.clamp_(2.0**-65, 1 - 2.0**-24)


def exponential(seeds: Tensor, positions: Tensor, index: Tensor, domain: int) -> Tensor:
    """Return float64 standard exponential numbers E = -log(1 - u); -log E is the Gumbel number of the same counter."""
    return uniform(seeds, positions, index, domain).to(torch.float64).neg_().log1p_().neg_()


def race(weights: Tensor, seeds: Tensor, positions: Tensor, index: Tensor, domain: int) -> Tensor:
    """Run the exponential race of [..., n] float32 or float64 weights; return which has the largest w / E, [..., 1]."""
    return (weights / exponential(seeds, positions, index, domain)).argmax(dim=-1, keepdim=True)
