"""Ask a verifier all questions, and report the answers."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdecode.checking import cases, greedy, trees
from specdecode.checking.cases import ALIKE, DEFAULT_REQUESTS, DOUBLED, MAIN, Case
from specdecode.checking.findings import Finding, findings, loss, next_tokens, pairs
from specdecode.checking.notes import (
    drafts_fit,
    few_requests,
    left_out,
    note_drafts,
    note_impossible_drafts,
    note_seeds,
)
from specdecode.checking.report import Check, Report
from specdecode.checking.settings import Progress, Session, Settings
from specdecode.checking.statistics import homogeneity
from specdecode.checking.subject import Ids, OutputError, Subject
from specdecode.checking.suspects import by_distribution, by_failed_checks, by_greedy

FALSE_ALARM = 1e-6
"""Of a whole run, whatever the number of its tests."""


def check(
    verify: Callable[..., Any],
    draft: Callable[..., Any] | None = None,
    *,
    num_draft_tokens: int = 3,
    vocab_size: int = 5,
    requests: int = DEFAULT_REQUESTS,
    seed: int = 0,
    only: str | None = None,
    tree: Sequence[int] | None = None,
    allow: float | None = None,
    progress: bool | None = None,
    name: str = "",
) -> Report:
    """Verify many requests of small models, and compare the emitted tokens with the target's distribution.

    Args:
        verify: `verify(target_logits [n, K + 1, V] float32, draft_token_ids [n, K] int64, draft_logits [n, K, V] float32 or
            None, *, temperature, seeds [n], positions [n])`, called with NumPy arrays, returns [n, K + 1] ids: the accepted
            drafts, one more token, then -1. Its signature may leave out any of draft_logits, temperature, seeds
            and positions. A draft of -1 is no draft. A verifier that takes seeds or positions, so that
            requests differ, must take -1 or raise an error; of others it is noted if they use it as an index.
        draft: `draft(draft_logits [n, V], *, temperature, seeds, positions, offset)` returns [n] ids, -1 where a request
            stops drafting; positions are this draft's, offset is its index in the step. Its signature, too, may leave out
            options. None: drafts are drawn from the softmax of their logits.
        num_draft_tokens: K; with a tree its depth is used.
        vocab_size: V, 2 or more.
        requests: how many are verified in all.
        seed: of the drafts and of all other random numbers of the checker.
        only: ask this question alone, a name of the report's.
        tree: the parents of a tree of drafts, such as `[-1, 0, 0, 1, 1]`: node 0 is the last token of the text. Then
            `verify(target_logits [n, N, V], token_ids [n, N], parents [N], *, draft_logits, temperature, seeds,
            positions)` returns [n, depth + 1] ids. Row n of both logits follows node n; draft_logits are None if siblings
            were not drawn.
        allow: the largest total variation of a token that the verifier may add, for rules that are meant to be lossy. A
            check fails if more is certain, and `report.lossiness` has the bounds.
        progress: whether to show progress on standard error; None: if it is a terminal.
        name: how the report calls the verifier.

    Returns:
        The report; `report.passed` says whether everything is right.

    Raises:
        ValueError: an argument is out of range, the signature of a function is another one, or the only question cannot
            be asked.

    >>> import numpy as np
    >>> from specdecode.checking import check
    >>> random = np.random.default_rng(0)
    >>> def verify(target_logits, draft_token_ids):
    ...     token = (target_logits[:, 0] + random.gumbel(size=target_logits[:, 0].shape)).argmax(axis=1)
    ...     return np.concatenate([token[:, None], np.full(draft_token_ids.shape, -1)], axis=1)
    >>> report = check(verify, requests=20_000)  # it samples from the target and accepts no draft: a waste, but no error
    >>> report.passed, report.suspects
    (True, [])
    """
    started = time.perf_counter()
    if tree is not None:
        num_draft_tokens = depth_of(tree, draft)
    settings = Settings(num_draft_tokens, vocab_size, requests, seed, None if tree is None else tuple(tree), allow)
    check_settings(settings, only)
    subject = Subject.of(verify, draft, tree is not None)
    session = Session(subject, settings, Progress(requests, sys.stderr.isatty() if progress is None else progress))
    ask(session, only)
    tests = sum(each.p_value is not None for each in session.findings)
    threshold = FALSE_ALARM / max(1, tests)
    checks = [each.judged(threshold) for each in session.findings]
    suspects, notes, nan = [], session.all_notes(), ""
    if all(each.passed for each in checks):
        notes = few_requests(session.findings[0], threshold) + notes
    else:
        session.progress.say("comparing with known mistakes")
        suspects = suspects_of(session, checks)
        failed = [name for name in session.nan if any(asks(each.name, name) and not each.passed for each in checks)]
        nan = f"{session.nan[failed[0]]}; first in {failed[0]}" if failed else ""
    session.progress.end()
    name = name or getattr(verify, "__name__", type(verify).__name__)
    seconds = time.perf_counter() - started
    return Report(checks, suspects, notes, name, settings.shown(), threshold, seconds, nan, session.lossiness)


def depth_of(tree: Sequence[int], draft: object) -> int:
    """Return the depth of a tree.

    Raises:
        ValueError: it is no tree of drafts, or a drafter is given, too.
    """
    if draft is not None:
        raise ValueError("draft: expected None with a tree, whose tokens the checker draws")
    depths = trees.depths(tree)
    if len(depths) < 2 or tree[0] != -1 or min(depths) < 0:
        raise ValueError(f"tree: expected the parent of each node, -1 and then nodes of the tree, got {tree!r}")
    return max(depths)


def suspects_of(session: Session, checks: list[Check]) -> list[str]:
    """Return the ids of known mistakes that fit, likeliest first: by failed checks, by the distribution, by errors."""
    subject, settings, outcomes = session.subject, session.settings, session.outcomes
    shown = [*dict.fromkeys(each.suspect for each in session.findings if each.suspect)]
    failed = [each for each in checks if not each.passed]
    names = {each.name for each in failed}
    if names == {cases.GREEDY}:
        return shown if session.greedy is None else by_greedy(subject, *session.greedy)
    known = by_failed_checks({each.name for each in checks}, names, subject.tree)
    differ = any(each.p_value is not None for each in failed)
    if known or names & set(cases.INDEPENDENCE) or not differ:
        return [*known, *shown]  # where requests are not independent, their distribution tells nothing
    main = outcomes.get(MAIN.name)
    if subject.draft is not None and main is not None and left_out(settings.models(settings.cases[0]), main):
        return ["drafts_left_out", *shown]
    cases_failed = {case.name for case in settings.cases if any(asks(each, case.name) for each in names)}
    return [*by_distribution(subject, settings, outcomes, cases_failed), *shown]


def check_settings(settings: Settings, only: str | None) -> None:
    """Raise if an argument is out of range."""
    least = {"num_draft_tokens": 1, "vocab_size": 2, "requests": 100, "seed": 0}
    for name, smallest in least.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(f"{name}: expected an integer of at least {smallest}, got {value!r}")
    if settings.allow is not None and not 0 <= settings.allow < 1:
        raise ValueError(f"allow: expected a total variation, from 0 to less than 1, got {settings.allow!r}")
    names = list(dict.fromkeys([*(case.name for case in settings.cases), cases.GREEDY, *cases.INDEPENDENCE]))
    if only is not None and not any(asks(only, name) for name in names):
        raise ValueError(f"only: expected the name of a check, such as {', '.join(names)}, got {only!r}")


def asks(only: str | None, name: str) -> bool:
    """Return whether a question is to be asked: a check of the main case is named without it."""
    if only is None or only == name or only.startswith(f"{name}:"):
        return True
    main = only in ("first token", "bonus token", "acceptance") or (only.startswith("token ") and only[6:].isdigit())
    return name == MAIN.name and main


def ask(session: Session, only: str | None) -> None:
    """Ask every question, or one alone."""
    settings = session.settings
    for case in settings.cases:
        if not asks(only, case.name):
            continue
        if settings.allow is not None and only is None and case.name in cases.NOT_FOR_LOSSY:
            session.leave_out(case.name, cases.LOSSY_REASON)
            continue
        session.progress.say(case.name)
        ask_case(session, case, only)
        session.note_nan(case.name)
        if case.name == MAIN.name and "joint" not in session.outcomes:
            return  # a verifier that fails here fails everywhere alike
    if asks(only, cases.GREEDY) and not settings.tree and (settings.allow is None or only):
        session.progress.say(cases.GREEDY)
        ask_greedy(session)
        session.note_nan(cases.GREEDY)
    if asks(only, cases.IN_A_CALL) or asks(only, cases.IN_CALLS):
        ask_calls(session)
    if any(asks(only, name) for name in (cases.STEPS, cases.LAST, cases.SUMS)):
        ask_steps(session)
    if only is None:
        note_drafts(session)
        note_seeds(session)
        note_impossible_drafts(session)
        return
    errors = [each for each in session.findings if each.p_value is None and not each.passed]
    session.findings = [each for each in session.findings if each.name == only] or errors
    if not session.findings:
        why = " ".join(session.all_notes()) or "no check of this run has that name"
        raise ValueError(f"only: expected a question that can be asked, got {only!r}; {why}")


def ask_case(session: Session, case: Case, only: str | None) -> None:
    """Run a case and apply its statistics."""
    subject, allow = session.subject, session.settings.allow
    if case.needs - subject.takes:
        session.leave_out(case.name, f"verify takes no {', '.join(sorted(case.needs))}.")
        return
    run = session.run(case, case.name, case.how)
    try:
        outcome = run.steps(session.settings.size(case.share))
    except OutputError as error:
        fixed_length = case.how.drafts == "ragged" and not subject.takes & cases.PER_REQUEST
        if fixed_length and not error.raised and only is None:
            session.leave_out(case.name, cases.FIXED_LENGTH)
        else:
            session.fail(case.name, error, case.may_refuse)
        return
    session.outcomes[case.name] = outcome
    if allow is not None:
        measured, lossiness = loss(case, run.models, outcome, allow)
        session.findings.append(measured)
        session.lossiness = session.lossiness or lossiness
        return
    all_drafted = bool((outcome.given == run.models.num_draft_tokens).all())
    drawn = subject.draft is None or case.how.drafts == "argmax" or (all_drafted and drafts_fit(run.models, outcome))
    session.findings += findings(case, run.models, outcome, drawn)


def ask_greedy(session: Session) -> None:
    """At temperature 0 every token must be the argmax."""
    subject = session.subject
    if "temperature" not in subject.takes:
        session.leave_out(cases.GREEDY, "verify takes no temperature.")
        return
    try:
        arguments = greedy.make_texts(subject, session.settings)
        session.progress.tick(len(arguments.seeds))
        tokens = subject.call(arguments)
    except OutputError as error:
        session.fail(cases.GREEDY, error, may_refuse=True)
        return
    session.greedy = arguments, tokens
    session.findings.append(greedy.compared(subject, arguments, tokens))


def ask_calls(session: Session) -> None:
    """Two requests of one call, and the same place of two calls, must be independent."""
    settings, run = session.settings, session.run(ALIKE, ALIKE.name)
    try:
        neighbours = run.small_calls(max(50, min(cases.MAX_CALLS, settings.requests // 100)))
        places = run.two_calls(settings.size(cases.STEPS_SHARE))
    except OutputError as error:
        session.fail(cases.IN_A_CALL, error)
        return
    what = "first tokens of neighbours in a call are independent"
    session.findings.append(pairs(cases.IN_A_CALL, what, neighbours, settings.vocab_size))
    what = "first tokens in the same place of different calls are independent"
    paired = pairs(cases.IN_CALLS, what, places, settings.vocab_size)
    session.findings.append(calls_differ(paired, neighbours[:, 0], places.ravel()))


def calls_differ(paired: Finding, in_first_place: Ids, in_any: Ids) -> Finding:
    """Add a second test: over many calls the first place has the tokens that any place has.

    Where every call starts with the same noise, it has fewer.
    """
    fit = homogeneity(in_first_place, in_any)
    before = 1.0 if paired.p_value is None else paired.p_value
    if fit.p_value >= before:
        return paired._replace(p_value=min(1.0, 2 * before))
    shares = [np.bincount(tokens).max() / len(tokens) for tokens in (in_first_place, in_any)]
    seen = f"the first place of a call has one token in {shares[0]:.1%} of calls, any place in {shares[1]:.1%}"
    return paired._replace(p_value=min(1.0, 2 * fit.p_value), difference=seen)


def ask_steps(session: Session) -> None:
    """Two steps of a request with one seed, and two requests with the same seed + position, must be independent."""
    names = (cases.STEPS, cases.LAST, cases.SUMS)
    if cases.PER_REQUEST - session.subject.takes:
        for name in names:
            session.leave_out(name, "verify does not take seeds and positions.")
        return
    size, vocab = session.settings.size(cases.STEPS_SHARE), session.settings.vocab_size
    try:
        steps = session.run(ALIKE, cases.STEPS).two_steps(size)
        others = session.run(DOUBLED, cases.LAST).two_steps(size)
        equal = session.run(ALIKE, cases.SUMS).equal_sums(size)
    except OutputError as error:
        session.fail(cases.STEPS, error)
        return
    what = "first tokens of two steps with one seed are independent"
    session.findings.append(pairs(cases.STEPS, what, steps[:, [0, 2]], vocab))
    session.findings.append(next_tokens(cases.LAST, others[:, 1], others[:, 2], vocab))
    what = "first tokens of requests with equal seed + position are independent"
    session.findings.append(pairs(cases.SUMS, what, equal, vocab))
