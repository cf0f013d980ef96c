"""What a rank knows of the others' scores in Triton, while it searches its blocks for the best.

Statistics, which all ranks have, may show a score that some block reaches: `least_score`.

*Hints* are words that nothing depends on. A rank lets all others know a score that it has found; whoever sees that in time
does not look at blocks which cannot reach it. A hint is only ever raised, by an atomic maximum, and the index of its step is
in front of the score: so it need not be set back, and one of another step is known by that. (The index has 32 bits: after
2^31 steps of a shard, 248 days at 100 a second, hints are no longer raised, and after 2^32 one of an old step could be
believed.)

`residual.select_residual_block` is given these functions by its tuning, see `arguments.Searching`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from specdecode.kernels.distribution import relative_sums
from specdecode.kernels.search import SLACK
from specdecode.kernels.selection import block_scores
from specdecode.kernels.sharding.channel import HEADER, HINTS, high_of, words_of
from specdecode.kernels.statistics import load_draft_statistics, load_target_statistics


class Rivals(NamedTuple):
    """Where ranks hint to each other which score one of their blocks reaches, see `hint`."""

    mine: Any  # the word that this rank looks at
    theirs: Any  # that of every rank, its own too
    is_hinted: Any  # whether there is such a word
    step: Any  # which step that is, int32


@triton.jit
def rivals_of(index, line, exchange):
    """Return where hints on an offer are, given its index; () where words are gathered."""
    rivals = ()
    if exchange.peers_ptr is not None:
        theirs = ()
        for rank in tl.static_range(exchange.RANKS):
            theirs = theirs + (line.peers[rank] + HINTS + index,)
        step = line.step.to(tl.int32)
        rivals = Rivals(exchange.memory_ptr + HINTS + index, theirs, index < HEADER - HINTS, step)
    return rivals


@triton.jit
def least_score(place, exponentials, residual, inputs, workspace, sizes):
    """Return a score that a block of some rank reaches, as the bits of a float32, if statistics show it; else 0.

    A block's residual is at least its part of p less its part of q.
    """
    score = tl.full([], 0, tl.int32)
    if inputs.drafts.logsumexp_ptr is None:
        statistics = load_target_statistics(place, workspace, sizes)
        summary = load_draft_statistics(place, True, workspace, sizes)
        p_sums = relative_sums(residual.row_max, statistics, place.temperature)
        q_sums = relative_sums(residual.draft_max, summary, place.temperature) * tl.exp(-residual.log_sum_ratio)
        least = p_sums * (1 - SLACK) - q_sums * (1 + SLACK)
        scores = block_scores(tl.where(least > 0, least, 0.0), exponentials) * (1 - SLACK)
        score = tl.max(scores, 0).to(tl.int32, bitcast=True)
    return score


@triton.jit
def hint(score, rivals):
    """Let all ranks know a score that a block of this rank reaches, given as the bits of a float32; 0 is none."""
    word = words_of(score, rivals.step)
    for rank in tl.static_range(len(rivals.theirs)):
        tl.atomic_max(rivals.theirs[rank], word, rivals.is_hinted & (score > 0), sem="relaxed", scope="sys")


@triton.jit
def hinted(rivals, like):
    """Return a score that a block of some rank reaches, 0 as long as none is known.

    For each of the elements of `like`, of which each thread must have its own: two that load a word may see different ones.
    """
    # Triton's interpreter spreads the result of a scalar comparison as integers, which are no mask in Triton 3.9.
    wanted = tl.where(rivals.is_hinted, tl.full(like.shape, True, tl.int1), False)
    words = tl.load(rivals.mine + tl.zeros_like(like), mask=wanted, other=0, volatile=True)
    return tl.where(high_of(words) == rivals.step, words.to(tl.int32), 0)
