"""Mistakes in what is decided by: rows, temperatures, drafts, random numbers."""

import numpy as np

from specdecode.checking.mistakes.record import EASY, Mistake, unscaled
from specdecode.checking.models import softmax
from specdecode.checking.subject import Ids
from specdecode.checking.verifiers import (
    TOKENS,
    Bools,
    Drafter,
    Floats,
    GumbelDrafter,
    Logits,
    Step,
    Use,
    Verifier,
    gumbel,
    hashed,
    last_row,
    log,
    pick,
    ratio,
    residual,
)


def sorted_rank(probs: Floats) -> Ids:
    """Return the rank of each token, 0 for the most likely."""
    return np.asarray((-probs).argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable"))


def most_likely_half(logits: Logits, temperature: float) -> Floats:
    """Keep the larger half of a row's tokens."""
    probs = softmax(logits, temperature)
    kept = np.where(sorted_rank(probs) < (probs.shape[-1] + 1) // 2, probs, 0)
    return np.asarray(kept / kept.sum(axis=-1, keepdims=True))


def multiplied(logits: Logits, temperature: float) -> Floats:
    """Multiply by the temperature."""
    return softmax(logits, 0 if temperature == 0 else 1 / temperature)


def twice(logits: Logits, temperature: float) -> Floats:
    """Apply the softmax to probabilities."""
    return softmax(softmax(logits, 0 if temperature == 0 else 1), temperature)


def without_last_token(logits: Logits, temperature: float) -> Floats:
    """Leave the last id out."""
    probs = softmax(logits, temperature)
    probs[..., -1] = 0
    return np.asarray(probs / np.maximum(probs.sum(axis=-1, keepdims=True), 1e-300))


def shifted_target(step: Step) -> Step:
    """Judge each draft by the target row after it."""
    rows = np.concatenate([step.target[:, 1:], step.target[:, -1:]], axis=1)
    return step._replace(target=rows)


def first_draft_row(step: Step) -> Step:
    return step._replace(draft=np.broadcast_to(step.draft[:, :1], step.draft.shape))


def first_target_row(step: Step, rows: int | None = None) -> Step:
    """Replace rows of the target by the first one: all, or all but the last ones."""
    target = step.target.copy()
    target[:, :rows] = target[:, :1]
    return step._replace(target=target)


def kept_while(step: Step, kept: Bools) -> Step:
    """Leave out the first draft that is not to be kept, and all after it."""
    return step._replace(given=np.minimum(step.given, np.cumprod(kept, axis=1).sum(axis=1)))


def planned(step: Step) -> Step:
    """Choose the length with the most expected tokens a cost, by this step's confidences."""
    survival = np.cumprod(step.draft.max(axis=2), axis=1)
    tokens = 1 + np.pad(survival.cumsum(axis=1), ((0, 0), (1, 0)))
    cost = np.where(np.arange(step.num_drafts + 1) > 0, 1.47 + 0.03 * np.arange(step.num_drafts + 1), 1)
    return step._replace(given=np.minimum(step.given, (tokens / cost).argmax(axis=1)))


def previous_draft_row(step: Step) -> Step:
    return step._replace(draft=np.concatenate([step.draft[:, :1], step.draft[:, :-1]], axis=1))


def by_rank(step: Step) -> Bools:
    """Judge each draft by the rows of the request whose index is the rank among the requests that go on."""
    accepts, uniforms = np.zeros(step.drafts.shape, dtype=bool), step.uniforms()
    for i in range(step.num_drafts):
        live = np.flatnonzero((step.given > i) & accepts[:, :i].all(axis=1))
        rank, token = np.arange(len(live)), step.drafts[live, i]
        accepts[live, i] = uniforms[live, i] * step.draft[rank, i, token] < step.target[rank, i, token]
    return accepts


def own_noise(step: Step, weights: Floats, accepted: Ids) -> Ids:
    """Draw with the number that drew the draft."""
    numbers = np.column_stack([step.uniforms(Use.DRAFT), step.uniform(0, Use.EMIT)])
    return pick(weights, numbers[step.requests, accepted])


def own_gumbel_noise(step: Step, weights: Floats, accepted: Ids) -> Ids:
    """Draw with the noise for each token that drew the draft."""
    drawn = pick(weights, step.uniform(0, Use.EMIT))
    for i in range(step.num_drafts):
        noise = gumbel(lambda use, i=i: step.uniform(i, use), Use.DRAFT, weights.shape[1])  # type: ignore[misc]
        drawn = np.where(accepted == i, (log(weights) + noise).argmax(axis=1), drawn)
    return drawn


def over_rows(logits: Logits, temperature: float) -> Floats:
    """Apply the softmax along the wrong axis: over the rows of a step."""
    if logits.shape[-2] == 0:
        return logits.astype(np.float64)  # no row: a maximum over none would raise
    with np.errstate(invalid="ignore"):
        probs = softmax(np.swapaxes(logits, -1, -2), temperature)
    return np.nan_to_num(np.swapaxes(probs, -1, -2))


def in_one_call(seeds: Ids, positions: Ids, offset: int, use: int) -> Floats:
    """Give all requests of a call the numbers of its first."""
    return np.broadcast_to(hashed(seeds[:1], positions[:1], offset, use), seeds.shape)


def by_slot(seeds: Ids, positions: Ids, offset: int, use: int) -> Floats:
    """Leave the seed out: the place in the batch decides."""
    return hashed(np.arange(len(seeds)), np.zeros_like(positions), offset, use)


def by_slot_and_position(seeds: Ids, positions: Ids, offset: int, use: int) -> Floats:
    return hashed(np.arange(len(seeds)), positions, offset, use)


def without_position(seeds: Ids, positions: Ids, offset: int, use: int) -> Floats:
    return hashed(seeds, np.zeros_like(positions), offset, use)


def of_sum(seeds: Ids, positions: Ids, offset: int, use: int) -> Floats:
    return hashed(seeds + positions, np.zeros_like(positions), offset, use)


def at_positions(seeds: Ids, positions: Ids, offset: int, use: int) -> Floats:
    """Give each position numbers of its own, whatever step has it."""
    return hashed(seeds, positions + offset, 0, use)


def of_position_k(step: Step, weights: Floats, accepted: Ids) -> Ids:
    """Draw with the number that would accept a draft at position K."""
    return pick(weights, step.uniform(step.num_drafts, Use.ACCEPT))


def overflowing(logits: Logits, temperature: float) -> Floats:
    """Leave the row's maximum in the exponential; what float32 makes of it."""
    if temperature == 0:
        return softmax(logits, 0)
    with np.errstate(all="ignore"):
        weights = np.exp(logits / np.float32(temperature))
        probs: Floats = np.nan_to_num(weights / weights.sum(axis=-1, keepdims=True), nan=0.0).astype(np.float64)
        return probs


ROWS = {
    "last_row_without_the_drafts": Mistake(
        "no draft is accepted, but the token is drawn from the row after all drafts.",
        EASY,
        "Row i follows i accepted drafts: after none of them, draw from row 0.",
        Verifier(count=lambda step, accepts: 0 * step.given, recovered=lambda step, accepted: last_row(step)),
    ),
    "target_rows_shifted": Mistake(
        "each draft is judged by the target's next row.",
        EASY,
        "The row that was computed before draft i was read judges it.",
        Verifier(changes=shifted_target),
    ),
    "first_draft_row_for_all": Mistake(
        "each draft is judged by the draft model's first row.",
        EASY,
        "Use row i of the draft for draft i.",
        Verifier(changes=first_draft_row),
    ),
    "first_target_row_for_all": Mistake(
        "each draft is judged by the target's first row.",
        "a reader of the course",
        "Use row i of the target for draft i, and row K for the bonus token.",
        Verifier(changes=first_target_row),
        forms=(
            Verifier(changes=lambda step: first_target_row(step, -1)),
            Verifier(changes=lambda step: first_target_row(first_draft_row(step))),
        ),
    ),
    "previous_draft_row": Mistake(
        "each draft is judged by the draft model's row before.",
        EASY,
        "Use row i of the draft for draft i.",
        Verifier(changes=previous_draft_row),
    ),
    "rows_by_rank": Mistake(
        "after the first draft the rows of p and q are indexed by the rank among the requests that go on.",
        "a reader of the course",
        "Index all arrays by the ids of the requests that go on, or compact all of them.",
        Verifier(accepts=by_rank),
    ),
    "softmax_of_probabilities": Mistake(
        "probabilities are passed through softmax again.",
        "probabilities taken for logits",
        "Pass raw logits, or log-probabilities.",
        Verifier(target_probs=twice, draft_probs=twice),
    ),
    "softmax_over_the_wrong_axis": Mistake(
        "the softmax runs over the rows of a step, not over the vocabulary.",
        EASY,
        "Take the softmax along the last axis.",
        Verifier(target_probs=over_rows, draft_probs=over_rows),
    ),
    "last_token_unreachable": Mistake(
        "the last id of the vocabulary is never emitted by the target.",
        EASY,
        "Look for an off-by-one at the end of the row.",
        Verifier(target_probs=without_last_token),
    ),
    "always_greedy": Mistake(
        "the target's argmax is emitted at every temperature.",
        "SGLang on ROCm, pull request 31214; LiteRT-LM issue 3017",
        "Draw at temperatures above 0.",
        Verifier(target_probs=lambda logits, temperature: softmax(logits, 0)),
    ),
    "target_truncated": Mistake(
        "the target's less likely tokens are left out (here: the less likely half).",
        "a truncation that plain decoding does not have",
        "Truncate as plain decoding does, or not at all.",
        Verifier(target_probs=most_likely_half),
    ),
    "draft_truncated_when_judged": Mistake(
        "q is truncated (here: to its likelier half), but the drafts were drawn before that.",
        "q taken after truncation, a public report",
        "Judge drafts by the distribution that they were drawn from.",
        Verifier(draft_probs=most_likely_half),
    ),
}


TEMPERATURES = {
    "temperature_for_target_alone": Mistake(
        "the temperature is applied to the target's logits alone.",
        "a public report of a serving engine",
        "Divide the draft's logits, too, as they were when the drafts were drawn.",
        Verifier(draft_probs=unscaled),
    ),
    "temperature_for_draft_alone": Mistake(
        "the temperature is applied to the draft's logits alone.",
        EASY,
        "Divide the target's logits, too.",
        Verifier(target_probs=unscaled),
    ),
    "temperature_ignored": Mistake(
        "every temperature but 0 counts as 1.",
        "an uninitialised temperature, vLLM on CPU",
        "Divide all logits by it.",
        Verifier(target_probs=unscaled, draft_probs=unscaled),
    ),
    "temperature_multiplied": Mistake(
        "logits are multiplied by the temperature.",
        EASY,
        "Divide by it.",
        Verifier(target_probs=multiplied, draft_probs=multiplied),
    ),
}


NO_LOGITS = {
    "draft_left_in_residual": Mistake(
        "without draft logits, the rejected draft is left in the residual.",
        EASY,
        "A draft without logits is a point mass: the residual is p without it.",
        Verifier(
            recovered=lambda step, n: residual(step, n) if step.draft_logits is not None else step.row(step.target, n)
        ),
    ),
    "uniform_draft_assumed": Mistake(
        "without draft logits, q is taken to be uniform.",
        EASY,
        "A draft without logits is a point mass: q(x) = 1.",
        Verifier(certain=lambda drafts, vocab_size: np.full((*drafts.shape, vocab_size), 1 / vocab_size)),
    ),
}


DRAFTS = {
    "drafts_are_argmax": Mistake(
        "drafts are the argmax of their logits, but are judged by their probability.",
        "jaymody/speculative-sampling issue 3",
        "Draw the drafts, or pass no draft logits.",
        TOKENS,
        Drafter(probs=lambda logits, temperature: softmax(logits, 0)),
    ),
    "drafts_without_temperature": Mistake(
        "drafts are drawn at temperature 1, and judged at the temperature.",
        EASY,
        "Draw drafts at the temperature that they are judged at.",
        TOKENS,
        Drafter(probs=unscaled),
    ),
    "drafts_truncated": Mistake(
        "drafts are drawn from a truncated row (here: its likelier half), and judged by the whole one.",
        "transformers issue 47932",
        "Judge drafts by the distribution that they were drawn from.",
        TOKENS,
        Drafter(probs=most_likely_half),
    ),
    "drafts_left_out": Mistake(
        "drafts are drawn, and left out for a reason that looks at them: they are unlikely (here: below 0.2), end the text "
        "or repeat a token.",
        "confidence thresholds and grammars that are applied after drawing; a reader of the course",
        "Decide before the draft is drawn, or verify it in any case, and stop after it.",
        TOKENS,
        Drafter(left_out=lambda probs, tokens: probs[np.arange(len(tokens)), tokens] < 0.2),
    ),
    "drafts_cut_before_an_unlikely_one": Mistake(
        "the verifier leaves out an unlikely draft, and all after it (here: q(x) is below 0.2 or 0.33, or p(x) below q(x)).",
        "confidence thresholds that are applied after drawing",
        "Decide by anything that is known before the draft is drawn, or keep it and stop after it.",
        Verifier(changes=lambda step: kept_while(step, step.of_drafts(step.draft) >= 0.2)),
        forms=(
            Verifier(changes=lambda step: kept_while(step, step.of_drafts(step.draft) >= 0.33)),
            Verifier(changes=lambda step: kept_while(step, ratio(step) >= 1)),
        ),
    ),
    "length_from_later_confidences": Mistake(
        "the number of drafts depends on this step's later confidences (here: the largest q of each row), and those on the "
        "drafts before.",
        "planners that use this step's confidences",
        "Let draft i depend on rows up to i alone: stop at the first length that does not pay, or fix the budget before.",
        Verifier(changes=planned),
    ),
    "recovered_with_the_drafts_noise": Mistake(
        "the noise that drew the draft is used again for the recovered token.",
        "vLLM pull request 54282",
        "Use noise of its own for the recovered token.",
        Verifier(emit=own_noise),
        Drafter(),
    ),
    "recovered_with_the_drafts_gumbel_noise": Mistake(
        "the Gumbel noise that drew the draft is used again for the recovered token.",
        "vLLM pull request 54282",
        "Use noise of its own for the recovered token.",
        Verifier(emit=own_gumbel_noise),
        GumbelDrafter(),
    ),
}


NOISE = {
    "one_noise_for_a_call": Mistake(
        "all requests of a call have the same random numbers.",
        "TensorRT-LLM issue 19487: requests without a seed share one stream",
        "Draw for each request, or make its seed part of the key.",
        Verifier(noise=in_one_call),
        signature=frozenset({"requests of a call"}),
    ),
    "noise_starts_again_at_every_call": Mistake(
        "every call has the same random numbers, a request's depending on its place alone.",
        "seeds that depend on the slot, a public report",
        "Make the generator once, or use each request's seed.",
        Verifier(noise=by_slot),
        signature=frozenset({"calls", "steps"}),
    ),
    "noise_by_slot": Mistake(
        "a request's random numbers depend on its place and position, not on its seed.",
        "seeds that depend on the slot or the batch, a public report",
        "Use each request's seed.",
        Verifier(noise=by_slot_and_position),
        signature=frozenset({"calls"}),
    ),
    "positions_do_not_advance": Mistake(
        "two steps of a request with one seed have the same random numbers.",
        "a public report of a serving engine",
        "Make the absolute position part of what the noise depends on.",
        Verifier(noise=without_position),
        signature=frozenset({"steps"}),
    ),
    "noise_of_seed_plus_position": Mistake(
        "random numbers depend on seed + position alone, so the request with the next seed has them one position earlier.",
        "a reader of the course",
        "Make the key of both numbers, such as `default_rng([seed, position])`, not of their sum.",
        Verifier(noise=of_sum),
        signature=frozenset({"seed + position"}),
    ),
    "noise_used_again_in_the_next_step": Mistake(
        "the token after the accepted drafts is drawn with the number of a later position, which the next step uses, too.",
        "a reader of the course",
        "Use the number of the token's own position, with another use than the acceptance of a draft there.",
        Verifier(emit=of_position_k, noise=at_positions),
        signature=frozenset({"last tokens"}),
    ),
    "softmax_overflows": Mistake(
        "the softmax does not subtract the row's maximum, and overflows.",
        "float16 overflow",
        "Subtract the maximum before the exponential.",
        Verifier(target_probs=overflowing, draft_probs=overflowing),
        signature=frozenset({"large logits"}),
    ),
}
