"""The command line, on the models that come with the package and on tiny ones with tokenizers of other kinds."""

import io
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import specdecode
from specdecode import cli, commands
from specdecode.demo import DRAFT, comparison
from specdecode.integrations import transformers as integration
from specdecode.integrations.transformers import TokenKind
from specdecode.sampler import Method
from specdecode.synthetic import Shape
from tests.support.examples import fences

PAGE = Path(__file__).parent.parent / "docs" / "use" / "transformers.md"


@pytest.fixture(autouse=True)
def wide_and_plain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def run(capsys, *arguments):
    capsys.readouterr()  # such as the progress bars of models that were saved
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
    assert f"of each text; {comparison.TEXTS} texts per prompt (" in " ".join(capsys.readouterr().out.split())


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


NEEDS_SIGINT = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send a process SIGINT")


@NEEDS_SIGINT
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


@NEEDS_SIGINT
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


SOLVE = "solve", "--rate", "0.69", "--num-draft-tokens", "3"
PROMPT = "\u00e9 = '\u4e2d'"
PRINTING = {
    "solve": SOLVE,
    "generate": ("generate", "--max-new-tokens", "4", "--prompt", PROMPT),
    "demo": ("demo", "--max-new-tokens", "4", "--prompt", PROMPT),
    "check": ("check", "specdecode:strict:eager", "--only", "first token", "--requests", "100", "--progress"),
}


def printed_in(monkeypatch, encoding: str, *arguments: str, errors: str = "strict") -> str:
    """Return a command's output on a stream with an encoding."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(arguments) == 0
    return stream.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("command", PRINTING)
def test_a_character_that_the_output_cannot_encode_is_replaced(monkeypatch, command):
    printed = printed_in(monkeypatch, "ascii", *PRINTING[command])
    assert ("? = '?'" in printed) == (PROMPT in PRINTING[command])


@pytest.mark.parametrize(
    ("encoding", "bar"), [("ascii", "#"), ("cp1252", "#"), ("cp437", "\u2588"), ("utf-8", "\u2588")]
)
def test_bars_consist_of_a_character_that_the_output_can_encode(monkeypatch, encoding, bar):
    printed = printed_in(monkeypatch, encoding, *SOLVE)
    assert [len(found) for found in re.findall(f"{bar}+", printed)] == [33, 25, 17]
    assert "?" not in printed


def test_a_prompt_beyond_the_encoding_of_the_locale_is_read_as_utf_8(monkeypatch):
    given = PROMPT.encode().decode("ascii", "surrogateescape")  # as Python reads it with LC_ALL=C
    command = ("generate", "--max-new-tokens", "4", "--prompt", given)
    assert "? = '?'" in printed_in(monkeypatch, "ascii", *command, errors="surrogateescape")
    assert PROMPT in printed_in(monkeypatch, "utf-8", *command)


def test_a_way_to_write_other_characters_that_the_user_has_chosen_is_kept(monkeypatch):
    printed = printed_in(monkeypatch, "ascii", *PRINTING["generate"], errors="backslashreplace")
    assert r"\xe9 = '\u4e2d'" in printed


NEEDS_SIGPIPE = pytest.mark.skipif(sys.platform == "win32", reason="Windows has another error for a closed pipe")


def closed_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)  # by line, as standard error is


@NEEDS_SIGPIPE
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("stdout", arguments) for arguments in PRINTING.values()),
        ("stderr", PRINTING["check"]),
        ("stderr", ("solve", "--rate", "2", "--num-draft-tokens", "3")),  # which prints an error
    ],
)
def test_a_closed_pipe_ends_a_command_as_sigpipe_does(monkeypatch, name, arguments):
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, name, stream)
        assert cli.main(arguments) == 128 + signal.SIGPIPE


@NEEDS_SIGPIPE
def test_a_closed_pipe_leaves_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    for arguments, status in ((SOLVE, 128 + signal.SIGPIPE), (["--version"], 0)):
        command = [sys.executable, "-m", "specdecode", *arguments]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (status, "")
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_output_that_cannot_be_written_ends_in_one_line(capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(SOLVE) == 2
    assert capsys.readouterr().err == "specdecode: [Errno 28] No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_messages_that_cannot_be_written_change_no_status(capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        check = "check", "specdecode:strict:eager", "--requests", "500", "--only", "greedy", "--progress"
        assert cli.main(check) == 0
        assert "greedy" in capsys.readouterr().out
        assert cli.main(("solve", "--rate", "7", "--num-draft-tokens", "3")) == 2
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(("solve", "--rate", "7", "--num-draft-tokens", "3")) == 2
    assert capsys.readouterr().out == ""


def test_what_is_missing_is_named_with_a_command_that_installs_it(capsys, monkeypatch):
    for missing in ("rich.box", "transformers", "specdecode.checking.checker"):
        monkeypatch.setitem(sys.modules, missing, None)  # importing it fails
    needed = "specdecode: this command needs transformers: pip install transformers\n"
    assert run(capsys, *PRINTING["generate"]) == (2, "", needed)
    needed = r"specdecode: check needs NumPy and SciPy \(.*\): pip install numpy scipy\n"
    assert re.fullmatch(needed, run(capsys, *PRINTING["check"])[2])
    monkeypatch.delitem(sys.modules, "specdecode.commands")
    with pytest.raises(SystemExit, match=r"^specdecode: the command line needs rich: pip install rich$"):
        cli.main(SOLVE)


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
        (("solve", "--rate", "1.5", "--num-draft-tokens", "3"), "--rate: expected a real number in [0, 1], got 1.5"),
        (("solve", "--rate", "0.5", "--num-draft-tokens", "0"), "--num-draft-tokens: expected a positive int, got 0"),
        (("generate", "--prompt", "x", "--max-new-tokens", "0"), "--max-new-tokens: expected a positive int, got 0"),
        (("generate", "--prompt", "x", "--seed", str(2**70)), "--seed: expected an int of 64 bits, got 11"),
        (("generate", "--prompt", "x", "--temperature", "-1"), "--temperature: expected a finite float >= 0, got -1.0"),
        (("generate", "--prompt", "x", "--top-k", "-1"), "--top-k: expected an int >= 0, got -1"),
        (("generate", "--prompt", "x", "--top-p", "0"), "--top-p: expected a float in (0, 1], got 0.0"),
        (("generate", "--prompt", "x", "--top-p", "nan"), "--top-p: expected a float in (0, 1], got nan"),
        (("generate", "--prompt", "x", "--min-p", "1.5"), "--min-p: expected a float in [0, 1], got 1.5"),
        (("demo", "--top-k", "-1"), "--top-k: expected an int >= 0, got -1"),
        (("demo", "--min-p", "-0.1"), "--min-p: expected a float in [0, 1], got -0.1"),
        (("generate", "--prompt", ""), "--prompt: expected at least one token, got ''"),
        (("generate", "--prompt", "x", "--target", str(tmp_path)), "--draft: expected a folder, because --target is"),
        (("generate", "--prompt", "x", "--device", "nowhere"), "--device: expected a device that PyTorch can use here"),
        (("demo", "--device", "meta"), "--device: expected a device that PyTorch can use here, got 'meta'"),
        (("demo", "--device", "cuda:99"), "--device: expected a device that PyTorch can use here, got 'cuda:99'"),
        (("demo", "--target", str(tmp_path), "--draft", str(tmp_path)), "--target: expected a folder with a model"),
        (("demo", "--max-new-tokens", "3"), "--max-new-tokens: expected at least 4"),
    ]:
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, "")
        assert f"specdecode: {message}" in err.replace("\n", " ")
        assert "Traceback" not in err


@pytest.mark.parametrize("name", ["owner/some-model_1.5B", "gpt2"])
def test_the_name_of_a_model_on_the_hub_ends_in_a_line_that_says_what_works(capsys, name):
    status, out, err = run(capsys, "generate", "--prompt", "x", "--target", name, "--prompt-lookup")
    assert (status, out) == (2, "")
    assert err == (
        f"specdecode: --target: expected a folder with a model in Hugging Face format, got {name}: there is no such folder, "
        f"and models are not downloaded; `hf download {name} --local-dir FOLDER` puts one into a folder\n"
    )


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
UNREADABLE_DRAFTS = "nothing", "broken weights", "broken tokenizer"


@pytest.mark.parametrize(
    ("option", "case"),
    [("--target", case) for case in UNREADABLE] + [("--draft", case) for case in UNREADABLE_DRAFTS],
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


def test_truncation_to_one_token_generates_the_greedy_text(capsys):
    hot = ("--temperature", "2")
    greedy = generated(capsys, "--temperature", "0")
    for option in (("--top-k", "1"), ("--top-p", "0.001"), ("--min-p", "1")):
        assert generated(capsys, *hot, *option) == greedy, option
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
    status, out, _ = run(capsys, "demo", "--max-new-tokens", "4", *TRUNCATION)
    assert status == 0
    assert "(strict, temperature 0.8, top-k 20, top-p 0.9, min-p 0.02)" in out
    assert "strict was identical to plain decoding, token for token (24 of 24 texts)" in out
    assert len(sampled) == 4
    assert all(each == [0.8, 20, 0.9, 0.02] for each in sampled)


def test_the_demo_tells_what_each_method_saves_and_that_strict_is_plain_decoding(capsys, monkeypatch):
    decided, accepted = [], comparison.Comparison.accepted

    def recorded(self):
        decided.append(accepted(self))
        return decided[-1]

    monkeypatch.setattr(comparison.Comparison, "accepted", recorded)
    status, out, _ = run(capsys, "demo", "--max-new-tokens", "24")
    assert status == 0
    (of_methods,) = decided
    rows = {}
    for name in ("strict", "probabilistic", "block", "prompt lookup", "tree"):
        row = re.search(rf"^ *{name} +(\d\.\d\d) +(\d+) *$", out, flags=re.M)
        mean, calls = map(float, row.groups())
        assert calls == pytest.approx(1000 / (1 + mean), abs=6)
        rows[name] = mean
    assert re.search(r"^ *plain decoding +1,000 *$", out, flags=re.M)
    means = {name: each.double().mean(dim=1) for name, each in of_methods.items()}
    assert {name: pytest.approx(rows[name], abs=0.006) for name in means} == {
        name: mean.mean().item() for name, mean in means.items()
    }
    # What the theory says about the differences is seen at 2 standard errors.
    for name, sign in (("strict", -1), ("block", 1)):
        more = sign * (means[name] - means["probabilistic"])
        assert more.mean() > -2 * more.std() / len(more) ** 0.5
    assert "strict was identical to plain decoding, token for token (24 of 24 texts)" in out
    calls, tokens = map(int, re.search(r"(\d+) calls of the target instead of (\d+),", out).groups())
    assert calls < tokens == 24 * 24


def test_the_demo_says_first_what_happens_and_last_what_to_try_which_runs(capsys):
    status, out, _ = run(capsys, "demo", "--max-new-tokens", "4", "--prompt", "def f(", "--prompt", "class A:")
    assert status == 0
    assert out.startswith("A small model drafts 3 tokens; the target checks them in one call.\n")
    program, *arguments = shlex.split(out.splitlines()[-1].removeprefix("Next: "))
    assert program == "specdecode"
    assert arguments[-1] == "def f("
    status, shown, _ = run(capsys, *arguments, "--max-new-tokens", "8")
    assert status == 0
    assert "def f(" in shown


def test_the_calls_of_the_target_are_those_of_the_mean_step():
    def rows(speeds):
        table = comparison.savings_table({"block": 1.0, "tree": 3.0}, 3, speeds)
        return list(zip(*(column.cells for column in table.columns)))

    assert rows({}) == [("plain decoding", "", "1,000"), ("block", "1.00", "500"), ("tree", "3.00", "250")]
    timed = rows({"plain decoding": 1234.5, "tree": 3000})
    assert [row[3] for row in timed] == ["1,234", "", "3,000"]


@pytest.mark.parametrize("plain_seconds", [10, 0.5])
def test_the_demo_shows_times_of_other_models_where_drafts_save_time(capsys, monkeypatch, plain_seconds):
    generate, now = integration.generate, [0.0]

    def takes_time(target, drafter, *arguments, **options):
        now[0] += plain_seconds if drafter is None else 1.0
        return generate(target, drafter, *arguments, **options)

    monkeypatch.setattr(integration, "generate", takes_time)
    monkeypatch.setattr(comparison, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    models = ("--target", str(DRAFT), "--draft", str(DRAFT))
    status, out, _ = run(capsys, "demo", *models, "--max-new-tokens", "5", "--prompt", "def f(")
    assert status == 0
    drafts_save_time = plain_seconds > 1
    speeds = dict(re.findall(r"^ *(plain decoding|strict|prompt lookup|tree) .* ([\d,]+) *$", out, flags=re.M))
    assert (speeds == {"plain decoding": "2", "strict": "20", "prompt lookup": "20", "tree": "20"}) == drafts_save_time
    assert ("tokens a second: " in out) == drafts_save_time
    assert ("No times: nothing was faster" in out) != drafts_save_time


def test_the_demo_counts_only_steps_that_were_allowed_all_drafts():
    steps = [
        integration.Step(
            request, [7] * (accepted + 1), [TokenKind.ACCEPTED] * accepted + [TokenKind.BONUS], [7] * drafts
        )
        for request, accepted, drafts in [(0, 2, 3), (1, 3, 3), (0, 0, 0), (1, 0, 3), (0, 2, 2), (1, 1, 1)]
    ]
    # Of 8 tokens request 0 has 3, then 4, so that its last step may have 3 drafts; request 1 has 4, then 5.
    assert comparison.accepted_in(steps, num_draft_tokens=3, max_new_tokens=8)[:, 0].tolist() == [2, 3, 0, 0, 2]


BYTES = b"\t\n" + "\u00e9\U0001f600".encode()
"""The tokens of two characters, two and four tokens long."""


def fast(tokenizer: Tokenizer, **options) -> PreTrainedTokenizerFast:
    """A tokenizer that begins texts with <s>."""
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>", **options)


def metaspace() -> PreTrainedTokenizerFast:
    """As in SentencePiece: words that begin with a space; what is in no word is spelt in bytes."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in BYTES),
        "\u2581the",
        "\u2581cat",
        "\u2581sat",
        "h",
        "!",
        "\u2581",
    ]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(tokenizer)


def byte_level() -> PreTrainedTokenizerFast:
    """As in GPT-2: everything is spelt in bytes."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((letters, _),) = pre_tokenizer.pre_tokenize_str("the cat sat h!" + BYTES.decode())
    vocabulary = ["<unk>", "<s>", *sorted(set(letters))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    return fast(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """As in BERT: a space before every word; transformers removes it before punctuation."""
    words = ["<unk>", "<s>", "the", "cat", "sat", "##s", "!", "n't", "'"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    return fast(tokenizer, clean_up_tokenization_spaces=True)


TOKENIZERS = {"metaspace": metaspace, "byte level": byte_level, "word piece": word_piece}
ALL_TOKENIZERS = pytest.mark.parametrize("kind", TOKENIZERS)
OF_BYTES = pytest.mark.parametrize("kind", ["metaspace", "byte level"])


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast | None, vocab_size: int, seed: int = 0) -> str:
    """Write a tiny model of random weights, whose texts do not end; return its folder."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, eos_token_id=None, **sizes)).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def model_options(folder: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """The options of a target and a draft."""
    target, draft = (save_model(folder / str(seed), tokenizer, len(tokenizer), seed) for seed in (0, 1))
    return "--target", target, "--draft", draft


def decoded(tokenizer, prompt: str, sequence: list[int]) -> str:
    """A prompt and its continuation, decoded together; <s> is no part of the prompt as it was given."""
    whole = tokenizer.decode(sequence, clean_up_tokenization_spaces=False)
    start = tokenizer.decode(sequence[:1], clean_up_tokenization_spaces=False)
    assert start == "<s>"
    return prompt + whole[len(tokenizer.decode(tokenizer(prompt).input_ids, clean_up_tokenization_spaces=False)) :]


@pytest.fixture
def generations(monkeypatch):
    """The outputs of `generate` in the command line."""
    outputs, generate = [], integration.generate

    def recorded(*arguments, **options):
        outputs.append(generate(*arguments, **options))
        return outputs[-1]

    monkeypatch.setattr(integration, "generate", recorded)
    return outputs


@ALL_TOKENIZERS
@pytest.mark.parametrize("drafter", ["draft", "lookup"])
def test_the_text_that_generate_prints_is_that_of_all_tokens_decoded_together(
    capsys, tmp_path, generations, kind, drafter
):
    tokenizer, prompt = TOKENIZERS[kind](), "the cat"
    models = model_options(tmp_path, tokenizer)
    drafting = ("--prompt-lookup",) if drafter == "lookup" else ()
    for seed in range(3):
        options = ("--max-new-tokens", "60", "--temperature", "1", "--seed", str(seed), *drafting)
        status, out, _ = run(capsys, "generate", "--prompt", prompt, *models, *options)
        assert status == 0
        shown = unmarked(out[out.index(prompt) : out.rindex("\n\n-------- Speculative")])
        assert shown == decoded(tokenizer, prompt, generations[-1].sequences[0].tolist())


@ALL_TOKENIZERS
def test_the_beginning_that_the_demo_prints_is_that_of_all_tokens_decoded_together(capsys, tmp_path, generations, kind):
    tokenizer, prompt = TOKENIZERS[kind](), "the cat"
    models = model_options(tmp_path, tokenizer)
    status, out, _ = run(capsys, "demo", "--prompt", prompt, *models, "--max-new-tokens", "40", "--temperature", "1")
    assert status == 0
    shown = unmarked(out[out.index(f"\n{prompt}") + 1 : out.index("4 texts of 40 tokens")]).rstrip(" ")
    plain = next(each for each in generations if each.sequences.shape[1] >= 40)  # by `strict`, after a warm-up
    assert shown == decoded(tokenizer, prompt, plain.sequences[0].tolist()) + "\n\n"


def cut_in_steps(tokenizer, text: str, *steps: str) -> list[integration.Step]:
    """Steps of a text's tokens, each given as one letter per token: accepted, recovered, bonus or plain."""
    kinds = {kind.name[0]: kind for kind in TokenKind}
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == sum(map(len, steps))
    return [integration.Step(0, [ids.pop(0) for _ in step], [kinds[letter] for letter in step], []) for step in steps]


def printed_by_step(capsys, monkeypatch, tmp_path, tokenizer, prompt: str, steps: list[integration.Step]) -> list[str]:
    """Return the text that `generate` prints after each of these steps, and after the last one."""
    printed = []

    def generate(*_arguments, on_step, **_options):
        for step in steps:
            on_step(step)
            printed.append(capsys.readouterr().out)
        return SimpleNamespace(stats="the end")

    monkeypatch.setattr(integration, "generate", generate)
    folder = save_model(tmp_path / "model", tokenizer, len(tokenizer))
    status, out, _ = run(capsys, "generate", "--prompt", prompt, "--target", folder, "--prompt-lookup")
    assert status == 0
    before, rest = printed[0].split("\n\n", maxsplit=1)[1], out.removesuffix("\n\nthe end\n")
    return [before, *printed[1:], rest]


def test_spaces_between_runs_and_after_the_prompt_are_kept(capsys, monkeypatch, tmp_path):
    tokenizer = metaspace()
    steps = cut_in_steps(tokenizer, "cat sat the", "AR", "B")
    printed = printed_by_step(capsys, monkeypatch, tmp_path, tokenizer, "the", steps)
    assert printed == ["the cat[- sat-]", "{+ the+}", ""]


def test_tabs_stay_tabs(capsys, monkeypatch, tmp_path):
    tokenizer = byte_level()
    steps = cut_in_steps(tokenizer, "\th\t", "AR", "R")
    assert printed_by_step(capsys, monkeypatch, tmp_path, tokenizer, "\t", steps) == ["\t\t[-h-]", "[-\t-]", ""]


def test_a_character_of_several_tokens_is_printed_once_with_the_mark_of_the_last(capsys, monkeypatch, tmp_path):
    tokenizer = byte_level()
    steps = cut_in_steps(tokenizer, "h\u00e9\U0001f600!", "AR", "AAR", "AB", "R")
    printed = printed_by_step(capsys, monkeypatch, tmp_path, tokenizer, "the", steps)
    assert printed == ["theh", "\u00e9", "{+\U0001f600+}", "[-!-]", ""]


def test_bytes_that_are_decoded_together_are_printed_together(capsys, monkeypatch, tmp_path):
    tokenizer = metaspace()
    steps = cut_in_steps(tokenizer, "the\u00e9\U0001f600!", "AR", "AAR", "AB", "R")
    printed = printed_by_step(capsys, monkeypatch, tmp_path, tokenizer, "the", steps)
    assert printed == ["the the", "", "", "\u00e9{+\U0001f600+}[-!-]", ""]


@OF_BYTES
def test_what_is_held_back_is_printed_at_the_end(capsys, monkeypatch, tmp_path, kind):
    tokenizer = TOKENIZERS[kind]()
    emoji = tokenizer("\U0001f600", add_special_tokens=False).input_ids[-4:]
    step = integration.Step(0, emoji[:2], [TokenKind.ACCEPTED, TokenKind.RECOVERED], [])
    printed = printed_by_step(capsys, monkeypatch, tmp_path, tokenizer, "the", [step])
    shown = decoded(tokenizer, "the", [*tokenizer("the").input_ids, *step.token_ids])
    assert "\ufffd" in shown
    assert printed[0] == "the"
    assert unmarked(printed[0] + printed[1]) == shown


@ALL_TOKENIZERS
def test_no_printed_character_is_ever_another_one_in_the_whole_text(kind):
    tokenizer, generator = TOKENIZERS[kind](), random.Random(0)
    prompt = tokenizer("the cat").input_ids
    parts = [[i] for i in range(len(tokenizer))]
    parts += 5 * [tokenizer(text, add_special_tokens=False).input_ids for text in ("\u00e9", "\U0001f600", "sat")]
    for _ in range(200):
        ids = [token for part in generator.choices(parts, k=8) for token in part]
        whole = tokenizer.decode(prompt + ids, clean_up_tokenization_spaces=False)
        continuation, shown = commands.Continuation(tokenizer, prompt), ""
        start = continuation.num_returned
        while ids:
            size = generator.randint(1, 4)
            step, ids = ids[:size], ids[size:]
            pieces = continuation.add(integration.Step(0, step, generator.choices(list(TokenKind), k=len(step)), []))
            assert all(piece for _, piece in pieces)
            shown += "".join(piece for _, piece in pieces)
            assert whole[start:].startswith(shown)
        assert shown + "".join(piece for _, piece in continuation.rest()) == whole[start:]


def generate_with_draft(capsys, target: str, draft: str) -> tuple[int, str]:
    status, _, err = run(
        capsys, "generate", "--prompt", "the cat", "--target", target, "--draft", draft, "--max-new-tokens", "4"
    )
    return status, err


def test_a_draft_with_another_tokenizer_is_refused(capsys, tmp_path):
    tokenizer, size = metaspace(), len(metaspace())
    target = save_model(tmp_path / "target", tokenizer, size)
    draft = save_model(tmp_path / "draft", tokenizer, size)
    assert generate_with_draft(capsys, target, draft) == (0, "")
    saved = tmp_path / "draft" / "tokenizer.json"
    saved.write_text(
        re.sub(
            '"(\u2581cat|\u2581sat)"',
            lambda found: {"\u2581cat": '"\u2581sat"', "\u2581sat": '"\u2581cat"'}[found[1]],
            saved.read_text(),
        )
    )
    status, err = generate_with_draft(capsys, target, draft)
    cat, sat = tokenizer.convert_tokens_to_ids(["\u2581cat", "\u2581sat"])
    assert sat == cat + 1
    assert status == 2
    assert err == (
        "specdecode: --draft: expected a model with the target's tokenizer, got one in which "
        f"2 of {size} ids are other tokens, such as {cat}: '\u2581sat' instead of '\u2581cat'\n"
    )


def test_a_draft_may_lack_a_tokenizer(capsys, tmp_path):
    tokenizer = metaspace()
    target = save_model(tmp_path / "target", tokenizer, len(tokenizer))
    assert generate_with_draft(capsys, target, save_model(tmp_path / "draft", None, len(tokenizer))) == (0, "")


def test_a_draft_may_have_another_tokenizer_where_not_both_models_have_tokens(capsys, tmp_path):
    size = len(metaspace())
    bare, added, other = metaspace(), metaspace(), metaspace()
    added.add_tokens(["<tool>"])
    other.add_tokens(["<image>"])
    target = save_model(tmp_path / "target", added, size + 1)
    for name, tokenizer, width in (("padded", bare, size + 1), ("narrow", other, size)):
        status, err = generate_with_draft(capsys, target, save_model(tmp_path / name, tokenizer, width))
        assert "ids are other tokens" not in err, name
    status, err = generate_with_draft(capsys, target, save_model(tmp_path / "wide", other, size + 1))
    assert (status, f"such as {size}: '<image>' instead of '<tool>'" in err) == (2, True)
