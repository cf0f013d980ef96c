"""Drawing tokens one row at a time: plain seeded sampling, and drafting for a verification method."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from specdecode import backends, sharding
from specdecode.adjustments import Adjustments
from specdecode.arguments import check_rows
from specdecode.backends import breaks_graph
from specdecode.batch import RowBatch
from specdecode.noise import SELECT
from specdecode.sharding import VocabShard, check_shard


class DraftOutput(NamedTuple):
    """The result of one drafting step: a token per request, and the logsumexp, which saves verification time."""

    token_ids: Tensor
    """[batch] int64; with `width` [batch, width]."""

    logsumexp: Tensor
    """[batch] float32: logsumexp(logits / temperature) of the kept tokens, 0 for greedy requests."""

    cutoff: Tensor | None = None
    """[batch] int64: the last kept token under top_k, top_p and min_p, in the order of decreasing logits; -1: all are
    kept.

    None if none of the three is given.
    """


@breaks_graph
def sample(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    seeds: int | Tensor | None = None,
    positions: Tensor | None = None,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    shard: VocabShard | None = None,
    adjustments: Adjustments | None = None,
) -> Tensor:
    """Draw one token per row from softmax(logits / temperature), truncated, reproducibly.

    The token depends only on the row's logits, temperature, seed and position. `strict` verification returns exactly these
    tokens. Do not draw drafts with this function: its noise is the noise of recovered and bonus tokens, so the output of
    `probabilistic` verification would not have the target's distribution. Use
    [`RejectionSampler.draft`][specdecode.RejectionSampler.draft] for drafts.

    Args:
        logits: [batch, vocab] raw logits, float16, bfloat16, float32 or float64.
        temperature: one number >= 0 or a [batch] float tensor; 0 takes the argmax.
        seeds: [batch] int64; an int s means s, s + 1, ...; None draws them from torch's default generator.
        positions: [batch] int64, the absolute position of the drawn token; None means 0.
        top_k: as for [`RejectionSampler`][specdecode.RejectionSampler.__call__].
        top_p: as for [`RejectionSampler`][specdecode.RejectionSampler.__call__].
        min_p: as for [`RejectionSampler`][specdecode.RejectionSampler.__call__].
        shard: the part of the vocabulary that the logits cover, under tensor parallelism; every rank gets the same
            tokens. None: the whole vocabulary.
        adjustments: biases, penalties and masks, as for [`RejectionSampler`][specdecode.RejectionSampler.__call__].

    Returns:
        [batch] int64 token ids. A row without a finite logit gives token 0.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value.

    Example:
        >>> import torch
        >>> from specdecode import sample
        >>> logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 0.0, 5.0]])
        >>> sample(logits, temperature=0.8, seeds=7)
        tensor([1, 2])
        >>> sample(logits, temperature=0)
        tensor([1, 2])
    """
    token_ids: Tensor
    vocab_size = None
    if shard is not None:
        vocab_size = check_shard(shard).vocab_size
    limits: Any = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    batch = check_rows(logits, temperature, seeds, positions, **limits, adjustments=adjustments, vocab_size=vocab_size)
    token_ids, *_ = draw(batch.greedy_if_equivalent(), SELECT, "auto", shard)
    return token_ids


def draw(
    batch: RowBatch, domains: tuple[int, int], backend: backends.Backend, shard: VocabShard | None, width: int = 0
) -> Sequence[Any]:
    """Draw one token per row, or `width` siblings, by a backend; with a shard each rank draws for a share of the requests.

    Returns:
        [batch] or [batch, width] int64 token ids; [batch] float32 logsumexp(logits / temperature) of the tokens kept;
        [batch] int64 cutoffs, None if rows are not truncated.
    """

    def draw_rows(rows: RowBatch) -> Sequence[Any]:
        results: Sequence[Any] = backends.choose(backend, rows.logits).sample_rows(rows, domains, width)
        return results

    return draw_rows(batch) if shard is None else sharding.draw(shard, batch, draw_rows)
