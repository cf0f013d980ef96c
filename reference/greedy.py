"""Greedy verification: temperature 0, where the target always emits its most likely token.

A draft is accepted if and only if it is the argmax of the target's raw logits, the lowest id on ties. The softmax is
monotone, so only maxima are needed: no exponential, no noise, and no draft logits. Strict, probabilistic and block
verification treat a request of temperature 0 in this way. Synthetic verification accepts by its schedule even then, and
emits the argmax.

Left out: nothing. Source: the T = 0 limit of Leviathan, Kalman, Matias, "Fast inference from transformers via
speculative decoding" (2023), section 2.2.
"""

import numpy as np

from reference import Outcome, leading_drafts
from reference.selection import Choice, first_maximum, is_invalid


def argmax(logits) -> Choice:
    """Return the lowest id among the largest logits. NaN counts as -inf.

    >>> argmax([1.0, 3.0, np.nan, 3.0]).index
    1
    """
    logits = np.array(logits, dtype=np.float64)
    logits[np.isnan(logits)] = -np.inf
    # A comparison does not round. So the margin is infinite: every implementation must return this very token.
    return Choice(first_maximum(logits).index, np.inf)


def verify(target_logits, draft_token_ids) -> Outcome:
    """Accept drafts while each is the argmax of its row; then emit the argmax of the next row.

    >>> rows = [[0.0, 9.0, 1.0], [5.0, 0.0, 1.0], [0.0, 1.0, 2.0]]
    >>> verify(rows, [1, 0]).token_ids
    [1, 0, 2]
    >>> verify(rows, [1, 2]).token_ids
    [1, 0]
    """
    drafts = leading_drafts(draft_token_ids, vocab_size=len(target_logits[0]))
    emitted, invalid = [], False
    for offset, row in enumerate(target_logits):
        token = argmax(row)
        emitted.append(token.index)
        invalid |= is_invalid(row)
        if offset == len(drafts) or drafts[offset] != token.index:
            break
    return Outcome(emitted, np.inf, invalid)
