"""With tensor parallelism in vLLM each rank verifies its own columns, also of steps with penalties, biases and masks."""

import threading
from types import SimpleNamespace as Namespace

import pytest
import torch

from specdecode.integrations.vllm.needs import TRUNCATES
from tests.support.vllm import (
    METHODS,
    LimitedSampler,
    PlainWorker,
    Worker,
    grammar_of,
    ragged_case,
    rejection_sampler,
    sampling_states,
)
from tests.support.vllm_ranks import (
    DRAFTS,
    SLOTS,
    VOCAB,
    Model,
    PlainRunner,
    batch_of,
    group_by_thread,
    of_rank,
    on_two_ranks,
)


@pytest.fixture
def group_of_thread(monkeypatch):
    return group_by_thread(monkeypatch)


PENALTIES, BIASES = {"repetition_penalty": 1.5, "presence_penalty": 2.0}, {"logit_bias": {7: 9.0, 2500: 9.0}}
ASKED = {  # given the first token that the request emits else
    "all": lambda token: [{}, PENALTIES, BIASES, {"bad_words": [[token]]}],
    "masks": lambda token: [{}, {"allowed_token_ids": [4, 2047, 2048, 2999]}, {"bad_words": [[token]]}],
}


@pytest.fixture
def one_kernel_at_a_time(monkeypatch):
    """Triton's interpreter does not run in two threads."""
    masking = pytest.importorskip("specdecode.integrations.vllm.masking", exc_type=ImportError)
    lock, mask_rows = threading.Lock(), masking.mask_rows

    def locked(*arguments):
        with lock:
            mask_rows(*arguments)

    monkeypatch.setattr(masking, "mask_rows", locked)


def truncate(sampler, slots):
    """Let every second request keep half of its tokens' mass."""
    sampler.sampling_states.top_p.np[slots[::2]] = 0.5
    sampler.needs[slots[::2]] |= TRUNCATES
    sampler.copies = None


@pytest.mark.usefixtures("one_kernel_at_a_time")
@pytest.mark.parametrize(("method", "asked"), [*[(method, "all") for method in METHODS], ("probabilistic", "masks")])
def test_adjustments_are_applied_to_a_ranks_columns(group_of_thread, method, asked):
    """From vLLM's state of the whole vocabulary, in truncated steps, too."""
    case, *_ = ragged_case(batch=16, vocab=VOCAB, num_draft_tokens=DRAFTS, scale=2.0)

    def verified(runner):
        return runner.sample(case["logits"], batch_of(case), None)[1:]

    def truncated(runner):
        truncate(runner.rejection_sampler.sampler, slots)
        return verified(runner)

    whole, slots, samplers = PlainRunner(), case["idx_mapping_np"], []
    whole.rejection_sampler = rejection_sampler(method, sampling_states(SLOTS, VOCAB, temperature=0.8), DRAFTS)
    whole.model, whole.speculator = Model(0, VOCAB), Namespace(draft_logits=None)
    unadjusted = verified(whole)[0]
    kinds = len(ASKED[asked](0))
    for _ in range(3):
        torch.manual_seed(5)
        samplers.append(LimitedSampler(SLOTS, VOCAB))
        samplers[-1].sampling_states.temperature.np[:] = 0.8
        for i, (slot, token) in enumerate(zip(slots, unadjusted[:, 0].tolist())):
            samplers[-1].add_request(slot, Namespace(**ASKED[asked](token)[i % kinds]))
    whole.rejection_sampler.sampler = samplers[0]
    want = verified(whole), truncated(whole)
    changed = (want[0][0] != unadjusted).any(dim=1)
    assert not want[1][0].equal(want[0][0])
    assert [bool(changed[i::kinds].any()) for i in range(kinds)] == [i > 0 for i in range(kinds)]

    def steps(rank):
        runner = of_rank(rank, method)
        runner.sampler = runner.rejection_sampler.sampler = samplers[1 + rank]
        runner.sampler.compute_nans = False
        verified(runner)  # which compiles, from whole rows
        results = verified(runner), truncated(runner)
        assert runner.gathered == 1
        return results

    for results in on_two_ranks(group_of_thread, steps):
        assert all(one.equal(other) for got, of_whole in zip(results, want) for one, other in zip(got, of_whole))


class GrammarSampler(LimitedSampler):
    keeps_grammars, compute_nans = True, False


@pytest.mark.usefixtures("one_kernel_at_a_time")
@pytest.mark.parametrize("method", METHODS)
def test_grammars_are_applied_to_a_ranks_columns(group_of_thread, method):
    """Drafts are left out, also those that their rows forbid."""
    case, *_ = ragged_case(batch=16, vocab=VOCAB, num_draft_tokens=DRAFTS, scale=2.0)
    grammar = grammar_of(range(16), DRAFTS + 1, VOCAB, share=0.3)
    allowed = case["logits"].clone()
    given = batch_of(case), grammar.structured_output_request_ids, grammar.grammar_bitmask
    PlainWorker(400, VOCAB, DRAFTS + 1).apply_grammar_bitmask(allowed, *given)
    draft_logits = torch.zeros(SLOTS, DRAFTS + 1, VOCAB, dtype=torch.bfloat16)  # of the likeliest token that is allowed
    where = case["expanded_idx_mapping"].long(), case["expanded_local_pos"].long(), allowed.argmax(dim=1)
    draft_logits = draft_logits.index_put(where, torch.tensor(50.0).bfloat16())[:, :DRAFTS]
    case["verify_draft_sampled"] = case["draft_sampled"].masked_fill(case["expanded_local_pos"] > 0, -1)

    def verified(runner):
        return runner.sample(case["logits"].clone(), batch_of(case), grammar)[1:]

    def made(runner, worker):
        torch.manual_seed(5)
        runner.sampler = runner.rejection_sampler.sampler = GrammarSampler(SLOTS, VOCAB)
        runner.sampler.verifier = runner.rejection_sampler.verifier
        runner.sampler.sampling_states.temperature.np[:] = 0.1
        runner.speculator = Namespace(draft_logits=draft_logits)
        runner.structured_outputs_worker = worker(400, VOCAB, DRAFTS + 1)
        return runner

    whole = PlainRunner()
    whole.rejection_sampler, whole.model = of_rank(0, method).rejection_sampler, Model(0, VOCAB)
    want = [verified(made(whole, PlainWorker))]
    truncate(whole.sampler, case["idx_mapping_np"])
    want.append(verified(whole))
    runners = [made(of_rank(rank, method), Worker) for rank in range(2)]

    def steps(rank):
        runner = runners[rank]
        verified(runner)  # which compiles, from whole rows
        result = verified(runner)
        truncate(runner.sampler, case["idx_mapping_np"])
        truncated = verified(runner)
        assert runner.gathered == 1
        assert runner.structured_outputs_worker.applied == [0, 0, 0]
        return result, truncated

    for results in on_two_ranks(group_of_thread, steps):
        assert all(one.equal(other) for got, of_whole in zip(results, want) for one, other in zip(got, of_whole))


@pytest.mark.parametrize(("worker", "why"), [(Worker, None), (PlainWorker, "grammars")])
def test_rows_are_gathered_where_vllms_own_worker_would_mask_a_ranks_columns(worker, why):
    case, *_ = ragged_case(batch=16, vocab=VOCAB, num_draft_tokens=DRAFTS)
    runner = of_rank(0, "block")
    runner.sampler, runner.structured_outputs_worker = GrammarSampler(SLOTS, VOCAB), worker(400, VOCAB, DRAFTS + 1)
    runner.columns = Namespace(why_not=(None, None))
    assert runner.why_whole(batch_of(case), grammar_of(range(16), DRAFTS + 1, VOCAB)) == why
