"""Vocabulary shards on the eager backend: every rank gets the bits that one process gets from the whole logits."""

import importlib.util
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from specdecode import RejectionSampler, Sampling, VocabShard, sample, transports
from tests.support.differential import case as random_case
from tests.support.differential import like_a_device
from tests.support.hostile import FLOATS, make_call, pick
from tests.support.packing import fed_positions, in_slots, numbers_of, packed_rows, with_counts
from tests.support.ranks import Ranks, groups, made_once, on_ranks
from tests.support.truncated import SCHEDULE

NAN, INF = float("nan"), float("inf")
EXAMPLE = Path(__file__).parent.parent / "docs" / "use" / "tensor_parallel.py"
METHODS = ("probabilistic", "strict", "block", "synthetic")
WHOLE_BLOCKS = [([0, 1024, 3100], None), ([0, 1024, 2048, 2051], [2, 0, 1]), ([0, 0, 2048, 2048, 2500], [3, 2, 1, 0])]
DIVIDED_BLOCKS = [([0, 1100, 2051], None), ([0, 300, 301, 900], [1, 2, 0]), ([0, 7, 7, 2050, 3100], [0, 3, 1, 2])]
BOUNDS = WHOLE_BLOCKS + DIVIDED_BLOCKS


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


@pytest.mark.parametrize("bounds", range(len(BOUNDS)))
def test_every_rank_returns_the_bits_of_one_process(bounds, ranks_of):
    ranks = ranks_of(*BOUNDS[bounds])
    for seed in range(100 * bounds, 100 * bounds + 14):
        method, call, drawn = random_call(seed, ranks.vocab_size)
        assert_equal(verified(ranks, method, call), sampler_of(method)(**call))
        if drawn:
            whole = sampler_of(method).draft(**drawn[0])
            for got in ranks.run(partial(drafter_of, method), drawn[0]):
                assert_equal(got, whole)


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


def exchanges_of(ranks: Ranks, make: Callable, call: dict) -> list[int]:
    """The bytes that each exchange brings to a rank, of a call of what `make` returns for its shard."""
    sizes: list[int] = []
    gather = transports.all_gather

    def counted(tensor: Tensor, group: distributed.ProcessGroup) -> Tensor:
        gathered = gather(tensor, group)
        if group.rank() == 0:
            sizes.append(gathered.numel() * gathered.element_size())
        return gathered

    ranks.run(make, call)  # the first call agrees on the layout
    with mock.patch.object(transports, "all_gather", counted):
        ranks.run(make, call)
    return sizes


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 9, "logprobs": "raw"}], ids=str)
def test_rows_that_a_method_reads_are_gathered_once_and_nothing_else(options, ranks_of):
    ranks = ranks_of(*WHOLE_BLOCKS[0])  # of 1,024 and of 2,076 tokens
    row = len(ranks.shards) * 2076 * 2
    batch = random_case(3, 2, 3100, torch.bfloat16)
    call = vars(batch) | options
    assert exchanges_of(ranks, partial(sampler_of, "block"), call) == [3 * 3 * row, 3 * 2 * row]
    assert exchanges_of(ranks, partial(sampler_of, "block"), call | {"draft_logits": None}) == [3 * 3 * row]
    assert exchanges_of(ranks, partial(sampler_of, "strict"), call) == [3 * 3 * row]
    counts, slots = [2, 0, 1], torch.tensor([4, 0, 7])
    packed = packed_rows(with_counts(batch, counts), counts) | options | {"slots": slots, "seeds": 0}
    packed["draft_logits"] = in_slots(batch.draft_logits, slots, 9)  # of which those of three are gathered
    assert exchanges_of(ranks, partial(verifier_of, "block", packed), packed) == [3 * 3 * row, 3 * 2 * row]
    draw = {"logits": batch.draft_logits[:, 0], "seeds": 0} | {"top_k": options.get("top_k")}
    assert exchanges_of(ranks, partial(drafter_of, "block"), draw) == exchanges_of(ranks, sample_of, draw) == [3 * row]


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


def test_distributed_tensors_are_refused_by_name():
    class Distributed(Tensor):
        def to_local(self):
            return self

    logits, ids = torch.zeros(1, 2, 4).as_subclass(Distributed), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(
        TypeError, match=r"^target_logits: expected a plain tensor, got a DTensor; pass its to_local\(\)"
    ):
        RejectionSampler("strict")(logits, ids, seeds=0)
