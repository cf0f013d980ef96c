"""Adjustments in the kernels: the reference's tokens, in every method, way of reading and kind of row."""

import itertools
from dataclasses import replace

import pytest
import torch

from specdecode import Adjustments, RejectionSampler, eager, kernels
from specdecode.batch import RowBatch, VerificationBatch
from specdecode.noise import SELECT
from tests.conftest import ON_GPU
from tests.support.addresses import apart, reads_and_writes_inside
from tests.support.adjusted import adjusted_rows, adjustments_for, to
from tests.support.differential import FLOAT32_BAND, assert_same_tokens, case
from tests.support.kernels import DEVICE, FEW, LARGE, MANY, assert_same
from tests.support.packing import in_slots, packed_rows, with_counts
from tests.support.truncated import SCHEDULE, expected

METHODS = ["strict", "probabilistic", "block", "synthetic"]
WAYS = {"few": FEW, "large": LARGE, "many": MANY}


def verify(method, batch, adjustments, with_logits=True, logprobs=None, way=FEW, **options):
    draft_logits = batch.draft_logits if with_logits else None
    numbers = batch.temperature, batch.seeds, batch.positions
    adjustments = None if adjustments is None else to(DEVICE, adjustments)
    arguments = VerificationBatch.check(
        batch.target_logits, batch.draft_token_ids, draft_logits, None, *numbers, logprobs=logprobs,
        adjustments=adjustments, **options,
    )  # fmt: skip
    return kernels.verify(method, arguments, SCHEDULE if method == "synthetic" else None, **way)


def both(batch, adjustments, **options):
    """A call of both backends, each with the same checked arguments."""
    outputs = [
        RejectionSampler("probabilistic", backend=backend)(
            batch.target_logits.to(DEVICE),
            batch.draft_token_ids.to(DEVICE),
            batch.draft_logits.to(DEVICE),
            temperature=batch.temperature.to(DEVICE),
            seeds=batch.seeds.to(DEVICE),
            adjustments=to(DEVICE, adjustments),
            **options,
        )
        for backend in ("triton", "eager")
    ]
    return outputs


@pytest.mark.parametrize("way", [FEW, LARGE], ids=["few", "large"])
@pytest.mark.parametrize("method", METHODS[:3])
def test_drafts_before_a_row_count_as_emitted(method, way):
    """Token 0 is repeated until the penalty of what was emitted makes token 1 better, in the middle of a step."""
    logits = torch.tensor([2.0, 1.5, 0.0]).expand(1, 6, 3).contiguous().to(DEVICE)
    drafts = torch.tensor([[0, 0, 1, 0, 1]], device=DEVICE)
    before = torch.tensor([[1, 0, 0]], dtype=torch.int32)
    for penalties, tokens in (
        (Adjustments(frequency_penalty=0.4), [0, 0, 1, 0, 1, 0]),
        (Adjustments(frequency_penalty=0.4, output_counts=before), [0, 1, -1, -1, -1, -1]),
        (Adjustments(presence_penalty=0.6), [0, 1, -1, -1, -1, -1]),
    ):
        arguments = VerificationBatch.check(logits, drafts, None, None, 0.0, 0, None, adjustments=to(DEVICE, penalties))
        assert kernels.verify(method, arguments, None, **way).token_ids.tolist() == [tokens]


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 800}])
def test_the_cutoff_of_a_wide_row_is_that_of_its_adjusted_logits(options):
    """More is kept than can be compared in pairs, so the row is searched: by float32, of which bfloat16 has a few."""
    batch = case(3, 0, 1104, torch.bfloat16, greedy=0, seed=6)
    batch = replace(batch, target_logits=(8 + batch.target_logits * 0.1).bfloat16())
    adjustments = adjustments_for(batch, "penalties")
    output = verify("strict", batch.to(DEVICE), adjustments, logprobs="processed", **options)
    assert_same_tokens(output.token_ids, expected("strict", batch, options, None, False, adjustments), FLOAT32_BAND)
    copied = replace(batch, target_logits=adjusted_rows(batch, adjustments, batch.draft_token_ids)).to(DEVICE)
    of_copy = verify("strict", copied, None, logprobs="processed", **options)
    # One token more or less that is kept changes them by 1e-3; float32 rows are summed in another order.
    torch.testing.assert_close(output.logprobs, of_copy.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"top_k": 800}, {}], ids=["wide", "not finite"])
def test_drafts_before_a_row_count_in_what_rarely_runs(options):
    """A search of the whole row, and a block with a NaN: functions of their own, which load the drafts again."""
    batch = case(2, 2, 1104, torch.float32, greedy=0, seed=8)
    rows, drafts = batch.target_logits.mul_(0.02), torch.tensor([[5, 900], [600, 4]])
    for request, ids in enumerate(drafts.tolist()):
        rows[request, :, ids] = torch.tensor([9.0, 8.9])
        if not options:
            rows[request, :, [ids[0] + 1, ids[1] + 1]] = torch.nan
    batch = replace(batch, draft_token_ids=drafts, draft_logits=rows[:, :2].clone())
    adjustments = Adjustments(repetition_penalty=1.3, frequency_penalty=0.9, presence_penalty=0.4)
    output, expected_output = both(batch, adjustments, logprobs="processed", **options)
    assert torch.equal(output.token_ids, expected_output.token_ids)
    assert (output.num_accepted > 0).all()
    torch.testing.assert_close(output.logprobs, expected_output.logprobs, rtol=0, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("method", "way"),
    list(itertools.product(METHODS, WAYS))
    if ON_GPU
    else [
        ("strict", "few"),
        ("probabilistic", "few"),
        ("probabilistic", "large"),
        ("block", "large"),
        ("synthetic", "few"),
    ],
)
def test_it_is_a_call_with_the_rows_adjusted_before(method, way):
    """Bit for bit, log-probabilities too: an adjusted float32 copy is what `adjusted` makes of a float32 row."""
    batch = case(3, 2, 1104, torch.float32, greedy=0, seed=3)
    batch.target_logits[1] -= 20  # penalties are a factor of negative logits
    adjustments = adjustments_for(batch)
    copied = replace(batch, target_logits=adjusted_rows(batch, adjustments, batch.draft_token_ids)).to(DEVICE)
    options = {"way": WAYS[way], "logprobs": "processed"} | ({"top_p": 0.9} if method in ("strict", "block") else {})
    assert_same(verify(method, batch.to(DEVICE), adjustments, **options), verify(method, copied, None, **options))


@pytest.mark.parametrize(("kind", "options"), [("all", {}), ("mask", {"top_k": 7})])
def test_raw_log_probabilities_are_of_the_models_own_logits(kind, options):
    batch = case(4, 2, 1104, torch.bfloat16, seed=4)
    batch.target_logits[:, :, 7] = 300  # whose weight would overflow beside the largest that is allowed
    adjustments = adjustments_for(batch, kind)
    adjustments.allowed_mask[:, :, 0] &= ~(1 << 7)
    output, expected_output = both(batch, adjustments, logprobs="raw", **options)
    assert torch.equal(output.token_ids, expected_output.token_ids)
    torch.testing.assert_close(output.logprobs, expected_output.logprobs, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "min_p": 0.01}])
def test_a_request_without_them_keeps_its_bits(options):
    """Beside requests that have some. Rows are then read by other instructions, summed in the same order."""
    batch = case(4, 1, 1104, torch.bfloat16, seed=5).to(DEVICE)
    adjustments = to(DEVICE, adjustments_for(batch))  # requests 0 and 3 have none
    for method in ("strict", "probabilistic", "block") if ON_GPU or not options else ("probabilistic",):
        adjusted = verify(method, batch, adjustments, logprobs="processed", **options)
        usual = verify(method, batch, None, logprobs="processed", **options)
        for got, want in zip(adjusted[:5], usual):
            torch.testing.assert_close(got[[0, 3]], want[[0, 3]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}])
def test_sampled_rows_and_packed_calls_are_those_of_the_eager_backend(limits):
    """And nothing is read beyond their tensors, where rows have fewer drafts than others, or no bias."""
    batch, counts = with_counts(case(5, 2, 1100, torch.float16, seed=6), [2, 0, 1, 2, 0]), [2, 0, 1, 2, 0]
    adjustments, slots = to(DEVICE, adjustments_for(batch)), torch.tensor([4, 0, 3, 1, 6])
    one_row = adjustments._replace(allowed_mask=adjustments.allowed_mask[:, :1])
    numbers = batch.temperature.to(DEVICE), batch.seeds.to(DEVICE)
    rows = RowBatch.check(batch.target_logits[:, 0].to(DEVICE), *numbers, None, adjustments=one_row)
    for got, want in zip(kernels.sample(rows, SELECT)[:2], eager.sample(rows, SELECT)):
        torch.testing.assert_close(got, want)
    packed = packed_rows(batch.to(DEVICE), counts)
    packed["draft_token_ids"] = apart(packed["draft_token_ids"][: packed["row_starts"][-1] - 1])
    packed["target_logits"] = packed["target_logits"][: packed["row_starts"][-1]]
    mask = torch.zeros(len(packed["target_logits"]), 35, dtype=torch.int32, device=DEVICE)
    for request, (start, count) in enumerate(zip(packed["row_starts"].tolist(), counts)):
        mask[start : start + count + 1] = adjustments.allowed_mask[request, : count + 1]
    by_slot = [
        apart(in_slots(each, slots.to(DEVICE), 7))
        for each in (*adjustments[:-1], *numbers, batch.draft_logits.to(DEVICE))
    ]
    *parts, temperature, seeds, draft_logits = by_slot
    options = {"temperature": temperature, "seeds": seeds, "draft_logits": draft_logits, "slots": slots.to(DEVICE)}
    options["adjustments"] = Adjustments(*parts, mask)
    with reads_and_writes_inside():
        outputs = [
            RejectionSampler("probabilistic", backend=backend).packed(**packed, **options, **limits)
            for backend in ("triton", "eager")
        ]
    for got, want in zip(*outputs):
        if got is not None:
            assert torch.equal(got, want)


def test_warmup_compiles_steps_of_fewer_drafts():
    batch = case(2, 2, 70, torch.float32).to(DEVICE)
    arguments = batch.target_logits, batch.draft_token_ids
    adjustments = to(DEVICE, adjustments_for(batch))
    RejectionSampler("strict", backend="triton").warmup(*arguments, seeds=0, adjustments=adjustments)
