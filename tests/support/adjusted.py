"""Adjustments for tests, and their form for one request in the reference."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reference.adjustments import Adjustments as OfRequest
from reference.adjustments import adjust
from specdecode import Adjustments
from tests.support.differential import Case
from tests.support.packing import in_slots

INF = float("inf")


class Rows(NamedTuple):
    """The sizes that adjustments are made for."""

    target_logits: Tensor


def words_of(bits: Tensor) -> Tensor:
    """Return [..., vocab] bool as masks: bit v % 32 of word v // 32, int32."""
    padded = torch.nn.functional.pad(bits.to(torch.int64), (0, -bits.shape[-1] % 32))
    words = (padded.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    return words.to(torch.int32)  # the highest bit is the sign


def bits_of(words: Tensor, vocab: int) -> np.ndarray:
    """Return masks as [..., vocab] bool, by an independent computation."""
    little_endian = np.ascontiguousarray(words.cpu().numpy()).astype("<i4").view(np.uint8)
    return np.unpackbits(little_endian, axis=-1, bitorder="little")[..., :vocab].astype(bool)


def likely(batch: Case | Rows, count: int) -> Tensor:
    """Return the likeliest tokens of each request's rows, [batch, count], whose adjustments matter."""
    return batch.target_logits.cpu().float().mean(1).topk(count, dim=1).indices


def all_of(batch: Case | Rows, seed: int = 0) -> dict[str, Any]:
    """Return every adjustment, with different values for each request, some of them neutral."""
    generator = torch.Generator().manual_seed(seed)
    requests, rows, vocab = batch.target_logits.shape
    few = min(vocab, 40)
    prompt = torch.rand(requests, vocab, generator=generator) < 0.3
    counts = torch.randint(0, 3, (requests, vocab), generator=generator, dtype=torch.int32)
    counts[torch.rand(requests, vocab, generator=generator) < 0.7] = 0
    counts.scatter_(1, likely(batch, min(vocab, 2)), 70_000)  # more than 16 bits
    allowed = torch.rand(requests, rows, vocab, generator=generator) < 0.7
    allowed[:, 0] = True
    ids = likely(batch, few).gather(1, torch.rand(requests, few, generator=generator).argsort(1))[:, :7]
    ids = torch.cat([ids, ids[:, :1], torch.full((requests, 1), -1)], 1)  # a token twice, and an empty place
    bias = 4 * torch.randn(ids.shape, generator=generator)
    bias[:, 1:2] = -INF
    neutral = torch.arange(requests) % 3 == 0
    return {
        "repetition_penalty": (0.5 + 1.5 * torch.rand(requests, generator=generator)).masked_fill(neutral, 1),
        "frequency_penalty": torch.randn(requests, generator=generator).mul(0.3).masked_fill(neutral, 0),
        "presence_penalty": torch.randn(requests, generator=generator).masked_fill(neutral, 0),
        "prompt_mask": words_of(prompt),
        "output_counts": counts,
        "bias_ids": ids.masked_fill(neutral[:, None], -1).to(torch.int32),
        "bias": bias,
        "allowed_mask": words_of(allowed | neutral[:, None, None]),
    }


PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "prompt_mask", "output_counts")
SOME = {
    "all": (),
    "penalties": PENALTIES,
    "without counts": (*PENALTIES[:3],),
    "bias": ("bias_ids", "bias"),
    "mask": ("allowed_mask",),
}


def adjustments_for(batch: Case | Rows, kind: str = "all", seed: int = 0) -> Adjustments:
    """Return adjustments of a kind for a batch."""
    given = all_of(batch, seed)
    return Adjustments(**{name: value for name, value in given.items() if not SOME[kind] or name in SOME[kind]})


def to(device: str, adjustments: Adjustments) -> Adjustments:
    return Adjustments(*[each.to(device) if isinstance(each, Tensor) else each for each in adjustments])


def packed(
    adjustments: Adjustments, rows: dict[str, Any], counts: Sequence[int], slots: Tensor, num: int
) -> Adjustments:
    """Return a padded call's adjustments for a packed call: by slot, `num` slots in all; masks by row."""
    mask = adjustments.allowed_mask
    if mask is not None:
        flat = mask.new_zeros(len(rows["target_logits"]), mask.shape[2])
        for request, (start, count) in enumerate(zip(rows["row_starts"].tolist(), counts)):
            flat[start : start + count + 1] = mask[request, : count + 1]
        mask = flat
    return Adjustments(*[in_slots(each, slots, num) for each in adjustments[:-1]], mask)


def of_request(adjustments: Adjustments, index: int, vocab: int) -> OfRequest:
    """Return one request's adjustments for the reference."""

    def number(value: Tensor | float | None, neutral: float) -> float:
        return neutral if value is None else float(value[index]) if isinstance(value, Tensor) else value

    penalties = [number(value, neutral) for value, neutral in zip(adjustments[:3], (1.0, 0.0, 0.0))]
    prompt, counts, allowed = adjustments.prompt_mask, adjustments.output_counts, adjustments.allowed_mask
    return OfRequest(
        *penalties,
        None if prompt is None else bits_of(prompt[index], vocab),
        None if counts is None else counts[index].cpu().numpy(),
        dict(biases(adjustments, index)),
        None if allowed is None else bits_of(allowed[index], vocab),
    )


def biases(adjustments: Adjustments, index: int) -> Iterator[tuple[int, float]]:
    """Yield each token's bias, the sum over equal ids."""
    if adjustments.bias_ids is None or adjustments.bias is None:
        return
    sums: dict[int, float] = {}
    for token, bias in zip(adjustments.bias_ids[index].tolist(), adjustments.bias[index].float().cpu()):
        if token >= 0:
            sums[token] = sums.get(token, 0.0) + float(bias)
    yield from sums.items()


def adjusted_rows(batch: Case, adjustments: Adjustments, drafts: Tensor) -> Tensor:
    """Return the batch's rows, adjusted before the call, in float32 or float64."""
    logits = batch.target_logits
    rows = logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu().numpy()
    result = []
    with np.errstate(invalid="ignore", over="ignore"):
        for index, request in enumerate(rows):
            given = of_request(adjustments, index, rows.shape[-1])
            ids = [token for token in drafts[index].tolist() if token >= 0]
            result.append([adjust(row, ids[:i], given, i) for i, row in enumerate(request)])
    return torch.tensor(np.array(result)).to(logits.device)
