"""`generate`, the way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from specdecode import AcceptanceStats, RejectionSampler, Sampling
from specdecode.arguments import check_seeds, seed_each
from specdecode.integrations.transformers.arguments import (
    check_max_new_tokens,
    check_num_return_sequences,
    check_options,
    check_prompts,
    check_sampling,
    check_token_types,
    find_pad_id,
    find_stop_ids,
    on,
    streaming,
)
from specdecode.integrations.transformers.drafters import Drafter, LookupDrafter, ModelDrafter
from specdecode.integrations.transformers.generation_config import (
    Processors,
    check_config,
    merged_config,
    merged_sampling,
)
from specdecode.integrations.transformers.lookup import PromptLookup
from specdecode.integrations.transformers.loop import Loop
from specdecode.integrations.transformers.models import CachedModel
from specdecode.integrations.transformers.outputs import GenerationOutput, Step
from specdecode.integrations.transformers.requests import Request, map_tensors
from specdecode.integrations.transformers.stops import Stops, find_stop_strings
from specdecode.sampler import Method


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
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    token_type_ids: Tensor | None = None,
) -> GenerationOutput:
    """Generate tokens with the target model's distribution, in fewer calls of the target than tokens.

    A request's tokens depend on its prompt, temperature, top_k, top_p, min_p and seed, up to rounding in the models: not on
    the rest of the batch, nor on padding. With `method="strict"` they do not depend on the drafter either, and equal those
    of `draft=None`. Temperature 0 is greedy decoding. The rows of the draft model are processed and truncated as those of
    the target are.

    The generation config decides what no argument says. What it adds to logits (such as `repetition_penalty`,
    `no_repeat_ngram_size`, `bad_words_ids`, `suppress_tokens`, `sequence_bias`, `min_new_tokens` and `forced_eos_token_id`)
    is applied to each row that can matter, with the tokens before that row, drafts included: by the sampler, as
    [`Adjustments`][specdecode.Adjustments], or by transformers' logits processors. What cannot be honoured is refused by
    name. Fields about speed, memory or what is drafted have no effect; the documentation lists them.

    Both models must be in evaluation mode: call `.eval()`. In training mode dropout would change their distributions.

    Args:
        target: Hugging Face causal language model that caches keys and values; sliding windows are fine, and so are the
            recurrent layers of many hybrid models.
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
        eos_token_id: stop token or tokens; None = those of the config, whose ids outside the vocabulary, such as -1, stop
            nothing; [] = none.
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
        accept_stop_tokens: False = end a request's drafts before a token that ends the text. Only for a synthetic sampler,
            which would accept it at the scheduled rate, so that texts end earlier than the target's. A text then ends where
            the target itself emits such a token.
        stop_strings: string or strings; a text ends with the token that completes one, as in transformers. None = those of
            the config, [] = none.
        tokenizer: the target's, needed only where there are stop strings.
        token_type_ids: ignored, so that `**tokenizer(...)` can be passed; refused if a model reads them.

    Returns:
        The sequences, what kind of token each new token is, and acceptance statistics.

    Raises:
        TypeError: an argument of the wrong type or dtype, or a model that is not a causal language model.
        ValueError: an argument is out of range or does not fit the others, the config asks for what is not supported, a
            model is in training mode, has a state that cannot go back, too few positions, or logits of another width than
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
    check_options(sampler, num_draft_tokens, on_step, accept_stop_tokens)
    target_model = CachedModel("target", target)
    config = merged_config(target, generation_config)
    draft_model = None if draft is None or isinstance(draft, PromptLookup) else CachedModel("draft", draft)
    device, vocab_size = target.device, target_model.vocab_size

    prompts = check_prompts(input_ids, attention_mask, target_model.num_embeddings)
    max_new_tokens = check_max_new_tokens(max_new_tokens, max_length, config, input_ids.shape[1])
    models = [target_model, *([draft_model] if draft_model else [])]
    check_fit(models, prompts, max_new_tokens)
    check_token_types(token_type_ids, models)
    sampling = merged_sampling(config, Sampling(temperature, top_k, top_p, min_p))  # type: ignore[arg-type]
    check_config(config, sampling)
    copies = check_num_return_sequences(num_return_sequences, config, sampling)
    repeat = partial(torch.repeat_interleave, repeats=copies, dim=0)
    sampling = map_tensors(repeat, check_sampling(sampling, len(input_ids), vocab_size, device))
    input_ids, prompts = repeat(input_ids), repeat(prompts)
    seeds = seed_each(check_seeds(on(device, seeds), len(input_ids), device), len(input_ids), device)
    stop_ids = find_stop_ids(config, eos_token_id, vocab_size)
    stops = Stops(stop_ids, find_stop_strings(config, stop_strings, tokenizer), device)
    is_padded = len(input_ids) > 1 and bool(stops)  # some texts may end before others
    pad_id = find_pad_id(config, stop_ids, target_model.num_embeddings, is_padded)

    processors = Processors(target, config, logits_processor, prompts, max_new_tokens, stop_ids, vocab_size, device)
    drafter: Drafter
    if draft_model is not None:
        drafter = ModelDrafter(draft_model, sampler, processors, vocab_size, stops, accept_stop_tokens)
    else:
        drafter = Drafter() if draft is None else LookupDrafter(draft, vocab_size, stops, accept_stop_tokens)
    loop = Loop(
        target=target_model,
        drafter=drafter,
        sampler=sampler,
        num_draft_tokens=num_draft_tokens,
        stops=stops,
        processors=processors,
        stats=None if draft is None else AcceptanceStats(num_draft_tokens, device=device),
        on_step=streaming(streamer, input_ids, on_step),
    )
    requests = [Request(row, length, length + max_new_tokens) for row, length in enumerate(prompts.sum(1).tolist())]
    loop.decode_all(requests, input_ids.masked_fill(~prompts, 0).to(device), sampling, seeds)
    if streamer is not None:
        streamer.end()  # type: ignore[no-untyped-call]
    return loop.output(input_ids, requests, pad_id)


def check_fit(models: Sequence[CachedModel], prompts: Tensor, max_new_tokens: int) -> None:
    """Refuse requests that are too long for a model, and a draft model with another vocabulary than the target's."""
    lengths = prompts.sum(1).tolist()
    for model in models:
        model.check_lengths(min(lengths), max(lengths) + max_new_tokens)
        model.check_vocab_size(models[0].vocab_size)
