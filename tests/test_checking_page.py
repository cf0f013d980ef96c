"""The outputs on the page "Check yours" are the command's."""

import shlex
from pathlib import Path

import pytest

from specdecode import cli
from specdecode.checking.mistakes import MISTAKES
from tests.support.examples import fences

PAGE = Path(__file__).parent.parent / "docs" / "learn" / "check-yours.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")


def runs():
    """Each file of the page with the command after it and the output after that."""
    if not PAGE.exists():
        return []
    blocks = fences(PAGE)
    files = [i for i, each in enumerate(blocks) if "verifier.py" in each.info]
    return [(blocks[i].code, blocks[i + 1].code, blocks[i + 2]) for i in files]


@pytest.mark.parametrize(("run", "status"), [(0, 1), (1, 0)], ids=["wrong", "right"])
def test_the_output_on_the_page_is_the_commands(run, status, tmp_path, monkeypatch, capsys):
    code, command, output = runs()[run]
    assert output.is_output
    monkeypatch.chdir(tmp_path)
    Path("verifier.py").write_text(code)
    program, *arguments = shlex.split(command)
    assert program == "specdecode"
    assert cli.main(arguments) == status
    assert capsys.readouterr().out.strip() == output.code.strip()


def test_the_verifier_on_the_page_has_fifteen_lines():
    code = runs()[0][0]
    body = code[code.index("def verify") :].strip().splitlines()
    assert len(body) <= 15


def test_the_page_says_how_many_mistakes_are_known():
    assert f"a list of {len(MISTAKES)} known mistakes" in PAGE.read_text()
