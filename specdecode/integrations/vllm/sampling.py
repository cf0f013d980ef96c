"""The sampler of vLLM's V2 model runner: what it notes of requests, and the tokens of steps without drafts."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from specdecode import RejectionSampler
from specdecode.integrations.vllm.adjusting import Known, StepRows, known_processors
from specdecode.integrations.vllm.compiling import compile_all
from specdecode.integrations.vllm.grammars import StepGrammar, apply_grammar
from specdecode.integrations.vllm.needs import (
    ADJUSTS,
    LOGPROBS,
    MASKS,
    SlotValues,
    adjusted,
    needs_in,
    needs_of,
    of_processed,
    requested,
    views_of,
    why_processed,
)

NO_NEED = SimpleNamespace(add_request=lambda request, params: False)
"""In place of states of vLLM whose work is done here: requests need no processing."""

NOTHING = (False, False, False)
"""What no processor that is known needs."""


class TokenSampling:
    """Mixed into vLLM's `Sampler`: it knows what each request needs, and draws by seed for `"strict"`.

    vLLM's sampler draws the tokens of steps in which no request has a draft. For `"strict"` they must have the noise of all
    other tokens: a request's text depends on its seed and not on which steps had drafts.
    """

    verifier: ClassVar[RejectionSampler]
    unknown: ClassVar[str | None] = None
    """Why all steps are left to vLLM: it may do what is not known here."""

    keeps_grammars: ClassVar[bool] = False
    """Whether vLLM's masks of grammars may be kept for a step."""

    copies: SlotValues | None = None
    grammar: StepGrammar | None = None
    """The masks of the step's grammars, where they were not applied to its logits at once."""

    # What vLLM's class has:
    apply_sampling_params: Callable[..., Tensor]
    logits_processors: list[Any]
    logprobs_mode: str
    needs_logits_processing: np.ndarray
    return_sampling_mask: bool
    sampling_states: Any
    thinking_budget_state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.other_processing = np.zeros_like(self.needs_logits_processing)
        self.applied, self.needs = np.zeros((2, len(self.needs_logits_processing)), dtype=np.uint8)
        config = kwargs.get("vllm_config", args[0] if args else None)
        self.shards_batches = bool(
            getattr(getattr(config, "parallel_config", None), "enable_batch_sharded_sampling", False)
        )

    @functools.cached_property
    def kinds(self) -> set[torch.dtype]:
        """Of logits whose kernels are compiled."""
        return set()

    @functools.cached_property
    def known(self) -> Known | None:
        """The processors of vLLM whose work is done here."""
        return known_processors(self)

    @functools.cached_property
    def reads_grammars(self) -> bool:
        """Whether masks of grammars are read where steps are verified here: vLLM counts NaN after it has applied them."""
        return self.keeps_grammars and self.known is not None and not getattr(self, "compute_nans", False)

    def takes(self, num_draft_tokens: int) -> bool:
        """Return whether a step of so many drafts is this package's, unless its requests need what vLLM does."""
        return self.unknown is None and (num_draft_tokens > 0 or self.verifier.method == "strict")

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Note what a request needs: vLLM's copy of logits, what is applied here, truncation, log-probabilities."""
        # vLLM keeps one flag for all: so first let its method see no need but of what is not known.
        known, states = self.known, self.sampling_states
        processors, thinking = getattr(self, "logits_processors", []), getattr(self, "thinking_budget_state", None)
        self.sampling_states = NO_NEED
        if known is not None:
            self.logits_processors = [each for each in processors if all(each is not one for one in known.processors)]
            self.thinking_budget_state = NO_NEED
        try:
            super().add_request(req_idx, sampling_params)  # type: ignore[misc]
        finally:
            self.sampling_states = states
            if known is not None:
                self.logits_processors, self.thinking_budget_state = processors, thinking
        adjusts, masks, restores = NOTHING if known is None else known.add_request(req_idx, sampling_params)
        others = self.needs_logits_processing[req_idx] | (restores and not self.reads_grammars)
        self.other_processing[req_idx] = others
        self.applied[req_idx] = ADJUSTS * adjusts | MASKS * masks
        needs_others = self.other_processing[req_idx] | adjusts | masks
        self.needs_logits_processing[req_idx] = needs_others | states.add_request(req_idx, sampling_params)
        self.needs[req_idx] = needs_of(self, np.array([req_idx]))[0]
        self.copies = None

    def slot_values(self) -> SlotValues:
        """Return what requests sample by, in memory of the device; copied again only after a request has come."""
        if self.copies is None:
            self.copies = SlotValues(*[values.clone() for values in views_of(self.sampling_states)])
        return self.copies

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
        if self.verifier.method != "strict" or self.unknown is not None:
            return super().sample(logits, *mappings, *tokens, return_logprobs)  # type: ignore[misc, no-any-return]
        needs, values = needs_in(self, idx_mapping_np), self.slot_values()
        if why_processed(self, needs & ~LOGPROBS | LOGPROBS * return_logprobs) is None:
            rows = StepRows(*mappings, pos, input_ids, expanded_local_pos)
            sampling = requested(values, needs) | adjusted(self, needs, rows)
        else:
            apply_grammar(self)
            logits = self.apply_sampling_params(logits, *mappings, *tokens)
            sampling = of_processed(values)
        call: dict[str, Any] = {
            "target_logits": logits,
            "draft_token_ids": input_ids,  # not looked at: each row is its request's last
            "row_starts": torch.arange(len(logits) + 1, device=logits.device),
            "num_draft_tokens": 0,
            "slots": expanded_idx_mapping,
            "seeds": values.seeds,
            "row_positions": pos,
        }
        if logits.dtype not in self.kinds:
            self.kinds.add(logits.dtype)
            compile_all(self.verifier, call, self)
        token_ids = self.verifier.packed(**call, **sampling).token_ids[:, 0]
        if return_logprobs:
            apply_grammar(self)
        return token_ids, logits
