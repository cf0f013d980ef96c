"""A step of which a few requests need logits that vLLM prepares: their rows alone are copied, and all are verified here.

What a request emits depends on nothing of others. So the requests of a step may be verified by two calls, with the same
method and noise: those that need vLLM's copy from that, and the others from the model's logits as they are.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdecode import SamplerOutput
from specdecode.integrations.vllm.needs import PROCESSORS, needs_each, of_processed, values_of, with_masked_drafts

MOST_PREPARED = 0.25
"""The most of a step's requests: so copies of their rows, and of their drafts', take no more memory than vLLM's."""


class Prepared(NamedTuple):
    """The requests of a step that vLLM prepares rows for."""

    requests: Tensor  # [requests] int64, on the device
    rows: Tensor  # [rows] int64, likewise: theirs in the step
    row_starts: Tensor  # [requests + 1] int64: where they start among these
    on_host: np.ndarray  # [requests] the same requests

    @classmethod
    def of(cls, some: np.ndarray, starts: np.ndarray, device: torch.device) -> "Prepared":
        """Return the requests of a mask, given where each request's rows start."""
        requests = np.flatnonzero(some)
        counts = np.diff(starts)[requests]
        rows = np.concatenate([np.arange(starts[request], starts[request + 1]) for request in requests])
        parts = [requests, rows, np.concatenate([[0], np.cumsum(counts)])]
        values = torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device, non_blocking=True)  # in one copy
        return cls._make([*torch.split(values, [len(part) for part in parts]), requests])


def prepared_in(sampler: Any, slots: np.ndarray, starts: np.ndarray | None, logits: Tensor) -> Prepared | None:
    """Return the requests of a step that need vLLM's copy, if they are few, and it is known where all rows start."""
    if starts is None or len(starts) != len(slots) + 1:
        return None
    some = (needs_each(sampler, slots) & PROCESSORS) > 0
    if not 0 < some.sum() <= len(some) * MOST_PREPARED or starts[-1] != len(logits):
        return None
    return Prepared.of(some, starts, logits.device)


def without(call: dict[str, Any], prepared: Prepared) -> dict[str, Any]:
    """Return a step's call in which these requests have no slot: nothing of them is read."""
    return {**call, "slots": call["slots"].index_fill(0, prepared.requests, -1)}


def drawn_at_one(draft_logits: Tensor, slots: Tensor, temperature: Tensor) -> Tensor:
    """Return the draft rows of some slots divided by their temperature, as vLLM has divided the target's, in float32."""
    divisor = torch.where(temperature > 0, temperature, 1.0)
    return draft_logits[slots].to(torch.float32) / divisor[:, None, None]


def verify_prepared(verification: Any, prepared: Prepared, given: tuple[Any, ...]) -> SamplerOutput:
    """Let vLLM process the rows of these requests, and verify them, given the arguments of its `_verify`."""
    logits, draft_logits, fed, pos, _, slots, slots_np, row_slots, local_pos, lengths, to_verify = given
    requests, rows, row_starts, on_host = prepared
    fed, slots, draft_rows = fed[rows], slots[requests].long(), None
    where = row_slots[rows], slots, slots_np[on_host]
    logits = verification.sampler.apply_sampling_params(
        logits[rows], *where, pos[rows], fed, local_pos[rows], lengths[on_host]
    )
    values, drafts = values_of(verification.sampler), to_verify[rows][1:]
    if draft_logits is not None and verification.verifier.method != "strict":
        draft_rows = drawn_at_one(draft_logits, slots, values.temperature[slots])
        drafts = with_masked_drafts(drafts, fed[1:], logits, None)
    call = verification.call_of(logits, drafts, draft_rows, pos[rows], row_starts, slots)
    call |= {"seeds": values.seeds[slots], "slots": None}
    output: SamplerOutput = verification.verifier.packed(**call, temperature=of_processed(values)["temperature"][slots])
    return output


def joined(output: SamplerOutput, own: SamplerOutput, prepared: Prepared) -> SamplerOutput:
    """Return what all requests of a step emit."""
    parts = [
        None if part is None or other is None else part.index_copy(0, prepared.requests, other)
        for part, other in zip(output, own)
    ]
    return SamplerOutput._make(parts)
