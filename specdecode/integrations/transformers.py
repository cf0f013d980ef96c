"""Speculative generation with Hugging Face models: batches, caches that roll back, streaming.

One step drafts up to K tokens for every request, scores them all in one call of the target and lets the sampler decide.
The tokens of a batch are right-aligned in one tensor, and the caches hold the same columns:

    one step    . . a b c | x y z      three drafts each: the first request keeps x, then emits u;
                d e f g h | x y z      the second keeps all three, then emits v
    the next    . . . . a b c x u      both are right-aligned again, and the columns of the caches were moved
                d e f g h x y z v      in the same way: rejected columns are gone, no gaps are left to mask

So a request's columns are consecutive, whatever the other requests accept. Masks that count columns (sliding windows, ALiBi)
stay right. The caches are never longer than the longest request needs. For one request, or if all requests accept equally
many drafts, moving is only a crop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import takewhile
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from transformers.generation.streamers import BaseStreamer

from specdecode import AcceptanceStats, RejectionSampler, SamplerOutput, Sampling
from specdecode.checks import check_count, check_seeds, check_tensor, check_type, seed_each, shown
from specdecode.integrations.generation_config import (
    Processors,
    check_config,
    is_greedy,
    merged_config,
    merged_sampling,
)
from specdecode.sampler import Method
from specdecode.sampling import Truncation, check_temperature

__all__ = ["GenerationOutput", "PromptLookup", "Step", "TokenKind", "generate"]

POSITIONS_BY_DISTANCE = {"bloom", "mpt"}
"""Model types that take no position_ids and need none: only distances between columns matter (ALiBi)."""

CACHED_BY_COLUMN = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types, as model configs name them, that keep keys and values per token."""

if hasattr(DynamicCache, "is_recording_past"):  # before, caches of short convolutions could not keep all columns
    CACHED_BY_COLUMN.add("conv")


class TokenKind(IntEnum):
    """What a generated token is."""

    PLAIN = 0
    """Sampled from the target where nothing was drafted."""
    ACCEPTED = 1
    """An accepted draft."""
    RECOVERED = 2
    """Emitted in place of a rejected draft."""
    BONUS = 3
    """Emitted after drafts that were all accepted."""


class Step(NamedTuple):
    """What one step emitted for one request: the argument of `on_step`."""

    request: int
    """Row of `sequences`: the row of `input_ids`, times `num_return_sequences`, plus which of these."""

    token_ids: list[int]
    """New tokens, a stop token included: accepted drafts, then at most one other."""

    kinds: list[TokenKind]
    """What each of them is."""

    draft_token_ids: list[int]
    """All drafts, accepted or rejected."""


@dataclass(frozen=True)
class GenerationOutput:
    """What `generate` returns, with tensors on the device of `input_ids`."""

    sequences: Tensor
    """[batch, prompt + most new tokens] int64: the prompts as given, new tokens, then padding: the config's pad token, else
    the first stop token, else 0. With `num_return_sequences`, each prompt has as many consecutive rows, here and below."""

    num_generated: Tensor
    """[batch] int64: new tokens, a stop token included."""

    token_kinds: Tensor
    """[batch, most new tokens] int8: the `TokenKind` of each new token, -1 in the padding."""

    stats: AcceptanceStats | None
    """Acceptance as the sampler saw it, None without a drafter. Not counted, because not verified: requests that have ended,
    and drafts past the length limit or after a drafted stop token. The acceptance length counts one token after every
    verification, even after an accepted stop token, where that token is discarded."""

    target_calls: int
    """Forward passes of the target."""

    draft_calls: int
    """Forward passes of the draft model; 0 where there is none."""


@dataclass(frozen=True)
class PromptLookup:
    """Draft what followed the last tokens when they occurred before: a drafter without a model.

    Of all suffixes of `min_ngram` to `max_ngram` tokens that occurred before, the longest is used, and its latest
    occurrence. A continuation that reaches the end of the sequence goes on with its own first tokens, so loops are drafted
    at full length.

    Args:
        max_ngram: the longest suffix to look for, at least 1.
        min_ngram: the shortest suffix to look for, from 1 to `max_ngram`. With 1 a single repeated token is enough to draft.
            From 2 on fewer steps have drafts, and more of these are accepted.

    Raises:
        TypeError: an argument is not an int.
        ValueError: `max_ngram` or `min_ngram` is less than 1, or `min_ngram` is more than `max_ngram`.

    Example:
        >>> import torch
        >>> from specdecode.integrations.transformers import PromptLookup
        >>> tokens = torch.tensor([[5, 6, 7, 8, 5, 6], [0, 0, 1, 2, 3, 4]])
        >>> PromptLookup().propose(tokens, lengths=torch.tensor([6, 4]), num_draft_tokens=5)
        tensor([[ 7,  8,  5,  6,  7],
                [-1, -1, -1, -1, -1]])
        >>> PromptLookup(min_ngram=3).propose(tokens, lengths=torch.tensor([6, 4]), num_draft_tokens=5)[0]
        tensor([-1, -1, -1, -1, -1])

    Source: Saxena, prompt lookup decoding (2023).
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        check_count("max_ngram", self.max_ngram)
        if check_count("min_ngram", self.min_ngram) > self.max_ngram:
            raise ValueError(f"min_ngram: expected at most max_ngram = {self.max_ngram}, got {self.min_ngram}")

    def propose(self, token_ids: Tensor, lengths: Tensor, num_draft_tokens: int) -> Tensor:
        """Return the drafts of each row.

        Args:
            token_ids: [batch, width] int64, right-aligned.
            lengths: [batch] int64: how many of a row's last columns are its tokens.
            num_draft_tokens: K.

        Returns:
            [batch, K] int64: drafts, or a row of -1 where nothing was found.
        """
        width = token_ids.shape[1]
        columns = torch.arange(width, device=token_ids.device)
        source = torch.full_like(lengths, -1)  # the column after the best occurrence
        for size in range(self.min_ngram, min(self.max_ngram, width - 1) + 1):  # a longer match replaces a shorter one
            windows = token_ids[:, :-1].unfold(1, size, 1)  # [batch, width - size, size]
            starts = columns[: width - size]
            matches = (windows == token_ids[:, None, -size:]).all(-1) & (starts >= (width - lengths)[:, None])
            latest = torch.where(matches, starts, -1).amax(1)
            source = torch.where(latest >= 0, latest + size, source)
        offsets = torch.arange(num_draft_tokens, device=token_ids.device) % (width - source)[:, None]
        drafts = token_ids.gather(1, (source[:, None] + offsets).clamp(min=0))
        return torch.where(source[:, None] >= 0, drafts, -1)


@torch.no_grad()
def generate(
    target: Any,
    draft: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    method: Method | RejectionSampler = "probabilistic",
    num_draft_tokens: int = 4,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    temperature: float | Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seeds: int | Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    on_step: Callable[[Step], object] | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Sequence[Callable[[Tensor, Tensor], Tensor]] | None = None,
    num_return_sequences: int | None = None,
    streamer: BaseStreamer | None = None,
    accept_stop_tokens: bool = True,
) -> GenerationOutput:
    """Generate tokens with the target model's distribution, in fewer calls of the target than tokens.

    A request's tokens depend on its prompt, temperature, top_k, top_p, min_p and seed, up to rounding in the models: not on
    the rest of the batch, nor on padding. With `method="strict"` they do not depend on the drafter either, and equal those
    of `draft=None`. Temperature 0 is greedy decoding. The rows of the draft model are processed and truncated as those of
    the target are.

    The generation config decides what no argument says. Its logits processors (such as those of `repetition_penalty`,
    `no_repeat_ngram_size`, `bad_words_ids`, `suppress_tokens`, `sequence_bias`, `min_new_tokens` and `forced_eos_token_id`)
    are applied to each row with the tokens before that row, drafts included. What cannot be honoured is refused by name.

    Both models must be in evaluation mode: call `.eval()`. In training mode dropout would change their distributions.

    Args:
        target: Hugging Face causal language model that caches keys and values only; sliding windows are fine.
        draft: such a model with the target's tokenizer, a `PromptLookup`, or None to sample token by token. Vocabulary
            sizes may differ by 1 %, because one tokenizer is padded to several sizes.
        input_ids: [batch, prompt] int64, padded on the left.
        attention_mask: [batch, prompt] bool, int32 or int64, 0 = padding; None = no padding.
        method: a verification method, or a sampler, such as a synthetic one with its schedule.
        num_draft_tokens: K, the most drafts per step and request, at least 1. Near the end there are fewer.
        max_new_tokens: the most new tokens per request, at least 1. Give this or `max_length`; without either, the config's
            `max_new_tokens` or else its `max_length` holds.
        max_length: the most columns of `sequences`, prompt and padding included, as in transformers.
        temperature: float or [batch]; 0 = greedy. None = 0 if the config says `do_sample=False`, else the config's
            temperature, else 1.
        top_k: as for [`RejectionSampler`][specdecode.RejectionSampler.__call__]: int or [batch] integers; 0 = all tokens,
            None = as the config says, else all tokens.
        top_p: likewise: float or [batch]; 1 = all tokens, None as for `top_k`.
        min_p: likewise: float or [batch]; 0 = all tokens, None as for `top_k`.
        seeds: [batch] int64, or one int s meaning s, s + 1, ...; None = drawn from torch's default generator.
        eos_token_id: stop token or tokens; None = those of the config, [] = none.
        on_step: called with a `Step` for every request and step, as soon as its tokens are known.
        generation_config: what to do where no argument says it. The target's own `generation_config` fills in the fields
            that this one leaves out (None), and is used alone by default.
        logits_processor: functions of (input_ids, scores), such as a `LogitsProcessorList`, applied after those of the
            config. They are given [rows, length] int64 tokens without padding and [rows, vocab] scores, and return scores
            of the same shape. They must decide by these alone, row by row: which rows come together is not defined.
        num_return_sequences: how often each prompt is continued, each time with a seed of its own: `seeds` is then
            [batch * num_return_sequences] or an int, and a [batch] tensor for another argument holds for all continuations
            of a prompt. None = as the config says, else 1.
        streamer: such as a `TextStreamer`, for one request: given the prompt, then each new token, as by transformers. See
            `on_step` for several.
        accept_stop_tokens: False = end a request's drafts before a drafted stop token. Only for a synthetic sampler, which
            would accept it at the scheduled rate, so that texts end earlier than the target's. A text then ends where the
            target itself emits a stop token.

    Returns:
        The sequences, what kind of token each new token is, and acceptance statistics.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument is out of range or does not fit the others, the config asks for what is not supported, a
            model is in training mode or has state that cannot be rolled back, or all logits of the target in a row are NaN
            or -inf.

    Example:
        >>> import torch
        >>> from specdecode.integrations.transformers import generate
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2)
        >>> target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval()
        >>> draft = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).eval()
        >>> prompt = torch.tensor([[1, 5, 9]])
        >>> options = dict(max_new_tokens=8, seeds=0, eos_token_id=[])
        >>> speculative = generate(target, draft, prompt, method="strict", **options)
        >>> plain = generate(target, None, prompt, **options)
        >>> torch.equal(speculative.sequences, plain.sequences)
        True
    """
    sampler = method if isinstance(method, RejectionSampler) else RejectionSampler(method)
    check_count("num_draft_tokens", num_draft_tokens)
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step: expected a function of a Step, got {type(on_step).__name__}")
    if not accept_stop_tokens and sampler.method != "synthetic":
        raise ValueError(f"accept_stop_tokens: False is only for method 'synthetic', got method {sampler.method!r}")
    target_model = _CachedModel("target", target)
    config = merged_config(target, generation_config)
    device, vocab_size = target.device, target_model.vocab_size
    drafter = draft if draft is None or isinstance(draft, PromptLookup) else _CachedModel("draft", draft)
    models = [target_model, *([drafter] if isinstance(drafter, _CachedModel) else [])]

    prompts = _check_prompts(input_ids, attention_mask, vocab_size)
    max_new_tokens = _check_max_new_tokens(max_new_tokens, max_length, config, input_ids.shape[1])
    lengths = prompts.sum(1).tolist()
    for model in models:
        model.check_lengths(min(lengths), max(lengths) + max_new_tokens)
        model.check_vocab_size(vocab_size)

    sampling = merged_sampling(config, Sampling(temperature, top_k, top_p, min_p))  # type: ignore[arg-type]
    check_config(config, sampling)
    copies = _check_num_return_sequences(num_return_sequences, config, sampling)
    repeat = partial(torch.repeat_interleave, repeats=copies, dim=0)
    sampling = _map_tensors(repeat, _check_sampling(sampling, len(input_ids), vocab_size, device))
    input_ids, prompts = repeat(input_ids), repeat(prompts)
    seeds = seed_each(check_seeds(_on(device, seeds), len(input_ids), device), len(input_ids), device)
    stop_ids = _stop_ids(config, eos_token_id, vocab_size)
    run = _Run(
        target=target_model,
        drafter=drafter,
        sampler=sampler,
        num_draft_tokens=num_draft_tokens,
        stop_ids=stop_ids,
        accept_stop_tokens=accept_stop_tokens,
        processors=Processors(target, config, logits_processor, prompts, max_new_tokens, stop_ids, device),
        stats=None if draft is None else AcceptanceStats(num_draft_tokens, device=device),
        on_step=_streaming(streamer, input_ids, on_step),
    )
    requests = [_Request(row, length, length + max_new_tokens) for row, length in enumerate(prompts.sum(1).tolist())]
    run.decode_all(requests, input_ids.masked_fill(~prompts, 0).to(device), sampling, seeds)
    if streamer is not None:
        streamer.end()  # type: ignore[no-untyped-call]
    return run.output(input_ids, requests, _pad_id(config, stop_ids))


class _Drafts(NamedTuple):
    token_ids: Tensor  # [requests, drafts] int64, -1 = none
    logits: Tensor | None = None  # [requests, drafts, vocab]; None = a deterministic drafter, or not needed
    logsumexp: Tensor | None = None  # [requests, drafts] float32
    cutoff: Tensor | None = None  # [requests, drafts] int64; None = rows that are not truncated


def _look_up(lookup: PromptLookup | None, tokens: Tensor, lengths: Tensor, num_draft_tokens: int) -> _Drafts:
    """Draft by prompt lookup; without it, or where nothing is found for any request, return no drafts."""
    if lookup is None:
        return _Drafts(tokens[:, :0])
    found = lookup.propose(tokens, lengths, num_draft_tokens)
    return _Drafts(found if (found >= 0).any() else tokens[:, :0])


@dataclass
class _Run:
    """What stays the same from step to step, for all requests."""

    target: _CachedModel
    drafter: _CachedModel | PromptLookup | None
    sampler: RejectionSampler
    num_draft_tokens: int
    stop_ids: list[int]
    accept_stop_tokens: bool
    processors: Processors
    stats: AcceptanceStats | None
    on_step: Callable[[Step], object] | None

    def decode_all(self, requests: list[_Request], tokens: Tensor, sampling: Sampling, seeds: Tensor) -> None:
        """Generate the tokens of all requests: at once, or one by one if a model would count padding."""
        rows = range(len(requests))
        counts_padding = any(getattr(model, "counts_padding", False) for model in (self.target, self.drafter))
        for group in [[row] for row in rows] if counts_padding else [list(rows)]:
            select = partial(torch.index_select, dim=0, index=torch.tensor(group, device=tokens.device))
            members = [requests[row] for row in group]
            self.decode(members, select(tokens), _map_tensors(select, sampling), select(seeds))

    def output(self, input_ids: Tensor, requests: list[_Request], pad_id: int) -> GenerationOutput:
        """Return what was generated."""
        device = input_ids.device
        generated = _padded([request.token_ids for request in requests], pad_id, torch.int64)
        return GenerationOutput(
            sequences=torch.cat([input_ids, generated.to(device)], dim=1),
            num_generated=torch.tensor([len(request.token_ids) for request in requests], device=device),
            token_kinds=_padded([request.kinds for request in requests], -1, torch.int8).to(device),
            stats=self.stats,
            target_calls=self.target.calls,
            draft_calls=self.drafter.calls if isinstance(self.drafter, _CachedModel) else 0,
        )

    def decode(self, requests: list[_Request], tokens: Tensor, sampling: Sampling, seeds: Tensor) -> None:
        """Generate the tokens of these requests, with empty caches at first."""
        self.target.clear()
        if isinstance(self.drafter, _CachedModel):
            self.drafter.clear()
        live, tokens = requests, tokens[:, -max(request.length for request in requests) :]
        while live:
            before = [request.length for request in live]
            lengths = torch.tensor(before, device=tokens.device)
            # Each request drafts at most one token less than its own limit allows, because a token follows the drafts. What
            # a request emits must not depend on the limits of the others.
            most = [min(self.num_draft_tokens, request.limit - request.length - 1) for request in live]
            drafts = self.draft(live, tokens, lengths, max(most), sampling, seeds)
            allowed = torch.tensor(most, device=tokens.device)
            draft_ids = _cut(drafts.token_ids, allowed, self.stop_ids, self.accept_stop_tokens)
            output = self.verify(live, tokens, lengths, drafts, draft_ids, sampling, seeds)
            for step in _advance(live, output, draft_ids, self.stop_ids):
                if self.on_step is not None:
                    self.on_step(step)

            rows = [i for i, request in enumerate(live) if not request.finished]
            if not rows:
                break
            live = [live[i] for i in rows]
            alignment = _Alignment(rows, before, [request.length for request in live], tokens.shape[1], tokens.device)
            tokens = alignment(torch.cat([tokens, output.token_ids], dim=1), alignment.width, dim=1)
            seeds, sampling = alignment.select(seeds), _map_tensors(alignment.select, sampling)
            self.target.realign(alignment)
            if isinstance(self.drafter, _CachedModel):
                self.drafter.realign(alignment)

    def verify(
        self,
        live: list[_Request],
        tokens: Tensor,
        lengths: Tensor,
        drafts: _Drafts,
        draft_ids: Tensor,
        sampling: Sampling,
        seeds: Tensor,
    ) -> SamplerOutput:
        """Score all drafts with the target, and let the sampler decide."""
        num_drafts = draft_ids.shape[1]
        candidates = torch.cat([tokens, drafts.token_ids.clamp(min=0)], dim=1)
        logits = self.target.logits(candidates, lengths + num_drafts, keep=num_drafts + 1)
        output = self.sampler(
            self.process(logits, live, candidates),
            draft_ids,
            drafts.logits,
            **sampling._asdict(),
            seeds=seeds,
            positions=lengths,
            draft_logsumexp=drafts.logsumexp,
            draft_cutoff=drafts.cutoff,
        )
        if self.stats is not None:
            self.stats.update(output)
        return output

    def draft(
        self,
        live: list[_Request],
        tokens: Tensor,
        lengths: Tensor,
        num_draft_tokens: int,
        sampling: Sampling,
        seeds: Tensor,
    ) -> _Drafts:
        """Draft with the draft model, token by token, or by prompt lookup; without either, return no drafts."""
        if not isinstance(self.drafter, _CachedModel):
            return _look_up(self.drafter, tokens, lengths, num_draft_tokens)
        width, logits, drawn = tokens.shape[1], [], []
        for i in range(num_draft_tokens):
            row = self.drafter.logits(tokens, lengths + i, keep=1)[:, 0]
            # Padded or cut to the target's vocabulary, then processed and truncated, as verification will do with the same
            # row. A token that the draft model lacks has logit -inf: it is never drafted.
            missing = self.target.vocab_size - row.shape[-1]
            row = F.pad(row, (0, missing), value=-torch.inf) if missing > 0 else row[:, : self.target.vocab_size]
            row = self.process(row[:, None], live, tokens, num_drafts=i)[:, 0]
            drawn.append(self.sampler.draft(row, **sampling._asdict(), seeds=seeds, positions=lengths + i, offset=i))
            tokens = torch.cat([tokens, drawn[-1].token_ids[:, None]], dim=1)
            logits.append(row)
        if not logits or self.sampler.method == "strict":  # which does not use them
            return _Drafts(tokens[:, width:])
        logsumexp = torch.stack([step.logsumexp for step in drawn], dim=1)
        cutoffs = [step.cutoff for step in drawn if step.cutoff is not None]
        cutoff = torch.stack(cutoffs, dim=1) if cutoffs else None
        return _Drafts(tokens[:, width:], torch.stack(logits, dim=1), logsumexp, cutoff)

    def process(self, logits: Tensor, live: list[_Request], tokens: Tensor, num_drafts: int = 0) -> Tensor:
        """Apply the logits processors to rows, the first of which follows `num_drafts` drafts of each request."""
        prompt_lengths = [request.prompt_length for request in live]
        return self.processors(logits, tokens, prompt_lengths, [request.length + num_drafts for request in live])


def _advance(requests: list[_Request], output: SamplerOutput, draft_ids: Tensor, stop_ids: list[int]) -> Iterator[Step]:
    """Append what a step emitted to each request, and yield each request's step. This waits for the device."""
    num_drafts = draft_ids.shape[1]
    columns = torch.cat([output.invalid[:, None], output.token_ids, draft_ids], dim=1)
    for request, (invalid, *ids) in zip(requests, columns.tolist()):
        if invalid:
            raise ValueError(
                f"target: expected finite logits, got only NaN or -inf for request {request.row}, logits processors included"
            )
        yield request.advance(ids[: num_drafts + 1], ids[num_drafts + 1 :], stop_ids)


def _cut(draft_ids: Tensor, allowed: Tensor, stop_ids: list[int], with_stop: bool) -> Tensor:
    """End each request's drafts (with -1) at the number allowed, and after a stop token or before it."""
    columns = torch.arange(draft_ids.shape[1], device=draft_ids.device)
    stops = torch.isin(draft_ids, torch.tensor(stop_ids, dtype=torch.int64, device=draft_ids.device))
    stopped = stops.cumsum(1) > (stops if with_stop else 0)
    return draft_ids.masked_fill(stopped | (columns >= allowed[:, None]), -1)


@dataclass
class _Request:
    """The state of one row of `input_ids`. It leaves the batch when it is finished."""

    row: int
    length: int  # tokens so far, padding not counted
    limit: int  # the most it may have
    token_ids: list[int] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    finished: bool = False
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = self.length

    def advance(self, token_ids: list[int], draft_ids: list[int], stop_ids: list[int]) -> Step:
        """Append what a step emitted, up to a stop token."""
        emitted = list(takewhile(lambda token: token >= 0, token_ids))
        drafted = list(takewhile(lambda token: token >= 0, draft_ids))
        num_accepted = len(emitted) - 1
        last = TokenKind.RECOVERED if num_accepted < len(drafted) else TokenKind.BONUS if drafted else TokenKind.PLAIN
        end = next((i + 1 for i, token in enumerate(emitted) if token in stop_ids), None)
        step = Step(self.row, emitted[:end], [*[TokenKind.ACCEPTED] * num_accepted, last][:end], drafted)
        self.token_ids += step.token_ids
        self.kinds += step.kinds
        self.length += len(step.token_ids)
        self.finished = end is not None or self.length >= self.limit
        return step


class _Alignment:
    """Which columns the next step keeps: those of the rows that are not finished, right-aligned again.

    A row's padding on the left changes from old_width - before to width - after columns. So its new column j is column
    j + (old_width - before) - (width - after) of the old row, in the tokens and in every cache.
    """

    def __init__(
        self, rows: list[int], before: list[int], after: list[int], old_width: int, device: torch.device
    ) -> None:
        self.width = max(after)
        shifts = [(old_width - before[row]) - (self.width - length) for row, length in zip(rows, after)]
        self.max_shift = max(shifts)
        self.is_crop = min(shifts) == self.max_shift
        self.rows = None if len(rows) == len(before) else torch.tensor(rows, device=device)
        columns = torch.arange(self.width, device=device) + torch.tensor(shifts, device=device)[:, None]
        self.columns = columns.clamp(min=0)  # padding may hold any column
        self.is_new_padding = columns < 0

    def select(self, values: Tensor) -> Tensor:
        """Return the rows of requests that are not finished."""
        return values if self.rows is None else values[self.rows.to(values.device)]

    def __call__(self, values: Tensor, num_columns: int, dim: int) -> Tensor:
        """Return the first `num_columns` new columns. `dim` is the dimension of columns, 0 that of requests."""
        values = self.select(values)
        if self.is_crop:
            return values.narrow(dim, self.max_shift, num_columns)
        columns = self.columns[:, :num_columns].to(values.device)
        shape = [1] * values.ndim
        shape[0], shape[dim] = columns.shape
        return values.take_along_dim(columns.view(shape), dim)


def _map_tensors(function: Callable[[Tensor], Tensor], sampling: Sampling) -> Sampling:
    return Sampling._make(function(value) if isinstance(value, Tensor) else value for value in sampling)


class _CachedModel:
    """A model with its cache: the keys and values of the columns that it was given so far."""

    def __init__(self, name: str, model: Any) -> None:
        config: Any = getattr(model, "config", None)
        if not callable(model) or not hasattr(config, "get_text_config"):
            raise TypeError(f"{name}: expected a Hugging Face causal language model, got {type(model).__name__}")
        text_config = config.get_text_config()
        self.layer_types = list(getattr(text_config, "layer_types", None) or ())
        others = set(self.layer_types) - CACHED_BY_COLUMN
        if config.is_encoder_decoder or getattr(model, "_is_stateful", False) or others:
            layers = f" with layers of type {', '.join(sorted(others))}" if others else ""
            raise ValueError(
                f"{name}: expected a decoder that caches only keys and values, so that rejected drafts can be removed, "
                f"got {type(model).__name__}{layers}"
            )
        if "conv" in self.layer_types and getattr(text_config, "conv_bias", False):
            raise ValueError(
                f"{name}: expected convolutions without a bias, got {type(model).__name__} with conv_bias=True, whose "
                "padding is not zero to them"
            )
        if _attends_ahead(model, text_config):
            raise ValueError(
                f"{name}: expected a causal model, got {type(model).__name__} that attends in both directions: set "
                "is_decoder=True in its config if it was trained as a decoder"
            )
        if getattr(model, "training", False):
            raise ValueError(
                f"{name}: expected a model in evaluation mode, got {type(model).__name__} in training mode, where dropout "
                "changes its distribution: call .eval() on it"
            )
        if getattr(text_config, "use_learned_position_embeddings", True) is False:
            raise ValueError(
                f"{name}: expected a model whose positions are those of its columns, got {type(model).__name__} with "
                "use_learned_position_embeddings=False, where they depend on which tokens equal the padding token"
            )
        self.name = name
        self.model = model
        self.vocab_size: int = text_config.vocab_size
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self.rotary_switch = _rotary_switch(text_config)
        self.last_position = 0  # that a token can have: check_lengths sets it
        self.calls = 0
        self.clear()
        adapted = model.get_base_model() if hasattr(model, "get_base_model") else model  # by a PEFT adapter
        self.parameters = inspect.signature(adapted.forward).parameters
        # Without position_ids a model counts columns from the left, padding included.
        self.counts_padding = {"input_ids", "position_ids"} & set(self.parameters) == {
            "input_ids"
        } and text_config.model_type not in POSITIONS_BY_DISTANCE
        self.takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values())

    def logits(self, tokens: Tensor, lengths: Tensor, keep: int) -> Tensor:
        """Return the logits of the last `keep` columns. The model is given the columns that its cache lacks.

        Args:
            tokens: [requests, width] int64, right-aligned.
            lengths: [requests] int64: how many of a row's last columns are its tokens.
            keep: how many columns' logits to return.

        Returns:
            [requests, keep, vocab] any float.
        """
        width, cached, device = tokens.shape[1], self.cache.get_seq_length(), self.model.device
        positions = torch.arange(width, device=tokens.device) - (width - lengths)[:, None]
        # Columns past a request's own drafts can lie beyond its last position; their logits are not used.
        position_ids = positions[:, cached:].clamp(0, self.last_position)
        options = {"position_ids": position_ids.to(device), "logits_to_keep": keep}
        output = self.model(
            # A draft model may lack tokens of the target: another token in their place costs only acceptance.
            input_ids=tokens[:, cached:].clamp(max=self.vocab_size - 1).to(device),
            attention_mask=(positions >= 0).long().to(device),
            past_key_values=self.cache,
            use_cache=True,
            **{name: value for name, value in options.items() if self.takes_any or name in self.parameters},
        )
        self.calls += 1
        if {layer.get_seq_length() for layer in self._layers()} != {width}:
            raise ValueError(f"{self.name}: expected a model that fills its cache, got {type(self.model).__name__}")
        logits: Tensor = output.logits
        return logits[:, -keep:].to(tokens.device)

    def realign(self, alignment: _Alignment) -> None:
        """Move the cached columns to their places in the next step, without those of rejected drafts.

        The model was not given the next step's last token yet. A draft model was not given the last draft either: if a
        request accepted all drafts, the next call gives that column to the model, for every request.
        """
        num_columns = min(alignment.width - 1, self.cache.get_seq_length() - alignment.max_shift)
        for layer in self._layers():
            layer.keys = alignment(layer.keys, num_columns, dim=-2)
            layer.values = alignment(layer.values, num_columns, dim=-2)
        for layer in self._convolutions():
            columns = alignment(layer.conv_states[0], num_columns, dim=-1)
            padding = alignment.is_new_padding[:, None, :num_columns].to(columns.device)
            layer.conv_states[0] = columns.masked_fill(padding, 0)  # unlike attention, a convolution sees padding

    def clear(self) -> None:
        """Forget all columns."""
        # Made without the config: sliding-window layers then keep all columns, so that rejected ones can be removed.
        self.cache = DynamicCache()
        if "conv" in self.layer_types:
            kinds: dict[bool, Any] = {True: LinearAttentionLayer, False: DynamicLayer}
            self.cache.layers = [kinds[layer_type == "conv"]() for layer_type in self.layer_types]
            for layer in self._convolutions():
                layer.activate_past_recording()  # it keeps all columns too

    def check_lengths(self, shortest_prompt: int, longest: int) -> None:
        """Refuse requests that are too long, given the shortest prompt and the most tokens of any request."""
        if self.max_positions is not None and longest > self.max_positions:
            raise ValueError(
                f"max_new_tokens: the {self.name} model has {self.max_positions} positions, but the longest request could "
                f"have {longest} tokens"
            )
        self.last_position = max(0, longest - 2)  # the last token is not given to the model
        if self.rotary_switch is not None and shortest_prompt <= self.rotary_switch <= self.last_position:
            raise ValueError(
                f"max_new_tokens: the rotary factors of the {self.name} model (longrope) change beyond "
                f"{self.rotary_switch} tokens, cached keys too: expected all requests to stay within, at most "
                f"{self.rotary_switch + 1} tokens with the last new one, or all prompts to be longer, got a prompt of "
                f"{shortest_prompt} tokens and a request of up to {longest}"
            )

    def check_vocab_size(self, target_vocab_size: int) -> None:
        if abs(self.vocab_size - target_vocab_size) > 0.01 * target_vocab_size:
            raise ValueError(
                f"{self.name}: expected a model with the target's tokenizer, whose vocabulary is within 1 % of the target's "
                f"{target_vocab_size} tokens, got {self.vocab_size} tokens"
            )

    def _layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if getattr(layer, "is_initialized", False)]

    def _convolutions(self) -> list[Any]:
        return [layer for layer, kind in zip(self.cache.layers, self.layer_types) if kind == "conv"]


def _attends_ahead(model: Any, text_config: Any) -> bool:
    """Return whether tokens attend to later ones, as in BERT without is_decoder."""
    if getattr(text_config, "use_bidirectional_attention", None) in (True, "all"):
        return True
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    encodes = any(getattr(module, "is_decoder", None) is False for module in modules)
    return encodes and not any(getattr(module, "is_causal", False) is True for module in modules)


def _rotary_switch(text_config: Any) -> int | None:
    """Return the number of tokens beyond which rotary factors change, None if they do not."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    own = getattr(text_config, "original_max_position_embeddings", None)
    switches = [
        rope.get("original_max_position_embeddings") or own
        for rope in [parameters, *per_layer_type]
        if rope.get("rope_type") == "longrope"
    ]
    return min((switch for switch in switches if switch is not None), default=None)


def _check_max_new_tokens(
    max_new_tokens: int | None, max_length: int | None, config: GenerationConfig, prompt_width: int
) -> int:
    """Return the most new tokens: what an argument says, else the config, whose max_new_tokens comes first."""
    if max_new_tokens is None and max_length is None:
        max_new_tokens = config.max_new_tokens
        max_length = config.max_length if max_new_tokens is None else None
    if max_new_tokens is not None and max_length is None:
        return check_count("max_new_tokens", max_new_tokens)
    if max_length is None or max_new_tokens is not None:
        raise ValueError(
            f"max_new_tokens: expected exactly one of it and max_length, got {max_new_tokens} and {max_length}"
        )
    if check_count("max_length", max_length) <= prompt_width:
        raise ValueError(f"max_length: expected more than the {prompt_width} columns of input_ids, got {max_length}")
    return max_length - prompt_width


def _check_num_return_sequences(given: int | None, config: GenerationConfig, sampling: Sampling) -> int:
    copies = given if given is not None else config.num_return_sequences
    copies = 1 if copies is None else check_count("num_return_sequences", copies)
    if copies > 1 and is_greedy(sampling):
        raise ValueError(
            f"num_return_sequences: expected 1 with greedy decoding, where all would be the same, got {copies}: pass a "
            "temperature, or do_sample=True in generation_config"
        )
    return copies


def _streaming(
    streamer: BaseStreamer | None, input_ids: Tensor, on_step: Callable[[Step], object] | None
) -> Callable[[Step], object] | None:
    """Give the prompt to the streamer, and return an `on_step` that gives it the new tokens too."""
    if streamer is None:
        return on_step
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer: expected one with the methods put and end, got {type(streamer).__name__}")
    if len(input_ids) > 1:
        raise ValueError(f"streamer: expected one request, got {len(input_ids)}: use on_step")
    put: Any = streamer.put
    put(input_ids.cpu())

    def stream(step: Step) -> None:
        for token in step.token_ids:
            put(torch.tensor([token]))
        if on_step is not None:
            on_step(step)

    return stream


def _check_prompts(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> Tensor:
    """Return which columns are tokens, [batch, prompt] bool."""
    check_type("input_ids", input_ids, (torch.int64,))
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: expected shape [batch, prompt], neither of them 0, got {list(input_ids.shape)}")
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        dtypes = (torch.bool, torch.int32, torch.int64)
        check_tensor("attention_mask", attention_mask, dtypes, tuple(input_ids.shape), input_ids.device)
        mask = attention_mask.bool()
        if (attention_mask != mask).any():
            raise ValueError("attention_mask: expected 0 or 1 everywhere, got other numbers")
        wrong = ~(mask[:, -1] & (mask[:, 1:] >= mask[:, :-1]).all(1))
        if wrong.any():
            row = int(wrong.nonzero()[0])
            got = f"{attention_mask[row].tolist()} in row {row}"
            raise ValueError(f"attention_mask: expected padding on the left only, then at least one token, got {got}")
    unknown = mask & ((input_ids < 0) | (input_ids >= vocab_size))
    if unknown.any():
        raise ValueError(f"input_ids: expected ids in [0, {vocab_size}), got {int(input_ids[unknown][0])}")
    return mask


def _check_sampling(sampling: Sampling, batch: int, vocab_size: int, device: torch.device) -> Sampling:
    """Return how tokens are drawn, on the device of the target, with None for what keeps all tokens."""
    sampling = Sampling._make(_on(device, value) for value in sampling)
    temperature = check_temperature(sampling.temperature, batch, device)
    return Sampling(temperature, *(Truncation.check(sampling, batch, vocab_size, device) or ()))


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _stop_ids(config: GenerationConfig, eos_token_id: int | Sequence[int] | None, vocab_size: int) -> list[int]:
    if eos_token_id is None:
        own = config.eos_token_id
        return [] if own is None else [own] if isinstance(own, int) else list(own)
    stop_ids: Any = [eos_token_id] if isinstance(eos_token_id, Integral) else eos_token_id
    if not isinstance(stop_ids, Sequence) or any(not isinstance(token, Integral) for token in stop_ids):
        raise TypeError(f"eos_token_id: expected an int, a sequence of ints or None, got {shown(eos_token_id)}")
    unknown = [token for token in stop_ids if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(f"eos_token_id: expected ids in [0, {vocab_size}), got {unknown[0]}")
    return [int(token) for token in stop_ids]


def _pad_id(config: GenerationConfig, stop_ids: list[int]) -> int:
    pad_id = config.pad_token_id
    return int(pad_id) if pad_id is not None else stop_ids[0] if stop_ids else 0


def _padded(rows: Sequence[Sequence[int]], value: int, dtype: torch.dtype) -> Tensor:
    """Return [rows, longest row]."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype)
