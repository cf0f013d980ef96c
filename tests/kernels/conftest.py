"""The kernels' tests: without a GPU in Triton's interpreter, which computes with NumPy; without Triton they are skipped."""

from pathlib import Path

import pytest

from tests.conftest import HAS_TRITON

collect_ignore_glob = [] if HAS_TRITON else ["*.py"]


def pytest_collection_modifyitems(items):
    # NumPy warns about what the kernels handle: infinities, NaN, overflow.
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
