"""Launching: few compiled variants, little work on the host, and launches that overlap where the GPU can do that."""

import concurrent.futures
import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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
    "chunks",
    "members",
    "patience",
]
"""Numbers of which no value is special: none has a kernel compiled anew."""

SMALL_TENSORS = [
    "token_ids_ptr",
    "num_accepted_ptr",
    "num_drafts_ptr",
    "invalid_ptr",
    "state_ptr",
    "scalars_ptr",
    "sums_ptr",
    "statistics_ptr",
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

MOST_PROGRAMS = 65_535
"""Programs along a grid's second dimension, and its third."""


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


@triton.jit
def place_in_grid(chunks, batch, FLAT: tl.constexpr):
    """Return a program's chunk of a row, its request and its offset: the dimensions of its grid, if it is not `FLAT`."""
    if FLAT:
        chunk = tl.program_id(0) % chunks
        request = tl.program_id(0) // chunks % batch
        offset = tl.program_id(0) // chunks // batch
    else:  # so nothing is divided before the first load
        chunk, request, offset = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    return chunk, request.to(tl.int64), offset


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Tell whether launches on a device may overlap: that takes compute capability 9.0."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


Layout = tuple[torch.dtype, tuple[int, ...], bool]
"""What a launch hangs on of a tensor, all but its address: dtype, strides, and whether it is aligned to 16 bytes.

A plain tuple, for each call makes a few: one with names takes twice as long.
"""


def layout(tensor: Tensor) -> Layout:
    """Return how a tensor lies."""
    return tensor.dtype, tensor.stride(), tensor.data_ptr() % 16 == 0


def dtypes(tensors: Iterable[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of tensors, None for those that are not there."""
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])


def alignment(logits: Layout, vocab_size: int) -> int:
    """Return 16 if rows are dense and start and end at multiples of 16 logits, 1 if only dense, else 0."""
    _, (*strides, stride_token), is_aligned = logits
    if stride_token != 1:
        return 0
    return 16 if is_aligned and functools.reduce(operator.or_, strides, vocab_size) % 16 == 0 else 1


def lanes(logits: Layout) -> int:
    """Return how many logits one warp loads at once if each thread loads 16 bytes."""
    dtype, *_ = logits
    return 512 // dtype.itemsize


HERE = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a tensor's device the current one, which is where kernels are launched."""
    if device.index is None or device.index == torch.cuda.current_device():  # a host has no index
        return HERE
    return torch.cuda.device(device)


IS_KNOWN = triton.__version__.startswith(("3.6", "3.7"))
"""Whether compiled kernels of this Triton can be launched directly; of others they are launched as Triton's users do."""


def can_launch_directly() -> bool:
    """Tell whether Triton need not be asked to launch: not if a profiler wants to hear of launches from it."""
    if not IS_KNOWN:
        return False
    runtime = triton.knobs.runtime
    return not (runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


CACHE_LINE = 32
"""Numbers of 32 bits in a cache line of a GPU."""


class Launch(NamedTuple):
    """One launch of a plan."""

    kernel: Any
    grid: tuple[int, ...]
    options: dict[str, Any]
    constants: dict[str, Any]


class Compiled(NamedTuple):
    """A launch when Triton has compiled its kernel."""

    variant: Any
    grid: tuple[int, ...]
    arguments_of: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    constants: tuple[Any, ...]


_variants: dict[tuple[object, ...], Any] = {}
"""Compiled kernels, by all that they hang on: no sizes, so that plans of new ones need not ask Triton."""


def kind(parameter: Any, argument: object) -> object:
    """Return what compiled code hangs on of an argument."""
    if isinstance(argument, Tensor):
        return argument.dtype, parameter.do_not_specialize_on_alignment or argument.data_ptr() % 16 == 0
    return argument if parameter.is_constexpr or argument is None else type(argument)


def hash_callees_first(function: object) -> None:
    """Have Triton hash a kernel after all that it calls, by which it finds compiled code on disk.

    Left to itself, Triton takes into a kernel's hash the constants of those callees alone that are hashed already: what one
    process has compiled, another that calls kernels in a different order compiles again.
    """
    if isinstance(function, triton.JITFunction) and function.hash is None:
        for name in function.fn.__code__.co_names:
            hash_callees_first(function.fn.__globals__.get(name))
        function.cache_key  # noqa: B018 (a property that keeps what it finds)


class Plan:
    """The launches of all calls that differ in addresses, and in numbers of no consequence, alone; arguments by name.

    Triton works out at each launch which compiled variant of a kernel is meant, and looks at every pointer, which takes
    longer than small kernels run. Here only the first call of a kind asks it. Those that follow fill in addresses.

    A plan holds no tensor. A call's workspace is one piece of memory, in parts, for each allocation takes its time.

    Args:
        device: where all of it happens.
        workspace: dtype (of 32 bits) and length of each part, None for one that is not needed.
        zeros: how many numbers of the workspace, from the first on, start as zeros.
        constants: arguments that are the same in all calls, and in all launches.
    """

    def __init__(
        self,
        device: torch.device,
        workspace: dict[str, tuple[torch.dtype, int] | None],
        zeros: int,
        constants: dict[str, Any],
    ) -> None:
        self.device = device
        self.parts = {name: part for name, part in workspace.items() if part is not None}
        lengths = [triton.cdiv(length, CACHE_LINE) * CACHE_LINE for _, length in self.parts.values()]
        *self.starts, self.length = itertools.accumulate(lengths, initial=0)
        self.zeros = zeros
        absent = {name: None for name, part in workspace.items() if part is None}
        self.constants = {**absent, **constants, "OVERLAPS": can_overlap(device)}
        self.launches: list[Launch] = []
        self.compiled: list[Compiled] = []

    def add(
        self,
        kernel: Any,
        *programs: int,
        num_warps: int,
        follows: bool = True,
        max_registers: int | None = None,
        **others: int,
    ) -> None:
        """Add a launch with arguments of its own; one that `follows` another may be set up while that runs.

        Programs are counted along up to three dimensions, the first fastest. Where the others take no such numbers the grid
        is `FLAT`: all are along the first.
        """
        flat = max(programs[1:], default=1) > MOST_PROGRAMS
        grid = (math.prod(programs), 1, 1) if flat else (*programs, 1, 1)[:3]
        overlaps = follows and self.constants["OVERLAPS"]
        options = {"num_warps": num_warps, "launch_pdl": overlaps, "maxnreg": max_registers}
        self.launches.append(Launch(kernel, grid, options, {**self.constants, "FLAT": flat, **others}))

    def run(self, tensors: dict[str, Tensor | None], numbers: dict[str, float]) -> None:
        """Make the launches, given what differs from call to call: the same names each time, in the same order."""
        workspace = torch.empty(self.length, dtype=torch.int32, device=self.device)
        if self.zeros:
            workspace[: self.zeros].zero_()
        with on_device(self.device):
            if not self.compiled:
                self.compiled = self.launch_by_triton(tensors, self.views(workspace), numbers)
                return
            first = workspace.data_ptr()
            values = (
                *[None if tensor is None else tensor.data_ptr() for tensor in tensors.values()],
                *[first + 4 * start for start in self.starts],
                *numbers.values(),
            )
            stream = triton.runtime.driver.active.get_current_stream(self.device.index)
            directly = can_launch_directly()
            for variant, grid, arguments_of, constants in self.compiled:
                arguments = arguments_of(values + constants)
                if directly:  # which leaves out what Triton prepares for hooks even where there are none
                    function, metadata = variant.function, variant.packed_metadata
                    variant.run(*grid, stream, function, metadata, None, None, None, *arguments)
                else:
                    variant[grid](*arguments, stream=stream)

    def views(self, workspace: Tensor) -> list[Tensor]:
        """Return the parts of a workspace."""
        return [
            workspace[start : start + length].view(dtype)
            for start, (dtype, length) in zip(self.starts, self.parts.values())
        ]

    def launch_by_triton(
        self, tensors: dict[str, Tensor | None], parts: list[Tensor], numbers: dict[str, float]
    ) -> list[Compiled]:
        """Make the launches by Triton, which compiles what is not; return them compiled, or none in the interpreter."""
        names, values = [*tensors, *self.parts, *numbers], (*tensors.values(), *parts, *numbers.values())
        calls = []
        for kernel, _, options, constants in self.launches:
            arguments_of = operator.itemgetter(*map([*names, *constants].index, kernel.arg_names))
            arguments = arguments_of((*values, *constants.values()))
            key: tuple[object, ...] = ()
            if isinstance(kernel, triton.JITFunction):  # not in the interpreter
                for function in (kernel, *arguments):  # a kernel may be told by an argument what to call
                    hash_callees_first(function)
                key = (self.device, kernel, *options.values(), *map(kind, kernel.params, arguments))
            calls.append((arguments_of, arguments, key))
        self.compile_at_once(
            {
                key: functools.partial(launch.kernel.warmup, *arguments, grid=(1,), **launch.options)
                for launch, (_, arguments, key) in zip(self.launches, calls)
                if key and key not in _variants
            }
        )
        compiled = []
        for (kernel, grid, options, constants), (arguments_of, arguments, key) in zip(self.launches, calls):
            variant = _variants.get(key)
            if variant is None:
                variant = kernel[grid](*arguments, **options)
            else:
                variant[grid](*arguments)
            if key:
                _variants[key] = variant
            compiled.append(Compiled(variant, grid, arguments_of, tuple(constants.values())))
        return [] if any(launch.variant is None for launch in compiled) else compiled

    def compile_at_once(self, variants: dict[tuple[object, ...], Callable[[], object]]) -> None:
        """Have variants compiled, each by a thread: then a first call takes as long as the slowest, not as all of them."""

        def compile_one(variant: Callable[[], object]) -> None:
            with on_device(self.device):  # which is a thread's own
                variant()

        if len(variants) > 1:
            with concurrent.futures.ThreadPoolExecutor(len(variants)) as threads:
                list(threads.map(compile_one, variants.values()))
