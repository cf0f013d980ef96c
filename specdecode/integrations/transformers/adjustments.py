"""What the sampler applies itself, where it reads logits, in place of transformers' logits processors.

A processor is called for rows of one length at a time, and copies them. Of what a config asks for, these are adjustments:

    sequence_bias of single tokens                      a bias
    repetition_penalty                                  a penalty; transformers counts the prompt and new tokens alike
    suppress_tokens, bad_words_ids of single tokens     masks of all rows
    begin_suppress_tokens, min_length, min_new_tokens   masks of the rows after texts of some lengths
    forced_bos_token_id, forced_eos_token_id            likewise, of one token, whatever else was asked for

They take the place of the processors only if these are all that there is, and if the sampler's order, which is that of this
table, gives what that of the processors does. Rows of a draft model are given the same before a draft is drawn.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specdecode import Adjustments
from specdecode.eager.adjustments import AdjustedRows, RowIndex, words_of
from specdecode.integrations.transformers.requests import Batch, Request

ALWAYS = range(sys.maxsize)
FLOAT32 = torch.finfo(torch.float32)


class Rule(NamedTuple):
    """What may follow texts of some lengths."""

    lengths: range
    token_ids: tuple[int, ...]  # that are forbidden
    forces: bool = False  # the one token that follows instead, whatever the rules before this one say


RULES: dict[type, Callable[[Any], Rule]] = {
    SuppressTokensLogitsProcessor: lambda given: Rule(ALWAYS, ids(given.suppress_tokens)),
    SuppressTokensAtBeginLogitsProcessor: lambda given: Rule(
        range(given.begin_index, given.begin_index + 1), ids(given.begin_suppress_tokens)
    ),
    MinLengthLogitsProcessor: lambda given: Rule(range(given.min_length), ids(given.eos_token_id)),
    MinNewTokensLengthLogitsProcessor: lambda given: Rule(
        range(given.prompt_length_to_skip + given.min_new_tokens), ids(given.eos_token_id)
    ),
    ForcedBOSTokenLogitsProcessor: lambda given: Rule(range(1, 2), (given.bos_token_id,), forces=True),
    ForcedEOSTokenLogitsProcessor: lambda given: Rule(
        range(given.max_length - 1, given.max_length), ids(given.eos_token_id), forces=True
    ),
}
"""What processors that only forbid tokens, or force one, ask for."""


def ids(tokens: Tensor) -> tuple[int, ...]:
    return tuple(tokens.flatten().tolist())


class Settings(NamedTuple):
    """What the processors of a request ask for, in the sampler's order."""

    bias: dict[int, float]
    penalty: float | None
    rules: list[Rule]


def read_processors(processors: Iterable[Any], vocab_size: int) -> Settings | None:
    """Return what processors ask for, None unless all of it is adjustments, in an order that gives the same."""
    bias: dict[int, float] = {}
    penalty, rules = None, []
    for processor in processors:
        if type(processor) in RULES:
            rule = RULES[type(processor)](processor)
            inside = tuple(token for token in rule.token_ids if 0 <= token < vocab_size)
            if rule.forces and (len(rule.token_ids) != 1 or not inside):
                return None  # of several tokens, each has a logit of 0
            rules.append(rule._replace(token_ids=inside))
        elif type(processor) is RepetitionPenaltyLogitsProcessor:
            ignored = getattr(processor, "prompt_ignore_length", None)
            if penalty is not None or ignored is not None or not FLOAT32.tiny <= processor.penalty <= FLOAT32.max:
                return None
            penalty = processor.penalty
        elif type(processor) in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
            of_sequences = processor.sequence_bias
            if any(len(sequence) != 1 or sequence[0] >= vocab_size for sequence in of_sequences):
                return None
            of_tokens = {int(token): float(value) for (token,), value in of_sequences.items()}
            added = {token: value for token, value in of_tokens.items() if value != -math.inf}
            if any(map(math.isnan, added.values())) or (added and (bias or penalty is not None)):
                return None  # a bias after a penalty is not penalised
            bias |= added
            rules.append(Rule(ALWAYS, tuple(token for token in of_tokens if token not in added)))
        else:
            return None
    return Settings(bias, penalty, [rule for rule in rules if rule.token_ids])


class Adjuster:
    """Makes the adjustments of each step.

    Args:
        settings: what is asked for, by the length of the prompt, which bias and penalty do not depend on.
        vocab_size: how many tokens the target has.
        device: where rows are.
    """

    def __init__(self, settings: Mapping[int, Settings], vocab_size: int, device: torch.device) -> None:
        bias, self.penalty, _ = next(iter(settings.values()))
        self.bias_ids = torch.tensor([list(bias)], dtype=torch.int64, device=device)
        self.bias = torch.tensor([list(bias.values())], dtype=torch.float32, device=device)
        self.rules = {length: each.rules for length, each in settings.items()}
        self.vocab_size = vocab_size
        self.masks = torch.empty(0, dtype=torch.int32, device=device)  # [masks, words]: those that were needed so far
        self.index: dict[tuple[Rule, ...], int] = {}  # of the masks

    @classmethod
    def find(cls, lists: Mapping[int, Sequence[Any]], vocab_size: int, device: torch.device) -> Adjuster | None:
        """Return what takes the place of the processors for prompts of each length; None if they have to stay."""
        settings = {length: read_processors(processors, vocab_size) for length, processors in lists.items()}
        known = {length: each for length, each in settings.items() if each is not None}
        return cls(known, vocab_size, device) if len(known) == len(lists) and any(lists.values()) else None

    def __call__(self, rows: Tensor, tokens: Tensor, batch: Batch, num_drafts: int) -> tuple[Tensor, Adjustments]:
        """Return the rows, where each token that is forced has a finite logit, and what is to be added to them.

        Args:
            rows: [requests, rows, vocab] any float: the rows that follow `tokens`, those with one draft more, and so on.
            tokens: [requests, width] int64, right-aligned.
            batch: the requests.
            num_drafts: how many drafts of the step are among the tokens of each.
        """
        adjustments = Adjustments()
        if self.penalty is not None:
            counts = count_tokens(tokens, batch.lengths + num_drafts, self.vocab_size)
            adjustments = adjustments._replace(repetition_penalty=self.penalty, output_counts=counts)
        if self.bias.numel():
            bias_ids, bias = (each.expand(len(rows), -1) for each in (self.bias_ids, self.bias))
            adjustments = adjustments._replace(bias_ids=bias_ids, bias=bias)
        if any(self.rules.values()):
            of_rows = [
                [self.rules_after(request, num_drafts + i) for i in range(rows.shape[1])] for request in batch.requests
            ]
            rows = with_forced(rows, of_rows)
            index = torch.tensor([[self.place(rules) for rules in each] for each in of_rows], device=rows.device)
            adjustments = adjustments._replace(allowed_mask=self.masks[index])
        return rows, adjustments

    def adjusted(self, row: Tensor, tokens: Tensor, batch: Batch, num_drafts: int) -> Tensor:
        """Return the adjusted rows that follow these tokens, [requests, vocab], in float32 or float64."""
        rows, adjustments = self(row[:, None], tokens, batch, num_drafts)
        requests = torch.arange(len(row), device=row.device)
        index = RowIndex(requests, requests, torch.zeros_like(requests), requests)
        return AdjustedRows(rows[:, 0], adjustments, tokens[:, :0], index).gather()

    def rules_after(self, request: Request, num_drafts: int) -> tuple[Rule, ...]:
        """Return the rules of the row that follows a request's tokens and so many drafts."""
        return tuple(rule for rule in self.rules[request.prompt_length] if request.length + num_drafts in rule.lengths)

    def place(self, rules: tuple[Rule, ...]) -> int:
        """Return the place of their mask among the masks."""
        if rules not in self.index:
            allowed = torch.ones(self.vocab_size, dtype=torch.bool, device=self.masks.device)
            for rule in rules:
                if rule.forces:
                    allowed[:] = False
                allowed[list(rule.token_ids)] = rule.forces
            self.masks = torch.cat([self.masks, words_of(allowed[None])])
            self.index[rules] = len(self.index)
        return self.index[rules]


def with_forced(rows: Tensor, of_rows: list[list[tuple[Rule, ...]]]) -> Tensor:
    """Return rows in which tokens that are forced have a logit of 0: the model's own may be -inf or NaN."""
    index = [
        (request, i, rule.token_ids[0])
        for request, each in enumerate(of_rows)
        for i, rules in enumerate(each)
        for rule in rules
        if rule.forces
    ]
    if not index:
        return rows
    return rows.index_put(torch.tensor(index, device=rows.device).unbind(1), rows.new_zeros(()))


def count_tokens(tokens: Tensor, lengths: Tensor, vocab_size: int) -> Tensor:
    """Return how often each token is in each text, [requests, vocab] int32.

    Args:
        tokens: [requests, width] int64, right-aligned. Prompts may hold tokens that the target cannot emit.
        lengths: [requests] int64: how many of a row's last columns are its tokens.
        vocab_size: how many tokens the target can emit.
    """
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    counts_here = (columns >= (tokens.shape[1] - lengths)[:, None]) & (tokens < vocab_size)
    counts = torch.zeros(len(tokens), vocab_size, dtype=torch.int32, device=tokens.device)
    return counts.scatter_add_(1, tokens.masked_fill(~counts_here, 0), counts_here.to(torch.int32))
