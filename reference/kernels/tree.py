"""Trees in Triton: the walk of `strict` along the nodes of a tree, which reads only the rows on the path.

`verify`: one program a request. At the current node it draws the target's own token, as in `strict`, and searches all
nodes at once for the child with this token. Nodes off the path cost nothing: their rows are not read.

The target draws 7 after the text, which is node 2; after node 2 it draws 8, which is none of its children:

>>> rows = torch.full((1, 4, 10), -9.0)
>>> rows[0, 0, 7] = rows[0, 2, 8] = 30.0
>>> token_ids, parents = torch.tensor([[0, 5, 7, 9]]), torch.tensor([[-1, 0, 0, 2]])
>>> [each.tolist() for each in verify(rows, token_ids, parents, torch.tensor([[3, 0]]), 1.0, max_depth=2)]
[[[7, 8, -1]], [[2, -1]]]
"""

import torch
import triton
import triton.language as tl

from reference.kernels.philox import SELECT_BLOCK, gumbel
from reference.kernels.rows import BLOCK_SIZE, load_block, log_sum
from reference.kernels.selection import draw_from_block


@triton.jit
def walk_kernel(
    target_ptr, ids_ptr, parents_ptr, keys_ptr, output_ptr, path_ptr, num_nodes, max_depth, vocab_size, temperature,
    NODES: tl.constexpr,
):  # fmt: skip
    """Walk one request from node 0."""
    request, nodes = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    is_draft = (nodes > 0) & (nodes < num_nodes)
    ids = tl.load(ids_ptr + request * num_nodes + nodes, mask=is_draft, other=-1)
    parents = tl.load(parents_ptr + request * num_nodes + nodes, mask=is_draft, other=-1)
    seed, position = tl.load(keys_ptr + 2 * request), tl.load(keys_ptr + 2 * request + 1)
    node, depth = tl.full([], 0, tl.int32), 0
    while node >= 0:
        row_ptr = target_ptr + (request * num_nodes + node) * vocab_size
        best, selected = -float("inf"), 0
        for block in range(tl.cdiv(vocab_size, BLOCK_SIZE)):
            score = log_sum(load_block(row_ptr, block, vocab_size) / temperature)
            score += gumbel(seed, position + depth, block, SELECT_BLOCK)
            if score > best:
                best, selected = score, block
        token = draw_from_block(row_ptr, selected, seed, position + depth, vocab_size, temperature)
        tl.store(output_ptr + request * (max_depth + 1) + depth, token)
        is_next = (parents == node) & (ids == token) & (depth < max_depth)
        child = tl.min(tl.where(is_next, nodes, NODES), 0)  # the lowest of equal siblings
        node = tl.where(child < NODES, child, -1)
        tl.store(path_ptr + request * max_depth + depth, node, mask=depth < max_depth)
        depth += 1


def verify(target_logits, token_ids, parents, keys, temperature, max_depth):
    """Return [batch, max_depth + 1] tokens and [batch, max_depth] nodes, -1 after the last."""
    batch, num_nodes, vocab_size = target_logits.shape
    tokens = torch.full((batch, max_depth + 1), -1, device=keys.device)
    path = torch.full((batch, max_depth), -1, device=keys.device)
    walk_kernel[(batch,)](
        target_logits, token_ids, parents, keys, tokens, path, num_nodes, max_depth, vocab_size, temperature,
        NODES=triton.next_power_of_2(num_nodes),
    )  # fmt: skip
    return tokens, path
