"""Vocabulary shards: which tokens each rank holds, and how whole rows are gathered where a backend needs them.

Under tensor parallelism the last layer leaves each rank the logits of a part of the vocabulary. Verification asks little of
most of a row: its maximum, the sums of its blocks, and the logits of single tokens. On the Triton backend ranks exchange
these, a small fraction of the logits, and then all compute the same decisions from the same bits. The eager backend gathers
the rows.
"""

import math

import torch
from torch import Tensor, distributed

from specdecode import transports
from specdecode.checks import check_count, check_seeds
from specdecode.noise import BLOCK_SIZE
from specdecode.transports import TRANSPORTS

Transport = transports.Collective | transports.SymmetricMemory

MOST_TOKENS = 2**31 - 1
"""The largest vocabulary: ranks exchange token ids as int32."""


class VocabShard:
    """Say which part of the vocabulary this rank's logits are: `logits[..., start : start + local]` of the whole rows.

    Pass it to [`RejectionSampler`][specdecode.RejectionSampler] or [`sample`][specdecode.sample], on every rank of the
    group. Logits are then [..., local], while token ids, top_k, temperatures, seeds and results are those of the whole
    vocabulary, the same on every rank.

    The ranks' shards must tile the vocabulary, in any order of the ranks. Shards may have different lengths, and be empty.
    The results are bit for bit those of one process with the whole logits. The Triton backend gathers no rows where every
    start is a multiple of 1,024 and, for truncated rows, it has symmetric memory. Elsewhere, and on the eager backend, rows
    are gathered first.

    In its first call a shard learns from the other ranks where theirs lie. The host waits for that, so this call cannot be
    captured in a CUDA graph. In later calls it never waits, and they can be captured if the group's backend is NCCL.

    Args:
        group: a process group of torch.distributed, such as a tensor-parallel group; None is the default group.
        start: the first token of this rank's shard, >= 0.
        vocab_size: tokens in the whole vocabulary, the same on every rank.
        transport: how the Triton backend's kernels exchange what they find. `"all_gather"`: by a collective of the group
            between two kernels. `"symmetric_memory"`: kernels write to the memory of the other ranks' GPUs, which takes
            NCCL and GPUs of one host. `"auto"` is the latter where it can be had. The same on every rank.

    Attributes:
        transport: the same; from the Triton backend's first call on, which of the two is used.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a start beyond the vocabulary, or a group that this process is not in. At the first call: shards that
            leave a gap, overlap, or disagree about the vocabulary.

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

    def __init__(
        self, group: "distributed.ProcessGroup | None", start: int, vocab_size: int, *, transport: str = "auto"
    ) -> None:
        if not distributed.is_available():
            raise ValueError("group: this build of PyTorch has no torch.distributed")
        if group is None:
            if not distributed.is_initialized():
                raise ValueError("group: None is the default group, which torch.distributed.init_process_group makes")
            group = distributed.group.WORLD
        if not isinstance(group, distributed.ProcessGroup):
            if group == distributed.GroupMember.NON_GROUP_MEMBER:  # what new_group returns to others
                raise ValueError("group: this process is not in it")
            raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
        self.group = group
        self.vocab_size = check_count("vocab_size", vocab_size, most=MOST_TOKENS)
        self.start = check_count("start", start, most=self.vocab_size, least=0)
        if transport not in TRANSPORTS:
            raise ValueError(f"transport: expected one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
        self.transport = self._wanted = transport
        self._layouts: dict[torch.device, Layout] = {}
        self._transports: dict[torch.device, Transport] = {}

    def __repr__(self) -> str:
        """Return what this rank holds."""
        rank = f"rank {self.group.rank()} of {self.group.size()}"
        return f"VocabShard(<{rank}>, start={self.start}, vocab_size={self.vocab_size})"

    def agree(self, logits: Tensor) -> "Layout":
        """Return where all shards lie; the first call on a device asks the other ranks.

        Raises:
            ValueError: the shards do not tile the vocabulary, or this rank's has another length than before.
        """
        local = logits.shape[-1]
        layout = self._layouts.get(logits.device)
        if layout is None:
            mine = torch.tensor([self.start, local, self.vocab_size], device=logits.device)
            table = transports.all_gather(mine, self.group).tolist()
            check_tiling(table)
            shards = [(start, length) for start, length, _ in table]
            layout = self._layouts[logits.device] = Layout(shards, self.group.rank(), self.vocab_size, logits.device)
        if layout.local != local:
            raise ValueError(
                f"shard: this rank holds {layout.local} tokens, as it told the other ranks, got logits of {local}"
            )
        return layout

    def check(self) -> None:
        """Raise if in any step so far, replayed ones included, a rank did not answer in time. It does not wait for the GPU.

        Calls do so themselves; between replays of a graph, which run no host code, call this.

        Raises:
            torch.distributed.DistBackendError: words did not come through symmetric memory in time.
        """
        for chosen in self._transports.values():
            chosen.check()

    def transport_on(self, device: torch.device) -> "Transport":
        """Return how kernels exchange words; the first call on a device asks the other ranks.

        Raises:
            ValueError: symmetric memory is wanted and cannot be had.
        """
        chosen = self._transports.get(device)
        if chosen is None:
            chosen = self._transports[device] = transports.choose(self._wanted, self.group, device)
            self.transport = chosen.name
        return chosen

    def whole_rows(self, logits: Tensor) -> Tensor:
        """Gather rows: return them with the logits of the whole vocabulary, given this rank's, [..., local]."""
        layout = self.agree(logits)
        if logits.shape[:-1].numel() == 0:  # every rank knows
            return logits.new_zeros(*logits.shape[:-1], self.vocab_size)
        lengths = [length for _, length in layout.shards]
        missing = max(lengths) - layout.local
        if missing > 0:  # padding copies rows even where nothing is missing
            logits = torch.nn.functional.pad(logits, (0, missing))
        gathered = transports.all_gather(logits, self.group)
        return torch.cat([gathered[rank, ..., : lengths[rank]] for rank in layout.by_start], dim=-1)

    def check_seeds(self, seeds: Tensor | int | None, batch: int, device: torch.device, logits: Tensor) -> Tensor | int:
        """Return checked seeds; None draws them from the generator of the group's first rank, in one more exchange."""
        checked = check_seeds(seeds, batch, device)
        if seeds is not None or not isinstance(checked, Tensor) or batch == 0:
            return checked
        self.agree(logits)  # before anything else is exchanged, so that wrong shards are named
        return transports.all_gather(checked, self.group)[0]


def check_shard(shard: VocabShard) -> None:
    """Raise unless this is a shard."""
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard: expected a VocabShard, got {type(shard).__name__}")


def check_tiling(table: list[list[int]]) -> None:
    """Raise unless the ranks' (start, length, vocab_size) tile one vocabulary; the error is the same on every rank."""
    sizes = {vocab_size for _, _, vocab_size in table}
    if len(sizes) > 1:
        said = ", ".join(f"{vocab_size} (rank {rank})" for rank, (_, _, vocab_size) in enumerate(table))
        raise ValueError(f"vocab_size: expected the same on every rank, got {said}")
    reached, before, (vocab_size,) = 0, None, sizes
    for rank, (start, length, _) in sorted(enumerate(table), key=lambda item: item[1][:2]):
        if length == 0:
            continue
        if start > reached:
            raise ValueError(f"shard: no rank holds tokens {reached} to {start - 1}; {shown_ranges(table)}")
        if start < reached:
            raise ValueError(f"shard: ranks {before} and {rank} both hold token {start}; {shown_ranges(table)}")
        reached, before = start + length, rank
    if reached < vocab_size:
        raise ValueError(f"shard: no rank holds tokens {reached} to {vocab_size - 1}; {shown_ranges(table)}")
    if reached > vocab_size:
        raise ValueError(
            f"shard: rank {before} holds tokens up to {reached - 1}, beyond the vocabulary of {vocab_size}; "
            f"{shown_ranges(table)}"
        )


def shown_ranges(table: list[list[int]]) -> str:
    """Return every rank's range, for an error message."""
    ranges = (f"rank {rank} [{start}, {start + length})" for rank, (start, length, _) in enumerate(table))
    return f"ranks hold {', '.join(ranges)}"


class Layout:
    """Where all shards lie: the same on every rank but for its own place.

    Args:
        shards: (start, length) of each rank.
        rank: this one.
        vocab_size: of the whole vocabulary.
        device: of the logits.
    """

    def __init__(self, shards: list[tuple[int, int]], rank: int, vocab_size: int, device: torch.device) -> None:
        self.shards, self.by_start = shards, sorted(range(len(shards)), key=lambda i: shards[i])
        """(start, length) of each rank; the ranks in the order of the vocabulary."""
        self.start, self.local = shards[rank]
        self.rank, self.ranks, self.vocab_size = rank, len(shards), vocab_size
        holders = [i for i in self.by_start if shards[i][1]]
        self.holders = torch.tensor(holders, dtype=torch.int32, device=device)
        """int32: the ranks whose shards are not empty, in the order of the vocabulary."""
        self.ranks_in_order = torch.tensor(self.by_start, dtype=torch.int32, device=device)
        """int32: all ranks in that order."""

        block_size = min(BLOCK_SIZE, vocab_size)
        touched = [range(start // block_size, math.ceil((start + length) / block_size)) for start, length in shards]
        self.most_blocks = max(len(touched[i]) for i in holders)
        """Blocks of the widest shard, to which all ranks pad what they send."""
        held = [[i for i in holders if block in touched[i]] for block in range(math.ceil(vocab_size / block_size))]
        self.divided = any(len(ranks) > 1 for ranks in held)
        """Whether several shards hold a part of one block."""
        sources = [first * self.most_blocks + block - touched[first].start for block, (first, *_) in enumerate(held)]
        self.sources = torch.tensor(sources, dtype=torch.int32, device=device)
        """[num_blocks] int32: where each block, or its first part, is among what the ranks send in their own order."""
