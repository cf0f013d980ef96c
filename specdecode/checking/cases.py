"""The cases: the models, the numbers of requests, and the compared values."""

from typing import NamedTuple

from specdecode.checking import models
from specdecode.checking.runs import How

TREE = 1024
FEW = 12


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

    max_states: int = FEW
    """With few states a test has few cells, and so sees a small error in them."""

    statistics: tuple[str, ...] = ("joint",)
    needs: frozenset[str] = frozenset()
    """Arguments that the verifier must take, to be asked at all."""

    may_refuse: bool = False
    """Whether a verifier need not take this: if it raises, it is not asked."""


HISTORY = Case(
    "joint", 0.38, max_states=TREE, statistics=("joint", "first token", "token", "bonus token", "acceptance")
)
TEMPERATURE = frozenset({"temperature"})
LOGITS = frozenset({"draft_logits"})

CASES = (
    HISTORY,
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

EACH_REQUESTS = frozenset({"seeds", "positions"})
FIXED = (
    "for drafts of -1 verify returns no output of a verification: is -1 used as an index? If some of your requests have "
    'fewer drafts than others, this is an error: ask "ragged drafts" alone to see it.'
)
"""Of a verifier whose signature does not tell requests apart: it may be meant for K drafts in each."""

GREEDY = "greedy"
IN_A_CALL, IN_CALLS, STEPS = "requests of a call", "calls", "steps"
INDEPENDENCE = (IN_A_CALL, IN_CALLS, STEPS)
MOST_CALLS = 400
STEPS_SHARE = 0.015
ALIKE = Case("alike", 0.0, models.alike, max_states=1)
