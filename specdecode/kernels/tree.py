"""Trees on a GPU: the walk of `eager.tree`, with three small kernels in addition to the steps that draw tokens.

In rounds, each request reads only the row of its current node: a `strict` step of one row per request, then a launch that
moves to the child. Small batches of trees are read at once, in one step, and one launch walks: fewer launches, more
bytes.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode.batch import SamplerOutput, TreeBatch, TreeOutput, VerificationBatch
from specdecode.eager.tree import Walk, output_of, walk_in_rounds
from specdecode.kernels.call import verify
from specdecode.kernels.launch import compile_ahead

LOGITS_A_ROUND = {"whole": 16_000_000, "narrow": 30_000_000, "wide": 110_000_000}
"""The most logits that are read at once, for each round that this saves, by the kind of rows.

With top-p alone, rows may be wide: a round then waits for the row with the longest search.
"""

BLOCK = 256  # nodes that one iteration searches for a child; kernels for larger trees have four warps


SIZES = ["num_rows", "num_slots", "num_nodes", "vocab_size", "max_depth", "most_drafts", "parents_stride", "id_stride"]
SIZES += ["depth", "first_seed"]
POINTERS = ["row_starts_ptr", "slots_ptr", "parents_ptr", "ids_ptr", "emitted_ptr", "is_invalid_ptr"]  # aligned or not
POINTERS += ["seeds_ptr", "positions_ptr"]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def start_kernel(
    row_starts_ptr, slots_ptr, parents_ptr, parents_stride, ids_ptr, id_stride, seeds_ptr, first_seed, positions_ptr,
    links_ptr, row_ptr, position_ptr, slot_ptr, seed_ptr, token_ids_ptr, nodes_ptr, num_accepted_ptr, num_drafts_ptr,
    invalid_ptr, num_rows, num_slots, num_nodes, vocab_size, max_depth, most_drafts, NODES: tl.constexpr,
    DEPTHS: tl.constexpr, SEEDS_BY_REQUEST: tl.constexpr, BY_NODE: tl.constexpr,
):  # fmt: skip
    """Start the walk of one request: its links, empty results, and the row to read, or the rows of all nodes."""
    request, nodes, depths = tl.program_id(0).to(tl.int64), tl.arange(0, NODES), tl.arange(0, DEPTHS)
    first, end = tl.load(row_starts_ptr + request).to(tl.int64), tl.load(row_starts_ptr + request + 1).to(tl.int64)
    has_rows = (first >= 0) & (first < end) & (end <= num_rows) & (end - first <= num_nodes)
    slot = request
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + request).to(tl.int64)
        has_rows &= (slot >= 0) & (slot < num_slots)
    last = tl.where(has_rows, end - first - 1, -1)
    inside = nodes < num_nodes
    parents = tl.load(parents_ptr + request * parents_stride + nodes, mask=inside, other=-1).to(tl.int64)
    ids = tl.load(ids_ptr + request * id_stride + nodes, mask=inside, other=-1).to(tl.int64)
    is_node = (nodes > 0) & (nodes <= last) & (ids >= 0) & (ids < vocab_size) & (parents >= 0) & (parents <= last)
    links_ptr += request * num_nodes
    links = tl.where(is_node, parents, -1).to(tl.int32)
    tl.store(links_ptr + nodes, links, mask=inside)
    reached, depth = tl.where(inside, nodes, -1), tl.zeros([NODES], tl.int32)
    for _ in range(most_drafts):
        moves = reached > 0
        reached = tl.where(moves, tl.gather(links, tl.maximum(reached, 0), 0), reached)
        depth += moves.to(tl.int32)
    depth = tl.where((reached == 0) & (nodes <= last), depth, -1)
    position = request * 0 if positions_ptr is None else tl.load(positions_ptr + request)
    if BY_NODE:
        seed = first_seed + request
        if seeds_ptr is not None:
            index = request if SEEDS_BY_REQUEST else slot
            seed = tl.load(seeds_ptr + index, mask=has_rows, other=0)
        each = request * num_nodes + nodes
        tl.store(row_ptr + each, tl.where(depth >= 0, first + nodes, -1), mask=inside)
        tl.store(position_ptr + each, position + depth, mask=inside)
        tl.store(slot_ptr + each, slot + nodes * 0, mask=inside)
        tl.store(seed_ptr + each, seed + nodes * 0, mask=inside)
    else:
        tl.store(row_ptr + request, tl.where(has_rows, first, -1))
        tl.store(position_ptr + request, position)
    tl.store(
        token_ids_ptr + request * (max_depth + 1) + depths, tl.full([DEPTHS], -1, tl.int64), mask=depths <= max_depth
    )
    tl.store(nodes_ptr + request * max_depth + depths, tl.full([DEPTHS], -1, tl.int32), mask=depths < max_depth)
    tl.store(num_accepted_ptr + request, 0)
    tl.store(num_drafts_ptr + request, tl.maximum(tl.max(depth, 0), 0))
    tl.store(invalid_ptr + request, tl.full([], False, tl.int1))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def advance_kernel(
    emitted_ptr, is_invalid_ptr, row_starts_ptr, links_ptr, ids_ptr, id_stride, row_ptr, position_ptr, token_ids_ptr,
    nodes_ptr, num_accepted_ptr, invalid_ptr, num_nodes, max_depth, depth, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk one request one level down, given the token drawn at its current node."""
    request, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    links_ptr, ids_ptr = links_ptr + request * num_nodes, ids_ptr + request * id_stride
    accepted, token = tl.load(num_accepted_ptr + request), tl.load(emitted_ptr + request)
    is_walking = accepted == depth
    node = tl.load(nodes_ptr + request * max_depth + depth - 1, mask=depth > 0, other=0)
    child = num_nodes
    for start in range(0, num_nodes, BLOCK):
        inside = start + lanes < num_nodes
        links = tl.load(links_ptr + start + lanes, mask=inside, other=-1)
        ids = tl.load(ids_ptr + start + lanes, mask=inside, other=-1).to(tl.int64)
        is_next = (links == node) & (ids == token) & inside & is_walking & (depth < max_depth)
        child = tl.minimum(child, tl.min(tl.where(is_next, start + lanes, num_nodes), 0))
    is_found = child < num_nodes
    first, position = tl.load(row_starts_ptr + request).to(tl.int64), tl.load(position_ptr + request)
    invalid = tl.load(invalid_ptr + request).to(tl.int1) | (is_walking & tl.load(is_invalid_ptr + request).to(tl.int1))
    tl.store(token_ids_ptr + request * (max_depth + 1) + depth, tl.where(is_walking, token, -1))
    tl.store(nodes_ptr + request * max_depth + depth, tl.where(is_found, child, -1), mask=depth < max_depth)
    tl.store(num_accepted_ptr + request, accepted + is_found.to(tl.int32))
    tl.store(invalid_ptr + request, invalid)
    tl.store(row_ptr + request, tl.where(is_found, first + child, -1))
    tl.store(position_ptr + request, position + 1)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def walk_kernel(
    emitted_ptr, is_invalid_ptr, links_ptr, ids_ptr, id_stride, token_ids_ptr, nodes_ptr, num_accepted_ptr, invalid_ptr,
    num_nodes, max_depth, most_drafts, NODES: tl.constexpr, DEPTHS: tl.constexpr,
):  # fmt: skip
    """Walk one request to the end, given the tokens drawn at all its nodes."""
    request, nodes, depths = tl.program_id(0).to(tl.int64), tl.arange(0, NODES), tl.arange(0, DEPTHS)
    emitted_ptr, is_invalid_ptr = emitted_ptr + request * num_nodes, is_invalid_ptr + request * num_nodes
    inside = nodes < num_nodes
    links = tl.load(links_ptr + request * num_nodes + nodes, mask=inside, other=-1)
    ids = tl.load(ids_ptr + request * id_stride + nodes, mask=inside, other=-1).to(tl.int64)
    drawn = tl.load(emitted_ptr + nodes, mask=inside, other=-1)
    is_drawn = (links >= 0) & (ids == tl.gather(drawn, tl.maximum(links, 0), 0))  # the token drawn at its parent
    path, node = tl.where(depths == 0, 0, -1), 0
    for depth in range(1, most_drafts + 1):
        child = tl.min(tl.where(is_drawn & (links == node), nodes, NODES), 0)
        node = tl.where(child < NODES, child, -1)
        path = tl.where(depths == depth, node, path)
    is_walked = path >= 0
    tokens = tl.load(emitted_ptr + path, mask=is_walked, other=-1)
    is_invalid = tl.load(is_invalid_ptr + path, mask=is_walked, other=0).to(tl.int32)
    tl.store(token_ids_ptr + request * (max_depth + 1) + depths, tokens, mask=depths <= max_depth)
    tl.store(nodes_ptr + request * max_depth + depths - 1, path, mask=(depths > 0) & (depths <= max_depth))
    tl.store(num_accepted_ptr + request, tl.sum(is_walked.to(tl.int32), 0) - 1)
    tl.store(invalid_ptr + request, tl.max(is_invalid, 0) > 0)


class Nodes(NamedTuple):
    """The rows of all nodes, each verified as a request without drafts; [batch, nodes] int64 each."""

    row: Tensor  # -1 for padding
    position: Tensor
    slot: Tensor
    seed: Tensor


def start(batch: TreeBatch, by_node: bool = False) -> tuple[Walk, Nodes | None]:
    """Return the walk at node 0, with int32 links; with `by_node` also the rows of all nodes, which replace its `row`."""
    requests, num_nodes = batch.token_ids.shape
    new, device = torch.empty, batch.token_ids.device
    packing, target, seeds = batch.packing, batch.rows.target_logits, batch.rows.seeds
    nodes = Nodes(*new(4, requests, num_nodes, dtype=torch.int64, device=device)) if by_node else None
    row, position = (nodes.row, nodes.position) if nodes else new(2, requests, dtype=torch.int64, device=device)
    walk = Walk(
        new(requests, num_nodes, dtype=torch.int32, device=device),
        packing.row_starts[:-1],
        row,
        position,
        new(requests, batch.max_depth + 1, dtype=torch.int64, device=device),
        new(requests, batch.max_depth, dtype=torch.int32, device=device),
        new(requests, dtype=torch.int32, device=device),
        new(requests, dtype=torch.int32, device=device),
        new(requests, dtype=torch.bool, device=device),
    )
    if requests > 0:
        has_seeds = isinstance(seeds, Tensor)
        start_kernel[(requests,)](
            packing.row_starts, packing.slots, batch.parents, batch.parents.stride(0), batch.token_ids,
            batch.token_ids.stride(0), seeds if has_seeds else None, 0 if has_seeds else seeds, batch.rows.positions,
            walk.parents, row, position, nodes and nodes.slot, nodes and nodes.seed, walk.token_ids, walk.nodes,
            walk.num_accepted, walk.num_draft_tokens, walk.invalid, len(target), packing.num_slots, num_nodes,
            target.shape[1], batch.max_depth, batch.num_rounds - 1, NODES=triton.next_power_of_2(num_nodes),
            DEPTHS=triton.next_power_of_2(batch.max_depth + 1), SEEDS_BY_REQUEST=packing.seeds_by_request, BY_NODE=by_node,
            num_warps=1 if num_nodes <= BLOCK else 4,
        )  # fmt: skip
    return walk, nodes


def advance(batch: TreeBatch, walk: Walk, output: SamplerOutput, depth: int) -> None:
    """Record the token that each request emits in a round, and move to the child with this token."""
    requests, num_nodes = batch.token_ids.shape
    if requests > 0:
        advance_kernel[(requests,)](
            output.token_ids, output.invalid, walk.first_row, walk.parents, batch.token_ids, batch.token_ids.stride(0),
            walk.row, walk.position, walk.token_ids, walk.nodes, walk.num_accepted, walk.invalid, num_nodes,
            batch.max_depth, depth, BLOCK=min(BLOCK, triton.next_power_of_2(num_nodes)), num_warps=1,
        )  # fmt: skip


def walk_all(batch: TreeBatch, walk: Walk, output: SamplerOutput) -> None:
    """Walk to the end, given the tokens of all nodes."""
    requests, num_nodes = batch.token_ids.shape
    if requests > 0:
        walk_kernel[(requests,)](
            output.token_ids, output.invalid, walk.parents, batch.token_ids, batch.token_ids.stride(0), walk.token_ids,
            walk.nodes, walk.num_accepted, walk.invalid, num_nodes, batch.max_depth, batch.num_rounds - 1,
            NODES=triton.next_power_of_2(num_nodes), DEPTHS=triton.next_power_of_2(batch.max_depth + 1),
            num_warps=1 if num_nodes <= BLOCK else 4,
        )  # fmt: skip


def needs_rounds(batch: TreeBatch) -> bool:
    """Return whether rows must be read in rounds: penalties depend on the path, and only rounds collect lists."""
    rows = batch.rows
    has_lists = rows.logprobs is not None or rows.has_lists
    return has_lists or (rows.adjustments is not None and rows.adjustments.penalizes)


def reads_all_at_once(batch: TreeBatch) -> bool:
    """Return whether one step over all rows takes less time than a round for each depth."""
    kind, truncation = "whole", batch.rows.truncation
    if truncation is not None:
        kind = "wide" if truncation.top_k is None and truncation.min_p is None else "narrow"
    num_logits = batch.token_ids.numel() * batch.rows.target_logits.shape[1]
    return not needs_rounds(batch) and num_logits <= LOGITS_A_ROUND[kind] * (batch.num_rounds - 1)


def all_nodes(batch: TreeBatch, nodes: Nodes) -> VerificationBatch:
    """Return the batch that draws the target's own token at every node."""
    row, position, slot, seed = (each.flatten() for each in nodes)
    packing = batch.packing._replace(
        row_starts=row, num_draft_tokens=0, slots=slot, seeds_by_request=True, is_round=True
    )
    return batch.rows._replace(seeds=seed, positions=position, packing=packing)


def with_contiguous_values(batch: TreeBatch) -> TreeBatch:
    """Return the batch as these kernels load it: unit stride along nodes, contiguous tensors of requests."""
    rows, packing = batch.rows, batch.packing
    ids, parents = (each if each.stride(-1) == 1 else each.contiguous() for each in (batch.token_ids, batch.parents))
    slots = None if packing.slots is None else packing.slots.contiguous()
    seeds = rows.seeds.contiguous() if isinstance(rows.seeds, Tensor) else rows.seeds
    positions = None if rows.positions is None else rows.positions.contiguous()
    packing = packing._replace(row_starts=packing.row_starts.contiguous(), slots=slots)
    rows = rows._replace(packing=packing, seeds=seeds, positions=positions)
    return batch._replace(rows=rows, token_ids=ids, parents=parents)


def walked(batch: TreeBatch, by_node: bool, many: bool | None = None) -> TreeOutput:
    """Walk in rounds, or from the tokens of all nodes; `many` as for `verify`."""
    step = functools.partial(verify, many=many)
    walk, nodes = start(batch, by_node)
    if nodes is None:
        return walk_in_rounds(batch, walk, step, advance)
    walk_all(batch, walk, step("strict", all_nodes(batch, nodes)))
    return output_of(walk, {})


def verify_tree(batch: TreeBatch) -> TreeOutput:
    """Verify one tree of drafts for each request."""
    with torch.cuda.device_of(batch.token_ids):
        return walked(with_contiguous_values(batch), reads_all_at_once(batch))


def warm_up_tree(batch: TreeBatch) -> None:
    """Compile the kernels for trees with this number of nodes and arguments like these, for any number of requests."""
    batch = with_contiguous_values(batch)
    ways = (False,) if needs_rounds(batch) else (False, True)
    with torch.cuda.device_of(batch.token_ids):
        compile_ahead([functools.partial(walked, batch, way, many) for way in ways for many in (False, True)])
