"""Penalties, biases and masks of requests, which the sampler applies from vLLM's own state by slot.

vLLM keeps them in logits processors, and applies these to a float32 copy of a step's logits. Here they become
`specdecode.Adjustments`, without a copy: penalties, biases, and one mask for each row, for lists of allowed tokens,
minimum lengths, bad words, thinking budgets and grammars. Other processors need vLLM's copy.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from specdecode import Adjustments
from specdecode.adjustments import WORD
from specdecode.integrations.vllm.compat import unknown_attributes
from specdecode.integrations.vllm.grammars import StepGrammar
from specdecode.integrations.vllm.steps import StepInputs


class Known:
    """The logits processors of vLLM that are applied here.

    Args:
        penalties: its `PenaltiesState`.
        bias: its `LogitBiasState`.
        bad_words: its `BadWordsState`.
        thinking: its `ThinkingBudgetState`, which is not in vLLM's list of processors.
        vocab_size: number of tokens.
    """

    def __init__(self, penalties: Any, bias: Any, bad_words: Any, thinking: Any, *, vocab_size: int) -> None:
        self.penalties, self.bias, self.bad_words, self.thinking = penalties, bias, bad_words, thinking
        self.processors, self.vocab_size = (penalties, bias, bad_words), vocab_size
        self.added: Adjustments | None = None
        self.limits: Any = None
        self.mask_memory: Tensor | None = None

    def add_request(self, slot: int, params: Any) -> tuple[bool, bool, bool]:
        """Pass a request to all processors.

        Returns:
            Whether it has penalties or biases; whether its tokens are limited; whether it may keep stop tokens before its
            minimum length, if a grammar allows no other token.
        """
        self.added = self.limits = None
        bias = self.bias
        has_penalties = bool(self.penalties.add_request(slot, params))
        bias.add_request(slot, params)
        has_words = bool(self.bad_words.add_request(slot, params))
        has_budget = bool(self.thinking.add_request(slot, params))
        has_bias, has_list, has_stops, restores = (
            bool(each.np[slot] > 0)
            for each in (
                bias.num_logit_bias,
                bias.num_allowed_token_ids,
                bias.num_stop_token_ids,
                bias.restore_when_all_masked,
            )
        )
        return has_penalties or has_bias, has_list or has_stops or has_words or has_budget, restores

    def adjustments(self, allowed_mask: Tensor | None) -> Adjustments:
        """Return all penalties and biases by slot, with a mask if there is one.

        vLLM keeps small values in host memory: they are copied to the device, and copied again only after a new request.
        All are passed if any request of a step needs one, because each combination would need its own kernels.
        """
        if self.added is None:
            names = "repetition_penalty", "frequency_penalty", "presence_penalty"
            penalties = [getattr(self.penalties, name).gpu.clone() for name in names]
            most = max(1, int(self.bias.num_logit_bias.np.max()))
            ids, bias = self.bias.logit_bias_token_ids.gpu[:, :most], self.bias.logit_bias.gpu[:, :most]
            is_there = torch.arange(most, device=ids.device) < self.bias.num_logit_bias.gpu[:, None]
            ids = ids.masked_fill(~is_there, -1)  # the rest remains from earlier requests of the slot
            seen = self.penalties.prompt_bin_mask, self.penalties.output_bin_counts
            self.added = Adjustments._make([*penalties, *seen, ids, bias.clone(), None])
        return self.added._replace(allowed_mask=allowed_mask)

    def masks_of(self, num_rows: int, device: torch.device) -> Tensor:
        """Return memory for masks, [num_rows, words]; the next step reuses it, in the same stream."""
        if self.mask_memory is None or len(self.mask_memory) < num_rows:
            self.mask_memory = torch.empty(num_rows, -(-self.vocab_size // WORD), dtype=torch.int32, device=device)
        return self.mask_memory[:num_rows]

    def limited_tokens(self, step: StepInputs, grammar: StepGrammar | None = None) -> Tensor:
        """Return the masks of a step's rows, [num_rows, words]."""
        masking: Any = importlib.import_module("specdecode.integrations.vllm.masking")  # which needs Triton
        if self.limits is None:
            self.limits = self.limits_by_slot(masking)
        # Without rows vLLM only updates where requests last began and ended to think.
        self.thinking.apply(step.pos.new_empty((0, self.vocab_size), dtype=torch.float32), step)
        words = self.masks_of(len(step.pos), step.pos.device)
        masking.mask_rows(words, step, *self.limits, grammar, self.vocab_size)
        if grammar is not None:
            grammar.used()
        return words

    def limits_by_slot(self, masking: Any) -> tuple[Any, Any]:
        """Return the kernel's `Limits` and `Thinking`; no `Thinking` if budgets are switched off."""
        bias, words, thinking, states = self.bias, self.bad_words, self.thinking, self.bad_words.req_states
        budget = thinking.thinking_token_budget.gpu if thinking.enabled else None
        lists = bias.num_allowed_token_ids, bias.num_stop_token_ids, bias.min_lens, bias.restore_when_all_masked
        numbers = [each.gpu for each in (*lists, words.num_bad_words, states.prompt_len)]
        numbers.append(torch.full_like(numbers[0], -1) if budget is None else budget)
        tensors = bias.allowed_token_ids, bias.stop_token_ids, words.bad_word_token_ids, words.bad_word_offsets
        by_slot = [part for each in (*tensors, states.all_token_ids) for part in (each.gpu, each.gpu.stride(0))]
        limits = masking.Limits(torch.stack(numbers, dim=1), *by_slot, states.total_len.gpu)
        if budget is None:
            return limits, None
        names = "reasoning_start_token_ids", "natural_reasoning_end_token_ids", "reasoning_end_token_ids"
        parts = [part for name in names for part in (getattr(thinking, name), len(getattr(thinking, name)))]
        return limits, masking.Thinking(thinking.cached_last_start, thinking.cached_last_end, *parts)


def known_processors(sampler: Any) -> Known | None:
    """Return the known processors of a sampler, or None if one of them differs from the tested versions."""
    processors = getattr(sampler, "logits_processors", ())
    states: list[Any] = [getattr(sampler, "penalties_state", None)]
    for kind in ("LogitBiasState", "BadWordsState"):
        of_kind = [each for each in processors if type(each).__name__ == kind]
        states.append(of_kind[0] if len(of_kind) == 1 else None)
    states.append(getattr(sampler, "thinking_budget_state", None))
    if any(state is None for state in states):
        return None
    kinds = "PenaltiesState", "LogitBiasState", "BadWordsState", "ThinkingBudgetState"
    unknown = [name for state, kind in zip(states, kinds) for name in unknown_attributes(state, kind)]
    vocab_size = sampler.sampling_states.vocab_size
    is_whole = states[0].output_bin_counts.shape[1] == vocab_size
    return None if unknown or not is_whole else Known(*states, vocab_size=vocab_size)
