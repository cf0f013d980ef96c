"""Residuals in PyTorch: max(0, c p - q) of rows, their sums, and the draw of a token."""

from typing import NamedTuple

import torch
from torch import Tensor

from specdecode.arguments import on_host
from specdecode.eager.selection import Rows, block_sums, exp_scaled, mark_greedy, or_first, select
from specdecode.eager.truncation import RowSampling, read
from specdecode.noise import SELECT


def log_difference(target: Tensor, draft: Tensor, target_max: Tensor, draft_max: Tensor, temperature: Tensor) -> Tensor:
    """Return D = ((draft - its max) - (target - its max)) / T, finite; 0 for tokens that neither model can draw.

    Close numbers are subtracted before any rounding. They are halved because their difference might overflow.
    """
    difference = (draft / 2).sub_(target, alpha=0.5).sub_(draft_max / 2 - target_max / 2).div_(temperature / 2)
    return difference.clamp_(-3e38, 3e38).nan_to_num_(nan=0)


class Comparison(NamedTuple):
    """The inputs of the residuals of rows, for any c: max(0, c p - q) = c p max(0, 1 - q / (c p)).

    log(q / p) = D - log_sum_ratio keeps its relative precision where p and q are close.
    """

    target_weights: Tensor
    """[..., padded vocab] proportional to p."""

    target_sum: Tensor
    """[...] the sum of these weights."""

    difference: Tensor
    """[..., padded vocab] D, the difference of the logarithms of the two models' weights."""

    log_sum_ratio: Tensor
    """[...] log(sum of the draft's weights / sum of the target's), infinite if the draft row is a point mass."""

    def residual_weights(self, log_running_ratio: Tensor) -> Tensor:
        """Return w max(0, 1 - q / (c p)), given the target's weights w; overwrites the difference."""
        log_quotient = self.difference.sub_((self.log_sum_ratio + log_running_ratio)[..., None])  # log(q / (c p))
        return log_quotient.clamp_(max=0).expm1_().neg_().mul_(self.target_weights)


def log_sum_ratio(target_sum: Tensor, draft_sum: Tensor, change: Tensor | None) -> Tensor:
    """Return log(sum of the draft's weights / sum of the target's), infinite if the former is not positive.

    `change` is the sum of the draft's weights minus the target's, NaN in rows where some weights differ much; None if all
    rows are such. Elsewhere log(1 + change / sum) is more precise than the difference of two logarithms.
    """
    ratio = draft_sum.log() - target_sum.log()
    if change is not None:
        change = change / target_sum
        ratio = torch.where(change.isnan(), ratio, change.log1p())
    return torch.where(draft_sum > 0, ratio, torch.inf)


def compare(rows: Rows, temperature: Tensor) -> tuple[Comparison, Tensor]:
    """Compare target rows with draft rows; also return the block sums of the target's weights, [..., num_blocks].

    Args:
        rows: [2, ..., vocab].
        temperature: [...] or broadcastable to it.
    """
    (target, draft), (target_max, draft_max) = rows.logits, rows.row_max
    difference = log_difference(target, draft, target_max, draft_max, temperature[..., None])
    weights = exp_scaled(rows.logits, rows.row_max, temperature[..., None])
    by_block = block_sums(weights)
    sums = by_block.sum(dim=-1)
    if rows.outside is not None:
        sums[-1] += rows.outside
    change = None
    if not on_host(difference) or bool((difference.abs().amax(dim=-1) <= 1).any()):
        changes = difference.expm1().mul_(weights[0]).masked_fill_(difference.abs() > 1, torch.nan)  # w (exp(D) - 1)
        change = block_sums(changes).sum(dim=-1)
        if rows.outside is not None:
            change = change.masked_fill(rows.outside > 0, torch.nan)
    ratio = log_sum_ratio(sums[0], sums[1], change)
    return Comparison(weights[0], sums[0], difference, ratio), by_block[0]


def exclude_token(weights: Tensor, token_ids: Tensor, log_sum_ratio: Tensor, log_running_ratio: Tensor) -> Tensor:
    """Set one token's weight to 0, in place, in rows where q is a point mass on it and c is finite.

    Weights are [rows, vocab], other arguments [rows].
    """
    difference = log_sum_ratio - log_running_ratio  # NaN if both are infinite
    limit = torch.full_like(difference, torch.inf).masked_fill_(difference == torch.inf, 0)
    return weights.scatter_reduce_(1, token_ids[:, None], limit[:, None], "amin")


class Residual(NamedTuple):
    """The weights that recovered tokens are drawn from."""

    weights: Tensor
    """[rows, padded vocab] proportional to max(0, c p - q), or to p if c is infinite."""

    target: tuple[Tensor, Tensor] | None
    """Weights proportional to p, and their block sums, for rows whose `weights` are all 0; None: `first` is drawn."""

    total: Tensor | None
    """[rows] a number, not positive for rows where `first` is drawn; None: the sum of the weights."""

    first: Tensor | None
    """[rows, 1] int64, the only token of p where p is a point mass; the weights of such rows are meaningless.

    None: p is never a point mass.
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
    log_running_ratio: Tensor,
    greedy: Tensor | None = None,
) -> tuple[Residual, Tensor]:
    """Return the residuals of rows, and whether the target row has no finite logit, [rows] bool.

    A draft row that is a point mass excludes one token, like a deterministic drafter.

    Args:
        target: [rows, vocab] raw logits.
        draft: [rows, vocab] raw logits, or None for the point mass on the rejected draft.
        token_ids: [rows] int64, the rejected drafts, or None if there are draft rows.
        sampling: [rows], how the target samples.
        draft_sampling: [rows], how drafts were drawn.
        log_running_ratio: [rows] log c.
        greedy: [rows] bool, whether p is the point mass on the argmax; None if it is for no row.
    """
    if draft is None:
        assert token_ids is not None
        rows, _ = read((target,), (sampling,))
        row_max = mark_greedy(rows, greedy).row_max[0]
        weights = exp_scaled(rows.logits[0], row_max, sampling.temperature[:, None])
        weights = exclude_token(
            weights, token_ids, weights.new_full(log_running_ratio.shape, torch.inf), log_running_ratio
        )
        # If nothing is left, all of p is on the excluded token, which is then `first`.
        found = Residual(weights, None, None, token_ids[:, None] if rows.first is None else rows.first[0])
        return found, rows.row_max[0, :, 0] == -torch.inf
    rows, _ = read((target, draft), (sampling, draft_sampling))
    comparison, sums = compare(mark_greedy(rows, greedy), sampling.temperature)
    weights = comparison.residual_weights(log_running_ratio)
    if rows.first is not None:
        weights = exclude_token(weights, rows.first[1].squeeze(1), comparison.log_sum_ratio, log_running_ratio)
    first = None if rows.first is None else rows.first[0]
    found = Residual(weights, (comparison.target_weights, sums), comparison.target_sum, first)
    return found, rows.row_max[0, :, 0] == -torch.inf
