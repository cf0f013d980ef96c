"""The tests' changes of Triton's interpreter do not change its results."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdecode.kernels.arguments import Pointer
from tests.support.kernels import DEVICE, needs_interpreter, run_kernel


class Reduced(NamedTuple):
    """A matrix, and the reductions of its rows and columns."""

    values_ptr: Pointer  # [4, 8] float32
    rows_ptr: Pointer  # [2, 4] float32: the first and the last number of each row
    columns_ptr: Pointer  # [2, 8] float32: the same of each column
    row_ptr: Pointer  # [2] float32: the same of the first row


@triton.jit
def first_and_last(first, last, next_first, next_last):
    """Return the first and the last of two pairs: associative, and not commutative."""
    return first, next_last


@triton.jit
def reduce_kernel(reduced):
    rows, columns = tl.arange(0, 4), tl.arange(0, 8)
    values = tl.load(reduced.values_ptr + rows[:, None] * 8 + columns[None, :])
    first, last = tl.reduce((values, values), 1, first_and_last)
    tl.store(reduced.rows_ptr + rows, first)
    tl.store(reduced.rows_ptr + 4 + rows, last)
    first, last = tl.reduce((values, values), 0, first_and_last, keep_dims=True)
    tl.store(reduced.columns_ptr + columns[None, :], first)
    tl.store(reduced.columns_ptr + 8 + columns[None, :], last)
    row = tl.load(reduced.values_ptr + columns)
    first, last = tl.reduce((row, row), 0, first_and_last)
    tl.store(reduced.row_ptr, first)
    tl.store(reduced.row_ptr + 1, last)


def test_reductions_are_in_order_along_any_axis():
    values = torch.arange(32.0, device=DEVICE).view(4, 8)
    empty = [torch.full(size, torch.nan, device=DEVICE) for size in ((2, 4), (2, 8), (2,))]
    run_kernel(reduce_kernel, 1, Reduced(values, *empty))
    rows, columns, row = empty
    assert torch.equal(rows, values[:, [0, -1]].T)
    assert torch.equal(columns, values[[0, -1]])
    assert torch.equal(row, values[0, [0, -1]])


@needs_interpreter
def test_types_are_described_as_triton_describes_them():
    """The first type of a kind, and the next one, which reuses the first's attributes."""
    for element in (tl.float32, tl.bfloat16, tl.pointer_type(tl.float32), tl.pointer_type(tl.bfloat16)):
        for shape in ([2, 4], [4, 2], [tl.constexpr(2), tl.constexpr(4)]):
            for _ in range(2):
                kind, sizes = tl.block_type(element, shape), [getattr(size, "value", size) for size in shape]
                assert (kind.element_ty, list(kind.shape), kind.numel) == (element, sizes, 8)
                assert kind.name == f"<{kind.shape}, {element}>"
                tensor = tl.tensor("data", kind)
                assert (tensor.handle, tensor.type, tensor.dtype) == ("data", kind, element)
                assert [size.value for size in tensor.shape] == sizes
                assert tensor.numel.value == 8
    assert tl.tensor(3, tl.int32).shape.values == []
    pair = tl.tuple([tl.tensor(0, tl.int32), tl.tensor(0, tl.float32)])
    assert pair.type.types == [tl.int32, tl.float32]
    assert (pair + tl.tuple([tl.tensor(0, tl.int64)])).type.types == [tl.int32, tl.float32, tl.int64]


class Operands(NamedTuple):
    """Numbers of three types, and the results of operations."""

    floats_ptr: Pointer  # [4] float32
    integers_ptr: Pointer  # [4] int32
    longs_ptr: Pointer  # [4] int64
    results_ptr: Pointer  # [20, 4] float64


@triton.jit
def operate_kernel(operands):
    lanes = tl.arange(0, 4)
    x, i = tl.load(operands.floats_ptr + lanes), tl.load(operands.integers_ptr + lanes)
    n, scalar = tl.load(operands.longs_ptr + lanes), tl.load(operands.integers_ptr)
    results = (
        *(x + 1, x + 1.0, x * 0.0, 1 / x, x - i, i + 1, 1 - i, i + n, i & 3, i & n),
        *(i >> 1, (i < scalar).to(tl.int32) | (i > 0), tl.where(i > 0, n, scalar)),
        *(i / 4, i / scalar, scalar / n, i.to(tl.uint32) >> 1, i.to(tl.uint32) / 4),
        *(tl.maximum(x, scalar), tl.where(scalar > 0, x, tl.where(i > 0, 1, scalar))),
    )
    for index in tl.static_range(len(results)):
        tl.store(operands.results_ptr + index * 4 + lanes, results[index].to(tl.float64))


@needs_interpreter
def test_operands_of_all_types_give_what_they_should_again_and_again():
    x, i, n = torch.tensor([0.5, -2, 3, 1e-30]), torch.tensor([7, -5, 0, 9]).int(), torch.tensor([2**40, -1, 6, 3])
    for _ in range(2):  # operations recorded with the first numbers are reused for the others
        unsigned = i.long() % 2**32
        want = [
            *(x + 1, x + 1.0, x * 0.0, 1 / x, x - i, i + 1, 1 - i, i + n, i & 3, i & n),
            *(i >> 1, (i < i[0]) | (i > 0), torch.where(i > 0, n, i[0])),
            *(i / 4, i / i[0], i[0] / n.float(), unsigned >> 1, unsigned.float() / 4),
            *(x.maximum(i[0]), torch.where(i[0] > 0, x, torch.where(i > 0, 1, i[0]))),
        ]
        results = torch.full((20, 4), torch.nan, dtype=torch.float64, device=DEVICE)
        run_kernel(operate_kernel, 1, Operands(*[each.to(DEVICE) for each in (x, i, n)], results))
        for got, expected in zip(results.cpu(), want, strict=True):
            assert torch.equal(got, expected.double())
            assert torch.equal(got.signbit(), expected.double().signbit())
        x, i, n = x.flip(0) * 3, i.flip(0) - 8, n.flip(0) * 5
