"""The eager backend: batched PyTorch for any device and float dtype, no loop over requests.

All rows are computed, a few requests at a time, including rows after a rejection and draft rows with a given
`draft_logsumexp`. Greedy requests skip the softmax on the CPU. On a device, counting them would require waiting.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdecode.batch import TARGET_ONLY, RowBatch, SamplerOutput, TreeBatch, TreeOutput, VerificationBatch
from specdecode.eager import block, probabilistic, strict, synthetic, tree
from specdecode.eager.adjustments import adjusted, adjusted_rows
from specdecode.eager.inputs import Inputs, row_temperature, seeds_and_positions
from specdecode.eager.logprobs import emitted_logprobs
from specdecode.eager.packed import mark_invalid, unpack
from specdecode.eager.top_logprobs import with_lists
from specdecode.eager.truncation import row_sampling
from specdecode.synthetic import AcceptanceSchedule

METHODS: dict[str, Callable[[Inputs], SamplerOutput]] = {
    "strict": strict.verify,
    "probabilistic": probabilistic.verify,
    "block": block.verify,
    "synthetic": synthetic.verify,
}


@torch.no_grad()
def verify(method: str, batch: VerificationBatch, schedule: AcceptanceSchedule | None = None) -> SamplerOutput:
    """Run one verification step."""
    if method not in METHODS:
        raise ValueError(f"backend: 'eager' has no method {method!r}: it is not in specdecode.eager.METHODS")
    if method in TARGET_ONLY:  # even the dtype of unused draft logits may not change a result
        batch = batch.without_draft_rows
    unpacked, has_rows = (batch, None) if batch.packing is None else unpack(batch, batch.packing)
    raw_logits = unpacked.target_logits
    batch = unpacked if batch.adjustments is None else adjusted(batch, unpacked)
    inputs = Inputs(batch, schedule)
    output = METHODS[method](inputs)
    if batch.logprobs is not None:
        logprobs = emitted_logprobs(inputs, raw_logits, output.token_ids, batch.logprobs)
        output = output._replace(logprobs=logprobs)
    if batch.has_lists:
        output = with_lists(inputs, raw_logits, output, batch)
    return output if has_rows is None else mark_invalid(output, has_rows)


@torch.no_grad()
def verify_tree(batch: TreeBatch) -> TreeOutput:
    """Verify one tree of drafts for each request."""
    return tree.walk_in_rounds(batch, tree.start(batch), verify, tree.advance)


@torch.no_grad()
def sample_rows(batch: RowBatch, domains: tuple[int, int], width: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row, or `width` siblings.

    Returns:
        [batch] or [batch, width] int64 token ids; [batch] float32 logsumexp(logits / temperature) of the tokens kept;
        [batch] int64 the last tokens kept, None if rows are not truncated.
    """
    logits = adjusted_rows(batch)
    temperature, greedy = row_temperature(batch.temperature, logits)
    requests = torch.arange(len(logits), device=logits.device)
    seeds, positions = seeds_and_positions(batch, requests)
    sampling = row_sampling(temperature, batch.truncation, logits.shape[-1])
    token_ids, logsumexp, _, *cutoff = strict.sample(logits, sampling, seeds, positions, greedy, domains)
    if width > 0:
        token_ids = tree.siblings(batch, width)
    return token_ids, logsumexp.to(torch.float32), cutoff[0] if cutoff else None
