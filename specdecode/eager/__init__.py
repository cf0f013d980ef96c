"""The eager backend: batched PyTorch for any device and float dtype, no loop over requests.

On the CPU only the rows that matter are computed: not those after a rejection, and no softmax for greedy requests. On other
devices counting them would mean waiting for the device, so every row is computed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch
from specdecode.eager import block, probabilistic, strict, synthetic
from specdecode.eager.logprobs import emitted_logprobs
from specdecode.eager.packed import mark_invalid, unpack
from specdecode.eager.steps import Steps, row_temperature, seeds_and_positions
from specdecode.eager.truncation import row_sampling
from specdecode.synthetic import AcceptanceSchedule

METHODS: dict[str, Callable[[Steps], SamplerOutput]] = {
    "strict": strict.verify,
    "probabilistic": probabilistic.verify,
    "block": block.verify,
    "synthetic": synthetic.verify,
}


@torch.no_grad()
def verify(method: str, batch: VerificationBatch, schedule: AcceptanceSchedule | None = None) -> SamplerOutput:
    """Run one verification step."""
    if method == "strict":  # it ignores draft logits: not even their dtype may change a result
        batch = batch._replace(draft_logits=None, draft_logsumexp=None, draft_temperature=None)
    has_rows = None
    if batch.packing is not None:
        batch, has_rows = unpack(batch, batch.packing)
    steps = Steps(batch, schedule)
    if batch.shard is not None:
        from specdecode.eager.sharded import ShardedRows

        steps.sharded = ShardedRows(steps, batch.shard)
    output = METHODS[method](steps)
    if batch.logprobs is not None:
        of_tokens = emitted_logprobs(steps, output.token_ids, output.num_accepted, batch.logprobs)
        output = output._replace(logprobs=of_tokens)
    return output if has_rows is None else mark_invalid(output, has_rows)


@torch.no_grad()
def sample(batch: RowBatch, domains: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row.

    Returns:
        [batch] int64 token ids; [batch] float32 logsumexp(logits / temperature) of what is kept; [batch] int64 the last
        tokens kept, None if rows are not truncated.
    """
    temperature, greedy = row_temperature(batch.temperature, batch.logits)
    requests = torch.arange(len(batch.logits), device=batch.logits.device)
    seeds, positions = seeds_and_positions(batch, requests)
    vocab = batch.logits.shape[-1] if batch.shard is None else batch.shard.vocab_size
    sampling = row_sampling(temperature, batch.truncation, vocab)
    if batch.shard is not None:
        from specdecode.eager.sharded import sample_rows

        return sample_rows(batch.shard, batch.logits, sampling, seeds, positions, greedy, domains)
    token_ids, logsumexp, _, *cutoff = strict.sample(batch.logits, sampling, seeds, positions, greedy, domains)
    return token_ids, logsumexp.to(torch.float32), cutoff[0] if cutoff else None
