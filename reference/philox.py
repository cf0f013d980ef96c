"""Noise: Philox4x32-10, a counter-based generator, and the random numbers that are computed from it.

A counter-based generator is a function, not a stream: it turns a *counter* of four 32-bit words into four random words,
under a *key* of two. The number of a counter is always the same, in any order of computation and on any machine. So there
is no state to keep.

One round, of the ten: with M0 and M1 the multipliers below, write hi and lo for the halves of a 64-bit product. Then

    c0, c1 <- hi(M1 c2) xor c1 xor k0,  lo(M1 c2)
    c2, c3 <- hi(M0 c0) xor c3 xor k1,  lo(M0 c0)

and a constant is added to each word of the key.

Under one key, different counters never give the same four words. Proof: a round can be undone. M0 is odd, so it has an
inverse modulo 2^32, and lo(M0 c0) says what c0 was. Then hi(M0 c0) is known, and the exclusive or with it and k1 gives c3.
In the same way the other two words give c2 and c1. There is no proof that the words of different counters look
independent, but the generator passes the tests of BigCrush with 7 rounds already, and 10 are used.

Here the key is a request's 64-bit seed, and the counter identifies the use of a number: (index, position low word,
position high word, domain). The index is a block id or a token id; for accept decisions it is the draft's offset in the
step with block verification, 0 with the others. The position is the absolute position of the token in its sequence. So a
request's tokens cannot depend on its batch, its slot or its neighbours.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and its library
Random123. Left out: streams, skipping ahead, other widths.
"""

from enum import IntEnum

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, the paper's Weyl constants
MASK = 0xFFFFFFFF


def philox4x32(counter, key, rounds: int = 10):
    """Turn a counter of four 32-bit words into four random words, under a key of two words.

    Args:
        counter: four words, each an integer or an array of them (they broadcast).
        key: two words.
        rounds: 10 is the standard choice.

    One round by hand: M0 * 1 is M0 itself, so its high word is 0, and M1 * 0 is 0.

    >>> [hex(word) for word in philox4x32((1, 0, 0, 0), (0, 0), rounds=1)]
    ['0x0', '0x0', '0x0', '0xd2511f53']

    The first of the authors' own test vectors:

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


def multiply(a, b):
    """Return the high and the low word of a 32 x 32 bit product.

    >>> [int(word) for word in multiply(np.uint64(2**31), np.uint64(6))]
    [3, 0]
    """
    product = np.uint64(a) * np.uint64(b)
    return product >> np.uint64(32), product & np.uint64(MASK)


def words(value: int) -> tuple[int, int]:
    """Split a 64-bit integer into its low and high 32-bit words. Negative integers are in two's complement.

    >>> words(2**32 + 7)
    (7, 1)
    >>> words(-1) == (MASK, MASK)
    True
    """
    return int(value) & MASK, (int(value) >> 32) & MASK


class Domain(IntEnum):
    """The use of a random number. Two uses that must be independent have two domains."""

    ACCEPT = 0
    """Accept or reject a draft."""
    SELECT_BLOCK = 1
    """Select the block of a token that the target emits."""
    SELECT_TOKEN = 2
    """Select that token in its block."""
    DRAFT_BLOCK = 3
    """Select the block of a draft."""
    DRAFT_TOKEN = 4
    """Select that draft in its block."""


SELECT = (Domain.SELECT_BLOCK, Domain.SELECT_TOKEN)
"""Domains of a token that the target emits."""

DRAFT = (Domain.DRAFT_BLOCK, Domain.DRAFT_TOKEN)
"""Domains of a draft token, for methods whose drafts must not share noise with the tokens that the target emits."""


def draft_domains(offset: int) -> tuple[int, int]:
    """Return the domains of the draft at an offset (counted from 0) in its step, for block verification.

    Block verification decides from all drafts of a step, and the next step drafts some of their positions again. With the
    same numbers, the new drafts would depend on the earlier rejections. So each step has new numbers. For the same reason
    the offset is the index of the accept number.

    >>> draft_domains(0) == DRAFT, draft_domains(2)
    (True, (515, 516))
    """
    block_domain, token_domain = DRAFT
    return block_domain + (offset << 8), token_domain + (offset << 8)


def uniform(seed: int, position: int, index, domain: Domain):
    """Return the uniform number u in (0, 1) of (seed, position, index, domain).

    u = high / 2^32 + low / 2^64 in float32, with each term and then their sum rounded to nearest. This gives 24
    significant bits down to about 2^-40, and multiples of 2^-64 below. Such small numbers are needed: without them a
    token that is 40 nats less likely than another could never be drawn. The clip excludes 0 and 1.

    >>> numbers = uniform(seed=1, position=0, index=np.arange(100_000), domain=Domain.ACCEPT)
    >>> bool(abs(numbers.mean() - 0.5) < 0.005), bool(0 < numbers.min() and numbers.max() < 1)
    (True, True)
    """
    counter = (index, *words(position), int(domain))
    high, low, _, _ = philox4x32(counter, key=words(seed))
    number = high.astype(np.float32) * np.float32(2**-32) + low.astype(np.float32) * np.float32(2**-64)
    return np.clip(number, np.float32(2**-65), np.float32(1 - 2**-24)).astype(np.float64)


def gumbel(seed: int, position: int, index, domain: Domain):
    """Return the standard Gumbel number -log(-log(1 - u)) of (seed, position, index, domain).

    1 - u is as uniform as u. With 1 - u the small values of u, which have the highest resolution, become the large Gumbel
    numbers, which decide the maximum.
    """
    return -np.log(-np.log1p(-uniform(seed, position, index, domain)))
