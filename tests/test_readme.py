"""What the README shows runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.skipif(not README.exists(), reason="not in a checkout")
def test_the_api_example_runs(capsys):
    example, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    exec(example, {})
    assert "Acceptance rate (%):" in capsys.readouterr().out
