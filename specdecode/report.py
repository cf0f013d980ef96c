"""What a step may report of the rows of its emitted tokens, beside their log-probabilities: how much, and its checks."""

from specdecode.checks import check_count

MOST_TOP_LOGPROBS = 20

MOST_KEPT = 1024
"""Tokens that are kept of a row, of which the ids are returned. Of others their number and the last of them are."""


def check_report(top_logprobs: int | None, kept_sets: bool, logprobs: str | None) -> int:
    """Return how many of the likeliest tokens are asked for, or raise if what is asked for is none of what there is."""
    if not isinstance(kept_sets, bool):
        raise TypeError(f"kept_sets: expected a bool, got {type(kept_sets).__name__}")
    if top_logprobs is None:
        return 0
    count = check_count("top_logprobs", top_logprobs, most=MOST_TOP_LOGPROBS, least=0)
    if count > 0 and logprobs is None:
        raise ValueError("top_logprobs: given without logprobs, which says of which distribution they are")
    return count
