"""`specdecode check`: it needs no PyTorch, its exit status says right or wrong, and its ready-made subjects are right."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from specdecode import cli
from specdecode.checking import Check, Report, check, subjects
from specdecode.checking.cases import CASES
from specdecode.checking.junit import junit
from specdecode.checking.lossy import RULES
from tests.conftest import ON_GPU
from tests.support.examples import fences

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "use" / "ci.md"

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
        ("mixture:most", "expected mixture:[weight], got 'mixture:most'"),
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


# ---- In CI ------------------------------------------------------------------------------------------------------------


def test_junit_has_a_test_case_for_each_check_and_the_report(file, tmp_path, capsys):
    path = tmp_path / "reports" / "check.xml"
    assert cli.main(["check", file(True), "--requests", "2000", "--drafts", "2", "--junit", str(path)]) == 1
    printed = capsys.readouterr().out
    suite = ElementTree.parse(path).getroot()
    cases, failures = suite.findall("testcase"), suite.findall("testcase/failure")
    lines = re.findall(r"^(?:ok  |FAIL|--  )  (.+?)  ", printed, flags=re.M)
    assert [case.get("name") for case in cases] == lines
    assert len(set(lines)) == len(lines)  # GitLab shows one of those that share a name
    assert (suite.get("tests"), suite.get("failures")) == (str(len(cases)), str(len(failures)))
    assert 0 < len(failures) < len(cases)
    assert suite.get("skipped") == str(printed.count(": not tested, too few requests")) != "0"
    assert all("No mistake in the list fits" in failure.text for failure in failures)
    assert failures[0].get("message") in failures[0].text
    assert suite.findtext("system-out") == printed.strip()


def test_a_failure_in_junit_has_the_suspects_and_can_be_read_whatever_characters_a_message_has():
    detail = "raised \x1b[31mE\x00\ud800: <a & 'b'>\x1b[0m é"
    report = Report([Check("greedy", False, None, detail)], suspects=["accept_everything"])
    failure = ElementTree.fromstring(junit(report)).find("testcase/failure")
    assert failure.get("message") == "raised \ufffd[31mE\ufffd\ufffd: <a & 'b'>\ufffd[0m é"
    assert "This looks like:\n1. accept_everything: " in failure.text


def test_a_wrong_report_can_be_raised_with_its_text():
    Report([Check("joint", True, 0.5, "")]).raise_if_wrong()
    report = Report([Check("joint", True, 0.5, ""), Check("greedy", False, None, "token 3")])
    with pytest.raises(AssertionError) as error:
        report.raise_if_wrong()
    assert str(error.value) == str(report)


@pytest.fixture
def page_files(tmp_path):
    """The files that the page on CI shows, by their names."""
    if not PAGE.exists():
        pytest.skip("not in a checkout")
    files = {}
    for block in fences(PAGE):
        if name := re.search(r'title="(.+?)"', block.info):
            files[name[1]] = block.code
            if name[1].endswith(".py"):
                compile(block.code, name[1], "exec")
                (tmp_path / name[1]).write_text(block.code)
    return files


@pytest.mark.skipif(not shutil.which("bash"), reason="the action's commands are for Bash")
@pytest.mark.parametrize(
    ("verifier", "status"),
    [("verifier.py:verify", 0), ("mine.py:verify", 1), (f"{ROOT}/specdecode/checking/verifiers.py:TOKENS", 0)],
    ids=["of the page", "wrong", "of the workflow"],
)
def test_the_action_checks_a_verifier(verifier, status, page_files, file, tmp_path):
    file(True)
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    *_, step = action["runs"]["steps"]
    given = {"verifier": verifier, "arguments": "--requests 2000 --drafts 2"}
    inputs = {name: given.get(name, about.get("default")) for name, about in action["inputs"].items()}
    environment = {name: inputs[re.search(r"inputs\.(\w+)", value)[1]] for name, value in step["env"].items()}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["PYTHONPATH"] = str(ROOT)  # in place of the installation
    command = ["bash", "-e", "-c", step["run"]]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert f"{verifier}: {'WRONG' if status else 'right'}" in done.stdout
    assert ElementTree.parse(tmp_path / inputs["junit"]).getroot().get("failures") != "0" or status == 0


def test_the_page_on_ci_names_inputs_of_the_action_and_pinned_versions(page_files):
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = yaml.safe_load(page_files[".github/workflows/verifier.yml"])["jobs"]["check"]["steps"]
    (use,) = (step for step in steps if step["uses"].startswith("OWNER/"))
    assert use["with"].keys() <= action["inputs"].keys()
    assert action["inputs"]["junit"]["default"] in [step.get("with", {}).get("path") for step in steps]
    script = " ".join(yaml.safe_load(page_files[".gitlab-ci.yml"])["verifier"]["script"])
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    for package in ("numpy", "scipy"):
        (pin,) = (line for line in pins if line.startswith(f"{package}=="))
        assert pin in script


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


@pytest.mark.parametrize("name", [*subjects.SUBJECTS, *RULES])
def test_every_subject_loads_or_says_what_is_missing(name):
    missing = None if name in ("specdecode", *RULES) else name
    if missing is None or importlib.util.find_spec(missing):
        assert callable(subjects.load(name).verify)
        return
    with pytest.raises(ValueError, match=f"installed, got '{name}': No module named"):
        subjects.load(name)
