"""Rows that are hard to truncate for the kernels: wide, crowded, with ties, at the limits of their lists."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.sampling import Sampling, cutoff, truncate
from reference.sampling import sample as sample_row
from specdecode import RejectionSampler, SamplerOutput, backends, eager, kernels
from specdecode import Sampling as PackageSampling
from specdecode.kernels.arguments import Pointer
from specdecode.kernels.rows import whole_row
from specdecode.kernels.truncation import kernel as truncation
from specdecode.kernels.truncation.wide import amounts_from
from specdecode.noise import SELECT
from tests.benchmarks.realistic import realistic_rows
from tests.conftest import ON_GPU
from tests.contract.cases import ORDINARY, on, run
from tests.support import distributions
from tests.support.addresses import reads_and_writes_inside
from tests.support.batches import row_batch, verification_batch
from tests.support.differential import FLOAT32_BAND, Case, assert_same, case
from tests.support.kernels import (
    DEVICE,
    in_reverse,
    needs_gpu,
    needs_interpreter,
    run_kernel,
    sizes_of,
    small,
)
from tests.support.oracle import assert_equals_oracle
from tests.support.truncated import ROWS_THAT_HURT, TRUNCATIONS, of_request


@pytest.fixture(autouse=True)
def addresses() -> Iterator[None]:
    """In the interpreter, check that kernels load and store inside their tensors. (On a GPU a sanitizer does.)"""
    with nullcontext() if ON_GPU else reads_and_writes_inside():
        yield


def verify(method: str, batch: Case, way: str, **options: Any) -> SamplerOutput:
    """Return the kernels' output after comparing it with the oracle's."""
    call = on(DEVICE, {**vars(batch), **options})
    output = run(ORDINARY._replace(method=method, backend=f"triton {way}"), call)
    assert_equals_oracle(method, call, output, "triton")
    return output


def drawn(logits: Tensor, temperature: float, options: dict) -> Any:
    return kernels.sample_rows(row_batch(logits, temperature, 5, None, **options), SELECT)


@pytest.mark.parametrize("dtype", small(torch.float32, torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("row", ROWS_THAT_HURT)
def test_rows_that_hurt_are_cut_where_a_sort_in_float64_cuts_them(row, dtype):
    logits = ROWS_THAT_HURT[row].to(dtype)
    vocab = len(logits)
    for top_k, top_p, min_p in ((1, None, None), (vocab - 1, 0.5, None), (2, 1 - 2**-24, 0.3)):
        options = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        sampling = Sampling(0.8, top_k, 1.0 if top_p is None else top_p, min_p or 0.0)
        if top_k in (None, vocab) and top_p is min_p is None:
            continue
        rows = logits.to(DEVICE).expand(1 + ON_GPU, vocab).contiguous()
        token_ids, _, cutoffs = drawn(rows, 0.8, options)
        whole = logits.double().numpy()
        result, margin = truncate(whole, sampling)
        if margin > FLOAT32_BAND:
            if cutoffs is not None:
                assert cutoffs.tolist() == [cutoff(whole, sampling)] * len(rows), options
            want = [sample_row(result, temperature=0.8, seed=5 + i).index for i in range(len(rows))]
            assert token_ids.tolist() == want, options


WIDE_ROWS = {
    "flat": lambda generator: torch.randn(1500, generator=generator),
    "alike": lambda generator: torch.full((1500,), -1.5),
    "two values": lambda generator: (torch.randn(1500, generator=generator) > 0).float() * 3,
    "falling": lambda generator: -0.01 * torch.arange(1500) - 100,
    "ties alone in their block": lambda generator: torch.cat(
        [torch.randn(1024, generator=generator), torch.full((476,), -3)]
    ),
    "suggests too much": lambda generator: torch.where(
        torch.arange(8192) % 2048 < 50, 5, 0.1 * torch.randn(8192, generator=generator)
    ),
    "suggests too little": lambda generator: torch.where(
        torch.arange(8192) % 2048 > 1900, 5, 0.1 * torch.randn(8192, generator=generator)
    ),
    "apart": lambda generator: torch.where(torch.arange(1500) % 9 == 0, 5.0, -9.0),
    "a few finite": lambda generator: torch.where(torch.rand(1500, generator=generator) < 0.004, 5.0, -torch.inf),
}
WIDE_LIMITS = [
    {"top_p": 0.95},
    {"top_k": 300},
    {"top_k": 1000, "top_p": 0.999},
    {"top_k": 1100},
    {"min_p": 0.01, "top_p": 0.9},
    {"min_p": 1e-6, "top_k": 200, "top_p": 0.8},
    {"min_p": 0.2},
]


WIDE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDE_CASES = list(itertools.product(WIDE_ROWS, WIDE_LIMITS, WIDE_DTYPES))


@pytest.mark.parametrize(("row", "limits", "dtype"), WIDE_CASES if ON_GPU else WIDE_CASES[::5])
def test_rows_that_keep_more_than_candidates_are_cut_where_a_sort_cuts_them(row, limits, dtype):
    logits = WIDE_ROWS[row](torch.Generator().manual_seed(3)).to(dtype)
    sampling = Sampling(0.8, limits.get("top_k", 0), limits.get("top_p", 1.0), limits.get("min_p", 0.0))
    whole = logits.double().numpy()
    result, margin = truncate(whole, sampling)
    _, logsumexp, cutoffs = drawn(logits[None].to(DEVICE), 0.8, limits)
    if margin > FLOAT32_BAND:
        assert cutoffs.tolist() == [cutoff(whole, sampling)]
        kept = result[np.isfinite(result)] / 0.8
        np.testing.assert_allclose(float(logsumexp[0]), np.logaddexp.reduce(kept), rtol=1e-5, atol=1e-5)


LAWS = [("normal", torch.float32, each) for each in ({"top_p": 0.9}, {"top_k": 1500}, {"top_k": 100, "min_p": 0.01})]
LAWS += [
    ("realistic", dtype, each)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for each in ({"top_p": 0.95}, {"top_k": 20, "top_p": 0.95}, {"top_k": 50}, {"top_k": 600}, {"min_p": 0.01})
]


def law_row(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a row of 4,000 normal logits, or a realistic row, in which every cutoff is among equal logits."""
    if kind == "normal":
        return torch.tensor(np.random.default_rng(0).normal(size=4000), dtype=dtype)
    row = realistic_rows(1, 8, vocab=49_152, generator=torch.Generator().manual_seed(1))[0]
    return row[row.softmax(-1).amax(-1).argmin()].bfloat16().to(dtype)


@needs_gpu
@pytest.mark.parametrize(("kind", "dtype", "options"), LAWS, ids=str)
@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_many_steps_have_the_truncated_distribution(method, kind, dtype, options):
    # An error of total variation 0.02 is found in 999 of 1,000 runs, at 2,000 kept tokens.
    requests, random = 400_000, np.random.default_rng(1)
    target = law_row(kind, dtype)
    vocab = len(target)
    draft = (target.float() + 0.6 * torch.tensor(random.normal(size=vocab), dtype=torch.float32)).to(dtype)
    p, q = (
        distributions.softmax(truncate(row.double().numpy(), Sampling(**options))[0][None])[0]
        for row in (target, draft)
    )
    target_logits, draft_logits = (row.to(DEVICE).expand(requests, 1, vocab) for row in (target, draft))
    sampler = RejectionSampler(method, backend="triton")
    drafted = sampler.draft(draft_logits[:, 0], seeds=0, **options).token_ids[:, None]
    output = sampler(target_logits.expand(-1, 2, -1), drafted, draft_logits, seeds=0, **options)
    first, second = output.token_ids.cpu().numpy().T
    distributions.assert_distribution(np.bincount(first, minlength=vocab), p)
    distributions.assert_distribution(np.bincount(second[second >= 0], minlength=vocab), p)
    if method != "strict":
        accepted, rate = int(output.num_accepted.sum()), float(np.minimum(p, q).sum())
        distributions.assert_distribution(np.array([requests - accepted, accepted]), np.array([1 - rate, rate]))


MANY = torch.arange(60)
FEW_LIKELY = {  # among 70 blocks: where likely tokens are, and their logits
    "side by side": (5000 + MANY, 8 - 0.05 * MANY),
    "each in its own block": (1031 * MANY, 8 - 0.05 * MANY),
    "one of many": (5000 + torch.arange(300), torch.cat([torch.tensor([8.0]), 3 - 0.001 * torch.arange(299)])),
}


@pytest.mark.parametrize(
    ("row", "options", "attempts"),
    [
        ("side by side", {"top_k": 20}, 1),
        ("side by side", {"top_k": 50, "top_p": 0.5}, 1),
        ("each in its own block", {"top_k": 50}, 1),
        ("each in its own block", {"top_k": 50, "top_p": 0.95}, 2),  # the first searches for a mass in few blocks
        ("each in its own block", {"top_k": 50, "top_p": 0.45}, 2),
        ("each in its own block", {"top_k": 50, "top_p": 0.2}, 1),
        ("each in its own block", {"top_k": 20, "top_p": 0.95}, 1),
        ("each in its own block", {"top_p": 0.95}, 1),
        ("each in its own block", {"min_p": 0.2}, 1),
        ("each in its own block", {"top_k": 200, "min_p": 0.2}, 1),
        ("one of many", {"top_p": 0.3}, 1),
        ("one of many", {"min_p": 0.1}, 1),
    ],
)
def test_rows_that_keep_few_tokens_are_cut_among_candidates(row, options, attempts, monkeypatch):
    """Kept tokens may be far apart. The interpreter also counts attempts, and allows no search of the whole row."""
    logits = -9 + 0.1 * torch.randn(70 * 1024, generator=torch.Generator().manual_seed(0))
    places, likely = FEW_LIKELY[row]
    logits[places] = likely
    called = []
    for name in [] if ON_GPU else ["list_tokens", "wide_cutoff"]:
        function = getattr(truncation, name)

        def counted(*arguments, name=name, function=function):
            called.append(name)
            return function(*arguments)

        monkeypatch.setattr(truncation, name, counted)
    _, logsumexp, cutoffs = drawn(logits[None].to(DEVICE), 1.0, options)
    sampling = Sampling(1.0, options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0))
    result, margin = truncate(logits.double().numpy(), sampling)
    assert margin > FLOAT32_BAND
    assert cutoffs.tolist() == [cutoff(logits.double().numpy(), sampling)]
    np.testing.assert_allclose(float(logsumexp[0]), np.logaddexp.reduce(result[np.isfinite(result)]), rtol=1e-5)
    assert "wide_cutoff" not in called
    assert len(called) <= attempts


CROWDED_OPTIONS = [
    (1.0, {"top_k": 50, "top_p": 0.95}),
    (0.7, {"top_k": 20, "top_p": 0.9}),
    (0.7, {"top_k": 300}),
    (0.8, {"top_p": 0.7}),
    (0.5, {"top_p": 0.95}),
    (1.0, {"top_p": 0.7, "min_p": 0.004}),
]


@pytest.mark.parametrize(
    ("values", "dtype"),
    list(itertools.product([2, 8], WIDE_DTYPES)) if ON_GPU else list(zip([2, 8, 2], WIDE_DTYPES)),
)
def test_rows_whose_likely_tokens_are_crowded_and_equal_are_cut_where_a_sort_cuts_them(values, dtype):
    """As in language models: likely tokens have low ids, and logits have few values, `values` per unit."""
    noise = torch.randn(40 * 1024 + 5, generator=torch.Generator().manual_seed(values))
    row = ((15 - 1.5 * torch.arange(len(noise)).add(20).log() + 1.5 * noise) * values).round().to(dtype) / values
    among_equals = 0
    for temperature, options in CROWDED_OPTIONS:
        sampling = Sampling(temperature, options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0))
        result, margin = truncate(row.double().numpy(), sampling)
        _, logsumexp, cutoffs = drawn(row[None].to(DEVICE), temperature, options)
        last = cutoff(row.double().numpy(), sampling)
        among_equals += int((row[last + 1 :] == row[last]).any())
        assert margin > FLOAT32_BAND, options
        assert cutoffs.tolist() == [last], options
        kept = result[np.isfinite(result)] / temperature
        np.testing.assert_allclose(float(logsumexp[0]), np.logaddexp.reduce(kept), rtol=1e-6)
    assert among_equals >= 4


@needs_interpreter
@pytest.mark.parametrize(("equal", "temperature"), [(0, 1.0), (20, 0.7), (60, 1.0), (140, 0.7)])
def test_blocks_with_the_same_maximum_do_not_make_a_row_wide(equal, temperature, monkeypatch):
    """Only some of 140 blocks can be searched: the blocks above many others with equal maxima."""
    row = -9 + torch.randn(140 * 1024, generator=torch.Generator().manual_seed(0))
    row[5 + 1024 * torch.arange(140)] = torch.linspace(6.0, 0.0, 140)
    row[5 + 1024 * torch.arange(40, 40 + min(equal, 100))] = 3.0
    searched: list[Any] = []
    monkeypatch.setattr(truncation, "wide_cutoff", lambda *arguments: searched.append(arguments))
    for options in ({"top_k": 30}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.3}, {"top_p": 0.1}):
        sampling = Sampling(temperature, options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0))
        _, margin = truncate(row.double().numpy(), sampling)
        assert margin > FLOAT32_BAND, options
        assert drawn(row[None], temperature, options)[2].tolist() == [cutoff(row.double().numpy(), sampling)], options
    assert not searched


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
@pytest.mark.parametrize("every", [7, 100, 1000])
def test_groups_with_nan_are_cut_as_those_with_infinity(every, options):
    row = torch.randn(3000, generator=torch.Generator().manual_seed(every))
    row[::every] = torch.nan
    rows = torch.stack([row, row.nan_to_num(-torch.inf)]).to(DEVICE)
    checked = row_batch(rows, 1.0, torch.full((2,), 5, device=DEVICE), None, **options)
    for got in kernels.sample_rows(checked, SELECT):
        assert got[0] == got[1]


def test_sums_of_equal_tokens_are_exact():
    row = torch.full((5000,), -torch.inf)
    row[1500:2012] = 2.0  # 512, in two blocks
    for top_p in (0.499, 0.749, 0.9999):
        _, logsumexp, cutoffs = drawn(row[None].to(DEVICE), 1.0, {"top_p": top_p})
        kept = int(np.ceil(512 * top_p))
        assert cutoffs.tolist() == [1499 + kept]
        np.testing.assert_allclose(float(logsumexp[0]), 2 + np.log(kept), rtol=1e-6)


@pytest.mark.parametrize("kept", [31, 32, 33, 255, 256, 257, 512, 513])
def test_candidates_may_be_as_many_as_a_vector_has_elements(kept):
    """Also in as many groups, and in two or more blocks; all candidates are kept, or top-p keeps some."""
    logits = torch.full((16 * kept + 1030,), -30.0)
    logits[16 * torch.arange(kept)] = 8 - 1.28 * torch.arange(kept) / kept
    for top_p in (None, 0.7):
        sampling = Sampling(1.0, 0, top_p or 1.0, 0.1)
        result, margin = truncate(logits.double().numpy(), sampling)
        _, logsumexp, cutoffs = drawn(logits[None].to(DEVICE), 1.0, {"min_p": 0.1, "top_p": top_p})
        assert margin > FLOAT32_BAND
        assert cutoffs.tolist() == [cutoff(logits.double().numpy(), sampling)]
        np.testing.assert_allclose(float(logsumexp[0]), np.logaddexp.reduce(result[np.isfinite(result)]), rtol=1e-6)


class Passed(NamedTuple):
    """The input and result of a pass over a row."""

    logits_ptr: Pointer  # [vocab]
    amounts_ptr: Pointer  # [3] float32


@triton.jit
def amounts_kernel(passed, sizes):
    row = whole_row(passed.logits_ptr, 1, sizes.vocab_size)
    amounts = amounts_from((-1.0, 0.5, 2.0), row, 4.0, 1.0, sizes)
    for index in tl.static_range(3):
        tl.store(passed.amounts_ptr + index, amounts[index])


def test_amounts_do_not_depend_on_the_number_of_warps():
    vocab = 40 * 1024 + 5
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    logits[7::1000] = torch.nan
    outputs = []
    for num_warps in (4, 8):
        outputs.append(torch.zeros(3, device=DEVICE))
        bundles = Passed(logits.to(DEVICE), outputs[-1]), sizes_of(1, 0, vocab)
        run_kernel(amounts_kernel, 1, *bundles, num_warps=num_warps)
    assert torch.equal(*outputs)
    weights = torch.exp2(logits.double() - 4)
    want = [float(weights[logits >= threshold].sum()) for threshold in (-1.0, 0.5, 2.0)]
    np.testing.assert_allclose(outputs[0].tolist(), want, rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "options", "with_logits"),
    [
        ("probabilistic", "top-p", True),
        ("probabilistic", "each request's own", False),
        ("synthetic", "each request's own", True),
    ],
)
def test_rejections_while_rows_are_read_change_no_token(method, options, with_logits):
    """Decisions before truncation agree with decisions after it, also for rows that are hard to truncate."""
    batch = case(6, 3 if ON_GPU else 2, 1040, torch.bfloat16, seed=11)
    target = batch.target_logits
    target[0, 1], target[1, 2, 7], target[2, 0, ::3] = -torch.inf, torch.inf, torch.nan
    batch = batch if with_logits else replace(batch, draft_logits=None)
    assert_same(*(verify(method, batch, way, **TRUNCATIONS[options]) for way in ("few", "large")))


def test_a_draft_is_not_rejected_early_because_of_a_token_that_min_p_leaves_out_by_its_last_bit():
    target, draft = torch.full((2, 2048), -60.0), torch.full((1, 2048), -60.0)
    target[:, 3], target[:, 1200] = 1.0, 1 - 1 / 128
    draft[:, 3], draft[:, 5] = 2.25, 0.0
    min_p = float(np.exp(np.float32(-1 / 128)))
    assert np.log(np.float32(min_p)) > np.float32(-1 / 128)  # so p(1200) is less than min_p, if only just
    rows = [row.to(DEVICE, torch.bfloat16).expand(6, *row.shape) for row in (target, draft)]
    ids = torch.full((6, 1), 3, device=DEVICE)
    checked = verification_batch(rows[0], ids, rows[1], None, 1.0, 0, None, min_p=min_p)
    for large in (False, True):
        assert kernels.verify("probabilistic", checked, large=large).num_accepted.tolist() == [1] * 6


def test_a_drafting_step_returns_what_is_kept():
    batch = case(6, 1, 2064, torch.bfloat16, seed=3)
    options = TRUNCATIONS["each request's own"]
    rows = batch.target_logits[:, 0]
    checked = row_batch(
        rows.to(DEVICE), batch.temperature.to(DEVICE), batch.seeds.to(DEVICE), None, **on(DEVICE, options)
    )
    _, logsumexp, cutoffs = kernels.sample_rows(checked, SELECT)
    assert (batch.temperature == 0).any()
    for index in range(6):
        sampling = Sampling(float(batch.temperature[index]), **of_request(options, index))
        row = rows[index].double().numpy()
        result, margin = truncate(row, sampling)
        if margin <= FLOAT32_BAND:
            continue
        asked = of_request(options, index)
        is_whole = sampling.temperature > 0 and asked == {"top_k": 0, "top_p": 1, "min_p": 0}
        assert int(cutoffs[index]) == (-1 if is_whole else cutoff(row, sampling))
        if sampling.temperature > 0:
            kept = result[np.isfinite(result)] / sampling.temperature
            np.testing.assert_allclose(float(logsumexp[index]), np.logaddexp.reduce(kept), rtol=1e-5, atol=1e-5)


@needs_interpreter
@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_programs_may_finish_in_any_order(method):
    batch = case(2, 2, 1040, torch.float32, seed=1)
    usual = verify(method, batch, "few", top_k=40)
    with in_reverse():
        assert_same(verify(method, batch, "few", top_k=40), usual)


@pytest.mark.parametrize("way", small("large", "few"))
def test_block_verification_compares_masses_of_what_is_kept(way):
    requests, vocab = (60, 9000) if ON_GPU else (2, 2064)
    batch = case(requests, 3, vocab, torch.float32, greedy=0, seed=6)
    verify("block", replace(batch, temperature=torch.full((requests,), 1.4)), way, top_p=0.97)


def test_top_p_is_a_share_of_what_top_k_and_min_p_have_kept():
    """Three of four tokens are kept, with 0.9 of the mass; two of them have 0.75 of this mass, but not of the whole mass."""
    rows = torch.tensor([[0.1, 0.4, 0.2, 0.3]], device=DEVICE).log()
    for options in ({"top_k": 3, "top_p": 0.75}, {"min_p": 0.3, "top_p": 0.75}):
        assert drawn(rows, 1.0, options)[2].tolist() == [3]
    assert drawn(rows, 1.0, {"top_p": 0.75})[2].tolist() == [2]


@pytest.mark.parametrize("largest", [3000.0, -3000.0])
def test_min_p_keeps_what_is_a_little_above_its_threshold_however_large_logits_are(largest):
    rows = torch.tensor([[-0.7, -0.69, 0.0, -9.0]], device=DEVICE) + largest  # log(0.5) is -0.693
    assert drawn(rows, 1.0, {"min_p": 0.5})[2].tolist() == [1]


def test_more_drafts_than_stop_bits_are_refused():
    batch = case(1, 28, 20, torch.float32).to(DEVICE)
    with pytest.raises(ValueError, match="'triton' truncates rows of at most 27 drafts, got 28"):
        RejectionSampler("strict", backend="triton")(batch.target_logits, batch.draft_token_ids, seeds=0, top_k=3)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_auto_is_eager_where_kernels_cannot_truncate(backend, monkeypatch):
    monkeypatch.setattr("specdecode.backends.choose", lambda *_: kernels)
    otherwise = PackageSampling(temperature=0.5)
    for drafts, options, is_possible in (
        (27, {"top_k": 3}, True),
        (28, {"top_k": 3}, False),
        (28, {}, True),
        (1, {"top_k": 3, "draft_sampling": otherwise}, False),
    ):
        batch = case(1, drafts, 20, torch.float32)
        tensors = batch.target_logits, batch.draft_token_ids, batch.draft_logits, None, 0.8, 5, None
        checked = verification_batch(*tensors, **options)
        if is_possible:
            assert backends.verifier_of(backend, "probabilistic", checked) is kernels, (drafts, options)
        elif backend == "auto":
            assert backends.verifier_of(backend, "probabilistic", checked) is eager, (drafts, options)
        else:
            with pytest.raises(ValueError, match="'triton' "):
                backends.verifier_of(backend, "probabilistic", checked)


def test_drafts_of_the_targets_temperature_are_known_by_where_it_is(monkeypatch):
    """No value is read: a tensor over other memory counts as another temperature."""
    monkeypatch.setattr("specdecode.backends.choose", lambda *_: kernels)
    buffer, batch = torch.full((4,), 0.8), case(2, 1, 20, torch.float32)
    for temperature, of_drafts, backend in (
        (0.8, 0.8, kernels),
        (buffer[:2], buffer[:2], kernels),
        (buffer[:2], buffer[2:], eager),
        (buffer[:2], buffer[::2], eager),
        (buffer[:2], 0.8, eager),
    ):
        tensors = batch.target_logits, batch.draft_token_ids, batch.draft_logits, None, temperature, 5, None
        checked = verification_batch(*tensors, top_k=3, draft_sampling=PackageSampling(of_drafts))
        assert backends.verifier_of("auto", "probabilistic", checked) is backend, (temperature, of_drafts)
