"""Check in the interpreter that kernels load and store inside their tensors. On a GPU, compute-sanitizer checks this."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

MARGIN = 1 << 14
"""The number of unused elements on either side of a tensor, see `apart`."""


def ranges_of(values: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of the first and the last byte of each tensor."""
    for tensor in values.values():
        if isinstance(tensor, Tensor) and tensor.numel():
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            yield tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size() - 1


def apart(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with unused memory around it, so that reads beyond its ends are in no tensor."""
    memory = tensor.new_zeros(tensor.numel() + 2 * MARGIN)[MARGIN : MARGIN + tensor.numel()]
    return memory.view(tensor.shape).copy_(tensor)


@contextmanager
def inside(values: dict[str, Any]) -> Iterator[None]:
    """Check that every address loaded or stored in this context lies in one of the tensors."""
    from triton.runtime.interpreter import interpreter_builder

    ranges, builder = np.array(sorted(ranges_of(values))), type(interpreter_builder)
    load, store = builder.create_masked_load, builder.create_masked_store

    def check(pointers: Any, mask: Any) -> None:
        addresses = pointers.data[mask.data].astype(np.int64)
        if addresses.size:
            first, last = addresses.min(), addresses.max()
            # Nearly always all addresses are in one tensor.
            if not any(low <= first and last <= high for low, high in ranges):
                # For each address, the index of the last tensor that begins at or before it; -1 for none.
                index = np.searchsorted(ranges[:, 0], addresses, side="right") - 1
                assert ((index >= 0) & (addresses <= ranges[index, 1])).all(), "outside every tensor"

    def checked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *others)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *others)

    with mock.patch.multiple(builder, create_masked_load=checked_load, create_masked_store=checked_store):
        yield


@contextmanager
def reads_and_writes_inside() -> Iterator[list[dict[str, Any]]]:
    """Check that all launches read and write inside their tensors; yield the arguments of each plan."""
    from specdecode.kernels.launch import Plan

    given: list[dict[str, Any]] = []
    interpret = Plan.interpret

    def checked(plan: Plan, values: dict[str, Any]) -> None:
        given.append(values)
        with inside(values):
            interpret(plan, values)

    with mock.patch.object(Plan, "interpret", checked):
        yield given
