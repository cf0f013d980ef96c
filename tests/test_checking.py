"""The checker: right verifiers pass, wrong ones fail, and what it says of them is true."""

import importlib.util
import json
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binom, kstest

from specdecode import cli
from specdecode.checking import check, checker, models, statistics, subjects
from specdecode.checking.cases import CASES, HISTORY
from specdecode.checking.mistakes import MISTAKES
from specdecode.checking.settings import Settings
from specdecode.checking.verifiers import BLOCKS, STRICT, TOKENS, Drafter, Use, Verifier
from tests.conftest import ON_GPU
from tests.support.enumeration import Case, normalised, sequence_distribution
from tests.support.exactness import accepted_distribution, accepted_distribution_of_blocks, overlap

RIGHT = {
    "tokens": (TOKENS, None),
    "tokens-with-their-drafter": (TOKENS, Drafter()),
    "blocks": (BLOCKS, Drafter()),
    "strict": (STRICT, None),
    "strict-with-shared-noise": (STRICT, Drafter(use=Use.OWN)),
}
SIZES = {"K1-V2": (1, 2), "K3-V5": (3, 5), "K6-V4": (6, 4), "K2-V100": (2, 100)}


def by_name(report):
    return {each.name: each for each in report.checks}


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def student(recovered=lambda p, q: np.maximum(p - q, 0), bonus_row=-1):
    """What a student writes: one request at a time, and no argument more than needed."""
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


def test_a_run_of_the_default_size_asks_all_questions():
    report = check(TOKENS, Drafter())
    assert report.passed, str(report)
    asked = {each.name for each in report.checks}
    assert {case.name for case in CASES} | {"requests of a call", "calls", "steps"} <= asked
    assert {"first token", "token 2", "token 3", "bonus token", "acceptance", "temperature 0.6: bonus token"} <= asked
    assert by_name(report)["joint"].detail.endswith("0.030")
    assert [note for note in report.notes if "64 of 64" in note and "32 of 32" in note]


def test_fifty_runs_of_right_verifiers_give_no_alarm_and_uniform_p_values():
    p_values = []
    for seed in range(50):
        verifier, drafter = list(RIGHT.values())[seed % len(RIGHT)]
        report = check(verifier, drafter, requests=4_000, seed=seed)
        assert report.passed, str(report)
        p_values += [each.p_value for each in report.checks if 0 < each.p_value < 1 and "accept" not in each.name]
    assert len(p_values) > 500
    # The discrete ones, of few requests, are near 1 a little too often; what counts is that none are small too often.
    for limit in (0.1, 0.01, 0.001):
        assert binom.sf(sum(p < limit for p in p_values) - 1, len(p_values), limit) > 1e-4
    assert kstest(p_values, "uniform").pvalue > 1e-6


def test_what_a_verifier_does_not_take_is_left_out():
    report = check(student(), requests=5_000)
    assert report.passed, str(report)
    assert {"temperature 0.6", "greedy", "steps", "ragged drafts"} & set(by_name(report)) == set()
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


def test_the_same_seed_gives_the_same_report():
    one, two, other = (check(TOKENS, requests=2_000, seed=seed) for seed in (1, 1, 2))
    assert one.checks == two.checks
    assert one.checks != other.checks


# ---- Wrong ones --------------------------------------------------------------------------------------------------------

HIDDEN = {
    "bonus_without_temperature": 200_000,
    "bonus_from_last_slot": 100_000,
    "temperature_for_target_alone": 100_000,
    "block_residual_unscaled": 100_000,
    "block_one_uniform": 100_000,
    "drafts_without_temperature": 100_000,
}
"""What changes little, and only in a case with few of the requests, needs larger runs."""


@pytest.mark.parametrize("name", MISTAKES)
def test_every_listed_mistake_is_seen(name, monkeypatch):
    monkeypatch.setattr(checker, "by_distribution", lambda *arguments: [])
    mistake = MISTAKES[name]
    assert not check(mistake.verifier, mistake.drafter, requests=HIDDEN.get(name, 20_000)).passed


@pytest.mark.parametrize("name", sorted(set(MISTAKES) - set(HIDDEN))[::7])
def test_a_listed_mistake_is_named_first(name):
    """Some of them, once; `tests.tools.check_suspects` does it for all, with ten seeds."""
    mistake = MISTAKES[name]
    report = check(mistake.verifier, mistake.drafter, requests=50_000)
    assert report.suspects[:1] == [name]
    assert f"1. {name}: " in str(report)


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
        ({"bonus_row": -2}, "bonus_from_last_draft_row"),
    ],
)
def test_a_mistake_is_named_in_code_that_is_not_ours(arguments, name):
    report = check(student(**arguments), requests=20_000)
    assert report.suspects[:1] == [name], str(report)


def test_a_mistake_that_is_not_listed_fails_without_a_name():
    report = check(student(recovered=lambda p, q: (np.maximum(p - q, 0)) ** 2), requests=20_000)
    assert not report.passed
    assert report.suspects == []
    assert "No mistake in the list" in str(report)


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


def test_a_verifier_that_uses_minus_1_as_an_index_is_told_so():
    report = check(student(), requests=1_000)
    assert [note for note in report.notes if "is -1 used as an index?" in note]


# ---- Errors ------------------------------------------------------------------------------------------------------------


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


def raising(ids, drafts):
    raise IndexError("index 7 is out of bounds")


ERRORS = {
    "too narrow": (lambda ids, drafts: ids[:, :-1], "expected [16, 4] integer ids, got int64 [16, 3]"),
    "floats": (lambda ids, drafts: ids.astype(float), "expected [16, 4] integer ids, got float64 [16, 4]"),
    "a string": (lambda ids, drafts: "tokens", "expected [16, 4] integer ids, got"),
    "lists of different lengths": (lambda ids, drafts: [[1], [1, 2]], "expected [16, 4] integer ids, got list"),
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
    "an exception": (raising, "verify raised IndexError: index 7 is out of bounds"),
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
    assert report.suspects == (["goes_on_after_a_rejection"] if name == "after a rejection" else [])


def test_the_input_that_is_shown_can_be_run():
    report = check(returning(lambda ids, drafts: replaced(ids, 0, [9, -1, -1, -1])), requests=500)
    call = report.checks[0].detail.split("called: ")[1].split("returned:")[0]
    arguments = eval(call.strip(), {"np": np, "verify": lambda *positional, **named: (positional, named)})
    (target, drafts), named = arguments
    assert (target.shape, drafts.shape) == ((1, 4, 5), (1, 3))
    assert set(named) == {"draft_logits", "temperature", "seeds", "positions"}


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
        ({"verify": lambda target, drafts, *, top_k: 0}, "got one of (target, drafts, top_k)"),
        ({"draft": lambda logits, top_k: 0}, "draft: expected a function of (draft_logits)"),
        ({"vocab_size": 1}, "vocab_size: expected an integer of at least 2, got 1"),
        ({"requests": 1.5}, "requests: expected an integer of at least 100, got 1.5"),
        ({"only": "everything"}, "only: expected the name of a check"),
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


# ---- Mathematics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5])
def test_p_values_hold_far_out_in_the_tail(probability):
    """All outcomes of a binomial number, with their exact probabilities. Cells of fewer than 10 are pooled."""
    size = 2_000
    counts = np.arange(size + 1)
    exact = binom.pmf(counts, size, probability)
    spread = np.sqrt(size * probability)
    near = counts[abs(counts - size * probability) < 12 * spread + 30]
    shares = np.array([[probability, 1 - probability]])
    p_values = np.array([statistics.goodness_of_fit(np.array([[n, size - n]]), shares).p_value for n in near])
    for limit in (1e-3, 1e-5, 1e-7, 1e-8):
        assert exact[near][p_values <= limit].sum() < 1.5 * limit


def test_what_a_run_would_have_seen_is_what_it_sees():
    """A distribution that is wrong by just that much, 300 times."""
    random, cells, size, threshold = np.random.default_rng(0), 20, 20_000, 1e-6
    right = random.dirichlet(np.full(cells, 5.0))
    distance = statistics.detectable(cells - 1, size, threshold)
    order = np.argsort(right)
    wrong = right.copy()
    wrong[order[-5:]] += distance / 5
    wrong[order[:-5]] -= distance * right[order[:-5]] / right[order[:-5]].sum()
    counts = random.multinomial(size, wrong, size=300)
    seen = [statistics.goodness_of_fit(row[None], right[None]).p_value < threshold for row in counts]
    assert sum(seen) >= 297


def test_facts_about_sizes_are_reproduced():
    """N = lambda / (4 TV^2) with lambda = 68, 82, 142 at 2, 7, 63 degrees of freedom, threshold 1e-6, power .999."""
    for degrees, noncentrality in [(2, 68), (7, 82), (63, 142)]:
        got = 4 * statistics.detectable(degrees, 10**6, 1e-6) ** 2 * 10**6
        assert abs(got - noncentrality) < 1


@pytest.mark.parametrize("case", [each for each in CASES if each.how.drafts == "drawn"], ids=lambda case: case.name)
def test_right_is_what_the_reference_enumerates(case):
    pair = Settings(2, 3, 1, 0).models(case._replace(max_states=1000))

    def model(tables):
        def row(prefix):
            state = 0
            for length, token in enumerate(prefix):
                state = pair.following[length][state, token]
            return [Fraction(float(each)) for each in tables[len(prefix)][state]]

        return row

    drafts = pair.num_draft_tokens
    exact = Case(model(pair.target_probs), model(pair.draft_probs), (drafts,), drafts + 1)
    sequences = sequence_distribution(exact.target, drafts + 1)
    states = np.zeros(3 ** (drafts + 1))
    for tokens, probability in sequences.items():
        states[int(sum(token * 3**i for i, token in enumerate(reversed(tokens))))] = probability
    assert np.abs(states - pair.final_states(pair.target_probs)).max() < 1e-12
    for accepted, got in zip(
        (accepted_distribution(exact, overlap), accepted_distribution_of_blocks(exact)),
        pair.most_accepted(pair.draft_probs),
    ):
        assert abs(float(sum(n * share for n, share in accepted.items())) - got) < 1e-9


def test_where_states_are_few_rows_still_depend_on_every_token_before():
    pair = Settings(4, 5, 1, 0).models(HISTORY._replace(max_states=12))
    assert [len(rows) for rows in pair.target] == [1, 5, 12, 12, 12]
    for following in pair.following[1:]:
        assert all(len(set(row)) > 1 for row in following)  # the last token
        assert all(len(set(column)) > 1 for column in following.T)  # and the state before it
    assert normalised([1, 1]) == [Fraction(1, 2)] * 2


def test_no_exact_method_accepts_more_than_the_bound():
    pair = Settings(3, 5, 1, 0).models(HISTORY)
    by_tokens, best = pair.most_accepted(pair.draft_probs)
    for verifier, expected in ((TOKENS, by_tokens), (BLOCKS, best)):
        detail = by_name(check(verifier, requests=100_000, only="acceptance"))["acceptance"].detail
        assert abs(float(detail.split()[0]) - expected) < 0.03


# ---- Without PyTorch, and on the command line --------------------------------------------------------------------------

FILE = """
import numpy as np
random = np.random.default_rng(0)

def verify(target_logits, draft_token_ids):
    logits = target_logits[:, 0]
    if BUG:
        logits = logits / 2
    token = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    return np.concatenate([token[:, None], np.full(draft_token_ids.shape, -1)], axis=1)

def draft(draft_logits):
    return (draft_logits + random.gumbel(size=draft_logits.shape)).argmax(axis=1)
"""

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["rich"] = None  # importing either fails
from specdecode.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def file(tmp_path):
    def write(bug):
        path = tmp_path / "mine.py"
        path.write_text(FILE.replace("BUG", str(bug)))
        return f"{path}:verify"

    return write


@pytest.mark.parametrize(("bug", "status"), [(False, 0), (True, 1)])
def test_the_command_needs_no_torch_and_its_status_says_right_or_wrong(file, bug, status):
    command = [sys.executable, "-c", WITHOUT_TORCH, "check", file(bug), "--requests", "2000", "--drafts", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert ("mine.py:verify: right" in done.stdout) == (status == 0)
    assert done.stderr == ""  # no progress where there is no terminal


def test_the_command_has_json_a_drafter_and_one_question(file, capsys):
    drafter = file(False).replace(":verify", ":draft")
    arguments = ["check", file(False), "--draft", drafter, "--only", "first token", "--requests", "2000", "--json"]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert [each["name"] for each in report["checks"]] == ["first token"]
    assert report["settings"] == {"drafts": 3, "vocabulary": 5, "requests": 2000, "seed": 0}


SHARING = """
import numpy as np
from specdecode.checking.verifiers import TOKENS, Drafter
drawn = []

def draft(draft_logits, *, temperature, seeds, positions, offset):
    drawn.append(offset)
    return Drafter()(draft_logits, temperature=temperature, seeds=seeds, positions=positions, offset=offset)

def verify(target_logits, draft_token_ids, draft_logits, *, temperature, seeds, positions):
    assert drawn
    return TOKENS(target_logits, draft_token_ids, draft_logits, temperature=temperature, seeds=seeds, positions=positions)
"""


def test_a_verifier_and_a_drafter_of_one_file_share_what_is_in_it(tmp_path, capsys):
    (tmp_path / "both.py").write_text(SHARING)
    path = tmp_path / "both.py"
    assert (
        cli.main(["check", f"{path}:verify", "--draft", f"{path}:draft", "--only", "joint", "--requests", "500"]) == 0
    )


def test_a_vocabulary_of_a_real_size_can_be_asked_about():
    report = check(TOKENS, vocab_size=20_000, num_draft_tokens=1, requests=300, only="joint")
    assert report.passed


def test_progress_is_shown_if_asked_for(file, capsys):
    assert cli.main(["check", file(False), "--requests", "2000", "--progress"]) == 0
    assert "padding" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("nobody.py:verify", "expected a Python file"),
        ("{file}:nothing", "expected a function of"),
        ("{broken}:verify", "raised ZeroDivisionError"),
        ("{leaving}:verify", "raised SystemExit"),
        ("nobody", "expected file.py:function, or one of specdecode, transformers, vllm"),
        ("specdecode:block:eager:more", "expected specdecode:[method]:[backend], got"),
        ("specdecode:greedy", "method: "),
        ("flashinfer", "expected one whose project is installed"),
    ],
)
def test_what_cannot_run_is_status_2_and_says_why(subject, message, file, tmp_path, capsys):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaving.py").write_text("exit(0)")
    mine = file(False).removesuffix(":verify")
    assert (
        cli.main(["check", subject.format(file=mine, broken=tmp_path / "broken.py", leaving=tmp_path / "leaving.py")])
        == 2
    )
    assert message in capsys.readouterr().err


# ---- Subjects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", *["triton"] * ON_GPU])
@pytest.mark.parametrize("method", ["probabilistic", "block", "strict"])
def test_this_packages_methods_are_right(method, backend):
    subject = subjects.load(f"specdecode:{method}:{backend}")
    report = check(subject.verify, subject.draft, requests=40_000, name=subject.name)
    assert report.passed, str(report)
    assert {case.name for case in CASES} <= set(by_name(report))  # none is left out


def test_transformers_is_right():
    subject = subjects.load("transformers")
    report = check(subject.verify, requests=2_000, name=subject.name)
    assert report.passed, str(report)
    assert "transformers 5" in str(report)


@pytest.mark.parametrize("name", subjects.SUBJECTS)
def test_every_subject_loads_or_says_what_is_missing(name):
    missing = {"specdecode": None, "transformers": "transformers"}.get(name, name)
    if missing is None or importlib.util.find_spec(missing):
        assert callable(subjects.load(name).verify)
        return
    with pytest.raises(ValueError, match=f"installed, got '{name}': No module named"):
        subjects.load(name)
