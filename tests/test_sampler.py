"""The public surface is the contract: names, signatures, shapes and dtypes, for every method."""

import inspect
import types

import pytest
import torch

import specdecode
from specdecode import AcceptanceSchedule, AcceptanceStats, RejectionSampler, SamplerOutput, sample
from specdecode.noise import BLOCK_SIZE
from tests.support.calls import assert_well_formed, each_dtype, each_method, make, make_call


def test_all_is_sorted_and_complete():
    # Sorted as Python sorts strings: capitals first.
    assert specdecode.__all__ == sorted(specdecode.__all__)
    for name in specdecode.__all__:  # each is imported at its first use
        assert getattr(specdecode, name).__module__.startswith("specdecode.")
    assert set(specdecode.__all__) <= set(dir(specdecode))
    with pytest.raises(AttributeError, match="module 'specdecode' has no attribute 'Sampler'"):
        specdecode.Sampler  # noqa: B018
    public = {
        name
        for name, value in vars(specdecode).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(specdecode.__all__) == public
    assert public >= {"RejectionSampler", "AcceptanceSchedule", "AcceptanceStats", "sample"}


def parameters(function) -> list[tuple]:
    """Return (name, default, keyword-only) of each parameter except self."""
    described = [
        (parameter.name, parameter.default, parameter.kind is parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function).parameters.values()
    ]
    return described[1:] if described[0][0] == "self" else described


REQUIRED = inspect.Parameter.empty
SEEDED = [("seeds", None), ("positions", None)]
TRUNCATION = [("top_k", None), ("top_p", None), ("min_p", None)]
SAMPLING = [("temperature", 1.0), *SEEDED]


@pytest.mark.parametrize(
    ("function", "positional", "keyword"),
    [
        (
            RejectionSampler.__init__,
            [("method", REQUIRED)],
            [("backend", "auto"), ("schedule", None), ("shard", None), ("validate", None)],
        ),
        (
            RejectionSampler.__call__,
            [("target_logits", REQUIRED), ("draft_token_ids", REQUIRED), ("draft_logits", None)],
            [
                ("temperature", 1.0),
                *TRUNCATION,
                ("draft_sampling", None),
                *SEEDED,
                ("draft_logsumexp", None),
                ("draft_cutoff", None),
                ("draft_vocab_ids", None),
                ("logprobs", None),
                ("adjustments", None),
                ("top_logprobs", None),
                ("kept_sets", False),
            ],
        ),
        (RejectionSampler.draft, [("logits", REQUIRED), *SAMPLING], [("offset", 0), *TRUNCATION, ("width", None)]),
        (sample, [("logits", REQUIRED), *SAMPLING], [*TRUNCATION, ("shard", None), ("adjustments", None)]),
    ],
    ids=["RejectionSampler", "call", "draft", "sample"],
)
def test_signatures_are_the_contract(function, positional, keyword):
    expected = [(name, default, False) for name, default in positional]
    assert parameters(function) == expected + [(name, default, True) for name, default in keyword]


@each_method
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_calls_as_the_contract_writes_them(method, backend):
    schedule = AcceptanceSchedule.from_mean_rate(0.69, num_draft_tokens=3, min_decay=0.85)
    given = {"schedule": schedule} if method == "synthetic" else {}
    sampler = RejectionSampler(method, backend=backend, **given)
    target_logits, draft_logits = torch.randn(2, 4, 7), torch.randn(2, 3, 7)
    seeds, positions = torch.tensor([5, -5]), torch.tensor([0, 9])
    drafts = [
        sampler.draft(draft_logits[:, i], temperature=1.0, seeds=seeds, positions=positions + i) for i in range(3)
    ]
    output = sampler(
        target_logits,
        torch.stack([draft.token_ids for draft in drafts], dim=1),
        draft_logits,
        temperature=1.0,
        seeds=seeds,
        positions=positions,
        draft_logsumexp=torch.stack([draft.logsumexp for draft in drafts], dim=1),
    )
    assert isinstance(output, SamplerOutput)
    assert output.token_ids.shape == (2, 4)
    assert output.num_accepted.shape == output.num_tokens.shape == output.invalid.shape == (2,)
    assert sample(target_logits[:, 0], temperature=1.0, seeds=seeds, positions=positions).shape == (2,)

    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(output)
    assert stats.drafts == 2
    assert stats.draft_tokens == 6
    assert stats.accepted_tokens == int(output.num_accepted.sum())
    assert stats.acceptance_rate == stats.accepted_tokens / 6
    assert stats.acceptance_length == stats.accepted_tokens / 2 + 1
    assert len(stats.per_position) == 3
    assert "Acceptance rate" in str(stats)


@pytest.mark.parametrize(
    "schedule",
    [
        AcceptanceSchedule.from_mean_rate(0.69, num_draft_tokens=3, min_decay=0.85),
        AcceptanceSchedule.from_rates([0.91, 0.70, 0.46]),
        AcceptanceSchedule.from_length(2.6, num_draft_tokens=3),
    ],
    ids=["from_mean_rate", "from_rates", "from_length"],
)
def test_schedules_have_the_attributes_of_the_contract(schedule):
    assert len(schedule.conditional_rates) == len(schedule.joint_rates) == 3
    assert schedule.mean_rate == pytest.approx(sum(schedule.joint_rates) / 3)
    assert schedule.acceptance_length == pytest.approx(1 + sum(schedule.joint_rates))
    assert (schedule.base_rate is None) == (schedule.decay is None)
    RejectionSampler("synthetic", schedule=schedule)


@each_method
@each_dtype
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_outputs_have_the_shapes_and_dtypes_of_the_contract(place, method, dtype, ids_dtype):
    call = make_call(place, dtype=dtype)
    call["draft_token_ids"] = call["draft_token_ids"].to(ids_dtype)
    output = make(method, place)(**call)
    assert_well_formed(output, call)
    accepted = set(output.num_accepted.tolist())
    assert len(accepted) > 1, "the batch must hold several outcomes"


def test_draft_and_sample_have_the_shapes_and_dtypes_of_the_contract(place):
    for batch, vocab in [(0, 5), (1, 1), (3, BLOCK_SIZE + 1)]:
        logits = torch.randn(batch, vocab).to(place[1])
        draft = make("probabilistic", place).draft(logits)
        assert (tuple(draft.token_ids.shape), draft.token_ids.dtype) == ((batch,), torch.int64)
        assert (tuple(draft.logsumexp.shape), draft.logsumexp.dtype) == ((batch,), torch.float32)
        tokens = sample(logits)
        assert (tuple(tokens.shape), tokens.dtype) == ((batch,), torch.int64)
