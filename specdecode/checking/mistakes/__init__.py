"""Known mistakes: each is a right verifier with one part replaced, a sentence, where it was seen, and what to do."""

from specdecode.checking.mistakes import decisions, greedy, inputs, tokens, trees
from specdecode.checking.mistakes.record import Mistake

MISTAKES: dict[str, Mistake] = {
    **decisions.ACCEPTANCE, **tokens.RECOVERED, **tokens.BONUS, **inputs.ROWS, **inputs.TEMPERATURES, **greedy.GREEDY,
    **inputs.NO_LOGITS, **decisions.BLOCK, **decisions.OWN_SAMPLES, **inputs.DRAFTS, **inputs.NOISE, **trees.TREES,
}  # fmt: skip
"""By their ids."""

__all__ = ["MISTAKES", "Mistake"]
