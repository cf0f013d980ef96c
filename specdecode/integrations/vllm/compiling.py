"""From a step's arguments to kernels: which are compiled ahead."""

import functools
import time
from typing import Any

import numpy as np
from torch import Tensor

from specdecode import Adjustments, RejectionSampler, backends, eager
from specdecode.arguments import check_verification
from specdecode.integrations.calls import warm_up
from specdecode.integrations.vllm.adjusting import Known, StepRows
from specdecode.integrations.vllm.compat import group_of
from specdecode.integrations.vllm.needs import for_drafts, listings, truncated, values_of
from specdecode.integrations.vllm.reporting import logger


def kind_of(logits: Tensor, draft_logits: Tensor | None) -> Any:
    """Return what steps have in common that the same kernels verify."""
    return logits.dtype, None if draft_logits is None else draft_logits.dtype


def compile_all(verifier: RejectionSampler, call: dict[str, Any], sampler: Any) -> tuple[str | None, str | None]:
    """Compile the kernels of steps like a call: truncated or not, with adjustments or not, with what they may list.

    Args:
        verifier: compiles.
        call: the arguments of its `packed`, but how requests sample.
        sampler: has that.

    Returns:
        Why the kernels do not take steps that are not truncated, and those that are; None where they do.
    """
    start = time.monotonic()
    one = {**call, "row_starts": call["row_starts"][:2], "slots": call["slots"][:1]}
    values = values_of(sampler)
    samplings = {"temperature": values.temperature}, for_drafts(truncated(values), call.get("draft_logits"))
    lists = call["num_draft_tokens"] > 0
    others: list[dict[str, Any]] = [{}, *(listings(sampler) if lists else [])]
    if (known := getattr(sampler, "known", None)) is not None:
        mask = known.masks_of(len(call["target_logits"]), call["target_logits"].device)
        added = known.adjustments(None), known.adjustments(mask), Adjustments(allowed_mask=mask)
        kept = {"kept_sets": True} if lists and sampler.return_sampling_mask else {}  # which all steps list then
        others += [kept | {"adjustments": each} for each in added]
    why_not = [why_not_by_kernels(verifier, {**one, **sampling}) for sampling in samplings]
    kinds = [{**sampling, **more} for sampling, reason in zip(samplings, why_not) if reason is None for more in others]
    warmups = [functools.partial(verifier.warmup, **one, **kind) for kind in kinds]
    device = call["target_logits"].device
    if warmups and known is not None and device.type == "cuda":
        warm_up_masks(known, call)
    warm_up(warmups, device, lambda: share_of(sampler))
    which = f"up to {call['num_draft_tokens']} drafts a request" if call["num_draft_tokens"] > 0 else "no drafts"
    logger.info("specdecode: kernels for %s are compiled, in %.0f s", which, time.monotonic() - start)
    return why_not[0], why_not[1]


def share_of(sampler: Any) -> tuple[Any, ...]:
    """Return which part of what all ranks launch this one compiles before it looks for what the others have: for `warm_up`.

    If they have no cache of compiled kernels in common, as vLLM has it with torch.compile, it compiles that, too.
    """
    group = group_of(sampler)
    return () if group is None else (group.rank_in_group, group.world_size, group.barrier)


def warm_up_masks(known: Known, call: dict[str, Any]) -> None:
    """Compile the kernel that writes masks: of no rows, of the types that those of a step like a call have."""
    slots, positions, tokens = (call[name][:0] for name in ("slots", "row_positions", "draft_token_ids"))
    known.limited_tokens(StepRows(slots, slots, np.zeros(0, dtype=np.int64), positions, tokens, slots.int()))


def why_not_by_kernels(verifier: RejectionSampler, call: dict[str, Any]) -> str | None:
    """Return why the eager backend would verify a call, or None: it takes more time and memory than vLLM's own method."""
    logits = call["target_logits"]
    backend = backends.choose(verifier.backend, logits)
    if backend is not eager:
        batch = check_verification(**call)
        why_not: str | None = backend.why_not_verified(verifier.method, batch)
        return why_not
    return None if logits.is_cpu else backends.obstacle(logits.device)
