"""The site's examples run; the site builds strictly, needs nothing from other hosts, and works in a browser."""

import functools
import importlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch

from tests.support.examples import fences, run_docstrings, run_page
from tests.support.site import Site, built_site, opened, served

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
pytestmark = pytest.mark.skipif(not PAGES, reason="not in a checkout")


# ---- Examples --------------------------------------------------------------------------------------------------------


def with_examples(on_gpu: bool) -> list[str]:
    """Return the pages that have examples for a GPU, or other ones."""
    return [page for page in PAGES if any(each.is_python and each.needs_gpu == on_gpu for each in fences(DOCS / page))]


@pytest.mark.parametrize("page", with_examples(on_gpu=False))
def test_each_example_of_a_page_runs_alone(page):
    assert run_page(DOCS / page)


@pytest.mark.parametrize("page", with_examples(on_gpu=True))
def test_each_gpu_example_of_a_page_runs_alone(page):
    for example in fences(DOCS / page):
        if example.needs_gpu:
            compile(example.code, page, "exec")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device; the examples were compiled, not run")
    assert run_page(DOCS / page, on_gpu=True)


MODULES = [
    "specdecode",
    "specdecode.checking",
    *(f"specdecode.integrations.{name}" for name in ("transformers", "vllm", "sglang")),
]


@pytest.mark.parametrize("module", MODULES)
def test_each_example_of_a_public_docstring_runs_alone(module):
    package = importlib.import_module(module)
    for name in package.__all__:
        public = getattr(package, name)
        run_docstrings(public, name, sys.modules[getattr(public, "__module__", module)])


@pytest.mark.parametrize("name", [f"reference.{file.stem}" for file in sorted((ROOT / "reference").glob("[a-z]*.py"))])
def test_each_example_of_the_reference_runs_after_the_import_that_its_overview_names(name):
    module, preamble = importlib.import_module(name), f"from {name} import *"
    assert "`from reference.block import *`" in " ".join(importlib.import_module("reference").__doc__.split())
    for public in [public for public in vars(module) if not public.startswith("_")]:
        if getattr(vars(module)[public], "__module__", None) == name:
            run_docstrings(vars(module)[public], f"{name}.{public}", module, preamble)


def test_every_test_that_a_page_names_exists():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", (DOCS / page).read_text()):
            assert f"def {name}(" in tests, f"{page}: {name}"


def test_the_early_exit_schedule_is_drawn_as_the_kernel_page_describes_it():
    figures = pytest.importorskip("docs._tools.figures", exc_type=ImportError)
    schedule = figures.Schedule()
    states, published = schedule.frames()[-1]
    assert published == dict(enumerate(schedule.first_rejected))
    needed = {program for program in states if program[1] <= schedule.first_rejected[program[0]]}
    read = {program for program, state in states.items() if state == "read"}
    assert read >= needed
    assert {(request, offset) for request, offset, _ in read - needed} == {(3, 3)}  # too late to be left unread
    assert all(state in ("read", "left") for state in states.values())


# ---- The built site --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def site() -> Site:
    return built_site()


class Elements(HTMLParser):
    """A page's elements, each with its own text and the tags that it is inside of."""

    VOID: ClassVar = {
        "area",
        "base",
        "br",
        "col",
        "embed",
        "hr",
        "img",
        "input",
        "link",
        "meta",
        "source",
        "track",
        "wbr",
    }

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.open: list[Element] = []
        self.all: list[Element] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        element = Element(tag, dict(attributes), [], tuple(each.tag for each in self.open))
        self.all.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.all.append(Element(tag, dict(attributes), [], tuple(each.tag for each in self.open)))

    def handle_endtag(self, tag):
        while self.open and self.open.pop().tag != tag:
            pass

    def handle_data(self, data):
        if self.open:
            self.open[-1].text.append(data)


class Element(NamedTuple):
    """An element of a page."""

    tag: str
    attributes: dict
    text: list
    inside: tuple


@functools.cache
def elements(page: Path) -> list[Element]:
    return Elements(page).all


def test_the_site_builds_strictly_without_torch_in_under_thirty_seconds(site):
    assert (site.folder / "index.html").exists()
    assert site.cpu_seconds < 30


def test_every_page_is_in_the_navigation():
    nav = re.search(r"^nav:\n(.*?)^\S", (ROOT / "mkdocs.yml").read_text(), re.M | re.S)[1]
    entries = set(re.findall(r"\S+\.md$", nav, re.M))
    assert entries == set(PAGES)


FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}


def test_pages_fetch_nothing_from_other_hosts(site):
    for page in site.pages():
        for element in elements(page):
            address = element.attributes.get(FETCHED.get(element.tag), "")
            if element.attributes.get("rel") == "canonical":  # the page's own address, if SITE_URL is set: not fetched
                continue
            assert not re.match(r"(\w+:)?//", address or ""), f"{page.name}: {element}"
            assert "url(http" not in element.attributes.get("style", "")
    for sheet in site.folder.rglob("*.css"):
        assert not re.search(r"(url\(\s*[\"']?|@import\s+[\"'])(\w+:)?//", sheet.read_text()), sheet


def test_no_tex_is_left_and_none_is_in_a_heading(site):
    headings = {f"h{level}" for level in range(1, 7)}
    for page in site.pages():
        for element in elements(page):
            text = "".join(element.text)
            if element.tag in headings or headings & set(element.inside):
                assert not re.search(r"\$|\\[(\[a-zA-Z]", text), f"{page}: {text}"
                assert element.tag != "math"
            if "arithmatex" in element.attributes.get("class", ""):
                assert "\\" not in text, f"{page}: {text}"
    titles = [entry["title"] for entry in json.loads((site.folder / "search/search_index.json").read_text())["docs"]]
    assert not [title for title in titles if re.search(r"\$|\\[(\[a-zA-Z]", title)]


def test_the_font_has_every_character_of_every_formula(site):
    from fontTools.ttLib import TTFont

    characters = set(TTFont(site.folder / "fonts" / "math.woff2").getBestCmap())
    characters.add(0xFE00)  # not a character: it selects a glyph
    italic = {chr(i): 0x1D434 + i - ord("A") for i in range(ord("A"), ord("Z") + 1)}
    italic |= {chr(i): 0x1D44E + i - ord("a") for i in range(ord("a"), ord("z") + 1)} | {"h": 0x210E}
    missing = {}
    for page in site.pages():
        for element in elements(page):
            text = "".join(element.text).strip()
            if "math" in element.inside:
                shown = {italic[text]} if element.tag == "mi" and text in italic else set(map(ord, text))
                missing |= {chr(code): page.parent.name for code in shown - characters if not chr(code).isspace()}
    assert not missing


def test_records_and_sources_that_a_page_names_must_exist():
    records = pytest.importorskip("docs._tools.records", exc_type=ImportError)
    source = pytest.importorskip("docs._tools.source", exc_type=ImportError)
    for where in ("h200; 256, 3, 0.7; nobody", "h200; 255, 3, 0.7; triton", "h200; colour", "h2000; gpu"):
        with pytest.raises(LookupError):
            records.look_up(where)
    with pytest.raises(LookupError):
        source.extract((ROOT / "reference" / "strict.py").read_text(), "nothing")
    text = source.extract((ROOT / "reference" / "oracle.py").read_text(), "Outcome.num_accepted")
    assert text.startswith("@property\ndef num_accepted")
    assert source.extract('A = 1\n"""Says\nwhat."""\nB = 2\n', "A") == 'A = 1\n"""Says\nwhat."""'
    assert source.extract("A = (\n    1,\n)\nB = 2\n", "A") == "A = (\n    1,\n)"


@pytest.fixture
def benchmarks(tmp_path, monkeypatch):
    """The module that makes tables, with a record "mixed" of two commits, and one that names no commit."""
    pytest.importorskip("pymdownx")
    benchmarks, records = (importlib.import_module(f"docs._tools.{name}") for name in ("benchmarks", "records"))

    def time(us: float, **more: object) -> dict:
        return {"device_us": {"median": us}, "GB": us / 250, "TB/s": 4.0, "fraction": 0.8, **more}

    of, earlier = "3 drafts, 151,936 tokens, bfloat16, T = 0.7", {"commit": "bbbbbbb"}
    results = {
        f"128 requests, {of}": {
            "triton": time(60.0),
            "triton block": time(80.0),
            "straightforward": time(600.0, **earlier),
        },
        f"256 requests, {of}": {"triton": time(100.0), "triton block": time(150.0, **earlier)},
        f"truncated, 256 requests, {of}, realistic rows": {
            "probabilistic, plain": time(10.0),
            "probabilistic, plain with draft_logsumexp": time(7.0, **earlier),
            "probabilistic, top-p .95": time(20.0, commit="aaaaaaa"),
        },
    }
    mixed = {"commit": "aaaaaaaaaaaa", "date": "2026-01-01", "read_TB/s": 4.5, "results": results}
    (tmp_path / "mixed.json").write_text(json.dumps(mixed))
    (tmp_path / "nameless.json").write_text(json.dumps({"results": {f"128 requests, {of}": {"vLLM": time(700.0)}}}))
    ratios = {"T .8": 0.981, "T .8, top-p .95": 1.1892, "greedy": 1.5}
    cells = [{"drafter": "n-gram", "sampling": sampling, "ratio": ratio} for sampling, ratio in ratios.items()]
    calls = {
        name: {"call_us": {"median": 8.0, "iqr": iqr}} for name, iqr in {"triton": 2.0, "triton block": 4.0}.items()
    }
    engine = {"cells": cells, "results": {f"eager call, 1 request, {of}": calls}}
    (tmp_path / "engine.json").write_text(json.dumps(engine))
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    records.load.cache_clear()
    yield benchmarks
    records.load.cache_clear()


def test_a_number_of_another_commit_than_most_of_its_table_has_a_letter_that_is_explained(benchmarks):
    table = benchmarks.truncated_table("mixed")
    assert ">10.0 (7.0ᵃ)<" in table
    assert ">20.0<" in table  # the record's own commit, given in seven digits
    assert "commit <code>aaaaaaa</code>; ᵃ at <code>bbbbbbb</code>" in table
    assert ">700.0<" in benchmarks.verification_table("nameless")  # without a commit, without its line
    table = benchmarks.verification_table("mixed")
    assert ">80.0<" in table
    assert ">600.0ᵃ<" in table
    plot = benchmarks.roofline_plot("mixed")
    assert "blockᵃ</li>" in plot
    assert "probabilistic</li>" in plot
    assert "ᵃ at <code>bbbbbbb</code>" in plot
    texts, line = benchmarks.with_marks(["1^c^", "2^a^", "", "3^b^ (4^a^)"])
    assert texts == ["1ᵃ", "2", "", "3ᵇ (4)"]
    assert re.findall("<code>(.)</code>", line) == ["a", "c", "b"]
    assert benchmarks.with_marks(["1", ""]) == (["1", ""], "")


def test_no_difference_or_ratio_is_drawn_between_kernels_of_two_commits(benchmarks):
    with pytest.raises(LookupError, match="different commits"):
        benchmarks.growth_table("mixed")
    few, many = "mixed; 128, 3, 0.7; triton", "mixed; 256, 3, 0.7; triton"
    with pytest.raises(Exception, match="different commits"):
        benchmarks.ratio_inline(f"{many} block / {few} block", "", "", None)
    assert benchmarks.ratio_inline(f"{many} / {few}", "", "", None) == "1.7"
    plain = "128, 3, 0.7; straightforward"
    assert benchmarks.ratio_inline(f"mixed; {plain} / {few}", "", "", None) == "10.0"
    assert benchmarks.ratio_inline(f"nameless; 128, 3, 0.7; vLLM / mixed; {plain}", "", "", None) == "1.2"


def test_a_number_in_a_sentence_is_a_part_of_a_result_and_a_range_has_its_smallest_and_largest(benchmarks):
    look_up = importlib.import_module("docs._tools.records").look_up
    assert look_up("mixed; 256, 3, 0.7; probabilistic, top-p .95") == 20.0
    assert look_up("mixed; 256, 3, 0.7; triton; device_us; median") == 100.0
    gains = "gains; engine; n-gram; sampled"
    assert benchmarks.range_inline(gains, "", "", None) == "-2 to 19&nbsp;%"
    assert benchmarks.range_inline("spreads; engine; call; call_us", "", "", None) == "25 to 50&nbsp;%"
    with pytest.raises(Exception, match="empty"):
        benchmarks.range_inline(gains.replace("n-gram", "model"), "", "", None)


def test_a_record_says_how_many_of_its_results_are_of_which_commit(benchmarks):
    table = benchmarks.environment_table("mixed")
    assert "5 of <code>aaaaaaa</code>, 3 of <code>bbbbbbb</code>" in table
    assert "4.50 TB/s; in all runs 5.00 to 5.00 TB/s" in table  # what each result says: TB/s / fraction


def test_every_table_and_plot_of_a_record_names_its_commits():
    pytest.importorskip("pymdownx")
    benchmarks, records = (importlib.import_module(f"docs._tools.{name}") for name in ("benchmarks", "records"))
    shown = [
        fence for page in PAGES for fence in re.findall(r"```benchmark\n(.*?)```", (DOCS / page).read_text(), re.S)
    ]
    assert shown
    for fence in shown:
        if "commit" in records.load(re.search(r"record: (.*)", fence)[1]) and "table: environment" not in fence:
            assert '<p class="commits">' in benchmarks.benchmark_fence(fence, "", "", {}, None), fence


# ---- In a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")  # not longer: a second driver, for another module's tests, would conflict with it
def server(site):
    with served(site.folder) as server:
        yield server


def test_the_search_finds_the_residual(server):
    with opened(server) as (tab, complaints):
        tab.goto(server.address)
        tab.locator("input.md-search__input").click()
        tab.locator("input.md-search__input").type("residual")
        results = tab.locator(".md-search-result__item")
        results.first.wait_for(timeout=20_000)
        assert "residual" in results.all_inner_texts()[0].lower()
        assert not complaints


def test_the_copy_button_copies_code_as_it_is(server):
    with opened(server) as (tab, _):
        tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
        tab.goto(server.address + "learn/drafting/")
        code = tab.locator(".md-typeset pre > code").first
        code.hover()
        tab.locator(".md-typeset pre > nav button").first.click()
        assert tab.evaluate("navigator.clipboard.readText()") == code.text_content().rstrip("\n")


def search_for(tab, words: str) -> None:
    """Fill the search field at once: typed letter by letter, each prefix is a search whose results come first."""
    tab.locator("input.md-search__input").fill(words)
    tab.locator("input.md-search__input").press("End")


def test_the_search_finds_pages_before_the_api(server):
    with opened(server) as (tab, _):
        tab.goto(server.address)
        tab.locator("input.md-search__input").click()
        for words, page in {
            "bonus token": "notation",
            "install": "use/quickstart",
            "residual": "learn/accept-and-resample",
            "temperature": "",
            "vllm": "use/vllm",
        }.items():
            search_for(tab, words)
            first = tab.locator(f".md-search-result__item:first-child > a[href*='h={words.split()[0]}']")
            found = first.first.get_attribute("href", timeout=20_000)
            assert page in found, f"{words}: {found}"
            assert "/api/" not in found, f"{words}: {found}"


def test_the_search_finds_what_operators_of_engines_ask_for(server):
    with opened(server) as (tab, _):
        tab.goto(server.address)
        tab.locator("input.md-search__input").click()
        for words, page in {
            "rollback": "use/vllm",
            "medusa": "use/trees",
            "per-request acceptance": "use/metrics",
            "ROCm": "use/vllm",
            "adaptive length": "use/choosing",
        }.items():
            search_for(tab, words)
            found = tab.locator(f".md-search-result__item > a[href*='/{page}/']")
            found.first.wait_for(state="attached", timeout=20_000)


def test_the_early_exit_schedule_is_stepped_through_by_keyboard(server):
    with opened(server, width=360) as (tab, complaints):
        tab.goto(server.address + "kernels/")
        frames = tab.locator(".steps .frames > div")
        assert frames.first.is_visible()
        tab.locator(".steps input").first.focus()
        for _ in range(frames.count() - 1):
            tab.keyboard.press("ArrowRight")
        assert [frames.nth(i).is_visible() for i in range(frames.count())] == [False] * (frames.count() - 1) + [True]
        assert not complaints
