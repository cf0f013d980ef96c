"""Verification of a step with drafts, with vLLM's arguments.

vLLM's tensors are used as they are, and nothing of vocabulary size is copied: the rows of all requests are packed in one
tensor, temperatures and seeds are by slot, lengths stay on the device.

| vLLM | the sampler's `packed` |
|---|---|
| `draft_sampled`, the token that is fed at each row | `draft_token_ids`, the draft that each row judges: the next one |
| `pos`, of the token that is fed | `row_positions` |
| cached draft logits, before the temperature, not truncated | `draft_sampling`, where the target truncates |
| no cached draft logits | `draft_logits=None`, a point mass |
| cached draft logits of fewer tokens than the target has | `draft_vocab_ids`: the draft has the first tokens |
| the states of known logits processors, the masks of grammars | `adjustments`, if a request of the step has any |
"""

import functools
import os
from collections.abc import Hashable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import specdecode
from specdecode import RejectionSampler, SamplerOutput, Sampling
from specdecode.integrations.engine import Fallbacks, StepMetrics, first_integers, log_interval, verify
from specdecode.integrations.vllm.compat import (
    INTERVAL,
    RUN_WITH,
    as_reason,
    group_of,
    logger,
    unknown_attributes,
    version_of,
)
from specdecode.integrations.vllm.grammars import apply_grammar
from specdecode.integrations.vllm.listing import ListedRows
from specdecode.integrations.vllm.sampling import LOGPROBS, TRUNCATES, TokenSampling, few_with_processors
from specdecode.integrations.vllm.steps import Requests, StepInputs, kind_of

LEFT_TO_VLLM = "vLLM verifies such a step, by its own method and noise"
PREPARED = "vLLM prepares a copy of the logits for such a step, and 'strict' verifies that"

NO_FINITE_LOGIT = (
    "specdecode: %d requests had a row without a finite logit, all NaN or masked, and emitted token 0 there; "
    "VLLM_COMPUTE_NANS_IN_LOGITS=1 lets vLLM count NaN, VLLM_RAISE_ON_LOGIT_NANS=1 lets it stop"
)


class DraftVerification(ListedRows):
    """Mixed into vLLM's `RejectionSampler`: it verifies steps with this package, and leaves unsupported steps to vLLM."""

    verifier: ClassVar[RejectionSampler]
    unknown: str | None = None
    """The reason to leave all steps to vLLM if it has unknown names."""

    fallbacks: Fallbacks
    metrics: StepMetrics | None = None
    """None: another rank logs the same steps."""

    host_starts: np.ndarray | None = None
    """The first row of each request, and the end of the last; None: the host does not know."""

    # What vLLM's class has:
    fly_window_size: int
    synthetic_conditional_rates: Tensor | None
    watermark_key: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.sampler, TokenSampling):
            self.unknown = f"a sampler of another class ({type(self.sampler).__name__})"
        self.unknown = self.unknown or as_reason(
            [
                *unknown_attributes(self, "RejectionSampler"),
                *unknown_attributes(self.sampler, "Sampler"),
                *unknown_attributes(self.sampler.sampling_states, "SamplingStates"),
            ]
        )
        self.sampler.unknown = self.unknown  # `TokenSampling` draws for "strict"
        self.fallbacks = Fallbacks(logger)
        group = group_of(self.sampler)
        if group is None or group.rank_in_group == 0:  # other ranks would log the same steps
            is_prepared = self.verifier.method == "strict" and self.other_rule() is None
            how = "of them from logits that vLLM prepared" if is_prepared else "left to vLLM"
            self.metrics = StepMetrics(self.fallbacks, log_interval(INTERVAL), how, NO_FINITE_LOGIT)
            self.log_start()

    def log_start(self) -> None:
        """Log the method, the versions, and the steps left to vLLM by configuration."""
        packages = ", ".join(f"{name} {version_of(name)}" for name in ("vllm", "torch", "triton"))
        of = "the logits of " if self.verifier.method == "strict" else ""  # verifies the copy that vLLM prepares
        if rule := self.other_rule():
            left = f"all steps, with {rule}"
        elif why := self.sampler.why_processed(LOGPROBS, lists=True):
            left = f"{of}steps with log-probabilities, with {why}"
        else:
            left = "nothing"
        logger.info(
            "specdecode %s: method %r verifies the drafts, up to %d a request (%s); left to vLLM by configuration: %s",
            specdecode.__version__,
            self.verifier.method,
            self.num_speculative_steps,
            packages,
            left,
        )
        if not version_of("vllm").startswith(RUN_WITH):
            logger.warning(
                "specdecode: vllm %s is not one of the versions that it was run with, %sx",
                version_of("vllm"),
                RUN_WITH,
            )
        if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0") and self.verifier.method != "strict":
            logger.warning(
                "specdecode: with VLLM_BATCH_INVARIANT the seeded text of a request still depends on the batch, because "
                "vLLM draws with other noise in steps without drafts and in those left to it; not so with method 'strict'"
            )

    # ---- A step

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
        """Verify one step, with vLLM's arguments (see `StepInputs`) and results.

        Returns:
            The logits for computing log-probabilities; [batch, num_draft_tokens + 1] int64 token ids; [batch] int32, the
            number of tokens.
        """
        rows = logits, draft_logits, draft_sampled, pos, cu_num_logits
        mappings = idx_mapping, idx_mapping_np, expanded_idx_mapping, expanded_local_pos
        given = StepInputs(*rows, *mappings, seq_lens_upper_bound_np, verify_draft_sampled)
        is_strict, self.listed = self.verifier.method == "strict", None
        if (rule := self.other_rule()) is not None:
            return self.leave(rule, given)
        step = given._replace(draft_logits=None) if is_strict else given
        self.compile_once(step)
        needs = self.sampler.needs_in(idx_mapping_np)
        listing = self.listing_of(needs)
        # A call that lists returns one output for all rows, so such a step is not split.
        few = None if listing else few_with_processors(step, self.sampler.needs[idx_mapping_np], self.host_starts)
        if few is not None:
            needs = needs & LOGPROBS | self.sampler.needs_in(np.delete(idx_mapping_np, few.on_host))
        if few is not None or "logprobs" in listing:
            apply_grammar(self.sampler)
        reason = self.why_not(step.kind, needs, self.can_list)
        if reason is None:
            sampling = self.sampler.sampling_of(needs, step) | listing
        elif is_strict:  # not left to vLLM: the noise must be the same in every step
            step, sampling = self.processed(reason, step), self.sampler.of_processed()
            few, listing = None, {}
        else:
            return self.leave(reason, given)
        call = self.as_call(step, sampling)
        if few is None:
            output = self.output_of(call, step.kind)
        else:  # nothing is read for a request without a slot
            call["slots"] = call["slots"].index_fill(0, few.indices, -1)
            output = joined(self.output_of(call, step.kind), self.verify_processed(step, few), few)
        if listing:
            self.keep(output)
        return self.as_result(step, output)

    def _verify_in_chunks(
        self,
        logits: Tensor,
        input_batch: Any,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        max_chunk_logits: int,
        max_num_logprobs: int,
        verify_draft_sampled: Tensor | None = None,
    ) -> Any:
        """Verify a batch, with vLLM's arguments and results: all at once where vLLM would divide it to bound its copy."""
        tokens = draft_logits, draft_sampled, pos
        limits = max_chunk_logits, max_num_logprobs, verify_draft_sampled
        verify_chunks = functools.partial(super()._verify_in_chunks, logits, input_batch, *tokens)  # type: ignore[misc]
        if self.other_rule() is not None:
            return verify_chunks(*limits)
        slots, is_strict = input_batch.idx_mapping_np, self.verifier.method == "strict"
        kind = kind_of(logits, None if is_strict else draft_logits)
        returns_masks, is_ours = self.sampler.return_sampling_mask, False
        is_divided = len(logits) > max_chunk_logits and max_num_logprobs < 0
        if is_divided or returns_masks:
            is_ours = self.why_not(kind, self.sampler.needs_in(slots), lists=True) is None
        if is_divided and is_ours:
            max_chunk_logits = len(logits)
        if len(logits) <= max_chunk_logits and not getattr(self, "enable_adaptive_verification", False):
            self.host_starts = input_batch.cu_num_logits_np  # otherwise only the device knows the rows
        self.num_listed = max_num_logprobs
        with self.making_sampling_masks(returns_masks and is_ours and kind in self.kinds):
            try:
                result = verify_chunks(max_chunk_logits, max_num_logprobs, verify_draft_sampled)
                return self.with_sampling_masks(result, slots)
            finally:
                self.host_starts, self.num_listed = None, -1

    def other_rule(self) -> str | None:
        """Return the reason to leave all steps to vLLM if it accepts drafts by an unsupported rule, or None."""
        if self.watermark_key is not None:
            return "watermarks"
        if self.synthetic_conditional_rates is not None:
            return "rejection_sample_method 'synthetic'"
        if self.fly_window_size > 0:
            return "rejection_sample_method 'fly'"
        return self.unknown

    def why_not(self, kind: Hashable, needs: int, lists: bool = False) -> str | None:
        """Return the reason why a step cannot be verified from the model's logits, or None.

        Args:
            kind: of the step.
            needs: of its requests, in bits.
            lists: whether calls can list the row data that vLLM returns.
        """
        if reason := self.other_rule() or self.sampler.why_processed(needs, lists):
            return reason
        limit = self.kinds.get(kind, (None, None))[bool(needs & TRUNCATES)]
        return None if limit is None else f"rows that the kernels do not take ({limit})"

    def leave(self, reason: str, given: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Let vLLM verify a step by its own method, and count it."""
        self.fallbacks.add(reason, LEFT_TO_VLLM)
        apply_grammar(self.sampler)
        if self.metrics is not None:
            self.metrics.tick()
        return super()._verify(*given)  # type: ignore[misc, no-any-return]

    def processed(self, reason: str, step: StepInputs) -> StepInputs:
        """Return a step with logits that vLLM has processed, and count it."""
        self.fallbacks.add(reason, PREPARED)
        apply_grammar(self.sampler)
        step = step._replace(logits=step.processed(self.sampler))
        self.compile_once(step)
        return step

    def as_call(self, step: StepInputs, sampling: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the sampler's `packed` for a step, given the sampling arguments."""
        vocab, draft_logits = step.logits.shape[-1], step.draft_logits
        call = sampling | {
            "target_logits": step.logits,
            "draft_token_ids": step.drafts(sampling.get("adjustments")),
            "row_starts": step.cu_num_logits,
            "draft_logits": draft_logits,
            "num_draft_tokens": self.num_speculative_steps,
            "slots": step.idx_mapping,
            "seeds": self.sampler.slot_values().seeds,
            "row_positions": step.pos,
        }
        if draft_logits is None:
            return call
        if "top_p" in sampling:  # vLLM drew the drafts at the target's temperature, from whole rows
            call["draft_sampling"] = Sampling(temperature=sampling["temperature"])
        if (draft_vocab := draft_logits.shape[-1]) != vocab:
            call["draft_logits"] = draft_logits[..., :vocab]  # ids beyond it are not tokens of the target
            if draft_vocab < vocab:
                call["draft_vocab_ids"] = first_integers(draft_vocab, step.logits.device)
        return call

    def as_result(self, step: StepInputs, output: SamplerOutput) -> tuple[Tensor, Tensor, Tensor]:
        """Return an output in the form of `_verify`, and count the step."""
        if self.metrics is not None:
            self.metrics.verified(output)
        return step.logits, output.token_ids, output.num_tokens

    # ---- Calls

    @functools.cached_property
    def kinds(self) -> dict[Hashable, tuple[str | None, str | None]]:
        """The compiled kinds of steps; for each, the reasons why kernels cannot take untruncated and truncated steps."""
        return {}

    @functools.cached_property
    def checked(self) -> set[Hashable]:
        """Kinds of calls whose arguments have been checked."""
        return set()

    def compile_once(self, step: StepInputs) -> None:
        """Compile all kernels of a kind of steps at its first step, which is part of vLLM's own warm-up."""
        if step.kind not in self.kinds:
            as_call = functools.partial(self.as_call, step)
            self.kinds[step.kind] = self.sampler.compile_kernels(self.verifier, as_call, step)

    def output_of(self, call: dict[str, Any], kind: Hashable) -> SamplerOutput:
        """Return the output of a call, given the kind of its step."""
        optional = [name in call for name in ("top_p", "logprobs", "kept_sets")]
        adjusts = [each is None for each in call.get("adjustments", ())]
        return verify(self.verifier, call, (kind, *optional, *adjusts), self.checked)

    def verify_processed(self, step: StepInputs, few: Requests) -> SamplerOutput:
        """Return the output of some requests of a step, verified from logits that vLLM processes."""
        part, values = step.part(few), self.sampler.slot_values()
        part, slots = part._replace(logits=part.processed(self.sampler)), part.idx_mapping
        if part.draft_logits is not None:  # divided by the temperature in float32, as vLLM has divided the target's
            temperature = values.temperature[slots, None, None]
            divisor = torch.where(temperature > 0, temperature, 1.0)
            part = part._replace(draft_logits=part.draft_logits[slots].to(torch.float32) / divisor)
        call = self.as_call(part, self.sampler.of_processed())
        by_request = {"slots": None, "seeds": values.seeds[slots], "temperature": call["temperature"][slots]}
        return self.verifier.packed(**call | by_request)


def joined(output: SamplerOutput, own: SamplerOutput, few: Requests) -> SamplerOutput:
    """Return the output of all requests of a step, given the output of a few in `own`."""
    return SamplerOutput._make(
        None if part is None or other is None else part.index_copy(0, few.indices, other)
        for part, other in zip(output, own)
    )
