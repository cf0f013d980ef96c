"""The kernels' tests: without a GPU in Triton's interpreter, which computes with NumPy; without Triton they are skipped."""

from pathlib import Path

import pytest

from tests.conftest import HAS_TRITON

collect_ignore_glob = [] if HAS_TRITON else ["*.py"]


@pytest.fixture(scope="module")
def ranks_of():
    """Ranks of some shards, made once in a module."""
    from tests.support.ranks import made_once

    return made_once()


@pytest.fixture
def turns():
    """Let ranks that are threads launch kernels one at a time."""
    from tests.support.sharded_calls import taking_turns

    with taking_turns():
        yield


@pytest.fixture
def shared():
    """Have ranks that are threads exchange words through memory of all."""
    from tests.support.sharded_calls import sharing_memory

    with sharing_memory():
        yield


def pytest_collection_modifyitems(items):
    # NumPy warns about what the kernels handle: infinities, NaN, overflow.
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
