"""The mathematics of the site's widgets gives the same results as the Python code.

docs/javascripts/math.js runs in QuickJS (`pip install quickjs-ng`) or Node, whichever is installed.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from scipy.stats import binom

from reference import oracle, philox
from reference import probabilistic as reference
from reference.sampling import Sampling, cutoff, log_softmax, truncate
from specdecode import AcceptanceSchedule
from tests.support.enumeration import Case, decode, distribution, normalised
from tests.support.widgets import MATH, WIDGETS, block_tokens, enumerated_joint_rates, enumerated_paths, row_constants

pytestmark = pytest.mark.skipif(not MATH.exists(), reason="the site is not part of this distribution")


@pytest.fixture(scope="module")
def evaluate():
    """Evaluate a JavaScript expression over `math`, the exports of math.js."""
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
    # The seed is the first one, 0. Five frequencies at three sizes: some seeds fail by chance, but a page should not show
    # one.
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
