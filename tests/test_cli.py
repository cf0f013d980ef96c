"""The command line, on the models that come with the package."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

import specdecode
from specdecode import cli, commands
from specdecode.demo import DRAFT
from specdecode.integrations import transformers as integration
from specdecode.integrations.transformers import TokenKind
from specdecode.sampler import Method
from specdecode.synthetic import Shape
from tests.examples import fences

PAGE = Path(__file__).parent.parent / "docs" / "use" / "transformers.md"


@pytest.fixture(autouse=True)
def wide_and_plain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def run(capsys, *arguments):
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def unmarked(text):
    """The text without the marks of recovered, bonus and undrafted tokens."""
    return re.sub(
        r"\[-(.*?)-\]|\{\+(.*?)\+\}|\[=(.*?)=\]", lambda match: "".join(filter(None, match.groups())), text, flags=re.S
    )


def python(program: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run a program in a process of its own."""
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)


def test_help_does_not_wait_for_pytorch():
    program = (
        "import sys\nfrom specdecode import cli\n"
        "try:\n    cli.main(sys.argv[1:])\nfinally:\n    assert not {'torch', 'rich', 'numpy'} & set(sys.modules)"
    )
    for arguments in (["--help"], ["generate", "--help"], ["--version"]):
        done = python(program, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "specdecode" in done.stdout


def test_the_demo_says_how_many_texts_it_writes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    assert f"per text; {commands.TEXTS} texts per prompt (" in " ".join(capsys.readouterr().out.split())


def test_the_package_can_be_run():
    shown = subprocess.run(
        [sys.executable, "-m", "specdecode", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == f"specdecode {specdecode.__version__}\n"


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"specdecode {specdecode.__version__}\n"


def test_choices_are_those_of_the_library():
    assert tuple(method for method in get_args(Method) if method != "synthetic") == cli.METHODS
    assert get_args(Shape) == cli.SHAPES


INTERRUPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from specdecode.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("torch", ["solve", "--rate", "0.5", "--num-draft-tokens", "3"]),
        ("rich.table", ["demo"]),
        ("transformers", ["generate", "--prompt", "x"]),
    ],
)
def test_an_interrupted_import_ends_in_one_line(module, command):
    done = python(INTERRUPT, module, *command)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "specdecode: interrupted\n")


def test_an_interrupted_generation_ends_in_one_line():
    command = [sys.executable, "-m", "specdecode", "generate", "--prompt", "class", "--max-new-tokens", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()  # it has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "specdecode: interrupted\n")


def test_an_interrupted_demo_ends_in_one_line(capsys, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(integration, "generate", interrupted)
    status, _, err = run(capsys, "demo")
    assert (status, err) == (130, "specdecode: interrupted\n")


def test_no_color_means_no_escape_sequences(capsys, monkeypatch):
    commands = (
        ("solve", "--rate", "0.69", "--num-draft-tokens", "3"),
        ("generate", "--prompt", "def main(", "--max-new-tokens", "8"),
        ("demo", "--prompt", "def main(", "--max-new-tokens", "4"),
    )
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    for command in commands:
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert "\x1b[" in run(capsys, *command)[1]
        monkeypatch.setenv("NO_COLOR", "1")
        status, out, err = run(capsys, *command)
        assert status == 0
        assert "\x1b" not in out + err


def test_solve_shows_the_schedule(capsys):
    status, out, _ = run(capsys, "solve", "--rate", "0.69", "--num-draft-tokens", "3")
    assert status == 0
    assert "base rate 0.908360   decay 0.850000" in out
    assert "mean rate 0.690000   acceptance length 3.0700" in out
    assert [float(joint) for joint in re.findall(r"\d +0\.\d+ +(0\.\d+) +█+", out)] == [0.908360, 0.701350, 0.460289]
    bars = [len(bar) for bar in re.findall("█+", out)]
    assert bars == [round(36 * joint) for joint in (0.908360, 0.701350, 0.460289)]


def test_solve_for_a_length_has_the_shape_that_the_library_has(capsys):
    _, out, _ = run(capsys, "solve", "--length", "2.5", "--num-draft-tokens", "3")
    assert "base rate" not in out
    assert re.findall(r"\d +\S+ +(\d\.\d{6})", out) == ["1.000000", "0.500000", "0.000000"]
    _, out, _ = run(capsys, "solve", "--length", "1.75", "--num-draft-tokens", "2", "--shape", "constant")
    assert "base rate 0.500000   decay 1.000000" in out


def test_bad_values_end_in_one_line_that_names_them(capsys, tmp_path):
    for arguments, message in [
        (("solve", "--rate", "1.5", "--num-draft-tokens", "3"), "rate: expected a real number in [0, 1], got 1.5"),
        (("solve", "--rate", "0.5", "--num-draft-tokens", "0"), "num_draft_tokens: expected a positive int, got 0"),
        (("generate", "--prompt", "x", "--temperature", "-1"), "--temperature: expected a finite float >= 0, got -1.0"),
        (("generate", "--prompt", "x", "--top-k", "-1"), "--top-k: expected an int >= 0, got -1"),
        (("generate", "--prompt", "x", "--top-p", "0"), "--top-p: expected a float in (0, 1], got 0.0"),
        (("generate", "--prompt", "x", "--top-p", "nan"), "--top-p: expected a float in (0, 1], got nan"),
        (("generate", "--prompt", "x", "--min-p", "1.5"), "--min-p: expected a float in [0, 1], got 1.5"),
        (("demo", "--top-k", "-1"), "--top-k: expected an int >= 0, got -1"),
        (("demo", "--min-p", "-0.1"), "--min-p: expected a float in [0, 1], got -0.1"),
        (("generate", "--prompt", ""), "--prompt: expected at least one token, got ''"),
        (("generate", "--prompt", "x", "--target", str(tmp_path)), "--draft: expected a folder, because --target"),
        (("generate", "--prompt", "x", "--device", "nowhere"), "--device: expected a device that PyTorch can use here"),
        (("demo", "--device", "cuda:99"), "--device: expected a device that PyTorch can use here, got 'cuda:99'"),
        (("demo", "--target", str(tmp_path), "--draft", str(tmp_path)), "expected a folder with a model"),
        (("demo", "--max-new-tokens", "3"), "--max-new-tokens: expected at least 4"),
    ]:
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, "")
        assert message in err.replace("\n", " ")
        assert "Traceback" not in err


UNREADABLE = {
    "nothing": lambda folder: shutil.rmtree(folder),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "a config that is not JSON": lambda folder: (folder / "config.json").write_text("{"),
    "a config of no model": lambda folder: (folder / "config.json").write_text("{}"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "broken weights": lambda folder: (folder / "model.safetensors").write_bytes(bytes(range(256))),
    "broken tokenizer": lambda folder: (folder / "tokenizer.json").write_text('{"model": 1}'),
}


@pytest.mark.parametrize(
    ("option", "case"),
    [("--target", case) for case in UNREADABLE] + [("--draft", "nothing"), ("--draft", "broken weights")],
)
def test_folders_that_cannot_be_read_end_in_one_line(capsys, tmp_path, option, case):
    folder = tmp_path / "model"
    shutil.copytree(DRAFT, folder)
    UNREADABLE[case](folder)
    models = ("--target", str(folder), "--draft", str(DRAFT)) if option == "--target" else ("--draft", str(folder))
    status, out, err = run(capsys, "generate", "--prompt", "x", *models)
    assert (status, out) == (2, "")
    line = err.splitlines()[-1]
    assert line.startswith(
        f"specdecode: {option}: expected a folder with a model in Hugging Face format, got {folder}: "
    )
    assert "Traceback" not in err


def test_a_folder_that_may_not_be_read_ends_in_one_line(capsys, monkeypatch, tmp_path):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    status, out, err = run(capsys, "generate", "--prompt", "x", "--target", str(tmp_path), "--prompt-lookup")
    assert (status, out) == (2, "")
    assert err.startswith("specdecode: --target: expected a folder with a model in Hugging Face format")
    assert "Permission denied" in err
    assert err.count("\n") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_models_run_on_the_device_asked_for(capsys):
    for command in (("generate", "--prompt", "def main("), ("demo",)):
        status, out, _ = run(capsys, *command, "--device", "cuda", "--max-new-tokens", "8")
        assert status == 0
        assert out


@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_generate_marks_recovered_and_bonus_tokens(capsys, method):
    status, out, _ = run(capsys, "generate", "--prompt", "def main(", "--max-new-tokens", "40", "--method", method)
    assert status == 0
    assert "def main(" in out
    assert "[-" in out
    assert "{+" in out
    assert "Acceptance rate (%):" in out


TRUNCATION = ("--top-k", "20", "--top-p", "0.9", "--min-p", "0.02")


def generated(capsys, *options):
    """The text that `generate` writes, without marks."""
    status, out, _ = run(capsys, "generate", "--prompt", "class A:", "--max-new-tokens", "40", *options)
    assert status == 0
    return unmarked(out[out.index("class A:") : out.index("-------- Speculative")])


@pytest.mark.parametrize("truncation", [(), TRUNCATION], ids=["whole rows", "truncated"])
def test_strict_generates_the_same_text_with_any_drafter(capsys, truncation):
    texts = [
        generated(capsys, "--method", "strict", *truncation, *drafter)
        for drafter in ((), ("--num-draft-tokens", "1"), ("--prompt-lookup",))
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("option", [("--top-k", "1"), ("--top-p", "0.001"), ("--min-p", "1")], ids=" ".join)
def test_truncation_to_one_token_generates_the_greedy_text(capsys, option):
    hot = ("--temperature", "2")
    greedy = generated(capsys, "--temperature", "0")
    assert generated(capsys, *hot, *option) == greedy
    assert generated(capsys, *hot) != greedy


@pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")
def test_the_command_of_the_page_runs(capsys):
    (example,) = (block for block in fences(PAGE) if block.language == "bash")
    program, *arguments = shlex.split(example.code)
    assert program == "specdecode"
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert arguments[arguments.index("--prompt") + 1] in out


def test_the_demo_truncates_all_methods_and_says_so(capsys, monkeypatch):
    sampled, generate = [], integration.generate

    def recorded(*arguments, **options):
        sampled.append([options[name] for name in ("temperature", "top_k", "top_p", "min_p")])
        return generate(*arguments, **options)

    monkeypatch.setattr(integration, "generate", recorded)
    status, out, _ = run(capsys, "demo", "--max-new-tokens", "8", *TRUNCATION)
    assert status == 0
    assert "strict, temperature 0.8, top-k 20, top-p 0.9, min-p 0.02, 3 drafts per step" in out
    assert "strict was identical to plain decoding, token for token (48 of 48 texts)" in out
    assert sampled == [[0.8, 20, 0.9, 0.02]] * 3 + [[0.0, None, None, None]]


def test_demo_compares_the_methods_and_says_that_strict_is_plain_decoding(capsys):
    status, out, _ = run(capsys, "demo", "--max-new-tokens", "24")
    assert status == 0
    rows = {}
    for name in ("strict", "probabilistic", "block", "synthetic", "prompt lookup", "greedy"):
        row = re.search(
            rf"^ {name} +(\d\.\d\d) +(?:([+-]\d\.\d{{3}})±(\d\.\d{{3}}))? +[\d ]+ +(\d+\.\d)%", out, flags=re.M
        )
        rows[name] = {
            heading: float(cell or "nan") for heading, cell in zip(("accepted", "by", "error", "saved"), row.groups())
        }
        assert rows[name]["saved"] == pytest.approx(100 - 100 / (1 + rows[name]["accepted"]), abs=0.3)
    # The mean differences are those of the means, and what the theory says about them is seen at 2 standard errors.
    for name in ("strict", "block"):
        apart = rows[name]["accepted"] - rows["probabilistic"]["accepted"]
        assert rows[name]["by"] == pytest.approx(apart, abs=0.011)
    assert rows["strict"]["by"] < 2 * rows["strict"]["error"]
    assert rows["block"]["by"] > -2 * rows["block"]["error"]
    assert rows["synthetic"]["accepted"] == pytest.approx(3 * 0.69, abs=0.15)
    assert "strict was identical to plain decoding, token for token (48 of 48 texts)" in out
    calls, tokens = map(int, re.search(r"(\d+) calls of the target instead of (\d+),", out).groups())
    assert calls < tokens == 48 * 24


def test_the_demo_counts_only_steps_that_were_allowed_all_drafts():
    steps = [
        integration.Step(
            request, [7] * (accepted + 1), [TokenKind.ACCEPTED] * accepted + [TokenKind.BONUS], [7] * drafts
        )
        for request, accepted, drafts in [(0, 2, 3), (1, 3, 3), (0, 0, 0), (1, 0, 3), (0, 2, 2), (1, 1, 1)]
    ]
    # Of 8 tokens request 0 has 3, then 4, so that its last step may have 3 drafts; request 1 has 4, then 5.
    assert commands.accepted_in(steps, num_draft_tokens=3, max_new_tokens=8)[:, 0].tolist() == [2, 3, 0, 0, 2]
