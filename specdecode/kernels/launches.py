"""Launching: few compiled variants, little work on the host, and launches that overlap where the GPU can do that."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SIZES = [
    "first_seed",
    "block_domain",
    "token_domain",
    "target_stride_request",
    "target_stride_offset",
    "target_stride_token",
    "draft_stride_request",
    "draft_stride_offset",
    "draft_stride_token",
    "logsumexp_stride_request",
    "logsumexp_stride_offset",
    "ids_stride_request",
    "ids_stride_offset",
    "stride_row",
    "stride_token",
    "batch",
    "num_draft_tokens",
    "vocab_size",
    "num_blocks",
    "tiles",
]
"""Numbers of which no value is special: none has a kernel compiled anew."""

SMALL_TENSORS = [
    "token_ids_ptr",
    "num_accepted_ptr",
    "num_drafts_ptr",
    "invalid_ptr",
    "state_ptr",
    "scalars_ptr",
    "jobs_ptr",
    "statistics_ptr",
    "residual_sums_ptr",
    "logsumexp_ptr",
    "ids_ptr",
    "rates_ptr",
    "target_index_ptr",
    "draft_index_ptr",
    "temperature_ptr",
    "seeds_ptr",
    "positions_ptr",
]
"""Tensors whose address is of no consequence, likewise. That of logits says whether 16 bytes can be read at once."""


@triton.jit
def admit_next_launch(OVERLAPS: tl.constexpr):
    """Let the next launch be set up once all programs have come here; it waits by `await_launch` before it goes on."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def await_launch(OVERLAPS: tl.constexpr):
    """Wait until the launch before has ended and all it wrote can be seen."""
    if OVERLAPS:
        gdc_wait()


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Tell whether launches on a device may overlap: that takes compute capability 9.0."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def alignment(logits: Tensor) -> int:
    """Return 16 if rows are dense and start and end at multiples of 16 logits, 1 if only dense, else 0."""
    *strides, stride_token = logits.stride()
    if stride_token != 1:
        return 0
    return 16 if functools.reduce(operator.or_, strides, logits.shape[-1] | logits.data_ptr()) % 16 == 0 else 1


def cdiv(total: int, size: int) -> int:
    """Return how many parts of a size make a total (in a tenth of the time of Triton's, which is compiled code's too)."""
    return -(-total // size)


def lanes(logits: Tensor) -> int:
    """Return how many logits one warp loads at once if each thread loads 16 bytes."""
    return 512 // logits.element_size()


_compiled: dict[tuple[object, ...], Any] = {}
_arguments_of: dict[Any, Callable[[dict[str, Any]], tuple[Any, ...]]] = {}


class Launches:
    """The launches of one call, with arguments by name.

    Triton works out at each launch which compiled variant of a kernel is meant, and looks at every pointer, which takes
    longer than small kernels run. Here that hangs on dtypes and constants alone: it is looked up once, for all launches.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: dict[str, Tensor | None],
        numbers: dict[str, float],
        constants: dict[str, Any],
    ) -> None:
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors.values()]
        logits = [tensors.get(name) for name in ("logits_ptr", "target_ptr", "draft_ptr")]
        alignments = [tensor is not None and tensor.data_ptr() % 16 == 0 for tensor in logits]
        self.key = (device, *dtypes, *alignments, *constants.values())
        self.tensors = tensors
        self.others = {**numbers, **constants, "OVERLAPS": can_overlap(device)}
        addresses = {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
        self.arguments = {**addresses, **self.others}

    def launch(self, kernel: Any, programs: int, num_warps: int, follows: bool = True, **others: int) -> None:
        """Launch a kernel on the current device; one that `follows` another may be set up while that runs."""
        key = (kernel, num_warps, *self.key)
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[programs, 1, 1](*_arguments_of[kernel]({**self.arguments, **others}))
            return
        named = _arguments_of.setdefault(kernel, operator.itemgetter(*kernel.arg_names))
        values = named({**self.tensors, **self.others, **others})
        overlaps = follows and self.others["OVERLAPS"]
        compiled = kernel[programs, 1, 1](*values, num_warps=num_warps, launch_pdl=overlaps)
        if compiled is not None:  # the interpreter compiles nothing
            _compiled[key] = compiled
