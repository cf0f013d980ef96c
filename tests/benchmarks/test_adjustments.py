"""The cost of penalties, biases and masks, compared with the plain call and with an adjusted copy of the rows.

`pytest --benchmark-only tests/benchmarks/test_adjustments.py`. Times are taken as in `test_gpu`. `bytes` counts only
counts and masks: 4 bytes per token, shared by all rows of a request, and 1 bit per token for each row of a mask.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdecode import Adjustments
from specdecode.eager.adjustments import AdjustedRows, RowIndex
from tests.benchmarks import test_gpu
from tests.benchmarks.bandwidth import Recording
from tests.benchmarks.inputs import Inputs
from tests.benchmarks.providers import Verifier
from tests.benchmarks.test_gpu import Shape, check_token_ids, measure, note_bytes

WHY_NOT, pytestmark = test_gpu.WHY_NOT, test_gpu.pytestmark
inputs, environment, bytes_per_second = test_gpu.inputs, test_gpu.environment, test_gpu.bytes_per_second  # fixtures

BIASES = 32
SHAPES = [Shape(batch, 3, "bfloat16", 0.7) for batch in (1, 32, 256)]
KINDS = [
    "none",
    "penalties of one request",
    "penalties",
    "biases of one request",
    "biases",
    "masks",
    "a copy, penalties",
]


def adjustments_of(kind: str, inputs: Inputs) -> Adjustments | None:
    """Return adjustments of a kind: for the first request, or for all."""
    batch, rows, vocab = inputs.target_logits.shape
    words = -(-vocab // 32)
    generator = torch.Generator("cuda").manual_seed(2)

    def each(value: float, neutral: float) -> torch.Tensor:
        values = torch.full((batch,), float(neutral), device="cuda")
        values[: 1 if "one" in kind else batch] = value
        return values

    if "penalties" in kind:
        counts = torch.randint(-40, 3, (batch, vocab), generator=generator, device="cuda", dtype=torch.int32)
        prompt = torch.randint(0, 2**31, (batch, words), generator=generator, device="cuda").to(torch.int32)
        return Adjustments(each(1.1, 1), each(0.2, 0), each(0.2, 0), prompt, counts.clamp_(min=0))
    if "biases" in kind:
        ids = torch.randint(0, vocab, (batch, BIASES), generator=generator, device="cuda", dtype=torch.int32)
        return Adjustments(bias_ids=ids.masked_fill(each(1, 0)[:, None] == 0, -1), bias=torch.ones_like(ids).float())
    if kind == "masks":
        return Adjustments(allowed_mask=torch.full((batch, rows, words), -2, device="cuda", dtype=torch.int32))
    return None


def with_a_copy(method: str, inputs: Inputs, adjustments: Adjustments) -> Callable[[], Any]:
    """Return a call of the kernels with rows adjusted by PyTorch in a float32 copy."""
    token_ids = inputs.drafts(method).token_ids
    batch, rows, _ = shape = inputs.target_logits.shape
    requests, offsets = torch.arange(batch, device="cuda"), torch.arange(rows, device="cuda")
    requests, offsets = requests[:, None].expand(shape[:2]), offsets.expand(shape[:2])
    index = RowIndex(requests, requests, offsets, requests)

    def call() -> Any:
        logits = AdjustedRows(inputs.target_logits, adjustments, token_ids, index).gather()
        copied = Inputs.__new__(Inputs)
        copied.__dict__ |= vars(inputs) | {"target_logits": logits}
        return Verifier(method)(copied)()

    return call


@pytest.mark.parametrize("inputs", SHAPES, indirect=True, ids=str)
@pytest.mark.parametrize("method", ["probabilistic", "strict"])
@pytest.mark.parametrize("kind", KINDS)
def test_adjustments_on_the_gpu(benchmark, request, inputs, method, kind, bytes_per_second, environment):
    benchmark.group = f"adjustments, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": f"{method}, {kind}", "environment": environment}
    adjustments = adjustments_of(kind, inputs)
    if kind.startswith("a copy"):
        assert adjustments is not None
        call = with_a_copy(method, inputs, adjustments)
    else:
        call, expected = (Verifier(method, backend)(inputs, adjustments=adjustments) for backend in ("triton", "eager"))
        got = call()
        check_token_ids(got.token_ids, inputs)
        assert (got.num_accepted == expected().num_accepted).double().mean() >= 0.98
    device_us = measure(benchmark, Recording(call))
    batch, rows, vocab = inputs.target_logits.shape
    of_mask = 4 * -(-vocab // 32)
    needed = {"penalties": batch * (4 * vocab + of_mask), "masks": batch * rows * of_mask}.get(kind)
    if needed is not None:
        note_bytes(benchmark, needed, device_us, bytes_per_second)
