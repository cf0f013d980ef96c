"""The Triton backend: fused kernels for NVIDIA GPUs.

A step is read, search where a method needs it, emit. `read` reads the rows and leaves 8 bytes of statistics for each block
of 1,024 logits; in a large batch it also decides, so as to read no row after a rejection. `emit` decides what is left, draws
the token of each request from the statistics and a few blocks, and writes the output. Between them `block` verification
compares residual masses.

| file | what is in it |
|---|---|
| `arguments`, `values` | what kernels receive: the shape and type of every field; what their functions pass to each other |
| `bundles` | from the tensors of a call to these bundles |
| `formulas` | numbers of a call, which plans do not know: sizes, strides, addresses |
| `methods` | each method: what it decides while rows are read, how it decides, how it draws |
| `plan`, `launch` | the launches of a step, with the tuned numbers; signature, compilation, launch |
| `read`, `emit` | the two kernels of every step |
| `packed` | where the rows and the state of a request are |
| `vocabulary` | draft rows over a vocabulary of their own |
| `rows` | where rows are, and how they are read |
| `statistics`, `distribution` | what is kept of each block; from that to softmax, NaN and infinities included |
| `truncation` | the last token that top-k, top-p and min-p keep, and the statistics of what is kept |
| `bounds` | what is decided before that is known |
| `candidates`, `widecut` | where that is looked for: among the likeliest tokens of a row, or in all of it |
| `selection`, `search` | how a token is drawn; which blocks are looked at, in the order of their bounds |
| `residual` | max(0, p - q): its weights, its block sums, which block is drawn from it |
| `state` | at which row a request stops, and its output |
| `logprobs` | log-probabilities of emitted tokens |
| `channel` | with shards of the vocabulary: how words travel |
| `tell`, `arrange` | what a rank tells of its part of the rows; what all told, put in order |
| `shard_cut` | the cutoffs of truncated rows, without gathering but few |
| `sharded` | the token that each rank offers, and which is taken |
| `shard_memory`, `shard_plan` | what such a step has to do, and its memory; its launches and exchanges |
| `greedy`, `strict`, `probabilistic`, `block`, `synthetic` | what each method adds: how it decides about a draft |
| `philox` | random numbers |

| what happens | where |
|---|---|
| a NaN or an infinity in a row | `distribution.recompute_nonfinite`; where logits are read again, `rows.load_logits` |
| a row need not be read | `read.decide` posts the stop, `read.may_matter` looks at it; a draft row: `read.summarise` |
| the token after a rejection | `probabilistic.recover`; in `strict`, `strict.decide` |
| a tie | between scores `selection.first_largest`, `search.ranked`; between logits `greedy.argmax` |
| the cutoff of top-k, top-p, min-p | `candidates.cut_candidates`; in a whole row `widecut.wide_cutoff`, ties `find_tie` |
| how many programs a launch has | the `add_*` functions of `plan` and `shard_plan` |
| the rows and the slot of a request of a packed call | `packed.locate` |

Shards of the vocabulary are read as whole rows are, and decided about by the same functions; only to draw a token takes
another way.

No program waits for another of the same GPU: what must come after everything else is done by the last program to finish, or
by the next launch. Through symmetric memory programs wait for other ranks, for a bounded time (`channel.awaited`). So no
kernel can hang. What is kept from one call to the next never changes: compiled code, plans, a schedule's rates. Only a
shard's symmetric memory is written by each of its steps, so these must follow each other. Other calls on several streams,
from several threads and in graphs share no memory that is written. Arithmetic is in float32 whatever the logits are.
"""

from typing import Any

import torch
from torch import Tensor

from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch
from specdecode.eager.packed import IndexedRows, mark_invalid, unpack
from specdecode.kernels import shard_plan
from specdecode.kernels.bundles import EACH_LIMIT, LIMITS, MIN_DRAFTS, class_of, lie
from specdecode.kernels.methods import METHODS, STRICT, Method
from specdecode.kernels.plan import MANY_REQUESTS, SPREAD_REQUESTS, plan_step
from specdecode.kernels.rows import LARGEST_TEMPERATURE, SMALLEST
from specdecode.kernels.state import MOST_ROWS
from specdecode.kernels.synthetic import conditional_rates
from specdecode.noise import SELECT
from specdecode.sharding import VocabShard
from specdecode.synthetic import AcceptanceSchedule


def sample(batch: RowBatch, domains: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row of a batch.

    Returns:
        [batch] int64 token ids; [batch] float32 logsumexp(logits / temperature) of what is kept; [batch] int64 the last
        tokens kept, None if rows are not truncated.
    """
    requests, _ = batch.logits.shape
    token_ids = torch.empty(requests, dtype=torch.int64, device=batch.logits.device)
    logsumexp = torch.empty(requests, dtype=torch.float32, device=batch.logits.device)
    outputs = {"token_ids": token_ids, "logsumexp": logsumexp}
    if batch.truncation is not None:
        outputs["cutoff"] = torch.empty_like(token_ids)
    if batch.shard is not None and takes_whole_rows(batch.shard, batch, batch.logits, None):
        batch = batch._replace(logits=batch.shard.whole_rows(batch.logits), shard=None)
    if requests > 0:
        numbers = {"batch": requests, "num_draft_tokens": 0}
        run(STRICT, outputs, {"target": batch.logits}, numbers, batch, domains)
    return token_ids, logsumexp, outputs.get("cutoff")


def verify(
    method: str,
    batch: VerificationBatch,
    schedule: AcceptanceSchedule | None = None,
    *,
    large: bool | None = None,
    many: bool | None = None,
) -> SamplerOutput:
    """Run one verification step.

    Args:
        method: one of the sampler's methods.
        batch: the checked arguments, of which `why_not_verified` says nothing.
        schedule: for `"synthetic"`.
        large: whether to decide while reading (in block verification: to sum no more residuals than it takes to decide);
            None chooses by the number of rows.
        many: whether to search as is best for many requests in a small batch (in block verification: to sum few residuals in
            a large one); None chooses by their number.
    """
    if batch.shard is not None and verifies_whole_rows(method, batch, batch.shard):
        return verify_whole_rows(method, batch, batch.shard, schedule, large, many)
    packing, num_draft_tokens = batch.packing, batch.num_draft_tokens
    requests = batch.draft_token_ids.shape[0] if packing is None else packing.row_starts.shape[0] - 1
    outputs = room_for_output(batch, requests, num_draft_tokens + 1)
    output = SamplerOutput(*outputs.values())
    if requests == 0:
        return output
    tensors, numbers = {"target": batch.target_logits}, {"batch": requests, "num_draft_tokens": num_draft_tokens}
    if packing is not None:
        tensors["row_starts"] = packing.row_starts.contiguous()
        if packing.slots is not None:
            tensors["slots"] = packing.slots.contiguous()
        if packing.row_positions is not None:
            tensors["row_positions"] = packing.row_positions.contiguous()
    if num_draft_tokens == 0:
        run(STRICT, outputs, tensors, numbers, batch, SELECT)
        return output
    chosen = METHODS[method][batch.draft_logits is None]
    reads_both = False
    if not chosen.samples and batch.draft_logits is not None:
        tensors["draft"] = batch.draft_logits
        if batch.draft_logsumexp is not None:
            tensors["draft_logsumexp"] = batch.draft_logsumexp
        if batch.draft_cutoff is not None:
            tensors["draft_cutoff"] = batch.draft_cutoff
        if batch.draft_vocab_ids is not None:
            tensors["draft_vocab_ids"] = batch.draft_vocab_ids.contiguous()
        reads_both = batch.draft_logsumexp is None
    tensors["ids"] = batch.draft_token_ids
    if schedule is not None:
        tensors["rates"] = conditional_rates(schedule, batch.target_logits.device)
    if large is None:
        rows = requests * (num_draft_tokens + 1)
        if packing is not None:
            rows = min(rows, batch.target_logits.shape[0])
        large = rows + max(rows - requests, 0) * reads_both >= chosen.large_rows
    large = large or (not chosen.settles and num_draft_tokens >= MOST_ROWS)
    if many is None:
        many = requests > SPREAD_REQUESTS if large else requests >= MANY_REQUESTS
    many = many and (chosen.settles or not large)
    run(chosen, outputs, tensors, numbers, batch, SELECT, large, many)
    return output


def takes_whole_rows(
    shard: VocabShard, batch: RowBatch | VerificationBatch, logits: Tensor, draft_logits: Tensor | IndexedRows | None
) -> bool:
    """Return whether rows have to be gathered, because kernels cannot do what is asked with a part of them.

    Truncation takes symmetric memory, and draft rows of the target rows' dtype. The first call on a device asks the other
    ranks.
    """
    if shard.agree(logits).divided:
        return True
    is_alike = draft_logits is None or draft_logits.dtype == logits.dtype
    is_cut = batch.is_truncated and not is_greedy(batch.temperature)
    return is_cut and not (is_alike and shard.transport_on(logits.device).is_symmetric)


def is_greedy(temperature: Tensor | float) -> bool:
    """Return whether all requests are known to be greedy."""
    return isinstance(temperature, float) and temperature == 0


def draft_rows(method: str, batch: VerificationBatch) -> Tensor | IndexedRows | None:
    """Return the draft logits that a method reads."""
    return None if METHODS[method][batch.draft_logits is None].samples else batch.draft_logits


def verifies_whole_rows(method: str, batch: VerificationBatch, shard: VocabShard) -> bool:
    """Return `takes_whole_rows` of the rows that a method reads."""
    return takes_whole_rows(shard, batch, batch.target_logits, draft_rows(method, batch))


def verify_whole_rows(
    method: str,
    batch: VerificationBatch,
    shard: VocabShard,
    schedule: AcceptanceSchedule | None,
    large: bool | None,
    many: bool | None,
) -> SamplerOutput:
    """Gather the rows of a batch, of a packed one those that its requests have, and verify these on every rank."""
    has_rows = None
    if batch.packing is not None:  # its slots may hold many draft rows that nobody asks for
        batch, has_rows = unpack(batch, batch.packing)
    draft_logits = draft_rows(method, batch)
    if draft_logits is not None:
        draft_logits = whole_rows(draft_logits, shard)
    whole = batch._replace(target_logits=whole_rows(batch.target_logits, shard), draft_logits=draft_logits, shard=None)
    output = verify(method, whole, schedule, large=large, many=many)
    return output if has_rows is None else mark_invalid(output, has_rows)


def whole_rows(rows: Tensor | IndexedRows, shard: VocabShard) -> Tensor:
    """Return rows of all ranks' logits, given this rank's, which may have to be copied out of a tensor first."""
    return shard.whole_rows(rows.gather() if isinstance(rows, IndexedRows) else rows)


def room_for_output(batch: VerificationBatch, requests: int, num_tokens: int) -> dict[str, Tensor]:
    """Return the tensors that a verification fills, in the order of `SamplerOutput`."""
    device = batch.target_logits.device
    num_accepted = torch.empty(requests, dtype=torch.int32, device=device)
    outputs = {
        "token_ids": torch.empty(requests, num_tokens, dtype=torch.int64, device=device),
        "num_accepted": num_accepted,
        "num_drafts": torch.empty_like(num_accepted),
        "invalid": torch.empty(requests, dtype=torch.bool, device=device),
    }
    if batch.logprobs is not None:
        outputs["logprobs"] = torch.empty(requests, num_tokens, dtype=torch.float32, device=device)
    return outputs


def why_not_verified(method: str, batch: VerificationBatch) -> str | None:
    """Return why the kernels cannot verify a batch, which then the eager backend alone can; or None."""
    if batch.num_draft_tokens == 0 or not batch.is_truncated:
        return None
    chosen, of_drafts = METHODS[method][batch.draft_logits is None], batch.draft_temperature
    if not chosen.samples and of_drafts is not None and not are_surely_equal(of_drafts, batch.temperature):
        return (
            "draft_sampling: 'triton' takes drafts of the target's temperature only, as the same number or tensor; use "
            "'eager' or 'auto'"
        )
    if not chosen.settles and batch.num_draft_tokens >= MOST_ROWS:
        return f"backend: 'triton' truncates rows of at most {MOST_ROWS - 1} drafts, got {batch.num_draft_tokens}"
    return None


def are_surely_equal(a: Tensor | float, b: Tensor | float) -> bool:
    """Return whether two arguments are known to have the same values without reading a tensor: they are in one place."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        layouts = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in (a, b)]
        return layouts[0] == layouts[1]
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def run(
    method: Method,
    outputs: dict[str, Tensor],
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    batch: RowBatch | VerificationBatch,
    domains: tuple[int, int],
    large: bool = False,
    many: bool = False,
) -> None:
    """Plan a step, or find its plan, and launch it."""
    target, temperature, seeds, positions = tensors["target"], batch.temperature, batch.seeds, batch.positions
    numbers["block_domain"], numbers["token_domain"] = domains
    numbers["temperature"], numbers["first_seed"] = 0.0, 0
    if isinstance(temperature, Tensor):
        tensors["temperatures"] = temperature.contiguous()
    elif temperature > 0:  # only 0 is greedy, in float32 too
        numbers["temperature"] = min(max(temperature, SMALLEST.value), LARGEST_TEMPERATURE.value)
    if isinstance(seeds, Tensor):
        tensors["seeds"] = seeds.contiguous()
    else:
        numbers["first_seed"] = seeds
    if positions is not None:
        tensors["positions"] = positions.contiguous()
    truncates, num_draft_tokens = batch.is_truncated, numbers["num_draft_tokens"]
    if truncates:
        add_limits(batch, tensors, numbers)
    logprobs, seeds_by_request, vocab_size = None, False, target.shape[-1]
    numbers["vocab_size"] = vocab_size
    if isinstance(batch, VerificationBatch):
        logprobs, packing = batch.logprobs, batch.packing
        if packing is not None:
            numbers["num_slots"] = packing.num_slots
            seeds_by_request = packing.seeds_by_request
    draft_lie, vocab_ids_are_aligned = None, False
    if "draft" in tensors:
        draft_lie = lie(tensors["draft"])
        if "draft_vocab_ids" in tensors:
            ids = tensors["draft_vocab_ids"]
            vocab_ids_are_aligned = (len(ids) | ids.data_ptr()) % 16 == 0
    structure = (  # a plain tuple, because each call makes one: a named one takes three times as long
        method,
        target.device,
        tuple(tensors),
        tuple([tensor.dtype for tensor in tensors.values()]),
        lie(target),
        draft_lie,
        vocab_ids_are_aligned,
        *class_of(num_draft_tokens, vocab_size),
        large,
        many,
        "logsumexp" in outputs,
        truncates,
        logprobs,
        seeds_by_request,
    )
    if batch.shard is None:
        plan_step(structure).run(outputs | tensors, numbers)
    else:
        shard_plan.run(structure, outputs | tensors, numbers, batch.shard, is_greedy(temperature))


def add_limits(batch: RowBatch | VerificationBatch, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
    """Add what truncates rows to the arguments of a step: a tensor, or a number, neutral if it is not given."""
    nothing = (None, None, None)
    of_drafts = batch.draft_truncation if isinstance(batch, VerificationBatch) else None
    limits = (*(batch.truncation or nothing), *(of_drafts or nothing))
    for name, each, limit, neutral in zip(LIMITS, EACH_LIMIT, limits, (0, 1.0, 0.0) * 2):
        numbers[name] = neutral
        if isinstance(limit, Tensor):
            tensors[each] = limit.contiguous()
        elif limit is not None:
            numbers[name] = limit


def warm_up(method: str, batch: VerificationBatch, schedule: AcceptanceSchedule | None = None) -> None:
    """Compile all kernels that steps with arguments like these launch, of as many drafts or fewer, whatever their sizes."""
    ways = [(False, False), (False, True), (True, False), (True, True)]
    if batch.shard is not None and not verifies_whole_rows(method, batch, batch.shard):
        ways = ways[::2]  # there are two
    if batch.packing is not None:  # the drafts of its requests may be fewer at any call
        for large, many in ways:
            verify(method, batch, schedule, large=large, many=many)
        return
    most = batch.draft_token_ids.shape[1]
    of_other_sizes = [2**i - 1 for i in range(MIN_DRAFTS.bit_length() - 1, most.bit_length())]  # see `bundles.at_least`
    for num_draft_tokens in {0, min(most, 1), *of_other_sizes, most}:
        drafts = slice(num_draft_tokens)
        fewer = batch._replace(
            target_logits=batch.target_logits[:, : num_draft_tokens + 1],
            draft_token_ids=batch.draft_token_ids[:, drafts],
            draft_logits=None if batch.draft_logits is None else batch.draft_logits[:, drafts],
            draft_logsumexp=None if batch.draft_logsumexp is None else batch.draft_logsumexp[:, drafts],
            draft_cutoff=None if batch.draft_cutoff is None else batch.draft_cutoff[:, drafts],
        )
        for large, many in ways:
            verify(method, fewer, schedule, large=large, many=many)
