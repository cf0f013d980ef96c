"""What a step over shards has to do, and the memory it takes: for what ranks tell each other, and from launch to launch."""

from typing import NamedTuple

import torch
import triton

from specdecode import sharding
from specdecode.batch import Logprobs
from specdecode.kernels.arguments import Inputs, Shard, Sizes
from specdecode.kernels.block import NUMBERS
from specdecode.kernels.bundles import MIN_BLOCKS, NO_ROWS, Layout, at_least, inputs_of, sizes_of
from specdecode.kernels.candidates import CANDIDATES
from specdecode.kernels.launch import Argument
from specdecode.kernels.plan import LIST_SIZE, AcceptRule
from specdecode.kernels.residual import LIST_FIELDS
from specdecode.kernels.rows import KNOWN
from specdecode.kernels.shard_cut import PROGRESS
from specdecode.kernels.state import FIELDS

Parts = dict[str, tuple[torch.dtype, int] | None]


MIN_SHARD_BLOCKS = 32  # MAX_BLOCKS of a shard is at least this


class Way(NamedTuple):
    """What a step over shards is asked for, besides its sizes."""

    rule: AcceptRule
    is_greedy: bool  # all requests are known to be
    samples: bool  # tokens are only sampled, and their rows' logsumexp asked for
    logprobs: Logprobs | None
    truncates: bool  # rows are truncated
    large: bool  # it is decided where requests stop before anything is drawn
    is_symmetric: bool  # words travel through symmetric memory


class Step(NamedTuple):
    """What a step over shards has to do."""

    inputs: Inputs
    here: Sizes  # of this rank's shard
    arranged: Sizes  # of the statistics that ranks tell
    sizes: Sizes  # of the statistics that are decided by
    shards: sharding.Layout
    maxima: bool  # a rank tells the maximum of its shard alone, as if that were one block
    all_know: bool  # what is emitted follows from that: no offers are exchanged
    truncates: bool  # rows are truncated, which takes symmetric memory
    settles: bool  # block verification
    sums: bool  # ... in which residuals are summed
    decides: bool  # it is decided where requests stop before anything is drawn, or truncated; then at the latest there
    per_row: bool  # there is an offer for each row, not for each request

    @property
    def rows(self) -> int:
        """How many target rows there are."""
        return int(self.here.batch) * (int(self.here.num_draft_tokens) + 1)

    @property
    def rows_per_request(self) -> int:
        """How many target and draft rows a request has."""
        drafts = int(self.here.num_draft_tokens)
        return drafts + 1 + drafts * (self.inputs.draft.ptr is not None)

    @property
    def all_rows(self) -> int:
        """How many target and draft rows there are."""
        return int(self.here.batch) * self.rows_per_request

    @property
    def num_slots(self) -> int:
        """How many rows a rank may own, if these are gathered to be truncated."""
        return -(-int(self.here.batch) // self.shards.ranks) * self.rows_per_request

    @property
    def row_bytes(self) -> int:
        """How many bytes such a row takes, in lines of 128 bytes."""
        assert isinstance(self.inputs.target.ptr, Argument)
        assert self.inputs.target.ptr.dtype is not None
        return -(-self.shards.vocab_size * self.inputs.target.ptr.dtype.itemsize // 128) * 128


def step_of(
    way: Way,
    shape: tuple[int, ...],
    layouts: tuple[Layout | None, ...],
    shards: sharding.Layout,
    seeds_by_request: bool,
) -> Step:
    """Return what a step has to do, given the shape of this rank's target logits."""
    requests, *rows, local = shape
    num_draft_tokens = rows[0] - 1 if rows else 0
    inputs = inputs_of(layouts, local, seeds_by_request, None)
    if way.is_greedy:  # only the drafts matter
        inputs = inputs._replace(draft=NO_ROWS, drafts=inputs.drafts._replace(logsumexp_ptr=None))
    all_know = way.is_greedy and way.logprobs != "raw"
    truncates = way.truncates and not way.is_greedy
    # Where a token is only drawn, statistics of other ranks' blocks are of no use but for the maximum.
    maxima = all_know or (way.rule.draw is None and way.logprobs is None and not way.samples and not truncates)
    end = shards.start + local
    shard = Shard(shards.vocab_size, shards.start, end, shards.most_blocks, ALIGNED=end % 16 == 0)
    here = sizes_of(requests, num_draft_tokens, local)._replace(
        num_blocks=shards.most_blocks, MAX_BLOCKS=at_least(MIN_SHARD_BLOCKS, shards.most_blocks), shard=shard
    )
    sizes = arranged = sizes_of(requests, num_draft_tokens, shards.vocab_size)._replace(shard=shard)
    if maxima:
        arranged = sizes._replace(num_blocks=len(shards.holders), MAX_BLOCKS=at_least(MIN_BLOCKS, shards.ranks))
    has_drafts = inputs.drafts.ids_ptr is not None
    settles = has_drafts and way.rule.while_reading is None
    decides = way.large and has_drafts and not settles and way.rule.draw is not None
    return Step(
        inputs=inputs,
        here=here,
        arranged=arranged,
        sizes=arranged if all_know else sizes,
        shards=shards,
        maxima=maxima,
        all_know=all_know,
        truncates=truncates,
        settles=settles,
        sums=settles and inputs.draft.ptr is not None,
        decides=decides,
        per_row=not settles and (truncates or not decides),
    )


class Told(NamedTuple):
    """How many int64 words a rank tells, in lines of 128 bytes."""

    statistics: int
    raw_statistics: int
    notes: int
    sums: int
    offers: int
    lists: int
    parts: int
    cuts: int


def words_told(step: Step, logprobs: Logprobs | None) -> Told:
    """Return how many words of each kind a rank tells."""
    num_drafts, has_draft_rows = step.here.batch * step.here.num_draft_tokens, step.inputs.draft.ptr is not None
    num_rows, rows, blocks = step.rows, step.all_rows, step.here.num_blocks
    words = (
        rows * (1 if step.maxima else blocks),
        num_rows * blocks if logprobs == "raw" else 0,
        rows * (1 + has_draft_rows),
        triton.cdiv(num_drafts * blocks, 2) if step.sums else 0,
        (num_rows if step.per_row else step.here.batch) * (1 if logprobs is None else 2),
        rows * (1 + CANDIDATES.value) if step.truncates else 0,
        step.num_slots if step.truncates else 0,
        rows * (1 + step.sizes.num_blocks) if step.truncates else 0,
    )
    return Told(*[triton.cdiv(count, 16) * 16 for count in words])


def parts_of(step: Step, told: Told, way: Way) -> Parts:
    """Return the parts of the workspace."""
    batch, blocks = step.here.batch, step.arranged.num_blocks
    num_drafts, is_raw = batch * step.here.num_draft_tokens, way.logprobs == "raw"
    num_rows, rows = step.rows, step.all_rows
    state = batch * FIELDS.value + (num_rows if step.truncates else 0)  # which drafts are surely accepted
    return {
        "sent_first": None if way.is_symmetric else (torch.int64, sum(told[:3])),
        "sent_sums": (torch.int64, told.sums) if step.sums and not way.is_symmetric else None,
        "sent_offers": (torch.int64, told.offers) if step.all_know or not way.is_symmetric else None,
        "statistics_here": (torch.float32, rows * 2 * step.here.num_blocks),
        "raw_statistics_here": (torch.float32, num_rows * 2 * step.here.num_blocks) if is_raw else None,
        "state": None if step.inputs.drafts.ids_ptr is None else (torch.int32, state),
        "statistics": (torch.float32, rows * 2 * blocks),
        "raw_statistics": (torch.float32, num_rows * 2 * blocks) if is_raw else None,
        "known": (torch.float32, rows * KNOWN.value),
        "cutoffs": (torch.float32, rows * 2) if step.truncates else None,
        "kept": (torch.int32, rows * LIST_SIZE) if step.truncates else None,
        "progress": (torch.float32, rows * PROGRESS.value) if step.truncates else None,
        "verdicts": (torch.int32, num_rows),
        "numbers": (torch.float32, num_rows * NUMBERS.value) if step.settles else None,
        "listed": (torch.int64, num_drafts * LIST_FIELDS.value) if step.sums else None,
        "residual_sums": (torch.float32, num_drafts * blocks) if step.sums else None,
    }
