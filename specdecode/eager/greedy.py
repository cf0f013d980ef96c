"""Greedy in PyTorch: maxima of raw logits, no softmax."""

import torch
from torch import Tensor

from specdecode.eager.selection import copy, without_nan


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's argmax, the lowest id on ties and NaN counting as -inf, and whether it has nothing to choose from.

    Args:
        logits: [..., vocab] any float.

    Returns:
        [...] int64 and [...] bool.
    """
    # Copied to float32 at least, which is exact: maxima of half-precision rows are slow on the CPU.
    copied = copy((logits,), torch.promote_types(logits.dtype, torch.float32))[0]
    row_max, index = without_nan(copied).max(dim=-1)
    return index, row_max == -torch.inf
