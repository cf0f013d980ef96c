"""Texts end with stop tokens and stop strings where transformers' texts end, for all drafts."""

from itertools import cycle

import numpy as np
import pytest
import torch

from specdecode import AcceptanceSchedule, RejectionSampler
from specdecode.demo import DRAFT, TARGET
from tests.hugging_face.common import (
    DRAFTERS,
    NEW,
    PROMPTS,
    TARGETS,
    VOCAB,
    noisy,
    padded,
    ragged,
    texts,
    with_config,
)

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from specdecode.integrations.transformers import PromptLookup, TokenKind, generate  # noqa: E402

WORDS = ["a", "b", "ab", " c", "ca", "d", "bd", "<s>"]


def word_tokenizer():
    """Return a tokenizer whose token i decodes to WORDS[i].

    With the letters after them "abcdef" can be encoded, as transformers does to read a tokenizer's vocabulary.
    """
    model = tokenizers.models.BPE({word: i for i, word in enumerate([*WORDS, "c", "e", "f"])}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = word_tokenizer()


def spelled(token_ids):
    return "".join(WORDS[token] for token in token_ids)


ONE_STOP = {
    "an int": 5,
    "a numpy integer": np.int64(5),
    "a tensor without dimensions": torch.tensor(5),
    "a tensor": torch.tensor([5]),
    "an array": np.array([5]),
    "a list of numpy integers": [np.int64(5)],
    "a tuple": (5,),
    "a whole float": 5.0,
    "beside none": [5, -1],
    "after none": [-1, 5],
    "beside one beyond the vocabulary": [VOCAB, 5],
}
NO_STOP = {"None": None, "-1": -1, "-1 in a list": [-1], "beyond the vocabulary": VOCAB}


class TestStopTokens:
    @pytest.mark.parametrize("spelling", ONE_STOP | NO_STOP)
    def test_of_the_config_end_texts_as_in_transformers(self, spelling):
        target = with_config(TARGETS["llama"], eos_token_id=(ONE_STOP | NO_STOP)[spelling], pad_token_id=0)
        (ids, mask), new, steps = padded([[7, 1, 0], [2]]), 8, []
        expected = target.generate(ids.clamp(min=0), attention_mask=mask, do_sample=False, max_new_tokens=new)
        options, ends = {"seeds": 100, "max_new_tokens": new}, [5] if spelling in ONE_STOP else []
        sampled = generate(target, None, ids, mask, eos_token_id=ends, **options).sequences
        drafts = [PromptLookup()] if spelling not in ("an int", "None") else [None, noisy(target, 0.1), PromptLookup()]
        for draft in drafts:
            output = generate(target, draft, ids, mask, temperature=0, **options, on_step=steps.append)
            assert torch.equal(output.sequences[:, 3:], expected[:, 3:])
            assert (output.num_generated == new).all() == (spelling in NO_STOP)
            assert torch.equal(generate(target, draft, ids, mask, method="strict", **options).sequences, sampled)
        assert all(0 <= token < VOCAB for step in steps for token in step.token_ids)

    def test_minus_1_as_a_stop_token_has_no_effect_on_stop_strings_and_minimum_lengths(self):
        fields = {"min_new_tokens": 5, "bad_words_ids": [[4], [7]]}
        options = {"stop_strings": ["da", "bb"], "tokenizer": TOKENIZER, "temperature": 0}
        for stop in (7, None):
            expected = texts(ragged(with_config(TARGETS["llama"], eos_token_id=stop, **fields), None, **options))
            target = with_config(TARGETS["llama"], eos_token_id=[-1, 7] if stop else -1, **fields)
            for draft in (None, noisy(target, 0.1), PromptLookup()):
                assert texts(ragged(target, draft, **options)) == expected

    @pytest.mark.parametrize("field", ["eos_token_id", "pad_token_id"])
    @pytest.mark.parametrize("value", ["5", 2.5, float("nan"), [5, None], {"a": 5}])
    def test_errors_name_the_field_of_the_config(self, field, value):
        target = with_config(TARGETS["llama"])
        # A config file may have such a value, but transformers' class does not accept it as an argument.
        setattr(target.generation_config, field, value)
        with pytest.raises(TypeError, match=rf"^generation_config: expected {field} to be an int"):
            ragged(target, None)


class TestPadding:
    @pytest.mark.parametrize(
        ("pad", "expected"),
        [(None, 5), (-1, 5), (6, 6), (np.int64(6), 6), (torch.tensor(6), 6), (torch.tensor([6]), 6), (6.0, 6)],
    )
    def test_is_the_configs_padding_token_or_without_one_the_stop_token(self, pad, expected):
        for eos in (5, [-1, 5]):
            output = ragged(with_config(TARGETS["llama"], eos_token_id=eos, pad_token_id=pad), PromptLookup())
            padding = output.token_kinds == -1
            assert padding.any()
            assert (output.sequences[:, -padding.shape[1] :][padding] == expected).all()

    def test_is_one_token(self):
        target = with_config(TARGETS["llama"])
        target.generation_config.pad_token_id = [6, 7]  # transformers' class does not accept it as an argument
        with pytest.raises(TypeError, match=r"^generation_config: expected pad_token_id to be one id, got \[6, 7\]"):
            ragged(target, None)


class TestStopStrings:
    @pytest.mark.parametrize(
        ("name", "stop_strings"),
        list(zip(cycle(TARGETS), ["abd", "bd", ["caca", "a c"], "da", ["nowhere", "ba"], "aabb"])),
    )
    def test_greedy_texts_end_where_those_of_transformers_end(self, name, stop_strings):
        target, options = TARGETS[name], {"stop_strings": stop_strings, "tokenizer": TOKENIZER, "max_new_tokens": NEW}
        expected = [
            target.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=VOCAB, **options)[0].tolist()
            for prompt in PROMPTS
        ]
        for drafter in ("close", "far", "lookup", None):
            output = ragged(target, drafter and DRAFTERS[drafter](target), temperature=0, **options)
            assert texts(output) == expected

    @pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
    def test_a_sampled_text_ends_with_the_token_that_completes_one(self, method):
        target, stops = TARGETS["llama"], ["abd", "ba", "d"]
        ended = 0
        for draft in (None, noisy(target, 0.1), PromptLookup()):
            options = {"method": method, "temperature": 1.5, "stop_strings": stops, "tokenizer": TOKENIZER}
            output = ragged(target, draft, **options)
            whole = texts(ragged(target, None, temperature=1.5))
            for prompt, text, longer in zip(PROMPTS, texts(output), whole):
                new = len(text) - len(prompt)
                for n in range(1, new + 1):
                    before, after = spelled(text[: len(prompt) + n - 1]), spelled(text[: len(prompt) + n])
                    # A string is complete only if it ends within the characters of the last token.
                    complete = any(stop in after[max(0, len(before) - len(stop) + 1) :] for stop in stops)
                    if n < new:
                        assert not complete
                    else:
                        assert complete or new == NEW
                ended += new < NEW
                assert method != "strict" or longer[: len(text)] == text
        assert ended > 5

    def test_a_string_may_begin_in_the_prompt_but_padding_is_no_text(self):
        target, prompts = TARGETS["llama"], [[3, 0], [0, 1, 2, 5, 0]]
        options = {"max_new_tokens": 1, "tokenizer": TOKENIZER, "temperature": 0}
        first = generate(target, None, *padded(prompts), **options).sequences[:, -1].tolist()
        for draft in (None, PromptLookup()):
            stop = spelled([*prompts[0], first[0]])
            output = generate(target, draft, *padded(prompts), **options | {"max_new_tokens": 4}, stop_strings=stop)
            assert output.num_generated[0] == 1
            # Token 0 stands for padding inside the loop, and decodes to "a".
            stop = "aa" + spelled([*prompts[0], first[0]])
            output = generate(target, draft, *padded(prompts), **options | {"max_new_tokens": 4}, stop_strings=stop)
            assert output.num_generated[0] == 4

    def test_the_default_device_does_not_matter(self):
        options = {"stop_strings": ["ad", "bd"], "tokenizer": TOKENIZER, "max_new_tokens": NEW, "seeds": 3}
        expected = generate(TARGETS["llama"], None, torch.tensor(PROMPTS[:1]), **options).num_generated
        ids = torch.tensor(PROMPTS[:1])
        with torch.device("meta"):  # whose tensors have no data
            assert torch.equal(
                generate(TARGETS["llama"], PromptLookup(), ids, method="strict", **options).num_generated, expected
            )

    def test_bytes_of_a_real_tokenizer(self):
        tokenizer, target, draft = (
            loader.from_pretrained(folder)
            for loader, folder in (
                (transformers.AutoTokenizer, TARGET),
                (transformers.AutoModelForCausalLM, TARGET),
                (transformers.AutoModelForCausalLM, DRAFT),
            )
        )
        prompts = [tokenizer(text).input_ids for text in ("def read_file(path):\n", "import os\n\n", "class Message:")]
        for stops in (["return", "):"], "\n\n", ["self.", "s\n"]):
            options = {"max_new_tokens": 20, "stop_strings": stops, "tokenizer": tokenizer}
            expected = [
                target.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt)),
                    do_sample=False,
                    pad_token_id=0,
                    **options,
                )[0].tolist()
                for prompt in prompts
            ]
            for drafter in (draft, PromptLookup(), None):
                output = generate(target.eval(), drafter, *padded(prompts), temperature=0, **options)
                assert texts(output, prompts) == expected

    def test_the_config_may_have_them_and_the_argument_wins(self):
        target = with_config(TARGETS["llama"], stop_strings=["a"])
        options = {"tokenizer": TOKENIZER, "temperature": 1.5}
        plain = ragged(TARGETS["llama"], None, temperature=1.5)
        by_config = ragged(target, PromptLookup(), method="strict", **options)
        assert (by_config.num_generated < NEW).any()
        assert torch.equal(ragged(target, None, **options, stop_strings=[]).sequences, plain.sequences)
        ends = ragged(TARGETS["llama"], None, **options, stop_strings="a")
        assert torch.equal(by_config.sequences, ends.sequences)

    def test_no_processor_is_given_a_text_that_has_ended(self):
        target = TARGETS["llama"]

        def watch(input_ids, scores):
            for text, prompt in ((text, p) for text in input_ids.tolist() for p in PROMPTS if text[: len(p)] == p):
                assert "ab" not in spelled(text)[max(0, len(spelled(prompt)) - 1) :]
            return scores

        for drafter in DRAFTERS:
            options = {"logits_processor": [watch], "stop_strings": "ab", "tokenizer": TOKENIZER, "temperature": 1.5}
            ragged(target, DRAFTERS[drafter](target), **options)

    @pytest.mark.parametrize(
        ("error", "message", "options"),
        [
            (ValueError, r"^tokenizer: expected the target's tokenizer, .* stop_strings = 'a'", {"stop_strings": "a"}),
            (TypeError, "^stop_strings: expected a string", {"stop_strings": [3], "tokenizer": TOKENIZER}),
            (TypeError, "^stop_strings: expected a string", {"stop_strings": 3, "tokenizer": TOKENIZER}),
            (ValueError, "^stop_strings: expected strings of at", {"stop_strings": ["a", ""], "tokenizer": TOKENIZER}),
            (ValueError, "^stop_strings: expected strings that", {"stop_strings": "xyz", "tokenizer": TOKENIZER}),
            (TypeError, "^tokenizer: expected a tokenizer", {"stop_strings": "a", "tokenizer": "gpt2"}),
        ],
    )
    def test_errors_name_the_argument(self, error, message, options):
        with pytest.raises(error, match=message):
            ragged(TARGETS["llama"], None, **options)


class TestStatistics:
    @pytest.mark.parametrize("method", ["strict", "probabilistic", "block", "synthetic"])
    def test_the_acceptance_length_counts_kept_tokens_only(self, method):
        target, steps = TARGETS["llama"], []
        if method == "synthetic":
            method = RejectionSampler("synthetic", schedule=AcceptanceSchedule.from_mean_rate(0.8, num_draft_tokens=4))
        options = {"method": method, "temperature": 1.5, "eos_token_id": [5, 6], "on_step": steps.append}
        output = ragged(target, noisy(target, 0.05), **options)
        drafted = [step for step in steps if step.draft_token_ids]
        assert any(step.token_ids[-1] in (5, 6) and step.kinds[-1] == TokenKind.ACCEPTED for step in drafted)
        assert output.stats.acceptance_length == sum(len(step.token_ids) for step in drafted) / len(drafted)
        assert output.stats.accepted_tokens == int((output.token_kinds == TokenKind.ACCEPTED).sum())

    def test_a_drafted_stop_token_ends_the_count(self):
        # Look-up drafts 2, 3, 1, ... after 1; all are accepted, and the text ends with the 3.
        schedule = AcceptanceSchedule.from_mean_rate(1.0, num_draft_tokens=5)
        sampler = RejectionSampler("synthetic", schedule=schedule)
        options = {"method": sampler, "num_draft_tokens": 5, "max_new_tokens": 9, "eos_token_id": 3, "seeds": 0}
        output = generate(TARGETS["llama"], PromptLookup(), torch.tensor([[1, 2, 3, 1]]), **options)
        assert output.sequences[0].tolist() == [1, 2, 3, 1, 2, 3]
        assert (output.stats.acceptance_length, output.stats.accepted_tokens, output.stats.draft_tokens) == (2, 2, 2)
