"""The names of vLLM that are known here, and checks for others.

A later version may apply a new rule in a method that is replaced here, and the rule must not be lost. So the names that
vLLM's methods use are compared with the names in tested versions. If one name is unknown, all steps are left to vLLM.
"""

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

from specdecode.integrations.engine import switched_on, unknown_reason

RUNNER = "vllm.v1.worker.gpu.model_runner"
PARALLEL = "vllm.distributed.parallel_state"

INTERVAL = "SPECDECODE_VLLM_LOG_INTERVAL"
logger = logging.getLogger("vllm.specdecode")  # below vLLM's logger, so that its handlers and level apply

RUN_WITH = "0.33."
"""The prefix of the tested versions."""

CONSULTED = {
    "_verify": {
        *("_watermarking_kwargs", "apply_sampling_params", "fly_entropy_threshold", "fly_entropy_top_k"),
        *("fly_window_size", "gpu", "num_speculative_steps", "rejection_sample", "sampler", "sampling_states", "seeds"),
        *("synthetic_conditional_rates", "temperature", "use_block_verification", "use_fp64_gumbel"),
    },
    "_get_logprobs_tensors": {
        *("NO_LOGPROBS", "_flatten_sampled_kernel", "clone", "compute_topk_scores", "device", "dtype"),
        *("enable_adaptive_verification", "logprobs_mode", "sampler", "shape", "stride", "tolist", "torch", "zeros"),
    },
    "apply_sampling_params": {
        *("LogitsContext", "any", "apply", "apply_min_p", "apply_temperature", "apply_top_k_top_p", "copy_"),
        *("empty_like", "float32", "logits_processors", "needs_logits_processing", "np", "sampling_states"),
        *("thinking_budget_state", "torch"),
    },
    "sample": {
        *("PROCESSED_LOGPROBS_MODES", "_sample_random", "any_explicit_seed", "any_greedy", "apply_sampling_params"),
        *("get_top_k_top_p", "logprobs_mode", "sampling_states", "shape", "use_flashinfer", "use_xpu_sampler"),
    },
    "add_request": {
        *("NO_LOGPROBS", "_NP_INT64_MAX", "_NP_INT64_MIN", "logprobs", "min_p", "np", "num_logprobs", "randint"),
        *("random", "seed", "seeds", "seeds_set", "temperature", "top_k", "top_p", "vocab_size"),
    },
    "apply_grammar_bitmask": {
        *("GRAMMAR_BITMASK_BLOCK_SIZE", "PIN_MEMORY", "_apply_grammar_bitmask_kernel", "async_tensor_h2d", "cdiv"),
        *("copy_", "copy_stream", "cu_num_logits", "cuda", "current_stream", "enumerate", "grammar_bitmask", "int32"),
        *("len", "logits_indices", "mask_stride", "range", "req_ids", "shape", "stream", "stride", "tensor", "torch"),
        *("triton", "wait_stream"),
    },
    "_validate_spec_decode": {"VLLMValidationError", "_SAMPLING_EPS", "logit_bias", "min_p"},
}
"""The names that vLLM's methods use; `add_request` is the method of sampling states."""

ARGUMENTS = {
    *("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping", "expanded_idx_mapping"),
    *("expanded_local_pos", "temperature", "seed", "num_speculative_steps", "synthetic_conditional_rates", "use_fp64"),
    *("use_block_verification", "contexts", "watermarking", "watermarking_skip_mask", "watermark_key"),
    *("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
}
"""The arguments of the function that vLLM's `_verify` calls."""

ATTRIBUTES = {
    "RejectionSampler": {
        *("sampler", "watermark_key", "num_speculative_steps", "enable_adaptive_verification", "fly_window_size"),
        *("use_block_verification", "fly_entropy_threshold", "fly_entropy_top_k", "synthetic_conditional_rates"),
        *("host_starts", "listed", "mask_outputs", "num_listed"),
    },
    "Sampler": {
        *("logprobs_mode", "compute_nans", "use_fp64_gumbel", "req_states", "sampling_states", "penalties_state"),
        *("logits_processors", "logprob_token_ids_state", "thinking_budget_state", "trace_replay_state"),
        *("needs_logits_processing", "num_speculative_tokens", "return_sampling_mask", "use_flashinfer"),
        *("use_xpu_sampler", "needs", "shards_batches", "compiled_dtypes", "copies", "unknown", "known", "grammar"),
        "reads_grammars",
    },
    "SamplingStates": {
        *("max_num_reqs", "vocab_size", "temperature", "top_k", "top_p", "min_p", "seeds", "seeds_set", "num_logprobs"),
    },
    "PenaltiesState": {
        *("req_states", "device", "repetition_penalty", "frequency_penalty", "presence_penalty", "use_penalty"),
        *("prompt_bin_mask", "output_bin_counts", "_new_penalties_reqs"),
    },
    "LogitBiasState": {
        *("prompt_len_np", "num_allowed_token_ids", "allowed_token_ids", "num_logit_bias", "logit_bias_token_ids"),
        *("logit_bias", "min_lens", "num_stop_token_ids", "restore_when_all_masked", "stop_token_ids"),
        "use_logit_bias",
    },
    "BadWordsState": {"req_states", "bad_word_token_ids", "bad_word_offsets", "num_bad_words"},
    "ThinkingBudgetState": {
        *("req_states", "max_num_reqs", "device", "enabled", "thinking_token_budget", "use_thinking_budget"),
        *("cached_last_start", "cached_last_end", "cached_scan_pos", "_reset_reqs", "_budget_dirty"),
        *("reasoning_start_token_ids", "natural_reasoning_end_token_ids", "reasoning_end_token_ids"),
    },
}
"""The attributes of vLLM's objects, by class, including the attributes that `DraftVerification` and `TokenSampling`
add."""


def group_of(sampler: Any) -> Any:
    """Return vLLM's group of ranks that verify the same requests; None without a group, or if each rank verifies its own."""
    if getattr(sampler, "shards_batches", False):
        return None
    try:
        return importlib.import_module(PARALLEL).get_tp_group()
    except (ImportError, AssertionError):  # there is no group
        return None


@functools.cache
def version_of(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def check_same_arguments(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Raise unless vLLM's method takes the same arguments as its replacement."""
    expected, found = (list(inspect.signature(method).parameters) for method in (ours, theirs))
    if expected != found:
        raise ImportError(
            f"specdecode: vLLM's {theirs.__qualname__} was expected to take {expected}, as in version 0.33, got {found}"
        )


def unknown_names(method: Callable[..., Any]) -> list[str]:
    """Return the names that a method of vLLM uses and that are not in `CONSULTED`."""
    method = inspect.unwrap(method)
    known = CONSULTED[method.__name__]
    names = sorted(set(method.__code__.co_names) - known)
    sample = getattr(method, "__globals__", {}).get("rejection_sample") if method.__name__ == "_verify" else None
    if sample is not None:
        names += sorted(set(inspect.signature(sample).parameters) - ARGUMENTS)
    return names


def unknown_attributes(holder: object, kind: str) -> list[str]:
    """Return the attributes of a vLLM object that are not in `ATTRIBUTES`, unless switched off: None, False or 0."""
    new = {f"{kind}.{name}": value for name, value in sorted(vars(holder).items()) if name not in ATTRIBUTES[kind]}
    return switched_on(new)


def as_reason(names: Iterable[str]) -> str | None:
    """Return the reason to leave all steps to vLLM if it has unknown names, or None."""
    return unknown_reason(f"what vLLM {version_of('vllm')} has and", names)
