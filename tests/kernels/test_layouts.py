"""Rows may have any layout: strides, dtypes, offsets beyond 2^31."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.conftest import ON_GPU
from tests.support.differential import FLOAT32_BAND, assert_same_tokens, case
from tests.support.kernels import (
    DEVICE,
    assert_same,
    expected,
    needs_gpu,
    sliced,
    strided,
    verify,
)


def transposed(logits: Tensor) -> Tensor:
    """The same rows, the offsets outermost."""
    return logits.transpose(0, 1).contiguous().transpose(0, 1)


def column_major(logits: Tensor) -> Tensor:
    """The same rows, tokens outermost."""
    return logits.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def negated_later(logits: Tensor) -> Tensor:
    """The same rows, of which PyTorch holds the negatives."""
    return torch._neg_view(-logits)


LAYOUTS = [sliced, strided, transposed, column_major, negated_later]


if ON_GPU:
    ANY_WAY = list(itertools.product(LAYOUTS, ["probabilistic", "strict", "synthetic", "block"], [1040, 1025]))
else:
    ANY_WAY = list(
        zip(LAYOUTS, ["probabilistic", "block", "strict", "probabilistic", "strict"], [1040, 1040, 1025, 1025, 1040])
    )


@pytest.mark.parametrize(("layout", "kind", "vocab"), ANY_WAY)
def test_rows_may_lie_in_any_way(layout, kind, vocab):
    batch = case(30 if ON_GPU else 2, 2, vocab, torch.float32, greedy=0, seed=5).to(DEVICE)
    elsewhere = replace(
        batch,
        target_logits=layout(batch.target_logits),
        draft_logits=layout(batch.draft_logits),
        draft_token_ids=batch.draft_token_ids.to(torch.int32).T.contiguous().T,
        seeds=strided(batch.seeds),
        positions=strided(batch.positions),
        temperature=strided(batch.temperature),
    )
    assert_same(verify(kind, elsewhere), verify(kind, batch))


@pytest.mark.parametrize(
    ("kind", "target", "draft"),
    [
        ("block", torch.bfloat16, torch.float32),
        ("probabilistic", torch.float64, torch.bfloat16),
        *(
            itertools.product(("block", "probabilistic"), (torch.float16,), (torch.float32, torch.float64))
            if ON_GPU
            else ()
        ),
    ],
)
def test_target_and_draft_may_differ_in_dtype_and_layout(kind, target, draft):
    batch = case(30 if ON_GPU else 3, 1, 1040, torch.bfloat16, seed=8).to(DEVICE)  # whose values every dtype holds
    whole = verify(kind, batch)
    cast = replace(batch, target_logits=batch.target_logits.to(target), draft_logits=batch.draft_logits.to(draft))
    assert_same_tokens(verify(kind, cast).token_ids, expected(kind, batch), FLOAT32_BAND)
    for layout in (sliced, strided):
        assert_same(verify(kind, replace(batch, draft_logits=layout(batch.draft_logits))), whole)


def test_rows_of_large_vocabularies_are_read_to_the_end():
    """More blocks than are handled at once, and the last one not whole."""
    vocab = 257 * 1024 + 5
    batch = case(1, 1, vocab, torch.bfloat16, greedy=0, seed=13)
    batch.target_logits[0, 0, vocab - 2], batch.target_logits[0, 1, vocab - 1] = 30.0, 30.0
    batch.draft_logits[0, 0, vocab - 2], batch.draft_token_ids[0, 0] = 30.0, vocab - 2
    assert verify("probabilistic", batch.to(DEVICE)).token_ids.tolist() == [[vocab - 2, vocab - 1]]


@needs_gpu
@pytest.mark.parametrize("kind", ["strict", "probabilistic", "block"])
def test_rows_may_lie_beyond_two_billion_elements(kind):
    batch = case(2, 1, 32768, torch.bfloat16, seed=9)
    stride = 2**31 + 16
    memory = torch.empty(stride + 2 * 32768, dtype=torch.bfloat16, device="cuda")
    moved = batch.to("cuda")
    far = memory.as_strided((2, 2, 32768), (stride, 32768, 1))
    far.copy_(moved.target_logits)
    assert_same(verify(kind, replace(moved, target_logits=far)), verify(kind, moved))
