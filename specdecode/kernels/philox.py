"""Philox4x32-10 in Triton, bit for bit the noise of `reference.philox`."""

import triton
import triton.language as tl


@triton.jit
def load_key(seeds_ptr, first_seed, positions_ptr, request):
    """Return a request's (seed, position of its first token), both int64.

    Of one seed s for all, the requests' seeds are s, s + 1, ...; without positions they are 0.
    """
    seed = first_seed + request if seeds_ptr is None else tl.load(seeds_ptr + request)
    position = request * 0 if positions_ptr is None else tl.load(positions_ptr + request)
    return seed, position


@triton.jit
def uniform(key, offset, index, domain):
    """Return float32 uniforms in (0, 1), shaped like `index`, for the token at an offset from the key's position."""
    seed, position = key
    position += offset
    zero = index * 0
    low = (position & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    words = tl.philox(seed.to(tl.uint64, bitcast=True), index, zero + low, zero + high, zero + domain)
    number = words[0].to(tl.float32) * 2.0**-32 + words[1].to(tl.float32) * 2.0**-64
    return tl.minimum(tl.maximum(number, 2.0**-65), 1 - 2.0**-24)


@triton.jit
def gumbel(key, offset, index, domain):
    """Return float32 standard Gumbel numbers -log(-log(1 - u)), shaped like `index`."""
    u = uniform(key, offset, index, domain)
    # Near 0 the hardware's logarithm of 1 - u keeps no relative precision, and small u is the end that wins: a series.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return -tl.log(tl.where(u < 1 / 64, series, -tl.log(1 - u)))
