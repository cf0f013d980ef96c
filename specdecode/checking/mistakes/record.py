"""What is known of a mistake."""

from typing import NamedTuple

from specdecode.checking.verifiers import Drafter, Verifier

EASY = "easily made; no public report known to us"


class Mistake(NamedTuple):
    """A mistake and how to know it."""

    sentence: str
    source: str
    remedy: str
    verifier: Verifier
    drafter: Drafter | None = None
    """Where the mistake is in the drafts, or needs them."""

    signature: frozenset[str] = frozenset()
    """The checks that fail, where that and not the distribution tells it."""
