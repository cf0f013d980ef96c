"""Compile the kernels for a GPU that the machine does not have.

`python -m tests.tools.portability 80` compiles them for compute capability 8.0. Without a GPU, tests run in Triton's
interpreter, which accepts code that the compiler refuses; and code for one kind of GPU may not compile for another. Here
a replacement of Triton's driver reports a GPU and launches nothing, so kernels are compiled to machine code. The number
may be followed by names of methods; by `adjusted`, for calls with penalties, biases and masks; and by `once`, to compile
only the first variant of each kernel. Kernels in Triton's cache are not compiled again.

It fails where Triton confuses two functions. Triton 3.6 names a compiled function after the flat sequence of its
arguments' elements: of two calls that differ only in nesting, the second gets the code of the first.
"""

import inspect
import sys
import threading
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import code_generator

from specdecode import AcceptanceSchedule, Adjustments, RejectionSampler, backends
from specdecode.kernels import launch, plan
from specdecode.kernels.methods import METHODS

VOCAB, DRAFTS = 33_024, 3


class Launcher:
    """Launches nothing."""

    def __init__(self, *_: object) -> None: ...

    def __call__(self, *_: object) -> None: ...


class Driver:
    """Reports a GPU, and accepts the kernels compiled for it."""

    launcher_cls = Launcher

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.compiled: list[str] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 99 << 10}  # the minimum of such GPUs, as of 8.6, 8.9 and 12.0

    def load_binary(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        """Record a kernel; return a module, a function, its registers, its spills and its maximum number of threads."""
        self.compiled.append(name)
        return 0, 0, 0, 0, 1024

    def unload_module(self, module: int) -> None: ...


def tell_calls_apart() -> None:
    """Raise if functions whose arguments differ in nesting get one name."""
    call, name_of, local = code_generator.CodeGenerator.call_JitFunction, code_generator.mangle_fn, threading.local()

    def structure(argument: Any) -> str:
        if type(argument).__name__ == "tuple":
            return f"({' '.join(map(structure, argument))})"
        return "constant" if code_generator._is_constexpr(argument) else str(getattr(argument, "type", argument))

    def noted(generator: Any, function: Any, args: Any, kwargs: Any, *context: Any) -> Any:
        bound = inspect.getcallargs(function.fn, *args, **kwargs)
        # A dictionary that all functions of a kernel share.
        local.call = generator.function_ret_types, [structure(bound[name]) for name in function.arg_names]
        return call(generator, function, args, kwargs, *context)

    def name_apart(*args: Any) -> str:
        name: str = name_of(*args)
        known, given = local.__dict__.pop("call", ({}, None))
        expected = known.setdefault(("arguments", name), given)
        if expected != given:
            raise TypeError(f"{name}: compiled for {expected}, called with {given}")
        return name

    code_generator.CodeGenerator.call_JitFunction, code_generator.mangle_fn = noted, name_apart


def compile_once() -> None:
    """Compile only the first variant of each kernel."""
    compile_variant, lock, first = triton.compile, threading.Lock(), {}

    def compile_first(source: Any, options: dict[str, Any]) -> Any:
        with lock:  # the kernels of a call are compiled at once
            if source.name not in first:
                first[source.name] = compile_variant(source, options=options)
        return first[source.name]

    triton.compile = compile_first


def all_adjustments() -> Adjustments:
    """Return adjustments of all kinds."""
    words, number = -(-VOCAB // 32), torch.ones(1)
    masks = torch.zeros(1, words, dtype=torch.int32), torch.zeros(1, DRAFTS + 1, words, dtype=torch.int32)
    counts, ids = torch.zeros(1, VOCAB, dtype=torch.int32), torch.zeros(1, DRAFTS, dtype=torch.int32)
    return Adjustments(number, number, number, masks[0], counts, ids, ids.float(), masks[1])


def compile_adjusted(methods: list[str]) -> None:
    """Compile the kernels of small calls of some methods with all adjustments."""
    target, draft = (torch.zeros(1, rows, VOCAB, dtype=torch.bfloat16) for rows in (DRAFTS + 1, DRAFTS))
    ids = torch.zeros(1, DRAFTS, dtype=torch.int64)
    for method in methods:
        RejectionSampler(method, backend="triton")(target, ids, draft, seeds=0, adjustments=all_adjustments())


def compile_all(methods: list[str], once: bool = False) -> None:
    """Compile the kernels of calls of some methods."""
    target, draft = (torch.zeros(1, rows, VOCAB, dtype=torch.bfloat16) for rows in (DRAFTS + 1, DRAFTS))
    ids = torch.zeros(1, DRAFTS, dtype=torch.int64)
    schedule = AcceptanceSchedule.from_mean_rate(0.6, num_draft_tokens=DRAFTS)
    for method in methods:
        sampler = RejectionSampler(method, backend="triton", schedule=schedule if method == "synthetic" else None)
        if once:
            for size in (1, 512) if method == "block" else (512,):
                sampler(*[each.expand(size, *each.shape[1:]) for each in (target, ids, draft)], seeds=0)
        else:
            for logits, logsumexp in ((draft, None), (draft, torch.zeros(1, DRAFTS)), (None, None)):
                sampler.warmup(target, ids, logits, seeds=0, draft_logsumexp=logsumexp)
        if method == "strict":
            sampler(target, ids, seeds=0, top_p=0.9)
            sampler(target, ids, seeds=0, top_p=0.9, logprobs="raw", top_logprobs=5, kept_sets=True)
            sampler.draft(target[:, 0], seeds=0, width=4)
            sampler.tree(target, torch.zeros(1, DRAFTS + 1, dtype=torch.int64), torch.arange(-1, DRAFTS), max_depth=2)
        if method == "probabilistic":
            vocabulary = torch.arange(draft.shape[2] // 2)
            sampler(target, ids, draft[..., : len(vocabulary)], seeds=0, draft_vocab_ids=vocabulary)


if __name__ == "__main__":
    capability, *methods = sys.argv[1:]
    driver = Driver(int(capability))
    triton.runtime.driver.set_active(driver)
    tell_calls_apart()
    backends.obstacle = lambda device: None
    launch.can_overlap = plan.can_overlap = lambda device: driver.target.arch >= 90
    if "once" in methods:
        compile_once()
    named = [name for name in methods if name not in ("once", "adjusted")]
    if "adjusted" in methods:
        compile_adjusted(named)
    else:
        compile_all(named or list(METHODS), once="once" in methods)
    print(*sorted(set(driver.compiled)))
