"""Trees of drafts: rules are exact by enumeration, lossy ones are seen, the oracle emits the text of plain sampling."""

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import combinations, permutations, product

import numpy as np
import pytest

from reference import adjustments, block, oracle, sampling, selection, strict, tree
from reference.adjustments import Adjustments
from reference.philox import SELECT, gumbel
from reference.probabilistic import acceptance_probability, residual
from reference.sampling import Sampling, log_softmax, truncate
from reference.selection import BLOCK_SIZE
from tests.conftest import ON_GPU
from tests.support.distributions import assert_distribution
from tests.support.enumeration import (
    Case,
    Chance,
    Table,
    distribution,
    history,
    iid,
    marginal,
    sequence_distribution,
    total_variation,
)
from tests.support.exactness import accepted_distribution_of_blocks
from tests.support.mutants import Mutant, assert_caught

# --- Trees that are drawn while a rule reads them ----------------------------------------------------------------------


class Lazy:
    """A sequence whose entries are computed on first access."""

    def __init__(self, compute: Callable) -> None:
        self.entry = cache(compute)

    def __getitem__(self, index: int):
        return self.entry(index)


class Interval:
    """A uniform number that may be compared several times, with fractions."""

    def __init__(self, chance: Chance) -> None:
        self.chance, self.low, self.high = chance, Fraction(0), Fraction(1)

    def __le__(self, threshold) -> bool:
        middle = min(max(Fraction(threshold), self.low), self.high)
        share = (middle - self.low) / (self.high - self.low)
        below = bool(self.chance.draw([1 - share, share]))
        self.low, self.high = (self.low, middle) if below else (middle, self.high)
        return below


class Drawn:
    """A tree whose tokens are drawn by a drafting law, and whose rows depend on the whole path."""

    def __init__(self, chance: Chance, parents: list, target: Table, draft: Table, law: str | list) -> None:
        self.chance, self.parents, self.draft, self.law = chance, parents, draft, law
        self.token_ids = Lazy(self.token)
        self.target_probs = Lazy(lambda node: np.array(target(self.path(node)), dtype=object))
        self.draft_probs = Lazy(lambda node: np.array(draft(self.path(node)), dtype=object))
        self.uniforms = Lazy(lambda node: Interval(chance))

    def path(self, node: int) -> tuple:
        return () if node == 0 else (*self.path(self.parents[node]), self.token_ids[node])

    def token(self, node: int) -> int:
        if isinstance(self.law, list):  # given tokens
            return self.law[node]
        parent = self.parents[node]
        probs = list(self.draft(self.path(parent)))
        before = [self.token_ids[other] for other in tree.children(self.parents, parent) if other < node]
        if self.law == "top":
            return int(np.argsort([-float(q) for q in probs], kind="stable")[len(before)])
        if self.law == "without":
            probs = [Fraction(0) if token in before else q for token, q in enumerate(probs)]
        return self.chance.draw([q / sum(probs) for q in probs])


def law(rule: Callable, parents: list, target: Table, draft: Table, drafted: str | list, length: int) -> tuple:
    """Return the distribution of `length` tokens, completed by the target, and the mean number of accepted drafts."""

    def step(chance: Chance) -> tuple:
        drawn = Drawn(chance, parents, target, draft, drafted)
        nodes, probs = rule(drawn)
        return tuple(drawn.token_ids[node] for node in nodes), tuple(probs)

    outcomes, joint, mean = distribution(step), {}, Fraction(0)
    for (accepted, probs), share in outcomes.items():
        mean += share * len(accepted)
        begun = {(*accepted, token): share * p for token, p in enumerate(probs) if p}
        for tokens, reached in begun.items():
            rest = sequence_distribution(lambda more, tokens=tokens: target(tokens + more), length - len(tokens))
            for more, p in rest.items():
                joint[tokens + more] = joint.get(tokens + more, 0) + reached * p
    return joint, mean


def walk(drawn: Drawn) -> tuple:
    nodes, tokens = tree.walk(
        lambda node, depth: drawn.chance.draw(list(drawn.target_probs[node])), drawn.token_ids, drawn.parents
    )
    return nodes, [Fraction(int(token == tokens[-1])) for token in range(len(drawn.target_probs[0]))]


def target_only(drawn: Drawn) -> tuple:
    return tree.target_only(drawn.target_probs, drawn.token_ids, drawn.parents, drawn.uniforms)


def with_q(verify: str, replacement: bool) -> Callable:
    def rule(drawn: Drawn) -> tuple:
        given = drawn.target_probs, drawn.draft_probs, drawn.token_ids, drawn.parents, drawn.uniforms
        return getattr(tree, verify)(*given, replacement)  # looked up at each call, so that a mutant of it takes effect

    return rule


EXACT = {
    "walk": (walk, ("iid", "without", "top")),
    "target-only": (target_only, ("iid", "without", "top")),
    "rejection": (with_q("rejection", True), ("iid",)),
    "rejection-without-replacement": (with_q("rejection", False), ("without",)),
    "traversal": (with_q("traversal", True), ("iid",)),
    "traversal-without-replacement": (with_q("traversal", False), ("without",)),
}
"""The rules, and the drafting laws for which each is exact."""

SHAPES = {
    "chain-3": [-1, 0, 1, 2],
    "star-2": [-1, 0, 0],
    "star-3": [-1, 0, 0, 0],
    "width-2-depth-2": [-1, 0, 0, 1, 1, 2, 2],
    "unbalanced": [-1, 0, 0, 1, 1, 3],
    "shuffled-and-padded": [
        5,
        4,
        -1,
        4,
        0,
        7,
        0,
        7,
        99,
        1,
    ],  # 0 has 4 and 6; 4 has 1 and 3; 1 has 9; 5, 7 are in a circle
    "alone": [-1],
}


def depth_of(parents: list) -> int:
    return len(tree.paths(parents)[-1]) - 1


def mixed(weight: Fraction, one: Table, other: Table) -> Table:
    return lambda prefix: [weight * a + (1 - weight) * b for a, b in zip(one(prefix), other(prefix))]


def pair(vocab: int, seed: int, weight: Fraction = Fraction(1, 2)) -> tuple[Table, Table]:
    target = history(seed, vocab)
    return target, mixed(weight, target, history(1000 + seed, vocab))


def check_rule(name: str, shape: str, vocab: int = 3, models: tuple | None = None) -> None:
    rule, laws = EXACT[name]
    parents, (target, draft) = SHAPES[shape], models or pair(vocab, 1)
    length = depth_of(parents) + 1
    for drafted in laws:
        joint, _ = law(rule, parents, target, draft, drafted, length)
        assert joint == sequence_distribution(target, length), (name, shape, drafted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EXACT)
def test_the_joint_distribution_of_the_tokens_is_the_targets(name, shape):
    check_rule(name, shape)


@pytest.mark.parametrize("name", EXACT)
def test_rules_are_exact_with_tokens_that_one_model_never_draws(name):
    check_rule(name, "star-2", models=(history(3, 4, zeros=1), history(4, 4, zeros=1)))
    check_rule(name, "unbalanced", models=(iid(1, 0, 2), iid(2, 1, 0)))
    check_rule(name, "star-3", models=(iid(18, 19, 6, 3), iid(2, 34, 54, 4)))


def test_the_traversal_of_a_chain_is_block_verification():
    def by_block(drawn: Drawn) -> tuple:
        nodes = [1, 2, 3]
        accepted, probs = block.verify(
            [drawn.target_probs[node] for node in [0, *nodes]],
            [drawn.draft_probs[node] for node in [0, 1, 2]],
            [drawn.token_ids[node] for node in nodes],
            [drawn.uniforms[node] for node in nodes],
        )
        return nodes[:accepted], probs

    for seed in range(3):
        given = SHAPES["chain-3"], *pair(3, seed), "iid", 4
        assert law(by_block, *given) == law(with_q("traversal", True), *given)


def arbitrary_trees(count: int = 30) -> list[tuple]:
    """Yield small trees of arbitrary tokens without a q: siblings may be equal, nodes are in any order."""
    random, trees = np.random.default_rng(0), []
    for seed in range(count):
        size = int(random.integers(2, 8))
        order = [0, *(1 + random.permutation(size - 1)).tolist()]
        parents = [-1] * size
        for i in range(1, size):
            parents[order[i]] = order[int(random.integers(i))]
        trees.append((parents, random.integers(0, 3, size).tolist(), history(50 + seed, 3)))
    return trees


def has_equal_siblings(parents: list, token_ids: list) -> bool:
    drafts = [(parents[node], token_ids[node]) for node in range(1, len(parents))]
    return len(set(drafts)) < len(drafts)


def test_without_q_a_given_tree_of_any_tokens_is_exact_and_accepts_the_most_possible():
    compared = 0
    for parents, token_ids, target in arbitrary_trees():
        length = depth_of(parents) + 1
        truth = sequence_distribution(target, length)
        (by_walk, mean), (by_sum, same_mean) = (
            law(rule, parents, target, target, token_ids, length) for rule in (walk, target_only)
        )
        assert by_walk == by_sum == truth
        assert mean == same_mean
        if not has_equal_siblings(parents, token_ids):
            texts = [tuple(token_ids[node] for node in path[1:]) for path in tree.paths(parents)[1:]]
            assert mean == sum(sum(p for tokens, p in truth.items() if tokens[: len(text)] == text) for text in texts)
            compared += 1
    assert compared > 8


# --- Published rules that are not exact
# ----------------------------------------------------------------------------------


def running_sum(drawn: Drawn) -> tuple:
    """Target-only verification whose running sum adds equal siblings again."""
    node, nodes = 0, []
    while True:
        probs, tried, total = drawn.target_probs[node], [], 0
        for child in tree.children(drawn.parents, node):
            token = drawn.token_ids[child]
            total += probs[token]
            if drawn.uniforms[node] <= total:
                break
            tried.append(token)
        else:
            left = np.array([0 if token in tried else p for token, p in enumerate(probs)], dtype=object)
            return nodes, left / left.sum()
        node = child
        nodes.append(child)


def by_the_whole_row(drawn: Drawn) -> tuple:
    """Each sibling judged by p / q of the whole row, and one residual after the last."""
    node, nodes = 0, []
    while True:
        target, draft = drawn.target_probs[node], drawn.draft_probs[node]
        kids = tree.children(drawn.parents, node)
        for child in kids:
            token = drawn.token_ids[child]
            if drawn.uniforms[child] <= acceptance_probability(target[token], draft[token]):
                break
        else:
            return nodes, residual(target, draft) if kids else target
        node = child
        nodes.append(child)


def test_a_running_sum_is_wrong_where_siblings_are_equal_and_only_there():
    wrong = []
    for parents, token_ids, target in arbitrary_trees():
        length = depth_of(parents) + 1
        joint, _ = law(running_sum, parents, target, target, token_ids, length)
        distance = total_variation(joint, sequence_distribution(target, length))
        assert distance == 0 or has_equal_siblings(parents, token_ids)
        wrong += [float(distance)] if distance else []
    assert len(wrong) == 12
    assert (round(min(wrong), 2), round(max(wrong), 2)) == (0.03, 0.45)


def test_top_k_siblings_judged_by_p_over_q_are_wrong_by_most_of_the_distribution():
    """Drawn siblings, judged by the whole row, are wrong too, but by less."""
    parents, models = SHAPES["width-2-depth-2"], pair(4, 1)
    truth = sequence_distribution(models[0], 3)
    for rule in (by_the_whole_row, with_q("rejection", True), with_q("rejection", False)):
        assert round(float(total_variation(law(rule, parents, *models, "top", 3)[0], truth)), 2) == 0.76
    joint, _ = law(by_the_whole_row, parents, *models, "iid", 3)
    assert round(float(total_variation(joint, truth)), 2) == 0.10


def test_the_example_of_top_k_siblings_on_the_page():
    """With p = (.5, .3, .2) and q = (.2, .2, .6) the two likeliest are always 2 and 0, and one is accepted."""
    models = iid(5, 3, 2), iid(2, 2, 6)
    joint, mean = law(with_q("rejection", True), SHAPES["star-2"], *models, "top", 2)
    first = marginal(joint, lambda tokens: tokens[0])
    assert (first, mean) == ({2: Fraction(1, 3), 0: Fraction(2, 3)}, 1)
    assert total_variation(first, dict(enumerate(models[0](())))) == Fraction(3, 10)


def test_rejection_and_traversal_are_exact_for_the_law_that_drew_the_siblings_alone():
    models = iid(18, 19, 6, 3), iid(2, 34, 54, 4)
    truth, wrong = sequence_distribution(models[0], 2), {"iid": 0.0425, "without": 0.1327}
    for name, drafted in product(("rejection", "traversal"), wrong):
        joint, _ = law(with_q(name, drafted == "without"), SHAPES["star-3"], *models, drafted, 2)
        assert round(float(total_variation(joint, truth)), 4) == wrong[drafted]


# --- How much is accepted ----------------------------------------------------------------------------------------------


def race_match(target_row: list, draft_row: list, width: int) -> list:
    """Return for each token the probability that the target selects it and it is among the draft's first `width`.

    Given E_v = e, every other E_i must be above e p_i / p_v, and fewer than `width` of them below e q_i / q_v. The tokens
    below form a set with q_i / q_v > p_i / p_v. Sum the sets' probabilities, and integrate over the exponential e.
    """
    matches = []
    for v, (pv, qv) in enumerate(zip(target_row, draft_row)):
        total = Fraction(0)
        others = (
            [(p / pv, q / qv) for i, (p, q) in enumerate(zip(target_row, draft_row)) if i != v] if pv and qv else []
        )
        between = [i for i, (a, b) in enumerate(others) if b > a]
        for size in range(min(width, len(between) + 1)) if others else ():
            for below in combinations(between, size):
                above = 1 + sum(max(pair) for i, pair in enumerate(others) if i not in below)
                for bounds in product((0, 1), repeat=size):  # exp(-e a) - exp(-e b) for each token
                    rate = above + sum(others[i][bound] for i, bound in zip(below, bounds))
                    total += (-1) ** sum(bounds) / rate
        matches.append(total)
    return matches


PAIRS = {
    "three": (iid(5, 3, 2), iid(2, 2, 6)),
    "zeros": (iid(3, 0, 2, 4), iid(1, 5, 0, 2)),
    "four": (iid(18, 19, 6, 3), iid(2, 34, 54, 4)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_shared_noise_finds_the_targets_token_as_often_as_the_formula_says(name):
    target_row, draft_row = (model(()) for model in PAIRS[name])
    vocab, draws = len(target_row), 8_000
    gumbels = -np.log(-np.log(np.random.default_rng(0).random((draws, vocab))))
    with np.errstate(divide="ignore"):
        target, draft = (np.log(np.array(row, dtype=float)) for row in (target_row, draft_row))
    zero = np.zeros(1)
    drawn = [tree.siblings(draft, zero, noise, 3) for noise in gumbels]
    tokens = (target + gumbels).argmax(axis=1)
    for width in (1, 2, 3):
        found = np.bincount([y for y, siblings in zip(tokens, drawn) if y in siblings[:width]], minlength=vocab)
        matches = [float(match) for match in race_match(target_row, draft_row, width)]
        assert_distribution(np.append(found, draws - found.sum()), np.array([*matches, 1 - sum(matches)]))
    assert race_match(target_row, draft_row, 1) == strict.match_probabilities(target_row, draft_row)
    assert sum(race_match(target_row, draft_row, vocab)) == sum(p for p, q in zip(target_row, draft_row) if q)


def test_the_race_on_one_block_draws_siblings_without_replacement():
    row = np.array([0.5, 0.3, 0.15, 0.05])
    gumbels = -np.log(-np.log(np.random.default_rng(1).random((20_000, 4))))
    pairs = list(permutations(range(4), 2))
    counts = dict.fromkeys(pairs, 0)
    for noise in gumbels:
        counts[tuple(tree.siblings(np.log(row), np.zeros(1), noise, 2))] += 1
    expected = [row[first] * row[second] / (1 - row[first]) for first, second in pairs]
    assert_distribution(np.array(list(counts.values())), np.array(expected))


def shared_mean(target: Table, draft: Table, width: int, depth: int, prefix: tuple = ()) -> Fraction:
    """Return the mean accepted drafts of a full tree of siblings that share the target's noise, one race a node."""
    if depth == 0:
        return Fraction(0)
    matches = enumerate(race_match(target(prefix), draft(prefix), width))
    return sum(
        match * (1 + shared_mean(target, draft, width, depth - 1, (*prefix, v))) for v, match in matches if match
    )


TABLE = {
    # p's weight in q: the likeliest; rejection, traversal (each with and without replacement); shared noise; chains of 2, 6
    Fraction(4, 5): [1.5, 1.93, 1.96, 1.94, 1.97, 1.99, 1.85, 5.23],
    Fraction(1, 2): [1.32, 1.8, 1.88, 1.82, 1.89, 1.96, 1.64, 4.21],
    Fraction(0): [1.31, 1.47, 1.66, 1.51, 1.69, 1.77, 1.29, 2.77],
}


def mean_accepted(weight: Fraction, models: int = 4) -> list[float]:
    """Return a row of the page's table: full trees of width 2 and depth 2 over three tokens, mean over pairs of models."""
    names = [("target-only", 2), ("rejection", 0), ("rejection-without-replacement", 0)]
    names += [("traversal", 0), ("traversal-without-replacement", 0)]
    sums = np.zeros(len(names) + 3)
    for seed in range(models):
        both = pair(3, seed, weight)
        rules = [(EXACT[name][0], EXACT[name][1][drafted]) for name, drafted in names]
        means = [law(rule, SHAPES["width-2-depth-2"], *both, drafted, 3)[1] for rule, drafted in rules]
        chains = [accepted_distribution_of_blocks(Case(*both, (length,), length + 1)) for length in (2, 6)]
        means += [shared_mean(*both, 2, 2), *(sum(n * share for n, share in chain.items()) for chain in chains)]
        sums += [float(mean) for mean in means]
    return (sums / models).round(2).tolist()


@pytest.mark.parametrize("weight", TABLE if ON_GPU else list(TABLE)[:1])
def test_mean_accepted_drafts_are_those_of_the_pages_table(weight):
    assert mean_accepted(weight) == TABLE[weight]


# --- A vocabulary of ordinary size -------------------------------------------------------------------------------------


def zipf_rows(random: np.random.Generator, exponent: float, noise: float, vocab: int = 32_768) -> tuple:
    """Return shuffled Zipf-like p, and q with the same logits plus noise."""
    logits = random.permutation(-exponent * np.log(np.arange(1, vocab + 1)) + 0.7 * random.normal(size=vocab))
    rows = [np.exp(row - row.max()) for row in (logits, logits + noise * random.normal(size=vocab))]
    return tuple(row / row.sum() for row in rows)


def acceptance_at_one_node(exponent: float, noise: float, rows: int = 24, draws: int = 60) -> dict[str, list[float]]:
    """Return the probabilities that one of 2, or 4, siblings is accepted: simulated for shared noise, otherwise exact."""
    widths = 2, 4
    rates = {name: np.zeros(2) for name in ("likeliest", "without replacement", "shared noise")}
    for row in range(rows):
        random = np.random.default_rng([0, row])
        p, q = zipf_rows(random, exponent, noise)
        log_p, log_q = np.log(p), np.log(q)
        rates["likeliest"] += [p[np.argsort(-q)[:width]].sum() for width in widths]
        for _ in range(draws):
            of_tokens, of_blocks = (-np.log(-np.log(random.random(n))) for n in (len(p), len(p) // BLOCK_SIZE))
            token = selection.select(log_p, of_blocks, of_tokens)
            siblings = tree.siblings(log_q, of_blocks, of_tokens, 4)
            rates["shared noise"] += [(token in siblings[:width]) / draws for width in widths]
            siblings = np.argpartition(-log_q - of_tokens, range(4))[:4]
            rates["without replacement"] += [rate / draws for rate in accepted_by_rejection(p, q, siblings, widths)]
    return {name: (total / rows).round(3).tolist() for name, total in rates.items()}


def accepted_by_rejection(p, q, siblings, widths) -> list[float]:
    failed, rates = 1.0, []
    for count, token in enumerate(siblings, 1):
        failed *= 1 - acceptance_probability(p[token], q[token])
        p, q = residual(p, q), tree.without(q, token)
        rates += [1 - failed] if count in widths else []
    return rates


ONE_NODE = {
    # exponent, noise: probabilities that one of 2, and of 4, siblings is accepted; with 200 draws of each of 24 rows
    (1.8, 0.5): {"likeliest": [0.637, 0.773], "without replacement": [0.919, 0.968], "shared noise": [0.945, 0.991]},
    (1.3, 1.0): {"likeliest": [0.268, 0.387], "without replacement": [0.750, 0.834], "shared noise": [0.718, 0.853]},
}


@pytest.mark.parametrize(("exponent", "noise"), ONE_NODE if ON_GPU else list(ONE_NODE)[:1])
def test_a_node_accepts_as_often_as_the_pages_table_says(exponent, noise):
    """Here with 60 draws, whose standard error is at most 0.013."""
    found = acceptance_at_one_node(exponent, noise)
    for name, rates in ONE_NODE[exponent, noise].items():
        assert found[name] == pytest.approx(rates, abs=0.03), name


# --- The oracle --------------------------------------------------------------------------------------------------------


class Model:
    """Random rows over several blocks of the vocabulary, which depend on the last tokens of the text."""

    def __init__(self, vocab: int = 2_500, dtype: type = np.float64) -> None:
        self.vocab, self.dtype = vocab, dtype

    def target(self, text: tuple) -> np.ndarray:
        random = np.random.default_rng([len(text), *(token + 1 for token in text[-3:])])
        return (2 * random.normal(size=self.vocab)).astype(self.dtype)

    def draft(self, text: tuple) -> np.ndarray:
        random = np.random.default_rng([7, len(text), *(token + 1 for token in text[-3:])])
        return self.target(text) + 0.5 * random.normal(size=self.vocab)


def counted(vocab: int, text: tuple, prompt: int, **options) -> Adjustments:
    """Return the adjustments of a request with this text so far."""
    counts = np.bincount(text[prompt:], minlength=vocab)
    in_prompt = np.isin(np.arange(vocab), text[:prompt])
    return Adjustments(1.3, 0.4, 0.6, in_prompt, counts, {3: 1.5, 8: -np.inf}, **options)


def allowed(text: tuple, vocab: int) -> np.ndarray:
    """Return a grammar's mask, which depends on the text."""
    return np.random.default_rng([5, len(text), text[-1] + 1]).random(vocab) < 0.6


def plain_text(model: Model, count: int, adjusted: bool, seed: int, temperature: float, **truncation) -> tuple:
    """Return a text of plain seeded sampling, one token after the other."""
    text: tuple = (0, 9)
    while len(text) < count:
        row = model.target(text)
        if adjusted:
            mask = allowed(text, model.vocab)[None]
            row = adjustments.adjust(row, [], counted(model.vocab, text, 2, allowed=mask))
        row, _ = truncate(row, Sampling(temperature, **truncation))
        text += (sampling.sample(row, temperature=temperature, seed=seed, position=len(text)).index,)
    return text


def drafted_tree(model: Model, text: tuple, how: str, random, **request) -> tuple[list, list, list]:
    """Return a random tree after a text: (token_ids, parents in a random order, the text at each node)."""
    size = int(random.integers(1, 10))
    places = [0, *(1 + random.permutation(size - 1)).tolist()]
    parents, token_ids, texts = [-1] * size, [text[-1]] * size, [text] * size
    for i in range(1, size):
        node, parent = places[i], places[int(random.integers(i))]
        parents[node], before = parent, texts[parent]
        rank = sum(parents[other] == parent for other in places[1:i])
        if how == "shared noise" and rank < 8:
            drawn = oracle.draft_siblings(model.draft(before), 8, position=len(before), **request).token_ids
            token_ids[node] = drawn[rank]
        else:
            token_ids[node] = int(random.integers(model.vocab)) if how == "random" else rank
        texts[node] = (*before, token_ids[node])
    return token_ids, parents, texts


def decode(model: Model, count: int, how: str, adjusted: bool, seed: int, **request) -> tuple[tuple, int]:
    """Return the text generated by trees of drafts, and the number of accepted drafts."""
    random = np.random.default_rng([1, seed])
    text, accepted = (0, 9), 0
    while len(text) < count:
        token_ids, parents, texts = drafted_tree(model, text, how, random, seed=seed, **request)
        rows = [model.target(each) for each in texts]
        added = None
        if adjusted:
            masks = np.array([allowed(each, model.vocab) for each in texts])
            added = counted(model.vocab, text, 2, allowed=masks)
        outcome = oracle.verify_tree(
            rows, token_ids, parents, max_depth=4, seed=seed, position=len(text), adjustments=added, **request
        )
        assert [token_ids[node] for node in outcome.nodes] == outcome.token_ids[:-1]
        text, accepted = (*text, *outcome.token_ids), accepted + outcome.num_accepted
    return text[:count], accepted


REQUESTS = {
    "temperature-1": {"temperature": 1.0},
    "temperature-0.5": {"temperature": 0.5},
    "greedy": {"temperature": 0.0},
    "truncated": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


def check_text(request: dict, how: str = "shared noise", adjusted: bool = False, seeds: int = 2) -> None:
    """Check that the text equals plain sampling token for token, for every tree."""
    accepted, model = 0, Model(12 if adjusted else 2_500)  # in a small vocabulary tokens are emitted again
    for seed in range(seeds):
        text, more = decode(model, 16, how, adjusted, seed, **request)
        assert text == plain_text(model, 16, adjusted, seed, **request)
        accepted += more
    assert accepted > 5 or how != "shared noise"


@pytest.mark.parametrize("adjusted", [False, True], ids=["plain", "adjusted"])
@pytest.mark.parametrize("how", ["shared noise", "random", "low ids"])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_the_text_is_that_of_plain_seeded_sampling_whatever_the_tree(request_name, how, adjusted):
    check_text(REQUESTS[request_name], how, adjusted)


def permuted(token_ids: list, parents: list, order: list, rows: list) -> tuple[list, list, list]:
    """Return the same tree with node `order[n]` in place of n."""
    place = {node: n for n, node in enumerate(order)}
    return (
        [rows[node] for node in order],
        [token_ids[node] for node in order],
        [place.get(parents[node], parents[node]) for node in order],
    )


def test_neither_the_order_of_nodes_nor_padding_changes_what_is_emitted():
    random, model, accepted = np.random.default_rng(0), Model(300), 0
    for seed in range(60):
        token_ids, parents, texts = drafted_tree(model, (1, 2), "shared noise", random, seed=seed)
        size, where = len(parents), {"max_depth": 8, "seed": seed, "position": 2}
        rows = [model.target(text) for text in texts]
        outcome = oracle.verify_tree(rows, token_ids, parents, **where)
        order = [0, *(1 + random.permutation(size - 1)).tolist()]
        again = oracle.verify_tree(*permuted(token_ids, parents, order, rows), **where)
        assert (again.token_ids, again.margin) == (outcome.token_ids, outcome.margin)
        assert [order[node] for node in again.nodes] == outcome.nodes
        # No parent; out of range; its own parent; a cycle of two and a node after it; an invalid id, and a node after it.
        nothing = np.full(300, np.nan)
        tokens = outcome.token_ids[0]
        padding = [-1, -7, size + 99, size + 3, size + 5, size + 4, size + 4, 0, size + 7]
        ids = [*token_ids, *[tokens] * 7, 300, tokens]
        padded = oracle.verify_tree([*rows, *[nothing] * 9], ids, [*parents, *padding], **where)
        assert padded == outcome
        accepted += outcome.num_accepted
    assert accepted > 40


def test_the_entry_of_node_0_is_not_looked_at():
    rows = np.log([[0.5, 0.5]] * 3)
    outcomes = {
        str(oracle.verify_tree(rows, [first, 0, 1], [parent, 0, 0], max_depth=2, seed=4))
        for first, parent in product((0, -1, 99), (-1, 0, 2, 99))
    }
    assert len(outcomes) == 1


@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_tree_that_is_a_chain_is_a_call_of_strict(request_name):
    random, model, where = np.random.default_rng(3), Model(), REQUESTS[request_name]
    for seed in range(20):
        drafts = [int(np.argmax(model.target((5,)))), *random.integers(0, model.vocab, 2).tolist()]
        drafts = drafts if seed % 4 else [*drafts[:1], -1, drafts[2]]
        rows = [model.target((5, *drafts[:i])) for i in range(4)]
        if seed % 5 == 0:
            rows[0][:] = np.nan
        added = Adjustments(presence_penalty=0.5, allowed=random.random((4, model.vocab)) < 0.9) if seed % 2 else None
        given = {"seed": seed, "position": 1, "adjustments": added, **where}
        chain = oracle.verify("strict", rows, drafts, **given)
        outcome = oracle.verify_tree(rows, [5, *drafts], [-1, 0, 1, 2], max_depth=3, **given)
        assert (outcome.token_ids, outcome.margin, outcome.invalid) == (chain.token_ids, chain.margin, chain.invalid)
        assert outcome.nodes == [1, 2, 3][: chain.num_accepted]
        assert outcome.num_draft_tokens == (3 if seed % 4 else 1)


def test_no_more_drafts_are_accepted_than_max_depth_says():
    rows = [np.eye(9)[n] for n in (4, 5, 6, 7)]
    for most in range(5):
        outcome = oracle.verify_tree(rows, [0, 4, 5, 6], [-1, 0, 1, 2], max_depth=most, temperature=0)
        assert outcome.token_ids == [4, 5, 6, 7][: most + 1]
        assert outcome.nodes == [1, 2, 3][:most]
        assert outcome.num_draft_tokens == min(most, 3)


def test_of_equal_siblings_the_lowest_node_counts():
    rows = [np.eye(9)[n] for n in (4, 5, 5, 1)]
    outcome = oracle.verify_tree(rows, [0, 4, 4, 5], [-1, 0, 0, 2], max_depth=3, temperature=0)
    assert (outcome.token_ids, outcome.nodes, outcome.num_draft_tokens) == ([4, 5], [1], 2)


def adjusted_rows() -> None:
    """Check that a row is adjusted only for the drafts before it."""
    rows, token_ids, nodes = np.ones((4, 3)), [2, 0, 0, 1], [1, 2, 3]
    added = Adjustments(frequency_penalty=0.25, allowed=np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]], bool))
    found = [row.tolist() for row in oracle.adjusted_path(rows, token_ids, nodes, added)]
    assert found == [[1, 1, 1], [0.75, 1, 1], [0.5, 1, -np.inf], [0.5, 0.75, 1]]


def test_rows_on_a_path_are_adjusted_for_the_drafts_before_them():
    adjusted_rows()


def test_log_probabilities_are_those_of_the_rows_on_the_path():
    random, model = np.random.default_rng(0), Model(300)
    for seed in range(20):
        request = {"temperature": 0.8, "top_p": 0.9}
        token_ids, parents, texts = drafted_tree(model, (1, 2), "shared noise", random, seed=seed, **request)
        rows = [model.target(text) for text in texts]
        given = {"max_depth": 8, "seed": seed, "position": 2, **request}
        outcome = oracle.verify_tree(rows, token_ids, parents, **given)
        on_path = [rows[node] for node in (0, *outcome.nodes)]
        logprobs = sampling.processed_logprobs(on_path, outcome.token_ids, Sampling(**request))
        assert len(logprobs) == outcome.num_accepted + 1
        assert np.isfinite(logprobs).all()
        neutral = oracle.adjusted_path(rows, token_ids, outcome.nodes, Adjustments())
        assert all(np.array_equal(*pair) for pair in zip(neutral, on_path))


# --- Siblings from logits ----------------------------------------------------------------------------------------------


def race_order(logits, seed: int, position: int, **request) -> list[int]:
    """Return all tokens in the order of the race, from the scores of every block."""
    weights = log_softmax(truncate(logits, Sampling(**request))[0], request.get("temperature", 1.0))
    tokens = np.arange(len(weights))
    blocks = tokens // BLOCK_SIZE
    sums = np.array([np.logaddexp.reduce(weights[blocks == b]) for b in range(blocks[-1] + 1)])
    block_scores = sums + gumbel(seed, position, np.arange(len(sums)), SELECT[0])
    scores = weights + gumbel(seed, position, tokens, SELECT[1])
    best = np.array([scores[blocks == b].max() for b in range(len(sums))])
    with np.errstate(invalid="ignore"):
        behind = (block_scores.max() - block_scores)[blocks] + best[blocks] - scores
    return [int(token) for token in np.argsort(behind, kind="stable") if weights[token] > -np.inf]


@pytest.mark.parametrize("request_name", ["temperature-1", "temperature-0.5", "truncated"])
def test_siblings_are_the_first_tokens_of_the_race_over_all_blocks(request_name):
    request, model = REQUESTS[request_name], Model(5_000)
    for seed in range(10):
        row = model.target((seed,))
        order = race_order(row, seed, 3, **request)
        for width in (1, 2, 8):
            found = oracle.draft_siblings(row, width, seed=seed, position=3, **request)
            assert found.token_ids == [*order, *[-1] * 8][:width]
            if width == 1:
                kept, margin = truncate(row, Sampling(**request))
                alone = sampling.select(log_softmax(kept, request["temperature"]), seed, 3)
                assert found == ([alone.index], pytest.approx(min(margin, alone.margin)))


def test_siblings_at_temperature_0_are_the_largest_logits_which_small_temperatures_tend_to():
    row = Model(5_000).target((4,))
    greedy_siblings = oracle.draft_siblings(row, 8, temperature=0).token_ids
    assert greedy_siblings == np.argsort(-row)[:8].tolist()
    assert oracle.draft_siblings(row, 8, temperature=1e-4, seed=2).token_ids == greedy_siblings


def test_where_fewer_tokens_are_possible_no_sibling_follows():
    nan, inf = np.nan, np.inf
    for row, options, expected in [
        ([1.0, 3.0, 2.0], {"top_k": 1}, [1, -1, -1, -1]),
        ([1.0, -inf, nan], {}, [0, -1, -1, -1]),
        ([1.0, inf, inf], {}, [1, -1, -1, -1]),
        ([nan, -inf, nan], {}, [0, -1, -1, -1]),
        ([nan, -inf, nan], {"temperature": 0}, [0, -1, -1, -1]),
        ([1.0, 3.0, 3.0], {"temperature": 0}, [1, 2, 0, -1]),
    ]:
        found = oracle.draft_siblings(row, 4, seed=3, **options)
        assert (found.token_ids, found.margin) == (expected, inf)


def test_the_margin_of_siblings_is_the_smallest_difference_of_successive_lags():
    row = np.log([0.4, 0.3, 0.2, 0.1])
    for seed in range(50):
        scores = np.sort(row + gumbel(seed, 0, np.arange(4), SELECT[1]))[::-1]
        for width in (1, 2, 3, 4):
            margin = oracle.draft_siblings(row, width, seed=seed).margin
            assert margin == pytest.approx(-np.diff(scores)[:width].max())


def test_trees_of_siblings_accept_as_many_drafts_as_the_formula_says():
    target, draft = pair(4, 1)
    expected, accepted = float(shared_mean(target, draft, 2, 2)), []
    for seed in range(1_000):
        texts, token_ids = [()], [0]
        for parent in (0, 1, 2):
            before = texts[parent]
            row = np.log(np.array(draft(before), dtype=float))
            for token in oracle.draft_siblings(row, 2, seed=seed, position=5 + len(before)).token_ids:
                texts.append((*before, token))
                token_ids.append(token)
        rows = [np.log(np.array(target(text), dtype=float)) for text in texts]
        parents = SHAPES["width-2-depth-2"]
        accepted.append(oracle.verify_tree(rows, token_ids, parents, max_depth=2, seed=seed, position=5).num_accepted)
    # Five standard errors; one draft for each position would be off by many more.
    assert abs(np.mean(accepted) - expected) < 5 * np.std(accepted) / len(accepted) ** 0.5


# --- Mistakes ----------------------------------------------------------------------------------------------------------


def rules(*names: str) -> Callable[[], None]:
    def check() -> None:
        for name in names:
            check_rule(name, "width-2-depth-2")
            check_rule(name, "star-3", models=(iid(18, 19, 6, 3), iid(2, 34, 54, 4)))

    return check


def texts() -> None:
    check_text(REQUESTS["temperature-1"])


def adjusted_texts() -> None:
    check_text(REQUESTS["temperature-1"], adjusted=True, seeds=6)


MUTANTS = [
    Mutant("a token of the parent's row", oracle.verify_tree, "request.target(node)",
           "request.target(max(0, parents[node]))",
           texts),
    Mutant("a token of the last node's row", oracle.verify_tree, "request.target(node)",
           "request.target(len(rows) - 1)", texts),
    Mutant("noise of the node, not its position", oracle.verify_tree, "request.draw(depth, ", "request.draw(node, ",
           texts),
    Mutant("drafts before the row not counted", oracle.adjusted_path, "drafts[:i]", "[]", adjusted_texts),
    Mutant("the draft that the row judges counted", oracle.adjusted_path, "drafts[:i]", "drafts[: i + 1]", adjusted_rows),
    Mutant("the token of node 0 counted again", oracle.verify_tree, "path[1:]", "path", adjusted_texts),
    Mutant("mask by depth", oracle.adjusted_path, "adjustments, node)", "adjustments, i)", adjusted_texts),
    Mutant("any child is followed", tree.walk, "if token_ids[child] == tokens[-1]", "", texts),
    Mutant("an equal sibling added again", tree.target_only, "left[token_ids[child]] = 0", "pass", rules("target-only")),
    Mutant("siblings by q", tree.rejection, "children(parents, node)",
           "sorted(children(parents, node), key=lambda child: -draft[token_ids[child]])", rules("rejection")),
    Mutant("no residual", tree.rejection, "target = residual(target, draft)", "pass", rules("rejection")),
    Mutant("the tried token stays in q", tree.rejection, "without(draft, token)", "draft",
           rules("rejection-without-replacement")),
    Mutant("the ratio is not updated", tree.traversal, "block.acceptance_probability(ratio, mass)", "ratio",
           rules("traversal")),
    Mutant("a residual without the ratio", tree.traversal, "block.residual(ratio, target", "block.residual(1, target",
           rules("traversal")),
    Mutant("the tried token stays in q", tree.traversal, "without(draft, token)", "draft",
           rules("traversal-without-replacement")),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_caught(mutant):
    assert_caught(mutant)
