"""From the tensors of a call to the bundles that kernels receive: what they are compiled for, and the names of arguments."""

import itertools

import torch
import triton
from torch import Tensor

from specdecode.checks import FLOATS, INTEGERS
from specdecode.kernels.arguments import (
    Drafts,
    DraftVocabulary,
    Inputs,
    Limits,
    Outputs,
    Packing,
    Requests,
    Rows,
    Shard,
    Sizes,
)
from specdecode.kernels.launch import Argument
from specdecode.noise import BLOCK_SIZE

# At least so many drafts of a request and blocks of a row (262,144 tokens) are handled at once, or the next power of two:
# so all usual sizes compile the same kernels.
MIN_DRAFTS, MIN_BLOCKS = 32, 256

Layout = tuple[torch.dtype, tuple[int, ...], bool]
"""What a plan depends on of a tensor: dtype, strides, and whether its address is a multiple of 16.

A plain tuple, because each call makes a few: a named one takes twice as long.
"""

TENSORS = (
    "target",
    "draft",
    "ids",
    "draft_logsumexp",
    "rates",
    "row_starts",
    "slots",
    "temperatures",
    "seeds",
    "positions",
    "row_positions",
    "draft_vocab_ids",
)
"""The tensors that a step may be given, see `arguments.Inputs`."""

LIMITS = ("top_k", "top_p", "min_p", "draft_top_k", "draft_top_p", "draft_min_p")
EACH_LIMIT = tuple(f"{name}_each" for name in LIMITS)
OF_TRUNCATION = (*EACH_LIMIT, "draft_cutoff")
"""The tensors that a step that truncates may be given besides."""

VECTORS = frozenset(
    ("rates", "row_starts", "slots", "temperatures", "seeds", "positions", "row_positions", *EACH_LIMIT)
)
"""Those that are given as contiguous vectors, of which kernels load single elements: they may start at any address."""
VECTOR_LAYOUTS: dict[torch.dtype, Layout] = {dtype: (dtype, (1,), False) for dtype in (*FLOATS, *INTEGERS)}


def layout(name: str, tensor: Tensor) -> Layout:
    """Return how a tensor lies; for a vector nothing but the dtype is looked up, because each call has several."""
    if name in VECTORS:
        return VECTOR_LAYOUTS[tensor.dtype]
    return tensor.dtype, tensor.stride(), tensor.data_ptr() % 16 == 0


def at_least(least: int, size: int) -> int:
    """Return a power of two that holds a size: the same for all usual ones, because each compiles kernels anew."""
    return least if size <= least else triton.next_power_of_2(size)


def sizes_of(requests: int, num_draft_tokens: int, vocab_size: int) -> Sizes:
    """Return the bundle of sizes."""
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    max_blocks, max_drafts = at_least(MIN_BLOCKS, num_blocks), at_least(MIN_DRAFTS, num_draft_tokens + 1)
    counts = requests, num_draft_tokens, vocab_size, num_blocks, max_blocks, max_drafts
    return Sizes(*counts, ALIGNED=vocab_size % 16 == 0, shard=Shard(*[None] * 5))


NO_ROWS = Rows(None, 0, 0, 0, ALIGNED=True)


def rows_of(rows: Layout | None, ptr: Argument | None, vocab_size: int) -> Rows:
    """Return the bundle of [batch, rows, vocab] logits, or of [batch, vocab]."""
    if rows is None:
        return NO_ROWS
    _, (stride_request, *offsets, stride_token), is_aligned = rows
    stride_offset = offsets[0] if offsets else 0
    is_aligned = is_aligned and stride_token == 1 and (stride_request | stride_offset | vocab_size) % 16 == 0
    return Rows(ptr, stride_request, stride_offset, stride_token, is_aligned)


def inputs_of(
    layouts: tuple[Layout | None, ...], vocab_size: int, seeds_by_request: bool, draft_vocab_size: int | None
) -> Inputs:
    """Return the bundle of inputs, given how each of `TENSORS` lies, and of `OF_TRUNCATION` if rows are truncated."""
    names = TENSORS + OF_TRUNCATION
    pointers = [None if tensor is None else Argument(name, tensor[0]) for name, tensor in zip(names, layouts)]
    target_ptr, draft_ptr, ids, logsumexp, rates, row_starts, slots, *others = pointers
    temperatures, seeds, positions, row_positions, draft_vocab_ids, *limits = others
    target, draft, *of_drafts = *layouts[:4], layouts[-1] if limits else None
    if row_starts is not None:
        target, of_drafts[0] = row_layout(target), row_layout(of_drafts[0])
    strides = [(0, 0) if tensor is None else tensor[1] for tensor in of_drafts]
    of_ids, of_logsumexp, of_cutoff = [(per_request, per_offset) for per_request, per_offset in strides]
    cutoff = limits.pop() if limits else None
    numbers = [Argument(name) for name in ("temperature", "first_seed", "block_domain", "token_domain")]
    return Inputs(
        packing_of(row_starts, slots),
        rows_of(target, target_ptr, vocab_size),
        rows_of(draft, draft_ptr, vocab_size if draft_vocab_size is None else draft_vocab_size),
        draft_vocabulary_of(layouts[TENSORS.index("draft_vocab_ids")], draft_vocab_ids, draft_vocab_size),
        Drafts(ids, *of_ids, logsumexp, *of_logsumexp, cutoff, *of_cutoff, rates),
        Requests(temperatures, numbers[0], seeds, seeds_by_request, numbers[1], positions, row_positions, *numbers[2:]),
        limits_of(limits[:3], LIMITS[:3]),
        limits_of(limits[3:], LIMITS[3:]),
    )


def row_layout(of: Layout | None) -> Layout | None:
    """Return how a tensor that is by row lies, as if it were by request and offset: both go on by rows."""
    if of is None:
        return None
    dtype, (step, *others), is_aligned = of
    return dtype, (step, step, *others), is_aligned


def draft_vocabulary_of(ids: Layout | None, ptr: Argument | None, size: int | None) -> DraftVocabulary:
    """Return the bundle of the draft's vocabulary; without ids it is the target's."""
    if ids is None or size is None:
        return DraftVocabulary(None, None, None)
    _, _, is_aligned = ids
    return DraftVocabulary(ptr, size, is_aligned and size % 16 == 0)


def packing_of(row_starts: Argument | None, slots: Argument | None) -> Packing:
    """Return the bundle of where rows and slots are; without pointers the call is not packed."""
    if row_starts is None:
        return Packing(None, None, None, None)
    return Packing(row_starts, Argument("num_rows"), slots, None if slots is None else Argument("num_slots"))


def limits_of(pointers: list[Argument | None], names: tuple[str, ...]) -> Limits:
    """Return the bundle of what truncates rows; without pointers nothing does."""
    if not pointers:
        return Limits(*[None] * len(Limits._fields))
    return Limits(*itertools.chain.from_iterable(zip(pointers, map(Argument, names))))


def outputs_of(samples: bool, truncates: bool, logprobs: Argument | None) -> Outputs:
    """Return the bundle of outputs: of sampled tokens with their rows' logsumexp and cutoff, or of a verification."""
    token_ids = Argument("token_ids", torch.int64)
    if samples:
        cutoff = Argument("cutoff", torch.int64) if truncates else None
        return Outputs(token_ids, None, None, None, Argument("logsumexp", torch.float32), cutoff, None)
    counts = Argument("num_accepted", torch.int32), Argument("num_drafts", torch.int32)
    return Outputs(token_ids, *counts, Argument("invalid", torch.bool), None, None, logprobs)
