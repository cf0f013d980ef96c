"""Speculative generation with Hugging Face models: batches, caches that roll back, streaming.

One step drafts up to K tokens for every request, scores them all in one call of the target and lets the sampler decide. Read
the modules in this order:

    generation         `generate`: checks its arguments, starts the loop, returns the output
    loop               the steps: draft, verify, advance, realign
    stops              what ends a text: stop tokens and stop strings
    requests           the requests of a batch, and where their columns go from step to step
    drafters           a draft model, prompt lookup, or neither
    lookup             prompt lookup itself
    models             a model with its cache: what it is given, and how rejected drafts are removed again
    supported          which models can be used, and why others are refused
    arguments          the checks of the other arguments
    generation_config  what a generation config asks for
    adjustments        what of it the sampler applies itself
    outputs            what is returned
"""

from specdecode.integrations.transformers.generation import generate
from specdecode.integrations.transformers.lookup import PromptLookup
from specdecode.integrations.transformers.outputs import GenerationOutput, Step, TokenKind

__all__ = ["GenerationOutput", "PromptLookup", "Step", "TokenKind", "generate"]
