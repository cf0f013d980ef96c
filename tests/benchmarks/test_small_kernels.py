"""The gain of each design: one program a request; blocks in two launches; the package's kernels. All on float32 rows.

`pytest --benchmark-only tests/benchmarks/test_small_kernels.py`. Times are taken as in `test_gpu`.
"""

import functools
import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.benchmarks import test_gpu
from tests.benchmarks.bandwidth import Recording
from tests.benchmarks.inputs import Inputs
from tests.benchmarks.providers import Verifier
from tests.benchmarks.test_gpu import Shape, check_token_ids, measure

WHY_NOT, pytestmark = test_gpu.WHY_NOT, test_gpu.pytestmark
inputs, environment, bytes_per_second = test_gpu.inputs, test_gpu.environment, test_gpu.bytes_per_second  # fixtures

STEPS = {"one program a request": "verify", "blocks, two launches": "verify_by_blocks", "production": None}
CASES = [
    (Shape(batch, 3, "float32", 0.0 if method == "greedy" else 0.7), method)
    for batch in (1, 32, 256)
    for method in ("strict", "probabilistic", "block", "greedy")
]


def small(method: str, version: str, inputs: Inputs, token_ids: Tensor) -> Callable[[], Tensor]:
    """Return a call of a small kernel, with the same seeds and positions as the package's kernels."""
    requests = torch.arange(len(token_ids), device=token_ids.device)
    given = [inputs.target_logits, token_ids]
    if method in ("probabilistic", "block"):
        given.append(inputs.draft_logits)
    if method != "greedy":
        given += [torch.stack([requests, torch.zeros_like(requests)], dim=1), inputs.temperature]
    return functools.partial(getattr(importlib.import_module(f"reference.kernels.{method}"), version), *given)


@pytest.mark.parametrize(("inputs", "method"), CASES, indirect=["inputs"], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_small_kernels_beside_production(benchmark, request, inputs, method, step, environment):
    benchmark.group = f"small kernels, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": f"{method}, {step}", "environment": environment}
    name = "strict" if method == "greedy" else method
    call = production = Verifier(name)(inputs)
    if (version := STEPS[step]) is not None:
        call = small(method, version, inputs, inputs.drafts(name).token_ids)
        token_ids = call()
        check_token_ids(token_ids, inputs)
        assert (token_ids == production().token_ids).all(dim=1).double().mean() >= 0.98
    measure(benchmark, Recording(call))
