"""The site's widgets: their JavaScript computes the same as the Python, and they can be used by keyboard in a browser.

The mathematics (docs/javascripts/math.js) runs in QuickJS (`pip install quickjs-ng`) or Node, whichever is installed. The
widgets themselves run in headless Chromium through Playwright, without a network.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from reference import block, oracle, philox
from reference import probabilistic as reference
from reference.sampling import Sampling, cutoff, log_softmax, truncate
from specdecode import AcceptanceSchedule
from tests.support.enumeration import Case, decode, distribution, normalised

DOCS = Path(__file__).parents[1] / "docs"
MATH, WIDGETS = DOCS / "javascripts/math.js", DOCS / "javascripts/widgets.js"
STYLES = DOCS / "stylesheets/widgets.css"
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)

pytestmark = pytest.mark.skipif(not MATH.exists(), reason="the site is not part of this distribution")


# ---- The mathematics ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluate():
    """Evaluate a JavaScript expression over `math`, what math.js exports."""
    if importlib.util.find_spec("quickjs"):
        import quickjs

        context = quickjs.Context()
        context.eval(MATH.read_text(encoding="utf-8"))
        return lambda expression: json.loads(context.eval(f"(math => JSON.stringify({expression}))(specdecodeMath)"))
    if node := shutil.which("node"):

        def run(expression: str):
            script = f"const math = require({json.dumps(str(MATH))}); console.log(JSON.stringify({expression}))"
            done = subprocess.run([node, "-"], input=script, capture_output=True, text=True, check=True, timeout=60)
            return json.loads(done.stdout)

        return run
    pytest.skip("no JavaScript engine: neither the module quickjs nor the program node")


@pytest.fixture
def call(evaluate):
    """Call one function of math.js for each list of arguments."""
    return lambda name, cases: evaluate(f"{json.dumps(cases)}.map(arguments => math.{name}(...arguments))")


@pytest.mark.parametrize("min_decay", [0.0, 0.5, 0.85, 1.0])
def test_schedule_is_the_solver_of_the_package(call, min_decay):
    rates = [0.0, 1e-9, 0.01, 0.05, 0.24, 0.5, 0.69, 0.82, 0.83, 0.9, 0.95, 0.99, 0.999, 1.0]
    cases = [[rate, drafts, min_decay] for rate in rates for drafts in range(1, 17)]
    for (rate, drafts, _), found in zip(cases, call("schedule", cases)):
        schedule = AcceptanceSchedule.from_mean_rate(rate, num_draft_tokens=drafts, min_decay=min_decay)
        expected = {
            "baseRate": schedule.base_rate,
            "decay": schedule.decay,
            "jointRates": list(schedule.joint_rates),
            "conditionalRates": list(schedule.conditional_rates),
            "meanRate": schedule.mean_rate,
            "acceptanceLength": schedule.acceptance_length,
        }
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=0, abs=1e-9), (key, rate, drafts)


def test_residual_and_acceptance_are_the_references(call):
    rng = np.random.default_rng(0)
    pairs = [rng.dirichlet(np.full(size, 0.7), 2) for size in (2, 3, 4, 7) for _ in range(50)]
    pairs += [
        np.array([[0.5, 0.5], [0.5, 0.5]]),
        np.array([[1.0, 0.0], [0.0, 1.0]]),
        np.array([[0.3, 0.7], [1.0, 0.0]]),
    ]
    cases = [pair.tolist() for pair in pairs]
    for pair, residual, alpha, distance in zip(
        pairs, call("residual", cases), call("acceptanceRate", cases), call("totalVariation", cases)
    ):
        assert residual == pytest.approx(reference.residual(*pair).tolist(), rel=1e-9, abs=1e-12)
        assert alpha == pytest.approx(reference.acceptance_rate(*pair), abs=1e-12)
        assert distance == pytest.approx(1 - alpha, abs=1e-12)
    probs = [[0.2, 0.5], [0.5, 0.2], [0.5, 0.0], [0.0, 0.5], [0.5, 0.5]]
    assert call("acceptanceProbability", probs) == [reference.acceptance_probability(*pair) for pair in probs]


def test_a_moved_bar_leaves_the_others_in_proportion(call):
    assert call("withProbability", [[[0.5, 0.3, 0.2], 0, 0.0]])[0] == pytest.approx([0, 0.6, 0.4])
    assert call("withProbability", [[[0.5, 0.3, 0.2], 1, 0.65]])[0] == pytest.approx([0.25, 0.65, 0.1])
    assert call("withProbability", [[[1.0, 0.0, 0.0], 0, 0.5]])[0] == pytest.approx([0.5, 0.25, 0.25])


def test_verification_emits_the_target_distribution_exactly(evaluate):
    # Every threshold of the three draws lies between the midpoints of these grids, so counting them integrates exactly.
    counts = evaluate(
        """(() => {
          const counts = [0, 0, 0, 0];
          const grid = (n) => Array.from({length: n}, (_, i) => (i + 0.5) / n);
          for (const u of grid(20)) for (const v of grid(24)) for (const w of grid(3)) {
            const uniforms = [u, v, w];
            counts[math.verify([0.4, 0.35, 0.15, 0.1], [0.2, 0.25, 0.4, 0.15], () => uniforms.shift()).token] += 1;
          }
          return counts;
        })()"""
    )
    assert counts == [576, 504, 216, 144]  # 1440 p


def row_constants(name: str) -> list[float]:
    """Return a list of numbers that widgets.js names."""
    return json.loads(re.search(rf"const {name} = (\[.*?\])", WIDGETS.read_text(encoding="utf-8"))[1])


def test_truncation_keeps_what_the_reference_keeps(call):
    rng = np.random.default_rng(0)
    fixed = [row_constants(name) for name in ("TARGET_LOGITS", "DRAFT_LOGITS")]
    drawn = [np.round(rng.normal(0, 2, rng.integers(1, 9)) * 2).tolist() for _ in range(40)]  # many ties
    options = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.1, 0.7, 1.0, 2.0)
        for top_k in (0, 1, 3, 8)
        for top_p in (0.05, 0.35, 0.8, 0.95, 1.0)
        for min_p in (0.0, 0.01, 0.13, 0.5)
    ]
    cases = [[logits, *values] for logits in fixed + drawn for values in options]
    close = 0
    for (logits, temperature, top_k, top_p, min_p), found in zip(cases, call("truncate", cases)):
        sampling = Sampling(temperature, top_k, top_p, min_p)
        row, margin = truncate(logits, sampling)
        if margin < 1e-9:
            close += 1
            assert logits not in fixed  # for the widget's rows rounding decides nothing
            continue
        assert found["cutoff"] == cutoff(logits, sampling) == found["kept"][-1]
        assert sorted(found["kept"]) == np.flatnonzero(np.isfinite(row)).tolist()
        expected = np.exp(log_softmax(row, temperature))
        assert found["truncated"] == pytest.approx(expected.tolist(), abs=1e-12)
        assert found["probs"] == pytest.approx(np.exp(log_softmax(np.array(logits), temperature)).tolist())
    assert close < len(cases) / 100


def test_simulation_is_seeded(evaluate):
    first, second, third = evaluate(
        "[0, 0, 1].map(seed => { const next = math.generator(seed); return [next(), next(), next()]; })"
    )
    assert first[0] == 1144304738 / 2**32  # mulberry32's first value from seed 0
    assert first == second != third


def test_sampling_noise_is_the_mean_total_variation(call):
    probs, n = [0.4, 0.35, 0.15, 0.1], 1000
    k = np.arange(n + 1)
    exact = sum(np.sum(binom.pmf(k, n, prob) * abs(k / n - prob)) for prob in probs) / 2
    assert call("samplingNoise", [[probs, n]])[0] == pytest.approx(exact, rel=1e-3)


def test_expected_tokens_and_speedup_follow_the_formulas(call):
    cases = [[alpha / 20, drafts] for alpha in range(21) for drafts in range(17)]
    for (alpha, drafts), tokens in zip(cases, call("expectedTokens", cases)):
        assert tokens == pytest.approx(reference.expected_tokens(alpha, drafts), abs=1e-12)
        if alpha < 1:
            assert tokens == pytest.approx((1 - alpha ** (drafts + 1)) / (1 - alpha), abs=1e-12)
    # Leviathan et al. (2023), table 1: alpha, K and the speed-up for free drafts.
    table = [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)]
    tokens = call("expectedTokens", [[alpha, drafts] for alpha, drafts, _ in table])
    assert [round(value, 2) for value in tokens] == [speedup for *_, speedup in table]
    assert call("speedup", [[3.0, 4, 0.25], [3.0, 4, 0.0]]) == [1.5, 3.0]


def test_best_draft_count_maximises_the_speedup(call):
    def gain(alpha: float, cost: float, drafts: int) -> float:
        return reference.expected_tokens(alpha, drafts) / (drafts * cost + 1)

    cases = [[alpha, cost] for alpha in (0.0, 0.3, 0.6, 0.8, 0.9, 0.95) for cost in (0.02, 0.05, 0.1, 0.5, 1.0)]
    for (alpha, cost), best in zip(cases, call("bestDraftCount", cases)):
        gains = [gain(alpha, cost, drafts) for drafts in range(60)]
        assert best == int(np.argmax(np.array(gains) > max(gains) - 1e-12)), (alpha, cost)
    assert call("bestDraftCount", [[0.8, 0.05], [0.8, 0.1], [0.9, 0.05], [0.6, 0.05]]) == [8, 6, 13, 4]
    # JSON writes infinity as null: a free draft always pays, as does one that is always accepted and costs less than 1.
    assert call("bestDraftCount", [[0.8, 0], [1, 0.5], [1, 1], [0, 0]]) == [None, None, 0, 0]


def block_tokens(target: list[Fraction], draft: list[Fraction], drafts: int) -> Fraction:
    """Return the mean tokens of a step of block verification: over all paths, sum the acceptance probabilities."""
    total = Fraction(1)
    for path in product(range(len(draft)), repeat=drafts):
        reach, ratio, heights = Fraction(1), Fraction(1), []
        for i, token in enumerate(path, start=1):
            reach *= draft[token]
            if not reach:
                break
            ratio = min(Fraction(1), ratio * target[token] / draft[token])
            area = sum(max(Fraction(0), ratio * p - q) for p, q in zip(target, draft))
            rest = area + 1 - ratio
            heights.append(ratio if i == drafts else area / rest if rest else Fraction(1))
        if not reach:
            continue
        none_longer = Fraction(1)
        for length, height in reversed(list(enumerate(heights, start=1))):
            total += reach * none_longer * height * length
            none_longer *= 1 - height
    return total


def test_block_tokens_are_the_exact_enumeration(call):
    third, tenth = Fraction(1, 3), Fraction(1, 10)
    pairs = [
        ([third, 2 * third], [2 * third, third]),
        ([2 * tenth, 8 * tenth], [8 * tenth, 2 * tenth]),
        ([5 * tenth, 3 * tenth, 2 * tenth], [1 * tenth, 6 * tenth, 3 * tenth]),
        ([7 * tenth, 3 * tenth], [Fraction(1), Fraction(0)]),
        ([tenth, 9 * tenth], [tenth, 9 * tenth]),
        ([Fraction(0), Fraction(1)], [Fraction(1), Fraction(0)]),
    ]
    most = 6
    found = call("blockTokens", [[*([float(prob) for prob in probs] for probs in pair), most] for pair in pairs])
    for pair, tokens in zip(pairs, found):
        assert tokens == pytest.approx([float(block_tokens(*pair, drafts)) for drafts in range(most + 1)], abs=1e-12)
    assert found[0][2] - 1 == pytest.approx(11 / 9)  # the paper's toy example; token verification accepts 10/9


@pytest.mark.parametrize(("distributions", "gains"), [("mirrored", True), ("certain", False)])
def test_block_never_emits_less_than_token(call, distributions, gains):
    pairs = {
        "mirrored": lambda alpha: [[alpha / 2, 1 - alpha / 2], [1 - alpha / 2, alpha / 2]],
        "certain": lambda alpha: [[alpha, 1 - alpha], [1, 0]],
    }
    for alpha in (0.1, 0.5, 0.8, 0.95):
        by_block = call("blockTokens", [[*pairs[distributions](alpha), 8]])[0]
        by_token = call("expectedTokens", [[alpha, drafts] for drafts in range(9)])
        assert by_block[:2] == pytest.approx(by_token[:2])
        if gains:
            assert all(block > token + 1e-6 for block, token in zip(by_block[2:], by_token[2:]))
        else:
            assert by_block == pytest.approx(by_token)


def enumerated_paths(target: list, draft: list, length: int) -> list[tuple]:
    """Return (drafts, how often they are proposed, accepted by token, accepted by block), by the reference's formulas."""
    paths = [((), Fraction(1), Fraction(1), Fraction(1))]
    for _ in range(length):
        paths = [
            (
                (*drafts, v),
                proposed * q,
                token * reference.acceptance_probability(p, q),
                Fraction(block.running_ratio(ratio, p, q)),
            )
            for drafts, proposed, token, ratio in paths
            for v, (p, q) in enumerate(zip(target, draft))
            if q
        ]
    return paths


def enumerated_joint_rates(target: list, draft: list, num_draft_tokens: int) -> list[tuple[Fraction, Fraction]]:
    """Return the joint rates (by token, by block) by offset."""
    rates = []
    for length in range(1, num_draft_tokens + 1):
        paths = enumerated_paths(target, draft, length)
        rates.append(tuple(sum(path[1] * path[method] for path in paths) for method in (2, 3)))
    return rates


SMALL_PAIRS = [
    ([2, 3], [4, 1]),
    ([1, 2], [2, 1]),
    ([5, 3, 2], [1, 6, 3]),
    ([0, 1], [1, 1]),
    ([7, 3], [1, 0]),
    ([1, 4], [1, 4]),
]


@pytest.mark.parametrize("weights", SMALL_PAIRS, ids=str)
def test_draft_paths_and_joint_rates_are_the_references(call, weights):
    pair = [normalised(side) for side in weights]
    numbers = [[float(prob) for prob in side] for side in pair]
    for found, expected in zip(
        call("draftPaths", [[*numbers, length] for length in range(4)]),
        [enumerated_paths(*pair, length) for length in range(4)],
    ):
        assert [tuple(path["drafts"]) for path in found] == [path[0] for path in expected]
        for i, key in enumerate(("proposed", "token", "block"), start=1):
            assert [path[key] for path in found] == pytest.approx([float(path[i]) for path in expected], abs=1e-12)
    (found,) = call("jointRatesByMethod", [[*numbers, 5]])
    expected = enumerated_joint_rates(*pair, 5)
    for i, method in enumerate(("token", "block")):
        assert found[method] == pytest.approx([float(rates[i]) for rates in expected], abs=1e-12)


def test_drawings_of_block_verification_show_the_widgets_numbers():
    figures = pytest.importorskip("docs._tools.figures", exc_type=ImportError)
    pair = [normalised(side) for side in SMALL_PAIRS[0]]
    assert [list(side) for side in figures.BLOCK_PAIR] == pair
    for length in (1, 2):
        assert [tuple(path) for path in figures.draft_paths(length)] == enumerated_paths(*pair, length)
    drawn = figures.block_tree_figure() + figures.block_bars_figure()
    for path in enumerated_paths(*pair, 2):
        drafts, proposed, token, ratio = ", ".join(map(str, path[0])), *(f"{float(value):.4g}" for value in path[1:])
        accepted = f"{token} by token, {ratio} by block"
        assert f"Drafts {drafts}: proposed with {proposed}; given them, both are accepted with {accepted}" in drawn
        assert f"Drafts {drafts}, proposed with {proposed}: {accepted}" in drawn
    assert "are 0.36 and 0.44" in drawn


@pytest.mark.parametrize("weights", SMALL_PAIRS[:2], ids=str)
def test_joint_rates_are_those_of_the_references_verify(call, weights):
    target, draft = (normalised(side) for side in weights)
    case = Case(lambda prefix: target, lambda prefix: draft, (2,), 3)
    (found,) = call("jointRatesByMethod", [[[float(prob) for prob in side] for side in (target, draft)] + [2]])
    for method, name, domains in (
        ("token", "probabilistic", philox.DRAFT),
        ("block", "block", philox.draft_domains),
    ):
        verify = partial(oracle.verify, name)
        outcomes = distribution(lambda chance, verify=verify, domains=domains: decode(chance, case, verify, domains))
        rates = [sum(P for (_, (accepted,)), P in outcomes.items() if accepted > i) for i in range(2)]
        assert found[method] == pytest.approx(rates, abs=1e-12)


def test_seeded_frequencies_are_within_two_standard_errors(evaluate):
    # The seed is the first there is, 0. Five frequencies at three sizes: some seeds fail by chance, which is no error of
    # theirs. But a page should not show one of those.
    seed = int(re.search(r"const SEED = (\d+)", WIDGETS.read_text(encoding="utf-8"))[1])
    assert seed == 0
    target, draft = [0.4, 0.35, 0.15, 0.1], [0.2, 0.25, 0.4, 0.15]
    found = evaluate(
        f"""(() => {{
          const [p, q, random] = [{target}, {draft}, math.generator({seed})];
          const [counts, shown] = [[0, 0, 0, 0, 0], []];
          for (let n = 1; n <= 100000; n++) {{
            const step = math.verify(p, q, random);
            counts[step.token] += 1;
            counts[4] += step.accepted ? 1 : 0;
            if ([1000, 9000, 100000].includes(n)) shown.push([n, [...counts]]);
          }}
          return shown;
        }})()"""
    )
    expected = np.array([*target, reference.acceptance_rate(np.array(target), np.array(draft))])
    for n, counts in found:
        errors = np.sqrt(expected * (1 - expected) / n)
        assert (abs(np.array(counts) / n - expected) <= 2 * errors).all(), n


# ---- The widgets --------------------------------------------------------------------------------------------------

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
        page.clock.pause_at(3600)  # from now on a test moves the time
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
    """Return the cells of all rows of a widget, or of those of one of its tables."""
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
    check(0.89, 5)  # more than the least decay reaches
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
    assert distance < 0.02  # four times its mean of 0.005
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
    check(temperature=1.5, top_p=0.95)  # what the page says of this setting
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
