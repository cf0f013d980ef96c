"""Notes: results that are reported but not required."""

import numpy as np

from specdecode.checking.cases import ALIKE, MAIN
from specdecode.checking.findings import Finding
from specdecode.checking.models import Models, count
from specdecode.checking.runs import Outcome, fresh
from specdecode.checking.settings import Session
from specdecode.checking.statistics import detectable, goodness_of_fit
from specdecode.checking.subject import Ids, OutputError

MAX_DEVIATIONS = 6
"""A token that is drafted more often than expected by more standard deviations was not drawn from its row."""

SUSPICIOUS = 1e-6
"""Drafts that fit worse are not drawn as their logits say."""

GROSS = 0.1
"""A total variation that a run should see, at least in its first question."""

PROBES = 64
"""Requests whose answers are counted."""


def few_requests(first: Finding, threshold: float) -> list[str]:
    """Return a note if even a gross error may pass the first question."""
    if first.fit is None or first.certain:
        return []
    seen = detectable(first.fit.degrees, first.fit.size, threshold)
    if seen <= GROSS:
        return []
    return [
        f"few requests: in {first.name} even a total variation of {seen:.2f} may pass. It shrinks with the square root of "
        "their number."
    ]


def drafts_fit(models: Models, outcome: Outcome) -> bool:
    """Return whether every draft has the distribution of its logits, where a request does not stop before it."""
    for i, expected in enumerate(models.draft_probs):
        if goodness_of_fit(draft_counts(models, outcome, i), expected).p_value < SUSPICIOUS:
            return False
    return True


def draft_counts(models: Models, outcome: Outcome, i: int) -> Ids:
    """Return the counts of the tokens of draft i in each state, [states, V]."""
    there = outcome.given > i
    return count(outcome.draft_states[there, i], outcome.drafts[there, i], models.draft[i].shape)


def left_out(models: Models, outcome: Outcome) -> bool:
    """Return whether the drafter draws tokens, and leaves some out for a reason that looks at them.

    Then the drafts of a state do not have its distribution, but no token is drafted more often than the distribution says.
    """
    if (outcome.given == models.num_draft_tokens).all() or drafts_fit(models, outcome):
        return False
    reached = np.ones(len(outcome.given), dtype=bool)
    for i, probs in enumerate(models.draft_probs):
        visits = np.bincount(outcome.draft_states[reached, i], minlength=len(probs))[:, None]
        expected = probs * visits
        if (draft_counts(models, outcome, i) > expected + MAX_DEVIATIONS * np.sqrt(expected + 1)).any():
            return False
        reached = outcome.given > i
    return True


def note_drafts(session: Session) -> None:
    """Report drafts of another distribution: exact for some methods, such as strict, and wrong for others."""
    for case in session.settings.cases:
        outcome = session.outcomes.get(case.name)
        if session.subject.draft is None or outcome is None or case.how.drafts != "drawn":
            continue
        models = session.settings.models(case)
        if not drafts_fit(models, outcome):
            what = "does not draw from the softmax of draft_logits / temperature"
            if left_out(models, outcome):
                what = "draws tokens, and leaves some out for a reason that looks at them"
            session.notes.append(
                f"{case.name}: draft {what}. Only a verifier that does not divide by their probability can be right with it."
            )
            return


def note_seeds(session: Session) -> None:
    """Report whether a seed fixes the tokens, in every batch, place and order."""
    if "seeds" not in session.subject.takes:
        return
    run = session.run(MAIN, "seeds")
    seeds, positions = fresh(PROBES, run.random)
    order = run.random.permutation(PROBES)[: PROBES // 2]
    try:
        inputs = (*run.draft(seeds, positions), seeds, positions)
        whole, again = (session.subject.call(run.arguments(*inputs)) for _ in range(2))
        other = session.subject.call(run.arguments(*(each[order] for each in inputs)))
    except OutputError:
        return  # seen elsewhere
    same, moved = (whole == again).all(axis=1).sum(), (whole[order] == other).all(axis=1).sum()
    session.notes.append(
        f"seeds: the same call again gives {same} of {PROBES} requests the same tokens; another batch, place and order "
        f"{moved} of {len(order)}."
    )


def note_impossible_drafts(session: Session) -> None:
    """Report whether drafts with q = 0 are accepted: drafts that are drawn from q never have it."""
    if "draft_logits" not in session.subject.takes or session.settings.tree:
        return
    run = session.run(ALIKE, "q = 0")
    states = np.zeros((PROBES, run.models.num_draft_tokens + 1), dtype=np.int64)
    arguments = run.arguments(states[:, 1:], states, *fresh(PROBES, run.random))
    assert arguments.draft_logits is not None
    arguments.draft_logits[:, :, 0] = -np.inf
    try:
        tokens = session.subject.call(arguments)
    except OutputError as error:
        session.notes.append(f"drafts with q = 0, which no drafter draws: {str(error).splitlines()[0]}")
        return
    accepted = int((tokens[:, 1] != -1).sum())
    if accepted > 0.9 * PROBES:
        session.notes.append(
            f"drafts with q = 0: {accepted} of {PROBES} are accepted. This is no error, as a draft that is drawn has q > 0. "
            "It becomes one if q is rounded or truncated after the draft was drawn: then reject a draft with q = 0."
        )
