"""Known mistakes: each is a right verifier with one part replaced, a sentence, where it was seen, and what to do."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specdecode.checking.models import softmax
from specdecode.checking.subject import Ids
from specdecode.checking.verifiers import (
    BLOCKS,
    STRICT,
    TOKENS,
    Bools,
    Drafter,
    Floats,
    Logits,
    Step,
    Use,
    Verifier,
    block_acceptance,
    hashed,
    or_target,
    pick,
    point_mass,
    ratio,
    residual,
    running_ratios,
)

EASY = "easily made; no public report known to us"
THRESHOLD = 0.3
MIN_P = 0.2


class Mistake(NamedTuple):
    """A mistake and how to know it."""

    sentence: str
    source: str
    remedy: str
    verifier: Verifier
    drafter: Drafter | None = None
    """Where the mistake is in the drafts, or needs them."""

    signature: frozenset[str] = frozenset()
    """The checks that fail, where that and not the distribution tells it."""


# --- Parts with mistakes -----------------------------------------------------------------------------------------------


def sorted_rank(probs: Floats) -> Ids:
    """Return the rank of each token, 0 for the most likely."""
    return np.asarray((-probs).argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable"))


def most_likely_half(logits: Logits, temperature: float) -> Floats:
    """Keep the larger half of a row's tokens."""
    probs = softmax(logits, temperature)
    kept = np.where(sorted_rank(probs) < (probs.shape[-1] + 1) // 2, probs, 0)
    return np.asarray(kept / kept.sum(axis=-1, keepdims=True))


def min_p(probs: Floats) -> Floats:
    """Drop tokens far below the most likely one."""
    return np.where(probs >= MIN_P * probs.max(axis=-1, keepdims=True), probs, 0)


def argmax(weights: Floats) -> Floats:
    """Put all weight on the largest."""
    return point_mass(weights.argmax(axis=1), weights.shape[1])


def unscaled(logits: Logits, temperature: float) -> Floats:
    """Leave the temperature out, unless it is 0."""
    return softmax(logits, 0 if temperature == 0 else 1)


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


def one_uniform(step: Step) -> Bools:
    """Compare every draft with one number."""
    return np.asarray(step.uniform(0, Use.ACCEPT)[:, None] < ratio(step))


def row_before(rows: Floats, offsets: Ids) -> Ids:
    return np.maximum(offsets - 1, 0)


def shifted_target(step: Step) -> Step:
    """Judge each draft by the target row after it."""
    rows = np.concatenate([step.target[:, 1:], step.target[:, -1:]], axis=1)
    return step._replace(target=rows)


def first_draft_row(step: Step) -> Step:
    return step._replace(draft=np.broadcast_to(step.draft[:, :1], step.draft.shape))


def previous_draft_row(step: Step) -> Step:
    return step._replace(draft=np.concatenate([step.draft[:, :1], step.draft[:, :-1]], axis=1))


def difference(step: Step, accepted: Ids) -> Floats:
    """Return p - q of the row of the rejected draft."""
    return step.row(step.target, accepted) - step.row(step.draft, accepted)


def same_uniform(step: Step, weights: Floats, accepted: Ids) -> Ids:
    """Draw with the number that rejected the draft."""
    numbers = np.column_stack([step.uniforms(), step.uniform(0, Use.EMIT)])
    return pick(weights, numbers[step.requests, accepted])


def own_noise(step: Step, weights: Floats, accepted: Ids) -> Ids:
    """Draw with the number that drew the draft."""
    numbers = np.column_stack([step.uniforms(Use.DRAFT), step.uniform(0, Use.EMIT)])
    return pick(weights, numbers[step.requests, accepted])


def emit_rejected(step: Step, weights: Floats, accepted: Ids) -> Ids:
    """Return the draft even where it was rejected."""
    padded = np.column_stack([step.drafts, step.drafts[:, :0].sum(axis=1)])
    return np.where(accepted < step.given, padded[step.requests, accepted], pick(weights, step.uniform(0, Use.EMIT)))


def strict_shared(step: Step) -> Ids:
    """Sample every row of the target with one number."""
    rows = range(step.num_drafts + 1)
    return np.stack([pick(step.target[:, i], step.uniform(0, Use.OWN)) for i in rows], axis=1)


def mass_over_ratio(step: Step) -> Floats:
    """Accept each length of a block with its ratio."""
    return running_ratios(step)[:, 1:]


def uncut_ratios(step: Step) -> Floats:
    """Leave the minimum out: the product of p / q."""
    return np.concatenate([np.ones((len(step.drafts), 1)), np.cumprod(ratio(step), axis=1)], axis=1)


def uncut_residual(step: Step, accepted: Ids) -> Floats:
    weights = uncut_ratios(step)[step.requests, accepted][:, None] * step.row(step.target, accepted)
    return or_target(step, accepted, np.maximum(0, weights - step.row(step.draft, accepted)))


def uncut_acceptance(step: Step) -> Floats:
    ratios = uncut_ratios(step)
    result = ratios[:, 1:].copy()
    for i in range(1, step.num_drafts):
        mass = np.maximum(0, ratios[:, i, None] * step.target[:, i] - step.draft[:, i]).sum(axis=1)
        h = mass / np.maximum(mass + np.maximum(0, 1 - ratios[:, i]), 1e-300)
        result[:, i - 1] = np.where(i < step.given, h, ratios[:, i])
    return result


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


def overflowing(logits: Logits, temperature: float) -> Floats:
    """Leave the row's maximum in the exponential; what float32 makes of it."""
    if temperature == 0:
        return softmax(logits, 0)
    with np.errstate(all="ignore"):
        weights = np.exp(logits / np.float32(temperature))
        probs: Floats = np.nan_to_num(weights / weights.sum(axis=-1, keepdims=True), nan=0.0).astype(np.float64)
        return probs


@dataclass(frozen=True)
class GoesOn(Verifier):
    """Keeps the drafts after a rejected one."""

    def __call__(self, target_logits: Logits, draft_token_ids: Ids, *others: Any, **options: Any) -> Ids:
        """Return ids that are no output of a verification."""
        token_ids = super().__call__(target_logits, draft_token_ids, *others, **options)
        return np.where(token_ids == -1, np.pad(draft_token_ids, ((0, 0), (0, 1)), constant_values=-1), token_ids)


# --- The list ----------------------------------------------------------------------------------------------------------

ACCEPTANCE = {
    "accept_everything": Mistake(
        "every draft is accepted, whatever the target says.",
        "vllm-ascend",
        "Compare a uniform number with p / q at every draft; check that a kernel is not a stub.",
        Verifier(accepts=lambda step: np.ones(step.drafts.shape, dtype=bool)),
    ),
    "accept_inverted_ratio": Mistake(
        "drafts are accepted with q / p.",
        "p and q are swapped between papers and engines",
        "Accept with min(1, p / q): p is the target's.",
        Verifier(accepts=lambda step: step.uniforms() * step.of_drafts(step.target) < step.of_drafts(step.draft)),
    ),
    "accept_complement": Mistake(
        "drafts are accepted where they should be rejected.",
        EASY,
        "Accept if u < p / q, not if u > p / q.",
        Verifier(accepts=lambda step: step.uniforms() >= ratio(step)),
    ),
    "accept_with_target_probability": Mistake(
        "drafts that were drawn are accepted with p(x), as a point mass would be, but the residual is max(0, p - q).",
        "drafts drawn and judged as a point mass",
        "Divide by q(x); or treat q as a point mass in both places.",
        Verifier(accepts=lambda step: step.uniforms() < step.of_drafts(step.target)),
    ),
    "accept_if_likelier": Mistake(
        "a draft is accepted if p >= q, and never by chance.",
        EASY,
        "If p < q, accept with probability p / q.",
        Verifier(accepts=lambda step: ratio(step) >= 1),
    ),
    "accept_if_likely": Mistake(
        f"a draft is accepted if p(x) is at least {THRESHOLD}, whatever q is, else by p / q.",
        "thresholds for lossy acceptance, such as SGLang's threshold_single",
        "Leave such thresholds at their neutral value.",
        Verifier(accepts=lambda step: (step.of_drafts(step.target) >= THRESHOLD) | (step.uniforms() < ratio(step))),
    ),
    "accept_argmax": Mistake(
        "a draft is accepted if it is the target's argmax, but the other tokens are drawn.",
        "greedy acceptance under sampling",
        "Compare with the target's own sample, or accept with min(1, p / q).",
        Verifier(
            accepts=lambda step: step.target[:, :-1].argmax(axis=2) == step.drafts,
            recovered=lambda s, n: s.row(s.target, n),
        ),
    ),
    "uniform_without_logarithm": Mistake(
        "the uniform number is compared with log p - log q, without its logarithm.",
        EASY,
        "Compare log u with log p - log q.",
        Verifier(accepts=lambda step: step.uniforms() < np.log(np.maximum(ratio(step), 1e-300))),
    ),
    "one_uniform_for_all_drafts": Mistake(
        "one uniform number decides about all drafts of a step.",
        "a public report of a serving engine",
        "Draw a number for each draft.",
        Verifier(accepts=one_uniform),
    ),
}

RECOVERED = {
    "recovered_from_target": Mistake(
        "after a rejection the recovered token is drawn from p, not from the residual. To accept another draft of the "
        "same row by the same p / q comes to the same.",
        "several public reports; TensorRT-LLM's trees at one time",
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
    "goes_on_after_a_rejection": Mistake(
        "after the recovered token further drafts are emitted.",
        EASY,
        "Stop at the first rejection: the drafts after it follow a text that is not there.",
        GoesOn(),
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
    "bonus_argmax": Mistake(
        "the bonus token is the argmax.",
        "greedy fallbacks",
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

ROWS = {
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
    "previous_draft_row": Mistake(
        "each draft is judged by the draft model's row before.",
        EASY,
        "Use row i of the draft for draft i.",
        Verifier(changes=previous_draft_row),
    ),
    "softmax_of_probabilities": Mistake(
        "probabilities are passed through softmax again.",
        "probabilities taken for logits",
        "Pass raw logits, or log-probabilities.",
        Verifier(target_probs=twice, draft_probs=twice),
    ),
    "last_token_unreachable": Mistake(
        "the last id of the vocabulary is never emitted by the target.",
        EASY,
        "Look for an off-by-one at the end of the row.",
        Verifier(target_probs=without_last_token),
    ),
    "always_greedy": Mistake(
        "the target's argmax is emitted at every temperature.",
        "SGLang on ROCm",
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

BLOCK = {
    "block_residual_unscaled": Mistake(
        "block verification, but the recovered token is drawn from max(0, p - q), without the running ratio.",
        EASY,
        "Draw it with weights max(0, c p - q).",
        Verifier(BLOCKS.target_probs, accepts=BLOCKS.accepts, count=BLOCKS.count),
    ),
    "block_ratio_not_cut": Mistake(
        "block verification, but the running ratio is not cut at 1.",
        EASY,
        "c = min(1, c p / q) after every draft.",
        Verifier(
            accepts=lambda step: step.uniforms() < uncut_acceptance(step), count=BLOCKS.count, recovered=uncut_residual
        ),
    ),
    "block_accepts_with_ratio": Mistake(
        "block verification, but each length is accepted with its running ratio.",
        EASY,
        "Accept length i < K with A / (A + 1 - c), where A is the mass of max(0, c p - q).",
        Verifier(
            accepts=lambda step: step.uniforms() < mass_over_ratio(step), count=BLOCKS.count, recovered=BLOCKS.recovered
        ),
    ),
    "block_stops_at_first_failure": Mistake(
        "block verification, but the search stops at the first length that fails.",
        EASY,
        "A failure at one length does not end the search: take the largest length that is accepted.",
        Verifier(accepts=BLOCKS.accepts, recovered=BLOCKS.recovered),
    ),
    "block_one_uniform": Mistake(
        "block verification, but one uniform number decides about all lengths.",
        EASY,
        "Draw a number for each length.",
        Verifier(
            accepts=lambda step: step.uniform(0, Use.ACCEPT)[:, None] < block_acceptance(step),
            count=BLOCKS.count,
            recovered=BLOCKS.recovered,
        ),
    ),
}

OWN_SAMPLES = {
    "strict_one_noise_for_all_rows": Mistake(
        "drafts are compared with the target's own samples, but these are drawn with one number for all rows.",
        EASY,
        "Draw each position's sample with noise of its own.",
        Verifier(
            accepts=lambda step: strict_shared(step)[:, :-1] == step.drafts,
            recovered=lambda step, n: point_mass(strict_shared(step)[step.requests, n], step.target.shape[2]),
            bonus=lambda step: point_mass(strict_shared(step)[step.requests, step.given], step.target.shape[2]),
        ),
    ),
    "strict_draws_again": Mistake(
        "a draft that differs from the target's own sample is replaced by a second sample.",
        EASY,
        "Emit the very sample that the draft was compared with.",
        Verifier(accepts=STRICT.accepts, recovered=lambda step, accepted: step.row(step.target, accepted)),
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
        "q taken before truncation, a public report",
        "Judge drafts by the distribution that they were drawn from.",
        TOKENS,
        Drafter(probs=most_likely_half),
    ),
    "drafts_left_out": Mistake(
        "drafts are drawn, and left out if they are unlikely (here: below 0.2).",
        "confidence thresholds and grammars that are applied after drawing",
        "Decide before the draft is drawn, or verify it in any case.",
        TOKENS,
        Drafter(left_out=lambda probs, tokens: probs[np.arange(len(tokens)), tokens] < 0.2),
    ),
    "recovered_with_the_drafts_noise": Mistake(
        "the noise that drew the draft is used again for the recovered token.",
        "vLLM pull request 54282",
        "Use noise of its own for the recovered token.",
        Verifier(emit=own_noise),
        Drafter(),
    ),
}

NOISE = {
    "one_noise_for_a_call": Mistake(
        "all requests of a call have the same random numbers.", "a public report",
        "Draw for each request, or make its seed part of the key.", Verifier(noise=in_one_call),
        signature=frozenset({"requests of a call"}),
    ),
    "noise_starts_again_at_every_call": Mistake(
        "every call has the same random numbers, a request's depending on its place alone.",
        "seeds that depend on the slot, a public report", "Make the generator once, or use each request's seed.",
        Verifier(noise=by_slot), signature=frozenset({"calls", "steps"}),
    ),
    "noise_by_slot": Mistake(
        "a request's random numbers depend on its place and position, not on its seed.",
        "seeds that depend on the slot or the batch, a public report", "Use each request's seed.",
        Verifier(noise=by_slot_and_position), signature=frozenset({"calls"}),
    ),
    "positions_do_not_advance": Mistake(
        "two steps of a request with one seed have the same random numbers.", "a public report of a serving engine",
        "Make the absolute position part of what the noise depends on.", Verifier(noise=without_position),
        signature=frozenset({"steps"}),
    ),
    "softmax_overflows": Mistake(
        "the softmax does not subtract the row's maximum, and overflows.", "float16 overflow",
        "Subtract the maximum before the exponential.", Verifier(target_probs=overflowing, draft_probs=overflowing),
        signature=frozenset({"large logits"}),
    ),
}  # fmt: skip

MISTAKES: dict[str, Mistake] = {
    **ACCEPTANCE, **RECOVERED, **BONUS, **ROWS, **TEMPERATURES, **NO_LOGITS, **BLOCK, **OWN_SAMPLES, **DRAFTS, **NOISE,
}  # fmt: skip
"""By their ids."""
