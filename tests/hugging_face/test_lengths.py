"""Draft lengths with Hugging Face models: planned ones, and drafts that stop where the draft model is unsure."""

import random

import numpy as np
import pytest
import torch

from tests.hugging_face.common import DRAFTERS, NEW, PROMPTS, TARGETS, VOCAB, ragged, texts
from tests.support.distributions import assert_distribution

transformers = pytest.importorskip("transformers")

from specdecode import DraftPlanner, RejectionSampler  # noqa: E402
from specdecode.integrations.transformers import PromptLookup, generate, lengths, measure_cost  # noqa: E402

TARGET = TARGETS["llama"]
CLOSE = DRAFTERS["close"](TARGET)


def with_times(monkeypatch, target_call, draft_call):
    """Let a target call of n tokens take target_call(n) seconds, and a draft draft_call; return the calls that are timed."""
    timed = []

    def step(model, sampler, num_requests, num_drafts):
        timed.append((model.name, num_requests, num_drafts))
        return lambda: draft_call if model.name == "draft" else target_call(num_requests * (1 + num_drafts))

    monkeypatch.setattr(lengths, "MEASURED", type(lengths.MEASURED)())
    monkeypatch.setattr(lengths, "step", step)
    monkeypatch.setattr(lengths, "seconds", lambda call: call())
    return timed


@pytest.mark.parametrize("drafter", ["close", "lookup"])
def test_no_plan_changes_the_text_of_strict(drafter, plain, monkeypatch):
    plans, draft = random.Random(0), DRAFTERS[drafter](TARGET)
    with_times(monkeypatch, float, 1.0)
    monkeypatch.setattr(lengths.Lengths, "next", lambda self, num_requests: plans.choice([0, 0, 1, 2, 5]))
    for _ in range(3):
        output = ragged(TARGET, draft, method="strict", num_draft_tokens="auto", max_draft_tokens=5)
        assert texts(output) == plain["llama"]
        assert output.stats.num_draft_tokens == 5


def test_steps_without_drafts_may_come_first_or_outlast_the_longest_request(plain, monkeypatch):
    """Then the cache of the draft model is empty, or has columns of finished requests alone."""
    stop = plain["llama"][3][len(PROMPTS[3]) + 3]  # ends the longest prompt's text early
    expected = texts(ragged(TARGET, None, eos_token_id=stop))
    with_times(monkeypatch, float, 1.0)
    for planned in ([0, 0, 3], [2] + [0] * 8 + [3] * 9, [0] * 99):
        plan = iter(planned + [1] * NEW)
        monkeypatch.setattr(lengths.Lengths, "next", lambda self, num_requests, plan=plan: next(plan))
        assert texts(ragged(TARGET, CLOSE, method="strict", num_draft_tokens="auto", eos_token_id=stop)) == expected


@pytest.mark.parametrize("method", ["strict", "probabilistic"])
def test_measured_plans_generate(method, plain):
    output = ragged(TARGET, CLOSE, method=method, num_draft_tokens="auto", max_draft_tokens=3)
    assert output.num_generated.tolist() == [NEW] * len(PROMPTS)
    assert method != "strict" or texts(output) == plain["llama"]
    assert ragged(TARGET, None, num_draft_tokens="auto").stats is None


def test_lengths_are_those_that_pay(monkeypatch):
    """The draft model is the target: all drafts are accepted."""
    options = {"max_new_tokens": 40, "seeds": 0, "num_draft_tokens": "auto", "method": "strict", "eos_token_id": []}
    lengths_of = []
    for draft_call in (0.01, 2.0):
        with_times(monkeypatch, lambda tokens: 1.0, draft_call)
        steps = []
        generate(TARGET, TARGET, torch.tensor(PROMPTS[:1]), on_step=steps.append, max_draft_tokens=9, **options)
        lengths_of.append([len(step.draft_token_ids) for step in steps])
    assert lengths_of[0] == [4, 8, 9, 9, 5]  # at most twice as many as before
    assert lengths_of[1] == [0] * 40


def test_costs_are_measured_once_for_each_model(monkeypatch):
    timed = with_times(monkeypatch, lambda tokens: 10.0 + tokens, 0.5)
    for _ in range(2):
        cost = measure_cost(TARGET, CLOSE, num_requests=2, num_draft_tokens=6)
    assert cost[1:].tolist() == [10 + 2 * (1 + k) + 0.5 * k for k in range(7)]
    assert timed == [*(("target", 2, k) for k in (0, 1, 2, 4, 6)), ("draft", 2, 0)]
    assert measure_cost(TARGET, PromptLookup(), num_requests=2, num_draft_tokens=6)[-1] == 10 + 2 * 7
    assert len(timed) == 6
    assert DraftPlanner(6, cost).plan(1).tolist() == [6]


def test_costs_are_seconds():
    cost = measure_cost(TARGET, CLOSE, num_draft_tokens=2)
    assert (cost > 0).all()
    assert cost[2] < 60


class Recorder(RejectionSampler):
    """Records the draft rows from which tokens are drawn, and the drafts."""

    def __init__(self, method):
        super().__init__(method)
        self.rows, self.drafts = [], []

    def draft(self, logits, *arguments, **options):
        self.rows.append(logits)
        return super().draft(logits, *arguments, **options)

    def __call__(self, target_logits, draft_token_ids, *arguments, **options):
        self.drafts += draft_token_ids.T
        return super().__call__(target_logits, draft_token_ids, *arguments, **options)


@pytest.mark.parametrize("method", ["strict", "block"])
def test_drafts_end_before_the_first_unsure_row(method, plain):
    sampler = Recorder(method)
    output = ragged(TARGET, CLOSE, method=sampler, stop_below=0.6, num_draft_tokens=6)
    assert method != "strict" or texts(output) == plain["llama"]
    sure = torch.cat([row.softmax(1).amax(1)[drafts >= 0] for row, drafts in zip(sampler.rows, sampler.drafts)])
    assert sure.min() >= 0.6
    assert output.draft_calls > len(sampler.rows)  # where all requests stop, a row is read and no token drawn


def test_all_drafts_are_kept_of_a_model_that_is_sure_enough(plain):
    whole, stopped = (ragged(TARGET, CLOSE, method="strict", **options) for options in ({}, {"stop_below": 0}))
    assert torch.equal(whole.token_kinds, stopped.token_kinds)
    none = ragged(TARGET, CLOSE, method="strict", stop_below=1.0)
    assert (none.token_kinds == 0).all()
    assert texts(none) == plain["llama"]


@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_texts_have_the_targets_distribution_where_drafts_stop(method):
    """False-alarm rate 1e-6; sees a total variation of .1: N = lambda / (4 TV^2), lambda = 160 at 150 degrees of freedom."""
    prompt, num_texts = torch.tensor([[2]]), 4_000
    options = {"max_new_tokens": 3, "num_return_sequences": num_texts, "seeds": 0, "eos_token_id": []}
    output = generate(TARGET, DRAFTERS["far"](TARGET), prompt, method=method, stop_below=0.45, **options)
    drafts = output.stats.draft_tokens_per_position
    assert 0 < drafts[1] < drafts[0] < num_texts * 2  # some stop, at either draft
    tokens = output.sequences[:, 1:].numpy()
    distribution, texts_so_far = np.ones(1), prompt
    for _ in range(3):
        with torch.no_grad():
            rows = TARGET(texts_so_far).logits[:, -1].softmax(1).numpy()
        distribution = (distribution[:, None] * rows).ravel()
        next_tokens = torch.arange(VOCAB).repeat(len(texts_so_far))[:, None]
        texts_so_far = torch.cat([texts_so_far.repeat_interleave(VOCAB, 0), next_tokens], 1)
    counts = np.bincount(tokens @ VOCAB ** np.arange(2, -1, -1), minlength=VOCAB**3)
    assert_distribution(counts, distribution)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"num_draft_tokens": "automatic"}, TypeError, r"^num_draft_tokens: expected a positive int, got 'automatic'"),
        (
            {"num_draft_tokens": "auto", "max_draft_tokens": 0},
            ValueError,
            r"^max_draft_tokens: expected a positive int",
        ),
        ({"stop_below": 1.1}, ValueError, r"^stop_below: expected a number in \[0, 1\], got 1.1"),
        ({"stop_below": "0.4"}, TypeError, r"^stop_below: expected a number or None, got '0.4'"),
        ({"stop_below": 0.4, "draft": PromptLookup()}, ValueError, r"^stop_below: expected None without a draft model"),
        ({"stop_below": 0.4, "tree": (2, 1), "method": "strict"}, ValueError, r"^tree: expected None with"),
        ({"num_draft_tokens": "auto", "tree": (2, 1), "method": "strict"}, ValueError, r"^tree: expected None with"),
    ],
)
def test_wrong_options_are_named(options, kind, message):
    with pytest.raises(kind, match=message):
        generate(TARGET, options.pop("draft", CLOSE), torch.tensor(PROMPTS[:1]), max_new_tokens=4, **options)


@pytest.mark.parametrize("call", [{"num_requests": 0}, {"num_draft_tokens": 0}])
def test_wrong_sizes_are_named(call):
    with pytest.raises(ValueError, match=rf"^{next(iter(call))}: expected a positive int, got 0"):
        measure_cost(TARGET, CLOSE, **call)
