"""The function that torch.compile leaves alone. Importing this module imports the compiler, which takes seconds."""

from collections.abc import Callable
from typing import Any

import torch

WHY = "calls of specdecode break the graph: compile without fullgraph=True"


@torch.compiler.disable(reason=WHY)  # type: ignore[untyped-decorator, no-untyped-call]
def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function without compiling it."""
    return function(*args, **kwargs)
