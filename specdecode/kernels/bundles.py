"""From the structure of a step to the bundles that its kernels receive.

A bundle of a plan holds constants and symbols: expressions of the tensors and numbers of a call, by their names.
"""

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
    Lists,
    Outputs,
    Packing,
    Requests,
    Rows,
    Sizes,
)
from specdecode.kernels.methods import Method
from specdecode.kernels.signature import Symbol
from specdecode.noise import BLOCK_SIZE

# Kernels are compiled for at least this many drafts and blocks (262,144 tokens), or the next power of two, so that all
# usual sizes share kernels. Rows of at most 65,536 tokens have separate kernels.
MIN_DRAFTS, MIN_BLOCKS, FEW_BLOCKS = 32, 256, 64

STRIDED_TENSORS = (
    "target",
    "draft",
    "ids",
    "draft_logsumexp",
    "draft_cutoff",
    "prompt_mask",
    "output_counts",
    "allowed_mask",
    "path",
)
"""The tensors whose strides kernels receive."""

LIMITS = ("top_k", "top_p", "min_p", "draft_top_k", "draft_top_p", "draft_min_p")
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")

STRIDED, DENSE, ALIGNED = "strided", "dense", "aligned"
"""The layouts of logits rows: any strides; contiguous rows; contiguous rows that start at multiples of 16 bytes, with a
width and strides that are multiples of 16 logits."""


class Structure(NamedTuple):
    """The properties of a step that its launches and kernels depend on: no size, no stride and no address."""

    method: Method
    device: torch.device
    names: tuple[str, ...]  # the names of a call's tensors
    dtypes: tuple[torch.dtype, ...]  # their dtypes
    target: str  # layout of target rows
    draft: str | None  # layout of draft rows, if there are any
    vocab_ids_are_aligned: bool  # the ids of the draft's own vocabulary
    max_blocks: int
    max_drafts: int
    is_aligned: bool  # vocab_size is a multiple of 16
    large: bool  # decide early which rows need not be read
    many: bool  # search blocks in the way that suits many requests
    truncates: bool  # rows are truncated
    logprobs: Logprobs | None
    seeds_by_request: bool  # a packed call has a seed for each request, not for each slot
    penalizes: bool  # target rows may have penalties
    counts_are_aligned: bool  # the counts of emitted tokens
    width: int  # number of siblings drawn from each row; 0: one token
    flat: bool  # more requests, or rows of a request, than the second and third dimensions of a grid allow

    @property
    def has_drafts(self) -> bool:
        """Whether requests may have drafts."""
        return "ids" in self.names

    @property
    def decides_block(self) -> bool:
        """Whether separate launches decide about all drafts of a request, see `methods`."""
        return self.has_drafts and self.method.decides_block


def layout_of(rows: Tensor) -> str:
    """Return the layout of logits rows, [batch, rows, vocab] or [rows, vocab]."""
    strides = rows.stride()
    if strides[-1] != 1:
        return STRIDED
    return DENSE if (strides[0] | strides[-2] | rows.shape[-1] | rows.data_ptr()) % 16 else ALIGNED


def at_least(least: int, size: int) -> int:
    """Return max(least, the next power of two of a size)."""
    return least if size <= least else triton.next_power_of_2(size)


def size_constants(num_draft_tokens: int, vocab_size: int) -> tuple[int, int, bool]:
    """Return the sizes that kernels are compiled for: MAX_BLOCKS, MAX_DRAFTS and ALIGNED of `Sizes`."""
    num_blocks = -(-vocab_size // BLOCK_SIZE)
    max_blocks = FEW_BLOCKS if num_blocks <= FEW_BLOCKS else at_least(MIN_BLOCKS, num_blocks)
    return max_blocks, at_least(MIN_DRAFTS, num_draft_tokens + 1), vocab_size % 16 == 0


def sizes_in(structure: Structure) -> Sizes:
    """Return the bundle of sizes."""
    num_draft_tokens = Symbol("num_draft_tokens") if structure.has_drafts else 0
    constants = structure.max_blocks, structure.max_drafts, structure.is_aligned
    return Sizes(Symbol("batch"), num_draft_tokens, Symbol("vocab_size"), Symbol("num_blocks"), *constants)


def definitions_in(structure: Structure) -> dict[str, str]:
    """Return the definitions, as expressions, of names that symbols use and that are not names of a call."""
    definitions = {
        "num_blocks": f"-(-vocab_size // {BLOCK_SIZE})",
        "target_rows": "batch * (num_draft_tokens + 1)",
        "draft_rows": "batch * num_draft_tokens",
    }
    return definitions | {f"{name}_strides": f"{name}.stride()" for name in STRIDED_TENSORS if name in structure.names}


Symbols = dict[str, Symbol]
"""The symbols of a structure's tensors, by name."""


def symbols_in(structure: Structure) -> Symbols:
    """Return the symbols of a structure's tensors."""
    return {name: Symbol(name, dtype) for name, dtype in zip(structure.names, structure.dtypes)}


def inputs_in(structure: Structure) -> Inputs:
    """Return the bundle of inputs."""
    symbols = symbols_in(structure)
    get, has_draft = symbols.get, structure.draft is not None
    limits = draft_limits = NO_LIMITS
    if structure.truncates:
        limits = Limits._make(each_or_all(symbols, LIMITS[:3]))
        draft_limits = Limits._make(each_or_all(symbols, LIMITS[3:]))
    logsumexp, cutoff = strided(symbols, "draft_logsumexp", 0, -1), strided(symbols, "draft_cutoff", 0, -1)
    temperature, first_seed = Symbol("temperature"), Symbol("first_seed")
    return Inputs(
        packing_in(symbols),
        rows_in(symbols, "target", structure.target),
        rows_in(symbols, "draft", structure.draft) if has_draft else NO_ROWS,
        draft_vocabulary_in(symbols, structure.vocab_ids_are_aligned),
        Drafts._make([*strided(symbols, "ids", 0, -1), *logsumexp, *cutoff, get("rates")]),
        Requests(
            *(get("temperatures"), temperature, get("seeds"), structure.seeds_by_request, first_seed),
            *(get("positions"), get("row_positions"), Symbol("block_domain"), Symbol("token_domain")),
        ),
        limits,
        draft_limits,
        adjustments_in(symbols, structure),
    )


def strided(symbols: Symbols, name: str, *dimensions: int, absent: int | None = 0) -> list[Any]:
    """Return a tensor and its strides in some dimensions."""
    if name not in symbols:
        return [None, *[absent] * len(dimensions)]
    return [symbols[name], *[Symbol(f"{name}_strides[{dimension}]") for dimension in dimensions]]


def each_or_all(symbols: Symbols, names: tuple[str, ...]) -> list[Any]:
    """Return for each name the tensor of values by request, or None, and the single value for all requests."""
    return [symbol for name in names for symbol in (symbols.get(f"{name}_each"), Symbol(name))]


NO_PACKING = Packing(None, None, None, None, False, None, None, None)
NO_ROWS = Rows(None, 0, 0, 0, ALIGNED=True)
NO_LIMITS = Limits(None, None, None, None, None, None)
NO_ADJUSTMENTS = Adjustments._make([False, *[None] * 16, False])


def rows_in(symbols: Symbols, name: str, layout: str | None) -> Rows:
    """Return the bundle of logits rows."""
    ptr, *strides, stride_token = strided(symbols, name, 0, -2, -1)
    return Rows._make([ptr, *strides, stride_token if layout == STRIDED else 1, layout == ALIGNED])


def draft_vocabulary_in(symbols: Symbols, is_aligned: bool) -> DraftVocabulary:
    """Return the bundle of the draft's vocabulary; without ids it is the target's."""
    if "draft_vocab_ids" not in symbols:
        return DraftVocabulary(None, None, None)
    return DraftVocabulary(symbols["draft_vocab_ids"], Symbol("len(draft_vocab_ids)"), is_aligned)


def packing_in(symbols: Symbols) -> Packing:
    """Return the bundle of rows and slots; without pointers the call is not packed."""
    starts, slots, is_round = symbols.get("row_starts"), symbols.get("slots"), "round_rows" in symbols
    if is_round:
        starts = symbols["round_rows"]
    if starts is None:
        return NO_PACKING
    path = [*strided(symbols, "path", 0, absent=None), Symbol("depth") if "path" in symbols else None]
    num_slots = None if slots is None else Symbol("num_slots")
    return Packing._make([starts, Symbol("len(target)"), slots, num_slots, is_round, *path])


def adjustments_in(symbols: Symbols, structure: Structure) -> Adjustments:
    """Return the bundle of adjustments."""
    get, penalizes, has_biases = symbols.get, structure.penalizes, "bias" in symbols
    if not (penalizes or has_biases or "allowed_mask" in symbols):
        return NO_ADJUSTMENTS
    return Adjustments._make(
        [
            True,
            *(each_or_all(symbols, PENALTIES) if penalizes else [None] * 6),
            *strided(symbols, "prompt_mask", 0, absent=None),
            *strided(symbols, "output_counts", 0, absent=None),
            *(get("bias_ids"), get("bias"), Symbol("num_biases") if has_biases else None),
            *strided(symbols, "allowed_mask", 0, -2, absent=None),
            structure.counts_are_aligned,
        ]
    )


def outputs_in(structure: Structure) -> Outputs:
    """Return the bundle of outputs."""
    names = "token_ids", "num_accepted", "num_drafts", "invalid", "logsumexp", "cutoff", "logprobs"
    return Outputs._make(map(symbols_in(structure).get, names))


def lists_in(structure: Structure, overlaps: bool) -> Lists:
    """Return the bundle of the lists of likely and kept tokens."""
    get = symbols_in(structure).get
    num_top = None if get("top_token_ids") is None else Symbol("num_top")
    top = get("top_token_ids"), get("top_logprobs"), num_top
    return Lists._make([*top, *map(get, ("num_kept", "kept_token_ids", "kept_cutoff")), overlaps])


def empty_outputs(batch: VerificationBatch, requests: int, num_tokens: int) -> dict[str, Tensor]:
    """Return the tensors that a verification fills, by the names of `Outputs`, in the order of `SamplerOutput`."""
    device = batch.target_logits.device
    num_accepted = torch.empty(requests, dtype=torch.int32, device=device)
    outputs = {
        "token_ids": torch.empty(requests, num_tokens, dtype=torch.int64, device=device),
        "num_accepted": num_accepted,
        "num_drafts": torch.empty_like(num_accepted),
        "invalid": torch.empty(requests, dtype=torch.bool, device=device),
    }
    if batch.logprobs is not None:
        outputs["logprobs"] = torch.empty(requests, num_tokens, dtype=torch.float32, device=device)
    return outputs


def empty_lists(batch: VerificationBatch, token_ids: Tensor) -> dict[str, Tensor]:
    """Return the tensors of the likely and kept tokens, by the names of `SamplerOutput`."""
    lists, shape, device = {}, token_ids.shape, token_ids.device
    if batch.top_logprobs > 0:
        top_shape = *shape, batch.top_logprobs
        lists["top_token_ids"] = torch.empty(top_shape, dtype=torch.int64, device=device)
        lists["top_logprobs"] = torch.empty(top_shape, dtype=torch.float32, device=device)
    if batch.kept_sets:
        lists["num_kept"] = torch.empty(shape, dtype=torch.int32, device=device)
        lists["kept_token_ids"] = torch.empty((*shape, MOST_KEPT), dtype=torch.int32, device=device)
        lists["kept_cutoff"] = torch.empty_like(token_ids)
    return lists
