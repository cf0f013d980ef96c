"""From a batch to a step: collect what its launches are given, and plan them: read, truncate, decide a block, emit, report.

`verify` and `sample` say what is asked for. `run_step` adds what both are given, and runs the plan of the step; `plan_step`
makes that plan, once for calls of all sizes. Only `block` verification decides a block. What happens inside the
launches, and in which file, is in the two tables of `specdecode.kernels`.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from specdecode.adjustments import Adjustments
from specdecode.arguments import select
from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch
from specdecode.kernels.bundles import (
    EACH_LIMIT,
    EACH_PENALTY,
    LIMITS,
    MIN_DRAFTS,
    PENALTIES,
    Structure,
    class_of,
    empty_report,
    inputs_in,
    layout_of,
    outputs_in,
    sizes_in,
)
from specdecode.kernels.launch import Plan, compile_ahead
from specdecode.kernels.methods import METHODS, STRICT, Method, method_of
from specdecode.kernels.plan import (
    MANY_REQUESTS,
    MOST_PROGRAMS,
    add_block_decision,
    add_emission,
    add_mapping,
    add_reading,
    add_report,
    add_truncation,
    allocate,
    decision_while_reading,
)
from specdecode.kernels.request import LARGEST_TEMPERATURE
from specdecode.kernels.rows import SMALLEST
from specdecode.kernels.stops import MOST_ROWS
from specdecode.kernels.synthetic import conditional_rates
from specdecode.noise import SELECT
from specdecode.synthetic import AcceptanceSchedule


def sample(batch: RowBatch, domains: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row of a batch.

    Returns:
        [batch] int64 token ids; [batch] float32 logsumexp(logits / temperature) of what is kept; [batch] int64 the last
        tokens kept, None if rows are not truncated.
    """
    requests, device = batch.logits.shape[0], batch.logits.device
    token_ids = torch.empty(requests, dtype=torch.int64, device=device)
    outputs = {"token_ids": token_ids, "logsumexp": torch.empty(requests, dtype=torch.float32, device=device)}
    if batch.truncation is not None:
        outputs["cutoff"] = torch.empty_like(token_ids)
    if requests > 0:
        numbers = {"batch": requests, "num_draft_tokens": 0}
        run_step(STRICT, outputs, {"target": batch.logits}, numbers, batch, domains)
    return token_ids, outputs["logsumexp"], outputs.get("cutoff")


def verify(
    name: str,
    batch: VerificationBatch,
    schedule: AcceptanceSchedule | None = None,
    *,
    large: bool | None = None,
    many: bool | None = None,
) -> SamplerOutput:
    """Run one verification step.

    Args:
        name: one of the sampler's methods.
        batch: the checked arguments, of which `why_not_verified` says nothing.
        schedule: for `"synthetic"`.
        large: whether to find out early which rows do not matter (in block verification: to sum no more residuals than it
            takes to decide); None chooses by the number of rows that are read.
        many: whether to search as is best for many requests in a small batch; None chooses by their number.
    """
    if batch.kept_sets and batch.logprobs is None:  # for which each row through the last token is truncated
        with_logprobs = batch._replace(logprobs="processed")
        return verify(name, with_logprobs, schedule, large=large, many=many)._replace(logprobs=None)
    packing, num_draft_tokens = batch.packing, batch.num_draft_tokens
    method = method_of(name, num_draft_tokens, batch.draft_logits is not None)
    requests = batch.num_requests
    outputs = empty_outputs(batch, requests, num_draft_tokens + 1)
    output = SamplerOutput(*outputs.values())
    if batch.reports:
        report = empty_report(batch, output.token_ids)
        outputs, output = outputs | report, output._replace(**report)
    if requests == 0:
        return output
    tensors, numbers = tensors_of(method, batch), {"batch": requests, "num_draft_tokens": num_draft_tokens}
    if num_draft_tokens > 0:
        tensors["ids"] = batch.draft_token_ids
        if schedule is not None:
            tensors["rates"] = conditional_rates(schedule, batch.target_logits.device)
    if large is None:
        rows = requests * (num_draft_tokens + 1)
        if packing is not None:
            rows = min(rows, batch.target_logits.shape[0])
        reads_both = "draft" in tensors and "draft_logsumexp" not in tensors
        large = rows + max(rows - requests, 0) * reads_both >= method.large_rows
    # A small batch keeps what is known of a request's rows in stop bits: more than these hold, decide as a large batch does.
    large = num_draft_tokens > 0 and (large or (num_draft_tokens >= MOST_ROWS and not method.decides_block))
    if many is None:
        many = requests >= MANY_REQUESTS
    many = many and not large and not method.decides_block  # elsewhere it changes nothing
    run_step(method, outputs, tensors, numbers, batch, SELECT, large, many)
    return output


def empty_outputs(batch: VerificationBatch, requests: int, num_tokens: int) -> dict[str, Tensor]:
    """Return the tensors that a verification fills, in the order of `SamplerOutput`."""
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


def tensors_of(method: Method, batch: VerificationBatch) -> dict[str, Tensor]:
    """Return the rows that a verification reads, and what says where they are, by the names of `Structure`."""
    tensors, packing = {"target": batch.target_logits}, batch.packing
    if packing is not None:
        tensors["row_starts"] = packing.row_starts.contiguous()
        if packing.slots is not None:
            tensors["slots"] = packing.slots.contiguous()
        if packing.row_positions is not None:
            tensors["row_positions"] = packing.row_positions.contiguous()
    if method.reads_drafts and batch.draft_logits is not None:
        tensors["draft"] = batch.draft_logits
        if batch.draft_logsumexp is not None:
            tensors["draft_logsumexp"] = batch.draft_logsumexp
        if batch.draft_cutoff is not None:
            tensors["draft_cutoff"] = batch.draft_cutoff
        if batch.draft_vocab_ids is not None:
            tensors["draft_vocab_ids"] = batch.draft_vocab_ids.contiguous()
    return tensors


def run_step(
    method: Method,
    outputs: dict[str, Tensor],
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    batch: RowBatch | VerificationBatch,
    domains: tuple[int, int],
    large: bool = False,
    many: bool = False,
) -> None:
    """Find the plan of a step, or make it, and run it."""
    numbers["block_domain"], numbers["token_domain"] = domains
    add_requests(batch, tensors, numbers)
    target, logprobs, seeds_by_request = tensors["target"], None, False
    if isinstance(batch, VerificationBatch):
        logprobs, packing = batch.logprobs, batch.packing
        if batch.top_logprobs > 0:
            numbers["num_top"] = batch.top_logprobs
        if packing is not None:
            numbers["num_slots"], seeds_by_request = packing.num_slots, packing.seeds_by_request
    vocab_size = numbers["vocab_size"] = target.shape[-1]
    draft_layout, vocab_ids_are_aligned = None, False
    if "draft" in tensors:
        draft_layout = layout_of(tensors["draft"])
        if "draft_vocab_ids" in tensors:
            ids = tensors["draft_vocab_ids"]
            vocab_ids_are_aligned = (len(ids) | ids.data_ptr()) % 16 == 0
    counts = tensors.get("output_counts")
    structure = (  # the fields of a `Structure`, in their order: to make one takes three times as long
        method,
        target.device,
        tuple(tensors),
        tuple([tensor.dtype for tensor in tensors.values()]),
        layout_of(target),
        draft_layout,
        vocab_ids_are_aligned,
        *class_of(numbers["num_draft_tokens"], vocab_size),
        large,
        many,
        "logsumexp" in outputs,
        "top_k" in numbers,
        logprobs,
        seeds_by_request,
        "repetition_penalty" in numbers,
        counts is not None and (counts.stride(0) | counts.data_ptr()) % 16 == 0,
        max(numbers["batch"], numbers["num_draft_tokens"] + 1) > MOST_PROGRAMS,
        "num_top" in numbers,
        "num_kept" in outputs,
    )
    plan_step(structure).run(outputs | tensors, numbers)


def add_requests(batch: RowBatch | VerificationBatch, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Add what each request brings to what a step is given: a tensor, or a number for all."""
    temperature, seeds, positions = batch.temperature, batch.seeds, batch.positions
    numbers["temperature"], numbers["first_seed"] = 0.0, 0
    if isinstance(temperature, Tensor):
        tensors["temperatures"] = temperature.contiguous()
    elif temperature > 0:  # only 0 is greedy, in float32 too
        numbers["temperature"] = min(max(temperature, SMALLEST.value), LARGEST_TEMPERATURE.value)
    if isinstance(seeds, Tensor):
        tensors["seeds"] = seeds.contiguous()
    else:
        numbers["first_seed"] = seeds
    if positions is not None:
        tensors["positions"] = positions.contiguous()
    if batch.adjustments is not None:
        add_adjustments(batch.adjustments, tensors, numbers)
    if not batch.is_truncated:
        return
    nothing = (None, None, None)
    of_drafts = batch.draft_truncation if isinstance(batch, VerificationBatch) else None
    limits = (*(batch.truncation or nothing), *(of_drafts or nothing))
    for name, each, limit, neutral in zip(LIMITS, EACH_LIMIT, limits, (0, 1.0, 0.0) * 2):
        numbers[name] = neutral
        if isinstance(limit, Tensor):
            tensors[each] = limit.contiguous()
        elif limit is not None:
            numbers[name] = limit


def add_adjustments(adjustments: Adjustments, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Add what requests add to target rows."""
    if adjustments.penalizes:
        for name, each, penalty, neutral in zip(PENALTIES, EACH_PENALTY, adjustments, (1.0, 0.0, 0.0)):
            numbers[name] = neutral
            if isinstance(penalty, Tensor):
                tensors[each] = penalty.contiguous()
            elif penalty is not None:
                numbers[name] = penalty
    for name in ("prompt_mask", "output_counts", "allowed_mask"):
        rows = getattr(adjustments, name)
        if rows is not None:
            tensors[name] = rows
    if adjustments.bias_ids is not None and adjustments.bias is not None:
        tensors["bias_ids"], tensors["bias"] = adjustments.bias_ids.contiguous(), adjustments.bias.contiguous()
        numbers["num_biases"] = adjustments.bias.shape[1]


@functools.lru_cache(maxsize=1024)
def plan_step(fields: tuple[Any, ...]) -> Plan:
    """Plan the steps of a structure, given its fields: allocate, read, truncate, decide a block, emit, report."""
    structure = Structure(*fields)
    inputs, outputs, sizes = inputs_in(structure), outputs_in(structure), sizes_in(structure)
    early_decision, truncates = decision_while_reading(structure), structure.truncates
    posted = early_decision is not None
    plan, workspace = allocate(structure, inputs, outputs, sizes, counts=posted)
    before_cutoffs = workspace._replace(cutoffs_ptr=None, logprobs_ptr=None) if truncates else workspace
    given = inputs, workspace, sizes
    if workspace.draft_ids_ptr is not None:
        add_mapping(plan, *given)
    add_reading(plan, inputs, before_cutoffs, sizes, early_decision, structure.large, truncates, structure.flat)
    if truncates:
        add_truncation(plan, *given, structure.large, posted=posted)
    sums_all = structure.decides_block and structure.draft is not None and not structure.large
    if structure.decides_block:
        add_block_decision(plan, *given, sums_all)
    add_emission(plan, structure, (inputs, outputs, workspace, sizes), sums_all, posted=posted)
    add_report(plan, structure, (inputs, outputs, workspace, sizes))
    return plan


def why_not_verified(name: str, batch: VerificationBatch) -> str | None:
    """Return why the kernels cannot verify a batch, which then the eager backend alone can; or None."""
    if name not in METHODS:
        return f"backend: 'triton' has no kernels for method {name!r}; use 'eager' or 'auto'"
    if batch.num_draft_tokens == 0 or not batch.is_truncated:
        return None
    method, of_drafts = method_of(name, batch.num_draft_tokens, batch.draft_logits is not None), batch.draft_temperature
    if method.reads_drafts and of_drafts is not None and not are_surely_equal(of_drafts, batch.temperature):
        return (
            "draft_sampling: 'triton' takes drafts of the target's temperature only, as the same number or tensor; use "
            "'eager' or 'auto'"
        )
    if not method.decides_block and batch.num_draft_tokens >= MOST_ROWS:
        return f"backend: 'triton' truncates rows of at most {MOST_ROWS - 1} drafts, got {batch.num_draft_tokens}"
    return None


def are_surely_equal(a: Tensor | float, b: Tensor | float) -> bool:
    """Return whether two arguments are known to have the same values without reading a tensor: they are the same memory."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        layouts = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in (a, b)]
        return layouts[0] == layouts[1]
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def warm_up(name: str, batch: VerificationBatch, schedule: AcceptanceSchedule | None = None) -> None:
    """Compile all kernels that steps with arguments like these launch, of as many drafts or fewer, whatever their sizes."""
    batches = [batch]
    if batch.packing is None:  # else the drafts of its requests may be fewer at any call
        most = batch.draft_token_ids.shape[1]
        # For sizes see `bundles.at_least`.
        of_other_sizes = [2**i - 1 for i in range(MIN_DRAFTS.bit_length() - 1, most.bit_length())]
        batches = [with_fewer_drafts(batch, number) for number in {0, min(most, 1), *of_other_sizes, most}]
    ways = [{"large": False, "many": False}, {"large": False, "many": True}, {"large": True, "many": False}]
    steps = [functools.partial(verify, name, each, schedule, **way) for each in batches for way in ways]
    compile_ahead(steps)


def with_fewer_drafts(batch: VerificationBatch, num_draft_tokens: int) -> VerificationBatch:
    """Return the batch of the first drafts of each request."""
    return select(batch, draft=slice(num_draft_tokens), row=slice(num_draft_tokens + 1))
