"""The adapter of vLLM: the masks of rows follow vLLM's rules, from its own state; steps with masks are verified here.

Stand-ins have the names, shapes and dtypes of vLLM 0.33.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Namespace
from unittest import mock

import numpy as np
import pytest
import torch

from specdecode.integrations.vllm.grammars import StepGrammar
from specdecode.integrations.vllm.sampling import MASKS
from tests.conftest import combine
from tests.support.vllm import (
    METHODS,
    LimitedSampler,
    emitted,
    last_in,
    ragged_case,
    rejection_sampler,
    step_of_rows,
)

pytest.importorskip("triton")

VOCAB, WORDS = 70, 3
THINKING = [40, 41], [43, 44], [42, 43, 44]
"""The tokens that begin a thought, end it, and are forced to end it."""


def allowed_tokens(asked, text, num_prompt, vocab=VOCAB, thinking=THINKING, grammar=None):
    """Return the tokens that vLLM allows after a text, [vocab] bool, by its rules in their order.

    Args:
        asked: the request's options, as for `LimitedSampler.add_request`.
        text: the committed text and the drafts before the row.
        num_prompt: the length of the prompt in it.
        vocab: the number of tokens.
        thinking: as `THINKING`.
        grammar: [vocab] bool, None if there is none.
    """
    left = np.ones(vocab, dtype=bool) if grammar is None else grammar.copy()
    if asked.get("allowed_token_ids"):
        left &= np.isin(np.arange(vocab), asked["allowed_token_ids"])
    if len(text) < asked.get("least_length", 0):
        without = left & ~np.isin(np.arange(vocab), asked["stop_token_ids"])
        left = without if without.any() or "structured_outputs" not in asked else left
    for *before, last in asked.get("bad_words", []):
        output = text[num_prompt:]
        if len(before) <= len(output) and output[len(output) - len(before) :] == before and 0 <= last < vocab:
            left[last] = False
    if "thinking_token_budget" in asked:
        start, end, forced = thinking
        begun = last_in(text, start)
        if begun > last_in(text, end) and len(text) - begun - len(start) >= asked["thinking_token_budget"]:
            counts = [i for i in range(len(forced)) if text[len(text) - i :] == forced[:i]]
            left = np.arange(vocab) == forced[counts[-1]]
    return left


def step_of(sampler, requests):
    """Add requests, (slot, asked, prompt, output, drafts) each, to a sampler, and return the rows of their step."""
    rows, states = [], sampler.req_states
    for slot, asked, prompt, output, drafts in requests:
        text = [*prompt, *output]
        states.all_token_ids.gpu[slot] = 7  # after the text
        states.all_token_ids.gpu[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        states.prompt_len.np[slot], states.total_len.gpu[slot] = len(prompt), len(text)
        sampler.add_request(slot, Namespace(**asked))
        rows += [(slot, len(text) - 1 + i, i, token) for i, token in enumerate([text[-1], *drafts])]
    slots, positions, offsets, fed = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows))
    order = np.array([slot for slot, *_ in requests])
    return step_of_rows(slots.long(), torch.from_numpy(order), order, positions.long(), fed, offsets)


def bits_of(masks, vocab=VOCAB):
    """Return masks as bool, and check that nothing beyond the vocabulary is allowed."""
    bits = (masks.numpy()[:, :, None] >> np.arange(32) & 1).reshape(len(masks), -1).astype(bool)
    assert not bits[:, vocab:].any()
    return bits[:, :vocab]


def expected_of(requests, **more):
    """Return `allowed_tokens` of each row, [rows, vocab]."""
    rows = []
    for _, asked, prompt, output, drafts in requests:
        for i in range(len(drafts) + 1):
            rows.append(allowed_tokens(asked, [*prompt, *output, *drafts[:i]], len(prompt), **more))
    return np.array(rows)


STOPS = {"stop_token_ids": [3, 64], "least_length": 9}
CASES = {
    "nothing": ({}, []),
    "a list": ({"allowed_token_ids": [0, 31, 32, 69, 31]}, [9]),
    "allowed ids that are no tokens": ({"allowed_token_ids": [-1, 5, 70, 95]}, [9]),
    "bad ids that are no tokens": ({"bad_words": [[-3], [70], [5]]}, [9]),
    "stop tokens up to the least length": (STOPS, [9, 9, 9, 9]),  # of a text of 6 tokens
    "no stop token but for others": ({"allowed_token_ids": [3, 64, 65], **STOPS}, [9]),
    "nothing is left": ({"allowed_token_ids": [3, 64], **STOPS}, [9]),
    "one bad token": ({"bad_words": [[5], [69]]}, [5, 9]),
    "a bad pair in what is committed": ({"bad_words": [[13, 5], [12, 6]]}, [9]),
    "a bad pair with a draft": ({"bad_words": [[13, 5], [20, 6], [20, 7]]}, [20, 21]),
    "three bad tokens": ({"bad_words": [[12, 13, 5], [13, 20, 6], [20, 21, 8], [21, 20, 9]]}, [20, 21, 20]),
    "what is in the prompt is no bad word": ({"bad_words": [[11, 9, 9, 12, 13, 1]]}, []),
    "left-out drafts": ({"bad_words": [[13, 5], [20, 6]]}, [-1, 20]),
    "a budget that committed text has begun": ({"thinking_token_budget": 2}, [20, 21, 22]),
    "a budget of 0": ({"thinking_token_budget": 0}, [40, 41, 20]),
    "a budget that drafts begin": ({"thinking_token_budget": 1}, [40, 41, 20, 21]),
    "a budget that drafts end": ({"thinking_token_budget": 0}, [40, 41, 43, 44, 20]),
    "a budget whose end has begun": ({"thinking_token_budget": 0}, [40, 41, 42, 42, 43]),
    "a budget over all else": ({"thinking_token_budget": 0, "allowed_token_ids": [1], "bad_words": [[42]]}, [40, 41]),
    "all": ({"allowed_token_ids": [3, 5, 6, 7], "bad_words": [[13, 5], [20, 6]], **STOPS}, [20, 21, 22]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_allows_what_vllms_rules_do(name):
    """The slots, and the memory of masks, had other requests before."""
    sampler, (asked, drafts) = LimitedSampler(8, VOCAB, THINKING), CASES[name]
    before = {"allowed_token_ids": [1], "bad_words": [[0], [2, 3]], "thinking_token_budget": 0, **STOPS}
    step = step_of(sampler, [(slot, before, [40, 41], [9], [9] * 4) for slot in (2, 3, 5)])
    sampler.known.limited_tokens(step)
    others = {"bad_words": [[8], [11, 12, 13, 14]]}, {"allowed_token_ids": [60, 2]}
    requests = [
        (5, others[0], [11], [12, 13], [14, 15]),
        (2, asked, [10, 11], [12, 13, 40, 41] if "has begun" in name else [9, 9, 12, 13], drafts),
        (3, others[1], [9], [], []),
    ]
    got = bits_of(sampler.known.limited_tokens(step_of(sampler, requests)))
    assert got.tolist() == expected_of(requests).tolist()
    assert got[3:-1].all() == (name in ("nothing", "what is in the prompt is no bad word"))


def test_a_step_reads_its_own_rows_alone():
    """A step may have a part of a batch's rows, and requests in any slots."""
    sampler, asked = LimitedSampler(8, VOCAB), {"bad_words": [[20, 5]]}
    requests = [(slot, asked, [10], [20], [20, 21]) for slot in (4, 1, 6)]
    step = step_of(sampler, requests)
    part = step._replace(
        **{name: getattr(step, name)[3:6] for name in ("expanded_idx_mapping", "pos", "draft_sampled")}
    )
    part = part._replace(expanded_local_pos=step.expanded_local_pos[3:6])
    assert bits_of(sampler.known.limited_tokens(part)).tolist() == expected_of(requests[1:2]).tolist()


def test_requests_that_come_change_what_is_read_of_their_slots():
    sampler = LimitedSampler(8, VOCAB)
    for asked in ({"bad_words": [[5]]}, {"bad_words": [[6], [20, 7]]}, {"allowed_token_ids": [1, 2]}, {}):
        requests = [(4, asked, [10], [20], [])]
        assert (
            bits_of(sampler.known.limited_tokens(step_of(sampler, requests))).tolist() == expected_of(requests).tolist()
        )


def test_a_vocabulary_of_several_tiles_is_written_in_full():
    vocab, asked = 70_000, {"allowed_token_ids": [0, 32_767, 32_768, 69_999], "bad_words": [[32_768]]}
    sampler = LimitedSampler(2, vocab)
    requests = [(0, asked, [1], [2], []), (1, {}, [1], [2], [])]
    got = bits_of(sampler.known.limited_tokens(step_of(sampler, requests)), vocab)
    assert got.tolist() == expected_of(requests, vocab=vocab).tolist()


COMPILED = """
import numpy as np, torch, triton
from tests.support.vllm import LimitedSampler, step_of_rows
from tests.tools import portability
from specdecode.integrations.vllm.grammars import StepGrammar
portability.tell_calls_apart()
triton.runtime.driver.set_active(driver := portability.Driver(90))
ids, long = lambda *shape: torch.zeros(shape, dtype=torch.int32), lambda *shape: torch.zeros(shape, dtype=torch.int64)
for thinking in ((), ([3], [5, 6], [4, 5, 6])):
    known = LimitedSampler(2, 151_936, thinking).known
    rows = step_of_rows(long(6), long(2), np.zeros(2, dtype=np.int64), long(6), ids(6), ids(6))
    known.limited_tokens(rows.without_rows())
    for grammar in (None, StepGrammar(ids(5, 4748), ids(5), rows.idx_mapping, 5, None, lambda: None)):
        known.limited_tokens(rows, grammar)
print(*driver.compiled)
"""


def test_the_kernel_compiles_for_gpus_that_are_not_here_and_not_again_once_it_is_warmed_up():
    root, environment = Path(__file__).parent.parent, {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", COMPILED], cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["mask_rows_kernel"] * 2


GRAMMARS = {
    "a grammar alone": ({}, [3, 5, 64, 69]),
    "a grammar, a list, bad words": ({"allowed_token_ids": [3, 5, 69, 68], "bad_words": [[13, 5]]}, [3, 5, 64, 69]),
    "stop tokens among others": ({"structured_outputs": None, **STOPS}, [3, 5, 64]),
    "stop tokens alone": ({"structured_outputs": None, **STOPS}, [3, 64]),
    "one of them": ({"structured_outputs": None, **STOPS}, [64]),
    "of a list": ({"structured_outputs": None, "allowed_token_ids": [3, 64, 5], **STOPS}, [64, 69]),
    "of a list alone": ({"structured_outputs": None, "allowed_token_ids": [3, 64], **STOPS}, [64, 69]),
    "none": ({"structured_outputs": None, "bad_words": [[9]], **STOPS}, []),
    "a budget": ({"thinking_token_budget": 0}, [3, 5]),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_row_allows_what_a_grammar_leaves(name):
    """Two of three requests have masks for three rows; one of these has four rows, the other one row."""
    sampler, (asked, left) = LimitedSampler(8, VOCAB, THINKING), GRAMMARS[name]
    drafts = [40, 41, 20] if name == "a budget" else [20, 21, 22]
    requests = [(5, {}, [10], [12], [9]), (2, asked, [10, 11], [9, 9, 12, 13], drafts), (3, {}, [9], [12, 13], [])]
    own = np.isin(np.arange(VOCAB), left)
    masks, used = {2: [~own, own, own], 1: [own, own, ~own]}, []
    words = np.packbits(np.concatenate([*masks.values()]), axis=1, bitorder="little")
    words = torch.from_numpy(np.pad(words, ((0, 0), (0, 4 * WORDS - words.shape[1]))).view(np.int32))
    mapping = torch.tensor([3 * place + i for place in masks for i in range(3)], dtype=torch.int32)
    step = step_of(sampler, requests)
    grammar = StepGrammar(words, mapping, step.idx_mapping, 3, None, lambda: used.append(True))
    got = bits_of(sampler.known.limited_tokens(step, grammar))
    expected = []
    for place, (_, of, prompt, output, after) in enumerate(requests):
        for i, mask in zip(range(len(after) + 1), [*masks.get(place, []), None, None]):
            expected.append(allowed_tokens(of, [*prompt, *output, *after[:i]], len(prompt), grammar=mask))
    assert got.tolist() == np.array(expected).tolist()
    assert used == [True]


KINDS = [
    {},
    {"bad_words": [[5], [7, 8]]},
    {"allowed_token_ids": list(range(10, 40))},
    {"stop_token_ids": list(range(20)), "least_length": 4},
    {"thinking_token_budget": 0},
]


def limited_case(penalties):
    """Return a step, its sampler, the masks of its rows by the rules, and the penalty of some requests."""
    case, drafts, _ = ragged_case(seed=8)
    case["pos"] = 1 + case["expanded_local_pos"].long()  # after a prompt of one token, and one more token
    sampler = LimitedSampler(thinking=([3], [50], [9, 4]))
    for i, (slot, own) in enumerate(zip(case["idx_mapping_np"], drafts)):
        asked = KINDS[i % 5] | ({"presence_penalty": 1.5} if penalties and i % 3 == 0 else {})
        step_of(sampler, [(slot, asked, [3], [3], own)])
    requests = [(0, KINDS[i % 5], [3], [3], own) for i, own in enumerate(drafts)]
    mask = expected_of(requests, vocab=50, thinking=([3], [50], [9, 4]))
    return case, sampler, torch.from_numpy(mask)


@pytest.mark.parametrize(("method", "with_draft_logits", "penalties"), combine(METHODS, [False, True], [False, True]))
def test_a_step_emits_what_rows_say_whose_other_tokens_have_no_probability(method, with_draft_logits, penalties):
    case, sampler, mask = limited_case(penalties)
    sampler.sampling_states.temperature.np[::2] = 0.8
    draft_logits = torch.randn(64, 4, 50) if with_draft_logits else None
    result = rejection_sampler(method, sampler.sampling_states, 4, sampler=sampler)
    plain = rejection_sampler(method, sampler.sampling_states, 4, sampler=sampler)
    logits, before = case["logits"], case["logits"].clone()
    rows, *tokens = result._verify(draft_logits=draft_logits, **case)
    assert rows is logits
    assert logits.equal(before)
    assert not result.fallbacks
    case["logits"] = logits.float().masked_fill(~mask, -torch.inf)
    all_tokens = torch.full((len(logits), 2), -1, dtype=torch.int32)
    with mock.patch.object(sampler.known, "limited_tokens", return_value=all_tokens):
        _, *expected = plain._verify(draft_logits=draft_logits, **case)
    assert emitted(*tokens) == emitted(*expected)
    case["logits"] = logits
    sampler.needs &= ~np.uint8(MASKS)
    assert emitted(*tokens) != emitted(*result._verify(draft_logits=draft_logits, **case)[1:])


@pytest.mark.parametrize("penalties", [False, True])
def test_strict_draws_the_same_tokens_in_steps_without_drafts(penalties):
    case, sampler, _ = limited_case(penalties)
    sampler.sampling_states.temperature.np[::2] = 0.8
    result = rejection_sampler("strict", sampler.sampling_states, 4, sampler=sampler)
    type(sampler).verifier = result.verifier
    _, token_ids, _ = result._verify(draft_logits=None, **case)
    first = case["cu_num_logits"][:-1].long()
    mappings = case["idx_mapping"], case["idx_mapping"], case["idx_mapping_np"]
    tokens = case["pos"][first], case["draft_sampled"][first], case["expanded_local_pos"][first]
    sampled, _ = sampler.sample(case["logits"][first], *mappings, *tokens, case["seq_lens_upper_bound_np"])
    assert sampled.tolist() == token_ids[:, 0].tolist()
