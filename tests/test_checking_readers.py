"""Mistakes of the course's readers, in their own code, are named first; NaN and a missing return are told by their place."""

import pytest

from specdecode.checking import check
from tests.support.readers import MISTAKES, reader


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
