"""Verification for speculative decoding: which drafts stand, and which token comes next."""

from specdecode.batch import SamplerOutput
from specdecode.drafting import DraftOutput, sample
from specdecode.metrics import AcceptanceStats
from specdecode.sampler import RejectionSampler
from specdecode.synthetic import AcceptanceSchedule

__all__ = [
    "AcceptanceSchedule",
    "AcceptanceStats",
    "DraftOutput",
    "RejectionSampler",
    "SamplerOutput",
    "sample",
]
__version__ = "0.1.0"
