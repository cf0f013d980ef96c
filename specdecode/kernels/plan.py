"""The launches of a step, for calls of all sizes: what they have for a workspace, how many programs, how much each does.

No number that is tuned here changes a result. (RESIDUAL_LANES would, and is one for all; DECIDE and DRAW, in the same
bundles, are the method's.) Unless they say otherwise, numbers are the best found for the cells of the record
tests/benchmarks/records/h200.json (one H200, 151,936 tokens, bfloat16).
"""

from typing import Any

import torch

from specdecode.kernels.arguments import (
    BlockDecision,
    Inputs,
    Mapping,
    Outputs,
    Reading,
    Searching,
    Sizes,
    Truncating,
    Workspace,
)
from specdecode.kernels.block import TERMS, decide_kernel, ratio_kernel, sum_kernel
from specdecode.kernels.bundles import MIN_BLOCKS, NO_ADJUSTMENTS, NO_ROWS, Structure, reporting_of
from specdecode.kernels.emit import emit_kernel
from specdecode.kernels.formulas import Number, ceil_div
from specdecode.kernels.launch import Plan, can_overlap
from specdecode.kernels.read import read_kernel
from specdecode.kernels.report import report_kernel
from specdecode.kernels.residual import LIST_FIELDS
from specdecode.kernels.statistics import WARP
from specdecode.kernels.stops import FIELDS
from specdecode.kernels.truncation.kernel import truncate_kernel
from specdecode.kernels.truncation.narrow import list_size
from specdecode.kernels.vocabulary import SPAN, map_kernel

READ_BLOCKS = 4  # that a program reads at once, each by one warp

# Warps of a program that truncates a row, and registers of a thread: so two programs run on a multiprocessor.
TRUNCATION_WARPS, TRUNCATION_REGISTERS = 8, 128

# Up to SMALL_GRID programs, each reads READ_BLOCKS blocks once (one and a half times as many as run at once); or up to
# SMALL_GRID_BOTH, where each reads a target and a draft row and none exits early. Beyond that a program reads requests /
# REQUESTS_PER_TILE times, at least 2 and at most 8: there are fewer programs to start, but decisions come later.
SMALL_GRID, SMALL_GRID_BOTH, REQUESTS_PER_TILE = 2048, 8192, 64

# Registers of a thread that reads aligned rows of 16-bit logits, of one and of two: as few as will do, for more programs at
# once. And of one that emits where there are draft rows: left to itself, the compiler spilled some to have more programs.
READ_REGISTERS, READ_REGISTERS_BOTH, EMIT_REGISTERS = 48, 64, 128

# Of one that reads rows with masks alone; and, in a small and in a large batch, with penalties or biases: counts take one
# for each logit. On an H100 96 spilled some in a small batch: 32 requests with penalties 60 -> 80 us. In a large one 128 let
# fewer programs run at once: `strict`, one of 256 requests with penalties 97 -> 106; but `probabilistic`, all, 294 -> 269.
READ_REGISTERS_MASKED, READ_REGISTERS_ADJUSTED = 80, (128, 96)

# More of them where lane maxima are kept, for truncation, or a large batch is summed at two temperatures: some would spill.
# On an H100, lane maxima: 32 requests 30.1 -> 29.4 us, 256 121 -> 114. Sums, 256 requests of 3 drafts, T = .7: `strict`
# 96 -> 92, `block` 225 -> 219. In a small batch it was slower: `strict`, 32 requests 19.3 -> 20.1 us.
MORE_REGISTERS = 16

# LANES of all that sums residuals. They set the order, and so the last bit, which must not depend on the batch.
RESIDUAL_LANES = 256

# In block verification: programs that share all sums, and BLOCKS of `arguments.BlockDecision`.
SUM_PROGRAMS, SUM_BLOCKS = 1056, 4

# TOP and BLOCKS of `arguments.Searching`: more blocks at once are more often enough, and take longer. With so many requests
# one is likely to need a long search, for which the others wait.
SEARCH = {"few": (2, 1), "many": (8, 1), "large": (8, 2)}
MANY_REQUESTS = 12

MOST_PROGRAMS = 65_535  # along a grid's second dimension, and its third


def allocate(
    structure: Structure, inputs: Inputs, outputs: Outputs, sizes: Sizes, counts: bool
) -> tuple[Plan, Workspace]:
    """Return a plan that is still empty, and the bundle of its workspace.

    Programs that count each other (`counts`) need zeros to start from. Else the first launch clears what the next ones use.
    """
    truncates, num_drafts = structure.truncates, sizes.batch * sizes.num_draft_tokens
    has_draft_rows = inputs.draft.ptr is not None
    num_rows, of_state = num_drafts + sizes.batch, sizes.batch * FIELDS.value
    rows_read, sums = num_rows + num_drafts * has_draft_rows, structure.decides_block and has_draft_rows
    state = of_state + num_rows
    if truncates:  # stop bits, at an even index
        state += state % 2 + of_state
    parts = {  # in the order of `arguments.Workspace`
        "state": (torch.int32, state) if structure.has_drafts else None,
        "statistics": (torch.float32, rows_read * 2 * sizes.num_blocks),
        "cutoffs": (torch.float32, rows_read * 2) if truncates else None,
        "maxima": (torch.float32, rows_read * WARP.value * sizes.num_blocks) if truncates else None,
        "candidates": (torch.int64, rows_read * list_size(sizes.MAX_BLOCKS)) if truncates else None,
        "terms": (torch.float32, num_rows * TERMS.value) if structure.decides_block else None,
        "listed": (torch.int64, num_drafts * LIST_FIELDS.value) if sums else None,
        "residual_sums": (torch.float32, num_drafts * sizes.num_blocks) if sums else None,
        "raw_statistics": (torch.float32, num_rows * 2 * sizes.num_blocks) if structure.logprobs == "raw" else None,
        "draft_ids": None if inputs.draft_vocabulary.ids_ptr is None else (torch.int32, sizes.vocab_size),
    }
    plan = Plan(structure.device, parts, zeros=state if counts else 0)
    of_parts = [plan.part(name) for name in parts]
    return plan, Workspace._make([*of_parts, outputs.logprobs_ptr])


def decision_while_reading(structure: Structure) -> Any:
    """Return how the launch that reads decides about drafts: it does in a large batch, if the method can know so early."""
    if not structure.large or structure.decides_block:
        return None
    method = structure.method
    return method.decide_before_truncation if structure.truncates else method.decide_while_reading


def add_mapping(plan: Plan, inputs: Inputs, workspace: Workspace, sizes: Sizes) -> None:
    """Add the launch that maps the target's tokens to the draft's ids."""
    bundles = inputs, workspace, sizes, Mapping(can_overlap(plan.device))
    plan.add(map_kernel, ceil_div(sizes.vocab_size, SPAN.value), bundles, num_warps=8, follows=False)


def add_block_decision(plan: Plan, inputs: Inputs, workspace: Workspace, sizes: Sizes, sums: bool) -> None:
    """Add the launches of block verification between reading and emitting; those that decide read `sums`, or not."""
    tuning = BlockDecision(SUM_BLOCKS, RESIDUAL_LANES, False, can_overlap(plan.device))
    bundles, requests, num_draft_tokens = (inputs, workspace, sizes), sizes.batch, sizes.num_draft_tokens
    plan.add(ratio_kernel, requests * num_draft_tokens, (*bundles, tuning), num_warps=4)
    deciding = *bundles, tuning._replace(SUMS=sums)
    plan.add(decide_kernel, requests * (num_draft_tokens + 1), deciding, num_warps=4)
    if inputs.draft.ptr is not None:
        shares = requests * num_draft_tokens * ceil_div(sizes.num_blocks, tuning.BLOCKS)
        plan.add(sum_kernel, Number(min, (shares, SUM_PROGRAMS)), (*bundles, tuning), num_warps=8)


def add_reading(
    plan: Plan,
    inputs: Inputs,
    workspace: Workspace,
    sizes: Sizes,
    while_reading: Any,
    large: bool,
    keeps_raw: bool,
    flat: bool,
) -> None:
    """Add the launch that reads."""
    has_drafts, has_draft_rows = inputs.drafts.ids_ptr is not None, inputs.draft.ptr is not None
    reads_both = has_draft_rows and inputs.drafts.logsumexp_ptr is None
    small_grid = SMALL_GRID_BOTH if reads_both and while_reading is None else SMALL_GRID
    num_rows = sizes.num_draft_tokens + 1
    tiles = Number(reading_tiles, (sizes.batch, num_rows, sizes.num_blocks, small_grid))
    chunks = ceil_div(sizes.num_blocks, tiles * READ_BLOCKS)
    logits = [rows for rows in (inputs.target, inputs.draft) if rows.ptr is not None]
    is_usual = all(rows.ALIGNED and rows.ptr.dtype.itemsize == 2 for rows in logits) and sizes.MAX_BLOCKS <= MIN_BLOCKS
    registers = READ_REGISTERS_BOTH if reads_both else READ_REGISTERS
    if inputs.adjustments.EXIST:
        only_masks = inputs.adjustments.repetition is None and inputs.adjustments.bias_ptr is None
        registers = READ_REGISTERS_MASKED if only_masks else READ_REGISTERS_ADJUSTED[large]
    if workspace.maxima_ptr is not None or (large and workspace.raw_statistics_ptr is not None):
        registers += MORE_REGISTERS
    tuning = Reading(
        tiles=tiles,
        chunks=chunks,
        BLOCKS=READ_BLOCKS,
        DECIDE=while_reading,
        # Where a program decides and reads both rows there are no registers left for it; without drafts it was slower.
        INTEGER_MAX=has_drafts and not (while_reading is not None and has_draft_rows),
        KEEPS_RAW=keeps_raw,
        FLAT=flat,
        OVERLAPS=can_overlap(plan.device),
        # A launch that emits without draft rows is soon set up; admitted early it only took room: 2 to 7 % slower.
        ADMITS_LATE=not has_draft_rows and not (has_drafts and while_reading is None),
    )
    plan.add(
        read_kernel,
        chunks * sizes.batch * num_rows if flat else (chunks, sizes.batch, num_rows),
        (inputs, workspace, sizes, tuning),
        num_warps=READ_BLOCKS,
        follows=workspace.draft_ids_ptr is not None,
        max_registers=registers if is_usual and has_drafts else None,
    )


def add_truncation(plan: Plan, inputs: Inputs, workspace: Workspace, sizes: Sizes, large: bool, posted: bool) -> None:
    """Add the launch that truncates the rows that were read; or two, if draft rows are read in another way."""
    target_rows, draft_rows = sizes.batch * (sizes.num_draft_tokens + 1), sizes.batch * sizes.num_draft_tokens
    tuning = Truncating(False, posted, can_overlap(plan.device))

    def add(rows: Any, inputs: Inputs, tuning: Truncating) -> None:
        bundles = inputs, workspace, sizes, tuning
        plan.add(truncate_kernel, rows, bundles, num_warps=TRUNCATION_WARPS, max_registers=TRUNCATION_REGISTERS)

    if inputs.draft.ptr is None:
        add(target_rows, inputs, tuning)
        return
    kinds = [(rows.ptr.dtype, rows.stride_token, rows.ALIGNED) for rows in (inputs.target, inputs.draft)]
    if kinds[0] == kinds[1] and not inputs.adjustments.EXIST:
        add(target_rows + draft_rows, inputs, tuning)
    else:
        of_target, of_drafts = inputs_apart(inputs)
        add(target_rows, of_target, tuning)
        add(draft_rows, of_drafts, tuning._replace(OF_DRAFTS=True))


def inputs_apart(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Return what a launch that truncates target rows is given, and one that truncates draft rows."""
    without_cutoffs = inputs.drafts._replace(cutoff_ptr=None, cutoff_stride_request=0, cutoff_stride_offset=0)
    of_target = inputs._replace(draft=NO_ROWS, drafts=without_cutoffs)
    return of_target, inputs._replace(adjustments=NO_ADJUSTMENTS)


def add_emission(
    plan: Plan, structure: Structure, bundles: tuple[Inputs, Outputs, Workspace, Sizes], sums: bool, posted: bool
) -> None:
    """Add the launch that emits; stops may have been posted while reading."""
    method, large = structure.method, structure.large
    per_row = structure.has_drafts and not structure.decides_block and (structure.truncates or not large)
    searches = structure.draft is not None and not sums
    search = "large" if large and not per_row else "many" if searches and (structure.many or large) else "few"
    flags = per_row, per_row and posted, structure.decides_block, sums, can_overlap(plan.device)
    tuning = Searching(*SEARCH[search], RESIDUAL_LANES, method.decide, method.draw, *flags)
    inputs, *_, sizes = bundles
    has_draft_rows = inputs.draft.ptr is not None
    plan.add(
        emit_kernel,
        sizes.batch * (sizes.num_draft_tokens + 1 if per_row else 1),
        (*bundles, tuning),
        num_warps=8 if has_draft_rows else method.num_warps,
        max_registers=EMIT_REGISTERS if has_draft_rows else None,
    )


def add_report(plan: Plan, structure: Structure, bundles: tuple[Inputs, Outputs, Workspace, Sizes]) -> None:
    """Add the launch that reports on the rows of the tokens that were emitted, if that is asked for."""
    if structure.lists_likeliest or structure.lists_kept:
        *_, sizes = bundles
        report = reporting_of(structure, can_overlap(plan.device))
        plan.add(report_kernel, sizes.batch * (sizes.num_draft_tokens + 1), (*bundles, report), num_warps=8)


def reading_tiles(requests: int, num_rows: int, num_blocks: int, small_grid: int) -> int:
    """Return how many times `READ_BLOCKS` blocks a program reads."""
    if requests * num_rows * ceil_div(num_blocks, READ_BLOCKS) <= small_grid:
        return 1
    return min(max(requests // REQUESTS_PER_TILE, 2), 8)
