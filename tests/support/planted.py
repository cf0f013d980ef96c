"""Right verifiers, and verifiers with the known mistakes, to test the checker."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specdecode.checking.mistakes import MISTAKES
from specdecode.checking.mistakes.trees import REJECTION, TARGET_ONLY, TREE
from specdecode.checking.models import pick, softmax
from specdecode.checking.trees import depths
from specdecode.checking.verifiers import BLOCKS, STRICT, TOKENS, Drafter, Step, Use, Verifier, hashed


@dataclass(frozen=True)
class Minus1(Verifier):
    """A verifier that reads draft -1 as the last token, as NumPy indexing does."""

    def __call__(self, target_logits, draft_token_ids, *others, **options):
        token_ids = super().__call__(target_logits, draft_token_ids % target_logits.shape[2], *others, **options)
        accepted = token_ids[:, 1:] != -1  # a token follows it; accepted drafts keep their given ids, -1 included
        return np.column_stack([np.where(accepted, draft_token_ids, token_ids[:, :-1]), token_ids[:, -1]])


@dataclass(frozen=True)
class Walk:
    """A tree verifier that draws the target's own token at each node and follows the child that equals it."""

    offset: Callable[[int, int], int] = lambda node, depth: depth
    """The offset of a node's noise from the step's position, given the node and its depth."""

    def __call__(self, target_logits, token_ids, parents, *, temperature=1.0, seeds, positions):
        depth, p = depths(parents.tolist()), softmax(target_logits, temperature)
        rows, count = np.arange(len(p)), len(depth)
        offsets = [self.offset(node, depth[node]) for node in range(count)]
        own = np.stack(
            [pick(p[:, node], hashed(seeds, positions + offsets[node], 0, Use.OWN)) for node in range(count)], axis=1
        )
        output = np.full((len(p), max(depth) + 1), -1)
        at, alive = np.zeros(len(p), dtype=np.int64), np.ones(len(p), dtype=bool)
        for step in range(output.shape[1]):
            output[:, step] = np.where(alive, own[rows, at], -1)
            equal = (parents == at[:, None]) & (token_ids == own[rows, at][:, None]) & (np.arange(count) > 0)
            alive, at = alive & equal.any(axis=1), equal.argmax(axis=1)
        return output


class AtPositions(Step):
    """A step whose random numbers depend on the absolute position: the next step has some of them again."""

    def uniform(self, offset, use):
        return hashed(self.seeds, self.positions + offset, 0, use)


def of_position_k(step, weights, accepted):
    """Draw with the accept number of offset K, beyond the drafts: the next step accepts a draft by the same number."""
    return pick(weights, step.uniform(step.num_drafts, Use.ACCEPT))


def overflowing(logits, temperature):
    """Return softmax(logits / T), computed in float32 without subtracting the row's maximum; NaN becomes 0."""
    if temperature == 0:
        return softmax(logits, 0)
    with np.errstate(all="ignore"):
        weights = np.exp(logits / np.float32(temperature))
        return np.nan_to_num(weights / weights.sum(axis=-1, keepdims=True), nan=0.0).astype(np.float64)


def keyed(seeds, positions):
    """Return a right verifier whose seeds and positions are replaced by functions of both."""
    return Verifier(
        changes=lambda step: step._replace(
            seeds=seeds(step.seeds, step.positions), positions=positions(step.seeds, step.positions)
        )
    )


PLANTED = {
    "one_noise_for_a_call": keyed(lambda s, p: 0 * s + s[0], lambda s, p: 0 * p + p[0]),
    "noise_starts_again_at_every_call": keyed(lambda s, p: np.arange(len(s)), lambda s, p: 0 * p),
    "noise_by_slot": keyed(lambda s, p: np.arange(len(s)), lambda s, p: p),
    "positions_do_not_advance": keyed(lambda s, p: s, lambda s, p: 0 * p),
    "noise_of_seed_plus_position": keyed(lambda s, p: s + p, lambda s, p: 0 * p),
    "noise_used_again_in_the_next_step": Verifier(changes=lambda step: AtPositions(*step), emit=of_position_k),
    "softmax_overflows": Verifier(target_probs=overflowing, draft_probs=overflowing),
    "tree_noise_by_node": Walk(offset=lambda node, depth: node),
    "minus_1_is_an_index": Minus1(),
}
"""Verifiers of mistakes that have none in `MISTAKES`; `test_checking_errors` and `readers` have those whose call fails."""

RIGHT = {
    "tokens": (TOKENS, None),
    "tokens with their drafter": (TOKENS, Drafter()),
    "blocks": (BLOCKS, Drafter()),
    "strict": (STRICT, None),
    "strict with shared noise": (STRICT, Drafter(use=Use.OWN)),
}
"""Right verifiers, with their drafters."""

RIGHT_TREES = {"rejection": REJECTION, "target-only": TARGET_ONLY, "walk": Walk()}
"""Right tree verifiers."""


def planted():
    """Yield (name, verify, draft, tree) for every verifier with a known mistake."""
    for name, mistake in MISTAKES.items():
        for verifier in mistake.verifiers:
            yield name, verifier, mistake.drafter, TREE if mistake.of_trees else None
    for name, verifier in PLANTED.items():
        yield name, verifier, None, TREE if MISTAKES[name].of_trees else None
