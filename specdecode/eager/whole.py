"""Steps over shards of the vocabulary whose rows are gathered first: every rank then does the whole step."""

from torch import Tensor

from specdecode.adjustments import Adjustments
from specdecode.batch import RowBatch, VerificationBatch
from specdecode.eager.adjustments import bits_of, by_request, words_of
from specdecode.eager.packed import unpack
from specdecode.eager.selection import gathered
from specdecode.sharding import VocabShard


def whole_batch(batch: VerificationBatch, reads_drafts: bool) -> tuple[VerificationBatch, Tensor | None]:
    """Return a batch of a shard as one of whole rows, not packed, and which of the requests of a packed call have rows."""
    shard = batch.shard
    assert shard is not None
    unpacked, has_rows = (batch, None) if batch.packing is None else unpack(batch, batch.packing)
    target, draft = unpacked.target_logits, unpacked.draft_logits if reads_drafts else None
    adjustments = whole_adjustments(by_request(batch), target.shape[-1], shard)
    whole = unpacked._replace(
        target_logits=shard.whole_rows(gathered(target)),
        draft_logits=None if draft is None else shard.whole_rows(gathered(draft)),
        shard=None,
        adjustments=adjustments,
    )
    return whole, has_rows


def whole_rows(batch: RowBatch) -> RowBatch:
    """Return a batch of rows of a shard as one of whole rows."""
    shard = batch.shard
    assert shard is not None
    adjustments = whole_adjustments(batch.adjustments, batch.logits.shape[-1], shard)
    return batch._replace(logits=shard.whole_rows(batch.logits), shard=None, adjustments=adjustments)


def whole_adjustments(adjustments: Adjustments | None, local: int, shard: VocabShard) -> Adjustments | None:
    """Return adjustments with the masks and counts of the whole vocabulary, given those of this rank's tokens."""
    if adjustments is None:
        return None

    def whole_mask(words: Tensor | None) -> Tensor | None:
        return None if words is None else words_of(shard.whole_rows(bits_of(words, local).byte()))

    counts = adjustments.output_counts
    return adjustments._replace(
        prompt_mask=whole_mask(adjustments.prompt_mask),
        output_counts=None if counts is None else shard.whole_rows(counts),
        allowed_mask=whole_mask(adjustments.allowed_mask),
    )
