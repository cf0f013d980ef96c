"""Adjusted rows of which each rank has a part, with its own columns of counts and masks: none is gathered.

As in test_sharded.py every rank is to return the bits of one GPU.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode import Adjustments, backends, kernels, sample
from specdecode.kernels.row_adjustments import of_whole_row
from specdecode.kernels.rows import BLOCK_SIZE, load_blocks, logits_of, part_of_blocks
from specdecode.kernels.values import Penalties, Row, RowAdjustments, RowShard
from tests.conftest import ON_GPU
from tests.support.addresses import apart, inside
from tests.support.adjusted import adjustments_for, packed, to, words_of
from tests.support.differential import case, like_a_device
from tests.support.kernels import DEVICE
from tests.support.packing import in_slots, packed_rows, with_counts
from tests.support.ranks import Ranks
from tests.support.sharded_calls import (
    EMPTY,
    INF,
    LARGE,
    NAN,
    THREE,
    TWO,
    UNEVEN,
    arguments,
    assert_ranks_agree,
    packed_of,
    sampler_of,
    sharing_memory,
)

pytestmark = pytest.mark.usefixtures("turns")

CALLS = {  # kind of call: bounds, adjustments, log-probabilities, dtype, whether the batch is large, the transport
    "probabilistic": (UNEVEN, "all", "processed", torch.bfloat16, False, "symmetric_memory"),
    "given logsumexp": (TWO, "penalties", "raw", torch.float32, True, "all_gather"),
    "strict": (THREE, "without counts", "processed", torch.bfloat16, False, "symmetric_memory"),
    "synthetic strict": (TWO, "bias", "raw", torch.bfloat16, False, "all_gather"),
    "block": (TWO, "all", None, torch.bfloat16, False, "all_gather"),
    "block deterministic": (EMPTY, "mask", "raw", torch.float16, False, "symmetric_memory"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_every_rank_returns_the_bits_of_one_gpu(kind):
    bounds, given, logprobs, dtype, large, transport = CALLS[kind]
    ranks = Ranks(*(LARGE if ON_GPU else bounds))
    batch = case(64 if ON_GPU else 2, 2, ranks.vocab_size, dtype, seed=5)
    adjustments = adjustments_for(batch, given)
    batch.draft_token_ids[1, 1] = batch.draft_token_ids[1, 0]
    method, call = arguments(kind, batch.to(DEVICE))
    call |= {"adjustments": to(DEVICE, adjustments), "logprobs": logprobs}
    memory = sharing_memory() if transport == "symmetric_memory" else nullcontext()
    with memory, mock.patch.object(kernels, "verify", partial(kernels.verify, large=large)):
        _, sizes = assert_ranks_agree(ranks, partial(sampler_of, method), call)
    longest = max(end - start for start, end in ranks.parts)
    assert max(sizes, default=0) < len(ranks.parts) * longest * dtype.itemsize  # those of one row
    assert bool(sizes) == (transport == "all_gather")


@pytest.mark.parametrize("logprobs", [None, "raw"])
def test_what_changes_on_one_rank_is_known_on_all(logprobs, ranks_of):
    """Greedy requests, of which each does something else to tokens 5 and 1500; the first rank has the second of them."""
    logits = torch.full((5, 3, 2064), -1.0)
    logits[..., 5], logits[..., 1500] = 10.0, 9.5
    logits[2, :, 7] = 9.7
    logits[3, :, 5] = INF
    logits[4, 0, [1600, 9]], logits[4, 1:] = torch.tensor([NAN, 9.9]), -INF
    drafts = torch.tensor([[5, 5], [5, 1500], [1500, 1500], [1500, 1500], [9, 1500]])
    counts, allowed = torch.zeros(5, 2064, dtype=torch.int32), torch.ones(5, 3, 2064, dtype=torch.bool)
    counts[2, 5] = 4
    allowed[1, 0, 1024:] = allowed[1, 1, :1024] = allowed[3, :, 5] = False
    frequencies = torch.tensor([0.3, 0.0, 0.2, 0.0, 0.0])
    ids = torch.tensor([[-1, -1], [-1, -1], [7, 7], [-1, -1], [5, 1600]])
    bias = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.2, -INF], [0.0, 0.0], [-INF, 9.0]])
    adjustments = Adjustments(None, frequencies, None, None, counts, ids, bias, words_of(allowed))
    call = {"target_logits": logits, "draft_token_ids": drafts, "temperature": 0.0, "seeds": 0, "logprobs": logprobs}
    call |= {"adjustments": to(DEVICE, adjustments)}
    output, sizes = assert_ranks_agree(ranks_of(*TWO), partial(sampler_of, "probabilistic"), call)
    assert output.token_ids.tolist() == [[5, 5, 1500], [5, 1500, 5], [1500, 1500, 5], [1500, 1500, 1500], [9, 0, -1]]
    assert len(sizes) == (1 if logprobs is None else 2)
    if logprobs is not None:
        assert output.logprobs[3].tolist() == [-INF] * 3  # of the only token that the model itself would emit


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=["", "truncated, so gathered"])
def test_packed_calls_have_their_columns_by_slot_and_by_row(options, ranks_of):
    """And ids that are none, as only a device takes them, change nothing."""
    counts, slots = [2, 0, 1], torch.tensor([3, 0, 4])
    batch = case(3, 2, 3100, torch.bfloat16, seed=7)
    adjustments = adjustments_for(batch, seed=1)
    adjustments.bias_ids[:, 2:6] = torch.tensor([3100, -(2**31), 2**31 - 1, -7])
    adjustments.bias[:, 2:6] = INF
    rows = packed_rows(with_counts(batch, counts), counts)
    by_slot = {name: in_slots(getattr(batch, name), slots, 5) for name in ("draft_logits", "temperature", "seeds")}
    adjustments = to(DEVICE, packed(adjustments, rows, counts, slots, 5))
    call = rows | by_slot | {"slots": slots, "adjustments": adjustments, "logprobs": "processed"}
    call |= options
    call["row_starts"][-1] += 99
    with like_a_device():
        output, _ = assert_ranks_agree(ranks_of(*UNEVEN), partial(packed_of, "probabilistic"), call)
    assert output.invalid.tolist() == [False, False, True]


@triton.jit
def blocks_kernel(logits_ptr, counts_ptr, words_ptr, blocks_ptr, start, end, LANES: tl.constexpr):
    is_any, one = tl.full([], True, tl.int1), tl.full([], 1.0, tl.float32)
    penalties = Penalties(is_any, one, one, one, one, (words_ptr,), (counts_ptr,))
    adjustments = of_whole_row(RowAdjustments((), penalties, (words_ptr,), (), (), (start,)), start)
    shard = RowShard(start, one, start, start, one, start, one)
    row, blocks = Row(logits_ptr - start, 1, end, (), shard, (), adjustments, ()), tl.arange(0, 4)
    parts = logits_of(load_blocks(row, blocks, False, LANES), row, blocks, LANES)
    for part in tl.static_range(len(parts)):
        tl.store(blocks_ptr + part_of_blocks(blocks, part, BLOCK_SIZE, LANES), parts[part])


@pytest.mark.parametrize("lanes", [128, 256])
def test_nothing_is_read_before_or_behind_a_shard(lanes):
    """Also where several blocks are loaded at once, of which some are other ranks'."""
    ones = {"logits": torch.zeros(1040), "counts": torch.ones(1040, dtype=torch.int32)}
    ones["words"] = torch.full((33,), -1, dtype=torch.int32)
    values = {name: apart(value.to(DEVICE)) for name, value in ones.items()}
    values["blocks"] = torch.empty(4096, device=DEVICE)
    with nullcontext() if ON_GPU else inside(values):
        blocks_kernel[(1,)](*values.values(), 1024, 2064, lanes)
    expected = torch.full((4096,), -INF, device=DEVICE)
    expected[1024:2064] = -2.0  # penalties of 1 for having been emitted, once
    assert torch.equal(values["blocks"], expected)


def test_tokens_are_sampled_alike(ranks_of):
    batch = case(3, 0, 2064, torch.bfloat16, seed=3)
    adjustments = to(DEVICE, adjustments_for(batch))
    call = {"logits": batch.target_logits[:, 0], "temperature": batch.temperature, "seeds": batch.seeds}
    call |= {"adjustments": adjustments}
    with mock.patch.object(backends, "choose", return_value=backends.kernels()):
        _, sizes = assert_ranks_agree(ranks_of(*TWO), lambda shard=None: partial(sampled, shard=shard), call)
    assert len(sizes) == 2


class Sampled(NamedTuple):
    token_ids: Tensor


def sampled(**call: Any) -> Sampled:
    return Sampled(sample(**call))
