"""The cases: the models, the numbers of requests, and the compared values."""

from collections.abc import Sequence
from typing import NamedTuple

from specdecode.checking import models
from specdecode.checking.models import How
from specdecode.checking.trees import padded, reversed_nodes

DEFAULT_REQUESTS = 200_000
"""Names of mistakes are tested with this many."""

MANY_STATES = 1024
FEW_STATES = 12


class Case(NamedTuple):
    """Models, a way to call the verifier, and the statistics that are compared."""

    name: str
    share: float
    """Of the run's requests."""

    shape: models.Shape = models.ordinary
    temperature: float = 1.0
    how: How = How()
    num_draft_tokens: int | None = None
    """None: as the caller says."""

    max_states: int = FEW_STATES
    """With few states a test has few cells, and so sees a small error in them."""

    statistics: tuple[str, ...] = ("joint",)
    needs: frozenset[str] = frozenset()
    """Arguments that the verifier must take, to be asked at all."""

    may_refuse: bool = False
    """Whether a verifier need not take this: if it raises, it is not asked."""


MAIN = Case(
    "joint", 0.38, max_states=MANY_STATES, statistics=("joint", "first token", "token", "bonus token", "acceptance")
)
TEMPERATURE = frozenset({"temperature"})
LOGITS = frozenset({"draft_logits"})

CASES = (
    MAIN,
    Case("temperature 0.4", 0.1, models.unrelated, 0.4, statistics=("joint", "bonus token"), needs=TEMPERATURE),
    Case("temperature 3", 0.1, temperature=3.0, statistics=("joint", "bonus token"), needs=TEMPERATURE),
    Case(
        "argmax drafts",
        0.08,
        how=How("argmax", draft_logits=False),
        statistics=("joint", "acceptance"),
        may_refuse=True,
    ),
    Case("zeros", 0.06, models.zeros),
    Case("disjoint supports", 0.03, models.disjoint),
    Case("equal models", 0.03, models.equal),
    Case("padding", 0.04, models.padding),
    Case("large logits", 0.04, models.large),
    Case("no drafts", 0.02, num_draft_tokens=0, may_refuse=True),
    Case("ragged drafts", 0.05, how=How("ragged"), may_refuse=True),
)

STAR = (-1, 0, 0, 0)


def tree_cases(parents: Sequence[int]) -> tuple[Case, ...]:
    """Return the cases of a tree. Siblings are drawn from q one by one, so some are equal, or come without draft logits."""
    tree = tuple(parents)
    drawn, top, equal = How(parents=tree), How("top", False, tree), How("equal", False, tree)
    all_or_bonus = ("joint", "bonus token")
    return (
        MAIN._replace(share=0.36, how=drawn),
        Case("temperature 0.4", 0.08, models.unrelated, 0.4, drawn, statistics=all_or_bonus, needs=TEMPERATURE),
        Case("temperature 3", 0.08, temperature=3.0, how=drawn, statistics=all_or_bonus, needs=TEMPERATURE),
        Case("fixed tree", 0.1, models.equal, how=top, statistics=("joint", "acceptance"), may_refuse=True),
        Case("equal siblings", 0.08, models.equal, how=equal, statistics=("joint", "acceptance"), may_refuse=True),
        Case("star", 0.1, models.star, how=How(parents=STAR), num_draft_tokens=1, statistics=("first token",)),
        Case("zeros", 0.04, models.zeros, how=drawn),
        Case("large logits", 0.04, models.large, how=drawn),
        Case("padding", 0.04, how=How(parents=padded(tree)), may_refuse=True),
        Case("shuffled nodes", 0.04, how=How(parents=reversed_nodes(tree)), may_refuse=True),
        Case(GREEDY, 0.02, temperature=0.0, how=How("drawn", False, tree), needs=TEMPERATURE, may_refuse=True),
    )


PER_REQUEST = frozenset({"seeds", "positions"})
FIXED_LENGTH = (
    "for drafts of -1 verify returns no output of a verification: is -1 used as an index? If some of your requests have "
    'fewer drafts than others, this is an error: ask "ragged drafts" alone to see it.'
)
"""Of a verifier whose signature does not tell requests apart: it may be meant for K drafts in each."""

GREEDY = "greedy"
NOT_FOR_LOSSY = ("argmax drafts", "zeros", "disjoint supports", GREEDY)
LOSSY_REASON = (
    "lossy rules differ most from the target where tokens have no probability or one has all; ask for one alone."
)
IN_A_CALL, IN_CALLS, STEPS, LAST, SUMS = "requests of a call", "calls", "steps", "last tokens", "seed + position"
INDEPENDENCE = (IN_A_CALL, IN_CALLS, STEPS, LAST, SUMS)
MAX_CALLS = 400
STEPS_SHARE = 0.015
ALIKE = Case("alike", 0.0, models.alike, max_states=1)
DOUBLED = Case("doubled", 0.0, models.doubled, max_states=1)
