"""Checks of single arguments: their errors name the argument, what it was and what it should be."""

from numbers import Integral
from typing import NamedTuple, cast

import torch
from torch import Tensor, strided

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
INT64 = torch.iinfo(torch.int64)

MOST_DRAFT_TOKENS = 4096
"""The most drafts of a step. Real steps have far fewer; a larger number is a mistake, and could fill the memory."""


class Extent(NamedTuple):
    """How much there is of everything in a call, by which the shapes of its arguments are checked."""

    batch: int
    num_slots: int  # of what is by slot in a packed call; else the requests
    num_draft_tokens: int
    vocab: int  # of the target, unsharded
    device: torch.device
    used_slots: Tensor | None = None  # [num_slots] bool: whose values are checked; None: all
    used_requests: Tensor | None = None  # [batch] bool, likewise

    @property
    def drafts(self) -> tuple[int, int]:
        """The shape of what there is for each draft."""
        return self.num_slots, self.num_draft_tokens


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor detached, and with its values in memory: PyTorch can postpone zeros and negation."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def on_host(tensor: Tensor) -> bool:
    """Return whether a value of the tensor can be read without waiting for a device."""
    return tensor.is_cpu


def shown(value: object) -> str:
    """Return the value for an error message: its repr, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print ints of more than 4,300 digits
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_count(name: str, value: object, most: int | None = None, least: int = 1) -> int:
    """Return an int of at least `least` and at most `most`, or raise."""
    # int comes first because the check for Integral, an abstract class, takes longer.
    is_int = isinstance(value, (int, Integral)) and not isinstance(value, bool)
    count = int(cast("int", value)) if is_int else 0
    if not is_int or count < least:
        expected = "a positive int" if least == 1 else f"an int >= {least}"
        if not is_int:
            raise TypeError(f"{name}: expected {expected}, got {shown(value)} ({type(value).__name__})")
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}")
    if most is not None and count > most:
        raise ValueError(f"{name}: expected at most {most}, got {shown(value)}")
    return count


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless the value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {shown(value)}")


def check_tensor(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise unless `tensor` is a plain tensor of one of the dtypes, of this shape, on this device, which holds data."""
    if (
        isinstance(tensor, Tensor)
        and tensor.layout is strided
        and not tensor.is_nested
        and tensor.dtype in dtypes
        and tensor.shape == shape
        and tensor.device == device
    ):  # in one condition, because a call checks a dozen tensors
        return
    check_type(name, tensor, dtypes)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    check_device(name, tensor, device)


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise unless `tensor` is on this device."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device}, where the logits are, got {tensor.device}")


def check_type(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless `tensor` is a plain tensor of one of the dtypes."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if type(tensor) is not Tensor and hasattr(tensor, "to_local"):
        raise TypeError(
            f"{name}: expected a plain tensor, got a DTensor; pass its to_local(), and where ranks have parts of the "
            "vocabulary a VocabShard as shard"
        )
    if tensor.layout is not strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
        raise TypeError(f"{name}: expected a dense tensor that holds data, got a {kind} one")
    if tensor.dtype not in dtypes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected dtype {expected}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_values(name: str, tensor: Tensor, valid: Tensor, expected: str, used: Tensor | None = None) -> None:
    """Raise on the first value that is used and not valid; this waits for a device."""
    if used is not None:
        valid = valid | ~used
    if not valid.all():
        index = (~valid).nonzero()[0].tolist()
        raise ValueError(f"{name}: expected {expected}, got {tensor[tuple(index)].item()} at {index}")


def check_logits(
    name: str, logits: Tensor, dimensions: tuple[str, ...], vocab_size: int | None = None
) -> tuple[int, ...]:
    """Raise unless `logits` is a float tensor with these dimensions and a vocabulary; return its shape, unsharded.

    With `vocab_size`, that of the whole vocabulary, the logits are a shard of it, which may be empty.
    """
    check_type(name, logits, FLOATS)
    shape = logits.shape
    if len(shape) != len(dimensions):
        raise ValueError(f"{name}: expected shape [{', '.join(dimensions)}], got {list(shape)}")
    if vocab_size is not None:
        return *shape[:-1], vocab_size
    if shape[-1] == 0:
        raise ValueError(f"{name}: expected a vocabulary of at least one token, got shape {list(shape)}")
    return shape


def check_seeds(seeds: Tensor | int | None, batch: int, device: torch.device) -> Tensor | int:
    """Return seeds as a [batch] int64 tensor, or as one int s meaning s, s + 1, ...; None gives fresh random seeds."""
    if seeds is None:
        return draw_seeds((batch,), device)
    if isinstance(seeds, Tensor):
        check_tensor("seeds", seeds, (torch.int64,), (batch,), device)
        return plain(seeds)
    if isinstance(seeds, bool) or not isinstance(seeds, (int, Integral)):
        raise TypeError(f"seeds: expected an int, a [batch] int64 tensor or None, got {type(seeds).__name__}")
    if not INT64.min <= seeds <= INT64.max:
        raise ValueError(f"seeds: expected an int of 64 bits, got {shown(seeds)}")
    return int(seeds)


def draw_seeds(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 seeds of a shape, such as (batch,), from torch's default generator."""
    return torch.randint(INT64.min, INT64.max, shape, dtype=torch.int64, device=device)


def seed_each(seeds: Tensor | int, batch: int, device: torch.device) -> Tensor:
    """Return checked seeds as a [batch] int64 tensor."""
    return seeds if isinstance(seeds, Tensor) else torch.arange(batch, dtype=torch.int64, device=device) + seeds


def check_positions(
    positions: Tensor | None, batch: int, device: torch.device, used: Tensor | None = None
) -> Tensor | None:
    """Return positions as a [batch] int64 tensor, or None."""
    if positions is None:
        return None
    check_tensor("positions", positions, (torch.int64,), (batch,), device)
    if on_host(positions):
        check_values("positions", positions, positions >= 0, "numbers >= 0", used)
    return plain(positions)
