"""Probabilistic verification in Triton: accept x iff u <= p(x) / q(x), and after a rejection draw from max(0, p - q).

A program has one request. It sums both rows for log p(x) and log q(x) (in `verify_by_blocks` the sums of each block are
there already), and after a rejection reads both again, for the block sums of the residual. The largest log W + G is found
as the largest W / E, since G = -log E. Draft 0 has p / q = 2.5: always accepted. Draft 2 has p / q = 1/3, and is rejected:

>>> p, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.2, 0.6]).log()
>>> given = p.repeat(1, 3, 1), torch.tensor([[0, 2]]), q.repeat(1, 2, 1), torch.tensor([[1, 0]]), 1.0
>>> verify(*given).tolist(), verify_by_blocks(*given).tolist()
([[0, 1, -1]], [[0, 1, -1]])
"""

import torch
import triton
import triton.language as tl

from reference.kernels.philox import ACCEPT, SELECT_BLOCK, SELECT_TOKEN, exponential, uniform
from reference.kernels.rows import BLOCK_SIZE, load_block, log_prob, row_statistics
from reference.kernels.selection import log_block_sums


@triton.jit
def residual(target, draft, ratio, block, temperature):
    """Return max(0, c p - q) of one block, [1,024]; c is 1 except in block verification."""
    p = tl.exp(load_block(target[0], block, target[1]) / temperature - target[2])
    q = tl.exp(load_block(draft[0], block, draft[1]) / temperature - draft[2])
    return tl.maximum(ratio * p - q, 0.0)


@triton.jit
def recover(target, draft, ratio, seed, position, temperature):
    """Draw a token from max(0, c p - q), or return -1 if that is 0 everywhere."""
    best, selected, token = 0.0, -1, -1
    for block in range(tl.cdiv(target[1], BLOCK_SIZE)):
        mass = tl.sum(residual(target, draft, ratio, block, temperature), 0)
        score = mass / exponential(seed, position, block, SELECT_BLOCK)
        if score > best:
            best, selected = score, block
    if selected >= 0:
        token_ids = selected * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        weights = residual(target, draft, ratio, selected, temperature)
        token = selected * BLOCK_SIZE + tl.argmax(weights / exponential(seed, position, token_ids, SELECT_TOKEN), 0)
    return token


@triton.jit
def verify_kernel(target_rows, draft_rows, drafts_ptr, keys_ptr, output_ptr, num_draft_tokens, size, T):
    """Verify one request; rows are (logits, block sums or None), of `size` tokens."""
    request = tl.program_id(0).to(tl.int64)
    seed, position = tl.load(keys_ptr + 2 * request), tl.load(keys_ptr + 2 * request + 1)
    offset, accepted = 0, True
    while accepted:
        draft_row = request * num_draft_tokens + offset
        token = tl.load(drafts_ptr + draft_row, mask=offset < num_draft_tokens, other=-1).to(tl.int32)
        target = row_statistics(target_rows, draft_row + request, size, T)
        draft = row_statistics(draft_rows, draft_row, tl.where(token >= 0, size, 0), T)
        log_p, log_q = log_prob(target, token, T), log_prob(draft, token, T)
        is_possible, u = (token >= 0) & (log_q > -float("inf")), uniform(seed, position + offset, 0, ACCEPT)
        accepted = is_possible & (tl.log(u) <= log_p - log_q)
        if not accepted:
            token = recover(target, draft, 1.0, seed, position + offset, T)
            if token < 0:  # p and q agree up to rounding
                token = recover(target, (draft[0], 0, 0.0), 1.0, seed, position + offset, T)
        tl.store(output_ptr + draft_row + request, token)
        offset += 1


def verify(target_logits, draft_token_ids, draft_logits, keys, temperature, sums=(None, None)):
    """Return [batch, num_draft_tokens + 1] tokens, -1 after the last."""
    (batch, num_rows, vocab_size), rows = target_logits.shape, ((target_logits, sums[0]), (draft_logits, sums[1]))
    token_ids = torch.full((batch, num_rows), -1, device=keys.device)
    verify_kernel[(batch,)](*rows, draft_token_ids, keys, token_ids, num_rows - 1, vocab_size, temperature)
    return token_ids


def verify_by_blocks(target_logits, draft_token_ids, draft_logits, keys, temperature):
    """Return the tokens of `verify`, computed by blocks."""
    sums = log_block_sums(target_logits, temperature), log_block_sums(draft_logits, temperature)
    return verify(target_logits, draft_token_ids, draft_logits, keys, temperature, sums)
