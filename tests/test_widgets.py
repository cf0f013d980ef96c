"""The site's widgets can be used by keyboard and pointer.

They run in headless Chromium through Playwright, without a network.
"""

import shutil
from fractions import Fraction

import numpy as np
import pytest

from reference import probabilistic as reference
from reference.sampling import Sampling, cutoff, log_softmax, truncate
from specdecode import AcceptanceSchedule
from tests.support.widgets import (
    DOCS,
    MATH,
    WIDGETS,
    block_tokens,
    enumerated_joint_rates,
    enumerated_paths,
    row_constants,
)

STYLES = DOCS / "stylesheets/widgets.css"
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)

pytestmark = pytest.mark.skipif(not MATH.exists(), reason="the site is not part of this distribution")

KINDS = ["schedule", "residual", "speedup", "block", "truncation"]
FALLBACK = "With scripts, this is a figure."
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Widgets</title>
<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="{styles}">
<style>html {{ font: 20px sans-serif }} body {{ font-size: 16px; margin: 16px }}</style></head>
<body><main>{body}</main>{before}<script src="{math}"></script><script src="{widgets}"></script></body></html>"""


def mount_point(kind: str) -> str:
    return f'<div class="sd-widget" data-widget="{kind}">{FALLBACK}</div>'


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a page with widgets and return it; fail if its console reports anything."""
    complaints, contexts = [], []

    def open_page(body: str, before: str = "", **options):
        context = browser.new_context(offline=True, **{"viewport": {"width": 1024, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.clock.install(time=0)
        files = {"styles": STYLES.as_uri(), "math": MATH.as_uri(), "widgets": WIDGETS.as_uri()}
        (tmp_path / "page.html").write_text(PAGE.format(body=body, before=before, **files), encoding="utf-8")
        page.goto((tmp_path / "page.html").as_uri())
        page.clock.pause_at(3600)  # the test advances the clock from here on
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def press(page, label: str, *keys: str) -> None:
    """Press keys on the slider with this name."""
    page.get_by_role("slider", name=label, exact=True).focus()
    for key in keys:
        page.keyboard.press(key)


def readout(page, name: str) -> str:
    return page.locator(f"[data-readout={name}]").inner_text()


def rows(page, table: int | None = None) -> list[list[str]]:
    """Return the cells of all rows of a widget, or of one of its tables."""
    tables = page.locator(".sd-table") if table is None else page.locator(".sd-table").nth(table)
    return tables.locator("tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )


def test_schedule_by_keyboard(show):
    page = show(mount_point("schedule"))

    def check(rate: float, drafts: int, min_decay: float = 0.85) -> None:
        schedule = AcceptanceSchedule.from_mean_rate(rate, num_draft_tokens=drafts, min_decay=min_decay)
        assert readout(page, "a") == f"{schedule.base_rate:.6f}"
        assert readout(page, "d") == f"{schedule.decay:.6f}"
        assert readout(page, "mean") == f"{rate:.4f}"
        assert readout(page, "length") == f"{schedule.acceptance_length:.4f}"
        pairs = zip(schedule.conditional_rates, schedule.joint_rates)
        assert rows(page) == [[str(i), f"{own:.6f}", f"{joint:.6f}"] for i, (own, joint) in enumerate(pairs)]
        assert page.locator(".sd-chart rect").count() == 2 * drafts

    check(0.69, 3)
    press(page, "Drafts per step, K", "ArrowRight", "ArrowRight")
    check(0.69, 5)
    press(page, "Mean joint rate", *["ArrowRight"] * 20)
    check(0.89, 5)  # above the mean that the smallest decay can reach
    assert "the decay rises" in page.locator(".sd-summary").inner_text()
    press(page, "Least decay", "Home")
    check(0.89, 5, min_decay=0.0)
    press(page, "Mean joint rate", "End")
    check(1.0, 5, min_decay=0.0)
    press(page, "Mean joint rate", "Home")
    check(0.0, 5, min_decay=0.0)
    press(page, "Least decay", "End")
    press(page, "Mean joint rate", "ArrowRight")
    check(0.01, 5, min_decay=1.0)
    press(page, "Drafts per step, K", "Home")
    check(0.01, 1, min_decay=1.0)
    press(page, "Drafts per step, K", "End")
    check(0.01, 16, min_decay=1.0)
    page.clock.run_for(1000)
    assert page.get_by_role("status").inner_text().startswith("Base rate ")


def test_residual_by_keyboard(show):
    page = show(mount_point("residual"))
    target, draft = np.array([0.4, 0.35, 0.15, 0.1]), np.array([0.2, 0.25, 0.4, 0.15])

    def check() -> None:
        alpha = reference.acceptance_rate(target, draft)
        assert readout(page, "alpha") == f"{100 * alpha:.1f}%"
        assert readout(page, "rejected") == f"{100 * (1 - alpha):.1f}%"
        columns = [target, draft, np.minimum(target, draft), reference.residual(target, draft)]
        assert [row[1:5] for row in rows(page)] == [[f"{column[v]:.3f}" for column in columns] for v in range(4)]

    check()
    press(page, "target p(cat)", *["ArrowRight"] * 6)
    target = np.array([0.46, *(0.54 / 0.6 * target[1:])])
    check()
    press(page, "draft q(owl)", "Home")
    draft = np.array([*(draft[:3] / 0.85), 0.0])
    check()
    press(page, "draft q(dog)", "End")
    draft = np.array([0.0, 1.0, 0.0, 0.0])
    check()
    page.clock.run_for(1000)
    assert "Accepted 31.5%." in page.get_by_role("status").inner_text()
    page.get_by_role("button", name="Reset").press("Enter")
    target, draft = np.array([0.4, 0.35, 0.15, 0.1]), np.array([0.2, 0.25, 0.4, 0.15])
    check()


def test_residual_by_pointer(show):
    page = show(mount_point("residual"))
    bar = page.get_by_role("slider", name="draft q(fox)", exact=True).bounding_box()
    start, end = bar["x"] + 4 + 0.4 * (bar["width"] - 8), bar["x"] + 4 + 0.75 * (bar["width"] - 8)
    page.mouse.move(start, bar["y"] + 12)
    page.mouse.down()
    page.mouse.move(end, bar["y"] + 12, steps=5)
    page.mouse.up()
    drafts = [float(row[2]) for row in rows(page)]
    assert drafts[2] == pytest.approx(0.75, abs=0.01)
    assert sum(drafts) == pytest.approx(1, abs=2e-3)


def test_simulation_starts_pauses_and_converges(show):
    page = show(mount_point("residual"))
    target = np.array([0.4, 0.35, 0.15, 0.1])
    page.get_by_role("button", name="Start").press("Enter")
    page.clock.run_for(1000)
    assert readout(page, "runs") == "11"  # the first at once, then one every tenth of a second
    page.get_by_role("button", name="Pause").press("Enter")
    page.clock.run_for(1000)
    assert readout(page, "runs") == "11"
    assert "After 11 verifications" in page.get_by_role("status").inner_text()
    for _ in range(20):
        page.get_by_role("button", name="1,000 more").press("Enter")
    assert readout(page, "runs") == "20,011"
    frequencies = np.array([float(row[5]) for row in rows(page)])
    distance = np.abs(frequencies - target).sum() / 2
    assert float(readout(page, "distance")) == pytest.approx(distance, abs=1.1e-3)
    assert distance < 0.02  # four times the mean of 0.005
    assert float(readout(page, "accepted").removesuffix("%")) == pytest.approx(70, abs=2)
    before = rows(page)
    page.get_by_role("button", name="Start").press("Enter")
    page.clock.run_for(60_000)
    assert readout(page, "runs") == "100,000"
    assert page.get_by_role("button", name="Start").count() == 1  # it stops by itself
    page.get_by_role("button", name="Reset").press("Enter")
    assert readout(page, "runs") == "0"
    page.get_by_role("button", name="Start").press("Enter")
    page.clock.run_for(1000)
    page.get_by_role("button", name="Pause").press("Enter")
    for _ in range(20):
        page.get_by_role("button", name="1,000 more").press("Enter")
    assert rows(page) == before  # the same seed


def test_simulation_moves_in_leaps_where_motion_is_reduced(show):
    page = show(mount_point("residual"), reduced_motion="reduce")
    page.get_by_role("button", name="Start").press("Enter")
    page.clock.run_for(900)
    assert readout(page, "runs") == "1"
    page.clock.run_for(2000)
    assert readout(page, "runs") == "100"


def test_speedup_by_keyboard(show):
    page = show(mount_point("speedup"))

    def check(alpha: Fraction, cost: float, drafts: int, mirrored: bool, best: str) -> None:
        half = alpha / 2
        pair = ([half, 1 - half], [1 - half, half]) if mirrored else ([alpha, 1 - alpha], [Fraction(1), Fraction(0)])
        by_token = reference.expected_tokens(float(alpha), drafts)
        by_block = float(block_tokens(*pair, drafts))
        assert readout(page, "tokens") == f"{by_token:.3f}"
        assert readout(page, "blockTokens") == f"{by_block:.3f}"
        assert readout(page, "speedup") == f"{by_token / (drafts * cost + 1):.3f} ×"
        assert readout(page, "blockSpeedup") == f"{by_block / (drafts * cost + 1):.3f} ×"
        assert readout(page, "best") == best
        assert len(rows(page)) == 17

    check(Fraction(8, 10), 0.05, 4, mirrored=True, best="8")
    press(page, "Acceptance rate, α", *["ArrowLeft"] * 20)
    check(Fraction(6, 10), 0.05, 4, mirrored=True, best="4")
    press(page, "Drafts per step, K", "ArrowRight")
    check(Fraction(6, 10), 0.05, 5, mirrored=True, best="4")
    press(page, "Cost of a draft, κ", "Home")
    check(Fraction(6, 10), 0.0, 5, mirrored=True, best="no limit")
    page.get_by_role("combobox", name="Distributions with this α").press("ArrowDown")
    check(Fraction(6, 10), 0.0, 5, mirrored=False, best="no limit")
    press(page, "Acceptance rate, α", "End")
    press(page, "Cost of a draft, κ", "End")
    check(Fraction(1), 1.0, 5, mirrored=False, best="0")
    press(page, "Acceptance rate, α", "ArrowLeft")
    press(page, "Cost of a draft, κ", "Home", "ArrowRight")
    check(Fraction(99, 100), 0.01, 5, mirrored=False, best="113 (off the chart)")
    page.clock.run_for(1000)
    assert page.get_by_role("status").inner_text().startswith("At K = 5: ")


def test_block_by_keyboard(show):
    page = show(mount_point("block"))

    def check(p: int, q: int, drafts: int) -> None:
        pair = [[Fraction(percent, 100), Fraction(100 - percent, 100)] for percent in (p, q)]
        rates = enumerated_joint_rates(*pair, drafts)
        by_token, by_block = (sum(rate[method] for rate in rates) for method in (0, 1))
        assert readout(page, "token") == f"{float(by_token):.3f}"
        assert readout(page, "block") == f"{float(by_block):.3f}"
        more = by_block - by_token
        assert readout(page, "moreDrafts") == (f"{float(100 * more / by_token):.1f}%" if by_token else "–")
        assert readout(page, "moreTokens") == f"{float(100 * more / (1 + by_token)):.1f}%"
        paths = enumerated_paths(*pair, min(drafts, 2))
        assert rows(page, 0) == [
            [", ".join(map(str, z)), *(f"{float(value):.4f}" for value in rest)] for z, *rest in paths
        ]
        assert rows(page, 1) == [[str(i), *(f"{float(rate):.4f}" for rate in pair)] for i, pair in enumerate(rates)]

    check(40, 80, 2)
    shown = [readout(page, key) for key in ("token", "block", "moreTokens")]
    assert shown == ["0.960", "1.040", "4.1%"]  # the page's example, and no more than the paper measured
    press(page, "Drafts per step, K", "ArrowRight")
    check(40, 80, 3)
    press(page, "Target, p(0)", *["ArrowRight"] * 3)
    press(page, "Draft, q(0)", "ArrowLeft")
    check(43, 79, 3)
    press(page, "Drafts per step, K", "Home")
    check(43, 79, 1)
    assert "both methods accept it alike" in page.locator(".sd-summary").inner_text()
    press(page, "Drafts per step, K", "End")
    check(43, 79, 8)
    press(page, "Draft, q(0)", "End")
    check(43, 100, 8)
    assert "the methods are equal" in page.locator(".sd-summary").inner_text()
    press(page, "Target, p(0)", "Home")
    check(0, 100, 8)
    press(page, "Draft, q(0)", "Home")
    check(0, 0, 8)
    page.clock.run_for(1000)
    assert page.get_by_role("status").inner_text().startswith("At K = 8: 8.000 accepted drafts by token, 8.000 by ")
    pictures = page.locator(".sd-chart").evaluate_all("charts => charts.map(chart => chart.getAttribute('aria-label'))")
    assert ["given the drafts" in pictures[0], "joint rates" in pictures[1]] == [True, True]


def test_truncation_by_keyboard(show):
    page = show(mount_point("truncation"))
    target, draft = row_constants("TARGET_LOGITS"), row_constants("DRAFT_LOGITS")

    def check(**options: float) -> None:
        sampling = Sampling(**options)
        rows_of = [truncate(logits, sampling)[0] for logits in (target, draft)]
        p, q = (np.exp(log_softmax(np.array(logits), sampling.temperature)) for logits in (target, draft))
        kept_p, kept_q = (np.exp(log_softmax(row, sampling.temperature)) for row in rows_of)
        for name, logits, row in zip(("target", "draft"), (target, draft), rows_of):
            shown = f"{np.isfinite(row).sum()} of 8, token {cutoff(logits, sampling)}"
            assert readout(page, name) == shown
        assert readout(page, "truncated") == f"{100 * reference.acceptance_rate(kept_p, kept_q):.1f}%"
        assert readout(page, "plain") == f"{100 * reference.acceptance_rate(kept_p, q):.1f}%"
        columns = [p, kept_p, q, kept_q, np.minimum(kept_p, kept_q), np.minimum(kept_p, q)]
        assert rows(page) == [[str(v), *(f"{column[v]:.3f}" for column in columns)] for v in range(8)]
        if np.isfinite(rows_of[0]).all():
            assert "Nothing is left out" in page.locator(".sd-summary").inner_text()
        else:
            lost = f"{100 * q[kept_p == 0].sum():.1f}%"
            assert f"leaves out {lost} of untruncated drafts" in page.locator(".sd-summary").inner_text()
        assert page.locator(".sd-chart rect").count() == 2 * 2 * 8
        assert page.locator(".sd-chart .sd-cutoff").count() == 2

    page.clock.run_for(100)
    check(top_p=0.8)
    press(page, "top_p", "End")
    check()
    press(page, "top_k", *["ArrowLeft"] * 5)
    check(top_k=3)
    assert [row[0] for row in rows(page) if row[2] != "0.000"] == ["0", "1", "2"]  # tokens 2 and 3 are equal
    press(page, "temperature", *["ArrowLeft"] * 3)
    check(temperature=0.7, top_k=3)
    press(page, "min_p", *["ArrowRight"] * 5)
    press(page, "top_k", "End")
    check(temperature=0.7, min_p=0.05)
    press(page, "top_p", *["ArrowLeft"] * 5)
    press(page, "top_k", *["ArrowLeft"] * 3)
    check(temperature=0.7, top_k=5, top_p=0.75, min_p=0.05)
    press(page, "top_k", "Home")
    check(temperature=0.7, top_k=1, top_p=0.75, min_p=0.05)
    assert readout(page, "truncated") == "100.0%"  # the two models have the same argmax
    assert "accepted more often" in page.locator(".sd-summary").inner_text()
    press(page, "top_k", "End")
    press(page, "min_p", "Home")
    press(page, "top_p", *["ArrowRight"] * 4)
    press(page, "temperature", *["ArrowRight"] * 8)
    check(temperature=1.5, top_p=0.95)  # the page describes this setting
    assert "accepted less often" in page.locator(".sd-summary").inner_text()
    press(page, "temperature", "End")
    press(page, "top_k", "Home")
    press(page, "top_p", "End")
    check(temperature=2.0, top_k=1)
    page.clock.run_for(1000)
    assert page.get_by_role("status").inner_text().startswith("Tokens kept: 1 of the target, 1 of the draft. ")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [360, 400, 1440])
def test_widgets_fit_and_keep_their_size(show, kind, width):
    page = show(f"{mount_point(kind)}<p>after</p>", viewport={"width": width, "height": 800})
    page.clock.run_for(100)
    assert FALLBACK not in page.locator("main").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate("""() => {
      const root = document.querySelector(".sd-widget"), {left, right} = root.getBoundingClientRect();
      const shown = [...root.querySelectorAll("*")].filter((node) => !node.closest(".sd-definitions, .sd-numbers"));
      const beyond = (box) => box.width > 0 && (box.left < left - 0.5 || box.right > right + 0.5);
      return shown.filter((node) => beyond(node.getBoundingClientRect())).map((node) => node.outerHTML);
    }""")
    assert outside == []
    height = page.locator(".sd-widget").bounding_box()["height"]
    for control in page.locator(".sd-widget input").all():
        for key in ("Home", "End", "ArrowLeft"):
            control.press(key)
            assert page.locator(".sd-widget").bounding_box()["height"] == pytest.approx(height, abs=1), key


@pytest.mark.parametrize("kind", KINDS)
def test_every_control_and_picture_has_a_name(show, kind):
    page = show(mount_point(kind))
    page.clock.run_for(100)
    nameless = page.evaluate("""() => [...document.querySelectorAll("input, select, button, summary, svg")]
      .filter((node) => !node.closest("[aria-hidden=true]"))
      .filter((node) => !(node.labels?.length || node.getAttribute("aria-label") || node.textContent.trim()))
      .map((node) => node.outerHTML)""")
    assert nameless == []
    for control in page.locator(".sd-widget input").all():
        assert control.get_attribute("aria-valuetext")


def test_widgets_mount_again_after_instant_navigation(show):
    # As in mkdocs-material: an observable that emits after every page, also after those that replace only the content.
    observable = "<script>document$ = { subscribe(mount) { mount(); document$.emit = mount; } }</script>"
    page = show(f"{mount_point('residual')}{mount_point('unknown')}", before=observable)
    assert page.get_by_text(FALLBACK).count() == 1  # nothing is mounted for an unknown name
    page.get_by_role("button", name="Start").press("Enter")
    page.evaluate("body => { document.querySelector('main').innerHTML = body; document$.emit(); document$.emit(); }",
                  mount_point("schedule") + mount_point("speedup"))  # fmt: skip
    assert page.locator(".sd-widget[data-mounted]").count() == 2
    assert page.locator("[data-readout=a]").count() == 1
    page.clock.run_for(10_000)  # the running simulation of the page before has stopped, without an error


def test_fallback_stays_without_scripts(show):
    page = show(mount_point("schedule"), java_script_enabled=False)
    assert page.get_by_text(FALLBACK).count() == 1


def test_widgets_fetch_nothing_from_other_hosts():
    for file in (MATH, WIDGETS, STYLES):
        source = file.read_text(encoding="utf-8").replace("http://www.w3.org/", "")  # names of namespaces
        assert not any(
            word in source for word in ("http:", "https:", "//cdn", "fetch(", "import(", "@import", "url(//")
        )


def test_widgets_use_no_unseeded_random_numbers():
    source = MATH.read_text(encoding="utf-8") + WIDGETS.read_text(encoding="utf-8")
    assert "Math.random" not in source
