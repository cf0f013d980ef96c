"""The public surface as a contract: signatures, shapes, corner rules, invariances and errors, for every method."""

import inspect
import math
import re
import types
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import specdecode
from reference.sampling import sample as sample_row
from specdecode import AcceptanceSchedule, AcceptanceStats, RejectionSampler, SamplerOutput, sample
from specdecode.batch import RowBatch, VerificationBatch
from specdecode.checks import check_seeds
from specdecode.noise import BLOCK_SIZE
from tests.conftest import ON_GPU
from tests.support.differential import like_a_device

METHODS = ["strict", "probabilistic", "block", "synthetic"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
INT64 = torch.iinfo(torch.int64)
NAN, INF = math.nan, math.inf

each_method = pytest.mark.parametrize("method", METHODS)
by_ratio = pytest.mark.parametrize("method", ["probabilistic", "block"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def make(method: str, place, rates=(0.9, 0.6, 0.5, 0.4, 0.3)) -> RejectionSampler:
    """A sampler of the method; `rates` are the schedule's joint rates if it is to have one."""
    schedule = AcceptanceSchedule.from_rates(rates) if method == "synthetic" else None
    return RejectionSampler(method, backend=place[0], schedule=schedule)


def plain_sample(place):
    """What `sample` does, which takes no backend: the drafts of "strict"."""
    return lambda *arguments: RejectionSampler("strict", backend=place[0]).draft(*arguments).token_ids


def make_call(place, batch=12, drafts=3, vocab=BLOCK_SIZE + 77, dtype=torch.float32, seed=0) -> dict:
    """The arguments of a call in which every outcome happens: ragged drafts that the target finds likely, some greedy."""
    generator = torch.Generator().manual_seed(seed)
    target = 4 * torch.randn(batch, drafts + 1, vocab, generator=generator)
    draft = target[:, :drafts] + torch.randn(batch, drafts, vocab, generator=generator)
    ids = draft.argmax(dim=2)
    ids[torch.rand(batch, drafts, generator=generator) < 0.1] = -1
    temperature = 0.3 + torch.rand(batch, generator=generator)
    temperature[1::4] = 0
    call = {
        "target_logits": target.to(dtype),
        "draft_token_ids": ids,
        "draft_logits": draft.to(dtype),
        "temperature": temperature,
        "seeds": torch.randint(INT64.min, INT64.max, (batch,), generator=generator),
        "positions": torch.randint(0, 2**40, (batch,), generator=generator),
    }
    return {name: value.to(place[1]) for name, value in call.items()}


def rows(place, *logits, requests: int = 1, dtype=torch.float32) -> Tensor:
    """The same rows for every request, [requests, len(logits), vocab]."""
    return torch.tensor(logits, dtype=dtype, device=place[1]).expand(requests, -1, -1)


def ids(place, *token_ids, requests: int = 1) -> Tensor:
    """The same drafts for every request, [requests, len(token_ids)]."""
    return torch.tensor(token_ids, dtype=torch.int64, device=place[1]).expand(requests, -1)


def assert_same(one: SamplerOutput, other: SamplerOutput) -> None:
    for name in ("token_ids", "num_accepted", "num_tokens", "invalid"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


def assert_well_formed(output: SamplerOutput, call: dict) -> None:
    """Accepted drafts, one more token of the vocabulary, then -1; the dtypes and shapes of the contract."""
    batch, num_rows, vocab = call["target_logits"].shape
    assert (tuple(output.token_ids.shape), output.token_ids.dtype) == ((batch, num_rows), torch.int64)
    assert (tuple(output.num_accepted.shape), output.num_accepted.dtype) == ((batch,), torch.int32)
    assert (tuple(output.num_tokens.shape), output.num_tokens.dtype) == ((batch,), torch.int32)
    assert (tuple(output.invalid.shape), output.invalid.dtype) == ((batch,), torch.bool)
    assert {value.device for value in output if value is not None} == {call["target_logits"].device}
    columns = [output.token_ids, call["draft_token_ids"], output.num_accepted, output.num_tokens]
    for tokens, drafted, accepted, emitted in zip(*(column.tolist() for column in columns)):
        assert emitted == accepted + 1
        assert tokens[:accepted] == drafted[:accepted]
        assert all(0 <= token < vocab for token in tokens[:emitted])
        assert tokens[emitted:] == [-1] * (num_rows - emitted)


# ---------------------------------------------------------------------------------------------------------------------
# The surface
# ---------------------------------------------------------------------------------------------------------------------


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
    """(name, default, keyword-only) of each parameter but self."""
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
            ],
        ),
        (RejectionSampler.draft, [("logits", REQUIRED), *SAMPLING], [("offset", 0), *TRUNCATION]),
        (sample, [("logits", REQUIRED), *SAMPLING], [*TRUNCATION, ("shard", None)]),
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


@each_method
@pytest.mark.parametrize("with_draft_logits", [True, False], ids=["draft_logits", "deterministic"])
@pytest.mark.parametrize("vocab", [1, 2, BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_every_size_is_answered(place, method, batch, drafts, vocab, with_draft_logits):
    call = make_call(place, batch, drafts, vocab)
    if not with_draft_logits:
        del call["draft_logits"]
    assert_well_formed(make(method, place)(**call), call)


@each_method
@pytest.mark.parametrize("with_draft_logits", [True, False], ids=["draft_logits", "deterministic"])
@pytest.mark.parametrize(("batch", "drafts", "vocab"), [(0, 0, 5), (0, 2, 5), (3, 0, 5), (1, 1, 1), (12, 3, 1101)])
def test_masking_rows_gives_what_skipping_them_gives(method, batch, drafts, vocab, with_draft_logits):
    place = ("eager", "cpu")
    call = make_call(place, batch, drafts, vocab)
    if not with_draft_logits:
        del call["draft_logits"]
    sampler = make(method, place)
    skipped = sampler(**call)
    with like_a_device():
        assert_same(sampler(**call), skipped)


def test_draft_and_sample_have_the_shapes_and_dtypes_of_the_contract(place):
    for batch, vocab in [(0, 5), (1, 1), (3, BLOCK_SIZE + 1)]:
        logits = torch.randn(batch, vocab).to(place[1])
        draft = make("probabilistic", place).draft(logits)
        assert (tuple(draft.token_ids.shape), draft.token_ids.dtype) == ((batch,), torch.int64)
        assert (tuple(draft.logsumexp.shape), draft.logsumexp.dtype) == ((batch,), torch.float32)
        tokens = sample(logits)
        assert (tuple(tokens.shape), tokens.dtype) == ((batch,), torch.int64)


# ---------------------------------------------------------------------------------------------------------------------
# Corner rules
# ---------------------------------------------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize(
    "drafted", [[-1, -1, -1], [-1, 2, 10**6], [-1, 2, 2], [2, -1, -5], [2, -1, 2], [2, 2, -1]], ids=str
)
def test_minus_one_ends_the_drafts(place, method, drafted):
    # What follows a -1 is ignored: at most the drafts before it are accepted, and the next token is drawn from p.
    leading = drafted.index(-1)
    target, draft = (rows(place, *[row] * 4, requests=200) for row in ([0, 1, 3, 0, 0], [0, 0, 3, 2, 1]))
    positions = torch.full((200,), 3, device=place[1])
    drafted = ids(place, *drafted, requests=200)
    for draft_logits in (None, draft[:, :3]):
        output = make(method, place, rates=(1.0, 1.0, 1.0))(target, drafted, draft_logits, seeds=0, positions=positions)
        assert int(output.num_accepted.max()) == leading
        full = output.num_accepted == leading
        bonus = sample(target[:, leading], seeds=0, positions=positions + leading)
        assert output.token_ids[full, leading].tolist() == bonus[full].tolist()
        assert bool(full.any())
        assert not output.invalid.any()
        assert output.num_draft_tokens.tolist() == [leading] * 200


@each_method
def test_impossible_drafts_are_rejected_and_never_emitted(place, method):
    # p(x) = 0, with and without draft logits. The decision of synthetic is scheduled, but not the token that it emits.
    target = rows(place, *[[1, -INF, 0.5, NAN]] * 2, requests=200)
    sampler = make(method, place, rates=[0.0])
    for drafted in (1, 3):
        for draft_logits in (None, rows(place, [0, 3, 0, 3], requests=200)):
            output = sampler(target, ids(place, drafted, requests=200), draft_logits, seeds=0)
            assert output.num_accepted.tolist() == [0] * 200
            assert set(output.token_ids[:, 0].tolist()) == {0, 2}


@by_ratio
def test_drafts_that_could_not_be_drawn_are_rejected(place, method):
    # q(x) = 0, so the residual is all of p wherever q is 0: the likely draft is rejected, then emitted.
    target = rows(place, *[[9, -INF, -INF, -INF]] * 2, requests=50)
    for impossible in (-INF, NAN):
        draft_logits = rows(place, [impossible, 0, 0, 0], requests=50)
        output = make(method, place)(target, ids(place, 0, requests=50), draft_logits, seeds=0)
        assert output.num_accepted.tolist() == [0] * 50
        assert output.token_ids.tolist() == [[0, -1]] * 50


@each_dtype
@pytest.mark.parametrize("vocab", [1, 7, BLOCK_SIZE + 1])
def test_an_empty_residual_falls_back_to_the_target(place, dtype, vocab):
    # The same rows on both sides, and a schedule that rejects the second draft: nothing is left of p - q.
    call = make_call(place, batch=40, drafts=2, vocab=vocab, dtype=dtype)
    call["draft_logits"] = call["target_logits"][:, :2].clone()
    call["draft_token_ids"] = call["draft_token_ids"].clamp(min=0)
    output = make("synthetic", place, rates=[1.0, 0.0])(**call)
    expected = plain_sample(place)(
        call["target_logits"][:, 1], call["temperature"], call["seeds"], call["positions"] + 1
    )
    assert output.num_accepted.tolist() == [1] * 40
    assert output.token_ids[:, 1].tolist() == expected.tolist()


@by_ratio
@each_dtype
def test_residuals_hold_only_what_the_target_says_more_often(place, method, dtype):
    call = make_call(place, batch=600, drafts=1, vocab=9, dtype=dtype)
    call["temperature"].clamp_(min=0.3)
    call["draft_logits"] *= 0.3  # flatter than the target, so that the sums of the two sides are far apart
    call["draft_token_ids"] = torch.arange(600, device=place[1])[:, None] % 9
    output = make(method, place)(**call)
    rejected = output.num_accepted == 0
    scaled = [
        (call[name][:, 0].double() / call["temperature"].double()[:, None]).log_softmax(dim=1)
        for name in ("target_logits", "draft_logits")
    ]
    target, draft = (side.gather(1, output.token_ids[:, :1]).squeeze(1) for side in scaled)
    assert int(rejected.sum()) > 100
    # 1e-5: where p and q are that close, rounding may decide which is larger.
    assert bool((target > draft - 1e-5)[rejected].all())


@by_ratio
@each_dtype
def test_deterministic_drafters_never_see_their_rejected_draft_again(place, method, dtype):
    call = make_call(place, batch=600, drafts=2, vocab=5, dtype=dtype)
    del call["draft_logits"]
    output = make(method, place)(**call)
    drafted = torch.nn.functional.pad(call["draft_token_ids"], (0, 1), value=-1).gather(
        1, output.num_accepted[:, None].long()
    )
    emitted = output.token_ids.gather(1, output.num_accepted[:, None].long())
    rejected = drafted >= 0
    assert int(rejected.sum()) > 50
    assert not bool((drafted == emitted)[rejected].any())


@each_method
@each_dtype
def test_nan_counts_as_minus_infinity(place, method, dtype):
    call = make_call(place, dtype=dtype)
    holes = torch.rand(call["target_logits"].shape, generator=torch.Generator().manual_seed(1)).to(place[1]) < 0.3
    holes[0] = True
    outputs, draws = [], []
    for hole in (NAN, -INF):
        target = call["target_logits"].masked_fill(holes, hole)
        draft = call["draft_logits"].masked_fill(holes[:, 1:], hole)
        outputs.append(make(method, place)(**call | {"target_logits": target, "draft_logits": draft}))
        draws.append([drawn.tolist() for drawn in make(method, place).draft(target[:, 0], call["temperature"], 0)[:2]])
    assert_same(*outputs)
    assert draws[0] == draws[1]
    assert bool(outputs[0].invalid[0])


@each_method
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafted", [0, 3])
def test_rows_without_a_finite_logit_emit_token_0_and_raise_the_flag(place, method, drafted, temperature):
    vocab = BLOCK_SIZE + 5
    target = torch.randn(3, 2, vocab).to(place[1])
    target[0] = NAN
    target[1] = -INF
    sampler = make(method, place, rates=[0.0])
    for draft_logits in (None, torch.zeros(3, 1, vocab, device=place[1])):
        arguments = {"temperature": temperature, "seeds": 0}
        output = sampler(target, ids(place, drafted, requests=3), draft_logits, **arguments)
        assert output.token_ids[:2, 0].tolist() == [0, 0]
        assert output.invalid.tolist() == [True, True, False]
        output = sampler(target[:, :1], ids(place, requests=3), **arguments)  # as a bonus row
        assert output.token_ids[:2].tolist() == [[0], [0]]
        assert output.invalid.tolist() == [True, True, False]
    assert sample(target[:, 0], temperature, seeds=0)[:2].tolist() == [0, 0]
    assert sampler.draft(target[:, 0], temperature, seeds=0).token_ids[:2].tolist() == [0, 0]


@each_method
def test_rows_that_decide_nothing_raise_no_flag(place, method):
    # Slot 1 is rejected whatever is drawn (p = 0 there), so what follows it may be anything.
    call = make_call(place, batch=60)
    call["draft_token_ids"].clamp_(min=0)
    call["target_logits"][:, 1] = 0
    call["target_logits"][:, 1].scatter_(1, call["draft_token_ids"][:, 1:2], -INF)
    sampler = make(method, place, rates=[0.5, 0.0, 0.0])
    clean = sampler(**call)
    for poison in (NAN, INF, -INF):
        for name in ("target_logits", "draft_logits"):
            call[name] = call[name].clone()
            call[name][:, 2:] = poison
        poisoned = sampler(**call)
        assert_same(clean, poisoned)
        assert not poisoned.invalid.any()
    assert set(clean.num_accepted.tolist()) == {0, 1}


@each_method
@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0, 1e4])
def test_plus_infinity_is_a_point_mass_on_the_first(place, method, temperature):
    target = rows(place, *[[NAN, 5, INF, INF, 0, -INF]] * 2, requests=30)
    sampler = make(method, place, rates=[0.0])
    assert sample(target[:, 0], temperature, seeds=0).tolist() == [2] * 30
    for drafted in (2, 3):
        for draft_logits in (None, torch.zeros(30, 1, 6, device=place[1])):
            output = sampler(target, ids(place, drafted, requests=30), draft_logits, temperature=temperature, seeds=0)
            assert output.invalid.tolist() == [False] * 30
            if method == "synthetic" and draft_logits is not None and drafted == 2:
                continue  # accepted by any other method; its residual is the point mass all the same
            is_accepted = method != "synthetic" and drafted == 2
            assert output.token_ids.tolist() == [[2, 2] if is_accepted else [2, -1]] * 30


@by_ratio
def test_plus_infinity_in_draft_rows_is_a_point_mass_on_the_first(place, method):
    # p is even over three tokens and q(0) = 1: a draft of 0 is accepted a third of the time, one of 2 never.
    target = rows(place, *[[0, 0, 0, -INF]] * 2, requests=300)
    draft = rows(place, [INF, 0, INF, 0], requests=300)
    sampler = make(method, place)
    drawn = sampler.draft(draft[:, 0], seeds=0)
    assert drawn.token_ids.tolist() == [0] * 300
    for logsumexp in (None, drawn.logsumexp[:, None]):
        output = sampler(target, ids(place, 0, requests=300), draft, seeds=0, draft_logsumexp=logsumexp)
        # Binomial(300, 1/3): outside 55..150 with probability below 1e-7.
        assert 55 <= int(output.num_accepted.sum()) <= 150
        assert set(output.token_ids[output.num_accepted == 0, 0].tolist()) == {1, 2}
        output = sampler(target, ids(place, 2, requests=300), draft, seeds=0, draft_logsumexp=logsumexp)
        assert int(output.num_accepted.sum()) == 0


@pytest.mark.parametrize("temperature", [1e-4, 1e-10, 1e-30, 1e-40, 1e-300])
@by_ratio
@each_dtype
def test_tiny_temperatures_take_the_largest_and_draw_among_ties(place, method, dtype, temperature):
    # Only a temperature of 0 is greedy. Two even outcomes in 128 draws: both are seen but for one chance in 2^127.
    logits = rows(place, [-3, 2, 1, 2], requests=128, dtype=dtype)
    for given in (temperature, torch.full((128,), temperature, dtype=torch.float64, device=place[1])):
        assert set(sample(logits[:, 0], given, seeds=0).tolist()) == {1, 3}
        output = make(method, place)(
            logits.expand(-1, 2, -1), ids(place, 2, requests=128), logits, temperature=given, seeds=0
        )
        assert set(output.token_ids.sum(dim=1).tolist()) <= {0, 2, 3, 5}  # 1 or 3 alone (then -1), or 2 and one of them


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e38, 1e39, 1e300])
@by_ratio
@each_dtype
def test_huge_temperatures_are_even(place, method, dtype, temperature):
    # 256 draws of four even outcomes: each is Binomial(256, 1/4), outside 30..103 with probability below 1e-6.
    logits = rows(place, [-3, 2, 1, 2], requests=256, dtype=dtype)
    for given in (temperature, torch.full((256,), temperature, dtype=torch.float64, device=place[1])):
        counts = torch.bincount(sample(logits[:, 0], given, seeds=0), minlength=4).tolist()
        assert all(30 <= count <= 103 for count in counts), counts
        output = make(method, place)(
            logits.expand(-1, 2, -1), ids(place, 0, requests=256), logits, temperature=given, seeds=0
        )
        assert output.num_accepted.tolist() == [1] * 256


@each_method
@each_dtype
def test_greedy_requests_in_a_mixed_batch_are_greedy(place, method, dtype):
    call = make_call(place, batch=40, dtype=dtype)
    greedy = (call["temperature"] == 0).nonzero().squeeze(1)
    output = make(method, place, rates=(0.5, 0.5, 0.5))(**call)
    argmax = call["target_logits"].argmax(dim=2)
    for request in greedy.tolist():
        drafted, likeliest = call["draft_token_ids"][request].tolist(), argmax[request].tolist()
        accepted = int(output.num_accepted[request])
        if method != "synthetic":
            agreed = [draft == token for draft, token in zip(drafted, likeliest)] + [False]
            assert accepted == agreed.index(False)
        assert int(output.token_ids[request, accepted]) == likeliest[accepted]
    call["temperature"] = 0
    assert output.token_ids[greedy].tolist() == make(method, place, (0.5,) * 3)(**call).token_ids[greedy].tolist()


@each_method
@each_dtype
@pytest.mark.parametrize("vocab", [6, 3 * BLOCK_SIZE])
def test_greedy_ties_go_to_the_lowest_id(place, method, dtype, vocab):
    target = torch.zeros(20, 2, vocab, dtype=dtype, device=place[1])
    lowest = torch.arange(20, device=place[1]) % (vocab // 2)
    for offset in (0, vocab // 3, vocab // 2 - 1):
        target[torch.arange(20), :, (lowest + offset) % vocab] = 7
    expected = target[:, 0].float().cpu().numpy().argmax(axis=1).tolist()
    assert sample(target[:, 0], 0, seeds=0).tolist() == expected
    output = make(method, place, rates=[1.0])(
        target, torch.tensor(expected, device=place[1])[:, None], target[:, :1], temperature=0, seeds=0
    )
    assert output.token_ids.tolist() == [[token, token] for token in expected]
    second = target.float().cpu().numpy()[:, 0, ::-1].argmax(axis=1)
    highest = torch.tensor(vocab - 1 - second, device=place[1])[:, None]
    output = make(method, place, rates=[0.0])(target, highest, target[:, :1], temperature=0, seeds=0)
    assert output.token_ids.tolist() == [[token, -1] for token in expected]


@each_method
def test_a_vocabulary_of_one_token_leaves_no_choice(place, method):
    target = torch.randn(5, 4, 1).to(place[1])
    drafted = torch.tensor([[0, 0, 0], [0, 0, -1], [0, -1, 0], [-1, 0, 0], [-1, -1, -1]], device=place[1])
    for draft_logits in (None, torch.randn(5, 3, 1).to(place[1])):
        output = make(method, place, rates=(1.0, 1.0, 1.0))(target, drafted, draft_logits, seeds=0)
        assert output.num_accepted.tolist() == [3, 2, 1, 0, 0]
        assert output.token_ids.tolist() == [[0] * (n + 1) + [-1] * (3 - n) for n in (3, 2, 1, 0, 0)]


def test_strict_has_no_use_for_draft_logits(place):
    call = make_call(place)
    sampler = make("strict", place)
    expected = sampler(**call | {"draft_logits": None})
    for draft_logits in (call["draft_logits"], call["draft_logits"] * NAN, call["draft_logits"].double() + INF):
        assert_same(expected, sampler(**call | {"draft_logits": draft_logits}))
        logsumexp = torch.full(call["draft_token_ids"].shape, NAN, device=place[1])
        assert_same(expected, sampler(**call | {"draft_logits": draft_logits, "draft_logsumexp": logsumexp}))


@pytest.mark.parametrize("seed", [INT64.min, -(2**32), -1, 0, 2**32 - 1, 2**32, INT64.max])
@pytest.mark.parametrize("position", [0, 2**31, 2**32 - 1, 2**62 - 1, 2**62, INT64.max - 1])
def test_seeds_and_positions_count_in_all_their_bits(place, seed, position):
    vocab = 2 * BLOCK_SIZE
    target = torch.zeros(1, 2, vocab, device=place[1])  # even, so noise alone decides
    arguments = {
        "seeds": torch.tensor([seed], device=place[1]),
        "positions": torch.tensor([position], device=place[1]),
    }
    expected = [sample_row(np.zeros(vocab), seed=seed, position=position + i).index for i in range(2)]
    assert sample(target[:, 0], **arguments).tolist() == expected[:1]
    assert sample(target[:, 0], seeds=seed, positions=arguments["positions"]).tolist() == expected[:1]
    output = make("strict", place)(target, ids(place, expected[0]), **arguments)
    assert output.token_ids.tolist() == [expected]


def test_neighbouring_seeds_and_positions_have_their_own_noise(place):
    # One of 2,048 even tokens each: two of these 8 agree by chance with probability 0.014, but seeds are fixed.
    logits = torch.zeros(1, 2 * BLOCK_SIZE, device=place[1])
    tokens = [
        int(sample(logits, seeds=seed, positions=torch.tensor([position], device=place[1])))
        for seed, position in [(0, 0), (1, 0), (0, 1), (1, 1), (2**32, 0), (0, 2**32), (-1, 0), (-(2**32), 0)]
    ]
    assert len(set(tokens)) == 8


@each_method
def test_values_that_a_device_cannot_refuse_are_harmless(method):
    place = ("eager", "cpu")
    call = make_call(place)
    vocab, sampler = call["target_logits"].shape[2], make(method, place)
    clean = sampler(**call)
    no_draft = call["draft_token_ids"] == -1
    with like_a_device():
        for wrong in (-2, vocab, INT64.min, INT64.max):
            assert_same(
                clean, sampler(**call | {"draft_token_ids": call["draft_token_ids"].masked_fill(no_draft, wrong)})
            )
        for harmless in (NAN, -1.0, -INF):
            temperature = call["temperature"].where(call["temperature"] > 0, harmless)
            assert_same(clean, sampler(**call | {"temperature": temperature}))
        assert_well_formed(sampler(**call | {"temperature": torch.full((12,), INF)}), call)


# ---------------------------------------------------------------------------------------------------------------------
# Invariances: a request's tokens depend on its own logits, drafts, temperature, seed and position
# ---------------------------------------------------------------------------------------------------------------------


def take(call: dict, requests) -> dict:
    return {name: value[requests] for name, value in call.items()}


@each_method
@each_dtype
def test_a_request_alone_gives_what_it_gives_in_a_batch(place, method, dtype):
    call = make_call(place, dtype=dtype)
    sampler = make(method, place)
    together = sampler(**call)
    for request in range(12):
        alone = sampler(**take(call, slice(request, request + 1)))
        assert_same(alone, SamplerOutput(*(value[request : request + 1] for value in together[:4])))


@each_method
def test_the_order_and_the_neighbours_do_not_matter(place, method):
    call = make_call(place, batch=30)
    sampler = make(method, place)
    together = sampler(**call)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2)).to(place[1])
    for requests in (order, order[:7], order[:13], order.repeat(2)):
        part = sampler(**take(call, requests))
        assert_same(part, SamplerOutput(*(value[requests] for value in together[:4])))
    # Neighbours that need special treatment: greedy, without a finite logit, infinite.
    call["temperature"][10:] = 0
    call["target_logits"][15:20], call["target_logits"][20:25], call["target_logits"][25:] = NAN, INF, -INF
    troubled = sampler(**call)
    assert_same(*(SamplerOutput(*(value[:10] for value in output[:4])) for output in (troubled, together)))


@each_method
@pytest.mark.parametrize("poison", [NAN, INF, 0.0])
def test_padding_does_not_matter(place, method, poison):
    call = make_call(place)
    output = make(method, place)(**call)
    padded = dict(call)
    for name in ("target_logits", "draft_logits"):
        padded[name] = torch.nn.functional.pad(call[name], (0, 0, 0, 2), value=poison)
    padded["draft_token_ids"] = torch.nn.functional.pad(call["draft_token_ids"], (0, 2), value=-1)
    longer = make(method, place)(**padded)
    assert longer.token_ids[:, :4].tolist() == output.token_ids.tolist()
    assert longer.token_ids[:, 4:].tolist() == [[-1, -1]] * 12
    assert longer.num_accepted.tolist() == output.num_accepted.tolist()
    assert longer.invalid.tolist() == output.invalid.tolist()


def last_dimension_first(tensor: Tensor) -> Tensor:
    return tensor.permute(*reversed(range(tensor.ndim))).contiguous().permute(*reversed(range(tensor.ndim)))


def inside(tensor: Tensor, fill: float) -> Tensor:
    """The same values as a slice of a larger tensor, as of an embedding whose vocabulary is padded."""
    size = [length + 3 for length in tensor.shape]
    larger = torch.full(size, fill, dtype=tensor.dtype, device=tensor.device)
    view = larger[tuple(slice(2, 2 + length) for length in tensor.shape)]
    view.copy_(tensor)
    return view


def every_other(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


LAYOUTS = {
    "transposed": last_dimension_first,
    "padded with NaN": lambda tensor: inside(tensor, NAN if tensor.is_floating_point() else -7),
    "padded with inf": lambda tensor: inside(tensor, INF if tensor.is_floating_point() else 10**6),
    "strided": every_other,
}


@each_method
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_layout_of_the_inputs_does_not_matter(place, method, dtype, layout):
    call = make_call(place, dtype=dtype)
    views = {name: layout(value) for name, value in call.items()}
    assert not views["target_logits"].is_contiguous()
    assert_same(make(method, place)(**call), make(method, place)(**views))
    arguments = {name: call[name] for name in ("temperature", "seeds", "positions")}
    tokens = sample(call["target_logits"][:, 0], **arguments)
    assert tokens.tolist() == sample(views["target_logits"][:, 0], **arguments).tolist()


@each_method
def test_expanded_inputs_are_rows_like_any_other(place, method):
    call = make_call(place, batch=1, vocab=7)
    call["draft_token_ids"].clamp_(min=0)
    expanded = {name: value.expand(20, *value.shape[1:]) for name, value in call.items()}
    repeated = {name: value.contiguous() for name, value in expanded.items()}
    assert_same(make(method, place)(**expanded), make(method, place)(**repeated))
    even = torch.zeros(1, 1, 1, device=place[1])
    flat = {"target_logits": even.expand(20, 4, 7), "draft_logits": even.expand(20, 3, 7), "seeds": 0}
    output = make(method, place)(draft_token_ids=repeated["draft_token_ids"], **flat)
    flat = {"target_logits": torch.zeros(20, 4, 7, device=place[1]), "draft_logits": None, "seeds": 0}
    if method != "strict":
        flat["draft_logits"] = torch.zeros(20, 3, 7, device=place[1])
    assert_same(output, make(method, place)(draft_token_ids=repeated["draft_token_ids"], **flat))


UNUSUAL = {
    "negated lazily": lambda tensor: torch._neg_view(-tensor),
    "zeros that are not in memory": lambda tensor: torch._efficientzerotensor(
        tensor.shape, dtype=tensor.dtype, device=tensor.device
    ),
    "a conjugate's imaginary part": lambda tensor: (
        torch.complex(tensor, -tensor).conj().imag if tensor.dtype == torch.float32 else tensor
    ),
    "of which gradients are wanted": lambda tensor: (
        tensor.clone().requires_grad_() if tensor.dtype == torch.float32 else tensor
    ),
}


@pytest.mark.parametrize("unusual", UNUSUAL.values(), ids=UNUSUAL)
def test_backends_get_tensors_whose_values_are_in_memory(place, unusual):
    # Kernels read memory at an address. PyTorch may have put nothing there yet, or the values with the other sign.
    call = make_call(place)
    call["draft_token_ids"].clamp_(min=0)
    call["draft_logsumexp"] = call["draft_logits"].logsumexp(dim=2)
    call = {name: unusual(value) for name, value in call.items()}
    assert all(
        value._is_zerotensor() or value.is_neg() or value.requires_grad
        for value in call.values()
        if value.dtype == torch.float32
    )
    rows = {"logits": call["target_logits"][:, 0], **{name: call[name] for name in SAMPLING_NAMES}}
    for given, batch in ((call, VerificationBatch.check(**call)), (rows, RowBatch.check(**rows))):
        for name, value in given.items():
            got = getattr(batch, name)
            assert not got._is_zerotensor(), name
            assert not got.is_neg(), name
            assert not got.requires_grad, name
            assert torch.equal(got, value), name
    plain = {name: value.detach().clone().resolve_neg() for name, value in call.items()}
    assert_same(make("block", place)(**call), make("block", place)(**plain))


@pytest.fixture
def two_threads():
    """PyTorch splits long sums over threads, where it has several and if the batch alone does not keep them busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def accept_threshold(place, method: str, target: Tensor, requests, layout) -> list[int]:
    """How low each request's first drafted logit may be and its draft still be accepted, as the bits of a float32.

    There is a second draft, so that a block's residual mass takes part.
    """
    target, drafted = target[requests].clone(), ids(place, 5, 6, requests=len(requests))
    draft = target[:, :2] * 0.8
    draft[:, :, 5:7] = 12
    sampler, seeds = make(method, place), torch.tensor(requests, device=place[1])

    def is_accepted(order: Tensor) -> Tensor:
        # Positive float32 numbers are ordered as their bits are.
        target[:, 0, 5] = order.to(torch.int32).view(torch.float32)
        return sampler(layout(target), drafted, layout(draft), seeds=seeds).num_accepted >= 1

    low = torch.tensor([1e-6] * len(requests), device=place[1]).view(torch.int32).long()
    high = torch.tensor([60.0] * len(requests), device=place[1]).view(torch.int32).long()
    assert bool(is_accepted(high).all())
    assert not bool(is_accepted(low).any())
    while int((high - low).max()) > 1:
        middle = (low + high) // 2
        accepted = is_accepted(middle)
        low, high = low.where(accepted, middle), middle.where(accepted, high)
    return high.tolist()


@pytest.mark.usefixtures("two_threads")
@by_ratio
@pytest.mark.parametrize("vocab", [300, 3 * BLOCK_SIZE + 5, 40 * BLOCK_SIZE])
def test_decisions_are_the_same_to_the_last_bit_in_any_batch_and_layout(place, vocab, method):
    # Equal tokens may hide sums that differ by a rounding, so look for the exact logit from which on a draft is accepted.
    # The eager backend leaves its sums to PyTorch, which on CUDA splits them by the shape of the whole batch.
    if place == ("eager", "cuda"):
        pytest.skip("PyTorch's CUDA reductions depend on the batch in the last bit")
    batch = 6
    target = (2 * torch.randn(batch, 3, vocab, generator=torch.Generator().manual_seed(3))).to(place[1])
    together = accept_threshold(place, method, target, range(batch), layout=lambda tensor: tensor)
    assert accept_threshold(place, method, target, range(batch), layout=last_dimension_first) == together
    alone = [accept_threshold(place, method, target, [i], layout=lambda tensor: tensor)[0] for i in range(batch)]
    assert alone == together


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [300, 3 * BLOCK_SIZE + 5, 40 * BLOCK_SIZE])
def test_residuals_are_the_same_to_the_last_bit_in_any_batch_and_layout(place, vocab):
    # p and q are nearly flat and differ by roundings alone, so that another order of adding makes another residual.
    if place == ("eager", "cuda"):
        pytest.skip("PyTorch's CUDA reductions depend on the batch in the last bit")
    call = make_call(place, batch=24, drafts=1, vocab=vocab)
    noise = torch.randn(24, 1, vocab, generator=torch.Generator().manual_seed(7)).to(place[1])
    call["draft_logits"] = call["target_logits"][:, :1] * (1 + 2e-7 * noise)
    call["draft_token_ids"].fill_(0)
    call["temperature"].fill_(40.0)
    sampler = make("synthetic", place, rates=[0.0])
    together = sampler(**call).token_ids.tolist()
    assert sampler(**{name: last_dimension_first(value) for name, value in call.items()}).token_ids.tolist() == together
    assert [sampler(**take(call, slice(i, i + 1))).token_ids.tolist()[0] for i in range(24)] == together


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [300, 3 * BLOCK_SIZE + 5, 40 * BLOCK_SIZE])
def test_logsumexp_is_the_same_to_the_last_bit_in_any_batch_and_layout(place, vocab):
    if place == ("eager", "cuda"):
        pytest.skip("PyTorch's CUDA reductions depend on the batch in the last bit")
    logits = (2 * torch.randn(16, vocab, generator=torch.Generator().manual_seed(4))).to(place[1])
    sampler = make("probabilistic", place)
    together = sampler.draft(logits, 0.7, seeds=0).logsumexp.tolist()
    assert [sampler.draft(logits[i : i + 1], 0.7, seeds=i).logsumexp.item() for i in range(16)] == together
    assert sampler.draft(last_dimension_first(logits), 0.7, seeds=0).logsumexp.tolist() == together
    assert sampler.draft(inside(logits, NAN), 0.7, seeds=0).logsumexp.tolist() == together


def bits(tensor: Tensor) -> list:
    """The tensor's bits as integers, so that NaNs compare by their payload."""
    return tensor.detach().contiguous().view(BITS[tensor.element_size()]).tolist()


@each_method
@each_dtype
@pytest.mark.parametrize("drafter", ["draft_logits", "deterministic", "draft_logsumexp"])
def test_inputs_are_never_written_to(place, method, dtype, drafter):
    call = make_call(place, dtype=dtype)
    for name, payload in (("target_logits", 3), ("draft_logits", 5)):
        # A NaN whose payload a rewrite would lose, in a corner that is read, and an infinity beside it.
        quiet = bits(torch.tensor([NAN], dtype=dtype))[0]
        call[name].view(BITS[call[name].element_size()])[:, :, 4] = quiet + payload
        call[name][3:6, :, 7] = INF
        call[name][6] = -INF
    if drafter == "deterministic":
        del call["draft_logits"]
    if drafter == "draft_logsumexp":
        call["draft_logsumexp"] = torch.randn(12, 3, device=place[1]).abs() + 5
    before = {name: bits(value) for name, value in call.items()}
    versions = {name: value._version for name, value in call.items()}
    sampler = make(method, place)
    outputs = [sampler(**call), sampler(**call)]
    sampler.draft(call["target_logits"][:, 0], call["temperature"], call["seeds"], call["positions"])
    assert_same(*outputs)
    for output in outputs:
        for value in output[:4]:
            value.fill_(1)  # and no output is a view of an input
    assert {name: bits(value) for name, value in call.items()} == before
    assert {name: value._version for name, value in call.items()} == versions


@each_method
@pytest.mark.parametrize("temperature", [None, 0.0], ids=["mixed", "greedy"])
def test_no_two_outputs_share_memory(place, method, temperature):
    sampler, call = make(method, place), make_call(place)
    if temperature is not None:
        call["temperature"] = temperature
    for options in ({}, {"top_k": 3}, {"logprobs": "processed"}, {"logprobs": "raw"}):
        output = sampler(**call, **options)
        outputs = [value for value in (*output, output.num_tokens) if value is not None]
        assert len({value.untyped_storage().data_ptr() for value in outputs}) == len(outputs), options


@each_method
def test_gradients_are_neither_needed_nor_made(place, method):
    call = make_call(place)
    expected = make(method, place)(**call)
    call["draft_logsumexp"] = torch.logsumexp(
        call["draft_logits"] / call["temperature"][:, None, None].clamp(0.1), dim=2
    )
    for name in ("target_logits", "draft_logits", "temperature", "draft_logsumexp"):
        call[name].requires_grad_()
    output = make(method, place)(**call)
    draft = make(method, place).draft(call["target_logits"][:, 0], call["temperature"], 0)
    tokens = sample(call["target_logits"][:, 0], call["temperature"], 0)
    assert not any(value.requires_grad for value in (*output[:4], output.num_tokens, *draft[:2], tokens))
    del call["draft_logsumexp"]
    call["target_logits"] = torch.nn.Parameter(call["target_logits"].detach())
    assert_same(make(method, place)(**call), expected)


@each_method
def test_tensors_made_in_inference_mode_are_as_good(place, method):
    expected = make(method, place)(**make_call(place))
    sampler = make(method, place)
    with torch.inference_mode():
        call = make_call(place)
        assert_same(sampler(**call), expected)
    assert_same(sampler(**call), expected)  # what the sampler kept is of use outside too


@each_method
def test_an_int_seed_means_consecutive_seeds(place, method):
    call = make_call(place)
    for first in (0, -5, 2**40):
        seeds = torch.arange(first, first + 12, device=place[1])
        assert_same(make(method, place)(**call | {"seeds": first}), make(method, place)(**call | {"seeds": seeds}))
        rows = call["target_logits"][:, 0]
        assert sample(rows, seeds=first).tolist() == sample(rows, seeds=seeds).tolist()


@each_method
def test_no_positions_means_zeros(place, method):
    call = make_call(place)
    zeros = torch.zeros(12, dtype=torch.int64, device=place[1])
    without, given = (make(method, place)(**call | {"positions": positions}) for positions in (None, zeros))
    assert_same(without, given)
    rows = call["target_logits"][:, 0]
    assert sample(rows, 1.0, 0).tolist() == sample(rows, 1.0, 0, zeros).tolist()


@each_method
def test_no_seeds_means_fresh_ones_of_the_default_generator(place, method):
    target = torch.zeros(8, 1, 2 * BLOCK_SIZE, device=place[1])  # even: two draws agree with probability 2,048^-8
    uses = {
        "call": lambda: make(method, place)(target, ids(place, requests=8)).token_ids.tolist(),
        "draft": lambda: make(method, place).draft(target[:, 0]).token_ids.tolist(),
        "sample": lambda: sample(target[:, 0]).tolist(),
    }
    for name, use in uses.items():
        torch.manual_seed(1)
        first, second = use(), use()
        torch.manual_seed(1)
        assert use() == first, name
        assert first != second, name
        assert len(set(map(str, first))) > 1, name  # requests of one call have their own, too


def test_fresh_seeds_have_64_random_bits(place):
    # Each bit is set in half of 10,000 seeds: outside 4,750..5,250 with probability 6e-7 for each of 64 bits.
    torch.manual_seed(0)
    seeds = check_seeds(None, 10_000, torch.device(place[1]))
    counts = [int((seeds >> bit & 1).sum()) for bit in range(64)]
    assert all(4750 <= count <= 5250 for count in counts), counts


@each_method
def test_given_seeds_leave_the_generator_alone(place, method):
    call = make_call(place)
    generators = [torch.get_rng_state] + ([torch.cuda.get_rng_state] if place[1] == "cuda" else [])
    states = [generator().tolist() for generator in generators]
    for seeds in (0, call["seeds"]):
        make(method, place)(**call | {"seeds": seeds})
        make(method, place).draft(call["target_logits"][:, 0], seeds=seeds)
        sample(call["target_logits"][:, 0], seeds=seeds)
    assert [generator().tolist() for generator in generators] == states


def test_default_dtype_and_device_do_not_matter(place):
    call = make_call(place)
    outputs = []
    for dtype in (torch.float32, torch.float64, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            outputs.append(make("probabilistic", place)(**call | {"temperature": 0.7, "positions": None}))
            outputs.append(make("block", place)(**call | {"temperature": 0.7, "positions": None}))
            outputs.append(make("synthetic", place)(**call | {"temperature": 0.7, "positions": None}))
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        outputs.append(make("probabilistic", place)(**call | {"temperature": 0.7, "positions": None}))
        outputs.append(make("block", place)(**call | {"temperature": 0.7, "positions": None}))
        outputs.append(make("synthetic", place)(**call | {"temperature": 0.7, "positions": None}))
    for one, other in zip(outputs, outputs[3:]):
        assert_same(one, other)


# ---------------------------------------------------------------------------------------------------------------------
# Drafting
# ---------------------------------------------------------------------------------------------------------------------


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


SAMPLING_NAMES = ("temperature", "seeds", "positions")


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


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------

BATCH, DRAFTS, VOCAB = 2, 3, 5


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def nested(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls them a prototype
        return torch.nested.nested_tensor(list(tensor))


FLOAT_ROWS = {  # for logits of any shape
    "None": lambda good: None,
    "list": lambda good: good.tolist(),
    "numpy": lambda good: good.cpu().numpy(),
    "str": lambda good: "logits",
    "int64": lambda good: good.long(),
    "bool": lambda good: good.bool(),
    "complex64": lambda good: good.to(torch.complex64),
    "float8": lambda good: good.to(torch.float8_e4m3fn),
    "sparse": lambda good: good.to_sparse(),
    "nested": nested,
    "meta": meta,
    "a dimension less": lambda good: good[0],
    "a dimension more": lambda good: good[None],
    "no dimension": lambda good: good.sum(),
    "no vocabulary": lambda good: good[..., :0],
}
BAD = {
    "target_logits": FLOAT_ROWS | {"no rows": lambda good: good[:, :0]},
    "draft_logits": {name: bad for name, bad in FLOAT_ROWS.items() if name != "None"}
    | {
        "another batch": lambda good: good[:1],
        "a row more": lambda good: good.repeat(1, 2, 1)[:, : DRAFTS + 1],
        "another vocabulary": lambda good: good[..., :-1],
    },
    "draft_token_ids": {
        "None": lambda good: None,
        "list": lambda good: good.tolist(),
        "numpy": lambda good: good.cpu().numpy(),
        "int": lambda good: 3,
        "float32": lambda good: good.float(),
        "int16": lambda good: good.to(torch.int16),
        "uint8": lambda good: good.to(torch.uint8),
        "bool": lambda good: good.bool(),
        "sparse": lambda good: good.to_sparse(),
        "meta": meta,
        "a dimension less": lambda good: good[0],
        "a dimension more": lambda good: good[None],
        "another batch": lambda good: good[:1],
        "a draft more": lambda good: good.repeat(1, 2)[:, : DRAFTS + 1],
        "a draft less": lambda good: good[:, 1:],
        "VALUE vocab": lambda good: good + VOCAB - 1,
        "VALUE -2": lambda good: good.clone().fill_(-2),
        "VALUE int64 max": lambda good: good.clone().fill_(INT64.max),
        "VALUE int32 min": lambda good: good.int().fill_(-(2**31)),
        "VALUE late": lambda good: torch.tensor([[0, 1, 2], [0, 1, VOCAB]]).to(good.device),
    },
    "draft_logsumexp": {
        "list": lambda good: good.tolist(),
        "float": lambda good: 1.0,
        "float64": lambda good: good.double(),
        "float16": lambda good: good.half(),
        "int64": lambda good: good.long(),
        "meta": meta,
        "a dimension less": lambda good: good[0],
        "another batch": lambda good: good[:1],
        "a draft more": lambda good: good.repeat(1, 2)[:, : DRAFTS + 1],
    },
    "temperature": {
        "None": lambda good: None,
        "str": lambda good: "1.0",
        "bool": lambda good: True,
        "list": lambda good: [1.0, 1.0],
        "numpy": lambda good: good.cpu().numpy(),
        "complex": lambda good: 1 + 0j,
        "negative": lambda good: -1e-30,
        "NaN": lambda good: NAN,
        "inf": lambda good: INF,
        "beyond float": lambda good: 10**400,
        "below float": lambda good: -(10**400),
        "too small for a float": lambda good: Fraction(1, 10**400),
        "int64 tensor": lambda good: good.long(),
        "bool tensor": lambda good: good.bool(),
        "meta": meta,
        "no dimension": lambda good: good[0],
        "a dimension more": lambda good: good[:, None],
        "another batch": lambda good: good.repeat(2),
        "VALUE negative": lambda good: -good,
        "VALUE NaN": lambda good: good * NAN,
        "VALUE inf": lambda good: good * INF,
    },
    "seeds": {
        "str": lambda good: "0",
        "float": lambda good: 0.0,
        "bool": lambda good: False,
        "list": lambda good: [0, 1],
        "65 bits": lambda good: 2**63,
        "65 bits below": lambda good: -(2**63) - 1,
        "longer than Python prints": lambda good: 10**5000,
        "int32": lambda good: good.int(),
        "float64": lambda good: good.double(),
        "meta": meta,
        "no dimension": lambda good: good[0],
        "a dimension more": lambda good: good[:, None],
        "another batch": lambda good: good.repeat(2),
        "generator": lambda good: torch.Generator(),
    },
    "positions": {
        "str": lambda good: "0",
        "int": lambda good: 0,
        "list": lambda good: [0, 1],
        "int32": lambda good: good.int(),
        "float32": lambda good: good.float(),
        "meta": meta,
        "no dimension": lambda good: good[0],
        "a dimension more": lambda good: good[:, None],
        "another batch": lambda good: good[:1],
        "VALUE -1": lambda good: good.clone().fill_(-1),
        "VALUE negative": lambda good: good - 5,
        "VALUE int64 min": lambda good: good.clone().fill_(INT64.min),
    },
}
BAD_CASES = [(name, case) for name, cases in BAD.items() for case in cases]
BAD_ROW_CASES = [
    ("logits" if name == "target_logits" else name, case)
    for name, case in BAD_CASES
    if name in ("target_logits", *SAMPLING_NAMES) and case != "no rows"
]
case_ids = {"ids": lambda value: value.replace(" ", "_")}


def good_call(place) -> dict:
    call = make_call(place, BATCH, DRAFTS, VOCAB)
    call["draft_token_ids"] = torch.ones(BATCH, DRAFTS, dtype=torch.int64, device=place[1])
    call["draft_logsumexp"] = torch.ones(BATCH, DRAFTS, device=place[1])
    call["temperature"] = torch.ones(BATCH, device=place[1])
    call["positions"] = torch.arange(BATCH, device=place[1])
    return call


def refused(name: str, use) -> None:
    """Assert that the use raises a TypeError or ValueError whose message starts with the argument's name."""
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: ") as caught:
        use()
    assert type(caught.value) in (TypeError, ValueError)


@each_method
@pytest.mark.parametrize(("name", "case"), BAD_CASES, **case_ids)
def test_bad_arguments_of_a_call_are_named(place, method, name, case):
    if "VALUE" in case and place[1] != "cpu":
        pytest.skip("looking at values would wait for the device")
    call = good_call(place)
    sampler = make(method, place)
    assert_well_formed(sampler(**call), call)
    call[name] = BAD[name][case](call[name])
    refused(name, lambda: sampler(**call))


@pytest.mark.parametrize(("name", "case"), BAD_ROW_CASES, **case_ids)
@pytest.mark.parametrize("use", ["draft", "sample"])
def test_bad_arguments_of_draft_and_sample_are_named(place, use, name, case):
    if "VALUE" in case and place[1] != "cpu":
        pytest.skip("looking at values would wait for the device")
    call = good_call(place)
    call = {"logits": call["target_logits"][:, 0]} | {argument: call[argument] for argument in SAMPLING_NAMES}
    function = sample if use == "sample" else make("probabilistic", place).draft
    function(**call)
    call[name] = BAD["target_logits" if name == "logits" else name][case](call[name])
    refused(name, lambda: function(**call))


@pytest.mark.parametrize("name", sorted(set(BAD) - {"target_logits"}))
def test_arguments_on_another_device_are_named(place, name):
    call = good_call(place)
    other = "cpu" if place[1] == "cuda" else "cuda"
    with FakeTensorMode():  # which has tensors on devices that are not there
        elsewhere = torch.empty(call[name].shape, dtype=call[name].dtype, device=other)
    message = rf"^{name}: expected on {place[1]}.*, where the logits are, got {other}"
    with pytest.raises(ValueError, match=message):
        make("probabilistic", place)(**call | {name: elsewhere})


def test_a_wrong_number_of_target_rows_is_blamed_on_the_target(place):
    call = good_call(place)
    message = "expected 4 rows per request, one more than draft_token_ids has drafts (3), got"
    for rows in (1, 2, 3):  # 3: the row of the bonus token is missing
        short = call | {"target_logits": call["target_logits"][:, :rows]}
        for without in ((), ("draft_logsumexp",), ("draft_logits", "draft_logsumexp")):
            with pytest.raises(ValueError, match=f"^target_logits: {re.escape(message)} {rows}$"):
                make("probabilistic", place)(**short | dict.fromkeys(without))
    # Where draft_logits has as many rows as the target's imply, draft_token_ids is wrong.
    for ids in (call["draft_token_ids"][:, 1:], call["draft_token_ids"].repeat(1, 2)):
        refused("draft_token_ids", lambda ids=ids: make("probabilistic", place)(**call | {"draft_token_ids": ids}))


def test_draft_logsumexp_without_its_logits_is_named(place):
    refused("draft_logsumexp", lambda: make("probabilistic", place)(**good_call(place) | {"draft_logits": None}))


def test_drafts_beyond_the_schedule_are_named(place):
    call = good_call(place)
    refused("draft_token_ids", lambda: make("synthetic", place, rates=[0.5] * (DRAFTS - 1))(**call))
    assert_well_formed(make("synthetic", place, rates=[0.5] * DRAFTS)(**call), call)


OFFSETS = {
    "str": "0",
    "float": 0.0,
    "bool": True,
    "None": None,
    "tensor": torch.tensor(0),
    "negative": -1,
    "many": 4096,
}


@each_method
@pytest.mark.parametrize("bad", OFFSETS.values(), ids=OFFSETS)
def test_bad_offsets_of_a_draft_are_named(place, method, bad):
    logits, sampler = torch.zeros(2, 5, device=place[1]), make(method, place)
    sampler.draft(logits, offset=4095)
    refused("offset", lambda: sampler.draft(logits, offset=bad))


SCHEDULE = AcceptanceSchedule.from_rates([0.5])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("method", {"method": "greedy"}),
        ("method", {"method": "Strict"}),
        ("method", {"method": ""}),
        ("method", {"method": None}),
        ("method", {"method": 1}),
        ("method", {"method": ["strict"]}),
        ("method", {"method": np.array(["strict", "strict"])}),
        ("method", {"method": torch.zeros(2)}),
        ("backend", {"method": "strict", "backend": "cuda"}),
        ("backend", {"method": "strict", "backend": None}),
        ("backend", {"method": "strict", "backend": ["eager"]}),
        ("backend", {"method": "strict", "backend": np.array(["eager", "eager"])}),
        ("schedule", {"method": "synthetic"}),
        ("schedule", {"method": "synthetic", "schedule": 0.5}),
        ("schedule", {"method": "synthetic", "schedule": [0.5]}),
        ("schedule", {"method": "synthetic", "schedule": AcceptanceSchedule}),
        ("schedule", {"method": "strict", "schedule": SCHEDULE}),
        ("schedule", {"method": "probabilistic", "schedule": SCHEDULE}),
    ],
    ids=repr,
)
def test_bad_arguments_of_the_constructor_are_named(name, arguments):
    refused(name, lambda: RejectionSampler(**arguments))


def test_errors_say_what_was_given_and_what_should_be(place):
    call = good_call(place)
    for name, bad, words in [
        ("target_logits", call["target_logits"].long(), ["int64", "float32"]),
        (
            "draft_logits",
            call["draft_logits"][:, :, 1:],
            [str([BATCH, DRAFTS, VOCAB - 1]), str([BATCH, DRAFTS, VOCAB])],
        ),
        ("draft_token_ids", call["draft_token_ids"].float(), ["float32", "int64"]),
        ("seeds", 0.5, ["float", "int"]),
        ("temperature", -2.0, ["-2.0", ">= 0"]),
    ]:
        with pytest.raises((TypeError, ValueError)) as caught:
            make("probabilistic", place)(**call | {name: bad})
        assert all(word in str(caught.value) for word in words), caught.value
