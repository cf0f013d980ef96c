"""Searching a row's blocks by bounds: in their order, a few at a time, until those that are left cannot matter.

Each block has a score that costs two reads to know, and a bound on it that costs nothing. A bound goes with its block into
one int32, a key, so that the next blocks are found by integer maxima. A search begins with the `LEADERS` largest of all,
which are soon known and often all that it takes. Then come the largest of each of `BLOCKS` columns, for more at once.
"""

import triton
import triton.language as tl

LAST_BLOCK = tl.constexpr(2**31 - 1)

SLACK = tl.constexpr(2.0**-12)
"""By how much sums that are rounded in different ways may differ, relatively, and more."""


@triton.jit
def bounds_of_residual(sums):
    """Return what the block sums of max(0, p - q) are at most, however they are rounded, given those of p."""
    return sums * (1 + SLACK) + 2.0**-110


@triton.jit
def with_blocks(ranks):
    """Return the ranks of all blocks with the block in place of their last bits."""
    MAX_BLOCKS: tl.constexpr = ranks.shape[0]
    return (ranks & -MAX_BLOCKS) | tl.arange(0, MAX_BLOCKS)


@triton.jit
def keys_of(bounds, num_blocks):
    """Return the keys of blocks: in the order of their bounds, but for the last bits, which are the block; -1 beyond."""
    blocks = tl.arange(0, bounds.shape[0])
    return tl.where(blocks < num_blocks, with_blocks(bounds.to(tl.int32, bitcast=True)), -1)


@triton.jit
def blocks_of(keys, num_blocks, MAX_BLOCKS: tl.constexpr):
    """Return the blocks of some keys, one beyond the last for no block."""
    return tl.where(keys >= 0, keys & (MAX_BLOCKS - 1), num_blocks)


@triton.jit
def most_of(keys, MAX_BLOCKS: tl.constexpr):
    """Return what a bound is at most, as the bits of a float32; -1 for no block."""
    return keys | (MAX_BLOCKS - 1)


@triton.jit
def least_of(keys, MAX_BLOCKS: tl.constexpr):
    """Return what a bound is at least; 0 for no block."""
    return tl.maximum(keys & -MAX_BLOCKS, 0).to(tl.float32, bitcast=True)


@triton.jit
def take_leaders(keys, LEADERS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the `LEADERS` largest keys, and the others in `BLOCKS` columns, with -1 in place of those."""
    slots = tl.arange(0, LEADERS)
    leaders = tl.full([LEADERS], -1, tl.int32)
    for slot in tl.static_range(LEADERS):
        largest = tl.max(keys, 0)
        leaders = tl.where(slots == slot, largest, leaders)
        keys = tl.where(keys == largest, -1, keys)
    return leaders, tl.reshape(keys, [keys.shape[0] // BLOCKS, BLOCKS])


@triton.jit
def ranked(scores, blocks):
    """Return scores as int64 numbers of which the largest is the first of the largest scores; none is negative."""
    return (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (blocks ^ LAST_BLOCK)


@triton.jit
def score_of(rank):
    """Return the score of a `ranked` one, as the bits of a float32."""
    return (rank >> 32).to(tl.int32)


@triton.jit
def block_of(rank):
    """Return the block of a `ranked` score."""
    return ((rank ^ LAST_BLOCK) & LAST_BLOCK).to(tl.int32)
