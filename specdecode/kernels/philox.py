"""Philox4x32-10 in Triton, bit for bit the noise of `reference.philox`."""

import triton
import triton.language as tl

from specdecode.noise import Domain

ACCEPT = tl.constexpr(int(Domain.ACCEPT))

ROUNDS = tl.constexpr(10)

MOST_IN_LOOP = tl.constexpr(512)
"""For more indices than this the rounds are unrolled: the compiler schedules them freely, but compiles longer."""


@triton.jit
def low(number):
    """Return the low 32 bits of a 64-bit number."""
    return (number & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def high(number):
    """Return the high 32 bits of a 64-bit number."""
    return low(number >> 32)


@triton.jit
def philox_round(words, keys):
    """Return the next words and keys."""
    word0, word1, word2, word3 = words
    key0, key1 = keys
    # A 64-bit product takes one instruction, its two halves separately take two.
    product0 = word0.to(tl.uint64) * 0xD2511F53
    product2 = word2.to(tl.uint64) * 0xCD9E8D57
    words = high(product2) ^ word1 ^ low(key0), low(product2), high(product0) ^ word3 ^ low(key1), low(product0)
    return words, (key0 + 0x9E3779B9, key1 + 0xBB67AE85)


@triton.jit
def philox4x32(seed, index, position, domain):
    """Return the first two words of Philox4x32-10, uint32, shaped like `index`."""
    word0 = index.to(tl.uint32, bitcast=True)
    word1, word2, word3 = low(position), high(position), tl.cast(domain, tl.uint32)
    keys = low(seed).to(tl.uint64), high(seed).to(tl.uint64)
    if index.shape[0] > MOST_IN_LOOP:
        # A word stays a scalar until the index enters it, so the part that all indices share is computed once.
        words = word0, word1, word2, word3
        for _ in tl.static_range(ROUNDS):
            words, keys = philox_round(words, keys)
    else:
        zeros = word0 * 0
        words = word0, word1 + zeros, word2 + zeros, word3 + zeros
        for _ in range(ROUNDS):
            words, keys = philox_round(words, keys)
    return words[0], words[1]


@triton.jit
def uniform(key, offset, index, domain):
    """Return float32 uniforms in (0, 1), shaped like `index`, for the token at an offset from the key's position."""
    seed, position = key
    word0, word1 = philox4x32(seed, index, position + offset, domain)
    number = word0.to(tl.float32) * 2.0**-32 + word1.to(tl.float32) * 2.0**-64
    return tl.minimum(tl.maximum(number, 2.0**-65), 1 - 2.0**-24)


@triton.jit
def accept_uniform(key, offset):
    """Return the uniform number of the accept decision at an offset."""
    return tl.max(uniform(key, offset, tl.zeros([1], tl.int32), ACCEPT), 0)


@triton.jit
def exponential(key, offset, index, domain):
    """Return float32 standard exponential numbers E = -log(1 - u), shaped like `index`; -log E is a Gumbel number."""
    u = uniform(key, offset, index, domain)
    # The smallest E wins. Near 0 the hardware's log(1 - u) has no relative precision, so a series is used.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return tl.where(u < 1 / 64, series, -tl.log(1 - u))
