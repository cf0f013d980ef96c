"""What requests ask for, as vLLM's states have it, and the arguments of calls that say so."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdecode import Adjustments, Sampling
from specdecode.adjustments import WORD
from specdecode.batch import MOST_KEPT, MOST_TOP_LOGPROBS
from specdecode.integrations.vllm.adjusting import StepRows

PROCESSORS, TRUNCATES, LOGPROBS, ADJUSTS, UNLISTED, WIDE, MASKS = 1, 2, 4, 8, 16, 32, 64
"""What a request may need, in bits: vLLM's copy of logits, truncation, log-probabilities, penalties or biases.

`MASKS`: a list of allowed tokens, a minimum length, bad words, a thinking budget.

And what calls do not list: log-probabilities of greedy requests, for which vLLM takes the row's softmax, or of more than 20
tokens beside the sampled one; kept sets that may be of more than 1,024 tokens.
"""

LISTED_MODE = "processed_logprobs"
"""The `logprobs_mode` whose log-probabilities calls list."""


class SlotValues(NamedTuple):
    """What requests sample by, [num_slots] each.

    vLLM's own tensors are views of the host's memory: each program of a kernel would read them over the bus.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor


def views_of(states: Any) -> SlotValues:
    """Return vLLM's own tensors."""
    return SlotValues(*[getattr(states, name).gpu for name in SlotValues._fields])


def values_of(sampler: Any) -> SlotValues:
    """Return what requests sample by, as a sampler has it."""
    return sampler.slot_values() if hasattr(sampler, "slot_values") else views_of(sampler.sampling_states)


def needs_of(sampler: Any, requests: np.ndarray) -> np.ndarray:
    """Return what each request needs, [requests] in bits.

    Greedy requests need no truncation.
    """
    states = sampler.sampling_states
    # A sampler that is not ours does not tell processors from temperatures: then both count.
    processors = getattr(sampler, "other_processing", sampler.needs_logits_processing)[requests]
    truncates = (states.top_k.np[requests] != states.vocab_size) | (states.top_p.np[requests] != 1)
    truncates = (truncates | (states.min_p.np[requests] != 0)) & (states.temperature.np[requests] != 0)
    logprobs = states.num_logprobs[requests] >= 0
    unlisted = logprobs & (states.temperature.np[requests] == 0) | (states.num_logprobs[requests] > MOST_TOP_LOGPROBS)
    bits: np.ndarray = PROCESSORS * processors | TRUNCATES * truncates | LOGPROBS * logprobs | UNLISTED * unlisted
    bits = bits | WIDE * (states.top_k.np[requests] > MOST_KEPT)
    if hasattr(sampler, "applied"):
        bits = bits | sampler.applied[requests]
    return bits.astype(np.uint8)


def needs_each(sampler: Any, requests: np.ndarray) -> np.ndarray:
    """Return what each of the requests of a step needs, in bits, as it was noted when it came."""
    needs: np.ndarray | None = getattr(sampler, "needs", None)
    return needs_of(sampler, requests) if needs is None else needs[requests]


def needs_in(sampler: Any, requests: np.ndarray) -> int:
    """Return what any of the requests of a step needs, in bits."""
    return int(np.bitwise_or.reduce(needs_each(sampler, requests), initial=0))


def processes_logprobs(sampler: Any) -> bool:
    """Return whether log-probabilities, if asked for, are of logits that vLLM has processed."""
    return sampler.logprobs_mode in ("processed_logits", "processed_logprobs")


def why_processed(sampler: Any, needs: int, lists: bool = False) -> str | None:
    """Return why a step that needs so much needs logits that vLLM has processed, or None.

    If what vLLM returns of rows may be listed by calls, fewer do.
    """
    if needs & PROCESSORS:
        return "logits processors that specdecode does not know"
    if needs & LOGPROBS and processes_logprobs(sampler):
        is_listed = lists and sampler.logprobs_mode == LISTED_MODE and not needs & (UNLISTED | ADJUSTS | MASKS)
        if not is_listed:
            return f"logprobs_mode {sampler.logprobs_mode!r}"
    if sampler.return_sampling_mask and not (lists and not needs & WIDE):
        return "return_sampling_mask"
    return None


def listings(sampler: Any) -> list[dict[str, Any]]:
    """Return what calls may be asked to list."""
    kept = [{"kept_sets": True}] if sampler.return_sampling_mask else []
    if sampler.logprobs_mode != LISTED_MODE:
        return kept
    logprobs: list[dict[str, Any]] = [{"logprobs": "processed", "top_logprobs": count} for count in (0, 1)]
    return [*logprobs, *kept, *[one | more for one in logprobs for more in kept]]


def requested(values: SlotValues, needs: int) -> dict[str, Any]:
    """Return how requests sample from raw logits, by slot, with no truncation if none of them truncates: that costs more."""
    return truncated(values) if needs & TRUNCATES else {"temperature": values.temperature}


def adjusted(sampler: Any, needs: int, rows: StepRows) -> dict[str, Any]:
    """Return what changes the logits of a step's rows: masks, all penalties and biases, both, or nothing."""
    known: Any = getattr(sampler, "known", None)
    grammar, mask = getattr(sampler, "grammar", None), None
    if needs & MASKS or not (grammar is None or grammar.is_applied):
        mask = known.limited_tokens(rows, grammar)  # what is left of limits may depend on masks that have been applied
    if needs & ADJUSTS:
        return {"adjustments": known.adjustments(mask)}
    return {} if mask is None else {"adjustments": Adjustments(allowed_mask=mask)}


def truncated(values: SlotValues) -> dict[str, Any]:
    """Return how requests sample. All truncation is passed if any is: each selection would need kernels of its own."""
    return {name: getattr(values, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def of_processed(values: SlotValues) -> dict[str, Any]:
    """Return how requests sample from logits that vLLM has divided by the temperature and truncated."""
    return {"temperature": (values.temperature != 0).to(torch.float32)}


def for_drafts(sampling: dict[str, Any], draft_logits: Tensor | None) -> dict[str, Any]:
    """Add how vLLM drew the drafts, where that differs: at the target's temperature, from whole rows."""
    if draft_logits is None or "top_p" not in sampling:
        return sampling
    return sampling | {"draft_sampling": Sampling(temperature=sampling["temperature"])}


def with_masked_drafts(drafts: Tensor, drawn: Tensor, logits: Tensor, added: Adjustments | None) -> Tensor:
    """Return drafts, of which vLLM made some -1, with the id that was drawn wherever its row does not allow it.

    A draft that is left out because of what it is must be rejected as itself, so that the token is drawn from the residual.
    It is sure to be: p(x) = 0. Other drafts that vLLM leaves out, as after the first that is masked, remain -1.

    Args:
        drafts: [num_rows - 1] what each row but the last is to judge, -1 where vLLM leaves a draft out.
        drawn: [num_rows - 1] the ids that were drawn there.
        logits: [num_rows, vocab] to which a grammar's masks may have been applied.
        added: to them; its masks are of all tokens.
    """
    ids = drawn.long().clamp(min=0)
    own = ids.clamp(max=logits.shape[1] - 1)
    is_masked = logits[:-1].gather(1, own[:, None]).squeeze(1) == -torch.inf
    if added is not None and added.allowed_mask is not None:
        own = ids.clamp(max=WORD * added.allowed_mask.shape[1] - 1)
        words = added.allowed_mask[:-1].gather(1, own[:, None] // WORD).squeeze(1)
        is_masked |= (words >> own % WORD) & 1 == 0
    return torch.where(is_masked, drawn, drafts)
