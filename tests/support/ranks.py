"""Ranks as threads of one process, each with its own member of a gloo process group: no process is started."""

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from specdecode import VocabShard
from tests.support.sharded_calls import columns


def groups(size: int, seconds: float = 60) -> list[distributed.ProcessGroup]:
    """Return the members of one gloo process group."""
    store = distributed.HashStore()

    def member(rank: int) -> distributed.ProcessGroup:
        group = distributed.ProcessGroup(store, rank, size)
        gloo = distributed.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=seconds))
        group._register_backend(torch.device("cpu"), distributed.ProcessGroup.BackendType.GLOO, gloo)
        return group

    return on_ranks(member, [(rank,) for rank in range(size)])


def on_ranks(function: Callable, arguments: list[tuple]) -> list[Any]:
    """Call a function on each rank at the same time; return each rank's result, an exception if it raised one."""
    results: list = [None] * len(arguments)

    def call(rank: int) -> None:
        try:
            results[rank] = function(*arguments[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Ranks:
    """Ranks with the tokens between two bounds each, in any order of the vocabulary."""

    def __init__(self, bounds: list[int], order: list[int] | None = None) -> None:
        parts = list(itertools.pairwise(bounds))
        self.parts = parts if order is None else [parts[place] for place in order]
        members = groups(len(parts))
        self.vocab_size = bounds[-1]
        self.shards = [VocabShard(group, start, bounds[-1]) for group, (start, _) in zip(members, self.parts)]

    def run(self, make: Callable[[VocabShard], Callable], call: dict, whole_drafts: bool = False) -> list[Any]:
        """Call on each rank the result of `make` for its shard, with its columns of logits and all other arguments."""

        def run_rank(rank: int) -> Any:
            with torch.no_grad():
                mine = columns(call, *self.parts[rank], self.vocab_size, whole_drafts)
                return make(self.shards[rank])(**mine)

        results = on_ranks(run_rank, [(rank,) for rank in range(len(self.parts))])
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def made_once() -> Callable[..., Ranks]:
    """Return a function that makes the ranks of some bounds, once for equal bounds."""
    made: dict = {}

    def make(bounds: list[int], order: list[int] | None = None) -> Ranks:
        key = str((bounds, order))
        if key not in made:
            made[key] = Ranks(bounds, order)
        return made[key]

    return make
