"""Rules that are meant to be lossy: the meter brackets the truth, and a check fails only above what is allowed."""

import numpy as np
import pytest

from specdecode.checking import check
from specdecode.checking.lossy import RULES, mixture
from specdecode.checking.settings import Settings
from specdecode.checking.verifiers import STRICT, TOKENS, Drafter


def first_token_variation(weight):
    """Return (1 - w) TV(p, q) of the first row of the main case, the variation that a mixture adds there."""
    settings = Settings(1, 5, 1_000, 0)
    models = settings.models(settings.cases[0])
    return (1 - weight) * abs(models.target_probs[0] - models.draft_probs[0]).sum() / 2


def test_the_meter_brackets_what_a_mixture_adds():
    """With one draft, the second token is exact: the mean over tokens lies below the first row's."""
    report = check(mixture(0.7), num_draft_tokens=1, requests=40_000, allow=0.3)
    low, estimate, high = report.lossiness
    assert report.passed, str(report)
    assert low < estimate < high
    assert low > 0.03
    accepted = float(report.checks[0].detail.split("; ")[1].split(" ")[0])
    assert low < first_token_variation(0.7) / (1 + accepted) < high


@pytest.mark.parametrize("verifier", [TOKENS, STRICT], ids=["tokens", "strict"])
def test_an_exact_verifier_passes_at_any_allowance_and_its_lower_bound_is_0(verifier):
    report = check(verifier, requests=10_000, allow=0.0)
    assert report.passed, str(report)
    assert report.lossiness[0] < 0.005
    assert check(verifier, requests=1_000).lossiness is None


@pytest.mark.parametrize("rule", RULES)
def test_a_lossy_rule_fails_without_an_allowance_and_beyond_it_alone(rule):
    verifier = RULES[rule]()
    assert not check(verifier, requests=200_000 if rule == "mixture" else 20_000, only="joint").passed
    assert not check(verifier, requests=200_000 if rule == "mixture" else 20_000, only="joint", allow=0.005).passed
    report = check(verifier, requests=5_000, allow=0.6)
    assert report.passed, str(report)
    assert [note for note in report.notes if "argmax drafts, zeros, disjoint supports" in note]


@pytest.mark.parametrize("allow", [-0.1, 1.0])
def test_an_allowance_is_a_total_variation(allow):
    with pytest.raises(ValueError, match="allow: expected a total variation, from 0 to less than 1"):
        check(TOKENS, allow=allow)


# ---- Drafts that stop --------------------------------------------------------------------------------------------------


def stopping(rule):
    """A drafter that returns -1 where `rule(probs, tokens)` says so."""
    return Drafter(left_out=rule)


def test_a_stop_that_its_row_decides_is_exact_and_gives_no_note():
    report = check(TOKENS, stopping(lambda probs, tokens: probs.max(axis=1) < 0.45), requests=20_000)
    assert report.passed, str(report)
    assert not [note for note in report.notes if "draft d" in note]


def test_a_stop_before_an_unlikely_draft_is_named_whatever_its_threshold():
    for threshold in (0.15, 0.33):
        drafter = stopping(lambda probs, tokens, least=threshold: probs[np.arange(len(tokens)), tokens] < least)
        report = check(TOKENS, drafter, requests=20_000)
        assert report.suspects[:1] == ["drafts_left_out"], str(report)
