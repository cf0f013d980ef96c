"""Rows for benchmarks have the structure of a real model's: entropy, kept sets, crowded blocks, equal logits."""

import pytest
import torch
from torch import Tensor

from tests.benchmarks.realistic import draft_rows, realistic_rows

QUANTILES = torch.tensor([0.1, 0.5, 0.9])
SMOLLM2 = {
    "entropy, T = 0.7": (0.03, 1.0, 2.9),
    "entropy, T = 1": (0.3, 2.3, 5.0),
    "likeliest, T = 0.7": (0.28, 0.72, 0.996),
    "likeliest, T = 1": (0.13, 0.47, 0.96),
    "top-p .95 keeps, T = 0.7": (1, 4, 67),
    "top-p .95 keeps, T = 1": (1, 68, 1249),
    "min-p .05 keeps, T = 1": (1, 4, 22),
    "blocks of 99 % of the mass, T = 1": (2, 20, 40),
    "blocks of the 50 likeliest": (8, 15, 23),
    "at or above the 16th block maximum": (28, 54, 116),
    "distinct values": (319, 504, 2366),
    "equal to the 50th": (2, 5, 8),
}
"""10, 50 and 90 % of 2,048 rows of SmolLM2-135M-Instruct: bfloat16, 49,152 tokens, technical text."""


def quantiles_of(rows: Tensor) -> dict[str, Tensor]:
    """Return the same of [rows, 49152] bfloat16 rows."""
    logits, found = rows.float(), {}
    for temperature in (0.7, 1):
        p = (logits / temperature).softmax(-1)
        ordered = p.sort(-1, descending=True).values
        before = ordered.cumsum(-1) - ordered
        blocks = p.unflatten(-1, (-1, 1024)).sum(-1).sort(-1, descending=True).values
        named = {
            "entropy": -(p * p.clamp(min=1e-30).log()).sum(-1),
            "likeliest": ordered[:, 0],
            "top-p .95 keeps": (before < 0.95).sum(-1),
            "min-p .05 keeps": (ordered >= 0.05 * ordered[:, :1]).sum(-1),
            "blocks of 99 % of the mass": (blocks.cumsum(-1) - blocks < 0.99).sum(-1),
        }
        found |= {f"{name}, T = {temperature}": values for name, values in named.items()}
    top = logits.topk(50, dim=-1)
    level = logits.unflatten(-1, (-1, 1024)).amax(-1).topk(16, dim=-1).values[:, -1:]
    found["blocks of the 50 likeliest"] = torch.tensor([len(row.unique()) for row in top.indices // 1024])
    found["at or above the 16th block maximum"] = (logits >= level).sum(-1)
    found["distinct values"] = torch.tensor([len(row.unique()) for row in logits])
    found["equal to the 50th"] = (logits == top.values[:, -1:]).sum(-1)
    return {name: values.float().quantile(QUANTILES) for name, values in found.items()}


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return realistic_rows(128, vocab=49_152, generator=torch.Generator().manual_seed(0))


def test_rows_have_the_structure_of_a_real_models(rows):
    """Half to twice as much; what is rare, the largest kept sets and the most certain rows, a third to three times."""
    found = quantiles_of(rows.bfloat16())
    assert found.keys() >= SMOLLM2.keys()
    for name, expected in SMOLLM2.items():
        low, middle, high = (found[name] + (name.startswith("entropy") * 0.1)).tolist()
        expected_low, expected_middle, expected_high = (each + name.startswith("entropy") * 0.1 for each in expected)
        assert 1 / 3 <= low / expected_low <= 3, (name, found[name])
        assert 1 / 2 <= middle / expected_middle <= 2, (name, found[name])
        assert 1 / 3 <= high / expected_high <= 3, (name, found[name])
    top = rows.topk(50, dim=-1).indices
    assert 0.5 < (top < 4096).float().mean() < 0.8  # 65 % in the first four blocks


def test_drafts_overlap_as_stated(rows):
    near = draft_rows(rows, 0.6, torch.Generator().manual_seed(1))
    p, q = ((each / 0.7).softmax(-1) for each in (rows, near))
    assert 0.81 < torch.minimum(p, q).sum(-1).mean() < 0.87


def test_rows_of_random_numbers_have_another_structure():
    """Those of `3 * randn` at T = 1 are wider than nine in ten real ones; likely tokens are anywhere."""
    found = quantiles_of((3 * torch.randn(32, 49_152, generator=torch.Generator().manual_seed(0))).bfloat16())
    assert found["entropy, T = 1"][0] > SMOLLM2["entropy, T = 1"][2]
    assert found["at or above the 16th block maximum"][1] < 24
