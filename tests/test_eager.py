"""The eager backend's reductions: of equal numbers the first counts."""

import pytest
import torch

from specdecode.eager import philox, selection

INF = torch.inf


@pytest.mark.parametrize("width", [7, 1024, 5 * 1024])
def test_of_equal_maxima_the_first_counts(place, width):
    logits = torch.randint(0, 3, (2, 4, width), generator=torch.Generator().manual_seed(0)).float()
    logits[0, :2], logits[0, 2, width // 2 :], logits[1, 0, [3, -1]] = -INF, -INF, INF
    row_max, first = (found.cpu().numpy() for found in selection.row_maxima(logits.to(place[1])))
    assert (row_max == logits.amax(dim=-1, keepdim=True).numpy()).all()
    assert (first == logits.numpy().argmax(axis=-1, keepdims=True)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_ratio_wins_a_race_and_of_equal_ones_the_first(place, dtype):
    weights = torch.rand(64, 300, dtype=dtype, generator=torch.Generator().manual_seed(0))
    weights[:2], weights[2:4, :200] = 0, 0
    seeds, positions = torch.arange(64)[:, None], torch.tensor([[5]])
    numbers = [tensor.to(place[1]) for tensor in (seeds, positions, torch.arange(300))]
    winners = philox.race(weights.to(place[1]), *numbers, 3).cpu()
    ratios = weights / philox.exponential(*numbers, 3).cpu()
    assert (winners.numpy() == ratios.numpy().argmax(axis=-1, keepdims=True)).all()
    assert winners[:2].tolist() == [[0], [0]]
