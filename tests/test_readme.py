"""What the README shows runs."""

from pathlib import Path

import pytest

from tests.examples import run_page

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.skipif(not README.exists(), reason="not in a checkout")
def test_each_example_of_the_readme_runs_alone_and_prints_what_it_shows():
    assert run_page(README) == 2
