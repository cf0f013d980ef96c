"""The eager backend: batched PyTorch for any device and float dtype, no loop over requests.

On the CPU only the rows that matter are computed: not those after a rejection, and no softmax for greedy requests. On
other devices counting them would mean waiting for the device, so every row is computed and masked.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch
from specdecode.eager import probabilistic, strict, synthetic
from specdecode.eager.steps import Steps, row_temperature
from specdecode.noise import Domain
from specdecode.synthetic import AcceptanceSchedule

METHODS: dict[str, Callable[[Steps], Tensor]] = {
    "strict": strict.verify,
    "probabilistic": probabilistic.verify,
    "synthetic": synthetic.verify,
}


@torch.no_grad()
def verify(method: str, batch: VerificationBatch, schedule: AcceptanceSchedule | None = None) -> SamplerOutput:
    """Run one verification step."""
    steps = Steps(batch, schedule)
    return steps.output(METHODS[method](steps))


@torch.no_grad()
def sample(batch: RowBatch, domains: tuple[Domain, Domain]) -> tuple[Tensor, Tensor]:
    """Draw one token per row; return [batch] int64 token ids and [batch] float32 logsumexp(logits / temperature)."""
    temperature = row_temperature(batch.temperature, batch.logits)
    token_ids, logsumexp, _ = strict.sample(batch.logits, temperature, batch.seeds, batch.positions, domains)
    return token_ids, logsumexp.to(torch.float32)
