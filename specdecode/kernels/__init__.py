"""The Triton backend: fused kernels for NVIDIA GPUs.

A step is read, search where a method needs it, emit. `read` reads the rows and leaves 8 bytes of statistics for each block of
1,024 logits; in a large batch it also decides, so as to read no row after a rejection. `emit` decides what is left, draws the
token of each request from the statistics and a few blocks, and writes the output. Between them `block` verification compares
residual masses.

| file | what is in it |
|---|---|
| `arguments` | the bundles that kernels receive: the shape and type of every field |
| `plan`, `launch` | from sizes to launches, with the tuned numbers; signature, compilation, launch |
| `read`, `emit` | the two kernels of every step |
| `rows`, `distribution` | where rows lie, block statistics; from these to softmax, NaN and infinities included |
| `selection`, `search` | how a token is drawn; which blocks are looked at, in the order of their bounds |
| `state` | at which row a request stops, and its output |
| `greedy`, `strict`, `probabilistic`, `block`, `synthetic`, `philox` | what each method adds |

No program waits for another: what must come after everything else is done by the last program to finish, or by the next
launch. So nothing can hang. Nothing outlives a call but what never changes: compiled code, plans, a schedule's rates. So
calls on several streams, from several threads and in graphs do not meet. Arithmetic is in float32 whatever the logits are.
"""

import torch
from torch import Tensor

from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch
from specdecode.kernels import block, probabilistic, strict
from specdecode.kernels.plan import (
    BOUND_ROWS,
    MANY_REQUESTS,
    AcceptRule,
    is_large,
    layout,
    optional_layout,
    plan_sampling,
    plan_verification,
)
from specdecode.kernels.rows import LARGEST_TEMPERATURE, SMALLEST
from specdecode.kernels.state import MOST_ROWS
from specdecode.kernels.synthetic import conditional_rates
from specdecode.noise import SELECT
from specdecode.synthetic import AcceptanceSchedule

BY_SAMPLE = AcceptRule(strict.accepts, strict.decide, strict.draw, large_rows=384)
BY_RATIO = AcceptRule(probabilistic.decide, probabilistic.decide, probabilistic.draw, large_rows=320)
IN_BLOCK = AcceptRule(None, block.decide, probabilistic.draw, large_rows=BOUND_ROWS)

METHODS = {
    "strict": (BY_SAMPLE, BY_SAMPLE),
    "probabilistic": (BY_RATIO, BY_RATIO),
    "block": (IN_BLOCK, IN_BLOCK),
    "synthetic": (BY_RATIO, BY_SAMPLE),
}
"""Each method's accept rule with draft logits, and without."""


def sample(batch: RowBatch, domains: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Draw one token per row; return [batch] int64 token ids and [batch] float32 logsumexp(logits / temperature)."""
    requests, _ = batch.logits.shape
    token_ids = torch.empty(requests, dtype=torch.int64, device=batch.logits.device)
    logsumexp = torch.empty(requests, dtype=torch.float32, device=batch.logits.device)
    if requests > 0:
        run_sampling(batch.logits[:, None], None, batch, domains, {"token_ids": token_ids, "logsumexp": logsumexp})
    return token_ids, logsumexp


def run_sampling(
    logits: Tensor,
    index: Tensor | None,
    batch: RowBatch | VerificationBatch,
    domains: tuple[int, int],
    outputs: dict[str, Tensor],
) -> None:
    """Draw one token from each [batch, 1, vocab] row."""
    requests, _, vocab_size = logits.shape
    of_requests, dtypes, numbers = per_request(batch, domains)
    index_dtype = None if index is None else index.dtype
    verifies = "logsumexp" not in outputs
    plan = plan_sampling(
        BY_SAMPLE, logits.device, requests, vocab_size, layout(logits), index_dtype, dtypes, verifies
    )
    plan.run({**outputs, "target": logits, "target_index": index, **of_requests}, numbers)


def verify(
    method: str,
    batch: VerificationBatch,
    schedule: AcceptanceSchedule | None = None,
    *,
    large: bool | None = None,
    many: bool | None = None,
    target_index: Tensor | None = None,
    draft_index: Tensor | None = None,
) -> SamplerOutput:
    """Run one verification step.

    Args:
        method: one of the sampler's methods.
        batch: the checked arguments.
        schedule: for `"synthetic"`.
        large: whether to decide while reading (in block verification: to bound candidates before they are summed); None
            chooses by the number of rows.
        many: whether to search as is best for many requests in a small batch; None chooses by their number.
        target_index: [batch] int32 or int64; request r's target rows are `target_logits[target_index[r]]`. With
            overlapping strides, this addresses the rows of a ragged, packed batch. Then all ids behind a request's last
            draft are to be -1, for the row after any other may be read.
        draft_index: [batch] int32 or int64; likewise its slot in a cache of draft logits.
    """
    target, draft_token_ids = batch.target_logits, batch.draft_token_ids
    requests, num_draft_tokens = draft_token_ids.shape
    device = target.device
    outputs = {
        "token_ids": torch.empty(requests, num_draft_tokens + 1, dtype=torch.int64, device=device),
        "num_accepted": torch.empty(requests, dtype=torch.int32, device=device),
        "num_drafts": torch.empty(requests, dtype=torch.int32, device=device),
        "invalid": torch.empty(requests, dtype=torch.bool, device=device),
    }
    if requests == 0:
        return SamplerOutput(*outputs.values())
    if num_draft_tokens == 0:
        run_sampling(target, target_index, batch, SELECT, outputs)
        return SamplerOutput(*outputs.values())
    rule = METHODS[method][batch.draft_logits is None]
    draft = None if rule is BY_SAMPLE else batch.draft_logits
    draft_logsumexp = None if draft is None else batch.draft_logsumexp
    if large is None:
        large = is_large(rule, requests, num_draft_tokens, draft is not None and draft_logsumexp is None)
    large = large or (rule is not IN_BLOCK and num_draft_tokens >= MOST_ROWS)
    many = not large and (requests >= MANY_REQUESTS if many is None else many)
    rates = None if schedule is None else conditional_rates(schedule, device)
    of_requests, dtypes, numbers = per_request(batch, SELECT)
    plan = plan_verification(
        rule,
        large,
        many,
        device,
        requests,
        num_draft_tokens,
        target.shape[-1],
        layout(target),
        optional_layout(draft),
        layout(draft_token_ids),
        optional_layout(draft_logsumexp),
        (None if target_index is None else target_index.dtype, None if draft_index is None else draft_index.dtype),
        rates is not None,
        dtypes,
    )
    tensors = {
        **outputs,
        "target": target,
        "draft": draft,
        "ids": draft_token_ids,
        "draft_logsumexp": draft_logsumexp,
        "rates": rates,
        "target_index": target_index,
        "draft_index": draft_index,
        **of_requests,
    }
    plan.run(tensors, numbers)
    return SamplerOutput(*outputs.values())


def warm_up(method: str, batch: VerificationBatch, schedule: AcceptanceSchedule | None = None) -> None:
    """Have all compiled that steps with arguments like these take, of as many drafts or fewer, whatever their sizes."""
    most = batch.draft_token_ids.shape[1]
    for num_draft_tokens in {0, min(most, 1), most}:
        drafts = slice(num_draft_tokens)
        fewer = batch._replace(
            target_logits=batch.target_logits[:, : num_draft_tokens + 1],
            draft_token_ids=batch.draft_token_ids[:, drafts],
            draft_logits=None if batch.draft_logits is None else batch.draft_logits[:, drafts],
            draft_logsumexp=None if batch.draft_logsumexp is None else batch.draft_logsumexp[:, drafts],
        )
        for large, many in ((False, False), (False, True), (True, False)):
            verify(method, fewer, schedule, large=large, many=many)


def per_request(
    batch: RowBatch | VerificationBatch, domains: tuple[int, int]
) -> tuple[dict[str, Tensor | None], tuple[torch.dtype | None, ...], dict[str, float]]:
    """Return the tensors that hold one number for each request, their dtypes, and the numbers that hold one for all."""
    temperature, seeds, positions = batch.temperature, batch.seeds, batch.positions
    temperatures = temperature.contiguous() if isinstance(temperature, Tensor) else None
    number = 0.0
    if temperatures is None and temperature > 0:  # only 0 is greedy, in float32 too
        number = min(max(temperature, SMALLEST.value), LARGEST_TEMPERATURE.value)
    tensors = {
        "temperatures": temperatures,
        "seeds": seeds.contiguous() if isinstance(seeds, Tensor) else None,
        "positions": None if positions is None else positions.contiguous(),
    }
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors.values()])
    block_domain, token_domain = domains
    numbers = {
        "temperature": number,
        "first_seed": seeds if isinstance(seeds, int) else 0,
        "block_domain": int(block_domain),
        "token_domain": int(token_domain),
    }
    return tensors, dtypes, numbers
