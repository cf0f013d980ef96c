"""Mistakes in the token that is emitted after the accepted drafts."""

from collections.abc import Callable

import numpy as np

from specdecode.checking.mistakes.inputs import unscaled
from specdecode.checking.mistakes.record import wrong
from specdecode.checking.models import Floats, pick, point_mass
from specdecode.checking.subject import Ids
from specdecode.checking.verifiers import Step, Use, Verifier, or_target, residual

MIN_P, CONSTANT = 0.2, 1e-3
DRAW_RESIDUAL = "Draw it with weights max(0, p - q)."


def p_of(step: Step, accepted: Ids) -> Floats:
    """Return p of the row of the rejected draft, or of the row after all drafts."""
    return step.row(step.target, accepted)


def q_of(step: Step, accepted: Ids) -> Floats:
    """Return q of the row of the rejected draft."""
    return step.row(step.draft, accepted)


def positive_part(difference: Callable[[Step, Ids], Floats]) -> Verifier:
    """Draw the recovered token with weights max(0, difference), or from p if they are all 0."""
    return Verifier(
        recovered=lambda step, accepted: or_target(step, accepted, np.maximum(0, difference(step, accepted)))
    )


def argmax(weights: Floats) -> Floats:
    """Put all weight on the largest."""
    return point_mass(weights.argmax(axis=1), weights.shape[1])


def min_p(probs: Floats) -> Floats:
    """Drop tokens far below the most likely one."""
    return np.where(probs >= MIN_P * probs.max(axis=-1, keepdims=True), probs, 0)


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


RECOVERED = {
    "recovered_from_target": wrong(
        "after a rejection the recovered token is drawn from p, not from the residual. Two rules come to the same: to "
        "accept another draft of the row by the same p / q, and to cut the drafts after the decisions, before the first "
        "rejected one, and draw a bonus token.",
        "Draw it with weights max(0, p - q); judge a sibling in a tree by them, too.",
        Verifier(recovered=p_of),
        source="several public reports, such as Spec-RL issue 14; TensorRT-LLM's trees at one time",
    ),
    "recovered_from_absolute_difference": wrong(
        "the recovered token is drawn from |p - q|.",
        DRAW_RESIDUAL,
        Verifier(recovered=lambda step, accepted: abs(p_of(step, accepted) - q_of(step, accepted))),
        source="a public report",
    ),
    "recovered_from_draft": wrong(
        "the recovered token is drawn from q.",
        DRAW_RESIDUAL,
        Verifier(recovered=q_of),
    ),
    "recovered_from_reversed_difference": wrong(
        "the recovered token is drawn from max(0, q - p).",
        DRAW_RESIDUAL,
        positive_part(lambda step, accepted: q_of(step, accepted) - p_of(step, accepted)),
    ),
    "recovered_argmax": wrong(
        "the recovered token is an argmax, of the residual or of p.",
        DRAW_RESIDUAL,
        Verifier(recovered=lambda step, accepted: argmax(residual(step, accepted))),
        Verifier(recovered=lambda step, accepted: argmax(p_of(step, accepted))),
        source="greedy fallbacks",
    ),
    "recovered_not_normalised": wrong(
        "the residual is not divided by its sum: what is missing to 1 goes to the first token, or to the last.",
        "Compare the uniform number, times the sum of the residual, with the cumulative sum.",
        Verifier(recovered=lambda step, accepted: with_the_rest(residual(step, accepted), 0)),
        Verifier(recovered=lambda step, accepted: with_the_rest(residual(step, accepted), -1)),
        source="a reader of the course",
    ),
    "recovered_with_a_constant": wrong(
        f"a constant (here {CONSTANT}) is added to each weight of the residual, also to those that are 0.",
        "Add nothing: a token whose residual is 0, such as the rejected draft, must not be emitted.",
        Verifier(recovered=lambda step, accepted: residual(step, accepted) + CONSTANT),
        source="a reader of the course",
    ),
    "recovered_from_logits": wrong(
        "the recovered token is drawn from the softmax of the difference of the logits.",
        "Subtract probabilities, not logits: max(0, p - q).",
        Verifier(
            recovered=lambda step, accepted: np.nan_to_num(
                p_of(step, accepted) / np.maximum(q_of(step, accepted), 1e-9)
            )
        ),
    ),
    "recovered_from_another_row": wrong(
        "the residual is that of the step's first row or of the next row, or it has p of the next row and q of its own.",
        "Use row i of both models for draft i.",
        Verifier(recovered=lambda step, accepted: residual(step, 0 * accepted)),
        Verifier(recovered=lambda step, accepted: residual(step, np.minimum(accepted + 1, step.num_drafts))),
        positive_part(lambda step, accepted: p_of(step, accepted + 1) - q_of(step, accepted)),
        source="the residual of the wrong row, a public report",
    ),
    "recovered_draft_kept": wrong(
        "the rejected draft itself is emitted.",
        "Emit a token of the residual in its place.",
        Verifier(emit=emit_rejected),
    ),
    "recovered_minus_one_probability": wrong(
        "the recovered token is drawn from p without the rejected draft, or with its q alone subtracted, though q has other "
        "tokens, too.",
        "Subtract the whole row: max(0, p - q).",
        positive_part(
            lambda step, accepted: (
                p_of(step, accepted) - q_of(step, accepted) * point_mass(step.draft_at(accepted), step.target.shape[2])
            )
        ),
        source="rotalabs-accel 1.1.1",
    ),
    "recovered_with_the_accept_noise": wrong(
        "the number that rejected the draft is used again to draw the recovered token.",
        "Use a number of its own for each decision.",
        Verifier(emit=same_uniform),
    ),
}


BONUS = {
    "bonus_from_another_row": wrong(
        "the bonus token is drawn from the row of the last draft, or from the first row.",
        "Row i judges draft i; the bonus token comes from row K.",
        Verifier(bonus=lambda step: p_of(step, np.maximum(step.given - 1, 0))),
        Verifier(bonus=lambda step: step.row(step.target, 0)),
        source="a public report",
    ),
    "bonus_from_draft": wrong(
        "the bonus token is drawn from the draft model.",
        "The bonus token comes from p, row K.",
        Verifier(
            bonus=lambda step: step.row(step.draft if step.num_drafts else step.target, np.maximum(step.given - 1, 0))
        ),
    ),
    "last_token_argmax": wrong(
        "the token after the accepted drafts is an argmax, of the residual or of p.",
        "Draw it: after a rejection with weights max(0, p - q), after all drafts from p, row K.",
        Verifier(emit=lambda step, weights, accepted: weights.argmax(axis=1)),
        Verifier(emit=lambda step, weights, accepted: p_of(step, accepted).argmax(axis=1)),
        source="a reader of the course",
    ),
    "bonus_argmax": wrong(
        "the bonus token is the argmax.",
        "Draw it from p, row K.",
        Verifier(bonus=lambda step: argmax(p_of(step, step.given))),
        source="kronk pull request 788",
    ),
    "bonus_without_temperature": wrong(
        "the bonus token is drawn at temperature 1.",
        "Divide the last row's logits by the temperature, too.",
        Verifier(bonus=lambda step: step.row(unscaled(step.target_logits, step.temperature), step.given)),
        source="a public report of a serving engine",
    ),
    "bonus_truncated": wrong(
        f"the bonus token alone is truncated, as by min-p {MIN_P}.",
        "Truncate every row alike, before the drafts are judged.",
        Verifier(bonus=lambda step: min_p(p_of(step, step.given))),
        source="min_p applied to the bonus token alone, a public report",
    ),
    "bonus_from_last_slot": wrong(
        "a request with fewer drafts than others draws its bonus token from the last row.",
        "Draw it from the row after the request's own last draft.",
        Verifier(bonus=lambda step: step.row(step.target, step.num_drafts)),
    ),
}
