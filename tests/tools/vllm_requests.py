"""Kinds of requests to vLLM: penalties, biases, limits of tokens, grammars; a tokenizer."""

import collections
import json
import re
from pathlib import Path
from typing import Any

from tests.benchmarks.serving import SAMPLING
from tests.tools.check_engine import REQUESTS, Texts

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "on": {"type": "boolean"},
    },
    "required": ["name", "age", "on"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[0-9]{3,12}(,[a-z]{2,8}){2}"},
    {"choice": ["accepted", "accept", "rejected", "recovered 17"]},
    {"json": SCHEMA},
]


def common_tokens(texts: Texts) -> list[int]:
    """Return the tokens of texts, most frequent first."""
    return [token for token, _ in collections.Counter(token for text in texts for token in text).most_common()]


def penalties_and_biases(text: list[int], common: list[int]) -> dict[str, dict[str, Any]]:
    """Return kinds of requests, given the text of a plain greedy request, and the tokens that are common in many texts."""
    bias = {common[7]: 3.0, text[1]: -6.0, text[4]: -100.0}
    return {
        "repetition": {"repetition_penalty": 1.3},
        "frequency, presence": {"frequency_penalty": 0.4, "presence_penalty": 0.7},
        "negative": {"repetition_penalty": 0.9, "frequency_penalty": -0.3},
        "bias": {"logit_bias": bias},
        "penalties, bias": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": bias},
    }


def limits(text: list[int], common: list[int]) -> dict[str, dict[str, Any]]:
    """Return kinds of requests whose tokens are limited, see `penalties_and_biases`."""
    return {
        "allowed": {"allowed_token_ids": common[:300]},
        "minimum": {"min_tokens": 8, "stop_token_ids": sorted(set(text[2:8]))},
        "bad words": {"bad_words_token_ids": [[text[2]], [text[5]]]},
        "bad pair": {"bad_words_token_ids": [[text[2], text[3]]]},
        "bad three": {"bad_words_token_ids": [text[3:6], [text[7]]]},
        "allowed, repetition": {"allowed_token_ids": common[:300], "repetition_penalty": 1.2},
    }


def mixed_samplings(plain: Texts) -> tuple[list[dict[str, Any]], list[str]]:
    """Return parameters and kinds: every eighth request is greedy and plain, every eighth greedy and adjusted."""
    common, kinds, samplings = common_tokens(plain), list[str](), list[dict[str, Any]]()
    for i in range(REQUESTS):
        adjusting = list(penalties_and_biases(plain[i], common).items())
        limited = limits(plain[i], common)
        others: list[dict[str, Any]] = [
            {"temperature": 0.8, "seed": 1},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
            {"temperature": 0.7, "min_p": 0.05, "max_tokens": 7},
            {"temperature": 0.8, "logit_bias": {5: -3.0, 7: 2.5}, "max_tokens": 21},
            {"temperature": 1.0, "logprobs": 3},
            {"temperature": 0.8, "top_p": 0.95, "max_tokens": 3},
            {"temperature": 0.9, "repetition_penalty": 1.1, "max_tokens": 12},
            {"temperature": 0.8, "frequency_penalty": 0.4, "presence_penalty": 0.3, "min_p": 0.02, "logprobs": 1},
            {"temperature": 0.8, "max_tokens": 9, **limited["allowed"]},
            {"temperature": 0.9, "seed": 3, **SAMPLING["as Qwen2.5"]},
            {"temperature": 0.8, "top_p": 0.9, "max_tokens": 15, **limited["minimum"]},
            {"temperature": 0.8, "max_tokens": 9, "logprobs": 2, **limited["bad words"]},
        ]
        kind, options = adjusting[i // 8 % len(adjusting)] if i % 8 == 4 else ("plain", {})
        kinds.append(kind if i % 4 == 0 else "")
        samplings.append({"temperature": 0.0} | options if i % 4 == 0 else others[i % len(others)])
    return samplings, kinds


def is_valid(text: str, grammar: dict[str, Any]) -> bool:
    """Return whether a text is in a grammar."""
    if "regex" in grammar:
        return re.fullmatch(grammar["regex"], text) is not None
    if "choice" in grammar:
        return text in grammar["choice"]
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), grammar["json"])
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes, and of pairs of digits, with the special tokens of `random_models`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet, pairs = sorted(pre_tokenizers.ByteLevel.alphabet()), [(a, b) for a in "0123456789" for b in "0123456789"]
    ids = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
