"""Findings: the statistical tests of a case's outcome, and their texts in the report."""

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
"""A verifier that accepts less than this share of token verification's accepted drafts gets a note."""

MAX_GROUPS = 8
"""The most groups of tokens in a table of pairs: in a large vocabulary most pairs of tokens never occur."""

MAX_SHOWN = 8
"""The most probabilities of a row that a report shows."""


class Finding(NamedTuple):
    """The result of one test. Its threshold is set later, when the number of tests is known."""

    name: str
    p_value: float | None
    description: str
    difference: str = ""
    """The text that is added if the test fails."""

    fit: Fit | None = None
    notes: tuple[str, ...] = ()
    suspect: str = ""
    """The id of the known mistake that the failure proves, or ""."""

    passed: bool = True
    """Whether the test passes, if there is no p-value."""

    certain: bool = False
    """Whether only one outcome is possible; then a single other outcome proves an error."""

    within: str = ""
    """The text that is added if the test passes."""

    def verdict(self, threshold: float) -> bool:
        """Return whether the test passes."""
        return self.passed if self.p_value is None else self.p_value >= threshold

    def judged(self, threshold: float) -> Check:
        """Return the check for the report; too few requests leave it unanswered, unless one outcome is certain."""
        answered = self.fit is None or self.fit.degrees > 0 or self.certain or self.fit.impossible > 0
        return Check(self.name, self.verdict(threshold), self.p_value, self.detail(threshold), answered)

    def detail(self, threshold: float) -> str:
        """Return the description, with the smallest error that the test detects or, if it failed, the difference."""
        if not self.verdict(threshold):
            return "\n".join(filter(None, (self.description, self.difference)))
        if self.fit is None:
            return self.description + self.within
        if not self.fit.degrees:
            return self.description + ("" if self.certain else ": not tested, too few requests")
        return f"{self.description}; sees a total variation of {detectable(self.fit.degrees, self.fit.size, threshold):.3f}"


def findings(case: Case, models: Models, outcome: Outcome, drafts_are_drawn: bool) -> list[Finding]:
    """Return the findings of a case: one for each of its statistics and places."""
    drafts = models.num_draft_tokens
    places = {"first token": [0], "token": [*range(1, drafts)], "bonus token": [drafts] * (drafts > 0)}
    found = [joint(case, models, outcome)] * ("joint" in case.statistics)
    found += [token(case, models, outcome, place) for name in case.statistics for place in places.get(name, [])]
    if "acceptance" in case.statistics and drafts and drafts_are_drawn:
        found.append(acceptance(case, models, outcome))
    return found


def name_of(case: Case, statistic: str) -> str:
    """Return the name of a check; names of the main case, `joint`, leave out the case."""
    if statistic == "joint":
        return case.name
    return statistic if case.name == "joint" else f"{case.name}: {statistic}"


def joint(case: Case, models: Models, outcome: Outcome) -> Finding:
    """Test the joint distribution of the K + 1 tokens, by final state: each has one text, or several if texts are many."""
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
    """Test the distribution of one token, given that all tokens before it are accepted drafts.

    With every exact method it is p. A text x and the token v after it arise in two ways: x is accepted and v emitted, or
    fewer drafts are accepted and the target samples the rest of x and v. Together they have the probability P(x) p(v | x).
    The second way is proportional to p(v | x), so the first is proportional to it too.
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
    """Return the counts of tokens at a place, [states, vocab], over requests whose tokens before it are accepted drafts."""
    there = outcome.accepted >= place
    return count(outcome.states[there, place], outcome.tokens[there, place], models.target[place].shape)


def worst_token(case: Case, models: Models, outcome: Outcome, place: int) -> tuple[float, str]:
    """Return the largest deviation of a count at a place, and its description with the rows of p and q."""
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

    The estimate compares counts with expected counts. It is never negative, so it is above 0 for an exact verifier too.
    The lower bound and the p-value belong to one event: the tokens that are too frequent in one half of the requests are
    counted in the other half.

    Returns:
        The finding; and the lower bound, the estimate and the upper bound. A bound is wrong with probability 1e-3 at most.
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
    # McDiarmid: one token changes the estimate by at most 1 / n, so P(it is t too low) <= exp(-2 n t^2), here 1 / 1000.
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
    """Return the rows of p and q before each token of a text, for the report."""
    state, target, draft = 0, [], []
    for i, token in enumerate(text):
        target.append(row_text(models.target_probs[i][state]))
        draft += [row_text(rows[state]) for rows in models.draft_probs[i : i + 1]]
        state = int(models.following[i][state, token])
    return f"\nits rows: p = {', '.join(target)}\n          q = {', '.join(draft)}"


def row_text(row: Floats) -> str:
    """Return the first probabilities of a row, to three digits."""
    return f"[{' '.join(f'{each:.3f}' for each in row[:MAX_SHOWN])}{' ...' * (len(row) > MAX_SHOWN)}]"


def text_of(models: Models, state: int, length: int) -> str:
    """Return the tokens of a state's text for the report, or "some texts" if several share the state."""
    if len(models.target[length]) < models.vocab_size**length:
        return "some texts"
    return str([int(state // models.vocab_size**i % models.vocab_size) for i in reversed(range(length))])


def acceptance(case: Case, models: Models, outcome: Outcome) -> Finding:
    """Test the mean number of accepted drafts against its upper bound for exact methods."""
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
    """Test the independence of the two tokens of pairs, [n, 2], whatever their distribution is."""
    one, two = tokens.T
    groups = min(vocab_size, MAX_GROUPS)
    table = np.bincount(one % groups * groups + two % groups, minlength=groups**2).reshape(groups, groups)
    fit = independence(table)
    shares = [np.bincount(tokens, minlength=vocab_size) / len(tokens) for tokens in (one, two)]
    expected = float((shares[0] * shares[1]).sum())
    return Finding(name, fit.p_value, what, f"equal in {(one == two).mean():.1%}, expected {expected:.1%}", fit)


def next_tokens(name: str, outcomes: Counts, following: Counts, vocab_size: int) -> Finding:
    """Test the independence of the next step's first token from a step's outcome: its accepted drafts and its last token.

    An outcome is `accepted * vocab_size + last token`. Tokens are compared in three groups, so that a few hundred steps for
    each number of accepted drafts are enough.
    """

    def group(tokens: Counts) -> Counts:
        return np.where(tokens == 0, 0, 1 + 2 * (tokens - 1) // (vocab_size - 1))

    table = np.zeros((int(outcomes.max()) // vocab_size + 1, 3, 3), dtype=np.int64)
    np.add.at(table, (outcomes // vocab_size, group(outcomes % vocab_size), group(following)), 1)
    totals, shares = table.sum(axis=2), table.sum(axis=(0, 1)) / len(following)
    far = deviations(table, totals[..., None] * shares)
    accepted, last, first = (int(index) for index in np.unravel_index(far.argmax(), far.shape))
    tokens = ["token 0", f"a token from 1 to {vocab_size // 2}", f"a token from {vocab_size // 2 + 1} on"]
    seen = f"after {accepted} accepted drafts and {tokens[last]}, the next step begins with {tokens[first]}: "
    seen += compared(table[accepted, last, first], int(totals[accepted, last]), shares[first])
    fit = independence(table[totals > 0][:, shares > 0])
    what = "a step's last token and the first of the next step are independent"
    return Finding(name, fit.p_value, what, seen, fit)


def deviations(counts: NDArray[np.int64], mean: Floats) -> Floats:
    """Return (count - mean)^2 / max(mean, 1); infinite for a count whose mean is 0."""
    return np.where(mean > 0, (counts - mean) ** 2 / np.maximum(mean, 1), np.where(counts > 0, np.inf, 0))


def compared(count: int, total: int, probability: float) -> str:
    """Return the text that compares a count's share of a total with its probability."""
    return f"{count / max(1, total):.4f}, expected {probability:.4f} ({count:,} of {total:,})"
