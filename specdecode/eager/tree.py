"""Trees in PyTorch: a walk in rounds, one for each depth; and the siblings of a node.

A round is a `strict` step without drafts. It draws the target's own token from one row of each request, the row of its
current node, and goes to the child with that token. Rows off the path are not read.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specdecode.arguments import on_host
from specdecode.batch import RowBatch, SamplerOutput, TreeBatch, TreeOutput, VerificationBatch
from specdecode.eager.inputs import row_temperature, seeds_and_positions
from specdecode.eager.packed import locate
from specdecode.eager.philox import exponential
from specdecode.eager.selection import block_sums, by_chunks, exp_scaled
from specdecode.eager.truncation import RowSampling, read, row_sampling
from specdecode.noise import SELECT

NOTHING = {"logprobs": torch.nan, "top_token_ids": -1, "top_logprobs": torch.nan}
NOTHING |= {"num_kept": 0, "kept_token_ids": -1, "kept_cutoff": -1}
"""The padding of each list after the last token of a request."""


class Walk(NamedTuple):
    """The state of a walk; each round updates it."""

    parents: Tensor  # [batch, nodes] int64, -1 for node 0 and for nodes that cannot be followed
    first_row: Tensor  # [batch] int64, the row of node 0
    row: Tensor  # [batch] int64, the row of the current node; -1 if the walk has ended, or there is no row
    position: Tensor  # [batch] int64, the position of the token drawn from that row
    token_ids: Tensor  # [batch, max_depth + 1] int64, -1 where nothing is emitted
    nodes: Tensor  # [batch, max_depth] int32, -1 where nothing is accepted
    num_accepted: Tensor  # [batch] int32
    num_draft_tokens: Tensor  # [batch] int32, the depth of the tree
    invalid: Tensor  # [batch] bool, whether the row of an emitted token had no finite logit


def start(batch: TreeBatch) -> Walk:
    """Return the walk at node 0."""
    packing, nodes = batch.packing, torch.arange(batch.parents.shape[1], device=batch.parents.device)
    first_row, last_node, _ = locate(packing, len(batch.rows.target_logits))
    parents, ids = batch.parents.to(torch.int64), batch.token_ids
    is_node = (nodes > 0) & (nodes <= last_node[:, None]) & (ids >= 0) & (ids < batch.rows.target_logits.shape[1])
    parents = parents.where(is_node & (parents >= 0) & (parents <= last_node[:, None]), -1)
    return Walk(
        parents,
        first_row,
        torch.where(last_node >= 0, first_row, -1),
        torch.zeros_like(first_row) if batch.rows.positions is None else batch.rows.positions.clone(),
        first_row.new_full((len(first_row), batch.max_depth + 1), -1),
        first_row.new_full((len(first_row), batch.max_depth), -1, dtype=torch.int32),
        torch.zeros_like(first_row, dtype=torch.int32),
        depth_of(parents, batch.max_depth),
        torch.zeros_like(first_row, dtype=torch.bool),
    )


def depth_of(parents: Tensor, max_depth: int) -> Tensor:
    """Return the depth of each tree, at most max_depth, [batch] int32."""
    is_reached = torch.zeros_like(parents, dtype=torch.bool)
    is_reached[:, :1] = True  # nodes at the current depth
    depth = torch.zeros_like(parents[:, 0], dtype=torch.int32)
    for _ in range(min(max_depth, parents.shape[1] - 1)):
        is_reached = is_reached.gather(1, parents.clamp(min=0)) & (parents >= 0)
        depth += is_reached.any(dim=1)
    return depth


def advance(batch: TreeBatch, walk: Walk, output: SamplerOutput, depth: int) -> None:
    """Record the token that each request emits in a round, and go to the child with that token.

    Of equal siblings the lowest node is followed.
    """
    emitted, is_walking = output.token_ids[:, 0], walk.num_accepted == depth
    walk.token_ids[:, depth] = emitted.where(is_walking, -1)
    walk.invalid.logical_or_(output.invalid & is_walking)
    if depth == batch.max_depth:
        return
    node = walk.nodes[:, depth - 1, None] if depth > 0 else torch.zeros_like(walk.row)[:, None]
    is_next = (walk.parents == node) & (batch.token_ids == emitted[:, None]) & is_walking[:, None]
    is_found, child = is_next.max(dim=1)  # the first of equal nodes
    walk.nodes[:, depth] = child.where(is_found, -1)
    walk.num_accepted.add_(is_found)
    walk.row.copy_(torch.where(is_found, walk.first_row + child, -1))
    walk.position.add_(1)


def walk_in_rounds(
    batch: TreeBatch,
    walk: Walk,
    verify: Callable[[str, VerificationBatch], SamplerOutput],
    advance: Callable[[TreeBatch, Walk, SamplerOutput, int], None],
) -> TreeOutput:
    """Walk from node 0 through the nodes whose tokens are the target's own, with one `strict` step a round."""
    rounds = []
    for depth in range(batch.num_rounds):
        rounds.append(verify("strict", batch.round(walk.row, walk.position, walk.token_ids[:, :depth])))
        advance(batch, walk, rounds[-1], depth)
        if on_host(walk.row) and bool((walk.num_accepted <= depth).all()):
            break
    return output_of(walk, {name: columns(name, rounds, walk.token_ids) for name in NOTHING})


def output_of(walk: Walk, lists: dict[str, Tensor | None]) -> TreeOutput:
    """Return the result of a walk that has ended."""
    counts = walk.num_accepted, walk.num_draft_tokens, walk.invalid
    return TreeOutput(walk.token_ids, walk.nodes, *counts)._replace(**lists)  # type: ignore[arg-type]


def columns(name: str, rounds: list[SamplerOutput], token_ids: Tensor) -> Tensor | None:
    """Return a list of all rounds, [batch, max_depth + 1, ...], or None if it was not requested."""
    each: list[Tensor] = [getattr(output, name) for output in rounds]
    if each[0] is None:
        return None
    shape = (*token_ids.shape, *each[0].shape[2:])
    result = each[0].new_full(shape, NOTHING[name])
    is_emitted = token_ids[:, : len(rounds)].view(len(token_ids), len(rounds), *[1] * (len(shape) - 2)) >= 0
    result[:, : len(rounds)] = torch.cat(each, dim=1).where(is_emitted, NOTHING[name])
    return result


@torch.no_grad()
def siblings(batch: RowBatch, width: int) -> Tensor:
    """Draw the children of a node from each row, [batch, width] int64, the likeliest first.

    They are the tokens with the smallest lags in the race that draws the target's own token, then -1 if fewer are
    possible. For greedy requests they are the tokens with the largest logits.
    """
    temperature, greedy = row_temperature(batch.temperature, batch.logits)
    seeds, positions = seeds_and_positions(batch, torch.arange(len(batch.logits), device=batch.logits.device))
    sampling = row_sampling(temperature, batch.truncation, batch.logits.shape[-1])
    is_greedy = greedy if isinstance(greedy, Tensor) else torch.full(seeds.shape, greedy, device=seeds.device)

    def draw(
        logits: Tensor, sampling: RowSampling, seeds: Tensor, positions: Tensor, is_greedy: Tensor
    ) -> tuple[Tensor]:
        rows, _ = read((logits,), (sampling,))
        weights = exp_scaled(rows.logits[0], rows.row_max[0], sampling.temperature[..., None])
        token_ids, total = race_order(weights, seeds, positions, width), weights.sum(dim=-1, keepdim=True)
        if rows.first is not None:
            point = nn.functional.pad(rows.first[0], (0, width - 1), value=-1)
            token_ids = token_ids.where(total > 0, point)
        if on_host(is_greedy) and not is_greedy.any():
            return (token_ids,)
        return (likeliest(logits, width).where(is_greedy[:, None], token_ids),)

    return by_chunks(draw, batch.logits.shape[-1], batch.logits, sampling, seeds, positions, is_greedy)[0]


def race_order(weights: Tensor, seeds: Tensor, positions: Tensor, width: int) -> Tensor:
    """Return the tokens with the smallest lags in the race of [rows, padded vocab] weights, [rows, width] int64.

    The lag of token v in block b is log(t_b / t_best) + log(t_v / t_first), where times are E / w, t_best is the smallest
    time of a block, and t_first the smallest time of a token in block b. Only the first `width` blocks can matter.
    """
    sums = block_sums(weights)
    num_blocks, size = sums.shape[1], weights.shape[1] // sums.shape[1]
    ids = torch.arange(max(num_blocks, size), device=weights.device)
    counters = seeds[:, None], positions[:, None]
    block_times = exponential(*counters, ids[:num_blocks], SELECT[0]) / sums
    block_times, blocks = block_times.topk(min(width, num_blocks), largest=False)
    blocks, order = blocks.sort(dim=1)  # so that equal lags are in the order of ids
    token_ids = (blocks[:, :, None] * size + ids[:size]).flatten(1)
    times = exponential(*counters, token_ids, SELECT[1]) / weights.gather(1, token_ids)
    times = times.view(len(times), -1, size)
    block_lags = (block_times / block_times[:, :1]).log().gather(1, order)
    lags = (times / times.amin(dim=2, keepdim=True)).log() + block_lags[..., None]
    lags = lags.flatten(1).nan_to_num(nan=torch.inf, posinf=torch.inf)
    lags, first = lags.sort(dim=1, stable=True)
    token_ids = token_ids.gather(1, first).masked_fill(lags == torch.inf, -1)[:, :width]
    return nn.functional.pad(token_ids, (0, width - token_ids.shape[1]), value=-1)


def likeliest(logits: Tensor, width: int) -> Tensor:
    """Return the tokens with the largest logits, [rows, width] int64, then -1; token 0 in rows without finite logits."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32)).nan_to_num(
        nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    values, token_ids = values.sort(dim=1, descending=True, stable=True)
    is_left_out = values == -torch.inf
    token_ids[:, :1].masked_fill_(is_left_out[:, :1], 0)
    is_left_out[:, 0] = False
    token_ids = token_ids.masked_fill(is_left_out, -1)[:, :width]
    return nn.functional.pad(token_ids, (0, width - token_ids.shape[1]), value=-1)
