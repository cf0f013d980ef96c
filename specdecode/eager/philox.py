"""Philox4x32-10 in PyTorch, bit for bit the noise of `reference.philox`.

Not every device has unsigned 32-bit arithmetic in PyTorch, so words are kept in int64. The product of two words
overflows, but its bits are correct: `>> 32` and a mask give the high word.
"""

import functools
from typing import Any

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

FUSED = """
template <typename T> T negated_uniform_bits(T seed, T position, T index, T domain) {
    unsigned int c0 = index, c1 = position, c2 = (unsigned long long)position >> 32, c3 = domain;
    unsigned int k0 = seed, k1 = (unsigned long long)seed >> 32;
    for (int round = 0; round < 10; ++round) {
        unsigned long long product0 = 0xD2511F53ull * c0, product1 = 0xCD9E8D57ull * c2;
        c0 = (unsigned int)(product1 >> 32) ^ c1 ^ k0;
        c2 = (unsigned int)(product0 >> 32) ^ c3 ^ k1;
        c1 = product1, c3 = product0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    float number = (float)c0 * 0x1p-32f + (float)c1 * 0x1p-64f;
    return __double_as_longlong(-(double)::fminf(::fmaxf(number, 0x1p-65f), 1 - 0x1p-24f));
}
"""
"""`negated_uniform_bits`, compiled for GPUs, where otherwise each operation would be a launch."""


@functools.cache
def fused() -> Any:
    """Return the compiled `FUSED`, or None if this PyTorch cannot compile it."""
    try:
        kernel = torch.cuda.jiterator._create_jit_fn(FUSED, domain=0)
        kernel(*torch.zeros(3, 1, dtype=torch.int64, device="cuda"), domain=0)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    return kernel


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


def philox(seeds: Tensor, positions: Tensor, index: Tensor, domain: int) -> Tensor:
    """Return float32 uniforms in (0, 1)."""
    counter = (index, positions & MASK, (positions >> 32) & MASK, torch.full_like(positions, domain))
    high, low, _, _ = philox4x32(counter, key=(seeds & MASK, (seeds >> 32) & MASK))
    number = high.to(torch.float32) * 2.0**-32 + low.to(torch.float32) * 2.0**-64
    return number.clamp_(2.0**-65, 1 - 2.0**-24)


def negated_uniform_bits(seeds: Tensor, positions: Tensor, index: Tensor, domain: int) -> Tensor:
    """Return the float64 bits of -u for the uniforms u, as int64; every u is exact in float32."""
    kernel = fused() if seeds.is_cuda else None
    if kernel is not None:
        bits: Tensor = kernel(seeds, positions, index, domain=int(domain))
        return bits
    return philox(seeds, positions, index, domain).neg_().to(torch.float64).view(torch.int64)


def uniform(seeds: Tensor, positions: Tensor, index: Tensor, domain: int) -> Tensor:
    """Return float32 uniforms in (0, 1) for int64 seeds, positions and indices that broadcast."""
    return -negated_uniform_bits(seeds, positions, index, domain).view(torch.float64).to(torch.float32)


def log_uniform(seeds: Tensor, positions: Tensor, index: Tensor, domain: int, dtype: torch.dtype) -> Tensor:
    """Return the logarithms of `uniform`, computed in float32 or float64, as float64."""
    return uniform(seeds, positions, index, domain).to(dtype).log_().to(torch.float64)


def negated_exponential(seeds: Tensor, positions: Tensor, index: Tensor, domain: int) -> Tensor:
    """Return log(1 - u) in float64, which is -E of `exponential`."""
    return negated_uniform_bits(seeds, positions, index, domain).view(torch.float64).log1p_()


def exponential(seeds: Tensor, positions: Tensor, index: Tensor, domain: int) -> Tensor:
    """Return float64 standard exponential numbers E = -log(1 - u); -log E is the Gumbel number of the same counter."""
    return negated_exponential(seeds, positions, index, domain).neg_()


def race(weights: Tensor, seeds: Tensor, positions: Tensor, index: Tensor, domain: int) -> Tensor:
    """Return argmax w / E of [..., n] float32 or float64 weights, the winner of the exponential race, [..., 1]."""
    return (weights / negated_exponential(seeds, positions, index, domain)).argmin(dim=-1, keepdim=True)
