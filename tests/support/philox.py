"""Counters with extreme random words, by inverting Philox."""

from reference import philox as reference

ONES = 0xFFFFFFFF


EXTREMES = [(0, 0), (0, 1), (1, 0), (0, ONES), (ONES, 0), (ONES, ONES), (ONES - 128, 0), (2**31, 0)]


def counter_of(words: tuple[int, int]) -> tuple[int, int, int]:
    """Return the index, position and domain whose random words under seed 0 begin with two given words."""
    high, low = words
    c0, c1, c2, c3 = high, low, 0, 0
    for round_ in reversed(range(10)):
        k0, k1 = ((round_ * increment) & ONES for increment in reference.KEY_INCREMENTS)
        m0, m1 = reference.MULTIPLIERS
        before0, before2 = c3 * pow(m0, -1, 2**32) & ONES, c1 * pow(m1, -1, 2**32) & ONES
        c0, c1, c2, c3 = before0, c0 ^ (before2 * m1 >> 32) ^ k0, before2, c2 ^ (before0 * m0 >> 32) ^ k1
    position = c1 | c2 << 32
    return c0, position - (position >> 63 << 64), c3
