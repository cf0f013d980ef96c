"""Rules that are meant to be lossy: subjects for `check(..., allow=...)`.

Each is token verification with another rule for accepting; at temperature 0 it raises a ValueError.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode.checking.models import Floats, point_mass
from specdecode.checking.subject import Ids
from specdecode.checking.verifiers import Bools, Step, Verifier, accept_by_ratio, log


@dataclass(frozen=True)
class Sampled(Verifier):
    """Verifies at temperatures above 0 alone."""

    def __call__(self, *arguments: Any, temperature: float = 1.0, **options: Any) -> Ids:
        """Return [n, K + 1] ids."""
        if temperature == 0:
            raise ValueError("a lossy rule is not defined at temperature 0")
        return super().__call__(*arguments, temperature=temperature, **options)


def entropy(step: Step) -> Floats:
    """Return the entropy of p at each draft in nats, [n, K]."""
    p = step.target[:, : step.num_drafts]
    return np.asarray(-(p * np.where(p > 0, log(p), 0)).sum(axis=2))


def else_argmax(accepts: Callable[[Step], Bools]) -> Verifier:
    """Accept by a rule, and emit the argmax of p after a rejection."""

    def recovered(step: Step, accepted: Ids) -> Floats:
        row = step.row(step.target, accepted)
        return point_mass(row.argmax(axis=1), row.shape[1])

    return Sampled(accepts=accepts, recovered=recovered)


def mixture(weight: float = 0.9) -> Verifier:
    """Verify against weight * p + (1 - weight) * q. It adds (1 - weight) TV(p, q) to a token."""

    def mixed(step: Step) -> Step:
        target = step.target.copy()
        there = (np.arange(step.num_drafts) < step.given[:, None])[..., None]
        mean = weight * target[:, :-1] + (1 - weight) * step.draft
        target[:, :-1] = np.where(there, mean, target[:, :-1])
        return step._replace(target=target)

    return Sampled(changes=mixed)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Verifier:
    """Accept if p(x) > min(epsilon, delta exp(-entropy of p)), else emit the argmax (Cai et al. 2024, Medusa)."""
    return else_argmax(lambda step: step.of_drafts(step.target) > np.minimum(epsilon, delta * np.exp(-entropy(step))))


def relaxed(count: int = 3, least: float = 0.5) -> Verifier:
    """Accept if x is among the `count` likeliest tokens and p(x) >= least * max p, else emit the argmax."""

    def accepts(step: Step) -> Bools:
        p, x = step.target[:, : step.num_drafts], step.of_drafts(step.target)
        likelier = (p > x[..., None]).sum(axis=2)
        return np.asarray((likelier < count) & (x >= least * p.max(axis=2)))

    return else_argmax(accepts)


def fly(least_entropy: float = 0.3, window: int = 1) -> Verifier:
    """Override a rejection if the entropy of p is high and the next `window` drafts are accepted (FLy, as in vLLM)."""

    def accepts(step: Step) -> Bools:
        own = accept_by_ratio(step) & (np.arange(step.num_drafts) < step.given[:, None])
        following = np.ones_like(own)
        for i in range(1, window + 1):
            following &= np.pad(own[:, i:], ((0, 0), (0, min(i, own.shape[1]))))
        return own | ((entropy(step) >= least_entropy) & following)

    return Sampled(accepts=accepts)


RULES: dict[str, Callable[..., Verifier]] = {"mixture": mixture, "typical": typical, "relaxed": relaxed, "fly": fly}
