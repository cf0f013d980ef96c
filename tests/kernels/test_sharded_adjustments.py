"""Adjusted rows of which each rank has a part, with its own columns of counts and masks: none is gathered.

As in test_sharded.py every rank is to return the bits of one GPU.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode import Adjustments, backends, kernels, sample
from specdecode.kernels.arguments import Pointer
from specdecode.kernels.row_adjustments import of_whole_row
from specdecode.kernels.rows import BLOCK_SIZE, load_blocks, logits_of, part_of_blocks, whole_row
from specdecode.kernels.sharding import cut as shard_cut
from specdecode.kernels.truncation.wide import amounts_from
from specdecode.kernels.values import Penalties, Row, RowAdjustments, RowShard
from tests.conftest import ON_GPU
from tests.support.addresses import apart, inside
from tests.support.adjusted import adjustments_for, packed, to, words_of
from tests.support.differential import case, like_a_device
from tests.support.kernels import DEVICE, run_kernel, sizes_of
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


TRUNCATED = {  # kind of call: bounds, adjustments, what truncates rows, log-probabilities, dtype, whether the batch is large
    "probabilistic": (UNEVEN, "all", {"top_p": 0.95, "top_k": 500}, "processed", torch.bfloat16, True),
    "given logsumexp": (TWO, "penalties", {"top_p": 0.99}, "raw", torch.float16, False),
    "strict": (TWO, "mask", {"top_p": 0.999}, "processed", torch.bfloat16, False),
    "block": (TWO, "bias", {"min_p": 0.05}, None, torch.float32, False),
}


@pytest.mark.parametrize("kind", TRUNCATED)
@pytest.mark.usefixtures("shared")
def test_truncated_rows_are_cut_where_they_lie(kind):
    """Some are flat: one rank gathers them, some side by side. Of some all that is kept is of one rank, or one token."""
    bounds, given, options, logprobs, dtype, large = TRUNCATED[kind]
    ranks = Ranks(*(LARGE if ON_GPU else bounds))
    requests, drafts = (5, 0) if kind == "strict" else (3, 1)
    batch = case(64 if ON_GPU else requests, drafts, ranks.vocab_size, dtype, seed=4, greedy=0)
    for logits in (batch.target_logits, batch.draft_logits):
        logits[::3], logits[1::3] = 4 * logits[::3], (logits[1::3] / 4).to(torch.bfloat16).to(dtype)  # few; ties
        logits[::3, :1, 1024:2048] += 20
    adjustments = adjustments_for(batch, given)
    if given in ("all", "penalties"):
        frequencies = adjustments.frequency_penalty.abs()  # else one token would be all that is kept
        adjustments = adjustments._replace(frequency_penalty=frequencies)
    if given == "mask":
        allowed = torch.rand(batch.target_logits.shape, generator=torch.Generator().manual_seed(0)) < 0.9
        allowed[3::5], allowed[3::5, :, 2049] = False, True
        adjustments = adjustments._replace(allowed_mask=words_of(allowed))
    method, call = arguments(kind, batch.to(DEVICE))
    if kind == "given logsumexp":
        call["draft_cutoff"] = call["draft_token_ids"].to(torch.int64)
    call |= options | {"adjustments": to(DEVICE, adjustments), "logprobs": logprobs}
    with mock.patch.object(kernels, "verify", partial(kernels.verify, large=large)), counted() as counts:
        _, gathered = assert_ranks_agree(ranks, partial(sampler_of, method), call)
    assert gathered == []
    assert all(count.called for count in counts)
    for transport in [shard.transport_on(call["target_logits"].device) for shard in ranks.shards]:
        assert transport.not_heard() == set()


@contextmanager
def counted() -> Iterator[list[mock.Mock]]:
    """Count how many rows are cut among candidates, and by their owners; in the interpreter only."""
    with ExitStack() as patches:
        names = [] if ON_GPU else ["store_kept_candidates", "truncate_row"]
        each = [mock.patch.object(shard_cut, name, mock.Mock(wraps=getattr(shard_cut, name))) for name in names]
        yield [patches.enter_context(patch) for patch in each]


class Copied(NamedTuple):
    logits_ptr: Pointer  # [vocab]
    copy_ptr: Pointer  # the same in float32
    amounts_ptr: Pointer  # [6] float32: of a pass over each


@triton.jit
def copied_kernel(passed, sizes):
    stored = whole_row(passed.logits_ptr, 1, sizes.vocab_size)
    copy = Row(passed.copy_ptr, 1, sizes.vocab_size, (), (), (), (), (passed.logits_ptr,))
    of_stored = amounts_from((-9.0, 0.5, 2.0), stored, 4.0, 1.0, sizes, 8)
    of_copy = amounts_from((-9.0, 0.5, 2.0), copy, 4.0, 1.0, sizes, 8)
    for index in tl.static_range(3):
        tl.store(passed.amounts_ptr + index, of_stored[index])
        tl.store(passed.amounts_ptr + 3 + index, of_copy[index])


def test_a_copy_is_summed_in_the_order_of_the_row_that_it_is_of():
    logits, amounts = torch.randn(9 * 1024, generator=torch.Generator().manual_seed(0)), torch.empty(6, device=DEVICE)
    logits = logits.to(DEVICE, torch.bfloat16)
    run_kernel(copied_kernel, 1, Copied(logits, logits.float(), amounts), sizes_of(1, 0, len(logits)))
    assert torch.equal(amounts[:3], amounts[3:])


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


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=["", "truncated"])
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
    ranks = Ranks(*UNEVEN) if options else ranks_of(*UNEVEN)
    with like_a_device(), sharing_memory() if options else nullcontext():
        output, gathered = assert_ranks_agree(ranks, partial(packed_of, "probabilistic"), call)
    assert (gathered == []) == bool(options)
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
    call = {"logits": batch.target_logits[:, 0], "temperature": batch.temperature, "seeds": batch.seeds}
    call |= {"adjustments": to(DEVICE, adjustments_for(batch))}
    with mock.patch.object(backends, "choose", return_value=backends.kernels()):
        _, sizes = assert_ranks_agree(ranks_of(*TWO), lambda shard=None: partial(sampled, shard=shard), call)
    assert len(sizes) == 2


class Sampled(NamedTuple):
    token_ids: Tensor


def sampled(**call: Any) -> Sampled:
    return Sampled(sample(**call))
