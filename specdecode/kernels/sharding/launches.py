"""The launches of a step over shards, and the exchanges between them.

The launches between two exchanges are one `Plan`; all work on one workspace. Words travel by a transport of
`specdecode.transports`: an all-gather of torch.distributed, for which all that a rank tells is a part of the workspace; or
symmetric memory, to which kernels write themselves.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdecode import sharding
from specdecode.kernels.formulas import Argument, Number, Writer
from specdecode.kernels.launch import Launch, Plan, compile_all, is_collected, is_interpreted, on_device
from specdecode.kernels.sharding.arguments import Channel
from specdecode.kernels.sharding.memory import Parts


class ShardedPlan:
    """The launches and exchanges of all calls that differ in addresses and numbers alone, sizes among them.

    Args:
        device: where all of it happens.
        parts: of the workspace, see `Plan`.
        is_symmetric: whether words travel through symmetric memory.
    """

    def __init__(self, device: torch.device, parts: Parts, is_symmetric: bool) -> None:
        self.device, self.parts, self.is_symmetric = device, parts, is_symmetric
        self.plans = [Plan(device, parts, zeros=0)]
        self.spare = Plan(device, parts, zeros=0)
        """Launches that steps of other sizes make: compiled too, so that no rank waits for that in a later step."""
        self.sent: list[str] = []
        """The part of the workspace that is exchanged after each plan but the last."""
        self.words: Any = 0
        """How many int64 words of symmetric memory a step takes."""
        self.row_words: Any = None
        """Likewise, of that for rows that a rank owns, if it may own any."""
        self.sizes_of: Callable[..., Any] | None = None
        self.fill: Callable[..., Any] | None = None
        """From the first call on, what fills in a call: see `prepare`."""

    @property
    def last(self) -> Plan:
        """The launches after the last exchange."""
        return self.plans[-1]

    @property
    def all_launches(self) -> list[Launch]:
        """All that is to be compiled."""
        return [launch for plan in (*self.plans, self.spare) for launch in plan.launches]

    def channel(self, name: str, words: Any, ranks: int) -> Channel:
        """Return a new channel of so many int64 words from each rank, before its exchange."""
        if not self.is_symmetric:
            return Channel(self.last.part(name), None, 0, words)
        start, self.words = self.words, self.words + ranks * words
        return Channel(None, None, start, words)

    def exchange(self, channel: Channel) -> Channel:
        """Add the exchange of a channel; return what the launches after it hear."""
        name = received_after(len(self.sent))
        self.sent.append("" if channel.sent_ptr is None else channel.sent_ptr.name)
        self.plans.append(Plan(self.device, self.parts, zeros=0))
        return channel._replace(received_ptr=None if self.is_symmetric else Argument(name, torch.int64))

    def run(self, tensors: dict[str, Tensor], numbers: dict[str, Any], transport: sharding.Transport) -> None:
        """Make the launches and exchanges: see `Plan.run`."""
        if is_collected(self):
            return
        if self.sizes_of is None:
            extents = tuple([self.last.extent(name) if name else (0, 0) for name in self.sent])
            self.sizes_of = Writer().function(numbers, (self.last.length, self.words, self.row_words, extents))
        length, words, row_words, extents = self.sizes_of(*numbers.values())
        workspace = self.last.allocate(length, 0)
        memory, more_numbers = transport.memory(words)
        if row_words is not None:
            memory |= transport.row_memory(row_words)
        tensors, numbers = tensors | memory, numbers | more_numbers
        filled, received = None, None
        with on_device(self.device):
            if not is_interpreted():
                fill = self.fill or self.prepare([*tensors, *numbers])
                filled = fill(workspace, *tensors.values(), *numbers.values())
            for i, plan in enumerate(self.plans):
                if filled is None:
                    plan.interpret({**tensors, **plan.views(workspace, numbers), **numbers})
                else:
                    plan.launch(filled.send(received))
                if i < len(self.sent):
                    start, length = extents[i]
                    sent = workspace[start : start + length].view(torch.int64) if length else None
                    received = transport.exchange(sent)
                    if received is not None:
                        tensors[received_after(i)] = received

    def prepare(self, names: list[str]) -> Callable[..., Any]:
        """Compile all launches at once, not when it is their turn, and write the generator that fills in a call.

        Of the workspace, and the tensors and numbers of these names, it yields the grids and arguments of the launches
        between two exchanges, and is sent what was received.
        """
        compile_all(self.all_launches, self.device)
        for plan in self.plans:
            plan.ready = [launch.compile(self.device) for launch in plan.launches]
        launches, received = [plan.filled_in for plan in self.plans], map(received_after, range(len(self.sent)))
        writer = Writer(self.last.addresses(Number("workspace")))
        self.fill = writer.function(["workspace", *names], *launches, between=received)
        return self.fill


def received_after(plan: int) -> str:
    """Return the name of what is received in the exchange after a plan."""
    return f"received_{plan}"
