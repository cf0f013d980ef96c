"""The arguments of calls: each is described once, in `ARGUMENTS`, and checked against its description.

`check_verification` and `check_rows` build the bundles of `specdecode.batch`. Values of tensors are checked only on the
CPU: on a device a check would make the host wait, so backends make bad values harmless there.
"""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple, TypedDict, TypeVar, cast, get_args

import torch
from torch import Tensor, strided

from specdecode.adjustments import SMALLEST_FACTOR, WORD, Adjustments
from specdecode.batch import (
    MOST_TOP_LOGPROBS,
    Logprobs,
    Packing,
    RowBatch,
    Sampling,
    TreeBatch,
    Truncation,
    VerificationBatch,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
INT64 = torch.iinfo(torch.int64)

MOST_DRAFT_TOKENS = 4096
"""The most drafts of a step. Real steps have far fewer; a larger number is a mistake, and could fill the memory."""

MOST_SIBLINGS = 8
"""The most siblings that are drawn at once."""

Bundle = TypeVar("Bundle", bound=tuple[Any, ...])


class Argument(NamedTuple):
    """The description of an argument."""

    dtypes: tuple[torch.dtype, ...]
    dimensions: tuple[str, ...]
    """Names of its dimensions; `Sizes` has their sizes. In a padded call `"slot"` has the size of `"request"`; in a packed
    call `"row"` is the one dimension of all rows of all requests, and `"request"` before it is dropped."""
    expected: str = ""
    """The valid values, for errors; `{vocab}` and other dimensions are replaced by their sizes."""
    is_valid: Callable[[Any, "Sizes"], Any] | None = None
    """Returns whether each value of a tensor, or one number for all requests, is valid."""
    neutral: int | None = None
    """The neutral number, equivalent to None."""
    needs: str | None = None
    """The argument without which this one is an error."""


def in_float32(value: Any) -> Any:
    """Return values rounded to float32."""
    if isinstance(value, Tensor):
        return value.float()
    return torch.tensor(value, dtype=torch.float64, device="cpu").float().item()


ARGUMENTS = {
    "logits": Argument(FLOATS, ("request", "vocab")),
    "target_logits": Argument(FLOATS, ("request", "row", "vocab")),
    "draft_token_ids": Argument(INTEGERS, ("request", "draft"), "ids in [0, {vocab}), or -1 for no draft"),
    "token_ids": Argument(INTEGERS, ("request", "node")),
    "parents": Argument(INTEGERS, ("request", "node")),
    "draft_logits": Argument(FLOATS, ("slot", "draft", "draft_vocab")),
    "temperature": Argument(
        FLOATS, ("slot",), "finite numbers >= 0", lambda values, _: (values >= 0) & (abs(values) < math.inf)
    ),
    "seeds": Argument((torch.int64,), ("slot",)),
    "top_k": Argument(INTEGERS, ("slot",), "numbers >= 0", lambda values, _: values >= 0, neutral=0),
    "top_p": Argument(
        FLOATS, ("slot",), "numbers in (0, 1]", lambda values, _: (values > 0) & (values <= 1), neutral=1
    ),
    "min_p": Argument(
        FLOATS, ("slot",), "numbers in [0, 1]", lambda values, _: (values >= 0) & (values <= 1), neutral=0
    ),
    "positions": Argument((torch.int64,), ("request",), "numbers >= 0", lambda values, _: values >= 0),
    "row_positions": Argument((torch.int64,), ("row",), "numbers >= 0 at the first row of each request"),
    "row_starts": Argument(
        INTEGERS,
        ("request_end",),
        "numbers in [0, {row}], the number of rows",
        lambda values, sizes: (values >= 0) & (values <= sizes["row"]),
    ),
    "slots": Argument(INTEGERS, ("request",), "numbers in [0, {slot}), the number of slots"),
    "draft_logsumexp": Argument((torch.float32,), ("slot", "draft"), needs="draft_logits"),
    "draft_cutoff": Argument((torch.int64,), ("slot", "draft"), needs="draft_logsumexp"),
    "draft_vocab_ids": Argument(
        INTEGERS,
        ("draft_vocab",),
        "ids in [0, {vocab})",
        lambda values, sizes: (values >= 0) & (values < sizes["vocab"]),
        needs="draft_logits",
    ),
    "repetition_penalty": Argument(
        FLOATS,
        ("slot",),
        "finite numbers > 0",
        lambda values, _: (in_float32(values) >= SMALLEST_FACTOR) & (in_float32(values) < math.inf),
        neutral=1,
    ),
    "frequency_penalty": Argument(
        FLOATS, ("slot",), "finite numbers", lambda values, _: abs(in_float32(values)) < math.inf, neutral=0
    ),
    "presence_penalty": Argument(
        FLOATS, ("slot",), "finite numbers", lambda values, _: abs(in_float32(values)) < math.inf, neutral=0
    ),
    "prompt_mask": Argument((torch.int32,), ("slot", "word")),
    "output_counts": Argument((torch.int32,), ("slot", "vocab"), "numbers >= 0", lambda values, _: values >= 0),
    "bias_ids": Argument(
        INTEGERS,
        ("slot", "bias"),
        "ids in [0, {vocab}), or -1 for none",
        lambda values, sizes: (values >= -1) & (values < sizes["vocab"]),
        needs="bias",
    ),
    "bias": Argument(FLOATS, ("slot", "bias"), "numbers", needs="bias_ids"),
    "allowed_mask": Argument((torch.int32,), ("request", "row", "word")),
}
"""The tensors that calls take, by name; `draft_sampling` and `adjustments` are bundles of some of them."""


class CommonOptions(TypedDict, total=False):
    """The keyword arguments that calls of chains and of trees share."""

    temperature: Tensor | float
    top_k: Tensor | int | None
    top_p: Tensor | float | None
    min_p: Tensor | float | None
    seeds: Tensor | int | None
    positions: Tensor | None
    logprobs: Logprobs | None
    adjustments: Adjustments | None
    top_logprobs: int | None
    kept_sets: bool


class Options(CommonOptions, total=False):
    """The keyword arguments that padded and packed calls of chains share."""

    draft_sampling: Sampling | None
    draft_logsumexp: Tensor | None
    draft_cutoff: Tensor | None
    draft_vocab_ids: Tensor | None


class Sizes(dict[str, int]):
    """The sizes of a call's dimensions, the device of its tensors, and masks of the requests and slots in use."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device, packed: bool = False) -> None:
        super().__init__(sizes)
        self.device = device
        self.packed = packed
        self.used: dict[str, Tensor] = {}  # [slot] and [request] bool; empty: all

    def shape(self, dimensions: tuple[str, ...]) -> tuple[int, ...]:
        """Return the shape of an argument with these dimensions."""
        if self.packed and "row" in dimensions:
            dimensions = tuple([name for name in dimensions if name != "request"])
        return tuple([self[name] for name in dimensions])


def select(bundle: Bundle, **index: Any) -> Bundle:
    """Index the tensors of a bundle of padded arguments along named dimensions, as in `select(batch, draft=slice(2))`."""

    def indexed(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(indexed, value._fields, value))  # type: ignore[attr-defined]
        if not isinstance(value, Tensor):
            return value
        # draft_temperature has the description of temperature.
        argument = ARGUMENTS.get(name) or ARGUMENTS.get(name.removeprefix("draft_"))
        if argument is None or index.keys().isdisjoint(argument.dimensions):
            return value
        return value[tuple([index.get(dimension, slice(None)) for dimension in argument.dimensions])]

    return cast("Bundle", indexed("", bundle))


def check_verification(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None = None,
    *,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    draft_sampling: Sampling | None = None,
    seeds: Tensor | int | None = None,
    positions: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    draft_cutoff: Tensor | None = None,
    draft_vocab_ids: Tensor | None = None,
    logprobs: Logprobs | None = None,
    adjustments: Adjustments | None = None,
    top_logprobs: int | None = None,
    kept_sets: bool = False,
    row_starts: Tensor | None = None,
    num_draft_tokens: int | None = None,
    slots: Tensor | None = None,
    row_positions: Tensor | None = None,
    vocab_size: int | None = None,
    num_slots: int | None = None,
) -> VerificationBatch:
    """Build a batch from the arguments of a call; with `row_starts` the call is packed.

    With `vocab_size`, the size of the whole vocabulary, target logits are a shard of the vocabulary; draft logits are the
    same shard, or whole rows. `num_slots` is the size of tensors by slot; None: the size of the first such tensor.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value, or one without another that it needs.
    """
    check_bundle("draft_sampling", draft_sampling, Sampling)
    check_bundle("adjustments", adjustments, Adjustments)
    packing = None
    if row_starts is None:
        sizes = check_padded(target_logits, draft_token_ids, draft_logits, vocab_size)
    else:
        by_slot = {
            "draft_logits": draft_logits,
            **{"temperature": temperature, "seeds": seeds, "top_k": top_k, "top_p": top_p, "min_p": min_p},
            **fields_by_slot("draft_sampling", draft_sampling),
            **{"draft_logsumexp": draft_logsumexp, "draft_cutoff": draft_cutoff},
            **fields_by_slot("adjustments", adjustments),
        }
        if row_positions is not None and positions is not None:
            raise ValueError("row_positions: given beside positions, which they replace")
        rows = target_logits, draft_token_ids, row_starts, num_draft_tokens
        sizes, packing = check_packed(*rows, slots, row_positions, by_slot, vocab_size, num_slots)

    draft_vocab = check_draft_rows(draft_logits, draft_vocab_ids, target_logits.shape[-1], vocab_size, sizes)
    truncation = check_truncation(Sampling(temperature, top_k, top_p, min_p), sizes, sizes["vocab"])
    draft_temperature, draft_truncation = None, None if draft_logits is None else truncation
    if draft_sampling is not None:
        check_needs("draft_sampling", draft_logits)
        draft_temperature = check_number("temperature", draft_sampling.temperature, sizes, "draft_sampling.")
        draft_truncation = check_truncation(draft_sampling, sizes, draft_vocab, "draft_sampling.")
    elif truncation is not None and draft_vocab < sizes["vocab"]:  # a top_k >= draft_vocab is neutral
        draft_truncation = check_truncation(Sampling(temperature, top_k, top_p, min_p), sizes, draft_vocab)
    if draft_logsumexp is not None:
        check_needs("draft_logsumexp", draft_logits)
        if draft_truncation is not None and draft_cutoff is None:
            raise ValueError("draft_cutoff: needed beside draft_logsumexp, because drafts came from truncated rows")
    if draft_cutoff is not None:
        check_needs("draft_cutoff", draft_logsumexp)
        if draft_truncation is None:
            raise ValueError("draft_cutoff: given, but the drafts were drawn without top_k, top_p and min_p")
    if logprobs is not None:
        check_choice("logprobs", logprobs, get_args(Logprobs))
    return VerificationBatch(
        target_logits=plain(target_logits),
        draft_token_ids=plain(draft_token_ids),
        draft_logits=None if draft_logits is None else plain(draft_logits),
        draft_logsumexp=check_argument("draft_logsumexp", draft_logsumexp, sizes),
        temperature=check_number("temperature", temperature, sizes),
        seeds=check_seeds(seeds, sizes["request" if seeds is None else "slot"], sizes.device),
        positions=check_argument("positions", positions, sizes),
        truncation=truncation,
        draft_temperature=draft_temperature,
        draft_truncation=draft_truncation,
        draft_cutoff=check_argument("draft_cutoff", draft_cutoff, sizes),
        logprobs=logprobs,
        packing=packing,
        draft_vocab_ids=None if draft_vocab_ids is None else plain(draft_vocab_ids),
        adjustments=None if adjustments is None else check_adjustments(adjustments, sizes),
        top_logprobs=check_lists(top_logprobs, kept_sets, logprobs),
        kept_sets=kept_sets,
    )


def check_rows(
    logits: Tensor,
    temperature: Tensor | float = 1.0,
    seeds: Tensor | int | None = None,
    positions: Tensor | None = None,
    *,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    adjustments: Adjustments | None = None,
    vocab_size: int | None = None,
) -> RowBatch:
    """Build a batch of rows from the arguments of a call; with `vocab_size` the logits are a shard of that vocabulary.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value.
    """
    check_bundle("adjustments", adjustments, Adjustments)
    batch, vocab = check_logits("logits", logits, ("batch", "vocab"), vocab_size)
    sizes = Sizes({"request": batch, "slot": batch, "row": 1, "vocab": vocab}, logits.device)
    if adjustments is not None:
        mask = adjustments.allowed_mask
        if isinstance(mask, Tensor) and mask.ndim == 2:  # [batch, words]: one mask for each request
            adjustments = adjustments._replace(allowed_mask=mask[:, None])
        adjustments = check_adjustments(adjustments, sizes)
    return RowBatch(
        plain(logits),
        check_number("temperature", temperature, sizes),
        check_seeds(seeds, batch, logits.device),
        check_argument("positions", positions, sizes),
        check_truncation(Sampling(temperature, top_k, top_p, min_p), sizes, vocab),
        adjustments,
    )


def check_tree(
    target_logits: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    *,
    max_depth: int,
    row_starts: Tensor | None = None,
    slots: Tensor | None = None,
    adjustments: Adjustments | None = None,
    **options: Any,
) -> TreeBatch:
    """Build the batch of a tree verification from the arguments of a call; with `row_starts` the call is packed.

    Raises:
        TypeError: an argument of the wrong type or dtype, or one that trees do not take.
        ValueError: an argument of the wrong shape, device or value.
    """
    for name, value in options.items():
        if name not in CommonOptions.__annotations__ and not (name in Options.__annotations__ and value is None):
            raise TypeError(f"{name}: trees take no such argument; their drafts' distribution is not needed")
    options = {name: value for name, value in options.items() if name in CommonOptions.__annotations__}
    check_bundle("adjustments", adjustments, Adjustments)
    check_type("token_ids", token_ids, INTEGERS)
    if token_ids.ndim != 2 or not 1 <= token_ids.shape[1] <= MOST_DRAFT_TOKENS + 1:
        expected = f"shape [batch, nodes] with 1 to {MOST_DRAFT_TOKENS + 1} nodes"
        raise ValueError(f"token_ids: expected {expected}, got {list(token_ids.shape)}")
    batch, nodes = token_ids.shape
    num_slots = None
    if row_starts is None:
        if slots is not None:
            raise ValueError("slots: given without row_starts, which makes a call packed")
        shape = check_logits("target_logits", target_logits, ("batch", "nodes", "vocab"))
        if shape[:2] != (batch, nodes):
            raise ValueError(f"target_logits: expected shape {[batch, nodes, shape[2]]}, got {list(shape)}")
        mask = None if adjustments is None else adjustments.allowed_mask
        if adjustments is not None and isinstance(mask, Tensor):
            words = -(-shape[2] // WORD)
            if mask.shape != (batch, nodes, words):
                raise ValueError(
                    f"adjustments.allowed_mask: expected shape {[batch, nodes, words]}, got {list(mask.shape)}"
                )
            adjustments = adjustments._replace(allowed_mask=mask.flatten(0, 1))
        target_logits, num_slots = target_logits.flatten(0, 1), batch
        row_starts = nodes * torch.arange(batch + 1, device=target_logits.device)
    else:
        check_logits("target_logits", target_logits, ("num_rows", "vocab"))
    # A tree is verified as packed rows, one for each node. Draft tokens of rows must be valid ids, but are not read.
    no_drafts = torch.zeros(1, dtype=torch.int64, device=target_logits.device).expand(len(target_logits))
    rows = check_verification(
        target_logits,
        no_drafts,
        row_starts=row_starts,
        num_draft_tokens=nodes - 1,
        slots=slots,
        adjustments=adjustments,
        num_slots=num_slots,
        **options,
    )
    if rows.num_requests != batch:
        raise ValueError(
            f"row_starts: expected shape [{batch + 1}], one more than requests, got {list(row_starts.shape)}"
        )
    if isinstance(parents, Tensor) and parents.shape == (nodes,):  # one tree for all requests
        parents = parents.expand(batch, -1)
    sizes = Sizes({"request": batch, "node": nodes}, target_logits.device)
    return TreeBatch(
        rows,
        check_argument("token_ids", token_ids, sizes),
        check_argument("parents", parents, sizes),
        check_count("max_depth", max_depth, MOST_DRAFT_TOKENS, least=0),
    )


# The sizes of a call


def check_padded(
    target_logits: Tensor, draft_token_ids: Tensor, draft_logits: Tensor | None, vocab_size: int | None
) -> Sizes:
    """Raise unless target logits and draft tokens have shapes that match; return the sizes of the call."""
    dimensions = "batch", "num_draft_tokens + 1", "vocab"
    batch, rows, vocab = check_logits("target_logits", target_logits, dimensions, vocab_size)
    if rows == 0:
        raise ValueError(
            "target_logits: expected shape [batch, num_draft_tokens + 1, vocab], so at least one row per request, got 0"
        )
    sizes = {"request": batch, "slot": batch, "row": rows, "draft": rows - 1, "vocab": vocab}
    try:
        check_tensor("draft_token_ids", draft_token_ids, INTEGERS, (batch, rows - 1), target_logits.device)
    except ValueError:
        check_num_rows(rows, draft_token_ids, draft_logits)
        raise
    if on_host(draft_token_ids):
        is_ended = (draft_token_ids == -1).cumsum(dim=1) > 0
        check_draft_token_ids(draft_token_ids, is_ended, vocab)
    return Sizes(sizes, target_logits.device)


def check_num_rows(rows: int, draft_token_ids: Tensor, draft_logits: Tensor | None) -> None:
    """Raise an error that names target_logits, if its number of rows disagrees with draft_token_ids.

    If draft_logits agrees with target_logits, draft_token_ids has the wrong size: then return, for another error.
    """
    if draft_token_ids.ndim != 2 or draft_token_ids.shape[1] == rows - 1:
        return
    if isinstance(draft_logits, Tensor) and draft_logits.ndim == 3 and draft_logits.shape[1] == rows - 1:
        return
    drafts = draft_token_ids.shape[1]
    raise ValueError(
        f"target_logits: expected {drafts + 1} rows per request, one more than draft_token_ids has drafts ({drafts}), "
        f"got {rows}"
    ) from None


def check_draft_token_ids(draft_token_ids: Tensor, is_ignored: Tensor, vocab: int) -> None:
    """Raise on an id outside the vocabulary, unless it is ignored."""
    valid = ((draft_token_ids >= 0) & (draft_token_ids < vocab)) | is_ignored
    check_values("draft_token_ids", draft_token_ids, valid, ARGUMENTS["draft_token_ids"].expected.format(vocab=vocab))


def check_packed(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    row_starts: Tensor,
    num_draft_tokens: int | None,
    slots: Tensor | None,
    row_positions: Tensor | None,
    by_slot: Mapping[str, object],
    vocab_size: int | None,
    num_slots: int | None,
) -> tuple[Sizes, Packing]:
    """Raise unless rows, drafts and slots match; return the call's `Sizes` and `Packing`.

    `by_slot` maps names to the arguments that may be tensors by slot. The others are as for `check_verification`.
    """
    num_rows, vocab = check_logits("target_logits", target_logits, ("num_rows", "vocab"), vocab_size)
    device = target_logits.device
    all_but_last = isinstance(draft_token_ids, Tensor) and draft_token_ids.shape == (num_rows - 1,)
    check_tensor("draft_token_ids", draft_token_ids, INTEGERS, (num_rows - all_but_last,), device)
    most = check_count("num_draft_tokens", num_draft_tokens, MOST_DRAFT_TOKENS, least=0)
    check_type("row_starts", row_starts, INTEGERS)
    if row_starts.ndim != 1 or row_starts.shape[0] == 0:
        raise ValueError(f"row_starts: expected shape [batch + 1], got {list(row_starts.shape)}")
    batch = row_starts.shape[0] - 1
    sizes = Sizes({"request": batch, "row": num_rows, "draft": most, "vocab": vocab}, device, packed=True)
    sizes["request_end"] = batch + 1
    row_starts = check_argument("row_starts", row_starts, sizes)
    slots, row_positions = check_argument("slots", slots, sizes), check_argument("row_positions", row_positions, sizes)
    name, sizes["slot"] = count_slots(by_slot, batch, slots) if num_slots is None else (None, num_slots)
    if name is None:
        slots = None  # no tensor is by slot
    if on_host(row_starts):
        check_row_starts(row_starts, most)
        check_packed_draft_ids(draft_token_ids, row_starts, vocab)
        sizes.used = check_slots(slots, row_starts, name, sizes["slot"])
        if row_positions is not None:
            first_rows = row_starts[:-1][sizes.used["request"]].long()
            valid = torch.ones_like(row_positions, dtype=torch.bool)
            valid[first_rows] = row_positions[first_rows] >= 0
            check_values("row_positions", row_positions, valid, ARGUMENTS["row_positions"].expected)
    return sizes, Packing(row_starts, most, slots, sizes["slot"], by_slot["seeds"] is None, row_positions)


def fields_by_slot(name: str, bundle: Sampling | Adjustments | None) -> dict[str, object]:
    """Return the fields of a bundle that are by slot in a packed call, by full name."""
    fields = {} if bundle is None else bundle._asdict()
    return {f"{name}.{field}": value for field, value in fields.items() if "slot" in ARGUMENTS[field].dimensions}


def count_slots(by_slot: Mapping[str, object], batch: int, slots: Tensor | None) -> tuple[str | None, int]:
    """Return (the name of the first tensor by slot, its number of slots); (None, batch) without such a tensor."""
    for name, value in by_slot.items():
        if isinstance(value, Tensor) and value.ndim > 0:
            num_slots = value.shape[0]
            if slots is None and num_slots < batch:
                expected = f"a slot for each of {batch} requests, because slots is None"
                raise ValueError(f"{name}: expected {expected}, got {num_slots}")
            if num_slots == 0 < batch:
                raise ValueError(f"{name}: expected at least one slot, got 0")
            return name, num_slots
    return None, batch


def check_row_starts(row_starts: Tensor, most: int) -> None:
    """Raise if starts decrease, or a request has more than `most + 1` rows."""
    counts = row_starts.diff()
    is_in_order = torch.nn.functional.pad(counts >= 0, (1, 0), value=True)
    check_values("row_starts", row_starts, is_in_order, "numbers that do not decrease")
    if (counts > most + 1).any():
        request, expected = int(counts.argmax()), f"at most num_draft_tokens + 1 = {most + 1} rows for each request"
        raise ValueError(f"row_starts: expected {expected}, got {int(counts[request])} for request {request}")


def check_packed_draft_ids(draft_token_ids: Tensor, row_starts: Tensor, vocab: int) -> None:
    """Raise on a packed draft outside the vocabulary; a request's ids after a -1 and in its last row are ignored."""
    counts = row_starts.diff()
    requests = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    first = int(row_starts[0])
    rows = torch.arange(len(requests), device=counts.device) + first
    draft_token_ids = torch.nn.functional.pad(draft_token_ids, (0, 1))  # the last row may have no entry
    num_ended = (draft_token_ids[rows] == -1).cumsum(0)
    num_before = torch.nn.functional.pad(num_ended, (1, 0))[(row_starts[requests] - first).long()]
    is_draft = (rows + 1 < row_starts[requests + 1]) & (num_ended == num_before)
    is_ignored = torch.ones(len(draft_token_ids), dtype=torch.bool, device=counts.device)
    is_ignored[rows] = ~is_draft
    check_draft_token_ids(draft_token_ids, is_ignored, vocab)


def check_slots(slots: Tensor | None, row_starts: Tensor, of: str | None, num_slots: int) -> dict[str, Tensor]:
    """Raise unless each request with rows has a slot in [0, `num_slots`); `of` is an argument by slot, for the error.

    Returns:
        Whether a slot is used, [num_slots] bool, and whether a request has rows, [batch] bool: `Sizes.used`.
    """
    has_rows = row_starts.diff() > 0
    if slots is None:
        slots = torch.arange(len(has_rows), device=has_rows.device)
    else:
        valid = ((slots >= 0) & (slots < num_slots)) | ~has_rows
        check_values("slots", slots, valid, f"{ARGUMENTS['slots'].expected.format(slot=num_slots)} in {of}")
    is_used = torch.zeros(num_slots, dtype=torch.bool, device=has_rows.device)
    is_used[slots[has_rows].long()] = True
    return {"slot": is_used, "request": has_rows}


# Single arguments


def check_argument(name: str, tensor: Tensor | None, sizes: Sizes, prefix: str = "") -> Any:
    """Return a tensor in the form that backends take, or None; raise unless it matches its description in `ARGUMENTS`."""
    if tensor is None:
        return None
    argument = ARGUMENTS[name]
    check_tensor(prefix + name, tensor, argument.dtypes, sizes.shape(argument.dimensions), sizes.device)
    if argument.is_valid is not None and on_host(tensor):
        is_used = sizes.used.get(argument.dimensions[0])
        expected = argument.expected.format_map(sizes)
        check_values(prefix + name, tensor, argument.is_valid(tensor, sizes), expected, is_used)
    return plain(tensor)


def check_number(name: str, value: Any, sizes: Sizes, prefix: str = "") -> Any:
    """Return a number or a tensor in the form that backends take; None if it is neutral."""
    if value is None and name != "temperature":
        return None
    if isinstance(value, Tensor):
        return check_argument(name, value, sizes, prefix)
    argument = ARGUMENTS[name]
    kind: type = int if argument.dtypes is INTEGERS else float
    expected = ("an " if kind is int else "a ") + argument.expected.replace("numbers", kind.__name__)
    # The built-in type comes first because the check for an abstract class takes longer.
    if isinstance(value, bool) or not isinstance(value, (kind, Integral if kind is int else Real)):
        raise TypeError(f"{prefix}{name}: expected {expected} or a [batch] tensor, got {type(value).__name__}")
    try:
        number = kind(value)
    except OverflowError:
        number = math.inf
    assert argument.is_valid is not None
    # A number too small for a float is refused: it would become 0, which has another meaning.
    if not argument.is_valid(number, sizes) or (number == 0) != (value == 0):
        raise ValueError(f"{prefix}{name}: expected {expected}, got {shown(value)}")
    return None if number == argument.neutral else number


def check_truncation(sampling: Sampling, sizes: Sizes, vocab: int, prefix: str = "") -> Truncation | None:
    """Return the checked limits on the tokens of rows, None if all are neutral."""
    if sampling.top_k is sampling.top_p is sampling.min_p is None:  # the most frequent case
        return None
    top_k, top_p, min_p = (check_number(name, getattr(sampling, name), sizes, prefix) for name in Truncation._fields)
    if isinstance(top_k, int) and top_k >= vocab:
        top_k = None
    return None if top_k is top_p is min_p is None else Truncation(top_k, top_p, min_p)


def check_draft_rows(
    draft_logits: Tensor | None, draft_vocab_ids: Tensor | None, width: int, vocab_size: int | None, sizes: Sizes
) -> int:
    """Raise unless draft logits, if given, have a row for each draft; return the size of the draft's vocabulary.

    `width` is the width of the target logits, and `vocab_size` the size of the whole vocabulary if they are a shard.
    """
    draft_vocab = sizes["vocab"]
    if draft_vocab_ids is not None:
        width = draft_vocab = check_draft_vocab_ids(draft_vocab_ids, draft_logits, sizes)
    elif vocab_size is not None and isinstance(draft_logits, Tensor) and draft_logits.shape[-1:] == (vocab_size,):
        width = vocab_size
    sizes["draft_vocab"] = width
    check_argument("draft_logits", draft_logits, sizes)
    return draft_vocab


def check_draft_vocab_ids(draft_vocab_ids: Tensor, draft_logits: Tensor | None, sizes: Sizes) -> int:
    """Raise unless the ids are distinct target tokens, one for each entry of a draft row; return their number."""
    name, vocab = "draft_vocab_ids", sizes["vocab"]
    check_needs(name, draft_logits)
    check_type("draft_logits", draft_logits, FLOATS)
    assert draft_logits is not None
    size = draft_logits.shape[-1] if draft_logits.ndim > 0 else 0
    if size == 0:
        expected = "a last dimension of at least one token, those of draft_vocab_ids"
        raise ValueError(f"draft_logits: expected {expected}, got shape {list(draft_logits.shape)}")
    if size > vocab:
        raise ValueError(f"{name}: expected at most {vocab} ids, as many as the target has tokens, got {size}")
    sizes["draft_vocab"] = size
    check_argument(name, draft_vocab_ids, sizes)
    if on_host(draft_vocab_ids):
        is_only = draft_vocab_ids.bincount()[draft_vocab_ids.long()] == 1
        check_values(name, draft_vocab_ids, is_only, "distinct ids")
    return size


def check_adjustments(adjustments: Adjustments, sizes: Sizes) -> Adjustments | None:
    """Return checked adjustments, None if they are neutral."""
    prefix = "adjustments."
    sizes["word"] = -(-sizes["vocab"] // WORD)
    penalties = [check_number(name, getattr(adjustments, name), sizes, prefix) for name in Adjustments._fields[:3]]
    bias_ids, bias = adjustments.bias_ids, adjustments.bias
    for name, tensor, other in (("bias_ids", bias_ids, bias), ("bias", bias, bias_ids)):
        if tensor is not None:
            check_needs(name, other, prefix)
    if bias_ids is not None:
        check_type("adjustments.bias_ids", bias_ids, INTEGERS)
        sizes["bias"] = bias_ids.shape[1] if bias_ids.ndim == 2 else 0
    prompt_mask, output_counts, bias_ids, bias, allowed_mask = (
        check_argument(name, getattr(adjustments, name), sizes, prefix) for name in Adjustments._fields[3:]
    )
    for name, rows in ("prompt_mask", prompt_mask), ("output_counts", output_counts), ("allowed_mask", allowed_mask):
        if rows is not None and rows.stride(-1) != 1 and rows.shape[-1] > 1:
            raise ValueError(f"{prefix}{name}: expected a stride of 1 in the last dimension, got {rows.stride(-1)}")
    if bias is not None and bias_ids is not None:
        if on_host(bias):
            valid, expected = ~bias.isnan() | (bias_ids < 0), ARGUMENTS["bias"].expected
            check_values("adjustments.bias", bias, valid, expected, sizes.used.get("slot"))
        if sizes["bias"] == 0:
            bias_ids = bias = None
    if all(penalty is None for penalty in penalties):
        prompt_mask = output_counts = None  # only penalties read them
    checked = Adjustments._make([*penalties, prompt_mask, output_counts, bias_ids, bias, allowed_mask])
    return None if all(field is None for field in checked) else checked


def check_lists(top_logprobs: int | None, kept_sets: bool, logprobs: str | None) -> int:
    """Return the checked number of likeliest tokens to list; raise on invalid arguments for lists."""
    if not isinstance(kept_sets, bool):
        raise TypeError(f"kept_sets: expected a bool, got {type(kept_sets).__name__}")
    if top_logprobs is None:
        return 0
    count = check_count("top_logprobs", top_logprobs, most=MOST_TOP_LOGPROBS, least=0)
    if count > 0 and logprobs is None:
        raise ValueError("top_logprobs: needs logprobs='processed' or 'raw'")
    return count


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
    """Draw int64 seeds of a shape, such as (batch,), from torch's default generator."""
    return torch.randint(INT64.min, INT64.max, shape, dtype=torch.int64, device=device)


def seed_each(seeds: Tensor | int, batch: int, device: torch.device) -> Tensor:
    """Return checked seeds as a [batch] int64 tensor."""
    return seeds if isinstance(seeds, Tensor) else torch.arange(batch, dtype=torch.int64, device=device) + seeds


def check_logits(
    name: str, logits: Tensor, dimensions: tuple[str, ...], vocab_size: int | None = None
) -> tuple[int, ...]:
    """Raise unless `logits` is a float tensor with these dimensions and a vocabulary; return its shape, unsharded.

    With `vocab_size`, the size of the whole vocabulary, the logits are a shard of it, which may be empty.
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


# Types, shapes, values


def check_needs(name: str, needed: object, prefix: str = "") -> None:
    """Raise if `needed` is None: the argument that `name` needs, by `ARGUMENTS`, was not given."""
    if needed is None:
        other = ARGUMENTS[name].needs if name in ARGUMENTS else "draft_logits"  # draft_sampling has no entry
        raise ValueError(f"{prefix}{name}: given without the {prefix}{other} that it belongs to")


def check_bundle(name: str, value: object, kind: type) -> None:
    """Raise unless the argument is None or a bundle of this type."""
    if value is not None and not isinstance(value, kind):
        article = "a " if kind is Sampling else ""
        raise TypeError(f"{name}: expected {article}{kind.__name__}, got {type(value).__name__}")


def check_count(name: str, value: object, most: int | None = None, least: int = 1) -> int:
    """Return the value as an int in [`least`, `most`], or raise; without `most` it has no upper limit."""
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
    """Raise unless `tensor` is a plain tensor that holds data, with one of the dtypes, this shape and this device."""
    if (
        isinstance(tensor, Tensor)
        and tensor.layout is strided
        and not tensor.is_nested
        and tensor.dtype in dtypes
        and tensor.shape == shape
        and tensor.device == device
    ):  # one condition, because a call checks a dozen tensors
        return
    check_type(name, tensor, dtypes)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device}, where the logits are, got {tensor.device}")


def check_type(name: str, tensor: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> None:
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
    """Raise on the first used value that is not valid; the host waits if the tensor is on a device."""
    if used is not None:
        valid = valid | ~used.view(-1, *[1] * (valid.ndim - 1))
    if not valid.all():
        index = (~valid).nonzero()[0].tolist()
        raise ValueError(f"{name}: expected {expected}, got {tensor[tuple(index)].item()} at {index}")


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor detached and materialised: PyTorch can postpone zeros and negation."""
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
