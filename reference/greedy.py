"""Greedy verification: the target emits its most likely token, so a draft is accepted if and only if it is that token.

1. Accept drafts as long as each is the argmax of its row.
2. At the first draft that is not, emit the argmax instead. If all drafts are accepted, emit the argmax of the last row.

No random number is needed, and no draft probability. Softmax keeps the order of the logits, so no softmax is needed either.

Proof that the output equals greedy decoding, token for token. Row i belongs to the text and the drafts 0 to i - 1. If
these are the tokens that greedy decoding would have emitted, then its argmax is the next token of greedy decoding. It is
emitted in either case: as the accepted draft, which it equals, or in place of the draft. If it took the place of the draft,
the rows after it belong to another text, and the step ends. By induction every emitted token is greedy decoding's.

The proof nowhere uses that a token is an argmax. So *comparing* drafts with the target's own tokens is exact however the
target chooses its tokens: [`strict`][reference.strict] uses it for tokens that are drawn.

Source: the limit of temperature 0 of Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
decoding" (2023), section 2.2.
"""

from itertools import zip_longest

import numpy as np


def verify(target_logits, draft_token_ids) -> list[int]:
    """Return the emitted tokens: the accepted drafts, and the argmax of the row after them.

    Args:
        target_logits: [num_draft_tokens + 1, vocab], or probabilities, which have the same order.
        draft_token_ids: [num_draft_tokens] ids.

    The argmaxes of these rows are 1, 0 and 2:

    >>> rows = [[0.0, 9.0, 1.0], [5.0, 0.0, 1.0], [0.0, 1.0, 2.0]]
    >>> verify(rows, [1, 0]), verify(rows, [1, 2]), verify(rows, [0, 0])
    ([1, 0, 2], [1, 0], [1])
    """
    return compare((argmax(row) for row in target_logits), draft_token_ids)


def compare(target_token_ids, draft_token_ids) -> list[int]:
    """Return the target's own tokens, through the first that differs from the draft at its position.

    Args:
        target_token_ids: [num_draft_tokens + 1], the target's token at each row; tokens after the first difference are
            not read.
        draft_token_ids: [num_draft_tokens].

    >>> compare([4, 2, 7], [4, 2]), compare([4, 2, 7], [4, 3])
    ([4, 2, 7], [4, 2])
    """
    emitted = []
    for token, draft in zip_longest(target_token_ids, draft_token_ids):  # after all drafts the draft is None
        emitted.append(token)
        if token != draft:
            break
    return emitted


def argmax(logits) -> int:
    """Return the lowest id among the largest logits.

    >>> argmax([1.0, 3.0, 2.0, 3.0])
    1
    """
    return int(np.argmax(logits))
