"""The adapter of vLLM, with vLLM's arguments: steps verified here.

Constructors are bypassed: the attributes of vLLM's classes are in plain namespaces, see `support/vllm.py`.
"""

from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from specdecode import Adjustments, RejectionSampler, Sampling, backends, sample
from specdecode.batch import VerificationBatch
from specdecode.integrations.vllm.steps import StepInputs
from tests.support import distributions
from tests.support.vllm import (
    METHODS,
    bare_sampler,
    emitted,
    mirrored,
    packed_arguments,
    ragged_case,
    rejection_sampler,
    sampling_states,
    step,
)


@pytest.mark.parametrize("with_draft_logits", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_emit_what_the_contract_says(method, with_draft_logits):
    case, drafts, logits = ragged_case()
    states = sampling_states(64, 50, temperature=0.0, top_p=0.5)
    draft_logits = torch.randn(64, 4, 50) if with_draft_logits else None
    rows, token_ids, num_tokens = rejection_sampler(method, states, 4)._verify(draft_logits=draft_logits, **case)
    assert rows is case["logits"]
    assert (token_ids.shape, token_ids.dtype, num_tokens.dtype) == ((40, 5), torch.int64, torch.int32)
    expected = []
    for own, best in zip(drafts, logits.argmax(dim=-1).tolist()):
        accepted = 0
        while accepted < len(own) and own[accepted] == best[accepted]:
            accepted += 1
        expected.append(best[: accepted + 1])
    assert emitted(token_ids, num_tokens) == expected
    assert {len(row) for row in expected} == {1, 2, 3, 4, 5}


def test_strict_emits_what_plain_sampling_says_whatever_is_drafted():
    case, _, logits = ragged_case(seed=1, scale=4.0)
    temperature = torch.linspace(0, 2, 64)
    truncation = {"top_k": 30, "top_p": 0.9, "min_p": 0.01}
    states = sampling_states(64, 50, temperature, **truncation)
    _, token_ids, num_tokens = rejection_sampler("strict", states, 4)._verify(draft_logits=None, **case)
    slots = case["idx_mapping"].long()
    for i in range(4):
        own = sample(
            logits[:, i],
            temperature[slots],
            states.seeds.gpu[slots],
            case["pos"][case["cu_num_logits"][:-1].long()] + 1 + i,
            **truncation,
        )
        reached = num_tokens > i
        assert reached.any()
        assert torch.equal(token_ids[reached, i], own[reached])
    assert num_tokens.float().mean() > 1.2

    # Steps without drafts are drawn by vLLM's sampler: the same tokens.
    plain = bare_sampler(states)
    plain.verifier = Mock(wraps=RejectionSampler("strict"), method="strict", backend="auto")
    first = case["cu_num_logits"][:-1].long()
    tokens, _ = plain.sample(
        case["logits"][first],
        case["idx_mapping"],
        case["idx_mapping"],
        case["idx_mapping_np"],
        case["pos"][first],
        case["draft_sampled"][first],
        case["expanded_local_pos"][first],
        case["seq_lens_upper_bound_np"],
    )
    assert torch.equal(tokens, token_ids[:, 0])
    assert plain.verifier.warmup.call_count == 2


@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_drafts_of_untruncated_rows_are_verified_for_a_truncated_target(method):
    requests, vocab = 20_000, 6
    generator = torch.Generator().manual_seed(5)
    target, draft = 0.7 * torch.randn(2, vocab, generator=generator)
    temperature = torch.tensor([0.6, 1.4]).repeat(requests // 2)
    states = sampling_states(requests, vocab, temperature, top_k=4, top_p=0.9)
    draft_rows = (draft / temperature[:, None]).softmax(dim=1)
    drafts = torch.multinomial(draft_rows, 1, generator=generator)
    # Requests are in the reverse order of their slots, and draft rows belong to slots.
    slots = list(range(requests))[::-1]
    case = step(drafts.flip(0).tolist(), target.expand(requests, 2, vocab), slots, [8] * requests)
    draft_logits = draft.expand(requests, 1, vocab)
    _, token_ids, _ = rejection_sampler(method, states, 1)._verify(draft_logits=draft_logits, **case)
    for kind, at in enumerate((0.6, 1.4)):
        weights, order = (target.double() / at).softmax(dim=0).sort(descending=True)
        weights[4:] = 0
        weights /= weights.sum()
        weights[weights.cumsum(0) - weights >= 0.9] = 0
        seen = token_ids[:, 0].flip(0)[kind::2].bincount(minlength=vocab)[order]
        kept = weights > 0
        assert 1 < kept.sum() < vocab
        assert seen[~kept].sum() == 0
        expected = weights[kept] / weights.sum() * (requests // 2)
        assert chisquare(seen[kept].numpy(), expected.numpy()).pvalue > 1e-6


def test_packed_gets_vllms_own_tensors_and_nothing_that_changes_nothing():
    case, drafts, _ = ragged_case()
    got = packed_arguments("probabilistic", states := sampling_states(64, 50, temperature=0.7), case)
    assert got["target_logits"] is case["logits"]
    assert got["row_starts"] is case["cu_num_logits"]
    assert got["slots"] is case["idx_mapping"]
    assert got["temperature"] is states.temperature.gpu
    assert got["seeds"] is states.seeds.gpu
    assert got["draft_logits"] is None
    assert got["num_draft_tokens"] == 4
    assert set(got) == {
        *("target_logits", "draft_token_ids", "row_starts", "draft_logits"),
        *("num_draft_tokens", "slots", "temperature", "seeds", "row_positions"),
    }
    for request, own in enumerate(drafts):
        start = int(case["cu_num_logits"][request])
        assert got["draft_token_ids"][start : start + len(own)].tolist() == own
    assert got["draft_token_ids"].data_ptr() == case["verify_draft_sampled"][1:].data_ptr()  # not a copy
    assert got["row_positions"] is case["pos"]


def test_a_batch_may_be_filled_up_with_requests_without_rows():
    case, _, _ = ragged_case()
    sampler = rejection_sampler("strict", sampling_states(64, 50), 4)
    _, token_ids, num_tokens = sampler._verify(draft_logits=None, **case)
    case["cu_num_logits"] = torch.cat([case["cu_num_logits"], case["cu_num_logits"][-1:]])
    case["idx_mapping"] = torch.cat([case["idx_mapping"], case["idx_mapping"][:1]])
    _, padded_ids, padded_nums = sampler._verify(draft_logits=None, **case)
    assert torch.equal(padded_ids[:-1], token_ids)
    assert torch.equal(padded_nums[:-1], num_tokens)


@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_drafts_that_vllm_leaves_out_are_none_but_for_drawn_ones_that_their_row_masks(method):
    case, _, _ = ragged_case()
    fed, case["verify_draft_sampled"] = case["draft_sampled"], torch.full_like(case["draft_sampled"], -1)
    draft_logits = torch.randn(64, 4, 50)
    assert (packed_arguments(method, sampling_states(64, 50), case)["draft_token_ids"] == -1).all()
    assert (packed_arguments(method, sampling_states(64, 50), case, draft_logits)["draft_token_ids"] == -1).all()
    row = int(case["cu_num_logits"][1])
    case["logits"] = case["logits"].clone()
    case["logits"][row, int(fed[row + 1])] = -torch.inf
    got = packed_arguments(method, sampling_states(64, 50), case, draft_logits)["draft_token_ids"]
    assert int(got[row]) == (-1 if method == "strict" else int(fed[row + 1]))
    assert (got == -1).sum() == len(got) - (method != "strict")


def test_a_drawn_draft_that_vllm_leaves_out_keeps_its_id_if_a_mask_forbids_it():
    case, _, _ = ragged_case()
    row = int(case["cu_num_logits"][1])
    fed, token = case["draft_sampled"], int(case["draft_sampled"][row + 1])
    case["verify_draft_sampled"] = torch.full_like(fed, -1)
    mask = torch.full((len(fed), 2), -1, dtype=torch.int32)
    mask[row, token // 32] &= ~(1 << token % 32)
    case["logits"][0, int(fed[1])] = -torch.inf  # a grammar's mask that has been applied
    step, sampling = (
        StepInputs(draft_logits=torch.randn(64, 4, 50), **case),
        {"adjustments": Adjustments(allowed_mask=mask)},
    )
    call = rejection_sampler("block", sampling_states(64, 50), 4).as_call(step, sampling)
    assert call["draft_token_ids"].tolist() == [int(fed[i + 1]) if i in (0, row) else -1 for i in range(len(fed) - 1)]


@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_steps_whose_drafts_a_grammar_masks_have_the_distribution_of_the_masked_target(method):
    requests, target, draft = 100_000, torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.4, 1e-30, 0.6])
    drafts = torch.multinomial(draft, requests, replacement=True, generator=torch.Generator().manual_seed(0)).int()
    rows = target.log().expand(requests, 2, 3)
    case = step(drafts[:, None].tolist(), rows, list(range(requests)), [9] * requests)
    is_masked = (case["draft_sampled"] == 2) & (case["expanded_local_pos"] == 1)
    case["verify_draft_sampled"] = case["draft_sampled"].masked_fill(is_masked, -1)
    result = rejection_sampler(method, sampling_states(requests, 3), 1)
    _, token_ids, _ = result._verify(draft_logits=draft.log().expand(requests, 1, 3), **case)
    counts = np.bincount(token_ids[:, 0], minlength=3)
    distributions.assert_distribution(counts, target.double().numpy())


def test_truncation_is_passed_if_a_request_of_the_step_that_is_not_greedy_truncates():
    case, _, _ = ragged_case()
    states, slot = sampling_states(64, 50, temperature=0.7), int(case["idx_mapping_np"][3])
    draft_logits = torch.randn(64, 4, 50)
    others = np.setdiff1d(np.arange(64), case["idx_mapping_np"])
    states.top_p.np[others] = 0.5
    names = {"top_k", "top_p", "min_p"}
    for name, value in {"top_k": 5, "top_p": 0.9, "min_p": 0.1}.items():
        values = getattr(states, name)
        neutral, values.np[slot] = values.np[slot], value
        got = packed_arguments("probabilistic", states, case, draft_logits)
        assert all(got[each] is getattr(states, each).gpu for each in names)
        assert got["draft_sampling"] == Sampling(temperature=states.temperature.gpu)
        assert "draft_sampling" not in packed_arguments("probabilistic", states, case)  # no draft was drawn
        assert packed_arguments("strict", states, case, draft_logits)["draft_logits"] is None
        states.temperature.np[slot] = 0
        assert not (names | {"draft_sampling"}) & set(packed_arguments("probabilistic", states, case, draft_logits))
        states.temperature.np[slot], values.np[slot] = 0.7, neutral


def test_kernels_are_compiled_truncated_and_not_at_the_first_call_of_a_kind():
    case, _, _ = ragged_case()
    states, draft_logits = sampling_states(64, 50), torch.randn(64, 4, 50)
    result = rejection_sampler("probabilistic", states, 4)
    real = result.verifier
    result.verifier = Mock(wraps=real, method="probabilistic", backend="auto")
    for logits in (None, draft_logits, None, draft_logits):
        result._verify(draft_logits=logits, **case)
    calls = [call.kwargs for call in result.verifier.warmup.call_args_list]
    assert ["top_p" in call for call in calls] == [False, True] * 2
    assert [call["draft_logits"] is None for call in calls] == [True, True, False, False]
    assert ["draft_sampling" in call for call in calls] == [False, False, False, True]
    for call in calls:
        assert len(call["slots"]) == len(call["row_starts"]) - 1 == 1
        real.packed(**call)
    case["logits"] = case["logits"].float()
    result._verify(draft_logits=None, **case)
    assert result.verifier.warmup.call_count == 6


@pytest.mark.parametrize("truncation", [{}, {"top_k": 5, "top_p": 0.9}], ids=["plain", "truncated"])
@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_tokens_that_the_draft_model_lacks_are_emitted_as_often_as_the_target_says(method, truncation):
    requests, vocab, draft_vocab = 40_000, 6, 4
    generator = torch.Generator().manual_seed(11)
    target, draft = torch.tensor([0.7, -2.0, 1.2, 0.0, -0.5, 1.5]), torch.randn(draft_vocab, generator=generator)
    drafts = torch.multinomial(draft.softmax(dim=0), requests, replacement=True, generator=generator)
    temperature = torch.ones(requests)
    temperature[0] = 0
    case = step(drafts[:, None].tolist(), target.expand(requests, 2, vocab), list(range(requests)), [8] * requests)
    result = rejection_sampler(method, sampling_states(requests, vocab, temperature, **truncation), 1)
    _, token_ids, _ = result._verify(draft_logits=draft.expand(requests, 1, draft_vocab), **case)
    assert token_ids[0, 0] == target.argmax() == 5
    weights, order = target.double().softmax(dim=0).sort(descending=True)
    weights[5 if truncation else vocab :] = 0
    weights /= weights.sum()
    weights[weights.cumsum(dim=0) - weights >= (0.9 if truncation else 1)] = 0
    expected = torch.zeros_like(weights).scatter(0, order, weights / weights.sum())
    distributions.assert_distribution(token_ids[1:, 0].bincount(minlength=vocab).numpy(), expected.numpy())


@pytest.mark.parametrize(("target", "draft"), [(50, 47), (47, 50)])
def test_logits_of_other_widths_are_not_copied_and_the_targets_are_whole(target, draft):
    case, _, _ = ragged_case(vocab=target)
    draft_logits = torch.randn(64, 4, draft)
    got = packed_arguments("probabilistic", sampling_states(64, target), case, draft_logits)
    assert got["target_logits"] is case["logits"]
    assert got["draft_logits"].shape == (64, 4, 47)
    assert got["draft_logits"].data_ptr() == draft_logits.data_ptr()
    assert got.get("draft_vocab_ids", torch.empty(0)).tolist() == (list(range(47)) if draft < target else [])


@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_drafts_from_the_targets_own_rows_are_all_accepted_beside_requests_that_truncate(method):
    requests, vocab, generator = 4_000, 50, torch.Generator().manual_seed(12)
    rows = torch.randn(3, vocab, generator=generator).bfloat16()
    temperature = torch.tensor([0.3, 1.0, 2.0, 1.0]).repeat(1_000)
    top_k, top_p = torch.full((requests,), vocab), torch.ones(requests)
    top_k[3::4], top_p[0] = 1, 0.5
    weights = (rows[None, :2].float() / temperature[:, None, None]).softmax(dim=-1)
    drafts = torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view(requests, 2)
    case = step(drafts.tolist(), rows.expand(requests, 3, vocab), list(range(requests)), [8] * requests)
    result = rejection_sampler(method, sampling_states(requests, vocab, temperature, top_k, top_p), 2)
    _, token_ids, num_tokens = result._verify(draft_logits=rows[:2].expand(requests, 2, vocab), **case)
    keeps_one = top_k == 1
    whole = ~keeps_one & (top_p == 1)
    assert (num_tokens[whole] == 3).all()
    assert torch.equal(token_ids[whole, :2], drafts[whole])
    best = rows.float().argmax(dim=1).expand(requests, 3)
    assert torch.equal(token_ids[keeps_one], torch.where(token_ids == -1, -1, best)[keeps_one])


@pytest.mark.parametrize("widths", [None, 50, 47], ids=["no draft logits", "equal", "narrower"])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}], ids=["plain", "truncated"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_checked_again_is_what_a_checked_call_would_verify(method, truncation, widths, monkeypatch):
    case, _, _ = ragged_case()
    draft_logits = None if widths is None else torch.randn(64, 4, widths)
    result = rejection_sampler(method, sampling_states(64, 50, **truncation), 4)
    batches, choose = [], backends.verifier_of

    def noted(backend, name, batch):
        batches.append(batch)
        return choose(backend, name, batch)

    monkeypatch.setattr(backends, "verifier_of", noted)
    with mock.patch.object(RejectionSampler, "packed", autospec=True, side_effect=RejectionSampler.packed) as packed:
        first, second = (result._verify(draft_logits=draft_logits, **case) for _ in range(2))
        assert packed.call_count == 1
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    for name, checked, unchecked in zip(VerificationBatch._fields, *batches[-2:]):
        if name in ("truncation", "packing"):
            assert type(checked) is type(unchecked)
            assert all(one is other or one == other for one, other in zip(checked or (), unchecked or ()))
        elif name == "draft_token_ids" or (name == "draft_logits" and widths is not None):
            assert (checked is None) == (unchecked is None)
            assert checked is None or layout(checked) == layout(unchecked)
        else:
            assert checked is unchecked, name


def layout(tensor):
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


MIXED = {  # of each slot; 5 decodes and a request whose prompt has just been processed
    "temperature": [0.0, 0.7, 1.3, 0.7, 1.0, 0.5],
    "top_k": [50, 50, 50, 5, 50, 50],
    "top_p": [1.0, 1.0, 0.9, 1.0, 1.0, 0.8],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.2, 0.0],
}


@pytest.mark.parametrize("num_drafts", [7, 15])
@pytest.mark.parametrize("with_draft_logits", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_request_emits_in_a_mixed_step_what_it_emits_alone_in_another_slot(method, with_draft_logits, num_drafts):
    generator = torch.Generator().manual_seed(num_drafts)
    # Rows as on a rank that receives its requests' logits: the first columns of wider rows.
    logits = 3 * torch.randn(6, num_drafts + 1, 64, generator=generator)[..., :50]
    draft_logits = logits[:, :-1] + 0.3 * torch.randn(6, num_drafts, 50, generator=generator)
    drafts = [row[: num_drafts - i].tolist() for i, row in enumerate(draft_logits.argmax(dim=-1))]
    drafts[5] = []
    drafts[4] = [-1] * num_drafts  # resumed: its scheduled tokens are not in its text
    positions = [100, 7, 31, 2, 64, 9]
    options = {name: torch.tensor(values) for name, values in MIXED.items()}

    def emit(requests, slots):
        order = torch.tensor([requests[slots.index(slot)] if slot in slots else 0 for slot in range(6)])
        states = sampling_states(6, 50, **{name: values[order] for name, values in options.items()})
        states.seeds = mirrored(order * 7919 + 11, torch.int64)
        case = step([drafts[i] for i in requests], logits[requests], slots, [positions[i] for i in requests])
        rows = draft_logits[order] if with_draft_logits else None
        return emitted(*rejection_sampler(method, states, num_drafts)._verify(draft_logits=rows, **case)[1:])

    together = emit([0, 1, 2, 3, 4, 5], [3, 0, 5, 1, 4, 2])
    assert together == [emit([request], [(request + 2) % 6])[0] for request in range(6)]
    assert max(map(len, together)) > 3
    assert [len(tokens) for tokens in together[4:]] == [1, 1]
