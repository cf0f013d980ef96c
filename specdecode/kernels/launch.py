"""Launching: kernels are compiled once per signature, and prepared launches overlap where the GPU can do that.

A plain Triton launch inspects every argument to find the compiled kernel, which takes longer than a small kernel runs.
Here the signature is derived once, from the bundles of a plan. A call only fills in the values of their symbols:
addresses and numbers, sizes included.
"""

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdecode.kernels.signature import Signature, Symbol, with_values


@triton.jit
def admit_next_launch(OVERLAPS: tl.constexpr):
    """Allow the next launch to start once all programs have reached this point; it must call `await_launch`."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def await_launch(OVERLAPS: tl.constexpr):
    """Wait until the previous launch has ended and its writes are visible."""
    if OVERLAPS:
        gdc_wait()


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter."""
    return not isinstance(await_launch, triton.JITFunction)


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Return whether launches on a device may overlap, which requires compute capability 9.0."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


HERE = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a tensor's device the current device, on which kernels are launched."""
    if device.index is None or device.index == torch.cuda.current_device():  # the CPU has no index
        return HERE
    return torch.cuda.device(device)


def hash_callees_first(function: object) -> None:
    """Make Triton hash a kernel after all functions that it calls; the hash is the key of its disk cache.

    By default, a kernel's hash includes the constants of only those callees that are already hashed. So a process that
    calls kernels in another order would compile them again.
    """
    if isinstance(function, triton.JITFunction) and function.hash is None:
        for name in function.fn.__code__.co_names:
            callee = function.fn.__globals__.get(name)
            if callee is not function:  # name lookup finds `argmax` itself where it calls `tl.argmax`
                hash_callees_first(callee)
        function.cache_key  # noqa: B018 (a property that caches its result)


class Source(ASTSource):  # type: ignore[misc]
    """A source for Triton's compiler. Sources are parsed one after the other.

    Python runs one thread at a time: parsed concurrently, all sources would be ready only at the end. With a lock, the first
    is compiled while the next is parsed.
    """

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the source under a lock; other stages of the compiler run concurrently."""
        with _parsing:
            return super().make_ir(*args, **kwargs)


_parsing = threading.Lock()


class Launch(NamedTuple):
    """A launch of a plan."""

    kernel: Any
    grid: tuple[str, str, str]  # expressions, like a symbol's
    bundles: tuple[Any, ...]
    options: dict[str, Any]

    def key(self, device: torch.device) -> tuple[object, ...]:
        """Return the cache key of its compiled kernel."""
        signature = Signature(self.kernel.arg_names, self.bundles)
        with _hashing:  # before `Signature.key`, which hashes the kernel; locked: a half-computed hash looks complete
            for function in (self.kernel, *signature.constants.values()):  # a constant may be a called function
                hash_callees_first(function)
            return device, self.kernel, *self.options.items(), *signature.key()

    @property
    def num_arguments(self) -> int:
        """The number of pointers and numbers that its kernel receives."""
        return Signature(self.kernel.arg_names, self.bundles).num_arguments

    def compile(self, device: torch.device) -> Any:
        """Compile its kernel and load it, if that has not been done for the same signature."""
        key = self.key(device)
        with _compiling.setdefault(key, threading.Lock()):  # one thread compiles, the others wait
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
"""One lock for each compiled kernel, so that no two threads compile the same one."""

_variants: dict[tuple[object, ...], Any] = {}
"""Compiled kernels by their cache key."""


def compile_all(launches: Sequence[Launch], device: torch.device) -> list[Any]:
    """Compile launches concurrently, started in order: this takes as long as the slowest."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(launches))) as threads:
        return list(threads.map(lambda launch: launch.compile(device), launches))


class Share(NamedTuple):
    """The share of this process in a compilation, among several processes with one disk cache."""

    rank: int = 0
    ranks: int = 1
    barrier: Callable[[], object] = lambda: None
    """Waits until all processes have reached it."""


def compile_ahead(calls: Sequence[Callable[[], object]], share: Share = Share()) -> None:  # noqa: B008 (it is constant)
    """Make calls one after the other, after compiling the kernels of all of them in parallel.

    Kernels are divided among all processes. Those with the most arguments come first: they mostly take longest.
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


def collect(plan: Any) -> bool:
    """Append a plan to the plans that this thread collects, if it does; return whether it does."""
    plans = getattr(_collected, "plans", None)
    if plans is not None:
        plans.append(plan)
    return plans is not None


_collected = threading.local()
"""While `plans` is set, this thread's plans are appended to it and nothing is launched."""


class Part(NamedTuple):
    """A part of a workspace."""

    dtype: torch.dtype  # of 32 or 64 bits
    length: str  # an expression, like a symbol's


class Plan:
    """The launches of all calls that differ only in addresses and numbers, including sizes.

    A plan holds no tensor and no size, only expressions. The first call compiles them to one Python function, `fill`, that
    returns the grids and arguments of all launches. To walk the bundles in each call would take longer than the launches.

    Args:
        device: of all tensors.
        definitions: expressions of names that symbols use, beside the names of a call's tensors and numbers.
        parts: of the workspace, by name. The workspace is one allocation, because each allocation takes time.
        zeros: expression: the number of 32-bit words at the start of the workspace that are set to 0.
    """

    def __init__(
        self, device: torch.device, definitions: dict[str, str], parts: dict[str, Part], zeros: str = "0"
    ) -> None:
        self.device, self.parts, self.launches = device, parts, list[Launch]()
        self.definitions, start = dict(definitions), "0"
        for name, (dtype, length) in parts.items():
            self.definitions[f"{name}_start"] = start
            start = f"{name}_start + (({length}) * {dtype.itemsize // 4} + 31 & -32)"  # in cache lines
        self.definitions |= {"length": start, "zeros": zeros}
        self.functions: dict[str, Any] = {}
        """The functions in expressions, by name."""
        self.ready: list[Any] = []
        """The compiled kernels of the launches, from the first call on."""
        self.fill: Callable[..., Any] | None = None

    def part(self, name: str) -> Symbol | None:
        """Return the symbol of a part of the workspace, None if it is absent."""
        return Symbol(name, self.parts[name].dtype) if name in self.parts else None

    def add(
        self,
        kernel: Any,
        grid: str | tuple[str, str, str],
        bundles: tuple[Any, ...],
        *,
        num_warps: int,
        follows: bool = True,
        max_registers: int | None = None,
    ) -> None:
        """Add a launch, given its grid or the number of its programs.

        If it `follows` another launch, it may be set up while the other runs.
        """
        options = {"num_warps": num_warps, "launch_pdl": follows and can_overlap(self.device)}
        if max_registers is not None:
            options["maxnreg"] = max_registers
        self.launches.append(Launch(kernel, (grid, "1", "1") if isinstance(grid, str) else grid, bundles, options))

    def run(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Make the launches, given the tensors and numbers of a call: the same names each time, in the same order."""
        with on_device(self.device):
            fill = self.fill
            if fill is None:
                if collect(self):
                    return
                if is_interpreted():
                    values = self.values(tensors, numbers)
                    self.interpret(values | self.views(self.allocate(values["length"], values["zeros"]), values))
                    return
                fill = self.prepare([*tensors, *numbers])
            _workspace, launches = fill(self.allocate, *tensors.values(), *numbers.values())  # alive until the launches
            self.launch(launches)

    def allocate(self, length: int, zeros: int) -> Tensor:
        """Return a workspace of `length` 32-bit words; the first `zeros` are 0."""
        workspace = torch.empty(length, dtype=torch.int32, device=self.device)
        if zeros:
            workspace[:zeros].zero_()
        return workspace

    def launch(self, launches: tuple[Any, ...]) -> None:
        """Launch the compiled kernels, given their grids and arguments."""
        stream = triton.runtime.driver.active.get_current_stream(self.device.index)
        for variant, (grid, arguments) in zip(self.ready, launches):
            variant[grid](*arguments, stream=stream)

    def values(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> dict[str, Any]:
        """Return the values of all names in expressions, except the parts of the workspace."""
        values = {**tensors, **numbers}
        for name, expression in self.definitions.items():
            values[name] = eval(expression, self.functions, values)
        return values

    def views(self, workspace: Tensor, values: dict[str, Any]) -> dict[str, Tensor]:
        """Return the parts of a workspace."""
        views = {}
        for name, (dtype, length) in self.parts.items():
            start, words = values[f"{name}_start"], eval(length, self.functions, values) * (dtype.itemsize // 4)
            views[name] = workspace[start : start + words].view(dtype)
        return views

    def interpret(self, values: dict[str, Any]) -> None:
        """Make the launches in Triton's interpreter."""
        for kernel, grid, bundles, _ in self.launches:
            programs = tuple([eval(expression, self.functions, values) for expression in grid])
            kernel[programs](*[with_values(bundle, values) for bundle in bundles])

    def prepare(self, names: list[str]) -> Callable[..., Any]:
        """Compile the kernels that are not compiled yet, and make `fill`, given the names of a call's tensors and numbers.

        `fill` is a function of `allocate` and of the values of these names. It returns the workspace, and the grid and
        arguments of each launch.
        """
        self.ready = compile_all(self.launches, self.device)
        scope = dict(self.functions)
        exec(self.source(names), scope)
        fill: Callable[..., Any] = scope["fill"]
        self.fill = fill
        return fill

    def source(self, names: list[str]) -> str:
        """Return the source of `fill`."""
        lines = [f"{name} = {expression}" for name, expression in self.definitions.items()]
        lines += ["workspace = allocate(length, zeros)", "first = workspace.data_ptr()"]
        lines += [f"{name} = first + 4 * {name}_start" for name in self.parts]
        variables: dict[int, str] = {}

        def text(field: Any) -> str:
            if isinstance(field, tuple):
                if id(field) not in variables:  # launches share most bundles
                    fields = "".join(f"{text(each)}, " for each in field)
                    variables[id(field)] = f"bundle_{len(variables)}"
                    lines.append(f"{variables[id(field)]} = ({fields})")
                return variables[id(field)]
            if isinstance(field, Symbol):
                is_tensor = field.dtype is not None and field.expression not in self.parts
                return f"{field.expression}.data_ptr()" if is_tensor else field.expression
            return repr(field) if isinstance(field, int | float) else "None"  # kernels are compiled for other constants

        launches = [f"(({', '.join(grid)}), {text(bundles)})" for _, grid, bundles, _ in self.launches]
        lines.append(f"return workspace, ({', '.join(launches)},)")
        return "\n    ".join([f"def fill(allocate, {', '.join(names)}):", *lines])
