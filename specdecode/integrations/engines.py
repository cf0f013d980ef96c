"""How serving engines come to verify with this package: the switches, and the plug-ins that read them.

Engines load these functions as plug-ins in every process, whether they are wanted or not. So this module imports neither
PyTorch nor an engine.
"""

import os
from typing import cast, get_args

from specdecode.integrations.adapters import EngineMethod

VLLM_SWITCH = "SPECDECODE_VLLM"
SGLANG_SWITCH = "SPECDECODE_SGLANG"


def chosen_method(switch: str) -> EngineMethod | None:
    """Return the method that an environment variable chooses, or None if it is unset or empty.

    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get(switch, "")
    if value == "":
        return None
    if value not in get_args(EngineMethod):
        choices = ", ".join(map(repr, get_args(EngineMethod)))
        raise ValueError(f"{switch}: expected one of {choices}, or unset to leave the engine as it is, got {value!r}")
    return cast(EngineMethod, value)


def register_vllm() -> None:
    """Let vLLM verify with this package, if `SPECDECODE_VLLM` says so: the entry point in `vllm.general_plugins`.

    Raises:
        ValueError: a variable has a wrong value.
    """
    method = chosen_method(VLLM_SWITCH)
    if method is not None:
        from specdecode.integrations import vllm

        vllm.install(method)


def register_sglang() -> None:
    """Let SGLang verify with this package, if `SPECDECODE_SGLANG` says so: the entry point in `sglang.srt.plugins`.

    SGLang logs exceptions of plug-ins and goes on without them. A server that verifies otherwise than it was told to must
    not start, so a wrong value ends the process.
    """
    try:
        method = chosen_method(SGLANG_SWITCH)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if method is not None:
        from specdecode.integrations import sglang

        sglang.install(method)
