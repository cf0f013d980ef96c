"""What goes into a backend and what comes out. Arguments are checked here, once."""

from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from specdecode.adjustments import Adjustments, by_slot_of, check_adjustments
from specdecode.checks import (
    INTEGERS,
    Extent,
    check_choice,
    check_logits,
    check_positions,
    check_seeds,
    check_tensor,
    check_values,
    on_host,
    plain,
)
from specdecode.draft_checks import check_draft_cutoff, check_draft_rows, check_draft_vocab_ids
from specdecode.packing import Packing, check_packed
from specdecode.report import check_report
from specdecode.sampling import Sampling, Truncation, check_samplings, check_temperature

Logprobs = Literal["processed", "raw"]
"""Of what emitted tokens' log-probabilities are: the distribution sampled from, or softmax(logits)."""


class SamplerOutput(NamedTuple):
    """What one verification step decided, for a batch of requests."""

    token_ids: Tensor
    """[batch, num_draft_tokens + 1] int64: accepted drafts, one recovered or bonus token, then -1."""

    num_accepted: Tensor
    """[batch] int32: accepted draft tokens."""

    num_draft_tokens: Tensor
    """[batch] int32: draft tokens that the request had, -1 padding not counted."""

    invalid: Tensor
    """[batch] bool: a target row that the result depends on had no finite logit, only NaN or -inf. It emits token 0.

    In a packed call also: the request had no rows, or its rows or its slot are none.
    """

    logprobs: Tensor | None = None
    """[batch, num_draft_tokens + 1] float32: the log-probability of each emitted token, NaN where `token_ids` is -1.

    A row without a finite logit is the point mass on token 0, and so is what a packed request without rows draws from: the
    token 0 that an `invalid` request emits has 0, and what only `"synthetic"` accepts there -inf. None if it was not asked
    for.
    """

    top_token_ids: Tensor | None = None
    """[batch, num_draft_tokens + 1, top_logprobs] int64: the likeliest tokens of each emitted token's row, likeliest first.

    Of equal logits the lowest id comes first. -1 where there are no more that have a probability, and where `token_ids` is
    -1. None if they were not asked for, and so are the other fields below.
    """

    top_logprobs: Tensor | None = None
    """[batch, num_draft_tokens + 1, top_logprobs] float32: of each; -inf where there is none, NaN behind the last token."""

    num_kept: Tensor | None = None
    """[batch, num_draft_tokens + 1] int32: how many tokens of each emitted token's row are kept, 0 behind the last token."""

    kept_token_ids: Tensor | None = None
    """[batch, num_draft_tokens + 1, 1,024] int32: which they are, in the order of ids, then -1.

    All -1 where more than 1,024 are kept: then `kept_cutoff` tells which.
    """

    kept_cutoff: Tensor | None = None
    """[batch, num_draft_tokens + 1] int64: the last token kept, in the order of decreasing logits, of equal ones increasing
    ids; -1 where nothing truncates the row, which keeps every token with a finite logit, and where `token_ids` is -1.

    Logits are those after `adjustments`.
    """

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
        """Whether tokens are left out of any row."""
        return self.truncation is not None

    def greedy_if_alike(self) -> "RowBatch":
        """Return the batch as a greedy one if that draws the same tokens. (It has another logsumexp.)"""
        if self.truncation is None or not self.truncation.keeps_one:
            return self
        return self._replace(temperature=0.0, truncation=None)

    @classmethod
    def check(
        cls,
        logits: Tensor,
        temperature: Tensor | float,
        seeds: Tensor | int | None,
        positions: Tensor | None,
        top_k: Tensor | int | None = None,
        top_p: Tensor | float | None = None,
        min_p: Tensor | float | None = None,
        vocab_size: int | None = None,
        adjustments: Adjustments | None = None,
    ) -> "RowBatch":
        """Build a batch from a caller's arguments; with a vocab_size logits may be a part of so many columns.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape, device or value.
        """
        batch, vocab = check_logits("logits", logits, ("batch", "vocab"), vocab_size)
        if adjustments is not None:
            extent = Extent(batch, batch, 0, vocab, logits.device)
            adjustments = check_adjustments(adjustments, extent, (batch, 1))
        return cls(
            plain(logits),
            check_temperature(temperature, batch, logits.device),
            check_seeds(seeds, batch, logits.device),
            check_positions(positions, batch, logits.device),
            Truncation.check(Sampling(temperature, top_k, top_p, min_p), batch, vocab, logits.device),
            adjustments,
        )


class VerificationBatch(NamedTuple):
    """Checked arguments of a verification step: the one bundle of tensors that both backends receive.

    In a packed call target logits and draft tokens are by row, positions by request, and all else by slot, which is
    `num_slots` in place of `batch`.
    """

    target_logits: Tensor  # [batch, num_draft_tokens + 1, vocab] any float; packed: [num_rows, vocab]
    draft_token_ids: Tensor  # [batch, num_draft_tokens] int32 or int64; packed: [num_rows] or [num_rows - 1]
    draft_logits: Tensor | None  # [batch, num_draft_tokens, vocab] any float
    draft_logsumexp: Tensor | None  # [batch, num_draft_tokens] float32
    temperature: Tensor | float  # [batch] any float, or one for all
    seeds: Tensor | int  # [batch] int64, or s meaning s, s + 1, ...
    positions: Tensor | None  # [batch] int64, or None for zeros
    truncation: Truncation | None = None
    draft_temperature: Tensor | float | None = None  # like temperature; None: the same
    draft_truncation: Truncation | None = None
    draft_cutoff: Tensor | None = None  # [batch, num_draft_tokens] int64
    logprobs: Logprobs | None = None
    packing: Packing | None = None
    draft_vocab_ids: Tensor | None = None  # [draft_vocab] int32 or int64, tokens of draft_logits; None: the target's
    adjustments: Adjustments | None = None
    top_logprobs: int = 0  # how many of the likeliest tokens of each emitted token's row are returned
    kept_sets: bool = False  # and whether what is kept of it

    @property
    def num_requests(self) -> int:
        """The number of requests."""
        return len(self.draft_token_ids) if self.packing is None else len(self.packing.row_starts) - 1

    @property
    def num_draft_tokens(self) -> int:
        """The most drafts of a request."""
        return self.draft_token_ids.shape[1] if self.packing is None else self.packing.num_draft_tokens

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are left out of any row, or drafts were drawn otherwise than the target samples."""
        of_drafts = self.draft_truncation is not None or self.draft_temperature is not None
        return self.truncation is not None or of_drafts

    @property
    def reports(self) -> bool:
        """Whether anything is asked for of the rows of emitted tokens, beside log-probabilities."""
        return self.top_logprobs > 0 or self.kept_sets

    @property
    def without_draft_rows(self) -> "VerificationBatch":
        """The batch as `"strict"` reads it."""
        rows: dict[str, Any] = {name: None for name in self._fields if name.startswith("draft_")}
        return self._replace(**rows | {"draft_token_ids": self.draft_token_ids})

    def greedy_if_alike(self, method: str) -> "VerificationBatch":
        """Return the batch as a greedy one if that has the same result: one token is kept, and no draft row matters."""
        if self.truncation is None or not self.truncation.keeps_one:
            return self
        if self.draft_logits is not None and method != "strict":
            return self
        return self._replace(temperature=0.0, truncation=None, draft_temperature=None, draft_truncation=None)

    @classmethod
    def check(
        cls,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None,
        draft_logsumexp: Tensor | None,
        temperature: Tensor | float,
        seeds: Tensor | int | None,
        positions: Tensor | None,
        top_k: Tensor | int | None = None,
        top_p: Tensor | float | None = None,
        min_p: Tensor | float | None = None,
        draft_sampling: Sampling | None = None,
        draft_cutoff: Tensor | None = None,
        logprobs: Logprobs | None = None,
        draft_vocab_ids: Tensor | None = None,
        adjustments: Adjustments | None = None,
        vocab_size: int | None = None,
        row_starts: Tensor | None = None,
        num_draft_tokens: int | None = None,
        slots: Tensor | None = None,
        row_positions: Tensor | None = None,
        *,
        top_logprobs: int | None = None,
        kept_sets: bool = False,
    ) -> "VerificationBatch":
        """Build a batch from a caller's arguments; with row_starts they are those of a packed call.

        With a vocab_size target logits are a part of so many columns; draft logits are the same part, or whole rows.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape, device or value.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p)
        if row_starts is None:
            extent, packing = check_padded(target_logits, draft_token_ids, draft_logits, vocab_size), None
        else:
            rows = target_logits, draft_token_ids, row_starts, num_draft_tokens
            numbers = temperature, seeds, top_k, top_p, min_p, draft_sampling
            by_slot = draft_logits, *numbers, draft_logsumexp, draft_cutoff, by_slot_of(adjustments)
            if row_positions is not None and positions is not None:
                raise ValueError("row_positions: given beside positions, of which they take the place")
            extent, packing = check_packed(*rows, slots, by_slot, seeds is None, row_positions, vocab_size)
        device, draft_vocab, draft_width = extent.device, None, target_logits.shape[-1]
        if draft_vocab_ids is not None:
            draft_width = draft_vocab = check_draft_vocab_ids(draft_vocab_ids, draft_logits, extent.vocab, device)
        elif vocab_size is not None and isinstance(draft_logits, Tensor) and draft_logits.shape[-1:] == (vocab_size,):
            draft_width = vocab_size
        check_draft_rows(draft_logits, draft_logsumexp, draft_width, extent)
        of_both = check_samplings(sampling, draft_sampling, draft_logits, draft_vocab, extent)
        truncation, draft_temperature, draft_truncation = of_both
        check_draft_cutoff(draft_cutoff, draft_logsumexp, draft_truncation, extent)
        if adjustments is not None:
            adjustments = check_adjustments(adjustments, extent, target_logits.shape[:-1])
        if logprobs is not None:
            check_choice("logprobs", logprobs, get_args(Logprobs))
        num_top = check_report(top_logprobs, kept_sets, logprobs)
        return cls(
            plain(target_logits),
            plain(draft_token_ids),
            None if draft_logits is None else plain(draft_logits),
            None if draft_logsumexp is None else plain(draft_logsumexp),
            check_temperature(temperature, extent.num_slots, device, used=extent.used_slots),
            check_seeds(seeds, extent.batch if seeds is None else extent.num_slots, device),
            check_positions(positions, extent.batch, device, extent.used_requests),
            truncation,
            draft_temperature,
            draft_truncation,
            None if draft_cutoff is None else plain(draft_cutoff),
            logprobs,
            packing,
            None if draft_vocab_ids is None else plain(draft_vocab_ids),
            adjustments,
            num_top,
            kept_sets,
        )


def check_padded(
    target_logits: Tensor, draft_token_ids: Tensor, draft_logits: Tensor | None, vocab_size: int | None
) -> Extent:
    """Raise unless target logits and draft tokens have shapes that fit together; return how much there is.

    With `vocab_size` logits are of a shard of a vocabulary of that size.
    """
    dimensions = "batch", "num_draft_tokens + 1", "vocab"
    batch, rows, vocab = check_logits("target_logits", target_logits, dimensions, vocab_size)
    if rows == 0:
        raise ValueError(
            "target_logits: expected shape [batch, num_draft_tokens + 1, vocab], so at least one row per request, got 0"
        )
    try:
        check_tensor("draft_token_ids", draft_token_ids, INTEGERS, (batch, rows - 1), target_logits.device)
    except ValueError:
        check_num_rows(rows, draft_token_ids, draft_logits)
        raise
    if on_host(draft_token_ids):
        check_token_ids(draft_token_ids, vocab)
    return Extent(batch, batch, rows - 1, vocab, target_logits.device)


def check_num_rows(rows: int, draft_token_ids: Tensor, draft_logits: Tensor | None) -> None:
    """Raise an error that names target_logits, unless draft_logits shows that draft_token_ids has the wrong size."""
    if draft_token_ids.ndim != 2 or draft_token_ids.shape[1] == rows - 1:
        return
    if isinstance(draft_logits, Tensor) and draft_logits.ndim == 3 and draft_logits.shape[1] == rows - 1:
        return  # target_logits and draft_logits agree: draft_token_ids is wrong
    drafts = draft_token_ids.shape[1]
    raise ValueError(
        f"target_logits: expected {drafts + 1} rows per request, one more than draft_token_ids has drafts ({drafts}), "
        f"got {rows}"
    ) from None


def check_token_ids(draft_token_ids: Tensor, vocab: int) -> None:
    """Raise on an id outside the vocabulary; on a device the backends treat such an id as -1."""
    ended = (draft_token_ids == -1).cumsum(dim=1) > 0
    valid = ((draft_token_ids >= 0) & (draft_token_ids < vocab)) | ended
    check_values("draft_token_ids", draft_token_ids, valid, f"ids in [0, {vocab}), or -1 for no draft")
