"""How tokens are drawn from rows of logits: temperature, top-k, top-p and min-p, and their checks."""

import math
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from specdecode.checks import (
    FLOATS,
    INTEGERS,
    Extent,
    check_count,
    check_tensor,
    check_values,
    on_host,
    plain,
    shown,
)


class Sampling(NamedTuple):
    """How tokens were drawn from rows of logits: what a call of the sampler takes by the same names.

    Example:
        >>> from specdecode import Sampling
        >>> Sampling(temperature=0.7, top_p=0.95)
        Sampling(temperature=0.7, top_k=None, top_p=0.95, min_p=None)
    """

    temperature: Tensor | float = 1.0
    """One number >= 0 or a [batch] float tensor; 0 is greedy."""

    top_k: Tensor | int | None = None
    """An int >= 0 or a [batch] int32 or int64 tensor; None, 0 or the vocabulary size and more keep all tokens."""

    top_p: Tensor | float | None = None
    """A number in (0, 1] or a [batch] float tensor; None or 1 keep all tokens."""

    min_p: Tensor | float | None = None
    """A number in [0, 1] or a [batch] float tensor; None or 0 keep all tokens."""


class Truncation(NamedTuple):
    """Checked arguments of truncation; None for what keeps all tokens of every request."""

    top_k: Tensor | int | None  # [batch] int32 or int64, or one for all
    top_p: Tensor | float | None  # [batch] any float, or one for all
    min_p: Tensor | float | None  # likewise

    @classmethod
    def check(
        cls,
        sampling: Sampling,
        batch: int,
        vocab: int,
        device: torch.device,
        of: str = "",
        used: Tensor | None = None,
    ) -> "Truncation | None":
        """Return what truncates rows, or None if nothing does; `of` comes before the arguments' names in errors.

        Only values of what is `used`, [batch] bool, are checked; None: all.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape, device or value.
        """
        if sampling.top_k is sampling.top_p is sampling.min_p is None:  # as most often
            return None
        truncation = cls(
            check_top_k(f"{of}top_k", sampling.top_k, batch, vocab, device, used),
            check_share(f"{of}top_p", sampling.top_p, batch, device, 1, used),
            check_share(f"{of}min_p", sampling.min_p, batch, device, 0, used),
        )
        return None if all(field is None for field in truncation) else truncation

    @property
    def keeps_one(self) -> bool:
        """Whether it is known that of every row only the likeliest token is kept: then a step is greedy."""
        return not isinstance(self.top_k, Tensor) and self.top_k == 1


def check_temperature(
    temperature: Tensor | float, batch: int, device: torch.device, of: str = "", used: Tensor | None = None
) -> Tensor | float:
    """Return a temperature as a float or a [batch] tensor. The values of a tensor are checked only on the CPU."""
    if isinstance(temperature, Tensor):
        check_tensor(f"{of}temperature", temperature, FLOATS, (batch,), device)
        if on_host(temperature):
            valid = (temperature >= 0) & temperature.isfinite()
            check_values(f"{of}temperature", temperature, valid, "finite numbers >= 0", used)
        return plain(temperature)
    # float comes first because the check for Real, an abstract class, takes longer.
    if isinstance(temperature, bool) or not isinstance(temperature, (float, Real)):
        raise TypeError(f"{of}temperature: expected a float or a [batch] tensor, got {type(temperature).__name__}")
    try:
        number = float(temperature)
    except OverflowError:
        number = math.inf
    # A number too small for a float is refused: it would become 0, which is greedy.
    if not (math.isfinite(number) and number >= 0) or (number == 0) != (temperature == 0):
        raise ValueError(f"{of}temperature: expected a finite float >= 0, got {shown(temperature)}")
    return number


def check_top_k(
    name: str, top_k: Tensor | int | None, batch: int, vocab: int, device: torch.device, used: Tensor | None
) -> Tensor | int | None:
    """Return top_k as an int or a [batch] tensor, None if it keeps all tokens. A tensor is checked only on the CPU."""
    if top_k is None:
        return None
    if isinstance(top_k, Tensor):
        check_tensor(name, top_k, INTEGERS, (batch,), device)
        if on_host(top_k):
            check_values(name, top_k, top_k >= 0, "numbers >= 0, where 0 keeps all tokens", used)
        return plain(top_k)
    count = check_count(name, top_k, least=0)
    return None if count == 0 or count >= vocab else count


def check_share(
    name: str,
    share: Tensor | float | None,
    batch: int,
    device: torch.device,
    neutral: int,
    used: Tensor | None = None,
) -> Tensor | float | None:
    """Return top_p or min_p as a float or a [batch] tensor, None if it keeps all tokens.

    The values of a tensor are checked only on the CPU.
    """
    if share is None:
        return None
    expected = "in (0, 1]" if neutral == 1 else "in [0, 1]"
    if isinstance(share, Tensor):
        check_tensor(name, share, FLOATS, (batch,), device)
        if on_host(share):
            valid = (share <= 1) & (share > 0 if neutral == 1 else share >= 0)
            check_values(name, share, valid, f"numbers {expected}", used)
        return plain(share)
    if isinstance(share, bool) or not isinstance(share, (float, Real)):
        raise TypeError(f"{name}: expected a float {expected} or a [batch] tensor, got {type(share).__name__}")
    if not (share <= 1 and (share > 0 if neutral == 1 else share >= 0)):
        raise ValueError(f"{name}: expected a float {expected}, got {shown(share)}")
    return None if share == neutral else float(share)


def check_samplings(
    sampling: Sampling,
    draft_sampling: Sampling | None,
    draft_logits: Tensor | None,
    draft_vocab: int | None,
    extent: Extent,
) -> tuple[Truncation | None, Tensor | float | None, Truncation | None]:
    """Check how the target samples, but for its temperature, and how drafts were drawn.

    Args:
        sampling: how the target samples.
        draft_sampling: how drafts were drawn; None: likewise.
        draft_logits: what drafts were drawn from.
        draft_vocab: how many tokens the draft has; None: those of the target.
        extent: how much there is of everything.

    Returns:
        What truncates the target's rows; the temperature of the drafts, None for the target's; what truncates the draft's
        rows.
    """
    if draft_sampling is None and sampling.top_k is sampling.top_p is sampling.min_p is None:  # as most often
        return None, None, None
    _, num_slots, _, vocab, device, used, _ = extent
    truncation = Truncation.check(sampling, num_slots, vocab, device, used=used)
    draft_temperature, draft_truncation = None, None if draft_logits is None else truncation
    sizes = num_slots, vocab if draft_vocab is None else draft_vocab, device
    if draft_sampling is not None:
        check_draft_sampling(draft_sampling, draft_logits)
        of = "draft_sampling."
        draft_temperature = check_temperature(draft_sampling.temperature, num_slots, device, of, used)
        draft_truncation = Truncation.check(draft_sampling, *sizes, of, used)
    elif draft_vocab is not None:  # a top_k may keep all tokens of the draft, but not of the target
        draft_truncation = Truncation.check(sampling, *sizes, used=used)
    return truncation, draft_temperature, draft_truncation


def check_draft_sampling(draft_sampling: Sampling, draft_logits: Tensor | None) -> None:
    """Raise unless it is a Sampling, and there is something that it is said of."""
    if not isinstance(draft_sampling, Sampling):
        raise TypeError(f"draft_sampling: expected a Sampling, got {type(draft_sampling).__name__}")
    if draft_logits is None:
        raise ValueError("draft_sampling: given without the draft_logits that the drafts were drawn from")
