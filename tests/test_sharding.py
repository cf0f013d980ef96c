"""Vocabulary shards: every rank returns the same bits as one process with the whole logits, for all options."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from specdecode import Adjustments, RejectionSampler, Sampling, VocabShard, eager, sample, sharding
from tests.conftest import HAS_TRITON
from tests.support.calls import METHODS
from tests.support.differential import assert_same, case, like_a_device
from tests.support.packing import packed_rows, sampler_of
from tests.support.ranks import Ranks, groups, made_once, on_ranks
from tests.support.sharded_calls import columns, random_call, verified

NAN, INF = float("nan"), float("inf")
EXAMPLE = Path(__file__).parent.parent / "docs" / "use" / "tensor_parallel.py"
# Bounds of the parts of the vocabulary, and the part that each rank holds; None: part r on rank r.
TWO, THREE = ([0, 1100, 2051], None), ([0, 300, 301, 900], [1, 2, 0])
EMPTY, EVEN = ([0, 7, 7, 2050, 3100], [0, 3, 1, 2]), ([0, 1024, 2048], None)


@pytest.fixture(scope="module")
def ranks_of():
    return made_once()


def of_ranks(ranks: Ranks, method: str, call: dict, whole_drafts: bool = False) -> Any:
    """Return the output that all ranks return; fail if they differ."""
    first, *others = ranks.run(lambda shard: partial(verify, sampler_of(method, shard)), call, whole_drafts)
    for other in others:
        assert_same(other, first)
    return first


def verify(sampler: RejectionSampler, **call: Any) -> Any:
    return verified(sampler, call)


# ---------------------------------------------------------------------------------------------------------------------
# Every rank returns what one process does
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [TWO, THREE, EMPTY, EVEN], ids=str)
def test_every_rank_returns_the_bits_of_one_process(bounds, ranks_of):
    """Calls of every method and option, padded and packed, with few or many requests; draft rows whole or columns."""
    ranks = ranks_of(*bounds)
    for seed in range(40):
        method, call = random_call(seed, ranks.vocab_size)
        assert_same(of_ranks(ranks, method, call, seed % 3 == 0), verified(sampler_of(method), call))


def test_the_random_calls_cover_every_option():
    calls = [random_call(seed, 900)[1] for seed in range(40)]
    given = {name for call in calls for name, value in call.items() if value is not None and value is not False}
    adjustments = {
        name
        for call in calls
        if call["adjustments"]
        for name, value in call["adjustments"]._asdict().items()
        if value is not None
    }
    assert {"row_starts", "slots", "row_positions", "positions", "top_k", "top_p", "min_p", "logprobs"} <= given
    assert {
        "top_logprobs",
        "kept_sets",
        "draft_logsumexp",
        "draft_cutoff",
        "draft_sampling",
        "draft_vocab_ids",
    } <= given
    assert adjustments == set(Adjustments._fields)
    assert {type(call["seeds"]) for call in calls} == {Tensor, int}
    assert {type(call["temperature"]) for call in calls} == {Tensor, float}


@pytest.mark.parametrize("bounds", [TWO, EMPTY], ids=str)
def test_ranks_draw_the_tokens_of_one_process(bounds, ranks_of):
    """Drafts and plain samples, with their logsumexp and cutoff."""
    ranks = ranks_of(*bounds)
    for requests in (0, 1, 2, 7):
        logits = case(max(requests, 1), 0, ranks.vocab_size, torch.bfloat16).target_logits[:requests, 0]
        positions = torch.arange(requests)
        for options in ({}, {"top_p": 0.9}, {"temperature": 0.0, "top_k": 3}):
            call = {"logits": logits, "seeds": 2**63 - 3, "positions": positions} | options
            expected = sampler_of("block").draft(**call, offset=2)
            for got in ranks.run(lambda shard: partial(sampler_of("block", shard).draft, offset=2), call):
                assert_same(got, expected)
            for got in ranks.run(lambda shard: partial(sample, shard=shard), call):
                assert torch.equal(got, sample(**call))


def test_one_rank_may_hold_all_tokens_and_draft_rows_may_be_whole_on_the_others():
    ranks = Ranks([0, 0, 900])
    for seed in (1, 5):
        method, call = random_call(seed, 900)
        for whole in (False, True):
            assert_same(of_ranks(ranks, method, call, whole), verified(sampler_of(method), call))


def test_each_rank_verifies_its_share_of_the_requests_and_reads_whole_rows():
    """A share is ceil(requests / ranks); the last ranks have fewer requests, or none."""
    ranks, seen, verify_rows = Ranks(*THREE), [], eager.verify

    def noted(method: str, batch: Any, schedule: Any) -> Any:
        seen.append((tuple(batch.target_logits.shape), tuple(batch.draft_logits.shape)))
        return verify_rows(method, batch, schedule)

    for requests, shares in ((7, [3, 3, 1]), (2, [1, 1, 0]), (6, [2, 2, 2])):
        seen.clear()
        with mock.patch.object(eager, "verify", noted):
            ranks.run(lambda shard: sampler_of("block", shard), vars(case(requests, 2, 900, torch.float32)))
        assert sorted(seen) == sorted(((share, 3, 900), (share, 2, 900)) for share in shares)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of infinities in the interpreter
def test_what_a_backend_refuses_is_refused_on_every_rank(ranks_of):
    """A rank without requests refuses too.

    The backend refuses drafts of another temperature tensor. A packed call with a shard is not refused, though its tensors
    are copied when it is padded.
    """
    ranks, batch = ranks_of(*THREE), case(2, 1, 900, torch.float32)
    call = vars(batch) | {"top_k": 5, "draft_sampling": Sampling(batch.temperature.clone(), top_k=5)}
    errors = on_ranks(
        lambda shard, start, end: sampler_of("probabilistic", shard, "triton")(**columns(call, start, end, 900)),
        [(shard, *part) for shard, part in zip(ranks.shards, ranks.parts)],
    )
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(ValueError, match=r"^draft_sampling: 'triton' takes drafts of the target's temperature only"):
        raise errors[2]
    packed = packed_rows(batch, [1, 1]) | {"draft_logits": batch.draft_logits, "temperature": batch.temperature}
    same = {"draft_sampling": Sampling(batch.temperature[:], top_k=5), "top_k": 5, "seeds": batch.seeds}
    one = made_once()([0, 900]).shards[0]
    output = sampler_of("probabilistic", one, "triton").packed(**packed, **same)
    assert_same(output, sampler_of("probabilistic", backend="triton").packed(**packed, **same))


ATEN = torch.ops.aten
READS = {ATEN._local_scalar_dense, ATEN.nonzero, ATEN.masked_select, ATEN.equal, ATEN.is_nonzero}


class NoHostReads(TorchDispatchMode):
    """Fails on operations that make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in READS, func
        if func.overloadpacket in (ATEN.index, ATEN.index_put, ATEN.index_put_):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), func
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_on_the_host(ranks_of, monkeypatch):
    """Calls after the first one, in which ranks exchange their bounds."""
    ranks = ranks_of(*THREE)
    calls = [random_call(seed, 900) for seed in range(12)]
    expected = [of_ranks(ranks, *call) for call in calls]
    monkeypatch.setattr(Tensor, "tolist", None)  # no operation that the mode below would see

    def rank(index: int) -> list[Any]:
        mine = [(method, columns(call, *ranks.parts[index], 900)) for method, call in calls]
        with NoHostReads():
            return [verified(sampler_of(method, ranks.shards[index], "eager"), call) for method, call in mine]

    with like_a_device():
        results = on_ranks(rank, [(index,) for index in range(3)])
    for outputs in results:
        assert not isinstance(outputs, Exception), outputs
        for got, of_one in zip(outputs, expected):
            assert_same(got, of_one)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_a_captured_call_is_replayed_with_new_inputs(method):
    """On one GPU, with a group of one rank, which captures the same operations as several ranks."""
    store = distributed.HashStore()
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        sampler = sampler_of(method, VocabShard(None, 0, 3100))
        calls = [vars(case(4, 3, 3100, torch.bfloat16, seed=seed).to("cuda")) for seed in (0, 1)]
        for options in ({}, {"top_k": 9, "top_p": 0.7}):
            static = {name: value.clone() for name, value in calls[0].items()}
            sampler.warmup(**static, **options)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = sampler(**static, **options)
            for name, value in calls[1].items():
                static[name].copy_(value)
            graph.replay()
            assert_same(output, sampler_of(method)(**calls[1], **options))
    finally:
        distributed.destroy_process_group()


def test_seeds_that_are_not_given_differ_from_call_to_call_and_agree_on_all_ranks(ranks_of):
    ranks, logits = ranks_of(*TWO), torch.zeros(64, 3, 2051)
    # Each draft is accepted with probability 1/2, so different seeds accept different drafts.
    logits[..., [5, 2000]] = 30.0
    call = {"target_logits": logits, "draft_token_ids": torch.full((64, 2), 5)}
    first, second = (of_ranks(ranks, "probabilistic", call).token_ids for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.skipif(not EXAMPLE.exists(), reason="not in a checkout")
def test_the_example_writes_the_text_of_one_process_on_two():
    example = import_file(EXAMPLE)
    load = example.AutoModelForCausalLM.from_pretrained
    models = {folder: load(folder, dtype=torch.float32) for folder in (example.TARGET, example.DRAFT)}
    with mock.patch.object(example, "AutoModelForCausalLM") as loader:  # not thread-safe
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


@pytest.mark.parametrize("method", METHODS)
def test_each_row_is_sent_once_to_one_rank_and_results_once_to_all(method):
    ranks = Ranks([0, 1024, 3100])
    call = vars(case(3, 2, 3100, torch.bfloat16))
    of_ranks(ranks, method, call)  # the first call exchanges bounds
    sent: list[int] = []  # bytes, on the first rank
    exchange, gather = distributed.all_to_all_single, sharding.all_gather

    def counted(received: Tensor, *arguments: Any, group: Any, **options: Any) -> Any:
        sent.append(received.numel() * 2) if group.rank() == 0 else None
        return exchange(received, *arguments, group=group, **options)

    def counted_gather(tensor: Tensor, group: Any) -> Tensor:
        sent.append(tensor.numel() * tensor.element_size()) if group.rank() == 0 else None
        return gather(tensor, group)

    with (
        mock.patch.object(distributed, "all_to_all_single", counted),
        mock.patch.object(sharding, "all_gather", counted_gather),
    ):
        of_ranks(ranks, method, call)
    row, share = 3100 * 2, 2  # bytes of a bfloat16 row; the first rank's requests
    results = share * (3 * 8 + 3 * 4)  # three int64 tokens, and three fields of 4 bytes
    target_rows, draft_rows = share * 3 * row, share * 2 * row
    assert sent == [target_rows, *([draft_rows] if method != "strict" else []), results]


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


def test_whole_target_rows_and_other_lengths_than_before_are_refused():
    ranks, drafts = Ranks([0, 1024, 3100]), torch.zeros(2, 0, dtype=torch.int64)
    rows = torch.zeros(2, 1, 3100)
    for error in on_ranks(lambda shard: sampler_of("strict", shard)(rows, drafts), [(one,) for one in ranks.shards]):
        with pytest.raises(
            ValueError, match=r"^shard: ranks 0 and 1 both hold token 1024; ranks hold rank 0 \[0, 3100\)"
        ):
            raise error
    packed = {"row_starts": torch.tensor([0, 1, 2]), "num_draft_tokens": 0}
    call = {"target_logits": rows[:, 0], "draft_token_ids": torch.zeros(2, dtype=torch.int64)} | packed
    ranks.run(lambda shard: sampler_of("strict", shard).warmup, call)
    with pytest.raises(ValueError, match=r"^shard: expected logits of 1024 tokens, as in its first call, got 1000"):
        sample(torch.zeros(1, 1000), 0, shard=ranks.shards[0])


def test_a_shard_is_checked(ranks_of):
    shard = ranks_of(*TWO).shards[0]
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
    with pytest.raises(ValueError, match=r"^draft_token_ids: expected ids in \[0, 2051\)"):
        sampler_of("strict", shard)(torch.zeros(1, 2, 1100), torch.tensor([[2051]]), seeds=0)
    with pytest.raises(ValueError, match=r"^draft_logits: expected shape \[1, 1, 1100\], got \[1, 1, 9\]"):
        sampler_of("block", shard)(torch.zeros(1, 2, 1100), torch.tensor([[0]]), torch.zeros(1, 1, 9), seeds=0)
    mask = torch.zeros(1, 1, 35, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^adjustments.allowed_mask: expected shape \[1, 1, 65\], got \[1, 1, 35\]"):
        sample(torch.zeros(1, 1100), shard=shard, adjustments=Adjustments(allowed_mask=mask))
    assert repr(shard) == "VocabShard(<rank 0 of 2>, start=0, vocab_size=2051)"
    assert repr(sampler_of("strict", shard)).endswith(f", shard={shard!r})")


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others():
    first, _ = groups(2, seconds=0.2)
    with pytest.raises(RuntimeError, match=r"[Tt]imed out|[Tt]imeout"):
        sample(torch.zeros(1, 4), seeds=0, shard=VocabShard(first, 0, 8))


def test_a_rank_that_fails_in_a_step_ends_the_wait_of_the_others():
    """In both exchanges of a step: rows, and results."""
    call = vars(case(2, 1, 2051, torch.float32))
    for method_called in ("own_rows", "gather"):
        members = groups(2, seconds=0.5)
        shards = [VocabShard(group, start, 2051) for group, start in zip(members, (0, 1100))]

        def rank(shard: VocabShard, start: int, end: int, fails: bool, name: str = method_called) -> Any:
            mine, sampler = columns(call, start, end, 2051), sampler_of("probabilistic", shard)
            sampler(**mine)
            if fails:
                setattr(shard, name, None)  # not callable
            return sampler(**mine)

        waiting, failed = on_ranks(rank, [(shards[0], 0, 1100, False), (shards[1], 1100, 2051, True)])
        assert isinstance(failed, TypeError)
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|[Tt]imeout"):
            raise waiting


def test_distributed_tensors_are_refused_by_name():
    class Distributed(Tensor):
        def to_local(self):
            return self

    logits, ids = torch.zeros(1, 2, 4).as_subclass(Distributed), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(
        TypeError, match=r"^target_logits: expected a plain tensor, got a DTensor; pass its to_local\(\)"
    ):
        RejectionSampler("strict")(logits, ids, seeds=0)
