"""What requests add to the target's logits before a token is drawn: biases, penalties and masks, and their checks."""

import math
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from specdecode.checks import FLOATS, INTEGERS, Extent, check_tensor, check_type, check_values, on_host, plain, shown

FLOAT32 = torch.finfo(torch.float32)
MOST_COUNTED = 2**30
"""Counts above it are taken for it: float32 has no more digits, and drafts may be added without an overflow."""
WORD = 32
"""Tokens of a word of a mask."""


class Adjustments(NamedTuple):
    """What each request adds to the logits of the target's rows, before the temperature, in this order.

    1. Bias: l + b.
    2. Repetition penalty r, of tokens of the prompt and of those emitted before: l / r if l > 0, else l r.
    3. Frequency penalty f and presence penalty g: l - f n - g [n > 0], where n is how often the token was emitted.
    4. Tokens that are not allowed: -inf.

    What was emitted before row i of a step includes its drafts 0 to i - 1. The logits stay as they are in memory: each is
    adjusted in float32 (float64 logits in the eager backend in float64) where it is read.

    In a packed call what is [batch, ...] here is by slot, [num_slots, ...], and `allowed_mask` by row, [num_rows, ...]. With
    a shard, masks and counts cover the whole vocabulary, the same on every rank.

    Example:
        >>> import torch
        >>> from specdecode import Adjustments, RejectionSampler
        >>> target_logits = torch.tensor([2.0, 1.5, 0.0]).expand(1, 3, 3)  # 1 request, 2 drafts
        >>> drafts = torch.tensor([[0, 0]])
        >>> penalties = Adjustments(frequency_penalty=0.7)
        >>> RejectionSampler("strict")(target_logits, drafts, temperature=0.0, adjustments=penalties).token_ids
        tensor([[ 0,  1, -1]])

        After the first 0 it has a logit of 2 - 0.7: the draft 0 is rejected.
    """

    repetition_penalty: Tensor | float | None = None
    """One number > 0 or a [batch] float tensor; None or 1: none."""

    frequency_penalty: Tensor | float | None = None
    """One number or a [batch] float tensor; None or 0: none."""

    presence_penalty: Tensor | float | None = None
    """Likewise."""

    prompt_mask: Tensor | None = None
    """[batch, ceil(vocab / 32)] int32: bit v % 32 of word v // 32 says whether v is in the prompt. None: no prompt."""

    output_counts: Tensor | None = None
    """[batch, vocab] int32: how often each token was emitted before this step. None: nothing was."""

    bias_ids: Tensor | None = None
    """[batch, n] int32 or int64: the tokens that have a bias, -1 where there is none. The biases of equal ids add up."""

    bias: Tensor | None = None
    """[batch, n] float: what is added; -inf forbids a token."""

    allowed_mask: Tensor | None = None
    """[batch, num_draft_tokens + 1, ceil(vocab / 32)] int32, of `sample` also [batch, ceil(vocab / 32)]. None: all tokens.

    Bit v % 32 of word v // 32 says whether a row allows v.
    """

    @property
    def penalizes(self) -> bool:
        """Whether there may be a penalty."""
        return any(penalty is not None for penalty in self[:3])


def by_slot_of(adjustments: Adjustments | None) -> tuple[Tensor | float | None, ...]:
    """Return what is by slot in a packed call, or raise unless these are adjustments."""
    if adjustments is None:
        return ()
    if not isinstance(adjustments, Adjustments):
        raise TypeError(f"adjustments: expected Adjustments, got {type(adjustments).__name__}")
    return adjustments[:-1]


def check_adjustments(adjustments: Adjustments, extent: Extent, rows: tuple[int, ...]) -> Adjustments | None:
    """Return checked adjustments, None if they add nothing.

    Args:
        adjustments: as for a call.
        extent: how much there is of everything.
        rows: the shape of the target rows, such as (batch, num_draft_tokens + 1).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value.
    """
    by_slot_of(adjustments)
    words, by_slot = -(-extent.vocab // WORD), (extent.num_slots,)
    repetition, frequency, presence = (
        check_penalty(name, getattr(adjustments, name), extent) for name in Adjustments._fields[:3]
    )
    prompt_mask = check_rows("prompt_mask", adjustments.prompt_mask, (*by_slot, words), extent)
    output_counts = check_rows("output_counts", adjustments.output_counts, (*by_slot, extent.vocab), extent)
    if output_counts is not None and on_host(output_counts):
        used = None if extent.used_slots is None else extent.used_slots[:, None]
        check_values("adjustments.output_counts", output_counts, output_counts >= 0, "numbers >= 0", used)
    bias_ids, bias = check_bias(adjustments.bias_ids, adjustments.bias, extent)
    allowed_mask = adjustments.allowed_mask
    if isinstance(allowed_mask, Tensor) and allowed_mask.ndim == 2 and rows == (extent.batch, 1):
        allowed_mask = allowed_mask[:, None]  # of `sample`
    allowed_mask = check_rows("allowed_mask", allowed_mask, (*rows, words), extent)
    penalties = repetition, frequency, presence, prompt_mask, output_counts
    checked = Adjustments(*penalties, bias_ids, bias, allowed_mask)
    if not checked.penalizes:
        checked = checked._replace(prompt_mask=None, output_counts=None)  # which only penalties look at
    return None if all(field is None for field in checked) else checked


def check_penalty(name: str, penalty: Tensor | float | None, extent: Extent) -> Tensor | float | None:
    """Return a penalty as a float or a tensor, None if it is neutral. The values of a tensor are checked only on the CPU."""
    full_name, is_factor = f"adjustments.{name}", name == "repetition_penalty"
    expected = "finite numbers > 0" if is_factor else "finite numbers"
    if penalty is None:
        return None
    if isinstance(penalty, Tensor):
        check_tensor(full_name, penalty, FLOATS, (extent.num_slots,), extent.device)
        if on_host(penalty):
            rounded = penalty.to(torch.float32)
            valid = rounded.isfinite() & (rounded > 0) if is_factor else rounded.isfinite()
            check_values(full_name, penalty, valid, expected, extent.used_slots)
        return plain(penalty)
    if isinstance(penalty, bool) or not isinstance(penalty, (float, Real)):
        raise TypeError(f"{full_name}: expected a float or a [batch] tensor, got {type(penalty).__name__}")
    number = float(penalty) if abs(penalty) <= FLOAT32.max else math.inf
    if not math.isfinite(number) or (is_factor and number < FLOAT32.tiny):
        raise ValueError(f"{full_name}: expected a {expected.replace('numbers', 'number')}, got {shown(penalty)}")
    return None if number == is_factor else number


def check_rows(name: str, rows: Tensor | None, shape: tuple[int, ...], extent: Extent) -> Tensor | None:
    """Return int32 rows of a mask or of counts, whose tokens lie side by side in memory."""
    if rows is None:
        return None
    full_name = f"adjustments.{name}"
    check_tensor(full_name, rows, (torch.int32,), shape, extent.device)
    if rows.stride(-1) != 1 and rows.shape[-1] > 1:
        raise ValueError(f"{full_name}: expected a stride of 1 in the last dimension, got {rows.stride(-1)}")
    return plain(rows)


def check_bias(ids: Tensor | None, bias: Tensor | None, extent: Extent) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids and the biases of each request's tokens; (None, None) if there are none."""
    names = "adjustments.bias_ids", "adjustments.bias"
    if ids is None and bias is None:
        return None, None
    if ids is None or bias is None:
        given, missing = names if bias is None else reversed(names)
        raise ValueError(f"{given}: given without {missing}")
    check_type(names[0], ids, INTEGERS)
    if ids.ndim != 2:
        raise ValueError(f"{names[0]}: expected shape [{extent.num_slots}, number of biases], got {list(ids.shape)}")
    shape = extent.num_slots, ids.shape[1]
    check_tensor(names[0], ids, INTEGERS, shape, extent.device)
    check_tensor(names[1], bias, FLOATS, shape, extent.device)
    if on_host(ids):
        used = None if extent.used_slots is None else extent.used_slots[:, None]
        inside = (ids >= -1) & (ids < extent.vocab)
        check_values(names[0], ids, inside, f"ids in [0, {extent.vocab}), or -1 for none", used)
        check_values(names[1], bias, ~bias.isnan() | (ids < 0), "numbers", used)
    return (plain(ids), plain(bias)) if shape[1] > 0 else (None, None)
