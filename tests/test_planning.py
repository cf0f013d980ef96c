"""Draft lengths: the plan is the best one, and which rules for lengths keep the target's distribution."""

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

import specdecode
from reference import block, planning, probabilistic
from specdecode import DraftPlanner, RejectionSampler
from tests.conftest import ON_GPU
from tests.support import distributions
from tests.support.cuda import captured, synchronising_raises
from tests.support.enumeration import (
    Chance,
    ExactUniform,
    distribution,
    normalised,
    sequence_distribution,
    total_variation,
)

# --- The best lengths -------------------------------------------------------------------------------------------------


def expected_tokens(acceptance: np.ndarray, lengths) -> float:
    survival = np.cumprod(acceptance, axis=1)
    return len(survival) + sum(survival[request, :length].sum() for request, length in enumerate(lengths))


def random_case(seed: int) -> tuple:
    """Return (acceptance, cost, most); a fifth of the cases with ties, half of the costs with steps, some costs short."""
    rng = np.random.default_rng(seed)
    num_requests, num_draft_tokens = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    acceptance = rng.random((num_requests, num_draft_tokens)) ** 0.5
    if seed % 5 == 0:
        acceptance = acceptance.round(1)
    most = rng.integers(0, num_draft_tokens + 1, num_requests)
    tokens = np.arange(num_requests * (1 + num_draft_tokens) + 1)
    cost = 10 + 0.6 * tokens + 0.02 * tokens**2 if seed % 2 else 8 + 3 * np.ceil(tokens / 4)
    if seed % 3 == 0:
        cost = cost[: num_requests + 1 + int(rng.integers(0, 6))]
    return acceptance, cost, most


def test_no_lengths_are_better_than_the_plan():
    for seed in range(600):
        acceptance, cost, most = random_case(seed)
        num_requests = len(acceptance)
        ratios = [
            expected_tokens(acceptance, lengths) / cost[num_requests + sum(lengths)]
            for lengths in product(*[range(limit + 1) for limit in most])
            if num_requests + sum(lengths) < len(cost)
        ]
        for planned in (
            planning.plan(acceptance, cost, most).tolist(),
            specdecode.plan(torch.tensor(acceptance), torch.tensor(cost), torch.tensor(most)).tolist(),
        ):
            assert all(0 <= length <= limit for length, limit in zip(planned, most)), seed
            ratio = expected_tokens(acceptance, planned) / cost[num_requests + sum(planned)]
            assert ratio == pytest.approx(max(ratios), rel=1e-12), seed


def test_the_plan_is_the_references():
    for seed in range(600):
        acceptance, cost, most = random_case(seed)
        for limits in (None, most):
            expected = planning.plan(acceptance, cost, limits)
            lengths = None if limits is None else torch.tensor(limits)
            got = specdecode.plan(torch.tensor(acceptance), cost.tolist(), lengths)
            assert got.dtype == torch.int64
            assert got.tolist() == expected.tolist(), seed


# --- Rules for lengths, by exact enumeration --------------------------------------------------------------------------

TARGET = {(): (9, 5, 3), (0,): (1, 2, 1), (1,): (7, 7, 6), (2,): (3, 2, 4)}
DRAFT = {(): (148, 171, 38), (0,): (23, 22, 15), (1,): (23, 21, 16), (2,): (33, 7, 14)}
METHODS: dict[str, Callable] = {"probabilistic": probabilistic.verify, "block": block.verify}


def target(text: tuple) -> list[Fraction]:
    return normalised(TARGET.get(text, (3, 9, 5)))


def draft(text: tuple) -> list[Fraction]:
    return normalised(DRAFT[text])


def argmax(text: tuple) -> list[Fraction]:
    """Return the point mass on the likeliest draft."""
    row = draft(text)
    return [Fraction(token == row.index(max(row))) for token in range(len(row))]


def overlap(text: tuple) -> Fraction:
    return sum(map(min, target(text), draft(text)), Fraction(0))


def verified(chance: Chance, drafts: tuple, method: str, rows: Callable = draft) -> tuple:
    """Verify drafts drawn from `rows`; return the tokens, completed by the target to three."""
    target_rows = [np.array(target(drafts[:offset]), dtype=object) for offset in range(len(drafts) + 1)]
    draft_rows = [np.array(rows(drafts[:offset]), dtype=object) for offset in range(len(drafts))]
    if method == "strict":
        tokens: tuple = ()
        for offset, row in enumerate(target_rows):
            tokens += (chance.draw(row),)
            if tokens != drafts[: offset + 1]:
                break
    else:
        uniforms = [ExactUniform(chance) for _ in drafts]
        accepted, probs = METHODS[method](target_rows, draft_rows, drafts, uniforms)
        tokens = (*drafts[:accepted], chance.draw(probs))
    return completed(chance, tokens)


def completed(chance: Chance, tokens: tuple) -> tuple:
    while len(tokens) < 3:
        tokens += (chance.draw(target(tokens)),)
    return tokens


def error(step: Callable[[Chance], tuple]) -> Fraction | float:
    """Return the total variation between a step's tokens, completed, and the target's."""
    return total_variation(distribution(step), sequence_distribution(target, 3))


def stops_before(admits: Callable, stops_after: Callable = lambda text: False, rows: Callable = draft) -> Callable:
    """Return the step of two drafts at most that offers a draft only if `admits(text, token, chance)`."""

    def step(chance: Chance, method: str) -> tuple:
        drafts: tuple = ()
        while len(drafts) < 2 and not (drafts and stops_after(drafts)):
            token = chance.draw(rows(drafts))
            if not admits(drafts, token, chance):
                break
            drafts += (token,)
        return verified(chance, drafts, method, rows)

    return step


EXACT_RULES = {
    "two drafts": stops_before(lambda text, token, chance: True),
    "the draft row is sure enough": stops_before(lambda text, token, chance: max(draft(text)) >= Fraction(45, 100)),
    "the target row is sure enough": stops_before(lambda text, token, chance: max(target(text)) >= Fraction(48, 100)),
    "a coin": stops_before(lambda text, token, chance: chance.draw([Fraction(1, 2)] * 2) == 0),
    "after an unlikely draft": stops_before(
        lambda text, token, chance: True, stops_after=lambda text: draft(text[:-1])[text[-1]] < Fraction(33, 100)
    ),
}
LOOKING_RULES = {  # at the draft that is left out: the rule, and the errors of probabilistic and block
    "an unlikely draft": (lambda text, token, chance: draft(text)[token] >= Fraction(33, 100), 0.197, 0.201),
    "unlikely drafts": (
        lambda text, token, chance: draft(text)[token] * (draft(())[text[0]] if text else 1) >= Fraction(12, 100),
        0.151,
        0.151,
    ),
    "a draft that may be rejected": (
        lambda text, token, chance: target(text)[token] >= draft(text)[token],
        0.191,
        0.191,
    ),
}


@pytest.mark.parametrize("method", ["probabilistic", "block", "strict"])
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_rules_known_before_the_draw_are_exact(rule, method):
    assert error(lambda chance: EXACT_RULES[rule](chance, method)) == 0


@pytest.mark.parametrize("rule", LOOKING_RULES)
def test_rules_that_look_at_the_draft_change_the_distribution(rule):
    admits, *errors = LOOKING_RULES[rule]
    for method, expected in zip(METHODS, errors):
        assert error(lambda chance, method=method: stops_before(admits)(chance, method)) == pytest.approx(
            expected, abs=6e-4
        )
    assert error(lambda chance: stops_before(admits)(chance, "strict")) == 0


@pytest.mark.parametrize("rule", LOOKING_RULES)
@pytest.mark.parametrize("method", ["probabilistic", "block", "strict"])
def test_rules_may_look_at_argmax_drafts(rule, method):
    admits, *_ = LOOKING_RULES[rule]
    assert error(lambda chance: stops_before(admits, rows=argmax)(chance, method)) == 0


def test_lengths_from_this_steps_confidences_change_the_distribution():
    """The confidence of draft 1 depends on draft 0, so the budget decides about draft 0 by looking at it."""
    first, mean = overlap(()), sum(map(overlap, [(0,), (1,), (2,)])) / 3
    cost = [1, 1, (1 + first) * 10 / 9, 1 + first + first * mean]

    def step(chance: Chance, method: str, live: bool) -> tuple:
        drafts: tuple = (chance.draw(draft(())),)
        drafts += (chance.draw(draft(drafts)),)
        confidence = overlap(drafts[:1]) if live else mean
        (length,) = planning.plan(np.array([[first, confidence]], dtype=object), cost)
        return verified(chance, drafts[:length], method)

    for method in METHODS:
        assert error(lambda chance, method=method: step(chance, method, live=True)) == pytest.approx(0.088, abs=6e-4)
        assert error(lambda chance, method=method: step(chance, method, live=False)) == 0
    assert error(lambda chance: step(chance, "strict", live=True)) == 0


def test_a_length_chosen_after_the_decisions_changes_the_distribution():
    def step(chance: Chance) -> tuple:
        drafts: tuple = ()
        while len(drafts) < 2:
            row = draft(drafts)
            token = chance.draw(row)
            if ExactUniform(chance) > probabilistic.acceptance_probability(target(drafts)[token], row[token]):
                break
            drafts += (token,)
        return completed(chance, drafts)

    assert error(step) == pytest.approx(0.074, abs=6e-4)


# --- The planner ------------------------------------------------------------------------------------------------------

COST = [float(max(32, tokens)) for tokens in range(200)]  # a call of up to 32 tokens takes as long as one of one token


def simulated(planner: DraftPlanner, rates: list[float], steps: int, num_requests: int = 16) -> torch.Tensor:
    """Plan, verify and learn for some steps; return the last lengths. Draft i is accepted with probability rates[i]."""
    num_draft_tokens = planner.num_draft_tokens
    target_logits = torch.full((num_requests, num_draft_tokens + 1, 3), -torch.inf)
    for position, rate in enumerate([*rates, 1.0]):
        target_logits[:, position, 0], target_logits[:, position, 1] = (
            np.log(rate),
            np.log1p(-rate) if rate < 1 else -np.inf,
        )
    sampler, offsets = RejectionSampler("probabilistic"), torch.arange(num_draft_tokens)
    for step in range(steps):
        lengths = planner.plan(num_requests)
        drafts = torch.where(offsets < lengths[:, None], 0, -1)
        planner.update(sampler(target_logits, drafts, seeds=step * num_requests))
    return planner.plan(num_requests)


def test_the_planner_learns_rates_from_its_own_outputs():
    rates = [0.9, 0.6, 0.3]
    planner = DraftPlanner(
        num_draft_tokens=3, cost=[1.0] * 200, decay=0.999
    )  # tokens are free: all drafts are verified
    lengths = simulated(planner, rates, steps=600)
    assert lengths.tolist() == [3] * 16
    # the third position is judged 16 * 450 * .54 times in the memory: a standard error of .008
    assert planner.acceptance.tolist() == pytest.approx(rates, abs=0.04)


def test_the_planner_drafts_where_it_pays():
    rates = [0.9, 0.6, 0.3]
    planner = DraftPlanner(num_draft_tokens=3, cost=COST)
    lengths = simulated(planner, rates, steps=200)
    best = planning.plan([rates] * 16, COST)
    assert best.tolist() == [1] * 16
    assert lengths.tolist() == [1] * 16


def test_the_planner_tries_again_what_it_has_not_drafted_for_long():
    planner = DraftPlanner(num_draft_tokens=1, cost=[1.0, 1.0, 1.8], decay=0.9)
    simulated(planner, [0.001], steps=40, num_requests=1)
    bad = planner.acceptance.item()
    assert bad < 0.9
    lengths = []
    for _ in range(200):
        lengths.append(planner.plan(1).item())
        simulated(planner, [0.001], steps=1, num_requests=1)
    assert 0 < sum(lengths) < 40


def test_old_steps_are_forgotten_and_shorter_drafts_count_where_they_end():
    planner = DraftPlanner(num_draft_tokens=3, cost=COST, decay=0.5)
    target_logits = torch.zeros(3, 4, 5)
    target_logits[:, :, 3] = 1.0
    drafts = torch.tensor([[3, 3, 4], [3, -1, -1], [4, 3, 3]])
    output = RejectionSampler("strict")(target_logits, drafts, temperature=0.0)
    planner.update(output)  # accepted 2, 1, 0; judged 3, 1, 1
    assert planner.acceptance.tolist() == [3 / 4, (1 + 3 / 4) / 2, (4 / 5) / 2]
    planner.update(output)
    assert planner.acceptance.tolist() == pytest.approx([4 / 5.5, (1.5 + 4 / 5.5) / 2.5, (5.5 / 7) / 2.5])


def test_groups_learn_their_own_rates_and_begin_with_those_of_all():
    planner = DraftPlanner(num_draft_tokens=2, cost=COST, num_groups=3)
    target_logits = torch.zeros(3, 3, 5)
    target_logits[:, :, 3] = 1.0
    drafts = torch.tensor([[3, 3], [4, 3], [3, 4]])
    planner.update(RejectionSampler("strict")(target_logits, drafts, temperature=0.0), torch.tensor([0, 1, -1]))
    total = torch.tensor([2 / 3, (1 + 2 / 3) / 2], dtype=torch.float64)  # accepted 1, 1; judged 2, 1
    groups = torch.stack([(1 + total) / 2, total / torch.tensor([2, 1]), total])
    torch.testing.assert_close(planner.acceptance, groups)
    assert planner.plan(4).tolist() == specdecode.plan(total.expand(4, -1), COST).tolist()


def test_trees_are_counted_like_chains():
    """A tree's draft tokens are its depth, and its accepted drafts are a path."""
    of_chains, of_trees = DraftPlanner(num_draft_tokens=2, cost=COST), DraftPlanner(num_draft_tokens=2, cost=COST)
    sampler, target_logits = RejectionSampler("strict"), torch.zeros(2, 3, 5)
    target_logits[:, :, 3] = 1.0
    drafts = torch.tensor([[3, 4], [3, 3]])
    of_chains.update(sampler(target_logits, drafts, temperature=0.0))
    nodes = torch.nn.functional.pad(drafts, (1, 0))
    of_trees.update(sampler.tree(target_logits, nodes, torch.tensor([-1, 0, 1]), max_depth=2, temperature=0.0))
    assert of_trees.acceptance.tolist() == of_chains.acceptance.tolist()


def test_a_budget_limits_the_drafts_of_all_requests():
    planner = DraftPlanner(num_draft_tokens=3, cost=[1.0] * 200)
    assert planner.plan(4).tolist() == [3, 3, 3, 3]
    assert planner.plan(4, budget=6).tolist() == [2, 2, 1, 1]
    assert planner.plan(4, budget=0).tolist() == [0, 0, 0, 0]
    assert DraftPlanner(num_draft_tokens=3, cost=[1.0] * 8).plan(4).tolist() == [1, 1, 1, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_neither_learning_nor_planning_waits_for_the_device():
    acceptance, cost, most = random_case(2)
    on_host, on_device = (
        [torch.tensor(each, device=device) for each in (acceptance, cost, most)] for device in ("cpu", "cuda")
    )
    planners = [DraftPlanner(num_draft_tokens=3, cost=torch.tensor(COST, device=device)) for device in ("cpu", "cuda")]
    outputs = []
    for device in ("cpu", "cuda"):
        drafts = torch.tensor([[0, 0, 1], [0, -1, -1]], device=device)
        outputs.append(RejectionSampler("strict")(torch.zeros(2, 4, 5, device=device), drafts, temperature=0.0))
    torch.cuda.synchronize()
    with synchronising_raises():
        lengths = specdecode.plan(*on_device)
        planners[1].update(outputs[1])
        learned = planners[1].plan(4, budget=6)
    assert lengths.tolist() == specdecode.plan(*on_host).tolist()
    planners[0].update(outputs[0])
    assert learned.tolist() == planners[0].plan(4, budget=6).tolist()
    graph, learned = captured(lambda: (planners[1].update(outputs[1]), planners[1].plan(4, budget=6))[1])
    graph.replay()
    planners[0].update(outputs[0])
    assert learned.tolist() == planners[0].plan(4, budget=6).tolist()
    assert planners[1].acceptance.tolist() == planners[0].acceptance.tolist()


# --- Distributions with the planner in the loop -----------------------------------------------------------------------

PLANNED_REQUESTS = distributions.REQUESTS if ON_GPU else 20_000


def planned_step(sampler, model, planner, num_requests, first_seed, device):
    """Plan, draft, verify and learn; return the requests' tokens, completed by the target to K + 1, and the lengths."""
    seeds = first_seed + torch.arange(num_requests, device=device)
    rows, draft_rows = (
        [torch.tensor(each, dtype=torch.float32, device=device) for each in side]
        for side in (model.target, model.draft)
    )
    lengths, prefix = planner.plan(num_requests), torch.zeros_like(seeds)
    target_logits, draft_logits, drafts = [rows[0][prefix]], [], []
    for offset in range(model.num_draft_tokens):
        draft_logits.append(draft_rows[offset][prefix])
        positions = torch.full_like(seeds, offset)
        token = sampler.draft(draft_logits[-1], seeds=seeds, positions=positions, offset=offset).token_ids
        drafts.append(token.masked_fill(offset >= lengths, -1))
        prefix = prefix * model.vocab + token
        target_logits.append(rows[offset + 1][prefix])
    output = sampler(*(torch.stack(each, 1) for each in (target_logits, drafts, draft_logits)), seeds=seeds)
    planner.update(output)
    tokens, prefix = output.token_ids.clone(), torch.zeros_like(prefix)
    for offset, each in enumerate(rows):
        own = specdecode.sample(each[prefix], seeds=seeds, positions=torch.full_like(seeds, offset))
        tokens[:, offset] = torch.where(tokens[:, offset] < 0, own, tokens[:, offset])
        prefix = prefix * model.vocab + tokens[:, offset]
    return tokens.cpu().numpy(), lengths.cpu().numpy()


@pytest.mark.parametrize("backend", ["eager", *["triton"] * ON_GPU])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_have_the_targets_distribution_where_past_outputs_plan_the_lengths(method, backend):
    """False-alarm rate 1e-6. With 200,000 requests it sees a total variation of .014, with 20,000 one of .043.

    The planner forgets half of its counts in each step, and all lengths pay about equally: so they follow the last outputs.
    """
    device = "cuda" if ON_GPU else "cpu"
    model, num_requests = distributions.tables(vocab=3, num_draft_tokens=3), 500
    sampler = RejectionSampler(method, backend=backend)
    accepted = {
        "probabilistic": distributions.accepted_distribution(model, np.minimum),
        "block": distributions.accepted_distribution_of_blocks(model),
    }[method]
    emitted = np.cumsum(1 - np.cumsum([0, *accepted[:-1]]))  # mean tokens by length
    cost = np.interp(np.arange(4 * num_requests + 1) / num_requests - 1, range(4), emitted)
    planner = DraftPlanner(3, torch.tensor(cost, device=device), decay=0.5)
    steps = [
        planned_step(sampler, model, planner, num_requests, first_seed, device)
        for first_seed in range(0, PLANNED_REQUESTS, num_requests)
    ]
    tokens, lengths = map(np.concatenate, zip(*steps))
    assert sum(np.bincount(lengths) > PLANNED_REQUESTS / 50) >= 2, np.bincount(lengths)  # they do change
    distributions.assert_distribution(
        distributions.counts_of_tokens(model, tokens), distributions.joint_distribution(model)
    )


# --- Errors -----------------------------------------------------------------------------------------------------------

HALF = torch.full((2, 3), 0.5)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: specdecode.plan([[0.5]], COST), TypeError, "^acceptance: expected a torch.Tensor"),
        (lambda: specdecode.plan(HALF[0], COST), ValueError, r"^acceptance: expected shape .* got \[3\]"),
        (lambda: specdecode.plan(HALF * 3, COST), ValueError, r"^acceptance: expected values in \[0, 1\], got 1.5"),
        (
            lambda: specdecode.plan(HALF * torch.nan, COST),
            ValueError,
            r"^acceptance: expected values in \[0, 1\], got nan",
        ),
        (
            lambda: specdecode.plan(HALF, [1.0, 1.0]),
            ValueError,
            "^cost: expected more than num_requests = 2 values, got 2",
        ),
        (
            lambda: specdecode.plan(HALF, [1, 1, 0, 1]),
            ValueError,
            r"^cost: expected finite values above 0, got 0.0 at \[2\]",
        ),
        (lambda: specdecode.plan(HALF, "fast"), TypeError, "^cost: expected numbers or a tensor, got 'fast'"),
        (lambda: specdecode.plan(HALF, 3.0), TypeError, "^cost: expected numbers or a tensor, got 3.0"),
        (lambda: specdecode.plan(HALF, COST, torch.ones(3).long()), ValueError, r"^most: expected shape \[2\]"),
        (lambda: specdecode.plan(HALF, COST, torch.ones(2)), TypeError, "^most: expected dtype"),
        (lambda: DraftPlanner(0, COST), ValueError, "^num_draft_tokens: "),
        (lambda: DraftPlanner(3, []), ValueError, "^cost: expected shape"),
        (lambda: DraftPlanner(3, COST, decay=0.0), ValueError, "^decay: "),
        (lambda: DraftPlanner(3, COST, decay="slow"), TypeError, "^decay: "),
        (lambda: DraftPlanner(3, COST).plan(0), ValueError, "^num_requests: "),
        (lambda: DraftPlanner(3, COST).plan(200), ValueError, "^num_requests: expected at most 199"),
        (lambda: DraftPlanner(3, COST).plan(2, budget=-1), ValueError, "^budget: "),
        (
            lambda: DraftPlanner(3, COST).update(HALF),
            TypeError,
            "^output: expected a SamplerOutput or TreeOutput, got Tensor",
        ),
    ],
)
def test_errors_name_the_argument(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_an_output_with_more_drafts_than_planned_for_is_refused():
    output = RejectionSampler("strict")(torch.zeros(1, 4, 5), torch.zeros(1, 3).long(), temperature=0.0)
    with pytest.raises(ValueError, match=r"^output: expected at most num_draft_tokens = 2 drafts per request, got 3"):
        DraftPlanner(2, COST).update(output)
