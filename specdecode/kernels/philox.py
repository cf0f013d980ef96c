"""Philox4x32-10 in Triton, bit for bit the noise of `reference.philox`."""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(10)

UNROLLED = tl.constexpr(512)
"""More indices than this are worked out by code without a loop, so that the compiler may spread them as it likes."""


@triton.jit
def load_key(seeds_ptr, first_seed, positions_ptr, request):
    """Return a request's (seed, position of its first token), both int64.

    Of one seed s for all, the requests' seeds are s, s + 1, ...; without positions they are 0.
    """
    seed = first_seed + request if seeds_ptr is None else tl.load(seeds_ptr + request)
    position = request * 0 if positions_ptr is None else tl.load(positions_ptr + request)
    return seed, position


@triton.jit
def low(number):
    """Return the low 32 bits of a number of 64."""
    return (number & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def high(number):
    """Return the high 32 bits of a number of 64."""
    return low(number >> 32)


@triton.jit
def philox_round(words, keys):
    """Return the next words and keys."""
    word0, word1, word2, word3 = words
    key0, key1 = keys
    # Products of 64 bits take one instruction where their halves would take two.
    product0 = word0.to(tl.uint64) * 0xD2511F53
    product2 = word2.to(tl.uint64) * 0xCD9E8D57
    words = high(product2) ^ word1 ^ low(key0), low(product2), high(product0) ^ word3 ^ low(key1), low(product0)
    return words, (key0 + 0x9E3779B9, key1 + 0xBB67AE85)


@triton.jit
def philox(seed, index, position, domain):
    """Return the first two words of Philox4x32-10, uint32."""
    word0, word1, word2, word3 = (
        index.to(tl.uint32, bitcast=True),
        low(position),
        high(position),
        tl.cast(domain, tl.uint32),
    )
    keys = low(seed).to(tl.uint64), high(seed).to(tl.uint64)
    if index.shape[0] > UNROLLED:
        # Words that no index is in yet stay scalars: what all lanes share is worked out once.
        words = word0, word1, word2, word3
        for _ in tl.static_range(ROUNDS):
            words, keys = philox_round(words, keys)
    else:
        # A loop, for what compiling takes: it is unrolled too, but later.
        zeros = word0 * 0
        words = word0, word1 + zeros, word2 + zeros, word3 + zeros
        for _ in range(ROUNDS):
            words, keys = philox_round(words, keys)
    return words[0], words[1]


@triton.jit
def uniform(key, offset, index, domain):
    """Return float32 uniforms in (0, 1), shaped like `index`, for the token at an offset from the key's position."""
    seed, position = key
    word0, word1 = philox(seed, index, position + offset, domain)
    number = word0.to(tl.float32) * 2.0**-32 + word1.to(tl.float32) * 2.0**-64
    return tl.minimum(tl.maximum(number, 2.0**-65), 1 - 2.0**-24)


@triton.jit
def exponential(key, offset, index, domain):
    """Return float32 standard exponential numbers -log(1 - u), shaped like `index`."""
    u = uniform(key, offset, index, domain)
    # Near 0 the hardware's logarithm of 1 - u keeps no relative precision, and small u is the end that wins: a series.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return tl.where(u < 1 / 64, series, -tl.log(1 - u))
