"""Vocabulary shards: every rank gets what one process would get from the whole logits, and few bytes travel."""

import importlib.util
import inspect
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from specdecode import RejectionSampler, Sampling, VocabShard, sample, transports
from specdecode.eager import cutoffs, sharded
from specdecode.eager.sharded import ShardedRows
from specdecode.sharding import Layout
from tests.differential import assert_same_tokens, like_a_device
from tests.differential import case as random_case
from tests.packing import fed_positions, in_slots, packed_rows, with_counts
from tests.ranks import Ranks, groups, made_once, on_ranks
from tests.test_fuzz import FLOATS, make_call, pick
from tests.test_logprobs import assert_right
from tests.test_packed import numbers_of
from tests.test_truncation import SCHEDULE, expected

NAN, INF = float("nan"), float("inf")
EXAMPLE = Path(__file__).parent.parent / "docs" / "use" / "tensor_parallel.py"
METHODS = ("probabilistic", "strict", "block", "synthetic")
WHOLE_BLOCKS = [([0, 1024, 3100], None), ([0, 1024, 2048, 2051], [2, 0, 1]), ([0, 0, 2048, 2048, 2500], [3, 2, 1, 0])]
DIVIDED_BLOCKS = [([0, 1100, 2051], None), ([0, 300, 301, 900], [1, 2, 0]), ([0, 7, 7, 2050, 3100], [0, 3, 1, 2])]


@pytest.fixture(scope="module")
def ranks_of():
    return made_once()


def sampler_of(method: str, shard: VocabShard | None = None) -> RejectionSampler:
    schedule = SCHEDULE if method == "synthetic" else None
    return RejectionSampler(method, backend="eager", schedule=schedule, shard=shard)


def drafter_of(method: str, shard: VocabShard | None = None) -> Callable:
    return sampler_of(method, shard).draft


def sample_of(shard: VocabShard | None = None) -> Callable:
    return partial(sample, shard=shard)


def verifier_of(method: str, call: dict, shard: VocabShard | None = None) -> Callable:
    sampler = sampler_of(method, shard)
    return sampler.packed if "row_starts" in call else sampler


def verified(ranks: Ranks, method: str, call: dict) -> Any:
    """What every rank returns, after a check that all return the same."""
    first, *others = ranks.run(partial(verifier_of, method, call), call)
    for other in others:
        assert_equal(other, first)
    return first


def assert_equal(got: tuple, expected: tuple) -> None:
    """Bit for bit: NaN is equal to itself, here."""
    for mine, other in zip(got, expected, strict=True):
        if isinstance(other, Tensor):
            assert mine.dtype == other.dtype
            assert torch.equal(mine.nan_to_num(nan=-7), other.nan_to_num(nan=-7)), (mine, other)
        else:
            assert mine == other


# ---------------------------------------------------------------------------------------------------------------------
# Every rank returns what one process does
# ---------------------------------------------------------------------------------------------------------------------


def truncation_of(random: np.random.Generator, batch: int) -> dict:
    numbers = {
        "top_k": [torch.tensor(random.choice([0, 1, 2, 5, 40, 3000], batch), dtype=torch.int64), 3, 1, None],
        "top_p": [torch.tensor(random.choice([1e-6, 0.3, 0.5, 0.9, 0.999, 1.0], batch)), 0.8, None],
        "min_p": [torch.tensor(random.choice([0, 1e-4, 0.1, 0.5, 1.0], batch)), 0.05, None],
    }
    return {name: pick(random, values) for name, values in numbers.items()} if random.random() < 0.6 else {}


def random_call(seed: int, vocab: int) -> tuple[str, dict, list]:
    """A method, its arguments, and what `draft` was called with, if the call has what it returned."""
    random = np.random.default_rng(seed)
    structure = {
        "batch": pick(random, [4, 3, 1, 0]),
        "drafts": pick(random, [2, 1, 3, 0]),
        "vocab": vocab,
        "dtypes": (pick(random, FLOATS), pick(random, FLOATS)),
        "scale": pick(random, [1, 0, 3, 30]),
        "trouble": pick(random, [0.0, 0.001, 0.03, 0.4]),
        "alike": pick(random, ["unlike", "near", "shifted", "equal"]),
        "logprobs": pick(random, ["processed", "raw", None]),
        "given": pick(random, ["draft logits", "draft logits", "no draft logits", "logsumexp", "hostile logsumexp"]),
    }
    logprobs = structure.pop("logprobs")
    method, call = pick(random, METHODS), make_call(random, structure) | {"logprobs": logprobs}
    call |= {"seeds": 5} if call["seeds"] is None else {}
    call |= truncation_of(random, structure["batch"])
    how = Sampling(call["temperature"], *(call.get(name) for name in Sampling._fields[1:]))
    if call["draft_logits"] is not None and random.random() < 0.3:
        how = call["draft_sampling"] = Sampling(
            pick(random, [0.7, 1.5, 0.0]), **truncation_of(random, structure["batch"])
        )
    if call["draft_logsumexp"] is None:
        return method, call, []
    options = how._asdict() | {"seeds": 5, "positions": call["positions"]}
    drawn = [{"logits": call["draft_logits"][:, i], "offset": i} | options for i in range(structure["drafts"])]
    drafts = [sampler_of(method).draft(**draw) for draw in drawn]
    if isinstance(call["draft_logsumexp"], str):
        columns = [draft.logsumexp for draft in drafts]
        call["draft_logsumexp"] = torch.stack(columns, dim=1) if columns else torch.zeros(structure["batch"], 0)
    if any(limit is not None for limit in how[1:]):
        columns = [draft.cutoff for draft in drafts]
        empty = torch.zeros(structure["batch"], 0, dtype=torch.int64)
        call["draft_cutoff"] = torch.stack(columns, dim=1) if columns else empty
    return method, call, drawn


@pytest.mark.parametrize("bounds", range(len(WHOLE_BLOCKS)))
def test_shards_of_whole_blocks_give_the_bits_of_one_process(bounds, ranks_of):
    ranks = ranks_of(*WHOLE_BLOCKS[bounds])
    for seed in range(100 * bounds, 100 * bounds + 14):
        method, call, drawn = random_call(seed, ranks.vocab_size)
        assert_equal(verified(ranks, method, call), sampler_of(method)(**call))
        if drawn:
            whole = sampler_of(method).draft(**drawn[0])
            for got in ranks.run(partial(drafter_of, method), drawn[0]):
                assert_equal(got, whole)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bounds", range(len(DIVIDED_BLOCKS)))
def test_shards_that_divide_blocks_give_the_references_tokens(bounds, method, ranks_of):
    ranks = ranks_of(*DIVIDED_BLOCKS[bounds])
    case = random_case(6, 3, ranks.vocab_size, pick(np.random.default_rng(bounds), FLOATS), seed=bounds)
    for options, of in (({}, "raw"), ({"top_k": 7, "top_p": 0.83, "min_p": 0.01}, "processed")):
        output = verified(ranks, method, vars(case) | options | {"logprobs": of})
        assert_same_tokens(output.token_ids, expected(method, case, options, None, True), case.band("eager"))
        assert_right(output, case, options, of, "eager")


@pytest.mark.parametrize("method", METHODS)
def test_packed_calls_give_the_bits_of_one_process(method, ranks_of):
    ranks = ranks_of(*WHOLE_BLOCKS[1])
    for trial in range(6):
        draw = Random(f"{method} {trial}")
        requests, drafts = draw.choice([1, 2, 5]), draw.choice([0, 1, 3, 3])
        batch = random_case(requests, drafts, 2051, draw.choice(FLOATS), seed=trial)
        counts = [draw.randint(0, drafts) for _ in range(requests)]
        slots = torch.tensor(draw.sample(range(requests + 2), requests))
        options = numbers_of(batch, draw, method, ("eager", "cpu"))
        by_slot = {n: v if n == "positions" else in_slots(v, slots, requests + 2) for n, v in options.items()}
        call = packed_rows(with_counts(batch, counts), counts) | by_slot | {"slots": slots}
        if trial % 2 and (positions := call.pop("positions")) is not None:
            call["row_positions"] = fed_positions(positions + 1, call)
        assert_equal(verified(ranks, method, call), sampler_of(method).packed(**call))
        starts = call["row_starts"].clone()
        starts[-1] += 99
        hostile = call | {"row_starts": starts, "slots": slots + 2}  # the last request's rows, and some slots, are none
        with like_a_device():
            assert_equal(verified(ranks, method, call), sampler_of(method).packed(**call))
            assert_equal(verified(ranks, method, hostile), sampler_of(method).packed(**hostile))


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_calls_are_errors_that_say_what_to_do(fullgraph, ranks_of):
    (shard,), logits, drafts = ranks_of([0, 8]).shards, torch.zeros(2, 3, 8), torch.zeros(2, 2, dtype=torch.int64)
    sampler, starts = sampler_of("probabilistic", shard), torch.tensor([0, 3, 6])
    calls = [
        lambda: sampler(logits * 2, drafts, seeds=0),
        lambda: sampler.packed(logits.flatten(0, 1), drafts.new_zeros(6), starts, num_draft_tokens=2, seeds=0),
        lambda: sampler.draft(logits[:, 0], seeds=0),
        lambda: sample(logits[:, 0], seeds=0, shard=shard),
    ]
    for call in calls:
        torch._dynamo.reset()
        with pytest.raises(ValueError, match=r"^shard: .* torch.compiler.disable"):
            torch.compile(call, fullgraph=fullgraph, backend="aot_eager")()
    disabled = torch.compiler.disable(sampler)
    step = torch.compile(lambda: disabled(logits * 2, drafts, seeds=0), backend="aot_eager")
    assert_equal(step(), sampler(logits * 2, drafts, seeds=0))


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_takes_calls_of_any_size(method, ranks_of):
    ranks = ranks_of([0, 64])  # what it receives from itself is not copied
    for batch, drafts, dtype in itertools.product((1, 2, 3), (0, 1, 2), (torch.float32, torch.float64)):
        call = vars(random_case(batch, drafts, 64, dtype))
        for others in ({}, {"draft_logits": None, "logprobs": "raw"}):
            assert_equal(verified(ranks, method, call | others), sampler_of(method)(**call | others))


def test_a_drafts_token_and_its_cutoff_are_tensors_of_their_own(ranks_of):
    ranks = ranks_of(*WHOLE_BLOCKS[1])
    call = {"logits": torch.randn(3, ranks.vocab_size), "temperature": 0.0, "seeds": 0, "top_k": 2}
    for draft in ranks.run(partial(drafter_of, "strict"), call):
        expected = draft.cutoff.clone()
        draft.token_ids.fill_(-7)
        assert torch.equal(draft.cutoff, expected)


def test_eight_ranks_agree_with_one_process(ranks_of):
    ranks = ranks_of([0, 1024, 1024, 2048, 3072, 4096, 5120, 6144, 6200], [7, 1, 0, 3, 2, 5, 4, 6])
    call = vars(random_case(5, 3, 6200, torch.bfloat16)) | {"top_p": 0.95}
    for method in METHODS:
        assert_equal(verified(ranks, method, call), sampler_of(method)(**call))


def test_what_is_computed_for_a_device_is_what_the_cpu_computes(ranks_of):
    ranks, call = ranks_of(*WHOLE_BLOCKS[1]), vars(random_case(5, 3, 2051, torch.float16)) | {"top_k": 50}
    call["logprobs"] = "processed"
    for method in METHODS:
        with like_a_device():
            assert_equal(verified(ranks, method, call), sampler_of(method)(**call))


class NoHostReads(TorchDispatchMode):
    """Fails on operations that make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"top_k": 9, "top_p": 0.7, "min_p": 0.01}], ids=["whole", "truncated"])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_read_on_the_host(method, options, ranks_of):
    batch, ranks = random_case(4, 3, 2051, torch.bfloat16), ranks_of([0, 2051])
    counts, others = [3, 0, 2, 3], ("draft_logits", "temperature", "seeds", "positions")
    packed = packed_rows(with_counts(batch, counts), counts) | {name: vars(batch)[name] for name in others}
    for call in (vars(batch) | options | {"logprobs": "processed"}, packed | options | {"logprobs": "raw"}):
        expected_output = verified(ranks, method, call)
        verify = verifier_of(method, call, ranks.shards[0])
        with like_a_device(), NoHostReads():
            output = verify(**call)
        assert_equal(output, expected_output)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_a_captured_call_is_replayed_with_new_inputs(method):
    """On one GPU, so a group of one rank: what is captured is the same."""
    store = distributed.HashStore()
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        sampler = sampler_of(method, VocabShard(None, 0, 3100))
        calls = [vars(random_case(4, 3, 3100, torch.bfloat16, seed=seed).to("cuda")) for seed in (0, 1)]
        for options in ({}, {"top_k": 9, "top_p": 0.7}):
            static = {name: value.clone() for name, value in calls[0].items()}
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                sampler(**static, **options)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = sampler(**static, **options)
            for name, value in calls[1].items():
                static[name].copy_(value)
            graph.replay()
            assert_equal(output, sampler(**calls[1], **options))
            assert (output.token_ids == sampler_of(method)(**calls[1], **options).token_ids).all(dim=1).sum() >= 3
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_with_nothing_finite_on_some_rank_or_infinities_on_two(temperature, ranks_of):
    ranks = ranks_of(*WHOLE_BLOCKS[1])
    logits = torch.randn(6, 2051, generator=torch.Generator().manual_seed(0))
    logits[0, 1500], logits[1, :1024], logits[2, 1024:] = NAN, -INF, NAN
    logits[3, 2050], logits[3, 1024], logits[4] = INF, INF, -INF
    logits[5] = NAN
    for options in ({}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 1}):
        call = {"logits": logits, "temperature": temperature, "seeds": 3} | options
        whole = sample(**call)
        assert whole[3:].tolist() == [1024, 0, 0]
        for got in ranks.run(sample_of, call):
            assert torch.equal(got, whole)


def test_ties_go_to_the_lowest_token_wherever_it_is(ranks_of):
    ranks = ranks_of(*WHOLE_BLOCKS[1])  # whose ranks are not in the order of the vocabulary
    logits = torch.zeros(1, 2051)
    logits[0, [5, 1030, 2049]] = 3.0
    assert [ids.item() for ids in ranks.run(sample_of, {"logits": logits, "temperature": 0})] == [5, 5, 5]
    for top_k, last in ((1, 5), (2, 1030), (3, 2049), (4, 0), (6, 2), (7, 3), (2050, 2048)):
        call = {"logits": logits, "seeds": 1, "top_k": top_k}
        whole = drafter_of("strict")(**call)
        assert whole.cutoff.item() == last
        for draft in ranks.run(partial(drafter_of, "strict"), call):
            assert_equal(draft, whole)


def test_seeds_that_are_not_given_are_the_same_on_every_rank(ranks_of):
    ranks, logits = ranks_of(*WHOLE_BLOCKS[0]), torch.zeros(64, 3, 3100)
    logits[..., [5, 2000]] = 30.0  # each draft is accepted in every other case: with other seeds, others are
    drafts = torch.full((64, 3), 5)
    padded = {"target_logits": logits, "draft_token_ids": drafts[:, 1:]}
    packed = {"target_logits": logits.flatten(0, 1), "draft_token_ids": drafts.flatten(), "num_draft_tokens": 2}
    for call in (padded, packed | {"row_starts": 3 * torch.arange(65)}):
        first, second = (verified(ranks, "probabilistic", call).token_ids for _ in range(2))
        assert not torch.equal(first, second)


@pytest.mark.skipif(not EXAMPLE.exists(), reason="not in a checkout")
def test_the_example_writes_the_text_of_one_process_on_two():
    example = import_file(EXAMPLE)
    load = example.AutoModelForCausalLM.from_pretrained
    models = {folder: load(folder, dtype=torch.float32) for folder in (example.TARGET, example.DRAFT)}
    with mock.patch.object(example, "AutoModelForCausalLM") as loader:  # which is not made for several threads
        loader.from_pretrained = lambda folder, dtype: models[folder]
        runs = [on_ranks(example.generate, [(group, "block", "def ", 12) for group in groups(size)]) for size in (1, 2)]
    texts = [text for run in runs for text, _ in run]
    assert len(texts[0]) > 12
    assert texts == [texts[0]] * 3


def import_file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------------------------
# What travels
# ---------------------------------------------------------------------------------------------------------------------


def exchanges_of(ranks: Ranks, method: str, call: dict) -> list[int]:
    """The bytes that each exchange brings to a rank."""
    sizes: list[int] = []
    gather = transports.all_gather

    def counted(tensor: Tensor, group: distributed.ProcessGroup) -> Tensor:
        gathered = gather(tensor, group)
        if group.rank() == 0:
            sizes.append(gathered.numel() * gathered.element_size())
        return gathered

    verified(ranks, method, call)  # the first call agrees on the layout
    with mock.patch.object(transports, "all_gather", counted):
        verified(ranks, method, call)
    return sizes


NUMBERS = {
    ("strict", 0.0): 1,
    ("block", 0.0): 1,
    ("strict", 0.7): 2,
    ("synthetic", 0.7): 3,
    ("probabilistic", 0.7): 3,
    ("block", 0.7): 4,
}


@pytest.mark.parametrize(("method", "temperature"), NUMBERS)
def test_the_number_of_exchanges_does_not_depend_on_the_logits(method, temperature, ranks_of):
    ranks, rounds = ranks_of(*WHOLE_BLOCKS[0]), {torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}
    for dtype, seed in ((torch.bfloat16, 0), (torch.float32, 1), (torch.float64, 2)):
        case = random_case(3, 3, 3100, dtype, seed=seed)
        for options, searches in (({}, 0), ({"min_p": 0.1}, 0), ({"top_k": 9}, 1), ({"top_k": 9, "top_p": 0.9}, 2)):
            if searches and dtype == torch.float64 and method != "strict":
                continue  # slow, and the same code
            call = vars(case) | {"temperature": temperature} | options
            extra = searches * rounds[dtype] if temperature else 0
            assert len(exchanges_of(ranks, method, call)) == NUMBERS[method, temperature] + extra
            if dtype == torch.bfloat16:
                number = min(2, NUMBERS[method, temperature])  # candidates come with the sums
                assert len(exchanges_of(ranks, method, call | {"draft_logits": None})) == number + extra
            if dtype == torch.bfloat16 and not searches:
                for of in ("processed", "raw"):
                    one_more = int(of == "raw" or temperature > 0)
                    number = NUMBERS[method, temperature] + one_more
                    assert len(exchanges_of(ranks, method, call | {"logprobs": of})) == number


def test_less_than_half_a_percent_of_the_logits_travels(ranks_of):
    vocab, batch, drafts = 151_936, 2, 3
    ranks, case = ranks_of([0, 75_776, vocab]), random_case(batch, drafts, vocab, torch.bfloat16, greedy=0)
    logits = 2 * (case.target_logits.numel() + case.draft_logits.numel())
    for method, share in {"probabilistic": 0.003, "block": 0.004, "strict": 0.0001}.items():
        assert sum(exchanges_of(ranks, method, vars(case))) < share * logits
    greedy = vars(case) | {"temperature": 0.0}
    assert exchanges_of(ranks, "strict", greedy) == [2 * 8 * batch * (drafts + 1)]  # 8 bytes of each rank for each row


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(0, 1024, 2024), (1000, 1024, 2024)], "shard: ranks 0 and 1 both hold token 1000; ranks hold rank 0 "),
        ([(1100, 924, 2024), (0, 1024, 2024)], "shard: no rank holds tokens 1024 to 1099; ranks hold rank 0 "),
        ([(0, 1024, 2024), (1024, 900, 2024)], "shard: no rank holds tokens 1924 to 2023"),
        ([(0, 1024, 2024), (1024, 1100, 2024)], "shard: rank 1 holds tokens up to 2123, beyond the vocabulary of 2024"),
        ([(0, 8, 16), (8, 9, 17)], r"vocab_size: expected the same on every rank, got 16 \(rank 0\), 17 \(rank 1\)"),
    ],
)
def test_every_rank_says_what_is_wrong_with_the_shards(shards, message):
    members = groups(len(shards))

    def call(rank: int) -> Tensor:
        start, length, vocab = shards[rank]
        return sample(torch.zeros(1, length), seeds=0, shard=VocabShard(members[rank], start, vocab))

    for error in on_ranks(call, [(rank,) for rank in range(len(shards))]):
        with pytest.raises(ValueError, match=message):
            raise error


def test_warm_up_agrees_on_the_shards_and_their_lengths_stay():
    ranks = Ranks([0, 1024, 3100])
    call = {"target_logits": torch.zeros(1, 1, 3100), "draft_token_ids": torch.zeros(1, 0, dtype=torch.int64)}
    ranks.run(lambda shard: sampler_of("strict", shard).warmup, call)
    packed = {"row_starts": torch.tensor([0, 1]), "num_draft_tokens": 0}
    call = {"target_logits": torch.zeros(1, 3100), "draft_token_ids": torch.zeros(1, dtype=torch.int64)} | packed
    ranks.run(lambda shard: sampler_of("strict", shard).warmup, call)
    with pytest.raises(ValueError, match=r"^shard: this rank holds 1024 tokens.*, got logits of 1000"):
        sample(torch.zeros(1, 1000), 0, shard=ranks.shards[0])


def test_a_shard_is_checked(ranks_of):
    shard = ranks_of(*WHOLE_BLOCKS[0]).shards[0]
    for arguments, message in [
        (("group", 0, 8), "group: expected a torch.distributed.ProcessGroup or None, got str"),
        ((None, 0, 8), "group: None is the default group"),
        ((distributed.GroupMember.NON_GROUP_MEMBER, 0, 8), "group: this process is not in it"),
        ((shard.group, 9, 8), "start: expected at most 8, got 9"),
        ((shard.group, -1, 8), "start: expected an int >= 0, got -1"),
        ((shard.group, 0, 0), "vocab_size: expected a positive int, got 0"),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            VocabShard(*arguments)
    with pytest.raises(TypeError, match=r"^shard: expected a VocabShard, got int"):
        RejectionSampler("strict", shard=0)
    with pytest.raises(TypeError, match=r"^shard: expected a VocabShard, got int"):
        sample(torch.zeros(1, 8), shard=0)
    with pytest.raises(ValueError, match=r"^draft_token_ids: expected ids in \[0, 3100\)"):
        sampler_of("strict", shard)(torch.zeros(1, 2, 1024), torch.tensor([[3100]]), seeds=0)
    with pytest.raises(ValueError, match=r"^draft_token_ids: expected ids in \[0, 3100\)"):
        starts, drafts = torch.tensor([0, 2]), torch.tensor([3100, 0])
        sampler_of("strict", shard).packed(torch.zeros(2, 1024), drafts, starts, num_draft_tokens=1)
    assert repr(shard) == "VocabShard(<rank 0 of 2>, start=0, vocab_size=3100)"
    assert repr(sampler_of("strict", shard)).endswith(f", shard={shard!r})")


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others():
    first, _ = groups(2, seconds=0.2)
    with pytest.raises(RuntimeError, match=r"[Tt]imed out|[Tt]imeout"):
        sample(torch.zeros(1, 4), seeds=0, shard=VocabShard(first, 0, 8))


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes that these tests see
# ---------------------------------------------------------------------------------------------------------------------


class Mistake(NamedTuple):
    """A mistake in one function: a piece of its source, and what stands there instead."""

    owner: Any
    name: str
    old: str
    new: str


MISTAKES = {
    "a rank takes its own ids for the vocabulary's": Mistake(
        sharded, "at_token", "token_ids - layout.blocks.start * layout.block_size", "token_ids"
    ),
    "blocks have this rank's noise": Mistake(sharded, "best_tokens", "positions, blocks + offset", "positions, blocks"),
    "tokens have this rank's noise": Mistake(
        sharded, "best_tokens", "positions, index + offset * layout.block_size", "positions, index"
    ),
    "the first rank that sends wins a tie": Mistake(sharded, "sources_of", "ids, MOST_TOKENS).amin", "ids, -1).amax"),
    "the order of ranks is taken for that of the vocabulary": Mistake(
        VocabShard, "gather", "layout.order is not None", "False"
    ),
    "weights are relative to the shard's maximum": Mistake(
        sharded, "framed", "source.row_max[..., None]", "source.logits.to(source.row_max.dtype).amax(-1, keepdim=True)"
    ),
    "an empty residual is judged by the shard": Mistake(
        sharded, "best_of", "scores.amax(dim=-1, keepdim=True)", "scores[..., :1]"
    ),
    "parts of a divided block are not added": Mistake(Layout, "whole", "self.where[1:]", "self.where[:0]"),
    "ties are kept by every rank": Mistake(cutoffs, "search", "equal[: layout.place]", "equal[:0]"),
    "a token counts as before itself": Mistake(cutoffs, "before", "values[..., :-1], (1, 0)", "values, (0, 0)"),
    "top_p is a share of all, not of what top_k keeps": Mistake(
        cutoffs, "cut", "threshold=threshold, ties=ties", "threshold=source.threshold, ties=source.ties"
    ),
    "a log-probability is what the first rank says": Mistake(
        ShardedRows, "logprobs", "token_logits.amax(dim=0)", "token_logits[0]"
    ),
    "raw log-probabilities are truncated": Mistake(
        ShardedRows, "logprobs", "=RowSampling(", "=target.sampling._replace(temperature="
    ),
    "raw log-probabilities have the temperature": Mistake(
        ShardedRows, "logprobs", "torch.ones_like(target.sampling.temperature)", "target.sampling.temperature"
    ),
}


def check_for_mistakes(ranks_of: Callable) -> None:
    """A quick check of much: aligned and divided blocks, ties, equal rows, truncation."""
    generator = torch.Generator().manual_seed(3)
    for bounds, order in (WHOLE_BLOCKS[1], DIVIDED_BLOCKS[1]):
        ranks = ranks_of(bounds, order)
        case = vars(random_case(6, 2, bounds[-1], torch.bfloat16, seed=4))
        tied = case | {"target_logits": case["target_logits"].round(), "temperature": torch.tensor([0, 1.0] * 3)}
        equal = case | {"draft_logits": case["target_logits"][:, :2], "draft_token_ids": torch.randint(
            bounds[-1], (6, 2), generator=generator)}  # fmt: skip
        for call in (case, tied, equal, tied | {"top_k": 11, "top_p": 0.7}):
            assert_equal(verified(ranks, "block", call), sampler_of("block")(**call))
        for of in ("processed", "raw") if bounds == WHOLE_BLOCKS[1][0] else ():
            call = case | {"top_k": 11, "logprobs": of}
            assert_equal(verified(ranks, "block", call), sampler_of("block")(**call))


def test_the_check_for_mistakes_passes_without_one(ranks_of):
    check_for_mistakes(ranks_of)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake, ranks_of):
    owner, name, old, new = MISTAKES[mistake]
    function = getattr(owner, name)
    source = inspect.cleandoc("\n" + inspect.getsource(function))
    assert source.count(old) == 1, "the snippet is not there"
    scope: dict = {}
    exec(source.replace(old, new), function.__globals__, scope)
    with mock.patch.object(owner, name, scope[name]), pytest.raises(AssertionError):
        for module in (sharded, cutoffs):  # where it has been imported, too
            if owner is not module and not isinstance(owner, type) and hasattr(module, name):
                mock.patch.object(module, name, scope[name]).start()
        try:
            check_for_mistakes(ranks_of)
        finally:
            mock.patch.stopall()


def test_distributed_tensors_are_refused_by_name():
    class Distributed(Tensor):
        def to_local(self):
            return self

    logits, ids = torch.zeros(1, 2, 4).as_subclass(Distributed), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(
        TypeError, match=r"^target_logits: expected a plain tensor, got a DTensor; pass its to_local\(\)"
    ):
        RejectionSampler("strict")(logits, ids, seeds=0)
