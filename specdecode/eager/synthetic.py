"""Synthetic acceptance in PyTorch: the work of a real method, its verdicts replaced by scheduled ones."""

from torch import Tensor

from specdecode.eager import probabilistic, strict
from specdecode.eager.steps import Steps


def verify(steps: Steps, conditional_rates: Tensor) -> Tensor:
    """Accept the draft at offset i with probability `conditional_rates[i]`; emit what the real method would.

    The real method is probabilistic, or strict where there are no draft logits. Its accept tests are computed and thrown
    away: a load test is to cost what serving costs.

    Args:
        steps: the batch and its running state.
        conditional_rates: [>= num_draft_tokens] float32.

    Returns:
        [batch] int64: the token after the accepted drafts.
    """
    scheduled = steps.uniforms() <= conditional_rates[: steps.num_draft_tokens]

    def verdict(offset: int, _: Tensor) -> Tensor:
        return scheduled[:, offset]

    return (strict if steps.draft_logits is None else probabilistic).verify(steps, verdict)
