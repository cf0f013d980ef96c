"""Greedy in PyTorch: maxima of raw logits, no softmax."""

import torch
from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's argmax (lowest id on ties, NaN counts as -inf), and whether the row has only -inf.

    Args:
        logits: [..., vocab] any float.

    Returns:
        [...] int64 and [...] bool.
    """
    # Upcasting is exact, and maxima of half-precision rows are slow on the CPU.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    row_max, index = logits.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).max(dim=-1)
    return index, row_max == -torch.inf
