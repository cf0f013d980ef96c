"""From the sizes of a call with shards to its launches and exchanges: `plan`, where ranks meet between launches.

An exchange is an all-gather of torch.distributed. The launches between two of them are one `Plan`; all work on one
workspace, parts of which are what is sent. Every rank sends as many bytes: blocks are padded to those of the largest shard.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from specdecode import sharding
from specdecode.batch import Logprobs
from specdecode.kernels import exchange, probabilistic, sharded
from specdecode.kernels.arguments import Exchange, Inputs, Searching, Settling, Shard, Sizes, Workspace
from specdecode.kernels.block import NUMBERS, decide_kernel, ratio_kernel
from specdecode.kernels.bundles import MIN_BLOCKS, NO_ROWS, Layout, at_least, inputs_of, outputs_of, sizes_of
from specdecode.kernels.exchange import NOTES
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

if TYPE_CHECKING:
    from torch import distributed

Parts = dict[str, tuple[torch.dtype, int] | None]


class Stage(NamedTuple):
    """Launches, and the exchange after them."""

    plan: Plan
    sent: tuple[int, int]  # where what is exchanged begins and ends in the workspace
    received: tuple[str, torch.dtype] | None  # the name by which later launches know it; None: nothing is exchanged


class ShardedPlan:
    """The launches and exchanges of all calls that differ in addresses and numbers alone.

    Args:
        device: where all of it happens.
        parts: of the workspace, see `Plan`.
    """

    def __init__(self, device: torch.device, parts: Parts) -> None:
        self.device, self.parts = device, parts
        self.stages = [Stage(Plan(device, parts, zeros=0), (0, 0), None)]

    @property
    def last(self) -> Plan:
        """The launches after the last exchange."""
        return self.stages[-1].plan

    def exchange(self, parts: list[str], dtype: torch.dtype) -> dict[str, Any]:
        """Add an exchange of parts that follow each other; return what the next launches are told of it."""
        ends = dict(zip(self.last.parts, (*self.last.starts[1:], self.last.length)))
        starts = dict(zip(self.last.parts, self.last.starts))
        present = [name for name in parts if name in starts]
        sent, name = (starts[present[0]], ends[present[-1]]), f"received_{len(self.stages)}"
        self.stages[-1] = Stage(self.last, sent, (name, dtype))
        self.stages.append(Stage(Plan(self.device, self.parts, zeros=0), (0, 0), None))
        unit = dtype.itemsize // 4
        beginnings = [(starts[each] - sent[0]) // unit if each in starts else 0 for each in parts]
        return {
            "received_ptr": Argument(name, dtype),
            "length": (sent[1] - sent[0]) // unit,
            "beginnings": beginnings,
        }

    def run(
        self, tensors: dict[str, Tensor | None], numbers: dict[str, float], group: "distributed.ProcessGroup"
    ) -> None:
        """Make the launches and exchanges: see `Plan.run`."""
        workspace = self.last.allocate()
        for plan, (start, end), received in self.stages:
            plan.run(tensors, numbers, workspace)
            if received is not None:
                name, dtype = received
                tensors = tensors | {name: sharding.all_gather(workspace[start:end], group).view(-1).view(dtype)}


@functools.lru_cache(maxsize=PLANS)
def plan_sharded(
    rule: AcceptRule,
    is_greedy: bool,
    device: torch.device,
    shape: tuple[int, ...],
    layouts: tuple[Layout | None, ...],
    shards: sharding.Layout,
    samples: bool,
    seeds_by_request: bool = False,
    logprobs: Logprobs | None = None,
) -> ShardedPlan:
    """Plan a step of which this rank has a shard.

    Args:
        rule: how drafts are decided about.
        is_greedy: whether all requests are known to be.
        device: as for `plan_step`.
        shape: as there, of this rank's logits.
        layouts: as there.
        shards: where all shards lie.
        samples: as there.
        seeds_by_request: as there.
        logprobs: as there.
    """
    requests, *rows, local = shape
    num_draft_tokens = rows[0] - 1 if rows else 0
    inputs = inputs_of(layouts, local, seeds_by_request, None)
    all_know = is_greedy and logprobs != "raw"  # what is emitted, from each shard's maximum and where that is
    # Where a token is only drawn, statistics of other ranks' blocks are of no use but for the maximum.
    maxima = all_know or (rule.draw is None and logprobs is None and not samples)
    if is_greedy:
        inputs = without_draft_rows(inputs)
    shard = Shard(shards.vocab_size, shards.start, shards.start + local, shards.most_blocks)
    here = sizes_of(requests, num_draft_tokens, local)._replace(num_blocks=shards.most_blocks, shard=shard)
    sizes = sizes_of(requests, num_draft_tokens, shards.vocab_size)._replace(shard=shard)
    arranged = with_shards_as_blocks(sizes, shards) if maxima else sizes
    sizes = arranged if all_know else sizes
    has_drafts = inputs.drafts.ids_ptr is not None
    settles = has_drafts and rule.while_reading is None
    sums = settles and inputs.draft.ptr is not None
    plan = ShardedPlan(device, parts_of(inputs, here, arranged, settles, sums, maxima, logprobs))
    outputs = outputs_of(samples, False, None if logprobs is None else Argument("logprobs", torch.float32))
    part, workspace = plan.last.part, workspace_of(plan, outputs.logprobs_ptr)
    told = told_at_first(plan, shards, maxima, logprobs)
    told = told._replace(MATCHES=rule.draw is None and has_drafts and inputs.drafts.rates_ptr is None)
    statistics = part("statistics_here" if maxima else "sent_statistics")
    local_parts = {"statistics_ptr": statistics, "raw_statistics_ptr": part("sent_raw_statistics")}
    add_notes(plan, inputs, workspace._replace(**local_parts, notes_ptr=None), told, here)
    told = add_arranging(plan, inputs, workspace, told, arranged)
    decide = sharded.decide_sample if rule.draw is None else rule.decide
    if maxima and not all_know:
        workspace, decide = workspace._replace(statistics_ptr=statistics), sharded.decide_sample_here
    if settles:
        told = add_residuals(plan, inputs, workspace, told, sizes, sums)
    add_offers(plan, inputs, outputs, workspace, told, sizes, rule, decide, settles=settles, sums=sums)
    add_finish(plan, inputs, outputs, told, sizes, is_known=all_know)
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


def told_at_first(plan: ShardedPlan, shards: sharding.Layout, maxima: bool, logprobs: Logprobs | None) -> Exchange:
    """Return the bundle of what ranks tell each other, before anything is received."""
    part = plan.last.part
    return Exchange(
        notes_ptr=part("sent_notes"),
        maxima_ptr=part("sent_statistics") if maxima else None,
        sums_ptr=part("sent_sums"),
        offers_ptr=part("sent_offers"),
        verdicts_ptr=part("verdicts"),
        sources_ptr=Argument("holders" if maxima else "sources", torch.int32),
        received_ptr=None,
        length=0,
        notes_start=0,
        raw_start=0,
        ranks=shards.ranks,
        most_blocks=1 if maxima else shards.most_blocks,
        OFFERS=1 if logprobs is None else 2,
        MATCHES=False,
        OVERLAPS=can_overlap(plan.device),
    )


def parts_of(
    inputs: Inputs, here: Sizes, sizes: Sizes, settles: bool, sums: bool, maxima: bool, logprobs: Logprobs | None
) -> Parts:
    """Return the parts of the workspace; those that are sent together follow each other."""
    num_rows, num_drafts = sizes.batch * (sizes.num_draft_tokens + 1), sizes.batch * sizes.num_draft_tokens
    has_drafts, is_raw = inputs.drafts.ids_ptr is not None, logprobs == "raw"
    rows = num_rows + num_drafts * (inputs.draft.ptr is not None)
    return {
        "sent_statistics": (torch.float32, rows * 2 * (1 if maxima else here.num_blocks)),
        "sent_raw_statistics": (torch.float32, num_rows * 2 * here.num_blocks) if is_raw else None,
        "sent_notes": (torch.float32, rows * NOTES.value),
        "sent_sums": (torch.float32, num_drafts * here.num_blocks) if sums else None,
        "sent_offers": (torch.int64, num_rows * (2 if logprobs is None else 4)),
        "statistics_here": (torch.float32, rows * 2 * here.num_blocks) if maxima else None,
        "state": (torch.int32, sizes.batch * FIELDS.value) if has_drafts else None,
        "statistics": (torch.float32, rows * 2 * sizes.num_blocks),
        "raw_statistics": (torch.float32, num_rows * 2 * sizes.num_blocks) if is_raw else None,
        "known": (torch.float32, rows * KNOWN.value),
        "verdicts": (torch.int32, num_rows),
        "candidates": (torch.float32, num_rows * NUMBERS.value) if settles else None,
        "listed": (torch.int32, num_drafts) if sums else None,
        "residual_sums": (torch.float32, num_drafts * sizes.num_blocks) if sums else None,
    }


def add_notes(plan: ShardedPlan, inputs: Inputs, workspace: Workspace, told: Exchange, here: Sizes) -> None:
    """Add the launches before the first exchange, given the sizes of this rank's shard."""
    add_reading(plan.last, inputs, workspace, here, None)
    rows = here.batch * (here.num_draft_tokens + 1)
    plan.last.add(exchange.note_kernel, (rows,), (inputs, workspace, told, here), num_warps=4)


def add_arranging(plan: ShardedPlan, inputs: Inputs, workspace: Workspace, told: Exchange, sizes: Sizes) -> Exchange:
    """Add the first exchange, and the launch that puts what was received in order; return what is told from then on."""
    received = plan.exchange(["sent_statistics", "sent_raw_statistics", "sent_notes"], torch.float32)
    _, raw_start, notes_start = received.pop("beginnings")
    told = told._replace(**received, raw_start=raw_start, notes_start=notes_start)
    rows = sizes.batch * (sizes.num_draft_tokens + 1)
    bundles = inputs, workspace, told, sizes
    plan.last.add(exchange.arrange_kernel, (rows,), bundles, num_warps=4, follows=False)
    return told


def add_residuals(
    plan: ShardedPlan, inputs: Inputs, workspace: Workspace, told: Exchange, sizes: Sizes, sums: bool
) -> Exchange:
    """Add the launches of block verification before its offers, and the exchange of residual sums if there are any."""
    tuning = Settling(*SETTLING, 0, ALL.value if sums else OPEN_ONES.value, can_overlap(plan.device))
    bundles, requests, num_draft_tokens = (inputs, workspace, sizes, tuning), sizes.batch, sizes.num_draft_tokens
    plan.last.add(ratio_kernel, (requests * num_draft_tokens,), bundles, num_warps=4)
    plan.last.add(decide_kernel, (requests * (num_draft_tokens + 1),), bundles, num_warps=4)
    if not sums:
        return told
    shares = requests * num_draft_tokens * triton.cdiv(told.most_blocks, tuning.BLOCKS)
    programs = min(shares, SUM_PROGRAMS)
    plan.last.add(exchange.sum_shard_kernel, (programs,), (inputs, workspace, told, sizes, tuning), num_warps=8)
    received = plan.exchange(["sent_sums"], torch.float32)
    received.pop("beginnings")
    told = told._replace(**received)
    rows = requests * num_draft_tokens
    plan.last.add(exchange.arrange_sums_kernel, (rows,), (workspace, told, sizes), num_warps=4, follows=False)
    return told


def add_offers(
    plan: ShardedPlan,
    inputs: Inputs,
    outputs: Any,
    workspace: Workspace,
    told: Exchange,
    sizes: Sizes,
    rule: AcceptRule,
    decide: Any,
    *,
    settles: bool,
    sums: bool,
) -> None:
    """Add the launch that offers tokens."""
    flags = not settles, False, settles, ALL.value if sums else OPEN_ONES.value, can_overlap(plan.device)
    has_draft_rows = inputs.draft.ptr is not None
    tuning = Searching(*SEARCH["many" if has_draft_rows else "few"], decide, probabilistic.draw, *flags)
    plan.last.add(
        sharded.offer_kernel,
        (sizes.batch * (1 if settles else sizes.num_draft_tokens + 1),),
        (inputs, outputs, workspace, told, sizes, tuning),
        num_warps=8 if has_draft_rows else rule.num_warps,
        max_registers=EMIT_REGISTERS if has_draft_rows else None,
    )


def add_finish(plan: ShardedPlan, inputs: Inputs, outputs: Any, told: Exchange, sizes: Sizes, is_known: bool) -> None:
    """Add the exchange of offers, if all ranks do not offer the same, and the launch that takes the best."""
    if is_known:
        told = told._replace(received_ptr=told.offers_ptr, length=0, ranks=1)
    else:
        received = plan.exchange(["sent_offers"], torch.int64)
        received.pop("beginnings")
        told = told._replace(**received)
    plan.last.add(sharded.finish_kernel, (sizes.batch,), (inputs, outputs, told, sizes), num_warps=1, follows=is_known)
