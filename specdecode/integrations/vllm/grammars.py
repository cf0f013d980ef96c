"""Grammars: vLLM's masks are kept for the step and merged into the masks of its rows; no logit is changed.

vLLM copies the masks of a step's grammars to the device, and then sets logits to -inf in place. Here its method only
makes the copy. Code that needs vLLM's masked logits calls `apply_grammar` first: to leave a step to vLLM, to let vLLM
prepare logits, or to return log-probabilities.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass
class StepGrammar:
    """The masks of a step's grammars, on the device, kept until the step ends, even after they have been applied."""

    masks: Tensor  # [num_masks, width] int32
    mapping: Tensor  # [num_masks] int32: the request's index times `stride`, plus the row's index in the request
    requests: Tensor  # [batch] int64: each request's slot
    stride: int  # the number of masks of each request
    apply: Callable[[], None]  # applies the masks as vLLM's method does
    used: Callable[[], None]  # must be called after the masks have been read
    is_applied: bool = False  # whether the masks have been applied to the step's logits


def apply_grammar(sampler: Any) -> None:
    """Let vLLM apply the kept masks to the step's logits, once."""
    grammar: StepGrammar | None = getattr(sampler, "grammar", None)
    if grammar is not None and not grammar.is_applied:
        grammar.is_applied = True
        grammar.apply()


class KeptGrammars:
    """Mixed into vLLM's `StructuredOutputsWorker`: it keeps masks for a sampler that reads them."""

    sampler: Any = None
    """The step's sampler; None: masks are applied at once."""

    # What vLLM's class has:
    copy_stream: Any
    grammar_bitmask: Tensor
    logits_indices: Tensor
    mask_stride: int

    def apply_grammar_bitmask(
        self, logits: Tensor, input_batch: Any, grammar_req_ids: list[str], grammar_bitmask: Any
    ) -> None:
        """Keep the masks of a step, or apply them to its logits, with vLLM's arguments."""
        given = input_batch, grammar_req_ids, grammar_bitmask
        apply, sampler = super().apply_grammar_bitmask, self.sampler  # type: ignore[misc]
        if not grammar_req_ids or sampler is None or not sampler.takes(input_batch.num_draft_tokens):
            apply(logits, *given)
            return
        apply(logits[:, :0], *given)  # logits without columns: the method only copies
        count = len(grammar_bitmask)
        where = self.grammar_bitmask[:count], self.logits_indices[:count], input_batch.idx_mapping
        sampler.grammar = StepGrammar(*where, self.mask_stride, lambda: apply(logits, *given), self.masks_are_used)

    def masks_are_used(self) -> None:
        """Make the next copies wait until the masks have been read."""
        if self.copy_stream is not None:
            self.copy_stream.wait_stream(torch.cuda.current_stream())


class GrammarSteps:
    """Mixed into vLLM's V2 model runner: it passes its sampler to the grammar worker for a step, then drops both."""

    # What vLLM's class has:
    rejection_sampler: Any
    sampler: Any
    structured_outputs_worker: Any

    @property
    def reads_grammars(self) -> bool:
        """Whether every class that keeps or reads grammar masks is ours."""
        verification, is_kept = self.rejection_sampler, isinstance(self.structured_outputs_worker, KeptGrammars)
        is_read = getattr(self.sampler, "reads_grammars", False)
        return is_kept and is_read and (verification is None or hasattr(verification, "verifier"))

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """Sample a step, with vLLM's arguments and results."""
        given, worker = (hidden_states, input_batch, grammar_output), self.structured_outputs_worker
        if grammar_output is None or not self.reads_grammars:
            return super().sample(*given)  # type: ignore[misc]
        worker.sampler = self.sampler
        try:
            return super().sample(*given)  # type: ignore[misc]
        finally:
            worker.sampler = self.sampler.grammar = None
