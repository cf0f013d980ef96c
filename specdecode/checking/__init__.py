"""Tell any verifier what is wrong with it: `check(verify)`, on the command line `specdecode check file.py:verify`.

`check_server(url, model)` does so for a running server.

It imports NumPy and SciPy alone, at first use, so that `specdecode --help` does not wait for them.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from specdecode.checking.checker import check
    from specdecode.checking.report import Check, Report
    from specdecode.checking.server import check_server

__all__ = ["Check", "Report", "check", "check_server"]

_MODULES = {"Check": "report", "Report": "report", "check": "checker", "check_server": "server"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
