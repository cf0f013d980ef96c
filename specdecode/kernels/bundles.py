"""From the tensors of a call to the bundles that kernels receive: what they are compiled for, and the names of arguments."""

import itertools
import operator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specdecode.batch import MOST_KEPT, Logprobs, VerificationBatch
from specdecode.kernels.arguments import (
    Adjustments,
    Drafts,
    DraftVocabulary,
    Inputs,
    Limits,
    Outputs,
    Packing,
    Reporting,
    Requests,
    Rows,
    Sizes,
)
from specdecode.kernels.formulas import Argument, Number, ceil_div
from specdecode.kernels.methods import Method
from specdecode.noise import BLOCK_SIZE

# At least so many drafts of a request and blocks of a row (262,144 tokens) are handled at once, or the next power of two:
# so all usual sizes compile the same kernels. But rows of at most 65,536 tokens have kernels of their own.
MIN_DRAFTS, MIN_BLOCKS, FEW_BLOCKS = 32, 256, 64

LIMITS = ("top_k", "top_p", "min_p", "draft_top_k", "draft_top_p", "draft_min_p")
EACH_LIMIT = tuple(f"{name}_each" for name in LIMITS)

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
EACH_PENALTY = tuple(f"{name}_each" for name in PENALTIES)

STRIDED, DENSE, ALIGNED = "strided", "dense", "aligned"
"""How logits rows lie: anyhow; token beside token; and such that they start at multiples of 16 bytes, and have a width and
strides that are multiples of 16 logits."""


class Structure(NamedTuple):
    """All that the launches of a step depend on, and their kernels are compiled for: no size, no stride and no address."""

    method: Method
    device: torch.device
    names: tuple[str, ...]  # of the tensors that the step is given
    dtypes: tuple[torch.dtype, ...]  # of these
    target: str  # how its rows lie
    draft: str | None  # likewise, if there are draft rows
    vocab_ids_are_aligned: bool  # those of the draft's own vocabulary
    max_blocks: int
    max_drafts: int
    is_aligned: bool  # vocab_size is a multiple of 16
    large: bool  # it is found out early which rows do not matter
    many: bool  # search as is best for many requests
    is_sampling: bool  # tokens are only sampled, and their rows' logsumexp asked for
    truncates: bool  # rows are truncated
    logprobs: Logprobs | None  # of what the emitted tokens' log-probabilities are
    seeds_by_request: bool  # a packed call has a seed for each request, not for each slot
    penalizes: bool  # target rows may have penalties
    counts_are_aligned: bool  # those of emitted tokens
    flat: bool  # there are more requests, or rows of a request, than a grid's second and third dimensions take
    lists_likeliest: bool  # the likeliest tokens of emitted rows are returned
    lists_kept: bool  # and what is kept of them

    @property
    def has_drafts(self) -> bool:
        """Whether requests may have drafts."""
        return "ids" in self.names

    @property
    def decides_block(self) -> bool:
        """Whether launches of their own decide about all drafts of a request, see `methods`."""
        return self.has_drafts and self.method.decides_block


def layout_of(rows: Tensor) -> str:
    """Return how logits rows lie in memory, [batch, rows, vocab] or [rows, vocab]."""
    strides = rows.stride()
    if strides[-1] != 1:
        return STRIDED
    return DENSE if (strides[0] | strides[-2] | rows.shape[-1] | rows.data_ptr()) % 16 else ALIGNED


def at_least(least: int, size: int) -> int:
    """Return a power of two that holds a size: the same for all usual ones, because each compiles kernels anew."""
    return least if size <= least else triton.next_power_of_2(size)


def class_of(num_draft_tokens: int, vocab_size: int) -> tuple[int, int, bool]:
    """Return what kernels are compiled for of sizes: MAX_BLOCKS, MAX_DRAFTS and ALIGNED."""
    num_blocks = -(-vocab_size // BLOCK_SIZE)
    max_blocks = FEW_BLOCKS if num_blocks <= FEW_BLOCKS else at_least(MIN_BLOCKS, num_blocks)
    return max_blocks, at_least(MIN_DRAFTS, num_draft_tokens + 1), vocab_size % 16 == 0


def sizes_of(
    batch: Any, num_draft_tokens: Any, vocab_size: Any, max_blocks: int, max_drafts: int, is_aligned: bool
) -> Sizes:
    """Return the bundle of sizes."""
    counts = batch, num_draft_tokens, vocab_size, ceil_div(vocab_size, BLOCK_SIZE)
    return Sizes(*counts, max_blocks, max_drafts, is_aligned)


def sizes_in(structure: Structure) -> Sizes:
    """Return the bundle of sizes of calls of this structure."""
    num_draft_tokens = Number("num_draft_tokens") if structure.has_drafts else 0
    of_class = structure.max_blocks, structure.max_drafts, structure.is_aligned
    return sizes_of(Number("batch"), num_draft_tokens, Number("vocab_size"), *of_class)


def inputs_in(structure: Structure) -> Inputs:
    """Return the bundle of inputs of calls of this structure."""
    tensors = {name: Argument(name, dtype) for name, dtype in zip(structure.names, structure.dtypes)}
    get = tensors.get
    is_packed = "row_starts" in tensors
    numbers = [Number(name) for name in ("temperature", "first_seed", "block_domain", "token_domain")]
    requests = get("temperatures"), numbers[0], get("seeds"), structure.seeds_by_request, numbers[1]
    limits, draft_limits = (
        limits_of(tensors, slice(first, first + 3)) if structure.truncates else NO_LIMITS for first in (0, 3)
    )
    return Inputs(
        packing_of(get("row_starts"), get("slots"), tensors["target"]),
        rows_of(get("target"), structure.target, is_packed or not structure.has_drafts),
        rows_of(get("draft"), structure.draft),
        draft_vocabulary_of(get("draft_vocab_ids"), structure.vocab_ids_are_aligned),
        Drafts(
            *by_offset(get("ids"), is_packed),
            *by_offset(get("draft_logsumexp")),
            *by_offset(get("draft_cutoff")),
            get("rates"),
        ),
        Requests(*requests, get("positions"), get("row_positions"), *numbers[2:]),
        limits,
        draft_limits,
        adjustments_of(tensors, structure.penalizes, structure.counts_are_aligned, is_packed),
    )


def stride_of(ptr: Argument, dimension: int) -> Number:
    """Return how far apart a tensor's elements are in one dimension."""
    return Number(operator.getitem, (Number(Tensor.stride, (Number(ptr.name),)), dimension))


def length_of(ptr: Argument) -> Number:
    """Return the length of a tensor."""
    return Number(len, (Number(ptr.name),))


def by_offset(ptr: Argument | None, by_row: bool = False) -> tuple[Any, Any, Any]:
    """Return a pointer to what there is for each request and offset, and the strides of both: one where that is by row."""
    return (None, 0, 0) if ptr is None else (ptr, stride_of(ptr, 0), stride_of(ptr, 0 if by_row else 1))


NO_ROWS = Rows(None, 0, 0, 0, ALIGNED=True)


def rows_of(ptr: Argument | None, layout: str | None, by_row: bool = False) -> Rows:
    """Return the bundle of logits rows."""
    if ptr is None:
        return NO_ROWS
    return Rows(*by_offset(ptr, by_row), stride_of(ptr, -1) if layout == STRIDED else 1, ALIGNED=layout == ALIGNED)


def draft_vocabulary_of(ids: Argument | None, is_aligned: bool) -> DraftVocabulary:
    """Return the bundle of the draft's vocabulary; without ids it is the target's."""
    if ids is None:
        return DraftVocabulary(None, None, None)
    return DraftVocabulary(ids, length_of(ids), is_aligned)


def packing_of(row_starts: Argument | None, slots: Argument | None, target: Argument) -> Packing:
    """Return the bundle of where rows and slots are; without pointers the call is not packed."""
    if row_starts is None:
        return Packing(None, None, None, None)
    return Packing(row_starts, length_of(target), slots, None if slots is None else Number("num_slots"))


NO_LIMITS = Limits(*[None] * len(Limits._fields))


def limits_of(tensors: dict[str, Argument], some: slice) -> Limits:
    """Return the bundle of some of `LIMITS`."""
    pointers = [tensors.get(name) for name in EACH_LIMIT[some]]
    return Limits(*itertools.chain.from_iterable(zip(pointers, map(Number, LIMITS[some]))))


def adjustments_of(tensors: dict[str, Argument], penalizes: bool, is_aligned: bool, is_packed: bool) -> Adjustments:
    """Return the bundle of adjustments."""
    get = tensors.get
    penalties: list[Any] = [None] * 6
    if penalizes:
        penalties = list(itertools.chain.from_iterable(zip(map(get, EACH_PENALTY), map(Number, PENALTIES))))
    masks: list[Any] = []
    for name in ("prompt_mask", "output_counts"):
        rows = get(name)
        masks += [rows, None if rows is None else stride_of(rows, 0)]
    num_biases = Number("num_biases") if "bias" in tensors else None
    allowed = by_offset(tensors["allowed_mask"], is_packed) if "allowed_mask" in tensors else [None] * 3
    exist = penalizes or "bias" in tensors or "allowed_mask" in tensors
    return Adjustments._make(
        [exist, *penalties, *masks, get("bias_ids"), get("bias"), num_biases, *allowed, is_aligned]
    )


NO_ADJUSTMENTS = adjustments_of({}, False, False, False)


def outputs_in(structure: Structure) -> Outputs:
    """Return the bundle of outputs: of sampled tokens with their rows' logsumexp and cutoff, or of a verification."""
    token_ids = Argument("token_ids", torch.int64)
    if structure.is_sampling:
        cutoff = Argument("cutoff", torch.int64) if structure.truncates else None
        return Outputs(token_ids, None, None, None, Argument("logsumexp", torch.float32), cutoff, None)
    counts = Argument("num_accepted", torch.int32), Argument("num_drafts", torch.int32)
    logprobs = None if structure.logprobs is None else Argument("logprobs", torch.float32)
    return Outputs(token_ids, *counts, Argument("invalid", torch.bool), None, None, logprobs)


def empty_report(batch: VerificationBatch, token_ids: Tensor) -> dict[str, Tensor]:
    """Return what a report fills, by the names of `SamplerOutput` and of arguments."""
    report, shape, device = {}, token_ids.shape, token_ids.device
    if batch.top_logprobs > 0:
        lists = *shape, batch.top_logprobs
        report["top_token_ids"] = torch.empty(lists, dtype=torch.int64, device=device)
        report["top_logprobs"] = torch.empty(lists, dtype=torch.float32, device=device)
    if batch.kept_sets:
        report["num_kept"] = torch.empty(shape, dtype=torch.int32, device=device)
        report["kept_token_ids"] = torch.empty((*shape, MOST_KEPT), dtype=torch.int32, device=device)
        report["kept_cutoff"] = torch.empty_like(token_ids)
    return report


def reporting_of(structure: Structure, overlaps: bool) -> Reporting:
    """Return the bundle of what else a step returns of the rows of its tokens."""
    top: tuple[Any, ...] = (None,) * 3
    if structure.lists_likeliest:
        ids, logprobs = Argument("top_token_ids", torch.int64), Argument("top_logprobs", torch.float32)
        top = ids, logprobs, Number("num_top")
    kept: tuple[Any, ...] = (None,) * 3
    if structure.lists_kept:
        dtypes = {"num_kept": torch.int32, "kept_token_ids": torch.int32, "kept_cutoff": torch.int64}
        kept = tuple([Argument(name, dtype) for name, dtype in dtypes.items()])
    return Reporting._make([*top, *kept, overlaps])
