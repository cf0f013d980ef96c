"""What goes into a backend and what comes out. Arguments are checked here, once."""

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdecode.sharding import VocabShard

Logprobs = Literal["processed", "raw"]
"""Of what emitted tokens' log-probabilities are: the distribution sampled from, or softmax(logits)."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
INT64 = torch.iinfo(torch.int64)


class SamplerOutput(NamedTuple):
    """What one verification step decided, for a batch of requests."""

    token_ids: Tensor
    """[batch, num_draft_tokens + 1] int64: accepted drafts, one recovered or bonus token, then -1."""

    num_accepted: Tensor
    """[batch] int32: accepted draft tokens."""

    num_draft_tokens: Tensor
    """[batch] int32: draft tokens that the request had, -1 padding not counted."""

    invalid: Tensor
    """[batch] bool: a target row that the result depends on had no finite logit, only NaN or -inf. It emits token 0.

    In a packed call also: the request had no rows, or its rows or its slot are none.
    """

    logprobs: Tensor | None = None
    """[batch, num_draft_tokens + 1] float32: the log-probability of each emitted token, NaN where `token_ids` is -1.

    None if it was not asked for.
    """

    @property
    def num_tokens(self) -> Tensor:
        """[batch] int32: emitted tokens, `num_accepted + 1`."""
        return self.num_accepted + 1


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
        if sampling.top_k is sampling.top_p is sampling.min_p is None:  # as most often: a call does no more for it
            return None
        truncation = cls(
            check_top_k(f"{of}top_k", sampling.top_k, batch, vocab, device, used),
            check_share(f"{of}top_p", sampling.top_p, batch, device, 1, used),
            check_share(f"{of}min_p", sampling.min_p, batch, device, 0, used),
        )
        return None if all(field is None for field in truncation) else truncation


class RowBatch(NamedTuple):
    """Checked arguments for drawing one token from each row of logits."""

    logits: Tensor  # [batch, vocab] any float
    temperature: Tensor | float  # [batch] any float, or one for all
    seeds: Tensor | int  # [batch] int64, or s meaning s, s + 1, ...
    positions: Tensor | None  # [batch] int64, or None for zeros
    truncation: Truncation | None = None
    shard: "VocabShard | None" = None  # which part of the vocabulary the logits are; None: all of it

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are left out of any row."""
        return self.truncation is not None

    @classmethod
    def check(
        cls,
        logits: Tensor,
        temperature: Tensor | float,
        seeds: Tensor | int | None,
        positions: Tensor | None,
        top_k: Tensor | int | None = None,
        top_p: Tensor | float | None = None,
        min_p: Tensor | float | None = None,
        shard: "VocabShard | None" = None,
    ) -> "RowBatch":
        """Build a batch from a caller's arguments.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape, device or value.
        """
        batch, vocab = check_logits("logits", logits, ("batch", "vocab"), shard)
        for_seeds = seeds, batch, logits.device
        return cls(
            plain(logits),
            check_temperature(temperature, batch, logits.device),
            check_seeds(*for_seeds) if shard is None else shard.check_seeds(*for_seeds, logits),
            check_positions(positions, batch, logits.device),
            Truncation.check(Sampling(temperature, top_k, top_p, min_p), batch, vocab, logits.device),
            shard,
        )


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


class Packing(NamedTuple):
    """Where the rows and the state of each request of a packed call are. Their values are checked only on the CPU."""

    row_starts: Tensor  # [batch + 1] int32 or int64
    num_draft_tokens: int  # the most that a request may have
    slots: Tensor | None  # [batch] int32 or int64; None: the request itself
    num_slots: int
    seeds_by_request: bool  # seeds are not by slot, because they were drawn for this call

    def extent(self, target_logits: Tensor, shard: "VocabShard | None") -> Extent:
        """Return how much there is of everything. What is used is known on the CPU alone."""
        batch, device = self.row_starts.shape[0] - 1, target_logits.device
        vocab = target_logits.shape[1] if shard is None else shard.vocab_size
        used_slots, used_requests = self.used() if on_host(self.row_starts) else (None, None)
        return Extent(batch, self.num_slots, self.num_draft_tokens, vocab, device, used_slots, used_requests)

    def used(self) -> tuple[Tensor, Tensor]:
        """Return which slots are used, [num_slots] bool, and which requests have rows, [batch] bool."""
        has_rows = self.row_starts.diff() > 0
        slots = torch.arange(len(has_rows)) if self.slots is None else self.slots
        used = torch.zeros(self.num_slots, dtype=torch.bool)
        used[slots[has_rows].long()] = True
        return used, has_rows


class VerificationBatch(NamedTuple):
    """Checked arguments of a verification step: the one bundle of tensors that both backends receive.

    In a packed call target logits and draft tokens are by row, positions by request, and all else by slot, which is
    `num_slots` in place of `batch`.
    """

    target_logits: Tensor  # [batch, num_draft_tokens + 1, vocab] any float; packed: [num_rows, vocab]
    draft_token_ids: Tensor  # [batch, num_draft_tokens] int32 or int64; packed: [num_rows]
    draft_logits: Tensor | None  # [batch, num_draft_tokens, vocab] any float
    draft_logsumexp: Tensor | None  # [batch, num_draft_tokens] float32
    temperature: Tensor | float  # [batch] any float, or one for all
    seeds: Tensor | int  # [batch] int64, or s meaning s, s + 1, ...
    positions: Tensor | None  # [batch] int64, or None for zeros
    truncation: Truncation | None = None
    draft_temperature: Tensor | float | None = None  # like temperature; None: the same
    draft_truncation: Truncation | None = None
    draft_cutoff: Tensor | None = None  # [batch, num_draft_tokens] int64
    logprobs: Logprobs | None = None
    packing: Packing | None = None
    shard: "VocabShard | None" = None  # which part of the vocabulary the logits are; None: all of it
    draft_vocab_ids: Tensor | None = None  # [draft_vocab] int32 or int64, tokens of draft_logits; None: the target's

    @property
    def num_draft_tokens(self) -> int:
        """The most drafts of a request."""
        return self.draft_token_ids.shape[1] if self.packing is None else self.packing.num_draft_tokens

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are left out of any row, or drafts were drawn otherwise than the target samples."""
        of_drafts = self.draft_truncation is not None or self.draft_temperature is not None
        return self.truncation is not None or of_drafts

    @classmethod
    def check(
        cls,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None,
        draft_logsumexp: Tensor | None,
        temperature: Tensor | float,
        seeds: Tensor | int | None,
        positions: Tensor | None,
        top_k: Tensor | int | None = None,
        top_p: Tensor | float | None = None,
        min_p: Tensor | float | None = None,
        draft_sampling: Sampling | None = None,
        draft_cutoff: Tensor | None = None,
        logprobs: Logprobs | None = None,
        draft_vocab_ids: Tensor | None = None,
        shard: "VocabShard | None" = None,
        packing: Packing | None = None,
    ) -> "VerificationBatch":
        """Build a batch from a caller's arguments.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape, device or value.
        """
        if packing is None:
            extent = check_padded(target_logits, draft_token_ids, draft_logits, shard)
        else:
            extent = packing.extent(target_logits, shard)
        device, draft_vocab = extent.device, None
        if draft_vocab_ids is not None:
            draft_vocab = check_draft_vocab_ids(draft_vocab_ids, draft_logits, extent.vocab, device, shard)
        check_draft_rows(draft_logits, draft_logsumexp, draft_vocab or target_logits.shape[-1], extent)
        if packing is None:
            check_token_ids(draft_token_ids, extent.vocab)
        sampling = Sampling(temperature, top_k, top_p, min_p)
        of_both = check_samplings(sampling, draft_sampling, draft_logits, draft_vocab, extent)
        truncation, draft_temperature, draft_truncation = of_both
        check_draft_cutoff(draft_cutoff, extent.drafts, device, draft_logsumexp, draft_truncation)
        if logprobs is not None:
            check_choice("logprobs", logprobs, get_args(Logprobs))
        for_seeds = seeds, extent.batch if seeds is None else extent.num_slots, device
        return cls(
            plain(target_logits),
            plain(draft_token_ids),
            None if draft_logits is None else plain(draft_logits),
            None if draft_logsumexp is None else plain(draft_logsumexp),
            check_temperature(temperature, extent.num_slots, device, used=extent.used_slots),
            check_seeds(*for_seeds) if shard is None else shard.check_seeds(*for_seeds, target_logits),
            check_positions(positions, extent.batch, device, extent.used_requests),
            truncation,
            draft_temperature,
            draft_truncation,
            None if draft_cutoff is None else plain(draft_cutoff),
            logprobs,
            packing,
            shard,
            None if draft_vocab_ids is None else plain(draft_vocab_ids),
        )


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


MOST_DRAFT_TOKENS = 4096
"""The most drafts of a step. Real steps have far fewer; a larger number is a mistake, and could fill the memory."""


def check_count(name: str, value: object, most: int | None = None, least: int = 1) -> int:
    """Return an int of at least `least` and at most `most`, or raise."""
    expected = "a positive int" if least == 1 else f"an int >= {least}"
    # int comes first because the check for Integral, an abstract class, takes longer.
    if not isinstance(value, (int, Integral)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected {expected}, got {shown(value)} ({type(value).__name__})")
    count = int(value)
    if count < least:
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
    """Raise unless `tensor` is a plain tensor of one of the dtypes, of this shape, on this device."""
    check_type(name, tensor, dtypes)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.device != device:  # without a call where it is right
        check_device(name, tensor, device)


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise unless `tensor` is on this device."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device}, where the logits are, got {tensor.device}")


def check_type(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless `tensor` is a plain tensor of one of the dtypes."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
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
    name: str, logits: Tensor, dimensions: tuple[str, ...], shard: "VocabShard | None" = None
) -> tuple[int, ...]:
    """Raise unless `logits` is a float tensor with these dimensions and a vocabulary; return its shape, unsharded."""
    check_type(name, logits, FLOATS)
    if logits.ndim != len(dimensions):
        raise ValueError(f"{name}: expected shape [{', '.join(dimensions)}], got {list(logits.shape)}")
    if shard is not None:  # which may be empty
        return *logits.shape[:-1], shard.vocab_size
    if logits.shape[-1] == 0:
        raise ValueError(f"{name}: expected a vocabulary of at least one token, got shape {list(logits.shape)}")
    return logits.shape


def check_padded(
    target_logits: Tensor, draft_token_ids: Tensor, draft_logits: Tensor | None, shard: "VocabShard | None"
) -> Extent:
    """Raise unless target logits and draft tokens have shapes that fit together; return how much there is."""
    dimensions = "batch", "num_draft_tokens + 1", "vocab"
    batch, rows, vocab = check_logits("target_logits", target_logits, dimensions, shard)
    if rows == 0:
        raise ValueError(
            "target_logits: expected shape [batch, num_draft_tokens + 1, vocab], so at least one row per request, got 0"
        )
    try:
        check_tensor("draft_token_ids", draft_token_ids, INTEGERS, (batch, rows - 1), target_logits.device)
    except ValueError:
        check_num_rows(rows, draft_token_ids, draft_logits)
        raise
    return Extent(batch, batch, rows - 1, vocab, target_logits.device)


def check_num_rows(rows: int, draft_token_ids: Tensor, draft_logits: Tensor | None) -> None:
    """Raise an error that names target_logits, unless draft_logits shows that draft_token_ids has the wrong size."""
    if draft_token_ids.ndim != 2 or draft_token_ids.shape[1] == rows - 1:
        return
    if isinstance(draft_logits, Tensor) and draft_logits.ndim == 3 and draft_logits.shape[1] == rows - 1:
        return  # target_logits and draft_logits agree: draft_token_ids is wrong
    drafts = draft_token_ids.shape[1]
    raise ValueError(
        f"target_logits: expected {drafts + 1} rows per request, one more than draft_token_ids has drafts ({drafts}), "
        f"got {rows}"
    ) from None


def check_token_ids(draft_token_ids: Tensor, vocab: int) -> None:
    """Raise on an id outside the vocabulary, on the CPU; on other devices the backends treat such an id as -1."""
    if not on_host(draft_token_ids):
        return
    ended = (draft_token_ids == -1).cumsum(dim=1) > 0
    valid = ((draft_token_ids >= 0) & (draft_token_ids < vocab)) | ended
    check_values("draft_token_ids", draft_token_ids, valid, f"ids in [0, {vocab}), or -1 for no draft")


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


def check_draft_rows(draft_logits: Tensor | None, draft_logsumexp: Tensor | None, width: int, extent: Extent) -> None:
    """Raise unless there is a row of logits for each draft, and a logsumexp for each row, if there are any."""
    if draft_logits is not None:
        check_tensor("draft_logits", draft_logits, FLOATS, (*extent.drafts, width), extent.device)
    if draft_logsumexp is not None:
        check_tensor("draft_logsumexp", draft_logsumexp, (torch.float32,), extent.drafts, extent.device)
        if draft_logits is None:
            raise ValueError("draft_logsumexp: given without the draft_logits that it belongs to")


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


def check_draft_vocab_ids(
    draft_vocab_ids: Tensor,
    draft_logits: Tensor | None,
    vocab: int,
    device: torch.device,
    shard: "VocabShard | None",
) -> int:
    """Raise unless they are distinct ids of the target's tokens, one for each of draft_logits; return how many.

    Their values are checked only on the CPU.
    """
    name = "draft_vocab_ids"
    if shard is not None:
        raise ValueError(f"{name}: not supported with a shard of the vocabulary; spread draft_logits over the target's")
    if draft_logits is None:
        raise ValueError(f"{name}: given without the draft_logits whose tokens they are")
    check_type("draft_logits", draft_logits, FLOATS)
    size = draft_logits.shape[-1] if draft_logits.ndim > 0 else 0
    if size == 0:
        expected = "a last dimension of at least one token, those of draft_vocab_ids"
        raise ValueError(f"draft_logits: expected {expected}, got shape {list(draft_logits.shape)}")
    check_type(name, draft_vocab_ids, INTEGERS)
    if draft_vocab_ids.shape != (size,):
        expected = f"shape [{size}], one id for each token of draft_logits"
        raise ValueError(f"{name}: expected {expected}, got {list(draft_vocab_ids.shape)}")
    check_device(name, draft_vocab_ids, device)
    if size > vocab:
        raise ValueError(f"{name}: expected at most {vocab} ids, as many as the target has tokens, got {size}")
    if on_host(draft_vocab_ids):
        inside = (draft_vocab_ids >= 0) & (draft_vocab_ids < vocab)
        check_values(name, draft_vocab_ids, inside, f"ids in [0, {vocab})")
        is_only = draft_vocab_ids.bincount()[draft_vocab_ids.long()] == 1
        check_values(name, draft_vocab_ids, is_only, "distinct ids")
    return size


def check_draft_cutoff(
    draft_cutoff: Tensor | None,
    drafts: tuple[int, int],
    device: torch.device,
    draft_logsumexp: Tensor | None,
    draft_truncation: Truncation | None,
) -> None:
    """Raise unless a cutoff comes with each logsumexp of truncated draft rows, and with nothing else."""
    if draft_cutoff is not None:
        check_tensor("draft_cutoff", draft_cutoff, (torch.int64,), drafts, device)
        if draft_logsumexp is None:
            raise ValueError("draft_cutoff: given without the draft_logsumexp that it belongs to")
        if draft_truncation is None:
            raise ValueError("draft_cutoff: given, but the drafts were drawn without top_k, top_p and min_p")
    elif draft_logsumexp is not None and draft_truncation is not None:
        raise ValueError(
            "draft_cutoff: needed beside draft_logsumexp, because the drafts were drawn from truncated rows"
        )


def check_seeds(seeds: Tensor | int | None, batch: int, device: torch.device) -> Tensor | int:
    """Return seeds as a [batch] int64 tensor, or as one int s meaning s, s + 1, ...; None gives fresh random seeds."""
    if seeds is None:
        return torch.randint(INT64.min, INT64.max, (batch,), dtype=torch.int64, device=device)
    if isinstance(seeds, Tensor):
        check_tensor("seeds", seeds, (torch.int64,), (batch,), device)
        return plain(seeds)
    if isinstance(seeds, bool) or not isinstance(seeds, (int, Integral)):
        raise TypeError(f"seeds: expected an int, a [batch] int64 tensor or None, got {type(seeds).__name__}")
    if not INT64.min <= seeds <= INT64.max:
        raise ValueError(f"seeds: expected an int of 64 bits, got {shown(seeds)}")
    return int(seeds)


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
