"""With tensor parallelism in vLLM each rank verifies its own columns; whole rows are gathered where a step needs them."""

import sys
import threading
from types import ModuleType
from types import SimpleNamespace as Namespace

import pytest
import torch

from specdecode.integrations.vllm import columns
from tests.support.ranks import groups, on_ranks
from tests.support.vllm import METHODS, arguments, ragged_case, rejection_sampler, sampling_states

VOCAB, PADDED, BOUNDS, DRAFTS, SLOTS = 3000, 4096, [0, 2048, 3000], 4, 64


class PlainRunner:
    """What vLLM's model runner does, of hidden states that are the logits."""

    def sample(self, hidden_states, input_batch, grammar_output):
        logits = self.model.compute_logits(hidden_states)
        return self.rejection_sampler._verify(logits, self.speculator.draft_logits, *arguments(input_batch.case))


class Runner(columns.ColumnSampling, PlainRunner):
    pass


def of_rank(rank, method, draft_logits=None, **limits):
    """The model runner of a rank of two."""
    start = BOUNDS[rank]
    verification = rejection_sampler(method, sampling_states(SLOTS, VOCAB, temperature=0.8, **limits), DRAFTS)
    verification.sampler.compute_nans = False
    indices = Namespace(org_vocab_start_index=start, org_vocab_end_index=BOUNDS[rank + 1])
    result = Runner()
    result.model, result.rejection_sampler, result.sampler = Namespace(gathered=0), verification, verification.sampler
    model = result.model
    model.lm_head = Namespace(shard_indices=indices, num_embeddings_per_partition=2048)

    def compute_logits(hidden_states):
        model.gathered += 1
        return hidden_states

    model.compute_logits = compute_logits
    model.compute_logits_local = lambda hidden: torch.nn.functional.pad(hidden, (0, PADDED - VOCAB))[
        :, start : start + 2048
    ]
    result.speculator = Namespace(draft_logits=draft_logits)
    return result


@pytest.fixture
def group_of_thread(monkeypatch):
    """Each thread is a rank, whose group vLLM returns."""
    local = threading.local()
    module = ModuleType(columns.PARALLEL)
    module.get_tp_group = lambda: Namespace(world_size=2, device_group=local.group, rank_in_group=local.group.rank())
    module.get_tensor_model_parallel_world_size = lambda: 2
    monkeypatch.setitem(sys.modules, columns.PARALLEL, module)
    return local


def on_two_ranks(group_of_thread, function):
    """Call a function of the rank on each of two."""
    members = groups(2)

    def run(rank):
        group_of_thread.group = members[rank]
        return function(rank)

    results = on_ranks(run, [(0,), (1,)])
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def batch_of(case):
    return Namespace(case=case, num_draft_tokens=1, idx_mapping_np=case["idx_mapping_np"])


@pytest.mark.parametrize("limits", [{}, {"top_k": 20, "top_p": 0.9}], ids=["plain", "truncated"])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_verify_their_columns_and_return_what_one_does_of_whole_rows(group_of_thread, method, limits):
    case, _, logits = ragged_case(vocab=VOCAB, num_draft_tokens=DRAFTS, scale=2.0)
    draft_logits = torch.zeros(SLOTS, DRAFTS, VOCAB, dtype=torch.bfloat16)
    draft_logits[case["idx_mapping"].long()] = logits[:, :-1].flip(0)
    states = sampling_states(SLOTS, VOCAB, temperature=0.8, **limits)
    whole = rejection_sampler(method, states, DRAFTS)
    want = whole._verify(case["logits"], draft_logits, *arguments(case))

    def steps(rank):
        runner, batch = of_rank(rank, method, draft_logits, **limits), batch_of(case)
        runner.sample(case["logits"], batch, None)  # which compiles, from whole rows
        assert runner.model.gathered == 1
        assert runner.columns.gathered == {"kernels that are not compiled yet": 1}
        results = [runner.sample(case["logits"], batch, None) for _ in range(2)]  # the second one checks nothing again
        assert runner.model.gathered == 1
        assert results[0][0].shape[1] == BOUNDS[rank + 1] - BOUNDS[rank]
        return results

    for results in on_two_ranks(group_of_thread, steps):
        for _, token_ids, num_tokens in results:
            assert num_tokens.equal(want[2])
            emitted = torch.arange(DRAFTS + 1) < num_tokens[:, None]
            assert token_ids[emitted].equal(want[1][emitted])


def test_steps_that_need_whole_rows_are_gathered_and_counted(group_of_thread, caplog):
    case, *_ = ragged_case(vocab=VOCAB, num_draft_tokens=DRAFTS)

    def steps(rank):
        runner, batch = of_rank(rank, "probabilistic"), batch_of(case)
        runner.sample(case["logits"], batch, None)
        slot = int(case["idx_mapping_np"][3])
        changes = {
            "logits processors": lambda: runner.sampler.other_processing.__setitem__(slot, True),
            "log-probabilities": lambda: runner.sampler.sampling_states.num_logprobs.__setitem__(slot, 2),
            "VLLM_COMPUTE_NANS_IN_LOGITS": lambda: setattr(runner.sampler, "compute_nans", True),
            "grammars": None,
        }
        for reason, change in changes.items():
            if change is not None:
                change()
            before = runner.model.gathered
            runner.sample(case["logits"], batch, None if change else object())
            assert runner.model.gathered == before + 1
            assert runner.columns.gathered[reason] == 1
            runner.sampler.other_processing[slot] = False
            runner.sampler.sampling_states.num_logprobs[slot] = -1
        return runner

    on_two_ranks(group_of_thread, steps)
    assert "step 1 with grammars: vLLM gathers the logits of such a step on every rank" in caplog.text


def test_a_step_without_drafts_is_vllms_own(group_of_thread):
    case, *_ = ragged_case(vocab=VOCAB, num_draft_tokens=DRAFTS)

    def step(rank):
        runner, batch = of_rank(rank, "probabilistic"), batch_of(case)
        batch.num_draft_tokens = 0
        runner.sample(case["logits"], batch, None)
        return runner.model.gathered, dict(runner.columns.gathered)

    assert on_two_ranks(group_of_thread, step) == [(1, {}), (1, {})]


CHANGES = {
    "batch-sharded sampling": lambda runner: setattr(runner, "batch_sharder", object()),
    "SimpleNamespace, which has no compute_logits_local": lambda runner: delattr(runner.model, "compute_logits_local"),
    "return_sampling_mask": lambda runner: setattr(runner.sampler, "return_sampling_mask", True),
    "columns that do not start at a multiple of 1024": lambda runner: setattr(
        runner.model.lm_head, "num_embeddings_per_partition", 1500
    ),
    "a draft model of fewer tokens": lambda runner: setattr(
        runner.speculator, "draft_logits", torch.zeros(SLOTS, DRAFTS, VOCAB - 1)
    ),
    "rejection_sample_method 'fly'": lambda runner: setattr(runner.rejection_sampler, "fly_window_size", 3),
}


@pytest.mark.parametrize("why", CHANGES)
def test_what_keeps_vllm_gathering_is_logged(group_of_thread, caplog, why):
    caplog.set_level("INFO")
    runner = of_rank(1, "probabilistic")
    CHANGES[why](runner)
    group_of_thread.group = Namespace(rank=lambda: 1)
    assert runner.columns is None
    assert f"vLLM gathers the logits of all steps on every rank, with {why}" in caplog.text


@pytest.mark.parametrize("vocab", [128_256, 151_936, 201_088, 129_280, 262_208], ids=str)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_vocabularies_are_padded_so_that_columns_start_at_a_block(group_of_thread, monkeypatch, vocab, size):
    class VocabParallelEmbedding:
        def __init__(self, num_embeddings, embedding_dim, padding_size=64, *, disable_tp=False, parallel_group=None):
            self.padded = -(-num_embeddings // padding_size) * padding_size

    class ParallelLMHead(VocabParallelEmbedding):
        def __init__(self, num_embeddings, padding_size=64):
            super().__init__(num_embeddings, 8, padding_size)

    layers = ModuleType(columns.LAYERS)
    layers.VocabParallelEmbedding, layers.DEFAULT_VOCAB_PADDING_SIZE = VocabParallelEmbedding, 64
    monkeypatch.setitem(sys.modules, columns.LAYERS, layers)
    monkeypatch.setattr(sys.modules[columns.PARALLEL], "get_tensor_model_parallel_world_size", lambda: size)
    columns.pad_to_blocks()
    each, rest = divmod(ParallelLMHead(vocab).padded, size)
    assert rest == each % 1024 == 0
    assert each * size - vocab < 1024 * size
    assert VocabParallelEmbedding(vocab, 8, disable_tp=True).padded - vocab < 64
    assert VocabParallelEmbedding(vocab, 8, padding_size=128).padded - vocab < 128
