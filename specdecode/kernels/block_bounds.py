"""Search a row's blocks in the order of their bounds, with early exit once the remaining blocks cannot matter.

A block's score requires reading the block in both rows; an upper bound of the score does not. The bound and the block
index are packed into one int32, a key: the index replaces the lowest bits of the bound. Setting these bits to ones gives an
upper bound again (`upper_bound`). Bounds are not negative, so keys are ordered as integers, and integer maxima find the next
blocks. A search begins with the `TOP` largest keys, which is often enough. Then it takes the largest key of each of `BLOCKS`
columns at a time. Of blocks with equal scores the lowest index wins, in any order of the search: see `ranked`.
"""

import triton
import triton.language as tl

BLOCK_MASK = tl.constexpr(2**31 - 1)
"""The bits of a `ranked` value that hold the block, inverted."""

SLACK = tl.constexpr(2.0**-12)
"""An upper bound of the relative difference between two sums of the same terms that are rounded differently."""


@triton.jit
def residual_bounds(block_sums):
    """Return upper bounds of the block sums of max(0, p - q), rounding included, given the block sums of p."""
    # Terms below 2^-126 may be flushed to 0 in one of the sums: of 1,024 terms, a difference of at most 2^-116.
    return block_sums * (1 + SLACK) + 2.0**-110


@triton.jit
def with_blocks(bits):
    """Return the bits of float32 values, [MAX_BLOCKS], with the lowest bits replaced by the block index."""
    MAX_BLOCKS: tl.constexpr = bits.shape[0]
    return (bits & -MAX_BLOCKS) | tl.arange(0, MAX_BLOCKS)


@triton.jit
def keys_of(bounds, sizes):
    """Return the keys of blocks, given bounds >= 0; -1 beyond the last block."""
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    return tl.where(blocks < sizes.num_blocks, with_blocks(bounds.to(tl.int32, bitcast=True)), -1)


@triton.jit
def blocks_of(keys, sizes):
    """Return the blocks of keys; num_blocks, which is beyond the last block, for the key -1."""
    return tl.where(keys >= 0, keys & (sizes.MAX_BLOCKS - 1), sizes.num_blocks)


@triton.jit
def upper_bound(keys, sizes):
    """Return an upper bound of each key's bound, as the bits of a float32; -1 for the key -1."""
    return keys | (sizes.MAX_BLOCKS - 1)


@triton.jit
def take_top(keys, config):
    """Return the `TOP` largest keys, and all keys in `BLOCKS` columns with -1 in place of the taken ones."""
    entries = tl.arange(0, config.TOP)
    top = tl.full([config.TOP], -1, tl.int32)
    for entry in tl.static_range(config.TOP):
        largest = tl.max(keys, 0)
        top = tl.where(entries == entry, largest, top)
        keys = tl.where(keys == largest, -1, keys)
    return top, tl.reshape(keys, [keys.shape[0] // config.BLOCKS, config.BLOCKS])


@triton.jit
def ranked(scores, blocks):
    """Return scores >= 0 packed with their blocks into int64: of equal scores the first block has the largest value."""
    return (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (blocks ^ BLOCK_MASK)


@triton.jit
def score_of(best):
    """Return the score in a `ranked` value, as the bits of a float32."""
    return (best >> 32).to(tl.int32)


@triton.jit
def block_of(best):
    """Return the block in a `ranked` value."""
    return ((best ^ BLOCK_MASK) & BLOCK_MASK).to(tl.int32)
