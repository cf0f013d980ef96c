"""From the sizes of a call to its launches: how many programs, and how much each does.

Nothing that is tuned here changes a result. Unless they say otherwise, numbers are the best found for the cells of the
record tests/benchmarks/records/h200.json (one H200, 151,936 tokens, bfloat16).
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from specdecode.batch import Logprobs
from specdecode.kernels.arguments import (
    Inputs,
    Placing,
    Reading,
    Searching,
    Settling,
    Sizes,
    Truncating,
    Workspace,
)
from specdecode.kernels.block import NUMBERS, decide_kernel, ratio_kernel, sum_kernel
from specdecode.kernels.bundles import MIN_BLOCKS, TENSORS, Layout, inputs_of, outputs_of, sizes_of
from specdecode.kernels.candidates import CANDIDATES, LISTS
from specdecode.kernels.emit import emit_kernel
from specdecode.kernels.launch import Argument, Plan, can_overlap
from specdecode.kernels.read import read_kernel
from specdecode.kernels.residual import LIST_FIELDS
from specdecode.kernels.state import FIELDS
from specdecode.kernels.truncation import truncate_kernel
from specdecode.kernels.vocabulary import SPAN, places_kernel


@dataclass(frozen=True, eq=False)  # found by identity: to hash a kernel takes long
class AcceptRule:
    """How a method decides about drafts and draws the token after them."""

    while_reading: Any  # decides in the launch that reads; None: nothing is decided there
    before_truncation: Any  # likewise of rows that are truncated afterwards: which drafts may be accepted
    decide: Any
    draw: Any  # None: `decide` has drawn the token
    num_warps: int  # of a program that emits without draft logits; 8 with
    large_rows: int  # a batch with so many rows to read is large: it pays to find out early which rows do not matter


READ_BLOCKS = 4  # that a program reads at once, each by one warp

# Registers of a thread that truncates a row: so two programs of 8 warps run on a multiprocessor, or, in a large batch, four
# of 4 warps, which take longer.
TRUNCATION_REGISTERS = 128
LIST_SIZE = LISTS.value * CANDIDATES.value

# Up to SMALL_GRID programs, each reads READ_BLOCKS blocks once (one and a half times as many run at once); or up to
# SMALL_GRID_BOTH, where each reads a target and a draft row and none exits early. Beyond that a program reads requests /
# REQUESTS_PER_TILE times, at least 2 and at most 8: there are fewer programs to start, but decisions come later.
SMALL_GRID, SMALL_GRID_BOTH, REQUESTS_PER_TILE = 2048, 8192, 64

# Registers of a thread that reads aligned rows of 16-bit logits, of one and of two: as few as will do, for more programs at
# once. And of one that emits where there are draft rows: left to itself, the compiler spilled some to have more programs.
READ_REGISTERS, READ_REGISTERS_BOTH, EMIT_REGISTERS = 48, 64, 128

# More of them where a large batch is summed at two temperatures: some would spill. On an H100, 256 requests of 3 drafts,
# T = .7: `strict` 96 -> 92 us, `block` 225 -> 219. In a small batch it was slower: `strict`, 32 requests 19.3 -> 20.1 us.
RAW_REGISTERS = 16

# In block verification: programs that share all sums; and BLOCKS and LANES of `arguments.Settling`.
SUM_PROGRAMS, SETTLING = 1056, (4, 512)

# TOP, BLOCKS and LANES of `arguments.Searching`: more blocks at once are more often enough, and take longer. With so many
# requests one is likely to need a long search, for which the others wait.
SEARCH = {"few": (2, 1, 256), "many": (8, 1, 256), "large": (8, 2, 256)}
MANY_REQUESTS = 12

PLANS = 1024  # that are kept, of calls whose sizes, strides or dtypes differ
MOST_PROGRAMS = 65_535  # along a grid's second dimension, and its third


@functools.lru_cache(maxsize=PLANS)
def plan_step(
    rule: AcceptRule,
    large: bool,
    many: bool,
    device: torch.device,
    shape: tuple[int, ...],
    layouts: tuple[Layout | None, ...],
    samples: bool,
    seeds_by_request: bool = False,
    logprobs: Logprobs | None = None,
    draft_vocab_size: int | None = None,
) -> Plan:
    """Plan a step.

    Args:
        rule: how drafts are decided about.
        large: whether to find out early which rows do not matter.
        many: whether to search as is best for many requests.
        device: where the tensors are.
        shape: [batch, num_draft_tokens + 1, vocab] of the target logits that are read, or [batch, vocab].
        layouts: how each of `TENSORS` lies, None for those that are not there; of `OF_TRUNCATION` too if rows are truncated.
            With row_starts the call is packed: target logits and draft tokens lie by row.
        samples: whether tokens are only sampled, and their rows' logsumexp asked for.
        seeds_by_request: whether a packed call has a seed for each request, not for each slot.
        logprobs: of what the emitted tokens' log-probabilities are.
        draft_vocab_size: the number of tokens of draft rows, None if they have the target's.
    """
    requests, *rows, vocab_size = shape
    num_draft_tokens = rows[0] - 1 if rows else 0
    sizes = sizes_of(requests, num_draft_tokens, vocab_size)
    inputs = inputs_of(layouts, vocab_size, seeds_by_request, draft_vocab_size)
    truncates = len(layouts) > len(TENSORS)
    has_drafts, has_draft_rows = inputs.drafts.ids_ptr is not None, inputs.draft.ptr is not None
    settles = has_drafts and rule.while_reading is None
    while_reading = rule.before_truncation if truncates else rule.while_reading
    decides = large and not settles and while_reading is not None
    parts = parts_of(inputs, sizes, truncates, settles, logprobs)
    # Programs that count each other need zeros to start from. Else the first launch clears what the next ones use.
    state = parts["state"]
    plan = Plan(device, parts, zeros=state[1] if decides and state is not None else 0)
    logprobs_ptr = None if logprobs is None else Argument("logprobs", torch.float32)
    workspace = Workspace(*[*[plan.part(name) for name in parts], logprobs_ptr, None, None])
    bundles = inputs, workspace, sizes
    if draft_vocab_size is not None:
        add_places(plan, *bundles)
    untruncated = workspace._replace(cutoffs_ptr=None, logprobs_ptr=None) if truncates else workspace
    add_reading(plan, inputs, untruncated, sizes, while_reading if decides else None, large, keeps_raw=truncates)
    if truncates:
        add_truncation(plan, *bundles, large=large, posted=decides)
    sums = settles and has_draft_rows and not large
    if settles:
        add_settling(plan, *bundles, sums)
    per_row = has_drafts and not settles and (truncates or not large)
    searches = has_draft_rows and not sums
    search = "large" if large and not per_row else "many" if searches and (many or large) else "few"
    flags = per_row, per_row and decides, settles, sums, can_overlap(device)
    tuning = Searching(*SEARCH[search], rule.decide, rule.draw, *flags)
    outputs = outputs_of(samples, truncates, logprobs_ptr)
    add_drawing(plan, emit_kernel, (inputs, outputs, workspace, sizes, tuning), rule.num_warps)
    return plan


def parts_of(
    inputs: Inputs, sizes: Sizes, truncates: bool, settles: bool, logprobs: Logprobs | None
) -> dict[str, tuple[torch.dtype, int] | None]:
    """Return the dtype and the size of each part of the workspace, in the order of `arguments.Workspace`."""
    num_drafts = sizes.batch * sizes.num_draft_tokens
    num_rows, of_state = num_drafts + sizes.batch, sizes.batch * FIELDS.value
    rows_read = num_rows + num_drafts * (inputs.draft.ptr is not None)
    sums = settles and inputs.draft.ptr is not None
    state = of_state + num_rows
    if truncates:  # stop bits, at an even index
        state += state % 2 + of_state
    return {
        "state": None if inputs.drafts.ids_ptr is None else (torch.int32, state),
        "statistics": (torch.float32, rows_read * 2 * sizes.num_blocks),
        "cutoffs": (torch.float32, rows_read * 2) if truncates else None,
        "kept": (torch.int32, rows_read * LIST_SIZE) if truncates else None,
        "numbers": (torch.float32, num_rows * NUMBERS.value) if settles else None,
        "listed": (torch.int64, num_drafts * LIST_FIELDS.value) if sums else None,
        "residual_sums": (torch.float32, num_drafts * sizes.num_blocks) if sums else None,
        "raw_statistics": (torch.float32, num_rows * 2 * sizes.num_blocks) if logprobs == "raw" else None,
        "places": None if inputs.draft_vocabulary.ids_ptr is None else (torch.int32, sizes.vocab_size),
    }


def add_places(plan: Plan, inputs: Inputs, workspace: Workspace, sizes: Sizes) -> None:
    """Add the launch that finds the places of the target's tokens among the draft's."""
    bundles = inputs, workspace, sizes, Placing(can_overlap(plan.device))
    plan.add(places_kernel, (triton.cdiv(sizes.vocab_size, SPAN.value),), bundles, num_warps=8, follows=False)


def add_settling(plan: Plan, inputs: Inputs, workspace: Workspace, sizes: Sizes, sums: bool) -> None:
    """Add the launches of block verification between reading and emitting."""
    tuning = add_deciding(plan, inputs, workspace, sizes, sums)
    if inputs.draft.ptr is not None:
        shares = sizes.batch * sizes.num_draft_tokens * triton.cdiv(sizes.num_blocks, tuning.BLOCKS)
        plan.add(sum_kernel, (min(shares, SUM_PROGRAMS),), (inputs, workspace, sizes, tuning), num_warps=8)


def add_deciding(plan: Plan, inputs: Inputs, workspace: Workspace, sizes: Sizes, sums: bool) -> Settling:
    """Add the launches of block verification that decide; return how, but for `sums`, which others ignore."""
    tuning = Settling(*SETTLING, False, can_overlap(plan.device))
    bundles, requests, num_draft_tokens = (inputs, workspace, sizes), sizes.batch, sizes.num_draft_tokens
    plan.add(ratio_kernel, (requests * num_draft_tokens,), (*bundles, tuning), num_warps=4)
    deciding = *bundles, tuning._replace(SUMS=sums)
    plan.add(decide_kernel, (requests * (num_draft_tokens + 1),), deciding, num_warps=4)
    return tuning


def add_reading(
    plan: Plan, inputs: Inputs, workspace: Workspace, sizes: Sizes, while_reading: Any, large: bool, keeps_raw: bool
) -> None:
    """Add the launch that reads."""
    has_drafts, has_draft_rows = inputs.drafts.ids_ptr is not None, inputs.draft.ptr is not None
    reads_both = has_draft_rows and inputs.drafts.logsumexp_ptr is None
    small_grid = SMALL_GRID_BOTH if reads_both and while_reading is None else SMALL_GRID
    num_rows = sizes.num_draft_tokens + 1
    tiles = reading_tiles(sizes.batch, num_rows, sizes.num_blocks, small_grid)
    chunks = triton.cdiv(sizes.num_blocks, tiles * READ_BLOCKS)
    flat = max(sizes.batch, num_rows) > MOST_PROGRAMS
    logits = [rows for rows in (inputs.target, inputs.draft) if rows.ptr is not None]
    is_usual = all(rows.ALIGNED and rows.ptr.dtype.itemsize == 2 for rows in logits) and sizes.MAX_BLOCKS <= MIN_BLOCKS
    registers = READ_REGISTERS_BOTH if reads_both else READ_REGISTERS
    if large and workspace.raw_statistics_ptr is not None:
        registers += RAW_REGISTERS
    tuning = Reading(
        tiles=tiles,
        chunks=chunks,
        BLOCKS=READ_BLOCKS,
        DECIDE=while_reading,
        # Where a program decides there are no registers left for it, and where it only summarises it was slower.
        INTEGER_MAX=has_drafts and not (while_reading is not None and has_draft_rows),
        KEEPS_RAW=keeps_raw,
        FLAT=flat,
        OVERLAPS=can_overlap(plan.device),
        # A launch that emits without draft rows is soon set up; admitted early it only took room: 2 to 7 % slower.
        ADMITS_LATE=not has_draft_rows and not (has_drafts and while_reading is None),
    )
    plan.add(
        read_kernel,
        (chunks * sizes.batch * num_rows,) if flat else (chunks, sizes.batch, num_rows),
        (inputs, workspace, sizes, tuning),
        num_warps=READ_BLOCKS,
        follows=workspace.places_ptr is not None,
        max_registers=registers if is_usual and has_drafts else None,
    )


def add_truncation(plan: Plan, inputs: Inputs, workspace: Workspace, sizes: Sizes, large: bool, posted: bool) -> None:
    """Add the launch that truncates the rows that were read."""
    rows, is_alike = sizes.batch * (sizes.num_draft_tokens + 1), True
    if inputs.draft.ptr is not None:
        rows += sizes.batch * sizes.num_draft_tokens
        kinds = [(rows.ptr.dtype, rows.stride_token, rows.ALIGNED) for rows in (inputs.target, inputs.draft)]
        is_alike = kinds[0] == kinds[1]
    num_warps = 4 if large else 8
    bundles = inputs, workspace, sizes, Truncating(is_alike, posted, num_warps, can_overlap(plan.device))
    plan.add(truncate_kernel, (rows,), bundles, num_warps=num_warps, max_registers=TRUNCATION_REGISTERS)


def add_drawing(plan: Plan, kernel: Any, bundles: tuple[Any, ...], num_warps: int) -> None:
    """Add the launch that draws tokens, given how many warps a program has without draft rows."""
    inputs, *_, sizes, tuning = bundles
    has_draft_rows = inputs.draft.ptr is not None
    plan.add(
        kernel,
        (sizes.batch * (sizes.num_draft_tokens + 1 if tuning.PER_ROW else 1),),
        bundles,
        num_warps=8 if has_draft_rows else num_warps,
        max_registers=EMIT_REGISTERS if has_draft_rows else None,
    )


def reading_tiles(requests: int, num_rows: int, num_blocks: int, small_grid: int) -> int:
    """Return how many times `READ_BLOCKS` blocks a program reads."""
    if requests * num_rows * triton.cdiv(num_blocks, READ_BLOCKS) <= small_grid:
        return 1
    return min(max(requests // REQUESTS_PER_TILE, 2), 8)
