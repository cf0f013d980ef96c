"""Truncations to try, what they keep by the rules as they are told, and what the reference makes of a call."""

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from reference import oracle
from reference.sampling import Sampling
from specdecode import AcceptanceSchedule, Adjustments
from tests.support import adjusted
from tests.support.differential import Case

NAN, INF = float("nan"), float("inf")


def kept_tokens(row: list, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> list[int]:
    """The tokens that are kept of a row of probabilities, by the rules as they are told, in fractions."""
    order = sorted((token for token, p in enumerate(row) if p > 0), key=lambda token: (-row[token], token))
    order = [token for token in order if row[token] >= Fraction(min_p) * row[order[0]]]
    order = order[: top_k or None]
    mass, before, kept = sum(row[token] for token in order), Fraction(0), []
    for token in order:
        if kept and before >= Fraction(top_p) * mass:
            break
        kept.append(token)
        before += row[token]
    return kept


TRUNCATIONS: dict[str, dict] = {
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 5},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 20, "top_p": 0.95, "min_p": 0.01},
    "one": {"top_k": 1},
    "each request's own": {
        "top_k": torch.tensor([0, 1, 3, 50, 5000, 7]),
        "top_p": torch.tensor([1.0, 0.5, 0.99, 1e-9, 0.9, 0.3]),
        "min_p": torch.tensor([0.0, 0.2, 0.0, 1.0, 0.001, 0.0]),
    },
}


SCHEDULE = AcceptanceSchedule.from_rates([0.8, 0.5, 0.3])


def of_request(options: Mapping, index: int) -> dict:
    """One request's options, as plain numbers."""
    return {name: value[index].item() if isinstance(value, Tensor) else value for name, value in options.items()}


def on(device: str, options: Mapping) -> dict:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


def expected(
    method: str,
    batch: Case,
    options: Mapping,
    draft_options: Mapping | None,
    with_logits: bool,
    adjustments: Adjustments | None = None,
) -> list:
    outcomes = []
    for index in range(len(batch.seeds)):
        target, token_ids, draft = batch.rows(index)
        keywords = {**batch.request(index), **of_request(options, index)}
        if adjustments is not None:
            logits = batch.target_logits[index].cpu()
            target = logits.to(torch.promote_types(logits.dtype, torch.float32)).numpy()
            keywords["adjustments"] = adjusted.of_request(adjustments, index, target.shape[-1])
        rows = (target, token_ids)
        if method != "strict":
            rows = (target, token_ids, draft if with_logits else None)
            if draft_options is not None:
                keywords["draft_sampling"] = Sampling(**of_request(draft_options, index))
        if method == "synthetic":
            keywords["conditional_rates"] = SCHEDULE.conditional_rates
        outcomes.append(oracle.verify(method, *rows, **keywords))
    return outcomes


ROWS_THAT_HURT: dict[str, Tensor] = {
    "all equal": torch.zeros(2049),
    "two values": torch.arange(2049) % 2 * 1.0,
    "zeros of both signs": torch.where(torch.arange(2049) % 2 == 0, -0.0, 0.0),
    "one token has all the mass": torch.zeros(2049).index_fill(0, torch.tensor([1500]), 200.0),
    "tails of -inf": torch.cat([torch.zeros(3), torch.full((2046,), -INF)]),
    "NaN between": torch.arange(2049.0).remainder(7).masked_fill(torch.arange(2049) % 3 == 0, NAN),
    "nothing finite": torch.full((2049,), NAN),
    "+inf twice": torch.zeros(2049).index_fill(0, torch.tensor([7, 1500]), INF),
    "one token": torch.zeros(1),
    "a long tail": -torch.arange(2049) / 300.0,
}
