"""Triton's interpreter, made faster: a launch prepares Triton's language once, not at every call of a device function.

To interpret a kernel, Triton replaces the functions of `triton.language`, and restores them after the launch. It replaces
them again at each call of a function with `@triton.jit` inside the kernel, which changes nothing and takes more than half of
the time of our kernels. Where a Triton release is built differently, it is left as it is.
"""

from typing import Any


def prepare_once_per_launch() -> None:
    """Change Triton's interpreter, once per process."""
    from triton import language
    from triton.runtime import interpreter

    patch, launch = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "GridExecutor", None)
    if patch is None or launch is None or hasattr(patch, "once"):
        return
    call, patched = launch.__call__, set()

    def patch_lang(function: Any) -> Any:
        """Replace the functions of those language modules that the function's module imports, unless that is done."""
        used = {id(language), id(language.core)} & {id(value) for value in function.__globals__.values()}
        if used and used <= patched:
            return None  # the scope to restore, which the interpreter uses at the launch only
        patched.update(used)
        return patch(function)

    def call_kernel(executor: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        try:
            call(executor, *arguments, **options)
        finally:
            patched.clear()

    patch_lang.once = True
    interpreter._patch_lang = patch_lang
    launch.__call__ = call_kernel
