"""Mistakes that are known by their symptom, an error or the checks that fail: no verifier is compared."""

from specdecode.checking.cases import IN_A_CALL, IN_CALLS, LAST, STEPS, SUMS
from specdecode.checking.mistakes.record import Mistake

ERRORS = {
    "goes_on_after_a_rejection": Mistake(
        "after the recovered token further drafts are emitted.",
        "Stop at the first rejection: the drafts after it follow a text that is not there.",
    ),
    "no_token_after_the_drafts": Mistake(
        "no token of the target's follows the accepted drafts: the recovered one or the bonus token is missing.",
        "Emit one token more than there are accepted drafts, also if there are none.",
    ),
    "no_return": Mistake(
        "a function returns None.",
        "Return its result: look for a forgotten `return`, or for one branch without it.",
        "a reader of the course",
    ),
    "nan_probabilities": Mistake(
        "a token is drawn with probabilities that are NaN.",
        "Look for a division by 0, such as a residual of 0, q = 0 or a temperature of 0, and for rows of -inf.",
        "a reader of the course",
    ),
    "negative_probabilities": Mistake(
        "a token is drawn with probabilities that are negative.",
        "Cut the residual at 0: max(0, p - q).",
        "a reader of the course",
    ),
    "minus_1_is_an_index": Mistake(
        "a draft id of -1, which means that there is no draft, is used as an index.",
        "Let -1 end the request's drafts. If all have the same number, raise an error for -1: it is not asked then.",
        "vLLM pull request 46533",
    ),
    "tree_leaves_the_path": Mistake(
        "tree: the accepted tokens are no path of the tree: each must be a child of the one before.",
        "Go on with the children of the accepted node, and return one token after the path.",
        of_trees=True,
    ),
}

FAILED_CHECKS = {
    "one_noise_for_a_call": Mistake(
        "all requests of a call have the same random numbers.",
        "Draw for each request, or make its seed part of the key.",
        "TensorRT-LLM issue 19487: requests without a seed share one stream",
        failed_checks={IN_A_CALL},
    ),
    "noise_starts_again_at_every_call": Mistake(
        "every call has the same random numbers, a request's depending on its place alone.",
        "Make the generator once, or use each request's seed.",
        "seeds that depend on the slot, a public report",
        failed_checks={IN_CALLS, STEPS},
    ),
    "noise_by_slot": Mistake(
        "a request's random numbers depend on its place and position, not on its seed.",
        "Use each request's seed.",
        "seeds that depend on the slot or the batch, a public report",
        failed_checks={IN_CALLS},
    ),
    "positions_do_not_advance": Mistake(
        "two steps of a request with one seed have the same random numbers.",
        "Make the absolute position part of what the noise depends on.",
        "a public report of a serving engine",
        failed_checks={STEPS},
    ),
    "noise_of_seed_plus_position": Mistake(
        "random numbers depend on seed + position alone, so the request with the next seed has them one position earlier.",
        "Make the key of both numbers, such as `default_rng([seed, position])`, not of their sum.",
        "a reader of the course",
        failed_checks={SUMS},
    ),
    "noise_used_again_in_the_next_step": Mistake(
        "the token after the accepted drafts is drawn with the number of a later position, which the next step uses, too.",
        "Use the number of the token's own position, with another use than the acceptance of a draft there.",
        "a reader of the course",
        failed_checks={LAST},
    ),
    "softmax_overflows": Mistake(
        "the softmax does not subtract the row's maximum, and overflows.",
        "Subtract the maximum before the exponential.",
        "float16 overflow",
        failed_checks={"large logits"},
    ),
    "tree_noise_by_node": Mistake(
        "tree: the noise of a token belongs to its node, not to its depth, so a later step has it again.",
        "The position of a node's token is that of the step plus the node's depth.",
        of_trees=True,
        failed_checks={LAST},
    ),
}
