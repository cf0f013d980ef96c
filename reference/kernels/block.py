"""Block verification in Triton: accept the most drafts i with eta_i <= h_i, then draw from max(0, c_i p - q).

    c_{i+1} = min(1, c_i p(x_i) / q(x_i)),  c_0 = 1
    h_i = A_i / (A_i + 1 - c_i),  A_i = sum of max(0, c_i p - q) over the row after i drafts;  h_K = c_K

A program has one request. It tests all i, since a failure at i does not end the search, and keeps the last i that passes.
Each A_i requires a second read of both rows. In `verify_by_blocks`, too, one program computes all A_i of a request.

Drafts 0, 1 have p / q = 1/2 and 3, so c_2 = 1: always accepted. Drafts 0, 0 have c_1 = 1/2 and c_2 = 1/4:

>>> p, q = torch.tensor([0.4, 0.6]).log(), torch.tensor([0.8, 0.2]).log()
>>> rows, keys = (p.repeat(1, 3, 1), q.repeat(1, 2, 1)), torch.tensor([[1, 0]])
>>> [verify(rows[0], torch.tensor([drafts]), rows[1], keys, 1.0).tolist() for drafts in ([0, 1], [0, 0])]
[[[0, 1, 0]], [[1, -1, -1]]]
"""

import torch
import triton
import triton.language as tl

from reference.kernels.philox import ACCEPT, uniform
from reference.kernels.probabilistic import recover, residual
from reference.kernels.rows import BLOCK_SIZE, log_prob, row_statistics
from reference.kernels.selection import log_block_sums


@triton.jit
def residual_mass(target, draft, ratio, temperature):
    """Return A, the sum of max(0, c p - q)."""
    mass = 0.0
    for block in range(tl.cdiv(target[1], BLOCK_SIZE)):
        mass += tl.sum(residual(target, draft, ratio, block, temperature), 0)
    return mass


@triton.jit
def verify_kernel(target_rows, draft_rows, drafts_ptr, keys_ptr, output_ptr, num_draft_tokens, size, T):
    """Verify one request; rows are (logits, block sums or None), of `size` tokens."""
    request = tl.program_id(0).to(tl.int64)
    seed, position = tl.load(keys_ptr + 2 * request), tl.load(keys_ptr + 2 * request + 1)
    first, count, ratio = request * num_draft_tokens, 0, 1.0  # drafts so far, and c of them
    accepted, accepted_ratio = 0, 1.0
    token = tl.load(drafts_ptr + first, mask=num_draft_tokens > 0, other=-1)
    while token >= 0:
        target = row_statistics(target_rows, first + count + request, size, T)
        draft = row_statistics(draft_rows, first + count, size, T)
        if count > 0:
            mass = residual_mass(target, draft, ratio, T)
            h = tl.where(ratio < 1, mass / (mass + 1 - ratio), 1.0)
            if uniform(seed, position + count - 1, count - 1, ACCEPT) <= h:
                accepted, accepted_ratio = count, ratio
        log_p, log_q = log_prob(target, token, T), log_prob(draft, token, T)
        ratio = tl.where(log_q > -float("inf"), tl.minimum(ratio * tl.exp(log_p - log_q), 1.0), 0.0)
        count += 1
        token = tl.load(drafts_ptr + first + count, mask=count < num_draft_tokens, other=-1)
    if (count > 0) & (uniform(seed, position + count - 1, count - 1, ACCEPT) <= ratio):
        accepted, accepted_ratio = count, 1.0
    for i in range(accepted):
        tl.store(output_ptr + first + request + i, tl.load(drafts_ptr + first + i))
    target = row_statistics(target_rows, first + accepted + request, size, T)
    draft = row_statistics(draft_rows, first + accepted, tl.where(accepted < count, size, 0), T)
    token = recover(target, draft, accepted_ratio, seed, position + accepted, T)
    if token < 0:  # the residual rounds to nothing
        token = recover(target, (draft[0], 0, 0.0), 1.0, seed, position + accepted, T)
    tl.store(output_ptr + first + request + accepted, token)


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
