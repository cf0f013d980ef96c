"""The README's examples run, and its times equal the records."""

import json
import re
from pathlib import Path

import pytest

from tests.support.examples import run_page

README = Path(__file__).parent.parent / "README.md"
RECORDS = Path(__file__).parent / "benchmarks" / "records"
pytestmark = pytest.mark.skipif(not README.exists(), reason="not in a checkout")

COLUMNS = {
    "`probabilistic`": "triton",
    "PyTorch": "straightforward",
    "PyTorch, compiled": "straightforward compiled",
    "vLLM": "vllm",
    "SGLang": "sglang",
    "FlashInfer": "flashinfer",
}
TRUNCATIONS = {
    "plain": "no truncation",
    "top-k 20, top-p .95": "top-k 20, top-p .95",
    "top-k 50, top-p .95": "top-k 50, top-p .95",
    "top-p .95": "top-p .95",
    "min-p .05": "min-p .05",
}
ENGINES = "probabilistic", "vllm"


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


def shown(time: float) -> str:
    return f"{time:.1f}" if time < 100 else f"{time:,.0f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|--:" * len(head) + "|", *lines[1:]])


def test_the_times_are_those_of_the_records():
    record = json.loads((RECORDS / "h200.json").read_text())
    commits = set()

    def us(of: str, requests: int, rows: str, provider: str) -> str:
        group = f"{of}{requests} request{'s' * (requests > 1)}, 3 drafts, {rows.replace(':', ' tokens, bfloat16, T = 0.7,')}"
        cell = record["results"][group][provider]
        commits.add(cell.get("commit", record["commit"]))
        return shown(cell["device_us"]["median"])

    plain = [
        [str(requests), *[us("", requests, "151,936: realistic rows", provider) for provider in COLUMNS.values()]]
        for requests in (1, 32, 128, 256)
    ]
    truncated = [
        [str(requests)]
        + [
            " / ".join(us("truncated, ", requests, "49,152: rows of SmolLM2", f"{who}, {how}") for who in ENGINES)
            for how in TRUNCATIONS
        ]
        for requests in (1, 32, 256)
    ]
    text = README.read_text()
    for head, rows in ((["requests", *COLUMNS], plain), (["requests", *TRUNCATIONS.values()], truncated)):
        assert table(head, rows) in text, "a table of the README should be\n" + table(head, rows)
    assert len(commits) == 1
    assert f"commit `{commits.pop()}`" in text
    for name in ("vLLM", "SGLang", "FlashInfer"):
        assert re.search(rf"{name}\s{re.escape(record[name])}\b", text)
    shards = json.loads((RECORDS / "h100x4-exchange.json").read_text())["results"]
    us = {cell["way"]: cell["us"] for cell in shards if (cell["batch"], cell["method"]) == (256, "probabilistic")}
    text = " ".join(text.split())
    assert (
        f"take {us['exchange']:.0f} µs on four H100s; where every rank gathers all logits, {us['gather']:,.0f} ("
        in text
    )
