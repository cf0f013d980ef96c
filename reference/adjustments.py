"""Adjustments: a request's changes of the target's logits before a token is drawn: bias, penalties, forbidden tokens.

Five rules, in this order; each changes the logit l of a token as the previous rules have left it:

1. bias b: l + b.
2. repetition penalty r, of tokens of the prompt and of tokens emitted before: l / r if l > 0, else l r.
3. frequency penalty f, of a token emitted n times before: l - f n.
4. presence penalty g, of a token emitted before: l - g.
5. a token that is not allowed: -inf.

A row in the middle of a step belongs to the text with the drafts before that row. So these drafts count as emitted: token
1 below is not in the text, but it is the first draft of the step, and the row after it penalises it.

Verification is exact for the adjusted rows, without any change. Proof: the proofs of all methods hold for any p that
depends only on the text and the drafts before its row. The rules depend on nothing else, if n counts exactly these
drafts. If n also counted the draft that the row judges, or counted no drafts, p would not be the target's distribution at
that row. Drafts are judged by the q that they were drawn from, even if the drafter does not know the rules.

Sources: repetition penalty in Keskar et al., "CTRL: a conditional transformer language model for controllable generation"
(2019), section 4.1, which divides negative logits too. OpenAI's API, transformers and vLLM made the other rules common,
and the multiplication of negative logits. The order is vLLM's.
"""

from typing import NamedTuple

import numpy as np


class Adjustments(NamedTuple):
    """The adjustments of one request; the default values change nothing."""

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    in_prompt: np.ndarray | None = None
    """[vocab] bool: the tokens of the prompt."""

    output_counts: np.ndarray | None = None
    """[vocab] the number of times that each token was emitted before the step."""

    bias: dict[int, float] = {}  # noqa: RUF012 (a default that nobody changes)
    """The biases, by token id."""

    allowed: np.ndarray | None = None
    """[num_draft_tokens + 1, vocab] bool: the tokens that each row allows."""


def penalize(logits, counts, in_prompt, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0):
    """Return penalised logits, in the logits' dtype.

    Token 0 was emitted twice, token 1 is in the prompt.

    >>> logits, counts, in_prompt = np.array([3.0, -1.0, 2.0]), np.array([2, 0, 0]), np.array([False, True, False])
    >>> penalize(logits, counts, in_prompt, repetition_penalty=2.0).tolist()
    [1.5, -2.0, 2.0]
    >>> penalize(logits, counts, in_prompt, frequency_penalty=0.5, presence_penalty=0.25).tolist()
    [1.75, -1.0, 2.0]
    """
    repeated = logits * np.where(logits > 0, 1 / repetition_penalty, repetition_penalty).astype(logits.dtype)
    penalized = np.where(in_prompt | (counts > 0), repeated, logits)
    counts = counts.astype(logits.dtype)
    return penalized - frequency_penalty * counts - presence_penalty * np.minimum(counts, 1)


def adjust(logits, drafts, adjustments: Adjustments, row: int = 0):
    """Return a row of logits, adjusted, in its dtype.

    Args:
        logits: [vocab], the target's logits at this row.
        drafts: the drafts of the step before this row, which count as emitted.
        adjustments: of the request.
        row: the index of the row in the step.

    >>> adjust(np.array([1.0, 1.0, 1.0]), [1, 1], Adjustments(frequency_penalty=0.5, bias={2: -4.0})).tolist()
    [1.0, 0.0, -3.0]
    >>> adjust(np.array([1.0, 2.0]), [], Adjustments(allowed=np.array([[True, False]]))).tolist()
    [1.0, -inf]
    """
    adjusted = np.array(logits)
    for token, added in adjustments.bias.items():
        adjusted[token] += added
    counts = np.bincount(np.array(drafts, dtype=np.int64), minlength=len(adjusted))
    if adjustments.output_counts is not None:
        counts = counts + adjustments.output_counts
    in_prompt = np.zeros(len(adjusted), bool) if adjustments.in_prompt is None else adjustments.in_prompt
    adjusted = penalize(adjusted, counts, in_prompt, *adjustments[:3])
    if adjustments.allowed is not None:
        adjusted[~adjustments.allowed[row]] = -np.inf
    return adjusted
