"""What the host passes to kernels over shards, besides the bundles of `kernels.arguments`."""

from typing import NamedTuple

from specdecode.kernels.arguments import Constant, Int32, Int64, Pointer


class Channel(NamedTuple):
    """One exchange: words of every rank, see `sharding.channel`. Symmetric memory is counted in int64 words."""

    sent_ptr: Pointer  # [length] int64, this rank's words; None: they are written to the memory of every rank
    received_ptr: Pointer  # [ranks, length] int64; None in symmetric memory, and before the exchange
    start: Int64  # where [ranks, length] starts in symmetric memory, after the header
    length: Int64


class Exchange(NamedTuple):
    """What ranks tell each other of a step, in up to three exchanges."""

    first: Channel  # statistics, raw statistics, notes, raw notes: int64 words
    sums: Channel  # [batch * num_draft_tokens, blocks_told] int32 words, the bits of residual sums; see `block`
    offers: Channel  # [rows or requests, OFFERS] int64 words
    verdicts_ptr: Pointer  # [rows or requests] int32; it is not exchanged: all ranks compute the same
    sources_ptr: Pointer  # [num_blocks] int32 which block each is of those that all ranks send, [ranks, blocks_told]
    peers_ptr: Pointer  # [ranks] int64 addresses of each rank's symmetric memory; None: words are gathered
    memory_ptr: Pointer  # int64 this rank's symmetric memory: a header and two halves
    failed_ptr: Pointer  # [1] int32, of the host: set to 1 where a rank did not answer in time
    half: Int64  # words of a half
    most_tries: Int64  # how many times a word is looked for
    rank: Int32
    raw_start: Int64  # of `first`, in words, as the next one
    notes_start: Int64
    raw_notes_start: Int64  # None: there are none, see `tell.tell_raw_note`
    blocks_told: Int32  # by a rank of a row, in `first` and `sums`
    RANKS: Constant
    LANES: Constant  # ranks or more, and threads or more, so that each word is loaded by one thread alone
    MAXIMA: Constant  # statistics are the maximum of a shard alone, as of one block
    NOTES: Constant  # words of notes on a row: 2 where there are draft rows
    OFFERS: Constant  # words of an offer: 2 with a log-probability
    PER_ROW: Constant  # there is an offer for each row, not for each request
    MATCHES: Constant  # drafts are accepted that are the token drawn at their row
    OVERLAPS: Constant  # the next launch may be set up while this one runs


class Cutting(NamedTuple):
    """What ranks tell each other to truncate rows; all through symmetric memory."""

    lists: Channel  # [rows, 1 + CANDIDATES] int64 words: how many candidates of a row a rank has, and these
    parts: Channel  # [num_owned] int64 words for the owner alone: that a rank's part of a row is in its memory
    cuts: Channel  # [rows, 1 + num_blocks] int64 words, told by the owner alone: a row's cutoff and its statistics
    order_ptr: Pointer  # [ranks] int32 the ranks in the order of the vocabulary
    rows_ptr: Pointer  # int64 words: this rank's memory for the rows that it owns, see `cut.owned_row_at`
    peers_ptr: Pointer  # [ranks] int64 addresses of each rank's
    row_bytes: Int64
    more_bytes: Int64  # of a target row, if such rows are adjusted: they are gathered in float32; else None
    num_rows: Int32  # target and draft rows
    rows_per_request: Int32
    num_owned: Int32  # rows that this rank may own
    OF_DRAFTS: Constant  # a launch has draft rows alone, or target rows, where these are adjusted; None: both
    ALIKE: Constant  # tokens of target rows lie as far apart as those of draft rows
    POSTED: Constant  # as for `Truncating`
    WARPS: Constant


class Arranging(NamedTuple):
    """What is done with the statistics of all ranks."""

    DECIDE: Constant  # the accept rule by which it is decided where requests stop; None: later
