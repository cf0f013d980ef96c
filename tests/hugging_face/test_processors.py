"""Logits processors receive only texts that a request can have: no invented tokens, and no tokens after the end of a text.

A grammar, a table by position or a set of rules knows nothing of other texts, and may raise.
"""

from itertools import pairwise

import pytest
import torch

from specdecode import AcceptanceSchedule, RejectionSampler
from tests.conftest import combine
from tests.hugging_face.common import DRAFTERS, PROMPTS, TARGETS, VOCAB, noisy, padded, texts

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import PromptLookup, generate  # noqa: E402

NEW, STOP = 9, 7
CHAINS = [[1, 3, 4, 6, 1, 3], [2, 4], [6, 1, 2, 3, 5, 6, 1, 2], [0, 1, 3, 4, 6, 0], [5]]
"""Prompts of a grammar in which a token is followed by one that is larger by 1 or 2, modulo 7, or by the stop token."""


class Grammar:
    """Accepts texts of the chains' grammar after one of the prompts, up to the stop token; raises for other texts."""

    def __init__(self, prompts, most=NEW):
        self.prompts, self.most, self.seen = prompts, most, []

    def __call__(self, input_ids, scores):
        masked = torch.full_like(scores, -torch.inf)
        for row, text in enumerate(input_ids.tolist()):
            self.seen.append(text)
            prompts = [prompt for prompt in self.prompts if text[: len(prompt)] == prompt]
            new = min(len(text) - len(prompt) for prompt in prompts)
            assert new < self.most, "past the limit"
            assert STOP not in text, "after the end"
            assert all((b - a) % 7 in (1, 2) for a, b in pairwise(text)), "a text that the grammar forbids"
            following = [(text[-1] + 1) % 7, (text[-1] + 2) % 7, STOP]
            masked[row, following] = scores[row, following]
        return masked


class Table:
    """Allows other tokens at each position, and has no row for positions beyond the limit."""

    def __init__(self, prompts, most=NEW):
        self.prompts, self.seen = prompts, []
        generator = torch.Generator().manual_seed(2)
        size = max(map(len, prompts)) + most
        self.allowed = torch.rand(size, VOCAB, generator=generator) < 0.6
        self.allowed[:, STOP] = True

    def __call__(self, input_ids, scores):
        for text in input_ids.tolist():
            self.seen.append(text)
            start = max(len(prompt) for prompt in self.prompts if text[: len(prompt)] == prompt)
            assert STOP not in text
            assert all(self.allowed[i, text[i]] for i in range(start, len(text)))
        return scores.masked_fill(~self.allowed[input_ids.shape[1]], -torch.inf)


class Count:
    """Increases the score of the stop token with every token, like a budget."""

    def __init__(self, prompts, most=NEW):
        self.limit, self.seen = max(map(len, prompts)) + most, []

    def __call__(self, input_ids, scores):
        self.seen += input_ids.tolist()
        assert input_ids.shape[1] < self.limit
        assert all(STOP not in text for text in input_ids.tolist())
        return scores + torch.nn.functional.one_hot(torch.tensor(STOP), VOCAB) * 0.7 * input_ids.shape[1]


PROCESSORS = {"grammar": Grammar, "table": Table, "count": Count}
BATCHES = {"all": CHAINS, "two": CHAINS[:2], "one": CHAINS[:1]}


def by_transformers(target, prompt, processor, new):
    """Return the greedy text of one request, from transformers' own loop."""
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": STOP, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    return target.generate(ids, attention_mask=mask, logits_processor=[processor], **options)[0].tolist()


@pytest.mark.parametrize(("name", "batch", "new"), combine(list(PROCESSORS), list(BATCHES), [1, 2, 5, NEW]))
def test_greedy_texts_are_those_of_transformers_with_every_drafter(name, batch, new):
    target, prompts = TARGETS["llama"], BATCHES[batch]
    expected = [by_transformers(target, prompt, PROCESSORS[name](prompts), new) for prompt in prompts]
    for drafter in ("close", "far", "lookup", None):
        processor = PROCESSORS[name](prompts, new)
        options = {"max_new_tokens": new, "temperature": 0, "eos_token_id": STOP, "logits_processor": [processor]}
        draft = drafter and DRAFTERS[drafter](target)
        output = generate(target, draft, *padded(prompts), num_draft_tokens=3, **options)
        assert texts(output, prompts) == expected
        if drafter in ("lookup", None):  # a draft model's own rows are processed too
            prefixes = {
                tuple(text[:n]) for text, prompt in zip(expected, prompts) for n in range(len(prompt), len(text))
            }
            assert set(map(tuple, processor.seen)) == prefixes


@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
@pytest.mark.parametrize("drafter", ["close", "far", "lookup"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_sampled_requests_reach_no_text_that_they_cannot_have(name, drafter, method):
    target, temperature = TARGETS["gpt2"], torch.tensor([1.0, 0.7, 0.0, 2.0, 1.0])
    limits = {"top_k": torch.tensor([0, 3, 0, 2, 0]), "top_p": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.6])}
    processor = PROCESSORS[name](CHAINS)
    options = {"seeds": 0, "temperature": temperature, "eos_token_id": STOP, "max_new_tokens": NEW, **limits}
    options["logits_processor"] = [processor]
    plain = generate(target, None, *padded(CHAINS), **options)
    output = generate(target, DRAFTERS[drafter](target), *padded(CHAINS), method=method, **options)
    assert method != "strict" or torch.equal(output.sequences, plain.sequences)


@pytest.mark.parametrize("drafter", ["close", "lookup"])
def test_requests_that_are_ahead_reach_no_text_past_their_limit(drafter):
    # A request that has accepted more drafts than others may draft fewer.
    target, left = TARGETS["llama"], []
    prompts = [[5, 5, 5, 5, 5], [2], [7, 1, 0], [6, 6, 2, 5, 3, 1, 4], [1, 5]]

    def watch(input_ids, scores):
        for text in input_ids.tolist():
            left.append(12 - min(len(text) - len(prompt) for prompt in prompts if text[: len(prompt)] == prompt))
        return scores

    options = {"max_new_tokens": 12, "num_draft_tokens": 6, "eos_token_id": [], "logits_processor": [watch], "seeds": 3}
    output = generate(target, DRAFTERS[drafter](target), *padded(prompts), **options)
    assert min(left) == 1
    assert 0 < output.stats.acceptance_rate < 1  # so that requests get ahead


def test_a_draft_that_truncation_leaves_out_ends_what_is_processed():
    # Look-up drafts 1, then 2; 1 is at best the target's third token after 3, and two tokens are kept.
    target, seen = TARGETS["llama"], []

    def watch(input_ids, scores):
        seen.extend(input_ids.tolist())
        return scores.index_fill(1, torch.tensor([4, 5]), 9.0)

    options = {"max_new_tokens": 4, "num_draft_tokens": 2, "logits_processor": [watch], "seeds": 0}
    output = generate(target, PromptLookup(), torch.tensor([[3, 1, 2, 3]]), top_k=2, **options)
    assert 1 not in output.sequences[0, 4:]
    assert [3, 1, 2, 3] in seen
    assert [3, 1, 2, 3, 1] not in seen
    seen.clear()
    generate(target, PromptLookup(), torch.tensor([[3, 1, 2, 3]]), **options)
    assert [3, 1, 2, 3, 1] in seen  # without truncation the draft is possible


def test_a_synthetic_sampler_has_what_it_accepts_processed():
    schedule = AcceptanceSchedule.from_mean_rate(1.0, num_draft_tokens=3)
    sampler, seen = RejectionSampler("synthetic", schedule=schedule), []

    def forbid_all_but_zero(input_ids, scores):
        seen.extend(input_ids.tolist())
        return scores.masked_fill(torch.arange(VOCAB) > 0, -torch.inf)

    options = {"method": sampler, "num_draft_tokens": 3, "max_new_tokens": 4, "eos_token_id": []}
    prompt = torch.tensor([[1, 2, 3, 1]])
    output = generate(TARGETS["llama"], PromptLookup(), prompt, **options, logits_processor=[forbid_all_but_zero])
    assert output.sequences[0].tolist() == [1, 2, 3, 1, 2, 3, 1, 0]
    assert [1, 2, 3, 1, 2, 3, 1] in seen


def test_a_draft_model_whose_row_is_forbidden_altogether_drafts_no_further():
    # After a 4 the processor leaves no token to draft models, and one token to the target.
    target, draft, calls = TARGETS["llama"], noisy(TARGETS["llama"], 0.03), []

    def processor(input_ids, scores):
        calls.extend(input_ids.tolist())
        assert all(a != 4 or b == 2 for text in input_ids.tolist() for a, b in pairwise(text))
        after = input_ids[:, -1:] == 4
        allowed = torch.where(after, torch.arange(VOCAB) == 2, torch.arange(VOCAB) % 2 == 0)
        return scores.masked_fill(~allowed, -torch.inf)

    def without_two(_model, _inputs, output):
        output.logits[..., 2] = -torch.inf

    draft.register_forward_hook(without_two)
    options = {"max_new_tokens": NEW, "logits_processor": [processor], "eos_token_id": [], "seeds": 5}
    prompts = [[4], [0, 6], [6]]
    plain = generate(target, None, *padded(prompts), **options)
    output = generate(target, draft, *padded(prompts), method="strict", **options)
    assert torch.equal(output.sequences, plain.sequences)
    assert any(text[-1] == 4 for text in calls)


def test_prompts_reach_processors_without_padding():
    seen = []

    def watch(input_ids, scores):
        seen.extend(input_ids.tolist())
        return scores

    generate(TARGETS["llama"], PromptLookup(), *padded(PROMPTS), max_new_tokens=1, logits_processor=[watch])
    assert sorted(seen) == sorted(PROMPTS)
