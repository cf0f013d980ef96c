"""Notes: results that are reported but not required."""

import numpy as np

from specdecode.checking import runs
from specdecode.checking.cases import ALIKE, CASES, HISTORY
from specdecode.checking.findings import Finding
from specdecode.checking.models import Models
from specdecode.checking.settings import Answers, Settings
from specdecode.checking.statistics import detectable, goodness_of_fit
from specdecode.checking.subject import OutputError, Subject

SUSPICIOUS = 1e-6
"""Drafts that fit worse are not drawn as their logits say."""

GROSS = 0.1
"""A total variation that a run should see, at least in its first question."""

PROBES = 64
"""Requests whose answers are counted."""


def few_requests(first: Finding, threshold: float) -> list[str]:
    """Say so if even a gross error of what the first question asks may pass."""
    if first.fit is None or first.certain:
        return []
    seen = detectable(first.fit.degrees, first.fit.size, threshold)
    if seen <= GROSS:
        return []
    return [
        f"few requests: in {first.name} even a total variation of {seen:.2f} may pass. It shrinks with the square root of "
        "their number."
    ]


def drafts_fit(models: Models, outcome: runs.Outcome) -> bool:
    """Return whether drafts are distributed as their logits say: else the bounds on acceptance do not hold."""
    expected = models.final_states(models.draft_probs)
    counts = np.bincount(outcome.draft_states[:, -1], minlength=len(expected))
    complete = bool((outcome.given == models.num_draft_tokens).all())
    return complete and goodness_of_fit(counts[None], expected[None]).p_value > SUSPICIOUS


def note_drafts(subject: Subject, settings: Settings, answers: Answers) -> None:
    """Report drafts of another distribution: exact for some methods, such as strict, and wrong for others."""
    for case in CASES:
        outcome = answers.outcomes.get(case.name)
        if subject.draft is None or outcome is None or case.how.drafts != "drawn":
            continue
        if not drafts_fit(settings.models(case), outcome):
            answers.notes.append(
                f"{case.name}: draft does not draw from the softmax of draft_logits / temperature. Only a verifier that "
                "does not divide by their probability can be right with it."
            )
            return


def note_seeds(subject: Subject, settings: Settings, answers: Answers) -> None:
    """Report whether a seed fixes the tokens, in every batch, place and order."""
    if "seeds" not in subject.takes:
        return
    models, random = settings.models(HISTORY), settings.random("seeds")
    seeds, positions = runs.fresh(PROBES, random)
    order = random.permutation(PROBES)[: PROBES // 2]
    try:
        drafts, states = runs.draft(subject, models, HISTORY.how, seeds, positions, random)
        whole = subject.call(runs.arguments_of(models, HISTORY.how, drafts, states, seeds, positions))
        again = subject.call(runs.arguments_of(models, HISTORY.how, drafts, states, seeds, positions))
        some = (each[order] for each in (drafts, states, seeds, positions))
        other = subject.call(runs.arguments_of(models, HISTORY.how, *some))
    except OutputError:
        return  # seen elsewhere
    same, moved = (whole == again).all(axis=1).sum(), (whole[order] == other).all(axis=1).sum()
    answers.notes.append(
        f"seeds: the same call again gives {same} of {PROBES} requests the same tokens; another batch, place and order "
        f"{moved} of {len(order)}."
    )


def note_impossible_drafts(subject: Subject, settings: Settings, answers: Answers) -> None:
    """Report whether drafts with q = 0 are accepted: drafts that are drawn from q never have it."""
    if "draft_logits" not in subject.takes:
        return
    models, random = settings.models(ALIKE), settings.random("q = 0")
    drafts = np.zeros((PROBES, models.num_draft_tokens), dtype=np.int64)
    states = np.zeros((PROBES, models.num_draft_tokens + 1), dtype=np.int64)
    arguments = runs.arguments_of(models, HISTORY.how, drafts, states, *runs.fresh(PROBES, random))
    assert arguments.draft_logits is not None
    arguments.draft_logits[:, :, 0] = -np.inf
    try:
        tokens = subject.call(arguments)
    except OutputError as error:
        answers.notes.append(f"drafts with q = 0, which no drafter draws: {str(error).splitlines()[0]}")
        return
    accepted = int((tokens[:, 1] != -1).sum())
    if accepted > 0.9 * PROBES:
        answers.notes.append(
            f"drafts with q = 0: {accepted} of {PROBES} are accepted. No drafter draws them; but if rounding or truncation "
            "makes a q of 0, they should be rejected."
        )
