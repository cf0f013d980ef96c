"""Invalid outputs of verifiers, and verifiers that cannot be called: one error that names the cause, with an input."""

from collections import namedtuple
from dataclasses import make_dataclass

import numpy as np
import pytest

from specdecode.checking import check
from specdecode.checking.verifiers import TOKENS
from tests.test_checking import by_name, student


def returning(change):
    """A right verifier whose output is changed."""
    return lambda target_logits, draft_token_ids, draft_logits=None, *, temperature, seeds, positions: change(
        TOKENS(target_logits, draft_token_ids, draft_logits, temperature=temperature, seeds=seeds, positions=positions),
        draft_token_ids,
    )


def replaced(ids, row, values):
    ids = ids.copy()
    ids[row] = values
    return ids


Output = namedtuple("Output", "token_ids, num_accepted")
Result = make_dataclass("Result", ["token_ids", "num_accepted"], slots=True)


def raising(ids, drafts):
    raise IndexError("index 7 is out of bounds")


ERRORS = {
    "too narrow": (lambda ids, drafts: ids[:, :-1], "expected [16, 4] integer ids, got int64 [16, 3]"),
    "floats": (lambda ids, drafts: ids.astype(float), "expected [16, 4] integer ids, got float64 [16, 4]"),
    "nothing": (lambda ids, drafts: None, "expected [16, 4] integer ids, got None"),
    "a string": (lambda ids, drafts: "tokens", "expected [16, 4] integer ids, got"),
    "lists of different lengths": (
        lambda ids, drafts: [[1], [1, 2]],
        "integer ids, each row filled up with -1, got list",
    ),
    "a tuple": (lambda ids, drafts: (ids, ids[:, 0]), "got tuple(int64 [16, 4], int64 [16]): return the ids alone"),
    "a tuple of one shape": (
        lambda ids, drafts: (ids, ids),
        "got tuple(int64 [16, 4], int64 [16, 4]): return the ids alone",
    ),
    "a named tuple": (
        lambda ids, drafts: Output(ids, 3),
        "got Output(token_ids: int64 [16, 4], num_accepted: int): return the ids alone",
    ),
    "a dataclass": (lambda ids, drafts: Result(ids, 3), "got Result(token_ids: int64 [16, 4], num_accepted: int)"),
    "a dictionary": (lambda ids, drafts: {"ids": ids}, "got dict(ids: int64 [16, 4]): return the ids alone"),
    "beyond the vocabulary": (
        lambda ids, drafts: replaced(ids, 3, [5, -1, -1, -1]),
        "expected ids from 0 to 4, or -1 after the last token,\n  got [5, -1, -1, -1]",
    ),
    "no token": (lambda ids, drafts: replaced(ids, 3, -1), "expected at least one token"),
    "after the last": (lambda ids, drafts: replaced(ids, 3, [0, -1, 0, -1]), "expected only -1 after the first -1"),
    "after a rejection": (
        lambda ids, drafts: replaced(ids, 3, [(drafts[3, 0] + 1) % 5, drafts[3, 1], 0, -1]),
        "expected every token but the last to be the draft in its place",
    ),
    "an exception": (raising, "verify raised IndexError: index 7 is out of bounds (test_checking_errors.py, line "),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_no_output_is_one_error_with_an_input_that_shows_it(name):
    change, message = ERRORS[name]
    report = check(returning(change), requests=500)
    assert [each.name for each in report.checks] == ["joint"]
    (failed,) = report.checks
    assert message in failed.detail
    assert not failed.passed
    assert "called: verify(np.array([[[-0.7959, -1.8429, 0.6777, 0.4355, -0.6338]," in failed.detail
    assert "seeds=np.array([" in failed.detail
    assert ("returned: np.array([[" in failed.detail) == (" got [" in failed.detail)
    known = {
        "after a rejection": ["goes_on_after_a_rejection"],
        "no token": ["no_token_after_the_drafts"],
        "nothing": ["no_return"],
    }
    assert report.suspects == known.get(name, [])
    assert "nothing else was asked" in str(report)
    assert "No mistake in the list" not in str(report)


def test_the_input_that_is_shown_can_be_run():
    report = check(returning(lambda ids, drafts: replaced(ids, 0, [9, -1, -1, -1])), requests=500)
    call = report.checks[0].detail.split("called: ")[1].split("returned:")[0]
    arguments = eval(call.strip(), {"np": np, "verify": lambda *positional, **named: (positional, named)})
    (target, drafts), named = arguments
    assert (target.shape, drafts.shape) == ((1, 4, 5), (1, 3))
    assert set(named) == {"draft_logits", "temperature", "seeds", "positions"}


def test_an_exception_is_shown_with_the_request_that_raises():
    def verify(target_logits, draft_token_ids, draft_logits, *, temperature, seeds, positions):
        assert not (draft_token_ids == [4, 4, 4]).all(axis=1).any()
        return TOKENS(
            target_logits, draft_token_ids, draft_logits, temperature=temperature, seeds=seeds, positions=positions
        )

    (failed,) = check(verify, requests=20_000).checks
    assert "raised AssertionError" in failed.detail
    assert "np.array([[4, 4, 4]], dtype=np.int64)" in failed.detail


def test_an_exception_that_needs_many_requests_says_so():
    def verify(target_logits, draft_token_ids, draft_logits):
        assert len(target_logits) < 16
        return np.pad(draft_token_ids, ((0, 0), (0, 1)))

    (failed,) = check(verify, requests=500).checks
    assert "for 16 requests, of which this is the first; neither half of them raises" in failed.detail


def test_the_input_without_drafts_can_be_run():
    def verify(target_logits, draft_token_ids, draft_logits, *, temperature, seeds, positions):
        options = {"temperature": temperature, "seeds": seeds, "positions": positions}
        token_ids = TOKENS(target_logits, draft_token_ids, draft_logits, **options)
        return token_ids if draft_token_ids.shape[1] else token_ids * 0 - 1

    (failed,) = check(verify, requests=500, only="no drafts").checks
    assert "np.zeros((1, 0), dtype=np.int64)" in failed.detail
    assert "draft_logits=np.zeros((1, 0, 5), dtype=np.float32)" in failed.detail


def test_a_verifier_may_write_to_what_it_gets():
    def verify(target_logits, draft_token_ids, draft_logits=None, *, temperature, seeds, positions):
        options = {"temperature": temperature, "seeds": seeds, "positions": positions}
        token_ids = TOKENS(target_logits, draft_token_ids, draft_logits, **options)
        for array in (target_logits, draft_token_ids, seeds, positions):
            array[:] = 0
        return token_ids

    report = check(verify, requests=5_000)
    assert report.passed, str(report)
    assert [note for note in report.notes if "64 of 64" in note]


def test_an_error_in_a_rare_case_leaves_the_other_checks():
    def verify(target_logits, draft_token_ids, draft_logits, *, temperature, seeds, positions):
        assert np.isfinite(target_logits).all(), "a masked logit"
        return TOKENS(
            target_logits, draft_token_ids, draft_logits, temperature=temperature, seeds=seeds, positions=positions
        )

    report = check(verify, requests=5_000)
    failed = {each.name for each in report.checks if not each.passed}
    assert failed == {"zeros", "disjoint supports", "padding"}
    assert by_name(report)["joint"].passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verify": 3}, "verify: expected a function, got int"),
        ({"verify": lambda target: 0}, "verify: expected a function of (target_logits, draft_token_ids)"),
        ({"verify": lambda target, drafts, *, top_k: 0}, "got one of (target, drafts, *, top_k)"),
        ({"verify": lambda *, target, drafts: 0}, "the first two by position, got one of (*, target, drafts)"),
        ({"draft": lambda logits, top_k: 0}, "draft: expected a function of (draft_logits)"),
        ({"vocab_size": 1}, "vocab_size: expected an integer of at least 2, got 1"),
        ({"requests": 1.5}, "requests: expected an integer of at least 100, got 1.5"),
        ({"only": "everything"}, "only: expected the name of a check"),
        ({"only": "token 9", "requests": 1_000}, "got 'token 9'; no check of this run has that name"),
        ({"verify": student(), "only": "steps"}, "only: expected a question that can be asked, got 'steps'; not asked"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=r".*") as error:
        check(**({"verify": TOKENS} | arguments))
    assert message in str(error.value)


def test_a_drafter_that_returns_nonsense_is_an_error():
    report = check(TOKENS, lambda logits: np.full(len(logits), 7), requests=500)
    assert "draft: expected ids from -1 to 4, got 7" in report.checks[0].detail
    report = check(TOKENS, lambda logits: [[0]], requests=500)
    assert "draft: expected [16] integer ids" in report.checks[0].detail
    report = check(TOKENS, lambda logits: (logits.argmax(axis=1), logits), requests=500)
    assert "draft: expected [16] integer ids, got tuple(int64 [16], float32 [16, 5])" in report.checks[0].detail


def test_a_row_of_ids_may_be_a_tuple():
    assert check(returning(lambda ids, drafts: tuple(map(tuple, ids.tolist()))), requests=500, only="joint").passed
