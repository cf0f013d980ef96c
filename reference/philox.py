"""Counter-based noise: Philox4x32-10 and the numbers that every other room draws from it.

A counter-based generator is a keyed scrambler, not a stream: the number at (seed, position, index, domain) is the same
whoever asks for it, in whatever order, on whatever machine. So a request's tokens cannot depend on its batch, its slot
or its neighbours, and no state is kept anywhere.

The key is the request's 64-bit seed. The counter is (index, position low word, position high word, domain): index is a
block or token id (or, where block verification judges a draft, its offset in the step), position the place of the token in
its sequence, and the domain keeps uses apart that must be independent.

Left out: streams, skipping ahead, other widths. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy
as 1, 2, 3" (SC 2011), section 3.2 and table 2.
"""

from enum import IntEnum

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, the paper's Weyl constants
MASK = 0xFFFFFFFF


class Domain(IntEnum):
    """What a number is for. Two uses that must be independent have two domains."""

    ACCEPT = 0
    """To decide on a draft."""
    SELECT_BLOCK = 1
    """To pick the block of a token that the target emits."""
    SELECT_TOKEN = 2
    """To pick that token in its block."""
    DRAFT_BLOCK = 3
    """To pick the block of a draft."""
    DRAFT_TOKEN = 4
    """To pick that draft in its block."""


def words(value: int) -> tuple[int, int]:
    """Split a 64-bit integer into its low and high 32-bit words; negative ones by two's complement.

    >>> words(2**32 + 7)
    (7, 1)
    >>> words(-1) == (MASK, MASK)
    True
    """
    return int(value) & MASK, (int(value) >> 32) & MASK


def multiply(a, b):
    """Return the high and the low word of a 32 x 32 bit product.

    >>> [int(word) for word in multiply(np.uint64(2**31), np.uint64(6))]
    [3, 0]
    """
    product = np.uint64(a) * np.uint64(b)
    return product >> np.uint64(32), product & np.uint64(MASK)


def philox4x32(counter, key, rounds: int = 10):
    """Scramble a counter of four words under a key of two words.

    Args:
        counter: four words, each an integer or an array of them (they broadcast).
        key: two words.
        rounds: 10 is the standard choice; 7 already passes BigCrush.

    The first line of the authors' own test vectors:

    >>> [hex(word) for word in philox4x32((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.uint64(word) for word in key)
    for _ in range(rounds):
        high0, low0 = multiply(MULTIPLIERS[0], c0)
        high1, low1 = multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + np.uint64(KEY_INCREMENTS[0])) & np.uint64(MASK)
        k1 = (k1 + np.uint64(KEY_INCREMENTS[1])) & np.uint64(MASK)
    return c0, c1, c2, c3


def uniform(seed: int, position: int, index, domain: Domain):
    """Return the uniform number in (0, 1) that belongs to (seed, position, index, domain).

    high / 2^32 + low / 2^64 in float32, each term and then their sum rounded to nearest: 24 significant bits down to about
    2^-40, and multiples of 2^-64 below. That is what lets a token 40 nats less likely than another be drawn at all. The
    clip keeps both ends out.

    >>> numbers = uniform(seed=1, position=0, index=np.arange(100_000), domain=Domain.ACCEPT)
    >>> bool(abs(numbers.mean() - 0.5) < 0.005), bool(0 < numbers.min() and numbers.max() < 1)
    (True, True)
    """
    counter = (index, *words(position), int(domain))
    high, low, _, _ = philox4x32(counter, key=words(seed))
    number = high.astype(np.float32) * np.float32(2**-32) + low.astype(np.float32) * np.float32(2**-64)
    return np.clip(number, np.float32(2**-65), np.float32(1 - 2**-24)).astype(np.float64)


def gumbel(seed: int, position: int, index, domain: Domain):
    """Return the standard Gumbel number -log(-log(1 - u)) that belongs to (seed, position, index, domain).

    1 - u is as uniform as u; writing it so puts the fine end of u where the Gumbel number is large, the end that wins.
    """
    return -np.log(-np.log1p(-uniform(seed, position, index, domain)))
