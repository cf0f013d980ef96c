"""From the sizes of a call with shards to its launches and exchanges.

The launches between two exchanges are one `Plan`; all work on one workspace. Words travel by a *transport* of
`specdecode.sharding`: an all-gather of torch.distributed, for which all that a rank tells is a part of the workspace; or
symmetric memory, to which kernels write themselves.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specdecode import sharding
from specdecode.batch import Logprobs
from specdecode.kernels import exchange, sharded
from specdecode.kernels.arguments import (
    Arranging,
    Channel,
    Exchange,
    Inputs,
    Searching,
    Settling,
    Shard,
    Sizes,
    Workspace,
)
from specdecode.kernels.block import NUMBERS, decide_kernel, ratio_kernel
from specdecode.kernels.bundles import MIN_BLOCKS, NO_ROWS, Layout, at_least, inputs_of, outputs_of, sizes_of
from specdecode.kernels.launch import Argument, Plan, can_overlap
from specdecode.kernels.plan import (
    EMIT_REGISTERS,
    PLANS,
    SEARCH,
    SETTLING,
    SUM_PROGRAMS,
    AcceptRule,
    add_reading,
)
from specdecode.kernels.probabilistic import ALL, OPEN_ONES
from specdecode.kernels.rows import KNOWN
from specdecode.kernels.state import FIELDS

Parts = dict[str, tuple[torch.dtype, int] | None]

WAITING_PROGRAMS, WAITING_WARPS, WAITING_REGISTERS = 264, 4, 64
"""At most so many programs of a launch wait for other ranks, of so many warps, and registers of a thread: two programs on a
multiprocessor, which leave three quarters of it to the launches of other groups."""

FEW_PROGRAMS = 132
"""A launch of no more programs, one on a multiprocessor, may wait, and the next one be set up meanwhile."""


UNBOUNDED_SEARCH = (8, 4, 256)
"""`plan.SEARCH` where the draft rows' sums are not known: then a rank cannot know that another's residual beats all of its
own, and may have to look at most of its blocks."""


class Way(NamedTuple):
    """What a step over shards has to do."""

    rule: AcceptRule
    is_greedy: bool  # all requests are known to be
    samples: bool
    logprobs: Logprobs | None
    large: bool  # it is decided where requests stop before anything is drawn
    is_symmetric: bool  # words travel through symmetric memory


class ShardedPlan:
    """The launches and exchanges of all calls that differ in addresses and numbers alone.

    Args:
        device: where all of it happens.
        parts: of the workspace, see `Plan`.
        is_symmetric: whether words travel through symmetric memory.
    """

    def __init__(self, device: torch.device, parts: Parts, is_symmetric: bool) -> None:
        self.device, self.parts, self.is_symmetric = device, parts, is_symmetric
        self.plans = [Plan(device, parts, zeros=0)]
        self.sent: list[str] = []
        """The part of the workspace that is exchanged after each plan but the last."""
        self.words = 0
        """How many int64 words of symmetric memory a step takes."""

    @property
    def last(self) -> Plan:
        """The launches after the last exchange."""
        return self.plans[-1]

    def channel(self, name: str, words: int, ranks: int) -> Channel:
        """Return a new channel of so many int64 words from each rank, before its exchange."""
        if not self.is_symmetric:
            return Channel(self.last.part(name), None, 0, words)
        self.words += ranks * words
        return Channel(None, None, self.words - ranks * words, words)

    def exchange(self, channel: Channel) -> Channel:
        """Add the exchange of a channel; return what the launches after it hear."""
        name = f"received_{len(self.plans)}"
        self.sent.append("" if channel.sent_ptr is None else channel.sent_ptr.name)
        self.plans.append(Plan(self.device, self.parts, zeros=0))
        received_ptr = None if self.is_symmetric else Argument(name, torch.int64)
        return channel._replace(received_ptr=received_ptr)

    def run(self, tensors: dict[str, Tensor | None], numbers: dict[str, float], transport: sharding.Transport) -> None:
        """Make the launches and exchanges: see `Plan.run`."""
        workspace = self.last.allocate()
        if self.is_symmetric:
            memory, more_numbers = transport.memory(self.words)
            tensors, numbers = tensors | memory, numbers | more_numbers
        for i, plan in enumerate(self.plans):
            plan.run(tensors, numbers, workspace)
            if i < len(self.sent):
                received = transport.exchange(plan.views(workspace)[self.sent[i]] if self.sent[i] else None)
                if received is not None:
                    tensors = tensors | {f"received_{i + 1}": received}


@functools.lru_cache(maxsize=PLANS)
def plan_sharded(
    way: Way,
    device: torch.device,
    shape: tuple[int, ...],
    layouts: tuple[Layout | None, ...],
    shards: sharding.Layout,
    seeds_by_request: bool = False,
) -> ShardedPlan:
    """Plan a step of which this rank has a shard.

    Args:
        way: what the step has to do.
        device: as for `plan_step`.
        shape: as there, of this rank's logits.
        layouts: as there.
        shards: where all shards lie.
        seeds_by_request: as there.
    """
    requests, *rows, local = shape
    num_draft_tokens = rows[0] - 1 if rows else 0
    inputs = inputs_of(layouts, local, seeds_by_request, None)
    rule, logprobs = way.rule, way.logprobs
    all_know = way.is_greedy and logprobs != "raw"  # what is emitted, from each shard's maximum and where that is
    # Where a token is only drawn, statistics of other ranks' blocks are of no use but for the maximum.
    maxima = all_know or (rule.draw is None and logprobs is None and not way.samples)
    if way.is_greedy:
        inputs = without_draft_rows(inputs)
    end = shards.start + local
    shard = Shard(shards.vocab_size, shards.start, end, shards.most_blocks, ALIGNED=end % 16 == 0)
    here = sizes_of(requests, num_draft_tokens, local)._replace(num_blocks=shards.most_blocks, shard=shard)
    sizes = sizes_of(requests, num_draft_tokens, shards.vocab_size)._replace(shard=shard)
    arranged = with_shards_as_blocks(sizes, shards) if maxima else sizes
    sizes = arranged if all_know else sizes
    has_drafts = inputs.drafts.ids_ptr is not None
    settles = has_drafts and rule.while_reading is None
    sums = settles and inputs.draft.ptr is not None
    decides = way.large and has_drafts and not settles and rule.draw is not None
    per_row = not settles and not decides
    told = words_told(inputs, here, shards, maxima, per_row, sums, logprobs)
    plan = ShardedPlan(device, parts_of(inputs, here, arranged, told, settles, sums, way), way.is_symmetric)
    outputs = outputs_of(way.samples, False, None if logprobs is None else Argument("logprobs", torch.float32))
    exchanged = exchange_of(plan, inputs, shards, told, maxima, per_row, way)
    if all_know:
        own = plan.last.part("sent_offers")
        exchanged = exchanged._replace(offers=Channel(own, own, 0, 0))
    workspace = workspace_of(plan, outputs.logprobs_ptr)
    bundles = inputs, workspace, exchanged
    exchanged = add_telling(plan, *bundles, here)
    exchanged = add_arranging(plan, inputs, workspace, exchanged, arranged, rule.decide if decides else None)
    decide = sharded.decide_sample if rule.draw is None else rule.decide
    if maxima and not all_know:
        workspace, decide = (
            workspace._replace(statistics_ptr=plan.last.part("statistics_here")),
            sharded.decide_sample_here,
        )
    if settles:
        exchanged = add_residuals(plan, inputs, workspace, exchanged, sizes, sums)
    flags = per_row, False, settles, ALL.value if sums else OPEN_ONES.value, can_overlap(device)
    has_draft_rows = inputs.draft.ptr is not None
    search = SEARCH["large" if decides else "many" if has_draft_rows else "few"]
    if decides and inputs.drafts.logsumexp_ptr is not None:
        search = UNBOUNDED_SEARCH
    tuning = Searching(*search, decide, None, *flags)
    add_offers(plan, inputs, outputs, workspace, exchanged, sizes, tuning, rule.num_warps)
    add_finish(plan, inputs, outputs, exchanged, sizes, is_known=all_know)
    return plan


def without_draft_rows(inputs: Inputs) -> Inputs:
    """Return the inputs of greedy requests, to which only their drafts matter."""
    return inputs._replace(draft=NO_ROWS, drafts=inputs.drafts._replace(logsumexp_ptr=None))


def with_shards_as_blocks(sizes: Sizes, shards: sharding.Layout) -> Sizes:
    """Return the sizes of a row of which each shard that has tokens counts as one block."""
    return sizes._replace(num_blocks=len(shards.holders), MAX_BLOCKS=at_least(MIN_BLOCKS, shards.ranks))


def workspace_of(plan: ShardedPlan, logprobs: Argument | None) -> Workspace:
    """Return the bundle of memory that launches after the first exchange use as those of one GPU do."""
    part = plan.last.part
    return Workspace(
        state_ptr=part("state"),
        statistics_ptr=part("statistics"),
        cutoffs_ptr=None,
        kept_ptr=None,
        candidates_ptr=part("candidates"),
        listed_ptr=part("listed"),
        residual_sums_ptr=part("residual_sums"),
        raw_statistics_ptr=part("raw_statistics"),
        places_ptr=None,
        logprobs_ptr=logprobs,
        notes_ptr=part("known"),
    )


class Told(NamedTuple):
    """How many int64 words a rank tells, in lines of 128 bytes."""

    statistics: int
    raw_statistics: int
    notes: int
    sums: int
    offers: int


def words_told(
    inputs: Inputs,
    here: Sizes,
    shards: sharding.Layout,
    maxima: bool,
    per_row: bool,
    sums: bool,
    logprobs: Logprobs | None,
) -> Told:
    """Return how many words of each kind a rank tells."""
    num_drafts = here.batch * here.num_draft_tokens
    num_rows, has_draft_rows = num_drafts + here.batch, inputs.draft.ptr is not None
    rows = num_rows + num_drafts * has_draft_rows
    words = (
        rows * (1 if maxima else shards.most_blocks),
        num_rows * shards.most_blocks if logprobs == "raw" else 0,
        rows * (1 + has_draft_rows),
        triton.cdiv(num_drafts * shards.most_blocks, 2) if sums else 0,
        (num_rows if per_row else here.batch) * (1 if logprobs is None else 2),
    )
    return Told(*[triton.cdiv(count, 16) * 16 for count in words])


def exchange_of(
    plan: ShardedPlan, inputs: Inputs, shards: sharding.Layout, told: Told, maxima: bool, per_row: bool, way: Way
) -> Exchange:
    """Return the bundle of what ranks tell each other, before anything is received."""

    def of_memory(name: str, dtype: torch.dtype) -> Argument | None:
        return Argument(name, dtype) if way.is_symmetric else None

    return Exchange(
        first=plan.channel("sent_first", sum(told[:3]), shards.ranks),
        sums=plan.channel("sent_sums", told.sums, shards.ranks),
        offers=plan.channel("sent_offers", told.offers, shards.ranks),
        verdicts_ptr=plan.last.part("verdicts"),
        sources_ptr=Argument("holders" if maxima else "sources", torch.int32),
        peers_ptr=of_memory("peers", torch.int64),
        received_ptr=of_memory("memory", torch.int64),
        failed_ptr=of_memory("failed", torch.int32),
        half=Argument("half") if way.is_symmetric else 0,
        patience=Argument("patience") if way.is_symmetric else 0,
        rank=shards.rank,
        raw_start=told.statistics,
        notes_start=told.statistics + told.raw_statistics,
        most_blocks=1 if maxima else shards.most_blocks,
        RANKS=shards.ranks,
        LANES=max(32 * WAITING_WARPS, triton.next_power_of_2(shards.ranks)),
        MAXIMA=maxima,
        NOTES=1 + (inputs.draft.ptr is not None),
        OFFERS=1 if way.logprobs is None else 2,
        PER_ROW=per_row,
        MATCHES=way.rule.draw is None and inputs.drafts.ids_ptr is not None and inputs.drafts.rates_ptr is None,
        OVERLAPS=can_overlap(plan.device),
    )


def parts_of(inputs: Inputs, here: Sizes, sizes: Sizes, told: Told, settles: bool, sums: bool, way: Way) -> Parts:
    """Return the parts of the workspace."""
    num_rows, num_drafts = sizes.batch * (sizes.num_draft_tokens + 1), sizes.batch * sizes.num_draft_tokens
    has_drafts, is_raw = inputs.drafts.ids_ptr is not None, way.logprobs == "raw"
    rows = num_rows + num_drafts * (inputs.draft.ptr is not None)
    parts: Parts = {
        "sent_first": (torch.int64, sum(told[:3])),
        "sent_sums": (torch.int64, told.sums) if sums else None,
        "sent_offers": (torch.int64, told.offers),
        "statistics_here": (torch.float32, rows * 2 * here.num_blocks),
        "raw_statistics_here": (torch.float32, num_rows * 2 * here.num_blocks) if is_raw else None,
        "state": (torch.int32, sizes.batch * FIELDS.value) if has_drafts else None,
        "statistics": (torch.float32, rows * 2 * sizes.num_blocks),
        "raw_statistics": (torch.float32, num_rows * 2 * sizes.num_blocks) if is_raw else None,
        "known": (torch.float32, rows * KNOWN.value),
        "verdicts": (torch.int32, num_rows),
        "candidates": (torch.float32, num_rows * NUMBERS.value) if settles else None,
        "listed": (torch.int32, num_drafts) if sums else None,
        "residual_sums": (torch.float32, num_drafts * sizes.num_blocks) if sums else None,
    }
    return {
        name: None if way.is_symmetric and name in ("sent_first", "sent_sums") else part for name, part in parts.items()
    }


def add_telling(plan: ShardedPlan, inputs: Inputs, workspace: Workspace, exchanged: Exchange, here: Sizes) -> Exchange:
    """Add the launches before the first exchange, given the sizes of this rank's shard, and that exchange."""
    part = plan.last.part
    mine = {"statistics_ptr": part("statistics_here"), "raw_statistics_ptr": part("raw_statistics_here")}
    workspace = workspace._replace(**mine, notes_ptr=None)
    add_reading(plan.last, inputs, workspace, here, None)
    rows = here.batch * (here.num_draft_tokens + 1)
    plan.last.add(exchange.tell_kernel, (rows,), (inputs, workspace, exchanged, here), num_warps=4)
    return exchanged._replace(first=plan.exchange(exchanged.first))


def add_arranging(
    plan: ShardedPlan, inputs: Inputs, workspace: Workspace, exchanged: Exchange, sizes: Sizes, decide: Any
) -> Exchange:
    """Add the launch that puts what was heard in order, and may decide."""
    rows = sizes.batch * (sizes.num_draft_tokens + 1)
    options = {"num_warps": WAITING_WARPS, "max_registers": WAITING_REGISTERS}
    waits = plan.is_symmetric and rows > FEW_PROGRAMS
    if waits:
        programs = min(triton.cdiv(rows, exchanged.LANES), FEW_PROGRAMS)
        plan.last.add(exchange.wait_kernel, (programs,), (exchanged, sizes), **options)
    bundles = inputs, workspace, exchanged, sizes, Arranging(decide, can_overlap(plan.device))
    plan.last.add(exchange.arrange_kernel, (rows,), bundles, **options, follows=plan.is_symmetric)
    return exchanged


def add_residuals(
    plan: ShardedPlan, inputs: Inputs, workspace: Workspace, exchanged: Exchange, sizes: Sizes, sums: bool
) -> Exchange:
    """Add the launches of block verification before its offers, and the exchange of residual sums if there are any."""
    tuning = Settling(*SETTLING, 0, ALL.value if sums else OPEN_ONES.value, can_overlap(plan.device))
    bundles, requests, num_draft_tokens = (inputs, workspace, sizes, tuning), sizes.batch, sizes.num_draft_tokens
    plan.last.add(ratio_kernel, (requests * num_draft_tokens,), bundles, num_warps=4)
    plan.last.add(decide_kernel, (requests * (num_draft_tokens + 1),), bundles, num_warps=4)
    if not sums:
        return exchanged
    shares = requests * num_draft_tokens * triton.cdiv(exchanged.most_blocks, tuning.BLOCKS)
    bundles = inputs, workspace, exchanged, sizes, tuning
    plan.last.add(exchange.sum_shard_kernel, (min(shares, SUM_PROGRAMS),), bundles, num_warps=8)
    exchanged = exchanged._replace(sums=plan.exchange(exchanged.sums))
    programs = min(requests * num_draft_tokens, WAITING_PROGRAMS)
    options = {"num_warps": WAITING_WARPS, "max_registers": WAITING_REGISTERS, "follows": plan.is_symmetric}
    bundles = workspace, exchanged, sizes, Arranging(None, can_overlap(plan.device))
    plan.last.add(exchange.arrange_sums_kernel, (programs,), bundles, **options)
    return exchanged


def add_offers(
    plan: ShardedPlan,
    inputs: Inputs,
    outputs: Any,
    workspace: Workspace,
    exchanged: Exchange,
    sizes: Sizes,
    tuning: Searching,
    num_warps: int,
) -> None:
    """Add the launch that offers tokens, given how many warps a program has without draft rows."""
    has_draft_rows = inputs.draft.ptr is not None
    plan.last.add(
        sharded.offer_kernel,
        (sizes.batch * (sizes.num_draft_tokens + 1 if tuning.PER_ROW else 1),),
        (inputs, outputs, workspace, exchanged, sizes, tuning),
        num_warps=8 if has_draft_rows else num_warps,
        max_registers=EMIT_REGISTERS if has_draft_rows else None,
    )


def add_finish(
    plan: ShardedPlan, inputs: Inputs, outputs: Any, exchanged: Exchange, sizes: Sizes, is_known: bool
) -> None:
    """Add the exchange of offers, if all ranks do not offer the same, and the launch that takes the best."""
    if not is_known:
        exchanged = exchanged._replace(offers=plan.exchange(exchanged.offers))
    follows, programs = is_known or plan.is_symmetric, min(sizes.batch, WAITING_PROGRAMS)
    plan.last.add(sharded.finish_kernel, (programs,), (inputs, outputs, exchanged, sizes), num_warps=1, follows=follows)
