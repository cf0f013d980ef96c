"""The README's examples run, and its links lead to files that read well without the site."""

import re
from pathlib import Path

import pytest

from tests.support.examples import run_page

README = Path(__file__).parent.parent / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="not in a checkout")


def test_each_example_of_the_readme_runs_alone_and_prints_what_it_shows():
    assert run_page(README) == 3


NEEDS_THE_SITE = re.compile(r"^ *```(figure|benchmark|source|\{)|--8<--|`#!|^:::|^===|^(!!!|\?\?\?)|^ *<div", re.M)
"""Syntax that only the site renders."""


def test_links_lead_to_files_that_read_well_as_they_are():
    for target in re.findall(r'\]\((?!https?:|#)([^)\s]+)\)|src="([^"]+)"', README.read_text(encoding="utf-8")):
        path = README.parent / "".join(target).partition("#")[0]
        assert path.is_file(), path
        if path.suffix == ".md":
            found = NEEDS_THE_SITE.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{path}: {found[0]}"
