"""Truncation of rows of which this rank holds a shard: the last token kept, found without gathering or sorting rows.

A token comes before another if its logit is larger, or equal and its id lower. What is kept is a prefix of that order, so a
row's cutoff is a logit and how many of the tokens with that logit are kept. The logit is found as a key, an integer in the
order of its dtype's numbers, 8 bits at a time: in each round, ranks exchange how many of their tokens have each of the 256
values of the next 8 bits, and what they weigh. Then all know in which of the 256 the cutoff is.

So top_k takes 2 rounds for float16 and bfloat16, 4 for float32 and 8 for float64, and top_p as many after it. min_p takes
none: it needs no more than the row's maximum. Per row and round a rank sends 1,024 bytes of counts, and for top_p 2,048 of
masses besides. Counts are exact. Masses are summed in float64, in another order than in one process. That matters only where
the mass before a token and top_p agree to about 15 digits.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdecode.checks import on_host
from specdecode.eager.selection import by_chunks
from specdecode.eager.truncation import RowSampling
from specdecode.sharding import Layout, VocabShard

DIGITS = 256
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Search = Generator[tuple[Tensor, ...], list[Tensor], tuple[Tensor, Tensor]]


class Source(NamedTuple):
    """Rows of one model of which this rank holds a shard, and what all ranks know of them."""

    logits: Tensor
    """[requests, ..., local] any float."""

    sampling: RowSampling
    """[requests, ...] each field."""

    row_max: Tensor
    """[requests, ...] the largest logit of the whole row, in the dtype to compute in; -inf if none is finite or +inf."""

    first: Tensor
    """[requests, ...] int64, the first token that has it."""

    threshold: Tensor | None = None
    """[requests, ...] int64, the key of the last token kept; None: what min_p says is kept."""

    ties: Tensor | None = None
    """[requests, ...] int64, how many tokens with that key are kept of this shard."""

    def at(self, *index: Any) -> "Source":
        """Return some of the rows."""
        threshold, ties = (None if field is None else field[index] for field in (self.threshold, self.ties))
        known = self.row_max[index], self.first[index], threshold, ties
        return Source(self.logits[index], self.sampling.at(*index), *known)


def copy(models: tuple[Tensor, ...], layout: Layout, dtype: torch.dtype) -> Tensor:
    """Copy each model's rows into frames, [models, ..., width], in `dtype`; what is NaN or outside the shard is -inf."""
    shape = len(models), *models[0].shape[:-1], layout.width
    frames = torch.empty(shape, dtype=dtype, device=models[0].device)
    end = layout.offset + layout.local
    frames[..., : layout.offset] = -torch.inf
    frames[..., end:] = -torch.inf
    for frame, raw in zip(frames, models):
        if raw.is_cuda:
            torch.fmax(raw, torch.tensor(-torch.inf), out=frame[..., layout.offset : end])
        else:
            frame[..., layout.offset : end] = raw
    # On the CPU a pass that replaces NaN is slow, and rarely needed.
    if frames.is_cuda or (on_host(frames) and not frames.sum().isnan()):
        return frames
    return frames.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def keys_of(logits: Tensor) -> Tensor:
    """Return int64 keys in the order of the logits, equal where they are; NaN counts as -inf."""
    positive_zero = torch.where(logits.isnan(), -torch.inf, logits) + 0
    width = 8 * logits.dtype.itemsize
    bits = positive_zero.view(INTEGERS[logits.dtype.itemsize]).to(torch.int64)
    return torch.where(bits < 0, bits ^ (2 ** (width - 1) - 1), bits)


def scaled(source: Source) -> Tensor:
    """Return (l - max) / T of the shard."""
    values = source.logits.to(source.row_max.dtype)
    return (values - source.row_max[..., None]) / source.sampling.temperature[..., None]


def is_kept_here(source: Source) -> Tensor:
    """Return which tokens of the shard are kept, [..., local] bool; of a row with an infinite maximum it means nothing."""
    if source.threshold is not None and source.ties is not None:
        keys, threshold = keys_of(source.logits), source.threshold[..., None]
        equal = keys == threshold
        return (keys > threshold) | (equal & (equal.cumsum(dim=-1) <= source.ties[..., None]))
    differences = scaled(source)
    kept = differences > -torch.inf
    if source.sampling.min_p is not None:
        kept &= differences >= source.sampling.min_p[..., None].log()
    return kept


def histogram(source: Source, partial: Tensor, shift: int, weighs: bool) -> tuple[Tensor, ...]:
    """Count, and weigh, the kept tokens by the 8 bits of their keys from `shift` on, [..., 256], the largest first.

    Args:
        source: rows.
        partial: [...] int64, the bits above those; other tokens are left out. In the first round it means nothing.
        shift: the number of lower bits.
        weighs: whether to sum exp((l - max) / T), in float64.
    """
    keys, inside = keys_of(source.logits), is_kept_here(source)
    is_first = shift + 8 == 8 * source.logits.dtype.itemsize
    if not is_first:
        inside &= (keys >> (shift + 8)) == (partial[..., None] >> (shift + 8))
    digits = (keys >> shift) + DIGITS // 2 if is_first else (keys >> shift) & (DIGITS - 1)
    digits = torch.where(inside, DIGITS - 1 - digits, DIGITS)
    shape = (*partial.shape, DIGITS + 1)
    counts = torch.zeros(shape, dtype=torch.int32, device=keys.device)
    counts.scatter_add_(-1, digits, torch.ones_like(digits, dtype=torch.int32))
    if not weighs:
        return (counts[..., :-1],)
    masses = torch.zeros(shape, dtype=torch.float64, device=keys.device)
    masses.scatter_add_(-1, digits, torch.where(inside, scaled(source).exp(), 0).to(torch.float64))
    return counts[..., :-1], masses[..., :-1]


def before(values: Tensor) -> Tensor:
    """Return the sums of what comes before each, along the last dimension."""
    return torch.nn.functional.pad(values[..., :-1], (1, 0)).cumsum(dim=-1)


def search(source: Source, layout: Layout, by_mass: bool) -> Search:
    """Find what top_k, or if `by_mass` top_p, keeps of what is kept so far.

    It yields what this rank is to exchange, and is sent what all ranks have.

    Returns:
        [...] int64, the key of the last token kept; [...] int64, how many tokens of this shard with that key are kept.
    """
    logits, sampling = source.logits, source.sampling
    partial = torch.zeros_like(source.first)
    num_above, mass_above = torch.zeros_like(source.first), torch.zeros_like(source.first, dtype=torch.float64)
    limit = torch.zeros_like(mass_above)

    for shift in range(8 * logits.dtype.itemsize - 8, -1, -8):

        def compute(_: Tensor, source: Source, partial: Tensor, shift: int = shift) -> tuple[Tensor, ...]:
            return histogram(source, partial, shift, by_mass)

        sent = yield by_chunks(compute, 2 * logits.shape[1:].numel(), partial, source, partial)
        of_ranks = sent[0].to(torch.int64)
        counts = of_ranks.sum(dim=0)
        num_before = num_above[..., None] + before(counts)
        if by_mass:
            masses = sent[1].sum(dim=0)
            if shift + 8 == 8 * logits.dtype.itemsize and sampling.top_p is not None:
                limit = sampling.top_p * masses.sum(dim=-1)
            mass_before = mass_above[..., None] + before(masses)
            reached = mass_before < limit[..., None]
        else:
            assert sampling.top_k is not None
            reached = num_before < sampling.top_k[..., None]
        # The cutoff has the smallest digit of those that some token has and that the limit does not exclude altogether.
        places = torch.arange(DIGITS, device=counts.device)
        place = torch.where(reached & (counts > 0), places, 0).amax(dim=-1, keepdim=True)
        digit = DIGITS - 1 - place.squeeze(-1)
        is_first = shift + 8 == 8 * logits.dtype.itemsize
        partial = (digit - DIGITS // 2 << shift) if is_first else partial + (digit << shift)
        num_above = num_before.gather(-1, place).squeeze(-1)
        num_equal = counts.gather(-1, place).squeeze(-1)
        if by_mass:
            mass_above = mass_before.gather(-1, place).squeeze(-1)
            mass_equal = masses.gather(-1, place).squeeze(-1)

    if (
        by_mass
    ):  # the n-th of equal tokens, from 0, is kept iff the mass before it, which holds n of them, is below the limit
        kept = ((limit - mass_above) / (mass_equal / num_equal)).ceil().nan_to_num(nan=1.0)
        kept = torch.minimum(kept, num_equal).to(torch.int64)
    else:
        assert sampling.top_k is not None
        kept = torch.minimum(sampling.top_k - num_above, num_equal)
    equal = of_ranks.gather(-1, place.expand(len(of_ranks), *place.shape)).squeeze(-1)  # [ranks, ...]
    of_lower_ids = equal[: layout.place].sum(dim=0)
    return partial, (kept.clamp(min=1) - of_lower_ids).clamp(min=0).minimum(equal[layout.place])


def cut(source: Source, layout: Layout) -> Generator[tuple[Tensor, ...], list[Tensor], Source]:
    """Truncate rows: by top_k, and what that leaves by top_p. min_p is part of what is kept before."""
    for limit, by_mass in ((source.sampling.top_k, False), (source.sampling.top_p, True)):
        if limit is not None:
            threshold, ties = yield from search(source, layout, by_mass)
            source = source._replace(threshold=threshold, ties=ties)
    return source


def find_cutoffs(shard: VocabShard, layout: Layout, sources: list[Source]) -> list[Source]:
    """Truncate the rows of each model. The models' rounds share exchanges."""
    results = list(sources)
    cuts = {i: cut(source, layout) for i, source in enumerate(sources)}
    answers: dict[int, list[Tensor] | None] = dict.fromkeys(cuts)
    while cuts:
        questions = {}
        for i in list(cuts):
            try:
                answer = answers[i]
                questions[i] = next(cuts[i]) if answer is None else cuts[i].send(answer)
            except StopIteration as stop:
                results[i] = stop.value
                del cuts[i]
        if questions:
            gathered = iter(shard.gather(layout, *(tensor for tensors in questions.values() for tensor in tensors)))
            answers = {i: [next(gathered) for _ in tensors] for i, tensors in questions.items()}
    return results


def last_kept(source: Source, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the key of the last token that this shard keeps of each row, and its id; int64, the largest and -1 if none."""
    most = torch.iinfo(torch.int64).max
    if layout.local == 0:
        return torch.full_like(source.first, most), torch.full_like(source.first, -1)
    keys = keys_of(source.logits).masked_fill_(~is_kept_here(source), most)
    key = keys.amin(dim=-1)
    ids = torch.arange(layout.local, device=keys.device) + layout.start
    return key, torch.where((keys == key[..., None]) & (keys < most), ids, -1).amax(dim=-1)
