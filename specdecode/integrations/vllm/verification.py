"""A step with drafts, in vLLM's arguments.

vLLM hands over what it holds, and nothing of vocabulary size is copied: the rows of all requests are packed in one tensor,
temperatures and seeds are by slot, lengths stay on the device.

| vLLM | the sampler's `packed` |
|---|---|
| `draft_sampled`, the token that is fed at each row | `draft_token_ids`, the draft that each row judges: the next one |
| `pos`, of the token that is fed | `row_positions` |
| cached draft logits, before the temperature, not truncated | `draft_sampling`, where the target truncates |
| no cached draft logits | `draft_logits=None`, a point mass |
| cached draft logits of fewer tokens than the target has | `draft_vocab_ids`: the draft has the first of them |
| the states of logits processors that are known, the masks of grammars | `adjustments`, if a request of the step has any |
"""

import functools
import os
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

import specdecode
from specdecode import RejectionSampler, SamplerOutput
from specdecode.integrations.adapters import Fallbacks
from specdecode.integrations.calls import first_integers, verify_unchecked
from specdecode.integrations.vllm.adjusting import StepRows
from specdecode.integrations.vllm.compat import RUN_WITH, as_reason, unknown_attributes, version_of
from specdecode.integrations.vllm.compiling import compile_all, kind_of
from specdecode.integrations.vllm.grammars import apply_grammar
from specdecode.integrations.vllm.listing import ListedRows
from specdecode.integrations.vllm.needs import (
    LOGPROBS,
    TRUNCATES,
    adjusted,
    for_drafts,
    needs_in,
    of_processed,
    requested,
    values_of,
    why_processed,
    with_masked_drafts,
)
from specdecode.integrations.vllm.reporting import (
    Report,
    log_interval,
    logger,
    reports_here,
)
from specdecode.integrations.vllm.splitting import Prepared, joined, prepared_in, verify_prepared, without

LEFT_TO_VLLM = "vLLM verifies such a step, by its own method and noise"


class DraftVerification(ListedRows):
    """Mixed into vLLM's `RejectionSampler`: it verifies by this package what it can, and leaves other steps to vLLM."""

    verifier: ClassVar[RejectionSampler]
    unknown: str | None = None
    """Why all steps are left to vLLM: it may do what is not known here."""

    fallbacks: Fallbacks
    report: Report | None = None
    """None: another rank reports the same steps."""

    host_starts: np.ndarray | None = None
    """Where the rows of each request start, and those of the last end; None: the host does not know."""

    # What vLLM's class has:
    fly_window_size: int
    synthetic_conditional_rates: Tensor | None
    watermark_key: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unknown = self.unknown or as_reason(
            [
                *unknown_attributes(self, "RejectionSampler"),
                *unknown_attributes(self.sampler, "Sampler"),
                *unknown_attributes(self.sampler.sampling_states, "SamplingStates"),
            ]
        )
        self.sampler.unknown = self.unknown  # it draws for 'strict'
        self.fallbacks = Fallbacks(logger)
        if reports_here(self.sampler):
            is_prepared = self.verifier.method == "strict" and self.other_rule() is None
            how = "of them from logits that vLLM prepared" if is_prepared else "left to vLLM"
            self.report = Report(self.fallbacks, log_interval(), how)
            self.log_start()

    def log_start(self) -> None:
        """Log the method, the versions, and what is left to vLLM by configuration."""
        packages = ", ".join(f"{name} {version_of(name)}" for name in ("vllm", "torch", "triton"))
        of = "the logits of " if self.verifier.method == "strict" else ""  # it verifies the copy that vLLM prepares
        if rule := self.other_rule():
            left = f"all steps, with {rule}"
        elif why := why_processed(self.sampler, LOGPROBS, lists=True):
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
            logits: [num_rows, vocab] in the model's dtype; grammar masks are applied, or kept by the sampler.
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
        rows = logits, draft_logits, draft_sampled, pos, cu_num_logits
        mappings = idx_mapping, idx_mapping_np, expanded_idx_mapping, expanded_local_pos
        given = *rows, *mappings, seq_lens_upper_bound_np, verify_draft_sampled
        is_strict, self.listed = self.verifier.method == "strict", None
        drafts, draft_rows = verify_draft_sampled[1:], None if is_strict else draft_logits
        where = draft_rows, pos, cu_num_logits, idx_mapping
        step_rows = StepRows(expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled, expanded_local_pos)
        kind = kind_of(logits, draft_rows)
        if kind not in self.kinds and self.other_rule() is None:
            self.prepare(kind, self.call_of(logits, drafts, *where))
        needs, asked, prepared = self.asked_and_prepared(logits, idx_mapping_np)
        rule, processed = self.why_left(needs, kind, self.can_list)
        if rule is not None or (processed is not None and not is_strict):
            return self.leave(rule or str(processed), given)
        if processed is None:
            sampling = requested(values_of(self.sampler), needs) | adjusted(self.sampler, needs, step_rows) | asked
        else:  # only strict: it promises that the noise is the same in every step
            logits, sampling = self.processed(processed, given)
            kind = kind_of(logits, draft_rows)
        if draft_rows is not None and verify_draft_sampled.data_ptr() != draft_sampled.data_ptr():
            drafts = with_masked_drafts(drafts, draft_sampled[1:], logits, sampling.get("adjustments"))
        call = self.call_of(logits, drafts, *where)
        if kind not in self.kinds:  # as the copy of vLLM's is
            self.prepare(kind, call)
        if prepared is None:
            output = self.output_of(call, for_drafts(sampling, draft_rows), kind)
            if asked and processed is None:
                self.keep(output)
        else:
            output = self.output_of(without(call, prepared), for_drafts(sampling, draft_rows), kind)
            output = joined(output, verify_prepared(self, prepared, given), prepared)
        return self.verified(logits, output)

    def asked_and_prepared(self, logits: Tensor, slots: np.ndarray) -> tuple[int, dict[str, Any], Prepared | None]:
        """Return what a step needs, what calls are to list of it, and the requests that vLLM prepares rows for."""
        needs = needs_in(self.sampler, slots)
        asked = self.asked_of(needs)
        prepared = None if asked else prepared_in(self.sampler, slots, self.host_starts, logits)
        if prepared is not None:
            needs = needs & LOGPROBS | needs_in(self.sampler, np.delete(slots, prepared.on_host))
        if prepared is not None or "logprobs" in asked:
            apply_grammar(self.sampler)
        return needs, asked, prepared

    def verified(self, logits: Tensor, output: SamplerOutput) -> tuple[Tensor, Tensor, Tensor]:
        """Count a step that was verified here; return what `_verify` does."""
        if self.report is not None:
            self.report.verified(output)
        return logits, output.token_ids, output.num_tokens

    def output_of(self, call: dict[str, Any], sampling: dict[str, Any], kind: Any) -> SamplerOutput:
        """Verify a step by this package's sampler; what has been checked in a step of its kind is not checked again."""
        asked = [name in sampling for name in ("top_p", "logprobs", "kept_sets")]
        added = [each is None for each in sampling.get("adjustments", ())]
        checked = kind, *asked, *added
        if checked not in self.checked:
            self.checked.add(checked)
            return self.verifier.packed(**call, **sampling)
        return verify_unchecked(self.verifier, {**call, **sampling})

    def leave(self, reason: str, given: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Let vLLM verify a step by its own method, and count it."""
        self.fallbacks.add(reason, LEFT_TO_VLLM)
        apply_grammar(self.sampler)
        if self.report is not None:
            self.report.tick()
        return super()._verify(*given)  # type: ignore[misc, no-any-return]

    def processed(self, reason: str, given: tuple[Any, ...]) -> tuple[Tensor, dict[str, Any]]:
        """Let vLLM process the logits of a step; return them, and how requests sample from them."""
        self.fallbacks.add(reason, "vLLM prepares a copy of the logits for such a step, and 'strict' verifies that")
        apply_grammar(self.sampler)
        logits, _, fed, pos, _, idx_mapping, idx_mapping_np, expanded_idx_mapping, *more = given
        where = expanded_idx_mapping, idx_mapping, idx_mapping_np
        logits = self.sampler.apply_sampling_params(logits, *where, pos, fed, *more[:2])
        return logits, of_processed(values_of(self.sampler))

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
        slots, draft_rows = input_batch.idx_mapping_np, None if self.verifier.method == "strict" else draft_logits
        kind, returns_masks, is_ours = kind_of(logits, draft_rows), self.sampler.return_sampling_mask, False
        is_divided = len(logits) > max_chunk_logits and max_num_logprobs < 0
        if is_divided or returns_masks:
            is_ours = self.why_left(needs_in(self.sampler, slots), kind, lists=True) == (None, None)
        if is_divided and is_ours:
            max_chunk_logits = len(logits)
        where = draft_logits, draft_sampled, pos, max_chunk_logits, max_num_logprobs, verify_draft_sampled
        if len(logits) <= max_chunk_logits and not getattr(self, "enable_adaptive_verification", False):
            self.host_starts = input_batch.cu_num_logits_np  # not so if the device alone knows where rows are
        self.num_listed = max_num_logprobs
        with self.making_sampling_masks(returns_masks and is_ours and kind in self.kinds):
            try:
                return self.with_sampling_masks(super()._verify_in_chunks(logits, input_batch, *where), slots)  # type: ignore[misc]
            finally:
                self.host_starts, self.num_listed = None, -1

    @functools.cached_property
    def kinds(self) -> dict[Any, tuple[str | None, str | None]]:
        """Kinds of steps whose kernels are compiled, and why the kernels do not take those not truncated, and truncated."""
        return {}

    @functools.cached_property
    def checked(self) -> set[Any]:
        """Kinds of steps whose arguments have been checked: vLLM's are of the same types in each, and fit together."""
        return set()

    def prepare(self, kind: Any, call: dict[str, Any]) -> None:
        """Compile all kernels of its kind at the first call: vLLM's own warm-up makes that."""
        self.kinds[kind] = compile_all(self.verifier, call, self.sampler)

    def call_of(
        self,
        logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
    ) -> dict[str, Any]:
        """Return the arguments of the sampler's `packed`, but how requests sample."""
        call = {
            "target_logits": logits,
            "draft_token_ids": draft_token_ids,
            "row_starts": cu_num_logits,
            "draft_logits": draft_logits,
            "num_draft_tokens": self.num_speculative_steps,
            "slots": idx_mapping,
            "seeds": values_of(self.sampler).seeds,
            "row_positions": pos,
        }
        if draft_logits is not None and draft_logits.shape[-1] != logits.shape[-1]:
            call["draft_logits"] = draft_logits[..., : logits.shape[-1]]  # beyond it a draft is no token of the target
            if draft_logits.shape[-1] < logits.shape[-1]:
                call["draft_vocab_ids"] = first_integers(draft_logits.shape[-1], logits.device)
        return call

    def why_left(self, needs: int, kind: Any, lists: bool = False) -> tuple[str | None, str | None]:
        """Return why vLLM has to verify a step, and else why it has to process the step's logits; None: it has not."""
        rule = self.other_rule()
        if rule is not None:
            return rule, None
        processed = why_processed(self.sampler, needs, lists)
        if processed is None:
            why_not = self.kinds.get(kind, (None, None))[bool(needs & TRUNCATES)]
            processed = None if why_not is None else f"rows that the kernels do not take ({why_not})"
        return None, processed

    def other_rule(self) -> str | None:
        """Return why vLLM accepts drafts, or draws tokens, by a rule that this package does not have, or None."""
        if self.watermark_key is not None:
            return "watermarks"
        if self.synthetic_conditional_rates is not None:
            return "rejection_sample_method 'synthetic'"
        if self.fly_window_size > 0:
            return "rejection_sample_method 'fly'"
        return self.unknown
