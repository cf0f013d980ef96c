"""The adapter of vLLM, with vLLM's arguments: compared with vLLM's own function, if vLLM is installed.

Constructors are bypassed: the attributes of vLLM's classes are in plain namespaces, see `support/vllm.py`.
"""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from specdecode.integrations.vllm import DraftVerification
from tests.support.vllm import METHODS, emitted, ragged_case, rejection_sampler, sampling_states, step


@pytest.fixture
def real():
    """VLLM's own class with ours mixed in."""
    module = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
    return pytest.importorskip(module, reason="vLLM is not installed", exc_type=ImportError).RejectionSampler


def both(real, method, states, case, draft_logits, num_draft_tokens):
    """Return both outputs, vLLM's and ours, on a GPU (or, if vLLM's kernels are interpreted, on the CPU)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = type("Ours", (DraftVerification, real), {}).__new__(type("Ours", (DraftVerification, real), {}))
    result.__dict__ |= rejection_sampler(method, states, num_draft_tokens).__dict__
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
        values = getattr(states, name)
        values.gpu = values.gpu.to(device)
    result.sampler.use_fp64_gumbel = False
    result.use_block_verification = method == "block"
    result.fly_entropy_threshold, result.fly_entropy_top_k = 0.3, 3
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in case.items()}
    moved["draft_logits"] = None if draft_logits is None else draft_logits.to(device)
    ours, theirs = result._verify(**moved), real._verify(result, **moved)
    assert [(each.shape, each.dtype) for each in ours[1:]] == [(each.shape, each.dtype) for each in theirs[1:]]
    return emitted(*ours[1:]), emitted(*theirs[1:])


@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_emit_what_vllm_emits(real, method):
    case, _, _ = ragged_case(seed=3)
    ours, theirs = both(real, method, sampling_states(64, 50, temperature=0.0), case, torch.randn(64, 4, 50), 4)
    assert ours == theirs


@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_sampled_requests_are_distributed_as_vllms(real, method):
    requests, vocab = (20_000 if torch.cuda.is_available() else 400), 4
    generator = torch.Generator().manual_seed(6)
    target, draft = 1.5 * torch.randn(2, 2, vocab, generator=generator)
    drafts = torch.multinomial((draft / 0.7).softmax(dim=1), requests, replacement=True, generator=generator).T
    case = step(
        drafts.tolist(),
        torch.cat([target, target[:1]]).expand(requests, 3, vocab),
        list(range(requests)),
        [8] * requests,
    )
    states = sampling_states(requests, vocab, temperature=0.7)
    ours, theirs = both(real, method, states, case, draft.expand(requests, 2, vocab).contiguous(), 2)
    kinds = sorted({*map(tuple, ours), *map(tuple, theirs)})
    counts = np.array([[[*map(tuple, rows)].count(kind) for kind in kinds] for rows in (ours, theirs)], dtype=float)
    often = counts.sum(axis=0) >= 20
    counts = np.concatenate([counts[:, often], counts[:, ~often].sum(axis=1, keepdims=True)], axis=1)
    counts = counts[:, counts.sum(axis=0) > 0]
    assert chisquare(counts[0], counts.sum(axis=0) / 2, ddof=0).pvalue > 1e-6
