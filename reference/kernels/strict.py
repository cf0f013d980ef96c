"""Strict verification in Triton: a draft is accepted iff it is the token that the target itself draws at that position.

This is `greedy` with a token that is drawn in place of the argmax:

    block b = argmax log S_b + G(b)        token v = argmax l_v / T + G'(v) in block b

`verify`: one program a request. It sums block after block and keeps the largest score: each row is read once, and one block
again. `verify_by_blocks`: `log_block_sums` reads all rows; then a program for each request compares scores.

With this key the target draws tokens 1 and 2:

>>> rows, keys = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]]).log(), torch.tensor([[3, 0]])
>>> [[f(rows, torch.tensor([[draft]]), keys, 1.0).tolist() for draft in (1, 2)] for f in (verify, verify_by_blocks)]
[[[[1, 2]], [[1, -1]]], [[[1, 2]], [[1, -1]]]]
"""

import torch
import triton
import triton.language as tl

from reference.kernels.philox import SELECT_BLOCK, gumbel
from reference.kernels.rows import BLOCK_SIZE, MAX_BLOCKS, load_block, load_per_block, log_sum
from reference.kernels.selection import draw_from_block, log_block_sums


@triton.jit
def request_kernel(target_ptr, drafts_ptr, keys_ptr, output_ptr, num_draft_tokens, vocab_size, temperature):
    """Verify one request."""
    request = tl.program_id(0).to(tl.int64)
    seed, position = tl.load(keys_ptr + 2 * request), tl.load(keys_ptr + 2 * request + 1)
    offset, accepted = 0, True
    while accepted:
        row = request * (num_draft_tokens + 1) + offset
        row_ptr = target_ptr + row * vocab_size
        best, selected = -float("inf"), 0
        for block in range(tl.cdiv(vocab_size, BLOCK_SIZE)):
            score = log_sum(load_block(row_ptr, block, vocab_size) / temperature)
            score += gumbel(seed, position + offset, block, SELECT_BLOCK)
            if score > best:
                best, selected = score, block
        token = draw_from_block(row_ptr, selected, seed, position + offset, vocab_size, temperature)
        tl.store(output_ptr + row, token)
        draft = tl.load(drafts_ptr + row - request, mask=offset < num_draft_tokens, other=-1)
        accepted = draft == token
        offset += 1


@triton.jit
def emit_kernel(target_ptr, sums_ptr, drafts_ptr, keys_ptr, output_ptr, num_draft_tokens, vocab_size, temperature):
    """Verify one request, given log S_b of each block of its rows."""
    request = tl.program_id(0).to(tl.int64)
    seed, position = tl.load(keys_ptr + 2 * request), tl.load(keys_ptr + 2 * request + 1)
    offset, accepted = 0, True
    while accepted:
        row = request * (num_draft_tokens + 1) + offset
        noise = gumbel(seed, position + offset, tl.arange(0, MAX_BLOCKS), SELECT_BLOCK)
        selected = tl.argmax(load_per_block(sums_ptr, row, vocab_size) + noise, 0)
        row_ptr = target_ptr + row * vocab_size
        token = draw_from_block(row_ptr, selected, seed, position + offset, vocab_size, temperature)
        tl.store(output_ptr + row, token)
        draft = tl.load(drafts_ptr + row - request, mask=offset < num_draft_tokens, other=-1)
        accepted = draft == token
        offset += 1


def verify(target_logits, draft_token_ids, keys, temperature):
    """Return [batch, num_draft_tokens + 1] tokens, -1 after the last."""
    batch, num_rows, vocab_size = target_logits.shape
    token_ids = torch.full((batch, num_rows), -1, device=keys.device)
    request_kernel[(batch,)](target_logits, draft_token_ids, keys, token_ids, num_rows - 1, vocab_size, temperature)
    return token_ids


def verify_by_blocks(target_logits, draft_token_ids, keys, temperature):
    """Return the tokens of `verify`, computed by blocks."""
    batch, num_rows, vocab_size = target_logits.shape
    token_ids = torch.full((batch, num_rows), -1, device=keys.device)
    sums = log_block_sums(target_logits, temperature)
    emit_kernel[(batch,)](target_logits, sums, draft_token_ids, keys, token_ids, num_rows - 1, vocab_size, temperature)
    return token_ids
