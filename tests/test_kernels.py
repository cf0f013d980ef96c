"""The Triton backend: tokens against the reference and itself, however rows lie and whatever is tuned.

Without a GPU the kernels run in Triton's interpreter, on few small cases, for a program takes it milliseconds. It runs
programs one after another, so races are for the GPU to show.
"""

import gc
import itertools
import math
import threading
import warnings
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import poisson
from torch import Tensor

from reference import block, greedy, probabilistic, strict, synthetic
from specdecode import AcceptanceSchedule, RejectionSampler, backends, sample
from specdecode.batch import VerificationBatch
from tests import laws
from tests.conftest import ON_GPU
from tests.differential import FLOAT32_BAND, assert_same_tokens, case

kernels = pytest.importorskip("specdecode.kernels", reason="needs Triton")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

block_kernels, probabilistic_kernels = kernels.block, kernels.probabilistic
launches, reading, rows, search, selection, steps = (
    pytest.importorskip(f"specdecode.kernels.{name}")
    for name in ("launches", "reading", "rows", "search", "selection", "steps")
)

# The interpreter computes with NumPy, which warns of what the kernels deal with: infinities, NaN, overflow.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SCHEDULE = AcceptanceSchedule.from_mean_rate(0.6, num_draft_tokens=16)
KINDS = ["strict", "probabilistic", "given logsumexp", "deterministic", "synthetic", "synthetic strict"]
KINDS += ["block", "block given logsumexp", "block deterministic"]

if ON_GPU:
    CASES = list(itertools.product(KINDS, [1, 2, 7, 1000], [0, 1, 3, 7, 16], DTYPES))
    CASES += itertools.product(KINDS, [32003, 128256, 151936, 152064], [3], [torch.bfloat16, torch.float32])
    CASES += itertools.product(KINDS, [151936], [16], [torch.bfloat16])
else:  # each kind with each vocabulary, number of drafts and dtype, but not all at once
    CASES = list(itertools.product(KINDS, [1, 1025, 2064], [0, 2], DTYPES))[::5]
IDS = [f"{kind}-V{vocab}-K{drafts}-{str(dtype).removeprefix('torch.')}" for kind, vocab, drafts, dtype in CASES]


FEW, MANY, LAZY = WAYS = {"lazy": False, "many": False}, {"lazy": False, "many": True}, {"lazy": True}
"""How calls go about it, by their number of requests and rows."""
FEW_KINDS = KINDS if ON_GPU else ["strict", "given logsumexp", "block"]


def small(*cases):
    """All cases on a GPU, the first in the interpreter."""
    return cases if ON_GPU else cases[:1]


def verify(kind: str, batch, **options):
    """Run the kernels on a case, in one of the ways that calls differ."""
    return kernels.verify(*checked(kind, batch), **options)


def checked(kind: str, batch) -> tuple[str, VerificationBatch, AcceptanceSchedule | None]:
    """The method, the checked arguments and the schedule of such a call."""
    method, draft_logits, logsumexp = told_apart(kind, batch)
    arguments = VerificationBatch.check(
        batch.target_logits,
        batch.draft_token_ids,
        draft_logits,
        logsumexp,
        batch.temperature,
        batch.seeds,
        batch.positions,
    )
    return method, arguments, SCHEDULE if method == "synthetic" else None


def told_apart(kind: str, batch) -> tuple[str, Tensor | None, Tensor | None]:
    """The method that a kind of call names, and the draft's logits and their logsumexp where it gives them."""
    method = kind.split()[0] if kind.split()[0] in ("strict", "synthetic", "block") else "probabilistic"
    draft_logits = None if kind.endswith(("strict", "deterministic")) else batch.draft_logits
    logsumexp = None
    if kind.endswith("given logsumexp"):
        columns = [draft_logsumexp(batch, offset) for offset in range(batch.draft_logits.shape[1])]
        logsumexp = torch.stack(columns, 1) if columns else torch.empty(*batch.draft_token_ids.shape, device=DEVICE)
    return method, draft_logits, logsumexp


def draft_logsumexp(batch, offset: int) -> Tensor:
    rows, positions = batch.draft_logits[:, offset], batch.positions + offset
    return (
        RejectionSampler("probabilistic", backend="triton")
        .draft(rows, batch.temperature, batch.seeds, positions)
        .logsumexp
    )


def expected(kind: str, batch) -> list:
    """The reference's verdicts."""
    verdicts = []
    for index in range(len(batch.seeds)):
        target, token_ids, draft = batch.rows(index)
        request = batch.request(index)
        if kind.startswith("strict"):
            verdicts.append(strict.verify(target, token_ids, **request))
        elif kind.startswith("synthetic"):
            draft = None if kind == "synthetic strict" else draft
            rates = SCHEDULE.conditional_rates
            verdicts.append(synthetic.verify(target, token_ids, draft, conditional_rates=rates, **request))
        else:
            draft = None if kind.endswith("deterministic") else draft
            method = block if kind.startswith("block") else probabilistic
            verdicts.append(method.verify(target, token_ids, draft, **request))
    return verdicts


def forget_plans():
    kernels.plan_verification.cache_clear()
    kernels.plan_sampling.cache_clear()


def assert_same(one, other):
    for name, got, want in zip(one._fields, one, other):
        assert torch.equal(got, want), name


@pytest.mark.parametrize(("kind", "vocab", "drafts", "dtype"), CASES, ids=IDS)
def test_tokens_are_the_references(kind, vocab, drafts, dtype):
    requests = 3 if not ON_GPU or vocab > 10_000 else 20
    batch = case(requests, drafts, vocab, dtype, seed=vocab + drafts)
    verdicts = expected(kind, batch)
    for lazy in (False, True):
        output = verify(kind, batch.to(DEVICE), lazy=lazy)
        assert_same_tokens(output.token_ids, verdicts, FLOAT32_BAND)


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("vocab", small(1025, 2048, 50257))
def test_the_ways_of_few_and_of_many_requests_give_the_same_bits(kind, vocab):
    batch = case(200 if ON_GPU else 4, 4, vocab, torch.bfloat16).to(DEVICE)
    few = verify(kind, batch, **FEW)
    assert_same(verify(kind, batch, **MANY), few)
    assert_same(verify(kind, batch, **LAZY), few)


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("vocab", small(9221, 9232, 151_936))
def test_how_much_a_program_reads_does_not_matter(kind, vocab, monkeypatch):
    batch = case(70 if ON_GPU else 2, 2, vocab, torch.bfloat16, seed=4).to(DEVICE)
    for lazy in (False, True):
        usual = verify(kind, batch, lazy=lazy)
        for tiles in (1, 2, 3, 8) if ON_GPU else (1, 3):  # of four blocks each: more than there are too
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "reading_tiles", lambda *sizes, tiles=tiles: tiles)
                forget_plans()
                assert_same(verify(kind, batch, lazy=lazy), usual)
    forget_plans()


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_grid_of_one_dimension_does_as_well(kind, monkeypatch):
    batch = case(70 if ON_GPU else 2, 2, 9232, torch.bfloat16, seed=5).to(DEVICE)
    row = (batch.target_logits[:, 0], batch.temperature, batch.seeds)
    drawn = RejectionSampler("probabilistic", backend="triton").draft(*row)
    usual = [verify(kind, batch, lazy=lazy) for lazy in (False, True)]
    monkeypatch.setattr(launches, "MOST_PROGRAMS", 1)  # as if there were more requests than a second dimension takes
    forget_plans()
    for lazy, output in zip((False, True), usual):
        assert_same(verify(kind, batch, lazy=lazy), output)
    assert_same(RejectionSampler("probabilistic", backend="triton").draft(*row), drawn)
    forget_plans()


@triton.jit
def peek_nothing(state_ptr, request, num_draft_tokens):
    """Answer as `peek_stop` does before any verdict is known."""
    return num_draft_tokens


@pytest.mark.skipif(ON_GPU, reason="needs the interpreter, which looks up what a kernel calls at each call")
@pytest.mark.parametrize("kind", ["strict", "probabilistic", "given logsumexp", "block"])
def test_a_row_that_ceases_to_matter_while_it_is_read_changes_nothing(kind, monkeypatch):
    batch = case(3, 3, 9232, torch.bfloat16, seed=7)
    usual, unread = verify(kind, batch, lazy=True), []
    monkeypatch.setattr(kernels, "reading_tiles", lambda *sizes: 3)
    monkeypatch.setattr(reading, "peek_stop", peek_nothing)  # so that it is left to the second look
    load = reading.load_row_blocks
    seen = lambda row, first, wanted, *rest: unread.append(not wanted) or load(row, first, wanted, *rest)  # noqa: E731
    monkeypatch.setattr(reading, "load_row_blocks", seen)
    forget_plans()
    assert_same(verify(kind, batch, lazy=True), usual)
    forget_plans()
    assert any(unread) == ("logsumexp" not in kind)


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("vocab", small(2064, 1025, 50257))
def test_a_request_does_not_depend_on_the_batch(kind, vocab):
    batch = case(260 if ON_GPU else 4, 3, vocab, torch.bfloat16, seed=3).to(DEVICE)
    whole = verify(kind, batch)
    order = torch.randperm(len(batch.seeds), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    parts = [order, order[:3], order[:1]]
    for part in parts:
        chosen = replace(batch, **{name: value[part] for name, value in vars(batch).items()})
        for name, got, want in zip(whole._fields, verify(kind, chosen), whole):
            assert torch.equal(got, want[part]), name
    # Nor on padding: more offsets, none of them a draft.
    wider = replace(
        batch,
        target_logits=torch.cat([batch.target_logits, batch.target_logits[:, :2]], 1),
        draft_logits=torch.cat([batch.draft_logits, batch.draft_logits[:, :2]], 1),
        draft_token_ids=torch.nn.functional.pad(batch.draft_token_ids, (0, 2), value=-1),
    )
    padded = verify(kind, wider)
    assert torch.equal(padded.token_ids[:, :4], whole.token_ids)
    assert (padded.token_ids[:, 4:] == -1).all()
    assert torch.equal(padded.num_draft_tokens, whole.num_draft_tokens)


def sliced(logits: Tensor) -> Tensor:
    """The same rows, starting at odd places of wider ones."""
    wide = logits.new_full((*logits.shape[:-1], logits.shape[-1] + 5), 7)
    wide[..., 3:-2] = logits
    return wide[..., 3:-2]


def strided(logits: Tensor) -> Tensor:
    """The same rows, every other number of wider ones."""
    return logits.repeat_interleave(2, dim=-1)[..., ::2]


def transposed(logits: Tensor) -> Tensor:
    """The same rows, the offsets outermost."""
    return logits.transpose(0, 1).contiguous().transpose(0, 1)


def column_major(logits: Tensor) -> Tensor:
    """The same rows, tokens outermost."""
    return logits.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def negated_lazily(logits: Tensor) -> Tensor:
    """The same rows, of which PyTorch holds the negatives."""
    return torch._neg_view(-logits)


@pytest.mark.parametrize("layout", [sliced, strided, transposed, column_major, negated_lazily])
@pytest.mark.parametrize("kind", small("probabilistic", "strict", "synthetic", "block"))
@pytest.mark.parametrize("vocab", small(2064, 1025))
def test_rows_may_lie_in_any_way(layout, kind, vocab):
    batch = case(30 if ON_GPU else 3, 3, vocab, torch.float32, seed=5).to(DEVICE)
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


@pytest.mark.parametrize("kind", small("block", "probabilistic"))
@pytest.mark.parametrize(("target", "draft"), [(torch.bfloat16, torch.float32), (torch.float64, torch.bfloat16)])
def test_target_and_draft_may_differ_in_dtype_and_layout(kind, target, draft):
    batch = case(30 if ON_GPU else 4, 2, 2064, torch.bfloat16, seed=8).to(DEVICE)  # whose values every dtype holds
    whole = verify(kind, batch)
    cast = replace(batch, target_logits=batch.target_logits.to(target), draft_logits=batch.draft_logits.to(draft))
    assert_same_tokens(verify(kind, cast).token_ids, expected(kind, batch), FLOAT32_BAND)
    for layout in (sliced, strided):
        assert_same(verify(kind, replace(batch, draft_logits=layout(batch.draft_logits))), whole)


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_packed_rows_and_cached_draft_rows_need_no_copy(kind):
    # Requests of 3, 1, 0 and 2 drafts, their target rows packed one after another, their draft rows in a cache of 9 slots.
    drafts, vocab = [3, 1, 0, 2], 1025 if ON_GPU else 30
    batch = case(4, 3, vocab, torch.bfloat16, greedy=0.3, seed=11).to(DEVICE)
    token_ids = batch.draft_logits.argmax(2)
    for request, count in enumerate(drafts):
        token_ids[request, count:] = -1
    padded = replace(batch, draft_token_ids=token_ids)
    packed = torch.cat([rows[: count + 1] for rows, count in zip(padded.target_logits, drafts)])
    packed = torch.cat([packed, packed.new_full((3, vocab), torch.nan)])  # what lies behind is nobody's
    firsts = torch.tensor([0, *itertools.accumulate(count + 1 for count in drafts)][:4], device=DEVICE)
    slots = torch.tensor([7, 2, 8, 0], device=DEVICE, dtype=torch.int32)
    cache = torch.full((9, 3, vocab), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    cache[slots.long()] = padded.draft_logits
    view = packed.as_strided((len(packed) - 3, 4, vocab), (vocab, vocab, 1))

    def call(target_logits, draft_logits, **options):
        method, given, logsumexp = told_apart(kind, padded)
        fields = VerificationBatch(
            target_logits,
            padded.draft_token_ids,
            None if given is None else draft_logits,
            logsumexp,
            padded.temperature,
            padded.seeds,
            padded.positions,
        )
        return kernels.verify(method, fields, SCHEDULE if method == "synthetic" else None, **options)

    for lazy in (False, True):
        index = {"target_index": firsts, "draft_index": slots, "lazy": lazy}
        assert_same(call(view, cache, **index), call(padded.target_logits, padded.draft_logits))


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_nan_and_infinities_count_as_they_should(kind):
    vocab = 1100
    batch = case(8, 1, vocab, torch.float32, greedy=0.3, seed=2)
    target, draft = batch.target_logits, batch.draft_logits
    target[0], draft[1] = torch.nan, torch.nan
    target[2], draft[2] = -torch.inf, -torch.inf
    target[3, :, 1030:1033] = torch.inf
    draft[4, :, [5, 1050]] = torch.inf
    target[5, :, ::3] = torch.nan
    draft[5, :, ::2] = torch.nan
    target[6, :, :1024] = -torch.inf
    draft[6, :, 1024:] = -torch.inf
    target[7, :, 3], draft[7, :, 2] = torch.nan, -torch.inf
    moved = batch.to(DEVICE)
    for lazy in (False, True):
        output = verify(kind, moved, lazy=lazy)
        assert_same_tokens(output.token_ids, expected(kind, batch), FLOAT32_BAND)
        assert output.invalid.tolist() == [verdict.invalid for verdict in expected(kind, batch)]


def test_ids_and_temperatures_that_make_no_sense_are_harmless():
    batch = case(6, 3, 1025, torch.bfloat16, greedy=0).to(DEVICE)
    ids = batch.draft_token_ids.clone()
    ids[0, 1], ids[1, 0], ids[2, 2] = 1025, 2**40, -7
    sane = ids.where((ids >= 0) & (ids < 1025), -1)
    temperature = batch.temperature.clone()
    temperature[3], temperature[4], temperature[5] = torch.nan, -1.0, torch.inf
    harmless = temperature.clone()
    harmless[3], harmless[4], harmless[5] = 0, 0, torch.finfo(torch.float32).max

    def run(ids, temperature):
        fields = (batch.target_logits, ids, batch.draft_logits, None, temperature, batch.seeds, batch.positions)
        return kernels.verify("probabilistic", VerificationBatch(*fields))

    assert_same(run(ids, temperature), run(sane, harmless))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_strict_emits_what_sample_draws(temperature):
    batch = case(40 if ON_GPU else 3, 3, 2064, torch.bfloat16).to(DEVICE)
    strict_sampler = RejectionSampler("strict", backend="triton")
    output = strict_sampler(
        batch.target_logits,
        batch.draft_token_ids,
        temperature=temperature,
        seeds=batch.seeds,
        positions=batch.positions,
    )
    drawn = [
        strict_sampler.draft(batch.target_logits[:, i], temperature, batch.seeds, batch.positions + i).token_ids
        for i in range(4)
    ]
    emitted = output.token_ids != -1
    assert torch.equal(output.token_ids[emitted], torch.stack(drawn, 1)[emitted])


def test_one_seed_means_the_seeds_from_there_on():
    batch = case(4, 2, 50, torch.float32, greedy=0).to(DEVICE)
    sampler = RejectionSampler("probabilistic", backend="triton")
    for first in (5, 2**63 - 2):
        seeds = torch.arange(4, device=DEVICE) + first
        one = sampler(batch.target_logits, batch.draft_token_ids, batch.draft_logits, seeds=first)
        zeros = torch.zeros_like(seeds)
        assert_same(
            one, sampler(batch.target_logits, batch.draft_token_ids, batch.draft_logits, seeds=seeds, positions=zeros)
        )


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("gap", [85.0, 95.0, 101.0, 103.0])
def test_no_impossible_token_is_drawn_where_what_is_left_is_tiny(gap, lazy):
    # p without what q takes is one token, e^-gap below the other: next to nothing, or nothing at all, in float32.
    requests = 6 if ON_GPU else 3
    target = torch.full((requests, 2, 2064), -torch.inf)
    target[..., 3], target[..., 1500] = 0, -gap
    draft = torch.full((requests, 1, 2064), -torch.inf)
    draft[..., 3] = 0
    ids = torch.full((requests, 1), 3)
    never = AcceptanceSchedule.from_rates([0.0])
    for draft_logits in (draft.to(DEVICE), None):
        method, schedule = ("synthetic", never) if draft_logits is not None else ("probabilistic", None)
        batch = VerificationBatch.check(target.to(DEVICE), ids.to(DEVICE), draft_logits, None, 1.0, 0, None)
        output = kernels.verify(method, batch, schedule, lazy=lazy)
        assert set(output.token_ids.unique().tolist()) <= {3, 1500, -1}


def test_empty_batches_launch_nothing():
    output = verify("probabilistic", case(0, 3, 10, torch.float32).to(DEVICE))
    assert [tuple(field.shape) for field in output] == [(0, 4), (0,), (0,), (0,)]
    tokens, _ = kernels.sample(backends_row_batch(torch.zeros(0, 10, device=DEVICE)), (1, 2))
    assert tokens.shape == (0,)


def backends_row_batch(logits: Tensor):
    from specdecode.batch import RowBatch

    return RowBatch.check(logits, 1.0, 0, None)


# ---------------------------------------------------------------------------------------------------------------------
# Which backend runs
# ---------------------------------------------------------------------------------------------------------------------


def test_a_backend_that_is_named_is_taken_or_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backends.obstacle.cache_clear()
    logits, ids = torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=torch.int64)
    try:
        with pytest.raises(ValueError, match=r"backend: 'triton' cannot run here, the logits are on cpu"):
            RejectionSampler("strict", backend="triton")(logits, ids)
        with pytest.raises(ValueError, match=r"backend: 'triton' cannot run here"):
            RejectionSampler("strict", backend="triton").draft(logits[0])
        assert RejectionSampler("strict")(logits, ids).token_ids.shape == (1, 2)  # eager, without a word
    finally:
        backends.obstacle.cache_clear()


def test_auto_says_why_it_does_not_take_the_kernels(monkeypatch):
    class OnGpu:
        device, is_cpu = torch.device("cuda"), False

    monkeypatch.setattr(backends, "obstacle", lambda device: "triton is not installed")
    backends.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="eager backend is used.*triton is not installed"):
        assert backends.choose("auto", OnGpu()) is backends.eager
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose("auto", OnGpu()) is backends.eager  # said once


@needs_gpu
def test_auto_takes_the_kernels_on_a_gpu():
    assert backends.choose("auto", torch.zeros(1, device="cuda")) is kernels
    assert backends.choose("auto", torch.zeros(1)) is backends.eager


# ---------------------------------------------------------------------------------------------------------------------
# Plans: what the kernels are given by a first call, through Triton, and by those after it
# ---------------------------------------------------------------------------------------------------------------------

KERNELS = [
    (kernels, "summarise_kernel"),
    (kernels, "sample_kernel"),
    (kernels, "read_kernel"),
    (kernels, "finish_by_sample_kernel"),
    (kernels.probabilistic, "finish_by_ratio_kernel"),
    (kernels.probabilistic, "emit_kernel"),
    (kernels.block, "note_ratio_kernel"),
    (kernels.block, "emit_kernel"),
]
STREAM = 7


class Recorded:
    """Stands in for a kernel and for its compiled variants: notes what each launch is given, and launches nothing."""

    function, packed_metadata = object(), object()

    def __init__(self, kernel, launches: list):
        self.kernel, self.arg_names, self.launches = kernel, kernel.arg_names, launches

    def __getitem__(self, grid):
        def launch(*values, num_warps=None, launch_pdl=None, maxnreg=None, stream=None):
            how = "by hooks" if stream == STREAM else "by Triton"
            self.note(how, grid, values)
            return self

        return launch

    def run(self, *values):
        grid, (stream, function, metadata, *hooks), values = values[:3], values[3:9], values[9:]
        assert (stream, function, metadata, hooks) == (STREAM, self.function, self.packed_metadata, [None] * 3)
        self.note("by plan", grid, values)

    def note(self, how: str, grid: tuple, values: tuple):
        tensors = {name: value for name, value in zip(self.arg_names, values) if isinstance(value, Tensor)}
        addresses = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
        self.launches.append(
            SimpleNamespace(
                how=how,
                what=(self.kernel, grid),
                arguments=dict(zip(self.arg_names, addresses, strict=True)),
                dtypes={name: tensor.dtype for name, tensor in tensors.items()},
                tensors=[weakref.ref(tensor) for tensor in tensors.values()],
            )
        )


@pytest.fixture
def recorded(monkeypatch):
    """The launches made, in order."""
    launches: list = []
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Recorded(getattr(module, name), launches))
    driver = SimpleNamespace(get_current_stream=lambda index: STREAM)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    forget_plans()
    yield launches
    forget_plans()


WORKSPACE = ["statistics_ptr", "scalars_ptr", "sums_ptr"]
OUTPUT = {
    "token_ids_ptr": "token_ids",
    "num_accepted_ptr": "num_accepted",
    "num_drafts_ptr": "num_draft_tokens",
    "invalid_ptr": "invalid",
}


def laid_out(launch, state: int, output) -> dict:
    """The arguments of a launch, those of the workspace relative to its start, the output's by name."""
    arguments = dict(launch.arguments)
    for name in {"state_ptr", *WORKSPACE} & arguments.keys():
        if arguments[name] is not None:
            arguments[name] -= state
    for name, field in OUTPUT.items():
        if name in arguments:
            assert arguments[name] == getattr(output, field).data_ptr()
            arguments[name] = field
    return arguments


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_launches_what_triton_would(recorded, kind, drafts, lazy):
    def call(arguments, how):
        del recorded[:]
        output = kernels.verify(*arguments, lazy=lazy)
        assert {launch.how for launch in recorded} == {how}
        state = recorded[0].arguments["state_ptr"]
        launched = [(*launch.what, laid_out(launch, state, output)) for launch in recorded]
        if drafts == 0:  # then this has no length, and its place is of no consequence
            for *_, arguments in launched:
                arguments.pop("scalars_ptr", None)
        return launched

    one, other = (
        checked(kind, replace(case(2, drafts, 2064, torch.bfloat16, seed=seed).to(DEVICE), temperature=seed / 3))
        for seed in (1, 2)
    )
    call(one, "by Triton")
    by_plan = call(other, "by plan")
    forget_plans()
    assert by_plan == call(other, "by Triton")
    for launch in recorded:
        for name in {"state_ptr", *WORKSPACE} & launch.dtypes.keys():
            assert launch.dtypes[name] == (torch.int32 if name == "state_ptr" else torch.float32), name


def test_the_parts_of_the_workspace_do_not_overlap(recorded):
    requests, drafts, vocab = 3, 2, 5000
    verify("block", case(requests, drafts, vocab, torch.bfloat16).to(DEVICE), lazy=True)
    arguments = {name: value for launch in recorded for name, value in launch.arguments.items()}
    blocks = -(-vocab // 1024)
    lengths = {
        "state_ptr": requests * (4 + drafts + 1),
        "statistics_ptr": requests * (2 * drafts + 1) * 2 * blocks,
        "scalars_ptr": requests * drafts * probabilistic_kernels.SCALARS.value,
        "sums_ptr": requests * drafts * blocks,
    }
    parts = sorted((arguments[name], 4 * length) for name, length in lengths.items())
    assert all(start % 16 == 0 for start, _ in parts)
    assert all(start + length <= following for (start, length), (following, _) in itertools.pairwise(parts))


def test_only_what_programs_count_starts_as_zeros(recorded, monkeypatch):
    arguments = checked("probabilistic", case(5, 3, 2064, torch.bfloat16).to(DEVICE))
    memory, empty = torch.empty(10_000, dtype=torch.int32, device=DEVICE), torch.empty

    def allocate(*size, **options):
        return memory if len(size) == 1 and size[0] > 5 else empty(*size, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    for lazy, zeros in ((False, 0), (True, 5 * (4 + 4))):
        memory.fill_(-1)
        kernels.verify(*arguments, lazy=lazy)
        assert (memory[:zeros] == 0).all()
        assert (memory[zeros:] == -1).all()


def test_calls_that_are_alike_share_a_plan(recorded):
    batch = case(4, 3, 2064, torch.bfloat16).to(DEVICE)

    def asks_triton(**changes) -> bool:
        del recorded[:]
        verify("probabilistic", SimpleNamespace(**{**vars(batch), **changes}))
        return recorded[0].how == "by Triton"

    wider = torch.zeros(4, 4, 2064 + 16, dtype=torch.bfloat16, device=DEVICE)
    ids, target = batch.draft_token_ids, batch.target_logits
    assert asks_triton()
    assert not asks_triton()
    for change in (
        {"target_logits": wider[..., :2064]},  # other strides
        {"target_logits": wider[..., 1:2065]},  # the same strides, at no multiple of 16 bytes
        {"target_logits": target.float()},
        {"target_logits": target.half(), "draft_logits": batch.draft_logits.half()},
        {"target_logits": target[..., :2048], "draft_logits": batch.draft_logits[..., :2048]},
        {"draft_token_ids": ids.int()},
        {"draft_token_ids": ids.T.contiguous().T},
        {"temperature": batch.temperature.half()},
        {"temperature": 0.7},
        {"seeds": 5},
        {"positions": None},
        {name: value[:3] for name, value in vars(batch).items()},
    ):
        assert asks_triton(**change), change.keys()
        assert not asks_triton(**change), change.keys()
    for change in (
        {"target_logits": target.clone(), "draft_token_ids": ids.clone()},
        {"seeds": strided(batch.seeds), "positions": strided(batch.positions)},
        {"temperature": 0.3},
        {"seeds": 6},
    ):
        assert not asks_triton(**change), change.keys()


def test_plans_keep_no_tensor_alive(recorded, monkeypatch):
    allocated, empty = [], torch.empty

    def allocate(*size, **options):
        tensor = empty(*size, **options)
        allocated.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "empty", allocate)
    sampler = RejectionSampler("block", backend="triton")
    for _ in range(2):
        batch = case(2, 3, 2064, torch.bfloat16).to(DEVICE)
        output = sampler(batch.target_logits, batch.draft_token_ids, batch.draft_logits)
        drawn = sampler.draft(batch.draft_logits[:, 0])
    assert {launch.how for launch in recorded} == {"by Triton", "by plan"}
    held = [weakref.ref(tensor) for tensor in (*vars(batch).values(), *output, *drawn)]
    held += [*allocated, *(tensor for launch in recorded for tensor in launch.tensors)]
    del batch, output, drawn
    gc.collect()
    assert [tensor() for tensor in held if tensor() is not None] == []
    assert kernels.plan_verification.cache_info().currsize == 1


def test_launches_are_told_to_hooks(recorded, monkeypatch):
    batch = case(2, 3, 2064, torch.bfloat16).to(DEVICE)
    verify("probabilistic", batch)
    del recorded[:]
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    verify("probabilistic", batch)
    assert [launch.how for launch in recorded] == ["by hooks"] * 2


# ---------------------------------------------------------------------------------------------------------------------
# What only a GPU shows
# ---------------------------------------------------------------------------------------------------------------------


def test_a_residual_is_precise_where_all_logits_are_shifted_and_cold():
    # Nothing of size 1 / T may be rounded and be taken from both p and q.
    requests = 64 if ON_GPU else 20
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(requests, 1, 40, generator=generator).expand(requests, 2, 40).contiguous()
    draft = target[:, :1] + 0.001 * torch.randn(requests, 1, 40, generator=generator)
    batch = replace(
        case(requests, 1, 40, torch.float32, greedy=0),
        target_logits=target,
        draft_logits=(draft * 4096).round() / 4096 + 1024,  # which float32 holds exactly
        draft_token_ids=torch.zeros(requests, 1, dtype=torch.int64),
        temperature=torch.full((requests,), 0.05),
    )
    shifted = verify("block", batch.to(DEVICE)).token_ids
    unshifted = replace(batch, draft_logits=batch.draft_logits - 1024)
    assert torch.equal(shifted, verify("block", unshifted.to(DEVICE)).token_ids)
    assert_same_tokens(shifted, expected("block", batch), FLOAT32_BAND)


def hopeless(requests: int, vocab: int, closeness: float):
    """A batch of one draft each, which the target makes impossible; draft rows are as close to the target's as is said.

    They differ by blocks, some of which have a residual and some none, and a little by tokens. If infinitely, the first and
    half of the others are none of the draft's: there the residual is all of p.
    """
    batch = case(requests, 1, vocab, torch.float32, greedy=0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (requests, 1), generator=generator)
    by_block = torch.randn(requests, 1, -(-vocab // 1024), generator=generator).repeat_interleave(1024, 2)[..., :vocab]
    by_token = torch.randn(requests, 1, vocab, generator=generator)
    draft = batch.target_logits[:, :1]
    if closeness == math.inf:
        by_block[..., :1024].abs_()
        draft = torch.where(by_block > 0, -torch.inf, draft)
    else:
        draft = draft + closeness * (by_block + by_token / 10)
    target = batch.target_logits.scatter(2, ids[..., None].expand(requests, 2, 1), -torch.inf)
    temperature = torch.full((requests,), 0.7)
    return replace(batch, target_logits=target, draft_logits=draft, draft_token_ids=ids, temperature=temperature)


@triton.jit
def search_and_sum(
    found_ptr,  # [batch, 2 + tests, 2] int32
    statistics_ptr,  # [2 * batch, num_blocks, 2] float32
    sums_ptr,  # [batch, num_blocks] float32
    target_ptr,  # [batch, vocab_size] float32
    draft_ptr,  # [batch, vocab_size] float32
    fractions_ptr,  # [tests] float32
    shared_sums_ptr,  # [batch, tests, num_blocks] float32
    counts_ptr,  # [batch, tests, 2] int32: rounds that are claimed; that are summed, or programs that have finished
    open_ptr,  # [batch, tests] int64
    tests,
    members,
    patience,
    vocab_size,
    num_blocks,
    temperature,
    LEADERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """By its bounds, and having summed it all: draw a residual's block, and tell whether it reaches some sums.

    And tell whether each bound holds (1), beside what is to be (1).
    """
    request = tl.program_id(0) // members
    member = tl.program_id(0) % members
    key = (request.to(tl.int64), request.to(tl.int64))
    target_row = (target_ptr + request * vocab_size, 1, vocab_size)
    draft_row = (draft_ptr + request * vocab_size, 1, vocab_size)
    for first in range(0, num_blocks, BLOCKS):
        parts = rows.load_row_blocks(target_row, first, True, 1, BLOCKS, 128)
        rows.store_statistics(statistics_ptr, 2 * request, parts, first, num_blocks, temperature, BLOCKS, False)
        parts = rows.load_row_blocks(draft_row, first, True, 1, BLOCKS, 128)
        rows.store_statistics(statistics_ptr, 2 * request + 1, parts, first, num_blocks, temperature, BLOCKS, False)
    tl.debug_barrier()
    statistics = rows.load_statistics(statistics_ptr, 2 * request, True, num_blocks, MAX_BLOCKS)
    peak, total, _, of_target = selection.merge(statistics, target_row, num_blocks, temperature, 1, MAX_BLOCKS)
    of_draft = rows.load_statistics(statistics_ptr, 2 * request + 1, True, num_blocks, MAX_BLOCKS)
    draft_peak, draft_total, _, _ = selection.merge(of_draft, draft_row, num_blocks, temperature, 1, MAX_BLOCKS)
    scalars = (peak, draft_peak, probabilistic_kernels.log_quotient(draft_total, total))
    for first in range(0, num_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        target, draft = probabilistic_kernels.load_both(target_row, draft_row, blocks, 1, 1, 128)
        residual = probabilistic_kernels.sum_residual(target, draft, scalars, rows.base_2_scale(temperature))
        tl.store(sums_ptr + request * num_blocks + blocks, residual, mask=blocks < num_blocks)
    tl.debug_barrier()
    blocks = tl.arange(0, MAX_BLOCKS)
    sums = tl.load(sums_ptr + request * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
    times = selection.times_of_blocks(key, 0, 1, MAX_BLOCKS)
    found_ptr += request * (2 + tests) * 2
    bounds = search.bounds_of_residual(of_target)
    keys = search.keys_of(bounds, num_blocks)
    holds = (sums <= bounds) & (bounds <= search.most_of(keys, MAX_BLOCKS).to(tl.float32, bitcast=True))
    holds &= search.least_of(keys, MAX_BLOCKS) <= bounds
    tl.store(found_ptr, tl.min(tl.where(blocks < num_blocks, holds, True).to(tl.int32), 0))
    tl.store(found_ptr + 1, 1)
    searched = probabilistic_kernels.select_residual_block(
        of_target, times, target_row, draft_row, scalars, key, 0, num_blocks, temperature, 1, 1, LEADERS, BLOCKS, 128,
        MAX_BLOCKS,
    )  # fmt: skip
    tl.store(found_ptr + 2, searched)
    all_of_it = rows.sum_in_order(sums)
    tl.store(found_ptr + 3, tl.where(all_of_it > 0, selection.select_block(sums, times), -1))
    for test in range(tests):
        least = all_of_it * tl.load(fractions_ptr + test)
        place = request * tests + test
        enough, knowing = block_kernels.excess_reaches(
            least, statistics, target_row, draft_row, scalars,
            (shared_sums_ptr + place * num_blocks, counts_ptr + place * 2, counts_ptr + place * 2 + 1),
            (member, members, patience, members == 1), (open_ptr + place, place + 1), num_blocks, temperature, 1, 1,
            LEADERS, BLOCKS, 128, MAX_BLOCKS,
        )  # fmt: skip
        if knowing > 0:
            tl.store(found_ptr + 4 + 2 * test, enough.to(tl.int32))
        tl.store(found_ptr + 5 + 2 * test, (all_of_it >= least).to(tl.int32))


# About the sum itself they are so close that only all of it tells.
FRACTIONS = [0.1, 0.9, 1 - 1e-4, 1 - 2**-23, 1.0, 1 + 2**-22, 1 + 1e-4, 1.2, 10]


def search_by_bounds(
    batch,
    temperature: float,
    leaders: int,
    fractions: list[float],
    max_blocks: int = 256,
    members: int = 1,
    others=(math.nan, 0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Search first rows' residuals; return what was found, what is to be, and the counts of claims and of what is done.

    `others` say that they have summed each block to this, in so many rounds, if given.
    """
    target, draft = (logits[:, 0].contiguous().to(DEVICE) for logits in (batch.target_logits, batch.draft_logits))
    requests, vocab = target.shape
    num_blocks, tests = -(-vocab // 1024), len(fractions)
    found = torch.full((requests, 2 + tests, 2), -2, dtype=torch.int32, device=DEVICE)
    work = torch.empty(2, 2 * requests * num_blocks * 2, device=DEVICE)
    shared_sums = torch.full((requests, tests, num_blocks), others[0], device=DEVICE)
    counts = torch.zeros(requests, tests, 2, dtype=torch.int32, device=DEVICE)
    counts[..., 1] = others[1]
    is_open = torch.zeros(requests, tests, dtype=torch.int64, device=DEVICE)
    search_and_sum[(requests * members,)](
        found,
        *work,
        target,
        draft,
        torch.tensor(fractions).to(DEVICE),
        shared_sums,
        counts,
        is_open,
        tests,
        members,
        2 * num_blocks // 4 // members,
        vocab,
        num_blocks,
        temperature,
        LEADERS=leaders,
        BLOCKS=4,
        MAX_BLOCKS=max_blocks,
        num_warps=8,
    )
    assert (is_open == 0).all()
    return found.cpu(), counts.cpu()


def assert_found_by_bounds(*case, **options) -> tuple[list[int], torch.Tensor]:
    """Check such searches; return how many reach each fraction of their sums, and the counts."""
    found, counts = search_by_bounds(*case, **options)
    assert torch.equal(found[..., 0], found[..., 1])
    return found[:, 2:, 1].sum(0).tolist(), counts


@pytest.mark.parametrize(("closeness", "leaders"), [(0.0, 8), (1e-4, 1), (0.01, 2), (0.3, 1), (3.0, 8), (math.inf, 1)])
@pytest.mark.parametrize("vocab", small(6160, 151_936, 50_257))
def test_what_is_found_by_bounds_is_what_is_found_by_summing_all(vocab, closeness, leaders):
    requests = 300 if ON_GPU else 2
    reached, counts = assert_found_by_bounds(hopeless(requests, vocab, closeness), 0.7, leaders, FRACTIONS)
    claimed, summed = counts.unbind(2)
    assert (summed == 0).all()  # for nobody helped
    assert ((claimed == 0) | (claimed == -(-vocab // 1024 // 4))).all()  # nor could anybody afterwards
    if closeness > 0:
        assert reached == [requests] * 5 + [0] * 4


@pytest.mark.parametrize(("vocab", "max_blocks"), [(8192, 8), (6160, 2**17)])  # keys of 3 bits for the block, and of 17
def test_bounds_hold_however_many_bits_of_a_key_say_which_block(vocab, max_blocks):
    if ON_GPU:
        max_blocks = min(max_blocks, 4096)
    requests, fractions = 6, [0.1, 0.4, 0.7, 0.95]
    reached, _ = assert_found_by_bounds(hopeless(requests, vocab, 0.3), 0.7, 1, fractions, max_blocks)
    assert reached == [requests] * 4


@pytest.mark.parametrize("members", small(3, 7))
def test_a_team_finds_what_one_program_finds(members):
    requests, vocab = (40, 151_936) if ON_GPU else (1, 14_000)
    reached, counts = assert_found_by_bounds(hopeless(requests, vocab, 0.3), 0.7, 1, FRACTIONS, members=members)
    assert reached == [requests] * 5 + [0] * 4
    claimed, finished = counts.unbind(2)
    assert (claimed == 0).all()
    assert ((finished == 0) | (finished == members)).all()
    assert (finished[:, 3:5] == members).all()  # takes all blocks, so it is shared
    assert (finished[:, 8] == 0).all()  # is out of reach at once


def in_question(requests: int, vocab: int):
    """A batch of three drafts each: whether two stand, and else one, hangs on residuals; the third cannot."""
    batch = case(requests, 3, vocab, torch.float32, greedy=0)
    generator = torch.Generator().manual_seed(2)
    first, second, third = ids = torch.randint(vocab, (3, requests, 1), generator=generator)
    target = batch.target_logits / 3
    target[:, 2].scatter_(1, third, -torch.inf)
    draft = torch.cat([target[:, :1], torch.randn(requests, 2, vocab, generator=generator)], dim=1)
    draft[:, 0].scatter_add_(1, first, torch.full((requests, 1), math.log(2)))  # so about half can stand
    draft[:, 1].scatter_(1, second, target[:, 1].gather(1, second))
    return replace(
        batch,
        target_logits=target,
        draft_logits=draft,
        draft_token_ids=ids.squeeze(2).T.contiguous(),
        temperature=torch.ones(requests),
    )


@pytest.mark.parametrize("lazy", small(False, True))
def test_teams_and_helpers_emit_what_one_program_emits(lazy, monkeypatch):
    """However many sum a search, from whatever the workspace holds; and who has summed what adds up."""
    requests, vocab = (200, 151_936) if ON_GPU else (6, 9_000)
    rounds, patience = -(-vocab // 1024 // kernels.SEARCH["block"]["BLOCKS"]), 10 if ON_GPU else 0
    batch = in_question(requests, vocab).to(DEVICE)
    expected = verify("block", batch, lazy=lazy)
    memory, empty = torch.empty(10**6, dtype=torch.int32, device=DEVICE), torch.empty
    parts, launch = {}, launches.Plan.launch_by_triton

    def allocate(*size, **options):
        is_workspace = len(size) == 1 and size[0] > 300
        return memory[: size[0]] if is_workspace else empty(*size, **options)

    def noting(plan, tensors, of_workspace, numbers):
        parts.update(zip(plan.parts, of_workspace))
        return launch(plan, tensors, of_workspace, numbers)

    monkeypatch.setattr(launches.Plan, "launch_by_triton", noting)
    shared = {}
    for members in (7, 1):
        monkeypatch.setattr(kernels, "emission", lambda *sizes, members=members: (members, patience))
        forget_plans()
        for poison in [0x7FC0_0000, 0x7F7F_7F7F] * (10 if ON_GPU else 1):  # NaN, and 3.4e38
            memory.fill_(poison)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", allocate)
                output = verify("block", batch, lazy=lazy)
            assert_same(output, expected)
            scalars = parts["scalars_ptr"].view(torch.int32).view(requests, 3, -1)[:, 1:]  # of what can be searched
            claimed, done = (
                scalars[..., field.value] for field in (probabilistic_kernels.CLAIMED, probabilistic_kernels.SUMMED)
            )
            sums = parts["sums_ptr"].view(requests, 3, -1)[:, 1:]
            if members == 7:
                assert (claimed == 0).all()
                assert set(done.unique().tolist()) == {0, 7}
                shared = {"is": done == 7, "sums": sums.clone()}
                continue
            assert (claimed == 0).any()
            assert (claimed > 0).all(1).any()  # one after the other
            assert ((claimed == 0) | (claimed >= rounds + done)).all()
            assert ((done >= 0) & (done <= rounds)).all()
            assert (done[claimed == 0] == 0).all()
            complete = done == rounds
            assert complete.any() == ON_GPU  # in the interpreter nobody is done while others search
            assert torch.equal(sums[complete & shared["is"]], shared["sums"][complete & shared["is"]])
    forget_plans()
    assert set(expected.num_accepted.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("missing", [0, 1])
def test_what_others_have_summed_decides_if_it_is_all(missing):
    requests, vocab = (300, 151_936) if ON_GPU else (2, 14_000)
    rounds = -(-vocab // 1024 // 4)
    batch = hopeless(requests, vocab, 0.3)
    found, counts = search_by_bounds(batch, 0.7, 1, FRACTIONS, others=(0.0, rounds - missing))
    decided, to_be = found[:, 2:].unbind(2)
    takes_all, at_once = [3, 4], [8]
    assert (to_be[:, takes_all] == 1).all()
    assert (decided[:, takes_all] == missing).all()  # since nothing is what they are said to have found
    assert (counts[:, takes_all, 0] == rounds).all()
    assert (decided[:, at_once] == to_be[:, at_once]).all()
    assert (counts[:, at_once, 0] == 0).all()  # never open


@triton.jit
def help_from(
    state_ptr,  # [batch, FIELDS] int32
    scalars_ptr,  # [batch, num_draft_tokens, SCALARS] float32
    sums_ptr,  # [batch, num_draft_tokens, num_blocks] float32
    target_ptr,  # [batch, num_draft_tokens + 1, vocab_size] float32
    target_index_ptr,  # [batch] int64
    draft_ptr,  # [batch, num_draft_tokens, vocab_size] float32
    draft_index_ptr,  # [batch] int64
    temperature_ptr,  # [batch] float32
    request,
    batch,
    num_draft_tokens,
    vocab_size,
    num_blocks,
):
    """Help others, as if done with a request."""
    target_rows = (target_ptr, target_index_ptr, (num_draft_tokens + 1) * vocab_size, vocab_size, 1)
    draft_rows = (draft_ptr, draft_index_ptr, num_draft_tokens * vocab_size, vocab_size, 1)
    block_kernels.help_others(
        state_ptr, scalars_ptr, sums_ptr, target_rows, draft_rows, temperature_ptr, None, request, batch, num_draft_tokens,
        vocab_size, num_blocks, 1, 1, 4, 128,
    )  # fmt: skip


@pytest.mark.parametrize(("requests", "done"), [(300, 0), (300, 299), (8, 4)])
def test_who_is_done_sums_what_nobody_has_claimed(requests, done):
    """Of a search that is open: all of it, or the rest of it, or nothing; of no other candidate, nor request."""
    programs, vocab = (64, 151_936) if ON_GPU and requests < 300 else (3, 6160)
    drafts, log_c, log_sum_ratio, ahead = 2, -0.3, 0.1, 0.2
    num_blocks = -(-vocab // 1024)
    rounds = -(-num_blocks // 4)
    whole, rest, nothing, beyond = ((done + distance) % requests for distance in (1, 3, 6, 280))
    batch = case(requests, drafts, vocab, torch.float32, greedy=0).to(DEVICE)
    temperature = torch.linspace(0.5, 1.5, requests, device=DEVICE)
    generator = torch.Generator().manual_seed(done)
    target_index, draft_index = (torch.randperm(requests, generator=generator).to(DEVICE) for _ in range(2))
    targets, caches = torch.empty_like(batch.target_logits), torch.empty_like(batch.draft_logits)
    targets[target_index], caches[draft_index] = batch.target_logits, batch.draft_logits
    peaks = batch.target_logits.max(2).values[:, :drafts]
    scalars = torch.zeros(requests, drafts, probabilistic_kernels.SCALARS.value, device=DEVICE)
    scalars[..., probabilistic_kernels.PEAK.value] = peaks
    scalars[..., probabilistic_kernels.DRAFT_PEAK.value] = peaks + ahead
    scalars[..., probabilistic_kernels.LOG_SUM_RATIO.value] = log_sum_ratio
    counts = scalars.view(torch.int32)
    claimed, summed = (
        counts[..., field.value] for field in (probabilistic_kernels.CLAIMED, probabilistic_kernels.SUMMED)
    )
    claimed[rest, 1], claimed[nothing, 1] = 1, rounds
    sums = torch.full((requests, drafts, num_blocks), torch.nan, device=DEVICE)
    state = torch.zeros(requests, steps.FIELDS.value, dtype=torch.int32, device=DEVICE)
    names = state.view(torch.int64)[:, steps.OPEN.value // 2]
    names[[whole, rest, nothing]] = 1 << 32 | int(np.float32(log_c).view(np.uint32))
    if requests == 300:  # too far away to look
        names[beyond] = names[whole]
    help_from[(programs,)](
        state,
        scalars,
        sums,
        targets,
        target_index,
        caches,
        draft_index,
        temperature,
        done,
        requests,
        drafts,
        vocab,
        num_blocks,
        num_warps=8,
    )

    p, q = (logits[:, 1].double() for logits in (batch.target_logits, batch.draft_logits))
    t, peak = temperature[:, None].double(), peaks[:, 1:].double()
    left = torch.exp((p - peak) / t) - torch.exp((q - peak - ahead) / t - log_sum_ratio - log_c)
    expected = torch.nn.functional.pad(left.clamp(min=0), (0, num_blocks * 1024 - vocab))
    expected = expected.view(requests, num_blocks, 1024).sum(2).float()
    torch.testing.assert_close(sums[whole, 1], expected[whole], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sums[rest, 1, 4:], expected[rest, 4:], rtol=1e-5, atol=1e-7)
    assert sums[rest, 1, :4].isnan().all()
    assert sums.isnan().sum() == sums.numel() - num_blocks - (num_blocks - 4)
    assert [summed[whole, 1], summed[rest, 1], summed.sum()] == [rounds, rounds - 1, 2 * rounds - 1]
    # Each round once; and each program found once that there are no more.
    assert (claimed[[whole, rest, nothing], 1] == rounds + programs).all()
    assert claimed.sum() == 3 * (rounds + programs)


@triton.jit(do_not_specialize=["step", "offset", "stops", "is_empty"])
def take_step(
    step,
    offset,
    stops,
    is_empty,
    seen_ptr,  # [offsets] int64
    state_ptr,  # [4] int32
    token_ids_ptr,  # [offsets] int64
    num_accepted_ptr,  # [1] int32
    num_drafts_ptr,  # [1] int32
    invalid_ptr,  # [1] bool
    ids_ptr,  # [offsets - 1] int64
    num_draft_tokens,
):
    """Do what `finish_by_ratio_kernel` does at one offset, step by step: add a verdict; look; hand a token in."""
    drafts = (ids_ptr, num_draft_tokens, 1, num_draft_tokens)
    seen_ptr += offset
    verdicts = tl.full([], 0, tl.int64)
    if step == 0:
        verdicts = steps.add_verdict(state_ptr, 0, offset, stops, is_empty, "relaxed")
    elif step == 1:
        tl.store(seen_ptr, steps.load_verdicts(state_ptr, 0))
    else:
        verdicts = steps.hand_in(token_ids_ptr, state_ptr, 0, offset, 100 + offset, tl.load(seen_ptr), num_draft_tokens)
    if step == stops * 2:  # its last one
        finishes = steps.is_to_finish(state_ptr, 0, offset, verdicts, num_draft_tokens)
        if finishes:
            output = (token_ids_ptr, num_accepted_ptr, num_drafts_ptr, invalid_ptr)
            counted = steps.count_drafts(drafts, 0, 1000)
            steps.finish(output, drafts, counted, verdicts, 0, 1000)


def orders(counts: list[int]):
    """All orders of so many steps of each program."""
    if not any(counts):
        yield []
    for program, count in enumerate(counts):
        if count:
            for rest in orders([c - (p == program) for p, c in enumerate(counts)]):
                yield [program, *rest]


@pytest.mark.parametrize("empty", [None, 1])
@pytest.mark.parametrize("where_it_can_stop", [[2], [0, 2], [1, 2], [0, 1, 2]], ids=str)
def test_a_small_batch_is_put_together_whatever_the_order(where_it_can_stop, empty):
    drafts = torch.tensor([7, 8], device=DEVICE)
    stop = where_it_can_stop[0]
    wanted = [*[7, 8][:stop], 100 + stop, *[-1] * (2 - stop)]
    in_any_order = list(orders([3 if offset in where_it_can_stop else 1 for offset in range(3)]))
    for order in in_any_order[:: 1 + len(in_any_order) // (150 if ON_GPU else 30)]:
        state = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        seen = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        token_ids = torch.full((3,), -7, device=DEVICE)
        counts = torch.full((2, 1), -7, dtype=torch.int32, device=DEVICE)
        invalid = torch.full((1,), empty is None, device=DEVICE)
        done = [0, 0, 0]
        for offset in order:
            take_step[(1,)](
                done[offset],
                offset,
                int(offset in where_it_can_stop),
                int(offset == empty),
                seen,
                state,
                token_ids,
                *counts,
                invalid,
                drafts,
                2,
            )
            done[offset] += 1
        assert token_ids.tolist() == wanted, order
        assert counts.flatten().tolist() == [stop, 2]
        assert invalid.item() is (empty is not None and empty <= stop)


@pytest.mark.parametrize("temperature", [2.0**100, rows.LARGEST_TEMPERATURE.value])
def test_p_bounds_its_residual_at_the_largest_temperatures_too(temperature):
    requests = 24 if ON_GPU else 2
    target, draft = torch.full((requests, 2, 6144), -3e38), torch.full((requests, 1, 6144), -torch.inf)
    target[..., :1024], draft[..., :1024] = 0, 0
    batch = replace(case(requests, 1, 6144, torch.float32, greedy=0), target_logits=target, draft_logits=draft)
    assert_found_by_bounds(batch, temperature, 2, FRACTIONS)


@pytest.mark.parametrize("kind", ["probabilistic", "block"])
def test_temperatures_beyond_the_largest_count_as_that(kind):
    requests = 8 if ON_GPU else 4
    batch = case(requests, 2, 2064, torch.float32, greedy=0)
    beyond, largest = (
        replace(batch, temperature=torch.full((requests,), value, dtype=torch.float64)).to(DEVICE)
        for value in (1e300, rows.LARGEST_TEMPERATURE.value)
    )
    assert_same(verify(kind, beyond), verify(kind, largest))


@pytest.mark.parametrize("lazy", small(True, False))
def test_a_mass_is_found_in_a_block_whose_sum_a_nan_has_spoilt(lazy):
    requests = 48 if ON_GPU else 16
    batch = case(requests, 3, 6144, torch.float32, greedy=0)
    target = batch.target_logits.clone()
    target[..., 2048:3072] += 6  # it holds most of p
    generator = torch.Generator().manual_seed(2)
    draft = target[:, :3] + torch.randn(requests, 3, 6144, generator=generator)
    ids = torch.multinomial(draft.flatten(0, 1).softmax(-1), 1, generator=generator).view(requests, 3)
    target[..., 2500] = -torch.nan  # negative, which as an integer is small
    temperature = torch.ones(requests)
    batch = replace(batch, target_logits=target, draft_logits=draft, draft_token_ids=ids, temperature=temperature)
    output = verify("block", batch.to(DEVICE), lazy=lazy)
    wanted = expected("block", batch)
    assert {*output.num_accepted.tolist()} == {0, 1, 2, 3}
    assert_same_tokens(output.token_ids, wanted, FLOAT32_BAND)


def test_a_residual_that_is_nothing_falls_back_to_the_target():
    batch = hopeless(4 if ON_GPU else 2, 6160, 0.0)
    batch = replace(batch, draft_logits=batch.target_logits[:, :1])  # then p = q
    never = AcceptanceSchedule.from_rates([0.0])
    kind, checks, _ = checked("synthetic", batch.to(DEVICE))
    for lazy in (False, True):
        output = kernels.verify(kind, checks, never, lazy=lazy)
        assert torch.equal(output.token_ids, verify("strict", batch.to(DEVICE), lazy=lazy).token_ids)


@pytest.mark.skipif(ON_GPU, reason="counts in the interpreter")
def test_little_is_read_again_of_rows_that_differ(monkeypatch):
    summed, sum_residual = [], kernels.probabilistic.sum_residual

    def counted(target, *arguments):
        summed.append(int(target[0].shape[0]))
        return sum_residual(target, *arguments)

    batch = hopeless(5, 12_304, 0.05)
    monkeypatch.setattr(kernels.probabilistic, "sum_residual", counted)
    for way, leaders, blocks in ((FEW, 2, 1), (MANY, 8, 1), (LAZY, 8, 2)):
        assert (verify("probabilistic", batch, **way).num_accepted == 0).all()
        assert summed.count(leaders) == 5  # of thirteen blocks
        most = (13 - leaders) // blocks * 5
        assert 0 < summed.count(blocks) == len(summed) - 5 < most / 2
        summed.clear()


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


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("requests", [8, 200])
def test_the_workspace_is_at_most_two_percent_of_the_logits(kind, requests, lazy):
    batch = case(requests, 3, 65536, torch.bfloat16).to("cuda")
    verify(kind, batch, lazy=lazy)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    verify(kind, batch, lazy=lazy)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 0.02 * batch.target_logits.nbytes


@needs_gpu
def test_sizes_compile_nothing_anew():
    for kind, way in itertools.product(KINDS, WAYS):
        verify(kind, case(2, 2, 2048, torch.float16).to("cuda"), **way)
    known = compiled_variants()
    # Some of these decide while they read, some do not.
    for kind in KINDS:
        for requests, drafts, vocab in ((1, 1, 16), (16, 3, 4096), (65, 8, 160), (128, 16, 1024), (33, 4, 128256)):
            verify(kind, case(requests, drafts, vocab, torch.float16).to("cuda"))
    assert compiled_variants() == known


def compiled_variants() -> int:
    launched = [getattr(module, name) for module, name in KERNELS]
    return sum(len(cache[0]) for kernel in launched for cache in kernel.device_caches.values())


@needs_gpu
def test_after_a_warmup_nothing_is_compiled():
    batches = [case(requests, 3, 4112, torch.bfloat16).to("cuda") for requests in (1, 20, 90)]
    sampler = RejectionSampler("probabilistic", backend="triton")

    def arguments(batch):
        ids = batch.draft_token_ids.to(torch.int32)
        return (batch.target_logits, ids, batch.draft_logits), {"temperature": batch.temperature.half(), "seeds": 5}

    positional, options = arguments(batches[0])
    sampler.warmup(*positional, **options)
    known = compiled_variants()
    for batch in [*batches, *map(without_drafts, batches)]:
        positional, options = arguments(batch)
        sampler(*positional, **options)
        sampler.draft(batch.target_logits[:, 0], **options)
    assert compiled_variants() == known


def without_drafts(batch):
    return replace(
        batch,
        target_logits=batch.target_logits[:, :1],
        draft_token_ids=batch.draft_token_ids[:, :0],
        draft_logits=batch.draft_logits[:, :0],
    )


@needs_gpu
def test_after_a_warmup_calls_of_other_sizes_do_not_ask_triton(monkeypatch):
    kinds = [kind for kind in KINDS if not kind.endswith("logsumexp")]  # which a call of its own makes
    for kind, way in itertools.product(kinds, WAYS):
        verify(kind, case(3, 3, 4112, torch.bfloat16).to("cuda"), **way)

    def refuse(*arguments, **options):
        raise AssertionError("Triton was asked")

    monkeypatch.setattr(triton.JITFunction, "run", refuse)
    for kind in kinds:
        for requests, drafts, vocab in ((1, 1, 16), (65, 8, 160), (13, 2, 1024), (33, 4, 128256)):
            verify(kind, case(requests, drafts, vocab, torch.bfloat16).to("cuda"))


@needs_gpu
def test_calls_from_several_threads_on_several_streams_do_not_meet():
    batches = [case(requests, 3, 20_000, torch.bfloat16, seed=requests).to("cuda") for requests in (1, 7, 70, 260)]
    wanted = [[verify(kind, batch) for kind in KINDS] for batch in batches]
    torch.cuda.synchronize()
    wrong: list = []

    def work(batch, results):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(30):
                for kind, want in zip(KINDS, results):
                    got = verify(kind, batch)
                    stream.synchronize()
                    wrong.extend(kind for one, other in zip(got, want) if not torch.equal(one, other))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(batches, wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def recovered_near_agreement(closeness: float, given: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw from max(0, p - q) only, p and q being closer and closer; return counts of tokens, and max(0, p - q).

    A schedule that accepts nothing draws every token from there.
    """
    vocab, requests = 12, laws.REQUESTS
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(vocab, generator=generator)
    draft = target + closeness * torch.randn(vocab, generator=generator)
    sampler = RejectionSampler("synthetic", backend="triton", schedule=AcceptanceSchedule.from_rates([0.0]))
    rows = [logits.to("cuda").expand(requests, 1, vocab) for logits in (target, draft)]
    output = sampler(
        rows[0].expand(requests, 2, vocab),
        torch.zeros(requests, 1, dtype=torch.int64, device="cuda"),
        rows[1],
        seeds=torch.arange(requests, device="cuda"),
        draft_logsumexp=draft.double().logsumexp(0).float().to("cuda").expand(requests, 1) if given else None,
    )
    p, q = (laws.softmax(logits.double().numpy()) for logits in (target, draft))
    return np.bincount(output.token_ids[:, 0].cpu(), minlength=vocab), (p - q).clip(min=0)


@needs_gpu
@pytest.mark.parametrize(("closeness", "given"), [(1e-1, False), (1e-1, True), (1e-2, True), (1e-3, False)])
def test_the_residual_keeps_its_law_where_target_and_draft_nearly_agree(closeness, given):
    counts, residual = recovered_near_agreement(closeness, given)
    laws.assert_law(counts, residual / residual.sum())


@needs_gpu
@pytest.mark.parametrize("closeness", [1e-4, 1e-5, 1e-6])
def test_what_rounding_leaves_of_the_residual_cannot_be_seen_in_the_output(closeness):
    # log-sums in float32 are off by some 1e-7, which moves the recovered token's law by 1e-7 / A, A being the mass of
    # max(0, p - q), but happens with probability A. Counting 200,000 tokens moves it by 0.4 percent.
    counts, residual = recovered_near_agreement(closeness, given=False)
    moved = np.abs(counts / counts.sum() - residual / residual.sum()).sum() / 2
    assert residual.sum() * (moved - 0.004) < 3e-7


@needs_gpu
def test_rare_tokens_are_drawn_as_often_as_they_should():
    # 262,144 tokens 20.5 nats below the one: 32.8 hits in 100,000 draws, two-sided Poisson bounds at 1e-6.
    logits = torch.full((262_145,), -20.5, device="cuda").index_fill_(0, torch.tensor(77, device="cuda"), 0)
    tokens = torch.cat([sample(logits.expand(1000, -1), seeds=seed) for seed in range(0, 100_000, 1000)])
    hits = tokens[tokens != 77]
    low, high = poisson.ppf([laws.FALSE_ALARM / 2, 1 - laws.FALSE_ALARM / 2], 32.8)
    assert low <= len(hits) <= high
    assert len(hits.unique()) >= len(hits) - 1


def test_greedy_is_the_references():
    batch = case(40 if ON_GPU else 4, 3, 1025, torch.bfloat16).to(DEVICE)
    verdicts = [greedy.verify(*batch.rows(index)[:2]) for index in range(len(batch.seeds))]
    for method in ("strict", "probabilistic"):
        output = RejectionSampler(method, backend="triton")(
            batch.target_logits, batch.draft_token_ids, batch.draft_logits, temperature=0
        )
        assert_same_tokens(output.token_ids, verdicts, band=0)
