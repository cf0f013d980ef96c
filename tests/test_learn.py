"""The exercises of docs/learn: checks fail on skeletons and pass on solutions, and the pages show the printed outputs."""

import contextlib
import io
import re
import runpy
import shlex
from pathlib import Path

import pytest

from specdecode import cli
from tests.support.examples import fences

LEARN = Path(__file__).parent.parent / "docs" / "learn"
SCRIPT = LEARN / "afternoon.py"
ORDER = ["drafting", "accept-and-resample", "why-exact", "strict", "block", "trees", "truncation", "synthetic"]
SECTION = re.compile(r'--8<-- "docs/learn/afternoon\.py:([\w-]+)"')
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not in a checkout")


@pytest.fixture(scope="module")
def results():
    """Run the script; return (passed, mean accepted drafts) of each skeleton and solution, by title."""
    with contextlib.redirect_stdout(io.StringIO()):
        return runpy.run_path(str(SCRIPT))["results"]


def test_every_solution_passes(results):
    passed = {title: passed for title, (passed, _) in results.items() if title.endswith("solution")}
    assert len(passed) == 9
    assert all(passed.values()), passed


def test_every_skeleton_and_half_solution_fails(results):
    failed = {title: not passed for title, (passed, _) in results.items() if title.endswith(("skeleton", "half"))}
    assert failed.pop("4. strict, skeleton") is False  # exact, but it accepts few drafts: see the next test
    assert len(failed) == 10
    assert all(failed.values()), failed
    assert not results["8. synthetic"][0]  # synthetic acceptance is not exact


def test_accepted_drafts_distinguish_the_slow_skeleton_from_its_solution(results):
    assert results["4. strict, skeleton"][1] < 0.5
    assert 1.2 < results["4. strict, solution"][1] < results["2. probabilistic, solution"][1]
    assert results["1. cautious, solution"][1] == 0
    assert results["2. probabilistic, solution"][1] + 0.05 < results["5. block, solution"][1]


def section(name: str) -> str:
    """Return a section of the script, which a page includes."""
    text = SCRIPT.read_text()
    return text.split(f"# --8<-- [start:{name}]\n")[1].split(f"# --8<-- [end:{name}]")[0]


@pytest.mark.parametrize("page", ORDER)
def test_the_output_that_a_page_shows_is_printed(page, tmp_path, monkeypatch, capsys):
    """A reader's file has the head and the page's code up to the output; the last command before the output is run."""
    monkeypatch.chdir(tmp_path)
    parts, command = ["head"], []
    for fence in fences(LEARN / f"{page}.md"):
        parts += [name for name in SECTION.findall(fence.code) if name != "head"]
        if fence.language == "sh" and fence.code.startswith("specdecode check"):
            command = shlex.split(fence.code)[1:]
        if 'title="In the output"' in fence.info:
            Path("mine.py").write_text("\n\n".join(map(section, parts)))
            cli.main(command)
            printed = capsys.readouterr().out.splitlines()
            shown = [line.removesuffix("...") for line in fence.code.splitlines()]
            places = [next(i for i, line in enumerate(printed) if line.startswith(each)) for each in shown]
            assert places == sorted(places)
            assert places


def test_the_pages_show_every_part_of_the_script_once():
    text = "".join((LEARN / f"{page}.md").read_text() for page in ORDER)
    assert sorted(SECTION.findall(text)) == sorted(re.findall(r"\[start:([\w-]+)\]", SCRIPT.read_text()))


def test_each_page_leads_to_the_next():
    for page, following in zip(ORDER, [*ORDER[1:], "check-yours"]):
        text = (LEARN / f"{page}.md").read_text()
        assert f"({following}.md)" in text[text.index("## Next") :]
    nav = re.findall(r"learn/([\w-]+)\.md", (LEARN.parent.parent / "mkdocs.yml").read_text())
    assert nav[: len(ORDER)] == ORDER
