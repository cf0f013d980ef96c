"""The record of a known mistake, and a part that several mistakes share."""

from collections.abc import Callable
from typing import Any, NamedTuple

from specdecode.checking.models import softmax
from specdecode.checking.verifiers import Drafter, Floats, Logits

EASY = "easily made; no public report known to us"


class Mistake(NamedTuple):
    """A mistake and how to know it."""

    sentence: str
    source: str
    remedy: str
    verifier: Callable[..., Any]
    drafter: Drafter | None = None
    """The drafter, if the mistake is in the drafts or needs them."""

    forms: tuple[Callable[..., Any], ...] = ()
    """Other verifiers with the same mistake."""

    tree: tuple[int, ...] = ()
    """A tree that shows it, of mistakes in verifying trees."""

    signature: frozenset[str] = frozenset()
    """The checks that fail, where that and not the distribution tells it."""


def unscaled(logits: Logits, temperature: float) -> Floats:
    """Leave the temperature out, unless it is 0."""
    return softmax(logits, 0 if temperature == 0 else 1)
