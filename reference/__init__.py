"""The text-book floor: every algorithm of specdecode for one request, in NumPy and float64.

The setting. A language model, the *target*, says one token per call: it turns the tokens so far into logits, and the token
is drawn from p = softmax(logits / temperature). A cheaper model, the *draft*, runs ahead and proposes K tokens, each drawn
from its own q. The target then scores all of them in a single call, which gives K + 1 rows of logits: row i is its
distribution of the token at draft i, given the text and drafts 0 to i - 1, and the last row that of the token after them.
*Verification* accepts a beginning of the drafts and adds one token: a *recovered* token where a draft was rejected, a
*bonus* token where all stood. It must do so without changing what the target alone would have said, and the more drafts
it accepts, the fewer calls of the target a text takes.

Read the rooms in this order: [`philox`][reference.philox] (noise; on a first reading, only what `uniform` and `gumbel`
return matters), [`selection`][reference.selection] (how any token is drawn), [`greedy`][reference.greedy],
[`strict`][reference.strict], [`probabilistic`][reference.probabilistic], [`block`][reference.block],
[`synthetic`][reference.synthetic]. The last five have a `verify`, which returns the very tokens that the package returns for
the same logits, seed and position.

This package imports nothing of specdecode and specdecode imports nothing of it: an oracle that shared code with what it
judges would be no oracle.
"""

from typing import NamedTuple


class Verdict(NamedTuple):
    """What one verification step decides for one request."""

    token_ids: list[int]
    """Accepted drafts, then the one recovered or bonus token."""

    margin: float
    """How far the closest of the step's decisions was from falling the other way, in nats.

    An implementation in which no difference of two scores is off by this much must return the same tokens.
    """

    invalid: bool = False
    """Whether a target row that decided a token had no finite logit and no `+inf`."""

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens."""
        return len(self.token_ids) - 1


def leading_drafts(draft_token_ids, vocab_size: int) -> list[int]:
    """Return the drafts that count: those before the first id that is no token (-1 pads ragged batches).

    >>> leading_drafts([4, 2, -1, 3], vocab_size=5)
    [4, 2]
    >>> leading_drafts([4, 5], vocab_size=5)
    [4]
    """
    drafts = []
    for token in draft_token_ids:
        if not 0 <= token < vocab_size:
            break
        drafts.append(int(token))
    return drafts
