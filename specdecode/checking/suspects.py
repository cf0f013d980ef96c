"""The search for known mistakes that fit the results.

Each mistake is a verifier, so it can be run on the same models. The number of accepted drafts, the draft at the first
rejection, the first draft and the last token together tell most mistakes apart. A mistake fits if these differ from what
was seen by no more than chance in every case but one: two programs with one mistake often treat a corner otherwise, such as
a request with fewer drafts. If impossible tokens were seen, the mistake must emit some, too. Of the mistakes that fit, the
likeliest is the one that differs least.

If temperature 0 alone is wrong, its mistakes are run on the same rows and drafts, and the kinds of error are compared.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import chdtrc, chdtri

from specdecode.checking import greedy
from specdecode.checking.cases import GREEDY, IN_A_CALL, INDEPENDENCE, LAST, MAIN, STEPS, Case
from specdecode.checking.mistakes import MISTAKES
from specdecode.checking.models import Models
from specdecode.checking.runs import Outcome, Run
from specdecode.checking.settings import Settings
from specdecode.checking.statistics import homogeneity
from specdecode.checking.subject import Arguments, Ids, Subject

MIN_P_VALUE = 1e-5
"""A mistake is left out if it differs with a smaller p-value, in all or in one case."""

MIN_SHARED = 0.6
"""At temperature 0 a mistake is left out if fewer of its kinds of error, and of those that were seen, are of both."""

FIRST_SIZES = (2_000, 20_000)
"""Requests of the first comparisons, which leave most mistakes out."""

MAX_NAMED = 4
"""Named at most."""


def by_failed_checks(asked: set[str], failed: set[str], of_trees: bool) -> list[str]:
    """Return the ids of the mistakes that fail exactly these checks, mistakes in trees first.

    If requests are not independent, most other checks fail, too: only the checks of independence are informative.
    """
    if failed & set(INDEPENDENCE):
        asked, failed = asked & set(INDEPENDENCE), failed & set(INDEPENDENCE)
    if IN_A_CALL in failed:
        asked = failed = {IN_A_CALL}  # the others take for granted what failed
    if STEPS in failed:
        asked, failed = asked - {LAST}, failed - {LAST}  # numbers that all come again show there, too
    found = [name for name, known in MISTAKES.items() if known.failed_checks and known.failed_checks & asked == failed]
    found = [name for name in found if of_trees or not MISTAKES[name].of_trees]
    return sorted(found, key=lambda name: not MISTAKES[name].of_trees)


def by_greedy(subject: Subject, arguments: Arguments, tokens: Ids) -> list[str]:
    """Return the ids of the mistakes that make errors of the same kinds at temperature 0, the likeliest first."""
    if "draft_logits" not in subject.takes:
        arguments = arguments._replace(draft_logits=None)
    seen, distances = greedy.errors(arguments, tokens), {}
    accepts_all = bool((greedy.roles(arguments, tokens) == greedy.BONUS).any(axis=1).all())
    for name, mistake in MISTAKES.items():
        if mistake.failed_checks == {GREEDY}:
            its_tokens = Subject.of(mistake.verifiers[0]).call(arguments)
            if not accepts_all and (greedy.roles(arguments, its_tokens) == greedy.BONUS).any(axis=1).all():
                continue  # it rejects nothing, and the verifier does
            own = greedy.errors(arguments, its_tokens)
            kinds, own_kinds = {*seen[seen > 0]}, {*own[own > 0]}
            shared = len(kinds & own_kinds) / len(kinds | own_kinds)
            counts = [np.bincount(each, minlength=greedy.DIVIDED + 1) for each in (seen, own)]
            if shared >= MIN_SHARED:
                distances[name] = -shared, int(abs(counts[0] - counts[1]).sum())
    return sorted(distances, key=lambda name: distances[name])[:MAX_NAMED]


def by_distribution(
    subject: Subject, settings: Settings, outcomes: Mapping[str, Outcome], failed: set[str]
) -> list[str]:
    """Return the ids of the mistakes whose distribution fits, likeliest first."""
    distances: dict[str, tuple[bool, float]] = {}
    for name, mistake in MISTAKES.items():
        if mistake.failed_checks or mistake.of_trees != bool(settings.tree):
            continue
        if mistake.drafter is not None and subject.draft is None:
            continue
        for verifier in mistake.verifiers:
            simulated = Subject.of(verifier, mistake.drafter if subject.draft is not None else None, subject.tree)
            distance = compared(simulated, subject, settings, outcomes, failed)
            if distance is not None:
                distances[name] = min(distance, distances.get(name, distance))
    return sorted(distances, key=lambda name: distances[name])[:MAX_NAMED]


def compared(
    simulated: Subject, subject: Subject, settings: Settings, outcomes: Mapping[str, Outcome], failed: set[str]
) -> tuple[bool, float] | None:
    """Return whether a case differs from the simulated mistake, and the distance of the others, in standard deviations.

    None: it does not fit. The main case must fit, and one of those that failed.
    """
    fits, differing = [], ""
    for case, requests in comparisons(settings.cases, outcomes, failed):
        models, seen = settings.models(case), outcomes[case.name]
        how = case.how._replace(draft_logits=case.how.draft_logits and "draft_logits" in subject.takes)
        own = Run(simulated, models, how, settings.random(case.name, purpose=1)).steps(requests)
        fit = homogeneity(cells(models, seen, requests), cells(models, own, requests))
        explained = not seen.impossible(models) or own.impossible(models) > 0
        if fit.p_value < MIN_P_VALUE or not explained:
            if differing or case.name == MAIN.name or failed == {case.name}:
                return None
            differing = case.name
        elif requests == len(seen.tokens):
            fits.append(fit)
    degrees = sum(fit.degrees for fit in fits)
    statistic = float(sum(chdtri(fit.degrees, fit.p_value) for fit in fits if fit.degrees))
    if degrees and chdtrc(degrees, statistic) < MIN_P_VALUE:
        return None
    return bool(differing), (statistic - degrees) / max(1.0, (2 * degrees) ** 0.5)


def comparisons(cases: Sequence[Case], outcomes: Mapping[str, Outcome], failed: set[str]) -> list[tuple[Case, int]]:
    """Return the cases with their numbers of requests to compare: the most informative per cost come first."""
    sizes = {case: len(outcomes[case.name].tokens) for case in cases if case.name in outcomes}
    first = [(case, size) for case in cases[:1] for size in FIRST_SIZES if size < sizes.get(case, 0)]
    return first + sorted(sizes.items(), key=lambda each: (each[0].name not in failed, each[1]))


def cells(models: Models, outcome: Outcome, requests: int) -> Ids:
    """Number the compared values: accepted drafts, first draft, draft at the first rejection, first and last token."""
    outcome = Outcome(*(each[:requests] for each in outcome))
    accepted, vocab = outcome.accepted, models.vocab_size + 1
    rows = np.arange(len(accepted))
    drafts = np.pad(outcome.drafts, ((0, 0), (0, 1)), constant_values=-1) + 1
    number = accepted
    for part in (drafts[:, 0], drafts[rows, accepted], outcome.tokens[:, 0], outcome.tokens[rows, accepted]):
        number = number * vocab + part
    return number
