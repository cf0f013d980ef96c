"""The Triton backend: fused kernels for NVIDIA GPUs.

A step is two launches, read and emit. Truncation and the three launches of `block` verification come between them; the
launch that lists likely tokens comes last. `read` reads the rows and stores 8 bytes of statistics for each block of 1,024
logits. In a large batch it also decides, so that few rows after a rejection are read. `emit` makes the remaining decisions,
draws the token of each request from the statistics and a few blocks, and writes the output.

| file | content |
|---|---|
| `call` | the values of a call, and its plan |
| `methods` | each method's functions: decide while rows are read, decide, draw; its limit for large batches |
| `arguments`, `values` | the kernels' arguments: shape and type of every field; the values that their functions exchange |
| `bundles` | the structure of a step, and the bundles of its plan |
| `plan`, `launch` | the launches of a step, with the tuned numbers; compilation, launch |
| `signature` | the types that a kernel is compiled for; symbols, whose values a call has |
| `read`, `emit` | the two kernels of every step |
| `request` | the values of a request: pointers to its rows, temperature, key, drafts, limits |
| `vocabulary` | draft rows over their own vocabulary |
| `rows` | pointers to rows, and loads |
| `adjustments` | biases, penalties and masks, applied to target logits as they are loaded |
| `row_adjustments` | pointers to a row's adjustments |
| `statistics`, `distribution` | the statistics of each block; softmax computed from them, NaN and infinities included |
| `truncation.kernel` | the cutoff: the last token that top-k, top-p and min-p keep; the statistics of the kept tokens |
| `truncation.early` | decisions before the cutoff is known |
| `truncation.narrow`, `truncation.wide` | the search for the cutoff: among a row's likeliest tokens, or in the whole row |
| `selection`, `block_bounds` | the draw of a token; blocks in the order of their bounds, with early exit |
| `residual` | max(0, p - q): its weights, its block sums, the draw of a block from it |
| `first_rejected`, `output` | the first rejected row of a request; the output |
| `logprobs` | log-probabilities of emitted tokens |
| `tree`, `siblings` | the walk of a tree of drafts, and the children of a node: separate launches |
| `top_logprobs` | the likeliest tokens and the kept set of the rows of emitted tokens: one more launch |
| `greedy`, `strict`, `probabilistic`, `block`, `synthetic` | each method's decision about a draft |
| `philox` | random numbers |

| event | function |
|---|---|
| a draft is accepted or rejected | `probabilistic.decide`, `strict.decide`: called as `policy.DECIDE` by `emit.emit_row` |
| ... in a large batch | as `policy.DECIDE` by `read.decide`: `probabilistic.accepts`, `strict.decide_while_reading` |
| ... in `block` | `block.decide_without_reading`; open decisions, `block.decide_block` |
| a logit is adjusted | `rows.load_raw`, `rows.load_logit`, `rows.adjusted_blocks`: they call `adjustments.adjusted` |
| a NaN or an infinity in a row | `distribution.recompute_nonfinite`; where logits are read again, `rows.load_logits` |
| a row need not be read | `read.decide` publishes a rejection, `read.may_matter` checks it; a draft row: `read.summarise` |
| ... or not truncated | `truncation.kernel.is_to_cut` checks it, too |
| a recovered or a bonus token | `probabilistic.draw`; in `strict`, `strict.decide` |
| a tie | between scores `selection.first_largest`, `block_bounds.ranked`; between logits `greedy.argmax` |
| the cutoff of top-k, top-p, min-p | `narrow.cut_candidates`; in a whole row `wide.wide_cutoff`, ties `find_tie` |
| the number of programs of a launch | the `add_*` functions of `plan` |
| the rows and the slot of a request of a packed call | `request.locate` |
| the differences of `strict` and `probabilistic` | the table in `methods`; then each method's `decide` |

No program waits for another, so no kernel can hang: work that needs the results of all programs is done by the last
program to finish, or by the next launch. Compiled code, plans and a schedule's rates are kept from one call to the next;
they never change. Calls on several streams, from several threads and in graphs share no memory that is written.
Arithmetic is in float32 for logits of any dtype.
"""

from specdecode.kernels.call import sample_rows, verify, warm_up, why_not_verified
from specdecode.kernels.launch import Share, compile_ahead
from specdecode.kernels.tree import verify_tree, warm_up_tree

__all__ = [
    "Share",
    "compile_ahead",
    "sample_rows",
    "verify",
    "verify_tree",
    "warm_up",
    "warm_up_tree",
    "why_not_verified",
]
