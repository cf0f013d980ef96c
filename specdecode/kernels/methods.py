"""Each method's functions: decide while rows are read, decide about a draft, and draw the token after it."""

from dataclasses import dataclass
from typing import Any

from specdecode.kernels import block, probabilistic, strict
from specdecode.kernels.truncation import early


@dataclass(frozen=True, eq=False)  # compared by identity: hashing a kernel takes long
class Method:
    """A method. Its functions are compiled into the kernels that call them.

    Attributes:
        name: of the method; a step without drafts uses `strict`.
        reads_drafts: whether it reads draft logits. If not, its decision about a draft also draws the token that replaces
            the draft.
        decides_block: whether separate launches, between reading and emitting, decide about all drafts of a request.
        decide_while_reading: decides about a draft whose rows have been read, in a large batch; None: decided later.
        decide_before_truncation: the same for rows that are truncated afterwards.
        decide: returns whether the draft is accepted (False if separate launches decide), the row's `Normalizer`, and a
            source: the input of `draw`, or the token itself if `draw` is None. The two functions above return the same
            three values; their source is not used.
        draw: draws the recovered or bonus token from the source; None: `decide` has drawn it.
        num_warps: of a program that emits, without draft logits; with draft logits it has 8.
        large_rows: the number of rows from which a batch is large: decisions while reading save more than they cost.
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
"""The methods by public name: with draft logits, and without. `synthetic` only replaces the decision."""


def method_of(name: str, num_draft_tokens: int, has_draft_logits: bool) -> Method:
    """Return the method of a step."""
    return METHODS[name][not has_draft_logits] if num_draft_tokens > 0 else STRICT
