"""Mistakes in deciding which drafts are accepted: by tokens, by blocks, and by the target's own samples."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from specdecode.checking.mistakes.record import wrong
from specdecode.checking.models import point_mass
from specdecode.checking.subject import Ids
from specdecode.checking.verifiers import (
    BLOCKS,
    STRICT,
    Bools,
    Floats,
    Step,
    Use,
    Verifier,
    accept_by_ratio,
    block_acceptance,
    last_row,
    leading,
    or_target,
    pick,
    pick_by_gumbel,
    ratio,
    residual,
    running_ratios,
)

THRESHOLD = 0.3


def all_accepted(step: Step) -> Bools:
    return np.ones(step.drafts.shape, dtype=bool)


def after_one_more(step: Step) -> Floats:
    """Return the bonus weights, or the residual of the last draft if that was rejected."""
    accepted_all = leading(step, accept_by_ratio(step)) == step.given
    return np.where(accepted_all[:, None], last_row(step), residual(step, np.maximum(step.given - 1, 0)))


ACCEPTANCE = {
    "accept_everything": wrong(
        "every draft is accepted, whatever the target says.",
        "Compare a uniform number with p / q at every draft; check that a kernel is not a stub.",
        Verifier(accepts=all_accepted),
        source="vllm-ascend issue 13730",
    ),
    "accept_inverted_ratio": wrong(
        "drafts are accepted with q / p.",
        "Accept with min(1, p / q): p is the target's.",
        Verifier(accepts=lambda step: step.uniforms() * step.of_drafts(step.target) < step.of_drafts(step.draft)),
        source="p and q are swapped between papers and engines",
    ),
    "accept_complement": wrong(
        "drafts are accepted where they should be rejected: the uniform number is compared with p / q the wrong way round.",
        "Accept if u < p / q, not if u > p / q.",
        Verifier(accepts=lambda step: step.uniforms() >= ratio(step)),
    ),
    "accept_with_target_probability": wrong(
        "drafts that were drawn are accepted with p(x), as a point mass would be, but the residual is max(0, p - q).",
        "Divide by q(x); or treat q as a point mass in both places.",
        Verifier(accepts=lambda step: step.uniforms() < step.of_drafts(step.target)),
        source="drafts drawn and judged as a point mass",
    ),
    "accept_if_likelier": wrong(
        "a draft is accepted if p >= q, and never by chance.",
        "If p < q, accept with probability p / q.",
        Verifier(accepts=lambda step: ratio(step) >= 1),
    ),
    "accept_if_likely": wrong(
        f"a draft is accepted if p(x) is at least {THRESHOLD}, whatever q is, else by p / q.",
        "Leave such thresholds at their neutral value.",
        Verifier(accepts=lambda step: (step.of_drafts(step.target) >= THRESHOLD) | (step.uniforms() < ratio(step))),
        source="thresholds for lossy acceptance, such as SGLang's threshold_single",
    ),
    "accept_argmax": wrong(
        "a draft is accepted if it is the target's argmax, but the other tokens are drawn.",
        "Compare with the target's own sample, or accept with min(1, p / q).",
        Verifier(
            accepts=lambda step: step.target[:, :-1].argmax(axis=2) == step.drafts,
            recovered=lambda step, accepted: step.row(step.target, accepted),
        ),
        source="greedy acceptance under sampling",
    ),
    "accepted_after_a_rejection": wrong(
        "accepted drafts are counted, also those after a rejection.",
        "Count up to the first rejection: the cumulative product, not the sum.",
        Verifier(
            count=lambda step, accepts: (accepts & (np.arange(step.num_drafts) < step.given[:, None])).sum(axis=1)
        ),
    ),
    "rejected_draft_kept": wrong(
        "the first rejected draft is kept, and the recovered token comes after it: off by one in the accepted slice.",
        "If draft i is rejected, keep drafts[:i], and emit one token of row i.",
        Verifier(
            count=lambda step, accepts: np.minimum(leading(step, accepts) + 1, step.given),
            recovered=lambda step, accepted: residual(step, accepted - 1),
            bonus=after_one_more,
        ),
        source="a reader of the course",
    ),
    "uniform_without_logarithm": wrong(
        "the uniform number is compared with log p - log q, without its logarithm.",
        "Compare log u with log p - log q.",
        Verifier(accepts=lambda step: step.uniforms() < np.log(np.maximum(ratio(step), 1e-300))),
    ),
    "one_uniform_for_all_drafts": wrong(
        "one uniform number decides about all drafts of a step.",
        "Draw a number for each draft.",
        Verifier(accepts=lambda step: step.uniform(0, Use.ACCEPT)[:, None] < ratio(step)),
        source="a public report of a serving engine",
    ),
}


def uncut_ratios(step: Step) -> Floats:
    """Return running ratios without the minimum: the product of p / q."""
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


BLOCK = {
    "block_residual_unscaled": wrong(
        "block verification, but the recovered token is drawn from max(0, p - q), without the running ratio.",
        "Draw it with weights max(0, c p - q).",
        replace(BLOCKS, recovered=residual),
    ),
    "block_ratio_not_cut": wrong(
        "block verification, but the running ratio is not cut at 1.",
        "c = min(1, c p / q) after every draft.",
        replace(BLOCKS, accepts=lambda step: step.uniforms() < uncut_acceptance(step), recovered=uncut_residual),
    ),
    "block_accepts_with_ratio": wrong(
        "block verification, but each length is accepted with its running ratio.",
        "Accept length i < K with A / (A + 1 - c), where A is the mass of max(0, c p - q).",
        replace(BLOCKS, accepts=lambda step: step.uniforms() < running_ratios(step)[:, 1:]),
    ),
    "block_stops_at_first_failure": wrong(
        "block verification, but the search stops at the first length that fails.",
        "A failure at one length does not end the search: take the largest length that is accepted.",
        replace(BLOCKS, count=leading),
    ),
    "block_one_uniform": wrong(
        "block verification, but one uniform number decides about all lengths.",
        "Draw a number for each length.",
        replace(BLOCKS, accepts=lambda step: step.uniform(0, Use.ACCEPT)[:, None] < block_acceptance(step)),
    ),
}


def from_samples(sample: Callable[[Step, Floats], Ids]) -> Verifier:
    """Return strict verification with `sample(step, row)` as the target's own samples."""

    def samples(step: Step) -> Ids:
        return np.stack([sample(step, step.target[:, i]) for i in range(step.num_drafts + 1)], axis=1)

    def emitted(step: Step, places: Ids) -> Floats:
        return point_mass(samples(step)[step.requests, places], step.target.shape[2])

    return Verifier(
        accepts=lambda step: samples(step)[:, :-1] == step.drafts,
        recovered=emitted,
        bonus=lambda step: emitted(step, step.given),
    )


OWN_SAMPLES = {
    "strict_one_noise_for_all_rows": wrong(
        "drafts are compared with the target's own samples, but these are drawn with the same noise in all rows.",
        "Draw each position's sample with noise of its own.",
        from_samples(lambda step, row: pick(row, step.uniform(0, Use.OWN))),
        from_samples(lambda step, row: pick_by_gumbel(row, lambda use: step.uniform(0, use), Use.OWN)),
    ),
    "strict_draws_again": wrong(
        "a draft that differs from the target's own sample is replaced by a second sample.",
        "Emit the very sample that the draft was compared with.",
        Verifier(accepts=STRICT.accepts, recovered=lambda step, accepted: step.row(step.target, accepted)),
    ),
}
