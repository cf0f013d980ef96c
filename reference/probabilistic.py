"""Probabilistic verification: accept by likelihood ratio, and after a rejection draw from the residual.

The draft x was drawn from q. The output must be distributed as p.

1. Accept x with probability min(1, p(x) / q(x)).
2. After a rejection, draw the *recovered* token from the residual, which is proportional to max(0, p - q).
3. If every draft was accepted, draw a *bonus* token from p.

Token v is emitted as an accepted draft with probability q(v) min(1, p(v) / q(v)) = min(p(v), q(v)). A rejection has
probability Z = 1 - sum min(p, q) = sum max(0, p - q), and then v is emitted with probability max(0, p(v) - q(v)) / Z.
In all, v is emitted with probability min(p(v), q(v)) + max(0, p(v) - q(v)) = p(v): the output is exact for every p and
q. No exact method accepts a single draft drawn from q more often, because a token v that is both drafted and emitted
has probability min(p(v), q(v)) at most.

A deterministic drafter (n-gram look-up, greedy) is the point mass q(x) = 1. Then x is accepted with probability p(x), and
the residual is p without x, normalised.

The recovered token must not share noise with the draft, or the output is not distributed as p. So the two use different
domains, see [`selection`][reference.selection]. Left out: drafting several candidates per position. Sources: Leviathan,
Kalman, Matias (2023), algorithm 1; Chen et al., "Accelerating large language model decoding with speculative sampling"
(2023), algorithm 2.
"""

import numpy as np

from reference import Outcome, greedy, leading_drafts
from reference.philox import Domain, uniform
from reference.selection import Choice, is_invalid, log_softmax, sample, select
from reference.truncation import Sampling, truncate_rows


def acceptance_probability(target_prob, draft_prob):
    """Return min(1, p(x) / q(x)), and 0 if p(x) or q(x) is 0.

    >>> [acceptance_probability(p, q) for p, q in ((0.2, 0.5), (0.5, 0.2), (0.5, 0.0))]
    [0.4, 1, 0]
    """
    if target_prob == 0 or draft_prob == 0:
        return 0
    return min(1, target_prob / draft_prob)


def residual(target_probs, draft_probs):
    """Return max(0, p - q), normalised, or p itself if p - q is positive nowhere.

    >>> residual(np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.6, 0.3])).tolist()
    [1.0, 0.0, 0.0]
    >>> residual(np.array([0.5, 0.5]), np.array([0.5, 0.5])).tolist()
    [0.5, 0.5]
    """
    weights = np.maximum(0, target_probs - draft_probs)
    total = weights.sum()
    return weights / total if total > 0 else target_probs


def acceptance_rate(target_probs, draft_probs):
    """Return alpha = sum min(p, q), the probability that a draft drawn from q is accepted.

    >>> round(float(acceptance_rate(np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.6, 0.3]))), 12)
    0.6
    """
    return np.minimum(target_probs, draft_probs).sum()


def expected_tokens(alpha, num_draft_tokens: int):
    """Return the mean number of tokens that a step emits if each draft is accepted with probability alpha, independently.

    It is 1 + alpha + ... + alpha^K = (1 - alpha^(K+1)) / (1 - alpha); Leviathan et al. (2023), equation 1.

    >>> round(expected_tokens(0.8, 5), 2)
    3.69
    """
    return sum(alpha**i for i in range(num_draft_tokens + 1))


def spread(draft_logits, draft_vocab_ids, vocab_size: int):
    """Return a draft row over the target's tokens, where the draft model has tokens of its own: -inf where it has none.

    Draft id i is the target's token draft_vocab_ids[i]. Then q(v) = 0 for every token v that the draft model lacks, and
    nothing above asks for more. A row that is truncated is truncated before.

    >>> spread([0.5, 1.5], draft_vocab_ids=[3, 1], vocab_size=4).tolist()
    [-inf, 1.5, -inf, 0.5]
    """
    row = np.full(vocab_size, -np.inf)
    row[np.asarray(draft_vocab_ids)] = draft_logits
    return row


def draft_log_softmax(draft_logits, offset: int, token: int, vocab_size: int, temperature: float):
    """Return log q at one position: the point mass on the draft if the drafter gave no logits."""
    if draft_logits is None:
        return np.where(np.arange(vocab_size) == token, 0.0, -np.inf)
    return log_softmax(draft_logits[offset], temperature)


def accepts(log_uniform: float, target_logprob: float, draft_logprob: float) -> Choice:
    """Decide whether to accept a draft: log u <= log p(x) - log q(x).

    The logarithms are compared because p(x) and q(x) can round to 0 where their ratio is still an ordinary number.

    >>> [accepts(np.log(u), np.log(0.2), np.log(0.5)).index for u in (0.3, 0.5)]
    [1, 0]
    >>> accepts(np.log(1e-9), np.log(0.5), -np.inf).index
    0
    """
    if target_logprob == -np.inf or draft_logprob == -np.inf:
        return Choice(0, np.inf)
    slack = target_logprob - draft_logprob - log_uniform
    return Choice(int(slack >= 0), abs(slack))


def recover(target_logprobs, draft_logprobs, seed: int, position: int) -> Choice:
    """Draw the recovered token from the residual.

    >>> recover(np.log([0.5, 0.3, 0.2]), np.log([0.1, 0.6, 0.3]), seed=0, position=0).index
    0
    """
    probs = residual(np.exp(target_logprobs), np.exp(draft_logprobs))
    with np.errstate(divide="ignore"):
        return select(np.log(probs), seed, position)


def verify(
    target_logits,
    draft_token_ids,
    draft_logits=None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    draft_sampling: Sampling | None = None,
    seed: int = 0,
    position: int = 0,
) -> Outcome:
    """Accept drafts by likelihood ratio until the first rejection, then emit a recovered or a bonus token.

    Args:
        target_logits: [num_draft_tokens + 1, vocab] raw logits.
        draft_token_ids: [num_draft_tokens] ids; the first -1 ends them.
        draft_logits: [num_draft_tokens, vocab] raw logits that the drafts were drawn from; None for a deterministic drafter.
        temperature: 0 is greedy.
        top_k: see [`truncation`][reference.truncation].
        top_p: likewise.
        min_p: likewise.
        draft_sampling: how the drafts were drawn; None: as the target samples.
        seed: the request's seed.
        position: absolute position of the first draft token.

    >>> target, draft = np.log([[0.9, 0.1], [0.5, 0.5]]), np.log([[0.5, 0.5]])
    >>> verify(target, [0], draft, seed=1).token_ids  # 0.9 / 0.5 > 1: always accepted
    [0, 1]
    >>> verify(target, [1], draft, seed=1).token_ids  # accepted one time in five; here rejected, the residual is token 0
    [0]
    """
    if temperature == 0:
        return greedy.verify(target_logits, draft_token_ids)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    draft_sampling = draft_sampling or sampling
    target_logits, margins = truncate_rows(target_logits, sampling)
    draft_logits, draft_margins = truncate_rows(draft_logits, draft_sampling)
    vocab_size = len(target_logits[0])
    drafts = leading_drafts(draft_token_ids, vocab_size)
    margin, invalid = np.inf, False
    for offset, token in enumerate(drafts):
        target_logprobs = log_softmax(target_logits[offset], temperature)
        draft_logprobs = draft_log_softmax(draft_logits, offset, token, vocab_size, draft_sampling.temperature)
        invalid |= is_invalid(target_logits[offset])
        margin = min(margin, margins[offset], *draft_margins[offset : offset + 1])

        log_uniform = np.log(uniform(seed, position + offset, 0, Domain.ACCEPT))
        decision = accepts(log_uniform, target_logprobs[token], draft_logprobs[token])
        margin = min(margin, decision.margin)
        if not decision.index:
            recovered = recover(target_logprobs, draft_logprobs, seed, position + offset)
            return Outcome([*drafts[:offset], recovered.index], min(margin, recovered.margin), invalid)

    last_row = target_logits[len(drafts)]
    bonus = sample(last_row, temperature=temperature, seed=seed, position=position + len(drafts))
    margin = min(margin, margins[len(drafts)], bonus.margin)
    return Outcome([*drafts, bonus.index], margin, invalid | is_invalid(last_row))
