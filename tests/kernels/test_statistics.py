"""The statistics of a row, and the distributions computed from them."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from specdecode.kernels.arguments import Pointer
from specdecode.kernels.distribution import combine
from specdecode.kernels.request import locate
from specdecode.kernels.rows import whole_target_row_at
from specdecode.kernels.statistics import load_statistics, target_statistics
from tests.conftest import combine as pairs
from tests.support.differential import case
from tests.support.kernels import DEVICE, DTYPES, PlannedCall, sliced, strided

NAN, INF = math.nan, math.inf


class Found(NamedTuple):
    """The results for each row: maximum, sum and point mass; then the sums of its blocks, or its statistics."""

    scalars_ptr: Pointer  # [rows, 3] float32
    blocks_ptr: Pointer  # [rows, 3, MAX_BLOCKS] float32


@triton.jit
def combine_kernel(inputs, workspace, sizes, found):
    index = tl.program_id(0).to(tl.int64)
    request = locate(index, inputs.packing, sizes)
    statistics = load_statistics(target_statistics(workspace, request, 0, sizes), True, sizes)
    temperature = tl.load(inputs.requests.temperature_ptr + index)
    p = combine(statistics, whole_target_row_at(request, 0, inputs, sizes), temperature, sizes)
    tl.store(found.scalars_ptr + 3 * index, p.row_max)
    tl.store(found.scalars_ptr + 3 * index + 1, p.sumexp)
    tl.store(found.scalars_ptr + 3 * index + 2, p.point_mass_token.to(tl.float32))
    places = 3 * index * sizes.MAX_BLOCKS + tl.arange(0, sizes.MAX_BLOCKS)
    tl.store(found.blocks_ptr + places, p.block_sums)
    tl.store(found.blocks_ptr + places + sizes.MAX_BLOCKS, statistics[0])
    tl.store(found.blocks_ptr + places + 2 * sizes.MAX_BLOCKS, statistics[1])


def summarised(kind: str, batch, **options) -> tuple[np.ndarray, np.ndarray]:
    """Read the rows of a batch by the first launch of a call; return the distributions of the first rows, and statistics."""
    planned = PlannedCall(kind, batch.to(DEVICE), **options)
    planned.run(planned.launches[0])
    requests, max_blocks = len(batch.seeds), planned.bundle("sizes").MAX_BLOCKS
    found = Found(torch.zeros(requests, 3, device=DEVICE), torch.zeros(requests, 3, max_blocks, device=DEVICE))
    planned.run_kernel(combine_kernel, requests, ["inputs", "workspace", "sizes"], found)
    return found.scalars_ptr.cpu().numpy().astype(float), found.blocks_ptr.cpu().numpy().astype(float)


def in_blocks(row: np.ndarray) -> np.ndarray:
    return np.pad(row, (0, -len(row) % 1024), constant_values=-INF).reshape(-1, 1024)


@pytest.mark.parametrize(
    ("vocab", "dtype", "layout", "kind"),
    pairs([2064, 1025, 5], DTYPES, [torch.clone, sliced, strided], ["strict", "probabilistic"]),
)
def test_statistics_say_what_the_logits_do(vocab, dtype, layout, kind):
    batch = case(2, 1, vocab, dtype, seed=1)
    batch = replace(batch, temperature=torch.tensor([0.7, 0.0]), target_logits=layout(batch.target_logits))
    # With draft logits, and with decisions while rows are read, maxima are computed differently.
    scalars, blocks = summarised(kind, batch, large=kind == "probabilistic")
    for row, (row_max, sumexp, point_mass_token), (block_sums, maxima, sums) in zip(range(2), scalars, blocks):
        logits = batch.target_logits[row, 0].double().numpy().astype(np.float32).astype(float)
        count, weights = -(-vocab // 1024), np.exp((in_blocks(logits) - logits.max()) / 0.7).sum(1)
        assert (maxima[:count] == in_blocks(logits).max(1)).all()
        assert row_max == logits.max()
        assert (maxima[count:] == -INF).all()
        assert (block_sums[count:] == 0).all()
        assert (sums[count:] == 0).all()
        if row == 0:
            np.testing.assert_allclose(block_sums[:count], weights, rtol=2e-6)
            np.testing.assert_allclose([sumexp, point_mass_token], [weights.sum(), -1], rtol=2e-6)
        else:
            assert (sums == 0).all()
            assert [sumexp, point_mass_token] == [1, logits.argmax()]


def test_rows_of_negative_logits_have_the_maxima_that_they_have():
    """Memory beyond a row's last logit, or beyond its last block, does not count."""
    batch = case(2, 0, 1030, torch.float32, greedy=0)
    scalars, _ = summarised("strict", replace(batch, target_logits=batch.target_logits - 50))
    assert (scalars[:, 0] < -30).all()
    assert (scalars[:, 2] == -1).all()


SPOILS = {
    "NaN in a block": lambda row: row.__setitem__(slice(1030, 1032), NAN),
    "a negative NaN": lambda row: row.__setitem__(3, -torch.tensor(NAN)),
    "a block of NaN": lambda row: row.__setitem__(slice(1024, 2048), NAN),
    "a block of -inf": lambda row: row.__setitem__(slice(1024, 2048), -INF),
    "+inf twice": lambda row: row.__setitem__([1500, 2050], INF),
    "+inf and NaN": lambda row: row.__setitem__([1500, 1503, 3], torch.tensor([INF, NAN, NAN]).to(row)),
    "-inf only": lambda row: row.fill_(-INF),
    "NaN only": lambda row: row.fill_(NAN),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nonfinite_statistics_are_computed_again(dtype):
    batch = case(2 * len(SPOILS), 0, 2064, dtype, seed=2)
    rows = batch.target_logits[:, 0]
    for spoil, pair in zip(SPOILS.values(), rows.split(2)):
        pair[1] = pair[0]
        for row in pair:
            spoil(row)
    batch = replace(batch, temperature=torch.tensor([0.7, 0.0]).repeat(len(SPOILS)))
    scalars, blocks = summarised("strict", batch)
    for i, (row, name) in enumerate(zip(rows.double().numpy(), [name for name in SPOILS for _ in range(2)])):
        finite = np.where(np.isnan(row), -INF, row)
        row_max, sumexp, point_mass_token = scalars[i]
        assert row_max == finite.max(), name
        if i % 2 == 1 or np.isinf(row_max):
            assert [sumexp, point_mass_token] == [1, finite.argmax()], name
            assert (blocks[i, 0] == 0).all(), name
        else:
            weights = np.exp((in_blocks(finite) - row_max) / 0.7).sum(1)
            np.testing.assert_allclose(blocks[i, 0, :3], weights, rtol=2e-6, err_msg=name)
            np.testing.assert_allclose([sumexp, point_mass_token], [weights.sum(), -1], rtol=2e-6, err_msg=name)


def test_nan_counts_as_minus_infinity_to_the_bit():
    batch = case(2, 0, 2064, torch.float32, greedy=0, seed=3)
    batch = replace(batch, temperature=torch.ones(2), target_logits=batch.target_logits[:1].repeat(2, 1, 1))
    batch.target_logits[:, :, 100:900:7] = torch.tensor([NAN, -INF])[:, None, None]
    scalars, blocks = summarised("strict", batch)
    assert (scalars[0] == scalars[1]).all()
    assert (blocks[0, 0] == blocks[1, 0]).all()
