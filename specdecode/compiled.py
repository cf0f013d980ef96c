"""Calls in code that torch.compile compiles: they break its graph, and run as they do elsewhere."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def breaks_graph(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Have torch.compile not look into a function: it reads values on the host, and its arithmetic must stay as it is."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        from specdecode.disabled import run  # which imports the compiler: here it has been imported

        result: Result = run(function, args, kwargs)
        return result

    return call
