"""The corner rules of the contract, in every method: absent and impossible drafts, NaN, infinities, temperatures, ties."""

import numpy as np
import pytest
import torch

from reference.sampling import sample as sample_row
from specdecode import sample
from specdecode.noise import BLOCK_SIZE
from tests.support.calls import (
    INF,
    INT64,
    NAN,
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
