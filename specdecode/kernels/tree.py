"""Trees on a GPU: the walk of `eager.tree`, with two small kernels in addition to the steps that draw tokens.

In rounds, each request reads only the row of its current node: a `strict` step of one row per request, then a launch that
moves to the child. Small trees are read at once, in one step, and one launch walks: fewer launches, more bytes.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode.arguments import seed_each
from specdecode.batch import SamplerOutput, TreeBatch, TreeOutput, VerificationBatch
from specdecode.eager.tree import Walk, output_of, walk_in_rounds
from specdecode.kernels.call import verify
from specdecode.kernels.launch import compile_ahead

LOGITS_A_ROUND = 10_000_000
"""All rows are read at once if they have at most this many logits for each saved round."""

BLOCK = 256  # nodes that one iteration searches for a child


SIZES = ["num_rows", "num_slots", "num_nodes", "vocab_size", "max_depth", "most", "tree_stride", "id_stride", "stride"]
SIZES += ["first_depth", "last_depth"]
POINTERS = ["row_starts_ptr", "slots_ptr", "parents_ptr", "ids_ptr", "emitted_ptr", "is_invalid_ptr"]  # aligned or not


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def start_kernel(
    row_starts_ptr, slots_ptr, parents_ptr, tree_stride, ids_ptr, id_stride, links_ptr, depths_ptr, row_ptr, token_ids_ptr,
    nodes_ptr, num_accepted_ptr, num_drafts_ptr, invalid_ptr, num_rows, num_slots, num_nodes, vocab_size, max_depth, most,
    NODES: tl.constexpr, DEPTHS: tl.constexpr,
):  # fmt: skip
    """Start the walk of one request: its links, the depth of each node up to `most`, and empty results."""
    request, nodes, depths = tl.program_id(0).to(tl.int64), tl.arange(0, NODES), tl.arange(0, DEPTHS)
    first, end = tl.load(row_starts_ptr + request).to(tl.int64), tl.load(row_starts_ptr + request + 1).to(tl.int64)
    has_rows = (first >= 0) & (first < end) & (end <= num_rows) & (end - first <= num_nodes)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + request).to(tl.int64)
        has_rows &= (slot >= 0) & (slot < num_slots)
    last = tl.where(has_rows, end - first - 1, -1)
    inside = nodes < num_nodes
    parents = tl.load(parents_ptr + request * tree_stride + nodes, mask=inside, other=-1).to(tl.int64)
    ids = tl.load(ids_ptr + request * id_stride + nodes, mask=inside, other=-1).to(tl.int64)
    is_node = (nodes > 0) & (nodes <= last) & (ids >= 0) & (ids < vocab_size) & (parents >= 0) & (parents <= last)
    links_ptr += request * num_nodes
    tl.store(links_ptr + nodes, tl.where(is_node, parents, -1).to(tl.int32), mask=inside)
    tl.debug_barrier()
    reached, depth = tl.where(inside, nodes, -1), tl.zeros([NODES], tl.int32)
    for _ in range(most):
        moves = reached > 0
        reached = tl.where(moves, tl.load(links_ptr + reached, mask=moves, other=-1), reached)
        depth += moves.to(tl.int32)
    depth = tl.where(reached == 0, depth, -1)
    tl.store(depths_ptr + request * num_nodes + nodes, tl.where(nodes <= last, depth, -1), mask=inside)
    tl.store(row_ptr + request, tl.where(has_rows, first, -1))
    tl.store(
        token_ids_ptr + request * (max_depth + 1) + depths, tl.full([DEPTHS], -1, tl.int64), mask=depths <= max_depth
    )
    tl.store(nodes_ptr + request * max_depth + depths, tl.full([DEPTHS], -1, tl.int32), mask=depths < max_depth)
    tl.store(num_accepted_ptr + request, 0)
    tl.store(num_drafts_ptr + request, tl.maximum(tl.max(depth, 0), 0))
    tl.store(invalid_ptr + request, tl.full([], False, tl.int1))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def walk_kernel(
    emitted_ptr, is_invalid_ptr, stride, row_starts_ptr, links_ptr, ids_ptr, id_stride, row_ptr, token_ids_ptr, nodes_ptr,
    num_accepted_ptr, invalid_ptr, num_nodes, max_depth, first_depth, last_depth, BLOCK: tl.constexpr, BY_NODE: tl.constexpr,
):  # fmt: skip
    """Walk one request from one depth to another, given the tokens drawn at its current node, or at all nodes."""
    request, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    emitted_ptr, is_invalid_ptr = emitted_ptr + request * stride, is_invalid_ptr + request * stride
    links_ptr, ids_ptr = links_ptr + request * num_nodes, ids_ptr + request * id_stride
    accepted = tl.load(num_accepted_ptr + request)
    invalid = tl.load(invalid_ptr + request).to(tl.int1)
    node = tl.load(nodes_ptr + request * max_depth + first_depth - 1, mask=first_depth > 0, other=0)
    for depth in range(first_depth, last_depth + 1):
        is_walking = accepted == depth
        drawn_at = 0
        if BY_NODE:
            drawn_at = tl.maximum(node, 0)
        token = tl.load(emitted_ptr + drawn_at)
        invalid |= is_walking & tl.load(is_invalid_ptr + drawn_at).to(tl.int1)
        tl.store(token_ids_ptr + request * (max_depth + 1) + depth, tl.where(is_walking, token, -1))
        child = num_nodes
        for start in range(0, num_nodes, BLOCK):
            inside = start + lanes < num_nodes
            links = tl.load(links_ptr + start + lanes, mask=inside, other=-1)
            ids = tl.load(ids_ptr + start + lanes, mask=inside, other=-1).to(tl.int64)
            is_next = (links == node) & (ids == token) & inside & is_walking & (depth < max_depth)
            child = tl.minimum(child, tl.min(tl.where(is_next, start + lanes, num_nodes), 0))
        node = tl.where(child < num_nodes, child, -1).to(tl.int32)
        tl.store(nodes_ptr + request * max_depth + depth, node, mask=depth < max_depth)
        accepted += (node >= 0).to(tl.int32)
    tl.store(num_accepted_ptr + request, accepted)
    tl.store(invalid_ptr + request, invalid)
    tl.store(row_ptr + request, tl.where(node >= 0, tl.load(row_starts_ptr + request).to(tl.int64) + node, -1))


def start(batch: TreeBatch, depths: Tensor) -> Walk:
    """Return the walk at node 0; write the depth of each node, -1 for padding."""
    requests, num_nodes = batch.token_ids.shape
    new, device = torch.empty, batch.token_ids.device
    row_starts, target = batch.packing.row_starts, batch.rows.target_logits
    walk = Walk(
        new(requests, num_nodes, dtype=torch.int32, device=device),
        row_starts[:-1],
        new(requests, dtype=torch.int64, device=device),
        new(requests, batch.max_depth + 1, dtype=torch.int64, device=device),
        new(requests, batch.max_depth, dtype=torch.int32, device=device),
        new(requests, dtype=torch.int32, device=device),
        new(requests, dtype=torch.int32, device=device),
        new(requests, dtype=torch.bool, device=device),
    )
    if requests == 0:
        return walk
    start_kernel[(requests,)](
        row_starts, batch.packing.slots, batch.parents, batch.parents.stride(0), batch.token_ids, batch.token_ids.stride(0),
        walk.parents, depths, walk.row, walk.token_ids, walk.nodes, walk.num_accepted, walk.num_draft_tokens, walk.invalid,
        len(target), batch.packing.num_slots, num_nodes, target.shape[1], batch.max_depth, batch.num_rounds - 1,
        NODES=triton.next_power_of_2(num_nodes), DEPTHS=triton.next_power_of_2(batch.max_depth + 1),
    )  # fmt: skip
    return walk


def advance(batch: TreeBatch, walk: Walk, output: SamplerOutput, depth: int, last_depth: int | None = None) -> None:
    """Move to the child with the token that a round emitted; with `last_depth` walk to the end, given tokens of all
    nodes.
    """
    requests, num_nodes = batch.token_ids.shape
    by_node = last_depth is not None
    if requests == 0:
        return
    walk_kernel[(requests,)](
        output.token_ids, output.invalid, num_nodes if by_node else 1, walk.first_row, walk.parents, batch.token_ids,
        batch.token_ids.stride(0), walk.row, walk.token_ids, walk.nodes, walk.num_accepted, walk.invalid, num_nodes,
        batch.max_depth, depth, depth if last_depth is None else last_depth,
        BLOCK=min(BLOCK, triton.next_power_of_2(num_nodes)), BY_NODE=by_node,
    )  # fmt: skip


def reads_all_at_once(batch: TreeBatch) -> bool:
    """Return whether one step over all rows takes less time than a round for each depth."""
    rows = batch.rows
    has_lists = rows.logprobs is not None or rows.has_lists
    penalizes = rows.adjustments is not None and rows.adjustments.penalizes  # output counts depend on the path
    return not (has_lists or penalizes) and batch.token_ids.numel() * rows.target_logits.shape[1] <= (
        LOGITS_A_ROUND * (batch.num_rounds - 1)
    )


def all_nodes(batch: TreeBatch, walk: Walk, depths: Tensor) -> VerificationBatch:
    """Return the batch that draws the target's own token at every node: each node is a request, padding has no row."""
    requests, num_nodes = batch.token_ids.shape
    rows, packing = batch.rows, batch.packing
    nodes = torch.arange(num_nodes, device=depths.device)
    each_request = torch.arange(requests, device=depths.device).repeat_interleave(num_nodes)
    row = torch.where(depths >= 0, walk.first_row[:, None] + nodes, -1)
    positions = depths if rows.positions is None else depths + rows.positions[:, None]
    seeds, by_request = rows.seeds, packing.seeds_by_request or not isinstance(rows.seeds, Tensor)
    if by_request:
        seeds = seed_each(seeds, requests, depths.device).repeat_interleave(num_nodes)
    packing = packing._replace(
        row_starts=row.flatten(),
        num_draft_tokens=0,
        slots=each_request if packing.slots is None else packing.slots[each_request],
        seeds_by_request=by_request,
        is_round=True,
    )
    return rows._replace(seeds=seeds, positions=positions.flatten(), packing=packing)


def with_contiguous_nodes(batch: TreeBatch) -> TreeBatch:
    """Return the batch with contiguous token ids, parents, row starts and slots."""
    ids, parents = (each if each.stride(-1) == 1 else each.contiguous() for each in (batch.token_ids, batch.parents))
    row_starts, slots = batch.packing.row_starts, batch.packing.slots
    slots = None if slots is None else slots.contiguous()
    packing = batch.packing._replace(row_starts=row_starts.contiguous(), slots=slots)
    return batch._replace(rows=batch.rows._replace(packing=packing), token_ids=ids, parents=parents)


def warm_up_tree(batch: TreeBatch) -> None:
    """Compile the kernels that draw tokens for trees with arguments like these, for any sizes."""
    batch = with_contiguous_nodes(batch)
    depths = torch.empty(batch.token_ids.shape, dtype=torch.int64, device=batch.token_ids.device)
    with torch.cuda.device_of(depths):
        walk = start(batch, depths)
        steps = batch.round(walk.row, walk.token_ids[:, :0]), all_nodes(batch, walk, depths)
        compile_ahead(
            [functools.partial(verify, "strict", step, many=many) for step in steps for many in (False, True)]
        )


def verify_tree(batch: TreeBatch) -> TreeOutput:
    """Verify one tree of drafts for each request."""
    batch = with_contiguous_nodes(batch)
    depths = torch.empty(batch.token_ids.shape, dtype=torch.int64, device=batch.token_ids.device)
    with torch.cuda.device_of(depths):
        walk = start(batch, depths)
        if not reads_all_at_once(batch):
            return walk_in_rounds(batch, walk, verify, advance)
        advance(batch, walk, verify("strict", all_nodes(batch, walk, depths)), 0, batch.num_rounds - 1)
    return output_of(walk, {})
