"""Probabilistic in PyTorch: accept by likelihood ratio, repair with the residual."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdecode.batch import on_host
from specdecode.eager.greedy import argmax
from specdecode.eager.selection import Rows, block_sums, by_chunks, centre, fill, log_sum, select
from specdecode.eager.steps import Steps
from specdecode.eager.strict import sample
from specdecode.noise import SELECT

LARGEST_LOGSUMEXP = 256.0
"""Beyond this a float32 logsumexp may be off by more than 1.5e-5."""


def logprob(logits: Tensor, token_ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of one token per row, [rows], and whether the row has nothing to choose from."""
    scaled, peak = centre(logits, temperature)
    picked = scaled.gather(1, token_ids[:, None]).squeeze(1)
    return picked - log_sum(scaled.exp_()), peak == -torch.inf


def target_logprob(steps: Steps, rows: Rows, offset: int) -> tuple[Tensor, Tensor]:
    """Return log p(x) of each row's draft, and whether its target row has nothing to choose from."""
    token_ids, temperature = steps.draft_token_ids[rows, offset], steps.temperature[rows]
    target, invalid = by_chunks(logprob, steps.vocab, steps.target_logits[rows, offset], token_ids, temperature)
    return target, invalid


def draft_logprob(steps: Steps, rows: Rows, offset: int) -> Tensor:
    """Return log q(x) of each row's draft: 0 for a deterministic drafter."""
    if steps.draft_logits is None:
        return torch.zeros_like(steps.temperature[rows])
    if steps.draft_logsumexp is None:
        return read_draft_logprob(steps, rows, offset)[0]
    logit = steps.draft_logits[steps.requests, offset, steps.draft_token_ids[:, offset]]
    logsumexp = steps.draft_logsumexp[:, offset].to(steps.temperature.dtype)
    logprobs = logit / steps.temperature - logsumexp
    # A row whose logsumexp is known need not be read, unless that is so large that float32 has rounded away what counts.
    asked = torch.zeros_like(steps.standing).index_fill_(0, steps.requests[rows], True)
    asked &= logsumexp.abs() > LARGEST_LOGSUMEXP
    fill((logprobs,), asked, lambda rows: read_draft_logprob(steps, rows, offset))
    return logprobs[rows]


def read_draft_logprob(steps: Steps, rows: Rows, offset: int) -> tuple[Tensor, ...]:
    """Return log q(x) of each row's draft from the row itself, as the only one of a tuple."""
    token_ids, temperature = steps.draft_token_ids[rows, offset], steps.temperature[rows]
    assert steps.draft_logits is not None
    return by_chunks(logprob, steps.vocab, steps.draft_logits[rows, offset], token_ids, temperature)[:1]


def excess_weights(target: Tensor, draft: Tensor, temperature: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights proportional to max(0, c p - q), and by the same factor to c p.

    max(0, c p - q) = c p (1 - q / (c p)) where q < c p, and log(q / p) keeps its relative precision where p and q are close.

    Args:
        target: [rows, vocab] raw logits.
        draft: [rows, vocab] raw logits.
        temperature: [rows], > 0.
        log_ratio: [rows] log c, <= 0.

    Returns:
        Two of [rows, vocab].
    """
    target_scaled, target_peak = centre(target, temperature)
    draft_scaled, draft_peak = centre(draft, temperature)
    # What is close is subtracted before anything rounds it. Infinite logits are point masses, which `centre` knows about.
    difference = draft.to(temperature.dtype) - target.to(temperature.dtype)
    difference.sub_((draft_peak - target_peak)[:, None]).div_(temperature[:, None])
    difference = torch.where(difference.isfinite(), difference, draft_scaled - target_scaled)
    difference.nan_to_num_(nan=0, posinf=torch.inf, neginf=-torch.inf)  # NaN: p = q = 0
    target_weights = target_scaled.exp_()
    # log(sum of q's weights / sum of p's), by log1p(sum of p expm1(difference)) where that is more precise.
    log_sum_ratio = log_sum(draft_scaled.exp_()) - log_sum(target_weights)
    close = difference.abs().amax(dim=1) <= 1
    if not on_host(close) or close.any():
        change = block_sums(difference.expm1().mul_(target_weights)).sum(dim=1) / block_sums(target_weights).sum(dim=1)
        log_sum_ratio = torch.where(close, change.log1p(), log_sum_ratio)
    log_quotient = difference.sub_((log_sum_ratio + log_ratio)[:, None]).clamp_(max=0)
    return log_quotient.expm1_().neg_().mul_(target_weights), target_weights


def residual_weights(
    target: Tensor, draft: Tensor | None, temperature: Tensor, token_ids: Tensor, log_ratio: Tensor
) -> Tensor:
    """Return weights proportional to max(0, c p - q), or to p where nothing is left.

    Args:
        target: [rows, vocab] raw logits.
        draft: [rows, vocab] raw logits, or None for the point mass on the rejected draft.
        temperature: [rows], > 0.
        token_ids: [rows] the rejected drafts.
        log_ratio: [rows] log c, <= 0.

    Returns:
        [rows, vocab] weights.
    """
    if draft is None:
        target_weights = centre(target, temperature)[0].exp_()
        weights = target_weights.scatter(1, token_ids[:, None], 0)
    else:
        weights, target_weights = excess_weights(target, draft, temperature, log_ratio)
    empty = weights.amax(dim=1, keepdim=True) == 0
    if on_host(empty) and not empty.any():
        return weights
    return torch.where(empty, target_weights, weights)


def recover(steps: Steps, rows: Rows, log_ratio: Tensor) -> tuple[Tensor, ...]:
    """Draw the recovered token of requests whose draft at `num_accepted` was rejected, [rows] int64."""

    def draw(requests: Tensor, offset: Tensor, log_ratio: Tensor) -> tuple[Tensor, ...]:
        # Where every draft stood there is no draft row: take the last one, whose result is discarded.
        draft_offset = offset.clamp(max=steps.num_draft_tokens - 1)
        draft = None if steps.draft_logits is None else steps.draft_logits[requests, draft_offset]
        token_ids, temperature = steps.draft_token_ids[requests, draft_offset], steps.temperature[requests]
        weights = residual_weights(steps.target_logits[requests, offset], draft, temperature, token_ids, log_ratio)
        positions = steps.positions[requests] + offset
        return (select(weights, block_sums(weights), steps.seeds[requests], positions, SELECT),)

    offsets = steps.num_accepted[rows].to(torch.int64)
    return by_chunks(draw, steps.vocab, steps.requests[rows], offsets, log_ratio[rows])


def emit(steps: Steps, log_ratio: Tensor) -> Tensor:
    """Return the token after each request's accepted drafts, [batch] int64: recovered where one was rejected, or bonus.

    Args:
        steps: the batch, judged.
        log_ratio: [batch] log c, <= 0; a recovered token is drawn from max(0, c p - q).
    """
    emitted = torch.zeros_like(steps.seeds)

    def draw(rows: Rows) -> tuple[Tensor, Tensor]:
        offset = steps.num_accepted[rows].to(torch.int64)
        logits, positions = steps.target_logits[steps.requests[rows], offset], steps.positions[rows] + offset
        token_ids, _, invalid = sample(logits, steps.temperature[rows], steps.seeds[rows], positions, steps.kinds)
        return token_ids, invalid | steps.invalid[rows]

    rejected = (steps.temperature > 0) & (steps.num_accepted < steps.has_draft.sum(dim=1))
    fill((emitted, steps.invalid), ~rejected, draw)
    if steps.num_draft_tokens > 0 and steps.kinds.random:
        fill((emitted,), rejected, lambda rows: recover(steps, rows, log_ratio))
    return emitted


def verify(steps: Steps, verdict: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
    """Accept drafts by likelihood ratio up to the first rejection; return the recovered or bonus token.

    Args:
        steps: the batch and its running state.
        verdict: replaces the accept test by another one, given the position's offset and the test's result.

    Returns:
        [batch] int64: the token after the accepted drafts.
    """
    log_uniforms = steps.uniforms().to(steps.temperature.dtype).log()
    greedy = steps.temperature == 0
    for offset in range(steps.num_draft_tokens):
        matters = steps.standing & steps.has_draft[:, offset]
        accepted = torch.zeros_like(steps.standing)

        def accept(rows: Rows, offset: int = offset) -> tuple[Tensor, Tensor]:
            target, invalid = target_logprob(steps, rows, offset)
            draft = draft_logprob(steps, rows, offset)
            possible = (target > -torch.inf) & (draft > -torch.inf)
            return possible & (log_uniforms[rows, offset] <= target - draft), invalid | steps.invalid[rows]

        def match(rows: Rows, offset: int = offset) -> tuple[Tensor, Tensor]:
            token_ids, invalid = by_chunks(argmax, steps.vocab, steps.target_logits[rows, offset])
            return token_ids == steps.draft_token_ids[rows, offset], invalid | steps.invalid[rows]

        if steps.kinds.random:
            fill((accepted, steps.invalid), matters & ~greedy, accept)
        if steps.kinds.greedy:
            fill((accepted, steps.invalid), matters & greedy, match)
        steps.advance(offset, accepted if verdict is None else verdict(offset, accepted))
    return emit(steps, torch.zeros_like(steps.temperature))
