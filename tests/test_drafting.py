"""Drafts and plain samples are drawn with the noise that the method asks for, and their logsumexp changes nothing."""

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from specdecode import RejectionSampler, sample
from specdecode.noise import BLOCK_SIZE
from tests.conftest import ON_GPU
from tests.support.calls import (
    INF,
    NAN,
    SAMPLING_NAMES,
    by_ratio,
    each_dtype,
    each_method,
    ids,
    make,
    make_call,
    plain_sample,
    rows,
)
from tests.support.differential import assert_same


@each_dtype
@pytest.mark.parametrize("vocab", [3, BLOCK_SIZE + 77])
def test_strict_says_what_sample_says_whatever_the_drafts(place, dtype, vocab):
    call = make_call(place, batch=60, vocab=vocab, dtype=dtype)
    plain = torch.stack(
        [
            plain_sample(place)(call["target_logits"][:, i], call["temperature"], call["seeds"], call["positions"] + i)
            for i in range(4)
        ],
        dim=1,
    )
    right = plain[:, :3].where(torch.rand(60, 3, generator=torch.Generator().manual_seed(5)).to(place[1]) < 0.7, 0)
    for drafted in (call["draft_token_ids"], plain[:, :3], right, torch.full_like(right, -1)):
        output = make("strict", place)(call["target_logits"], drafted, **{k: call[k] for k in SAMPLING_NAMES})
        for tokens, said, drafts, accepted in zip(
            output.token_ids.tolist(), plain.tolist(), drafted.tolist(), output.num_accepted.tolist()
        ):
            agreed = [draft == token for draft, token in zip(drafts, said)] + [False]
            assert accepted == agreed.index(False)
            assert tokens == said[: accepted + 1] + [-1] * (3 - accepted)


def test_strict_drafts_with_the_noise_of_sample(place):
    call = make_call(place, batch=40)
    arguments = {name: call[name] for name in SAMPLING_NAMES}
    logits = call["target_logits"][:, 0]
    assert make("strict", place).draft(logits, **arguments).token_ids.tolist() == sample(logits, **arguments).tolist()


@pytest.mark.parametrize(
    ("method", "level"),
    [
        ("probabilistic", "tokens"),
        ("block", "tokens"),
        ("synthetic", "tokens"),
        ("probabilistic", "blocks"),
        *([("block", "blocks"), ("synthetic", "blocks")] if ON_GPU else []),  # methods share the code that draws drafts
    ],
)
def test_other_methods_draft_with_noise_of_their_own(place, method, level):
    # Sharing noise would change the distribution. Chi-square of independence over 4 x 4 even outcomes: 9 degrees of freedom,
    # false alarm 1e-6; 20,000 pairs show a dependence of total variation 0.035 (N = lambda / (4 TV^2), lambda = 87) in 999
    # runs of 1,000.
    pairs, outcomes = 20_000, 4
    vocab = outcomes if level == "tokens" else (outcomes - 1) * BLOCK_SIZE + 1
    logits = torch.full((1, vocab), -INF, device=place[1])
    logits[:, :: 1 if level == "tokens" else BLOCK_SIZE] = 0
    counts = torch.zeros(outcomes * outcomes, dtype=torch.int64)
    for start in range(0, pairs, 2000):
        many = logits.expand(2000, vocab)
        said, drafted = sample(many, seeds=start), make(method, place).draft(many, seeds=start).token_ids
        stride = vocab // (outcomes - 1) if level == "blocks" else 1
        counts += torch.bincount((said // stride * outcomes + drafted // stride).cpu(), minlength=outcomes**2)
    expected = pairs / outcomes**2
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < chi2.isf(1e-6, outcomes**2 - 1)


@each_method
def test_only_block_drafts_with_other_noise_at_another_offset(place, method):
    # 300 draws of one of 2,048 even tokens: each agrees with another by chance once in 2,048.
    logits = torch.zeros(300, 2 * BLOCK_SIZE, device=place[1])
    first, again, later = (make(method, place).draft(logits, seeds=0, offset=offset).token_ids for offset in (0, 0, 1))
    assert torch.equal(first, again)
    assert int((first == later).sum()) < 10 if method == "block" else torch.equal(first, later)
    if method == "block":
        assert first.tolist() == make("probabilistic", place).draft(logits, seeds=0).token_ids.tolist()


@each_dtype
@pytest.mark.parametrize("vocab", [1, 7, BLOCK_SIZE, 5 * BLOCK_SIZE + 3])
@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 30.0])
def test_draft_logsumexp_is_the_logsumexp(place, dtype, vocab, temperature):
    logits = (5 * torch.randn(8, vocab, generator=torch.Generator().manual_seed(6))).to(dtype).to(place[1])
    if vocab > 1:
        logits[1, 0], logits[2, 1:] = NAN, -INF
    logits[3], logits[4, 0] = -INF, INF
    got = make("probabilistic", place).draft(logits, temperature, seeds=0).logsumexp.double()
    clean = logits.double().nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
    expected = torch.logsumexp(clean / temperature, dim=1)
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)
    mixed = torch.full((8,), temperature, device=place[1])
    mixed[::2] = 0
    got = make("probabilistic", place).draft(logits, mixed, seeds=0).logsumexp.double()
    assert torch.allclose(got, expected.where(mixed > 0, 0), rtol=1e-5, atol=1e-5)


def draft_logsumexp(sampler: RejectionSampler, draft_logits: Tensor, **arguments) -> Tensor:
    return torch.stack([sampler.draft(row, **arguments).logsumexp for row in draft_logits.unbind(1)], dim=1)


@pytest.mark.parametrize("method", ["probabilistic", "block", "synthetic"])
@each_dtype
def test_draft_logsumexp_changes_nothing(place, method, dtype):
    # 400 requests of one to three decisions: a rounding of 1e-5 decides one of them with a probability of about 1 percent,
    # but seeds are fixed.
    call = make_call(place, batch=400, vocab=50, dtype=dtype)
    sampler = make(method, place)
    known = draft_logsumexp(sampler, call["draft_logits"], temperature=call["temperature"], seeds=0)
    assert_same(sampler(**call), sampler(**call, draft_logsumexp=known))


DEGENERATE_DRAFTS = {
    "all -inf": ([-INF, -INF, -INF], 1.0),
    "all NaN": ([NAN, NAN, NAN], 1.0),
    "one +inf": ([0.0, INF, 0.0], 1.0),
    "two +inf": ([0.0, INF, INF], 1.0),
    "-inf beside": ([-INF, 0.0, NAN], 1.0),
    "logit / temperature overflows": ([1.0, 20.0, -3.0], 1e-38),
    "logit / temperature overflows below": ([-50.0, -50.0, -30.0], 1e-38),
    "beyond float32": ([0.0, 1e300, 1e300], 1.0),
}


@pytest.mark.parametrize(("row", "temperature"), DEGENERATE_DRAFTS.values(), ids=DEGENERATE_DRAFTS)
@by_ratio
@pytest.mark.parametrize("drafted", [0, 1, 2])
def test_draft_logsumexp_changes_nothing_where_it_is_degenerate(place, row, temperature, drafted, method):
    draft_logits = rows(place, row, requests=60, dtype=torch.float64)
    target = torch.zeros(60, 2, 3, dtype=torch.float64, device=place[1])
    sampler = make(method, place)
    arguments = {"temperature": temperature, "seeds": 0}
    drawn = sampler.draft(draft_logits[:, 0], **arguments)
    call = {"target_logits": target, "draft_token_ids": ids(place, drafted, requests=60), "draft_logits": draft_logits}
    assert_same(sampler(**call, **arguments), sampler(**call, **arguments, draft_logsumexp=drawn.logsumexp[:, None]))
