"""From a checked batch to a step: collect the values of a call, find or make its plan, run it.

`verify` and `sample_rows` collect the tensors and numbers of a call by name. `run_step` adds the common ones and runs the
plan of the step's structure, which is made once for calls of all sizes. The two tables of `specdecode.kernels` list the
files, and the function of each event.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdecode.adjustments import Adjustments
from specdecode.arguments import select
from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch
from specdecode.kernels.bundles import (
    LIMITS,
    MIN_DRAFTS,
    PENALTIES,
    Structure,
    empty_lists,
    empty_outputs,
    layout_of,
    size_constants,
)
from specdecode.kernels.first_rejected import MOST_ROWS
from specdecode.kernels.launch import Plan, compile_ahead
from specdecode.kernels.methods import METHODS, STRICT, Method, method_of
from specdecode.kernels.plan import MANY_REQUESTS, MOST_PROGRAMS, plan_step
from specdecode.kernels.request import LARGEST_TEMPERATURE
from specdecode.kernels.rows import SMALLEST
from specdecode.kernels.synthetic import conditional_rates
from specdecode.noise import SELECT
from specdecode.synthetic import AcceptanceSchedule


def sample_rows(batch: RowBatch, domains: tuple[int, int], width: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row of a batch, or `width` siblings.

    Returns:
        [batch] or [batch, width] int64 token ids; [batch] float32 logsumexp(logits / temperature) of the tokens kept;
        [batch] int64 the last tokens kept, None if rows are not truncated.
    """
    requests, device = batch.logits.shape[0], batch.logits.device
    token_ids = torch.empty(requests, dtype=torch.int64, device=device)
    outputs = {"token_ids": token_ids, "logsumexp": torch.empty(requests, dtype=torch.float32, device=device)}
    if batch.truncation is not None:
        outputs["cutoff"] = torch.empty_like(token_ids)
    if width > 0:
        outputs["siblings"] = torch.empty(requests, width, dtype=torch.int64, device=device)
    if requests > 0:
        numbers = {"batch": requests, "num_draft_tokens": 0}
        run_step(STRICT, outputs | {"target": batch.logits}, numbers, batch, domains, width=width)
    return outputs.get("siblings", token_ids), outputs["logsumexp"], outputs.get("cutoff")


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
        batch: the checked arguments; `why_not_verified` returns None for them.
        schedule: for `"synthetic"`.
        large: whether to decide while reading, so that rows after a rejection are not read; in block verification, to sum
            only the residuals that a decision needs. None: chosen by the number of rows.
        many: whether to search more blocks at once, in a small batch. None: chosen by the number of requests.
    """
    if batch.kept_sets and batch.logprobs is None:  # so that every row through the last token's is truncated
        with_logprobs = batch._replace(logprobs="processed")
        return verify(name, with_logprobs, schedule, large=large, many=many)._replace(logprobs=None)
    requests, num_draft_tokens = batch.num_requests, batch.num_draft_tokens
    method = method_of(name, num_draft_tokens, batch.draft_logits is not None)
    tensors = empty_outputs(batch, requests, num_draft_tokens + 1)
    output = SamplerOutput(*tensors.values())
    if batch.has_lists:
        lists = empty_lists(batch, output.token_ids)
        tensors, output = tensors | lists, output._replace(**lists)
    if requests == 0:
        return output
    numbers = {"batch": requests, "num_draft_tokens": num_draft_tokens}
    add_rows(method, batch, tensors, numbers)
    if num_draft_tokens > 0:
        tensors["ids"] = batch.draft_token_ids
        if schedule is not None:
            tensors["rates"] = conditional_rates(schedule, batch.target_logits.device)
    if large is None:
        rows = requests * (num_draft_tokens + 1)
        if batch.packing is not None:
            rows = min(rows, batch.target_logits.shape[0])
        reads_both = "draft" in tensors and "draft_logsumexp" not in tensors
        large = rows + max(rows - requests, 0) * reads_both >= method.large_rows
    # The row bits, which only small batches use, hold MOST_ROWS rows.
    large = num_draft_tokens > 0 and (large or (num_draft_tokens >= MOST_ROWS and not method.decides_block))
    if many is None:
        many = requests >= MANY_REQUESTS
    many = many and not large and not method.decides_block  # otherwise it would only make a second, equal plan
    run_step(method, tensors, numbers, batch, SELECT, large, many)
    return output


def add_rows(method: Method, batch: VerificationBatch, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Add the rows that a verification reads, and the indices of each request's rows."""
    tensors["target"], packing = batch.target_logits, batch.packing
    if packing is not None:
        numbers["num_slots"] = packing.num_slots
        tensors["round_rows" if packing.is_round else "row_starts"] = packing.row_starts.contiguous()
        if packing.path is not None and batch.adjustments is not None and batch.adjustments.penalizes:
            tensors["path"], numbers["depth"] = packing.path, packing.path.shape[1]
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


def run_step(
    method: Method,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    batch: RowBatch | VerificationBatch,
    domains: tuple[int, int],
    large: bool = False,
    many: bool = False,
    width: int = 0,
) -> None:
    """Run a step: add the tensors and numbers that all steps have, find or make its plan, and run it."""
    target, logprobs, seeds_by_request = tensors["target"], None, False
    requests, num_draft_tokens, vocab_size = numbers["batch"], numbers["num_draft_tokens"], target.shape[-1]
    numbers["vocab_size"] = vocab_size
    numbers["block_domain"], numbers["token_domain"] = domains
    add_requests(batch, tensors, numbers)
    if isinstance(batch, VerificationBatch):
        logprobs, numbers["num_top"] = batch.logprobs, batch.top_logprobs
        seeds_by_request = batch.packing is not None and batch.packing.seeds_by_request
    vocab_ids, counts = tensors.get("draft_vocab_ids"), tensors.get("output_counts")
    structure = (  # the fields of a `Structure` in order: making the tuple itself takes three times as long
        method,
        target.device,
        tuple(tensors),
        tuple([tensor.dtype for tensor in tensors.values()]),
        layout_of(target),
        layout_of(tensors["draft"]) if "draft" in tensors else None,
        vocab_ids is not None and (len(vocab_ids) | vocab_ids.data_ptr()) % 16 == 0,
        *size_constants(max(num_draft_tokens, numbers.get("depth", 0)), vocab_size),
        large,
        many,
        "top_k" in numbers,
        logprobs,
        seeds_by_request,
        "repetition_penalty" in numbers,
        counts is not None and (counts.stride(0) | counts.data_ptr()) % 16 == 0,
        width,
        max(requests, num_draft_tokens + 1) > MOST_PROGRAMS,
    )
    plan_of(structure).run(tensors, numbers)


def add_requests(batch: RowBatch | VerificationBatch, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Add temperatures, seeds, positions, limits and adjustments: tensors, or one number for all requests."""
    temperature, seeds, positions = batch.temperature, batch.seeds, batch.positions
    numbers["temperature"], numbers["first_seed"] = 0.0, 0
    if isinstance(temperature, Tensor):
        tensors["temperatures"] = temperature.contiguous()
    elif temperature > 0:  # only 0 is greedy: a positive number must not round to 0 in float32
        numbers["temperature"] = min(max(temperature, SMALLEST.value), LARGEST_TEMPERATURE.value)
    if isinstance(seeds, Tensor):
        tensors["seeds"] = seeds.contiguous()
    else:
        numbers["first_seed"] = seeds
    if positions is not None:
        tensors["positions"] = positions.contiguous()
    if batch.adjustments is not None:
        add_adjustments(batch.adjustments, tensors, numbers)
    if batch.is_truncated:
        no_limits = (None, None, None)
        draft_truncation = batch.draft_truncation if isinstance(batch, VerificationBatch) else None
        limits = (*(batch.truncation or no_limits), *(draft_truncation or no_limits))
        add_each_or_all(LIMITS, limits, (0, 1.0, 0.0, 0, 1.0, 0.0), tensors, numbers)


def add_each_or_all(
    names: Sequence[str],
    values: Sequence[Tensor | float | None],
    neutral: Sequence[float],
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
) -> None:
    """Add values that are tensors by request or one number for all requests; None means the neutral number."""
    for name, value, number in zip(names, values, neutral):
        numbers[name] = number
        if isinstance(value, Tensor):
            tensors[f"{name}_each"] = value.contiguous()
        elif value is not None:
            numbers[name] = value


def add_adjustments(adjustments: Adjustments, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Add penalties, biases and masks."""
    if adjustments.penalizes:
        add_each_or_all(PENALTIES, adjustments[:3], (1.0, 0.0, 0.0), tensors, numbers)
    for name in ("prompt_mask", "output_counts", "allowed_mask"):
        rows = getattr(adjustments, name)
        if rows is not None:
            tensors[name] = rows
    if adjustments.bias_ids is not None and adjustments.bias is not None:
        tensors["bias_ids"], tensors["bias"] = adjustments.bias_ids.contiguous(), adjustments.bias.contiguous()
        numbers["num_biases"] = adjustments.bias.shape[1]


@functools.lru_cache(maxsize=1024)
def plan_of(fields: tuple[Any, ...]) -> Plan:
    """Return the plan of a structure, given its fields."""
    return plan_step(Structure(*fields))


def why_not_verified(name: str, batch: VerificationBatch) -> str | None:
    """Return the reason why `backend="triton"` cannot verify a batch, or None."""
    if name not in METHODS:
        return f"backend: 'triton' has no kernels for method {name!r}; use 'eager' or 'auto'"
    if batch.num_draft_tokens == 0 or not batch.is_truncated:
        return None
    method = method_of(name, batch.num_draft_tokens, batch.draft_logits is not None)
    given = batch.draft_temperature
    if method.reads_drafts and given is not None and not are_surely_equal(given, batch.temperature):
        return (
            "draft_sampling: 'triton' takes drafts of the target's temperature only, as the same number or tensor; use "
            "'eager' or 'auto'"
        )
    if not method.decides_block and batch.num_draft_tokens >= MOST_ROWS:
        return f"backend: 'triton' truncates rows of at most {MOST_ROWS - 1} drafts, got {batch.num_draft_tokens}"
    return None


def are_surely_equal(a: Tensor | float, b: Tensor | float) -> bool:
    """Return whether two arguments surely have the same values: equal numbers, or tensors over the same memory."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        layouts = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in (a, b)]
        return layouts[0] == layouts[1]
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def warm_up(name: str, batch: VerificationBatch, schedule: AcceptanceSchedule | None = None) -> None:
    """Compile all kernels of steps with arguments like these, for any sizes and for this many drafts or fewer."""
    batches = [batch]
    if batch.packing is None:  # in a packed call requests may have fewer drafts
        most = batch.draft_token_ids.shape[1]
        # The largest number of drafts for each value of MAX_DRAFTS, see `bundles.size_constants`.
        largest = [2**i - 1 for i in range(MIN_DRAFTS.bit_length() - 1, most.bit_length())]
        numbers = {0, min(most, 1), *largest, most}
        batches = [select(batch, draft=slice(number), row=slice(number + 1)) for number in numbers]
    ways = [{"large": False, "many": False}, {"large": False, "many": True}, {"large": True, "many": False}]
    steps = [functools.partial(verify, name, each, schedule, **way) for each in batches for way in ways]
    compile_ahead(steps)
