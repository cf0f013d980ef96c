"""The text-book version: every algorithm of specdecode for one request, in NumPy and float64.

The setting. A language model, the *target*, produces one token per call: it turns the tokens so far into logits, and
the token is drawn from p = softmax(logits / temperature). A cheaper *draft model* proposes the next K tokens, the *drafts*,
each drawn from its own distribution q. The target then scores all of them in a single call, which gives K + 1 rows of
logits. Row i, counted from 0, is the target's distribution of the token at the position of draft i, given the text and
drafts 0 to i - 1. The last row is that of the token after all drafts.

*Verification* accepts the first tau drafts, for some tau from 0 to K, and adds one token: a *recovered* token where draft
tau was rejected, a *bonus* token where all K were accepted. It must not change the distribution of the text: the tokens
must be distributed as if the target alone had drawn them. The more drafts it accepts, the fewer calls of the target a
text needs.

Read the modules in this order: [`greedy`][reference.greedy], [`probabilistic`][reference.probabilistic],
[`selection`][reference.selection] (how a token is drawn), [`strict`][reference.strict], [`block`][reference.block],
[`truncation`][reference.truncation] (top-k, top-p and min-p; without them it changes no row),
[`synthetic`][reference.synthetic], [`philox`][reference.philox] (the noise; until then it is enough to know what
`uniform` and `gumbel` return). Each method has a function `verify`. The tests
require that the package returns the same tokens as `verify` for the same logits, seed and position, except where two
scores are so close that rounding decides. Beside them, [`logprobs`][reference.logprobs] has the log-probabilities of the
tokens that `verify` returns.

The examples of a module need its names: in a clone of the repository, `from reference.block import *` imports those of
`block`.

This package imports nothing of specdecode, and specdecode imports nothing of it: a reference that shared code with what
it tests would repeat its mistakes.
"""

from typing import NamedTuple


class Outcome(NamedTuple):
    """What one verification step returns for one request."""

    token_ids: list[int]
    """Accepted drafts, then the one recovered or bonus token."""

    margin: float
    """How far the closest decision of the step was from the opposite decision, in nats.

    An implementation whose differences of scores are all wrong by less than this must return the same tokens.
    """

    invalid: bool = False
    """Whether a target row that decided a token had no finite logit and no `+inf`."""

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.token_ids) - 1


def leading_drafts(draft_token_ids, vocab_size: int) -> list[int]:
    """Return the drafts before the first id that is not a token of the vocabulary (-1 pads ragged batches).

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
