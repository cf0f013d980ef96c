"""The README's examples run, and its times equal the records."""

import json
import re
from pathlib import Path

import pytest

from tests.support.examples import run_page

README = Path(__file__).parent.parent / "README.md"
RECORDS = Path(__file__).parent / "benchmarks" / "records"
pytestmark = pytest.mark.skipif(not README.exists(), reason="not in a checkout")

VERIFIERS = "probabilistic", "vllm", "sglang", "flashinfer"
TRUNCATIONS = {"none": "plain", "top-k 20, top-p .95": "top-k 20, top-p .95"}
SAMPLINGS = "greedy", "T .8", "T .8, top-k 20, top-p .95", "T .8, top-p .95"


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


def record(name: str) -> dict:
    return json.loads((RECORDS / f"{name}.json").read_text())


def shown(time: float) -> str:
    return f"{time:.1f}" if time < 100 else f"{time:,.0f}"


def test_the_times_of_verification_are_those_of_the_records():
    h200, commits, rows = record("h200"), set(), []
    for requests in (1, 32, 256):
        size = f"{requests} request{'s' * (requests > 1)}, 3 drafts, 49,152 tokens"
        group = f"truncated, {size}, bfloat16, T = 0.7, rows of SmolLM2"
        for shown_as, truncation in TRUNCATIONS.items():
            cells = [h200["results"][group][f"{verifier}, {truncation}"] for verifier in VERIFIERS]
            commits |= {cell.get("commit", h200["commit"]) for cell in cells}
            first = requests if truncation == "plain" else ""
            rows.append([str(first), shown_as, *[shown(cell["device_us"]["median"]) for cell in cells]])
    text = README.read_text()
    lines = "\n".join("| " + " | ".join(row) + " |" for row in rows).replace("|  |", "| |")
    assert lines in text, "the table of the README should be\n" + lines
    assert len(commits) == 1
    assert f"commit `{commits.pop()}`" in text
    for name in ("vLLM", "SGLang", "FlashInfer"):
        assert re.search(rf"{name}\s{re.escape(h200[name])}\b", text)
    shards = record("h100x4-exchange")["results"]
    us = {cell["way"]: cell["us"] for cell in shards if (cell["batch"], cell["method"]) == (256, "probabilistic")}
    text = " ".join(text.split())
    assert (
        f"take {us['exchange']:.0f} µs on four H100s; where every rank gathers all logits, {us['gather']:,.0f} ("
        in text
    )


def gain(cells: list[dict], requests: int, sampling: str, **which: object) -> str:
    """A ratio with its interval, bold if all of it is above 1 and italic if below; empty where nothing was measured."""
    which |= {"requests": requests, "sampling": sampling}
    found = [cell for cell in cells if all(cell[name] == value for name, value in which.items())]
    if not found:
        return ""
    (cell,) = found
    ratio, low, high = (f"{cell[name]:.2f}".removeprefix("0") for name in ("ratio", "ratio_low", "ratio_high"))
    mark = "**" if cell["ratio_low"] > 1 else "*" if cell["ratio_high"] < 1 else ""
    return f"{mark}{ratio}{mark} ({low}–{high})"


@pytest.mark.parametrize(
    ("name", "page", "which"),
    [
        ("h200-serving-real", "vllm", {"drafter": "n-gram"}),
        ("h100-serving", "vllm", {"drafter": "model", "layers": 40}),
        ("h200-sglang", "sglang", {}),
    ],
)
def test_the_gains_in_the_engines_are_those_of_the_records(name, page, which):
    cells = record(name)["cells"]
    for requests in (1, 32, 256) if name != "h100-serving" else (256,):
        gains = [gain(cells, requests, sampling, **which) for sampling in SAMPLINGS]
        row = f"| {requests} | " + " | ".join(gains) + " |"
        assert row.replace("|  |", "| |") in README.read_text()
        row = row.removesuffix(" |  |") + " |" if page == "sglang" else row.replace("|  |", "| |")
        assert row in README.with_name("docs").joinpath("use", f"{page}.md").read_text()


@pytest.mark.parametrize(
    ("name", "page", "engine", "which"),
    [("h200-serving-real", "vllm", "vllm", {"drafter": "n-gram"}), ("h200-sglang", "sglang", "sglang", {})],
)
def test_the_times_on_the_pages_of_evidence_are_those_of_the_records(name, page, engine, which):
    """Microseconds of verification on the device, the engine's own / this package's."""
    text = README.with_name("docs").joinpath("use", "evidence", f"{page}.md").read_text()
    samplings = [*SAMPLINGS, "T .8, min-p .05"] if page == "vllm" else SAMPLINGS[:3]
    for requests in (1, 32, 256):
        pairs = []
        for sampling in samplings:
            (cell,) = [
                cell
                for cell in record(name)["cells"]
                if all(
                    cell[key] == value for key, value in {**which, "requests": requests, "sampling": sampling}.items()
                )
            ]
            pairs.append("/".join(f"{cell[side]['verify_device_us']:,.0f}" for side in (engine, "ours")))
        assert "| " + " | ".join(pairs) + " |" in text, pairs


def test_the_times_of_trees_on_the_page_of_benchmarks_are_those_of_the_record():
    text, results = (README.with_name("docs") / "benchmarks.md").read_text(), record("h200-trees")["results"]
    rows = "151,936 tokens, bfloat16, T = 0.7"

    def row(group: str, providers: list[str]) -> str:
        cells = [results[f"{group}, {rows}"].get(provider) for provider in providers]
        return " ".join(f"{cell['device_us']['median']:,.0f} |" if cell else "|" for cell in cells)

    ways = ["tree", "SGLang", "softmax, then walk"]
    for requests, nodes, depth in (1, 64, 8), (32, 16, 5), (256, 8, 3), (256, 64, 8):
        times = row(
            f"trees of {nodes} nodes and depth {depth}, {requests} requests",
            [f"{way}, {kind}" for kind in ("plain", "top-p .95") for way in ways],
        )
        assert f"| {requests}, {nodes}, {depth} | {times}" in text
        if requests == 32:
            ours, theirs = times.split(" | ")[:2]
            assert f"take {ours} µs on one H200, with SGLang's own verification {theirs} (" in " ".join(
                README.read_text().split()
            )
    for name, kind in ("whole rows", ""), ("top-p .95", ", top-p .95"):
        widths = ["one token", "2 siblings", "4 siblings", "8 siblings"]
        assert f"| {name} | {row('siblings, 256 rows', [width + kind for width in widths])}" in text
