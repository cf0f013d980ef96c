"""Truncation: top-k, top-p and min-p leave out the unlikely tokens of a row before a token is drawn.

All three keep the first tokens of one order: the largest logit first, and of equal logits the lowest id first. So one token
says what is kept of a row, the *cutoff*: the last one kept.

In this order of rules, p = softmax(logits / T):

1. min_p: keep v iff p(v) >= min_p max p.
2. top_k: of these keep the first k; of equal logits those with lower ids.
3. top_p: of these keep v iff the mass (sum of probabilities) before it is less than top_p times their whole mass. So the
   token that reaches top_p is kept, and the mass kept is at least that share.

At least one token is kept. The rest of this package needs no other change than this: a logit beyond the cutoff becomes
-inf. Then softmax gives the truncated distribution p', normalised over what is kept, and every method is exact for p' as it
is for any p. The drafts' distribution q is truncated by its own row.

Left out: nothing. Sources: top-k in Fan, Lewis, Dauphin, "Hierarchical neural story generation" (2018); top-p (nucleus
sampling) in Holtzman et al., "The curious case of neural text degeneration" (2020), section 3.1; min-p in Nguyen et al.,
"Turning up the heat: min-p sampling for creative and coherent LLM outputs" (2025). The order of the rules is vLLM's.
"""

from typing import NamedTuple

import numpy as np

from reference.selection import Choice, log_softmax


class Sampling(NamedTuple):
    """How tokens are drawn from a row."""

    temperature: float = 1.0
    """0 is greedy; then nothing else matters."""

    top_k: int | None = None
    """None, 0 or the vocabulary size and more: all tokens."""

    top_p: float = 1.0
    min_p: float = 0.0


def token_order(logits):
    """Return the token ids, the largest logit first and of equal logits the lowest id. NaN counts as -inf.

    >>> token_order([1.0, 3.0, np.nan, 3.0]).tolist()
    [1, 3, 0, 2]
    """
    logits = np.array(logits, dtype=np.float64)
    logits[np.isnan(logits)] = -np.inf
    return np.argsort(-logits, kind="stable")


def num_kept(logprobs, sampling: Sampling) -> Choice:
    """Return how many tokens are kept, given their log-probabilities in the order of truncation.

    Only the comparisons of min_p and top_p round. The margin is how far the closest one was from the opposite result, in
    nats.

    >>> logprobs = np.log([0.4, 0.3, 0.2, 0.1])
    >>> num_kept(logprobs, Sampling(min_p=0.5)).index, num_kept(logprobs, Sampling(top_k=3)).index
    (3, 3)
    >>> num_kept(logprobs, Sampling(top_p=0.65)).index, num_kept(logprobs, Sampling(top_p=0.75)).index
    (2, 3)

    Of the first three the mass is 0.9, of which 0.75 is 0.675: two tokens are enough.

    >>> num_kept(logprobs, Sampling(top_k=3, top_p=0.75)).index
    2
    """
    count, margin = int(np.isfinite(logprobs).sum()), np.inf
    if sampling.min_p > 0:
        slack = logprobs[:count] - logprobs[0] - np.log(sampling.min_p)
        count, margin = int((slack >= 0).sum()), float(np.abs(slack).min())
    if sampling.top_k:
        count = min(count, sampling.top_k)
    if sampling.top_p < 1:
        probs = np.exp(logprobs[:count])
        before = np.cumsum(probs) - probs
        slack = np.log(sampling.top_p * probs.sum()) - np.log(before[1:])  # the first is always kept
        count = 1 + int((slack > 0).sum())
        margin = min(margin, float(np.abs(slack).min(initial=np.inf)))
    return Choice(count, margin)


def truncate(logits, sampling: Sampling):
    """Return the logits with -inf where a token is left out, and the margin of that decision.

    >>> truncate(np.log([0.1, 0.4, 0.2, 0.3]), Sampling(top_p=0.65))[0].round(3).tolist()
    [-inf, -0.916, -inf, -1.204]
    >>> truncate([5.0, 5.0, 5.0], Sampling(top_k=2))[0].tolist()
    [5.0, 5.0, -inf]
    """
    logits = np.array(logits, dtype=np.float64)
    logprobs = log_softmax(logits, sampling.temperature)
    order = token_order(logits)
    kept = num_kept(logprobs[order], sampling)
    logits[order[kept.index :]] = -np.inf
    return logits, kept.margin


def truncate_rows(rows, sampling: Sampling):
    """Return each row truncated, and the margins of these decisions; rows may be None, of a drafter without logits.

    >>> truncate_rows([[1.0, 0.0], [0.0, 2.0]], Sampling(top_k=1))[0]
    [array([  1., -inf]), array([-inf,   2.])]
    """
    if rows is None or sampling[1:] == Sampling()[1:] or sampling.temperature == 0:
        return rows, [np.inf] * (0 if rows is None else len(rows))
    pairs = [truncate(row, sampling) for row in rows]
    return [row for row, _ in pairs], [margin for _, margin in pairs]


def cutoff(logits, sampling: Sampling) -> int:
    """Return the last token kept.

    >>> cutoff(np.log([0.1, 0.4, 0.2, 0.3]), Sampling(top_k=3))
    2
    """
    truncated, _ = truncate(logits, sampling)
    order = token_order(truncated)
    return int(order[max(1, int((truncated > -np.inf).sum())) - 1])
