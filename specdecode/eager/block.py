"""Block verification in PyTorch: accept the longest block of drafts that passes its test, then draw from the residual."""

from typing import Any

import torch
from torch import Tensor

from specdecode.batch import SamplerOutput
from specdecode.eager.inputs import Inputs
from specdecode.eager.probabilistic import emit, log_ratios
from specdecode.eager.residual import compare
from specdecode.eager.selection import block_sums, by_greedy, point_masses
from specdecode.eager.truncation import RowSampling, read


def running_ratio(before: Tensor, log_ratio: Tensor) -> Tensor:
    """Return log c_i = min(0, log c_{i-1} + log(p(x_i) / q(x_i)))."""
    return (before + log_ratio).clamp(max=0)


def residual_mass(
    target: Tensor,
    draft: Tensor,
    sampling: RowSampling,
    draft_sampling: RowSampling,
    log_running_ratio: Tensor,
    greedy: Tensor | None = None,
) -> Tensor:
    """Return A = sum max(0, c p - q) of each row.

    Args:
        target: [..., vocab] raw logits.
        draft: [..., vocab] raw logits.
        sampling: [...] or broadcastable to it, how the target samples.
        draft_sampling: [...] or broadcastable to it, how drafts were drawn.
        log_running_ratio: [...] log c, <= 0.
        greedy: [...] bool or broadcastable to it, whether the request is greedy; None if no request is.
    """
    rows, _ = read((target, draft), (sampling, draft_sampling))
    comparison, _ = compare(point_masses(rows, greedy), sampling.temperature)
    mass = block_sums(comparison.residual_weights(log_running_ratio)).sum(dim=-1)
    return log_running_ratio.exp() * (mass / comparison.target_sum)


def acceptance_probability(log_running_ratio: Tensor, mass: Tensor) -> Tensor:
    """Return h = A / (A + 1 - c), for log c < 0."""
    return mass / (mass - log_running_ratio.expm1())


def acceptance_probabilities(inputs: Inputs, log_running_ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """Return h_i of all i < K, given log c_i and log(p(x) / q(x)) of the draft after the first i."""
    if inputs.draft_logits is None:  # A = c (1 - p(x)) of the draft x at that row
        return acceptance_probability(log_running_ratio, log_running_ratio.exp() * -log_ratio.expm1())

    def masses(*tensors: Any) -> tuple[Tensor]:
        return (residual_mass(*tensors),)

    def of_point_mass(*tensors: Any) -> tuple[Tensor]:
        return (torch.zeros_like(tensors[4]),)  # c is 1 or 0: no mass is needed

    target, draft = inputs.target_logits[:, 1:-1], inputs.draft_logits[:, 1:]
    samplings = inputs.sampling.at(slice(None), None), inputs.draft_sampling.at(slice(None), None)
    logits_each = 2 * target.shape[1:].numel()
    (mass,) = by_greedy(inputs.greedy, masses, of_point_mass, logits_each, target, draft, *samplings, log_running_ratio)
    return acceptance_probability(log_running_ratio, mass)


def longest_accepted(inputs: Inputs, log_running_ratios: Tensor, log_ratios: Tensor) -> Tensor:
    """Return the largest i with eta_i <= h_i, [batch] int64, or 0, given log c_i and log(p(x_i) / q(x_i)) of all drafts."""
    num_drafts, counts = inputs.num_drafts[:, None], inputs.offsets[1:]
    log_uniforms = inputs.log_uniforms(fresh=True)
    accepted = (log_uniforms <= log_running_ratios) & (counts <= num_drafts)
    if inputs.num_draft_tokens > 1:
        # h <= c, and h = c if no draft follows or if c = 1. So only the other drafts with eta <= c need a residual mass.
        needed = (accepted & (counts < num_drafts) & (log_running_ratios < 0))[:, :-1]
        h = acceptance_probabilities(inputs, log_running_ratios[:, :-1], log_ratios[:, 1:])
        accepted[:, :-1] &= (log_uniforms[:, :-1] <= h.log()) | ~needed
    return (accepted * counts).amax(dim=1)


def verify(inputs: Inputs) -> SamplerOutput:
    """Accept the longest block of drafts that passes its test; then emit a recovered or bonus token."""
    ratios, is_empty = log_ratios(inputs)
    running = [torch.zeros_like(inputs.temperature)]
    for offset in range(inputs.num_draft_tokens):
        running.append(running_ratio(running[-1], ratios[:, offset]))
    log_running_ratios = torch.stack(running, dim=1)
    num_accepted = inputs.num_drafts
    if inputs.num_draft_tokens > 0:
        num_accepted = longest_accepted(inputs, log_running_ratios[:, 1:], ratios)
    emitted, emitted_is_empty = emit(
        inputs, num_accepted, log_running_ratios.gather(1, num_accepted[:, None]).squeeze(1)
    )
    return inputs.output(num_accepted, emitted, is_empty, emitted_is_empty)
