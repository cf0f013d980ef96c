"""The launches of a step, planned once for calls of all sizes: workspace, grids, and the tuned config.

No tuned number changes a result, except RESIDUAL_BLOCK_N, which all launches share. Unless a comment says otherwise, the
numbers are the best found for the cells of the record tests/benchmarks/records/h200.json (one H200, 151,936 tokens,
bfloat16).
"""

from typing import Any

import torch

from specdecode.kernels.arguments import (
    BlockDecision,
    Inputs,
    Mapping,
    Outputs,
    Policy,
    Reading,
    Searching,
    Siblings,
    Sizes,
    Truncating,
    Workspace,
)
from specdecode.kernels.block import TERMS, decide_kernel, ratio_kernel, sum_kernel
from specdecode.kernels.bundles import (
    MIN_BLOCKS,
    NO_ADJUSTMENTS,
    NO_ROWS,
    Structure,
    definitions_in,
    inputs_in,
    lists_in,
    outputs_in,
    sizes_in,
    symbols_in,
)
from specdecode.kernels.emit import emit_kernel
from specdecode.kernels.first_rejected import FIELDS
from specdecode.kernels.launch import Part, Plan, can_overlap
from specdecode.kernels.read import read_kernel
from specdecode.kernels.residual import QUEUE_FIELDS
from specdecode.kernels.siblings import siblings_kernel
from specdecode.kernels.signature import Symbol
from specdecode.kernels.statistics import WARP
from specdecode.kernels.top_logprobs import top_logprobs_kernel
from specdecode.kernels.truncation.kernel import truncate_kernel
from specdecode.kernels.truncation.narrow import list_size
from specdecode.kernels.vocabulary import SPAN, map_kernel

READ_BLOCKS = 4  # that a program reads at once, each by one warp

# Warps of a program that truncates a row, and registers of a thread: two programs fit on a multiprocessor.
TRUNCATION_WARPS, TRUNCATION_REGISTERS = 8, 128

# In grids of up to SMALL_GRID programs (1.5 times as many as run at once), each reads READ_BLOCKS blocks once. The limit
# is SMALL_GRID_BOTH if each reads a target and a draft row and none exits early. In larger grids a program does so
# requests / REQUESTS_PER_TILE times, at least 2 and at most 8: fewer programs start, but decisions come later.
SMALL_GRID, SMALL_GRID_BOTH, REQUESTS_PER_TILE = 2048, 8192, 64

# Registers of a thread that reads one or two aligned rows of 16-bit logits: fewer registers let more programs run at once.
# EMIT_REGISTERS holds with draft rows; the compiler's own limit spilled some.
READ_REGISTERS, READ_REGISTERS_BOTH, EMIT_REGISTERS = 48, 64, 128

# The same for rows with masks only; and for rows with penalties or biases, in a small and in a large batch. Counts need
# one register for each logit. On an H100, 96 registers spilled in a small batch (32 requests with penalties: 60 -> 80 us);
# 128 were slower in a large one (`strict`, 256 requests, one with penalties: 97 -> 106 us, because fewer programs run at
# once; but `probabilistic`, all with penalties: 294 -> 269).
READ_REGISTERS_MASKED, READ_REGISTERS_ADJUSTED = 80, (128, 96)

# Added where a thread also keeps lane maxima, for truncation, or sums a large batch at two temperatures: fewer spill. On an
# H100, with lane maxima: 32 requests 30.1 -> 29.4 us, 256 requests 121 -> 114. With two sums, 256 requests of 3 drafts, T =
# .7: `strict` 96 -> 92, `block` 225 -> 219; in a small batch slower: `strict`, 32 requests 19.3 -> 20.1 us.
MORE_REGISTERS = 16

# BLOCK_N of all sums of residuals. It sets their order, and so the last bit, which must not depend on the batch.
RESIDUAL_BLOCK_N = 256

# In block verification: the number of programs that share all sums, and BLOCKS of `arguments.BlockDecision`.
SUM_PROGRAMS, SUM_BLOCKS = 1056, 4

# TOP and BLOCKS of `arguments.Searching`: an iteration over more blocks takes longer, but fewer iterations are needed. From
# MANY_REQUESTS on, some request is likely to need a long search, which delays the whole launch.
SEARCH = {"few": (2, 1), "many": (8, 1), "large": (8, 2)}
MANY_REQUESTS = 12

MOST_PROGRAMS = 65_535  # along a grid's second dimension, and its third

Given = tuple[Inputs, Workspace, Sizes]
"""The bundles that all kernels receive."""


def plan_step(structure: Structure) -> Plan:
    """Plan the steps of a structure: read, truncate, decide a block, emit, list likely tokens."""
    inputs, outputs, sizes = inputs_in(structure), outputs_in(structure), sizes_in(structure)
    decide, overlaps = decision_while_reading(structure), can_overlap(structure.device)
    published, has_draft_rows = decide is not None, structure.draft is not None
    # Where programs count each other, the state is zeroed before; otherwise `read` clears it for later launches.
    parts = workspace_parts(structure)
    plan = Plan(structure.device, definitions_in(structure), parts, zeros=parts["state"].length if published else "0")
    workspace = Workspace._make(
        [*[plan.part(name.removesuffix("_ptr")) for name in Workspace._fields[:-1]], outputs.logprobs_ptr]
    )
    given = inputs, workspace, sizes
    if workspace.draft_id_of_token_ptr is not None:
        programs = f"-(-vocab_size // {SPAN.value})"
        plan.add(map_kernel, programs, (*given, Mapping(overlaps)), num_warps=8, follows=False)
    add_reading(plan, structure, given, decide)
    if structure.truncates:
        add_truncation(plan, given, published)
    sums_all = structure.decides_block and has_draft_rows and not structure.large
    if structure.decides_block:
        add_block_decision(plan, given, sums_all)
    step = inputs, outputs, workspace, sizes
    add_emission(plan, structure, step, sums_all, published)
    if {"top_token_ids", "num_kept"} & {*structure.names}:
        plan.add(top_logprobs_kernel, "target_rows", (*step, lists_in(structure, overlaps)), num_warps=8)
    if structure.width > 0:
        siblings = Siblings(symbols_in(structure)["siblings"], structure.width, overlaps)
        plan.add(siblings_kernel, "batch", (*step, siblings), num_warps=4 if structure.width <= 2 else 8)
    return plan


def workspace_parts(structure: Structure) -> dict[str, Part]:
    """Return the parts of the workspace, in the order of `Workspace`."""
    has_draft_rows, parts = structure.draft is not None, dict[str, Part]()
    rows_read = "(target_rows + draft_rows)" if has_draft_rows else "target_rows"
    if structure.has_drafts:
        length = f"batch * {FIELDS.value} + target_rows"
        if structure.truncates:  # row bits, at an even index
            length = f"{length} + ({length}) % 2 + batch * {FIELDS.value}"
        parts["state"] = Part(torch.int32, length)
    parts["statistics"] = Part(torch.float32, f"{rows_read} * 2 * num_blocks")
    if structure.truncates:
        parts["cutoffs"] = Part(torch.float32, f"{rows_read} * 2")
        parts["maxima"] = Part(torch.float32, f"{rows_read} * {WARP.value} * num_blocks")
        parts["candidates"] = Part(torch.int64, f"{rows_read} * {list_size(structure.max_blocks)}")
    if structure.decides_block:
        parts["terms"] = Part(torch.float32, f"target_rows * {TERMS.value}")
        if has_draft_rows:
            parts["queue"] = Part(torch.int64, f"draft_rows * {QUEUE_FIELDS.value}")
            parts["residual_sums"] = Part(torch.float32, "draft_rows * num_blocks")
    if structure.logprobs == "raw":
        parts["raw_statistics"] = Part(torch.float32, "target_rows * 2 * num_blocks")
    if "draft_vocab_ids" in structure.names:
        parts["draft_id_of_token"] = Part(torch.int32, "vocab_size")
    return parts


def decision_while_reading(structure: Structure) -> Any:
    """Return the function that decides about drafts while rows of a large batch are read; None if the method has none."""
    if not structure.large or structure.decides_block:
        return None
    method = structure.method
    return method.decide_before_truncation if structure.truncates else method.decide_while_reading


def add_block_decision(plan: Plan, given: Given, sums_all: bool) -> None:
    """Add the launches of block verification between reading and emitting.

    With `sums_all`, also sum the residuals that a token may be drawn from, not only those that a decision needs.
    """
    config = BlockDecision(SUM_BLOCKS, RESIDUAL_BLOCK_N, False, can_overlap(plan.device))
    plan.add(ratio_kernel, "draft_rows", (*given, config), num_warps=4)
    plan.add(decide_kernel, "target_rows", (*given, config._replace(SUMS=sums_all)), num_warps=4)
    if given[0].draft.ptr is not None:
        programs = f"min(draft_rows * -(-num_blocks // {SUM_BLOCKS}), {SUM_PROGRAMS})"
        plan.add(sum_kernel, programs, (*given, config), num_warps=8)


def add_reading(plan: Plan, structure: Structure, given: Given, decide: Any) -> None:
    """Add the launch that reads; with a function `decide` it also decides."""
    (inputs, workspace, sizes), large, flat = given, structure.large, structure.flat
    has_drafts, has_draft_rows = inputs.drafts.ids_ptr is not None, inputs.draft.ptr is not None
    reads_both = has_draft_rows and inputs.drafts.logsumexp_ptr is None
    small_grid = SMALL_GRID_BOTH if reads_both and decide is None else SMALL_GRID
    plan.functions["reading_tiles"] = reading_tiles
    plan.definitions["tiles"] = f"reading_tiles(batch, num_draft_tokens + 1, num_blocks, {small_grid})"
    plan.definitions["chunks"] = f"-(-num_blocks // (tiles * {READ_BLOCKS}))"
    logits = [rows for rows in (inputs.target, inputs.draft) if rows.ptr is not None]
    is_tuned = all(rows.ALIGNED and rows.ptr.dtype.itemsize == 2 for rows in logits) and sizes.MAX_BLOCKS <= MIN_BLOCKS
    registers = READ_REGISTERS_BOTH if reads_both else READ_REGISTERS
    if inputs.adjustments.EXIST:
        only_masks = inputs.adjustments.repetition is None and inputs.adjustments.bias_ptr is None
        registers = READ_REGISTERS_MASKED if only_masks else READ_REGISTERS_ADJUSTED[large]
    if workspace.maxima_ptr is not None or (large and workspace.raw_statistics_ptr is not None):
        registers += MORE_REGISTERS
    if structure.truncates:
        workspace = workspace._replace(cutoffs_ptr=None, logprobs_ptr=None)
    config = Reading(
        tiles=Symbol("tiles"),
        chunks=Symbol("chunks"),
        BLOCKS=READ_BLOCKS,
        # Not where a program decides and may read both rows: it has no registers left. Without drafts it was slower.
        INTEGER_MAX=has_drafts and not (decide is not None and has_draft_rows),
        KEEPS_RAW=structure.truncates,
        FLAT=flat,
        OVERLAPS=can_overlap(plan.device),
        # A launch that emits without draft rows starts fast. Admitted early it only occupies the GPU: 2 to 7 % slower.
        ADMITS_LATE=not has_draft_rows and not (has_drafts and decide is None),
    )
    plan.add(
        read_kernel,
        "chunks * target_rows" if flat else ("chunks", "batch", "num_draft_tokens + 1"),
        (inputs, workspace, sizes, config, Policy(DECIDE=decide, DRAW=None)),
        num_warps=READ_BLOCKS,
        follows=workspace.draft_id_of_token_ptr is not None,
        max_registers=registers if is_tuned and has_drafts else None,
    )


def add_truncation(plan: Plan, given: Given, published: bool) -> None:
    """Add the launch that truncates the rows that were read, or two launches if draft rows are read differently."""
    inputs, workspace, sizes = given
    config = Truncating(False, published, can_overlap(plan.device))

    def add(rows: str, inputs: Inputs, config: Truncating) -> None:
        bundles = inputs, workspace, sizes, config
        plan.add(truncate_kernel, rows, bundles, num_warps=TRUNCATION_WARPS, max_registers=TRUNCATION_REGISTERS)

    if inputs.draft.ptr is None:
        add("target_rows", inputs, config)
        return
    kinds = [(rows.ptr.dtype, rows.stride_token, rows.ALIGNED) for rows in (inputs.target, inputs.draft)]
    if kinds[0] == kinds[1] and not inputs.adjustments.EXIST:
        add("target_rows + draft_rows", inputs, config)
    else:
        of_target, of_drafts = inputs_apart(inputs)
        add("target_rows", of_target, config)
        add("draft_rows", of_drafts, config._replace(OF_DRAFTS=True))


def inputs_apart(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Return the inputs for truncating target rows, and the inputs for truncating draft rows."""
    without_cutoffs = inputs.drafts._replace(cutoff_ptr=None, cutoff_stride_request=0, cutoff_stride_offset=0)
    of_target = inputs._replace(draft=NO_ROWS, drafts=without_cutoffs)
    return of_target, inputs._replace(adjustments=NO_ADJUSTMENTS)


def add_emission(
    plan: Plan, structure: Structure, step: tuple[Inputs, Outputs, Workspace, Sizes], sums_all: bool, published: bool
) -> None:
    """Add the launch that emits; first rejections may have been published while reading."""
    method, large, has_draft_rows = structure.method, structure.large, structure.draft is not None
    per_row = structure.has_drafts and not structure.decides_block and (structure.truncates or not large)
    searches = has_draft_rows and not sums_all
    search = "large" if large and not per_row else "many" if searches and (structure.many or large) else "few"
    flags = per_row, per_row and published, structure.decides_block, sums_all, can_overlap(plan.device)
    config, policy = Searching(*SEARCH[search], RESIDUAL_BLOCK_N, *flags), Policy(method.decide, method.draw)
    plan.add(
        emit_kernel,
        "target_rows" if per_row else "batch",
        (*step, config, policy),
        num_warps=8 if has_draft_rows else method.num_warps,
        max_registers=EMIT_REGISTERS if has_draft_rows else None,
    )


def reading_tiles(requests: int, num_rows: int, num_blocks: int, small_grid: int) -> int:
    """Return the number of times that a program reads `READ_BLOCKS` blocks."""
    if requests * num_rows * -(-num_blocks // READ_BLOCKS) <= small_grid:
        return 1
    return min(max(requests // REQUESTS_PER_TILE, 2), 8)
