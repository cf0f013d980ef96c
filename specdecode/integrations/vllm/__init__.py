"""Verification in vLLM: classes mixed into the rejection sampler and the sampler of its V2 model runner.

| module | what it holds |
|---|---|
| `plugin` | what the switch does in each process: classes are replaced, a refusal is lifted |
| `compat` | what this package knows of vLLM: versions, and the names that its methods consult |
| `needs` | what requests ask for, as arguments of calls |
| `sampling` | what is noted of requests; the tokens of steps without drafts |
| `verification` | a step with drafts |
| `compiling` | which kernels are compiled ahead; calls whose arguments need no check |
| `splitting` | a step of which a few requests need logits that vLLM prepares |
| `listing` | what vLLM returns of rows: processed log-probabilities, sampling masks |
| `adjusting` | penalties, biases and masks, from vLLM's own state by slot |
| `masking` | the kernel that writes the masks of a step's rows |
| `grammars` | the masks of grammars, kept for the step |
| `reporting` | the log lines for operators |
"""

from specdecode.integrations.vllm.compat import RUNNER
from specdecode.integrations.vllm.plugin import install
from specdecode.integrations.vllm.reporting import logger
from specdecode.integrations.vllm.sampling import TokenSampling
from specdecode.integrations.vllm.verification import DraftVerification

__all__ = ["RUNNER", "DraftVerification", "TokenSampling", "install", "logger"]
