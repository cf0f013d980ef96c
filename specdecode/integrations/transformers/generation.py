"""`generate`, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from specdecode import AcceptanceStats, RejectionSampler, Sampling
from specdecode.arguments import (
    MOST_DRAFT_TOKENS,
    Sizes,
    check_count,
    check_number,
    check_seeds,
    check_tensor,
    check_truncation,
    check_type,
    seed_each,
    shown,
)
from specdecode.integrations.transformers.drafters import Drafter, LookupDrafter, ModelDrafter, PromptLookup
from specdecode.integrations.transformers.generation_config import (
    check_config,
    find_pad_id,
    find_stop_ids,
    merged_config,
    merged_max_new_tokens,
    merged_num_return_sequences,
    merged_sampling,
)
from specdecode.integrations.transformers.lengths import Lengths
from specdecode.integrations.transformers.loop import Loop
from specdecode.integrations.transformers.models import CachedModel
from specdecode.integrations.transformers.outputs import GenerationOutput, Step
from specdecode.integrations.transformers.processors import Processors
from specdecode.integrations.transformers.requests import Batch, Request, map_tensors
from specdecode.integrations.transformers.stops import Stops, find_stop_strings
from specdecode.integrations.transformers.trees import with_tree
from specdecode.sampler import Method


@torch.no_grad()
def generate(
    target: Any,
    draft: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    method: Method | RejectionSampler = "probabilistic",
    num_draft_tokens: int | Literal["auto"] = 4,
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
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    token_type_ids: Tensor | None = None,
    tree: Sequence[int] | None = None,
    max_draft_tokens: int = 16,
    stop_below: float | None = None,
) -> GenerationOutput:
    """Generate tokens with the target model's distribution, in fewer calls of the target than tokens.

    A request's tokens depend on its prompt, temperature, top_k, top_p, min_p and seed, up to rounding in the models: not on
    the rest of the batch, nor on padding. With `method="strict"` they do not depend on the drafter either, and equal the
    tokens with `draft=None`. Temperature 0 is greedy decoding.

    An argument that is None is taken from the generation config. Fields of the config that change logits (such as
    `repetition_penalty`, `no_repeat_ngram_size`, `bad_words_ids` and `min_new_tokens`) are applied by transformers' logits
    processors, to each row with the tokens before that row, drafts included. Rows of the draft model are processed and
    truncated in the same way. Fields that are not supported raise an error that names them. Fields about speed, memory or
    drafting have no effect; the documentation lists them.

    Args:
        target: Hugging Face causal language model in evaluation mode, whose cache holds only keys and values, with full,
            sliding-window or chunked attention.
        draft: such a model with the target's tokenizer, a `PromptLookup`, or None to sample token by token. Vocabulary
            sizes may differ by 1 %, because one tokenizer is padded to several sizes.
        input_ids: [batch, prompt] int64, padded on the left.
        attention_mask: [batch, prompt] bool, int32 or int64, 0 = padding; None = no padding.
        method: a verification method, or a sampler, such as a synthetic one with its schedule.
        num_draft_tokens: K, the most drafts per step and request, at least 1. Near the end there are fewer. "auto": planned
            for each step by a [`DraftPlanner`][specdecode.DraftPlanner] from the acceptance in the steps before it and the
            cost that [`measure_cost`][specdecode.integrations.transformers.measure_cost] finds, once for each model. The
            distribution stays the target's. But other lengths give other tokens, unless the method is `"strict"`: then they
            depend on the measured times and on the rest of the batch.
        max_new_tokens: the most new tokens per request, at least 1. Give this or `max_length`. None for both = the config's
            `max_new_tokens`, else its `max_length`.
        max_length: the most columns of `sequences`, prompt and padding included, as in transformers.
        temperature: float or [batch]; 0 = greedy. None = 0 if the config says `do_sample=False`, else the config's
            temperature, else 1.
        top_k: as for [`RejectionSampler`][specdecode.RejectionSampler.__call__]: int or [batch] integers; 0 = all tokens,
            None = the config's, else all tokens.
        top_p: float or [batch]; 1 = all tokens, None as for `top_k`.
        min_p: float or [batch]; 0 = all tokens, None as for `top_k`.
        seeds: [batch] int64, or one int s meaning s, s + 1, ...; None = drawn from torch's default generator.
        eos_token_id: stop token or tokens; None = the config's, without ids outside the vocabulary, such as -1; [] = none.
        on_step: called with a `Step` for every request and step, as soon as its tokens are known.
        generation_config: used where an argument is None. The target's own `generation_config` fills in the fields that are
            None here, and is used alone by default.
        logits_processor: functions of (input_ids, scores), such as a `LogitsProcessorList`, applied after the config's
            own. They are given [rows, length] int64 tokens without padding and [rows, vocab] scores, and return scores
            of the same shape. Each row of scores may depend only on the same row of both arguments.
        num_return_sequences: how often each prompt is continued, each time with a seed of its own: `seeds` is then
            [batch * num_return_sequences] or an int, and a [batch] tensor for another argument holds for all continuations
            of a prompt. None = the config's, else 1.
        streamer: such as a `TextStreamer`, for one request: given the prompt, then each new token, as by transformers. See
            `on_step` for several.
        accept_stop_tokens: False = end a request's drafts before a token that ends the text. Only for a synthetic sampler:
            it would accept such drafts at the scheduled rate, and texts would be shorter than the target's. With False a
            text ends where the target itself emits such a token.
        stop_strings: string or strings; a text ends with the token that completes one, as in transformers. None = the
            config's, [] = none.
        tokenizer: the target's, needed only where there are stop strings.
        token_type_ids: ignored, so that `**tokenizer(...)` can be passed; refused if a model reads them.
        tree: widths by level, each at most 8, in place of `num_draft_tokens`: (4, 2, 1) drafts four candidates for the next
            token, two after each of them, and one after each of these. The method must be `"strict"`, the drafter a draft
            model, and both models must take 4-D attention masks.
        max_draft_tokens: the most drafts per step and request with `num_draft_tokens="auto"`.
        stop_below: a number from 0 to 1: end a request's drafts before the first row of the draft model with a smaller
            largest probability, at temperature 1 and without truncation. This is decided before a token is drawn from the
            row, so the output stays exact. None = never. Needs a draft model.

    Returns:
        The sequences, the kind of each new token, and acceptance statistics.

    Raises:
        TypeError: an argument of the wrong type or dtype, or a model that is not a causal language model.
        ValueError: an argument is out of range or does not fit the others, the config asks for something that is not
            supported, the method, the drafter or a model cannot handle a tree, a model is in training mode, has a cache of
            other states than keys and values, takes no position_ids, has too few positions, or logits of another width than
            its embeddings, or all logits of the target in a row are NaN or -inf.

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
    is_auto = num_draft_tokens == "auto"
    if is_auto:
        most = check_count("max_draft_tokens", max_draft_tokens, MOST_DRAFT_TOKENS)
    else:
        most = check_count("num_draft_tokens", num_draft_tokens)
    check_options(sampler, most, on_step, accept_stop_tokens)
    check_stop_below(stop_below, draft)
    if tree is not None and (is_auto or stop_below is not None):
        raise ValueError('tree: expected None with num_draft_tokens="auto" or stop_below, which end chains of drafts')
    target_model = CachedModel("target", target)
    draft_model = None if draft is None or isinstance(draft, PromptLookup) else CachedModel("draft", draft)
    device, vocab_size = target.device, target_model.vocab_size

    config = merged_config(target, generation_config)
    prompts = check_prompts(input_ids, attention_mask, target_model.num_embeddings)
    max_new_tokens = merged_max_new_tokens(config, max_new_tokens, max_length, input_ids.shape[1])
    longest_prompt = int(prompts.sum(1).max())
    for model in (target_model, draft_model):
        if model is not None:
            model.check_lengths(longest_prompt + max_new_tokens)
            model.check_vocab_size(vocab_size)
            model.check_token_types(token_type_ids)

    sampling = merged_sampling(config, Sampling(temperature, top_k, top_p, min_p))  # type: ignore[arg-type]
    check_config(config, sampling)
    copies = merged_num_return_sequences(config, num_return_sequences, sampling)
    repeat = partial(torch.repeat_interleave, repeats=copies, dim=0)
    sampling = map_tensors(repeat, check_sampling(sampling, len(input_ids), vocab_size, device))
    input_ids, prompts = repeat(input_ids), repeat(prompts)
    seeds = seeds.to(device) if isinstance(seeds, Tensor) else seeds
    seeds = seed_each(check_seeds(seeds, len(input_ids), device), len(input_ids), device)

    stop_ids = find_stop_ids(config, eos_token_id, vocab_size)
    stops = Stops(stop_ids, find_stop_strings(config, stop_strings, tokenizer), device)
    pad_id = find_pad_id(config, stop_ids)
    processors = Processors(target, config, logits_processor, prompts, max_new_tokens, stops, sampler)

    drafter = Drafter()
    if draft_model is not None:
        drafter = ModelDrafter(draft_model, sampler, processors, vocab_size, stops, accept_stop_tokens, stop_below)
    elif draft is not None:
        drafter = LookupDrafter(draft, vocab_size, stops, accept_stop_tokens)
    stats = None if draft is None else AcceptanceStats(most, per_request=True)
    on_step = streaming(streamer, input_ids, on_step)
    lengths = Lengths(target, draft, sampler, len(input_ids), most) if is_auto and draft is not None else None
    loop = Loop(target_model, drafter, sampler, most, stops, processors, stats, on_step, lengths)
    if tree is not None:
        loop = with_tree(loop, tree)
    prompt_lengths = prompts.sum(1)
    requests = [Request(row, length, length + max_new_tokens) for row, length in enumerate(prompt_lengths.tolist())]
    tokens = input_ids.masked_fill(~prompts, 0)[:, -longest_prompt:].to(device)
    batch = Batch(requests, tokens, prompt_lengths.to(device), sampling, seeds)
    while batch.requests:
        batch = loop.step(batch)
    if streamer is not None:
        streamer.end()  # type: ignore[no-untyped-call]
    return loop.output(input_ids, requests, pad_id)


def check_options(
    sampler: RejectionSampler, num_draft_tokens: int, on_step: Callable[[Step], object] | None, accept_stop_tokens: bool
) -> None:
    """Check the arguments that depend on no model."""
    rates = num_draft_tokens if sampler.schedule is None else len(sampler.schedule.joint_rates)
    if num_draft_tokens > rates:
        raise ValueError(
            f"num_draft_tokens: expected at most {rates}, as many as the method's schedule has rates, got {num_draft_tokens}"
        )
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step: expected a function of a Step, got {type(on_step).__name__}")
    if not accept_stop_tokens and sampler.method != "synthetic":
        raise ValueError(f"accept_stop_tokens: False is only for method 'synthetic', got method {sampler.method!r}")


def check_stop_below(stop_below: float | None, draft: Any) -> None:
    """Raise unless `stop_below` is a probability and there is a draft model, or it is None."""
    if stop_below is None:
        return
    if isinstance(stop_below, bool) or not isinstance(stop_below, int | float):
        raise TypeError(f"stop_below: expected a number or None, got {shown(stop_below)} ({type(stop_below).__name__})")
    if not 0 <= stop_below <= 1:
        raise ValueError(f"stop_below: expected a number in [0, 1], got {shown(stop_below)}")
    if draft is None or isinstance(draft, PromptLookup):
        raise ValueError(f"stop_below: expected None without a draft model, got {shown(stop_below)}")


def check_prompts(input_ids: Tensor, attention_mask: Tensor | None, num_embeddings: int) -> Tensor:
    """Return the mask of tokens in the prompts, [batch, prompt] bool."""
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
    unknown = mask & ((input_ids < 0) | (input_ids >= num_embeddings))
    if unknown.any():
        raise ValueError(f"input_ids: expected ids in [0, {num_embeddings}), got {int(input_ids[unknown][0])}")
    return mask


def check_sampling(sampling: Sampling, batch: int, vocab_size: int, device: torch.device) -> Sampling:
    """Return the sampling parameters on the device of the target, None where nothing is truncated."""
    sampling = map_tensors(lambda value: value.to(device), sampling)
    sizes = Sizes({"slot": batch}, device)
    temperature = check_number("temperature", sampling.temperature, sizes)
    return Sampling(temperature, *(check_truncation(sampling, sizes, vocab_size) or ()))


def streaming(
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
            put(torch.tensor([token], device="cpu"))
        if on_step is not None:
            on_step(step)

    return stream
