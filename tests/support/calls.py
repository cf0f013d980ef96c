"""Calls of the sampler, and conditions of every output."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from specdecode import AcceptanceSchedule, RejectionSampler, SamplerOutput
from specdecode.noise import BLOCK_SIZE
from specdecode.sampler import Method
from tests.conftest import HAS_TRITON

if HAS_TRITON:
    from specdecode.kernels.methods import METHODS as WITH_KERNELS

ALL_METHODS = list(get_args(Method))
EAGER_ALONE = [method for method in ALL_METHODS if HAS_TRITON and method not in WITH_KERNELS]
METHODS = [method for method in ALL_METHODS if method not in EAGER_ALONE]
"""The methods of both backends."""
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
INT64 = torch.iinfo(torch.int64)
NAN, INF = math.nan, math.inf

each_method = pytest.mark.parametrize("method", METHODS)
by_ratio = pytest.mark.parametrize("method", ["probabilistic", "block"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def make(method: str, place, rates=(0.9, 0.6, 0.5, 0.4, 0.3)) -> RejectionSampler:
    """Return a sampler of the method; `rates` are the joint rates of its schedule, if any."""
    schedule = AcceptanceSchedule.from_rates(rates) if method == "synthetic" else None
    return RejectionSampler(method, backend=place[0], schedule=schedule)


def plain_sample(place):
    """Return the equivalent of `sample` on a backend: the drafts of "strict"."""
    return lambda *arguments: RejectionSampler("strict", backend=place[0]).draft(*arguments).token_ids


def make_call(place, batch=12, drafts=3, vocab=BLOCK_SIZE + 77, dtype=torch.float32, seed=0) -> dict:
    """Return the arguments of a call with every outcome: ragged, likely drafts, some requests greedy."""
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
    """Return the same rows for every request, [requests, len(logits), vocab]."""
    return torch.tensor(logits, dtype=dtype, device=place[1]).expand(requests, -1, -1)


def ids(place, *token_ids, requests: int = 1) -> Tensor:
    """Return the same drafts for every request, [requests, len(token_ids)]."""
    return torch.tensor(token_ids, dtype=torch.int64, device=place[1]).expand(requests, -1)


def assert_well_formed(output: SamplerOutput, call: dict) -> None:
    """Check the form of an output: accepted drafts, one more token, then -1; dtypes and shapes of the contract."""
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


SAMPLING_NAMES = ("temperature", "seeds", "positions")
