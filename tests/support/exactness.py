"""Cases small enough to enumerate, the reference's methods, and the exact acceptance of each."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from reference import oracle, philox
from tests.support.enumeration import (
    Case,
    Domains,
    decode,
    distribution,
    history,
    iid,
    marginal,
    most_likely,
    sequence_distribution,
    shared_selection,
    total_variation,
)

EXACT = 1e-12
"""Two distributions, in float64 and in fractions, are the same up to this total variation; the largest seen is 3e-16."""

CASES = {
    "iid-V3-K2": Case(iid(1, 2, 3), iid(3, 1, 1), (2,), 3),
    "iid-V2-K3": Case(iid(1, 3), iid(2, 1), (3,), 4),
    "iid-V4-K1": Case(iid(1, 2, 3, 4), iid(4, 1, 1, 1), (1,), 2),
    "history-V3-K2": Case(history(1, 3), history(2, 3), (2,), 3),
    "history-V2-K3": Case(history(3, 2), history(4, 2), (3,), 4),
    "history-V3-K3": Case(history(5, 3, zeros=1), history(6, 3, zeros=1), (3,), 4),
    "history-V4-K1": Case(history(7, 4), history(8, 4), (1,), 2),
    "same-models": Case(history(1, 3), history(1, 3), (2,), 3),
    "disjoint-supports": Case(iid(1, 2, 0, 0), iid(0, 0, 1, 2), (2,), 3),
    "truncated-supports": Case(history(1, 4, zeros=2), history(2, 4, zeros=1), (2,), 3),
    "point-mass-draft": Case(history(1, 3), most_likely(history(2, 3)), (2,), 3),
    "point-mass-target": Case(most_likely(history(1, 3)), history(2, 3), (2,), 3),
    "ragged-1-of-3": Case(history(1, 3), history(2, 3), (1,), 3, slots=3),
    "ragged-2-of-4": Case(history(1, 3), history(2, 3), (2,), 3, slots=4),
    "ragged-0-of-2": Case(history(1, 3), history(2, 3), (0,), 2, slots=2),
    "temperature-0.6": Case(history(1, 3), history(2, 3), (2,), 3, temperature=0.6),
    "temperature-2": Case(history(1, 3), history(2, 3), (2,), 3, temperature=2.0),
    "one-more-token": Case(history(1, 3), history(2, 3), (1,), 3),
    "steps-history": Case(history(1, 3), history(2, 3), (2, 1), 4),
    "steps-iid": Case(iid(1, 2), iid(3, 1), (2, 2), 4),
}


# --- Verification methods, and the exact acceptance of each -----------------------------------------------------------


class Method(NamedTuple):
    """A method of the oracle, the noise domains of its drafts, and its exact acceptance."""

    verify: Callable
    domains: Domains
    accepted_distribution: Callable[[Case], dict]
    """Returns the distribution of the number of drafts that the first step accepts."""


def overlap(target_row: list, draft_row: list) -> list:
    """Return min(p, q) of each token: P(it is drafted and accepted) with draft logits."""
    return [min(p, q) for p, q in zip(target_row, draft_row)]


def agreement(target_row: list, draft_row: list) -> list:
    """Return p q of each token: P(it is drafted and accepted) with independent noise."""
    return [p * q for p, q in zip(target_row, draft_row)]


def coupled(target_row: list, draft_row: list) -> list:
    """Return P(both rows select the token) of each token, with shared noise."""
    joint = shared_selection(target_row, draft_row)
    return [joint[token][token] for token in range(len(target_row))]


def accepted_distribution(case: Case, accepted_draft: Callable) -> dict[int, Fraction]:
    """Return the distribution of the number of accepted drafts.

    `accepted_draft(p, q)[v]` is P(token v is drafted and accepted) for a target and a draft row.
    """
    reached, at_least = {(): Fraction(1)}, [Fraction(1)]
    for _ in range(case.drafts[0]):
        reached = {
            (*prefix, token): probability * share
            for prefix, probability in reached.items()
            for token, share in enumerate(accepted_draft(case.target(prefix), case.draft(prefix)))
        }
        at_least.append(sum(reached.values()))
    return differences(at_least)


def differences(at_least: list[Fraction]) -> dict[int, Fraction]:
    """Return P(N = n) of each n, from P(N >= n)."""
    return {n: here - after for n, (here, after) in enumerate(zip(at_least, [*at_least[1:], 0]))}


def accepted_blocks(case: Case) -> list[dict]:
    """Return P(the block x is drafted, and i drafts or more are accepted) for each length i and block x of i drafts.

    It is Q(x) c_i(x), where Q(x) is the probability that the block x is drafted and c_i the running ratio. By
    c_{i+1} = min(1, c_i p(v) / q(v)), the block followed by the token v has the probability min(Q q(v), Q c_i p(v)).
    """
    drafted, accepted = {(): Fraction(1)}, [{(): Fraction(1)}]
    for _ in range(case.drafts[0]):
        longer = {}
        for prefix, probability in accepted[-1].items():
            for token, (p, q) in enumerate(zip(case.target(prefix), case.draft(prefix))):
                drafted[*prefix, token] = drafted[prefix] * q
                longer[*prefix, token] = min(drafted[prefix] * q, probability * p)
        accepted.append(longer)
    return accepted


def accepted_distribution_of_blocks(case: Case) -> dict[int, Fraction]:
    """Return the distribution of the number of accepted drafts of block verification."""
    return differences([sum(blocks.values()) for blocks in accepted_blocks(case)])


def verify_probabilistic(target_logits, draft_token_ids, draft_logits, **keywords):
    return oracle.verify("probabilistic", target_logits, draft_token_ids, draft_logits, **keywords)


def verify_without_draft_logits(target_logits, draft_token_ids, draft_logits, **keywords):
    return oracle.verify("probabilistic", target_logits, draft_token_ids, **keywords)


def verify_block(target_logits, draft_token_ids, draft_logits, **keywords):
    return oracle.verify("block", target_logits, draft_token_ids, draft_logits, **keywords)


def verify_block_without_draft_logits(target_logits, draft_token_ids, draft_logits, **keywords):
    return oracle.verify("block", target_logits, draft_token_ids, **keywords)


def fresh_domains(offset: int) -> tuple[int, int]:
    return philox.draft_domains(offset)  # looked up at each call, so that a mutant of it takes effect


def verify_strict(target_logits, draft_token_ids, draft_logits, **keywords):
    return oracle.verify("strict", target_logits, draft_token_ids, **keywords)


METHODS = {
    "probabilistic": Method(verify_probabilistic, philox.DRAFT, partial(accepted_distribution, accepted_draft=overlap)),
    # Without draft logits q is a point mass at the draft, which is exact for every drafter. A draft v is accepted with p(v).
    "no-draft-logits": Method(
        verify_without_draft_logits, philox.DRAFT, partial(accepted_distribution, accepted_draft=agreement)
    ),
    "block": Method(verify_block, fresh_domains, accepted_distribution_of_blocks),
    "block-no-draft-logits": Method(
        verify_block_without_draft_logits, fresh_domains, partial(accepted_distribution, accepted_draft=agreement)
    ),
    "strict": Method(verify_strict, philox.DRAFT, partial(accepted_distribution, accepted_draft=agreement)),
    "strict-shared-noise": Method(verify_strict, philox.SELECT, partial(accepted_distribution, accepted_draft=coupled)),
}

NOT_ENUMERABLE = {("strict-shared-noise", "steps-history")}
"""Cases with three selections from the same Gumbel numbers: the enumeration handles two, and raises."""


def assert_same_distribution(got: dict, expected: dict) -> None:
    assert abs(sum(got.values()) - 1) < EXACT
    distance = float(total_variation(got, expected))
    assert distance < EXACT, f"the distribution is wrong by a total variation of {distance:.3g}"


def check_method(name: str, case: Case) -> None:
    """Check the joint distribution of the tokens, and the distribution of the number of accepted drafts."""
    method = METHODS[name]
    joint = distribution(lambda chance: decode(chance, case, method.verify, method.domains))
    assert_same_distribution(
        marginal(joint, lambda outcome: outcome[0]), sequence_distribution(case.target, case.num_tokens)
    )
    accepted = marginal(joint, lambda outcome: outcome[1][0])
    assert_same_distribution(accepted, method.accepted_distribution(case))
