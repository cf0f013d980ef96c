"""The adapter of vLLM: penalties and biases are applied here, from vLLM's own state; other changes of logits are not.

Stand-ins have the names, shapes and dtypes of vLLM 0.33.
"""

from types import SimpleNamespace as Namespace
from unittest import mock

import numpy as np
import pytest
import torch

from reference.adjustments import Adjustments as OfRequest
from reference.adjustments import adjust
from specdecode import Adjustments
from specdecode.integrations.vllm.adjusting import known_processors
from specdecode.integrations.vllm.sampling import ADJUSTS, MASKS, PROCESSORS, few_with_processors
from specdecode.integrations.vllm.steps import StepInputs
from tests.support.differential import like_a_device
from tests.support.vllm import (
    LEFT,
    METHODS,
    NEUTRAL,
    Custom,
    PlainRejectionSampler,
    emitted,
    ragged_case,
    rejection_sampler,
)
from tests.support.vllm import LimitedSampler as Sampler

SLOTS, VOCAB = 64, 50

ASKED = [
    ({}, 0),
    ({"repetition_penalty": 1.3}, ADJUSTS),
    ({"frequency_penalty": 0.5, "presence_penalty": -0.5}, ADJUSTS),
    ({"logit_bias": {3: 2.5, 7: -100.0}}, ADJUSTS),
    ({"logit_bias": {1: 1.0}, "repetition_penalty": 0.8}, ADJUSTS),
    ({"allowed_token_ids": [4, 5]}, MASKS),
    ({"stop_token_ids": [4], "least_length": 2}, MASKS),
    ({"bad_words": [[4, 5]]}, MASKS),
    ({"thinking_token_budget": 0}, MASKS),
    ({"bad_words": [[4]], "presence_penalty": 1.0}, MASKS | ADJUSTS),
    ({"stop_token_ids": [4], "structured_outputs": None}, MASKS | PROCESSORS),
    ({"custom": True, "logit_bias": {3: 2.5}}, PROCESSORS | ADJUSTS),
]


@pytest.mark.parametrize(("asked", "needs"), ASKED)
def test_what_is_applied_here_is_told_apart_from_what_needs_vllms_copy(asked, needs):
    sampler = Sampler(thinking=([1], [2], [2]))
    before = {"repetition_penalty": 2.0, "bad_words": [[9]], "thinking_token_budget": 3, "custom": True}
    sampler.add_request(5, Namespace(**before))  # who was in the slot before
    sampler.add_request(5, Namespace(**asked))
    assert sampler.needs[5] == needs
    assert sampler.needs_logits_processing[5] == (needs > 0)  # for steps that are left to vLLM
    assert [type(each).__name__ for each in sampler.logits_processors] == [
        "LogitBiasState",
        "PenaltiesState",
        "BadWordsState",
        "Custom",
    ]
    assert type(sampler.thinking_budget_state).__name__ == "ThinkingBudgetState"


@pytest.mark.parametrize("method", METHODS)
def test_a_step_with_penalties_and_biases_emits_what_adjusted_rows_say(method):
    """Greedy: every request takes the argmax of its adjusted rows, where the drafts before a row count as emitted."""
    torch.manual_seed(3)
    case, drafts, logits = ragged_case(seed=4)
    sampler = Sampler()
    slots = case["idx_mapping_np"].tolist()
    for slot in range(SLOTS):  # all slots had another request before
        sampler.add_request(slot, Namespace(logit_bias={0: 50.0, 1: 50.0, 2: 50.0}, repetition_penalty=3.0))
    for place, slot in enumerate(slots):
        sampler.add_request(slot, Namespace(**ASKED[place % 5][0]))
    result = rejection_sampler(method, sampler.sampling_states, 4, sampler=sampler)
    _, *tokens = result._verify(draft_logits=torch.randn(SLOTS, 4, VOCAB), **case)
    assert not result.fallbacks
    for place, (got, slot) in enumerate(zip(emitted(*tokens), slots)):
        asked = ASKED[place % 5][0]
        words = sampler.penalties_state.prompt_bin_mask[slot].tolist()
        given = OfRequest(
            **{name: value for name, value in asked.items() if name in NEUTRAL},
            in_prompt=np.array([words[token // 32] >> token % 32 & 1 for token in range(VOCAB)], dtype=bool),
            output_counts=sampler.penalties_state.output_bin_counts[slot].numpy(),
            bias=asked.get("logit_bias", {}),
        )
        expected = []
        for row, draft in enumerate([*drafts[place], None]):
            best = int(np.argmax(adjust(logits[place, row].float().numpy(), drafts[place][:row], given)))
            expected.append(best)
            if best != draft:
                break
        assert got == expected


def test_what_requests_ask_for_is_copied_again_when_one_has_come():
    sampler = Sampler()
    before, mask = sampler.known.adjustments(None), torch.zeros(3, 2, dtype=torch.int32)
    beside = sampler.known.adjustments(mask)
    assert beside.repetition_penalty is before.repetition_penalty
    assert (beside.allowed_mask, before.allowed_mask) == (mask, None)
    sampler.add_request(5, Namespace(repetition_penalty=1.3, logit_bias={3: 2.0}))
    after = sampler.known.adjustments(None)
    assert after.repetition_penalty[5] == torch.tensor(1.3) != before.repetition_penalty[5]
    assert (after.bias_ids[5, 0], after.bias[5, 0]) == (3, 2)


@pytest.mark.parametrize("change", ["attribute", "width", "name"])
def test_states_that_are_not_as_known_are_left_to_vllm(change):
    sampler = Sampler()
    if change == "attribute":
        sampler.penalties_state.decay = 0.5
    elif change == "width":
        sampler.penalties_state.output_bin_counts = torch.zeros(SLOTS, VOCAB + 1, dtype=torch.int32)
    else:
        sampler.logits_processors[0] = Custom()
    assert known_processors(sampler) is None
    sampler.add_request(5, Namespace(repetition_penalty=2.0))
    assert sampler.needs[5] == PROCESSORS


@pytest.mark.parametrize("kept_sets", [False, True])
def test_kernels_are_compiled_with_penalties_with_masks_and_with_both_too(kept_sets):
    case, _, _ = ragged_case()
    sampler = Sampler()
    sampler.return_sampling_mask = kept_sets
    result = rejection_sampler("probabilistic", sampler.sampling_states, 4, sampler=sampler)
    calls = []
    real = result.verifier
    result.verifier = Namespace(
        method="probabilistic", backend="auto", warmup=lambda **call: calls.append(call), packed=real.packed
    )
    result._verify(draft_logits=None, **case)
    kinds = [
        ("top_p" in call, "kept_sets" in call, each.penalizes, each.allowed_mask is not None)
        for call in calls
        for each in [call.get("adjustments", Adjustments())]
    ]
    assert kinds == [
        (truncates, *kind)
        for truncates in (False, True)
        for kind in (
            (False, False, False),
            *([(True, False, False)] if kept_sets else []),
            *[(kept_sets, *each) for each in ((True, False), (True, True), (False, True))],
        )
    ]
    for call in calls:
        real.packed(**call)


def forbids_five(sampler, applied):
    """Replace vLLM's processing of a copy: token 5 is a bad word; rows are divided by the temperature."""

    def apply_sampling_params(logits, row_slots, slots, slots_np, pos, fed, local_pos, lengths):
        applied.append((len(logits), slots_np.tolist()))
        assert row_slots.tolist() == np.repeat(slots_np, np.bincount(np.cumsum(local_pos.numpy() == 0) - 1)).tolist()
        assert len(pos) == len(fed) == len(logits)
        assert len(lengths) == len(slots_np)
        rows = logits.float()
        rows[:, 5] = -torch.inf
        temperature = sampler.sampling_states.temperature.gpu[row_slots.long(), None]
        return rows / torch.where(temperature == 0, 1, temperature)

    return apply_sampling_params


@pytest.mark.parametrize("with_draft_logits", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_of_a_step_vllm_prepares_the_rows_of_those_requests_alone_that_need_it(method, with_draft_logits):
    """All requests emit the same tokens as in one call with these requests' rows changed before; some are greedy."""
    case, _, _ = ragged_case(seed=6)
    sampler, applied = Sampler(), []
    slots = case["idx_mapping_np"]
    sampler.sampling_states.temperature.np[::2] = 0.8
    bad = np.zeros(SLOTS, dtype=bool)
    bad[slots[[1, 2, 7, 30]]] = True
    for slot in slots:
        sampler.add_request(slot, Namespace(**({"custom": True} if bad[slot] else {})))
    sampler.apply_sampling_params = forbids_five(sampler, applied)
    draft_logits = torch.randn(SLOTS, 4, VOCAB) if with_draft_logits else None
    result = rejection_sampler(method, sampler.sampling_states, 4, sampler=sampler)
    starts = case["cu_num_logits"].numpy()
    result.host_starts = starts
    with like_a_device():  # a request may have no slot; then nothing is read for it
        _, *tokens = result._verify(draft_logits=draft_logits, **case)
    assert not result.fallbacks
    assert applied == [(int(np.diff(starts)[[1, 2, 7, 30]].sum()), slots[[1, 2, 7, 30]].tolist())]
    changed = case["logits"].float()
    changed[torch.from_numpy(bad)[case["expanded_idx_mapping"].long()], 5] = -torch.inf
    expected = result.verifier.packed(
        changed,
        case["verify_draft_sampled"][1:],
        case["cu_num_logits"],
        None if method == "strict" else draft_logits,
        num_draft_tokens=4,
        slots=case["idx_mapping"],
        temperature=sampler.sampling_states.temperature.gpu,
        seeds=sampler.sampling_states.seeds.gpu,
        row_positions=case["pos"],
    )
    assert emitted(*tokens) == emitted(expected.token_ids, expected.num_tokens)
    assert 5 not in np.concatenate([row for row, slot in zip(emitted(*tokens), slots) if bad[slot]])


def test_processed_log_probabilities_of_such_a_request_need_the_whole_copy():
    case, _, _ = ragged_case(seed=6)
    sampler, slot = Sampler(), case["idx_mapping_np"][3]
    sampler.logprobs_mode = "processed_logprobs"
    sampler.sampling_states.num_logprobs[slot] = 0
    sampler.add_request(slot, Namespace(custom=True))
    result = rejection_sampler("block", sampler.sampling_states, 4, sampler=sampler)
    result.host_starts = case["cu_num_logits"].numpy()
    assert result._verify(draft_logits=None, **case) is LEFT


def test_a_step_is_not_split_where_the_host_does_not_know_its_rows():
    case, _, _ = ragged_case(seed=6)
    sampler = Sampler()
    sampler.add_request(case["idx_mapping_np"][3], Namespace(custom=True))
    result = rejection_sampler("block", sampler.sampling_states, 4, sampler=sampler)
    for starts in (None, case["cu_num_logits"].numpy()[:-1], case["cu_num_logits"].numpy() + 1):
        result.host_starts = starts
        assert result._verify(draft_logits=None, **case) is LEFT


def test_a_step_is_not_split_if_more_than_a_quarter_of_its_requests_need_a_copy():
    case, _, _ = ragged_case(seed=6)
    sampler = Sampler()
    step, starts = StepInputs(draft_logits=None, **case), case["cu_num_logits"].numpy()
    for count, slot in enumerate(case["idx_mapping_np"][:12], start=1):
        sampler.add_request(slot, Namespace(custom=True))
        few = few_with_processors(step, sampler.needs[case["idx_mapping_np"]], starts)
        assert (few is not None) == (count <= 10)  # of 40


@pytest.mark.parametrize(("most", "adaptive", "known"), [(1000, False, True), (1000, True, False), (7, False, False)])
def test_the_host_knows_the_rows_of_a_step_that_is_not_divided(most, adaptive, known):
    case, _, _ = ragged_case(seed=6)
    sampler, seen = Sampler(), []
    sampler.add_request(case["idx_mapping_np"][3], Namespace(custom=True))
    result = rejection_sampler("block", sampler.sampling_states, 4, sampler=sampler)
    result.enable_adaptive_verification = adaptive
    batch = Namespace(idx_mapping_np=case["idx_mapping_np"], cu_num_logits_np=case["cu_num_logits"].numpy())
    with mock.patch.object(PlainRejectionSampler, "_verify_in_chunks", lambda self, *_: seen.append(self.host_starts)):
        result._verify_in_chunks(case["logits"], batch, None, case["draft_sampled"], case["pos"], most, -1)
    assert [starts is batch.cu_num_logits_np for starts in seen] == [known]
    assert result.host_starts is None
