"""Mistakes at temperature 0, of verifiers that are right at all others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode.checking.cases import GREEDY as GREEDY_CHECK
from specdecode.checking.mistakes.record import Mistake
from specdecode.checking.models import Floats, Logits, point_mass, softmax
from specdecode.checking.subject import Ids
from specdecode.checking.verifiers import TOKENS, Bools, Step, Verifier, ratio

TAKE_ARGMAX = "Accept a draft if it is the argmax of its row, else emit the argmax; after the last one, that of row K."


@dataclass(frozen=True)
class AtZero(Verifier):
    """Differs from a right verifier at temperature 0 alone."""

    def __call__(self, *arguments: Any, temperature: float = 1.0, **options: Any) -> Ids:
        """Return [n, K + 1] ids."""
        verify = super().__call__ if temperature == 0 else TOKENS
        return verify(*arguments, temperature=temperature, **options)


def greedy(sentence: str, remedy: str = TAKE_ARGMAX, **parts: Callable[..., Any]) -> Mistake:
    """Return a mistake that the greedy question alone sees."""
    verifiers = (AtZero(**parts),)
    return Mistake(f"at temperature 0 {sentence}", remedy, verifiers=verifiers, failed_checks={GREEDY_CHECK})


def drawn(logits: Logits, temperature: float) -> Floats:
    """Return the rows at temperature 1."""
    return softmax(logits)


def draft_at_1(step: Step) -> Floats:
    """Return q at temperature 1."""
    return step.draft if step.draft_logits is None else softmax(step.draft_logits)


def likelier(step: Step) -> Bools:
    """Accept if p >= q, both at temperature 1."""
    return np.asarray(step.of_drafts(softmax(step.target_logits)) >= step.of_drafts(draft_at_1(step)))


def later_rows_drawn(step: Step) -> Step:
    """Take the argmax of the first row alone."""
    target = np.concatenate([step.target[:, :1], softmax(step.target_logits[:, 1:])], axis=1)
    return step._replace(target=target, draft=np.concatenate([step.draft[:, :1], draft_at_1(step)[:, 1:]], axis=1))


def last_of_equal(logits: Logits, temperature: float) -> Floats:
    """Take the last id of the largest logit."""
    return point_mass(logits.shape[-1] - 1 - logits[..., ::-1].argmax(axis=-1), logits.shape[-1])


GREEDY = {
    "greedy_draws": greedy(
        "tokens are drawn, as at temperature 1.",
        "Take the argmax of the logits, or send temperature 0 elsewhere and raise an error here.",
        target_probs=drawn,
        draft_probs=drawn,
    ),
    "greedy_accepts_if_likelier": greedy(
        "a draft is accepted if p >= q, and not only if it is the argmax.", accepts=likelier
    ),
    "greedy_accepts_everything": greedy(
        "every draft is accepted.", accepts=lambda step: np.ones(step.drafts.shape, dtype=bool)
    ),
    "greedy_accepts_after_the_first": greedy(
        "the first draft alone is compared with the argmax: all after it are accepted.",
        accepts=lambda step: (ratio(step) >= 1) | (np.arange(step.num_drafts) > 0),
    ),
    "greedy_bonus_drawn": greedy(
        "the bonus token is drawn.", bonus=lambda step: step.row(softmax(step.target_logits), step.given)
    ),
    "greedy_first_token_alone": greedy(
        "the first token is the argmax, and all others are drawn.", changes=later_rows_drawn
    ),
    "greedy_last_of_equal_logits": greedy(
        "the last of equal logits is taken, or one of them by chance.",
        "Take the lowest id of equal logits, as argmax does: then a text does not depend on who computes it.",
        target_probs=last_of_equal,
    ),
    "greedy_divides_by_0": greedy(
        "the token after the accepted drafts is 0, or the first one with a positive logit: logits that are divided by 0 are "
        "NaN or infinite. Or it was never written.",
        "Treat temperature 0 apart, before anything is divided by it.",
        emit=lambda step, weights, accepted: 0 * accepted,
        accepts=lambda step: np.zeros(step.drafts.shape, dtype=bool),
    ),
}
