"""The bundles that the host passes to kernels, with the shape and type of each field.

Kernels are compiled for the value of a field in capitals, and for absent pointers (None).
`signature` derives each kernel's signature from the annotations here.
"""

from typing import Annotated, Any, NamedTuple

Pointer = Annotated[Any, "pointer"]  # a pointer to the dtype of the tensor that is passed
Int32 = Annotated[Any, "i32"]
Int64 = Annotated[Any, "i64"]
Float32 = Annotated[Any, "fp32"]
Constant = Annotated[Any, "constexpr"]  # OVERLAPS in bundles below: the next launch may be set up while this one runs
Stride = Annotated[Any, "stride"]  # int64; kernels are compiled for the value 1
Count = Annotated[Any, "count"]  # int32; kernels are compiled for the value 0
# Multiples of 16 if the bundle's ALIGNED is set: the compiler may rely on it, so a thread can load 16 bytes at once.
AlignedPointer = Annotated[Any, "pointer", "aligned"]
AlignedInt32 = Annotated[Any, "i32", "aligned"]
AlignedInt64 = Annotated[Any, "i64", "aligned"]


class Rows(NamedTuple):
    """Logits rows: a request's row at an offset starts at `index * stride_request + offset * stride_offset`.

    The index is the request's own. In a packed call it is the request's first target row, or its slot for draft rows. See
    `request`.
    """

    ptr: AlignedPointer  # [batch, rows, vocab_size] any float, in a packed call [num_rows, vocab_size]; None: there are none
    stride_request: AlignedInt64
    stride_offset: AlignedInt64
    stride_token: Stride  # 1 if rows are contiguous
    ALIGNED: Constant  # contiguous, starts at multiples of 16 bytes; size and strides are multiples of 16 logits


class DraftVocabulary(NamedTuple):
    """The draft's own vocabulary; all None if it is the target's."""

    ids_ptr: AlignedPointer  # [size] int32 or int64: the target's token of each id of the draft; not checked
    size: AlignedInt32
    ALIGNED: Constant  # size and the address of the ids are multiples of 16


class Packing(NamedTuple):
    """The rows and slots of the requests of a packed call; all None if the call is not packed.

    A round of a tree is a packed call with one row for each request.
    """

    row_starts_ptr: Pointer  # [batch + 1] int32 or int64: request i has rows row_starts[i] to row_starts[i + 1] - 1;
    # in a round [batch]: the row of each request
    num_rows: Int64
    slots_ptr: Pointer  # [batch] int32 or int64, or None: the slot is the request's index
    num_slots: Int64
    IS_ROUND: Constant  # whether the call is a round of a tree
    path_ptr: Pointer  # [batch, depth] int64, in a round: the tokens on the path after node 0, up to the row; None:
    # there are no penalties
    path_stride: Int64
    depth: Int32


class Drafts(NamedTuple):
    """The draft tokens, and their inputs other than logits; in a packed call all tensors except the tokens are by slot."""

    ids_ptr: Pointer  # [batch, num_draft_tokens] int32 or int64, -1: no draft, or [num_rows]; None: no request has any
    stride_request: Int64
    stride_offset: Int64
    logsumexp_ptr: Pointer  # [batch, num_draft_tokens] float32 logsumexp(draft logits / temperature), or None
    logsumexp_stride_request: Int64
    logsumexp_stride_offset: Int64
    cutoff_ptr: Pointer  # [batch, num_draft_tokens] int64 last token kept of each draft row, -1: all are; or None
    cutoff_stride_request: Int64
    cutoff_stride_offset: Int64
    rates_ptr: Pointer  # [num_draft_tokens] float32 conditional rates of synthetic acceptance, or None


class Requests(NamedTuple):
    """One value for each request, or one for all; in a packed call a request's values are at its slot."""

    temperature_ptr: Pointer  # [batch] any float, or None: `temperature` for all
    temperature: Float32  # 0 is greedy
    seeds_ptr: Pointer  # [batch] int64, or None: first_seed, first_seed + 1, ...
    SEEDS_BY_REQUEST: Constant  # whether seeds are by request in a packed call; otherwise by slot
    first_seed: Int64
    positions_ptr: Pointer  # [batch] int64 position of the token at offset 0, or None: 0; by request, never by slot
    row_positions_ptr: Pointer  # [num_rows] int64 position of each row's fed token, one before the drawn one's; or None
    block_domain: Int32  # noise domains of emitted tokens
    token_domain: Int32


class Limits(NamedTuple):
    """The limits that truncate rows: one value for each request, at its slot, or one for all; all None: no truncation."""

    top_k_ptr: Pointer  # [batch] int32 or int64, or None: `top_k` for all
    top_k: Int32  # 0 keeps all tokens
    top_p_ptr: Pointer  # [batch] any float, or None: `top_p` for all
    top_p: Float32  # 1 keeps all tokens
    min_p_ptr: Pointer  # [batch] any float, or None: `min_p` for all
    min_p: Float32  # 0 keeps all tokens


class Adjustments(NamedTuple):
    """The adjustments of target rows: one value for each request, at its slot, or one for all; None if absent."""

    EXIST: Constant  # whether there are any adjustments
    repetition_ptr: Pointer  # [batch] any float, or None: `repetition` for all
    repetition: Float32  # None: there are no penalties of any of the three kinds
    frequency_ptr: Pointer  # as repetition
    frequency: Float32
    presence_ptr: Pointer  # as repetition
    presence: Float32
    prompt_ptr: Pointer  # [batch, ceil(vocab_size / 32)] int32 masks of the tokens in the prompt
    prompt_stride: Int64
    counts_ptr: AlignedPointer  # [batch, vocab_size] int32 counts of the tokens emitted before the step
    counts_stride: AlignedInt64
    bias_ids_ptr: Pointer  # [batch, num_biases] int32 or int64, -1 for none
    bias_ptr: Pointer  # [batch, num_biases] any float
    num_biases: Int32
    allowed_ptr: Pointer  # [batch, num_draft_tokens + 1, ceil(vocab_size / 32)] int32 masks of allowed tokens, or
    # [num_rows, ...] in a packed call
    allowed_stride_request: Int64
    allowed_stride_offset: Int64
    ALIGNED: Constant  # rows of counts start at multiples of 16


class Inputs(NamedTuple):
    """The inputs of a step."""

    packing: Packing
    target: Rows
    draft: Rows
    draft_vocabulary: DraftVocabulary
    drafts: Drafts
    requests: Requests
    limits: Limits
    draft_limits: Limits
    adjustments: Adjustments


class Outputs(NamedTuple):
    """The outputs of a step.

    Counts and `invalid` are None if rows are sampled without drafts, logsumexp and cutoff are None in a verification.
    """

    token_ids_ptr: Pointer  # [batch, num_draft_tokens + 1] int64
    num_accepted_ptr: Pointer  # [batch] int32
    num_drafts_ptr: Pointer  # [batch] int32
    invalid_ptr: Pointer  # [batch] bool
    logsumexp_ptr: Pointer  # [batch] float32 logsumexp(logits / temperature)
    cutoff_ptr: Pointer  # [batch] int64 the last token kept, -1 for all; None: rows are not truncated
    logprobs_ptr: Pointer  # [batch, num_draft_tokens + 1] float32, NaN after the last token; None: not requested


class Lists(NamedTuple):
    """The likeliest and the kept tokens of the rows of emitted tokens; None for lists that are not requested."""

    top_ids_ptr: Pointer  # [batch, num_draft_tokens + 1, num_top] int64
    top_logprobs_ptr: Pointer  # [batch, num_draft_tokens + 1, num_top] float32
    num_top: Int32
    num_kept_ptr: Pointer  # [batch, num_draft_tokens + 1] int32
    kept_ids_ptr: Pointer  # [batch, num_draft_tokens + 1, MOST_KEPT] int32
    cutoff_ptr: Pointer  # [batch, num_draft_tokens + 1] int64
    OVERLAPS: Constant


class Siblings(NamedTuple):
    """The siblings that are drawn from each row."""

    ids_ptr: Pointer  # [batch, WIDTH] int64
    WIDTH: Constant
    OVERLAPS: Constant


class Workspace(NamedTuple):
    """Memory that lives as long as a call: the results that one launch passes to the next."""

    state_ptr: Pointer  # int32, see `first_rejected`; None without drafts
    statistics_ptr: Pointer  # [rows, num_blocks, 2] float32: target rows, then draft rows; see `statistics`
    cutoffs_ptr: Pointer  # [rows, 2] float32: logit and (int32) id of the last token kept; None: rows are not truncated
    maxima_ptr: Pointer  # [rows, num_blocks, WARP] float32, see `statistics.lane_maxima`; None: rows are not truncated
    candidates_ptr: Pointer  # [rows, list_size] int64, see `truncation.narrow`; None: rows are not truncated
    terms_ptr: Pointer  # [batch, num_draft_tokens + 1, TERMS] float32, see `block`, or None
    queue_ptr: Pointer  # [batch * num_draft_tokens, QUEUE_FIELDS] int64, see `residual`, or None
    residual_sums_ptr: Pointer  # [batch, num_draft_tokens, num_blocks] float32, see `residual`, or None
    raw_statistics_ptr: Pointer  # [target rows, num_blocks, 2] float32 statistics at temperature 1, or None
    draft_id_of_token_ptr: (
        Pointer  # [vocab_size] int32 the draft's id of each token, see `vocabulary`; None: the same ids
    )
    logprobs_ptr: Pointer  # as in `Outputs`: a decision stores its draft's log-probability there; or None


class Sizes(NamedTuple):
    """The sizes of a call."""

    batch: Int32
    num_draft_tokens: Count
    vocab_size: AlignedInt32
    num_blocks: Int32
    MAX_BLOCKS: Constant  # num_blocks or more, a power of two
    MAX_DRAFTS: Constant  # num_draft_tokens + 1 or more, a power of two
    ALIGNED: Constant  # vocab_size is a multiple of 16


class Mapping(NamedTuple):
    """The config of the launch that maps the target's tokens to the draft's ids."""

    OVERLAPS: Constant


class Policy(NamedTuple):
    """The functions of a method that a kernel calls."""

    DECIDE: Constant  # decides about a row's draft; None: every row is read, decisions come later
    DRAW: Constant  # draws the token after the accepted drafts; None: DECIDE draws it


class Reading(NamedTuple):
    """The config of the launch that reads: the division of its work."""

    tiles: Int32  # the number of times that a program reads BLOCKS blocks
    chunks: Int32  # programs for each row
    BLOCKS: Constant
    INTEGER_MAX: Constant  # compute maxima on integers: faster, but takes registers
    KEEPS_RAW: Constant  # store raw statistics even where T is 1, because truncation replaces the others
    FLAT: Constant  # all programs lie along the grid's first dimension
    OVERLAPS: Constant  # the next launch may be set up while this one runs
    ADMITS_LATE: Constant  # admit the next launch after a program's last loads of logits, not at its start


class Truncating(NamedTuple):
    """The config of a launch that truncates rows."""

    OF_DRAFTS: Constant  # draft rows only: they are read differently from target rows
    PUBLISHED: Constant  # rejections were published while reading: later rows were not read
    OVERLAPS: Constant


class BlockDecision(NamedTuple):
    """The config of the launches of block verification that sum residuals or decide by them."""

    BLOCKS: Constant  # blocks that are summed at once
    BLOCK_N: Constant  # logits of each that are loaded at once
    SUMS: Constant  # also keep the block sums of residuals that a token may be drawn from
    OVERLAPS: Constant


class Searching(NamedTuple):
    """The config of the launch that emits: the search of blocks in the order of their bounds, and the work of a program."""

    TOP: Constant  # blocks that are searched first
    BLOCKS: Constant  # blocks that each further iteration searches
    BLOCK_N: Constant  # logits of each that are loaded at once
    PER_ROW: Constant  # a program for each row decides about its draft; False: first rejected rows are known
    PUBLISHED: Constant  # rejections were published while reading: later rows do not matter
    DECIDES_BLOCK: Constant  # in block verification: decide the number of accepted drafts first
    SUMS: Constant  # the workspace has the block sums of the residual to draw from
    OVERLAPS: Constant
