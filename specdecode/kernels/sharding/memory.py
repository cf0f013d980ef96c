"""What a step over shards has to do, and the memory it takes: for what ranks tell each other, and from launch to launch."""

from typing import Any, NamedTuple

import torch

from specdecode.kernels.arguments import Inputs, Shard, Sizes
from specdecode.kernels.block import TERMS
from specdecode.kernels.bundles import MIN_BLOCKS, NO_ROWS, Structure, at_least, inputs_in, sizes_in, sizes_of
from specdecode.kernels.formulas import Argument, Number, ceil_div, rounded_up
from specdecode.kernels.plan import LIST_SIZE
from specdecode.kernels.residual import LIST_FIELDS
from specdecode.kernels.rows import KNOWN, RAW_KNOWN
from specdecode.kernels.sharding.cut import PROGRESS
from specdecode.kernels.stops import FIELDS
from specdecode.kernels.truncation.narrow import CANDIDATES

Parts = dict[str, tuple[torch.dtype, Any] | None]


class Way(NamedTuple):
    """All that the launches of a step over shards depend on besides its `Structure`, which is that of this rank's logits."""

    is_greedy: bool  # all requests are known to be
    is_symmetric: bool  # words travel through symmetric memory
    is_crowded: bool  # there are more rows than programs that may wait for other ranks
    ranks: int
    here: int  # MAX_BLOCKS of a shard
    whole: tuple[int, int, bool]  # MAX_BLOCKS, MAX_DRAFTS and ALIGNED of the whole vocabulary
    end_is_aligned: bool  # the shard's end is a multiple of 16


class Step(NamedTuple):
    """What a step over shards has to do."""

    structure: Structure
    way: Way
    inputs: Inputs
    here: Sizes  # of this rank's shard
    arranged: Sizes  # of the statistics that ranks tell
    sizes: Sizes  # of the statistics that are decided by
    maxima: bool  # a rank tells the maximum of its shard alone, as if that were one block
    all_know: bool  # what is emitted follows from that: no offers are exchanged
    tells_raw: bool  # of target rows as they are in memory, too: rows are adjusted, and raw log-probabilities asked for
    truncates: bool  # rows are truncated, which takes symmetric memory
    settles: bool  # block verification
    sums: bool  # ... in which residuals are summed
    decides: bool  # it is decided where requests stop while statistics are arranged; if rows are cut, in part later
    per_row: bool  # there is an offer for each row, not for each request

    @property
    def rows(self) -> Any:
        """How many target rows there are."""
        return self.here.batch * (self.here.num_draft_tokens + 1)

    @property
    def rows_per_request(self) -> Any:
        """How many target and draft rows a request has."""
        drafts = self.here.num_draft_tokens
        return drafts + 1 + (0 if self.inputs.draft.ptr is None else drafts)

    @property
    def all_rows(self) -> Any:
        """How many target and draft rows there are."""
        return self.here.batch * self.rows_per_request

    @property
    def num_owned(self) -> Any:
        """How many rows a rank may own, if these are gathered to be truncated."""
        return ceil_div(self.here.batch, self.way.ranks) * self.rows_per_request

    @property
    def row_bytes(self) -> Any:
        """How many bytes such a row takes, in lines of 128 bytes."""
        assert isinstance(self.inputs.target.ptr, Argument)
        return rounded_up(Number("whole_vocab_size") * self.inputs.target.ptr.dtype.itemsize, 128)

    @property
    def more_bytes(self) -> Any:
        """How many more an adjusted target row takes, which is gathered in float32; None if rows are not adjusted."""
        if not self.inputs.adjustments.EXIST:
            return None
        return rounded_up(Number("whole_vocab_size") * 4, 128) - self.row_bytes

    @property
    def row_words(self) -> Any:
        """How many int64 words the rows take that a rank may own."""
        num_bytes = self.num_owned * self.row_bytes
        if self.inputs.adjustments.EXIST:
            num_target_rows = ceil_div(self.here.batch, self.way.ranks) * (self.here.num_draft_tokens + 1)
            num_bytes += num_target_rows * self.more_bytes
        return num_bytes // 8


def step_of(structure: Structure, way: Way) -> Step:
    """Return what a step has to do."""
    method, inputs, of_shard = structure.method, inputs_in(structure), sizes_in(structure)
    if way.is_greedy:  # only the drafts matter
        inputs = inputs._replace(draft=NO_ROWS, drafts=inputs.drafts._replace(logsumexp_ptr=None))
    all_know = way.is_greedy and structure.logprobs != "raw"
    truncates = structure.truncates and not way.is_greedy
    # Where a token is only drawn, statistics of other ranks' blocks are of no use but for the maximum.
    only_draws = not method.reads_drafts and structure.logprobs is None and not structure.is_sampling and not truncates
    maxima, most_blocks = all_know or only_draws, Number("most_blocks")
    ends = Number("shard_start"), Number("shard_end")
    shard = Shard(Number("whole_vocab_size"), *ends, most_blocks, ALIGNED=way.end_is_aligned)
    here = of_shard._replace(num_blocks=most_blocks, MAX_BLOCKS=way.here, shard=shard)
    sizes = arranged = sizes_of(
        of_shard.batch, of_shard.num_draft_tokens, Number("whole_vocab_size"), *way.whole
    )._replace(shard=shard)
    if maxima:
        arranged = sizes._replace(num_blocks=Number("num_holders"), MAX_BLOCKS=at_least(MIN_BLOCKS, way.ranks))
    settles = structure.settles
    decides = structure.large and structure.has_drafts and not settles and method.reads_drafts
    return Step(
        structure=structure,
        way=way,
        inputs=inputs,
        here=here,
        arranged=arranged,
        sizes=arranged if all_know else sizes,
        maxima=maxima,
        all_know=all_know,
        tells_raw=structure.logprobs == "raw" and inputs.adjustments.EXIST,
        truncates=truncates,
        settles=settles,
        sums=settles and inputs.draft.ptr is not None,
        decides=decides,
        per_row=not settles and (truncates or not decides),
    )


class Told(NamedTuple):
    """How many int64 words a rank tells, in lines of 128 bytes."""

    statistics: Any
    raw_statistics: Any
    notes: Any
    raw_notes: Any
    sums: Any
    offers: Any
    lists: Any
    parts: Any
    cuts: Any


def words_told(step: Step) -> Told:
    """Return how many words of each kind a rank tells."""
    num_drafts, has_draft_rows = step.here.batch * step.here.num_draft_tokens, step.inputs.draft.ptr is not None
    num_rows, rows, blocks, logprobs = step.rows, step.all_rows, step.here.num_blocks, step.structure.logprobs
    words = (
        rows * (1 if step.maxima else blocks),
        num_rows * blocks if logprobs == "raw" else 0,
        rows * (1 + has_draft_rows),
        num_rows if step.tells_raw else 0,
        ceil_div(num_drafts * blocks, 2) if step.sums else 0,
        (num_rows if step.per_row else step.here.batch) * (1 if logprobs is None else 2),
        rows * (1 + CANDIDATES.value) if step.truncates else 0,
        step.num_owned if step.truncates else 0,
        rows * (1 + step.sizes.num_blocks) if step.truncates else 0,
    )
    return Told(*[rounded_up(count, 16) for count in words])


def parts_of(step: Step, told: Told) -> Parts:
    """Return the parts of the workspace."""
    batch, blocks, way = step.here.batch, step.arranged.num_blocks, step.way
    num_drafts, is_raw = batch * step.here.num_draft_tokens, step.structure.logprobs == "raw"
    num_rows, rows = step.rows, step.all_rows
    state = batch * FIELDS.value + (num_rows if step.truncates else 0)  # which drafts are surely accepted
    return {
        "sent_first": None if way.is_symmetric else (torch.int64, sum(told[:4])),
        "sent_sums": (torch.int64, told.sums) if step.sums and not way.is_symmetric else None,
        "sent_offers": (torch.int64, told.offers) if step.all_know or not way.is_symmetric else None,
        "statistics_here": (torch.float32, rows * 2 * step.here.num_blocks),
        "raw_statistics_here": (torch.float32, num_rows * 2 * step.here.num_blocks) if is_raw else None,
        "state": (torch.int32, state) if step.structure.has_drafts else None,
        "statistics": (torch.float32, rows * 2 * blocks),
        "raw_statistics": (torch.float32, num_rows * 2 * blocks) if is_raw else None,
        "known": (torch.float32, rows * KNOWN.value),
        "raw_known": (torch.float32, num_rows * RAW_KNOWN.value) if step.tells_raw else None,
        "cutoffs": (torch.float32, rows * 2) if step.truncates else None,
        "kept": (torch.int32, rows * LIST_SIZE) if step.truncates else None,
        "progress": (torch.float32, rows * PROGRESS.value) if step.truncates else None,
        "verdicts": (torch.int32, num_rows),
        "terms": (torch.float32, num_rows * TERMS.value) if step.settles else None,
        "listed": (torch.int64, num_drafts * LIST_FIELDS.value) if step.sums else None,
        "residual_sums": (torch.float32, num_drafts * blocks) if step.sums else None,
    }
