"""The texts of plain seeded sampling: request i has seed 100 + i."""

import pytest


@pytest.fixture(scope="session")
def plain():
    """Plain texts, by target."""
    from tests.hugging_face.common import NEW, PROMPTS, TARGETS, TEMPERATURE, one_by_one

    return {
        name: [one_by_one(target, prompt, NEW, TEMPERATURE[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
        for name, target in TARGETS.items()
    }


@pytest.fixture(scope="session")
def truncated():
    """Plain texts with truncated rows, by target."""
    from tests.hugging_face.common import HOT, NEW, PROMPTS, TARGETS, of_request, one_by_one

    expected = {}
    for name, target in TARGETS.items():
        rows = [(target, prompt, NEW, HOT[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
        expected[name] = [one_by_one(*row, **of_request(i)) for i, row in enumerate(rows)]
        whole = [one_by_one(*row) for row in rows]
        assert [one != other for one, other in zip(expected[name], whole)] == (HOT > 0).tolist()
    return expected
