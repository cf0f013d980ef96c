"""Rows of which each rank has a part: truncated where they lie, or gathered where kernels need them whole.

As in test_sharded.py every rank is to return the bits of one GPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from specdecode import Sampling, VocabShard, kernels
from specdecode.kernels.sharding import cut as shard_cut
from tests.conftest import ON_GPU
from tests.support.differential import case, like_a_device
from tests.support.kernels import DEVICE, small
from tests.support.packing import in_slots, packed_rows, with_counts
from tests.support.ranks import Ranks
from tests.support.sharded_calls import (
    EMPTY,
    INF,
    LARGE,
    NAN,
    THREE,
    TWO,
    UNEVEN,
    arguments,
    assert_ranks_agree,
    packed_of,
    sampler_of,
)

pytestmark = pytest.mark.usefixtures("turns")

TRUNCATED = {  # kind of call: what truncates rows, log-probabilities, whether the batch is large
    "probabilistic": ({"top_p": 0.9, "top_k": 20}, None, False),
    "given logsumexp": ({"top_p": 0.99, "draft_sampling": Sampling(0.8, top_p=0.5)}, "processed", False),
    "strict": ({"min_p": 0.05}, "processed", False),
    "synthetic": ({"top_p": 0.5}, "raw", True),
    "block": ({"top_k": 5, "min_p": 0.1}, None, False),
    "large": ({"top_p": 0.9}, "processed", True),
    "drafted otherwise": ({"top_p": 0.9, "draft_sampling": Sampling(0.8, top_k=2, top_p=0.99)}, None, False),
}


@pytest.mark.parametrize("kind", TRUNCATED)
@pytest.mark.parametrize("bounds", small(None, UNEVEN, EMPTY, LARGE))
@pytest.mark.usefixtures("shared")
def test_truncated_rows_are_cut_on_every_rank_as_on_one_gpu(kind, bounds, monkeypatch):
    """Some of them are flat, so that one rank has to gather them; no exchange is a collective."""
    called = counted_calls(shard_cut, ["store_kept_candidates", "send_part", "truncate_row"], monkeypatch)
    options, logprobs, large = TRUNCATED[kind]
    ranks = Ranks(*(bounds or (EMPTY if kind == "strict" else TWO)))
    requests, drafts = (64, 3) if ON_GPU else (2 + (kind == "given logsumexp"), 1)
    batch = case(requests, drafts, ranks.vocab_size, torch.bfloat16, seed=11, greedy=0.2)
    for logits in (batch.target_logits, batch.draft_logits):
        logits[::3], logits[1::3] = 4 * logits[::3], logits[1::3] / 8  # few tokens are kept, or most
    of_rows = "probabilistic" if kind in ("large", "drafted otherwise") else kind
    method, call = arguments(of_rows, batch.to(DEVICE))
    if kind in ("given logsumexp", "drafted otherwise"):
        call["temperature"] = 0.8
    if kind == "given logsumexp":
        draft = sampler_of(method).draft
        steps = enumerate(call["draft_logits"].unbind(1))
        each = [draft(logits, 0.8, seeds=call["seeds"], offset=i, top_p=0.5) for i, logits in steps]
        call["draft_logsumexp"] = torch.stack([one.logsumexp for one in each], 1)
        call["draft_cutoff"] = torch.stack([one.cutoff for one in each], 1)
        order = call["draft_logits"].sort(descending=True, stable=True).indices
        place = (order == call["draft_cutoff"][..., None]).int().argmax(-1, keepdim=True)
        call["draft_token_ids"] = order.gather(-1, place + 1).squeeze(-1)  # the first that is not kept of q
        call["draft_logsumexp"][2, 0], call["draft_cutoff"][2, 0] = NAN, -1  # neither is used
    call |= options | {"logprobs": logprobs}
    with mock.patch.object(kernels, "verify", partial(kernels.verify, large=large)):
        _, gathered = assert_ranks_agree(ranks, partial(sampler_of, method), call)
    assert gathered == []
    if not ON_GPU:
        cut, sent, gathered_rows = (
            called.count(name) for name in ("store_kept_candidates", "send_part", "truncate_row")
        )
        assert sent == len(ranks.parts) * gathered_rows
        assert cut > 0
        assert sent > 0 or kind in ("block", "synthetic")
    for transport in [shard.transport_on(call["target_logits"].device) for shard in ranks.shards]:
        assert transport.seen == {"even"}
        assert transport.not_heard() == set()


@pytest.mark.parametrize("way", ["packed", "draft", "hostile", "other strides", "other dtype"])
@pytest.mark.usefixtures("shared")
def test_truncated_calls_of_all_kinds_give_the_bits_of_one_gpu(way):
    counts, slots = [2, 0, 1], torch.tensor([3, 0, 4])
    ranks, options = Ranks(*(EMPTY if way == "draft" else TWO)), {"top_p": 0.9, "min_p": 0.01}
    size = {"packed": (3, 2), "other strides": (1, 2)}.get(way, (3, 1))
    batch = case(*size, ranks.vocab_size, torch.bfloat16, seed=7, greedy=0)
    target, draft = batch.target_logits, batch.draft_logits
    if way == "hostile":
        target[0, 0, [5, 1500]], target[0, 1, 3:] = NAN, -INF
        target[1, :, [1030, 7]], draft[1, :, [1031, 8]] = INF, INF
        target[2, :, 1024:], draft[2, :, :1024] = NAN, 0.0  # all tokens of a rank are alike
    call: dict = vars(batch) | options | {"logprobs": "processed"}
    make: Callable = partial(sampler_of, "probabilistic")
    if way == "packed":
        by_slot = {name: in_slots(getattr(batch, name), slots, 5) for name in ("draft_logits", "temperature", "seeds")}
        call = (
            packed_rows(with_counts(batch, counts), counts) | by_slot | {"slots": slots, "positions": batch.positions}
        )
        call |= {
            "top_p": in_slots(torch.tensor([0.5, 0.9, 1.0]), slots, 5),
            "top_k": in_slots(torch.tensor([9, 0, 40]), slots, 5),
        }
        call["row_starts"][-1] += 99
        make = partial(packed_of, "probabilistic")
    elif way == "draft":
        target[2, 0] = -INF
        call = {"logits": target[:, 0], "temperature": torch.tensor([0.5, 0.0, 1.0]), "seeds": batch.seeds} | options
        make = lambda shard=None: sampler_of("strict", shard).draft  # noqa: E731
    elif way == "other strides":
        make = with_apart_draft_tokens
        call |= {"top_k": 3, "draft_token_ids": draft.topk(3).indices[..., 2]}  # the last that is kept of q
    elif way == "other dtype":
        call["draft_logits"] = draft.to(torch.float16)
    with like_a_device():
        _, gathered = assert_ranks_agree(ranks, make, call)
    assert (gathered == []) == (way != "other dtype")


def with_apart_draft_tokens(shard: VocabShard | None = None) -> Callable:
    """A sampler that is given draft rows of which neighbouring tokens are not neighbours in memory."""

    def call(*, draft_logits: Tensor, **others: Any) -> Any:
        apart_tokens = draft_logits.transpose(1, 2).contiguous().transpose(1, 2)
        return sampler_of("probabilistic", shard)(draft_logits=apart_tokens, **others)

    return call


@pytest.mark.usefixtures("shared")
def test_lists_of_candidates_may_be_full_or_too_long_on_some_ranks():
    """Their order is that of the vocabulary, on which the last bits of sums depend."""
    ranks, generator = Ranks(*THREE), torch.Generator().manual_seed(1)
    logits = torch.full((5, 2064), -9.0)
    logits[0, 100:228] = 10.0  # as many as are compared
    logits[1, 0:200], logits[1, 1500:1503] = 10.0, 10.0
    logits[2, 924:1124] = 10.0  # too many of two ranks, neither of which has too many
    logits[3, 2048:], logits[3, 5] = 10.0, 10.2
    logits[4, torch.randperm(2064, generator=generator)[:120]] = 10 + 0.6 * torch.rand(120, generator=generator)
    call = {"logits": logits, "temperature": 1.0, "seeds": torch.arange(5), "min_p": 0.5}
    draft, gathered = assert_ranks_agree(ranks, lambda shard=None: sampler_of("strict", shard).draft, call)
    assert draft.cutoff.tolist()[:4] == [227, 1502, 1123, 2063]
    assert gathered == []


def counted_calls(module: Any, names: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the names of functions when they are called, in the interpreter only."""
    called: list[str] = []
    for name in [] if ON_GPU else names:
        function = getattr(module, name)

        def noted(*arguments: Any, name: str = name, function: Callable = function) -> Any:
            called.append(name)
            return function(*arguments)

        monkeypatch.setattr(module, name, noted)
    return called


DIVIDED = ([0, 1030, 1030, 2065], [2, 0, 1])  # shards that start within a block, one of them empty


@pytest.mark.parametrize(
    ("kind", "bounds", "options"),
    [
        ("probabilistic", TWO, {"top_p": 0.9, "top_k": 50}),
        ("strict", DIVIDED, {"min_p": 0.05, "logprobs": "raw"}),
        ("given logsumexp", DIVIDED, {}),
        ("block", DIVIDED, {}),
    ],
)
def test_rows_that_are_truncated_or_divided_within_a_block_are_gathered(kind, bounds, options, ranks_of):
    ranks = ranks_of(*bounds)
    batch = case(64 if ON_GPU else 2, 2, ranks.vocab_size, torch.bfloat16, seed=8).to(DEVICE)
    method, call = arguments(kind, batch)
    if kind == "strict":
        call["draft_logits"] = batch.draft_logits
    _, sizes = assert_ranks_agree(ranks, partial(sampler_of, method), call | options)
    longest = max(end - start for start, end in ranks.parts)
    rows = [2, 3] if kind != "strict" else [3]  # of a request; strict asks for no draft rows
    assert sorted(sizes) == [len(ranks.parts) * len(batch.seeds) * each * longest * 2 for each in rows]


def test_of_packed_rows_those_are_gathered_that_requests_have(ranks_of):
    ranks, counts, slots = ranks_of(*TWO), [2, 0, 1], torch.tensor([9, 0, 4])
    batch = case(3, 2, 2064, torch.bfloat16, seed=9)
    options = {name: getattr(batch, name) for name in ("draft_logits", "temperature", "seeds")}
    by_slot = {name: in_slots(value, slots, 20) for name, value in options.items()}
    call = packed_rows(with_counts(batch, counts), counts) | by_slot | {"slots": slots, "top_p": 0.9}
    call |= {"logprobs": "processed"}
    call["row_starts"][-1] += 99
    call["target_logits"][0] = batch.target_logits[0, 0]  # sound, and of nobody
    with like_a_device():
        output, sizes = assert_ranks_agree(ranks, partial(packed_of, "probabilistic"), call)
    assert output.invalid.tolist() == [False, False, True]
    assert sum(sizes) == 2 * (3 * 3 + 3 * 2) * 1040 * 2


@pytest.mark.parametrize(("bounds", "options"), [(TWO, {"top_k": 5}), (DIVIDED, {})])
def test_rows_to_sample_from_are_gathered(bounds, options, ranks_of):
    ranks = ranks_of(*bounds)
    batch = case(3, 0, ranks.vocab_size, torch.bfloat16, seed=3)
    call = {"logits": batch.target_logits[:, 0], "temperature": batch.temperature, "seeds": batch.seeds} | options
    longest = max(end - start for start, end in ranks.parts)
    _, sizes = assert_ranks_agree(ranks, lambda shard=None: sampler_of("probabilistic", shard).draft, call)
    assert sizes == [len(ranks.parts) * 3 * longest * 2]
    nothing = {name: value[:0] if isinstance(value, Tensor) else value for name, value in call.items()}
    _, sizes = assert_ranks_agree(ranks, lambda shard=None: sampler_of("strict", shard).draft, nothing)
    assert sizes == []


@pytest.mark.parametrize(("bounds", "options"), [(TWO, {"top_p": 0.9}), (DIVIDED, {}), (TWO, {})])
def test_a_warmup_takes_the_ways_of_calls_whose_rows_are_gathered(bounds, options, ranks_of):
    """All three of one GPU, where shards have two."""
    ranks, taken = ranks_of(*bounds), set()

    def note(method: Any, outputs: dict, tensors: dict, numbers: dict, batch: Any, domains: Any, *way: bool) -> None:
        taken.update([(batch.shard is None, *way)] if way else [])

    call = vars(case(1, 1, ranks.vocab_size, torch.bfloat16).to(DEVICE)) | options
    with mock.patch.object(kernels.call, "run_step", note):
        ranks.run(lambda shard: sampler_of("block", shard).warmup, call)
    gathered = {(True, False, False), (True, False, True), (True, True, False)}
    assert taken == (gathered if bounds is DIVIDED or options else {(False, False, False), (False, True, False)})
