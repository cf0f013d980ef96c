"""Synthetic acceptance in PyTorch: the work of a real method, its verdicts replaced by scheduled ones."""

from torch import Tensor

from specdecode.eager import probabilistic, strict
from specdecode.eager.steps import Steps


def verify(steps: Steps) -> Tensor:
    """Accept the draft at offset i with probability `steps.conditional_rates[i]`; emit what the real method would.

    The real method is probabilistic, or strict where there are no draft logits. Its accept tests are computed and thrown
    away: a load test is to cost what serving costs.

    Args:
        steps: the batch, its schedule and its running state.

    Returns:
        [batch] int64: the token after the accepted drafts.
    """
    uniforms = steps.uniforms()

    def verdict(offset: int, _: Tensor) -> Tensor:
        return uniforms[:, offset] <= steps.conditional_rates[offset]

    if steps.draft_logits is None:
        return strict.verify(steps, verdict)
    return probabilistic.verify(steps, verdict)
