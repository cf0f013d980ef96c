"""Ranks that are threads, which launch kernels in turn and share memory, and what every rank has to return."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from specdecode import RejectionSampler, VocabShard, sharding, transports
from specdecode.kernels.launch import Plan
from specdecode.kernels.sharding import plan as shard_plan
from tests.conftest import ON_GPU
from tests.support.addresses import apart, inside
from tests.support.kernels import DEVICE, SCHEDULE, given, memory_of, planned_with
from tests.support.ranks import Ranks

NAN, INF = float("nan"), float("inf")
THREE, TWO, UNEVEN, EMPTY = (
    ([0, 1024, 2048, 2064], [2, 0, 1]),
    ([0, 1024, 2064], [1, 0]),
    ([0, 1024, 3100], None),
    ([0, 0, 2048, 2048, 2500], [3, 2, 1, 0]),
)
LARGE = ([0, 51_200, 51_200, 151_936], [1, 2, 0])

ALL_GATHER = transports.all_gather


@contextmanager
def taking_turns() -> Iterator[None]:
    """Let one rank launch at a time, inside its tensors, in memory full of NaN; on a GPU exchange through the host."""
    lock, interpret, gather = threading.Lock(), Plan.interpret, transports.all_gather

    def in_turn(plan: Plan, values: dict) -> None:
        with lock, inside(values):
            interpret(plan, values)

    def through_the_host(tensor: Tensor, group: Any) -> Tensor:
        return gather(tensor.cpu(), group).to(tensor.device)

    with (
        mock.patch.object(Plan, "interpret", in_turn),
        memory_of(NAN),
        mock.patch.object(transports, "all_gather", through_the_host if ON_GPU else gather),
    ):
        yield


class Shared(transports.SymmetricMemory):
    """Symmetric memory of ranks that are threads. Between two launches they meet: a kernel that waits stops all others.

    So none has to, and one that does waits for a word that is never told: it gives up soon.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.most_tries = 100
        self.seen: set[str] = set()

    def memory(self, words: int) -> tuple[dict, dict]:
        self.needed = words
        return super().memory(words)

    def allocate(self, words: int) -> tuple[Tensor, list[int]]:
        memory = torch.empty(words, dtype=torch.int64, device=self.device)
        transports.start_over(memory)
        addresses = ALL_GATHER(torch.tensor([memory.data_ptr()]), self.group)
        return memory, addresses.flatten().tolist()

    def exchange(self, words: Tensor | None) -> None:
        assert words is None
        torch.cuda.synchronize() if ON_GPU else None
        self.seen |= self.not_heard()  # what this rank has told itself is there
        ALL_GATHER(torch.zeros(1), self.group)

    def not_heard(self) -> set[str]:
        """Where words are that are not heard: in the half of even or of odd steps, or beyond what a step was to take."""
        even, odd = self.words[transports.HEADER :].view(2, self.half) != -1
        beyond = torch.cat([even[self.needed :], odd[self.needed :]])
        parts = {"even": even[: self.needed], "odd": odd[: self.needed], "beyond": beyond}
        return {name for name, part in parts.items() if part.any()}


@contextmanager
def sharing_memory() -> Iterator[None]:
    """Have ranks exchange words through memory of all."""

    def choose(wanted: str, group: Any, device: torch.device) -> Shared:
        transport = Shared(group, device)
        transport.grow(1)
        return transport

    with (
        mock.patch.object(transports, "choose", choose),
        planned_with(shard_plan, WAITING_PROGRAMS=132 if ON_GPU else 2),
    ):
        yield


def sampler_of(method: str, shard: VocabShard | None = None, backend: str = "triton") -> RejectionSampler:
    return RejectionSampler(method, backend=backend, schedule=SCHEDULE if method == "synthetic" else None, shard=shard)


def packed_of(method: str, shard: VocabShard | None = None) -> Callable:
    return sampler_of(method, shard).packed


def assert_bits(got: Any, expected: Any) -> None:
    for name, mine, other in zip(expected._fields, got, expected):
        if mine is not other:  # what is absent is None
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True, msg=name)


def assert_ranks_agree(ranks: Ranks, make: Callable, call: dict) -> tuple[Any, list[int]]:
    """Check that every rank returns the bits of one process; return these, and the bytes of each exchange."""
    call = {name: apart(value.to(DEVICE)) if isinstance(value, Tensor) else value for name, value in call.items()}
    expected, sizes, gather = make()(**call), [], transports.all_gather

    def counted(tensor: Tensor, group: distributed.ProcessGroup) -> Tensor:
        gathered = gather(tensor, group)
        if group.rank() == 0:
            sizes.append(gathered.numel() * gathered.element_size())
        return gathered

    logits = call.get("target_logits", call.get("logits"))
    for shard in ranks.shards:  # so that no exchange is one about the layout
        table = [(start, end - start) for start, end in ranks.parts]
        layout = sharding.Layout(table, shard.group.rank(), ranks.vocab_size, logits.device)
        shard._layouts.setdefault(logits.device, layout)
    with mock.patch.object(transports, "all_gather", counted):
        for got in ranks.run(make, call):
            assert_bits(got, expected)
    return expected, sizes


def arguments(kind: str, batch: Any) -> tuple[str, dict]:
    """The method and the arguments of a kind of call."""
    method, draft_logits, logsumexp = given(kind, batch)
    return method, vars(batch) | {"draft_logits": draft_logits, "draft_logsumexp": logsumexp}
