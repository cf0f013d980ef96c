"""Probabilistic in PyTorch: accept by likelihood ratio, and after a rejection draw from the residual."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdecode.batch import SamplerOutput
from specdecode.checks import on_host
from specdecode.eager.fused import fused
from specdecode.eager.greedy import argmax
from specdecode.eager.selection import (
    Requests,
    Rows,
    block_sums,
    by_case,
    by_chunks,
    by_kind,
    exp_scaled,
    mark_greedy,
    or_first,
    rows_at,
    select,
)
from specdecode.eager.steps import Steps
from specdecode.eager.strict import sample
from specdecode.eager.truncation import RowSampling, is_kept, read
from specdecode.eager.vocabulary import DraftVocabRows
from specdecode.noise import SELECT

LARGEST_LOGSUMEXP = 256.0
"""Beyond this a float32 logsumexp may be off by more than 1.5e-5."""


@fused(
    """
    template <typename T> T logprob(T logit, T row_max, T temperature, T sum, T is_first) {
        T result = (logit - row_max) / temperature - ::log(sum);
        return result != result ? ::log(is_first) : result;
    }
    """
)
def logprob(logit: Tensor, row_max: Tensor, temperature: Tensor, sums: Tensor, is_first: Tensor | None) -> Tensor:
    """Return (l - max) / T - log of the sum; where an infinite maximum makes that NaN, what it is for a point mass."""
    result = (logit - row_max) / temperature - sums.log()
    return result if is_first is None else torch.where(result.isnan(), is_first.log(), result)


def logprobs(
    models: tuple[Tensor, ...], token_ids: Tensor, samplings: tuple[RowSampling, ...], greedy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each model's log-probability of one token per row, and whether a target row has no finite logit.

    Args:
        models: [..., vocab] raw logits of the target, and of the draft if it is to be read.
        token_ids: [...] int64.
        samplings: [...] or what broadcasts to it, of each model.
        greedy: [...] bool, likewise, or None if no row is.

    Returns:
        [models, ...] and [...].
    """
    rows, _ = read(models, samplings)
    temperature = samplings[0].temperature[..., None].expand_as(rows.row_max)
    token_ids = token_ids[None, ..., None].expand(rows.row_max.shape)
    logit = rows.logits.gather(-1, token_ids)
    sums = block_sums(exp_scaled(rows.logits, rows.row_max, temperature)).sum(dim=-1, keepdim=True)
    if rows.outside is not None:
        sums[-1, ..., 0] += rows.outside
    is_first = None
    if rows.first is not None:  # 1 or 0: beside a bool a GPU would cast each argument of `logprob`
        is_first = torch.eq(rows.first, token_ids, out=torch.empty_like(rows.row_max))
    result, is_empty = logprob(logit, rows.row_max, temperature, sums, is_first), rows.row_max[0, ..., 0] == -torch.inf
    if greedy is not None and is_first is not None:
        result = torch.where(greedy[..., None], is_first.log(), result)
    return result.squeeze(-1), is_empty


def kept_logits(draft: Tensor | DraftVocabRows, token_ids: Tensor, cutoff: Tensor | None) -> Tensor:
    """Return the raw logit of one token per row, [...]; -inf if it is beyond the cutoff, or no token of the draft."""
    if isinstance(draft, DraftVocabRows):
        places = draft.places[token_ids]
        return kept_logits(draft.tensor, places.clamp(min=0), cutoff).masked_fill(places < 0, -torch.inf)
    logits = draft.gather(-1, token_ids[..., None]).squeeze(-1)
    return logits if cutoff is None else logits.masked_fill(~is_kept(draft, token_ids, cutoff), -torch.inf)


@fused(
    """
    template <typename T> T logprob_difference(T target_logprob, T draft_logprob) {
        T difference = target_logprob - draft_logprob;
        return ::fabs(difference) < T(INFINITY) ? difference : -T(INFINITY);
    }
    """
)
def logprob_difference(target_logprob: Tensor, draft_logprob: Tensor) -> Tensor:
    """Return log(p(x) / q(x)) of both logarithms, -inf where p(x) or q(x) is 0."""
    difference = target_logprob - draft_logprob
    return difference.nan_to_num_(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def log_quotient(
    target: Tensor,
    draft: Tensor | None,
    token_ids: Tensor,
    sampling: RowSampling,
    draft_sampling: RowSampling,
    draft_logsumexp: Tensor | None,
    draft_cutoff: Tensor | None,
    greedy: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return log(p(x) / q(x)) of each row's draft x, -inf where either is 0, and whether the target row is empty.

    For a deterministic drafter and for greedy requests q(x) = 1. A draft row whose logsumexp is given is not read, unless
    the logsumexp is so large that float32 has rounded away what matters.
    """

    def by_rows(target: Tensor, draft: Tensor, token_ids: Tensor, *samplings: RowSampling) -> tuple[Tensor, Tensor]:
        (target_logprob, draft_logprob), is_empty = logprobs((target, draft), token_ids, samplings[:2], greedy)
        if greedy is not None:
            draft_logprob = draft_logprob.masked_fill(greedy, 0)
        return logprob_difference(target_logprob, draft_logprob), is_empty

    def by_logsumexp(
        target: Tensor,
        draft: Tensor,
        token_ids: Tensor,
        sampling: RowSampling,
        draft_sampling: RowSampling,
        logsumexp: Tensor,
        cutoff: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        (target_logprob,), is_empty = logprobs((target,), token_ids, (sampling,), greedy)
        draft_logprob = kept_logits(draft, token_ids, cutoff) / draft_sampling.temperature - logsumexp
        return logprob_difference(target_logprob, draft_logprob), is_empty

    if draft is None:
        (quotient,), is_empty = logprobs((target,), token_ids, (sampling,), greedy)
        return quotient, is_empty
    if draft_logsumexp is None:
        return by_rows(target, draft, token_ids, sampling, draft_sampling)
    trusted = (draft_logsumexp.abs() <= LARGEST_LOGSUMEXP).all(dim=1)
    tensors = (target, draft, token_ids, sampling, draft_sampling, draft_logsumexp, draft_cutoff)
    quotient, is_empty = by_case(trusted, by_logsumexp, by_rows, *tensors)
    return quotient, is_empty


def quotients(steps: Steps, rows: Requests, offsets: slice) -> tuple[Tensor, Tensor]:
    """Return `log_quotient` of some requests' drafts at some offsets, [rows, offsets] each."""

    def match(
        target: Tensor, _: Tensor | None, token_ids: Tensor, sampling: RowSampling, *__: Any
    ) -> tuple[Tensor, Tensor]:
        best, is_empty = argmax(target)
        return (best == token_ids).to(sampling.temperature.dtype).log(), is_empty

    target, draft, logsumexp = steps.target_logits[rows, offsets], steps.draft_logits, steps.draft_logsumexp
    cutoff = None if steps.draft_cutoff is None else steps.draft_cutoff[rows, offsets]
    if draft is not None:
        draft = draft[rows, offsets]
    if logsumexp is not None:  # on a device all rows are read: to choose by logsumexp, the host would wait
        logsumexp = logsumexp[rows, offsets] if on_host(logsumexp) else None
    samplings = steps.sampling.at(rows, None), steps.draft_sampling.at(rows, None)
    tensors = (target, draft, steps.draft_token_ids[rows, offsets], *samplings, logsumexp, cutoff)
    logits_each = target.shape[1:].numel() * (1 if draft is None else 2)
    quotient, is_empty = by_kind(steps.greedy_among(rows), log_quotient, match, logits_each, *tensors)
    return quotient, is_empty


def accepts(log_uniform: Tensor, quotient: Tensor) -> Tensor:
    """Decide whether drafts are accepted: log u <= log(p(x) / q(x))."""
    return log_uniform <= quotient


@fused(
    """
    template <typename T> T log_difference(T target, T draft, T target_max, T draft_max, T temperature) {
        T change = ((draft / 2 - target / 2) - (draft_max / 2 - target_max / 2)) / (temperature / 2);
        return change != change ? T(0) : change > T(3e38) ? T(3e38) : change < T(-3e38) ? T(-3e38) : change;
    }
    """
)
def log_difference(target: Tensor, draft: Tensor, target_max: Tensor, draft_max: Tensor, temperature: Tensor) -> Tensor:
    """Return D = ((draft - its max) - (target - its max)) / T, finite, and 0 for tokens that neither model can draw.

    Close numbers are subtracted before anything rounds them. They are halved because the difference of two might overflow.
    """
    difference = (draft / 2).sub_(target, alpha=0.5).sub_(draft_max / 2 - target_max / 2).div_(temperature / 2)
    return difference.clamp_(-3e38, 3e38).nan_to_num_(nan=0)


@fused(
    """
    template <typename T> T weight_change(T weight, T difference) {
        return ::fabs(difference) <= 1 ? weight * ::expm1(difference) : T(NAN);
    }
    """
)
def weight_change(weights: Tensor, difference: Tensor) -> Tensor:
    """Return w (exp(D) - 1), precise where D is small, and NaN where |D| > 1."""
    return difference.expm1().mul_(weights).masked_fill_(difference.abs() > 1, torch.nan)


@fused(
    """
    template <typename T> T weight_left(T weight, T difference, T log_sum_ratio, T log_ratio) {
        T quotient = difference - (log_sum_ratio + log_ratio);
        return quotient < 0 ? -::expm1(quotient) * weight : T(0);
    }
    """
)
def weight_left(weights: Tensor, difference: Tensor, log_sum_ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """Return w max(0, 1 - exp(D - s)), s being the sum of the last two; may overwrite D."""
    return difference.sub_(log_sum_ratio + log_ratio).clamp_(max=0).expm1_().neg_().mul_(weights)


class Comparison(NamedTuple):
    """What the residuals of rows are computed from, for any c: max(0, c p - q) = c p max(0, 1 - q / (c p)).

    log(q / p) = D - log_sum_ratio keeps its relative precision where p and q are close.
    """

    target_weights: Tensor
    """[..., padded vocab] proportional to p."""

    target_sum: Tensor
    """[...] the sum of those."""

    difference: Tensor
    """[..., padded vocab] D, by which the logarithms of the two models' weights differ."""

    log_sum_ratio: Tensor
    """[...] log(sum of the draft's weights / sum of the target's), infinite if the draft row is a point mass."""

    def residual_weights(self, log_ratio: Tensor) -> Tensor:
        """Return what is proportional to max(0, c p - q), and by the same factor to c p; may overwrite the difference."""
        ratios = self.log_sum_ratio[..., None], log_ratio[..., None]
        return weight_left(self.target_weights, self.difference, *ratios)


@fused(
    """
    template <typename T> T log_sum_ratio(T target_sum, T draft_sum, T change) {
        T relative = change / target_sum;
        if (!(draft_sum > 0)) return T(INFINITY);
        return relative != relative ? ::log(draft_sum) - ::log(target_sum) : ::log1p(relative);
    }
    """
)
def log_sum_ratio(target_sum: Tensor, draft_sum: Tensor, change: Tensor | None) -> Tensor:
    """Return log(sum of the draft's weights / sum of the target's), infinite if the former is not positive.

    The third argument is the sum of what changes the target's weights to the draft's, NaN where some weight changes much;
    None: everywhere some does. If none does, log(1 + change) is more precise than the difference of two logarithms.
    """
    ratio = draft_sum.log() - target_sum.log()
    if change is not None:
        change = change / target_sum
        ratio = torch.where(change.isnan(), ratio, change.log1p())
    return torch.where(draft_sum > 0, ratio, torch.inf)


def compare(rows: Rows, temperature: Tensor) -> tuple[Comparison, Tensor]:
    """Compare a target's rows with a draft's; return also the block sums of the target's weights, [..., num_blocks].

    Args:
        rows: [2, ..., vocab].
        temperature: [...] or what broadcasts to it.
    """
    difference = log_difference(*rows.logits, *rows.row_max, temperature[..., None])
    weights = exp_scaled(rows.logits, rows.row_max, temperature[..., None])
    by_block = block_sums(weights)
    sums = by_block.sum(dim=-1)
    if rows.outside is not None:
        sums[-1] += rows.outside
    change = None
    if not on_host(difference) or bool((difference.abs().amax(dim=-1) <= 1).any()):
        change = block_sums(weight_change(weights[0], difference)).sum(dim=-1)
        if rows.outside is not None:
            change = change.masked_fill(rows.outside > 0, torch.nan)
    return Comparison(weights[0], sums[0], difference, log_sum_ratio(*sums, change)), by_block[0]


@fused(
    """
    template <typename T> T most_left(T log_sum_ratio, T log_ratio) {
        return log_sum_ratio - log_ratio == T(INFINITY) ? T(0) : T(INFINITY);
    }
    """
)
def most_left(log_sum_ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the most that the residual can weigh at one token: 0 if q is a point mass on it, unless c is infinite."""
    difference = log_sum_ratio - log_ratio
    return torch.full_like(difference, torch.inf).masked_fill_(difference == torch.inf, 0)


def leave_out(weights: Tensor, token_ids: Tensor, log_sum_ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """Limit the weight of one token of each row to `most_left`, in place: [rows, vocab] weights, and [rows] each."""
    return weights.scatter_reduce_(1, token_ids[:, None], most_left(log_sum_ratio, log_ratio)[:, None], "amin")


class Residual(NamedTuple):
    """What rows' recovered tokens are drawn from."""

    weights: Tensor
    """[rows, padded vocab] proportional to max(0, c p - q), or to p if c is infinite."""

    target: tuple[Tensor, Tensor] | None
    """Weights proportional to p, and their block sums: drawn from where the former are all 0; None: `first` is drawn."""

    total: Tensor | None
    """[rows] a number that is not positive where `first` is drawn; None: the sum of the weights."""

    first: Tensor | None
    """[rows, 1] int64, the only token that p can draw where it is a point mass, and the weights are meaningless.

    None: p is no point mass.
    """

    def draw(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw a token of each row, [rows] int64, given [rows] int64 each."""
        sums = block_sums(self.weights)
        token_ids = select(self.weights, sums, seeds, positions, SELECT, self.target)
        return or_first(token_ids, sums.sum(dim=1) if self.total is None else self.total, self.first)


def residual(
    target: Tensor,
    draft: Tensor | None,
    token_ids: Tensor | None,
    sampling: RowSampling,
    draft_sampling: RowSampling,
    log_ratio: Tensor,
    greedy: Tensor | None = None,
) -> tuple[Residual, Tensor]:
    """Return the residuals of rows, and which target rows have no finite logit, [rows] bool.

    A draft row that is a point mass leaves out one token, as a deterministic drafter does.

    Args:
        target: [rows, vocab] raw logits.
        draft: [rows, vocab] raw logits, or None for the point mass on the rejected draft.
        token_ids: [rows] int64, the rejected drafts, or None if there are draft rows.
        sampling: [rows], how the target samples.
        draft_sampling: [rows], how drafts were drawn.
        log_ratio: [rows] log c.
        greedy: [rows] bool, whether p is the point mass on the argmax, or None if it is for no row.
    """
    if draft is None:
        assert token_ids is not None
        rows, _ = read((target,), (sampling,))
        row_max = mark_greedy(rows, greedy).row_max[0]
        weights = exp_scaled(rows.logits[0], row_max, sampling.temperature[:, None])
        weights = leave_out(weights, token_ids, weights.new_full(log_ratio.shape, torch.inf), log_ratio)
        # If nothing is left, all of p is on the token that was left out, which is then the first.
        found = Residual(weights, None, None, token_ids[:, None] if rows.first is None else rows.first[0])
        return found, rows.row_max[0, :, 0] == -torch.inf
    rows, _ = read((target, draft), (sampling, draft_sampling))
    comparison, sums = compare(mark_greedy(rows, greedy), sampling.temperature)
    weights = comparison.residual_weights(log_ratio)
    if rows.first is not None:
        weights = leave_out(weights, rows.first[1].squeeze(1), comparison.log_sum_ratio, log_ratio)
    first = None if rows.first is None else rows.first[0]
    found = Residual(weights, (comparison.target_weights, sums), comparison.target_sum, first)
    return found, rows.row_max[0, :, 0] == -torch.inf


def recover(
    steps: Steps,
    requests: Tensor,
    offsets: Tensor,
    log_ratio: Tensor,
    sampling: RowSampling,
    draft_sampling: RowSampling,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens from max(0, c p - q), or from p where c is infinite, at some requests' offsets and positions."""
    # After all drafts there is no draft row: take the last one, which an infinite c makes irrelevant.
    at_draft = requests, offsets.clamp(max=steps.num_draft_tokens - 1)
    draft = None if steps.draft_logits is None else rows_at(steps.draft_logits, *at_draft)
    target, token_ids = rows_at(steps.target_logits, requests, offsets), None
    if draft is None:
        token_ids = steps.draft_token_ids[at_draft]
    found, is_empty = residual(target, draft, token_ids, sampling, draft_sampling, log_ratio, greedy)
    return found.draw(seeds, positions), is_empty


def infinite_at(is_bonus: Tensor, log_ratio: Tensor | None) -> Tensor:
    """Return log c for the tokens of `emit`: infinite for bonus tokens, else as given, or 0."""
    if log_ratio is None:
        return torch.xlogy(is_bonus, torch.inf)  # 1 log inf or 0 log inf, which is 0, in one kernel
    return log_ratio.masked_fill(is_bonus, torch.inf)


def emit(steps: Steps, num_accepted: Tensor, log_ratio: Tensor | None = None) -> tuple[Tensor, ...]:
    """Draw the token after each request's accepted drafts: recovered where one was rejected, else bonus.

    A bonus token is a recovered token with an infinite c. So a GPU draws all tokens in one way; the CPU reads no draft row
    for a bonus token.

    Args:
        steps: the batch.
        num_accepted: [batch] int64.
        log_ratio: [batch] log c; recovered tokens are drawn from max(0, c p - q); None: c = 1.

    Returns:
        [batch] int64 token ids; [batch] bool, whether the target row has no finite logit.
    """

    def bonus(requests: Tensor, offsets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        token_ids, _logsumexp, is_empty, *_cutoff = sample(
            steps.target_logits[requests, offsets],
            steps.sampling.at(requests),
            steps.seeds[requests],
            steps.positions[requests] + offsets,
            steps.greedy_among(requests),
        )
        return token_ids, is_empty

    is_bonus = num_accepted >= steps.num_drafts
    if isinstance(steps.greedy, Tensor):
        is_bonus |= steps.greedy
    scalars = (steps.sampling, steps.draft_sampling, steps.seeds, steps.positions + num_accepted, steps.point_masses)
    tensors = (steps.requests, num_accepted, infinite_at(is_bonus, log_ratio), *scalars)
    recovered = functools.partial(by_chunks, functools.partial(recover, steps), 2 * steps.vocab)
    if steps.num_draft_tokens == 0 or steps.greedy is True:
        return bonus(*tensors)
    if on_host(is_bonus):
        return by_case(is_bonus, bonus, recovered, *tensors)
    return recovered(*tensors)


def verify(steps: Steps, scheduled: Tensor | None = None) -> SamplerOutput:
    """Accept drafts by likelihood ratio up to the first rejection; then emit a recovered or a bonus token.

    Args:
        steps: the batch.
        scheduled: [batch, num_draft_tokens] which drafts to accept instead, or None.
    """
    log_uniforms = steps.log_uniforms()

    def decide(rows: Requests, offsets: slice) -> tuple[Tensor, Tensor]:
        quotient, is_empty = quotients(steps, rows, offsets)
        if scheduled is not None:
            return scheduled[rows, offsets], is_empty
        return accepts(log_uniforms[rows, offsets], quotient), is_empty

    accepted, is_empty = steps.scan(steps.num_drafts, steps.num_draft_tokens, decide)
    num_accepted = steps.leading(accepted).minimum(steps.num_drafts)
    emitted, emitted_is_empty = emit(steps, num_accepted)
    return steps.output(num_accepted, emitted, is_empty, emitted_is_empty)
