"""From the sizes of a call to its launches: how many programs, how much each does, and the numbers that tests found best.

What is tuned here does not change any result. Each number names the measurement that it comes from, all on one H200.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from specdecode.kernels.arguments import (
    Drafts,
    Inputs,
    Outputs,
    Reading,
    Requests,
    Rows,
    Searching,
    Sizes,
    Workspace,
)
from specdecode.kernels.block import NUMBERS, bound_kernel, ratio_kernel
from specdecode.kernels.emit import emit_kernel
from specdecode.kernels.launch import Argument, Plan, can_overlap, grid_of_rows
from specdecode.kernels.read import read_kernel
from specdecode.kernels.state import FIELDS
from specdecode.noise import BLOCK_SIZE


@dataclass(frozen=True, eq=False)  # found by identity: to hash a kernel takes long
class AcceptRule:
    """How a method decides about drafts and draws the token after them, and when it does so while rows are read."""

    accepts: Any  # while reading, given the statistics of a row; None: not then
    decide: Any
    draw: Any
    large_rows: int  # from so many rows to read on a batch is large


READ_BLOCKS = 4
"""Blocks that a program reads at once, each by one warp."""

SMALL_GRID = 2048
"""Programs of a launch in which each had best read as little as it can: one and a half times those that run at once."""

READ_REGISTERS, READ_REGISTERS_WITH_DRAFT = 48, 64
"""Registers for a thread that reads aligned rows of 16-bit logits: as few as will do, for more programs at once."""

EMIT_REGISTERS_BLOCK = 128
"""Likewise where block verification settles: with more, a multiprocessor would run one program at a time, not two."""

SEARCH = {"few": (2, 1, 256), "many": (8, 1, 256), "early exit": (8, 2, 256), "block": (1, 4, 512)}
"""TOP, BLOCKS and LANES of a search, see `arguments.Searching`: more blocks at once are more often enough, but take longer."""

MANY_REQUESTS = 12
"""Requests of which one is likely to need a long search, for which the others wait."""

BOUND_ROWS = 512
"""From so many rows on, block verification bounds its candidates before it sums those that are left."""

BOUND_ROUNDS = 6
"""Rounds of four blocks by which most candidates are decided."""

MIN_DRAFTS = 32
"""At least so many drafts of a request are handled at once, or the next power of two: all usual numbers compile the same."""

MIN_BLOCKS = 256
"""At least so many blocks of a row are handled at once (262,144 tokens), or the next power of two."""

PLANS = 1024
"""Plans that are kept, of calls whose sizes, strides or dtypes differ."""


Layout = tuple[torch.dtype, tuple[int, ...], bool]
"""What a plan depends on of a tensor: dtype, strides, and whether its address is a multiple of 16.

A plain tuple, because each call makes a few: a named one takes twice as long.
"""


def layout(tensor: Tensor) -> Layout:
    """Return how a tensor lies."""
    return tensor.dtype, tensor.stride(), tensor.data_ptr() % 16 == 0


def optional_layout(tensor: Tensor | None) -> Layout | None:
    """Return how a tensor lies, None if there is none."""
    return None if tensor is None else layout(tensor)


def at_least(least: int, size: int) -> int:
    """Return a power of two that holds a size: the same for all usual ones, because each compiles kernels anew."""
    return least if size <= least else triton.next_power_of_2(size)


def rows_of(name: str, rows: Layout | None, index: torch.dtype | None, vocab_size: int) -> Rows:
    """Return the bundle of [batch, rows, vocab] logits."""
    if rows is None:
        return Rows(None, None, 0, 0, 0, True)
    dtype, (stride_request, stride_offset, stride_token), is_aligned = rows
    is_dense = stride_token == 1
    is_aligned = is_aligned and is_dense and (stride_request | stride_offset | vocab_size) % 16 == 0
    pointers = Argument(name, dtype), optional(f"{name}_index", index)
    return Rows(*pointers, stride_request, stride_offset, 1 if is_dense else stride_token, is_aligned)


def optional(name: str, dtype: torch.dtype | None) -> Argument | None:
    """Return a tensor's argument, None if there is no such tensor."""
    return None if dtype is None else Argument(name, dtype)


Dtypes = tuple[torch.dtype | None, ...]


def requests_of(dtypes: Dtypes) -> Requests:
    """Return the bundle of one number for each request, given the dtypes of temperature, seeds and positions."""
    temperature, seeds, positions = dtypes
    return Requests(
        optional("temperatures", temperature),
        Argument("temperature"),
        optional("seeds", seeds),
        Argument("first_seed"),
        optional("positions", positions),
        Argument("block_domain"),
        Argument("token_domain"),
    )


class Step:
    """A plan in the making: its sizes and bundles, and the launches that all steps share."""

    def __init__(
        self, device: torch.device, sizes: Sizes, inputs: Inputs, workspace: dict[str, Any], zeros: int = 0
    ) -> None:
        self.sizes, self.inputs = sizes, inputs
        self.plan = Plan(device, workspace, zeros)
        self.workspace = Workspace(*[self.plan.part(name) for name in workspace])
        self.overlaps = can_overlap(device)

    def read(self, accepts: Any, *, small_grid: int = SMALL_GRID, requests_per_tile: int = 64) -> None:
        """Add the launch that reads."""
        sizes, (target, draft, drafts, _) = self.sizes, self.inputs
        num_rows = sizes.num_draft_tokens + 1
        tiles = reading_tiles(sizes.batch, num_rows, sizes.num_blocks, small_grid, requests_per_tile)
        chunks = triton.cdiv(sizes.num_blocks, tiles * READ_BLOCKS)
        grid, flat = grid_of_rows(chunks, sizes.batch, num_rows)
        reads_draft = draft.ptr is not None and drafts.logsumexp_ptr is None
        registers = READ_REGISTERS_WITH_DRAFT if reads_draft else READ_REGISTERS
        logits = [rows for rows in (target, draft) if rows.ptr is not None]
        is_usual = all(rows.ALIGNED and rows.ptr.dtype.itemsize == 2 for rows in logits) and sizes.MAX_BLOCKS == MIN_BLOCKS
        integer_max = drafts.ids_ptr is not None and (accepts is None or draft.ptr is None)
        admits_late = draft.ptr is None and (accepts is not None or drafts.ids_ptr is None)
        tuning = Reading(tiles, chunks, READ_BLOCKS, accepts, integer_max, flat, self.overlaps, admits_late)
        self.plan.add(
            read_kernel,
            grid,
            (self.inputs, self.workspace, sizes, tuning),
            num_warps=READ_BLOCKS,
            follows=False,
            max_registers=registers if is_usual and drafts.ids_ptr is not None else None,
        )

    def searching(self, search: str, rule: AcceptRule, programs: int, **options: bool) -> Searching:
        """Return how blocks are searched."""
        flags = [options.get(name, False) for name in ("per_row", "settles", "summed")]
        return Searching(programs, BOUND_ROUNDS, *SEARCH[search], rule.decide, rule.draw, *flags, self.overlaps)

    def search(self, kernel: Any, tuning: Searching, programs: int, num_warps: int) -> None:
        """Add a launch between reading and emitting."""
        bundles = self.inputs, self.workspace, self.sizes, tuning
        self.plan.add(kernel, (programs,), bundles, num_warps=num_warps)

    def emit(self, outputs: Outputs, tuning: Searching, num_warps: int, max_registers: int | None = None) -> Plan:
        """Add the launch that emits; return the plan."""
        bundles = self.inputs, outputs, self.workspace, self.sizes, tuning
        grid = (self.sizes.batch * tuning.programs,)
        self.plan.add(emit_kernel, grid, bundles, num_warps=num_warps, max_registers=max_registers)
        return self.plan


def sizes_of(requests: int, num_draft_tokens: int, vocab_size: int) -> Sizes:
    """Return the bundle of sizes."""
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    max_blocks, max_drafts = at_least(MIN_BLOCKS, num_blocks), at_least(MIN_DRAFTS, num_draft_tokens + 1)
    return Sizes(requests, num_draft_tokens, vocab_size, num_blocks, max_blocks, max_drafts, vocab_size % 16 == 0)


NO_DRAFTS = Drafts(None, 0, 0, None, 0, 0, None)


@functools.lru_cache(maxsize=PLANS)
def plan_sampling(
    rule: AcceptRule,
    device: torch.device,
    requests: int,
    vocab_size: int,
    logits: Layout,
    index: torch.dtype | None,
    dtypes: Dtypes,
    verifies: bool,
) -> Plan:
    """Plan to draw a token from each row, and to say its logsumexp, or (`verifies`) that there were no drafts."""
    sizes = sizes_of(requests, 0, vocab_size)
    inputs = Inputs(
        rows_of("target", logits, index, vocab_size), rows_of("draft", None, None, 0), NO_DRAFTS, requests_of(dtypes)
    )
    statistics = (torch.float32, requests * 2 * sizes.num_blocks)
    workspace = {"state": None, "statistics": statistics, "candidates": None, "residual_sums": None}
    step = Step(device, sizes, inputs, workspace)
    step.read(None)
    outputs = Outputs(
        Argument("token_ids", torch.int64),
        *verification_outputs() if verifies else (None, None, None),
        None if verifies else Argument("logsumexp", torch.float32),
    )
    return step.emit(outputs, step.searching("few", rule, programs=1), num_warps=8)


def verification_outputs() -> tuple[Argument, ...]:
    """Return the outputs of a verification but for its tokens."""
    return (
        Argument("num_accepted", torch.int32),
        Argument("num_drafts", torch.int32),
        Argument("invalid", torch.bool),
    )


@functools.lru_cache(maxsize=PLANS)
def plan_verification(
    rule: AcceptRule,
    large: bool,
    many: bool,
    device: torch.device,
    requests: int,
    num_draft_tokens: int,
    vocab_size: int,
    target: Layout,
    draft: Layout | None,
    ids: Layout,
    logsumexp: Layout | None,
    indices: Dtypes,
    has_rates: bool,
    dtypes: Dtypes,
) -> Plan:
    """Plan a verification step with drafts; `dtypes` are those of temperature, seeds and positions."""
    sizes = sizes_of(requests, num_draft_tokens, vocab_size)
    target_index, draft_index = indices
    drafts = Drafts(
        Argument("ids", ids[0]),
        *ids[1],
        *(None, 0, 0) if logsumexp is None else (Argument("draft_logsumexp", logsumexp[0]), *logsumexp[1]),
        optional("rates", torch.float32 if has_rates else None),
    )
    inputs = Inputs(
        rows_of("target", target, target_index, vocab_size),
        rows_of("draft", draft, draft_index, vocab_size),
        drafts,
        requests_of(dtypes),
    )
    in_block = rule.accepts is None
    decides = large and not in_block  # while reading
    num_rows, num_drafts = requests * (num_draft_tokens + 1), requests * num_draft_tokens
    state = requests * FIELDS.value + num_rows
    rows = num_rows if draft is None else num_rows + num_drafts
    workspace = {
        "state": (torch.int32, state),
        "statistics": (torch.float32, rows * 2 * sizes.num_blocks),
        "candidates": (torch.float32, num_rows * NUMBERS.value) if in_block else None,
        "residual_sums": (torch.float32, num_drafts * sizes.num_blocks) if in_block and draft is not None else None,
    }
    # Programs that count each other need zeros to start from. Else the first launch clears what the next ones use.
    step = Step(device, sizes, inputs, workspace, zeros=state if decides else 0)
    # Programs that read both rows at once, of which none exits early, are best small in larger launches too.
    reads_draft = draft is not None and logsumexp is None
    step.read(rule.accepts if decides else None, small_grid=SMALL_GRID * (4 if reads_draft and not decides else 1))
    outputs = Outputs(Argument("token_ids", torch.int64), *verification_outputs(), None)
    num_warps = 4 if draft is None else 8
    if in_block:
        programs = 1 if draft is None else settling_programs(requests, sizes.num_blocks)
        tuning = step.searching("block", rule, programs, settles=True, summed=not large and draft is not None)
        step.search(ratio_kernel, tuning, num_rows, num_warps=4)
        if draft is not None and large:
            step.search(bound_kernel, tuning, num_drafts, num_warps=8)
        return step.emit(outputs, tuning, num_warps, EMIT_REGISTERS_BLOCK)
    if large:
        return step.emit(outputs, step.searching("early exit", rule, programs=1), num_warps)
    search = "many" if many and draft is not None else "few"
    tuning = step.searching(search, rule, programs=num_draft_tokens + 1, per_row=True)
    return step.emit(outputs, tuning, num_warps=8 if rule.large_rows == 384 else num_warps)


def is_large(rule: AcceptRule, requests: int, num_draft_tokens: int, reads_draft_rows: bool) -> bool:
    """Return whether a batch has so many rows that it pays to find out early which of them need not be read."""
    return requests * (num_draft_tokens + 1 + num_draft_tokens * reads_draft_rows) >= rule.large_rows


def reading_tiles(requests: int, num_rows: int, num_blocks: int, small_grid: int, requests_per_tile: int) -> int:
    """Return how many times `READ_BLOCKS` blocks a program reads: fewer programs to start, against later decisions."""
    if requests * num_rows * triton.cdiv(num_blocks, READ_BLOCKS) <= small_grid:
        return 1
    return min(max(requests // requests_per_tile, 2), 8)


def settling_programs(requests: int, num_blocks: int) -> int:
    """Return how many programs share what is left to sum of a request in block verification."""
    rounds = triton.cdiv(num_blocks, SEARCH["block"][1])
    return max(1, min(rounds, 512 // requests))
