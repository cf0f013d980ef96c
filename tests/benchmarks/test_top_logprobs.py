"""The cost of likeliest tokens and kept sets, compared with the same call with log-probabilities alone.

`pytest --benchmark-only tests/benchmarks/test_top_logprobs.py`. Times are taken as in `test_gpu`.
A kept set writes 4 KB a row.
"""

import pytest

from tests.benchmarks import test_gpu
from tests.benchmarks.bandwidth import Recording
from tests.benchmarks.providers import Verifier
from tests.benchmarks.test_gpu import TRUNCATIONS, Shape, check, measure

WHY_NOT, pytestmark = test_gpu.WHY_NOT, test_gpu.pytestmark
inputs, environment, bytes_per_second = test_gpu.inputs, test_gpu.environment, test_gpu.bytes_per_second  # fixtures

LISTS = {
    "none": {},
    "20 likeliest tokens": {"top_logprobs": 20},
    "kept sets": {"kept_sets": True},
    "both": {"top_logprobs": 20, "kept_sets": True},
}
SHAPES = [Shape(batch, 3, "bfloat16", 0.7) for batch in (1, 32, 256)]


@pytest.mark.parametrize("inputs", SHAPES, indirect=True, ids=str)
@pytest.mark.parametrize("method", ["probabilistic", "strict"])
@pytest.mark.parametrize("truncation", ["plain", "top-k 20, top-p .95"])
@pytest.mark.parametrize("lists", list(LISTS))
def test_reports_on_the_gpu(benchmark, request, inputs, method, truncation, lists, environment):
    benchmark.group = f"reports, {request.node.callspec.params['inputs']}"
    benchmark.extra_info |= {"provider": f"{method}, {truncation}, {lists}", "environment": environment}
    options = {"truncation": TRUNCATIONS[truncation], "logprobs": "processed", **LISTS[lists]}
    call, expected = (Verifier(method, backend)(inputs, **options) for backend in ("triton", "eager"))
    got, want = call(), expected()
    check(inputs, Verifier(method), got, TRUNCATIONS[truncation])
    same = (got.token_ids == want.token_ids).all(dim=1)
    if "top_logprobs" in options:
        assert (got.top_token_ids[same] == want.top_token_ids[same]).double().mean() >= 0.98
    if "kept_sets" in options:
        assert (got.num_kept[same] == want.num_kept[same]).double().mean() >= 0.98
    measure(benchmark, Recording(call))
