"""Steps that kernels cannot do with shards of the rows: these are gathered first, and every rank does the whole step."""

from torch import Tensor

from specdecode.batch import RowBatch, VerificationBatch
from specdecode.eager.packed import IndexedRows, unpack
from specdecode.sharding import VocabShard


def are_gathered(
    shard: VocabShard, batch: RowBatch | VerificationBatch, logits: Tensor, draft_logits: Tensor | None
) -> bool:
    """Return whether the rows of a step, given the draft rows that it reads, have to be gathered.

    Truncation takes symmetric memory, and draft rows of the target rows' dtype. The first call on a device asks the other
    ranks.
    """
    if shard.agree(logits).divided:
        return True
    is_alike = draft_logits is None or draft_logits.dtype == logits.dtype
    is_cut = batch.is_truncated and not is_greedy(batch.temperature)
    return is_cut and not (is_alike and shard.transport_on(logits.device).is_symmetric)


def is_greedy(temperature: Tensor | float) -> bool:
    """Return whether all requests are known to be greedy."""
    return isinstance(temperature, float) and temperature == 0


def gathered(
    shard: VocabShard, batch: VerificationBatch, reads_drafts: bool
) -> tuple[VerificationBatch, Tensor | None]:
    """Return a batch of whole rows, and which of the requests of a packed call have rows."""
    has_rows = None
    if batch.packing is not None:  # its slots may hold many draft rows that nobody asks for
        batch, has_rows = unpack(batch, batch.packing)
    target, draft = batch.target_logits, batch.draft_logits if reads_drafts else None
    whole_draft = None if draft is None else whole_rows(shard, draft)
    return batch._replace(target_logits=whole_rows(shard, target), draft_logits=whole_draft, shard=None), has_rows


def whole_rows(shard: VocabShard, rows: Tensor | IndexedRows) -> Tensor:
    """Return rows of all ranks' logits, given this rank's, which may have to be copied out of a tensor first."""
    return shard.whole_rows(rows.gather() if isinstance(rows, IndexedRows) else rows)
