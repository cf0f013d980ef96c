"""Shards in Triton: every rank gets the bits of one GPU from its part of the logits, in few exchanges.

Ranks are threads. The interpreter is not made for that, so they take turns to launch; they meet in the exchanges.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed

from specdecode import VocabShard, backends, kernels, sample, transports
from specdecode.kernels.launch import Plan
from specdecode.kernels.sharding import plan as shard_plan
from tests.conftest import ON_GPU
from tests.support.differential import case, like_a_device
from tests.support.kernels import (
    DEVICE,
    impossible_drafts,
    in_question,
    memory_of,
    needs_gpu,
    needs_interpreter,
    planned_with,
    small,
)
from tests.support.packing import fed_positions, in_slots, packed_rows, with_counts
from tests.support.ranks import Ranks
from tests.support.sharded_calls import (
    ALL_GATHER,
    EMPTY,
    INF,
    LARGE,
    NAN,
    THREE,
    TWO,
    UNEVEN,
    Shared,
    arguments,
    assert_bits,
    assert_ranks_agree,
    packed_of,
    sampler_of,
)

pytestmark = pytest.mark.usefixtures("turns")

KINDS = {  # with log-probabilities and dtypes, which are independent of it
    "probabilistic": ("raw", torch.bfloat16, 2),
    "given logsumexp": (None, torch.float32, 2),
    "deterministic": ("processed", torch.float16, 2),
    "strict": (None, torch.bfloat16, 2),
    "synthetic": ("processed", torch.bfloat16, 2),
    "synthetic strict": ("raw", torch.bfloat16, 2),
    "block": ("processed", torch.bfloat16, 3),
    "block deterministic": (None, torch.float64, 2),
}


@pytest.mark.parametrize("kind", KINDS if ON_GPU else ["probabilistic", "deterministic", "strict", "block"])
@pytest.mark.parametrize("bounds", small(None, UNEVEN, EMPTY, LARGE))
def test_every_rank_returns_the_bits_of_one_gpu(kind, bounds, ranks_of):
    """In the interpreter one kind of each exchange: the others go through symmetric memory, below."""
    logprobs, dtype, exchanges = KINDS[kind]
    ranks = ranks_of(*(bounds or (THREE if kind == "block" else TWO)))
    requests = 64 if ON_GPU else 2 + kind.endswith("strict")
    batch = case(requests, 3 if ON_GPU else 2, ranks.vocab_size, dtype, seed=5)
    batch.temperature[0] = 1  # at which raw sums are the processed ones
    method, call = arguments(kind, batch.to(DEVICE))
    if kind == "given logsumexp":
        call["draft_logsumexp"][:, 0] = NAN  # which is not trusted
        call["temperature"] = 0.8
    _, sizes = assert_ranks_agree(ranks, partial(sampler_of, method), call | {"logprobs": logprobs})
    assert len(sizes) == exchanges
    if kind == "strict" and not ON_GPU:
        assert sizes == [2 * 256, 2 * 128]  # of 9 rows, from each rank: 8 and 12 bytes, then 8, in lines of 128


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounds", small(None, UNEVEN, EMPTY, LARGE))
@pytest.mark.usefixtures("shared")
def test_through_symmetric_memory_every_rank_returns_the_bits_of_one_gpu(kind, bounds):
    """In one step after the other, of different sizes; nothing is gathered."""
    logprobs, dtype, _ = KINDS[kind]
    ranks = Ranks(*(bounds or (EMPTY if kind in ("probabilistic", "strict") else TWO)))
    sizes = ((64, 3), (3, 1), (64, 2)) if ON_GPU else ((1, 2), (2, 1), (1, 1))[: 2 + (kind == "given logsumexp")]
    for seed, (requests, drafts) in enumerate(sizes):
        method, call = arguments(kind, case(requests, drafts, ranks.vocab_size, dtype, seed=seed).to(DEVICE))
        _, gathered = assert_ranks_agree(ranks, partial(sampler_of, method), call | {"logprobs": logprobs})
        assert gathered == []
        for transport in [shard.transport_on(call["target_logits"].device) for shard in ranks.shards]:
            assert transport.seen == {("even", "odd")[seed % 2]}
            assert transport.not_heard() == set()
            assert transport.words[:3].tolist() == [seed + 1, seed + 1, 0]
            transport.seen.clear()
    assert {shard.transport for shard in ranks.shards} == {"symmetric_memory"}


@pytest.mark.parametrize("kind", ["probabilistic", "given logsumexp", "synthetic"])
def test_large_batches_draw_only_where_requests_stop(kind, ranks_of):
    logprobs, dtype, _ = KINDS[kind]
    ranks = ranks_of(*(LARGE if ON_GPU else TWO))
    batch = case(64 if ON_GPU else 4, 2, ranks.vocab_size, dtype, seed=10)
    if kind == "probabilistic":
        batch.target_logits[:2, 0], batch.draft_token_ids[:2, 0] = -INF, torch.tensor([0, 5])  # of which 0 is accepted
        batch.target_logits[2, 0, 5], batch.draft_token_ids[2] = -INF, 5  # and this is not
        batch.target_logits[2, 1] = -INF  # so this does not matter
    method, call = arguments(kind, batch.to(DEVICE))
    with mock.patch.object(kernels, "verify", partial(kernels.verify, large=True)):
        output, sizes = assert_ranks_agree(ranks, partial(sampler_of, method), call | {"logprobs": logprobs})
    words = len(output.invalid) * (1 + (logprobs is not None))  # of a request, not of a row
    assert sizes[1:] == [len(ranks.parts) * 8 * -(-words // 16) * 16]
    if kind == "probabilistic":
        assert output.invalid[:3].tolist() == [True, True, False]
        assert output.num_accepted[:3].clamp(max=1).tolist() == [1, 0, 0]


@needs_interpreter  # which can leave out what one rank tells
@pytest.mark.parametrize("kernel", ["tell_kernel", "list_kernel", "cut_kernel"])
@pytest.mark.usefixtures("shared")
def test_a_rank_that_does_not_answer_in_time_is_an_error_of_the_next_call(kernel):
    ranks, batch = Ranks(*TWO), case(2, 1, 2064, torch.bfloat16)
    call = vars(batch.to(DEVICE))
    if kernel != "tell_kernel":  # by all ranks, of flat rows
        call |= {"top_p": 0.99, "temperature": 8.0}
    assert_ranks_agree(ranks, partial(sampler_of, "probabilistic"), call)
    interpret = Plan.interpret
    loses = mock.patch.object(Plan, "interpret", lambda plan, values: lost(kernel, interpret, plan, values))
    with loses, looks() as counted:
        outputs = ranks.run(partial(sampler_of, "probabilistic"), call)
    assert len(counted) < 1000  # a rank waits for one word, looking 100 times for it, and then for no other
    assert [output.invalid.tolist() for output in outputs] == [[True, True]] * 2
    assert all(0 <= token < 2064 for output in outputs for token in output.token_ids[:, 0].tolist())
    with pytest.raises(distributed.DistBackendError, match="a rank did not tell its part of a step in time"):
        ranks.shards[0].check()
    with pytest.raises(distributed.DistBackendError, match="a rank did not tell its part of a step in time"):
        ranks.run(partial(sampler_of, "probabilistic"), call)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}])
@pytest.mark.usefixtures("shared")
def test_words_that_come_after_a_rank_was_given_up_are_harmless(options):
    """Until the host knows of it, steps go on, in memory with whatever came late."""
    ranks, generator = Ranks(*TWO), torch.Generator().manual_seed(0)
    call = vars(case(1, 1, 2064, torch.bfloat16, seed=3, greedy=0).to(DEVICE)) | options
    assert_ranks_agree(ranks, partial(sampler_of, "probabilistic"), call)
    exchange = Shared.exchange

    def late(transport: Shared, words: Tensor | None) -> None:
        exchange(transport, words)
        transport.words[2] = 1  # a rank did not answer in time
        later = transport.words[transports.HEADER :]
        numbers = 100 * torch.randn(2 * len(later), generator=generator)
        later.copy_(numbers.view(torch.int64))

    with mock.patch.object(Shared, "exchange", late):
        outputs = ranks.run(partial(sampler_of, "probabilistic"), call)
    for output in outputs:
        assert output.invalid.all()
        assert output.token_ids.max() < 2064


@contextmanager
def looks() -> Iterator[list[None]]:
    """Count how often words of other ranks are looked at; in the interpreter only."""
    counted: list[None] = []
    if ON_GPU:
        yield counted
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    load = builder.create_masked_load

    def look(*arguments: Any) -> Any:
        counted.extend([None] * arguments[-1])  # it is volatile
        return load(*arguments)

    with mock.patch.object(builder, "create_masked_load", look):
        yield counted


def lost(kernel: str, interpret: Callable, plan: Plan, values: dict) -> None:
    """Launch a plan; lose what its rank told itself if that was by a kernel, and what others have told until then."""
    interpret(plan, values)
    if kernel in [launch.kernel.__name__ for launch in plan.launches]:
        values["memory"][transports.HEADER :] = -1


def test_sizes_never_seen_before_plan_nothing(ranks_of):
    ranks, known = ranks_of(*TWO), []
    for requests, drafts in ((2, 1), (3, 2), (1, 1), (5, 1)):
        call = vars(case(requests, drafts, ranks.vocab_size, torch.bfloat16, seed=1).to(DEVICE))
        assert_ranks_agree(ranks, partial(sampler_of, "probabilistic"), call)
        known.append(shard_plan.plan_sharded.cache_info().currsize)
    assert known == known[:1] * 4


@pytest.mark.parametrize("bounds", [EMPTY, UNEVEN][: 1 + ON_GPU])
def test_shards_may_be_uneven_and_empty(bounds, ranks_of):
    ranks = ranks_of(*bounds)
    batch = case(2, 1, ranks.vocab_size, torch.bfloat16, greedy=0, seed=1)
    assert_ranks_agree(ranks, partial(sampler_of, "block"), vars(batch))


@pytest.mark.parametrize(("method", "logprobs"), [("strict", "processed"), ("block", None), ("probabilistic", "raw")])
def test_greedy_calls_take_one_exchange_of_few_bytes(method, logprobs, ranks_of):
    """But two for raw log-probabilities, which take all sums."""
    ranks, batch = ranks_of(*TWO), case(3, 2, 2064, torch.bfloat16)
    batch.target_logits[:, :, [5, 1030, 2049]] = 20.0  # ties on every rank
    batch.draft_token_ids[0] = 5
    batch.target_logits[1] = -INF
    batch.target_logits[2, :, 1500] = 30.0  # of the first rank, which is not the first in the vocabulary
    call = vars(batch) | {"temperature": 0.0, "logprobs": logprobs}
    output, sizes = assert_ranks_agree(ranks, partial(sampler_of, method), call)
    assert output.token_ids[0].tolist() == [5, 5, 5]
    if logprobs == "raw":
        assert len(sizes) == 2
    else:
        assert sizes == [2 * 2 * 128]  # of each rank, 8 bytes a row and notes of 12, in lines of 128


@pytest.mark.parametrize("kind", ["probabilistic", "block", "strict"])
def test_nan_and_infinities_count_as_on_one_gpu(kind, ranks_of):
    batch = case(8, 1, 2064, torch.float32, greedy=0.2, seed=2)
    target, draft = batch.target_logits, batch.draft_logits
    target[0, 0, 1500], draft[1, :, 7] = NAN, NAN  # on one rank
    target[0, 0, batch.draft_token_ids[0]], target[0, 1] = -INF, NAN  # which the request does not reach
    target[2, :, [2050, 700]] = INF  # on two
    draft[3, :, [2050, 701]] = INF
    target[4, :, :1024], draft[4, :, 1024:] = -INF, NAN  # nothing finite on some rank
    target[5, 0], batch.draft_token_ids[5] = NAN, 0  # which such a row emits
    target[6], draft[6] = -INF, -INF
    target[7, :, 3], draft[7, :, 3] = INF, INF
    batch.draft_token_ids[2:4] = torch.tensor([[700], [701]])
    if kind == "block" and not ON_GPU:
        batch = replace(batch, **{name: value[2:6] for name, value in vars(batch).items()})
    method, call = arguments(kind, batch.to(DEVICE))
    output, _ = assert_ranks_agree(ranks_of(*TWO), partial(sampler_of, method), call)
    assert output.invalid.any()
    assert kind != "probabilistic" or not output.invalid[0]


@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_recovered_tokens_are_drawn_from_the_residual_of_all_ranks(method, ranks_of):
    """Some ranks have no residual; where p and q are the same none has any, and the token is drawn from p."""
    size = 100 if ON_GPU else 2 - (method == "block")
    parts = [vars(impossible_drafts(size, 2064, closeness)) for closeness in (INF, 1.0, 0.0)]
    call = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    call["draft_logits"][-size:] = call["target_logits"][-size:, :1]
    call |= {"temperature": 0.7, "seeds": torch.arange(len(call["seeds"]))}
    assert_ranks_agree(ranks_of(*TWO), partial(sampler_of, method), call)


def long_searches() -> dict:
    """A third of q is one token, and p is flat: their sums are relative to other maxima."""
    batch = impossible_drafts(64 if ON_GPU else 6, 6000, 5.0)
    call = vars(batch) | {"seeds": torch.arange(len(batch.seeds)), "target_logits": batch.target_logits / 5}
    draft = call["draft_logits"] = batch.draft_logits / 5
    draft[..., 4000] = 0.7 * ((draft / 0.7).logsumexp(2) - 0.7)
    return call | {"draft_logsumexp": (draft / 0.7).logsumexp(2)}


@pytest.mark.usefixtures("shared")
def test_a_hint_ends_the_searches_of_its_step_alone():
    """A search looks at two blocks before, of eight or seven, of which two have a residual."""
    ranks, batch = Ranks([0, 8192, 16_000], [1, 0]), impossible_drafts(64 if ON_GPU else 4, 16_000, 5.0)
    batch.draft_logits[..., torch.arange(16_000) // 1024 % 4 > 0] += 40
    requests = len(batch.seeds)
    call = vars(batch) | {"temperature": 5.0, "seeds": torch.arange(requests)}
    call["draft_logsumexp"] = (batch.draft_logits / 5).logsumexp(2)
    check = partial(assert_ranks_agree, ranks, partial(sampler_of, "probabilistic"), call)
    with planned_with(shard_plan, SEARCH=(1, 1)):
        check()
        memory = [shard.transport_on(torch.zeros(1, device=DEVICE).device).words for shard in ranks.shards]
        hints = [words[transports.HINTS : transports.HEADER] for words in memory]
        assert torch.equal(*hints)
        told = (hints[0] > 0).nonzero().flatten().tolist()
        assert 0 < len(told) <= requests
        assert all(row % 2 == 0 for row in told)  # whose draft is rejected
        for words in hints:
            words.fill_(0x7F000000)  # of the first step: the second has the number 1
        check()
        for words in hints:
            words.fill_((2 << 32) | 0x7F000000)  # a false one, of the third step
        with pytest.raises(AssertionError):
            check()
        assert all((words == words[0]).all() for words in hints)  # none has become a lower one


@pytest.mark.parametrize("is_given", [False, True])
def test_a_rank_ends_its_search_only_where_anothers_residual_surely_is_best(is_given, ranks_of):
    """It looks at one block before."""
    call = long_searches()
    if not is_given:
        call["draft_logsumexp"] = None
    ranks = ranks_of([0, 3072, 6000], [1, 0])
    with planned_with(shard_plan, SEARCH=(1, 1)):
        assert_ranks_agree(ranks, partial(sampler_of, "probabilistic"), call)


def test_block_verification_knows_other_ranks_logits_of_a_one_hot_token(ranks_of):
    """The mass of max(0, c p - q) is c less the other model's probability of the only token, which the last rank has.

    The other model's likeliest token is on the first rank. c is .9 after the first draft, and the mass half of that. Where
    it were taken for c, with these seeds that draft were accepted.
    """
    target, draft = torch.full((2, 3, 1030), -INF), torch.full((2, 2, 1030), -INF)
    target[:, 0, :2], draft[:, 0, :2] = torch.tensor([0.45, 0.55]).log(), torch.tensor([0.5, 0.5]).log()
    target[0, 1, 1029] = draft[1, 1, 1029] = INF
    draft[0, 1, 1029] = target[1, 1, 1029] = 3.0
    draft[0, 1, 3] = target[1, 1, 3] = 3.1
    target[:, 2, 0] = 0.0
    call = {"target_logits": target, "draft_token_ids": torch.tensor([[0, 3]]).expand(2, 2), "draft_logits": draft}
    call |= {"seeds": torch.tensor([1, 1])}
    output, _ = assert_ranks_agree(ranks_of([0, 1024, 1030]), partial(sampler_of, "block"), call)
    assert output.num_accepted.tolist() == [0, 0]


@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_packed_calls_give_the_bits_of_one_gpu(method, ranks_of):
    counts, slots = [2, 0, 1], torch.tensor([3, 0, 4])
    batch = case(3, 2, 3100, torch.bfloat16, seed=7)
    options = {name: getattr(batch, name) for name in ("draft_logits", "temperature", "seeds")}
    by_slot = {name: in_slots(value, slots, 5) for name, value in options.items()}
    rows = packed_rows(with_counts(batch, counts), counts)
    for name in ("target_logits", "draft_token_ids"):
        rows[name] = rows[name][: rows["row_starts"][-1]]  # nothing follows the rows of the last request, which has few
    call = rows | by_slot | {"slots": slots, "positions": batch.positions}
    if method == "block":  # rows and a slot that are none, as only a device takes them
        call["row_starts"][-1] += 99
        call["slots"][0] = 5
        with like_a_device():
            output, _ = assert_ranks_agree(ranks_of(*UNEVEN), partial(packed_of, method), call)
        assert output.invalid.tolist() == [True, False, True]
    else:
        assert_ranks_agree(ranks_of(*UNEVEN), partial(packed_of, method), call)


@pytest.mark.parametrize("bounds", small(TWO, UNEVEN))
def test_residuals_of_packed_requests_are_summed_on_the_ranks_that_have_them(bounds, ranks_of):
    """No request's rows and slot are at its own index."""
    counts, slots = [2, 0, 1, 2], torch.tensor([3, 0, 4, 1])
    batch = in_question(4, 2, bounds[0][-1], torch.bfloat16)
    by_slot = {name: in_slots(getattr(batch, name), slots, 5) for name in ("draft_logits", "temperature", "seeds")}
    rows = packed_rows(with_counts(batch, counts), counts)
    call = rows | by_slot | {"slots": slots, "row_positions": fed_positions(batch.positions, rows)}
    assert_ranks_agree(ranks_of(*bounds), partial(packed_of, "block"), call)


def test_raw_statistics_are_told_at_temperature_1_too(ranks_of):
    call = vars(case(2, 1, 2064, torch.bfloat16, seed=5)) | {"logprobs": "raw"}
    call["temperature"] = torch.tensor([1.0, 0.0])
    with memory_of(1):
        assert_ranks_agree(ranks_of(*TWO), partial(sampler_of, "probabilistic"), call)


def test_tokens_are_sampled_and_drafted_alike(ranks_of):
    batch = case(3, 0, 2064, torch.bfloat16, seed=3)
    batch.target_logits[2] = -INF
    call = {"logits": batch.target_logits[:, 0], "temperature": batch.temperature, "seeds": batch.seeds}
    draft, sizes = assert_ranks_agree(ranks_of(*TWO), lambda shard=None: sampler_of("strict", shard).draft, call)
    assert len(sizes) == 2
    one_row = {"target_logits": batch.target_logits, "draft_token_ids": batch.draft_token_ids}
    one_row |= {"temperature": batch.temperature, "seeds": batch.seeds, "logprobs": "raw"}
    output, _ = assert_ranks_agree(ranks_of(*TWO), partial(sampler_of, "block"), one_row)
    assert torch.equal(output.token_ids[:, 0], draft.token_ids)
    assert output.invalid.tolist() == [False, False, True]
    with mock.patch.object(backends, "choose", return_value=backends.kernels()):
        call = {name: value.to(DEVICE) for name, value in call.items()}
        for token_ids in ranks_of(*TWO).run(lambda shard: partial(sample, shard=shard), call):
            assert torch.equal(token_ids, draft.token_ids)


@needs_gpu
@pytest.mark.parametrize("method", ["strict", "probabilistic", "block", "synthetic"])
def test_a_captured_call_is_replayed_with_new_inputs(method):
    """On one GPU, so a group of one rank: the launches and the collectives are those of more."""
    store = distributed.HashStore()
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        with mock.patch.object(transports, "all_gather", ALL_GATHER):
            sampler = sampler_of(method, VocabShard(None, 0, 3100))
            calls = [vars(case(4, 3, 3100, torch.bfloat16, seed=seed).to("cuda")) for seed in (0, 1)]
            static = {name: value.clone() for name, value in calls[0].items()}
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                sampler(**static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = sampler(**static)
            for call in calls[::-1]:
                for name, value in call.items():
                    static[name].copy_(value)
                graph.replay()
                assert_bits(output, sampler_of(method)(**call))
    finally:
        distributed.destroy_process_group()
