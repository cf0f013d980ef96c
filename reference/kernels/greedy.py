"""Greedy verification in Triton: accept drafts as long as each is the argmax of its row, then emit the argmax.

`verify`: one program a request. It reads row after row, 1,024 logits at a time, and stops at the first draft that is not an
argmax. A row of 151,936 tokens is 149 loads, one after the other.
`verify_by_blocks`: two launches. First a program for each block stores its maximum, 4 bytes for 4,096 read. Then a
program for each request takes the largest of a row's maxima, and reads that block again to find the token.

The argmaxes of these rows are 1, 0 and 2:

>>> rows = torch.tensor([[[0.0, 9.0, 1.0], [5.0, 0.0, 1.0], [0.0, 1.0, 2.0]]])
>>> [verify(rows, torch.tensor([drafts])).tolist() for drafts in ([1, 0], [1, 2], [0, 0])]
[[[1, 0, 2]], [[1, 0, -1]], [[1, -1, -1]]]
>>> verify_by_blocks(rows, torch.tensor([[1, 2]])).tolist()
[[1, 0, -1]]
"""

import torch
import triton
import triton.language as tl

from reference.kernels.rows import BLOCK_SIZE, load_block, load_per_block


@triton.jit
def request_kernel(target_ptr, drafts_ptr, output_ptr, num_draft_tokens, vocab_size):
    """Verify one request."""
    request = tl.program_id(0).to(tl.int64)
    offset, accepted = 0, True
    while accepted:
        row = request * (num_draft_tokens + 1) + offset
        largest, token = -float("inf"), 0
        for block in range(tl.cdiv(vocab_size, BLOCK_SIZE)):
            logits = load_block(target_ptr + row * vocab_size, block, vocab_size)
            if tl.max(logits, 0) > largest:  # the first of equal logits
                largest, token = tl.max(logits, 0), tl.argmax(logits, 0) + block * BLOCK_SIZE
        tl.store(output_ptr + row, token)
        draft = tl.load(drafts_ptr + row - request, mask=offset < num_draft_tokens, other=-1)
        accepted = draft == token  # never, if there is no draft
        offset += 1


@triton.jit
def block_max_kernel(target_ptr, maxima_ptr, vocab_size):
    """Store the largest logit of one block of one row."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits = load_block(target_ptr + row * vocab_size, block, vocab_size)
    tl.store(maxima_ptr + row * tl.num_programs(0) + block, tl.max(logits, 0))


@triton.jit
def emit_kernel(target_ptr, maxima_ptr, drafts_ptr, output_ptr, num_draft_tokens, vocab_size):
    """Verify one request, given the maximum of each block of its rows."""
    request = tl.program_id(0).to(tl.int64)
    offset, accepted = 0, True
    while accepted:
        row = request * (num_draft_tokens + 1) + offset
        block = tl.argmax(load_per_block(maxima_ptr, row, vocab_size), 0)
        token = block * BLOCK_SIZE + tl.argmax(load_block(target_ptr + row * vocab_size, block, vocab_size), 0)
        tl.store(output_ptr + row, token)
        draft = tl.load(drafts_ptr + row - request, mask=offset < num_draft_tokens, other=-1)
        accepted = draft == token
        offset += 1


def verify(target_logits, draft_token_ids):
    """Return [batch, num_draft_tokens + 1] tokens, -1 after the last."""
    batch, num_rows, vocab_size = target_logits.shape
    token_ids = torch.full_like(target_logits[..., 0], -1, dtype=torch.int64)
    request_kernel[(batch,)](target_logits, draft_token_ids, token_ids, num_rows - 1, vocab_size)
    return token_ids


def verify_by_blocks(target_logits, draft_token_ids):
    """Return the tokens of `verify`, computed by blocks."""
    batch, num_rows, vocab_size = target_logits.shape
    token_ids = torch.full_like(target_logits[..., 0], -1, dtype=torch.int64)
    maxima = target_logits.new_empty(batch, num_rows, triton.cdiv(vocab_size, BLOCK_SIZE.value))
    block_max_kernel[(maxima.shape[2], batch * num_rows)](target_logits, maxima, vocab_size)
    emit_kernel[(batch,)](target_logits, maxima, draft_token_ids, token_ids, num_rows - 1, vocab_size)
    return token_ids
