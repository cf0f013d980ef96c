"""Mistakes in deciding which drafts are accepted: by tokens, by blocks, and by the target's own samples."""

from dataclasses import replace
from functools import partial

import numpy as np

from specdecode.checking.mistakes.record import wrong
from specdecode.checking.models import Floats, pick
from specdecode.checking.verifiers import (
    BLOCKS,
    STRICT,
    Bools,
    Step,
    Use,
    Verifier,
    accept_by_ratio,
    block_acceptance,
    block_verifier,
    last_row,
    leading,
    pick_by_gumbel,
    ratio,
    residual,
    running_ratios,
    strict_verifier,
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


BLOCK = {
    "block_residual_unscaled": wrong(
        "block verification, but the recovered token is drawn from max(0, p - q), without the running ratio.",
        "Draw it with weights max(0, c p - q).",
        replace(BLOCKS, recovered=residual),
    ),
    "block_ratio_not_cut": wrong(
        "block verification, but the running ratio is not cut at 1.",
        "c = min(1, c p / q) after every draft.",
        block_verifier(most=np.inf),
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


OWN_SAMPLES = {
    "strict_one_noise_for_all_rows": wrong(
        "drafts are compared with the target's own samples, but these are drawn with the same noise in all rows.",
        "Draw each position's sample with noise of its own.",
        strict_verifier(lambda step, i: pick(step.target[:, i], step.uniform(0, Use.OWN))),
        strict_verifier(lambda step, i: pick_by_gumbel(step.target[:, i], partial(step.uniform, 0), Use.OWN)),
    ),
    "strict_draws_again": wrong(
        "a draft that differs from the target's own sample is replaced by a second sample.",
        "Emit the very sample that the draft was compared with.",
        Verifier(accepts=STRICT.accepts, recovered=lambda step, accepted: step.row(step.target, accepted)),
    ),
}
