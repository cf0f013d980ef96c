"""Right verifiers, and verifiers with the known mistakes."""

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
    """Reads -1 as the last token's index, as NumPy does."""

    def __call__(self, target_logits, draft_token_ids, *others, **options):
        token_ids = super().__call__(target_logits, draft_token_ids % target_logits.shape[2], *others, **options)
        accepted = token_ids[:, 1:] != -1
        return np.column_stack([np.where(accepted, draft_token_ids, token_ids[:, :-1]), token_ids[:, -1]])


@dataclass(frozen=True)
class Walk:
    """Draws the target's own token at each node, and follows the child that equals it."""

    offset: Callable[[int, int], int] = lambda node, depth: depth
    """The distance of a token's noise from the step's position."""

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
    """Each position has random numbers of its own, whatever step has it."""

    def uniform(self, offset, use):
        return hashed(self.seeds, self.positions + offset, 0, use)


def of_position_k(step, weights, accepted):
    """Draw with the number that would accept a draft at position K."""
    return pick(weights, step.uniform(step.num_drafts, Use.ACCEPT))


def overflowing(logits, temperature):
    """Leave the row's maximum in the exponential; what float32 makes of it."""
    if temperature == 0:
        return softmax(logits, 0)
    with np.errstate(all="ignore"):
        weights = np.exp(logits / np.float32(temperature))
        return np.nan_to_num(weights / weights.sum(axis=-1, keepdims=True), nan=0.0).astype(np.float64)


def keyed(seeds, positions):
    """A right verifier with other seeds and positions: each a function of the request's own."""
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
"""Other mistakes that an error shows are made by the verifiers of `test_checking_errors` and `readers`."""


RIGHT = {
    "tokens": (TOKENS, None),
    "tokens with their drafter": (TOKENS, Drafter()),
    "blocks": (BLOCKS, Drafter()),
    "strict": (STRICT, None),
    "strict with shared noise": (STRICT, Drafter(use=Use.OWN)),
}
RIGHT_TREES = {"rejection": REJECTION, "target-only": TARGET_ONLY, "walk": Walk()}
"""Right verifiers, with their drafters."""


def planted():
    """Yield (name, verify, draft, tree) of each mistake in each of its forms."""
    for name, mistake in MISTAKES.items():
        for verifier in mistake.verifiers:
            yield name, verifier, mistake.drafter, TREE if mistake.of_trees else None
    for name, verifier in PLANTED.items():
        yield name, verifier, None, TREE if MISTAKES[name].of_trees else None
