"""The promises of every call, for all methods, backends, options and layouts: each promise is one test over all cases."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode import Adjustments, SamplerOutput, Sampling
from specdecode.eager import truncation
from tests.conftest import ON_GPU, cover
from tests.contract.cases import (
    EAGER_WAYS,
    INF,
    KERNEL_WAYS,
    LAYOUTS,
    METHODS,
    NAN,
    ORDINARY,
    Parameters,
    cases_of,
    chosen,
    device_of,
    each_tensor,
    laid_out,
    make,
    on,
    run,
    with_more_padding,
)
from tests.support.addresses import apart, reads_and_writes_inside
from tests.support.cuda import captured, synchronising_raises
from tests.support.differential import like_a_device
from tests.support.oracle import assert_equals_oracle

# Triton's interpreter computes with NumPy, which warns of infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KERNEL_DTYPES = ["bfloat16", "float32", "float16", "bfloat16 and float32", *["float64"] * ON_GPU]
KERNEL_VOCABS = [1040, 1025, *[5003, 50_257] * ON_GPU]
EAGER = cases_of(EAGER_WAYS)
KERNELS = cases_of(
    KERNEL_WAYS,
    dtype=KERNEL_DTYPES,
    vocab=KERNEL_VOCABS,
    # The interpreter runs fewer values of the longest axes; the eager backend runs all.
    **{}
    if ON_GPU
    else {
        "truncation": ["none", "none", "top-p", "all three", "by request"],
        "adjustments": ["none", "none", "all", "without counts", "bias", "mask"],
        "drafts": ["read", "handed on", "drawn otherwise", "own vocabulary", "own vocabulary, handed on", "no logits"],
        "layout": LAYOUTS[1:],
    },
)

# The interpreter runs fewer cases of tests with several calls.
SOME_KERNELS = (
    KERNELS
    if ON_GPU
    else cases_of(
        KERNEL_WAYS,
        dtype=["bfloat16", "float32"],
        vocab=[1040, 1025],
        truncation=["none", "all three"],
        adjustments=["none", "all"],
        drafts=["read", "handed on", "own vocabulary", "no logits"],
        rows=["ordinary"],
        layout=["packed", "packed by slot", "inside larger tensors"],
        report=["processed", "raw lists"],
    )
)
"""Cases of tests with several calls for each case."""


def arguments_of(case: Parameters) -> dict[str, Any]:
    return on(device_of(case), make(case))


def assert_same_bits(one: SamplerOutput, other: SamplerOutput) -> None:
    for name, got, want in zip(one._fields, one, other):
        if got is not want:  # absent fields are None
            torch.testing.assert_close(
                got, want, rtol=0, atol=0, equal_nan=True, msg=lambda text, of=name: f"{of}: {text}"
            )


@pytest.mark.parametrize("case", [*EAGER, *KERNELS], ids=str)
def test_the_output_is_the_oracles(case):
    arguments = arguments_of(case)
    output = run(case, laid_out(case, arguments))
    assert_equals_oracle(case.method, arguments, output, case.backend.split()[0])


@pytest.mark.parametrize("case", [*EAGER, *SOME_KERNELS], ids=str)
def test_a_request_depends_on_nothing_but_itself(case):
    """Bit for bit, a result is independent of layout, slot, padding, order, other requests, and memory beyond its tensors.

    The eager backend uses PyTorch's sums, whose order on CUDA depends on the shape of the whole batch: there only tokens
    must be equal in other batches.
    """
    arguments = arguments_of(case)
    is_interpreted = case.backend.startswith("triton") and not ON_GPU  # on a GPU a sanitizer finds wrong addresses
    alike = laid_out(case, arguments)
    if case.layout.startswith("packed"):
        alike = each_tensor(lambda _, tensor: apart(tensor), alike)
    with reads_and_writes_inside() if is_interpreted else nullcontext():
        whole = run(case, alike)
    requests, rows = len(whole.token_ids), whole.token_ids.shape[1]
    parts = [range(requests), *[[request] for request in range(min(requests, 6))]]
    for others in [[requests - 1, 2, 0], *parts * (not is_interpreted)]:
        padded = run(case, with_more_padding(chosen(arguments, others)))
        assert (padded.token_ids[:, rows:] == -1).all()
        part = SamplerOutput(*[None if each is None else each[list(others)] for each in whole])
        unpadded = [each if each is None or each.ndim < 2 else each[:, :rows] for each in padded]
        assert_same_bits(*[SamplerOutput(*each[: 4 if "cuda" in case.backend else None]) for each in (unpadded, part)])


@pytest.mark.parametrize("case", [case for case in EAGER if case.numbers == "by request"], ids=str)
def test_greedy_requests_compute_no_softmax(case, monkeypatch):
    """Only sampled requests compute a softmax, a truncation or a residual mass; a greedy batch computes none."""
    read, softmaxes = truncation.read, []

    def counted(models, samplings):
        softmaxes.extend(logits.shape[:-1].numel() for logits in models)
        return read(models, samplings)

    arguments = arguments_of(case) | {"logprobs": None, "top_logprobs": None}  # raw log-probabilities need a softmax
    for room in ("strict", "probabilistic", "residual", "block", "top_logprobs"):
        monkeypatch.setattr(f"specdecode.eager.{room}.read", counted)
    run(case, arguments | {"temperature": 0.0, "draft_sampling": None})
    assert softmaxes == []
    if case.backend == "eager":
        run(case, chosen(arguments, [1]))
        assert softmaxes == []


@pytest.mark.parametrize("case", [*EAGER[::2], *SOME_KERNELS[::3]], ids=str)
def test_inputs_are_not_written_to_and_outputs_are_memory_of_their_own(case):
    arguments = laid_out(case, arguments_of(case))
    tensors: list[Tensor] = []
    each_tensor(lambda _, tensor: tensors.append(tensor) or tensor, arguments)
    before = [(bits(tensor).clone(), tensor._version) for tensor in tensors]
    output = run(case, arguments)
    fields = [field for field in (*output, output.num_tokens) if field is not None]
    assert len({field.untyped_storage().data_ptr() for field in fields}) == len(fields)
    for field in fields:
        field.fill_(1)  # no output is a view of an input
    for tensor, (old, version) in zip(tensors, before):
        assert torch.equal(bits(tensor), old)
        assert tensor._version == version


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as integers, so that NaN compares by its payload."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.resolve_neg().contiguous().view(integers[tensor.element_size()])


@pytest.mark.parametrize(
    ("method", "backend", "vocab", "drafts", "given", "layout", "report"),
    cover(
        [
            METHODS,
            [*EAGER_WAYS, *KERNEL_WAYS[::2]],
            [1, 7, 1024, 2049],
            [0, 1, 5],
            ["read", "handed on", "no logits"],
            ["padded", "packed by slot"],
            ["processed", "raw lists"],
        ],
        2,
    ),
)
def test_every_size_is_answered(method, backend, vocab, drafts, given, layout, report):
    """No drafts, no requests, requests without rows, one token."""
    case = ORDINARY._replace(method=method, backend=backend, vocab=vocab, drafts=given, layout=layout, report=report)
    for requests in (0, 3):
        arguments = on(device_of(case), make(case, (requests, drafts)))
        assert_equals_oracle(method, arguments, run(case, laid_out(case, arguments)), backend.split()[0])
    if layout != "padded":
        nothing = laid_out(case, arguments)
        nothing["row_starts"] = torch.zeros_like(nothing["row_starts"])
        by_row = ("target_logits", "draft_token_ids", "row_positions")
        output = run(case, nothing | {name: nothing[name][:0] for name in by_row})
        assert_same_bits(output, output_without_rows(output))


# ---------------------------------------------------------------------------------------------------------------------
# Values that a device cannot refuse
# ---------------------------------------------------------------------------------------------------------------------

UNCHECKED = ["eager like a device", *[way for way in KERNEL_WAYS if "many" not in way]]
LOW, HIGH = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
LARGE = torch.finfo(torch.float32).max
LIMITS = {
    "top_k": ([-5, 3 - 2**32, -(2**62), 0, 0, 1], [0, 0, 0, 0, 0, 1]),
    "top_p": ([NAN, 7.0, 0.0, -3.0, INF, 1.0], [1.0, 1.0, 1e-9, 1e-9, 1.0, 1.0]),
    "min_p": ([NAN, -2.0, 0.0, -INF, 40.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
}


def nonsense(kind: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments of six requests that the host would refuse, and the equivalent valid arguments."""
    drafts, temperature = arguments["draft_token_ids"], torch.tensor([0.7, 1.0, 0.3, 0.9, 1.3, 0.5])
    if kind == "ids":
        bad = torch.tensor([1040, -7, 2**40, LOW, HIGH, 2**32])
        there = torch.arange(6)[:, None] % 2 == torch.arange(drafts.shape[1])
        return tuple({"draft_token_ids": drafts.where(~there, ids)} for ids in (bad[:, None], torch.tensor(-1)))
    if kind == "temperature":
        bad, sense = [NAN, -1.0, -INF, INF, 1.0, 0.7], [0.0, 0.0, 0.0, LARGE, 1.0, 0.7]
        return {"temperature": torch.tensor(bad)}, {"temperature": torch.tensor(sense)}
    if kind == "limits":
        limits = [{name: torch.tensor(values[i]) for name, values in LIMITS.items()} for i in range(2)]
        return tuple({"temperature": temperature, **each} for each in limits)
    if kind == "limits of drafts":
        limits = [{name: torch.tensor(values[i]) for name, values in LIMITS.items()} for i in range(2)]
        return tuple({"temperature": temperature, "draft_sampling": Sampling(temperature, **each)} for each in limits)
    counts = torch.full((6, 1040), -(2**31), dtype=torch.int32)
    ids = torch.tensor([[1040, -7, 2**31 - 1]] * 6, dtype=torch.int32)
    rates, wild = torch.tensor([NAN, INF, -1.0, 0.0, -INF, 1e-40]), torch.tensor([NAN, INF, -INF, NAN, INF, NAN])
    return {"adjustments": Adjustments(rates, wild, wild, None, counts, ids, torch.full((6, 3), 5.0))}, {}


@pytest.mark.parametrize(
    ("method", "backend", "kind"),
    cover([METHODS, UNCHECKED, ["ids", "temperature", "limits", "limits of drafts", "adjustments"]], 2),
)
def test_values_that_make_no_sense_on_a_device_count_as_harmless_ones(method, backend, kind):
    case = ORDINARY._replace(method=method, backend=backend)
    arguments = make(case, (6, 1 + (method == "block")))
    bad, harmless = (on(device_of(case), arguments | given) for given in nonsense(kind, arguments))
    with like_a_device():
        assert_same_bits(run(case, bad), run(case, harmless))


PLACES = [
    # Decreasing; far before the first row; valid; decreasing; five rows; none; beyond the last row; slots out of range.
    ([HIGH, LOW, 1, 4, 3, 8, 8, 10], [4, 0, 1, 2, 3, 2, 2]),
    ([0, 1, 2, 3, 5, 6, 7, 8], [0, 5, -1, HIGH, LOW, 2**31, 4]),
]
"""Row starts and slots of seven requests of at most three drafts, with eight rows and five slots."""


def is_sound(starts: list[int], slots: list[int], request: int) -> bool:
    """Return whether a request has valid rows and a valid slot."""
    first, end = starts[request : request + 2]
    return 0 <= first < end <= 8 and end - first <= 4 and 0 <= slots[request] < 5


@pytest.mark.parametrize(
    ("method", "backend", "places", "truncation", "drafts", "report"),
    cover([METHODS, UNCHECKED, PLACES, ["none", "top-p"], ["read", "no logits"], ["processed", "raw", "raw lists"]], 2),
)
def test_a_request_whose_rows_or_slot_cannot_be_is_invalid_and_is_not_read(
    method, backend, places, truncation, drafts, report
):
    """It emits token 0, with probability 1; no other request changes."""
    case = ORDINARY._replace(
        method=method, backend=backend, vocab=40, truncation=truncation, drafts=drafts, report=report
    )
    arguments = on(device_of(case), make(case, (5, 3)))
    target, ids = arguments["target_logits"].flatten(0, 1)[:8], arguments["draft_token_ids"].flatten()[:8].clamp(min=0)
    starts, slots = (torch.tensor(each, device=target.device) for each in places)
    arguments |= {"target_logits": target, "draft_token_ids": ids, "num_draft_tokens": 3, "positions": None}
    arguments = each_tensor(lambda _, tensor: apart(tensor), arguments)
    is_interpreted = backend.startswith("triton") and not ON_GPU
    with like_a_device(), reads_and_writes_inside() if is_interpreted else nullcontext():
        output = run(case, arguments | {"row_starts": starts, "slots": slots})
        for request in range(7):
            got = SamplerOutput(*[None if field is None else field[[request]] for field in output])
            if is_sound(*places, request):
                alone = {"row_starts": starts[request : request + 2], "slots": slots[[request]]}
                assert_same_bits(got, run(case, arguments | alone))
            else:
                assert_same_bits(got, output_without_rows(got))
    assert output.invalid.tolist() == [not is_sound(*places, request) for request in range(7)]


def output_without_rows(like: SamplerOutput) -> SamplerOutput:
    """Return the output of one request without rows, with the fields of another output."""
    nothing = {
        "num_accepted": 0,
        "num_draft_tokens": 0,
        "invalid": 1,
        "logprobs": NAN,
        "top_logprobs": NAN,
        "num_kept": 0,
    }
    fields = {
        name: None if field is None else torch.full_like(field, nothing.get(name, -1))
        for name, field in like._asdict().items()
    }
    for name, first in {"token_ids": 0, "logprobs": 0, "num_kept": 1, "kept_cutoff": 0}.items():
        if fields[name] is not None:
            fields[name][:, 0] = first
    for name, first, others in (("top_token_ids", 0, -1), ("top_logprobs", 0, -INF), ("kept_token_ids", 0, -1)):
        if fields[name] is not None:
            fields[name][:, 0], fields[name][:, 0, 0] = others, first
    return SamplerOutput(**fields)


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------------------------------

GPU_CASES = [case for case in [*EAGER, *KERNELS] if device_of(case) == "cuda"]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_a_captured_call_returns_for_new_inputs_what_a_call_does_and_neither_waits_for_the_device(case):
    """The replay sees the requests in another order: other rows, lengths, slots, limits and adjustments."""
    first = arguments_of(case)
    requests = range(len(first["target_logits"]))
    static, second = (laid_out(case, chosen(first, order)) for order in (requests, requests[::-1]))
    run(case, static)  # compiles
    with synchronising_raises():
        expected = run(case, second)
    graph, output = captured(lambda: run(case, static))
    copies: list[Tensor] = []
    each_tensor(lambda _, tensor: copies.append(tensor) or tensor, second)
    each_tensor(lambda _, tensor: tensor.copy_(copies.pop(0)), static)
    graph.replay()
    assert_same_bits(output, expected)
