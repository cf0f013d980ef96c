"""From what is asked of a step over shards to its launches and exchanges, for calls of all sizes; `launches` runs them."""

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from specdecode import sharding
from specdecode.kernels.arguments import Outputs, Searching, Workspace
from specdecode.kernels.bundles import Structure, at_least, class_of, outputs_in
from specdecode.kernels.formulas import Argument, Number, ceil_div
from specdecode.kernels.launch import Plan, can_overlap
from specdecode.kernels.methods import Method
from specdecode.kernels.plan import (
    RESIDUAL_LANES,
    SUM_PROGRAMS,
    TRUNCATION_REGISTERS,
    add_deciding,
    add_drawing,
    add_reading,
    inputs_apart,
)
from specdecode.kernels.sharding import arrange, cut, offer, rivals, tell
from specdecode.kernels.sharding.arguments import Arranging, Channel, Cutting, Exchange
from specdecode.kernels.sharding.launches import ShardedPlan
from specdecode.kernels.sharding.memory import Step, Told, Way, parts_of, step_of, words_told

# Programs of a launch that wait for other ranks, at most, and registers of a thread; each program is one warp, so they take
# half of a multiprocessor, and leave the other half to another group's launches. With half the registers arranging 256
# requests of 3 drafts took 6 us longer, with four warps a program, 3 us.
WAITING_PROGRAMS, WAITING_REGISTERS = 1056, 128

MIN_SHARD_BLOCKS = 32  # MAX_BLOCKS of a shard is at least this

# TOP and BLOCKS of `arguments.Searching`: less than on one GPU, as a rank has only a part of the blocks; more where draft
# rows' sums are not known and ranks cannot hint to each other: one without likely tokens may look at most of its blocks.
SEARCH, UNBOUNDED_SEARCH = (4, 1), (8, 8)


def run(
    fields: tuple[Any, ...],
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    shard: sharding.VocabShard,
    is_greedy: bool,
) -> None:
    """Find the plan of a step over shards, or make it, and run it, given the fields of its `Structure` on this rank."""
    target, num_draft_tokens = tensors["target"], numbers["num_draft_tokens"]
    transport, shards = shard.transport_on(target.device), shard.agree(target)
    end = shards.start + shards.local
    way = Way(
        is_greedy,
        transport.is_symmetric,
        numbers["batch"] * (num_draft_tokens + 1) > WAITING_PROGRAMS,
        shards.ranks,
        at_least(MIN_SHARD_BLOCKS, shards.most_blocks),
        class_of(num_draft_tokens, shards.vocab_size),
        end % 16 == 0,
    )
    numbers |= {"whole_vocab_size": shards.vocab_size, "shard_start": shards.start, "shard_end": end}
    numbers |= {"rank": shards.rank, "most_blocks": shards.most_blocks, "num_holders": len(shards.holders)}
    ranks = {"sources": shards.sources, "holders": shards.holders, "order": shards.ranks_in_order}
    plan_sharded(fields, way).run(tensors | ranks, numbers, transport)


@functools.lru_cache(maxsize=1024)
def plan_sharded(fields: tuple[Any, ...], way: Way) -> ShardedPlan:
    """Plan all steps of a structure of whose rows this rank has a shard, given the structure's fields."""
    structure = Structure(*fields)
    step, method = step_of(structure, way), structure.method
    told = words_told(step)
    plan = ShardedPlan(structure.device, parts_of(step, told), way.is_symmetric)
    outputs = outputs_in(structure)
    workspace = workspace_of(plan, outputs.logprobs_ptr)
    untruncated = workspace._replace(cutoffs_ptr=None, logprobs_ptr=None) if step.truncates else workspace
    exchanged = add_telling(plan, step, untruncated, exchange_of(plan, step, told))
    while_arranging = method.decide_before_truncation if step.truncates else method.decide
    add_arranging(plan, step, untruncated, exchanged, while_arranging if step.decides else None)
    if step.truncates:
        add_truncation(plan, step, workspace, exchanged, told)
    decide = method.decide if method.reads_drafts else offer.decide_sample
    if step.maxima and not step.all_know:
        decide = offer.decide_sample_here
        workspace = workspace._replace(statistics_ptr=plan.last.part("statistics_here"))
    if step.settles:
        exchanged = add_residuals(plan, step, workspace, exchanged)
    add_offers(plan, step, outputs, workspace, exchanged, decide, method)
    add_finish(plan, step, outputs, exchanged)
    return plan


def workspace_of(plan: ShardedPlan, logprobs: Argument | None) -> Workspace:
    """Return the bundle of memory that launches after the first exchange use as those of one GPU do."""
    part = plan.last.part
    return Workspace(
        state_ptr=part("state"),
        statistics_ptr=part("statistics"),
        cutoffs_ptr=part("cutoffs"),
        kept_ptr=part("kept"),
        terms_ptr=part("terms"),
        listed_ptr=part("listed"),
        residual_sums_ptr=part("residual_sums"),
        raw_statistics_ptr=part("raw_statistics"),
        draft_ids_ptr=None,
        logprobs_ptr=logprobs,
        known_ptr=part("known"),
        progress_ptr=part("progress"),
        raw_known_ptr=part("raw_known"),
    )


def exchange_of(plan: ShardedPlan, step: Step, told: Told) -> Exchange:
    """Return the bundle of what ranks tell each other, before anything is received."""
    method, drafts, ranks = step.structure.method, step.inputs.drafts, step.way.ranks
    own = plan.last.part("sent_offers")

    def of_memory(name: str, dtype: torch.dtype) -> Argument | None:
        return Argument(name, dtype) if plan.is_symmetric else None

    return Exchange(
        first=plan.channel("sent_first", sum(told[:4]), ranks),
        sums=plan.channel("sent_sums", told.sums, ranks),
        offers=Channel(own, own, 0, 0) if step.all_know else plan.channel("sent_offers", told.offers, ranks),
        verdicts_ptr=plan.last.part("verdicts"),
        sources_ptr=Argument("holders" if step.maxima else "sources", torch.int32),
        peers_ptr=of_memory("peers", torch.int64),
        memory_ptr=of_memory("memory", torch.int64),
        failed_ptr=of_memory("failed", torch.int32),
        half=Number("half") if plan.is_symmetric else 0,
        most_tries=Number("most_tries") if plan.is_symmetric else 0,
        rank=Number("rank"),
        raw_start=told.statistics,
        notes_start=told.statistics + told.raw_statistics,
        raw_notes_start=sum(told[:3]) if step.tells_raw else None,
        blocks_told=1 if step.maxima else step.here.num_blocks,
        RANKS=ranks,
        LANES=max(32, triton.next_power_of_2(ranks)),
        MAXIMA=step.maxima,
        NOTES=1 + (step.inputs.draft.ptr is not None),
        OFFERS=1 if step.structure.logprobs is None else 2,
        PER_ROW=step.per_row,
        MATCHES=not method.reads_drafts and drafts.ids_ptr is not None and drafts.rates_ptr is None,
        OVERLAPS=can_overlap(plan.device),
    )


def add_telling(plan: ShardedPlan, step: Step, workspace: Workspace, exchanged: Exchange) -> Exchange:
    """Add the launches before the first exchange, and that exchange."""
    part = plan.last.part
    mine = {"statistics_ptr": part("statistics_here"), "raw_statistics_ptr": part("raw_statistics_here")}
    workspace = workspace._replace(**mine, known_ptr=None)
    flat = step.structure.flat
    add_reading(plan.last, step.inputs, workspace, step.here, None, large=False, keeps_raw=True, flat=flat)
    bundles = step.inputs, workspace, exchanged, step.here
    plan.last.add(tell.tell_kernel, step.rows, bundles, num_warps=1)
    return exchanged._replace(first=plan.exchange(exchanged.first))


def add_arranging(plan: ShardedPlan, step: Step, workspace: Workspace, exchanged: Exchange, decide: Any) -> None:
    """Add the launch that puts what was heard in order, and may decide; before it one that waits, if it is large."""
    follows = plan.is_symmetric
    if plan.is_symmetric:
        launches = plan.last if step.way.is_crowded else plan.spare
        programs = ceil_div(step.rows, exchanged.LANES)
        add_waiting(launches, arrange.wait_kernel, programs, (exchanged, step.arranged), follows)
    bundles = step.inputs, workspace, exchanged, step.arranged, Arranging(decide)
    kernel, programs = arrange.arrange_kernel, step.rows
    plan.last.add(kernel, programs, bundles, num_warps=1, max_registers=WAITING_REGISTERS, follows=follows)


def add_truncation(plan: ShardedPlan, step: Step, workspace: Workspace, exchanged: Exchange, told: Told) -> None:
    """Add the launches that truncate rows, and their exchanges."""
    plan.row_words = step.row_words
    cutting = cutting_of(plan, step, told)
    told_of_rows = exchanged, cutting, step.sizes
    kinds = [(step.inputs, cutting, step.all_rows)]
    if step.inputs.adjustments.EXIST:  # target rows are read in another way than draft rows
        of_target, of_drafts = inputs_apart(step.inputs)
        kinds = [(of_target, cutting._replace(OF_DRAFTS=False), step.rows)]
        if step.inputs.draft.ptr is not None:
            kinds.append((of_drafts, cutting._replace(OF_DRAFTS=True), step.here.batch * step.here.num_draft_tokens))

    def add(kernel: Any, is_owner: bool = False) -> None:
        for inputs, cutting, rows in kinds:
            programs, bundles = (
                step.num_owned if is_owner else rows,
                (inputs, workspace, exchanged, cutting, step.sizes),
            )
            plan.last.add(kernel, programs, bundles, num_warps=cutting.WARPS, max_registers=TRUNCATION_REGISTERS)

    add(cut.list_kernel)
    plan.exchange(cutting.lists)
    add_waiting(plan.last, cut.merge_kernel, step.all_rows, (workspace, *told_of_rows), follows=True)
    add(cut.cut_kernel)
    plan.exchange(cutting.parts)
    programs = ceil_div(step.num_owned, exchanged.LANES)
    add_waiting(plan.last, cut.await_parts_kernel, programs, (workspace, *told_of_rows), follows=True)
    add(cut.cut_gathered_kernel, is_owner=True)
    plan.exchange(cutting.cuts)
    add_waiting(plan.last, cut.hear_cuts_kernel, step.all_rows, (workspace, *told_of_rows), follows=True)


def cutting_of(plan: ShardedPlan, step: Step, told: Told) -> Cutting:
    """Return the bundle of what ranks tell each other to truncate rows."""
    inputs, ranks = step.inputs, step.way.ranks
    cuts = plan.channel("cuts", told.cuts, 1)._replace(length=0)  # a word has one writer, which may be any rank
    return Cutting(
        lists=plan.channel("lists", told.lists, ranks),
        parts=plan.channel("parts", told.parts, ranks),
        cuts=cuts,
        order_ptr=Argument("order", torch.int32),
        rows_ptr=Argument("row_memory", torch.int64),
        peers_ptr=Argument("row_peers", torch.int64),
        row_bytes=step.row_bytes,
        more_bytes=step.more_bytes,
        num_rows=step.all_rows,
        rows_per_request=step.rows_per_request,
        num_owned=step.num_owned,
        OF_DRAFTS=None,
        ALIKE=inputs.draft.ptr is None or inputs.target.stride_token == inputs.draft.stride_token,
        POSTED=step.decides,
        WARPS=4 if step.structure.large else 8,
    )


def add_waiting(plan: Plan, kernel: Any, programs: Any, bundles: tuple[Any, ...], follows: bool) -> None:
    """Add a launch whose programs wait for other ranks, with as many programs as may, each for several items then."""
    programs = Number(min, (programs, WAITING_PROGRAMS))
    plan.add(kernel, programs, bundles, num_warps=1, max_registers=WAITING_REGISTERS, follows=follows)


def add_residuals(plan: ShardedPlan, step: Step, workspace: Workspace, exchanged: Exchange) -> Exchange:
    """Add the launches of block verification before its offers, and the exchange of residual sums if there are any."""
    tuning = add_deciding(plan.last, step.inputs, workspace, step.sizes, step.sums)
    if not step.sums:
        return exchanged
    num_drafts = step.sizes.batch * step.sizes.num_draft_tokens
    shares = num_drafts * ceil_div(exchanged.blocks_told, tuning.BLOCKS)
    bundles: tuple[Any, ...] = step.inputs, workspace, exchanged, step.sizes, tuning
    plan.last.add(tell.sum_shard_kernel, Number(min, (shares, SUM_PROGRAMS)), bundles, num_warps=8)
    exchanged = exchanged._replace(sums=plan.exchange(exchanged.sums))
    bundles = workspace, exchanged, step.sizes
    add_waiting(plan.last, arrange.arrange_sums_kernel, num_drafts, bundles, plan.is_symmetric)
    return exchanged


def add_offers(
    plan: ShardedPlan,
    step: Step,
    outputs: Outputs,
    workspace: Workspace,
    exchanged: Exchange,
    decide: Any,
    method: Method,
) -> None:
    """Add the launch that offers tokens."""
    is_unbounded = step.decides and step.inputs.drafts.logsumexp_ptr is not None and not plan.is_symmetric
    search = UNBOUNDED_SEARCH if is_unbounded else SEARCH
    flags = step.per_row, step.per_row and step.decides, step.settles, step.sums, can_overlap(plan.device)
    hints = (rivals.hint, rivals.hinted) if plan.is_symmetric else (None, None)
    tuning = Searching(*search, RESIDUAL_LANES, decide, None, *flags, rivals.least_score, *hints)
    bundles = step.inputs, outputs, workspace, exchanged, step.sizes, tuning
    add_drawing(plan.last, offer.offer_kernel, bundles, method.num_warps)


def add_finish(plan: ShardedPlan, step: Step, outputs: Outputs, exchanged: Exchange) -> None:
    """Add the exchange of offers, if all ranks do not offer the same, and the launch that takes the best."""
    if not step.all_know:
        exchanged = exchanged._replace(offers=plan.exchange(exchanged.offers))
    bundles = step.inputs, outputs, exchanged, step.sizes
    add_waiting(plan.last, offer.finish_kernel, step.sizes.batch, bundles, follows=step.all_know or plan.is_symmetric)
