"""Summing a few blocks, in the order of their bounds, finds the same block as summing all blocks."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from specdecode import kernels
from specdecode.kernels import residual
from specdecode.kernels.arguments import Pointer
from specdecode.kernels.block_bounds import block_of, keys_of, ranked, residual_bounds, score_of, upper_bound
from specdecode.kernels.distribution import combine
from specdecode.kernels.probabilistic import log_ratio
from specdecode.kernels.request import LARGEST_TEMPERATURE, load_key, locate
from specdecode.kernels.residual import ROW, load_both, residual_sums, select_residual_block
from specdecode.kernels.rows import whole_draft_row_at, whole_target_row_at
from specdecode.kernels.selection import noise_at, select_block
from specdecode.kernels.statistics import draft_statistics, load_statistics, sum_in_order, target_statistics
from specdecode.kernels.values import Residual, RowContext
from tests.conftest import ON_GPU
from tests.support.differential import case
from tests.support.kernels import (
    DEVICE,
    FEW,
    LARGE,
    MANY,
    PlannedCall,
    impossible_drafts,
    needs_interpreter,
    run_kernel,
    small,
    verify,
)


class Found(NamedTuple):
    """The results for the residual of each request's first row."""

    sums_ptr: Pointer  # [batch, num_blocks] float32
    blocks_ptr: Pointer  # [batch, 2] int32: the block drawn by bounds, and by all sums
    holds_ptr: Pointer  # [batch] int32: whether no bound is below its sum


@triton.jit
def search_kernel(inputs, workspace, sizes, config, found):
    index = tl.program_id(0).to(tl.int64)
    request = locate(index, inputs.packing, sizes)
    temperature = tl.load(inputs.requests.temperature_ptr + index)
    context = RowContext(request, 0, -1, load_key(inputs.requests, request), temperature)
    rows = whole_target_row_at(request, 0, inputs, sizes), whole_draft_row_at(request, 0, inputs, sizes)
    row, draft_row = rows
    p = combine(load_statistics(target_statistics(workspace, request, 0, sizes), True, sizes), row, temperature, sizes)
    q_statistics = load_statistics(draft_statistics(workspace, request, 0, sizes), True, sizes)
    q = combine(q_statistics, draft_row, temperature, sizes)
    residual = Residual(p.row_max, q.row_max, log_ratio(q.sumexp, p.sumexp), tl.full([], ROW, tl.int32))
    sums_ptr = found.sums_ptr + index * sizes.num_blocks
    for first in range(0, sizes.num_blocks, config.BLOCKS):
        blocks = first + tl.arange(0, config.BLOCKS)
        target, draft = load_both(inputs, rows, blocks, config.BLOCK_N)
        tl.store(sums_ptr + blocks, residual_sums(target, draft, residual, temperature), mask=blocks < sizes.num_blocks)
    tl.debug_barrier()
    blocks = tl.arange(0, sizes.MAX_BLOCKS)
    sums = tl.load(sums_ptr + blocks, mask=blocks < sizes.num_blocks, other=0.0)
    bounds = residual_bounds(p.block_sums)
    keys = keys_of(bounds, sizes)
    holds = (sums <= bounds) & (bounds <= upper_bound(keys, sizes).to(tl.float32, bitcast=True))
    tl.store(found.holds_ptr + index, tl.min(tl.where(blocks < sizes.num_blocks, holds, True).to(tl.int32), 0))
    exponentials = noise_at(context, inputs.requests, sizes).exponentials
    searched = select_residual_block(context, exponentials, (p, residual), rows, inputs, sizes, config)
    tl.store(found.blocks_ptr + 2 * index, searched)
    mass = sum_in_order(sums)
    tl.store(found.blocks_ptr + 2 * index + 1, tl.where(mass > 0, select_block(sums, exponentials), -1))


def search(batch, *, top: int, columns: int, max_blocks: int | None = None):
    """Search the residual of each first row, and check the results."""
    planned = PlannedCall("probabilistic", batch.to(DEVICE), **FEW)
    planned.run(planned.launches[0])
    requests, sizes = len(batch.seeds), planned.bundle("sizes")
    config = planned.bundle("config", kernels.plan.emit_kernel)
    config = config._replace(TOP=top, BLOCKS=columns, BLOCK_N=128 if ON_GPU else 512)
    if max_blocks is not None:
        sizes = sizes._replace(MAX_BLOCKS=max_blocks)
    integers = torch.full((requests, 3), -2, dtype=torch.int32, device=DEVICE)
    sums = torch.full((requests, sizes.num_blocks), torch.nan, device=DEVICE)
    blocks, holds = integers[:, :2].contiguous(), integers[:, 2].contiguous()
    found = Found(sums, blocks, holds)
    planned.run_kernel(search_kernel, requests, ["inputs", "workspace"], sizes, config, found)
    assert (holds == 1).all()
    assert torch.equal(blocks[:, 0], blocks[:, 1])


@pytest.mark.parametrize(
    ("closeness", "top", "columns"), [(1e-4, 1, 4), (0.01, 2, 1), (0.3, 1, 4), (3.0, 8, 2), (math.inf, 1, 4)]
)
@pytest.mark.parametrize("vocab", small(6160, 151_936, 50_257))
def test_what_is_found_by_bounds_is_what_is_found_by_summing_all(vocab, closeness, top, columns):
    requests = 300 if ON_GPU else 8 if closeness == 3 else 2  # then sums in different orders often differ
    batch = impossible_drafts(requests, vocab, closeness)
    search(batch, top=top, columns=columns)


def test_a_residual_of_nothing_selects_no_block():
    batch = impossible_drafts(2, 4112, 0.0)
    batch = replace(batch, draft_logits=batch.target_logits[:, :1])
    search(batch, top=2, columns=1)


@pytest.mark.parametrize(("vocab", "max_blocks"), [(8192, 8), (6160, 2**12 if ON_GPU else 2**17)])
def test_bounds_hold_however_many_bits_of_a_key_say_which_block(vocab, max_blocks):
    """Keys with 3 bits for the block, and with 17: they leave 28 bits of a bound, or 14 with 5 bits of the mantissa."""
    batch = impossible_drafts(5 if ON_GPU else 3, vocab, 0.3)
    search(batch, top=1, columns=4, max_blocks=max_blocks)


@pytest.mark.parametrize("temperature", [2.0**100, LARGEST_TEMPERATURE.value])
def test_p_bounds_its_residual_at_the_largest_temperatures_too(temperature):
    requests = 24 if ON_GPU else 2
    target, draft = torch.full((requests, 2, 6144), -3e38), torch.full((requests, 1, 6144), -torch.inf)
    target[..., :1024], draft[..., :1024] = 0, 0
    batch = replace(case(requests, 1, 6144, torch.float32, greedy=0), target_logits=target, draft_logits=draft)
    search(replace(batch, temperature=torch.full((requests,), temperature)), top=2, columns=4)


def test_p_bounds_its_residual_where_both_are_next_to_nothing():
    """Blocks 100 nats below the first, whose sums of p are rounded to a few bits."""
    requests = 24 if ON_GPU else 4
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(requests, 2, 4096, generator=generator) - 100
    target[..., :1024] = 0
    draft = torch.full((requests, 1, 4096), -torch.inf)
    draft[..., :1024] = 0
    batch = replace(case(requests, 1, 4096, torch.float32, greedy=0), target_logits=target, draft_logits=draft)
    search(replace(batch, temperature=torch.ones(requests)), top=2, columns=1)


@needs_interpreter
def test_little_is_read_again_of_rows_that_differ(monkeypatch):
    """Count the blocks that are summed at once."""
    summed, residual_sums = [], residual.residual_sums

    def counted(target, *arguments):
        summed.append(int(target[0].shape[0]))
        return residual_sums(target, *arguments)

    batch = impossible_drafts(3, 12_304, 0.05)
    monkeypatch.setattr(residual, "residual_sums", counted)
    for way, top, columns in ((FEW, 2, 1), (MANY, 8, 1), (LARGE, 8, 2)):
        assert (verify("probabilistic", batch, **way).num_accepted == 0).all()
        assert summed.count(top) == 3  # of thirteen blocks
        most = (13 - top) // columns * 3
        assert 0 < summed.count(columns) == len(summed) - 3 < most / 2
        summed.clear()


class Ranked(NamedTuple):
    """Scores of blocks, and the best of them."""

    scores_ptr: Pointer  # [8] float32
    best_ptr: Pointer  # [2] int32: the best block, and the bits of its score


@triton.jit
def rank_kernel(scored):
    blocks = tl.arange(0, 8)
    best = tl.max(ranked(tl.load(scored.scores_ptr + blocks), blocks), 0)
    tl.store(scored.best_ptr, block_of(best))
    tl.store(scored.best_ptr + 1, score_of(best))


def test_of_equal_scores_the_first_block_is_best():
    scores = torch.tensor([0.0, 1e-38, 3e38, 1.0, 3e38, 0.0, 3e38, 2.0], device=DEVICE)
    best = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    run_kernel(rank_kernel, 1, Ranked(scores, best))
    assert best[0] == 2
    assert best[1:].view(torch.float32) == scores[2]
