"""Mistakes of the course's readers, in their own code, are named first; NaN and a missing return are told by their place."""

import numpy as np
import pytest

from specdecode.checking import check
from specdecode.checking.verifiers import TOKENS
from tests.support.readers import MISTAKES, reader, seeded


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_readers_mistake_is_named_first_at_the_requests_of_the_course(mistake):
    """One seed; `tests.tools.check_suspects` runs ten."""
    name, report = MISTAKES[mistake], check(reader(mistake), requests=20_000)
    assert report.passed == (name is None), str(report)
    assert report.suspects[:1] == ([name] if name else []), str(report)


def test_a_missing_return_is_told_by_the_functions_name():
    (failed,) = check(reader("forgotten return"), requests=500).checks
    assert "forgetful (readers.py, line " in failed.detail
    assert "returned None: is a return missing?" in failed.detail


def test_a_verifier_that_returns_nothing_is_told_by_its_name():
    def my_verifier(target_logits, draft_token_ids):
        target_logits.sum()

    (failed,) = check(my_verifier, requests=500).checks
    assert "my_verifier (test_checking_readers.py, line " in failed.detail


def test_the_place_where_nan_was_computed_is_in_the_verdict():
    report = check(reader("NaN"), requests=500)
    assert "in residual; first in joint" in report.nan
    assert f"The code that was called computed NaN: {report.nan}." in str(report).replace("\n", " ")


def test_nan_is_no_refusal_of_a_question():
    """A division by temperature 0 raises by accident."""
    report = check(reader("no mistake, with a temperature"), requests=5_000)
    assert [each.name for each in report.checks if not each.passed] == ["greedy"]
    assert report.suspects == ["greedy_divides_by_0"]


SHARED = {
    "seed + position": (lambda s, p: s + p, lambda i, K: (i, 1), "noise_of_seed_plus_position", 5_000),
    "last tokens": (lambda s, p: [s, p], lambda i, K: (K, 0), "noise_used_again_in_the_next_step", 100_000),
}


@pytest.mark.parametrize("name", SHARED)
def test_noise_that_two_requests_or_steps_share_is_named(name):
    key, recovered_at, suspect, requests = SHARED[name]
    report = check(seeded(key, recovered_at), requests=requests, only=name)
    assert report.suspects == [suspect], str(report)
    assert check(seeded(lambda s, p: [s, p], lambda i, K: (i, 1)), requests=requests, only=name).passed


def drafter(left_out):
    """Return a drafter that leaves drafts out: `left_out(logits, tokens, those before)`."""
    random, before = np.random.default_rng(0), [0]

    def draft(draft_logits, *, temperature, offset):
        noise = temperature * random.gumbel(size=draft_logits.shape)
        tokens = (draft_logits + noise).argmax(axis=1)
        stops = left_out(draft_logits, tokens, before[0] if offset else -1)
        before[0] = tokens
        return np.where(stops, -1, tokens)

    return draft


LEFT_OUT = {
    "it ends the text": (lambda logits, tokens, before: tokens == 0, True),
    "it repeats a token": (lambda logits, tokens, before: tokens == before, True),
    "its row is unsure": (lambda logits, tokens, before: np.ptp(logits, axis=1) < 2, False),
}


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_a_draft_is_left_out_for_a_reason_that_looks_at_it(reason):
    left_out, wrong = LEFT_OUT[reason]
    report = check(TOKENS, drafter(left_out), requests=20_000)
    assert report.suspects[:1] == ["drafts_left_out"] * wrong, str(report)
    assert report.passed == (not wrong)


def test_a_question_without_enough_requests_is_not_passed_but_open():
    report = check(TOKENS, requests=2_000)
    unanswered = [each for each in report.checks if not each.answered]
    assert unanswered
    assert str(report).count("\n--  ") == len(unanswered)
