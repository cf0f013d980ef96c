"""Mistakes in what is decided by: rows, temperatures, drafts."""

from collections.abc import Callable
from functools import partial

import numpy as np

from specdecode.checking.mistakes.record import wrong
from specdecode.checking.models import Floats, Logits, pick, softmax
from specdecode.checking.subject import Ids
from specdecode.checking.verifiers import (
    TOKENS,
    Bools,
    Drafter,
    Step,
    Use,
    Verifier,
    last_row,
    pick_by_gumbel,
    ratio,
    residual,
)


def unscaled(logits: Logits, temperature: float) -> Floats:
    """Leave the temperature out, unless it is 0."""
    return softmax(logits, 0 if temperature == 0 else 1)


def most_likely_half(logits: Logits, temperature: float) -> Floats:
    """Keep the more likely half of a row's tokens."""
    probs = softmax(logits, temperature)
    ranks = (-probs).argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable")
    kept = np.where(ranks < (probs.shape[-1] + 1) // 2, probs, 0)
    return np.asarray(kept / kept.sum(axis=-1, keepdims=True))


def without_last_token(logits: Logits, temperature: float) -> Floats:
    probs = softmax(logits, temperature)
    probs[..., -1] = 0
    return np.asarray(probs / np.maximum(probs.sum(axis=-1, keepdims=True), 1e-300))


def over_rows(logits: Logits, temperature: float) -> Floats:
    """Apply the softmax along the wrong axis: over the rows of a step."""
    if logits.shape[-2] == 0:
        return logits.astype(np.float64)  # no row: a maximum over none would raise
    with np.errstate(invalid="ignore"):
        probs = softmax(np.swapaxes(logits, -1, -2), temperature)
    return np.nan_to_num(np.swapaxes(probs, -1, -2))


def both(probs: Callable[[Logits, float], Floats]) -> Verifier:
    """Replace the softmax of both models."""
    return Verifier(target_probs=probs, draft_probs=probs)


def draft_rows(step: Step, row: Callable[[Ids], Ids]) -> Step:
    """Judge draft i by row `row(i)` of the draft model."""
    return step._replace(draft=step.draft[:, row(np.arange(step.num_drafts))])


def first_target_row(step: Step, rows: int | None = None) -> Step:
    """Replace rows of the target by the first one: all, or all but the last ones."""
    target = step.target.copy()
    target[:, :rows] = target[:, :1]
    return step._replace(target=target)


def by_rank(step: Step) -> Bools:
    """Judge each draft by the rows of the request whose index is the rank among the requests that go on."""
    accepts, uniforms = np.zeros(step.drafts.shape, dtype=bool), step.uniforms()
    for i in range(step.num_drafts):
        live = np.flatnonzero((step.given > i) & accepts[:, :i].all(axis=1))
        rank, token = np.arange(len(live)), step.drafts[live, i]
        accepts[live, i] = uniforms[live, i] * step.draft[rank, i, token] < step.target[rank, i, token]
    return accepts


ROWS = {
    "last_row_without_the_drafts": wrong(
        "no draft is accepted, but the token is drawn from the row after all drafts.",
        "Row i follows i accepted drafts: after none of them, draw from row 0.",
        Verifier(count=lambda step, accepts: 0 * step.given, recovered=lambda step, accepted: last_row(step)),
    ),
    "target_rows_shifted": wrong(
        "each draft is judged by the target's next row.",
        "The row that was computed before draft i was read judges it.",
        Verifier(changes=lambda step: step._replace(target=np.append(step.target[:, 1:], step.target[:, -1:], axis=1))),
    ),
    "another_draft_row": wrong(
        "each draft is judged by another row of the draft model: the first one, or the row before.",
        "Use row i of the draft for draft i.",
        Verifier(changes=lambda step: draft_rows(step, lambda i: 0 * i)),
        Verifier(changes=lambda step: draft_rows(step, lambda i: np.maximum(i - 1, 0))),
    ),
    "first_target_row_for_all": wrong(
        "each draft is judged by the target's first row.",
        "Use row i of the target for draft i, and row K for the bonus token.",
        Verifier(changes=first_target_row),
        Verifier(changes=lambda step: first_target_row(step, -1)),
        Verifier(changes=lambda step: first_target_row(draft_rows(step, lambda i: 0 * i))),
        source="a reader of the course",
    ),
    "rows_by_rank": wrong(
        "after the first draft the rows of p and q are indexed by the rank among the requests that go on.",
        "Index all arrays by the ids of the requests that go on, or compact all of them.",
        Verifier(accepts=by_rank),
        source="a reader of the course",
    ),
    "softmax_of_probabilities": wrong(
        "probabilities are passed through softmax again.",
        "Pass raw logits, or log-probabilities.",
        both(lambda logits, temperature: softmax(unscaled(logits, temperature), temperature)),
        source="probabilities taken for logits",
    ),
    "softmax_over_the_wrong_axis": wrong(
        "the softmax runs over the rows of a step, not over the vocabulary.",
        "Take the softmax along the last axis.",
        both(over_rows),
    ),
    "last_token_unreachable": wrong(
        "the last id of the vocabulary is never emitted by the target.",
        "Look for an off-by-one at the end of the row.",
        Verifier(target_probs=without_last_token),
    ),
    "always_greedy": wrong(
        "the target's argmax is emitted at every temperature.",
        "Draw at temperatures above 0.",
        Verifier(target_probs=lambda logits, temperature: softmax(logits, 0)),
        source="SGLang on ROCm, pull request 31214; LiteRT-LM issue 3017",
    ),
    "target_truncated": wrong(
        "the target's less likely tokens are left out (here: the less likely half).",
        "Truncate as plain decoding does, or not at all.",
        Verifier(target_probs=most_likely_half),
        source="a truncation that plain decoding does not have",
    ),
    "draft_truncated_when_judged": wrong(
        "q is truncated (here: to its likelier half), but the drafts were drawn before that.",
        "Judge drafts by the distribution that they were drawn from.",
        Verifier(draft_probs=most_likely_half),
        source="q taken after truncation, a public report",
    ),
}


TEMPERATURES = {
    "temperature_for_target_alone": wrong(
        "the temperature is applied to the target's logits alone.",
        "Divide the draft's logits, too, as they were when the drafts were drawn.",
        Verifier(draft_probs=unscaled),
        source="a public report of a serving engine",
    ),
    "temperature_for_draft_alone": wrong(
        "the temperature is applied to the draft's logits alone.",
        "Divide the target's logits, too.",
        Verifier(target_probs=unscaled),
    ),
    "temperature_ignored": wrong(
        "every temperature but 0 counts as 1.",
        "Divide all logits by it.",
        both(unscaled),
        source="an uninitialised temperature, vLLM on CPU",
    ),
    "temperature_multiplied": wrong(
        "logits are multiplied by the temperature.",
        "Divide by it.",
        both(lambda logits, temperature: softmax(logits, 0 if temperature == 0 else 1 / temperature)),
    ),
}


NO_LOGITS = {
    "draft_left_in_residual": wrong(
        "without draft logits, the rejected draft is left in the residual.",
        "A draft without logits is a point mass: the residual is p without it.",
        Verifier(
            recovered=lambda step, n: step.row(step.target, n) if step.draft_logits is None else residual(step, n)
        ),
    ),
    "uniform_draft_assumed": wrong(
        "without draft logits, q is taken to be uniform.",
        "A draft without logits is a point mass: q(x) = 1.",
        Verifier(draft_probs_without_logits=lambda drafts, size: np.full((*drafts.shape, size), 1 / size)),
    ),
}


def kept_while(keeps: Callable[[Step], Bools]) -> Verifier:
    """Leave out the first draft that is not kept, and all after it."""

    def cut(step: Step) -> Step:
        return step._replace(given=np.minimum(step.given, np.cumprod(keeps(step), axis=1).sum(axis=1)))

    return Verifier(changes=cut)


def planned(step: Step) -> Step:
    """Choose the length with the most expected tokens a cost, by this step's confidences."""
    survival = np.cumprod(step.draft.max(axis=2), axis=1)
    tokens = 1 + np.pad(survival.cumsum(axis=1), ((0, 0), (1, 0)))
    cost = np.where(np.arange(step.num_drafts + 1) > 0, 1.47 + 0.03 * np.arange(step.num_drafts + 1), 1)
    return step._replace(given=np.minimum(step.given, (tokens / cost).argmax(axis=1)))


def own_noise(step: Step, weights: Floats, accepted: Ids) -> Ids:
    """Draw with the number that drew the draft."""
    numbers = np.column_stack([step.uniforms(Use.DRAFT), step.uniform(0, Use.EMIT)])
    return pick(weights, numbers[step.requests, accepted])


def own_gumbel_noise(step: Step, weights: Floats, accepted: Ids) -> Ids:
    """Draw with the noise for each token that drew the draft."""
    drawn = pick(weights, step.uniform(0, Use.EMIT))
    for i in range(step.num_drafts):
        again = pick_by_gumbel(weights, partial(step.uniform, i), Use.DRAFT)
        drawn = np.where(accepted == i, again, drawn)
    return drawn


DRAFTS = {
    "drafts_are_argmax": wrong(
        "drafts are the argmax of their logits, but are judged by their probability.",
        "Draw the drafts, or pass no draft logits.",
        TOKENS,
        drafter=Drafter(probs=lambda logits, temperature: softmax(logits, 0)),
        source="jaymody/speculative-sampling issue 3",
    ),
    "drafts_without_temperature": wrong(
        "drafts are drawn at temperature 1, and judged at the temperature.",
        "Draw drafts at the temperature that they are judged at.",
        TOKENS,
        drafter=Drafter(probs=unscaled),
    ),
    "drafts_truncated": wrong(
        "drafts are drawn from a truncated row (here: its likelier half), and judged by the whole one.",
        "Judge drafts by the distribution that they were drawn from.",
        TOKENS,
        drafter=Drafter(probs=most_likely_half),
        source="transformers issue 47932",
    ),
    "drafts_left_out": wrong(
        "drafts are drawn, and left out for a reason that looks at them: they are unlikely (here: below 0.2), end the text "
        "or repeat a token.",
        "Decide before the draft is drawn, or verify it in any case, and stop after it.",
        TOKENS,
        drafter=Drafter(left_out=lambda probs, tokens: probs[np.arange(len(tokens)), tokens] < 0.2),
        source="confidence thresholds and grammars that are applied after drawing; a reader of the course",
    ),
    "drafts_cut_before_an_unlikely_one": wrong(
        "the verifier leaves out an unlikely draft, and all after it (here: q(x) is below 0.2 or 0.33, or p(x) below q(x)).",
        "Decide by anything that is known before the draft is drawn, or keep it and stop after it.",
        kept_while(lambda step: step.of_drafts(step.draft) >= 0.2),
        kept_while(lambda step: step.of_drafts(step.draft) >= 0.33),
        kept_while(lambda step: ratio(step) >= 1),
        source="confidence thresholds that are applied after drawing",
    ),
    "length_from_later_confidences": wrong(
        "the number of drafts depends on this step's later confidences (here: the largest q of each row), and those on the "
        "drafts before.",
        "Let draft i depend on rows up to i alone: stop at the first length that does not pay, or fix the budget before.",
        Verifier(changes=planned),
        source="planners that use this step's confidences",
    ),
    "recovered_with_the_drafts_noise": wrong(
        "the noise that drew the draft is used again for the recovered token.",
        "Use noise of its own for the recovered token.",
        Verifier(emit=own_noise),
        drafter=Drafter(),
        source="vLLM pull request 54282",
    ),
    "recovered_with_the_drafts_gumbel_noise": wrong(
        "the Gumbel noise that drew the draft is used again for the recovered token.",
        "Use noise of its own for the recovered token.",
        Verifier(emit=own_gumbel_noise),
        drafter=Drafter(draw=pick_by_gumbel),
        source="vLLM pull request 54282",
    ),
}
