"""What every call promises, whatever its method, backend, options and layout: each promise is one test over all cases."""

from typing import Any

import pytest
import torch

from tests.contract.cases import (
    EAGER_WAYS,
    KERNEL_WAYS,
    Parameters,
    cases_of,
    device_of,
    laid_out,
    make,
    on,
    run,
)
from tests.conftest import ON_GPU
from tests.support.oracle import assert_equals_oracle

# NumPy, with which Triton's interpreter computes, warns of infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EAGER = cases_of(EAGER_WAYS)
KERNELS = cases_of(
    KERNEL_WAYS,
    dtype=["bfloat16", "float32", "float16", *["float64", "bfloat16 and float32"] * ON_GPU],
    vocab=[1040, 1025, *[5003, 50_257] * ON_GPU],
)


def arguments_of(case: Parameters) -> dict[str, Any]:
    return on(device_of(case), make(case))


@pytest.mark.parametrize("case", [*EAGER, *KERNELS], ids=str)
def test_the_output_is_the_oracles(case):
    arguments = arguments_of(case)
    output = run(case, laid_out(case, arguments))
    assert_equals_oracle(case.method, arguments, output, case.backend.split()[0])
