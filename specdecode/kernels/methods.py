"""Each method's functions: decide while rows are read, decide about a draft, and draw the token after it."""

from dataclasses import dataclass
from typing import Any

from specdecode.kernels import block, probabilistic, strict
from specdecode.kernels.truncation import early


@dataclass(frozen=True, eq=False)  # found by identity: to hash a kernel takes long
class Method:
    """A method. Its functions are compiled into the kernels that call them.

    Attributes:
        name: of the method; a step without drafts is one of `strict`.
        reads_drafts: it reads draft logits. Else its decision about a draft draws the token that is emitted in its stead.
        decides_block: launches of its own decide about all drafts of a request, between reading and emitting.
        decide_while_reading: decides about a draft whose rows have been read, in a large batch; None: decided later.
        decide_before_truncation: the same for rows that are truncated afterwards.
        decide: returns whether the draft is accepted (False if launches of its own decide), the row's `Normalizer`, and a
            source: the input of `draw`, or the token itself if `draw` is None. The two above return as much; their source
            is not used.
        draw: draws the token after the accepted drafts from that source, recovered or bonus; None: `decide` has.
        num_warps: of a program that emits without draft logits; 8 with.
        large_rows: a batch with so many rows to read is large: it pays to find rows early that do not matter.
    """

    name: str
    reads_drafts: bool
    decides_block: bool
    decide_while_reading: Any
    decide_before_truncation: Any
    decide: Any
    draw: Any
    num_warps: int
    large_rows: int


STRICT = Method(
    "strict",
    reads_drafts=False,
    decides_block=False,
    decide_while_reading=strict.decide_while_reading,
    decide_before_truncation=None,
    decide=strict.decide,
    draw=None,
    num_warps=8,
    large_rows=384,
)
PROBABILISTIC = Method(
    "probabilistic",
    reads_drafts=True,
    decides_block=False,
    decide_while_reading=probabilistic.decide,
    decide_before_truncation=early.may_accept,
    decide=probabilistic.decide,
    draw=probabilistic.draw,
    num_warps=4,
    large_rows=320,
)
BLOCK = Method(
    "block",
    reads_drafts=True,
    decides_block=True,
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
"""By the names that users give: the method with draft logits, and without. `synthetic` only schedules the verdict."""


def method_of(name: str, num_draft_tokens: int, has_draft_logits: bool) -> Method:
    """Return the method of a step."""
    return METHODS[name][not has_draft_logits] if num_draft_tokens > 0 else STRICT
