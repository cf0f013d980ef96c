"""How a transport is chosen, and how symmetric memory grows and fails: ranks are threads, and their memory is the host's."""

import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric_memory

from specdecode import VocabShard, transports
from specdecode.transports import HEADER, LEAST_WORDS, TRIES_PER_SECOND, Collective, SymmetricMemory
from tests.support.ranks import groups, on_ranks

CPU = torch.device("cpu")


class Handle:
    """What rendezvous returns, here by a fake."""

    def __init__(self, addresses: list[int]) -> None:
        self.buffer_ptrs = addresses


class Host:
    """Memory of the host in place of symmetric memory. Some ranks cannot get it; the last one is slow."""

    def __init__(self) -> None:
        self.failing: set[int] = set()
        self.message = "this GPU cannot write to the others\nand more"
        self.events: list[str] = []
        self.handles: list[tuple[int, weakref.ref]] = []

    def empty(self, words: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full((words,), 7, dtype=dtype)

    def rendezvous(self, memory: Tensor, group: ProcessGroup) -> Any:
        addresses = transports.all_gather(torch.tensor([memory.data_ptr()]), group)
        if group.rank() in self.failing:
            raise RuntimeError(self.message)
        time.sleep(0.1 * (group.rank() + 1 == group.size()))
        handle = Handle(addresses.flatten().tolist())
        self.handles.append((group.rank(), weakref.ref(handle)))
        return handle

    def synchronize(self, device: torch.device) -> None:
        self.events.append("ready")


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    with (
        mock.patch.object(transports, "why_not_symmetric", return_value=None),
        mock.patch.object(symmetric_memory, "empty", host.empty),
        mock.patch.object(symmetric_memory, "rendezvous", host.rendezvous),
        mock.patch.object(torch.cuda, "synchronize", host.synchronize),
    ):
        yield host


def chosen(wanted: str, size: int = 2) -> list[Any]:
    """What each rank chooses, or the error that it raises."""
    return on_ranks(transports.choose, [(wanted, group, CPU) for group in groups(size, seconds=5)])


@pytest.mark.parametrize(("failing", "kind"), [(set(), SymmetricMemory), ({1}, Collective), ({0, 1, 2}, Collective)])
def test_auto_is_symmetric_memory_if_all_ranks_can_get_it(failing, kind, host):
    host.failing = failing
    assert [type(transport) for transport in chosen("auto", 3)] == [kind] * 3
    assert [type(transport) for transport in chosen("all_gather")] == [Collective] * 2


def test_symmetric_memory_that_is_wanted_and_cannot_be_had_is_an_error_that_says_why(host):
    host.failing = {1}
    reasons = "another rank could not get it", "this GPU cannot write to the others"
    for error, reason in zip(chosen("symmetric_memory"), reasons):
        with pytest.raises(ValueError, match=f"^transport: no symmetric memory: {reason}$"):
            raise error
    host.message = ""
    assert str(chosen("symmetric_memory")[1]) == "transport: no symmetric memory: RuntimeError"
    with mock.patch.object(transports, "why_not_symmetric", return_value="there is one rank"):
        (error,) = chosen("symmetric_memory", 1)
        assert isinstance(chosen("auto", 1)[0], Collective)
    assert str(error) == "transport: no symmetric memory: there is one rank"


def test_a_shard_chooses_once_and_says_what(host):
    (group,) = groups(1)
    with pytest.raises(ValueError, match=r"^transport: expected one of 'auto', 'all_gather', .*, got 'nvlink'"):
        VocabShard(group, 0, 8, transport="nvlink")
    shard = VocabShard(group, 0, 8)
    assert shard.transport == "auto"
    assert shard.transport_on(CPU) is shard.transport_on(CPU)
    assert shard.transport == "symmetric_memory"
    with mock.patch.object(transports, "choose") as choose:
        shard.transport_on(torch.device("meta"))
    assert choose.call_args.args[0] == "auto"  # what was chosen for one device is not demanded of another


def reason(size: int, backend: type, hosts: Callable[[Tensor], Tensor]) -> str | None:
    """Why a group on GPUs has no symmetric memory, given what all ranks tell of their hosts if one rank tells a number."""
    group, tensor = SimpleNamespace(size=lambda: size, _get_backend=lambda device: backend()), torch.tensor
    with (
        mock.patch.object(torch, "tensor", lambda numbers, device: tensor(numbers)),
        mock.patch.object(transports, "all_gather", lambda number, group: hosts(number).view(-1, 1)),
    ):
        return transports.why_not_symmetric(group, torch.device("cuda", 0))


def test_symmetric_memory_takes_nvidia_gpus_of_one_host_and_nccl():
    class Nccl:
        pass

    assert transports.why_not_symmetric(groups(1)[0], CPU) == "it takes NVIDIA GPUs"
    here, elsewhere = lambda number: number.repeat(2), lambda number: torch.cat([number, number ^ 1])
    with mock.patch.object(torch.version, "hip", None):
        assert reason(2, object, here) == "the group's backend is not NCCL"  # in a build without NCCL, too
    with (
        mock.patch.object(torch.version, "hip", None),
        mock.patch.object(distributed, "ProcessGroupNCCL", Nccl, create=True),
    ):
        assert reason(1, Nccl, here) == "there is one rank"
        for other in (object, Mock(side_effect=RuntimeError("No backend type associated with device type cuda"))):
            assert reason(2, other, here) == "the group's backend is not NCCL"
        assert reason(2, Nccl, elsewhere) == "ranks are on several hosts"
        assert reason(2, Nccl, here) is None
        with mock.patch.object(torch.version, "hip", "7.0"):
            assert reason(2, Nccl, here) == "it takes NVIDIA GPUs"


def test_hosts_are_known_by_numbers_that_fit_int64():
    numbers = [transports.hash_of(str(name)) for name in range(64)]
    assert len(set(torch.tensor(numbers).tolist())) == 64


def test_kernels_wait_as_long_as_the_groups_collectives():
    (group,) = groups(1, seconds=7)
    assert transports.timeout_of(group, CPU) == timedelta(seconds=7)
    for backend_of in (lambda device: object(), Mock(side_effect=RuntimeError)):
        unknown = SimpleNamespace(_get_backend=backend_of)
        assert transports.timeout_of(unknown, CPU) == distributed.constants.default_pg_timeout
    assert SymmetricMemory(group, CPU).most_tries == 7 * TRIES_PER_SECOND


def test_memory_grows_as_steps_need_it_and_old_memory_is_kept(host):
    """Graphs that were captured before write to old memory."""

    def grow(group: ProcessGroup) -> None:
        transport, old = SymmetricMemory(group, CPU), []
        for words, half in ((1, LEAST_WORDS), (LEAST_WORDS, LEAST_WORDS), (LEAST_WORDS + 1, 2 * LEAST_WORDS)):
            tensors, numbers = transport.memory(words)
            assert len(host.events) >= group.size() * (1 + len(old) // 4)  # no rank writes before all memory is ready
            assert numbers["half"] == half
            memory, peers = tensors["memory"], tensors["peers"]
            assert len(memory) == HEADER + 2 * half
            assert (memory[:HEADER] == 0).all()
            assert (memory[HEADER:] == -1).all()
            assert peers[group.rank()] == memory.data_ptr()
            old += [weakref.ref(memory), weakref.ref(peers)]
        assert old[:2] == old[2:4]
        del tensors, memory, peers
        old += [handle for rank, handle in host.handles if rank == group.rank()]
        assert len(old) == 6 + 2
        assert None not in [reference() for reference in old]

    assert on_ranks(grow, [(group,) for group in groups(2, seconds=5)]) == [None, None]


def test_memory_that_could_not_be_had_is_asked_for_again(host):
    transport = SymmetricMemory(groups(1)[0], CPU)
    transport.memory(1)
    with mock.patch.object(host, "failing", {0}), pytest.raises(RuntimeError, match="cannot write to the others"):
        transport.memory(LEAST_WORDS + 1)
    tensors, numbers = transport.memory(LEAST_WORDS + 1)
    assert len(tensors["memory"]) == HEADER + 2 * numbers["half"] == HEADER + 4 * LEAST_WORDS


def test_memory_does_not_grow_while_a_graph_is_captured(host):
    transport = SymmetricMemory(groups(1)[0], CPU)
    before = transport.memory(1)
    transport.device = torch.device("cuda", 0)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        with pytest.raises(RuntimeError, match=r"^shard: call the sampler once .* before capturing a graph"):
            transport.memory(LEAST_WORDS + 1)
        assert transport.memory(LEAST_WORDS)[0]["memory"] is before[0]["memory"]


def test_a_step_after_one_that_failed_is_refused(host):
    transport = SymmetricMemory(groups(1)[0], CPU)
    tensors, _ = transport.memory(1)
    tensors["failed"][0] = 1
    for _ in range(2):
        with pytest.raises(distributed.DistBackendError, match="a rank did not tell its part of a step in time"):
            transport.memory(1)


def test_tensors_are_gathered_in_the_order_of_ranks():
    words = [torch.tensor([[rank, 5]]) for rank in range(3)]
    for gathered in on_ranks(transports.all_gather, list(zip(words, groups(3)))):
        assert gathered.tolist() == [[[0, 5]], [[1, 5]], [[2, 5]]]
    for heard in on_ranks(lambda word, group: Collective(group).exchange(word), list(zip(words, groups(3)))):
        assert heard.tolist() == [0, 5, 1, 5, 2, 5]
