"""Known mistakes: a sentence, what to do, where it was seen, and right verifiers with one part replaced that make it."""

from specdecode.checking.mistakes import decisions, greedy, inputs, symptoms, tokens, trees
from specdecode.checking.mistakes.record import Mistake

MISTAKES: dict[str, Mistake] = {
    **decisions.ACCEPTANCE, **tokens.RECOVERED, **tokens.BONUS, **inputs.ROWS, **inputs.TEMPERATURES, **greedy.GREEDY,
    **inputs.NO_LOGITS, **decisions.BLOCK, **decisions.OWN_SAMPLES, **inputs.DRAFTS, **trees.TREES,
    **symptoms.FAILED_CHECKS, **symptoms.ERRORS,
}  # fmt: skip
"""By their ids."""

__all__ = ["MISTAKES", "Mistake"]
