"""How words travel between ranks: told by one kernel, heard by the next.

A *channel* is one exchange: words of which every rank tells its own, and hears those of all. Either they are gathered
between two launches, by a collective of torch.distributed; or a kernel writes them to the memory of every rank, and the next
kernel waits for them there. No word that is told is -1, so a word that has not come is known by that. A kernel that has
heard a word sets it back to -1. Meanwhile other ranks may be one step ahead, so steps use two halves of the memory in turn.

While kernels wait, those of another group may have to run first. So kernels that wait have few and small programs, which
leave room on every multiprocessor. They wait for a bounded time. Then they say so in `FAILED`, and go on; the next call
raises an error.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from specdecode import transports

STEP, NEXT_STEP, FAILED = (tl.constexpr(word) for word in range(3))
"""The first words of a rank's symmetric memory: the index of the step; that of the next one, while a step runs; and whether
a rank did not answer in time. No kernel reads one of the first two and writes it."""

HINTS, HEADER = tl.constexpr(transports.HINTS), tl.constexpr(transports.HEADER)
"""Where hints are, one for each offer, see `rivals`; and how many words come before the two halves."""

ABSENT = tl.constexpr(-1)
"""A word that has not come."""


class Line(NamedTuple):
    """What it takes to write words to all ranks."""

    step: Any  # the index of the step, which says which half of symmetric memory is used
    peers: Any  # where the symmetric memory of each rank is; nothing if words are gathered


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
