"""Examples of Markdown pages and docstrings, each run as if pasted into a fresh interpreter."""

import contextlib
import doctest
import io
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import torch

FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+)(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks) *$", re.M | re.S
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Example(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    info: str
    code: str

    @property
    def is_python(self) -> bool:
        """Whether it is Python on the page itself, not included from a file."""
        return self.language in ("python", "pycon") and "--8<--" not in self.code

    @property
    def needs_gpu(self) -> bool:
        return ".gpu" in self.info

    @property
    def is_output(self) -> bool:
        """Whether it is the output of the previous example."""
        return 'title="Output"' in self.info


def fences(page: Path) -> list[Example]:
    """Return a page's fenced blocks."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        info = match["info"].strip()
        language = re.match(r"(\w*)|\{ *\.(\w+)", info.removeprefix("{ .")).group(0)
        line = text.count("\n", 0, match.start("body"))
        found.append(Example(page, line, language, info, textwrap.dedent(match["body"])))
    return found


def run_page(page: Path, on_gpu: bool = False) -> int:
    """Run a page's examples for a GPU, or all others, and return their number.

    Each has its own namespace. Its output must be the output on the page. Examples that print random numbers must seed
    them: the default generator is not in its initial state.
    """
    count, blocks = 0, fences(page)
    for number, example in enumerate(blocks):
        if not example.is_python or example.needs_gpu != on_gpu:
            continue
        count += 1
        namespace, where = fresh_namespace(), f"{page}:{example.line}"
        if example.language == "pycon":
            run_doctest(doctest.DocTestParser().get_doctest(example.code, namespace, where, str(page), example.line))
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * example.line + example.code, str(page), "exec"), namespace)
        if number + 1 < len(blocks) and blocks[number + 1].is_output:
            assert printed.getvalue().strip() == blocks[number + 1].code.strip(), where
    return count


def run_docstrings(named: object, name: str, module: object, preamble: str = "") -> None:
    """Run the examples of each docstring of a class, function or module after one import, or after nothing."""
    for test in doctest.DocTestFinder(exclude_empty=True).find(named, name, module=module):
        if test.examples:
            test.globs = fresh_namespace()
            exec(preamble, test.globs)
            run_doctest(test)


def fresh_namespace() -> dict:
    """Return the namespace of a new program, and advance torch's default generator from its initial state."""
    torch.manual_seed(20_260_101)
    return {"__name__": "__main__"}


def run_doctest(test: doctest.DocTest) -> None:
    report = io.StringIO()
    results = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.write)
    assert results.failed == 0, f"{test.name}\n{report.getvalue()}"
