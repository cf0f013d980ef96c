"""The record of a known mistake."""

from collections.abc import Callable, Set
from typing import Any, NamedTuple

from specdecode.checking.verifiers import Drafter

NO_REPORT = "easily made; no public report known to us"


class Mistake(NamedTuple):
    """A known mistake. It is named if the output of its verifiers fits, if its checks fail, or by an error that shows it."""

    sentence: str
    remedy: str
    source: str = NO_REPORT
    verifiers: tuple[Callable[..., Any], ...] = ()
    drafter: Drafter | None = None
    """The drafter, if the mistake is in the drafts or needs them."""

    of_trees: bool = False
    failed_checks: Set[str] = frozenset()
    """The checks that fail, where these and not the output identify it."""


def wrong(
    sentence: str,
    remedy: str,
    *verifiers: Callable[..., Any],
    source: str = NO_REPORT,
    drafter: Drafter | None = None,
    of_trees: bool = False,
) -> Mistake:
    """Return a mistake that verifiers make, each in another form."""
    return Mistake(sentence, remedy, source, verifiers, drafter, of_trees)
