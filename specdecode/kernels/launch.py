"""Launching: compilation, launch; little work on the host, and launches that overlap where the GPU can do that.

Where a kernel is launched by its source, Triton finds out at each launch which compiled variant is meant, and looks at every
pointer for that, which takes longer than a small kernel runs. Here each kernel's signature is stated once, from the bundles
of `arguments`, and compiled for exactly that; a call only fills in addresses and numbers, sizes included.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdecode.kernels.formulas import Argument, Number, Writer, address_of, rounded_up, value_of
from specdecode.kernels.signature import Signature, is_constant, kinds


@triton.jit
def admit_next_launch(OVERLAPS: tl.constexpr):
    """Let the next launch be set up once all programs have come here; it waits by `await_launch` before it reads."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def await_launch(OVERLAPS: tl.constexpr):
    """Wait until the launch before has ended and all that it wrote can be seen."""
    if OVERLAPS:
        gdc_wait()


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter."""
    return not isinstance(await_launch, triton.JITFunction)


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Return whether launches on a device may overlap: that takes compute capability 9.0."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


HERE = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a tensor's device the current one, which is where kernels are launched."""
    if device.index is None or device.index == torch.cuda.current_device():  # a host has no index
        return HERE
    return torch.cuda.device(device)


def hash_callees_first(function: object) -> None:
    """Have Triton hash a kernel after all that it calls, by which it finds compiled code on disk.

    Left to itself, Triton takes into a kernel's hash the constants of those callees alone that are hashed already: what one
    process has compiled, another that calls kernels in a different order compiles again.
    """
    if isinstance(function, triton.JITFunction) and function.hash is None:
        for name in function.fn.__code__.co_names:
            callee = function.fn.__globals__.get(name)
            if callee is not function:  # as it seems where `argmax` calls `tl.argmax`
                hash_callees_first(callee)
        function.cache_key  # noqa: B018 (a property that keeps what it finds)


class Source(ASTSource):  # type: ignore[misc]
    """What Triton compiles, read one after the other.

    Python runs one thread at a time. If all sources were read at once, all would be ready when the last is; so the first is
    compiled while the next is read.
    """

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        """Read the source; all other work of the compiler is done beside that of others."""
        with _reading:
            return super().make_ir(*args, **kwargs)


_reading = threading.Lock()


class Launch(NamedTuple):
    """One launch of a plan: a kernel, the three dimensions of its grid, and what it is given, in numbers of calls."""

    kernel: Any
    grid: tuple[Any, Any, Any]
    bundles: tuple[Any, ...]
    options: dict[str, Any]

    def key(self, device: torch.device) -> tuple[object, ...]:
        """Return all that compiled code depends on."""
        signature = Signature(self.kernel.arg_names, self.bundles)
        with _hashing:  # before `Signature.key`, which hashes the kernel; alone: a hash half done looks like one done
            for function in (self.kernel, *signature.constants.values()):  # a constant may say what a kernel calls
                hash_callees_first(function)
            return device, self.kernel, *self.options.items(), *signature.key()

    @property
    def num_arguments(self) -> int:
        """How many pointers and numbers its kernel is given."""
        return Signature(self.kernel.arg_names, self.bundles).num_arguments

    def compile(self, device: torch.device) -> Any:
        """Compile its kernel and load it, if that has not been done for the same signature."""
        key = self.key(device)
        with _compiling.setdefault(key, threading.Lock()):  # by one thread, for which others wait
            if key not in _variants:
                signature = Signature(self.kernel.arg_names, self.bundles)
                source = Source(self.kernel, signature.types, signature.constants, signature.attributes)
                with on_device(device):  # the current device belongs to a thread
                    variant = triton.compile(source, options=self.options)
                    variant.run  # noqa: B018 (loads it)
                _variants[key] = variant
        return _variants[key]


_hashing = threading.Lock()
_compiling: dict[tuple[object, ...], threading.Lock] = {}
"""One for each compiled kernel, so that no two threads compile the same."""

_variants: dict[tuple[object, ...], Any] = {}
"""Compiled kernels by all that they depend on."""


def filled(bundle: Any, values: dict[str, Any]) -> Any:
    """Return a bundle as the interpreter takes it: values filled in, constants marked as such."""
    fields = []
    for field, (kind, _) in zip(bundle, kinds(bundle.__class__)):
        if isinstance(field, Argument):
            fields.append(values[field.name])
        elif kind == "bundle":
            fields.append(filled(field, values))
        elif field is not None and is_constant(kind, field):
            fields.append(tl.constexpr(field))
        else:
            fields.append(value_of(field, values))
    return type(bundle)(*fields)


def compile_all(launches: Sequence[Launch], device: torch.device) -> list[Any]:
    """Compile launches, each by a thread, in their order: it takes as long as the slowest."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(launches))) as threads:
        return list(threads.map(lambda launch: launch.compile(device), launches))


class Share(NamedTuple):
    """Which part this process compiles of what several need, whose cache of compiled kernels is one."""

    rank: int = 0
    ranks: int = 1
    barrier: Callable[[], object] = lambda: None
    """Waits until all of them have come to it."""


def compile_ahead(calls: Sequence[Callable[[], object]], share: Share = Share()) -> None:  # noqa: B008 (it is constant)
    """Make calls one after the other; what all of them launch is compiled before, at once.

    Kernels with more arguments, which do more with them, mostly take longer: they come first, and are divided among all
    processes.
    """
    if not hasattr(_collected, "plans") and not is_interpreted():
        plans = _collected.plans = list[Any]()
        try:
            for call in calls:
                call()
        finally:
            del _collected.plans
        launches = {launch.key(plan.device): (launch, plan.device) for plan in plans for launch in plan.launches}
        largest_first = sorted(launches.values(), key=lambda each: -each[0].num_arguments)
        ours = largest_first[share.rank :: share.ranks]
        for device in dict.fromkeys(device for _, device in ours):
            compile_all([launch for launch, its_device in ours if its_device == device], device)
        share.barrier()
    for call in calls:
        call()


def is_collected(plan: Any) -> bool:
    """Return whether a plan is collected, and not to be run."""
    plans = getattr(_collected, "plans", None)
    if plans is not None:
        plans.append(plan)
    return plans is not None


_collected = threading.local()
"""While it has `plans`, those of this thread's calls come there, and the calls are not made."""


class Plan:
    """The launches of all calls that differ in addresses and numbers alone, sizes among them.

    A plan holds no tensor and no size. A call's workspace is one piece of memory, in parts, as each allocation takes time.

    Args:
        device: where all of it happens.
        workspace: dtype (of 32 or 64 bits) and length of each part, None for one that is not needed.
        zeros: how many elements of 32 bits of the workspace, from the first on, start as zeros.
    """

    def __init__(self, device: torch.device, workspace: dict[str, tuple[torch.dtype, Any] | None], zeros: Any) -> None:
        self.device, self.zeros = device, zeros
        self.parts = {name: part for name, part in workspace.items() if part is not None}
        # In cache lines of 32 elements.
        lengths = [rounded_up(length * (dtype.itemsize // 4), 32) for dtype, length in self.parts.values()]
        *starts, self.length = itertools.accumulate(lengths, initial=0)
        self.starts = dict(zip(self.parts, starts))
        self.launches: list[Launch] = []
        self.ready: list[Any] = []
        """The compiled kernels of the launches, from the first call on."""
        self.fill: Callable[..., Any] | None = None
        """From then on, what fills in a call: the function of all that differs between calls that `prepare` writes."""

    def part(self, name: str) -> Argument | None:
        """Return the argument that is a part of the workspace, if there is one of that name."""
        return Argument(name, self.parts[name][0]) if name in self.parts else None

    def add(
        self,
        kernel: Any,
        programs: Any,
        bundles: tuple[Any, ...],
        *,
        num_warps: int,
        follows: bool = True,
        max_registers: int | None = None,
    ) -> None:
        """Add a launch of so many programs, or of a grid of three dimensions.

        One that `follows` another may be set up while that runs.
        """
        options = {"num_warps": num_warps, "launch_pdl": follows and can_overlap(self.device)}
        if max_registers is not None:
            options["maxnreg"] = max_registers
        grid = programs if isinstance(programs, tuple) else (programs, 1, 1)
        self.launches.append(Launch(kernel, grid, bundles, options))

    def run(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Make the launches, given what differs from call to call: the same names each time, in the same order."""
        with on_device(self.device):
            fill = self.fill
            if fill is None:
                if is_collected(self):
                    return
                if is_interpreted():
                    workspace = self.allocate(value_of(self.length, numbers), value_of(self.zeros, numbers))
                    self.interpret({**tensors, **self.views(workspace, numbers), **numbers})
                    return
                fill = self.prepare([*tensors, *numbers])
            workspace, launches = fill(self.allocate, *tensors.values(), *numbers.values())
            self.launch(launches)

    def allocate(self, length: int, zeros: int) -> Tensor:
        """Return memory for a workspace of so many elements of 32 bits, of which the first few are zeros."""
        workspace = torch.empty(length, dtype=torch.int32, device=self.device)
        if zeros:
            workspace[:zeros].zero_()
        return workspace

    def launch(self, launches: tuple[Any, ...]) -> None:
        """Launch compiled kernels, given their grids and arguments."""
        stream = triton.runtime.driver.active.get_current_stream(self.device.index)
        for variant, (grid, arguments) in zip(self.ready, launches):
            variant[grid](*arguments, stream=stream)

    def extent(self, name: str) -> tuple[Any, Any]:
        """Return where a part of the workspace starts, and how many elements of 32 bits it has."""
        dtype, length = self.parts[name]
        return self.starts[name], length * (dtype.itemsize // 4)

    def views(self, workspace: Tensor, numbers: dict[str, Any]) -> dict[str, Tensor]:
        """Return the parts of a workspace."""
        extents = {name: [value_of(number, numbers) for number in self.extent(name)] for name in self.parts}
        return {
            name: workspace[start : start + length].view(self.parts[name][0])
            for name, (start, length) in extents.items()
        }

    def interpret(self, values: dict[str, Any]) -> None:
        """Make the launches in Triton's interpreter."""
        for kernel, grid, bundles, _ in self.launches:
            programs = tuple([value_of(number, values) for number in grid])
            kernel[programs](*[filled(bundle, values) for bundle in bundles])

    def prepare(self, names: list[str]) -> Callable[..., Any]:
        """Compile what is not compiled yet, and write the function that fills in a call.

        Of a function that allocates the workspace, and of the tensors and numbers of these names, it returns the workspace,
        and the grids and arguments of the launches.
        """
        workspace = Number("allocate", (self.length, self.zeros))
        self.ready = compile_all(self.launches, self.device)
        self.fill = Writer(self.addresses(workspace)).function(["allocate", *names], (workspace, self.filled_in))
        return self.fill

    def addresses(self, workspace: Number) -> dict[str, Number]:
        """Return the addresses of the parts of a workspace."""
        return {name: address_of(workspace) + 4 * start for name, start in self.starts.items()}

    @property
    def filled_in(self) -> tuple[Any, ...]:
        """What a call fills in: the grid and the bundles of each launch."""
        return tuple([(launch.grid, launch.bundles) for launch in self.launches])
