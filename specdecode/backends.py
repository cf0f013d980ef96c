"""The choice of the backend: Triton kernels on a GPU, batched PyTorch elsewhere."""

import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from specdecode import eager
from specdecode.batch import VerificationBatch

Backend = Literal["auto", "triton", "eager"]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def breaks_graph(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make torch.compile break the graph at a function that reads values; otherwise it would compile for each value."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        from specdecode.uncompiled import run  # imports the compiler, which is already running here

        result: Result = run(function, args, kwargs)
        return result

    return call


def verifier_of(backend: Backend, method: str, batch: VerificationBatch) -> ModuleType:
    """Return the backend's module that verifies a batch; `"auto"` falls back to eager if the kernels cannot.

    Raises:
        ValueError: the choice is `"triton"`, which cannot run here or cannot verify the batch.
    """
    module = choose(backend, batch.target_logits)
    why_not = None if module is eager else module.why_not_verified(method, batch)
    if why_not is None:
        return module
    if backend == "triton":
        raise ValueError(why_not)
    log_once(f"the eager backend takes a call of 'auto': {why_not}")
    return eager


def choose(backend: Backend, logits: Tensor) -> ModuleType:
    """Return the backend's module for these logits.

    `"auto"` takes Triton for logits on a GPU, and warns with the reason where Triton cannot run. Any other choice is never
    replaced.

    Raises:
        ValueError: the choice is `"triton"`, which cannot run here.
    """
    if backend == "eager" or (backend == "auto" and logits.is_cpu):
        return eager
    why_not = obstacle(logits.device)
    if why_not is None:
        return kernels()
    if backend == "triton":
        raise ValueError(f"backend: 'triton' cannot run here: {why_not}; use 'eager' or 'auto'")
    warn_once(f"specdecode: the eager backend is used, because the Triton backend cannot run: {why_not}")
    return eager


@functools.cache
def kernels() -> ModuleType:
    """Import the Triton backend, which needs Triton."""
    return importlib.import_module("specdecode.kernels")


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Return the reason that prevents the kernels from running on a device, or None."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return None
    if device.type != "cuda":
        return f"the logits are on {device.type}, not on a GPU"
    if torch.version.hip is not None:
        return "it supports NVIDIA GPUs only"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU has a compute capability below 8.0"
    return None


@functools.cache
def log_once(message: str) -> None:
    """Log the first time that this message is given."""
    logging.getLogger("specdecode").info(message)


@functools.cache
def warn_once(message: str) -> None:
    """Warn the first time that this message is given."""
    warnings.warn(message, RuntimeWarning, stacklevel=5)
