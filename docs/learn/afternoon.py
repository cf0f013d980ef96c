"""An afternoon on speculative decoding: every exercise of the pages in docs/learn, with its skeleton and its solution.

Run it from top to bottom, `python afternoon.py`: it needs this package, NumPy and SciPy, and takes seconds on a CPU. Each
skeleton runs as it is and is wrong. `try_it` prints what the checker says of it, and then of the solution. The pages include
the parts between the marks, so this file is their only copy.
"""

# ruff: noqa: B007, E402, F811, I001 - skeletons leave things unused; what is corrected is defined again
# fmt: off

import doctest

# --8<-- [start:head]
import numpy as np

random = np.random.default_rng(0)


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=float)
    return weights / weights.sum(axis=-1, keepdims=True)


def draw(weights):
    """Draw a token with a probability proportional to its weight."""
    assert weights.min() >= 0, "a weight is negative"
    assert weights.sum() > 0, "no token has a positive weight"
    return random.choice(len(weights), p=weights / weights.sum())


def each_request(step):
    """Turn a step of one request into a verifier of many requests, for `specdecode check`."""

    def verify(target_logits, draft_token_ids, draft_logits):
        p, q = softmax(target_logits), softmax(draft_logits)
        output = np.full((len(p), p.shape[1]), -1)
        for r, drafts in enumerate(draft_token_ids):
            tokens = step(p[r], q[r], drafts[drafts >= 0])
            output[r, : len(tokens)] = tokens
        return output

    return verify
# --8<-- [end:head]
from specdecode.checking import check


examples = {}
results = {}
"""The result of each skeleton and solution: whether it passed, and the accepted drafts of a step."""


def try_it(title, verify, draft=None, *, requests=5_000):
    """Print the verdict, the mean number of accepted drafts, and the known mistake that fits best."""
    report = check(verify, draft, requests=requests)
    accepted = next(each.detail for each in report.checks if each.name == "acceptance").split(" accepted")[0]
    results[title] = report.passed, float(accepted)
    verdict = "right" if report.passed else "WRONG"
    print(f"{title}: {verdict}, {accepted} accepted drafts a step", *report.suspects[:1], sep=", ")


def run_examples(title, function):
    """Print the number of passing examples of the first function of that name."""
    text = examples.setdefault(function.__name__, function.__doc__)
    test = doctest.DocTestParser().get_doctest(text, dict(globals()), title, __file__, 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=lambda text: None)
    results[title] = runner.failures == 0, None
    print(f"{title}: {runner.tries - runner.failures} of {runner.tries} examples come out right")

# ---- 1. What drafting is ---------------------------------------------------------------------------------------------

# --8<-- [start:cautious-skeleton]
@each_request
def cautious(p, q, drafts):
    return [*drafts, draw(p[len(drafts)])]  # accepts every draft: TODO accept none
# --8<-- [end:cautious-skeleton]

try_it("1. cautious, skeleton", cautious)

# --8<-- [start:cautious-solution]
@each_request
def cautious(p, q, drafts):
    return [draw(p[0])]
# --8<-- [end:cautious-solution]

try_it("1. cautious, solution", cautious)

# --8<-- [start:gain-skeleton]
def gain(rate, num_drafts, cost):
    """Return tokens per unit of time; one call of the target takes one unit.

    Two drafts, each accepted with probability 1/2 if the one before was:
    1 + 1/2 + 1/4 tokens. The drafts take 2 * 1/8, the call 1.

    >>> gain(0.5, 2, cost=1 / 8)
    1.4
    >>> gain(0.8, 5, cost=0.1) > gain(0.8, 50, cost=0.1)  # more drafts are not better
    True
    """
    tokens = 1 + num_drafts * rate  # TODO draft 1 counts only if draft 0 was accepted
    time = 1 + num_drafts * cost
    return tokens / time
# --8<-- [end:gain-skeleton]

run_examples("1. gain, skeleton", gain)

# --8<-- [start:gain-solution]
def gain(rate, num_drafts, cost):
    tokens = sum(rate**i for i in range(num_drafts + 1))
    time = 1 + num_drafts * cost
    return tokens / time
# --8<-- [end:gain-solution]

run_examples("1. gain, solution", gain)

# ---- 2. Accept and resample ------------------------------------------------------------------------------------------

# --8<-- [start:probabilistic-skeleton]
@each_request
def probabilistic(p, q, drafts):
    for i, x in enumerate(drafts):
        ratio = 1  # TODO p(x) / q(x), of row i
        if random.random() > ratio:
            weights = p[i]  # TODO the residual
            return [*drafts[:i], draw(weights)]
    return [*drafts, draw(p[len(drafts)])]
# --8<-- [end:probabilistic-skeleton]

try_it("2. probabilistic, skeleton", probabilistic)

# --8<-- [start:probabilistic-half]
@each_request
def probabilistic(p, q, drafts):
    for i, x in enumerate(drafts):
        ratio = p[i, x] / q[i, x]
        if random.random() > ratio:
            weights = p[i]
            return [*drafts[:i], draw(weights)]
    return [*drafts, draw(p[len(drafts)])]
# --8<-- [end:probabilistic-half]

try_it("2. probabilistic, half", probabilistic)

# --8<-- [start:probabilistic-solution]
@each_request
def probabilistic(p, q, drafts):
    for i, x in enumerate(drafts):
        ratio = p[i, x] / q[i, x]
        if random.random() > ratio:
            weights = np.maximum(0, p[i] - q[i])
            return [*drafts[:i], draw(weights)]
    return [*drafts, draw(p[len(drafts)])]
# --8<-- [end:probabilistic-solution]

try_it("2. probabilistic, solution", probabilistic)

# ---- 3. Why it is exact ----------------------------------------------------------------------------------------------

# --8<-- [start:emitted-skeleton]
def emitted(p, q):
    """Return the probability that each token is emitted, for one draft drawn from q.

    >>> from fractions import Fraction as F
    >>> p, q = [F(5, 10), F(3, 10), F(2, 10)], [F(2, 10), F(2, 10), F(6, 10)]
    >>> emitted(p, q) == p
    True
    >>> emitted(q, p) == q
    True
    """
    accepted = [qv * min(1, pv / qv) if qv else 0 for pv, qv in zip(p, q)]
    rejected = 1 - sum(accepted)
    weights = p  # TODO the residual's weights
    total = sum(weights)
    if total == 0:
        return accepted
    return [a + rejected * w / total for a, w in zip(accepted, weights)]
# --8<-- [end:emitted-skeleton]

run_examples("3. emitted, skeleton", emitted)

# --8<-- [start:emitted-solution]
def emitted(p, q):
    accepted = [qv * min(1, pv / qv) if qv else 0 for pv, qv in zip(p, q)]
    rejected = 1 - sum(accepted)
    weights = [max(0, pv - qv) for pv, qv in zip(p, q)]
    total = sum(weights)
    if total == 0:
        return accepted
    return [a + rejected * w / total for a, w in zip(accepted, weights)]
# --8<-- [end:emitted-solution]

run_examples("3. emitted, solution", emitted)

# ---- 4. Strict -------------------------------------------------------------------------------------------------------

# --8<-- [start:strict-skeleton]
def gumbels(seed, position, vocab_size):
    """Return the noise of a request at a position, the same in every call."""
    return np.random.default_rng([seed, position]).gumbel(size=vocab_size)


def draft(draft_logits, *, seeds, positions):
    noise = [gumbels(s, t, draft_logits.shape[1]) for s, t in zip(seeds, positions)]
    return (draft_logits + noise).argmax(axis=1)


def strict(target_logits, draft_token_ids, *, seeds, positions):
    output = np.full((len(seeds), target_logits.shape[1]), -1)
    for r, rows in enumerate(target_logits):
        for i, row in enumerate(rows):
            noise = random.gumbel(size=len(row))  # TODO the noise of this position
            y = (row + noise).argmax()  # the target's own token
            output[r, i] = y
            if i == len(rows) - 1 or y != draft_token_ids[r, i]:
                break
    return output
# --8<-- [end:strict-skeleton]

try_it("4. strict, skeleton", strict, draft)

# --8<-- [start:strict-solution]
def strict(target_logits, draft_token_ids, *, seeds, positions):
    output = np.full((len(seeds), target_logits.shape[1]), -1)
    for r, rows in enumerate(target_logits):
        for i, row in enumerate(rows):
            noise = gumbels(seeds[r], positions[r] + i, len(row))
            y = (row + noise).argmax()
            output[r, i] = y
            if i == len(rows) - 1 or y != draft_token_ids[r, i]:
                break
    return output
# --8<-- [end:strict-solution]

try_it("4. strict, solution", strict, draft)

# ---- 5. Block --------------------------------------------------------------------------------------------------------

# --8<-- [start:block-skeleton]
def running_ratio(c, p, q):
    return c * p / q  # TODO never above 1


def acceptance(c, A):
    return A  # TODO


@each_request
def block(p, q, drafts):
    K, c = len(drafts), [1.0]
    for i, x in enumerate(drafts):
        c.append(running_ratio(c[i], p[i, x], q[i, x]))
    if random.random() <= c[K]:
        return [*drafts, draw(p[K])]
    for i in range(K - 1, 0, -1):
        weights = np.maximum(0, c[i] * p[i] - q[i])
        if random.random() <= acceptance(c[i], weights.sum()):
            return [*drafts[:i], draw(weights)]
    return [draw(np.maximum(0, p[0] - q[0]))]
# --8<-- [end:block-skeleton]

try_it("5. block, skeleton", block)

# --8<-- [start:block-half]
def acceptance(c, A):
    return A / (A + 1 - c)
# --8<-- [end:block-half]

try_it("5. block, half", block)

# --8<-- [start:block-solution]
def running_ratio(c, p, q):
    return min(1, c * p / q)
# --8<-- [end:block-solution]

try_it("5. block, solution", block)

# ---- 6. Siblings and trees -------------------------------------------------------------------------------------------

# --8<-- [start:walk-skeleton]
def walk(own, token_ids, parents):
    """Return the accepted nodes, and the emitted tokens: the tokens of these nodes and one more.

    After node 0 the target's own token is 7, so node 2 is accepted; then 9: node 4; then 1, and node 4 has no such
    child.

    >>> token_ids, parents = [0, 5, 7, 6, 9], [-1, 0, 0, 2, 2]
    >>> own = {0: 7, 2: 9, 4: 1}
    >>> walk(lambda node, depth: own[node], token_ids, parents)
    ([2, 4], [7, 9, 1])
    >>> walk(lambda node, depth: 6, token_ids, parents)  # node 3 is 6, but no child of node 0
    ([], [6])
    >>> from reference import tree
    >>> trees = [random_tree(seed) for seed in range(200)]
    >>> sum(walk(*each) == tree.walk(*each) for each in trees)
    200
    """
    y = own(0, 0)
    equal = [n for n in range(1, len(parents)) if parents[n] == 0 and token_ids[n] == y]
    return equal[:1], [y]  # TODO go on at equal[0], until there is none


def random_tree(seed):
    """Return the target's own tokens, and a tree of 12 nodes with three different tokens."""
    rng = np.random.default_rng(seed)
    own, token_ids = rng.integers(3, size=12), rng.integers(3, size=12)
    parents = [-1, *(int(rng.integers(node)) for node in range(1, 12))]
    return lambda node, depth: int(own[node]), token_ids.tolist(), parents
# --8<-- [end:walk-skeleton]

run_examples("6. walk, skeleton", walk)

# --8<-- [start:walk-solution]
def walk(own, token_ids, parents):
    node, nodes, tokens = 0, [], []
    while True:
        y = own(node, len(nodes))
        tokens.append(y)
        equal = [n for n in range(1, len(parents)) if parents[n] == node and token_ids[n] == y]
        if not equal:
            return nodes, tokens
        node = equal[0]
        nodes.append(node)
# --8<-- [end:walk-solution]

run_examples("6. walk, solution", walk)

# ---- 7. Truncation ---------------------------------------------------------------------------------------------------

# --8<-- [start:truncate-skeleton]
def truncate(p, top_k, top_p):
    """Return p', the distribution over the kept tokens.

    >>> p = np.array([0.1, 0.4, 0.2, 0.3])
    >>> truncate(p, top_k=3, top_p=1.0).round(3).tolist()
    [0.0, 0.444, 0.222, 0.333]
    >>> truncate(p, top_k=4, top_p=0.65).round(3).tolist()  # 0.4 is too little
    [0.0, 0.571, 0.0, 0.429]
    >>> truncate(p, top_k=3, top_p=0.75).round(3).tolist()  # of 0.9, not of 1
    [0.0, 0.571, 0.0, 0.429]
    """
    order = np.argsort(-p, kind="stable")[:top_k]  # the most likely first
    mass = np.cumsum(p[order])
    kept = order[mass <= top_p]  # TODO two mistakes: which?
    truncated = np.zeros_like(p)
    truncated[kept] = p[kept]
    return truncated / truncated.sum()
# --8<-- [end:truncate-skeleton]

run_examples("7. truncate, skeleton", truncate)

# --8<-- [start:truncate-solution]
def truncate(p, top_k, top_p):
    order = np.argsort(-p, kind="stable")[:top_k]
    mass = np.cumsum(p[order])
    before = mass - p[order]
    kept = order[before < top_p * mass[-1]]
    truncated = np.zeros_like(p)
    truncated[kept] = p[kept]
    return truncated / truncated.sum()
# --8<-- [end:truncate-solution]

run_examples("7. truncate, solution", truncate)

# ---- 8. Synthetic ----------------------------------------------------------------------------------------------------

# --8<-- [start:base-rate-skeleton]
def base_rate(mean, decay):
    """Return the a with which two drafts a step have this mean acceptance rate: accepted / drafted tokens.

    Draft 0 is accepted with probability a. If it was, draft 1 is accepted with a * decay.
    With a = decay = 1/2: draft 0 is accepted with 1/2, both with 1/2 * 1/4 = 1/8. Mean: (1/2 + 1/8) / 2 = 5/16.

    >>> base_rate(5 / 16, 1 / 2)
    0.5
    >>> from specdecode import AcceptanceSchedule
    >>> schedule = AcceptanceSchedule.from_mean_rate(0.69, num_draft_tokens=2)
    >>> abs(base_rate(0.69, schedule.decay) - schedule.base_rate) < 1e-6
    True
    """
    return 2 * mean / (1 + decay)  # TODO right for a + a * decay = 2 * mean; and here?
# --8<-- [end:base-rate-skeleton]

run_examples("8. base_rate, skeleton", base_rate)

# --8<-- [start:base-rate-solution]
def base_rate(mean, decay):
    return ((1 + 8 * decay * mean) ** 0.5 - 1) / (2 * decay)
# --8<-- [end:base-rate-solution]

run_examples("8. base_rate, solution", base_rate)

# --8<-- [start:synthetic]
@each_request
def synthetic(p, q, drafts):
    for i, rate in enumerate([0.9, 0.7, 0.5][: len(drafts)]):
        if random.random() > rate:
            weights = np.maximum(0, p[i] - q[i])
            return [*drafts[:i], draw(weights if weights.any() else p[i])]
    return [*drafts, draw(p[len(drafts)])]
# --8<-- [end:synthetic]

try_it("8. synthetic", synthetic)
