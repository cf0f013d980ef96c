"""Truncation: top-k, top-p and min-p exclude the unlikely tokens of a row before a token is drawn.

Sort the tokens: the most likely first, and of equally likely tokens the lowest id first. Three rules, each applied to the
tokens that the rules before it have kept:

1. min_p: keep v iff p(v) >= min_p max p.
2. top_k: keep the first k.
3. top_p: keep v iff the mass (sum of probabilities) before it is less than top_p times the whole mass. So the token that
   reaches top_p is kept, and the mass kept is at least that share.

With `top_p` > 0 at least one token is kept. p', the truncated distribution, is p over the kept tokens, normalised.

Each rule keeps the first tokens of the order. So one token defines the kept set of a row: the *cutoff*, the last kept
token.

Verification is exact for p', without any change. Proof: the proofs of all methods hold for any p that depends on the text
and the drafts before its row alone, and for any q that the drafts were drawn from. p' is a function of p, so it depends on
nothing else; and if drafts were drawn from a truncated q', then q' is the q of the method. The two need not be truncated in
the same way.

Sources: top-k in Fan, Lewis, Dauphin, "Hierarchical neural story generation" (2018); top-p (nucleus
sampling) in Holtzman et al., "The curious case of neural text degeneration" (2020), section 3.1; min-p in Nguyen et al.,
"Turning up the heat: min-p sampling for creative and coherent LLM outputs" (2025). The order of the rules is vLLM's.
"""

import numpy as np


def truncate(probs, top_k: int | None = None, top_p=1, min_p=0):
    """Return p', the distribution over the kept tokens.

    Of (0.1, 0.4, 0.2, 0.3) min_p = 0.3 excludes tokens below 0.3 * 0.4 = 0.12: token 0. The mass of the others is 0.9,
    and top_p = 0.75 needs 0.75 * 0.9 = 0.675. Tokens 1 and 3 have 0.7: enough.

    >>> truncate(np.array([0.1, 0.4, 0.2, 0.3]), top_k=3, top_p=0.75, min_p=0.3).round(3).tolist()
    [0.0, 0.571, 0.0, 0.429]
    """
    order = token_order(probs)
    kept = order[: num_kept(probs[order], top_k, top_p, min_p)]
    truncated = np.zeros_like(probs)
    truncated[kept] = probs[kept]
    return truncated / truncated.sum()


def token_order(scores):
    """Return the token ids, the largest score first and of equal scores the lowest id. Logits and probabilities order alike.

    >>> token_order(np.array([1.0, 3.0, 2.0, 3.0])).tolist()
    [1, 3, 2, 0]
    """
    return np.argsort(-scores, kind="stable")


def num_kept(probs, top_k: int | None = None, top_p=1, min_p=0) -> int:
    """Return the number of kept tokens, given the probabilities in the order of truncation.

    >>> probs = np.array([0.4, 0.3, 0.2, 0.1])
    >>> num_kept(probs, min_p=0.5), num_kept(probs, top_k=3)
    (3, 3)
    >>> num_kept(probs, top_p=0.65), num_kept(probs, top_p=0.75), num_kept(probs, top_k=3, top_p=0.75)
    (2, 3, 2)
    """
    probs = probs[(probs > 0) & (probs >= min_p * probs[0])]
    probs = probs[: top_k or None]
    if top_p < 1:
        before = np.cumsum(probs) - probs
        probs = probs[before < top_p * probs.sum()]
    return len(probs)


def cutoff(probs, top_k: int | None = None, top_p=1, min_p=0) -> int:
    """Return the last kept token.

    >>> cutoff(np.array([0.1, 0.4, 0.2, 0.3]), top_k=3)
    2
    """
    order = token_order(probs)
    return int(order[num_kept(probs[order], top_k, top_p, min_p) - 1])
