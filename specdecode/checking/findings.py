"""From outcomes to findings: what each statistic of a case compares, and how it is said."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdecode.checking import trees
from specdecode.checking.cases import Case
from specdecode.checking.models import Models, count, softmax
from specdecode.checking.report import Check
from specdecode.checking.runs import Outcome
from specdecode.checking.statistics import (
    Counts,
    Fit,
    Floats,
    detectable,
    distance,
    goodness_of_fit,
    independence,
    lower_bound,
    p_value_of_mean,
)

WASTE = 0.75
"""Fewer accepted drafts than this share of what token verification accepts are noted."""


MAX_GROUPS = 8
"""Tokens of a pair are compared in as many groups at most: of a large vocabulary most pairs are never seen."""


class Finding(NamedTuple):
    """One test, before the number of tests is known."""

    name: str
    p_value: float | None
    description: str
    difference: str = ""
    """Reported if it failed."""

    fit: Fit | None = None
    notes: tuple[str, ...] = ()
    suspect: str = ""
    """The id of the known mistake that an error shows."""

    passed: bool = True
    """The result if there is no p-value."""

    certain: bool = False
    """Whether there is only one right outcome: then one other is proof."""

    within: str = ""
    """The text that is added if it passes."""

    def verdict(self, threshold: float) -> bool:
        """Return whether it passes."""
        return self.passed if self.p_value is None else self.p_value >= threshold

    def judged(self, threshold: float) -> Check:
        """Return the check. It is open if there were too few requests for a test; a certain outcome needs none."""
        answered = self.fit is None or self.fit.degrees > 0 or self.certain or self.fit.impossible > 0
        return Check(self.name, self.verdict(threshold), self.p_value, self.detail(threshold), answered)

    def detail(self, threshold: float) -> str:
        """Return the description with the smallest error that it sees, or with the difference if it failed."""
        if not self.verdict(threshold):
            return "\n".join(filter(None, (self.description, self.difference)))
        if self.fit is None:
            return self.description + self.within
        if not self.fit.degrees:
            return self.description + ("" if self.certain else ": not tested, too few requests")
        return f"{self.description}; sees a total variation of {detectable(self.fit.degrees, self.fit.size, threshold):.3f}"


def findings(case: Case, models: Models, outcome: Outcome, drafts_are_drawn: bool) -> list[Finding]:
    """Apply the statistics of a case."""
    drafts = models.num_draft_tokens
    places = {"first token": [0], "token": [*range(1, drafts)], "bonus token": [drafts] * (drafts > 0)}
    found = [joint(case, models, outcome)] * ("joint" in case.statistics)
    found += [token(case, models, outcome, place) for name in case.statistics for place in places.get(name, [])]
    if "acceptance" in case.statistics and drafts and drafts_are_drawn:
        found.append(acceptance(case, models, outcome))
    return found


def name_of(case: Case, statistic: str) -> str:
    """Name a check: the main case's by their statistics alone."""
    if statistic == "joint":
        return case.name
    return statistic if case.name == "joint" else f"{case.name}: {statistic}"


def joint(case: Case, models: Models, outcome: Outcome) -> Finding:
    """The K + 1 tokens together. They lead to a state each, or few texts share one."""
    expected = models.final_states(models.target_probs)
    counts = np.bincount(outcome.states[:, -1], minlength=len(expected))
    estimate, exact = distance(counts[None], expected[None])
    seen = [f"total variation {estimate:.3f} (an exact verifier shows {exact:.3f})"]
    fit = goodness_of_fit(counts[None], expected[None])
    if impossible := outcome.impossible(models):  # other texts may lead to the same state
        fit = fit._replace(p_value=0.0, impossible=impossible)
        seen[0] += f", {impossible:,} request{'s' * (impossible > 1)} with an impossible token"
    vocab, length = models.vocab_size, models.num_draft_tokens + 1
    what = f"the {length} tokens together" if length > 1 else "the token"
    if certain := bool(expected.max() == 1):
        what = "every token is the only possible one"
    if len(expected) == vocab**length:
        index = int(deviations(counts, expected * counts.sum()).argmax())
        text = [int(index // vocab**i % vocab) for i in reversed(range(length))]
        rows = rows_text(models, text) if case.name == "joint" else ""
        seen.append(f"tokens {text}: {compared(counts[index], counts.sum(), expected[index])}{rows}")
    if case.name != "joint":
        seen.append(max(worst_token(case, models, outcome, place) for place in range(length))[1])
    return Finding(name_of(case, "joint"), fit.p_value, what, "; ".join(seen), fit, certain=certain)


def token(case: Case, models: Models, outcome: Outcome, place: int) -> Finding:
    """One token, where all tokens before it are accepted drafts.

    Whatever the exact method is, it must then be distributed as p. The text x and the token v after it come about in two
    ways: x is accepted and v emitted, or less was accepted and the target itself went on to x and v. Together they have
    the probability P(x) p(v | x), and the second way is proportional to p(v | x), so the first one is, too.
    """
    counts = token_counts(models, outcome, place)
    fit = goodness_of_fit(counts, models.target_probs[place])
    _, seen = worst_token(case, models, outcome, place)
    statistic = "first token" if place == 0 else f"token {place + 1}"
    what = (
        "the first token alone" if place == 0 else f"token {place + 1}, after {place} accepted draft{'s' * (place > 1)}"
    )
    if place == models.num_draft_tokens:
        all_drafts = "drafts of every depth" if case.how.parents else "all drafts"
        statistic, what = "bonus token", f"the token after {all_drafts} were accepted"
    notes: tuple[str, ...] = ()
    requests = len(outcome.tokens)
    if place == models.num_draft_tokens and place and not counts.any() and requests > 1000:
        notes = (f"{case.name}: no bonus token was seen in {requests:,} requests.",)
    return Finding(name_of(case, statistic), fit.p_value, what, seen, fit, notes)


def token_counts(models: Models, outcome: Outcome, place: int) -> Counts:
    """Return the counts of the tokens of a place in each state, where all tokens before it are accepted drafts."""
    there = outcome.accepted >= place
    return count(outcome.states[there, place], outcome.tokens[there, place], models.target[place].shape)


def worst_token(case: Case, models: Models, outcome: Outcome, place: int) -> tuple[float, str]:
    """Return the deviation of the most unlikely count of a place, and its description with the rows of p and q."""
    counts, expected = token_counts(models, outcome, place), models.target_probs[place]
    totals = counts.sum(axis=1, keepdims=True)
    far = deviations(counts, expected * totals)
    state, value = divmod(int(far.argmax()), models.vocab_size)
    seen = f"after {text_of(models, state, place)}, token {value}: "
    seen += compared(counts[state, value], int(totals[state, 0]), expected[state, value])
    seen += "\nits row: p = " + row_text(expected[state])
    if place < models.num_draft_tokens and case.how.draft_logits:
        seen += ", q = " + row_text(models.draft_probs[place][state])
    return float(far.max()), seen


def loss(case: Case, models: Models, outcome: Outcome, allow: float) -> tuple[Finding, tuple[float, float, float]]:
    """Measure the total variation that a lossy rule adds to a token: the mean over the rows of all emitted tokens.

    The estimate is the difference of the counts: never negative, so an exact verifier shows some, too. The lower bound and
    the p-value belong to an event, the tokens that half of the requests have too often, counted in the other half.
    """
    halves: list[list[Counts]] = [[], []]
    for place in range(models.num_draft_tokens + 1):
        for half in range(2):
            tokens, states = outcome.tokens[half::2, place], outcome.states[half::2, place]
            halves[half].append(count(states[tokens != -1], tokens[tokens != -1], models.target[place].shape))
    one, other = (np.concatenate(half) for half in halves)
    expected = np.concatenate(models.target_probs)
    estimate, exact = distance(one + other, expected)
    size, added = int(other.sum()), one > expected * one.sum(axis=1, keepdims=True)
    share = float(other[added].sum() / size)
    exact_share = float((other.sum(axis=1, keepdims=True) * expected)[added].sum() / size)
    low = max(0.0, min(estimate, lower_bound(share, size) - exact_share))
    high = min(1.0, estimate + (np.log(1000) / (2 * (one + other).sum())) ** 0.5)
    p_value = p_value_of_mean(share, exact_share + allow, size)
    what = (
        f"a token's total variation {estimate:.4f} (an exact verifier shows {exact:.4f}), from {low:.4f} to {high:.4f}"
    )
    what += f"; {outcome.accepted.mean():.3f} accepted drafts a step"
    if "acceptance" in case.statistics and models.num_draft_tokens and not case.how.parents:
        by_tokens = models.most_accepted(models.draft_probs)
        what += f", token verification {by_tokens[0]:.3f}" if by_tokens else ""
    return Finding(case.name, p_value, what, f"more than {allow:g} is certain"), (low, estimate, high)


def rows_text(models: Models, text: list[int]) -> str:
    """Write the rows of p and q before each token of a text."""
    state, target, draft = 0, [], []
    for i, token in enumerate(text):
        target.append(row_text(models.target_probs[i][state]))
        draft += [row_text(rows[state]) for rows in models.draft_probs[i : i + 1]]
        state = int(models.following[i][state, token])
    return f"\nits rows: p = {', '.join(target)}\n          q = {', '.join(draft)}"


def row_text(row: Floats) -> str:
    """Write the first probabilities of a row to three digits."""
    return f"[{' '.join(f'{each:.3f}' for each in row[:MAX_GROUPS])}{' ...' * (len(row) > MAX_GROUPS)}]"


def text_of(models: Models, state: int, length: int) -> str:
    """Return the text of a state, as the report shows it."""
    if len(models.target[length]) < models.vocab_size**length:
        return "some texts"
    return str([int(state // models.vocab_size**i % models.vocab_size) for i in reversed(range(length))])


def acceptance(case: Case, models: Models, outcome: Outcome) -> Finding:
    """The number of accepted drafts, which is bounded for every exact method."""
    if case.how.parents:
        most, method = trees.most_accepted(models, case.how), "the walk"
    else:
        probs = [softmax(rows, 0) for rows in models.draft] if case.how.drafts == "argmax" else models.draft_probs
        most, method = models.most_accepted(probs), "token verification"
    mean, requests = float(outcome.accepted.mean()), len(outcome.accepted)
    what = f"{mean:.3f} accepted drafts a step"
    if most is None:
        return Finding(name_of(case, "acceptance"), None, f"{what}; too many texts to say what is possible")
    by_tokens, best = most
    what += f"; {method} {by_tokens:.3f}, an exact method {best:.3f} at most"
    scale = models.num_draft_tokens
    p_value = p_value_of_mean(mean / scale, best / scale, requests)
    within = "; above it, but within chance" if mean > best else ""
    notes: tuple[str, ...] = ()
    if mean < WASTE * by_tokens:
        share = mean / by_tokens
        notes = (f"{case.name}: it accepts {share:.0%} of the drafts that {method} accepts. This is waste, no error.",)
    difference, name = "more than an exact method can accept", name_of(case, "acceptance")
    return Finding(name, p_value, what, difference, notes=notes, within=within)


def pairs(name: str, what: str, tokens: Counts, vocab_size: int) -> Finding:
    """Pairs of tokens, [n, 2], that must be independent, whatever their distribution is."""
    one, two = tokens.T
    groups = min(vocab_size, MAX_GROUPS)
    table = np.bincount(one % groups * groups + two % groups, minlength=groups**2).reshape(groups, groups)
    fit = independence(table)
    shares = [np.bincount(tokens, minlength=vocab_size) / len(tokens) for tokens in (one, two)]
    expected = float((shares[0] * shares[1]).sum())
    return Finding(name, fit.p_value, what, f"equal in {(one == two).mean():.1%}, expected {expected:.1%}", fit)


def next_tokens(name: str, outcomes: Counts, following: Counts, vocab_size: int) -> Finding:
    """The first token of the next step must not depend on a step's outcome: its accepted drafts and its last token.

    Tokens are compared in three groups, so that a few hundred steps with one number of accepted drafts are enough.
    """

    def group(tokens: Counts) -> Counts:
        return np.where(tokens == 0, 0, 1 + 2 * (tokens - 1) // (vocab_size - 1))

    table = np.zeros((int(outcomes.max()) // vocab_size + 1, 3, 3), dtype=np.int64)
    np.add.at(table, (outcomes // vocab_size, group(outcomes % vocab_size), group(following)), 1)
    totals, shares = table.sum(axis=2), table.sum(axis=(0, 1)) / len(following)
    far = deviations(table, totals[..., None] * shares)
    accepted, last, first = (int(index) for index in np.unravel_index(far.argmax(), far.shape))
    tokens = ["token 0", f"a token from 1 to {vocab_size // 2}", f"a token from {vocab_size // 2 + 1}"]
    seen = f"after {accepted} accepted drafts and {tokens[last]}, the next step begins with {tokens[first]}: "
    seen += compared(table[accepted, last, first], int(totals[accepted, last]), shares[first])
    fit = independence(table[totals > 0][:, shares > 0])
    what = "a step's last token and the first of the next step are independent"
    return Finding(name, fit.p_value, what, seen, fit)


def deviations(counts: NDArray[np.int64], mean: Floats) -> Floats:
    """Return the squared deviations of counts from their means, divided by these; infinite where a count is impossible."""
    return np.where(mean > 0, (counts - mean) ** 2 / np.maximum(mean, 1), np.where(counts > 0, np.inf, 0))


def compared(count: int, total: int, probability: float) -> str:
    """Compare a count with its probability."""
    return f"{count / max(1, total):.4f}, expected {probability:.4f} ({count:,} of {total:,})"
