"""Vocabulary shards: requests are divided among ranks, and each rank verifies whole rows of its own.

    a rank's columns of all rows -> all-to-all -> whole rows of its own requests -> verify -> all-gather -> all results

Under tensor parallelism the last layer leaves each rank some columns of the logits. If requests divide evenly, a rank
receives the bytes of a gather of all rows divided by the number of ranks; verification is divided, too. Packed rows are
padded to `num_draft_tokens + 1` a request first, because the host does not know their lengths. Backends see ordinary
batches of whole rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from specdecode.arguments import check_count, seed_each, select
from specdecode.batch import RowBatch, SamplerOutput, VerificationBatch
from specdecode.eager.adjustments import by_request
from specdecode.eager.packed import mark_invalid, unpack
from specdecode.eager.selection import gathered

MOST_TOKENS = 2**31 - 1
"""The largest vocabulary: token ids are int32 in the kernels."""


class Layout(NamedTuple):
    """The shards of all ranks."""

    lengths: list[int]  # tokens of each rank
    by_start: list[int]  # ranks in the order of the vocabulary


class VocabShard:
    """The part of the vocabulary that this rank's logits cover: `logits[..., start : start + local]` of whole rows.

    Pass it to [`RejectionSampler`][specdecode.RejectionSampler] or [`sample`][specdecode.sample] on every rank of the group.
    Logits are then [..., local]. All other arguments concern the whole vocabulary and all requests, and are the same on
    every rank: token ids, temperatures, seeds, masks and counts. The draft logits of a verification may also be whole rows,
    [..., vocab], if every rank has them; with `draft_vocab_ids` they must be. Every rank gets the results of all requests.
    Drafts from whole rows need no shard: draw them with a sampler without one, and with `seeds`.

    The shards of all ranks must tile the vocabulary, in any order of the ranks. Shards may have different lengths and may be
    empty. Each rank verifies an equal share of the requests. The results are bit for bit equal to one process with whole
    logits.

    In its first call a shard exchanges its bounds with the other ranks. The host waits for them, so this call cannot be
    captured in a CUDA graph. Later calls never wait, and they can be captured if the group's backend is NCCL.

    Args:
        group: a process group of torch.distributed, such as a tensor-parallel group; None is the default group.
        start: the first token of this rank's shard, >= 0.
        vocab_size: tokens in the whole vocabulary, the same on every rank.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a start beyond the vocabulary, or a group that this process is not in. In the first call: shards that
            leave a gap, overlap, or have different `vocab_size`.

    Example:
        >>> import torch, torch.distributed
        >>> from specdecode import VocabShard, sample
        >>> store = torch.distributed.HashStore()  # torchrun sets up a group of several processes; here it is this one alone
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> shard = VocabShard(None, start=0, vocab_size=3)
        >>> sample(torch.tensor([[0.0, 3.0, 1.0]]), temperature=0.8, seeds=7, shard=shard)
        tensor([1])
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, group: "distributed.ProcessGroup | None", start: int, vocab_size: int) -> None:
        if not distributed.is_available():
            raise ValueError("group: this build of PyTorch has no torch.distributed")
        if group is None:
            if not distributed.is_initialized():
                raise ValueError("group: None is the default group, which torch.distributed.init_process_group makes")
            group = distributed.group.WORLD
        if not isinstance(group, distributed.ProcessGroup):
            if group == distributed.GroupMember.NON_GROUP_MEMBER:  # the result of new_group on ranks outside the group
                raise ValueError("group: this process is not in it")
            raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
        self.group = group
        self.vocab_size = check_count("vocab_size", vocab_size, most=MOST_TOKENS)
        self.start = check_count("start", start, most=self.vocab_size, least=0)
        self._layout: Layout | None = None

    def __repr__(self) -> str:
        """Return the rank and its shard."""
        rank = f"rank {self.group.rank()} of {self.group.size()}"
        return f"VocabShard(<{rank}>, start={self.start}, vocab_size={self.vocab_size})"

    def layout(self, logits: Tensor) -> Layout:
        """Return the layout of all shards; the first call exchanges it.

        Raises:
            ValueError: the shards do not tile the vocabulary, or this rank's has another length than before.
        """
        if self._layout is None:
            mine = torch.tensor([self.start, logits.shape[-1], self.vocab_size], device=logits.device)
            table = all_gather(mine, self.group).tolist()
            check_tiling(table)
            lengths = [length for _, length, _ in table]
            self._layout = Layout(lengths, sorted(range(len(table)), key=lambda rank: table[rank]))
        return self._layout

    def are_whole(self, draft_logits: Tensor) -> bool:
        """Return whether draft logits are whole rows, not columns."""
        return draft_logits.shape[-1] == self.vocab_size > max(self.layout(draft_logits).lengths)

    def share(self, batch: int, rank: int | None = None) -> slice:
        """Return the range of requests of a rank, by default this one; the last shares may be smaller or empty."""
        most = -(-batch // self.group.size())
        first = min(batch, most * (self.group.rank() if rank is None else rank))
        return slice(first, min(batch, first + most))

    def own_rows(self, columns: Tensor) -> Tensor:
        """Return whole rows of this rank's requests, [share, ..., vocab], given columns of all rows, [batch, ..., local]."""
        layout = self.layout(columns)
        expected = layout.lengths[self.group.rank()]
        if columns.shape[-1] == self.vocab_size == max(layout.lengths):
            columns = columns[..., :expected]  # one rank holds all tokens: the rows of others are not needed
        batch, *inner, local = columns.shape
        if local != expected:
            raise ValueError(f"shard: expected logits of {expected} tokens, as in its first call, got {local}")
        rows = columns.shape[1:-1].numel()
        shares = [self.share(batch, rank) for rank in range(self.group.size())]
        counts = [share.stop - share.start for share in shares]
        own = counts[self.group.rank()]
        if batch * rows == 0:  # on every rank
            return columns.new_zeros(own, *inner, self.vocab_size)
        sent = [count * rows * local for count in counts]
        received = [own * rows * length for length in layout.lengths]
        buffer = columns.new_empty(sum(received))
        distributed.all_to_all_single(buffer, columns.reshape(-1).contiguous(), received, sent, group=self.group)
        parts = [part.view(own, *inner, length) for part, length in zip(torch.split(buffer, received), layout.lengths)]
        return torch.cat([parts[rank] for rank in layout.by_start], dim=-1)

    def gather(self, results: Sequence[Tensor | None], batch: int) -> list[Tensor | None]:
        """Return the results of all requests, [batch, ...] each, given this rank's results, [share, ...] each."""
        words = [words_of(each) for each in results if each is not None]
        missing = -(-batch // self.group.size()) - len(words[0])
        packed = torch.nn.functional.pad(torch.cat(words, dim=1), (0, 0, 0, missing))
        all_words = all_gather(packed, self.group).flatten(0, 1)[:batch]
        rest = iter(torch.split(all_words, [each.shape[1] for each in words], dim=1))
        return [None if each is None else from_words(next(rest), each) for each in results]


def all_gather(tensor: Tensor, group: "distributed.ProcessGroup") -> Tensor:
    """Return the tensors of all ranks, [ranks, ...]."""
    gathered = tensor.new_empty(group.size() * tensor.numel())
    # PyTorch 2.13 has renamed the function and warns of its old name.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(gathered, tensor.reshape(-1), group=group)
    return gathered.view(group.size(), *tensor.shape)


def words_of(result: Tensor) -> Tensor:
    """Return a result as int32 words, [share, n]."""
    words = result.int() if result.dtype == torch.bool else result
    return words.reshape(len(words), words.shape[1:].numel()).view(torch.int32)


def from_words(words: Tensor, result: Tensor) -> Tensor:
    """Return words of any number of requests, with the dtype of `result` and the shape [requests, *result.shape[1:]]."""
    copied = words.bool() if result.dtype == torch.bool else words.clone(memory_format=torch.contiguous_format)
    return copied.view(result.dtype).view(len(words), *result.shape[1:])


def check_shard(shard: VocabShard) -> VocabShard:
    """Return a shard, or raise if it is not one."""
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard: expected a VocabShard, got {type(shard).__name__}")
    return shard


def check_tiling(table: list[list[int]]) -> None:
    """Raise unless the ranks' (start, length, vocab_size) tile one vocabulary; the error is the same on every rank."""
    sizes = {vocab_size for _, _, vocab_size in table}
    if len(sizes) > 1:
        said = ", ".join(f"{vocab_size} (rank {rank})" for rank, (_, _, vocab_size) in enumerate(table))
        raise ValueError(f"vocab_size: expected the same on every rank, got {said}")
    reached, before, (vocab_size,) = 0, None, sizes
    ranges = ", ".join(f"rank {rank} [{start}, {start + length})" for rank, (start, length, _) in enumerate(table))
    for rank, (start, length, _) in sorted(enumerate(table), key=lambda item: item[1][:2]):
        if length == 0:
            continue
        if start > reached:
            raise ValueError(f"shard: no rank holds tokens {reached} to {start - 1}; ranks hold {ranges}")
        if start < reached:
            raise ValueError(f"shard: ranks {before} and {rank} both hold token {start}; ranks hold {ranges}")
        reached, before = start + length, rank
    if reached < vocab_size:
        raise ValueError(f"shard: no rank holds tokens {reached} to {vocab_size - 1}; ranks hold {ranges}")
    if reached > vocab_size:
        beyond = f"tokens up to {reached - 1}, beyond the vocabulary of {vocab_size}"
        raise ValueError(f"shard: rank {before} holds {beyond}; ranks hold {ranges}")


def own_part(
    batch: VerificationBatch, own: slice, exchange: Callable[[Tensor], Tensor], are_whole: Callable[[Tensor], bool]
) -> tuple[VerificationBatch, Tensor | None]:
    """Return some requests of a batch as a padded batch, and whether each has rows, if the batch was packed.

    Args:
        batch: of this rank's columns.
        own: the requests.
        exchange: returns their whole rows, given this rank's columns of all requests' rows.
        are_whole: whether draft logits are whole rows.
    """
    has_rows = None
    if batch.packing is None:
        adjustments = None if batch.adjustments is None else select(batch.adjustments, request=own, slot=own)
    else:
        adjustments = by_request(batch, batch.packing, own)
        batch, has_rows = unpack(batch, batch.packing)
        has_rows = has_rows[own]
    seeds = seed_each(batch.seeds, len(batch.draft_token_ids), batch.draft_token_ids.device)
    target_logits, draft_logits = exchange(gathered(batch.target_logits)), batch.draft_logits
    if draft_logits is not None:
        is_whole = batch.draft_vocab_ids is not None or are_whole(draft_logits)
        draft_logits = gathered(draft_logits[own]) if is_whole else exchange(gathered(draft_logits))
    no_rows: Any = {"target_logits": None, "draft_logits": None, "adjustments": None}
    part = select(batch._replace(seeds=seeds, **no_rows), request=own, slot=own)
    return part._replace(target_logits=target_logits, draft_logits=draft_logits, adjustments=adjustments), has_rows


def verify(
    shard: VocabShard, batch: VerificationBatch, verify_own: Callable[[VerificationBatch], SamplerOutput]
) -> SamplerOutput:
    """Verify a batch of this rank's columns: exchange rows, verify the own requests by a backend, gather the results."""
    requests = batch.num_requests
    mine, has_rows = own_part(batch, shard.share(requests), shard.own_rows, shard.are_whole)
    output = verify_own(mine)
    if has_rows is not None:
        output = mark_invalid(output, has_rows)
    return output if requests == 0 else SamplerOutput(*shard.gather(output, requests))  # type: ignore[arg-type]


def for_warmup(shard: VocabShard, batch: VerificationBatch) -> VerificationBatch:
    """Return a batch of one request, of zeros, like the batches that this rank verifies; every rank exchanges rows."""

    def exchange(columns: Tensor) -> Tensor:
        return shard.own_rows(columns.new_zeros(shard.group.size(), *columns.shape[1:]))

    all_gather(batch.draft_token_ids.new_zeros(1), shard.group)
    return own_part(batch, slice(0, 1), exchange, shard.are_whole)[0]


def draw(shard: VocabShard, batch: RowBatch, draw_own: Callable[[RowBatch], Sequence[Any]]) -> Sequence[Any]:
    """Draw a token from each row of a batch of this rank's columns: exchange rows, draw, gather the results."""
    requests, own = len(batch.logits), shard.share(len(batch.logits))
    rows = shard.own_rows(batch.logits)
    seeds = seed_each(batch.seeds, requests, rows.device)
    own_batch = select(batch._replace(logits=None, seeds=seeds), request=own, slot=own)  # type: ignore[arg-type]
    results = draw_own(own_batch._replace(logits=rows))
    return results if requests == 0 else shard.gather(results, requests)
