"""Kernels verify drafts from a vocabulary of their own: what rows spread over the target's would give, which no one spreads."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import probabilistic as reference
from reference import truncation
from specdecode import RejectionSampler, kernels
from specdecode.batch import VerificationBatch
from specdecode.eager.vocabulary import places_of
from specdecode.packing import check_packed
from tests.conftest import ON_GPU
from tests.conftest import combine as pairs
from tests.differential import FLOAT32_BAND, Case, assert_same_tokens, case, like_a_device
from tests.kernels.common import DEVICE, FEW, LARGE, MANY, assert_same, needs_interpreter
from tests.kernels.test_packed import reads_and_writes_inside
from tests.packing import in_slots, packed_rows, with_counts
from tests.test_truncation import SCHEDULE, TRUNCATIONS, VERIFY, of_request, on

METHODS = ["probabilistic", "block", "synthetic"]
SIZES = [(1100, 37), (2064, 1040), (2100, 2100)] + [(151_936, 32_000), (50_257, 5001)] * ON_GPU
"""Tokens of the target and of the draft: of fewer blocks than the target's, aligned, and of all of them."""


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


def drafted(batch: Case, ids: Tensor, options: dict) -> dict[str, Any]:
    """What drafting steps return that verification takes: logsumexp and cutoff."""
    sampler, offsets = RejectionSampler("probabilistic"), range(batch.draft_logits.shape[1])
    steps = [sampler.draft(batch.draft_logits[:, i], batch.temperature, batch.seeds, **options) for i in offsets]
    given = {"draft_logsumexp": torch.stack([step.logsumexp for step in steps], 1)}
    if steps[0].cutoff is not None:
        given["draft_cutoff"] = torch.stack([step.cutoff for step in steps], 1)
    elif options.get("top_k") is not None:  # all tokens of the draft, though not of the target
        given["draft_cutoff"] = torch.full(batch.draft_token_ids.shape, -1)
    return given


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
        how = truncation.Sampling(keywords["temperature"], **limits)
        rows, margins = truncation.truncate_rows(draft, how)
        rows = [reference.spread(row, ids.numpy(), vocab) for row in rows]
        if method == "synthetic":
            keywords["conditional_rates"] = SCHEDULE.conditional_rates
        keywords["draft_sampling"] = truncation.Sampling(keywords["temperature"])
        outcome = VERIFY[method].verify(target, token_ids, rows, **keywords, **limits)
        outcomes.append(outcome._replace(margin=min([outcome.margin, *margins])))
    return outcomes


LIMITS = {name: TRUNCATIONS[name] for name in ("top-p", "each request's own")}
LIMITS |= {"none": {}, "all of the draft": {"top_k": 1090}}
CASES = pairs(METHODS, SIZES, list(LIMITS), [torch.bfloat16, torch.float32], [False, True], [FEW, LARGE, MANY])


@pytest.mark.parametrize(("method", "sizes", "limits", "dtype", "with_given", "way"), CASES, ids=str)
def test_tokens_are_the_references(method, sizes, limits, dtype, with_given, way):
    batch, ids = narrow(case(6, 3 if ON_GPU else 2, sizes[0], dtype, seed=sum(sizes)), sizes[1])
    options = LIMITS[limits]
    given = drafted(batch, ids, options) if with_given else {}
    got = verify(method, batch, ids.to(torch.int32), options, given=given, **way)
    assert_same_tokens(got.token_ids, expected(method, batch, ids, options), FLOAT32_BAND)
