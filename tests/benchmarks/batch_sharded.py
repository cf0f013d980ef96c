"""Verification of whole rows, divided among ranks by requests: what vLLM calls batch-sharded sampling.

    a rank's columns of all rows -> all-to-all -> whole rows of its own requests -> verify -> all-gather -> all results

The all-to-all brings a rank as many bytes as an all-gather does, divided by the number of ranks. Verification is divided
too. Requests are divided as evenly as can be: of fewer requests than ranks, some ranks verify none.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from specdecode import transports


class Results(NamedTuple):
    """What every rank learns of all requests."""

    token_ids: Tensor  # [batch, num_draft_tokens + 1] int64
    num_accepted: Tensor  # [batch] int64


def side_by_side(shards: Tensor) -> Tensor:
    """Return whole rows, [..., ranks * columns], given each rank's columns, [ranks, ..., columns]."""
    return shards.movedim(0, -2).flatten(-2)


class BatchSharded:
    """Which requests each rank verifies: the first of the batch the first rank, and so on.

    Engines compute logits in any order of requests, so none has to be moved before the exchange.

    Args:
        group: the ranks.
        batch: the number of requests.
    """

    def __init__(self, group: "distributed.ProcessGroup", batch: int) -> None:
        self.group, self.ranks, self.is_even = group, group.size(), batch % group.size() == 0
        self.counts = [batch // self.ranks + (rank < batch % self.ranks) for rank in range(self.ranks)]
        self.count = self.counts[group.rank()]
        first = sum(self.counts[: group.rank()])
        self.own = slice(first, first + self.count)

    def own_rows(self, shard: Tensor) -> Tensor:
        """Return whole rows of this rank's requests, given its columns of all requests' rows, as many as other ranks'."""
        received = shard.new_empty(self.ranks * self.count, *shard.shape[1:])
        sizes = (None, None) if self.is_even else ([self.count] * self.ranks, self.counts)
        distributed.all_to_all_single(received, shard, *sizes, group=self.group)
        return side_by_side(received.unflatten(0, (self.ranks, self.count)))

    def gather(self, output: Any, draft_token_ids: Tensor) -> Results:
        """Return the results of all requests, given the output of this rank's, None if it has none, and all drafts."""
        most, width = self.counts[0], draft_token_ids.shape[1] + 1
        packed = torch.empty(most, width + 1, dtype=torch.int64, device=draft_token_ids.device)
        if output is not None:
            packed[: self.count, :width] = output.token_ids
            packed[: self.count, width] = output.num_accepted
        gathered = transports.all_gather(packed, self.group)
        parts = [part[:count] for part, count in zip(gathered, self.counts)]
        results = gathered.flatten(0, 1) if self.is_even else torch.cat(parts)
        return Results(results[:, :width], results[:, width])
