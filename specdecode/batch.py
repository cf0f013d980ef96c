"""The bundles that backends receive and return: rows to sample from, a verification step, its output.

`specdecode.arguments` builds them from a caller's checked arguments.
"""

from typing import Any, Literal, NamedTuple

from torch import Tensor

from specdecode.adjustments import Adjustments

Logprobs = Literal["processed", "raw"]
"""The distribution of log-probabilities: the sampled distribution, or softmax(logits)."""

TARGET_ONLY = frozenset({"strict"})
"""The methods that read no draft rows, as `Method.reads_drafts` of `kernels.methods`."""

MOST_TOP_LOGPROBS = 20
"""The largest `top_logprobs`."""

MOST_KEPT = 1024
"""The largest kept set whose ids are returned. Of a larger set only the size and the last token are returned."""


class Sampling(NamedTuple):
    """The sampling parameters that tokens were drawn with, named as in a call of the sampler.

    Example:
        >>> from specdecode import Sampling
        >>> Sampling(temperature=0.7, top_p=0.95)
        Sampling(temperature=0.7, top_k=None, top_p=0.95, min_p=None)
    """

    temperature: Tensor | float = 1.0
    """One number >= 0 or a [batch] float tensor; 0 is greedy."""

    top_k: Tensor | int | None = None
    """An int >= 0 or a [batch] int32 or int64 tensor; None, 0 or the vocabulary size and more keep all tokens."""

    top_p: Tensor | float | None = None
    """A number in (0, 1] or a [batch] float tensor; None or 1 keep all tokens."""

    min_p: Tensor | float | None = None
    """A number in [0, 1] or a [batch] float tensor; None or 0 keep all tokens."""


class Truncation(NamedTuple):
    """Checked limits on the tokens of a row; None where a limit keeps all tokens of every request."""

    top_k: Tensor | int | None  # [batch] int32 or int64, or one for all
    top_p: Tensor | float | None  # [batch] any float, or one for all
    min_p: Tensor | float | None  # [batch] any float, or one for all

    @property
    def keeps_one(self) -> bool:
        """Whether every row keeps only its likeliest token, known without reading tensors."""
        return not isinstance(self.top_k, Tensor) and self.top_k == 1


class Packing(NamedTuple):
    """The rows and slot of each request of a packed call. Values are checked only on the CPU.

    On a device the host does not read them, because a replayed CUDA graph may change them. There a request whose rows or
    slot are out of range counts as a request without rows.
    """

    row_starts: Tensor  # [batch + 1] int32 or int64
    num_draft_tokens: int  # the most drafts of a request
    slots: Tensor | None  # [batch] int32 or int64; None: slot r for request r, or no argument is by slot
    num_slots: int
    seeds_by_request: bool  # seeds are by request, not by slot: they were drawn for this call
    row_positions: Tensor | None  # [num_rows] int64, of the tokens fed at the rows; in place of the batch's positions
    is_round: bool = False  # a round of a tree: `row_starts` is [batch], the one row of each request, -1 for no row
    path: Tensor | None = None  # [batch, depth] int64, in a round: the tokens between node 0 and the row, for penalties

    @property
    def num_requests(self) -> int:
        """The number of requests."""
        return len(self.row_starts) - (not self.is_round)


class SamplerOutput(NamedTuple):
    """The result of one verification step, for a batch of requests."""

    token_ids: Tensor
    """[batch, num_draft_tokens + 1] int64: accepted drafts, one recovered or bonus token, then -1."""

    num_accepted: Tensor
    """[batch] int32: accepted draft tokens."""

    num_draft_tokens: Tensor
    """[batch] int32: draft tokens of the request, without -1 padding."""

    invalid: Tensor
    """[batch] bool: a target row that the result depends on had no finite logit, only NaN or -inf. It emits token 0.

    In a packed call also a request without rows, or whose rows or slot are out of range.
    """

    logprobs: Tensor | None = None
    """[batch, num_draft_tokens + 1] float32: the log-probability of each emitted token, NaN where `token_ids` is -1.

    A row without a finite logit, or of a packed request without rows, is the point mass on token 0: the token 0 that an
    `invalid` request emits has 0, and a draft that only `"synthetic"` accepts there has -inf. None unless requested.
    """

    top_token_ids: Tensor | None = None
    """[batch, num_draft_tokens + 1, top_logprobs] int64: the likeliest tokens of each emitted token's row, likeliest first.

    Of equal logits the lowest id comes first. -1 if no further token has a positive probability, and where `token_ids` is
    -1. None unless requested, like the fields below.
    """

    top_logprobs: Tensor | None = None
    """[batch, num_draft_tokens + 1, top_logprobs] float32: their log-probabilities; -inf where there is no token, NaN
    after the last emitted token."""

    num_kept: Tensor | None = None
    """[batch, num_draft_tokens + 1] int32: the number of kept tokens of each emitted token's row, 0 after the last
    one."""

    kept_token_ids: Tensor | None = None
    """[batch, num_draft_tokens + 1, 1,024] int32: the ids of the kept tokens, in increasing order, then -1.

    All -1 if more than 1,024 are kept: then `kept_cutoff` defines the set.
    """

    kept_cutoff: Tensor | None = None
    """[batch, num_draft_tokens + 1] int64: the last kept token, in the order of decreasing logits and, for equal logits,
    increasing ids. -1 where `token_ids` is -1, and where the row is not truncated: then every token with a finite logit
    is kept.

    Logits are taken after `adjustments`.
    """

    @property
    def num_tokens(self) -> Tensor:
        """[batch] int32: emitted tokens, `num_accepted + 1`."""
        return self.num_accepted + 1


class TreeOutput(NamedTuple):
    """The result of verifying one tree of drafts for each request."""

    token_ids: Tensor
    """[batch, max_depth + 1] int64: accepted drafts, one more token, then -1."""

    nodes: Tensor
    """[batch, max_depth] int32: the accepted nodes, then -1."""

    num_accepted: Tensor
    """[batch] int32: accepted drafts."""

    num_draft_tokens: Tensor
    """[batch] int32: the depth of the tree without padding, at most max_depth: the most drafts that could be accepted."""

    invalid: Tensor
    """[batch] bool: as in a [`SamplerOutput`][specdecode.SamplerOutput]."""

    logprobs: Tensor | None = None
    """[batch, max_depth + 1] float32: as in a `SamplerOutput`, like the fields below."""

    top_token_ids: Tensor | None = None
    """[batch, max_depth + 1, top_logprobs] int64."""

    top_logprobs: Tensor | None = None
    """[batch, max_depth + 1, top_logprobs] float32."""

    num_kept: Tensor | None = None
    """[batch, max_depth + 1] int32."""

    kept_token_ids: Tensor | None = None
    """[batch, max_depth + 1, 1,024] int32."""

    kept_cutoff: Tensor | None = None
    """[batch, max_depth + 1] int64."""

    @property
    def num_tokens(self) -> Tensor:
        """[batch] int32: emitted tokens, `num_accepted + 1`."""
        return self.num_accepted + 1


class RowBatch(NamedTuple):
    """Checked arguments for drawing one token from each row of logits."""

    logits: Tensor  # [batch, vocab] any float
    temperature: Tensor | float  # [batch] any float, or one for all
    seeds: Tensor | int  # [batch] int64, or s meaning s, s + 1, ...
    positions: Tensor | None  # [batch] int64, or None for zeros
    truncation: Truncation | None = None
    adjustments: Adjustments | None = None

    @property
    def is_truncated(self) -> bool:
        """Whether any row is truncated."""
        return self.truncation is not None

    def greedy_if_equivalent(self) -> "RowBatch":
        """Return the greedy batch with the same tokens, if every row keeps one token. (Its logsumexp differs.)"""
        if self.truncation is None or not self.truncation.keeps_one:
            return self
        return self._replace(temperature=0.0, truncation=None)


class VerificationBatch(NamedTuple):
    """Checked arguments of a verification step, the same for both backends.

    In a packed call target logits and draft tokens are by row, positions by request, and all other tensors by slot:
    [num_slots, ...] in place of [batch, ...].
    """

    target_logits: Tensor  # [batch, num_draft_tokens + 1, vocab] any float; packed: [num_rows, vocab]
    draft_token_ids: Tensor  # [batch, num_draft_tokens] int32 or int64; packed: [num_rows] or [num_rows - 1]
    draft_logits: Tensor | None  # [batch, num_draft_tokens, vocab] any float
    draft_logsumexp: Tensor | None  # [batch, num_draft_tokens] float32
    temperature: Tensor | float  # [batch] any float, or one for all
    seeds: Tensor | int  # [batch] int64, or s meaning s, s + 1, ...
    positions: Tensor | None  # [batch] int64, or None for zeros
    truncation: Truncation | None = None
    draft_temperature: Tensor | float | None = None  # like temperature; None: equal to it
    draft_truncation: Truncation | None = None
    draft_cutoff: Tensor | None = None  # [batch, num_draft_tokens] int64
    logprobs: Logprobs | None = None
    packing: Packing | None = None
    draft_vocab_ids: Tensor | None = None  # [draft_vocab] int32 or int64, tokens of draft_logits; None: the target's
    adjustments: Adjustments | None = None
    top_logprobs: int = 0  # number of likeliest tokens to return of each emitted token's row
    kept_sets: bool = False  # whether to return the kept set of each emitted token's row

    @property
    def num_requests(self) -> int:
        """The number of requests."""
        return len(self.draft_token_ids) if self.packing is None else self.packing.num_requests

    @property
    def num_draft_tokens(self) -> int:
        """The most drafts of a request."""
        return self.draft_token_ids.shape[1] if self.packing is None else self.packing.num_draft_tokens

    @property
    def is_truncated(self) -> bool:
        """Whether any row is truncated, or drafts were drawn with sampling parameters other than the target's."""
        drafts_differ = self.draft_truncation is not None or self.draft_temperature is not None
        return self.truncation is not None or drafts_differ

    @property
    def has_lists(self) -> bool:
        """Whether lists of likely tokens or kept sets are requested."""
        return self.top_logprobs > 0 or self.kept_sets

    @property
    def without_draft_rows(self) -> "VerificationBatch":
        """The batch without draft rows, for methods of `TARGET_ONLY`."""
        rows: dict[str, Any] = {name: None for name in self._fields if name.startswith("draft_")}
        return self._replace(**rows | {"draft_token_ids": self.draft_token_ids})

    def greedy_if_equivalent(self, method: str) -> "VerificationBatch":
        """Return the greedy batch with the same output, if every target row keeps one token and no draft row matters."""
        if self.truncation is None or not self.truncation.keeps_one:
            return self
        if self.draft_logits is not None and method not in TARGET_ONLY:
            return self
        return self._replace(temperature=0.0, truncation=None, draft_temperature=None, draft_truncation=None)


class TreeBatch(NamedTuple):
    """Checked arguments of a tree verification."""

    rows: VerificationBatch  # packed, node n of request r at row_starts[r] + n; draft tokens are not used
    token_ids: Tensor  # [batch, nodes] int32 or int64
    parents: Tensor  # [batch, nodes] int32 or int64
    max_depth: int

    @property
    def num_rounds(self) -> int:
        """The largest number of emitted tokens, one more than the most drafts on a path."""
        return min(self.max_depth, self.parents.shape[1] - 1) + 1

    @property
    def packing(self) -> Packing:
        """The rows and slot of each request."""
        assert self.rows.packing is not None
        return self.rows.packing

    def round(self, row: Tensor, position: Tensor, path: Tensor) -> VerificationBatch:
        """Return the batch that draws the next token of each request from one row.

        Args:
            row: [batch] int64, -1 for no row.
            position: [batch] int64, the position of that token.
            path: [batch, depth] int64, the tokens between node 0 and the row.
        """
        packing = self.packing._replace(row_starts=row, num_draft_tokens=0, is_round=True, path=path)
        return self.rows._replace(positions=position, packing=packing)
