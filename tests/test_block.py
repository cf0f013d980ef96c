"""Block verification: distributions over several steps, and precision."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from specdecode import RejectionSampler, sample
from specdecode.eager.block import residual_mass
from specdecode.eager.truncation import RowSampling
from tests.support import distributions


def decode(
    place,
    model: distributions.Tables,
    widths: tuple[int, ...],
    fresh: bool = True,
    requests: int = distributions.REQUESTS,
):
    """Decode in steps with `widths` drafts, each request with one seed; return the first tokens, [requests, K + 1]."""
    backend, device = place
    sampler, depth = RejectionSampler("block", backend=backend), model.num_draft_tokens + 1
    target, draft = (
        [torch.tensor(rows, device=device).float() for rows in side] for side in (model.target, model.draft)
    )
    seeds, tokens = torch.arange(requests, device=device), torch.full((requests, depth), -1, device=device)
    length = torch.zeros(requests, dtype=torch.int64, device=device)

    def rows_after(tables: list, prefix: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the rows after `count` tokens each; rows beyond the model's depth are arbitrary and unused."""
        rows = torch.zeros(requests, model.vocab, device=device)
        for depth_so_far, table in enumerate(tables):
            here = count == depth_so_far
            rows[here] = table[prefix[here]]
        return rows

    for width in widths:
        prefix = torch.zeros_like(length)
        for column in range(depth):
            prefix = torch.where(column < length, prefix * model.vocab + tokens[:, column], prefix)
        ids, target_rows, draft_rows = [], [rows_after(target, prefix, length)], []
        for offset in range(width):
            draft_rows.append(rows_after(draft, prefix, length + offset))
            drawn = sampler.draft(draft_rows[-1], 1.0, seeds, length + offset, offset=offset if fresh else 0)
            # The last token is the target's own: positions beyond the model's depth are not drafted.
            ids.append(torch.where(length + offset < depth - 1, drawn.token_ids, -1))
            prefix = prefix * model.vocab + drawn.token_ids
            target_rows.append(rows_after(target, prefix, length + offset + 1))
        stacks = torch.stack(target_rows, 1), torch.stack(ids, 1), torch.stack(draft_rows, 1)
        output = sampler(*stacks, seeds=seeds, positions=length)
        for column in range(width + 1):
            place_of = (length + column)[:, None].clamp(max=depth - 1)
            emits = (column < output.num_tokens) & (length + column < depth)
            token = torch.where(emits, output.token_ids[:, column], tokens.gather(1, place_of).squeeze(1))
            tokens.scatter_(1, place_of, token[:, None])
        length = (length + output.num_tokens).clamp(max=depth)
    prefix = torch.zeros_like(length)
    for column in range(depth):
        own = sample(
            rows_after(target, prefix, torch.full_like(length, column)), 1.0, seeds, torch.full_like(seeds, column)
        )
        tokens[:, column] = torch.where(column < length, tokens[:, column], own)
        prefix = prefix * model.vocab + tokens[:, column]
    return tokens.cpu().numpy()


SEVERAL_STEPS = {"V2-K2-2-1": (2, 4, (2, 2, 1)), "V3-K3-2": (3, 3, (3, 2))}


@pytest.mark.parametrize(("vocab", "depth", "widths"), SEVERAL_STEPS.values(), ids=SEVERAL_STEPS)
def test_several_steps_with_one_seed_have_the_distribution_of_the_target(place, vocab, depth, widths):
    model = distributions.tables(vocab, depth, seed=vocab)
    distributions.assert_distribution(
        distributions.counts_of_tokens(model, decode(place, model, widths)), distributions.joint_distribution(model)
    )


def test_drafts_with_the_noise_of_earlier_steps_would_change_the_distribution(place):
    # The purpose of the offset: a step drafts positions that an earlier step has used. The check above has to find the
    # error.
    model = distributions.Tables(*([np.log([row]).repeat(2**i, 0) for i in range(4)] for row in ([1, 2], [3, 1])))
    right, wrong = (
        distributions.counts_of_tokens(model, decode(place, model, (2, 2), fresh=fresh)) for fresh in (True, False)
    )
    distributions.assert_distribution(right, distributions.joint_distribution(model))
    assert distributions.p_value(wrong, distributions.joint_distribution(model)) < distributions.FALSE_ALARM


@pytest.mark.parametrize("vocab", [7, 3000, 151_936])
@pytest.mark.parametrize("behind", [0.0, 0.3, 1.0], ids=lambda behind: f"ratio-{behind}-behind")
@pytest.mark.parametrize("closeness", [1.0, 1e-1, 1e-2, 1e-3, 1e-5])
def test_residual_masses_keep_their_relative_precision_where_target_and_draft_nearly_agree(closeness, behind, vocab):
    # All logits are float32 numbers, and worked on in float32 and in float64.
    generator = torch.Generator().manual_seed(0)
    target = 2 * torch.randn(4, vocab, generator=generator)
    draft = target + closeness * torch.randn(4, vocab, generator=generator)
    log_ratio = torch.full((4,), -behind * closeness)
    temperature = torch.full((4,), 0.7)
    masses = [
        residual_mass(target.to(dtype), draft.to(dtype), sampling, sampling, log_ratio.to(dtype)).double()
        for dtype in (torch.float32, torch.float64)
        for sampling in [RowSampling(temperature.to(dtype))]
    ]
    probs = [torch.softmax(row.double() / temperature.double()[:, None], dim=1) for row in (target, draft)]
    difference = log_ratio.double().exp()[:, None] * probs[0] - probs[1]
    assert torch.allclose(masses[1], difference.clamp(min=0).sum(dim=1), rtol=1e-8)
    # A mass may be tiny relative to the distance of c p and q, where few tokens share the vocabulary.
    distance = difference.abs().sum(dim=1)
    assert ((masses[0] - masses[1]).abs() < 1e-6 * distance).all()
    ordinary = masses[1] > 1e-3 * distance
    assert torch.allclose(masses[0][ordinary], masses[1][ordinary], rtol=1e-5, atol=0)
    assert ordinary.all() or vocab == 7


def test_rows_past_the_emitted_one_raise_no_flag(place):
    # A row without a finite logit ends a request's ratio; it decided no token if the request stops before it.
    backend, device = place
    target, draft = torch.zeros(400, 4, 5, device=device), torch.zeros(400, 3, 5, device=device)
    draft[:, 0, 0] = 2.0
    target[:, 1] = -torch.inf
    output = RejectionSampler("block", backend=backend)(
        target, torch.tensor([[0, 3, 0]] * 400, device=device), draft, seeds=0
    )
    assert set(output.num_accepted.tolist()) == {0, 1}
    assert output.invalid.tolist() == (output.num_accepted >= 1).tolist()


# ---- Optimality ------------------------------------------------------------------------------------------------------


def test_no_method_that_sees_one_path_accepts_more_in_the_toy_example():
    """A method is a table P(accepted, token | path); exactness and the mean accepted number are linear in it."""
    p, q = np.array([0.4, 0.6]), np.array([0.8, 0.2])
    paths, outputs = list(product(range(2), repeat=2)), list(product(range(2), repeat=3))
    choices = [(path, accepted, token) for path in paths for accepted in range(3) for token in range(2)]

    def emits(path: tuple, accepted: int, token: int, output: tuple) -> float:
        """P(the path is drafted, and the output follows from this choice)."""
        agrees = (*path[:accepted], token) == output[: accepted + 1]
        return np.prod(q[list(path)]) * np.prod(p[list(output[accepted + 1 :])]) * agrees

    mean_accepted = [np.prod(q[list(path)]) * accepted for path, accepted, _ in choices]
    sums = [[path == drafted for drafted, _, _ in choices] for path in paths]
    exact = [[emits(*choice, output) for choice in choices] for output in outputs]
    bounds = [1 for _ in paths] + [np.prod(p[list(output)]) for output in outputs]
    best = linprog([-mean for mean in mean_accepted], A_eq=sums + exact, b_eq=bounds)
    assert abs(-best.fun - 1.04) < 1e-9  # as block verification: 0.6 + 0.44
