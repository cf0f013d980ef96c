"""The Triton backend: fused kernels for GPUs.

A step is two launches. The first reads the rows (`reading`), and in a large batch decides on the way. The second emits
(`strict`, `probabilistic`, `block`); in a small batch it decides too, except in block verification, where a launch between
them weighs the drafts. No program waits for another: what must come after everything else is done by whoever comes last, or
by the next launch; and who is helped goes on alone until all is done. So nothing can hang. Nothing outlives a call but what
never changes: compiled code, plans of what to launch, a schedule's rates. So calls on several streams, from several threads
and in graphs do not meet.

Arithmetic is in float32 whatever the logits are. A request's result does not depend on anything that is tuned here.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch
from specdecode.kernels import block, probabilistic
from specdecode.kernels.launches import Layout, Plan, alignment, dtypes, lanes, layout
from specdecode.kernels.reading import read_kernel
from specdecode.kernels.rows import LARGEST_TEMPERATURE, SMALLEST
from specdecode.kernels.selection import sample_kernel, summarise_kernel
from specdecode.kernels.steps import FIELDS, MOST_ROWS
from specdecode.kernels.strict import decide_by_sample, finish_by_sample_kernel
from specdecode.kernels.synthetic import conditional_rates
from specdecode.noise import BLOCK_SIZE
from specdecode.synthetic import AcceptanceSchedule


@dataclass(frozen=True, eq=False)  # plans are found by it: not by its fields, for to hash a kernel takes long
class Judgement:
    """How a draft is judged when the statistics of its rows are there.

    In a large batch that is done while reading, so as to read no row after a rejection (in block verification, where these
    rows are needed, none behind an impossible draft).
    """

    decide: Any
    lazy_rows: int  # rows to read that make a batch large


BY_SAMPLE = Judgement(decide_by_sample, 384)
BY_RATIO = Judgement(probabilistic.decide_by_ratio, 320)
IN_BLOCK = Judgement(block.note_ratio, 1536)

METHODS = {
    "strict": (BY_SAMPLE, BY_SAMPLE),
    "probabilistic": (BY_RATIO, BY_RATIO),
    "block": (IN_BLOCK, IN_BLOCK),
    "synthetic": (BY_RATIO, BY_SAMPLE),
}
"""Each method's judgement with draft logits, and without."""

READ_BLOCKS = 4
"""Blocks that a program reads at once, each by one warp."""

SEARCH = {
    "few": {"LEADERS": 2, "BLOCKS": 1, "LANES": 256},
    "many": {"LEADERS": 8, "BLOCKS": 1, "LANES": 256},
    "large batch": {"LEADERS": 8, "BLOCKS": 2, "LANES": 256},
    "block": {"LEADERS": 1, "BLOCKS": 4, "LANES": 512},
}
"""How blocks are searched: with how many a search begins, and with how many a round it goes on, for more of them are more
often enough, and take longer; and how many logits of each are loaded at once, for fewer loads compile faster, and block
verification has many."""

MANY = 12
"""Requests of which one is likely to need a long search, for which the others wait."""

SMALL_GRID = 2048
"""Programs of a launch in which each had best read as little as it can: one and a half times those that run at once."""

EMITTING = 256
"""Programs that can emit at once."""

SMALLEST_TEAM, LARGEST_TEAM = 8, 16
"""Programs that one request may have in block verification, if not one: fewer would share the rest of a search later than
others could help, and more would have few blocks left for each."""

REGISTERS, REGISTERS_WITH_DRAFT_ROWS = 48, 64
"""Registers for a thread that reads aligned rows of 16-bit logits: as few as will do, for more programs at once."""

REGISTERS_TO_EMIT = 128
"""Likewise in block verification: with more, a GPU's multiprocessor would emit for one request at a time, not for two."""

MIN_DRAFTS = 32
"""As many drafts of a request are handled at once at least, or the next power of two."""

MIN_BLOCKS = 256
"""The statistics of a row are handled as this many blocks at least (262,144 tokens), or as the next power of two."""

PLANS = 1024
"""Plans that are kept, of calls whose sizes, strides or dtypes differ."""


def sample(batch: RowBatch, domains: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Draw one token per row; return [batch] int64 token ids and [batch] float32 logsumexp(logits / temperature)."""
    logits = batch.logits
    requests, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(requests, dtype=torch.int64, device=device)
    logsumexp = torch.empty(requests, dtype=torch.float32, device=device)
    if requests == 0:
        return token_ids, logsumexp
    of_requests, numbers = per_request(batch)
    plan = plan_sampling(device, requests, vocab_size, layout(logits), dtypes(of_requests.values()))
    plan.run(
        {"token_ids_ptr": token_ids, "logsumexp_ptr": logsumexp, "logits_ptr": logits, **of_requests},
        {"block_domain": int(domains[0]), "token_domain": int(domains[1]), **numbers},
    )
    return token_ids, logsumexp


@functools.lru_cache(maxsize=PLANS)
def plan_sampling(
    device: torch.device, requests: int, vocab_size: int, logits: Layout, others: tuple[torch.dtype | None, ...]
) -> Plan:
    """Plan to draw a token from each row; `others` are the dtypes of all other tensors, which compiled code hangs on."""
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    _, (stride_row, stride_token), _ = logits
    plan = Plan(
        device,
        workspace={"statistics_ptr": (torch.float32, requests * 2 * num_blocks)},
        zeros=0,
        constants={
            "stride_row": stride_row,
            "stride_token": stride_token,
            "batch": requests,
            "vocab_size": vocab_size,
            "num_blocks": num_blocks,
            "ALIGNMENT": alignment(logits, vocab_size),
            "LANES": lanes(logits),
            "MAX_BLOCKS": at_least(MIN_BLOCKS, num_blocks),
        },
    )
    tiles = reading_tiles(requests, 1, num_blocks)
    chunks = triton.cdiv(num_blocks, tiles * READ_BLOCKS)
    plan.add(
        summarise_kernel,
        chunks,
        requests,
        num_warps=READ_BLOCKS,
        follows=False,
        tiles=tiles,
        chunks=chunks,
        BLOCKS=READ_BLOCKS,
    )
    plan.add(sample_kernel, requests, num_warps=8)
    return plan


def verify(
    method: str,
    batch: VerificationBatch,
    schedule: AcceptanceSchedule | None = None,
    *,
    lazy: bool | None = None,
    many: bool | None = None,
    target_index: Tensor | None = None,
    draft_index: Tensor | None = None,
) -> SamplerOutput:
    """Run one verification step.

    Args:
        method: one of the sampler's methods.
        batch: the checked arguments.
        schedule: for `"synthetic"`.
        lazy: whether to decide while reading; None chooses by the number of rows.
        many: whether to search as is best for many requests in a small batch; None chooses by their number.
        target_index: [batch] int32 or int64; request r's target rows are `target_logits[target_index[r]]`. With
            overlapping strides, this addresses the rows of a ragged, packed batch. Then all ids behind a request's last
            draft are to be -1, for the row after any other may be read.
        draft_index: [batch] int32 or int64; likewise its slot in a cache of draft logits.
    """
    target, draft_token_ids = batch.target_logits, batch.draft_token_ids
    requests, num_draft_tokens = draft_token_ids.shape
    device = target.device
    token_ids = torch.empty(requests, num_draft_tokens + 1, dtype=torch.int64, device=device)
    num_accepted = torch.empty(requests, dtype=torch.int32, device=device)
    num_drafts = torch.empty(requests, dtype=torch.int32, device=device)
    invalid = torch.empty(requests, dtype=torch.bool, device=device)
    output = SamplerOutput(token_ids, num_accepted, num_drafts, invalid)
    if requests == 0:
        return output
    judgement = METHODS[method][batch.draft_logits is None]
    draft = None if judgement is BY_SAMPLE or num_draft_tokens == 0 else batch.draft_logits
    draft_logsumexp = batch.draft_logsumexp if draft is not None else None
    if lazy is None:
        reads_draft_rows = draft is not None and draft_logsumexp is None
        lazy = requests * (num_draft_tokens + 1 + num_draft_tokens * reads_draft_rows) >= judgement.lazy_rows
    lazy = (lazy or num_draft_tokens >= MOST_ROWS) and num_draft_tokens > 0
    many = not lazy and (requests >= MANY if many is None else many)
    rates = None if schedule is None else conditional_rates(schedule, device)
    of_requests, numbers = per_request(batch)
    plan = plan_verification(
        judgement,
        lazy,
        many,
        device,
        requests,
        num_draft_tokens,
        target.shape[-1],
        layout(target),
        None if draft is None else layout(draft),
        layout(draft_token_ids),
        None if draft_logsumexp is None else layout(draft_logsumexp),
        dtypes((rates, target_index, draft_index, *of_requests.values())),
    )
    tensors = {
        "token_ids_ptr": token_ids,
        "num_accepted_ptr": num_accepted,
        "num_drafts_ptr": num_drafts,
        "invalid_ptr": invalid,
        "target_ptr": target,
        "draft_ptr": draft,
        "ids_ptr": draft_token_ids,
        "logsumexp_ptr": draft_logsumexp,
        "rates_ptr": rates,
        "target_index_ptr": target_index,
        "draft_index_ptr": draft_index,
        **of_requests,
    }
    plan.run(tensors, numbers)
    return output


def warm_up(method: str, batch: VerificationBatch, schedule: AcceptanceSchedule | None = None) -> None:
    """Have all compiled that steps with arguments like these take, of as many drafts or fewer, whatever their sizes."""
    most = batch.draft_token_ids.shape[1]
    for num_draft_tokens in {0, min(most, 1), most}:
        drafts = slice(num_draft_tokens)
        fewer = batch._replace(
            target_logits=batch.target_logits[:, : num_draft_tokens + 1],
            draft_token_ids=batch.draft_token_ids[:, drafts],
            draft_logits=None if batch.draft_logits is None else batch.draft_logits[:, drafts],
            draft_logsumexp=None if batch.draft_logsumexp is None else batch.draft_logsumexp[:, drafts],
        )
        for lazy, many in ((False, False), (False, True), (True, False)):
            verify(method, fewer, schedule, lazy=lazy, many=many)


@functools.lru_cache(maxsize=PLANS)
def plan_verification(
    judgement: Judgement,
    lazy: bool,
    many: bool,
    device: torch.device,
    requests: int,
    num_draft_tokens: int,
    vocab_size: int,
    target: Layout,
    draft: Layout | None,
    ids: Layout,
    logsumexp: Layout | None,
    others: tuple[torch.dtype | None, ...],
) -> Plan:
    """Plan a verification step; `others` are the dtypes of all other tensors, which compiled code hangs on."""
    by_sample, in_block = judgement is BY_SAMPLE, judgement is IN_BLOCK
    num_rows, num_blocks = num_draft_tokens + 1, triton.cdiv(vocab_size, BLOCK_SIZE)
    num_drafts = requests * num_draft_tokens
    keeps_scalars = in_block or (lazy and not by_sample)
    summarised = requests * num_rows if draft is None else requests * num_rows + num_drafts
    max_blocks = at_least(MIN_BLOCKS, num_blocks)
    target_lanes = lanes(target)
    draft_lanes = target_lanes if draft is None else lanes(draft)
    search = "block" if in_block else "large batch" if lazy else "many" if many and draft is not None else "few"
    state = requests * (FIELDS.value + num_rows)
    floats, ints = torch.float32, torch.int32
    plan = Plan(
        device,
        workspace={
            "state_ptr": (ints, state),
            "statistics_ptr": (floats, summarised * 2 * num_blocks),
            "scalars_ptr": (floats, num_drafts * probabilistic.SCALARS.value) if keeps_scalars else None,
            "sums_ptr": (floats, num_drafts * num_blocks) if in_block and draft is not None else None,
        },
        # Programs that count each other need zeros to start from. Else the first launch clears what the next ones use.
        zeros=state if lazy else 0,
        constants={
            "batch": requests,
            "num_draft_tokens": num_draft_tokens,
            "vocab_size": vocab_size,
            "num_blocks": num_blocks,
            **strides("target", target, 3),
            **strides("draft", draft, 3),
            **strides("ids", ids, 2),
            **strides("logsumexp", logsumexp, 2),
            "DECIDE": judgement.decide,
            "LAZY": lazy,
            "TARGET_ALIGNMENT": alignment(target, vocab_size),
            "DRAFT_ALIGNMENT": 16 if draft is None else alignment(draft, vocab_size),
            "TARGET_LANES": target_lanes,
            "DRAFT_LANES": draft_lanes,
            **SEARCH[search],
            "MAX_BLOCKS": max_blocks,
            "MAX_DRAFTS": at_least(MIN_DRAFTS, num_rows),
        },
    )
    reads_draft_rows = draft is not None and logsumexp is None
    # Programs that read both rows at once, and are not started in vain, are best small in larger launches too. Where
    # decisions seldom save a row, and no draft row is read beside, they may be fewer.
    small_grid = 4 * SMALL_GRID if reads_draft_rows and not lazy else SMALL_GRID
    requests_per_tile = 32 if lazy and in_block and not reads_draft_rows else 64
    tiles = reading_tiles(requests, num_rows, num_blocks, small_grid, requests_per_tile)
    chunks = triton.cdiv(num_blocks, tiles * READ_BLOCKS)
    registers = REGISTERS_WITH_DRAFT_ROWS if reads_draft_rows else REGISTERS
    usual = {
        "TARGET_ALIGNMENT": 16,
        "DRAFT_ALIGNMENT": 16,
        "TARGET_LANES": 256,
        "DRAFT_LANES": 256,
        "MAX_BLOCKS": MIN_BLOCKS,
    }
    plan.add(
        read_kernel,
        chunks,
        requests,
        num_rows,
        num_warps=READ_BLOCKS,
        follows=False,
        max_registers=registers if usual.items() <= plan.constants.items() else None,
        tiles=tiles,
        chunks=chunks,
        BLOCKS=READ_BLOCKS,
    )
    num_warps = 4 if draft is None else 8
    if in_block:
        if num_draft_tokens > 0 and not lazy:
            plan.add(block.note_ratio_kernel, num_drafts, num_warps=4)
        members, patience = (1, 0) if draft is None else emission(device, requests, num_blocks)
        plan.add(
            block.emit_kernel,
            requests * members,
            num_warps=num_warps,
            max_registers=REGISTERS_TO_EMIT,
            members=members,
            patience=patience,
        )
    elif lazy:
        plan.add(probabilistic.emit_kernel, requests, num_warps=num_warps)
    elif by_sample:
        plan.add(finish_by_sample_kernel, requests * num_rows, num_warps=8)
    else:
        plan.add(probabilistic.finish_by_ratio_kernel, requests * num_rows, num_warps=num_warps)
    return plan


def reading_tiles(
    requests: int, num_rows: int, num_blocks: int, small_grid: int = SMALL_GRID, requests_per_tile: int = 64
) -> int:
    """Return how many times `READ_BLOCKS` blocks a program reads: fewer programs to start, against later decisions."""
    if requests * num_rows * triton.cdiv(num_blocks, READ_BLOCKS) <= small_grid:
        return 1
    return min(max(requests // requests_per_tile, 2), 8)


def emission(device: torch.device, requests: int, num_blocks: int) -> tuple[int, int]:
    """Return how many programs share a request's emission in block verification, and for how many rounds they do not.

    As many as run at once. They work alike for twice as long as their shares would take: most searches have ended then. One
    alone shares nothing, so it has no use for patience.
    """
    members = min(EMITTING // requests, LARGEST_TEAM)
    if device.type == "cuda" and members >= SMALLEST_TEAM:
        return members, 2 * triton.cdiv(num_blocks, SEARCH["block"]["BLOCKS"]) // members
    return 1, 0


def at_least(least: int, size: int) -> int:
    """Return a power of two that holds a size: the same for all usual ones, as each compiles kernels anew."""
    return least if size <= least else triton.next_power_of_2(size)


def strides(name: str, values: Layout | None, dimensions: int) -> dict[str, float]:
    """Return the arguments that say how a [batch, offsets, ...] tensor lies."""
    _, sizes, _ = values or (None, (0,) * dimensions, None)
    return {f"{name}_stride_{of}": size for of, size in zip(("request", "offset", "token"), sizes)}


def per_request(batch: RowBatch | VerificationBatch) -> tuple[dict[str, Tensor | None], dict[str, float]]:
    """Return the arguments that hold one number for each request, and those that hold one for all."""
    temperature, seeds, positions = batch.temperature, batch.seeds, batch.positions
    tensors = {
        "temperature_ptr": None,
        "seeds_ptr": None,
        "positions_ptr": None if positions is None else positions.contiguous(),
    }
    numbers: dict[str, float] = {"temperature": 0.0, "first_seed": 0}
    if isinstance(temperature, Tensor):
        tensors["temperature_ptr"] = temperature.contiguous()
    elif temperature > 0:  # only 0 is greedy, in float32 too
        numbers["temperature"] = min(max(temperature, SMALLEST.value), LARGEST_TEMPERATURE.value)
    if isinstance(seeds, Tensor):
        tensors["seeds_ptr"] = seeds.contiguous()
    else:
        numbers["first_seed"] = seeds
    return tensors, numbers
