"""Speculative generation with Hugging Face models: batches, caches that roll back, streaming.

One step drafts up to K tokens for every request, scores them all in one call of the target and verifies them. Read the
modules in this order:

    generation         `generate`: checks its arguments, runs the loop, returns the output
    loop               a step: draft, verify, advance, realign
    requests           the requests of a batch, and the movement of their columns from step to step
    drafters           a draft model, prompt lookup, or neither
    lengths            how many drafts: planned from measured times, for `num_draft_tokens="auto"`
    models             a model with its cache, and which models are supported
    stops              stop tokens and stop strings
    generation_config  the fields of a generation config
    processors         logits processors, each row with its own prefix
    trees              only for `tree`: drafts in levels, with an attention mask
    outputs            the output and the report of each step
"""

from specdecode.integrations.transformers.drafters import PromptLookup
from specdecode.integrations.transformers.generation import generate
from specdecode.integrations.transformers.lengths import measure_cost
from specdecode.integrations.transformers.outputs import GenerationOutput, Step, TokenKind

__all__ = ["GenerationOutput", "PromptLookup", "Step", "TokenKind", "generate", "measure_cost"]
