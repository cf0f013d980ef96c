"""Selection in Triton: the first of two launches, and the draw from one block.

`log_block_sums` reads rows, one program for each block, and stores log S_b of every block: 4 bytes for 4,096 bytes read.
S_b is the sum of exp(l_v / T) over the tokens of block b. A row of 151,936 tokens has 149 programs, which run at the same
time, where the one program of a request would read one block after the other.

A token is drawn by two-level Gumbel-max, see `reference.selection`: the block with the largest log S_b + G(b), then the
token in it with the largest l_v / T + G'(v). Each program computes the noise that it needs.

>>> log_block_sums(torch.zeros(2, 1025), temperature=1.0).exp().round().tolist()  # the last block has one token
[[1024.0, 1.0], [1024.0, 1.0]]
"""

import torch
import triton
import triton.language as tl

from reference.kernels.philox import SELECT_TOKEN, gumbel
from reference.kernels.rows import BLOCK_SIZE, load_block, log_sum


@triton.jit
def log_block_sums_kernel(rows_ptr, sums_ptr, vocab_size, temperature):
    """Sum one block of one row."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits = load_block(rows_ptr + row * vocab_size, block, vocab_size)
    tl.store(sums_ptr + row * tl.num_programs(0) + block, log_sum(logits / temperature))


def log_block_sums(logits, temperature):
    """Return log S_b of each block of logits [..., vocab], float32."""
    *shape, vocab_size = logits.shape
    sums = torch.empty(*shape, triton.cdiv(vocab_size, BLOCK_SIZE.value), device=logits.device)
    if sums.numel() > 0:
        log_block_sums_kernel[(sums.shape[-1], sums[..., 0].numel())](logits, sums, vocab_size, temperature)
    return sums


@triton.jit
def draw_from_block(row_ptr, block, seed, position, vocab_size, temperature):
    """Return the token of a block with the largest log w(v) + G'(v), where log w(v) = l_v / T."""
    token_ids = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    noise = gumbel(seed, position, token_ids, SELECT_TOKEN)
    return block * BLOCK_SIZE + tl.argmax(load_block(row_ptr, block, vocab_size) / temperature + noise, 0)
