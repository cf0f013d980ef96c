"""The values that device functions pass to each other, as named tuples.

The code that reads a row depends on the row's parts, so it is compiled for each combination of parts.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


class Row(NamedTuple):
    """One logits row. An absent part is (): see `exists`."""

    ptr: Any
    stride_token: Any
    vocab_size: Any
    cutoff: Any  # `Cutoff`: logits beyond it are read as -inf
    draft_id_of_token: (
        Any  # `DraftIdOfToken` of a draft row over its own vocabulary that is read by the target's tokens
    )
    adjustments: Any  # `RowAdjustments` of a target row, or ()


class Cutoff(NamedTuple):
    """The last kept token of a truncated row."""

    logit: Any
    token: Any


class DraftIdOfToken(NamedTuple):
    """The draft's id of each token of the target, see `vocabulary`."""

    ptr: Any
    vocab_size: Any  # the target's vocabulary size


class Tokens(NamedTuple):
    """Tokens of a row with adjustments, in parts."""

    ids: Any
    inside: Any  # whether the row has them
    octets: Any  # of whole blocks: the index of the mask byte of eight tokens, [BLOCKS, BLOCK_N // 8]; otherwise ()
    quads: Any  # of whole blocks: the first four of every eight tokens, [BLOCKS, BLOCK_N // 2]; otherwise ()
    end: Any  # of whole blocks: the vocabulary size


class Loaded(NamedTuple):
    """The loaded values that adjust logits, in parts; () for adjustments that no request has."""

    counts: Any
    in_prompt: Any  # words or bytes of a mask
    allowed: Any  # words or bytes of a mask


class RowAdjustments(NamedTuple):
    """The adjustments of a row's logits; a part that no request has is ()."""

    biases: Any  # `Biases`
    penalties: Any  # `Penalties`
    allowed: Any  # a pointer to the row of a mask
    before: Any  # the location of the step's drafts before the row, see `load_drafts`; () without penalties
    drafts: Any  # their ids, [MAX_DRAFTS], -1 for none


class Biases(NamedTuple):
    """A request's biases."""

    ids_ptr: Any
    ptr: Any
    num_biases: Any


class Penalties(NamedTuple):
    """A request's penalties, and the counts that they apply to."""

    is_any: Any  # whether one of the three is not neutral
    repetition: Any
    inverse: Any  # 1 / repetition
    frequency: Any
    presence: Any
    prompt: Any  # a pointer to a mask
    counts: Any  # a pointer to the output count of each token before the step


@triton.constexpr_function
def exists(part):
    """Return, at compile time, whether a part is present (not ()), such as a row's cutoff."""
    return len(part) > 0


@triton.constexpr_function
def ordinal_shift(dtype, adjustments):
    """Return, at compile time, the number of low bits that keys can drop: different logits keep different keys."""
    return 0 if len(adjustments) > 0 else {"bf16": 16, "fp16": 13}.get(dtype.name, 0)


class RequestIndex(NamedTuple):
    """The indices of a request's rows and values; all are equal unless the call is packed."""

    index: Any  # int64: of its output, its positions and its workspace
    row: Any  # int64: of its target rows and draft tokens
    slot: Any  # int64: of its draft rows and of its values in `Requests` and `Limits`
    num_drafts: Any  # an upper bound: some ids may not be tokens
    vocab_size: Any  # of its target rows; 0 if it has no rows


class RowContext(NamedTuple):
    """One offset of one request."""

    request: RequestIndex
    offset: Any
    token: Any  # the draft there, -1 for none
    key: Any  # (seed, position of offset 0), see `philox`
    temperature: Any


class Noise(NamedTuple):
    """Random numbers of a context. They do not depend on logits, so they are computed while loads are in flight."""

    uniform: Any  # of the accept decision
    exponentials: Any  # [MAX_BLOCKS] one for each block


class Distribution(NamedTuple):
    """softmax(logits / T) of a row."""

    row_max: Any  # largest logit
    sumexp: Any  # sum of exp((l - row_max) / T)
    point_mass_token: Any  # the only token of a point mass (greedy, infinite logits), or -1
    block_sums: Any  # [MAX_BLOCKS] the parts of sumexp; zeros where it is a point mass


class Summary(NamedTuple):
    """The maximum and distribution of a row before truncation, and its limits."""

    block_max: Any  # [MAX_BLOCKS] the largest logit of each block
    p: Distribution  # before truncation
    temperature: Any
    limits: Any  # top_k, top_p and min_p
    floor: Any  # a little below the least logit that min-p keeps


class WeighedRow(NamedTuple):
    """A row and its tokens' weights exp2((l - row_max) * scale)."""

    row: Any
    row_max: Any
    scale: Any  # log2(e) / T
    total: Any  # the weight of all tokens


class Normalizer(NamedTuple):
    """The parameters of log p = (l - row_max) / T - log_sum; of a point mass only its token is used."""

    row_max: Any
    log_sum: Any
    point_mass_token: Any


class Residual(NamedTuple):
    """The parameters of max(0, p - q), given the logits of both rows; in block verification of max(0, p - q / c)."""

    row_max: Any  # of p
    draft_max: Any  # of q
    log_sum_ratio: Any  # log(sumexp of q / sumexp of p), plus log c
    subtracted: Any  # NONE, ROW (all of q), or the only token of q


class Terms(NamedTuple):
    """The terms that decide about a draft x, and the residual to draw from after a rejection."""

    log_p: Any  # of x
    log_q: Any
    p: Distribution
    draft_normalizer: Normalizer  # of q
    residual: Residual
