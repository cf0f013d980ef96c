"""Skip the tests of the kernels without Triton, and hide NumPy's warnings, which come from Triton's interpreter."""

from pathlib import Path

import pytest

from tests.conftest import HAS_TRITON

collect_ignore_glob = [] if HAS_TRITON else ["*.py"]


def pytest_collection_modifyitems(items):
    # The interpreter computes with NumPy, which warns about infinities, NaN and overflow; kernels handle these.
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
