"""Strict in PyTorch: the target's own seeded sample at every position, compared with the draft."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdecode.eager.greedy import argmax
from specdecode.eager.selection import Rows, block_sums, by_chunks, centre, fill, select
from specdecode.eager.steps import Kinds, Steps
from specdecode.noise import SELECT


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    kinds: Kinds,
    domains: tuple[int, int] = SELECT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row: greedily where the temperature is 0, else from softmax(logits / temperature).

    Returns:
        [rows] int64 token ids, [rows] logsumexp(logits / temperature) (0 for greedy rows, which have no softmax), [rows]
        bool, whether the row has nothing to choose from.
    """

    def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        scaled, peak = centre(logits, temperature)
        weights = scaled.exp_()
        sums = block_sums(weights)
        token_ids = select(weights, sums, seeds, positions, domains)
        return token_ids, peak / temperature + sums.sum(dim=1).log(), peak == -torch.inf

    token_ids, logsumexp = torch.zeros_like(seeds), torch.zeros_like(temperature)
    invalid = torch.zeros_like(seeds, dtype=torch.bool)
    greedy, vocab = temperature == 0, logits.shape[1]
    if kinds.random:
        fill(
            (token_ids, logsumexp, invalid),
            ~greedy,
            lambda rows: by_chunks(draw, vocab, logits[rows], temperature[rows], seeds[rows], positions[rows]),
        )
    if kinds.greedy:
        fill((token_ids, invalid), greedy, lambda rows: by_chunks(argmax, vocab, logits[rows]))
    return token_ids, logsumexp, invalid


def verify(steps: Steps, verdict: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
    """Accept drafts while each is the target's own sample; return the target's own sample at the first mismatch.

    Args:
        steps: the batch and its running state.
        verdict: replaces the comparison by another one, given the position's offset and the comparison's result.

    Returns:
        [batch] int64: the token after the accepted drafts.
    """
    emitted = torch.zeros_like(steps.seeds)
    for offset in range(steps.num_draft_tokens + 1):

        def draw(rows: Rows, offset: int = offset) -> tuple[Tensor, Tensor]:
            logits, positions = steps.target_logits[rows, offset], steps.positions[rows] + offset
            token_ids, _, invalid = sample(logits, steps.temperature[rows], steps.seeds[rows], positions, steps.kinds)
            return token_ids, invalid | steps.invalid[rows]

        fill((emitted, steps.invalid), steps.standing, draw)
        if offset < steps.num_draft_tokens:
            agreed = emitted == steps.draft_token_ids[:, offset]
            steps.advance(offset, agreed if verdict is None else verdict(offset, agreed))
    return emitted
