"""Packed calls of requests without rows read no logit."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests.contract.cases import NAN, ORDINARY, make, run
from tests.support import addresses
from tests.support.addresses import reads_and_writes_inside
from tests.support.differential import like_a_device
from tests.support.kernels import needs_interpreter

HIGH, LOW = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min


@needs_interpreter
@pytest.mark.parametrize(
    ("method", "backend", "truncation", "drafts", "report"),
    [
        ("strict", "triton few", "none", "read", "processed"),
        ("probabilistic", "triton few", "top-p", "read", "raw"),
        ("block", "triton large", "none", "read", "processed"),
        ("synthetic", "triton large", "none", "read", "raw"),
        ("probabilistic", "triton many", "top-p", "no logits", "processed"),
    ],
)
@pytest.mark.parametrize(
    ("starts", "slots"),
    [([HIGH, LOW, 5, 5, 20], [0, 1, 2, 3]), ([0, 1, 4], [5, -1])],
    ids=["rows", "slots"],
)
def test_no_logit_is_read_of_requests_that_have_none(method, backend, truncation, drafts, report, starts, slots):
    """Not even rows of other requests; and the log-probability of their token 0 is 0."""
    case = ORDINARY._replace(
        method=method, backend=backend, truncation=truncation, drafts=drafts, report=report, vocab=40
    )
    call = make(case, (5, 3)) | {"positions": None, "num_draft_tokens": 3}
    call |= {"row_starts": torch.tensor(starts), "slots": torch.tensor(slots)}
    call["target_logits"] = call["target_logits"].flatten(0, 1)[:8].clone()
    call["draft_token_ids"] = call["draft_token_ids"].flatten()[:8].clamp(min=0)
    ranges_of = addresses.ranges_of

    def ranges_without_logits(values: dict[str, Any]) -> Any:
        return ranges_of({name: value for name, value in values.items() if name not in ("target", "draft")})

    without_logits = mock.patch.object(addresses, "ranges_of", ranges_without_logits)
    with like_a_device(), without_logits, reads_and_writes_inside() as launched:
        output = run(case, call)
    assert "target" in launched[0]
    assert output.token_ids.tolist() == [[0, -1, -1, -1]] * len(slots)
    torch.testing.assert_close(output.logprobs[:, :2], torch.tensor([[0.0, NAN]] * len(slots)), equal_nan=True)
    assert output.invalid.all()
