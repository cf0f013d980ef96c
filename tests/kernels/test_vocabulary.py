"""Kernels verify drafts from a vocabulary of their own, and give what rows spread over the target's vocabulary would."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from reference import oracle
from reference.sampling import Sampling, spread, truncate
from specdecode import RejectionSampler, kernels
from specdecode.batch import VerificationBatch
from specdecode.eager.vocabulary import target_to_draft
from specdecode.kernels.launch import Plan
from specdecode.kernels.vocabulary import IDS, NO_ID, SPAN
from tests.conftest import ON_GPU
from tests.support.addresses import reads_and_writes_inside
from tests.support.differential import FLOAT32_BAND, Case, assert_same_tokens, case, like_a_device
from tests.support.kernels import DEVICE, FEW, LARGE, parts_of, run
from tests.support.truncated import SCHEDULE, of_request, on

METHODS = ["probabilistic", "block", "synthetic"]


def narrow(batch: Case, size: int, seed: int = 0) -> tuple[Case, Tensor]:
    """The batch with draft rows over some of the target's tokens in any order; some drafts are none of these tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(batch.target_logits.shape[2], generator=generator)[:size]
    rows = batch.draft_logits[..., ids].contiguous()
    noise = -torch.log(-torch.log(torch.rand(rows.shape, generator=generator).clamp(1e-6, 1 - 1e-6)))
    likely = ids[(rows.float() + noise).argmax(2)]
    lacking = torch.rand(likely.shape, generator=generator) < 0.2
    token_ids = likely.where((batch.draft_token_ids >= 0) & ~lacking, batch.draft_token_ids)
    return replace(batch, draft_logits=rows, draft_token_ids=token_ids), ids


def check(batch: Case, ids: Tensor, options: dict, **given: Any) -> VerificationBatch:
    tensors = batch.target_logits, batch.draft_token_ids, batch.draft_logits, given.pop("draft_logsumexp", None)
    numbers = batch.temperature, batch.seeds, batch.positions
    return VerificationBatch.check(*tensors, *numbers, **options, **given, draft_vocab_ids=ids)


def verify(method: str, *arguments: Any, given: dict | None = None, **way: bool) -> Any:
    """Run the kernels on a batch, ids and options, as `check` takes them."""
    batch, ids, options = arguments
    given = on(DEVICE, given or {})
    checked = check(batch.to(DEVICE), ids.to(DEVICE), on(DEVICE, options), **given)
    return kernels.verify(method, checked, SCHEDULE if method == "synthetic" else None, **way)


def expected(method: str, batch: Case, ids: Tensor, options: dict) -> list:
    """What the reference says of rows that are truncated first and then spread."""
    outcomes, vocab = [], batch.target_logits.shape[2]
    for index in range(len(batch.seeds)):
        target, token_ids, draft = batch.rows(index)
        keywords, limits = batch.request(index), of_request(options, index)
        how = Sampling(keywords["temperature"], **limits)
        kept = [truncate(row, how) for row in draft]
        rows = [spread(row, ids.numpy(), vocab) for row, _ in kept]
        if method == "synthetic":
            keywords["conditional_rates"] = SCHEDULE.conditional_rates
        keywords["draft_sampling"] = Sampling(keywords["temperature"])
        outcome = oracle.verify(method, target, token_ids, rows, **keywords, **limits)
        outcomes.append(outcome._replace(margin=min(outcome.margin, *(margin for _, margin in kept))))
    return outcomes


def hostile(size: int, vocab: int, drafts: int) -> tuple[Case, Tensor]:
    """A batch of which some rows are point masses, or empty, and ids of which many are no tokens or there before.

    Many draft logits are equal, so that truncation goes by the order of ids.
    """
    batch, ids = narrow(case(11, drafts, vocab, torch.float32, greedy=0.1, seed=30), size)
    batch.draft_logits.round_()
    draft, target = batch.draft_logits, batch.target_logits
    ids[5::7], ids[6::11], ids[0] = ids[3], vocab, torch.iinfo(torch.int64).min
    ids[8::13], ids[9::17] = torch.iinfo(torch.int64).max, 2**32 + 3
    # Point masses: on an id that is no token, on one that is, and on one that was there before.
    draft[0, 0], draft[1, :, 0], draft[2, 0, 3], draft[2, 1:, 5] = torch.nan, torch.inf, torch.inf, torch.inf
    draft[3, :, 5], target[2:4, 0, ids[3]] = torch.inf, 15
    target[2] -= 50  # the same distribution
    draft[4, :, 1:] = -torch.inf
    target[5, :, 7] = target[6, :, ids[3]] = draft[6, :, 0] = torch.inf
    draft[7, :, 1::2] = torch.nan
    batch.draft_token_ids[2:4, 0] = ids[3]
    return batch, ids


HOSTILE = [
    ("probabilistic", {}, LARGE),
    ("probabilistic", {"top_k": 30}, FEW),
    ("block", {}, FEW),
    ("block", {}, LARGE),
]


@pytest.mark.parametrize(("method", "options", "way"), HOSTILE, ids=str)
def test_ids_that_are_no_tokens_or_were_there_before_count_as_eager_has_it(method, options, way):
    batch, ids = hostile(1030, 1100, drafts=1 if options else 2)
    if options and not ON_GPU:  # half of them, each of whose rows takes long
        batch = replace(batch, **{name: value[::2] for name, value in vars(batch).items()})
    with ExitStack() as stack:
        stack.enter_context(like_a_device())  # values are not checked, which on the CPU would refuse the ids
        want = RejectionSampler(method, backend="eager")._verify(check(batch, ids, options))
        if not ON_GPU:
            stack.enter_context(reads_and_writes_inside())  # of a GPU, a sanitizer does
        got = verify(method, batch, ids, options, **way)
    for name, one, other in zip(got._fields, got[:4], want):
        assert one.tolist() == other.tolist(), name
    assert got.num_accepted.sum() > 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_places_are_those_of_the_first_ids(dtype):
    """Of more tokens than a program has, and more ids than it looks through at once; many are none or there before."""
    vocab, size = 2 * SPAN.value + 5000, IDS.value + 4000
    ids = torch.randint(-500, vocab + 500, (size,), generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    target, draft = (torch.zeros(1, rows, width, device=DEVICE) for rows, width in ((2, vocab), (1, size)))
    numbers = 1.0, 0, None
    batch = VerificationBatch(target, torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), draft, None, *numbers)
    calls: list = []
    with mock.patch.object(Plan, "run", lambda plan, *values: calls.append((plan, *values))):
        kernels.verify("probabilistic", batch._replace(draft_vocab_ids=ids))
    ((plan, tensors, others),) = calls
    parts = {name: part.fill_(3) for name, part in parts_of(plan, others).items()}
    run(plan.launches[:1], {**tensors, **parts}, others)
    want = target_to_draft(ids, vocab)
    assert 0 < (want < 0).sum() < vocab
    assert torch.equal(parts["draft_ids"], want.where(want >= 0, NO_ID.value).int())


def test_the_width_of_draft_rows_is_part_of_what_a_plan_is_found_by():
    """Two calls whose rows lie alike in one wide buffer, and differ in their width alone."""
    batch, ids = narrow(case(3, 1, 1100, torch.float32, greedy=0, seed=3), 1040)
    for width in (37, 1040):
        few = replace(batch, draft_logits=batch.draft_logits[..., :width])
        outcomes = expected("probabilistic", few, ids[:width], {})
        assert_same_tokens(verify("probabilistic", few, ids[:width], {}).token_ids, outcomes, FLOAT32_BAND)
