"""vLLM's verification step and the adapter's, on the same inputs, including the host's work.

vLLM's classes are the real ones; their constructors, which need an engine, are bypassed, and attributes are set here.
"""

from collections.abc import Callable
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdecode import RejectionSampler
from specdecode.integrations.engine import Fallbacks
from specdecode.integrations.vllm import DraftVerification, TokenSampling, logger
from tests.benchmarks.inputs import Inputs


def vllm_call(
    inputs: Inputs, provider: str, with_draft_logits: bool, truncation: dict[str, float]
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """Return one call of `_verify`.

    Args:
        inputs: the logits.
        provider: `"vllm"` or a method of the adapter.
        with_draft_logits: whether vLLM has cached the draft logits, `draft_sample_method="probabilistic"`.
        truncation: top_k, top_p and min_p of every request.
    """
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler as VllmRejectionSampler

    batch, num_draft_tokens, vocab = inputs.draft_logits.shape
    sampler_kind, kind = Sampler, VllmRejectionSampler
    if provider != "vllm":
        method = {"verifier": RejectionSampler(provider)}
        sampler_kind = type("Sampler", (TokenSampling, Sampler), method)
        kind = type("RejectionSampler", (DraftVerification, VllmRejectionSampler), method)
    sampler = sampler_kind.__new__(sampler_kind)
    sampler.__dict__ |= {
        "sampling_states": states(batch, vocab, inputs.temperature, inputs.draft_logits.device, truncation),
        "needs_logits_processing": np.full(batch, inputs.temperature != 1 or bool(truncation)),
        "known": None,
        "logits_processors": [],
        "thinking_budget_state": Namespace(apply=lambda logits, context: None),
        "logprobs_mode": "raw_logprobs",
        "return_sampling_mask": False,
        "use_fp64_gumbel": False,
    }
    if provider != "vllm":
        sampler.needs = sampler.sampling_needs(np.arange(batch))
    verification = kind.__new__(kind)
    verification.__dict__ |= {
        "sampler": sampler,
        "num_speculative_steps": num_draft_tokens,
        "watermark_key": None,
        "synthetic_conditional_rates": None,
        "use_block_verification": False,
        "fly_window_size": 0,
        "fly_entropy_threshold": 0.3,
        "fly_entropy_top_k": 3,
        "fallbacks": Fallbacks(logger),
    }
    arguments = step(inputs, inputs.drafts("probabilistic").token_ids)
    draft_logits = inputs.draft_logits if with_draft_logits else None
    return lambda: verification._verify(draft_logits=draft_logits, **arguments)


def states(slots: int, vocab: int, temperature: float, device: torch.device, truncation: dict[str, float]) -> Any:
    """Return vLLM's sampling states, equal for all requests except the seeds."""
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    def each(value: float, dtype: torch.dtype = torch.float32) -> Namespace:
        values = torch.full((slots,), value, dtype=dtype)
        return Namespace(np=values.numpy(), gpu=values.to(device))

    result = SamplingStates.__new__(SamplingStates)
    result.__dict__ |= {
        "max_num_reqs": slots,
        "vocab_size": vocab,
        "temperature": each(temperature),
        "top_k": each(truncation.get("top_k", vocab), torch.int32),
        "top_p": each(truncation.get("top_p", 1.0)),
        "min_p": each(truncation.get("min_p", 0.0)),
        "seeds": Namespace(gpu=torch.arange(slots, device=device)),
        "num_logprobs": np.full(slots, -1, dtype=np.int32),
    }
    return result


def step(inputs: Inputs, token_ids: Tensor) -> dict[str, Any]:
    """Return the arguments of vLLM's `_verify` except draft_logits; request r is in slot r."""
    batch, num_draft_tokens = token_ids.shape
    rows, device = num_draft_tokens + 1, token_ids.device
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    fed = torch.nn.functional.pad(token_ids, (1, 0)).flatten().to(torch.int32)  # before the drafts, the last token
    return {
        "logits": inputs.target_logits.flatten(0, 1),
        "draft_sampled": fed,
        "pos": torch.arange(rows, device=device).repeat(batch),
        "cu_num_logits": rows * torch.arange(batch + 1, dtype=torch.int32, device=device),
        "idx_mapping": slots,
        "idx_mapping_np": np.arange(batch, dtype=np.int32),
        "expanded_idx_mapping": slots.repeat_interleave(rows),
        "expanded_local_pos": torch.arange(rows, dtype=torch.int32, device=device).repeat(batch),
        "seq_lens_upper_bound_np": np.full(batch, rows, dtype=np.int32),
        "verify_draft_sampled": fed,
    }
