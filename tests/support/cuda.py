"""CUDA graphs of calls, and calls that must not wait for the device."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def synchronising_raises() -> Iterator[None]:
    """Raise an error where the host waits for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call, and return its graph and the output that replays write."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output
