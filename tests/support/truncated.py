"""Truncations for tests, rows that are hard to truncate, and the kept tokens by the rules, in fractions."""

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")


def kept_tokens(row: list, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> list[int]:
    """Return the kept tokens of a row of probabilities, by the definition of the rules, in fractions."""
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


def of_request(options: Mapping, index: int) -> dict:
    """Return one request's options, as plain numbers."""
    return {name: value[index].item() if isinstance(value, Tensor) else value for name, value in options.items()}


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
