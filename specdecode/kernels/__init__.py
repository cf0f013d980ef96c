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
from specdecode.kernels.plan import MANY_REQUESTS, AcceptRule, layout, plan_step
from specdecode.kernels.rows import LARGEST_TEMPERATURE, SMALLEST
from specdecode.kernels.state import MOST_ROWS
from specdecode.kernels.synthetic import conditional_rates
from specdecode.noise import SELECT
from specdecode.synthetic import AcceptanceSchedule

BY_SAMPLE = AcceptRule(strict.decide_while_reading, strict.decide, strict.draw, num_warps=8, large_rows=384)
BY_RATIO = AcceptRule(probabilistic.decide, probabilistic.decide, probabilistic.draw, num_warps=4, large_rows=320)
IN_BLOCK = AcceptRule(None, block.decide, probabilistic.draw, num_warps=4, large_rows=512)

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
        run(BY_SAMPLE, {"token_ids": token_ids, "logsumexp": logsumexp}, batch, domains, batch.logits[:, None])
    return token_ids, logsumexp


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
        large: whether to decide while reading (in block verification: to bound before summing); None chooses by the number
            of rows.
        many: whether to search as is best for many requests in a small batch; None chooses by their number.
        target_index: [batch] int32 or int64; request r's target rows are `target_logits[target_index[r]]`. With
            overlapping strides, this addresses the rows of a ragged, packed batch. Then all ids behind a request's last
            draft are to be -1, for the row after any other may be read.
        draft_index: [batch] int32 or int64; likewise its slot in a cache of draft logits.
    """
    requests, num_draft_tokens = batch.draft_token_ids.shape
    device = batch.target_logits.device
    outputs = {
        "token_ids": torch.empty(requests, num_draft_tokens + 1, dtype=torch.int64, device=device),
        "num_accepted": torch.empty(requests, dtype=torch.int32, device=device),
        "num_drafts": torch.empty(requests, dtype=torch.int32, device=device),
        "invalid": torch.empty(requests, dtype=torch.bool, device=device),
    }
    if requests == 0:
        return SamplerOutput(*outputs.values())
    if num_draft_tokens == 0:
        run(BY_SAMPLE, outputs, batch, SELECT, batch.target_logits, target_index=target_index)
        return SamplerOutput(*outputs.values())
    rule = METHODS[method][batch.draft_logits is None]
    draft = None if rule is BY_SAMPLE else batch.draft_logits
    logsumexp = None if draft is None else batch.draft_logsumexp
    if large is None:
        rows = num_draft_tokens + 1 + num_draft_tokens * (draft is not None and logsumexp is None)
        large = requests * rows >= rule.large_rows
    large = large or (rule is not IN_BLOCK and num_draft_tokens >= MOST_ROWS)
    many = not large and (requests >= MANY_REQUESTS if many is None else many)
    run(
        rule,
        outputs,
        batch,
        SELECT,
        batch.target_logits,
        draft,
        batch.draft_token_ids,
        logsumexp,
        None if schedule is None else conditional_rates(schedule, device),
        target_index,
        draft_index,
        large,
        many,
    )
    return SamplerOutput(*outputs.values())


def run(
    rule: AcceptRule,
    outputs: dict[str, Tensor],
    batch: RowBatch | VerificationBatch,
    domains: tuple[int, int],
    target: Tensor,
    draft: Tensor | None = None,
    ids: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    rates: Tensor | None = None,
    target_index: Tensor | None = None,
    draft_index: Tensor | None = None,
    large: bool = False,
    many: bool = False,
) -> None:
    """Plan a step, or find its plan, and launch it."""
    temperature, seeds, positions = batch.temperature, batch.seeds, batch.positions
    numbers = {
        "temperature": 0.0,
        "first_seed": seeds if isinstance(seeds, int) else 0,
        "block_domain": int(domains[0]),
        "token_domain": int(domains[1]),
    }
    if not isinstance(temperature, Tensor) and temperature > 0:  # only 0 is greedy, in float32 too
        numbers["temperature"] = min(max(temperature, SMALLEST.value), LARGEST_TEMPERATURE.value)
    others = {
        "rates": rates,
        "target_index": target_index,
        "draft_index": draft_index,
        "temperatures": temperature.contiguous() if isinstance(temperature, Tensor) else None,
        "seeds": seeds.contiguous() if isinstance(seeds, Tensor) else None,
        "positions": None if positions is None else positions.contiguous(),
    }
    requests, rows, vocab_size = target.shape
    plan = plan_step(
        rule,
        large,
        many,
        target.device,
        (requests, rows - 1, vocab_size),
        (layout(target), layout(draft)),
        (layout(ids), layout(draft_logsumexp)),
        tuple([None if tensor is None else tensor.dtype for tensor in others.values()]),
        "logsumexp" in outputs,
    )
    tensors = {"target": target, "draft": draft, "ids": ids, "draft_logsumexp": draft_logsumexp}
    plan.run({**outputs, **tensors, **others}, numbers)


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
