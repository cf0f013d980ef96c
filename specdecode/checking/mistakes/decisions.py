"""Mistakes in deciding which drafts are accepted: by tokens, by blocks, and by the target's own samples."""

from collections.abc import Callable

import numpy as np

from specdecode.checking.mistakes.record import EASY, Mistake
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
    gumbel,
    last_row,
    leading,
    log,
    or_target,
    pick,
    ratio,
    residual,
    running_ratios,
)

THRESHOLD = 0.3


def one_uniform(step: Step) -> Bools:
    """Compare every draft with one number."""
    return np.asarray(step.uniform(0, Use.ACCEPT)[:, None] < ratio(step))


def strict_shared(step: Step) -> Ids:
    """Sample every row of the target with one number."""
    rows = range(step.num_drafts + 1)
    return np.stack([pick(step.target[:, i], step.uniform(0, Use.OWN)) for i in rows], axis=1)


def strict_shared_gumbel(step: Step) -> Ids:
    """Sample every row of the target with one number for each token."""
    noise = gumbel(lambda use: step.uniform(0, use), Use.OWN, step.target.shape[2])
    return np.asarray((log(step.target) + noise[:, None]).argmax(axis=2))


def strict_with(samples: Callable[[Step], Ids]) -> Verifier:
    """Compare drafts with the target's own samples, however they are drawn."""

    def emitted(step: Step, places: Ids) -> Floats:
        return point_mass(samples(step)[step.requests, places], step.target.shape[2])

    return Verifier(
        accepts=lambda step: samples(step)[:, :-1] == step.drafts,
        recovered=emitted,
        bonus=lambda step: emitted(step, step.given),
    )


def ratios_alone(step: Step) -> Floats:
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


def all_accepted(step: Step, accepts: Bools) -> Ids:
    """Count what is accepted, also after a rejection."""
    return np.asarray((accepts & (np.arange(step.num_drafts) < step.given[:, None])).sum(axis=1))


def one_more(step: Step, accepts: Bools) -> Ids:
    """Count the first rejected draft as accepted."""
    return np.minimum(leading(step, accepts) + 1, step.given)


def after_one_more(step: Step) -> Floats:
    """Return the bonus weights, or the residual of the last draft if that was rejected."""
    accepted_all = leading(step, accept_by_ratio(step)) == step.given
    return np.where(accepted_all[:, None], last_row(step), residual(step, np.maximum(step.given - 1, 0)))


ACCEPTANCE = {
    "accept_everything": Mistake(
        "every draft is accepted, whatever the target says.",
        "vllm-ascend issue 13730",
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
        "drafts are accepted where they should be rejected: the uniform number is compared with p / q the wrong way round.",
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
    "accepted_after_a_rejection": Mistake(
        "accepted drafts are counted, also those after a rejection.",
        EASY,
        "Count up to the first rejection: the cumulative product, not the sum.",
        Verifier(count=all_accepted),
    ),
    "rejected_draft_kept": Mistake(
        "the first rejected draft is kept, and the recovered token comes after it: off by one in the accepted slice.",
        "a reader of the course",
        "If draft i is rejected, keep drafts[:i], and emit one token of row i.",
        Verifier(
            count=one_more,
            recovered=lambda step, accepted: residual(step, accepted - 1),
            bonus=after_one_more,
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


BLOCK = {
    "block_residual_unscaled": Mistake(
        "block verification, but the recovered token is drawn from max(0, p - q), without the running ratio.",
        EASY,
        "Draw it with weights max(0, c p - q).",
        Verifier(accepts=BLOCKS.accepts, count=BLOCKS.count),
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
            accepts=lambda step: step.uniforms() < ratios_alone(step), count=BLOCKS.count, recovered=BLOCKS.recovered
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
        strict_with(strict_shared),
    ),
    "strict_one_gumbel_noise_for_all_rows": Mistake(
        "drafts are compared with the target's own samples, but these are drawn with the same Gumbel noise in all rows.",
        EASY,
        "Draw each position's sample with noise of its own.",
        strict_with(strict_shared_gumbel),
    ),
    "strict_draws_again": Mistake(
        "a draft that differs from the target's own sample is replaced by a second sample.",
        EASY,
        "Emit the very sample that the draft was compared with.",
        Verifier(accepts=STRICT.accepts, recovered=lambda step, accepted: step.row(step.target, accepted)),
    ),
}
