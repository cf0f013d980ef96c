"""Searching a row's blocks in the order of their bounds, until those that are left cannot matter.

To know a block's score takes reading it in both rows; a bound on the score is known without reading. The bound and the
index of the block are packed into one int32, a key: the block replaces the lowest bits of the bound, and the
result counts as if these bits were all ones, so it remains an upper bound. So the blocks that come next are found by integer
maxima. A search begins with the `TOP` largest keys of all, which is often enough. Then it continues with the largest key of
each of `BLOCKS` columns. Of blocks with equal scores the lowest wins, in whatever order they were looked at: `ranked`.
"""

import triton
import triton.language as tl

LAST_BLOCK = tl.constexpr(2**31 - 1)

SLACK = tl.constexpr(2.0**-12)
"""An upper bound of the relative difference of two sums that are rounded differently."""


@triton.jit
def residual_bounds(block_sums):
    """Return upper bounds of the block sums of max(0, p - q), however they are rounded, given the block sums of p."""
    return block_sums * (1 + SLACK) + 2.0**-110


@triton.jit
def with_blocks(bits):
    """Return the bits of a float32 of each block, the lowest replaced by the block."""
    MAX_BLOCKS: tl.constexpr = bits.shape[0]
    return (bits & -MAX_BLOCKS) | tl.arange(0, MAX_BLOCKS)


@triton.jit
def keys_of(bounds, sizes):
    """Return the keys of blocks, given bounds >= 0; -1 beyond the last block."""
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    return tl.where(blocks < sizes.num_blocks, with_blocks(bounds.to(tl.int32, bitcast=True)), -1)


@triton.jit
def blocks_of(keys, sizes):
    """Return the blocks of some keys, one beyond the last for the key -1."""
    return tl.where(keys >= 0, keys & (sizes.MAX_BLOCKS - 1), sizes.num_blocks)


@triton.jit
def most_of(keys, sizes):
    """Return an upper bound of each key's bound, as the bits of a float32; -1 for the key -1."""
    return keys | (sizes.MAX_BLOCKS - 1)


@triton.jit
def take_top(keys, config):
    """Return the `TOP` largest keys, and the remaining ones in `BLOCKS` columns, with -1 instead of those."""
    entries = tl.arange(0, config.TOP)
    top = tl.full([config.TOP], -1, tl.int32)
    for entry in tl.static_range(config.TOP):
        largest = tl.max(keys, 0)
        top = tl.where(entries == entry, largest, top)
        keys = tl.where(keys == largest, -1, keys)
    return top, tl.reshape(keys, [keys.shape[0] // config.BLOCKS, config.BLOCKS])


@triton.jit
def ranked(scores, blocks):
    """Return scores >= 0 as int64 with a block in the low bits: the largest is the first of equal scores."""
    return (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (blocks ^ LAST_BLOCK)


@triton.jit
def score_of(best):
    """Return the score of a `ranked` one, as the bits of a float32."""
    return (best >> 32).to(tl.int32)


@triton.jit
def block_of(best):
    """Return the block of a `ranked` score."""
    return ((best ^ LAST_BLOCK) & LAST_BLOCK).to(tl.int32)
