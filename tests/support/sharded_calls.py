"""Random calls with any options, to compare ranks that hold shards with one process that holds whole rows."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from specdecode import RejectionSampler, SamplerOutput, Sampling
from tests.support.adjusted import SOME, adjustments_for, packed
from tests.support.calls import METHODS
from tests.support.differential import case
from tests.support.packing import fed_positions, in_slots, packed_rows, sampler_of, with_counts

LIMITS: list[dict[str, Any]] = [{}, {"top_p": 0.9, "top_k": 40}, {"top_p": 0.95}, {"top_k": 7}, {"min_p": 0.02}]
REPORTS: list[dict[str, Any]] = [
    {},
    {"logprobs": "raw"},
    {"logprobs": "processed", "top_logprobs": 4},
    {"logprobs": "processed", "kept_sets": True},
]
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
VALUES = (float("nan"), float("inf"), -float("inf"))
LOGITS = ("target_logits", "draft_logits", "logits")


def spoil(chance: Random, logits: Tensor) -> None:
    """Put NaN or an infinity at some tokens, or at all tokens, of some rows."""
    for _ in range(3 if logits.numel() and chance.random() < 0.3 else 0):
        row = [chance.randrange(size) for size in logits.shape[:-1]]
        tokens = [chance.randrange(logits.shape[-1]) for _ in range(3)] if chance.random() < 0.7 else slice(None)
        logits[(*row, tokens)] = chance.choice(VALUES)


def random_call(seed: int, vocab: int, device: str = "cpu") -> tuple[str, dict[str, Any]]:
    """Return the method and the arguments of a random call, which depend on the seed; with `row_starts` it is packed."""
    chance = Random(seed)
    requests, drafts = chance.choice([1, 2, 3, 5]), chance.choice([0, 1, 2, 3])
    batch = case(requests, drafts, vocab, chance.choice(FLOATS), seed=seed, greedy=chance.choice([0, 0.3]))
    spoil(chance, batch.target_logits)
    spoil(chance, batch.draft_logits)
    counts = [chance.randint(0, drafts) for _ in range(requests)]
    batch, method, limits = with_counts(batch, counts), chance.choice(METHODS), chance.choice(LIMITS)
    options = vars(batch) | chance.choice(REPORTS) | limits
    if chance.random() < 0.3:
        options["seeds"] = chance.choice([0, 2**63 - 2])
    if chance.random() < 0.2:
        options["temperature"] = chance.choice([0.0, 0.7])
    given = chance.choice(["drawn", "drawn", "other sampling", "logsumexp", "own vocabulary", "none"])
    if given == "none":
        options["draft_logits"] = None
    elif given == "other sampling":
        options["draft_sampling"] = Sampling(chance.choice([0.7, options["temperature"]]), **chance.choice(LIMITS))
    elif given == "own vocabulary":
        options["draft_logits"] = options["draft_logits"][..., : vocab // 2].contiguous()
        options["draft_vocab_ids"] = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[: vocab // 2]
    elif given == "logsumexp" and drafts:
        numbers = {name: options[name] for name in ("temperature", "seeds")} | limits
        rows = [sampler_of(method).draft(batch.draft_logits[:, i], **numbers, offset=i) for i in range(drafts)]
        options["draft_logsumexp"] = torch.stack([row.logsumexp for row in rows], dim=1)
        if limits:
            options["draft_cutoff"] = torch.stack([row.cutoff for row in rows], dim=1)
    adjustments = adjustments_for(batch, chance.choice(list(SOME)), seed) if chance.random() < 0.4 else None
    if chance.random() < 0.4:
        slots, rows = torch.tensor(chance.sample(range(requests + 2), requests)), packed_rows(batch, counts)
        named = {name: options.pop(name) for name in ("positions", "draft_vocab_ids") if name in options}
        options = {name: in_slots(each, slots, requests + 2) for name, each in options.items()} | named
        options |= rows | {"slots": slots}
        if chance.random() < 0.5:
            options["row_positions"] = fed_positions(options.pop("positions"), rows)
        if adjustments is not None:
            adjustments = packed(adjustments, rows, counts, slots, requests + 2)
        if chance.random() < 0.5:  # one more request, without rows
            # A read for the request without rows would be at row 0: a valid row there makes it change the output.
            options["target_logits"][0] = batch.target_logits[0, 0]
            empty = chance.randrange(requests)
            for name in ("row_starts", "slots", "positions"):
                if name in options:
                    options[name] = torch.cat([options[name][: empty + 1], options[name][empty:]])
    options["adjustments"] = adjustments
    return method, {name: on(each, device) for name, each in options.items()}


def on(value: Any, device: str) -> Any:
    """Return an argument on a device."""
    if isinstance(value, tuple):
        return type(value)(*[on(each, device) for each in value])
    return value.to(device) if isinstance(value, Tensor) else value


def columns(call: dict[str, Any], start: int, end: int, vocab: int, whole_drafts: bool = False) -> dict[str, Any]:
    """Return a call whose logits are a rank's columns; with `whole_drafts` draft logits stay whole."""
    names = [name for name in LOGITS if call.get(name) is not None and call[name].shape[-1] == vocab]
    names = [name for name in names if not (whole_drafts and name == "draft_logits")]
    return call | {name: call[name][..., start:end] for name in names}


def verified(sampler: RejectionSampler, call: dict[str, Any]) -> SamplerOutput:
    """Return the output of a call, packed or padded."""
    return (sampler.packed if "row_starts" in call else sampler)(**call)


def differences(got: Any, expected: Any) -> list[str]:
    """Return the names of the fields whose values differ; a NaN equals a NaN."""
    pairs = [(name, getattr(got, name), value) for name, value in zip(expected._fields, expected)]
    return [name for name, mine, other in pairs if not is_same(mine, other)]


def is_same(mine: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two results have equal type, shape and values; a NaN equals a NaN."""
    if mine is None or other is None:
        return mine is other
    alike = mine.dtype == other.dtype and mine.shape == other.shape
    return alike and torch.allclose(mine, other, rtol=0, atol=0, equal_nan=True)
