"""Lists of likeliest tokens and of kept sets take one more launch, and a warm-up compiles it."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from specdecode import RejectionSampler, kernels
from specdecode.kernels.launch import Plan
from specdecode.kernels.signature import Signature
from tests.contract.cases import on
from tests.support.batches import verification_batch
from tests.support.differential import Case, case
from tests.support.kernels import (
    DEVICE,
    FEW,
    LARGE,
    checked,
)


def arguments_of(kind: str, batch: Case, options: Any) -> tuple:
    """Return the method, the batch and the schedule of a call that requests both lists."""
    method, plain, schedule = checked(kind, batch.to(DEVICE))
    numbers = plain.temperature, plain.seeds, plain.positions
    tensors = plain.target_logits, plain.draft_token_ids, plain.draft_logits, plain.draft_logsumexp, *numbers
    lists = {"logprobs": "raw", "top_logprobs": 5, "kept_sets": True}
    return method, verification_batch(*tensors, **on(DEVICE, options), **lists), schedule


def launches_of(call: Callable[[], Any]) -> list:
    """Return the kernel and the signature of each launch of a call, without running them."""
    with mock.patch.object(Plan, "run", autospec=True) as run:
        call()
    launches = [each for made in run.call_args_list for each in made.args[0].launches]
    return [(each.kernel, Signature(each.kernel.arg_names, each.bundles).key()) for each in launches]


def verification_launches(arguments: tuple, **way: bool) -> list:
    """Return the kernel and the signature of each launch of a verification."""
    return launches_of(lambda: kernels.verify(*arguments, **way))


@pytest.mark.parametrize("way", [FEW, LARGE])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=["whole", "truncated"])
@pytest.mark.parametrize("kind", ["strict", "probabilistic", "block"])
def test_lists_take_one_more_launch_and_change_no_other(kind, options, way):
    method, asked, schedule = arguments_of(kind, case(2, 2, 1040, torch.bfloat16), options)
    *steps, last = verification_launches((method, asked, schedule), **way)
    assert verification_launches((method, asked._replace(top_logprobs=0, kept_sets=False), schedule), **way) == steps
    assert verification_launches((method, asked._replace(top_logprobs=9), schedule), **way) == [*steps, last]
    likeliest, kept = (
        verification_launches((method, asked._replace(**one), schedule), **way)
        for one in ({"kept_sets": False}, {"top_logprobs": 0})
    )
    assert len({likeliest[-1], kept[-1], last}) == 3


def test_a_warmup_compiles_the_launches_of_calls_with_lists():
    sampler, batch = RejectionSampler("probabilistic", backend="triton"), case(2, 2, 1040, torch.bfloat16).to(DEVICE)
    rows = batch.target_logits, batch.draft_token_ids, batch.draft_logits
    for asked in ({"kept_sets": True}, {"logprobs": "raw", "top_logprobs": 3}):
        known = launches_of(lambda asked=asked: sampler.warmup(*rows, seeds=0, **asked))
        for size in (1, 40, 400):
            some = [each[:1].expand(size, *each.shape[1:]) for each in rows]
            assert set(launches_of(lambda some=some, asked=asked: sampler(*some, seeds=0, **asked))) <= set(known)
