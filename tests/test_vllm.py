"""The adapter of vLLM, on vLLM's calling contract; where vLLM is installed, against its own function too.

Constructors are bypassed: what vLLM's classes hold is in plain namespaces, with the names, shapes and dtypes of vLLM 0.33.
"""

import logging
from types import SimpleNamespace as Namespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from specdecode import RejectionSampler, SamplerOutput, Sampling, backends, sample
from specdecode.integrations.adapters import Fallbacks
from specdecode.integrations.vllm import DraftVerification, TokenSampling
from specdecode.integrations.vllm.sampling import LOGPROBS, PROCESSORS, TRUNCATES, needs_in, needs_of
from tests.support import distributions

METHODS = ["probabilistic", "block", "strict"]
LEFT = object()
"""What the stand-in for vLLM's own verification returns."""


class PlainRejectionSampler:
    """What the adapter's class is mixed into: it notes the calls that are left to it."""

    def _verify(self, *arguments):
        self.left = arguments
        return LEFT

    def _verify_in_chunks(self, *arguments):
        return arguments


class Verifying(DraftVerification, PlainRejectionSampler):
    pass


def mirrored(values, dtype):
    """Values by slot, as vLLM keeps them: for the host and for the device."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return Namespace(gpu=tensor, np=tensor.numpy())


def sampling_states(slots, vocab, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    def each(value, dtype=torch.float32):
        return mirrored(torch.as_tensor(value, dtype=dtype).expand(slots).clone(), dtype)

    return Namespace(
        vocab_size=vocab,
        temperature=each(temperature),
        top_k=each(vocab if top_k is None else top_k, torch.int32),
        top_p=each(top_p),
        min_p=each(min_p),
        seeds=mirrored(torch.arange(slots) * 7919 + 11, torch.int64),
        num_logprobs=np.full(slots, -1),
    )


def processed(states):
    """VLLM's processing: the rows as float32, divided by the temperature; what truncates is not in these tests."""

    def apply_sampling_params(logits, expanded_idx_mapping, *_):
        temperature = states.temperature.gpu[expanded_idx_mapping.long(), None]
        return logits.float() / torch.where(temperature == 0, 1, temperature)

    return apply_sampling_params


def rejection_sampler(method, states, num_draft_tokens, **members):
    sampler = Namespace(
        sampling_states=states,
        other_processing=np.zeros(len(states.seeds.np), dtype=bool),
        needs_logits_processing=np.ones(len(states.seeds.np), dtype=bool),  # of temperature, too: not looked at
        logprobs_mode="raw_logprobs",
        return_sampling_mask=False,
        apply_sampling_params=processed(states),
    )
    result = Verifying.__new__(Verifying)
    result.__dict__ |= {
        "sampler": sampler,
        "fallbacks": Fallbacks(logging.getLogger("vllm.specdecode")),
        "verifier": RejectionSampler(method),
        "num_speculative_steps": num_draft_tokens,
        "watermark_key": None,
        "synthetic_conditional_rates": None,
        "fly_window_size": 0,
    }
    result.__dict__ |= members
    return result


def step(drafts, logits, slots, positions):
    """The arguments of vLLM's `_verify`, but draft_logits: ragged drafts, and rows [batch, num_draft_tokens + 1, vocab]."""
    lengths = [len(each) + 1 for each in drafts]
    fed = [token for each in drafts for token in (3, *each)]  # 3: each request's last token
    offsets = [i for length in lengths for i in range(length)]
    requests = np.repeat(np.arange(len(drafts)), lengths)
    fed = torch.tensor(fed, dtype=torch.int32)
    return {
        "logits": logits[requests, offsets],
        "draft_sampled": fed,
        "pos": torch.tensor(positions)[requests] - 1 + torch.tensor(offsets),
        "cu_num_logits": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "idx_mapping": torch.tensor(slots, dtype=torch.int32),
        "idx_mapping_np": np.array(slots),
        "expanded_idx_mapping": torch.tensor(slots, dtype=torch.int32)[requests],
        "expanded_local_pos": torch.tensor(offsets, dtype=torch.int32),
        "seq_lens_upper_bound_np": np.array(positions) + 9,
        "verify_draft_sampled": fed,
    }


def emitted(token_ids, num_tokens):
    return [row[:count] for row, count in zip(token_ids.tolist(), num_tokens.tolist())]


def ragged_case(seed=0, batch=40, slots=64, vocab=50, num_draft_tokens=4, scale=1.0):
    """Drafts of 0 to K tokens, most of them the argmax, some of them -1; requests in any slots."""
    random = np.random.default_rng(seed)
    logits = torch.tensor(scale * random.normal(size=(batch, num_draft_tokens + 1, vocab)), dtype=torch.bfloat16)
    drafts = []
    for row in logits[:, :-1].argmax(dim=-1).tolist():
        ids = [token if random.random() < 0.7 else int(random.integers(-1, vocab)) for token in row]
        drafts.append(ids[: random.integers(0, num_draft_tokens + 1)])
    places = random.permutation(slots)[:batch].tolist()
    return step(drafts, logits, places, random.integers(1, 500, size=batch).tolist()), drafts, logits


def arguments(case):
    """The order of vLLM's method, draft_logits aside."""
    return [value for name, value in case.items() if name != "logits"]


# ---- What is verified here -------------------------------------------------------------------------------------------


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
    plain = TokenSampling.__new__(TokenSampling)
    plain.__dict__ |= vars(rejection_sampler("strict", states, 4).sampler)
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


def packed_arguments(method, states, case, draft_logits=None, num_draft_tokens=4):
    """Return what the sampler's `packed` is called with."""
    verifier = Mock(method=method, backend="auto")
    verifier.packed.return_value = SamplerOutput(*[torch.zeros(1)] * len(SamplerOutput._fields))
    rejection_sampler(method, states, num_draft_tokens, verifier=verifier)._verify(draft_logits=draft_logits, **case)
    return verifier.packed.call_args.kwargs


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
    real, result.verifier = result.verifier, Mock(wraps=result.verifier, method="probabilistic", backend="auto")
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


# ---- What is left to vLLM --------------------------------------------------------------------------------------------

PROCESSED = {
    "logits processors": lambda result, slot: result.sampler.other_processing.__setitem__(slot, True),
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
    for _ in range(3):
        assert result._verify(draft_logits=draft_logits, **case) is LEFT
    given = [case["logits"], draft_logits, *arguments(case)]
    assert len(result.left) == len(given)
    assert all(got is value for got, value in zip(result.left, given))
    ((counted, steps),) = result.fallbacks.items()
    assert counted.startswith(reason)
    assert steps == 3
    assert len(caplog.records) == 1
    assert reason in caplog.text
    for _ in range(98):
        result.fallbacks.add(counted, "")
    assert [record.args[0] for record in caplog.records] == [1, 10, 100]


@pytest.mark.parametrize("reason", PROCESSED)
def test_requests_of_other_steps_do_not_matter(reason):
    case, _, _ = ragged_case()
    result = rejection_sampler("block", sampling_states(64, 50), 4)
    if reason != "return_sampling_mask":  # which is one switch for all requests
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


def test_a_sampler_that_is_not_ours_counts_temperature_as_processing():
    case, _, _ = ragged_case()
    result = rejection_sampler("probabilistic", sampling_states(64, 50), 4)
    del result.sampler.other_processing
    assert result._verify(draft_logits=None, **case) is LEFT


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
    assert sampler.other_processing.tolist() == [False, False, True, True] + [False] * 4
    assert sampler.needs_logits_processing.tolist() == [False, True, True, True] + [False] * 4
    assert sampler.needs.tolist() == [0, 0, PROCESSORS, PROCESSORS] + [0] * 4
    assert sampler.sampling_states.add_request.call_count == 4
    sampler.add_request(3, Namespace(temperature=1, penalty=False))  # another request in the slot
    assert not sampler.other_processing[3]
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
    sampler.add_request(5, Namespace(**asked))
    assert sampler.needs.tolist() == [0] * 5 + [needs, 0, 0]
    assert needs_in(sampler, np.array([1, 5, 7])) == needs
    assert needs_in(sampler, np.array([1, 7])) == 0
    assert needs_of(sampler, np.arange(8)).tolist() == sampler.needs.tolist()
    del sampler.needs
    assert needs_in(sampler, np.array([1, 5, 7])) == needs


@pytest.mark.parametrize("method", METHODS)
def test_what_vllm_has_and_is_not_known_leaves_every_step_to_vllm_by_name(method, caplog):
    case, _, _ = ragged_case()
    result = rejection_sampler(method, sampling_states(64, 50), 4, unknown="what is not known (typical_eps)")
    assert result._verify(draft_logits=None, **case) is LEFT
    assert dict(result.fallbacks) == {"what is not known (typical_eps)": 1}
    assert "typical_eps" in caplog.text


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
    if method == "strict":  # of the copy that vLLM has truncated
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
        result.sampler.other_processing[case["idx_mapping_np"][7]] = True
    batch = Namespace(idx_mapping_np=case["idx_mapping_np"])
    where = None, case["draft_sampled"], case["pos"]
    for most in (7, 1000):
        expected = len(case["logits"]) if change is None and most == 7 else most
        max_num_logprobs = 0 if change == "logprobs" else -1
        got = result._verify_in_chunks(case["logits"], batch, *where, most, max_num_logprobs, case["draft_sampled"])
        assert got == (case["logits"], batch, *where, expected, max_num_logprobs, case["draft_sampled"])


# ---- Against vLLM's own function -------------------------------------------------------------------------------------


@pytest.fixture
def real():
    """VLLM's own class with ours mixed in."""
    module = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
    return pytest.importorskip(module, reason="vLLM is not installed", exc_type=ImportError).RejectionSampler


def both(real, method, states, case, draft_logits, num_draft_tokens):
    """Return what both emit on a GPU (or, if vLLM's kernels are interpreted, on the CPU)."""
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
