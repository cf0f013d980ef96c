"""Verification for speculative decoding: accept or reject drafts, and draw the next token.

The public names are imported at first use, so that `specdecode --help` does not wait for PyTorch.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from specdecode.adjustments import Adjustments
    from specdecode.batch import SamplerOutput, Sampling, TreeOutput
    from specdecode.drafting import DraftOutput, sample
    from specdecode.metrics import AcceptanceRecord, AcceptanceStats
    from specdecode.planning import DraftPlanner, plan
    from specdecode.sampler import RejectionSampler
    from specdecode.sharding import VocabShard
    from specdecode.synthetic import AcceptanceSchedule

__all__ = [
    "AcceptanceRecord",
    "AcceptanceSchedule",
    "AcceptanceStats",
    "Adjustments",
    "DraftOutput",
    "DraftPlanner",
    "RejectionSampler",
    "SamplerOutput",
    "Sampling",
    "TreeOutput",
    "VocabShard",
    "plan",
    "sample",
]
__version__ = "0.1.0"

_MODULES = {
    "AcceptanceRecord": "metrics",
    "AcceptanceSchedule": "synthetic",
    "AcceptanceStats": "metrics",
    "Adjustments": "adjustments",
    "DraftOutput": "drafting",
    "DraftPlanner": "planning",
    "RejectionSampler": "sampler",
    "SamplerOutput": "batch",
    "Sampling": "batch",
    "TreeOutput": "batch",
    "VocabShard": "sharding",
    "plan": "planning",
    "sample": "drafting",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # cached: this function is called once for each name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
