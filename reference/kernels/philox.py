"""Noise in Triton: the random numbers of `reference.philox`, computed by the program that needs them.

No tensor of noise is written or read. The number of (seed, position, index, domain) is the same in every kernel, so
kernels that divide the work differently draw the same tokens.
"""

import triton
import triton.language as tl

from reference.philox import Domain

ACCEPT = tl.constexpr(int(Domain.ACCEPT))
SELECT_BLOCK = tl.constexpr(int(Domain.SELECT_BLOCK))
SELECT_TOKEN = tl.constexpr(int(Domain.SELECT_TOKEN))


@triton.jit
def uniform(seed, position, index, domain):
    """Return float32 numbers in (0, 1), one for each index (int32)."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    word0, word1, _, _ = tl.philox(seed, index, low, high, domain)  # Philox4x32-10, a part of Triton
    number = word0.to(tl.float32) * 2.0**-32 + word1.to(tl.float32) * 2.0**-64
    return tl.minimum(tl.maximum(number, 2.0**-65), 1 - 2.0**-24)


@triton.jit
def exponential(seed, position, index, domain):
    """Return float32 exponential numbers E = -log(1 - u); G = -log E is a Gumbel number."""
    u = uniform(seed, position, index, domain)
    # The smallest E wins. Near 0, 1 - u would round to 1 in float32, so there log is computed by its series.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return tl.where(u < 1 / 64, series, -tl.log(1 - u))


@triton.jit
def gumbel(seed, position, index, domain):
    """Return float32 standard Gumbel numbers."""
    return -tl.log(exponential(seed, position, index, domain))
