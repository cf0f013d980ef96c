"""Verification in vLLM: classes mixed into the rejection sampler and the sampler of its V2 model runner.

vLLM hands over what it holds, and nothing of vocabulary size is copied: the rows of all requests are packed in one tensor,
temperatures and seeds are by slot, lengths stay on the device.

| vLLM | the sampler's `packed` |
|---|---|
| `draft_sampled`, the token that is fed at each row | `draft_token_ids`, the draft that each row judges: the next one |
| `pos`, of the token that is fed | `row_positions` |
| cached draft logits, before the temperature, not truncated | `draft_sampling`, where the target truncates |
| no cached draft logits | `draft_logits=None`, a point mass |
| cached draft logits of fewer tokens than the target has | `draft_vocab_ids`: the draft has the first of them |
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from specdecode import RejectionSampler, Sampling
from specdecode.integrations.adapters import EngineMethod, Fallbacks

__all__ = ["DraftVerification", "TokenSampling", "install"]

RUNNER = "vllm.v1.worker.gpu.model_runner"

logger = logging.getLogger("vllm.specdecode")  # below vLLM's logger, so that its handlers and level hold

NO_SAMPLING_NEED = SimpleNamespace(add_request=lambda request, params: False)
"""In place of vLLM's sampling states: temperature and truncation need no processing."""


def install(method: EngineMethod) -> None:
    """Replace the classes that vLLM's V2 model runner makes its samplers from.

    Engines that are made afterwards in this process verify by the method. `SPECDECODE_VLLM` calls this in every process of
    vLLM; call it yourself only if vLLM runs in one process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`).

    Args:
        method: `"probabilistic"`, `"block"` or `"strict"`.

    Raises:
        ImportError: vLLM is not installed, or is of a version whose classes take other arguments.
    """
    runner: Any = importlib.import_module(RUNNER)
    if issubclass(runner.RejectionSampler, DraftVerification):
        runner.RejectionSampler.verifier = runner.Sampler.verifier = RejectionSampler(method)
        return
    check_same_arguments(TokenSampling.sample, runner.Sampler.sample)
    check_same_arguments(DraftVerification._verify, runner.RejectionSampler._verify)
    members = {"verifier": RejectionSampler(method)}
    runner.Sampler = type("Sampler", (TokenSampling, runner.Sampler), dict(members))
    runner.RejectionSampler = type("RejectionSampler", (DraftVerification, runner.RejectionSampler), dict(members))


def check_same_arguments(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Raise unless vLLM's method takes the arguments of the one that replaces it."""
    expected, found = (list(inspect.signature(method).parameters) for method in (ours, theirs))
    if expected != found:
        raise ImportError(
            f"specdecode: vLLM's {theirs.__qualname__} was expected to take {expected}, as in version 0.33, got {found}"
        )


class TokenSampling:
    """Mixed into vLLM's `Sampler`: it knows which requests need logits processors, and draws by seed for `"strict"`.

    vLLM's sampler draws the tokens of steps in which no request has a draft. For `"strict"` they must have the noise of all
    other tokens: a request's text depends on its seed and not on which steps had drafts.
    """

    verifier: ClassVar[RejectionSampler]

    # What vLLM's class has:
    apply_sampling_params: Callable[..., Tensor]
    logprobs_mode: str
    needs_logits_processing: np.ndarray
    return_sampling_mask: bool
    sampling_states: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.other_processing = np.zeros_like(self.needs_logits_processing)
        self.warm: set[Any] = set()

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Note whether a request needs logits processing beyond temperature and truncation."""
        # vLLM keeps one flag for both: so first let its method see no need of temperature and truncation.
        states, self.sampling_states = self.sampling_states, NO_SAMPLING_NEED
        try:
            super().add_request(req_idx, sampling_params)  # type: ignore[misc]
        finally:
            self.sampling_states = states
        self.other_processing[req_idx] = self.needs_logits_processing[req_idx]
        self.needs_logits_processing[req_idx] |= states.add_request(req_idx, sampling_params)

    def sample(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: np.ndarray,
        pos: Tensor,
        input_ids: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        return_logprobs: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Draw one token per row, with vLLM's arguments and results."""
        mappings = expanded_idx_mapping, idx_mapping, idx_mapping_np
        tokens = pos, input_ids, expanded_local_pos, seq_lens_upper_bound_np
        if self.verifier.method != "strict":
            return super().sample(logits, *mappings, *tokens, return_logprobs)  # type: ignore[misc, no-any-return]
        if why_processed(self, idx_mapping_np, return_logprobs and processes_logprobs(self)) is None:
            sampling = requested(self.sampling_states, idx_mapping_np)
        else:
            logits = self.apply_sampling_params(logits, *mappings, *tokens)
            sampling = of_processed(self.sampling_states)
        call = {
            "target_logits": logits,
            "draft_token_ids": input_ids,  # not looked at: each row is its request's last
            "row_starts": torch.arange(len(logits) + 1, device=logits.device),
            "num_draft_tokens": 0,
            "slots": expanded_idx_mapping,
            "seeds": self.sampling_states.seeds.gpu,
            "row_positions": pos,
        }
        warm_up_once(self.warm, self.verifier, call, self.sampling_states)
        return self.verifier.packed(**call, **sampling).token_ids[:, 0], logits


class DraftVerification:
    """Mixed into vLLM's `RejectionSampler`: it verifies by this package what it can, and leaves other steps to vLLM."""

    verifier: ClassVar[RejectionSampler]

    # What vLLM's class has:
    fly_window_size: int
    num_speculative_steps: int
    sampler: Any
    synthetic_conditional_rates: Tensor | None
    watermark_key: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fallbacks = Fallbacks(logger)
        self.warm: set[Any] = set()
        logger.info("specdecode: %r verifies the drafts", self.verifier)

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Verify one step, with vLLM's arguments and results.

        Args:
            logits: [num_rows, vocab] in the model's dtype, grammar masks applied.
            draft_logits: [max_requests, num_draft_tokens, vocab] by slot, as the draft model wrote them; None means that
                drafts are deterministic.
            draft_sampled: [num_rows] the token that was fed at each row: a request's last token, then its drafts.
            pos: [num_rows] the positions of these.
            cu_num_logits: [batch + 1] each request's first row. Only the device may know its values.
            idx_mapping: [batch] each request's slot.
            idx_mapping_np: the same on the host.
            expanded_idx_mapping: [num_rows] the slot of each row's request.
            expanded_local_pos: [num_rows] each row's place in its request.
            seq_lens_upper_bound_np: for vLLM's logits processors.
            verify_draft_sampled: [num_rows] `draft_sampled` with -1 for drafts that a grammar forbids.

        Returns:
            The logits that log-probabilities are computed from; [batch, num_draft_tokens + 1] int64 token ids; [batch]
            int32, how many of them each request emits.
        """
        sampler, is_strict = self.sampler, self.verifier.method == "strict"
        states = sampler.sampling_states
        for_logprobs = processes_logprobs(sampler) and bool((states.num_logprobs[idx_mapping_np] >= 0).any())
        other_rule, processed = self.other_rule(), why_processed(sampler, idx_mapping_np, for_logprobs)
        if other_rule is not None or (processed is not None and not is_strict):
            self.fallbacks.add(other_rule or str(processed), "vLLM verifies such a step, by its own method and noise")
            rows = logits, draft_logits, draft_sampled, pos, cu_num_logits
            mappings = idx_mapping, idx_mapping_np, expanded_idx_mapping, expanded_local_pos
            left = (*rows, *mappings, seq_lens_upper_bound_np, verify_draft_sampled)
            return super()._verify(*left)  # type: ignore[misc, no-any-return]
        if processed is None:
            sampling = requested(states, idx_mapping_np)
        else:  # only strict: it promises that the noise is the same in every step
            self.fallbacks.add(
                processed, "vLLM prepares a copy of the logits for such a step, and 'strict' verifies that"
            )
            where = expanded_idx_mapping, idx_mapping, idx_mapping_np
            tokens = pos, draft_sampled, expanded_local_pos, seq_lens_upper_bound_np
            logits = sampler.apply_sampling_params(logits, *where, *tokens)
            sampling = of_processed(states)
        drafts, draft_logits = verify_draft_sampled[1:], None if is_strict else draft_logits
        if draft_logits is not None and verify_draft_sampled.data_ptr() != draft_sampled.data_ptr():
            drafts = with_masked_drafts(drafts, draft_sampled[1:], logits)
        return logits, *self.verified(logits, drafts, draft_logits, pos, cu_num_logits, idx_mapping, sampling)

    def verified(
        self,
        logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        sampling: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return the token ids that each request emits, and how many, by this package's sampler."""
        states = self.sampler.sampling_states
        if draft_logits is not None:
            draft_logits = draft_logits[..., : logits.shape[-1]]  # beyond it a draft is no token of the target
        call = {
            "target_logits": logits,
            "draft_token_ids": draft_token_ids,
            "row_starts": cu_num_logits,
            "draft_logits": draft_logits,
            "num_draft_tokens": self.num_speculative_steps,
            "slots": idx_mapping,
            "seeds": states.seeds.gpu,
            "row_positions": pos,
        }
        if draft_logits is not None and draft_logits.shape[-1] < logits.shape[-1]:
            call["draft_vocab_ids"] = torch.arange(draft_logits.shape[-1], device=logits.device)
        warm_up_once(self.warm, self.verifier, call, states)
        output = self.verifier.packed(**call, **for_drafts(sampling, draft_logits))
        return output.token_ids, output.num_tokens

    def other_rule(self) -> str | None:
        """Return why vLLM accepts drafts, or draws tokens, by a rule that this package does not have, or None."""
        if self.watermark_key is not None:
            return "watermarks"
        if self.synthetic_conditional_rates is not None:
            return "rejection_sample_method 'synthetic'"
        if self.fly_window_size > 0:
            return "rejection_sample_method 'fly'"
        return None


def with_masked_drafts(drafts: Tensor, drawn: Tensor, logits: Tensor) -> Tensor:
    """Return drafts, of which vLLM made some -1, with the id that was drawn wherever a grammar has masked it.

    A draft that is left out because of what it is must be rejected as itself, so that the token is drawn from the residual.
    It is sure to be: p(x) = 0. Other drafts that vLLM leaves out, as after the first that is masked, remain -1.

    Args:
        drafts: [num_rows - 1] what each row but the last is to judge, -1 where vLLM leaves a draft out.
        drawn: [num_rows - 1] the ids that were drawn there.
        logits: [num_rows, vocab] with the grammar's masks applied.
    """
    ids = drawn.long().clamp(0, logits.shape[1] - 1)
    is_masked = logits[:-1].gather(1, ids[:, None]).squeeze(1) == -torch.inf
    return torch.where(is_masked, drawn, drafts)


def processes_logprobs(sampler: Any) -> bool:
    """Return whether log-probabilities, if asked for, are of logits that vLLM has processed."""
    return sampler.logprobs_mode in ("processed_logits", "processed_logprobs")


def why_processed(sampler: Any, requests: np.ndarray, for_logprobs: bool) -> str | None:
    """Return why a step of these requests needs logits that vLLM has processed, or None."""
    # A sampler that is not ours does not tell processors from temperatures: then both count.
    if getattr(sampler, "other_processing", sampler.needs_logits_processing)[requests].any():
        return "logits processors (penalties, biases, bad words, thinking budgets, custom ones)"
    if for_logprobs:
        return f"logprobs_mode {sampler.logprobs_mode!r}"
    if sampler.return_sampling_mask:
        return "return_sampling_mask"
    return None


def requested(states: Any, requests: np.ndarray) -> dict[str, Any]:
    """Return how the requests sample from raw logits, by slot, with no truncation if none of them truncates.

    A truncated call costs more, and greedy requests need no truncation: so the host's copies are looked at.
    """
    drawn = requests[states.temperature.np[requests] != 0]
    truncates = (
        (states.top_k.np[drawn] != states.vocab_size) | (states.top_p.np[drawn] != 1) | (states.min_p.np[drawn] != 0)
    )
    return truncated(states) if truncates.any() else {"temperature": states.temperature.gpu}


def truncated(states: Any) -> dict[str, Any]:
    """Return how requests sample. All truncation is passed if any is: each selection would need kernels of its own."""
    return {name: getattr(states, name).gpu for name in ("temperature", "top_k", "top_p", "min_p")}


def for_drafts(sampling: dict[str, Any], draft_logits: Tensor | None) -> dict[str, Any]:
    """Add how vLLM drew the drafts, where that differs: at the target's temperature, from whole rows."""
    if draft_logits is None or "top_p" not in sampling:
        return sampling
    return sampling | {"draft_sampling": Sampling(temperature=sampling["temperature"])}


def warm_up_once(warm: set[Any], verifier: RejectionSampler, call: dict[str, Any], states: Any) -> None:
    """Compile kernels, truncated and not, at the first call of its kind: vLLM's own warm-up makes that.

    Args:
        warm: the kinds that have been compiled.
        verifier: compiles.
        call: the arguments of its `packed`, but how requests sample.
        states: vLLM's, which have that.
    """
    draft_logits = call.get("draft_logits")
    kind = call["target_logits"].dtype, draft_logits is None
    if kind in warm:
        return
    warm.add(kind)
    one = {"row_starts": call["row_starts"][:2], "slots": call["slots"][:1]}
    for sampling in ({"temperature": states.temperature.gpu}, truncated(states)):
        verifier.warmup(**call | one, **for_drafts(sampling, draft_logits))


def of_processed(states: Any) -> dict[str, Any]:
    """Return how requests sample from logits that vLLM has divided by the temperature and truncated."""
    return {"temperature": (states.temperature.gpu != 0).to(torch.float32)}
