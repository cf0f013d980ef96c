"""Verification in PyTorch where each rank holds a shard of the vocabulary.

Everything that a whole row is asked for is computed here in two halves: what this rank's shard says, and, after an exchange,
what all shards say together. The arithmetic and its order are those of the other rooms, so that where shards are whole
blocks the results are the same bits. Between the halves nothing is read on the host, and the number of exchanges does not
depend on any value:

1. The maximum of each row and where it is. Greedy requests need no more.
2. The block sums of each draft's target row and draft row, and the logits of the draft: every accept decision.
3. In block verification, the block sums of each residual.
4. The best token of each shard in the row where a request stops, and how good it is.

`strict` needs 1 and 4. Without draft logits 4 comes with 2, for every row. Truncation comes after 1 (`eager.cutoffs`).
Log-probabilities take one more exchange, after 4: block sums and single logits, as in 2.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from specdecode.checks import on_host
from specdecode.eager.cutoffs import Source, copy, find_cutoffs, is_kept_here, last_kept
from specdecode.eager.philox import exponential
from specdecode.eager.probabilistic import (
    LARGEST_LOGSUMEXP,
    Comparison,
    infinite_at,
    log_difference,
    log_sum_ratio,
    weight_change,
)
from specdecode.eager.selection import block_sums, by_chunks, exp_scaled
from specdecode.eager.steps import Steps
from specdecode.eager.truncation import RowSampling, is_whole, to_one_temperature
from specdecode.noise import SELECT
from specdecode.sharding import MOST_TOKENS, Layout, VocabShard


def sources_of(
    shard: VocabShard, layout: Layout, models: list[Tensor], samplings: list[RowSampling], greedy: Tensor | bool
) -> list[Source]:
    """Exchange the maxima of all rows, then truncate them, if any request draws from them.

    Args:
        shard: this rank's.
        layout: of all.
        models: [requests, rows, local] raw logits each.
        samplings: [requests], of each model.
        greedy: [requests] bool, or one for all.
    """
    dtype = samplings[0].temperature.dtype

    def find(logits: Tensor) -> tuple[Tensor, Tensor]:
        row_max, index = copy((logits,), layout, dtype)[0].max(dim=-1)
        ids = layout.token_ids[index]
        return row_max, ids.masked_fill(ids < 0, MOST_TOKENS).to(torch.int32)

    found = [by_chunks(find, logits.shape[1] * layout.width, logits) for logits in models]
    tops, ids = shard.gather(layout, *(torch.cat(column, dim=1) for column in zip(*found)))
    row_max = tops.amax(dim=0)
    first = torch.where(tops == row_max, ids, MOST_TOKENS).amin(dim=0).to(torch.int64)
    sources, start = [], 0
    for logits, sampling in zip(models, samplings):
        rows = slice(start, start := start + logits.shape[1])
        each = RowSampling(*(None if f is None else f[:, None].expand(logits.shape[:2]) for f in sampling))  # type: ignore[arg-type]
        sources.append(Source(logits, each, row_max[:, rows], first[:, rows]))
    return sources if greedy is True else find_cutoffs(shard, layout, sources)


def framed(sources: tuple[Source, ...], layout: Layout, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """Copy rows as `eager.truncation.read` and `point_masses` do, but this rank's frame of them only.

    Returns:
        [models, ..., width] logits and [models, ..., 1] their maxima over all shards.
    """
    frames, maxima = copy(tuple(source.logits for source in sources), layout, sources[0].row_max.dtype), []
    for logits, source in zip(frames, sources):
        if source.sampling.truncates:
            inside = logits[..., layout.offset : layout.offset + layout.local]
            inside.masked_fill_(~is_kept_here(source), -torch.inf)
    row_maxima = torch.stack([source.row_max[..., None] for source in sources])
    row_maxima = to_one_temperature(frames, row_maxima, tuple(source.sampling for source in sources))
    for logits, row_max, source in zip(frames, row_maxima, sources):
        is_point = row_max.abs() == torch.inf
        if greedy is not None:
            is_point = is_point | greedy.view(-1, *[1] * (is_point.ndim - 1))
        maxima.append(row_max.masked_fill(is_point, 0))
        if not on_host(is_point) or bool(is_point.any()):
            logits.masked_fill_(is_point & (layout.token_ids != source.first[..., None]), -torch.inf)
            logits.masked_fill_(is_point & (layout.token_ids == source.first[..., None]), 0)
    return frames, torch.stack(maxima)


def at_token(values: Tensor, token_ids: Tensor, layout: Layout) -> Tensor:
    """Return the entry of one token per row of frames, -inf where another rank has it."""
    index = (token_ids - layout.blocks.start * layout.block_size).clamp(0, layout.width - 1)[..., None]
    inside = layout.token_ids[index] == token_ids[..., None]
    return values.gather(-1, index).masked_fill(~inside, -torch.inf).squeeze(-1)


def pad_blocks(sums: Tensor, layout: Layout) -> Tensor:
    """Pad block sums of this frame to those of the widest."""
    return torch.nn.functional.pad(sums, (0, layout.most_blocks - sums.shape[-1]))


def best_tokens(
    weights: Tensor, seeds: Tensor, positions: Tensor, domains: tuple[int, int], layout: Layout
) -> tuple[Tensor, ...]:
    """Return what this shard has to offer for a draw by weight: `eager.selection.select`, so far as it can decide alone.

    Args:
        weights: [..., width] w >= 0.
        seeds: [...] int64, or what broadcasts to it.
        positions: [...] int64.
        domains: of the noise.
        layout: of the shards.

    Returns:
        [..., 1] the score, W / E, of its best block, among those that no other shard has a part of; [..., 1] the best token
        there. If any shards divide a block, also [..., 2] each of three: the sums of this shard's parts of such blocks, and
        the score, w / E, and the id of the best token in each.
    """
    seeds, positions = seeds[..., None], positions[..., None]
    sums, offset = block_sums(weights), layout.blocks.start
    blocks = torch.arange(len(layout.blocks), device=weights.device)
    scores = sums / exponential(seeds, positions, blocks + offset, domains[0])
    places = torch.arange(layout.block_size, device=weights.device)

    def best_token(block: Tensor) -> tuple[Tensor, Tensor]:
        index = block * layout.block_size + places
        exponentials = exponential(seeds, positions, index + offset * layout.block_size, domains[1])
        score, best = (weights.gather(-1, index.expand(*weights.shape[:-1], -1)) / exponentials).max(
            dim=-1, keepdim=True
        )
        return score, index.expand(*weights.shape[:-1], -1).gather(-1, best) + offset * layout.block_size

    if layout.divided:
        scores = scores.masked_fill(layout.is_divided, 0)
    score, block = scores.max(dim=-1, keepdim=True)
    _, token = best_token(block)
    offer = score, token.to(torch.int32)
    if not layout.divided:
        return offer
    nothing = sums[..., :1] * 0, score * 0, torch.full_like(offer[1], MOST_TOKENS)
    parts = []
    for edge in layout.edges:
        if edge < 0:
            parts.append(nothing)
        else:
            token_score, token = best_token(torch.full_like(block, edge))
            parts.append((sums[..., edge : edge + 1], token_score, token.to(torch.int32)))
    return *offer, *(torch.cat(column, dim=-1) for column in zip(*parts))


def best_of(
    offers: list[Tensor], seeds: Tensor, positions: Tensor, domains: tuple[int, int], layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the token that wins the draw, [...] int64, and its block's score, [...], 0 if there is no weight anywhere.

    Args:
        offers: what all ranks have sent of `best_tokens`, [ranks, ...] each.
        seeds: as there.
        positions: as there.
        domains: as there.
        layout: of the shards.
    """
    scores, tokens = (offer.movedim(0, -2).flatten(-2) for offer in offers[:2])  # [..., ranks]
    if layout.divided:
        sums, token_scores, token_ids = (
            torch.nn.functional.pad(offer.movedim(0, -2).flatten(-2), (0, 1), value=value)[..., layout.slots]
            for offer, value in zip(offers[2:], (0, -1, MOST_TOKENS))
        )  # [..., divided, parts]
        exponentials = exponential(seeds[..., None], positions[..., None], layout.divided_ids, domains[0])
        best = token_scores.argmax(dim=-1, keepdim=True)
        scores = torch.cat([scores, sums.sum(dim=-1) / exponentials], dim=-1)
        tokens = torch.cat([tokens, token_ids.gather(-1, best).squeeze(-1)], dim=-1)
    score = scores.amax(dim=-1, keepdim=True)
    token = torch.where(scores == score, tokens, MOST_TOKENS).amin(dim=-1)
    return token.to(torch.int64), score.squeeze(-1)


def best_of_both(offers: list[Tensor], seeds: Tensor, positions: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the token drawn from a residual, or from p if that is 0 everywhere; and the token drawn from p."""
    half = len(offers) // 2
    recovered, score = best_of(offers[:half], seeds, positions, SELECT, layout)
    from_target, _ = best_of(offers[half:], seeds, positions, SELECT, layout)
    return torch.where(score == 0, from_target, recovered), from_target


def sample(
    shard: VocabShard,
    layout: Layout,
    source: Source,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor | bool,
    domains: tuple[int, int] = SELECT,
    is_draft: bool = False,
) -> tuple[Tensor, ...]:
    """Draw one token per row: `eager.strict.sample`, in one more exchange, none if all requests are greedy.

    Args:
        shard: this rank's.
        layout: of all.
        source: the rows, [requests, ...].
        seeds: [requests, ...] int64.
        positions: likewise.
        greedy: [requests] bool, or one for all.
        domains: of the noise.
        is_draft: whether a verification will want the logsumexp and the cutoffs, for which ranks exchange block sums.

    Returns:
        [requests, ...] each: token ids; whether the row has no finite logit; for drafts the logsumexp, and if rows are
        truncated, the cutoffs.
    """
    is_empty, temperature = source.row_max == -torch.inf, source.sampling.temperature
    if greedy is True:
        return source.first, is_empty, torch.zeros_like(temperature), source.first.clone()
    mask = None if greedy is False else greedy

    def compute(positions: Tensor, seeds: Tensor, source: Source, mask: Tensor | None) -> tuple[Tensor, ...]:
        logits, row_max = framed((source,), layout, mask)
        weights = exp_scaled(logits[0], row_max[0], source.sampling.temperature[..., None])
        offer = best_tokens(weights, seeds, positions, domains, layout)
        if not is_draft:
            return offer
        sums = pad_blocks(block_sums(weights), layout)
        return (sums, *last_kept(source, layout), *offer) if source.sampling.truncates else (sums, *offer)

    logits_each = source.logits.shape[1:-1].numel() * layout.width
    received = shard.gather(layout, *by_chunks(compute, logits_each, positions, seeds, source, mask))
    num_offers = 5 if layout.divided else 2
    token_ids, _ = best_of(received[-num_offers:], seeds, positions, domains, layout)
    if not is_draft:
        return token_ids, is_empty
    logsumexp = source.row_max / temperature + layout.whole(received[0]).sum(dim=-1).log()
    if mask is not None:
        logsumexp = logsumexp.masked_fill(mask, 0)
    if not source.sampling.truncates:
        return token_ids, is_empty, logsumexp
    keys, last = received[1:3]
    cutoffs = torch.where(keys == keys.amin(dim=0), last, -1).amax(dim=0).masked_fill(is_whole(source.sampling), -1)
    cutoffs = torch.where(source.row_max.isfinite(), cutoffs, source.first)
    return token_ids, is_empty, logsumexp, cutoffs if mask is None else torch.where(mask, token_ids, cutoffs)


def sample_rows(
    shard: VocabShard,
    logits: Tensor,
    sampling: RowSampling,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor | bool,
    domains: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row, [requests, local]; return what `eager.sample` does."""
    layout = shard.agree(logits)
    (source,) = sources_of(shard, layout, [logits[:, None]], [sampling], greedy)
    source = source.at(slice(None), 0)
    token_ids, _, logsumexp, *cutoffs = sample(shard, layout, source, seeds, positions, greedy, domains, is_draft=True)
    return token_ids, logsumexp.to(torch.float32), cutoffs[0] if sampling.truncates else None


class ShardedRows:
    """The rows of a step of which this rank holds a shard: what a method asks of whole rows.

    Args:
        steps: the step. Its logits are this rank's shard, all else is of the whole vocabulary.
        shard: this rank's.
    """

    def __init__(self, steps: Steps, shard: VocabShard) -> None:
        self.steps, self.shard, self.layout = steps, shard, shard.agree(steps.target_logits)
        models, samplings = [steps.target_logits], [steps.sampling]
        if steps.draft_logits is not None:
            models, samplings = [*models, steps.draft_logits], [*samplings, steps.draft_sampling]
        self.sources = sources_of(shard, self.layout, models, samplings, steps.greedy)
        self.greedy = None if isinstance(steps.greedy, bool) else steps.greedy

    def sample(self) -> tuple[Tensor, Tensor]:
        """Draw the target's own token at each position; return [batch, rows] token ids and whether rows are empty."""
        steps = self.steps
        positions = steps.positions[:, None] + steps.offsets
        seeds = steps.seeds[:, None].expand_as(positions)
        token_ids, is_empty, *_ = sample(self.shard, self.layout, self.sources[0], seeds, positions, steps.greedy)
        return token_ids, is_empty

    def quotients(self) -> tuple[Tensor, Tensor]:
        """Return log(p(x) / q(x)) of each draft, and whether target rows are empty: `eager.probabilistic.quotients`."""
        steps = self.steps
        before_last = slice(None), slice(0, steps.num_draft_tokens)
        drafted = tuple(source.at(*before_last) for source in self.sources)
        is_empty = drafted[0].row_max == -torch.inf
        matches = (drafted[0].first == steps.draft_token_ids).to(steps.temperature.dtype).log()
        if steps.greedy is True or steps.num_draft_tokens == 0:
            return matches, is_empty
        quotient = self._quotients(drafted) if len(drafted) == 2 else self._quotients_and_tokens()
        quotient = quotient.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        return quotient if self.greedy is None else torch.where(self.greedy[:, None], matches, quotient), is_empty

    def _quotients(self, drafted: tuple[Source, ...]) -> Tensor:
        """Exchange what decides on drafts with logits; return log(p(x) / q(x))."""
        steps, layout = self.steps, self.layout
        logsumexp, cutoffs = steps.draft_logsumexp, steps.draft_cutoff
        if logsumexp is not None and not on_host(logsumexp):  # as without shards
            logsumexp = None

        def compute(token_ids: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
            *sources, mask, cutoffs = tensors
            raw = () if logsumexp is None else self._raw_draft_logits(sources[1], token_ids, cutoffs)
            return *raw, *self._statistics(tuple(sources), token_ids, mask)

        ids, logits_each = steps.draft_token_ids, 2 * steps.num_draft_tokens * layout.width
        sent = by_chunks(compute, logits_each, ids, *drafted, self.greedy, cutoffs)
        *raw, token_logits, target_sums, draft_sums, changes = self.shard.gather(layout, *sent)
        sums = torch.stack([layout.whole(part).sum(dim=-1) for part in (target_sums, draft_sums)])
        self.target_sum, self.log_sum_ratio = sums[0], log_sum_ratio(*sums, layout.whole(changes).sum(dim=-1))
        # Of a token's logit, the ranks that do not have it say -inf.
        scaled = token_logits.amax(dim=0).movedim(-1, 0) / steps.temperature[:, None]
        logprobs = scaled - sums.log()
        draft_logprob = logprobs[1]
        if logsumexp is not None:
            logit, *least = (each.amax(dim=0) for each in raw)
            given = logit / drafted[1].sampling.temperature - logsumexp
            if cutoffs is not None:
                kept = (cutoffs < 0) | (logit > least[0]) | ((logit == least[0]) & (ids <= cutoffs))
                given = given.masked_fill(~kept, -torch.inf)
            draft_logprob = torch.where(logsumexp.abs() <= LARGEST_LOGSUMEXP, given, draft_logprob)
        if self.greedy is not None:
            draft_logprob = draft_logprob.masked_fill(self.greedy[:, None], 0)
        return logprobs[0] - draft_logprob

    def _quotients_and_tokens(self) -> Tensor:
        """Exchange what decides on drafts without logits, and candidates; return log p(x), keep each row's tokens.

        The residual is p without the draft, whatever is accepted. So what each row would emit can be drawn at once.
        """
        steps, layout = self.steps, self.layout

        def compute(
            token_ids: Tensor, positions: Tensor, seeds: Tensor, target: Source, mask: Tensor | None
        ) -> tuple[Tensor, ...]:
            temperature = target.sampling.temperature[..., None]
            (logits,), (row_max,) = framed((target,), layout, mask)
            token_logits = at_token(logits, token_ids, layout) - row_max.squeeze(-1)
            weights = exp_scaled(logits, row_max, temperature)
            residual = weights.masked_fill(layout.token_ids == token_ids[..., None], 0)
            draws = (best_tokens(each, seeds, positions, SELECT, layout) for each in (residual, weights))
            return token_logits, pad_blocks(block_sums(weights), layout), *itertools.chain(*draws)

        positions = steps.positions[:, None] + steps.offsets
        seeds = steps.seeds[:, None].expand_as(positions)
        ids = torch.nn.functional.pad(steps.draft_token_ids, (0, 1), value=-1)
        tensors = ids, positions, seeds, self.sources[0], self.greedy
        logits_each = 2 * positions.shape[1] * layout.width
        token_logits, sums, *offers = self.shard.gather(layout, *by_chunks(compute, logits_each, *tensors))
        self.recovered, self.bonus = best_of_both(offers, seeds, positions, layout)
        logprobs = token_logits.amax(dim=0) / steps.temperature[:, None] - layout.whole(sums).sum(dim=-1).log()
        quotient: Tensor = logprobs[:, :-1]
        return quotient

    def _raw_draft_logits(self, source: Source, token_ids: Tensor, cutoffs: Tensor | None) -> tuple[Tensor, ...]:
        """Return the draft model's raw logits of the drafts, and of any cutoffs; -inf where another rank has them."""
        (logits,) = copy((source.logits,), self.layout, source.row_max.dtype)
        ids = (token_ids,) if cutoffs is None else (token_ids, cutoffs.clamp(0, self.shard.vocab_size - 1))
        return tuple(at_token(logits, each, self.layout) for each in ids)

    def _statistics(self, sources: tuple[Source, ...], token_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Return what decides on drafts: [..., models] their logits less the rows' maxima; [..., most_blocks] block sums.

        The block sums are those of both models' weights, and of the change from the one to the other
        (`eager.probabilistic.compare`).
        """
        temperature = sources[0].sampling.temperature[..., None]
        logits, row_max = framed(sources, self.layout, mask)
        token_logits = [at_token(each, token_ids, self.layout) - top.squeeze(-1) for each, top in zip(logits, row_max)]
        difference = log_difference(*logits, *row_max, temperature)
        weights = exp_scaled(logits, row_max, temperature)
        sums = *block_sums(weights), block_sums(weight_change(weights[0], difference))
        return torch.stack(token_logits, dim=-1), *(pad_blocks(each, self.layout) for each in sums)

    def _comparison(
        self, target: Source, draft: Source, sums: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Comparison:
        """Compare this rank's frames of rows, given the sum of all the target's weights and log(draft's / target's)."""
        temperature = target.sampling.temperature[..., None]
        logits, row_max = framed((target, draft), self.layout, mask)
        difference = log_difference(*logits, *row_max, temperature)
        weights = exp_scaled(logits[0], row_max[0], temperature)
        return Comparison(weights, sums[0], difference, sums[1])

    def residual_masses(self, offsets: slice, log_ratio: Tensor) -> Tensor:
        """Return A = sum max(0, c p - q) of the rows at some offsets, given log c there: `eager.block.residual_mass`."""
        if self.steps.greedy is True:  # c is 1 or 0: no A is needed
            return torch.zeros_like(log_ratio)

        def compute(log_ratio: Tensor, *tensors: Any) -> tuple[Tensor]:
            target, draft, target_sum, ratio, mask = tensors
            comparison = self._comparison(target, draft, (target_sum, ratio), mask)
            return (pad_blocks(block_sums(comparison.residual_weights(log_ratio)), self.layout),)

        rows = slice(None), offsets
        sources = (source.at(*rows) for source in self.sources)
        tensors = *sources, self.target_sum[rows], self.log_sum_ratio[rows], self.greedy
        logits_each = 2 * log_ratio.shape[1] * self.layout.width
        (sent,) = self.shard.gather(self.layout, *by_chunks(compute, logits_each, log_ratio, *tensors))
        mass = self.layout.whole(sent).sum(dim=-1)
        return log_ratio.exp() * (mass / self.target_sum[rows])

    def emit(self, num_accepted: Tensor, log_ratio: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw the token after each request's accepted drafts: `eager.probabilistic.emit`."""
        steps = self.steps
        requests = torch.arange(len(num_accepted), device=num_accepted.device)
        target, positions = self.sources[0].at(requests, num_accepted), steps.positions + num_accepted
        is_empty = target.row_max == -torch.inf
        if steps.greedy is True:
            return target.first, is_empty
        if steps.num_draft_tokens == 0:
            token_ids, *_ = sample(self.shard, self.layout, target, steps.seeds, positions, steps.greedy)
            return token_ids, is_empty

        is_bonus = num_accepted == steps.num_drafts
        if len(self.sources) == 1:
            at_stop = requests, num_accepted
            token_ids = torch.where(is_bonus, self.bonus[at_stop], self.recovered[at_stop])
        else:
            subtracted = requests, num_accepted.clamp(max=steps.num_draft_tokens - 1)
            ratios = infinite_at(is_bonus, log_ratio)
            draft, sums = self.sources[1].at(*subtracted), (self.target_sum[subtracted], self.log_sum_ratio[subtracted])
            tensors = positions, steps.seeds, ratios, target, draft, *sums, self.greedy
            offers = self.shard.gather(self.layout, *by_chunks(self._candidates, 2 * self.layout.width, *tensors))
            token_ids, _ = best_of_both(offers, steps.seeds, positions, self.layout)
        return token_ids if self.greedy is None else torch.where(self.greedy, target.first, token_ids), is_empty

    def logprobs(self, token_ids: Tensor, is_raw: bool) -> Tensor:
        """Return the log-probability of one token per row, [batch, rows] each: `eager.probabilistic.logprobs`.

        Args:
            token_ids: [batch, rows] int64.
            is_raw: whether of softmax(logits), or else of the distribution sampled from.
        """
        target = self.sources[0]
        if is_raw:
            target = target._replace(sampling=RowSampling(torch.ones_like(target.sampling.temperature)))
        elif self.steps.greedy is True:
            return (target.first == token_ids).to(target.row_max.dtype).log()

        def compute(token_ids: Tensor, target: Source, mask: Tensor | None) -> tuple[Tensor, Tensor]:
            (logits,), (row_max,) = framed((target,), self.layout, mask)
            token_logits = at_token(logits, token_ids, self.layout) - row_max.squeeze(-1)
            weights = exp_scaled(logits, row_max, target.sampling.temperature[..., None])
            return token_logits, pad_blocks(block_sums(weights), self.layout)

        mask, logits_each = None if is_raw else self.greedy, token_ids.shape[1] * self.layout.width
        token_logits, sums = self.shard.gather(self.layout, *by_chunks(compute, logits_each, token_ids, target, mask))
        return token_logits.amax(dim=0) / target.sampling.temperature - self.layout.whole(sums).sum(dim=-1).log()

    def _candidates(
        self,
        positions: Tensor,
        seeds: Tensor,
        log_ratio: Tensor,
        target: Source,
        draft: Source,
        target_sum: Tensor,
        ratio: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return `best_tokens` of max(0, c p - q), and of p: which of the two is needed, no rank knows alone."""
        comparison = self._comparison(target, draft, (target_sum, ratio), mask)
        both = comparison.residual_weights(log_ratio), comparison.target_weights
        return tuple(itertools.chain(*(best_tokens(each, seeds, positions, SELECT, self.layout) for each in both)))
