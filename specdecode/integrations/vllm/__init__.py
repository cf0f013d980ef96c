"""Verification in vLLM: classes mixed into the rejection sampler and the sampler of its V2 model runner.

| module | content |
|---|---|
| `plugin` | replaces classes and lifts a restriction, in each process |
| `compat` | the known names of vLLM, checks for others |
| `verification` | a step with drafts |
| `sampling` | needs and sampling parameters of requests; the tokens of steps without drafts |
| `steps` | a step as one bundle, and parts of it |
| `listing` | processed log-probabilities and sampling masks of rows |
| `adjusting` | penalties, biases and masks, from vLLM's own state by slot |
| `masking` | the kernel that writes the masks of a step's rows |
| `grammars` | the masks of grammars, kept for the step |
"""

from specdecode.integrations.vllm.compat import RUNNER, logger
from specdecode.integrations.vllm.plugin import install
from specdecode.integrations.vllm.sampling import TokenSampling
from specdecode.integrations.vllm.verification import DraftVerification

__all__ = ["RUNNER", "DraftVerification", "TokenSampling", "install", "logger"]
