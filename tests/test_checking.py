"""The checker: right verifiers pass, wrong ones fail, and what it says of them is true."""

import numpy as np
import pytest
from scipy.stats import binom, kstest

from specdecode.checking import check, checker, models
from specdecode.checking.cases import CASES, INDEPENDENCE
from specdecode.checking.mistakes import MISTAKES
from specdecode.checking.runs import Run
from specdecode.checking.settings import Settings
from specdecode.checking.subject import Subject
from specdecode.checking.verifiers import STRICT, TOKENS, Drafter, Verifier
from tests.support.planted import PLANTED, RIGHT, planted

SIZES = {"K1-V2": (1, 2), "K6-V4": (6, 4), "K2-V100": (2, 100)}


def by_name(report):
    return {each.name: each for each in report.checks}


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def student(recovered=lambda p, q: np.maximum(p - q, 0), bonus_row=-1):
    """Return a student's verifier: one request at a time, and only the needed arguments."""
    random = np.random.default_rng(0)

    def verify(target_logits, draft_token_ids, draft_logits):
        output = np.full((len(target_logits), target_logits.shape[1]), -1)
        for request, drafts in enumerate(draft_token_ids):
            p, q = softmax(target_logits[request].astype(float)), softmax(draft_logits[request].astype(float))
            for i, x in enumerate(drafts):
                if random.random() >= p[i, x] / q[i, x]:
                    weights = recovered(p[i], q[i])
                    output[request, i] = random.choice(len(weights), p=weights / weights.sum())
                    break
                output[request, i] = x
            else:
                output[request, len(drafts)] = random.choice(p.shape[1], p=p[bonus_row])
        return output

    return verify


# ---- Right verifiers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RIGHT)
def test_right_verifiers_pass_at_every_size_and_are_accused_of_nothing(name, size):
    drafts, vocab = SIZES[size]
    report = check(*RIGHT[name], num_draft_tokens=drafts, vocab_size=vocab, requests=12_000)
    assert report.passed, str(report)
    assert report.suspects == []


def test_a_vocabulary_of_a_real_size_can_be_asked_about():
    report = check(TOKENS, vocab_size=20_000, num_draft_tokens=1, requests=300, only="joint")
    assert report.passed


def test_a_larger_vocabulary_does_not_make_other_questions_slow():
    report = check(TOKENS, vocab_size=2_000, num_draft_tokens=1, requests=300, only="calls")
    assert report.passed
    assert report.seconds < 10


def test_a_run_of_the_default_size_asks_all_questions():
    report = check(TOKENS, Drafter())
    assert report.passed, str(report)
    asked = {each.name for each in report.checks}
    assert {case.name for case in CASES} | {*INDEPENDENCE} <= asked
    assert {"first token", "token 2", "token 3", "bonus token", "acceptance", "temperature 3: bonus token"} <= asked
    assert by_name(report)["joint"].detail.endswith("0.030")
    assert [note for note in report.notes if "64 of 64" in note and "32 of 32" in note]


def test_fifty_runs_of_right_verifiers_give_no_alarm_and_uniform_p_values():
    p_values = []
    for seed in range(50):
        verifier, drafter = list(RIGHT.values())[seed % len(RIGHT)]
        report = check(verifier, drafter, requests=2_000, seed=seed)
        assert report.passed, str(report)
        p_values += [
            each.p_value for each in report.checks if 0 < (each.p_value or 0) < 1 and "accept" not in each.name
        ]
    assert len(p_values) > 400
    # The discrete ones, of few requests, are near 1 a little too often; what counts is that none are small too often.
    for limit in (0.1, 0.01, 0.001):
        assert binom.sf(sum(p < limit for p in p_values) - 1, len(p_values), limit) > 1e-4
    assert kstest(p_values, "uniform").pvalue > 1e-6


def test_what_a_verifier_does_not_take_is_left_out():
    report = check(student(), requests=5_000)
    assert report.passed, str(report)
    assert {"temperature 0.4", "greedy", "steps", "ragged drafts"} & set(by_name(report)) == set()
    assert sum("not asked" in note for note in report.notes) >= 3


def test_a_verifier_without_draft_logits_is_right_if_it_treats_drafts_as_certain():
    def verify(target_logits, draft_token_ids, *, temperature, seeds, positions):
        return TOKENS(target_logits, draft_token_ids, temperature=temperature, seeds=seeds, positions=positions)

    report = check(verify, requests=20_000)
    assert report.passed, str(report)
    assert "argmax drafts" in by_name(report)


def test_positional_names_are_the_verifiers_own():
    def verify(p_logits, tokens, q_logits):
        return student()(p_logits, tokens, q_logits)

    assert check(verify, requests=1_000).passed


def test_too_few_accepted_drafts_are_waste_and_no_error():
    report = check(STRICT, requests=20_000)
    assert report.passed
    assert [note for note in report.notes if "waste" in note]


@pytest.mark.parametrize(("requests", "few"), [(100, True), (4_000, True), (20_000, False)])
def test_a_run_that_sees_little_says_so(requests, few):
    report = check(TOKENS, requests=requests)
    assert report.passed
    assert ["may pass" in note for note in report.notes if note.startswith("few requests: in joint")] == [True] * few


def test_the_same_seed_gives_the_same_report():
    one, two, other = (check(TOKENS, requests=2_000, seed=seed) for seed in (1, 1, 2))
    assert one.checks == two.checks
    assert one.checks != other.checks


# ---- Wrong ones --------------------------------------------------------------------------------------------------------

HIDDEN = {
    "bonus_without_temperature": (30_000, "temperature 3: bonus token"),
    "bonus_from_last_slot": (100_000, "ragged drafts"),
    "length_from_later_confidences": (60_000, "joint"),
    "block_residual_unscaled": (200_000, "joint"),
    "block_one_uniform": (60_000, "joint"),
    "draft_left_in_residual": (60_000, "argmax drafts"),
    "strict_draws_again": (100_000, "joint"),
    "drafts_without_temperature": (20_000, "temperature 0.4"),
    "tree_equal_siblings_skipped": (30_000, "star: first token"),
    "tree_one_uniform_for_siblings": (90_000, "star: first token"),
    "tree_noise_by_node": (30_000, "last tokens"),
    "noise_used_again_in_the_next_step": (100_000, "last tokens"),
    "recovered_with_a_constant": (100_000, "disjoint supports"),
    "tree_judged_as_without_replacement": (30_000, "star: first token"),
    "tree_equal_siblings_counted_twice": (30_000, "star: first token"),
    "tree_coin_used_again": (20_000, "star: first token"),
    "recovered_with_the_drafts_gumbel_noise": (200_000, "joint"),
}
"""The questions that find small or rare mistakes, which need larger runs."""


@pytest.mark.parametrize(("name", "verifier", "drafter", "tree"), list(planted()))
def test_every_listed_mistake_is_seen(name, verifier, drafter, tree, monkeypatch):
    monkeypatch.setattr(checker, "by_distribution", lambda *arguments: [])
    requests, only = HIDDEN.get(name, (10_000, None))
    assert not check(verifier, drafter, tree=tree, requests=requests, only=only).passed


@pytest.mark.parametrize(
    ("name", "verifier", "drafter", "tree"), [each for each in planted() if each[0] not in HIDDEN][::18]
)
def test_a_listed_mistake_is_named_first(name, verifier, drafter, tree):
    """Some of them, once; `tests.tools.check_suspects` does it for all, with ten seeds."""
    report = check(verifier, drafter, tree=tree, requests=30_000)
    assert report.suspects[:1] == [name]
    assert f"1. {name}: " in str(report)


@pytest.mark.parametrize("case", ["no drafts", "ragged drafts", "argmax drafts"])
def test_every_listed_mistake_runs_where_requests_have_few_drafts(case):
    """Mistakes are run in every case that a verifier passed: none may raise."""
    (case,) = (each for each in CASES if each.name == case)
    pair = Settings(3, 5, 100, 0).models(case)
    for mistake in MISTAKES.values():
        for verifier in mistake.verifiers * (not mistake.of_trees):
            Run(Subject.of(verifier, mistake.drafter), pair, case.how, np.random.default_rng(0)).steps(20)


def test_the_list_has_what_a_reader_needs():
    assert len(MISTAKES) >= 25
    for name, mistake in MISTAKES.items():
        assert name.isidentifier()
        assert mistake.sentence[0].islower()
        assert mistake.sentence.endswith(".")
        assert mistake.remedy.endswith(".")
        assert mistake.source


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"recovered": lambda p, q: p}, "recovered_from_target"),
        ({"recovered": lambda p, q: abs(p - q)}, "recovered_from_absolute_difference"),
        ({"bonus_row": -2}, "bonus_from_another_row"),
    ],
)
def test_a_mistake_is_named_in_code_that_is_not_ours(arguments, name):
    report = check(student(**arguments), requests=10_000)
    assert report.suspects[:1] == [name], str(report)


def test_a_mistake_that_is_not_listed_fails_without_a_name():
    report = check(student(recovered=lambda p, q: (np.maximum(p - q, 0)) ** 2), requests=20_000)
    assert not report.passed
    assert report.suspects == []
    assert "No mistake in the list" in str(report)


def depending_on_drafts(choose):
    """A verifier that is chosen in every call: `choose(draft_token_ids, draft_logits)`."""

    def verify(target_logits, draft_token_ids, draft_logits=None, *, temperature, seeds, positions):
        return choose(draft_token_ids, draft_logits)(
            target_logits, draft_token_ids, draft_logits, temperature=temperature, seeds=seeds, positions=positions
        )

    return verify


def test_a_mistake_is_named_in_code_that_treats_one_corner_otherwise():
    wrong = MISTAKES["bonus_argmax"].verifiers[0]
    report = check(
        depending_on_drafts(lambda drafts, logits: TOKENS if (drafts == -1).any() else wrong), requests=50_000
    )
    assert not by_name(report)["bonus token"].passed
    assert by_name(report)["ragged drafts"].passed
    assert report.suspects[:1] == ["bonus_argmax"]


def test_a_mistake_is_not_named_for_a_failure_that_it_does_not_explain():
    """All but one case fit the mistakes that show in another single case; the one that fails does not."""
    wrong = Verifier(accepts=lambda step: step.uniforms() < 0.5)
    report = check(depending_on_drafts(lambda drafts, logits: wrong if logits is None else TOKENS), requests=20_000)
    assert {each.name.split(":")[0] for each in report.checks if not each.passed} == {"argmax drafts"}
    assert report.suspects == []


def test_a_generator_that_is_made_in_every_call_is_seen():
    def verify(target_logits, draft_token_ids, draft_logits):
        return student()(target_logits, draft_token_ids, draft_logits)

    report = check(verify, requests=10_000)
    assert not by_name(report)["calls"].passed
    assert report.suspects[:1] == ["noise_starts_again_at_every_call"]


def test_synthetic_acceptance_is_wrong_and_above_what_is_possible():
    report = check(Verifier(accepts=lambda step: step.uniforms() < 0.9), requests=20_000)
    assert not by_name(report)["joint"].passed
    assert not by_name(report)["acceptance"].passed


def test_drafts_that_are_not_drawn_from_their_logits_are_reported():
    report = check(STRICT, Drafter(probs=lambda logits, temperature: models.softmax(logits, 0)), requests=5_000)
    assert report.passed  # strict does not depend on how the drafts came about
    assert [note for note in report.notes if "draft does not draw" in note]


# ---- Drafts of -1 ------------------------------------------------------------------------------------------------------

MINUS_1 = PLANTED["minus_1_is_an_index"]


def test_a_verifier_whose_requests_differ_fails_if_it_uses_minus_1_as_an_index():
    report = check(MINUS_1, requests=1_000)
    (failed,) = (each for each in report.checks if not each.passed)
    assert failed.name == "ragged drafts"
    assert "-1 means that there is no draft: is it used as an index?" in failed.detail
    assert report.suspects == ["minus_1_is_an_index"]


def test_a_verifier_that_refuses_minus_1_passes():
    def verify(target_logits, draft_token_ids, draft_logits=None, *, temperature, seeds, positions):
        assert (draft_token_ids >= 0).all(), "K drafts in each request"
        options = {"temperature": temperature, "seeds": seeds, "positions": positions}
        return MINUS_1(target_logits, draft_token_ids, draft_logits, **options)

    report = check(verify, requests=1_000)
    assert report.passed
    assert [note for note in report.notes if "not asked: ragged drafts" in note and "K drafts in each request" in note]


def test_a_verifier_that_may_be_meant_for_K_drafts_passes_with_a_note_unless_it_is_asked():
    report = check(student(), requests=1_000)
    assert report.passed
    assert [note for note in report.notes if "is -1 used as an index?" in note]
    assert check(student(), requests=1_000, only="ragged drafts").suspects == ["minus_1_is_an_index"]
