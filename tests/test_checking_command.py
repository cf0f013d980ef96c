"""`specdecode check`: it needs no PyTorch, its exit status says right or wrong, and its ready-made subjects are right."""

import importlib.util
import json
import subprocess
import sys

import pytest

from specdecode import cli
from specdecode.checking import check, subjects
from specdecode.checking.cases import CASES
from specdecode.checking.lossy import RULES
from tests.conftest import ON_GPU

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


def test_the_command_checks_trees_and_lossy_rules(capsys):
    assert cli.main(["check", "specdecode:strict:eager", "--tree=-1,0,0", "--requests", "1000"]) == 0
    assert "tree [-1, 0, 0]" in capsys.readouterr().out
    assert cli.main(["check", "mixture:0.5", "--allow", "0.01", "--requests", "30000", "--json"]) == 1
    low, estimate, high = json.loads(capsys.readouterr().out)["lossiness"]
    assert 0.01 < low < estimate < high


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["specdecode:block", "--tree=-1,0"], "subject: expected a verifier of trees"),
        (["specdecode:strict", "--tree=-1,a"], "--tree: expected the parent of each node"),
    ],
)
def test_what_is_no_tree_is_refused(arguments, message, capsys):
    assert cli.main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err


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


def test_progress_is_shown_if_asked_for(file, capsys):
    assert cli.main(["check", file(False), "--requests", "2000", "--progress"]) == 0
    assert "padding" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("nobody.py:verify", "subject: expected file.py:function and a file that exists, got 'nobody.py:verify'"),
        ("{file}:nothing", "expected a function of"),
        ("{broken}:verify", "raised ZeroDivisionError"),
        ("{leaving}:verify", "raised SystemExit"),
        ("nobody", "expected file.py:function, or one of specdecode, transformers, vllm"),
        ("specdecode:block:eager:more", "expected specdecode:[method]:[backend], got"),
        ("specdecode:greedy", "method: "),
        ("mixture:most", "expected mixture:[options], got 'mixture:most'"),
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


@pytest.mark.parametrize("drafter", ["specdecode:strict", "nobody.py:draft"])
def test_a_drafter_is_a_function_of_a_file(drafter, file, capsys):
    assert cli.main(["check", file(False), "--draft", drafter]) == 2
    assert f"draft: expected file.py:function and a file that exists, got '{drafter}'" in capsys.readouterr().err


# ---- Subjects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", *["triton"] * ON_GPU])
@pytest.mark.parametrize("method", ["probabilistic", "block", "strict"])
def test_this_packages_methods_are_right(method, backend):
    subject = subjects.load(f"specdecode:{method}:{backend}")
    report = check(subject.verify, subject.draft, requests=40_000, name=subject.name)
    assert report.passed, str(report)
    assert {case.name for case in CASES} <= {each.name for each in report.checks}  # none is left out


def test_transformers_is_right():
    subject = subjects.load("transformers")
    report = check(subject.verify, requests=2_000, name=subject.name)
    assert report.passed, str(report)
    assert "transformers 5" in str(report)


@pytest.mark.parametrize("name", subjects.SUBJECTS)
def test_every_subject_loads_or_says_what_is_missing(name):
    missing = None if name in ("specdecode", *RULES) else name
    if missing is None or importlib.util.find_spec(missing):
        assert callable(subjects.load(name).verify)
        return
    with pytest.raises(ValueError, match=f"installed, got '{name}': No module named"):
        subjects.load(name)
