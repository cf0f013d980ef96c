"""Block verification in PyTorch: accept the longest block of drafts that stands, repair with the residual."""

import torch
from torch import Tensor

from specdecode.eager.greedy import argmax
from specdecode.eager.probabilistic import draft_logprob, emit, excess_weights, target_logprob
from specdecode.eager.selection import Rows, block_sums, by_chunks, fill
from specdecode.eager.steps import Steps


def log_residual_mass(target: Tensor, draft: Tensor, temperature: Tensor, log_ratio: Tensor) -> tuple[Tensor]:
    """Return log sum max(0, c p - q) of each row, [rows], as the only one of a tuple.

    Args:
        target: [rows, vocab] raw logits.
        draft: [rows, vocab] raw logits.
        temperature: [rows], > 0.
        log_ratio: [rows] log c, <= 0.
    """
    excess, total = (
        block_sums(weights).sum(dim=1) for weights in excess_weights(target, draft, temperature, log_ratio)
    )
    return (log_ratio + (excess / total).log(),)


def log_acceptance(log_ratio: Tensor, log_mass: Tensor) -> Tensor:
    """Return log h = log(A / (A + 1 - c)), [rows], of log c < 0 and log A, each [rows]."""
    return log_mass - (log_mass.exp() - log_ratio.expm1()).log()


class Ratios:
    """The running ratios of a batch, and what they were made from."""

    def __init__(self, steps: Steps) -> None:
        size, drafts = steps.has_draft.shape
        self.log_ratio = steps.temperature.new_zeros(size, drafts + 1)
        """log p_i after i drafts; 0 for greedy requests, and whatever it may be behind a ratio of 0."""
        self.target_logprob = steps.temperature.new_zeros(size, drafts)
        """log p(x) of each draft."""
        self.empty = steps.has_draft.new_zeros(size, drafts)
        """Whether the target row at a draft has nothing to choose from."""


def run_ratios(steps: Steps) -> Ratios:
    """Follow each request's running ratio up to a draft that makes it 0, and set `num_accepted` to the drafts before it.

    For greedy requests, whose ratio is 0 from the first draft on that is not the argmax, that is the number accepted.
    """
    ratios, greedy = Ratios(steps), steps.temperature == 0
    for offset in range(steps.num_draft_tokens):
        matters = steps.standing & steps.has_draft[:, offset]
        possible = torch.zeros_like(steps.standing)

        def weigh(rows: Rows, offset: int = offset) -> tuple[Tensor, ...]:
            target, empty = target_logprob(steps, rows, offset)
            draft = draft_logprob(steps, rows, offset)
            log_ratio = (ratios.log_ratio[rows, offset] + (target - draft)).clamp(max=0)
            return (target > -torch.inf) & (draft > -torch.inf), empty, log_ratio, target

        def match(rows: Rows, offset: int = offset) -> tuple[Tensor, ...]:
            token_ids, empty = by_chunks(argmax, steps.vocab, steps.target_logits[rows, offset])
            return token_ids == steps.draft_token_ids[rows, offset], empty

        outputs = (possible, ratios.empty[:, offset], ratios.log_ratio[:, offset + 1], ratios.target_logprob[:, offset])
        if steps.kinds.random:
            fill(outputs, matters & ~greedy, weigh)
        if steps.kinds.greedy:
            fill(outputs[:2], matters & greedy, match)
        steps.advance(offset, possible)
    return ratios


def search(steps: Steps, ratios: Ratios) -> None:
    """Set `num_accepted` of random requests to the largest i with eta_i <= h_i, looking from the last draft down."""
    log_uniforms = steps.uniforms(fresh=True).to(steps.temperature.dtype).log()
    num_drafts, possible = steps.has_draft.sum(dim=1), steps.num_accepted
    undecided = steps.temperature > 0
    steps.num_accepted = possible.where(~undecided, 0)
    for count in range(steps.num_draft_tokens, 0, -1):
        log_ratio, log_uniform = ratios.log_ratio[:, count], log_uniforms[:, count - 1]
        # h is never above the ratio: most that fails does so without a residual mass.
        stands = undecided & (count <= possible) & (log_uniform <= log_ratio)

        def weigh(rows: Rows, count: int = count, log_ratio: Tensor = log_ratio) -> tuple[Tensor]:
            if steps.draft_logits is None:  # A = c (1 - p(x)) of the draft x at that row
                log_mass = log_ratio[rows] + (-ratios.target_logprob[rows, count].expm1()).log()
            else:
                logits = steps.target_logits[rows, count], steps.draft_logits[rows, count]
                scalars = steps.temperature[rows], log_ratio[rows]
                (log_mass,) = by_chunks(log_residual_mass, steps.vocab, *logits, *scalars)
            return (log_acceptance(log_ratio[rows], log_mass),)

        if count < steps.num_draft_tokens and steps.kinds.random:
            log_h = log_ratio.clone()
            fill((log_h,), stands & (count < num_drafts) & (log_ratio < 0), weigh)
            stands &= log_uniform <= log_h
        steps.num_accepted = steps.num_accepted.where(~stands, count)
        undecided &= ~stands


def verify(steps: Steps) -> Tensor:
    """Accept the longest block of drafts that stands; return the recovered or bonus token.

    Args:
        steps: the batch and its running state.

    Returns:
        [batch] int64: the token after the accepted drafts.
    """
    ratios = run_ratios(steps)
    search(steps, ratios)
    accepted = steps.num_accepted[:, None].to(torch.int64)
    offsets = torch.arange(steps.num_draft_tokens, device=accepted.device)
    steps.invalid |= (ratios.empty & (offsets <= accepted)).any(dim=1)
    return emit(steps, ratios.log_ratio.gather(1, accepted).squeeze(1))
