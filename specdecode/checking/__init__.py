"""Tell any verifier what is wrong with it: `check(verify)`, on the command line `specdecode check file.py:verify`.

It imports NumPy and SciPy alone, at first use, so that `specdecode --help` does not wait for them.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from specdecode.checking.checker import check
    from specdecode.checking.report import Check, Report

__all__ = ["Check", "Report", "check"]

_MODULES = {"Check": "report", "Report": "report", "check": "checker"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
