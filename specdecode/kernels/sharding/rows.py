"""Which steps kernels cannot do with shards of the rows: these are gathered first, see `specdecode.eager.whole`."""

from torch import Tensor

from specdecode.batch import RowBatch, VerificationBatch
from specdecode.sharding import VocabShard


def are_gathered(
    shard: VocabShard, batch: RowBatch | VerificationBatch, logits: Tensor, draft_logits: Tensor | None
) -> bool:
    """Return whether the rows of a step, given the draft rows that it reads, have to be gathered.

    Those that are reported on are. Truncation takes symmetric memory, and draft rows of the target rows' dtype. The first
    call on a device asks the other ranks.
    """
    reports = isinstance(batch, VerificationBatch) and batch.reports
    if shard.agree(logits).divided or reports:
        return True
    is_alike = draft_logits is None or draft_logits.dtype == logits.dtype
    is_cut = batch.is_truncated and not is_greedy(batch.temperature)
    return is_cut and not (is_alike and shard.transport_on(logits.device).is_symmetric)


def is_greedy(temperature: Tensor | float) -> bool:
    """Return whether all requests are known to be greedy."""
    return isinstance(temperature, float) and temperature == 0
