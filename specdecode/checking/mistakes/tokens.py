"""Mistakes in the token that is emitted after the accepted drafts."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode.checking.mistakes.record import EASY, Mistake, unscaled
from specdecode.checking.models import point_mass
from specdecode.checking.subject import Ids
from specdecode.checking.verifiers import Floats, Logits, Step, Use, Verifier, or_target, pick, residual

MIN_P, CONSTANT = 0.2, 1e-3


def min_p(probs: Floats) -> Floats:
    """Drop tokens far below the most likely one."""
    return np.where(probs >= MIN_P * probs.max(axis=-1, keepdims=True), probs, 0)


def argmax(weights: Floats) -> Floats:
    """Put all weight on the largest."""
    return point_mass(weights.argmax(axis=1), weights.shape[1])


def difference(step: Step, accepted: Ids) -> Floats:
    """Return p - q of the row of the rejected draft."""
    return step.row(step.target, accepted) - step.row(step.draft, accepted)


def with_the_rest(weights: Floats, token: int) -> Floats:
    """Give a token what is missing to a sum of 1."""
    weights[:, token] += np.maximum(0, 1 - weights.sum(axis=1))
    return weights


def same_uniform(step: Step, weights: Floats, accepted: Ids) -> Ids:
    """Draw with the number that rejected the draft."""
    numbers = np.column_stack([step.uniforms(), step.uniform(0, Use.EMIT)])
    return pick(weights, numbers[step.requests, accepted])


def emit_rejected(step: Step, weights: Floats, accepted: Ids) -> Ids:
    """Return the draft even where it was rejected."""
    return np.where(accepted < step.given, step.draft_at(accepted), pick(weights, step.uniform(0, Use.EMIT)))


@dataclass(frozen=True)
class GoesOn(Verifier):
    """Keeps the drafts after a rejected one."""

    def __call__(self, target_logits: Logits, draft_token_ids: Ids, *others: Any, **options: Any) -> Ids:
        """Return ids that are no output of a verification."""
        token_ids = super().__call__(target_logits, draft_token_ids, *others, **options)
        return np.where(token_ids == -1, np.pad(draft_token_ids, ((0, 0), (0, 1)), constant_values=-1), token_ids)


@dataclass(frozen=True)
class Minus1(Verifier):
    """Reads -1 as the last token's index, as NumPy does."""

    def __call__(self, target_logits: Logits, draft_token_ids: Ids, *others: Any, **options: Any) -> Ids:
        """Return ids that are no output of a verification where there is a -1."""
        token_ids = super().__call__(target_logits, draft_token_ids % target_logits.shape[2], *others, **options)
        accepted = token_ids[:, 1:] != -1
        return np.column_stack([np.where(accepted, draft_token_ids, token_ids[:, :-1]), token_ids[:, -1]])


@dataclass(frozen=True)
class AcceptedAlone(Verifier):
    """Returns the accepted drafts and nothing after them."""

    def __call__(self, *arguments: Any, **options: Any) -> Ids:
        """Return ids that are no output of a verification."""
        token_ids = super().__call__(*arguments, **options)
        last = (token_ids != -1).sum(axis=1, keepdims=True) - 1
        return np.where(np.arange(token_ids.shape[1]) < last, token_ids, -1)


@dataclass(frozen=True)
class ReturnsNothing(Verifier):
    """Verifies, and returns None."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return None."""


@dataclass(frozen=True)
class Draws(Verifier):
    """Draws with weights that are no probabilities."""

    weights: tuple[float, float] = (np.nan, np.nan)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Raise, as NumPy does."""
        return np.random.default_rng(0).choice(2, p=self.weights)


RECOVERED = {
    "recovered_from_target": Mistake(
        "after a rejection the recovered token is drawn from p, not from the residual. Two rules come to the same: to "
        "accept another draft of the row by the same p / q, and to cut the drafts after the decisions, before the first "
        "rejected one, and draw a bonus token.",
        "several public reports, such as Spec-RL issue 14; TensorRT-LLM's trees at one time",
        "Draw it with weights max(0, p - q); judge a sibling in a tree by them, too.",
        Verifier(recovered=lambda step, accepted: step.row(step.target, accepted)),
    ),
    "recovered_from_absolute_difference": Mistake(
        "the recovered token is drawn from |p - q|.",
        "a public report",
        "Draw it with weights max(0, p - q).",
        Verifier(recovered=lambda step, accepted: abs(difference(step, accepted))),
    ),
    "recovered_from_draft": Mistake(
        "the recovered token is drawn from q.",
        EASY,
        "Draw it with weights max(0, p - q).",
        Verifier(recovered=lambda step, accepted: step.row(step.draft, accepted)),
    ),
    "recovered_from_reversed_difference": Mistake(
        "the recovered token is drawn from max(0, q - p).",
        EASY,
        "Draw it with weights max(0, p - q).",
        Verifier(
            recovered=lambda step, accepted: or_target(step, accepted, np.maximum(0, -difference(step, accepted)))
        ),
    ),
    "recovered_argmax": Mistake(
        "the recovered token is the argmax of the residual.",
        EASY,
        "Draw it with the residual's weights.",
        Verifier(recovered=lambda step, accepted: argmax(residual(step, accepted))),
    ),
    "recovered_target_argmax": Mistake(
        "the recovered token is the argmax of p.",
        "greedy fallbacks",
        "Draw it with weights max(0, p - q).",
        Verifier(recovered=lambda step, accepted: argmax(step.row(step.target, accepted))),
    ),
    "recovered_not_normalised": Mistake(
        "the residual is not divided by its sum: what is missing to 1 goes to the first token, or to the last.",
        "a reader of the course",
        "Compare the uniform number, times the sum of the residual, with the cumulative sum.",
        Verifier(recovered=lambda step, accepted: with_the_rest(residual(step, accepted), 0)),
        forms=(Verifier(recovered=lambda step, accepted: with_the_rest(residual(step, accepted), -1)),),
    ),
    "recovered_with_a_constant": Mistake(
        f"a constant (here {CONSTANT}) is added to each weight of the residual, also to those that are 0.",
        "a reader of the course",
        "Add nothing: a token whose residual is 0, such as the rejected draft, must not be emitted.",
        Verifier(recovered=lambda step, accepted: residual(step, accepted) + CONSTANT),
    ),
    "recovered_from_logits": Mistake(
        "the recovered token is drawn from the softmax of the difference of the logits.",
        EASY,
        "Subtract probabilities, not logits: max(0, p - q).",
        Verifier(
            recovered=lambda step, n: np.asarray(
                np.nan_to_num(step.row(step.target, n) / np.maximum(step.row(step.draft, n), 1e-9))
            )
        ),
    ),
    "recovered_from_next_row": Mistake(
        "the residual is that of the row after the rejected draft.",
        "the residual of the wrong row, a public report",
        "Use row i of both models for draft i.",
        Verifier(recovered=lambda step, n: residual(step, np.minimum(n + 1, step.num_drafts))),
    ),
    "recovered_from_next_target_row": Mistake(
        "the residual has p of the row after the rejected draft, and q of its own.",
        "the residual of the wrong row, a public report",
        "Use row i of both models for draft i.",
        Verifier(
            recovered=lambda step, n: or_target(
                step, n, np.maximum(0, step.row(step.target, n + 1) - step.row(step.draft, n))
            )
        ),
    ),
    "recovered_from_first_row": Mistake(
        "the residual is that of the step's first row.",
        "the residual of the wrong row, a public report",
        "Use row i of both models for draft i.",
        Verifier(recovered=lambda step, accepted: residual(step, 0 * accepted)),
    ),
    "recovered_draft_kept": Mistake(
        "the rejected draft itself is emitted.",
        EASY,
        "Emit a token of the residual in its place.",
        Verifier(emit=emit_rejected),
    ),
    "recovered_minus_one_probability": Mistake(
        "the recovered token is drawn from p without the rejected draft, or with its q alone subtracted, though q has other "
        "tokens, too.",
        "rotalabs-accel 1.1.1",
        "Subtract the whole row: max(0, p - q).",
        Verifier(
            recovered=lambda step, n: or_target(
                step,
                n,
                np.maximum(
                    0,
                    step.row(step.target, n)
                    - step.row(step.draft, n) * point_mass(step.draft_at(n), step.target.shape[2]),
                ),
            )
        ),
    ),
    "goes_on_after_a_rejection": Mistake(
        "after the recovered token further drafts are emitted.",
        EASY,
        "Stop at the first rejection: the drafts after it follow a text that is not there.",
        GoesOn(),
        signature=frozenset({"an error"}),
    ),
    "no_token_after_the_drafts": Mistake(
        "no token of the target's follows the accepted drafts: the recovered one or the bonus token is missing.",
        EASY,
        "Emit one token more than there are accepted drafts, also if there are none.",
        AcceptedAlone(),
        signature=frozenset({"an error"}),
    ),
    "no_return": Mistake(
        "a function returns None.",
        "a reader of the course",
        "Return its result: look for a forgotten `return`, or for one branch without it.",
        ReturnsNothing(),
        signature=frozenset({"an error"}),
    ),
    "nan_probabilities": Mistake(
        "a token is drawn with probabilities that are NaN.",
        "a reader of the course",
        "Look for a division by 0, such as a residual of 0, q = 0 or a temperature of 0, and for rows of -inf.",
        Draws(),
        signature=frozenset({"an error"}),
    ),
    "negative_probabilities": Mistake(
        "a token is drawn with probabilities that are negative.",
        "a reader of the course",
        "Cut the residual at 0: max(0, p - q).",
        Draws(weights=(-1.0, 2.0)),
        signature=frozenset({"an error"}),
    ),
    "minus_1_is_an_index": Mistake(
        "a draft id of -1, which means that there is no draft, is used as an index.",
        "vLLM pull request 46533",
        "Let -1 end the request's drafts. If all have the same number, raise an error for -1: it is not asked then.",
        Minus1(),
        signature=frozenset({"an error"}),
    ),
    "recovered_with_the_accept_noise": Mistake(
        "the number that rejected the draft is used again to draw the recovered token.",
        EASY,
        "Use a number of its own for each decision.",
        Verifier(emit=same_uniform),
    ),
}


BONUS = {
    "bonus_from_last_draft_row": Mistake(
        "the bonus token is drawn from the row of the last draft.",
        "a public report",
        "Row i judges draft i; the bonus token comes from row K.",
        Verifier(bonus=lambda step: step.row(step.target, np.maximum(step.given - 1, 0))),
    ),
    "bonus_from_first_row": Mistake(
        "the bonus token is drawn from the first row.",
        EASY,
        "The bonus token comes from row K.",
        Verifier(bonus=lambda step: step.row(step.target, 0)),
    ),
    "bonus_from_draft": Mistake(
        "the bonus token is drawn from the draft model.",
        EASY,
        "The bonus token comes from p, row K.",
        Verifier(
            bonus=lambda step: step.row(step.draft if step.num_drafts else step.target, np.maximum(step.given - 1, 0))
        ),
    ),
    "last_token_argmax": Mistake(
        "the token after the accepted drafts is an argmax, of the residual or of p.",
        "a reader of the course",
        "Draw it: after a rejection with weights max(0, p - q), after all drafts from p, row K.",
        Verifier(emit=lambda step, weights, accepted: weights.argmax(axis=1)),
        forms=(Verifier(emit=lambda step, weights, accepted: step.row(step.target, accepted).argmax(axis=1)),),
    ),
    "bonus_argmax": Mistake(
        "the bonus token is the argmax.",
        "kronk pull request 788",
        "Draw it from p, row K.",
        Verifier(bonus=lambda step: argmax(step.row(step.target, step.given))),
    ),
    "bonus_without_temperature": Mistake(
        "the bonus token is drawn at temperature 1.",
        "a public report of a serving engine",
        "Divide the last row's logits by the temperature, too.",
        Verifier(bonus=lambda step: step.row(unscaled(step.target_logits, step.temperature), step.given)),
    ),
    "bonus_truncated": Mistake(
        f"the bonus token alone is truncated, as by min-p {MIN_P}.",
        "min_p applied to the bonus token alone, a public report",
        "Truncate every row alike, before the drafts are judged.",
        Verifier(bonus=lambda step: min_p(step.row(step.target, step.given))),
    ),
    "bonus_from_last_slot": Mistake(
        "a request with fewer drafts than others draws its bonus token from the last row.",
        EASY,
        "Draw it from the row after the request's own last draft.",
        Verifier(bonus=lambda step: step.row(step.target, step.num_drafts)),
    ),
}
