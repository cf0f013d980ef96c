"""Small Triton kernels to learn from: the algorithms of this folder's neighbours in float32, for a batch of requests.

Read them in this order: `greedy`; `philox`, `rows` and `selection`, the shared functions for random numbers, rows and
blocks; then `strict`, `probabilistic`, `block`.

Each method has two versions. In `verify` one program does all the work of a request. In `verify_by_blocks` a first launch
(two with draft logits) reads the rows, one program for each block of 1,024 tokens, and stores one number for each block;
the last launch decides and draws. The arguments are the same everywhere:

- `target_logits` [batch, num_draft_tokens + 1, vocab] and `draft_logits` [batch, num_draft_tokens, vocab]: float32,
  contiguous, finite or -inf, with at least one finite logit in a row. At most 262,144 tokens.
- `draft_token_ids` [batch, num_draft_tokens] int64. The first -1 ends a request's drafts.
- `keys` [batch, 2] int64: a request's seed, and the absolute position of its first draft token.
- `temperature`: one number above 0 for all requests.

They return [batch, num_draft_tokens + 1] int64: the accepted drafts, one more token, then -1. For the same seeds these are
the tokens of `reference.oracle`, except where two scores are so close that rounding decides.

Left out: all that the package adds; the site's page on kernels explains it.

Without a GPU the kernels run in Triton's interpreter, which has to be chosen before Triton is imported.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
