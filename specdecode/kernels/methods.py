"""Each method: what it decides while rows are read, how it decides about a draft, and how it draws the token after it."""

from dataclasses import dataclass
from typing import Any

from specdecode.kernels import block, bounds, probabilistic, strict


@dataclass(frozen=True, eq=False)  # found by identity: to hash a kernel takes long
class Method:
    """A method; its functions are compiled into the kernels that call them.

    Attributes:
        samples: the decision about a draft draws the token that is emitted otherwise, and asks for no draft logits.
        settles: launches of their own decide about all drafts of a request, between reading and emitting.
        decide_while_reading: about a draft whose rows have been read, in a large batch, where that can be known.
        decide_before_truncation: likewise of rows that are truncated afterwards.
        decide: about a draft, before its token is emitted; where the method settles, what its row is then drawn from.
        draw: the token after the accepted drafts.
        num_warps: of a program that emits without draft logits; 8 with.
        large_rows: a batch with so many rows to read is large: it pays to find out early which rows do not matter.
    """

    name: str
    samples: bool
    settles: bool
    decide_while_reading: Any
    decide_before_truncation: Any
    decide: Any
    draw: Any
    num_warps: int
    large_rows: int


STRICT = Method(
    "strict",
    samples=True,
    settles=False,
    decide_while_reading=strict.decide_while_reading,
    decide_before_truncation=None,
    decide=strict.decide,
    draw=None,
    num_warps=8,
    large_rows=384,
)
PROBABILISTIC = Method(
    "probabilistic",
    samples=False,
    settles=False,
    decide_while_reading=probabilistic.decide,
    decide_before_truncation=bounds.may_accept,
    decide=probabilistic.decide,
    draw=probabilistic.draw,
    num_warps=4,
    large_rows=320,
)
BLOCK = Method(
    "block",
    samples=False,
    settles=True,
    decide_while_reading=None,
    decide_before_truncation=None,
    decide=block.decide,
    draw=probabilistic.draw,
    num_warps=4,
    large_rows=512,
)

METHODS = {
    "strict": (STRICT, STRICT),
    "probabilistic": (PROBABILISTIC, PROBABILISTIC),
    "block": (BLOCK, BLOCK),
    "synthetic": (PROBABILISTIC, STRICT),
}
"""By the names that users give: the method with draft logits, and without. What `synthetic` changes are the rates alone."""
