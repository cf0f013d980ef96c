"""Speed on a GPU: `pytest --benchmark-only tests/benchmarks/test_gpu.py`.

Every provider takes raw logits and returns tokens. The time of one call on the device is `device_us`, in the table at the
end and in the JSON of `--benchmark-json`, from which `record.py` makes a record. It comes from replays of a CUDA graph of
ten calls. (pytest-benchmark's own numbers are the host time of such a replay.) All calls of a graph read the same logits,
so the logits of small batches are in the GPU's cache.
"""

import functools
import importlib.util
import itertools
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specdecode import RejectionSampler, backends, sample
from specdecode.batch import SamplerOutput
from specdecode.drafting import DraftOutput
from tests.benchmarks import engines
from tests.benchmarks.bandwidth import REPLAYS, Recording, median_us, quartiles, read_bandwidth
from tests.benchmarks.inputs import VOCAB, Inputs, describe, spread, verification, with_draft_vocabulary
from tests.benchmarks.providers import FAST, PROVIDERS, SLOW, Verifier, flashinfer, sglang
from tests.benchmarks.realistic import realistic_rows
from tests.support.batches import verification_batch

WHY_NOT = backends.obstacle(torch.device("cuda")) if torch.cuda.is_available() else "there is no CUDA device"
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

ROW_NAMES = {
    "realistic": "realistic rows",
    "flat": "flat rows",
    "real": "rows of SmolLM2",
}
"""The names of the kinds of rows in groups."""
SMALL = 49_152  # SmolLM2's vocabulary


class Shape(NamedTuple):
    """The shape of a batch of inputs."""

    batch: int
    num_draft_tokens: int
    dtype: str
    temperature: float
    rows: str = "realistic"
    vocab: int = VOCAB

    def __str__(self) -> str:
        """Return the shape as a benchmark's group."""
        sizes = describe(self.batch, self.num_draft_tokens, self.dtype, self.vocab)
        return f"{sizes}, T = {self.temperature:g}, {ROW_NAMES[self.rows]}"


def cases():
    """Yield shapes and providers, ordered by shape, so that providers share the inputs of a shape."""
    for batch, num_draft_tokens in ((1, 3), (8, 3), (32, 3), (128, 3), (256, 3), (256, 7)):
        for temperature in (0.7, 1.0, 0.0):
            providers = ["triton greedy"] if temperature == 0 else list(FAST)
            if temperature == 0.7 and num_draft_tokens == 3:
                providers += SLOW
                if batch != 8:
                    providers.append("straightforward compiled")
            for provider in providers:
                yield case(Shape(batch, num_draft_tokens, "bfloat16", temperature), provider)
    for provider in FAST:
        yield case(Shape(256, 3, "float32", 0.7), provider)


def case(shape: Shape, provider: str):
    """Return the parameters of a test. Warnings of other packages' code are allowed."""
    marks = () if isinstance(PROVIDERS[provider], Verifier) else pytest.mark.filterwarnings("default")
    return pytest.param(shape, provider, marks=marks, id="-".join(map(str, (*shape, provider))))


@pytest.fixture(scope="module")
def inputs(request) -> Inputs:
    """One batch on the GPU, shared by the tests of its shape."""
    torch.cuda.empty_cache()
    batch, num_draft_tokens, dtype, temperature, rows, vocab = request.param
    dtype = getattr(torch, dtype)
    return Inputs(batch, num_draft_tokens, dtype, temperature, device="cuda", rows=rows, vocab=vocab)


@pytest.fixture(scope="session")
def bytes_per_second() -> float:
    """Return the measured read bandwidth of this GPU's memory."""
    return read_bandwidth()


@pytest.fixture(scope="session")
def environment(bytes_per_second) -> dict[str, Any]:
    """Return the GPU, the driver and the versions."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "read_TB/s": round(bytes_per_second / 1e12, 3),
    }


@pytest.fixture
def recording(inputs, provider) -> Recording:
    """The calls to replay. Providers of other packages may be missing or fail; then the benchmark is skipped."""
    try:
        return Recording(PROVIDERS[provider](inputs))
    except Exception as error:
        if isinstance(PROVIDERS[provider], Verifier):
            raise
        pytest.skip(f"{provider}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def check(inputs: Inputs, verifier: Verifier, output: SamplerOutput, truncation: dict[str, Any] | None = None) -> None:
    """Compare a call's result with the eager backend's: no time is reported for wrong tokens."""
    check_token_ids(output.token_ids, inputs)
    expected = Verifier(verifier.method, "eager", deterministic=verifier.deterministic)(inputs, truncation=truncation)()
    assert output.token_ids.shape == expected.token_ids.shape
    assert (output.num_accepted == expected.num_accepted).double().mean() >= 0.98


def check_token_ids(token_ids: Tensor, inputs: Inputs) -> None:
    assert ((token_ids >= -1) & (token_ids < inputs.target_logits.shape[-1])).all()


def measure(benchmark, recording: Recording) -> float:
    """Replay; return the median microseconds of one call on the device."""
    recording.warm_up()  # again, because the GPU was idle while the result was checked
    benchmark.pedantic(recording.replay, rounds=REPLAYS)
    recording.settle()
    benchmark.extra_info["device_us"] = recording.device_us()
    return recording.device_us()["median"]


def note_bytes(benchmark, needed: int, device_us: float, bytes_per_second: float) -> None:
    """Record the bytes that an outcome needs, and the bandwidth."""
    rate = needed / device_us * 1e6
    benchmark.extra_info |= {
        "bytes": needed,
        "TB/s": round(rate / 1e12, 3),
        "fraction": round(rate / bytes_per_second, 3),
    }


@pytest.mark.parametrize(("inputs", "provider"), list(cases()), indirect=["inputs"])
def test_verification_on_the_gpu(recording, benchmark, request, inputs, provider, bytes_per_second, environment):
    benchmark.group = str(request.node.callspec.params["inputs"])
    benchmark.extra_info |= {"provider": provider, "environment": environment}
    verifier, output = PROVIDERS[provider], recording.output
    if isinstance(verifier, Verifier):
        check(inputs, verifier, output)
    elif output is not None:
        check_token_ids(output, inputs)
    device_us = measure(benchmark, recording)
    if isinstance(verifier, Verifier) and verifier.backend == "triton":
        check(inputs, verifier, output)  # the timed replays have overwritten it
        rows = verifier.rows_needed(output.num_accepted, inputs.draft_logits.shape[1])
        needed = rows * inputs.target_logits[0, 0].nbytes
        note_bytes(benchmark, needed, device_us, bytes_per_second)


SERVED = [Shape(batch, 3, "bfloat16", temperature) for temperature in (0.7, 1.0) for batch in (1, 32, 256)]


@pytest.mark.parametrize("inputs", SERVED, indirect=True, ids=str)
@pytest.mark.parametrize("provider", FAST)
def test_numbers_in_tensors(benchmark, request, inputs, provider, environment):
    """Time steps as in engines: temperatures, seeds and positions in tensors."""
    benchmark.group = f"numbers in tensors, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": provider, "environment": environment}
    requests = torch.arange(len(inputs.target_logits), device="cuda")
    temperature = torch.full(requests.shape, inputs.temperature, device="cuda")
    verifier = PROVIDERS[provider]
    call = verifier(inputs, temperature=temperature, seeds=requests, positions=torch.zeros_like(requests))
    assert all(map(torch.equal, call()[:4], verifier(inputs)()[:4]))  # equal values
    measure(benchmark, Recording(call))


PACKED = [Shape(batch, 3, "bfloat16", 0.7) for batch in (1, 32, 256)]


@pytest.mark.parametrize("inputs", PACKED, indirect=True, ids=str)
@pytest.mark.parametrize("provider", [*FAST, "triton, top-p .95"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_packed_rows(benchmark, request, inputs, provider, packed, environment):
    """Time packed calls as in engines, with slots in another order, and the same calls padded."""
    benchmark.group = f"packed, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": f"{provider}{', packed' * packed}", "environment": environment}
    name, _, truncation = provider.partition(", ")
    verifier, options = PROVIDERS[name]._replace(packed=packed), TRUNCATIONS[truncation or "plain"]
    requests = torch.arange(len(inputs.target_logits), device="cuda")
    numbers = {"temperature": torch.full(requests.shape, inputs.temperature, device="cuda"), "seeds": requests}
    numbers |= {"positions": torch.zeros_like(requests)}
    call, other = (
        each(inputs, truncation=options, **numbers) for each in (verifier, verifier._replace(packed=not packed))
    )
    assert all(map(torch.equal, call()[:4], other()[:4]))
    measure(benchmark, Recording(call))


TRUNCATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-p .95": {"top_p": 0.95},
    "top-k 50, top-p .95": {"top_k": 50, "top_p": 0.95},
    "top-k 20, top-p .95": {"top_k": 20, "top_p": 0.95},
    "min-p .05": {"min_p": 0.05},
}


def truncated_cases():
    """Yield shapes, methods, truncations and with or without the drafter's logsumexp, ordered by shape."""
    kinds = [("realistic", VOCAB)]
    kinds += [("real", SMALL)] * ("SPECDECODE_ROWS" in os.environ)
    for (rows, vocab), temperature, batch in itertools.product(kinds, (0.7, 1.0), (1, 32, 256)):
        shape = Shape(batch, 3, "bfloat16", temperature, rows, vocab)
        for name in TRUNCATIONS:
            for with_logsumexp in (False, True) if rows == "realistic" else (False,):
                yield shape, "probabilistic", name, with_logsumexp
        if temperature == 0.7:
            for method, name in itertools.product(("strict", "block"), ("plain", "top-p .95")):
                yield shape, method, name, False
    for batch in (1, 32, 256):  # the worst case
        for name in ("plain", "top-p .95"):
            yield Shape(batch, 3, "bfloat16", 1.0, "flat"), "probabilistic", name, False


@pytest.mark.parametrize(
    ("inputs", "method", "truncation", "with_logsumexp"), list(truncated_cases()), indirect=["inputs"], ids=str
)
def test_truncation_on_the_gpu(benchmark, request, inputs, method, truncation, with_logsumexp, environment):
    """Time truncated calls, and the same calls without truncation."""
    benchmark.group = f"truncated, {request.node.callspec.params['inputs']}"
    with_given = " with draft_logsumexp" if with_logsumexp else ""
    benchmark.extra_info |= {"provider": f"{method}, {truncation}{with_given}", "environment": environment}
    verifier, options = Verifier(method, with_logsumexp=with_logsumexp), TRUNCATIONS[truncation]
    call = verifier(inputs, truncation=options)
    check(inputs, verifier, call(), options)
    measure(benchmark, Recording(call))


REAL = [Shape(batch, 3, "bfloat16", T, "real", SMALL) for T in (0.7, 1.0) for batch in (1, 32, 256)]
ENGINES = {"vllm": functools.partial(engines.vllm_call, provider="vllm", with_draft_logits=True)}
ENGINES |= {"sglang": sglang, "flashinfer": flashinfer}


@pytest.mark.skipif("SPECDECODE_ROWS" not in os.environ, reason="SPECDECODE_ROWS names no rows of SmolLM2")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("inputs", REAL, indirect=True, ids=str)
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("engine", ENGINES)
def test_truncation_in_engines(benchmark, request, inputs, engine, truncation, environment):
    """Time the installed engines, and the same calls of this package; engines do not truncate the draft's rows."""
    if truncation.startswith("min-p") and engine != "vllm":
        pytest.skip(f"{engine} verifies without min-p")
    benchmark.group = f"truncated, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": f"{engine}, {truncation}", "environment": environment}
    try:
        recording = Recording(ENGINES[engine](inputs, truncation=TRUNCATIONS[truncation]))
    except Exception as error:
        pytest.skip(f"{engine}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    measure(benchmark, recording)


def drafts_that_are_accepted(narrow: Inputs, ids: Tensor, method: str) -> tuple[int, DraftOutput]:
    """Return the first seed with an accepted draft, and its drafts as target ids.

    The first draft of a single request is rejected with probability 1 - sum min(p, q), about .2.
    """
    sampler = RejectionSampler(method, backend="eager")
    for seed in range(100):
        draft = narrow.drafts(method, seed)
        draft = draft._replace(token_ids=ids[draft.token_ids])
        if verification(narrow, sampler, draft, seeds=seed, draft_vocab_ids=ids)().num_accepted.any():
            return seed, draft
    raise AssertionError("no draft is accepted with any of 100 seeds")


@pytest.mark.parametrize("inputs", PACKED, indirect=True, ids=str)
@pytest.mark.parametrize("provider", FAST[:4])
@pytest.mark.parametrize("rows", ["its own", "spread before the call", "spread by the call"])
def test_draft_vocabularies_on_the_gpu(benchmark, request, inputs, provider, rows, environment):
    """Time draft vocabularies of 32,000 tokens: with short rows, and with full rows, made before or in the call."""
    benchmark.group = f"draft vocabulary of 32,000, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": f"{provider}, rows {rows}", "environment": environment}
    verifier, (narrow, ids) = PROVIDERS[provider], with_draft_vocabulary(inputs, 32_000)
    seed, draft = drafts_that_are_accepted(narrow, ids, verifier.method)
    few = narrow.draft_logits
    vocab = narrow.target_logits.shape[-1]
    whole = spread(few, ids, vocab) if rows == "spread before the call" else None

    def call(backend: str = "triton", how: str = rows) -> SamplerOutput:
        options: dict[str, Any] = {"draft_logsumexp": draft.logsumexp} if verifier.with_logsumexp else {}
        draft_logits = few
        if how == "its own":
            options["draft_vocab_ids"] = ids
        else:
            draft_logits = spread(few, ids, vocab) if whole is None else whole
        options |= {"temperature": inputs.temperature, "seeds": seed}
        return RejectionSampler(verifier.method, backend=backend)(
            narrow.target_logits, draft.token_ids, draft_logits, **options
        )

    output, expected = call(), call("eager", "its own")
    check_token_ids(output.token_ids, narrow)
    assert (output.num_accepted == expected.num_accepted).double().mean() >= 0.98
    assert expected.num_accepted.sum() > 0
    measure(benchmark, Recording(call))


def logprobs_cases():
    """Yield shapes, methods and truncations; each is timed without log-probabilities, and with both kinds."""
    for batch in (1, 32, 256):
        for temperature in (0.7, 1.0):  # at 1, raw sums are the processed ones
            for method in ("probabilistic", "strict", "block"):
                yield Shape(batch, 3, "bfloat16", temperature), method, "plain"
        yield Shape(batch, 3, "bfloat16", 0.0), "strict", "plain"
        yield Shape(batch, 3, "bfloat16", 0.7), "probabilistic", "top-p .95"


@pytest.mark.parametrize(("inputs", "method", "truncation"), list(logprobs_cases()), indirect=["inputs"], ids=str)
@pytest.mark.parametrize("of", [None, "processed", "raw"])
def test_logprobs_on_the_gpu(benchmark, request, inputs, method, truncation, of, environment):
    """Time calls that return log-probabilities, and the same calls without them."""
    benchmark.group = f"log-probabilities, {request.node.callspec.params['inputs']}"
    name = method if truncation == "plain" else f"{method}, {truncation}"
    benchmark.extra_info |= {"provider": f"{name}, {of or 'none'}", "environment": environment}
    verifier, options = Verifier(method), TRUNCATIONS[truncation]
    call, output = (
        Verifier(method, backend)(inputs, truncation=options, logprobs=of) for backend in ("triton", "eager")
    )
    got, want = call(), output()
    check(inputs, verifier, got, options)
    if of is not None:
        same = (got.token_ids == want.token_ids).all(dim=1)
        torch.testing.assert_close(got.logprobs[same], want.logprobs[same], rtol=1e-6, atol=1e-4, equal_nan=True)
    measure(benchmark, Recording(call))


def sampling_group(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}, {VOCAB:,} tokens, bfloat16, T = 0.7, realistic rows"


def sampling_logits(rows: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return realistic_rows(rows, vocab=VOCAB, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("provider", ["triton sample", "triton draft", "triton draft, top-p .95"])
@pytest.mark.parametrize("rows", [1, 256])
def test_sampling_on_the_gpu(benchmark, rows, provider, bytes_per_second, environment):
    benchmark.group = sampling_group(rows)
    benchmark.extra_info |= {"provider": provider, "environment": environment}
    logits = sampling_logits(rows)
    method = "strict" if provider == "triton sample" else "probabilistic"
    options = TRUNCATIONS["top-p .95"] if "top-p" in provider else {}
    expected = RejectionSampler(method, backend="eager").draft(logits, 0.7, seeds=0, **options).token_ids
    if provider == "triton sample":
        recording = Recording(functools.partial(sample, logits, 0.7, seeds=0))
        token_ids = recording.output
    else:
        draft = RejectionSampler(method, backend="triton").draft
        recording = Recording(functools.partial(draft, logits, 0.7, seeds=0, **options))
        token_ids = recording.output.token_ids
    assert (token_ids == expected).double().mean() >= 0.98
    note_bytes(benchmark, logits.nbytes, measure(benchmark, recording), bytes_per_second)


def plan_of(monkeypatch, call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return the plan that a call runs, and the values of the call, see `Plan.values`."""
    from specdecode.kernels.launch import Plan

    plans, run = [], Plan.run
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "run", lambda plan, *given: (plans.append((plan, plan.values(*given))), run(plan, *given)))
        call()
    return plans[0]


def until_each_launch(monkeypatch, call: Callable[[], Any]) -> list[list[Any]]:
    """Return the time after each launch of a step; omitted launches have no result."""
    plan, _ = plan_of(monkeypatch, call)
    ready, after = plan.ready, []
    try:
        for count, launch in enumerate(plan.launches, start=1):
            plan.ready = ready[:count]
            after.append([launch.kernel.fn.__name__, median_us(call)])
    finally:
        plan.ready = ready
    return after


STAGED = [Shape(batch, 3, "bfloat16", 0.7) for batch in (1, 8, 32, 256)]


@pytest.mark.parametrize("inputs", STAGED, indirect=True, ids=str)
@pytest.mark.parametrize("provider", ["triton", "triton block", "triton strict"])
def test_launch_by_launch(benchmark, monkeypatch, request, inputs, provider, environment):
    """Time a step launch by launch."""
    benchmark.group = f"launch by launch, {request.node.callspec.params['inputs']}"
    call = PROVIDERS[provider](inputs)
    check(inputs, PROVIDERS[provider], call())
    after = until_each_launch(monkeypatch, call)
    benchmark.pedantic(Recording(call).replay, rounds=REPLAYS)
    benchmark.extra_info |= {"provider": provider, "environment": environment, "after_us": after}


@pytest.mark.parametrize("rows", [1, 256])
def test_sampling_launch_by_launch(benchmark, monkeypatch, rows, environment):
    benchmark.group = f"launch by launch, {sampling_group(rows)}"
    logits = sampling_logits(rows)
    call = functools.partial(sample, logits, 0.7, seeds=0)
    after = until_each_launch(monkeypatch, call)
    benchmark.pedantic(Recording(call).replay, rounds=REPLAYS)
    benchmark.extra_info |= {"provider": "triton sample", "environment": environment, "after_us": after}


LARGE = [Shape(batch, drafts, "bfloat16", 0.7) for batch, drafts in ((128, 3), (256, 3), (256, 7))]


def reading_that_decides_nothing(monkeypatch, call: Callable[[], Any], output: SamplerOutput) -> dict[str, float]:
    """Time the launch that reads of a large batch, given the first rejected rows, with counters that no program completes.

    Timed twice: unchanged, and without the wait for visible writes before programs are counted.
    """
    import triton

    from specdecode.kernels import read
    from specdecode.kernels.first_rejected import FIELDS, FIRST_REJECTED
    from tests.benchmarks.bandwidth import is_last_unpublished

    (plan, values), empty = plan_of(monkeypatch, call), torch.empty
    length = values["length"]
    requests, most = len(output.num_accepted), output.token_ids.shape[1] - 1
    workspace = torch.full((length,), -(2**30), dtype=torch.int32, device="cuda")
    state = workspace[: requests * FIELDS.value].zero_().view(requests, FIELDS.value)
    state[:, FIRST_REJECTED.value] = most - output.num_accepted
    launches = plan.launches
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, **like: workspace if size == (length,) else empty(*size, **like))
        patch.setitem(plan.definitions, "zeros", "0")
        patch.setattr(plan, "launches", launches[:1])
        patch.setattr(plan, "ready", [])
        patch.setattr(plan, "fill", None)
        times = {"decides nothing": median_us(call)}
        patch.setattr(read, "is_last", is_last_unpublished)
        plan.launches, plan.fill = [launches[0]._replace(kernel=triton.jit(read.read_kernel.fn))], None
        call()
        return {**times, "publishes nothing": median_us(call)}


@pytest.mark.parametrize("inputs", LARGE, indirect=True, ids=str)
@pytest.mark.parametrize("provider", ["triton strict", "triton with draft_logsumexp"])
def test_reading_alone(benchmark, monkeypatch, request, inputs, provider, bytes_per_second, environment):
    """Time the launch that reads: unchanged, without some of its work, and when it reads every row.

    Drafts that end at the first rejections make it read only the rows that matter, as a small batch, so nothing is
    counted or decided. For comparison, the best time of plain kernels that read the same number of contiguous bytes.
    """
    from specdecode import kernels

    benchmark.group = f"reading alone, {request.node.callspec.params['inputs']}"
    verifier = PROVIDERS[provider]
    call = verifier(inputs)
    output = call()
    check(inputs, verifier, output)
    draft = inputs.drafts(verifier.method)
    with_draft = (None, None) if verifier.method == "strict" else (inputs.draft_logits, draft.logsumexp)
    batch = verification_batch(inputs.target_logits, draft.token_ids, *with_draft, inputs.temperature, 0, None)
    offsets = torch.arange(inputs.draft_logits.shape[1], device="cuda")
    told = batch._replace(draft_token_ids=torch.where(offsets < output.num_accepted[:, None], draft.token_ids, -1))
    calls = {
        "as it is": call,
        "told in advance": lambda: kernels.verify(verifier.method, told, large=False),
        "every row": lambda: kernels.verify(verifier.method, batch, large=False),
    }
    reading = {name: until_each_launch(monkeypatch, each)[0][1] for name, each in calls.items()}
    reading |= reading_that_decides_nothing(monkeypatch, call, output)
    _, num_draft_tokens, vocab = inputs.draft_logits.shape
    elements = verifier.rows_needed(output.num_accepted, num_draft_tokens) * vocab
    reading["plain"] = round(1e6 * 2 * elements / read_bandwidth(elements // 2**16 * 2**16), 3)
    note_bytes(benchmark, 2 * elements, measure(benchmark, Recording(call)), bytes_per_second)
    benchmark.extra_info |= {"provider": provider, "environment": environment, "reading_us": reading}


def time_calls(benchmark, call: Callable[[], Any]) -> None:
    """Time a call from Python, without a graph: among many calls; alone, until it returns; alone, until it is complete."""
    until_return: list[float] = []
    until_result: list[float] = []

    def timed() -> None:
        start = time.perf_counter()
        call()
        until_return.append(1e6 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        until_result.append(1e6 * (time.perf_counter() - start))

    def in_a_row(calls: int = 100) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        microseconds = 1e6 * (time.perf_counter() - start) / calls
        torch.cuda.synchronize()
        return microseconds

    torch.cuda.synchronize()
    benchmark.pedantic(timed, rounds=200, warmup_rounds=20)
    benchmark.extra_info |= {
        "call_in_a_row_us": quartiles([in_a_row() for _ in range(20)]),
        "call_us": quartiles(until_return[-200:]),
        "call_and_wait_us": quartiles(until_result[-200:]),
    }


@pytest.mark.parametrize("inputs", [Shape(1, 3, "bfloat16", 0.7)], indirect=True, ids=["1"])
@pytest.mark.parametrize("provider", ["nothing", "triton", "triton block", "triton strict", "triton packed"])
def test_eager_call_of_one_request(benchmark, request, inputs, provider, environment):
    """Time a call from Python.

    For comparison, the minimum of any call: allocate output and workspace, and make two launches.
    """
    benchmark.group = f"eager call, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": provider, "environment": environment}
    call = PROVIDERS[provider](inputs)
    call()
    if provider != "nothing":
        check(inputs, PROVIDERS[provider], call())
    time_calls(benchmark, call)


@pytest.mark.parametrize("inputs", [Shape(256, 3, "bfloat16", 0.7)], indirect=True, ids=["256"])
@pytest.mark.parametrize("provider", ["sizes not seen before", "the same sizes again"])
def test_calls_whose_size_changes(benchmark, request, inputs, provider, environment):
    """Time calls from Python with a different number of requests each time, as in continuous batching."""
    benchmark.group = f"sizes that change, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": provider, "environment": environment}
    token_ids, sampler = inputs.drafts("probabilistic").token_ids, RejectionSampler("probabilistic")
    sizes = [size for size in range(2, 240) if size not in (8, 32, 64, 128)]  # other benchmarks have it
    left, times = iter(sizes * 2), []

    def step() -> None:
        size = next(left)
        torch.cuda.synchronize()
        start = time.perf_counter()
        sampler(inputs.target_logits[:size], token_ids[:size], inputs.draft_logits[:size], temperature=0.7, seeds=0)
        times.append(1e6 * (time.perf_counter() - start))

    sampler.warmup(inputs.target_logits, token_ids, inputs.draft_logits, temperature=0.7, seeds=0)
    if provider == "the same sizes again":
        for _ in sizes:
            step()
    benchmark.pedantic(step, rounds=len(sizes))
    benchmark.extra_info["call_us"] = quartiles(times[-len(sizes) :])


IN_VLLM = [
    pytest.param(Shape(batch, 3, "bfloat16", 0.7), with_draft_logits, truncation, id=f"{batch}-{name}")
    for batch in (1, 32, 256)
    for name, with_draft_logits, truncation in (
        ("one-hot", False, "plain"),
        ("drawn", True, "plain"),
        ("one-hot, top-p", False, "top-p .95"),
    )
]


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@needs_vllm
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("inputs", "with_draft_logits", "truncation"), IN_VLLM, indirect=["inputs"])
@pytest.mark.parametrize("provider", ["vllm", "probabilistic", "block", "strict"])
def test_a_step_in_vllm(benchmark, request, inputs, with_draft_logits, truncation, provider, environment):
    """Time vLLM's `_verify` and the adapter's, on the device and from Python, including the host's work."""
    drafts = "drawn drafts" if with_draft_logits else "one-hot drafts"
    benchmark.group = f"in vLLM, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": f"{provider}, {drafts}, {truncation}", "environment": environment}
    time_in_vllm(benchmark, inputs, engines.vllm_call(inputs, provider, with_draft_logits, TRUNCATIONS[truncation]))


@needs_vllm
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("inputs", SERVED, indirect=True, ids=str)
@pytest.mark.parametrize("truncation", ["plain", "top-p .95", "top-k 50, top-p .95", "top-k 20, top-p .95"])
@pytest.mark.parametrize("provider", ["vllm", "probabilistic"])
def test_truncation_in_vllm(benchmark, request, inputs, truncation, provider, environment):
    """Time `_verify` with drawn drafts, at two temperatures, for each truncation."""
    benchmark.group = f"truncation in vLLM, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": f"{provider}, {truncation}", "environment": environment}
    time_in_vllm(benchmark, inputs, engines.vllm_call(inputs, provider, True, TRUNCATIONS[truncation]))


def time_in_vllm(benchmark, inputs: Inputs, call: Callable[[], tuple[Tensor, Tensor, Tensor]]) -> None:
    _, token_ids, num_tokens = call()
    emitted = torch.arange(token_ids.shape[1], device="cuda") < num_tokens[:, None]
    assert ((token_ids >= 0) & (token_ids < inputs.target_logits.shape[-1]))[emitted].all()
    recording = Recording(call)
    for _ in range(REPLAYS):
        recording.replay()
    benchmark.extra_info["device_us"] = recording.device_us()
    time_calls(benchmark, call)
