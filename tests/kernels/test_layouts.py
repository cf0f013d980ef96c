"""Rows may have any layout: strides, dtypes, offsets beyond 2^31."""

from dataclasses import replace

import pytest
import torch

from tests.support.differential import assert_same, case
from tests.support.kernels import (
    DEVICE,
    needs_gpu,
    verify,
)


def test_rows_of_large_vocabularies_are_read_to_the_end():
    """More blocks than one iteration handles, and a partial last block."""
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
