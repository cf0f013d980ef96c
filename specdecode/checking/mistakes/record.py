"""What is known of a mistake, and a part that several have."""

from typing import NamedTuple

from specdecode.checking.models import softmax
from specdecode.checking.verifiers import Drafter, Floats, Logits, Verifier

EASY = "easily made; no public report known to us"


class Mistake(NamedTuple):
    """A mistake and how to know it."""

    sentence: str
    source: str
    remedy: str
    verifier: Verifier
    drafter: Drafter | None = None
    """Where the mistake is in the drafts, or needs them."""

    forms: tuple[Verifier, ...] = ()
    """Other verifiers with the same mistake."""

    signature: frozenset[str] = frozenset()
    """The checks that fail, where that and not the distribution tells it."""


def unscaled(logits: Logits, temperature: float) -> Floats:
    """Leave the temperature out, unless it is 0."""
    return softmax(logits, 0 if temperature == 0 else 1)
