"""The adapter of vLLM, with vLLM's arguments: steps left to vLLM, and requests that need it.

Constructors are bypassed: the attributes of vLLM's classes are in plain namespaces, see `support/vllm.py`.
"""

from types import SimpleNamespace as Namespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from specdecode import backends
from specdecode.integrations.vllm import TokenSampling
from specdecode.integrations.vllm.sampling import LOGPROBS, PROCESSORS, TRUNCATES
from tests.support.vllm import (
    LEFT,
    METHODS,
    BareSampler,
    arguments,
    bare_sampler,
    emitted,
    processed,
    ragged_case,
    rejection_sampler,
    sampling_states,
)

PROCESSED = {
    "logits processors": lambda result, slot: result.sampler.noted.__setitem__(slot, PROCESSORS),
    "logprobs_mode 'processed_logprobs'": lambda result, slot: (
        setattr(result.sampler, "logprobs_mode", "processed_logprobs"),
        result.sampler.sampling_states.num_logprobs.__setitem__(slot, 0),
    ),
    "return_sampling_mask": lambda result, slot: setattr(result.sampler, "return_sampling_mask", True),
}
OTHER_RULES = {
    "watermarks": lambda result, slot: setattr(result, "watermark_key", 1),
    "rejection_sample_method 'synthetic'": lambda result, slot: setattr(
        result, "synthetic_conditional_rates", torch.ones(4)
    ),
    "rejection_sample_method 'fly'": lambda result, slot: setattr(result, "fly_window_size", 2),
    "what is not known": lambda result, slot: setattr(result, "unknown", "what is not known (typical_eps)"),
}


@pytest.mark.parametrize(
    ("method", "reason"),
    [(method, reason) for method in METHODS for reason in OTHER_RULES]
    + [(method, reason) for method in METHODS[:2] for reason in PROCESSED],
)
def test_steps_that_need_more_go_vllms_own_way_and_are_counted(method, reason, caplog):
    case, _, _ = ragged_case()
    result, draft_logits = rejection_sampler(method, sampling_states(64, 50), 4), torch.randn(64, 4, 50)
    (PROCESSED | OTHER_RULES)[reason](result, case["idx_mapping_np"][7])
    result.metrics = Mock()
    for _ in range(3):
        result.listed = "of the step before"
        assert result._verify(draft_logits=draft_logits, **case) is LEFT
        assert result.listed is None
    given = [case["logits"], draft_logits, *arguments(case)]
    assert len(result.left) == len(given)
    assert all(got is value for got, value in zip(result.left, given))
    ((counted, steps),) = result.fallbacks.items()
    assert counted.startswith(reason)
    assert steps == result.metrics.tick.call_count == 3
    assert len(caplog.records) == 1
    assert reason in caplog.text
    for _ in range(98):
        result.fallbacks.add(counted, "")
    assert [record.args[0] for record in caplog.records] == [1, 10, 100]


@pytest.mark.parametrize("reason", PROCESSED)
def test_requests_of_other_steps_do_not_matter(reason):
    case, _, _ = ragged_case()
    result = rejection_sampler("block", sampling_states(64, 50), 4)
    if reason != "return_sampling_mask":  # one switch for all requests
        PROCESSED[reason](result, np.setdiff1d(np.arange(64), case["idx_mapping_np"])[0])
    assert result._verify(draft_logits=None, **case) is not LEFT
    assert not result.fallbacks


@pytest.mark.parametrize("reason", PROCESSED)
def test_strict_draws_with_the_same_noise_from_logits_that_vllm_processed(reason):
    case, _, _ = ragged_case(seed=2)
    states = sampling_states(64, 50, temperature=torch.linspace(0, 1.5, 64))
    plain, result = (rejection_sampler("strict", states, 4) for _ in range(2))
    PROCESSED[reason](result, case["idx_mapping_np"][7])
    rows, *tokens = result._verify(draft_logits=torch.randn(64, 4, 50), **case)
    assert torch.equal(rows, processed(states)(case["logits"], case["expanded_idx_mapping"]))
    states.num_logprobs[:] = -1
    assert emitted(*tokens) == emitted(*plain._verify(draft_logits=None, **case)[1:])
    assert sum(result.fallbacks.values()) == 1


def test_processing_is_told_apart_from_temperature_and_truncation():
    class Sampler:
        def __init__(self):
            self.needs_logits_processing = np.zeros(8, dtype=bool)
            self.sampling_states = sampling_states(8, 50)
            self.sampling_states.add_request = Mock(side_effect=lambda slot, params: params.temperature != 1)

        def add_request(self, slot, params):
            needs = self.sampling_states.add_request(slot, params)
            if params.penalty is None:
                raise ValueError("penalty")
            self.needs_logits_processing[slot] = needs | params.penalty

    sampler = type("Ours", (TokenSampling, Sampler), {})()
    for slot, (temperature, penalty) in enumerate([(1, False), (0.7, False), (1, True), (0.7, True)]):
        sampler.add_request(slot, Namespace(temperature=temperature, penalty=penalty))
    assert sampler.needs_logits_processing.tolist() == [False, True, True, True] + [False] * 4
    assert sampler.needs.tolist() == [0, 0, PROCESSORS, PROCESSORS] + [0] * 4
    assert sampler.sampling_states.add_request.call_count == 4
    sampler.add_request(3, Namespace(temperature=1, penalty=False))  # another request in the slot
    assert not sampler.needs_logits_processing[3]
    assert not sampler.needs[3]
    states = sampler.sampling_states
    with pytest.raises(ValueError, match="penalty"):
        sampler.add_request(3, Namespace(temperature=1, penalty=None))
    assert sampler.sampling_states is states


@pytest.mark.parametrize(
    ("asked", "needs"),
    [
        ({}, 0),
        ({"top_p": 0.9}, TRUNCATES),
        ({"top_k": 5}, TRUNCATES),
        ({"min_p": 0.1}, TRUNCATES),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, 0),
        ({"num_logprobs": 0}, LOGPROBS),
        ({"num_logprobs": 5, "min_p": 0.1}, LOGPROBS | TRUNCATES),
    ],
)
def test_what_a_request_needs_is_noted_when_it_comes_and_a_step_needs_what_any_of_its_requests_does(asked, needs):
    class Sampler:
        def __init__(self):
            self.needs_logits_processing = np.zeros(8, dtype=bool)
            self.sampling_states = sampling_states(8, 50)
            self.sampling_states.add_request = self.write

        def write(self, slot, params):
            for name, value in vars(params).items():
                values = getattr(self.sampling_states, name)
                getattr(values, "np", values)[slot] = value
            return True

        def add_request(self, slot, params):
            self.needs_logits_processing[slot] = self.sampling_states.add_request(slot, params)

    sampler = type("Ours", (TokenSampling, Sampler), {})()
    before = sampler.slot_values()
    sampler.add_request(5, Namespace(**asked))
    assert sampler.needs.tolist() == [0] * 5 + [needs, 0, 0]
    assert sampler.needs_in(np.array([1, 5, 7])) == needs
    assert sampler.needs_in(np.array([1, 7])) == 0
    assert sampler.slot_values() is not before  # copies, made again when a request has come, and then kept
    assert sampler.slot_values() is sampler.slot_values()
    for name, copy in sampler.slot_values()._asdict().items():
        view = getattr(sampler.sampling_states, name).gpu
        assert copy.equal(view)
        assert copy.data_ptr() != view.data_ptr()


@pytest.mark.parametrize("method", METHODS)
def test_truncated_steps_that_the_kernels_do_not_take_are_left_by_name_and_never_eager(method, monkeypatch):
    case, _, _ = ragged_case()
    states, reason = sampling_states(64, 50, top_p=0.9), "backend: 'triton' truncates rows of at most 3 drafts, got 4"
    why = lambda name, batch: reason if batch.is_truncated else None  # noqa: E731
    module = Namespace(why_not_verified=why)
    monkeypatch.setattr(backends, "choose", lambda backend, logits: module)
    result = rejection_sampler(method, states, 4)
    result.verifier = Mock(method=method, backend="auto")
    left = result._verify(draft_logits=None, **case)
    assert dict(result.fallbacks) == {f"rows that the kernels do not take ({reason})": 1}
    assert ["top_p" in call.kwargs for call in result.verifier.warmup.call_args_list] == [False] * (
        1 + (method == "strict")
    )
    if method == "strict":  # from the copy that vLLM has truncated
        assert set(result.verifier.packed.call_args.kwargs) & {"top_p", "top_k", "min_p"} == set()
        assert result.verifier.packed.call_args.kwargs["target_logits"].dtype == torch.float32
    else:
        assert left is LEFT
    states.top_p.np[:] = 1
    assert result._verify(draft_logits=None, **case) is not LEFT
    assert result.fallbacks.total() == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", [None, "penalty", "logprobs"])
def test_a_batch_is_divided_only_for_the_copy_that_vllm_makes(method, change):
    case, _, _ = ragged_case()
    result = rejection_sampler(method, sampling_states(64, 50), 4)
    if change == "penalty":
        result.sampler.noted[case["idx_mapping_np"][7]] = PROCESSORS
    batch = Namespace(idx_mapping_np=case["idx_mapping_np"], cu_num_logits_np=case["cu_num_logits"].numpy())
    where = None, case["draft_sampled"], case["pos"]
    for most in (7, 1000):
        expected = len(case["logits"]) if change is None and most == 7 else most
        max_num_logprobs = 0 if change == "logprobs" else -1
        got = result._verify_in_chunks(case["logits"], batch, *where, most, max_num_logprobs, case["draft_sampled"])
        assert got == (case["logits"], batch, *where, expected, max_num_logprobs, case["draft_sampled"])


@pytest.mark.parametrize("unknown", [None, "what is not known (typical_eps)"])
def test_steps_without_drafts_are_vllms_too_if_it_has_what_is_not_known(unknown):
    class Sampler:
        def sample(self, *arguments):
            return LEFT

    case, _, _ = ragged_case()
    sampler = bare_sampler(sampling_states(64, 50), kind=type("Ours", (BareSampler, Sampler), {}))
    sampler.unknown = unknown
    first = case["cu_num_logits"][:-1].long()
    mappings = case["idx_mapping"], case["idx_mapping"], case["idx_mapping_np"]
    tokens = case["pos"][first], case["draft_sampled"][first], case["expanded_local_pos"][first]
    sampled = sampler.sample(case["logits"][first], *mappings, *tokens, case["seq_lens_upper_bound_np"])
    assert (sampled is LEFT) == (unknown is not None)
