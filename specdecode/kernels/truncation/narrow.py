"""Truncation among few tokens in Triton: those that are likely enough to be kept of a row, the *candidates*.

1. A *level* is chosen: the 16th largest of the maxima of the blocks, or the 64th, or the k-th. (A block whose maximum
   reaches it has at least that one token there.) Only blocks that reach the level are read.
2. Their tokens that reach it are listed: first groups of neighbours, then tokens.
3. Of each candidate it is computed how many tokens come before it, and their mass; so which are kept follows from the
   definition. It is also told whether that is all that is kept, or whether it takes more to tell: there are too many
   candidates, or the mass of what top-k keeps is known too roughly.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import add_both
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    INFINITY,
    LAST_TOKEN,
    base_2_scale,
    key_of,
    load_logits,
    logit_of,
    scaled,
)
from specdecode.kernels.values import Level

DEPTH = tl.constexpr(16.0)
"""Where too many tokens reach a level, the next lies less than so many natural logarithms below the first token."""

CANDIDATES = tl.constexpr(128)
"""So many at most: all pairs of them are compared."""

FEW = tl.constexpr(32)
"""Candidates, or groups of them, that nearly all rows have at most. They take as few threads as a warp has, so that no warp
has to wait for another."""

LISTS = tl.constexpr(3)
"""In the workspace of a row: groups of tokens; keys and ids of candidates."""

GROUP = tl.constexpr(8)
"""Neighbouring tokens, of which the largest logit shows whether any is a candidate."""

PAIRS = tl.constexpr(1024)
"""Of candidates that are compared at once."""

FEW_BLOCKS, MORE_BLOCKS, AT_ONCE = tl.constexpr(16), tl.constexpr(64), tl.constexpr(8)
"""That are to reach a level: where a mass decides, at first; else, at most. And how many are read at once."""

ANY_NUMBER = tl.constexpr(2**31 - 1)

NO_ORDER = tl.constexpr(2**63 - 1)
"""Larger than what `order_of` returns of any token."""

FINE = tl.constexpr(2.0**23)
"""Masses are added up as integers, those of candidates as multiples of 1 / FINE. Unlike a sum of floats, one of integers is
the same in any order. So what is decided by it depends neither on how the compiler distributes a tensor over threads, which
differs from kernel to kernel, nor on the rank."""

BITS_OF_ONE = tl.constexpr(0x3F800000)


@triton.jit
def list_at(workspace, index):
    """Return where the lists of a row are, given its `row_index`."""
    return workspace.kept_ptr + index * LISTS * CANDIDATES


@triton.jit
def in_parts(masses):
    """Return masses of at most 1 as multiples of 1 / FINE: in a float32 from 1 to 2 the last bit is that much."""
    return (masses + 1.0).to(tl.int32, bitcast=True) - BITS_OF_ONE


@triton.jit
def mass_of(parts):
    """Return such multiples as masses."""
    return parts.to(tl.float32) * (1 / FINE)


@triton.jit
def sum_rounded_down(masses):
    """Return the sum of masses of at most 1, as integers, or a little less."""
    ONE: tl.constexpr = 2**30 // masses.shape[0]  # so that no sum overflows
    return tl.sum((masses * ONE).to(tl.int32), 0).to(tl.float32) * (1 / ONE)


@triton.jit
def level_at(logit, block_max):
    """Return the level that is a logit."""
    return Level(logit, tl.sum((block_max >= logit).to(tl.int32), 0))


@triton.jit
def list_groups(level, num_blocks, row, block_max, list_ptr, sizes):
    """List the groups of tokens that reach a level: the first token of each; return how many there are.

    Beyond the first `CANDIDATES` they are only counted.
    """
    GROUPS: tl.constexpr = AT_ONCE * BLOCK_SIZE // GROUP
    tl.debug_barrier()  # what another attempt has listed may still be read
    reach = block_max >= level
    entries, blocks_ptr = tl.cumsum(reach.to(tl.int32), 0) - 1, list_ptr + CANDIDATES  # where keys will be
    tl.store(blocks_ptr + entries, tl.arange(0, sizes.MAX_BLOCKS), mask=reach & (entries < num_blocks))
    tl.debug_barrier()  # what is listed is read by other threads than wrote it
    found = tl.full([], 0, tl.int32)
    for first in range(0, num_blocks, AT_ONCE):
        listed = first + tl.arange(0, AT_ONCE)
        tile = tl.load(blocks_ptr + listed, mask=listed < num_blocks, other=sizes.num_blocks) * BLOCK_SIZE
        logits = load_logits(row, tile[:, None] + tl.arange(0, BLOCK_SIZE)[None, :], True)
        is_listed = (tl.max(tl.reshape(logits, [GROUPS, GROUP]), 1) >= level).to(tl.int32)
        group_ids = tl.reshape(tile[:, None] + tl.arange(0, BLOCK_SIZE // GROUP)[None, :] * GROUP, [GROUPS])
        listed = found + tl.cumsum(is_listed, 0) - is_listed
        tl.store(list_ptr + listed, group_ids, mask=(is_listed == 1) & (listed < CANDIDATES))
        found += tl.sum(is_listed, 0)
    tl.debug_barrier()
    return found


@triton.jit
def list_candidates(level, num_groups, row, list_ptr, MOST: tl.constexpr):
    """List the tokens that reach a level, given the groups they are in, at most `MOST`; return how many tokens there are.

    Of each its key and its id.
    """
    listed = tl.arange(0, MOST)
    group_ids = tl.load(list_ptr + listed, mask=listed < num_groups, other=LAST_TOKEN - GROUP)
    token_ids = group_ids[:, None] + tl.arange(0, GROUP)[None, :]
    logits = load_logits(row, token_ids, True)
    is_candidate = tl.reshape((logits >= level).to(tl.int32), [MOST * GROUP])
    entries = tl.cumsum(is_candidate, 0) - is_candidate
    is_listed = (is_candidate == 1) & (entries < CANDIDATES)
    candidates_ptr = list_ptr + CANDIDATES
    tl.store(candidates_ptr + entries, tl.reshape(key_of(logits), [MOST * GROUP]), mask=is_listed)
    tl.store(candidates_ptr + CANDIDATES + entries, tl.reshape(token_ids, [MOST * GROUP]), mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_candidate, 0)


@triton.jit
def list_tokens(level, num_blocks, row, block_max, list_ptr, sizes):
    """List the tokens of a row that reach a level, which so many blocks do; return how many, or more than `CANDIDATES`."""
    num_groups = list_groups(level, num_blocks, row, block_max, list_ptr, sizes)
    if num_groups <= FEW:
        found = list_candidates(level, num_groups, row, list_ptr, FEW)
    else:
        found = list_candidates(level, num_groups, row, list_ptr, CANDIDATES)
    return tl.where(num_groups > CANDIDATES, CANDIDATES + 1, found)


@triton.jit
def order_of(keys, token_ids):
    """Return int64 of which the largest is the first token in order, given tokens' keys and ids."""
    return (keys.to(tl.int64) << 32) | (token_ids ^ LAST_TOKEN)


@triton.jit
def token_in_order(order):
    """Return the logit and the id of a token, given its `order_of`."""
    return logit_of((order >> 32).to(tl.int32)), (order & LAST_TOKEN).to(tl.int32) ^ LAST_TOKEN


@triton.jit
def load_candidates(list_ptr, first, found, COUNT: tl.constexpr):
    """Return the logits and ids of `COUNT` listed tokens, and the `order_of` each."""
    listed = first + tl.arange(0, COUNT)
    keys = tl.load(list_ptr + CANDIDATES + listed, mask=listed < found, other=-ANY_NUMBER - 1)
    token_ids = tl.load(list_ptr + 2 * CANDIDATES + listed, mask=listed < found, other=LAST_TOKEN)
    logits = tl.where(listed < found, logit_of(keys), -INFINITY)
    return logits, token_ids, order_of(keys, token_ids)


@triton.jit
def count_before(order, list_ptr, found, row_max, scale):
    """Return how many candidates come before each, and what these weigh, given the `order_of` each."""
    TOGETHER: tl.constexpr = PAIRS // order.shape[0]
    num_before = tl.zeros([TOGETHER, order.shape[0]], tl.int32)
    parts = tl.zeros([TOGETHER, order.shape[0]], tl.int32)
    for first in range(0, tl.minimum(found, CANDIDATES), TOGETHER):
        logits, _, others = load_candidates(list_ptr, first, found, TOGETHER)
        is_before = others[:, None] > order[None, :]
        num_before += is_before.to(tl.int32)
        parts += tl.where(is_before, in_parts(tl.exp2((logits - row_max) * scale))[:, None], 0)
    num_before, parts = tl.reduce((num_before, parts), 0, add_both)
    return num_before, mass_of(parts)


@triton.jit
def bounds_on_mass(kept, missing, unseen, level_weight, total, limits, sizes):
    """Return what the tokens that top-k and min-p keep weigh at least and at most.

    Given what those among the candidates weigh, how many are missing to k, and what so many of the others weigh at least
    if none is left out by min-p.
    """
    top_k, _, min_p = limits
    lower, upper = kept, kept
    if missing > 0:
        lower = kept + unseen
        upper = tl.minimum(total, kept + missing.to(tl.float32) * level_weight)
        if (top_k == sizes.vocab_size) & (min_p == 0):
            lower = total
    return lower, tl.maximum(lower, upper)


@triton.jit
def cut_candidates(list_ptr, found, level, unseen, summary, sizes, MOST: tl.constexpr):
    """Return the `order_of` the last candidate that is kept; and whether that is all that is kept.

    And whether it could be, from a lower level on: not if top-p keeps more tokens than can be compared.
    """
    top_k, top_p, min_p = summary.limits
    row_max, total, scale = summary.p.row_max, summary.p.sumexp, base_2_scale(summary.temperature)
    logits, _, order = load_candidates(list_ptr, 0, found, MOST)
    num_before, mass_before = count_before(order, list_ptr, found, row_max, scale)
    passed = (logits > -INFINITY) & (scaled(logits, row_max, summary.temperature) >= tl.log(min_p))
    in_top_k = passed & (num_before < top_k)
    weights = tl.where(in_top_k, tl.exp2((logits - row_max) * scale), 0.0)
    num_passed, parts = tl.reduce((passed.to(tl.int32), in_parts(weights)), 0, add_both)
    mass = mass_of(parts)
    is_complete = (level.logit <= summary.floor) | (num_passed < found) | (num_passed >= top_k)
    missing = tl.where(is_complete, 0, top_k - num_passed)
    level_weight = tl.exp2((level.logit - row_max) * scale)
    lower, upper = bounds_on_mass(mass, missing, unseen, level_weight, total, summary.limits, sizes)
    kept = in_top_k & ((mass_before < top_p * lower) | (num_before == 0))
    kept_at_most = in_top_k & ((mass_before < top_p * upper) | (num_before == 0))
    num_kept, most = tl.reduce((kept.to(tl.int32), kept_at_most.to(tl.int32)), 0, add_both)
    is_known = num_kept == most
    is_all = is_complete | (num_kept < num_passed) | (mass >= top_p * upper)
    last = tl.min(tl.where(kept, order, NO_ORDER), 0)
    most_mass = mass - (found - CANDIDATES).to(tl.float32) * level_weight  # of as many tokens as there is room for
    is_few = (found <= CANDIDATES) & (most_mass >= top_p * lower)
    return last, (found <= CANDIDATES) & (found > 0) & is_known & is_all, is_few | (top_k < sizes.vocab_size)


@triton.jit
def store_kept_candidates(statistics_ptr, last, list_ptr, found, temperature, sizes):
    """Replace the statistics of a row's blocks by those of the candidates up to the last that is kept."""
    every_block = tl.arange(0, sizes.MAX_BLOCKS)
    inside = every_block < sizes.num_blocks
    tl.store(statistics_ptr + every_block * 2, tl.full([sizes.MAX_BLOCKS], -INFINITY, tl.float32), mask=inside)
    tl.store(statistics_ptr + every_block * 2 + 1, tl.zeros([sizes.MAX_BLOCKS], tl.float32), mask=inside)
    tl.debug_barrier()  # else another thread might store what is kept of a block first
    if found <= FEW:
        store_blocks(statistics_ptr, last, list_ptr, found, temperature, FEW)
    else:
        store_blocks(statistics_ptr, last, list_ptr, found, temperature, CANDIDATES)


@triton.jit
def store_blocks(statistics_ptr, last, list_ptr, found, temperature, MOST: tl.constexpr):
    """Store the statistics of blocks that have kept candidates."""
    TOGETHER: tl.constexpr = PAIRS // MOST
    scale = base_2_scale(temperature)
    logits, token_ids, order = load_candidates(list_ptr, 0, found, MOST)
    blocks = token_ids // BLOCK_SIZE
    parts = tl.zeros([TOGETHER, MOST], tl.int32)
    before = tl.zeros([TOGETHER, MOST], tl.int32)
    for first in range(0, found, TOGETHER):
        other_logits, others_ids, others = load_candidates(list_ptr, first, found, TOGETHER)
        is_with = ((others_ids // BLOCK_SIZE)[:, None] == blocks[None, :]) & (others >= last)[:, None]
        weights = tl.exp2((other_logits[:, None] - logits[None, :]) * scale)  # at most 1 where it matters
        parts += tl.where(is_with, in_parts(tl.minimum(weights, 1.0)), 0)
        before += (is_with & (others[:, None] > order[None, :])).to(tl.int32)
    parts, before = tl.reduce((parts, before), 0, add_both)
    is_first = (order >= last) & (before == 0)  # in its block, whose maximum it is
    tl.store(statistics_ptr + blocks * 2, logits, mask=is_first)
    tl.store(statistics_ptr + blocks * 2 + 1, mass_of(parts), mask=is_first)
