"""Drafters with only some of the target's tokens: the target's distribution, equal logits, hostile ids, errors."""

import pytest
import torch

from specdecode import RejectionSampler, Sampling
from specdecode.eager.vocabulary import target_to_draft
from tests.support.batches import verification_batch
from tests.support.differential import assert_same, like_a_device
from tests.support.enumeration import (
    Case,
    decode,
    distribution,
    history,
    iid,
    marginal,
    sequence_distribution,
    total_variation,
)
from tests.support.exactness import EXACT
from tests.support.exactness import METHODS as REFERENCE

CASES = {
    "history": Case(history(1, 4), history(2, 2), (2,), 3, draft_vocab_ids=(3, 1)),
    "ties": Case(iid(1, 2, 3), iid(2, 2), (2,), 3, draft_truncation={"top_k": 1}, draft_vocab_ids=(2, 0)),
    "truncated": Case(
        history(1, 4), history(2, 3), (2,), 3, 0.6, 3, draft_truncation={"top_p": 0.7}, draft_vocab_ids=(2, 0, 1)
    ),
    "one-token": Case(history(3, 3), iid(1), (2,), 3, draft_vocab_ids=(1,)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_the_joint_distribution_of_the_tokens_is_the_targets(method, name):
    how, chosen = REFERENCE[method], CASES[name]
    joint = distribution(lambda chance: decode(chance, chosen, how.verify, how.domains))
    tokens = marginal(joint, lambda outcome: outcome[0])
    assert total_variation(tokens, sequence_distribution(chosen.target, chosen.num_tokens)) < EXACT
    assert any(accepted[0] > 0 for _, accepted in joint), "no draft was ever accepted"


def test_of_equal_logits_the_drafts_ids_decide():
    target, draft = torch.zeros(400, 2, 5), torch.zeros(400, 1, 3)
    draft[0], draft[1, 0, 1:] = torch.nan, torch.inf
    ids, sampler = torch.tensor([4, 2, 0]), RejectionSampler("probabilistic")
    drawn = sampler.draft(draft[:, 0], seeds=0, top_k=2)
    assert ids[drawn.token_ids].unique().tolist() == [2, 4]
    assert drawn.cutoff[2:].unique().tolist() == [1]
    given = {"draft_logsumexp": drawn.logsumexp[:, None], "draft_cutoff": drawn.cutoff[:, None]}
    spread_rows = torch.full((400, 1, 5), -torch.inf)
    spread_rows[2:, 0, [4, 2]], spread_rows[0, 0, 4], spread_rows[1, 0, 2] = 0.0, 0.0, 0.0
    token_ids = ids[drawn.token_ids][:, None]
    options = {"seeds": 0, "top_k": 2}
    expected = sampler(target, token_ids, spread_rows, draft_sampling=Sampling(), **options)
    for more in ({}, given):
        assert_same(sampler(target, token_ids, draft, draft_vocab_ids=ids, **more, **options), expected)


def test_hostile_ids_of_a_device_stay_inside():
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    hostile = torch.tensor([low, high, -1, 8, 2, 2, 0, 2**32])
    assert target_to_draft(hostile, 8).tolist() == [6, -1, 4, -1, -1, -1, -1, -1]
    target, draft, drafts = torch.randn(64, 3, 8), torch.randn(64, 2, 8), torch.randint(0, 8, (64, 2))
    draft[:9, 0, 1] = torch.inf  # a point mass on what is no token
    for method in ("probabilistic", "block"):
        with like_a_device():
            for options in ({}, {"top_k": 2}):
                batch = verification_batch(
                    target, drafts, draft, None, 1.0, 0, None, **options, draft_vocab_ids=hostile
                )
                output = RejectionSampler(method, backend="eager")._verify(batch)
                at_end = output.token_ids.gather(1, output.num_accepted[:, None].long())
                assert ((at_end >= 0) & (at_end < 8)).all()
                assert not output.invalid.any()


IDS, ROWS = torch.tensor([4, 2, 0]), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"draft_logits": ROWS}, ValueError, r"draft_logits: expected shape \[1, 2, 5\], got \[1, 2, 3\]"),
        ({"draft_vocab_ids": IDS}, ValueError, r"draft_vocab_ids: given without the draft_logits"),
        ({"draft_vocab_ids": [4, 2, 0], "draft_logits": ROWS}, TypeError, r"draft_vocab_ids: expected a torch.Tensor"),
        ({"draft_vocab_ids": IDS.short(), "draft_logits": ROWS}, TypeError, r"draft_vocab_ids: expected dtype int32"),
        ({"draft_vocab_ids": IDS[:2], "draft_logits": ROWS}, ValueError, r"draft_vocab_ids: expected shape \[3\]"),
        ({"draft_vocab_ids": IDS[None], "draft_logits": ROWS}, ValueError, r"draft_vocab_ids: expected shape \[3\]"),
        (
            {"draft_vocab_ids": IDS + 1, "draft_logits": ROWS},
            ValueError,
            r"draft_vocab_ids: .*\[0, 5\), got 5 at \[0\]",
        ),
        ({"draft_vocab_ids": IDS - 1, "draft_logits": ROWS}, ValueError, r"draft_vocab_ids: .*, got -1 at \[2\]"),
        ({"draft_vocab_ids": IDS * 0 + 3, "draft_logits": ROWS}, ValueError, r"draft_vocab_ids: expected distinct ids"),
        (
            {"draft_vocab_ids": IDS, "draft_logits": ROWS[:, :1]},
            ValueError,
            r"draft_logits: expected shape \[1, 2, 3\]",
        ),
        (
            {"draft_vocab_ids": IDS[:0], "draft_logits": ROWS[..., :0]},
            ValueError,
            r"draft_logits: .*at least one token",
        ),
        (
            {"draft_vocab_ids": torch.arange(6), "draft_logits": torch.zeros(1, 2, 6)},
            ValueError,
            r"draft_vocab_ids: expected at most 5 ids",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(options, kind, message):
    for method in ("strict", "block"):
        sampler, drafts = RejectionSampler(method), torch.zeros(1, 2, dtype=torch.int64)
        with pytest.raises(kind, match=message):
            sampler(torch.zeros(1, 3, 5), drafts, **options, seeds=0)
        with pytest.raises(kind, match=message):
            sampler.warmup(torch.zeros(1, 3, 5), drafts, **options, seeds=0)
    rows, starts = torch.zeros(3, 5), torch.tensor([0, 3])
    with pytest.raises(kind, match=message):
        sampler.packed(rows, torch.zeros(3, dtype=torch.int64), starts, **options, num_draft_tokens=2, seeds=0)
