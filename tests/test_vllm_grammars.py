"""The adapter of vLLM: grammar masks are kept for the step, and applied to logits only where masked logits are needed.

Stand-ins have the names, shapes and dtypes of vLLM 0.33.
"""

from types import SimpleNamespace as Namespace
from unittest import mock

import numpy as np
import pytest
import torch

from specdecode.integrations.vllm.grammars import GrammarSteps
from specdecode.integrations.vllm.sampling import MASKS, PROCESSORS
from tests.conftest import combine
from tests.support.differential import like_a_device
from tests.support.vllm import (
    LEFT,
    METHODS,
    LimitedSampler,
    PlainRejectionSampler,
    PlainWorker,
    Worker,
    emitted,
    grammar_of,
    group_of_ranks,
    ragged_case,
    rejection_sampler,
)

pytest.importorskip("triton")

VOCAB, DRAFTS = 50, 4
SEES = []
"""Copies of the logits passed to vLLM's own methods."""


class Sampler(LimitedSampler):
    keeps_grammars, compute_nans = True, False

    def apply_sampling_params(self, logits, row_slots, *_):
        SEES.append(logits.clone())
        temperature = self.sampling_states.temperature.gpu[row_slots.long(), None]
        return logits.float() / torch.where(temperature == 0, 1, temperature)


class PlainRunner:
    """A stand-in for vLLM's model runner; hidden states are the logits."""

    def sample(self, hidden_states, input_batch, grammar_output):
        case, verification = dict(input_batch.case), self.rejection_sampler
        if grammar_output is not None:
            given = grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
            self.structured_outputs_worker.apply_grammar_bitmask(hidden_states, input_batch, *given)
        verification.num_listed = self.num_logprobs
        result = verification._verify(logits=hidden_states, draft_logits=self.draft_logits, **case)
        if result is LEFT:
            SEES.append(verification.left[0].clone())
            return LEFT
        where = case["cu_num_logits"], case["cu_num_logits"].numpy(), self.num_logprobs
        verification._get_logprobs_tensors(*result[1:], hidden_states, *where)
        return emitted(*result[1:])


class Runner(GrammarSteps, PlainRunner):
    pass


def made(method, kinds=({},), with_draft_logits=False, **members):
    """Return a runner, its batch and logits; requests have the given kinds in turn."""
    case, _, _ = ragged_case(seed=11, batch=18, scale=2.0)
    case["pos"] = 1 + case["expanded_local_pos"].long()
    torch.manual_seed(5)
    runner, sampler = Runner(), Sampler()
    sampler.sampling_states.temperature.np[::2] = 0.8
    vars(sampler).update(members)
    sampler.verifier = rejection_sampler(method, sampler.sampling_states, DRAFTS).verifier
    for i, slot in enumerate(case["idx_mapping_np"]):
        sampler.add_request(slot, Namespace(**kinds[i % len(kinds)]))
    runner.sampler, runner.num_logprobs = sampler, -1
    runner.rejection_sampler = rejection_sampler(method, sampler.sampling_states, DRAFTS, sampler=sampler)
    runner.draft_logits = None
    if with_draft_logits:
        runner.draft_logits = torch.randn(64, DRAFTS, VOCAB, generator=torch.Generator().manual_seed(1))
        is_left_out = (case["expanded_local_pos"] > 0) & (case["idx_mapping"][0] != case["expanded_idx_mapping"])
        case["verify_draft_sampled"] = case["draft_sampled"].masked_fill(is_left_out, -1)
    runner.structured_outputs_worker = Worker(400, VOCAB, DRAFTS + 1)
    logits = case.pop("logits")
    names = [f"request {i}" for i in range(18)]
    batch = Namespace(case=case, req_ids=names, num_draft_tokens=1, idx_mapping_np=case["idx_mapping_np"])
    batch.cu_num_logits, batch.idx_mapping = case["cu_num_logits"], case["idx_mapping"]
    SEES.clear()
    return runner, batch, logits


GRAMMAR = grammar_of(range(0, 18, 3), DRAFTS + 1, VOCAB)
KINDS = [{}, {"bad_words": [[5], [3, 9]]}, {"allowed_token_ids": list(range(30))}]


def masked(logits, batch):
    """Return logits with the step's grammars."""
    worker, masked = Worker(400, VOCAB, DRAFTS + 1), logits.clone()
    worker.apply_grammar_bitmask(masked, batch, GRAMMAR.structured_output_request_ids, GRAMMAR.grammar_bitmask)
    return masked


ALL = {"alone": [{}], "masks": KINDS, "all": [*KINDS, {"presence_penalty": 1.5}]}


@pytest.mark.parametrize(("method", "with_draft_logits", "kinds"), combine(METHODS, [False, True], list(ALL)))
def test_a_step_emits_what_masked_logits_say_and_no_logit_is_changed(method, with_draft_logits, kinds):
    runner, batch, logits = made(method, ALL[kinds], with_draft_logits)
    before = logits.clone()
    got = runner.sample(logits, batch, GRAMMAR)
    assert logits.equal(before)
    assert runner.structured_outputs_worker.applied == [0]
    assert not runner.rejection_sampler.fallbacks
    assert runner.sample(before.clone(), batch, None) != got  # no mask is kept
    other, batch, _ = made(method, ALL[kinds], with_draft_logits)
    assert other.sample(masked(before, batch), batch, None) == got


@pytest.mark.parametrize("kinds", ["alone", "all"])
@pytest.mark.parametrize("method", METHODS)
def test_kept_sets_are_listed_of_what_masks_leave_and_no_logit_is_changed(method, kinds):
    runner, batch, logits = made(method, ALL[kinds])
    before, other = logits.clone(), made(method, ALL[kinds])[0]
    for each in (runner, other):
        each.rejection_sampler.mask_outputs = []
    assert runner.sample(logits, batch, GRAMMAR) == other.sample(masked(before, batch), batch, None)
    assert logits.equal(before)
    (got,), (want,) = (each.rejection_sampler.mask_outputs for each in (runner, other))
    assert got.kept_token_ids.equal(want.kept_token_ids)
    assert (want.num_kept[::3, 0] < want.num_kept[1::3, 0]).any()


def own_part(logits, batch, grammar, owned):
    """Return the step of some requests, as divided by vLLM's `BatchSharder`."""
    case, starts = dict(batch.case), batch.case["cu_num_logits"].numpy()
    rows, ids = np.concatenate([np.arange(*starts[i : i + 2]) for i in owned]), [batch.req_ids[i] for i in owned]
    case["cu_num_logits"] = torch.tensor([0, *np.cumsum(np.diff(starts)[owned])], dtype=torch.int32)
    for name in case.keys() - {"cu_num_logits"}:
        case[name] = case[name][owned if len(case[name]) == len(batch.req_ids) else rows]
    where = {name: case[name] for name in ("cu_num_logits", "idx_mapping", "idx_mapping_np")}
    part = Namespace(case=case, req_ids=ids, num_draft_tokens=1, **where)
    masked = grammar.structured_output_request_ids
    masks = grammar.grammar_bitmask[np.repeat([name in ids for name in masked], DRAFTS + 1)]
    own = Namespace(structured_output_request_ids=[name for name in masked if name in ids], grammar_bitmask=masks)
    wider = torch.nn.functional.pad(logits[rows], (0, 14), value=99.0)  # the exchange includes the vocabulary's padding
    return wider[:, :VOCAB], part, own


@pytest.mark.parametrize(("method", "with_draft_logits"), combine(METHODS, [False, True]))
def test_two_ranks_emit_what_one_does_whether_each_verifies_all_requests_or_its_own(
    method, with_draft_logits, monkeypatch
):
    runner, batch, logits = made(method, ALL["all"], with_draft_logits)
    want = runner.sample(logits.clone(), batch, GRAMMAR)
    got = [None] * len(want)
    for rank in range(2):
        group_of_ranks(monkeypatch, rank, 2)
        runner, batch, logits = made(method, ALL["all"], with_draft_logits)
        assert runner.sample(logits.clone(), batch, GRAMMAR) == want
        runner.sampler.shards_batches = True
        owned = np.flatnonzero(batch.idx_mapping_np % 2 == rank)
        assert 2 < len(owned) < 16
        for request, tokens in zip(owned, runner.sample(*own_part(logits, batch, GRAMMAR, owned))):
            got[request] = tokens
    assert got == want


NEED_LOGITS = {
    "raw log-probabilities": lambda runner: setattr(runner, "num_logprobs", 0),
    "processed log-probabilities": lambda runner: (
        setattr(runner, "num_logprobs", 0),
        setattr(runner.sampler, "logprobs_mode", "processed_logprobs"),
        runner.sampler.needs.__ior__(4),
    ),
    "a step that is left to vLLM": lambda runner: setattr(runner.rejection_sampler, "watermark_key", 1),
    "custom processors": lambda runner: runner.sampler.needs.__ior__(PROCESSORS),
    "few custom processors": lambda runner: (
        runner.sampler.needs.__setitem__(int(runner.slots[3]), PROCESSORS),
        setattr(runner.rejection_sampler, "host_starts", runner.starts),
    ),
}


@pytest.mark.parametrize("why", NEED_LOGITS)
@pytest.mark.parametrize("method", METHODS)
def test_masks_are_applied_before_anything_reads_logits_that_needs_them(method, why):
    runner, batch, logits = made(method)
    runner.slots, runner.starts = batch.idx_mapping_np, batch.cu_num_logits.numpy()
    NEED_LOGITS[why](runner)
    want, seen = masked(logits, batch), []
    read = PlainRejectionSampler._get_logprobs_tensors

    def noted(self, sampled, num_sampled, logits, *more):
        if more[-1] >= 0:
            seen.append(logits.clone())
        return read(self, sampled, num_sampled, logits, *more)

    listed = "specdecode.integrations.vllm.listing.with_listed"
    # Like a device: a request may have no slot, and then nothing is read for it.
    with mock.patch.object(PlainRejectionSampler, "_get_logprobs_tensors", noted), mock.patch(listed), like_a_device():
        got = runner.sample(logits, batch, GRAMMAR)
    assert logits.equal(want)
    seen += SEES
    assert seen
    rows = slice(runner.starts[3], runner.starts[4]) if why.startswith("few") else slice(None)
    assert all(each.equal(want[rows]) for each in seen)
    if got is not LEFT:
        other, batch, _ = made(method)
        assert other.sample(want, batch, None) == got
    assert runner.structured_outputs_worker.applied == [0, VOCAB]


@pytest.mark.parametrize("method", METHODS)
def test_what_limits_leave_depends_on_masks_that_have_been_applied(method):
    """For a batch in two parts: the log-probabilities of the first part apply masks to the logits of both."""
    runner, batch, logits = made(method, [{"stop_token_ids": [4], "least_length": 99, "structured_outputs": None}])
    grammar = grammar_of(range(18), DRAFTS + 1, VOCAB, share=0)
    grammar.grammar_bitmask[:, 0] = 1 << 4  # only a stop token

    def sample(self, logits, input_batch, grammar_output):
        given = grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
        self.structured_outputs_worker.apply_grammar_bitmask(logits, input_batch, *given)
        case, tokens, starts = input_batch.case, [], input_batch.cu_num_logits
        for first, last in ((0, 9), (9, 18)):
            rows, requests = slice(starts[first], starts[last]), slice(first, last)
            part = {name: each[requests if len(each) == 18 else rows] for name, each in case.items()}
            part["cu_num_logits"] = starts[first : last + 1] - starts[first]
            _, *result = self.rejection_sampler._verify(logits=logits[rows], draft_logits=None, **part)
            where = part["cu_num_logits"], part["cu_num_logits"].numpy(), 0
            self.rejection_sampler._get_logprobs_tensors(*result, logits[rows], *where)
            tokens += emitted(*result)
        return tokens

    with mock.patch.object(PlainRunner, "sample", sample):
        got = runner.sample(logits, batch, grammar)
    assert {token for tokens in got for token in tokens} == {4}
    assert runner.structured_outputs_worker.applied == [0, VOCAB]


@pytest.mark.parametrize("method", METHODS)
def test_vllm_prepares_rows_of_requests_beside_those_with_a_grammar_and_limits(method):
    runner, batch, logits = made(method, KINDS)
    want, other = masked(logits, batch), made(method, KINDS)[0]
    for each in (runner, other):
        each.sampler.needs[batch.idx_mapping_np[3]] = PROCESSORS
        each.rejection_sampler.host_starts = batch.cu_num_logits.numpy()
    with like_a_device():
        got = runner.sample(logits, batch, GRAMMAR)
        assert got == other.sample(want, batch, None) is not LEFT
    assert logits.equal(want)


@pytest.mark.parametrize(
    "change",
    [{"compute_nans": True}, {"keeps_grammars": False}, {"unknown": "what is not known"}, {"known": None}],
    ids=str,
)
def test_masks_are_applied_at_once_where_they_are_not_read(change):
    runner, batch, logits = made("probabilistic", **change)
    want = masked(logits, batch)
    runner.rejection_sampler.unknown = change.get("unknown")
    runner.sample(logits, batch, GRAMMAR)
    assert runner.structured_outputs_worker.applied == [VOCAB]
    assert logits.equal(want)


def test_masks_are_applied_at_once_if_a_sampler_is_vllms_own():
    runner, batch, logits = made("probabilistic")
    want, ours = masked(logits, batch), runner.rejection_sampler
    for other in ("sampler", "rejection_sampler", "structured_outputs_worker"):
        runner, batch, logits = made("probabilistic")
        runner.rejection_sampler = Namespace(_verify=ours._verify, _get_logprobs_tensors=ours._get_logprobs_tensors)
        if other != "rejection_sampler":
            runner.rejection_sampler.verifier = ours.verifier
        if other == "sampler":
            runner.sampler = Namespace()
        elif other == "structured_outputs_worker":
            runner.structured_outputs_worker = PlainWorker(400, VOCAB, DRAFTS + 1)
        runner.sample(logits, batch, GRAMMAR)
        assert logits.equal(want)
        assert runner.structured_outputs_worker.applied == [VOCAB]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_stop_token_that_a_grammar_may_need_is_vllms_where_masks_are_not_read(keeps):
    asked = Namespace(stop_token_ids=[4], least_length=9, structured_outputs=None)
    runner, *_ = made("probabilistic", keeps_grammars=keeps)
    runner.sampler.add_request(5, asked)
    assert runner.sampler.needs[5] == MASKS | PROCESSORS * (not keeps)


def test_masks_are_kept_for_their_step_alone():
    runner, batch, logits = made("block")
    with mock.patch.object(PlainRunner, "sample", side_effect=RuntimeError), pytest.raises(RuntimeError):
        runner.sample(logits, batch, GRAMMAR)
    worker = runner.structured_outputs_worker
    assert worker.sampler is runner.sampler.grammar is None
    other = Namespace(req_ids=batch.req_ids, cu_num_logits=batch.cu_num_logits, idx_mapping=batch.idx_mapping.flip(0))
    other.num_draft_tokens = 1  # of a rank that verifies other requests
    worker.sampler = runner.sampler
    worker.apply_grammar_bitmask(logits, other, GRAMMAR.structured_output_request_ids, GRAMMAR.grammar_bitmask)
    assert runner.sampler.grammar.requests is other.idx_mapping
    assert len(runner.sampler.grammar.masks) == len(runner.sampler.grammar.mapping) == len(GRAMMAR.grammar_bitmask)


@pytest.mark.parametrize("return_logprobs", [False, True])
@pytest.mark.parametrize("method", ["strict", "probabilistic"])
def test_a_step_without_drafts_reads_masks_if_it_is_drawn_here(method, return_logprobs):
    runner, batch, logits = made(method, KINDS)
    first, case, sampler = batch.cu_num_logits[:-1].long(), batch.case, runner.sampler
    batch.cu_num_logits, batch.num_draft_tokens = torch.arange(19), 0
    logits = logits[first]
    before, want = logits.clone(), masked(logits, batch)
    mappings = case["idx_mapping"], case["idx_mapping"], case["idx_mapping_np"]
    tokens = case["pos"][first], case["draft_sampled"][first], case["expanded_local_pos"][first]

    def sample(self, logits, *_):
        SEES.append(logits.clone())
        return LEFT

    worker = runner.structured_outputs_worker
    worker.sampler = sampler
    worker.apply_grammar_bitmask(logits, batch, GRAMMAR.structured_output_request_ids, GRAMMAR.grammar_bitmask)
    given = *mappings, *tokens, case["seq_lens_upper_bound_np"], return_logprobs
    with mock.patch.object(LimitedSampler.__mro__[2], "sample", sample, create=True):
        sampled = sampler.sample(logits, *given)
    if method == "probabilistic":
        assert sampled is LEFT
        assert SEES[0].equal(want)
        return
    assert logits.equal(want if return_logprobs else before)
    expected, _ = sampler.sample(want, *given)
    assert sampled[0].tolist() == expected.tolist()
    sampler.grammar = None
    assert sampled[0].tolist() != sampler.sample(before, *given)[0].tolist()
