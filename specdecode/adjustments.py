"""Adjustments of the target's logits by requests, before a token is drawn: biases, penalties and masks."""

from typing import NamedTuple

from torch import Tensor

MOST_COUNTED = 2**30
"""The largest count; larger ones are clamped to it. float32 has no more digits, and adding drafts cannot overflow."""

SMALLEST_FACTOR = 1.1754943508222875e-38
"""The smallest repetition penalty r: the smallest normal float32. Below it a GPU may flush r to 0, and 1 / r overflows."""

WORD = 32
"""The tokens in one word of a mask."""


class Adjustments(NamedTuple):
    """Changes of the logits of the target's rows, by request, before the temperature, in this order.

    1. Bias: l + b.
    2. Repetition penalty r, of tokens of the prompt and of tokens emitted before: l / r if l > 0, else l r.
    3. Frequency penalty f and presence penalty g: l - f n - g [n > 0], where n is the number of times the token was
       emitted.
    4. Tokens that are not allowed: -inf.

    The tokens emitted before row i of a step include its drafts 0 to i - 1. The logits in memory do not change: each is
    adjusted in float32 (float64 logits in the eager backend in float64) when it is read.

    In a packed call, tensors that are [batch, ...] here are by slot, [num_slots, ...], and `allowed_mask` is by row,
    [num_rows, ...]. With a shard, masks and counts cover the whole vocabulary, the same on every rank.

    Example:
        >>> import torch
        >>> from specdecode import Adjustments, RejectionSampler
        >>> target_logits = torch.tensor([2.0, 1.5, 0.0]).expand(1, 3, 3)  # 1 request, 2 drafts
        >>> drafts = torch.tensor([[0, 0]])
        >>> penalties = Adjustments(frequency_penalty=0.7)
        >>> RejectionSampler("strict")(target_logits, drafts, temperature=0.0, adjustments=penalties).token_ids
        tensor([[ 0,  1, -1]])

        After the first 0, token 0 has a logit of 2 - 0.7: the second draft 0 is rejected.
    """

    repetition_penalty: Tensor | float | None = None
    """One number > 0 or a [batch] float tensor; None or 1: none."""

    frequency_penalty: Tensor | float | None = None
    """One number or a [batch] float tensor; None or 0: none."""

    presence_penalty: Tensor | float | None = None
    """One number or a [batch] float tensor; None or 0: none."""

    prompt_mask: Tensor | None = None
    """[batch, ceil(vocab / 32)] int32: bit v % 32 of word v // 32 says whether v is in the prompt. None: no prompt."""

    output_counts: Tensor | None = None
    """[batch, vocab] int32: the number of times each token was emitted before this step. None: 0."""

    bias_ids: Tensor | None = None
    """[batch, n] int32 or int64: the tokens that have a bias, -1 where there is none. The biases of equal ids add up."""

    bias: Tensor | None = None
    """[batch, n] float: the biases; -inf forbids a token."""

    allowed_mask: Tensor | None = None
    """[batch, num_draft_tokens + 1, ceil(vocab / 32)] int32, of `sample` also [batch, ceil(vocab / 32)]. None: all tokens.

    Bit v % 32 of word v // 32 says whether a row allows v.
    """

    @property
    def penalizes(self) -> bool:
        """Whether there may be a penalty."""
        return any(penalty is not None for penalty in self[:3])
