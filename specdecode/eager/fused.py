"""Elementwise functions that a GPU computes in one kernel each.

PyTorch launches one kernel per operation, so a formula of ten operations reads and writes memory ten times. For NVIDIA and
AMD GPUs `torch.cuda.jiterator` compiles such a formula at its first call, without Triton.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_one_number(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers are all one in memory."""
    return all(size == 1 or stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))


def alike(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return tensors that broadcast so that those of one number a row lie alike.

    A GPU finds an element's place in each tensor by a division for each dimension, and divides once for the dimensions that
    are contiguous in all tensors: with temperatures of [batch, 1, 1] besides maxima of [models, batch, rows, 1] it divides
    four times, which takes longer than the exponential. One number for all rows lies like anything.
    """
    rows = torch.broadcast_shapes(*(tensor.shape[:-1] for tensor in tensors))  # type: ignore[no-untyped-call]
    return [
        tensor if is_one_number(tensor) or tensor.shape[-1] > 1 else tensor.expand(*rows, 1).contiguous()
        for tensor in tensors
    ]


class Fused:
    """An elementwise function: its definition in PyTorch, and the same in C++ for GPUs.

    The definition is called on other devices, and on a GPU that cannot compile the C++.

    Args:
        definition: a function of tensors that broadcast, and of `numbers`; the last tensor may be None, but not on a GPU.
        source: a C++ template of one type, that of the tensors.
        numbers: the keyword arguments, with any value of their type.
    """

    def __init__(self, definition: Callable[..., Tensor], source: str, **numbers: int) -> None:
        self.definition, self.source, self.numbers = definition, source, numbers
        self.compiles = True

    @functools.cached_property
    def kernel(self) -> Callable[..., Tensor]:
        """The compiled function. It is made at the first call because making it looks for GPUs."""
        kernel: Callable[..., Tensor] = torch.cuda.jiterator._create_jit_fn(self.source, **self.numbers)
        return kernel

    def __call__(self, *tensors: Any, **numbers: int) -> Tensor:
        if self.compiles and tensors[0].is_cuda:
            try:
                return self.kernel(*alike(tensors), **numbers)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                self.compiles = False
        return self.definition(*tensors, **numbers)


def fused(source: str, **numbers: int) -> Callable[[Callable[..., Tensor]], Fused]:
    """Decorate the definition of a `Fused` function."""
    return lambda definition: Fused(definition, source, **numbers)
