"""How words travel between ranks: told by one kernel, heard by the next.

A *channel* is one exchange: words of which every rank tells its own, and hears those of all. Either they are gathered
between two launches, by a collective of torch.distributed; or a kernel writes them to the memory of every rank, and the next
kernel waits for them there. No word that is told is -1, so a word that has not come is known by that. A kernel that has
heard a word sets it back to -1. Meanwhile other ranks may be one step ahead, so steps use two halves of the memory in turn.

While kernels wait, those of another group may have to run first. So kernels that wait have few and small programs, which
leave room on every multiprocessor. They wait for a bounded time. Then they say so in `FAILED`, and go on; the next call
raises an error.

*Hints* are words that nothing depends on. A rank that searches its blocks for the best score lets all others know a score
that it has found; whoever sees that in time does not look at blocks which cannot reach it. A hint is only ever raised, by an
atomic maximum, and the index of its step is in front of the score: so it need not be set back, and one of another step is
known by that.
"""

import triton
import triton.language as tl

from specdecode import transports
from specdecode.kernels.values import Line, Rivals

STEP, NEXT_STEP, FAILED = (tl.constexpr(word) for word in range(3))
"""The first words of a rank's symmetric memory: the index of the step; that of the next one, while a step runs; and whether
a rank did not answer in time. No kernel reads one of the first two and writes it."""

HINTS, HEADER = tl.constexpr(transports.HINTS), tl.constexpr(transports.HEADER)
"""Where hints are, one for each offer; and how many words come before the two halves."""

ABSENT = tl.constexpr(-1)
"""A word that has not come."""


@triton.jit
def words_of(low, high):
    """Return int64 words of two float32 or int32 each; a word is not negative where `high` is not."""
    low, high = low.to(tl.int32, bitcast=True).to(tl.int64), high.to(tl.int32, bitcast=True).to(tl.int64)
    return (high << 32) | (low & 0xFFFFFFFF)


@triton.jit
def low_of(words):
    """Return the first of the two of words, as float32."""
    return words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def high_of(words):
    """Return the second of the two, as int32."""
    return (words >> 32).to(tl.int32)


@triton.jit
def open_line(exchange):
    """Return the index of the step, in launches before the last, and where the memory of each rank is."""
    return Line(load_step(exchange), load_peers(exchange))


@triton.jit
def load_step(exchange):
    """Return the index of the step, in launches before the last."""
    step = tl.full([], 0, tl.int64)
    if exchange.peers_ptr is not None:
        step = tl.load(exchange.memory_ptr + STEP)
    return step


@triton.jit
def load_peers(exchange):
    """Return where the memory of each rank is, as a tuple."""
    peers = ()
    if exchange.peers_ptr is not None:
        for rank in tl.static_range(exchange.RANKS):
            peers = peers + (tl.load(exchange.peers_ptr + rank).to(tl.pointer_type(tl.int64)),)
    return peers


@triton.jit
def start_of(channel, step, exchange):
    """Return where a channel starts in symmetric memory."""
    return HEADER + (step & 1) * exchange.half + channel.start


@triton.jit
def tell(channel, index, words, wanted, line, exchange):
    """Tell all ranks some of the words of a channel; of each step every word that is heard, and no other."""
    if channel.sent_ptr is not None:
        sent_ptr = channel.sent_ptr.to(tl.pointer_type(words.dtype), bitcast=True)
        tl.store(sent_ptr + index, words, mask=wanted)
    else:
        start = start_of(channel, line.step, exchange) + exchange.rank * channel.length
        for rank in tl.static_range(exchange.RANKS):
            sent_ptr = (line.peers[rank] + start).to(tl.pointer_type(words.dtype), bitcast=True)
            tl.store(sent_ptr + index, words, mask=wanted)


@triton.jit
def listen(channel, rank, index, wanted, step, exchange, WORD: tl.constexpr):
    """Return words that ranks have told, of type WORD, as far as they have come, and where they are.

    `hear` waits for the others. Words of several kinds are listened to before one of them is waited for. No word may be
    loaded by two threads: one might see it come before the other does.
    """
    if channel.received_ptr is not None:
        received_ptr = channel.received_ptr + rank * channel.length
    else:
        received_ptr = exchange.memory_ptr + start_of(channel, step, exchange) + rank * channel.length
    pointers = received_ptr.to(tl.pointer_type(WORD), bitcast=True) + index
    return tl.load(pointers, mask=wanted, other=0, volatile=True), pointers


@triton.jit
def awaited(words, pointers, wanted, exchange):
    """Return the words at some pointers when all have come, given what has come of them."""
    tries = tl.full([], 0, tl.int64)
    while (tl.max((words == ABSENT).to(tl.int32), 0) == 1) & (tries < exchange.most_tries):
        words = tl.load(pointers, mask=wanted, other=0, volatile=True)
        tries += 1
        if tl.load(exchange.memory_ptr + FAILED, volatile=True) == 1:
            tries = exchange.most_tries
        if tries == exchange.most_tries:
            if tl.max((words == ABSENT).to(tl.int32), 0) == 1:  # they may have come at the last try
                tl.store(exchange.memory_ptr + FAILED, 1)
                tl.store(exchange.failed_ptr, 1)
    return tl.where(words == ABSENT, 0, words)


@triton.jit
def hear(words, pointers, channel, wanted, exchange):
    """Return the words at some pointers, given what has come of them; each is heard once in a step."""
    if channel.received_ptr is not None:
        return words
    else:
        words = awaited(words, pointers, wanted, exchange)
        tl.store(pointers, tl.full(words.shape, ABSENT, words.dtype), mask=wanted)
        return words


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
def hint(score, rivals):
    """Let all ranks know a score that a block of this rank reaches, given as the bits of a float32; 0 is none."""
    if len(rivals) > 0:
        word = words_of(score, rivals.step)
        for rank in tl.static_range(len(rivals.theirs)):
            tl.atomic_max(rivals.theirs[rank], word, rivals.exists & (score > 0), sem="relaxed", scope="sys")


@triton.jit
def hinted(rivals, like):
    """Return a score that a block of some rank reaches, 0 as long as none is known.

    For each of the elements of `like`, of which each thread must have its own: two that load a word may see different ones.
    """
    # Triton's interpreter spreads the result of a scalar comparison as integers, which are no mask in Triton 3.9.
    exists = tl.where(rivals.exists, tl.full(like.shape, True, tl.int1), False)
    words = tl.load(rivals.mine + tl.zeros_like(like), mask=exists, other=0, volatile=True)
    return tl.where(high_of(words) == rivals.step, words.to(tl.int32), 0)
