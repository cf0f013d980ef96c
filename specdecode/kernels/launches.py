"""Launching: few compiled variants, little work on the host, and launches that overlap where the GPU can do that."""

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
    "counts_ptr",
    "scalars_ptr",
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
"""Tensors that may lie at any address, likewise."""


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


def can_overlap(device: torch.device) -> bool:
    """Tell whether launches on a device may overlap: that takes compute capability 9.0."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def lanes(logits: Tensor) -> int:
    """Return how many logits one warp loads at once: 16 bytes a thread of aligned rows, one logit a thread of others."""
    return 512 // logits.element_size() if is_aligned(logits) else 32


def is_aligned(logits: Tensor) -> bool:
    """Tell whether the rows can be read 16 bytes at once: dense, and starting and ending at multiples of 16 logits."""
    *strides, stride_token = logits.stride()
    sizes = (*strides, logits.shape[-1], logits.data_ptr())
    return stride_token == 1 and all(size % 16 == 0 for size in sizes)


_compiled: dict[tuple[object, ...], Any] = {}


def variant(value: object) -> object:
    """Return what of a runtime argument the compiled code depends on."""
    if isinstance(value, Tensor):
        return value.device.index, value.dtype, value.data_ptr() % 16
    return value is None


def launch(kernel: Any, programs: int, arguments: dict[str, Any], **options: Any) -> None:
    """Launch a kernel on the current device, with arguments by name.

    Triton works out at each launch which compiled variant of a kernel is meant, which takes longer than small kernels run.
    Here that hangs on types, alignment and constants alone, so after the first time it is looked up.
    """
    values = [arguments[name] for name in kernel.arg_names]
    constants = [value if name.isupper() else variant(value) for name, value in zip(kernel.arg_names, values)]
    key = (kernel, *options.values(), *constants)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[programs, 1, 1](*values)
        return
    compiled = kernel[programs, 1, 1](*values, **options)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled
