"""The adapter of vLLM: processed log-probabilities and sampling masks belong to the rows that tokens are drawn from."""

import sys
from types import SimpleNamespace as Namespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from reference.sampling import Sampling, kept_tokens, top_logprobs
from specdecode import RejectionSampler
from specdecode.integrations.vllm import DraftVerification
from specdecode.integrations.vllm.listing import sampling_mask
from specdecode.integrations.vllm.sampling import ADJUSTS, LOGPROBS, MASKS, UNLISTED, WIDE
from tests.support.vllm import LEFT, METHODS, bare_sampler, ragged_case, rejection_sampler, sampling_states

SLOTS, VOCAB, DRAFTS = 64, 50, 4


class Logprobs(NamedTuple):
    """As vLLM's `LogprobsTensors`."""

    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any


class Masks(NamedTuple):
    """As vLLM's `SamplingMaskTensors`."""

    token_ids: Any
    packed_mask: Any
    counts: Any
    vocab_size: int
    rows_per_request: int

    @classmethod
    def cat(cls, chunks):
        parts = [torch.cat([chunk[i] for chunk in chunks]) for i in range(3)]
        return cls(*parts, *chunks[0][3:])


class Engine:
    """A stand-in for vLLM's class: a step, in two chunks if divided, without the prepared copy."""

    def _verify(self, *arguments):
        return LEFT, torch.zeros(len(arguments[5]), DRAFTS + 1, dtype=torch.int64), torch.ones(len(arguments[5]))

    def _get_logprobs_tensors(self, sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs):
        assert logits is not LEFT
        flat = torch.zeros(len(logits), dtype=torch.int64)
        for tokens, count, start in zip(sampled.tolist(), num_sampled.tolist(), cu_num_logits_np):
            flat[start : start + count] = torch.tensor(tokens[:count])
        ids = torch.cat([flat[:, None], logits.float().topk(max_num_logprobs).indices], 1)
        ranks = (logits >= logits.gather(1, flat[:, None])).sum(1)
        return Logprobs(ids, logits.float().log_softmax(-1).gather(1, ids), ranks)

    def _verify_in_chunks(self, logits, batch, draft_logits, fed, pos, most, count, verify):
        starts, results, masks = batch.cu_num_logits_np, [], None
        middle = len(starts) // 2 if len(logits) > most else len(starts) - 1
        for first, end in [(0, middle), (middle, len(starts) - 1)]:
            rows, some = slice(starts[first], starts[end]), slice(first, end)
            if first == end:
                continue
            cu = batch.cu_num_logits[first : end + 1] - starts[first]
            mappings = batch.idx_mapping[some], batch.idx_mapping_np[some], batch.expanded_idx_mapping[rows]
            where = batch.expanded_local_pos[rows], batch.seq_lens_cpu_upper_bound[some], verify[rows]
            used, *tokens = self._verify(logits[rows], draft_logits, fed[rows], pos[rows], cu, *mappings, *where)
            of_rows = self._get_logprobs_tensors(*tokens, used, cu, cu.numpy(), count) if used is not LEFT else LEFT
            results.append((*tokens, of_rows))
            if self.sampler.return_sampling_mask:
                masks = LEFT
        sampled, num_sampled, tensors = zip(*results)
        if LEFT not in tensors:
            tensors = Logprobs(*[torch.cat(parts) for parts in zip(*tensors)])
        return torch.cat(sampled), torch.cat(num_sampled), tensors, masks


@pytest.fixture(autouse=True)
def output_module(monkeypatch):
    name = "vllm.v1.worker.gpu.sample.output"
    for i, letter in enumerate(name):
        if letter == ".":
            monkeypatch.setitem(sys.modules, name[:i], Namespace(__path__=[]))
    monkeypatch.setitem(sys.modules, name, Namespace(SamplingMaskTensors=Masks))


def engine(method, states, **sampler):
    """Return the adapter, after a step that compiles its kernels."""
    kind = type("Ours", (DraftVerification, Engine), {})
    result = kind.__new__(kind)
    result.__dict__ |= vars(rejection_sampler(method, states, DRAFTS))
    vars(result.sampler).update(sampler)
    case, _, _ = ragged_case(batch=3)
    result.sampler.return_sampling_mask = False
    result._verify(draft_logits=None, **case)
    result.sampler.return_sampling_mask = sampler.get("return_sampling_mask", False)
    result.fallbacks.clear()
    return result


def run(result, case, most=1000):
    """Verify a step like vLLM."""
    slots = case["idx_mapping_np"]
    names = "idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos", "cu_num_logits"
    batch = Namespace(**{name: case[name] for name in names}, cu_num_logits_np=case["cu_num_logits"].numpy())
    batch.seq_lens_cpu_upper_bound = case["seq_lens_upper_bound_np"]
    count = int(result.sampler.sampling_states.num_logprobs[slots].max())
    fed = case["draft_sampled"]
    return result._verify_in_chunks(case["logits"], batch, None, fed, case["pos"], most, count, fed)


@pytest.mark.parametrize("most", [1000, 20])
@pytest.mark.parametrize("method", METHODS)
def test_log_probabilities_and_masks_are_those_of_the_truncated_rows(method, most):
    case, _, _ = ragged_case(seed=3, scale=3.0)
    options = [(5, 1.0), (40, 0.8), (50, 0.95), (2, 1.0)]
    top_k, top_p = (torch.tensor([options[slot % 4][i] for slot in range(SLOTS)]) for i in (0, 1))
    states = sampling_states(SLOTS, VOCAB, temperature=torch.linspace(0.3, 1.5, SLOTS), top_k=top_k, top_p=top_p)
    states.num_logprobs[:] = np.arange(SLOTS) % 3 + 1
    result = engine(method, states, logprobs_mode="processed_logprobs", return_sampling_mask=True)
    sampled, num_sampled, logprobs, masks = run(result, case, most)
    assert not result.fallbacks
    assert result.sampler.return_sampling_mask
    assert (result.mask_outputs, result.num_listed, masks[3:]) == (None, -1, (VOCAB, DRAFTS + 1))
    starts, compared = case["cu_num_logits"].tolist(), 0
    for request, slot in enumerate(case["idx_mapping_np"]):
        sampling = Sampling(float(states.temperature.np[slot]), *options[slot % 4])
        for offset in range(int(num_sampled[request])):
            row, place = starts[request] + offset, request * (DRAFTS + 1) + offset
            logits, token = case["logits"][row].double().numpy(), int(sampled[request, offset])
            kept = kept_tokens(logits, sampling)
            assert masks.token_ids[place].tolist() == [*kept, *[-1] * (50 - len(kept))]
            bits = np.unpackbits(masks.packed_mask[place].numpy(), count=VOCAB, bitorder="little")
            assert np.flatnonzero(bits).tolist() == kept
            assert masks.counts[place] == len(kept)
            want, ids = top_logprobs(logits, VOCAB, sampling), logprobs.logprob_token_ids[row].tolist()
            assert ids[0] == token
            assert ids[1:] == [*[v for v, _ in want if v >= 0], *[v for v in range(VOCAB) if v not in kept]][:3]
            expected = [dict(want).get(v, -np.inf) for v in ids]
            np.testing.assert_allclose(logprobs.logprobs[row].numpy(), expected, rtol=1e-5, atol=1e-5)
            assert logprobs.selected_token_ranks[row] == sum(logits[v] >= logits[token] for v in kept)
            compared += 1
    assert compared > 45
    assert (masks.counts.view(-1, DRAFTS + 1)[torch.arange(DRAFTS + 1) >= num_sampled[:, None]] == 0).all()


def test_a_step_without_log_probabilities_lists_masks_alone_and_without_masks_ranks_are_of_the_rows():
    case, _, _ = ragged_case(seed=3)
    states = sampling_states(SLOTS, VOCAB, top_k=2)
    result = engine("block", states, logprobs_mode="processed_logprobs", return_sampling_mask=True)
    result._get_logprobs_tensors = lambda *_: Logprobs(*torch.zeros(3, 1, 1))
    *_, masks = run(result, case)
    assert set(masks.counts.tolist()) == {0, 2}
    states.num_logprobs[:] = 0
    *_, logprobs, masks = run(engine("block", states, logprobs_mode="processed_logprobs"), case)
    assert masks is None
    assert logprobs.logprobs.shape == (len(case["logits"]), 1)


@pytest.mark.parametrize(
    ("change", "has_masks"),
    [
        (lambda states, slot: states.temperature.np.__setitem__(slot, 0), False),
        (lambda states, slot: states.num_logprobs.__setitem__(slot, 21), False),
        (lambda states, slot: states.temperature.np.__setitem__(slot, 0), True),
        (lambda states, slot: states.top_k.np.__setitem__(slot, 1025), True),
    ],
    ids=["greedy", "many", "greedy with masks", "wide"],
)
@pytest.mark.parametrize("most", [1000, 20])
def test_steps_of_which_not_all_can_be_listed_are_vllms(change, has_masks, most):
    case, _, _ = ragged_case(seed=3)
    states = sampling_states(SLOTS, VOCAB, top_k=20)
    states.num_logprobs[:] = 2
    change(states, case["idx_mapping_np"][7])
    mode = "raw_logprobs" if states.top_k.np.max() > 20 else "processed_logprobs"
    result = engine("probabilistic", states, logprobs_mode=mode, return_sampling_mask=has_masks)
    sampled, _, logprobs, masks = run(result, case, most)
    assert len(sampled) == 40
    assert LEFT in logprobs
    assert masks is (LEFT if has_masks else None)
    assert result.fallbacks
    assert result.sampler.return_sampling_mask == has_masks


def test_what_is_not_listed_is_noted_of_each_request():
    states = sampling_states(6, 2000, temperature=torch.tensor([1.0, 0, 0, 1, 1, 1]), top_k=5)
    states.num_logprobs[:] = [2, 2, -1, 21, 20, -1]
    states.top_k.np[4:] = [1024, 1025]
    needs = bare_sampler(states).needs
    assert (needs & UNLISTED > 0).tolist() == [False, True, False, True, False, False]
    assert (needs & WIDE > 0).tolist() == [False] * 5 + [True]
    assert (needs & LOGPROBS > 0).tolist() == [True, True, False, True, True, False]


def test_a_step_with_penalties_or_masks_and_processed_log_probabilities_is_vllms():
    result = rejection_sampler("block", sampling_states(SLOTS, VOCAB), DRAFTS)
    result.sampler.logprobs_mode = "processed_logprobs"
    assert result.why_not(None, LOGPROBS, lists=True) is None
    for need in (ADJUSTS, MASKS):
        assert result.why_not(None, LOGPROBS | need, lists=True) == "logprobs_mode 'processed_logprobs'"
    result.sampler.logprobs_mode = "processed_logits"
    assert result.why_not(None, LOGPROBS, lists=True) == "logprobs_mode 'processed_logits'"


def test_what_calls_may_be_asked_to_list_is_compiled_ahead():
    kept = {"kept_sets": True}
    few, many = ({"logprobs": "processed", "top_logprobs": count} for count in (0, 1))
    for mode, mask, want in [
        ("raw_logprobs", False, []),
        ("raw_logprobs", True, [kept]),
        ("processed_logprobs", False, [few, many]),
        ("processed_logprobs", True, [few, many, kept, few | kept, many | kept]),
    ]:
        sampler = bare_sampler(sampling_states(1, VOCAB))
        sampler.logprobs_mode, sampler.return_sampling_mask = mode, mask
        assert sampler.listings() == want


def test_an_error_in_a_step_leaves_vllms_switch_as_it_was():
    case, _, _ = ragged_case()
    states = sampling_states(SLOTS, VOCAB, top_k=5)
    result = engine("block", states, logprobs_mode="processed_logprobs", return_sampling_mask=True)

    def fail(*_):
        raise RuntimeError("no memory")

    result._verify = fail
    with pytest.raises(RuntimeError, match="no memory"):
        run(result, case)
    assert (result.sampler.return_sampling_mask, result.mask_outputs, result.num_listed) == (True, None, -1)


def test_a_mask_has_a_bit_for_each_kept_token():
    logits = torch.zeros(1, 1, 20)
    logits[0, 0, [0, 7, 8, 19]] = 9.0
    output = RejectionSampler("strict")(logits, torch.zeros(1, 0, dtype=torch.int64), top_k=4, seeds=0, kept_sets=True)
    token_ids, packed, counts = sampling_mask(output, 20, 6)
    assert token_ids.tolist() == [[0, 7, 8, 19, -1, -1]]
    assert packed.tolist() == [[0b10000001, 1, 0b1000]]
    assert counts.tolist() == [4]
    assert (token_ids.dtype, packed.dtype, counts.dtype) == (torch.int32, torch.uint8, torch.int32)
