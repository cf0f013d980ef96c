"""Integrations with other libraries: one module or package for each library, the only one that imports it.

Serving engines load the two functions below as plug-ins in every process, whether or not they are switched on. So this
module imports neither PyTorch nor an engine, unless an environment variable switches the plug-in on.
"""

import os

VLLM_SWITCH = "SPECDECODE_VLLM"
SGLANG_SWITCH = "SPECDECODE_SGLANG"


def register_vllm() -> None:
    """Make vLLM verify with this package if `SPECDECODE_VLLM` is set: the entry point in `vllm.general_plugins`.

    Raises:
        ValueError: a variable has a wrong value.
    """
    if os.environ.get(VLLM_SWITCH):
        from specdecode.integrations import engine, vllm

        vllm.install(engine.method_of(VLLM_SWITCH))


def register_sglang() -> None:
    """Make SGLang verify with this package if `SPECDECODE_SGLANG` is set: the entry point in `sglang.srt.plugins`.

    SGLang logs exceptions of plug-ins and continues without them. A wrong value ends the process instead: a server must not
    start if it would ignore the variable.
    """
    if os.environ.get(SGLANG_SWITCH):
        from specdecode.integrations import engine, sglang

        try:
            method = engine.method_of(SGLANG_SWITCH)
        except ValueError as error:
            raise SystemExit(str(error)) from error
        sglang.install(method)
