"""Temperature 0: each token of many texts is compared with the argmax, and wrong greedy verifiers are named."""

import numpy as np
import pytest

from specdecode.checking import check, greedy
from specdecode.checking.mistakes import MISTAKES
from specdecode.checking.settings import Settings
from specdecode.checking.subject import Subject
from specdecode.checking.verifiers import TOKENS, Drafter
from tests.support.planted import RIGHT
from tests.test_checking import by_name, softmax

SEEDS = range(4)
SIZES = {"K3-V5": (3, 5), "K1-V2": (1, 2), "K5-V2": (5, 2), "K1-V50": (1, 50), "K5-V50": (5, 50)}
random = np.random.default_rng(0)


def asked(verify, draft=None, size="K3-V5", seed=0):
    drafts, vocab = SIZES[size]
    return check(verify, draft, num_draft_tokens=drafts, vocab_size=vocab, seed=seed, only="greedy")


def argmax(i, row):
    return row.argmax()


def drawn(i, row):
    return (row + random.gumbel(size=row.shape)).argmax()


def first_alone(i, row):
    return drawn(i, row) if i else row.argmax()


def last_argmax(i, row):
    return np.flatnonzero(row == row.max())[-1]


def of_nan(i, row):
    with np.errstate(all="ignore"):
        return softmax(row / np.float32(0)).argmax()


def of_infinity(i, row):
    with np.errstate(all="ignore"):
        return (row / np.float32(0)).argmax()


def users(choose=argmax, accepts=None, bonus=None):
    """Return a user's verifier for temperature 0, one request at a time; by default it accepts its own choice."""

    def verify(target_logits, draft_token_ids, draft_logits, *, temperature):
        output = np.full((len(target_logits), target_logits.shape[1]), -1)
        for r, (rows, drafts) in enumerate(zip(target_logits, draft_token_ids)):
            for i, x in enumerate(drafts):
                token = choose(i, rows[i])
                if not (token == x if accepts is None else accepts(i, x, rows[i], draft_logits[r, i])):
                    output[r, i] = token
                    break
                output[r, i] = x
            else:
                output[r, -1] = (bonus or choose)(len(drafts), rows[-1])
        return output

    return verify


USERS = {
    "p >= q": (users(accepts=lambda i, x, p, q: softmax(p)[x] >= softmax(q)[x]), "greedy_accepts_if_likelier"),
    "a coin": (
        users(accepts=lambda i, x, p, q: random.random() * softmax(q)[x] <= softmax(p)[x]),
        "greedy_accepts_if_likelier",
    ),
    "2 p >= q": (users(accepts=lambda i, x, p, q: 2 * softmax(p)[x] >= softmax(q)[x]), "greedy_accepts_if_likelier"),
    "p / q > 1": (users(accepts=lambda i, x, p, q: softmax(p)[x] / softmax(q)[x] > 1), "greedy_accepts_if_likelier"),
    "everything": (users(accepts=lambda i, x, p, q: True), "greedy_accepts_everything"),
    "after the first": (users(accepts=lambda i, x, p, q: i or x == p.argmax()), "greedy_accepts_after_the_first"),
    "bonus drawn": (users(bonus=drawn), "greedy_bonus_drawn"),
    "bonus of any token": (users(bonus=lambda i, row: random.integers(len(row))), "greedy_bonus_drawn"),
    "drawn": (users(drawn), "greedy_draws"),
    "later drawn": (users(first_alone), "greedy_first_token_alone"),
    "later drawn, argmax accepted": (
        users(first_alone, lambda i, x, p, q: x == p.argmax()),
        "greedy_first_token_alone",
    ),
    "last of equal": (users(last_argmax), "greedy_last_of_equal_logits"),
    "any of equal": (users(accepts=lambda i, x, p, q: p[x] == p.max()), "greedy_last_of_equal_logits"),
    "NaN": (users(of_nan), "greedy_divides_by_0"),
    "NaN accepts": (users(accepts=lambda i, x, p, q: True, bonus=of_nan), "greedy_divides_by_0"),
    "infinity": (users(of_infinity), "greedy_divides_by_0"),
    "always 0": (users(lambda i, row: 0, lambda i, x, p, q: False), "greedy_divides_by_0"),
}


@pytest.mark.parametrize("name", USERS)
def test_a_wrong_greedy_verifier_is_seen_with_every_seed_and_named_first(name):
    verify, mistake = USERS[name]
    for seed in SEEDS:
        report = asked(verify, seed=seed)
        assert not report.passed
        assert report.suspects[:1] == [mistake], str(report)
    (failed,) = report.checks
    assert "of the 400 of its call" in failed.detail
    assert "called: verify(np.array(" in failed.detail


@pytest.mark.parametrize("size", SIZES)
def test_right_greedy_verifiers_pass_at_every_size_with_every_seed(size):
    subjects = [*RIGHT.values(), (users(), None), (users(accepts=lambda i, x, p, q: False), None)]
    for seed in SEEDS:
        for verify, draft in subjects:
            assert asked(verify, draft, size, seed).passed


UNSEEN = {("greedy_accepts_after_the_first", 1, 2), ("greedy_accepts_after_the_first", 1, 50)} | {
    ("greedy_accepts_if_likelier", drafts, 2) for drafts in (1, 5)
}
"""They are right there: nothing follows a single draft; of two tokens a draft that is no argmax has q > 1/2 > p."""


@pytest.mark.parametrize("size", SIZES)
def test_listed_greedy_mistakes_are_seen_at_every_size_where_they_are_wrong(size):
    names = [name for name, mistake in MISTAKES.items() if mistake.failed_checks == {"greedy"}]
    assert len(names) == 8
    for name in names:
        assert asked(*MISTAKES[name].verifiers, size=size).passed == ((name, *SIZES[size]) in UNSEEN)


@pytest.mark.parametrize("draft", [None, Drafter()])
def test_the_texts_have_what_tells_mistakes_apart(draft):
    settings = Settings(3, 5, 200_000, seed=0)
    target, drafts, *_ = arguments = greedy.make_texts(Subject.of(TOKENS, draft), settings)
    best, others = target.argmax(axis=2), greedy.make_texts(Subject.of(TOKENS, draft), settings._replace(seed=1))
    right = drafts == best[:, :-1]
    accepted = np.cumprod(right, axis=1).sum(axis=1)
    assert np.bincount(accepted).tolist() == [100] * 4
    assert right[accepted == 0, 1:].any()
    assert not right[accepted == 0, 1:].all()
    assert {*best.ravel()} == {*range(5)}
    assert ((target == target.max(axis=2, keepdims=True)).sum(axis=2) > 1).mean() > 0.2
    assert (target[0] != others.target_logits[0]).any()
    assert (drafts == arguments.draft_logits.argmax(axis=2)).all()


def at_zero(change):
    """A right verifier whose output at temperature 0 is changed."""

    def verify(target_logits, draft_token_ids, draft_logits=None, *, temperature, seeds, positions):
        options = {"temperature": temperature, "seeds": seeds, "positions": positions}
        token_ids = TOKENS(target_logits, draft_token_ids, draft_logits, **options)
        return token_ids if temperature else change(token_ids)

    return verify


def test_one_wrong_token_of_one_text_is_enough():
    def change(token_ids):
        token_ids[3, -1] = (token_ids[3, -1] + 1) % 5
        return token_ids

    report = check(at_zero(change), requests=1_000)
    (failed,) = (each for each in report.checks if not each.passed)
    assert (failed.name, failed.p_value) == ("greedy", None)
    assert "wrong: 1 of 100 bonus tokens\ntoken 4 of [" in failed.detail
    assert "1.500 accepted drafts a step, 1.500 possible" in failed.detail


def test_what_is_no_output_at_temperature_0_is_an_error():
    failed = by_name(check(at_zero(np.zeros_like), requests=1_000))["greedy"]
    assert not failed.passed
    assert "after a rejection comes one token" in failed.detail


def test_an_exception_at_temperature_0_is_a_refusal():
    def change(token_ids):
        raise ValueError("greedy requests go elsewhere")

    report = check(at_zero(change), requests=1_000)
    assert report.passed
    assert [note for note in report.notes if "greedy requests go elsewhere" in note]


def test_errors_that_no_listed_mistake_makes_have_no_name():
    report = asked(users(lambda i, row: len(row) - 1 if i == 0 else row.argmax()))
    assert not report.passed
    assert report.suspects == []
    assert "No mistake in the list fits" in str(report)
