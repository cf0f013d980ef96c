"""Draft vocabularies in the kernels: invalid ids, the map from tokens to draft ids, plans by the width of rows."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from specdecode import RejectionSampler, kernels
from specdecode.batch import VerificationBatch
from specdecode.eager.vocabulary import target_to_draft
from specdecode.kernels.launch import Plan
from specdecode.kernels.vocabulary import IDS, NO_ID, SPAN
from tests.conftest import ON_GPU
from tests.contract.cases import ORDINARY, computing, on
from tests.contract.cases import run as run_call
from tests.support.addresses import reads_and_writes_inside
from tests.support.differential import Case, case, like_a_device
from tests.support.kernels import DEVICE, parts_of, run
from tests.support.oracle import assert_equals_oracle


def narrow(batch: Case, size: int, seed: int = 0) -> tuple[Case, Tensor]:
    """Return the batch with draft rows over `size` random tokens, and these tokens; some drafts are not among them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(batch.target_logits.shape[2], generator=generator)[:size]
    rows = batch.draft_logits[..., ids].contiguous()
    noise = -torch.log(-torch.log(torch.rand(rows.shape, generator=generator).clamp(1e-6, 1 - 1e-6)))
    likely = ids[(rows.float() + noise).argmax(2)]
    lacking = torch.rand(likely.shape, generator=generator) < 0.2
    token_ids = likely.where((batch.draft_token_ids >= 0) & ~lacking, batch.draft_token_ids)
    return replace(batch, draft_logits=rows, draft_token_ids=token_ids), ids


def call_of(batch: Case, ids: Tensor, **options: Any) -> dict[str, Any]:
    return {**vars(batch), "draft_vocab_ids": ids, **options}


def hostile(size: int, vocab: int, drafts: int) -> tuple[Case, Tensor]:
    """Return a batch with point masses and rows without a finite logit, and ids, many of them invalid or repeated.

    Many draft logits are equal, so that truncation depends on the order of ids.
    """
    batch, ids = narrow(case(11, drafts, vocab, torch.float32, greedy=0.1, seed=30), size)
    batch.draft_logits.round_()
    draft, target = batch.draft_logits, batch.target_logits
    ids[5::7], ids[6::11], ids[0] = ids[3], vocab, torch.iinfo(torch.int64).min
    ids[8::13], ids[9::17] = torch.iinfo(torch.int64).max, 2**32 + 3
    # Point masses: on an invalid id, on a valid id, and on a repeated id.
    draft[0, 0], draft[1, :, 0], draft[2, 0, 3], draft[2, 1:, 5] = torch.nan, torch.inf, torch.inf, torch.inf
    draft[3, :, 5], target[2:4, 0, ids[3]] = torch.inf, 15
    target[2] -= 50  # the same distribution
    draft[4, :, 1:] = -torch.inf
    target[5, :, 7] = target[6, :, ids[3]] = draft[6, :, 0] = torch.inf
    draft[7, :, 1::2] = torch.nan
    batch.draft_token_ids[2:4, 0] = ids[3]
    return batch, ids


@pytest.mark.parametrize(
    ("method", "options", "way"),
    [
        ("probabilistic", {}, "triton large"),
        ("probabilistic", {"top_k": 30}, "triton few"),
        ("block", {}, "triton few"),
        ("block", {}, "triton large"),
    ],
    ids=str,
)
def test_invalid_and_repeated_ids_give_the_output_of_the_eager_backend(method, options, way):
    batch, ids = hostile(1030, 1100, drafts=1 if options else 2)
    if options and not ON_GPU:  # every second request: truncated rows take long in the interpreter
        batch = replace(batch, **{name: value[::2] for name, value in vars(batch).items()})
    with ExitStack() as stack:
        stack.enter_context(like_a_device())  # skip the check of values, which on the CPU would refuse the ids
        want = RejectionSampler(method, backend="eager")(**call_of(batch, ids, **options))
        if not ON_GPU:
            stack.enter_context(reads_and_writes_inside())  # on a GPU, compute-sanitizer checks this
        with computing(way):
            got = RejectionSampler(method, backend="triton")(**on(DEVICE, call_of(batch, ids, **options)))
    for name, one, other in zip(got._fields, got[:4], want):
        assert one.tolist() == other.tolist(), name
    assert got.num_accepted.sum() > 0


@pytest.mark.parametrize(
    ("method", "way"), [("probabilistic", "triton large"), ("block", "triton few"), ("synthetic", "triton few")]
)
def test_a_draft_row_has_empty_statistics_in_blocks_beyond_its_own_vocabulary(method, way):
    """Most programs read no draft token: they must store empty statistics, or old memory would count."""
    batch, ids = narrow(case(3, 1 + (method == "block"), 4200, torch.bfloat16, greedy=0, seed=4), 37)
    call = on(DEVICE, call_of(batch, ids))
    output = run_call(ORDINARY._replace(method=method, backend=way), call)
    assert_equals_oracle(method, call, output, "triton")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_map_has_the_first_draft_id_of_each_token(dtype):
    """There are more tokens than a program maps, and more ids than it compares at once; many are invalid or repeated."""
    vocab, size = 2 * SPAN.value + 5000, IDS.value + 4000
    ids = torch.randint(-500, vocab + 500, (size,), generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    target, draft = (torch.zeros(1, rows, width, device=DEVICE) for rows, width in ((2, vocab), (1, size)))
    drafts = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    batch = VerificationBatch(target, drafts, draft, None, temperature=1.0, seeds=0, positions=None)
    calls: list = []
    with mock.patch.object(Plan, "run", lambda plan, *values: calls.append((plan, *values))):
        kernels.verify("probabilistic", batch._replace(draft_vocab_ids=ids))
    ((plan, tensors, others),) = calls
    parts = {name: part.fill_(3) for name, part in parts_of(plan, plan.values(tensors, others)).items()}
    run(plan.launches[:1], {**tensors, **parts}, others, plan)
    want = target_to_draft(ids, vocab)
    assert 0 < (want < 0).sum() < vocab
    assert torch.equal(parts["draft_id_of_token"], want.where(want >= 0, NO_ID.value).int())


def test_draft_rows_of_different_widths_have_different_plans():
    """The rows of two calls lie in one wide buffer with equal strides, and differ only in width."""
    batch, ids = narrow(case(3, 1, 1100, torch.float32, greedy=0, seed=3), 1040)
    for width in (37, 1040):
        few = replace(batch, draft_logits=batch.draft_logits[..., :width])
        call = on(DEVICE, call_of(few, ids[:width]))
        output = RejectionSampler("probabilistic", backend="triton")(**call)
        assert_equals_oracle("probabilistic", call, output, "triton")
