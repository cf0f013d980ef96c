"""The outputs on the page "Check yours" are the command's."""

import shlex
from pathlib import Path

import pytest

from specdecode import cli
from specdecode.checking.mistakes import MISTAKES
from tests.support.examples import fences

PAGE = Path(__file__).parent.parent / "docs" / "learn" / "check-yours.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")


def blocks():
    return fences(PAGE) if PAGE.exists() else []


def printed(code, command, tmp_path, monkeypatch, capsys):
    """Run a command of the page on a file; return its exit status and output."""
    monkeypatch.chdir(tmp_path)
    Path("verifier.py").write_text(code)
    program, *arguments = shlex.split(command)
    assert program == "specdecode"
    return cli.main(arguments), capsys.readouterr().out.strip()


def shown_in(output, fence):
    """Return whether the lines of a block, which may end in dots, are in the output."""
    lines = [line.removesuffix("...") for line in fence.code.splitlines()]
    return all(any(each.startswith(line) for each in output.splitlines()) for line in lines)


def place(info):
    return next(i for i, each in enumerate(blocks()) if info in each.info)


def test_the_output_of_the_wrong_verifier_is_the_commands(tmp_path, monkeypatch, capsys):
    code, command, output = blocks()[place("python title") :][:3]
    status, text = printed(code.code, command.code, tmp_path, monkeypatch, capsys)
    assert (status, text) == (1, output.code.strip())


def test_the_correction_makes_it_right(tmp_path, monkeypatch, capsys):
    code, command = (each.code for each in blocks()[place("python title") :][:2])
    diff, output = blocks()[place("diff") :][:2]
    removed, *added = diff.code.splitlines()
    assert removed[0] == "-"
    assert code.count(removed[1:]) == 1
    code = code.replace(removed[1:], "\n".join(line[1:] for line in added))
    status, text = printed(code, command, tmp_path, monkeypatch, capsys)
    assert status == 0
    assert shown_in(text, output)


def test_the_output_of_the_lossy_rule_is_the_commands(tmp_path, monkeypatch, capsys):
    command, output = blocks()[next(i for i, each in enumerate(blocks()) if "--allow" in each.code) :][:2]
    status, text = printed("", command.code, tmp_path, monkeypatch, capsys)
    assert status == 0
    assert shown_in(text, output)


def test_the_verifier_on_the_page_has_fifteen_lines():
    code = blocks()[place("python title")].code
    body = code[code.index("def verify") :].strip().splitlines()
    assert len(body) <= 15


def test_the_page_says_how_many_mistakes_are_known():
    assert f"a list of {len(MISTAKES)} known mistakes" in PAGE.read_text()
