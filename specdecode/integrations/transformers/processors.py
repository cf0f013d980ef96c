"""Logits processors: transformers' own, built from the generation config, then the user's.

A processor decides by the tokens before a position. So each row of a step is processed with its own prefix: the tokens so
far and the drafts before that row. Rows of the draft model are processed in the same way, and the output has the
distribution of the processed target.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from specdecode import RejectionSampler
from specdecode.eager.truncation import is_kept
from specdecode.integrations.transformers.requests import Batch
from specdecode.integrations.transformers.stops import Stops

REFUSED_PROCESSORS = {
    "AlternatingCodebooksLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
}
"""Processors with state, or with an argument per row of a fixed batch."""


class Processors:
    """The logits processors of a call.

    A request's processors see its own tokens, without padding. Lengths in the config that count the columns of a padded
    batch (`min_length`) count them here too.

    Args:
        target: the target model, whose method builds the processors of the config.
        config: the merged config.
        given: the user's processors, applied last; each replaces the config's processor of the same class.
        prompts: [batch, prompt] bool: the mask of tokens, False for padding.
        max_new_tokens: the most new tokens per request.
        stops: what ends a text.
        sampler: the sampler that verifies the processed rows.

    Raises:
        TypeError: `given` is not a list of functions.
        ValueError: a processor is not supported, or the config has a wrong value.
    """

    def __init__(
        self,
        target: Any,
        config: GenerationConfig,
        given: Sequence[Any] | None,
        prompts: Tensor,
        max_new_tokens: int,
        stops: Stops,
        sampler: RejectionSampler,
    ) -> None:
        self.given = check_processors(given)
        self.stops = stops
        self.sampler = sampler
        decay, stop_ids = config.exponential_decay_length_penalty, stops.stop_ids
        if decay is not None and not stop_ids.numel():
            raise ValueError(
                f"generation_config: exponential_decay_length_penalty = {decay} needs a stop token: pass eos_token_id"
            )
        builder: Any = target if hasattr(target, "_get_logits_processor") else Builder(target.config)
        self.lists: dict[int, LogitsProcessorList] = {}  # by the length of the prompt
        for length in set(prompts.sum(1).tolist()):
            own = copy.copy(config)
            own.do_sample = False  # the sampler does what transformers' warpers do
            own._eos_token_tensor = stop_ids if stop_ids.numel() else None
            own.max_length = length + max_new_tokens
            padding = prompts.shape[1] - length
            own.min_length = max(0, (own.min_length or 0) - padding) if own.min_new_tokens is None else 0
            self.lists[length] = builder._get_logits_processor(
                generation_config=own, input_ids_seq_length=length, logits_processor=self.given, device=target.device
            )

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return any(self.lists.values())

    def process_step(self, logits: Tensor, candidates: Tensor, batch: Batch, draft_ids: Tensor) -> Tensor:
        """Return the target's processed rows, [requests, drafts + 1, vocab].

        The user's processors, a grammar for one, may not know texts that a request cannot have. So they see a row only if
        each draft before it is a token that the target may emit there, and does not end the text.
        """
        if not self:
            return logits
        num_drafts = draft_ids.shape[1]
        logits, width = writable(logits), candidates.shape[1] - num_drafts
        used = torch.ones_like(batch.lengths, dtype=torch.bool)
        goes_on = (draft_ids >= 0) & ~self.stops(batch.tokens, batch.lengths, draft_ids) if self.given else None
        for i in range(num_drafts + 1):
            self.apply(logits[:, i], candidates[:, : width + i], batch, i, used)
            if goes_on is not None and i < num_drafts:
                used = used & goes_on[:, i] & self.is_possible(logits[:, i], draft_ids[:, i].clamp(min=0), batch)
        return logits

    def process_row(self, row: Tensor, tokens: Tensor, batch: Batch, num_drafts: int, used: Tensor) -> Tensor:
        """Return the draft model's processed rows, [requests, vocab]; takes the arguments of `apply`."""
        if self:
            row = writable(row)
            self.apply(row, tokens, batch, num_drafts, used)
        return row

    def apply(self, row: Tensor, tokens: Tensor, batch: Batch, num_drafts: int, used: Tensor) -> None:
        """Process the rows that follow `tokens`, in place.

        Args:
            row: [requests, vocab] float32 or float64.
            tokens: [requests, width] int64, right-aligned; every token is in the vocabulary.
            batch: the requests.
            num_drafts: how many drafts of the step are among the tokens of each.
            used: [requests] bool: the rows to process.
        """
        groups = defaultdict(list)  # texts of one length are processed in one call
        for i, (request, is_used) in enumerate(zip(batch.requests, used.tolist())):
            if is_used:
                groups[request.prompt_length, request.length + num_drafts].append(i)
        for (prompt_length, length), members in groups.items():
            index = slice(None) if len(members) == len(row) else torch.tensor(members, device=row.device)
            processors: Any = self.lists[prompt_length]
            scores = processors(tokens[index, tokens.shape[1] - length :], row[index])
            if not isinstance(scores, Tensor):
                raise TypeError(f"logits_processor: expected scores to be returned, got {type(scores).__name__}")
            if scores.shape != (len(members), row.shape[1]):
                expected, got = [len(members), row.shape[1]], list(scores.shape)
                raise ValueError(f"logits_processor: expected scores of shape {expected}, got {got}")
            row[index] = scores.to(row.dtype)

    def is_possible(self, row: Tensor, token_ids: Tensor, batch: Batch) -> Tensor:
        """Return whether each request may emit a token, given its processed row, [requests] bool."""
        if self.sampler.method == "synthetic":  # which accepts any draft
            return torch.ones_like(token_ids, dtype=torch.bool)
        drawn = self.sampler.draft(row, **batch.sampling._asdict(), seeds=batch.seeds)
        possible = row.gather(1, token_ids[:, None])[:, 0] > -torch.inf
        if drawn.cutoff is not None:
            possible &= is_kept(row, token_ids, drawn.cutoff)
        is_greedy = torch.as_tensor(batch.sampling.temperature, device=row.device) == 0
        return torch.where(is_greedy, token_ids == drawn.token_ids, possible)


def writable(logits: Tensor) -> Tensor:
    """Return a copy of logits, in float32 if they are of a shorter type."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)


class Builder(GenerationMixin):
    """Builds the processors for a target that is not a model of transformers, such as a wrapper."""

    def __init__(self, config: Any) -> None:
        self.config = config


def check_processors(given: Sequence[Any] | None) -> list[Any]:
    """Return the user's processors as a list."""
    processors = [] if given is None else given
    if not isinstance(processors, list | tuple) or not all(map(callable, processors)):
        got = type(given).__name__
        raise TypeError(f"logits_processor: expected a list of functions of (input_ids, scores) or None, got {got}")
    for processor in processors:
        if REFUSED_PROCESSORS & {base.__name__ for base in type(processor).__mro__}:
            raise ValueError(
                f"logits_processor: {type(processor).__name__} is not supported: expected processors that decide by their "
                "two arguments alone, row by row, because rejected drafts are undone and requests leave the batch"
            )
    return list(processors)
