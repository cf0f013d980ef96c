"""What a generation config of transformers asks for: honoured as its own `generate` would, or refused by name.

Temperature, top-k, top-p and min-p go to the sampler. Everything else that changes logits is a logits processor, built by
transformers itself, or an adjustment in its place (see `adjustments`). A processor decides by the tokens before a position,
so each row of a step is processed with its own prefix: the tokens so far and the drafts before that row. Rows of the draft
model are processed alike. So the output has the distribution of the processed target. A row that cannot matter reaches no
processor: its text may be one that the request cannot have, which a grammar, for one, would not know.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from specdecode import Sampling
from specdecode.integrations.transformers.adjustments import Adjuster
from specdecode.integrations.transformers.requests import Batch

HONOURED = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "do_sample",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_return_sequences",
    "pad_token_id",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
}
"""Fields that are used here, or by the logits processors that transformers builds."""

WITHOUT_EFFECT = {
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "early_stopping",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
    "speculation_type",
    "target_lookbehind",
    "transformers_version",
    "use_cache",
    "use_mtp",
}
"""Fields that are not read. They change speed, memory or the form of the output, or belong to what is refused."""

REFUSED: dict[str, tuple[object, str]] = {
    "num_beams": (1, "beam search has no speculative form here"),
    "num_beam_groups": (1, "beam search has no speculative form here"),
    "diversity_penalty": (0, "beam search has no speculative form here"),
    "constraints": (None, "beam search has no speculative form here"),
    "force_words_ids": (None, "beam search has no speculative form here"),
    "penalty_alpha": (0, "contrastive search has no speculative form here"),
    "dola_layers": (None, "DoLa has no speculative form here"),
    "guidance_scale": (1, "classifier-free guidance keeps a second cache"),
    "watermarking_config": (None, "a watermark is applied after truncation"),
    "token_healing": (False, "it changes the prompt: heal the prompt first"),
    "encoder_repetition_penalty": (1, "use repetition_penalty"),
    "encoder_no_repeat_ngram_size": (0, "use no_repeat_ngram_size"),
    "assistant_ensemble_weight": (None, "it changes the distribution of the output"),
    "is_assistant": (False, "it ends texts where the model is not sure of a token"),
    "max_time": (None, "raise an exception from on_step to stop early"),
    "output_scores": (False, "the output holds no scores"),
    "output_logits": (False, "the output holds no logits"),
    "output_attentions": (False, "the output holds no attentions"),
    "output_hidden_states": (False, "the output holds no hidden states"),
}
"""Fields that are not supported: the value besides None that asks for nothing, and a reason or a way out."""

REFUSED_IN_SAMPLING: dict[str, tuple[object, str]] = {
    "typical_p": (1, "use top_k, top_p or min_p"),
    "top_h": (None, "use top_k, top_p or min_p"),
    "epsilon_cutoff": (0, "use top_k, top_p or min_p"),
    "eta_cutoff": (0, "use top_k, top_p or min_p"),
}
"""Likewise, but greedy decoding does not use them."""

QUANTIZED: dict[str, tuple[object, str]] = {
    "cache_implementation": (None, "rounded keys and values change the distribution of the output")
}
"""Fields of which the value "quantized" alone is refused."""

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
"""Processors with state, or with an argument per row of a batch that does not change."""


def merged_config(target: Any, given: GenerationConfig | None) -> GenerationConfig:
    """Return a copy of the config that was given; the target's own config fills in what it leaves out (None).

    Raises:
        TypeError: `given` is not a GenerationConfig.
        ValueError: nothing was given and the model's config holds fields that belong into a generation config.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise TypeError(f"generation_config: expected a GenerationConfig or None, got {type(given).__name__}")
    find_misplaced = getattr(target.config, "_get_generation_parameters", None)
    misplaced = find_misplaced() if given is None and find_misplaced is not None else None
    if misplaced:
        raise ValueError(f"target.config: {misplaced} would have no effect: set it in target.generation_config")
    merged = copy.deepcopy(given) if given is not None else GenerationConfig()  # type: ignore[no-untyped-call]
    own = getattr(target, "generation_config", None)
    for name, value in vars(own).items() if own is not None else ():
        if not name.startswith("_") and getattr(merged, name, None) is None:
            setattr(merged, name, copy.deepcopy(value))
    return merged


def merged_sampling(config: GenerationConfig, given: Sampling) -> Sampling:
    """Return how tokens are drawn: arguments win over the config, whose numbers are converted to Python's.

    A config that says `do_sample=False` is greedy. One that does not say is sampled from: see the documentation.

    Raises:
        ValueError: `min_p` and `top_p` come together and the config has one of them: transformers has another order.
    """
    temperature, *truncation = given
    if temperature is None:
        samples = config.do_sample is None or bool(config.do_sample)
        temperature = 0.0 if not samples else 1.0 if config.temperature is None else config.temperature
    names = ("top_k", "top_p", "min_p")
    values: Any = [getattr(config, name) if value is None else value for name, value in zip(names, truncation)]
    sampling = Sampling(temperature, *values)
    cuts = [_is_active(sampling.top_p, 1), _is_active(sampling.min_p, 0)]
    if all(cuts) and None in truncation[1:] and not is_greedy(sampling):
        raise ValueError(
            f"generation_config: min_p = {sampling.min_p} and top_p = {sampling.top_p} together are not supported, because "
            "transformers applies min_p after top_p, and the sampler before it: pass both as arguments for the sampler's "
            "order, or switch one off with min_p=0.0 or top_p=1.0"
        )
    return sampling


def is_greedy(sampling: Sampling) -> bool:
    """Return whether no request can be sampled."""
    return not isinstance(sampling.temperature, Tensor) and sampling.temperature == 0


def check_config(config: GenerationConfig, sampling: Sampling) -> None:
    """Refuse what cannot be honoured, and fields that a later version of transformers has added.

    Raises:
        ValueError: a field asks for something that is not supported.
    """
    known = HONOURED | WITHOUT_EFFECT | REFUSED.keys() | REFUSED_IN_SAMPLING.keys()
    refused = {
        name: (default, "this version of specdecode does not know it")
        for name, default in vars(GenerationConfig()).items()  # type: ignore[no-untyped-call]
        if not name.startswith("_") and name not in known
    }
    refused |= REFUSED if is_greedy(sampling) else REFUSED | REFUSED_IN_SAMPLING
    refused |= QUANTIZED if config.cache_implementation == "quantized" else {}
    for name, (neutral, hint) in refused.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise ValueError(
                f"generation_config: {name} = {value!r} is not supported: {hint}. Set it to {neutral!r} in "
                f"{'target.generation_config' if neutral is None else 'generation_config'} to generate without it"
            )


class Processors:
    """The logits processors of a call, those of the config and those that were given.

    A request's processors see its own tokens, without padding. Lengths in the config that count the columns of a padded
    batch (`min_length`) count them here too.

    Args:
        target: the target model, whose method builds the processors of the config.
        config: the merged config.
        given: processors to apply after them; one of the same class replaces that of the config.
        prompts: [batch, prompt] bool: which columns of the prompts are tokens.
        max_new_tokens: the most new tokens per request.
        stop_ids: the stop tokens.
        vocab_size: how many tokens the target has.
        device: where rows are processed.

    Raises:
        TypeError: `given` is not a list of functions.
        ValueError: a processor is not supported, or the config's is given a wrong value.
    """

    def __init__(
        self,
        target: Any,
        config: GenerationConfig,
        given: Sequence[Any] | None,
        prompts: Tensor,
        max_new_tokens: int,
        stop_ids: list[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        custom = _check_processors(given)
        if config.exponential_decay_length_penalty is not None and not stop_ids:
            value = config.exponential_decay_length_penalty
            raise ValueError(
                f"generation_config: exponential_decay_length_penalty = {value} needs a stop token: pass eos_token_id"
            )
        base = copy.copy(config)
        base.do_sample = False  # the sampler does what transformers' warpers do
        base._eos_token_tensor = torch.tensor(stop_ids, device=device) if stop_ids else None
        builder: Any = target if hasattr(target, "_get_logits_processor") else _Builder(target.config)
        self.lists: dict[int, LogitsProcessorList] = {}
        for length in set(prompts.sum(1).tolist()):
            own = copy.copy(base)
            own.max_length = length + max_new_tokens
            padding = prompts.shape[1] - length
            own.min_length = max(0, (own.min_length or 0) - padding) if own.min_new_tokens is None else 0
            self.lists[length] = builder._get_logits_processor(
                generation_config=own, input_ids_seq_length=length, logits_processor=custom, device=device
            )
        self.adjuster = Adjuster.find(self.lists, vocab_size, device)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return any(self.lists.values())

    def __call__(self, rows: Tensor, tokens: Tensor, batch: Batch, num_drafts: int, used: Tensor) -> Tensor:
        """Return the processed rows, or rows that are adjusted instead.

        Args:
            rows: [requests, vocab] any float: the rows that follow `tokens`.
            tokens: [requests, width] int64, right-aligned; every token is in the vocabulary.
            batch: the requests.
            num_drafts: how many drafts of the step are among the tokens of each.
            used: [requests] bool: which rows can matter. No processor is given another one.

        Returns:
            [requests, vocab], in float32 if `rows` is of a shorter type; `rows` itself without processors.
        """
        if not self:
            return rows
        if self.adjuster is not None:
            return self.adjuster.adjusted(rows, tokens, batch, num_drafts)
        alike = defaultdict(list)  # rows that are processed in one call
        for i, (request, is_used) in enumerate(zip(batch.requests, used.tolist())):
            if is_used:
                alike[request.prompt_length, request.length + num_drafts].append(i)
        processed = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
        for (prompt_length, length), members in alike.items():
            index = torch.tensor(members, device=rows.device)
            processors: Any = self.lists[prompt_length]
            scores = processors(tokens[index, tokens.shape[1] - length :], processed[index])
            if not isinstance(scores, Tensor):
                raise TypeError(f"logits_processor: expected scores to be returned, got {type(scores).__name__}")
            if scores.shape != (len(members), rows.shape[1]):
                expected, got = [len(members), rows.shape[1]], list(scores.shape)
                raise ValueError(f"logits_processor: expected scores of shape {expected}, got {got}")
            processed[index] = scores.to(processed.dtype)
        return processed


class _Builder(GenerationMixin):
    """Builds the processors for a target that is not a model of transformers, such as a wrapper."""

    def __init__(self, config: Any) -> None:
        self.config = config


def _check_processors(given: Sequence[Any] | None) -> list[Any]:
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


def _is_active(value: float | Tensor | None, neutral: float) -> bool:
    return isinstance(value, Tensor) or (value is not None and value != neutral)
