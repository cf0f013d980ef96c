"""Adjustments in the kernels: rows that are searched or recomputed, and the bits of rows without adjustments."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdecode import Adjustments, RejectionSampler, SamplerOutput, backends, kernels, sample
from tests.conftest import ON_GPU, combine
from tests.contract.cases import METHODS, ORDINARY, on, run
from tests.support.addresses import reads_and_writes_inside
from tests.support.adjusted import adjusted_rows, adjustments_for, to
from tests.support.differential import Case, assert_same, case
from tests.support.kernels import DEVICE
from tests.support.oracle import assert_equals_oracle


def computed(method: str, batch: Case, adjustments: Adjustments | None, way: str = "few", **options: Any) -> tuple:
    """Return the arguments of a call, and the kernels' output."""
    call = on(DEVICE, {**vars(batch), "adjustments": adjustments, **options})
    return call, run(ORDINARY._replace(method=method, backend=f"triton {way}"), call)


def verify(method: str, *arguments: Any, **options: Any) -> SamplerOutput:
    """Return the kernels' output after comparing it with the oracle's."""
    call, output = computed(method, *arguments, **options)
    assert_equals_oracle(method, call, output, "triton")
    return output


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 800}])
def test_the_cutoff_of_a_wide_row_is_that_of_its_adjusted_logits(options):
    """More tokens are kept than can be compared in pairs, so the row is searched, by float32 ordinals, not bfloat16's."""
    batch = case(3, 0, 1104, torch.bfloat16, greedy=0, seed=6)
    batch = replace(batch, target_logits=(8 + batch.target_logits * 0.1).bfloat16())
    adjustments = adjustments_for(batch, "penalties")
    verify("strict", batch, adjustments, **options)
    copied = replace(batch, target_logits=adjusted_rows(batch, adjustments, batch.draft_token_ids))
    _, output = computed("strict", batch, adjustments, logprobs="processed", **options)
    _, of_copy = computed("strict", copied, None, logprobs="processed", **options)
    # One token more or less that is kept changes them by 1e-3; float32 rows are summed in another order.
    torch.testing.assert_close(output.logprobs, of_copy.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"top_k": 800}, {}], ids=["wide", "not finite"])
def test_drafts_before_a_row_count_in_what_rarely_runs(options):
    """A search of the whole row, and a block with a NaN: separate functions that load the drafts again."""
    batch = case(2, 2, 1104, torch.float32, greedy=0, seed=8)
    rows, drafts = batch.target_logits.mul_(0.02), torch.tensor([[5, 900], [600, 4]])
    for request, ids in enumerate(drafts.tolist()):
        rows[request, :, ids] = torch.tensor([9.0, 8.9])
        if not options:
            rows[request, :, [ids[0] + 1, ids[1] + 1]] = torch.nan
    batch = replace(batch, draft_token_ids=drafts, draft_logits=rows[:, :2].clone())
    adjustments = Adjustments(repetition_penalty=1.3, frequency_penalty=0.9, presence_penalty=0.4)
    output = verify("probabilistic", batch, adjustments, logprobs="processed", **options)
    assert (output.num_accepted > 0).all()


@pytest.mark.parametrize(
    ("method", "way"),
    combine(METHODS, ["few", "large", "many"])
    if ON_GPU
    else [("strict", "few"), ("probabilistic", "large"), ("block", "large")],
)
def test_it_is_a_call_with_the_rows_adjusted_before(method, way):
    """Bit for bit, log-probabilities too: an adjusted float32 copy is what `adjusted` makes of a float32 row."""
    batch = case(3, 2, 1104, torch.float32, greedy=0, seed=3)
    batch.target_logits[1] -= 20  # penalties are a factor of negative logits
    adjustments = adjustments_for(batch)
    copied = replace(batch, target_logits=adjusted_rows(batch, adjustments, batch.draft_token_ids))
    options = {"logprobs": "processed"} | ({"top_p": 0.9} if method in ("strict", "block") else {})
    assert_same(verify(method, batch, adjustments, way, **options), verify(method, copied, None, way, **options))


@pytest.mark.parametrize(("kind", "options"), [("all", {}), ("mask", {"top_k": 7})])
def test_raw_log_probabilities_are_of_the_models_own_logits(kind, options):
    batch = case(4, 2, 1104, torch.bfloat16, seed=4)
    batch.target_logits[:, :, 7] = 300  # its weight relative to the largest allowed logit would overflow
    adjustments = adjustments_for(batch, kind)
    adjustments.allowed_mask[:, :, 0] &= ~(1 << 7)
    verify("probabilistic", batch, adjustments, logprobs="raw", **options)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "min_p": 0.01}])
def test_a_request_without_them_keeps_its_bits(options):
    """Other requests have adjustments. Rows are then read by other instructions, but summed in the same order."""
    batch = case(4, 1, 1104, torch.bfloat16, seed=5)
    adjustments = adjustments_for(batch)  # requests 0 and 3 have none
    for method in ("strict", "probabilistic", "block") if ON_GPU or not options else ("probabilistic",):
        adjusted, usual = (verify(method, batch, each, logprobs="processed", **options) for each in (adjustments, None))
        for got, want in zip(adjusted[:5], usual):
            torch.testing.assert_close(got[[0, 3]], want[[0, 3]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}])
def test_sample_draws_from_adjusted_rows_what_the_eager_backend_draws(limits, monkeypatch):
    batch = case(5, 0, 1100, torch.float16, seed=6).to(DEVICE)
    adjustments = to(DEVICE, adjustments_for(batch.to("cpu")))
    arguments = batch.target_logits[:, 0], batch.temperature, batch.seeds
    tokens = []
    for backend in (kernels, backends.eager):
        monkeypatch.setattr(backends, "choose", lambda *_, backend=backend: backend)
        with reads_and_writes_inside():
            tokens.append(sample(*arguments, adjustments=adjustments, **limits))
    assert torch.equal(*tokens)


def test_warmup_compiles_steps_of_fewer_drafts():
    batch = case(2, 2, 70, torch.float32).to(DEVICE)
    adjustments = to(DEVICE, adjustments_for(batch.to("cpu")))
    arguments = batch.target_logits, batch.draft_token_ids
    RejectionSampler("strict", backend="triton").warmup(*arguments, seeds=0, adjustments=adjustments)
