"""The Triton backend: fused kernels for GPUs.

A step is two or three launches. The first reads the rows (`reading`), and in a large batch decides on the way. In a small
batch the decisions are a launch of their own. The last one emits (`strict`, `probabilistic`). No program waits for another:
what must come after everything else is done by the last program to finish, or by the next launch. So nothing can hang, and
nothing outlives a call but compiled code: calls on several streams, from several threads and in graphs do not meet.

Arithmetic is in float32 whatever the logits are. A request's result does not depend on anything that is tuned here.
"""

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch
from specdecode.kernels.launches import can_overlap, is_aligned, lanes, launch
from specdecode.kernels.probabilistic import SCALARS, decide_by_ratio_kernel, emit_kernel
from specdecode.kernels.reading import read_kernel
from specdecode.kernels.rows import LARGEST, SMALLEST
from specdecode.kernels.selection import sample_kernel, summarise_kernel
from specdecode.kernels.steps import FIELDS
from specdecode.kernels.strict import finish_by_sample_kernel
from specdecode.kernels.synthetic import conditional_rates
from specdecode.noise import BLOCK_SIZE, Domain
from specdecode.synthetic import AcceptanceSchedule

LAZY_BATCH = 64
"""Requests from which on it pays to decide while reading, so as to read no row after a rejection."""

BLOCKS = 4
"""Blocks that a program reads at once, each by one warp."""

LAZY_TILES = 3
"""Times that a program of a large batch does so: fewer programs to start, against later decisions."""

MIN_BLOCKS = 256
"""The statistics of a row are handled as this many blocks at least (262,144 tokens), or as the next power of two."""


def sample(batch: RowBatch, domains: tuple[Domain, Domain]) -> tuple[Tensor, Tensor]:
    """Draw one token per row; return [batch] int64 token ids and [batch] float32 logsumexp(logits / temperature)."""
    logits = batch.logits
    requests, vocab_size = logits.shape
    num_blocks, device = triton.cdiv(vocab_size, BLOCK_SIZE), logits.device
    token_ids = torch.empty(requests, dtype=torch.int64, device=device)
    logsumexp = torch.empty(requests, dtype=torch.float32, device=device)
    if requests == 0:
        return token_ids, logsumexp
    arguments = {
        "token_ids_ptr": token_ids,
        "logsumexp_ptr": logsumexp,
        "statistics_ptr": torch.empty(requests * 2 * num_blocks, dtype=torch.float32, device=device),
        "logits_ptr": logits,
        "stride_row": logits.stride(0),
        "stride_token": logits.stride(1),
        "block_domain": int(domains[0]),
        "token_domain": int(domains[1]),
        "tiles": 1,
        "ALIGNED": is_aligned(logits),
        "BLOCKS": BLOCKS,
        "LANES": lanes(logits),
        **scalars_of_requests(batch),
        **sizes(vocab_size, device),
    }
    with on_device(device):
        launch(summarise_kernel, requests * triton.cdiv(num_blocks, BLOCKS), arguments, num_warps=BLOCKS)
        launch(sample_kernel, requests, arguments, num_warps=8, launch_pdl=arguments["OVERLAPS"])
    return token_ids, logsumexp


def verify(
    method: str,
    batch: VerificationBatch,
    schedule: AcceptanceSchedule | None = None,
    *,
    lazy: bool | None = None,
    target_index: Tensor | None = None,
    draft_index: Tensor | None = None,
) -> SamplerOutput:
    """Run one verification step.

    Args:
        method: one of the sampler's methods.
        batch: the checked arguments.
        schedule: for `"synthetic"`.
        lazy: whether to decide while reading; None chooses by the batch size.
        target_index: [batch] int32 or int64; request r's target rows are `target_logits[target_index[r]]`. With
            overlapping strides, this addresses the rows of a ragged, packed batch.
        draft_index: [batch] int32 or int64; likewise its slot in a cache of draft logits.
    """
    target, draft_token_ids = batch.target_logits, batch.draft_token_ids
    by_ratio = method == "probabilistic" or (method == "synthetic" and batch.draft_logits is not None)
    requests, num_draft_tokens = draft_token_ids.shape
    draft = batch.draft_logits if by_ratio and num_draft_tokens > 0 else None
    draft_logsumexp = batch.draft_logsumexp if draft is not None else None
    lazy = num_draft_tokens > 0 and (requests >= LAZY_BATCH if lazy is None else lazy)
    num_rows, vocab_size, device = num_draft_tokens + 1, target.shape[-1], target.device
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)

    num_accepted, num_drafts = torch.empty(2, requests, dtype=torch.int32, device=device).unbind()
    output = SamplerOutput(
        token_ids=torch.empty(requests, num_rows, dtype=torch.int64, device=device),
        num_accepted=num_accepted,
        num_draft_tokens=num_drafts,
        invalid=torch.empty(requests, dtype=torch.bool, device=device),
    )
    if requests == 0:
        return output

    # Programs that count each other need zeros to start from. Without them the first launch clears what the next ones use.
    allocate = torch.zeros if lazy else torch.empty
    counters = allocate(requests * (FIELDS.value + num_rows), dtype=torch.int32, device=device)
    summarised = num_rows if draft is None else num_rows + num_draft_tokens
    parts = (requests * 2 * num_blocks * summarised, requests * num_blocks, requests * SCALARS.value * num_draft_tokens)
    workspace = torch.empty(sum(parts), dtype=torch.float32, device=device)

    arguments = {
        "token_ids_ptr": output.token_ids,
        "num_accepted_ptr": num_accepted,
        "num_drafts_ptr": num_drafts,
        "invalid_ptr": output.invalid,
        "state_ptr": counters,
        "counts_ptr": counters[requests * FIELDS.value :],
        "statistics_ptr": workspace,
        "residual_sums_ptr": workspace[parts[0] :],
        "scalars_ptr": workspace[parts[0] + parts[1] :],
        "target_index_ptr": target_index,
        "draft_index_ptr": draft_index,
        "rates_ptr": None if schedule is None else conditional_rates(schedule, device),
        "batch": requests,
        "num_draft_tokens": num_draft_tokens,
        "LANES": min(lanes(logits) for logits in (target, draft) if logits is not None),
        "BY_RATIO": by_ratio,
        "LAZY": lazy,
        **rows("target", target),
        **rows("draft", draft),
        **table("ids", draft_token_ids),
        **table("logsumexp", draft_logsumexp),
        **scalars_of_requests(batch),
        **sizes(vocab_size, device),
    }
    with on_device(device):
        tiles = LAZY_TILES if lazy else 1
        programs = requests * num_rows * triton.cdiv(num_blocks, tiles * BLOCKS)
        launch(read_kernel, programs, {**arguments, "tiles": tiles, "BLOCKS": BLOCKS}, num_warps=BLOCKS)
        overlap = {"launch_pdl": arguments["OVERLAPS"]}
        if not by_ratio:
            programs, warps = (requests, 1) if lazy else (requests * num_rows, 8)
            launch(finish_by_sample_kernel, programs, arguments, num_warps=warps, **overlap)
            return output
        if num_draft_tokens > 0 and not lazy:
            # As many warps as decide in `read_kernel`, for sums to be added in the same order.
            launch(decide_by_ratio_kernel, requests * num_draft_tokens, arguments, num_warps=BLOCKS, **overlap)
        # Eight warps are sooner done with one request, four with many; which sums they add in which order is the same.
        warps, tiles = (4, LAZY_TILES) if lazy else (8, 1)
        programs = requests * (1 if draft is None else triton.cdiv(num_blocks, tiles * warps))
        launch(emit_kernel, programs, {**arguments, "tiles": tiles, "BLOCKS": warps}, num_warps=warps, **overlap)
    return output


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a tensor's device the current one, which is where kernels are launched."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def rows(name: str, logits: Tensor | None) -> dict[str, Any]:
    """Return the arguments that describe [batch, offsets, vocab] logits."""
    strides = (0, 0, 0) if logits is None else logits.stride()
    return {
        f"{name}_ptr": logits,
        f"{name}_stride_request": strides[0],
        f"{name}_stride_offset": strides[1],
        f"{name}_stride_token": strides[2],
        f"{name.upper()}_ALIGNED": logits is not None and is_aligned(logits),
        f"{name.upper()}_LANES": 1 if logits is None else lanes(logits),
    }


def table(name: str, values: Tensor | None) -> dict[str, Any]:
    """Return the arguments that describe a [batch, offsets] tensor."""
    strides = (0, 0) if values is None else values.stride()
    return {f"{name}_ptr": values, f"{name}_stride_request": strides[0], f"{name}_stride_offset": strides[1]}


def scalars_of_requests(batch: RowBatch | VerificationBatch) -> dict[str, Any]:
    """Return the arguments that hold one number for each request, or for all."""
    temperature, seeds, positions = batch.temperature, batch.seeds, batch.positions
    if not isinstance(temperature, Tensor) and temperature > 0:  # only 0 is greedy, in float32 too
        temperature = min(max(temperature, SMALLEST.value), LARGEST.value)
    return {
        "temperature_ptr": temperature.contiguous() if isinstance(temperature, Tensor) else None,
        "temperature": 0.0 if isinstance(temperature, Tensor) else temperature,
        "seeds_ptr": seeds.contiguous() if isinstance(seeds, Tensor) else None,
        "first_seed": 0 if isinstance(seeds, Tensor) else seeds,
        "positions_ptr": None if positions is None else positions.contiguous(),
    }


def sizes(vocab_size: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments that follow from the vocabulary and the device."""
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    return {
        "vocab_size": vocab_size,
        "num_blocks": num_blocks,
        "MAX_BLOCKS": max(MIN_BLOCKS, triton.next_power_of_2(num_blocks)),
        "OVERLAPS": can_overlap(device),
    }
