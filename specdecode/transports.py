"""How ranks exchange words: by a collective between kernels, or through memory that the kernels of all ranks write to."""

import hashlib
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TRANSPORTS = ("auto", "all_gather", "symmetric_memory")

HINTS, HEADER = 16, 16 + 4096
"""Where hints start in symmetric memory, one for each of 4,096 offers, and where its halves start: see `channel`."""

LEAST_WORDS = 1 << 20
"""Of a half, 8 MiB: enough for the statistics of 256 requests of 7 drafts and 151,936 tokens."""

TRIES_PER_SECOND = 1_000_000
"""How often a kernel looks for a word, at most; it was seen to take about twice as long."""


def all_gather(tensor: Tensor, group: "ProcessGroup") -> Tensor:
    """Return the tensors of all ranks, [ranks, ...]."""
    gathered = tensor.new_empty(group.size() * tensor.numel())
    # PyTorch 2.13 has renamed the function and warns of its old name.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(gathered, tensor.reshape(-1), group=group)
    return gathered.view(group.size(), *tensor.shape)


class Collective:
    """Words are gathered between two launches, by the group's all-gather.

    Args:
        group: the ranks.
    """

    name, is_symmetric = "all_gather", False

    def __init__(self, group: "ProcessGroup") -> None:
        self.group = group

    def exchange(self, words: Tensor | None) -> Tensor | None:
        """Return the words of all ranks, [ranks * length], given this rank's."""
        return None if words is None else all_gather(words, self.group).view(-1)

    def memory(self, words: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return what kernels are told of symmetric memory: nothing."""
        return {}, {}

    def row_memory(self, words: int) -> dict[str, Tensor]:
        """Do nothing: rows are gathered before."""
        return {}

    def check(self) -> None:
        """Do nothing: the group raises its own errors."""


class SymmetricMemory:
    """Kernels write their words to the memory of every rank: nothing is done between two launches.

    There is one step at a time: a shard's steps, replays of graphs included, have to follow each other on one stream, or on
    streams that wait for each other. Memory that a graph may hold is kept for good.

    Args:
        group: the ranks, whose GPUs can write to each other's memory.
        device: this rank's GPU.
    """

    name, is_symmetric = "symmetric_memory", True

    def __init__(self, group: "ProcessGroup", device: torch.device) -> None:
        self.group, self.device = group, device
        self.half = self.row_words = 0
        self.kept: list[object] = []
        self.failed = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self.most_tries = timeout_of(group, device).total_seconds() * TRIES_PER_SECOND

    def exchange(self, words: Tensor | None) -> Tensor | None:
        """Return nothing: kernels have exchanged the words."""
        return None

    def memory(self, words: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return what kernels are told, given how many words a step takes; every rank asks for as many.

        Raises:
            RuntimeError: more words are needed than in any step before, while a graph is captured.
            torch.distributed.DistBackendError: in a step before, a rank did not answer in time.
        """
        self.check()
        if words > self.half:
            self.check_not_capturing()
            self.grow(words)
            all_gather(self.words[:1], self.group).cpu()  # no rank writes before the memory of all is ready
        tensors: dict[str, Tensor] = {"peers": self.peers, "memory": self.words, "failed": self.failed}
        return tensors, {"half": self.half, "most_tries": int(self.most_tries)}

    def row_memory(self, words: int) -> dict[str, Tensor]:
        """Return where the memory of each rank for rows that it owns is, given how much a step takes.

        No rank writes there before all have told it something else in the same step.

        Raises:
            RuntimeError: as `memory`.
        """
        if words > self.row_words:
            self.check_not_capturing()
            self.rows, addresses = self.allocate(1 << (words - 1).bit_length())
            self.row_peers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
            self.kept += [self.rows, self.row_peers]
            self.row_words = len(self.rows)  # at last, as in `grow`
        return {"row_memory": self.rows, "row_peers": self.row_peers}

    def check_not_capturing(self) -> None:
        """Raise if a graph is captured, as memory is needed."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("shard: call the sampler once with arguments of these sizes before capturing a graph")

    def grow(self, words: int) -> None:
        """Get memory for steps of so many words; no rank may write to it before all have theirs."""
        half = max(LEAST_WORDS, 1 << (words - 1).bit_length())
        self.words, addresses = self.allocate(HEADER + 2 * half)
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self.kept += [self.words, self.peers]
        self.half = half  # at last: after an error it is that of the memory that is there

    def check(self) -> None:
        """Raise if a rank did not answer in time."""
        if self.failed[0]:
            message = "specdecode: a rank did not tell its part of a step in time; this shard cannot be used any more"
            raise distributed.DistBackendError(message)

    def allocate(self, words: int) -> tuple[Tensor, list[int]]:
        """Return memory that all ranks can write to, as it is before the first step, and its address on each rank."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        memory = symmetric_memory.empty(words, dtype=torch.int64, device=self.device)
        handle = symmetric_memory.rendezvous(memory, self.group)
        self.kept.append(handle)
        start_over(memory)
        torch.cuda.synchronize(self.device)
        return memory, list(handle.buffer_ptrs)


def start_over(memory: Tensor) -> None:
    """Set symmetric memory to what it is before the first step."""
    memory.fill_(-1)
    memory[:HEADER] = 0


def backend_of(group: "ProcessGroup", device: torch.device) -> object:
    """Return what a group sends a device's tensors by, None if it has nothing for them."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def timeout_of(group: "ProcessGroup", device: torch.device) -> timedelta:
    """Return how long a group's collectives wait."""
    options = getattr(backend_of(group, device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else distributed.constants.default_pg_timeout


def choose(wanted: str, group: "ProcessGroup", device: torch.device) -> Collective | SymmetricMemory:
    """Return the transport of a group on a device; every rank asks for it at the same time.

    `"auto"` takes symmetric memory if all ranks are on one host, on GPUs that can write to each other's memory, and the
    group's backend is NCCL.

    Raises:
        ValueError: symmetric memory is wanted and cannot be had.
    """
    if wanted == "all_gather":
        return Collective(group)
    reason = why_not_symmetric(group, device)
    transport = None if reason else SymmetricMemory(group, device)
    if transport is not None:
        try:
            transport.grow(1)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
        ready = all_gather(torch.tensor([not reason], dtype=torch.int32, device=device), group)
        if not ready.all() and not reason:
            reason = "another rank could not get it"
    if transport is not None and not reason:
        return transport
    if wanted == "symmetric_memory":
        raise ValueError(f"transport: no symmetric memory: {reason}")
    return Collective(group)


def why_not_symmetric(group: "ProcessGroup", device: torch.device) -> str | None:
    """Return why a group has no symmetric memory, or None; every rank says the same."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "it takes NVIDIA GPUs"
    if group.size() == 1:
        return "there is one rank"
    if not isinstance(backend_of(group, device), getattr(distributed, "ProcessGroupNCCL", ())):  # builds may lack it
        return "the group's backend is not NCCL"
    # The boot id tells hosts apart, whose names may be the same; in a container it is its host's.
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    number = hash_of(boot_id.read_text() if boot_id.exists() else socket.gethostname())
    hosts = all_gather(torch.tensor([number], device=device), group)
    if int((hosts != number).sum()) > 0:
        return "ranks are on several hosts"
    return None


def hash_of(text: str) -> int:
    """Return a number in 63 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
