"""With tensor parallelism in vLLM each rank verifies its own columns; whole rows are gathered where a step needs them."""

import sys
from operator import attrgetter
from types import ModuleType
from types import SimpleNamespace as Namespace

import pytest
import torch
from torch import nn

from specdecode.integrations.adapters import Fallbacks
from specdecode.integrations.vllm import columns, contract, logger
from specdecode.integrations.vllm.reporting import Report
from tests.support.ranks import groups
from tests.support.vllm import (
    METHODS,
    arguments,
    ragged_case,
    rejection_sampler,
    sampling_states,
)
from tests.support.vllm_ranks import (
    BOUNDS,
    DRAFTS,
    SLOTS,
    VOCAB,
    LogitsProcessor,
    Model,
    batch_of,
    group_by_thread,
    of_rank,
    on_two_ranks,
)


class WithLocal(Model):
    def compute_logits_local(self, hidden_states):
        self.asked = True
        return self.logits_processor(self.lm_head, hidden_states, skip_gather=True)


class WithBias(Model):
    def compute_logits(self, hidden_states):
        assert self.lm_head is not None
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)


class WithNames(Model):
    def compute_logits(self, hidden_states):
        return self.logits_processor(lm_head=self.lm_head, hidden_states=hidden_states)


class Tied(Model):
    def __init__(self, *bounds):
        super().__init__(*bounds)
        self.model = nn.Module()
        self.model.embed_tokens = self.lm_head
        del self.lm_head

    def compute_logits(self, hidden_states):
        return self.logits_processor(self.model.embed_tokens, hidden_states)


class Multimodal(nn.Module):
    """A model of vLLM's that has another one in it."""

    language = Model

    def __init__(self, *bounds):
        super().__init__()
        self.language_model = self.language(*bounds)

    def compute_logits(self, hidden_states):
        return self.language_model.compute_logits(hidden_states)


class MultimodalWithBias(Multimodal):
    language = WithBias


@pytest.fixture
def group_of_thread(monkeypatch):
    return group_by_thread(monkeypatch)


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
        assert runner.gathered == 1
        assert runner.columns.gathered == {"kernels that are not compiled yet": 1}
        results = [runner.sample(case["logits"], batch, None) for _ in range(2)]  # the second one checks nothing again
        assert runner.gathered == 1
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
        report = runner.rejection_sampler.report = Report(Fallbacks(logger), 60) if rank == 0 else None
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
            before = runner.gathered
            runner.sample(case["logits"], batch, None if change else object())
            assert runner.gathered == before + 1
            assert runner.columns.gathered[reason] == 1
            runner.sampler.other_processing[slot] = False
            runner.sampler.sampling_states.num_logprobs[slot] = -1
        assert report is None or report.gathered == dict.fromkeys(["kernels that are not compiled yet", *changes], 1)

    on_two_ranks(group_of_thread, steps)
    assert "step 1 with grammars: vLLM gathers the logits of such a step on every rank" in caplog.text


def test_a_step_without_drafts_is_vllms_own(group_of_thread):
    case, *_ = ragged_case(vocab=VOCAB, num_draft_tokens=DRAFTS)

    def step(rank):
        runner, batch = of_rank(rank, "probabilistic"), batch_of(case)
        batch.num_draft_tokens = 0
        runner.sample(case["logits"], batch, None)
        return runner.gathered, dict(runner.columns.gathered)

    assert on_two_ranks(group_of_thread, step) == [(1, {}), (1, {})]


# ---- Models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def of_group(group_of_thread, caplog):
    """Have a rank of a group that exchanges nothing."""
    caplog.set_level("INFO")
    group_of_thread.group = groups(2)[1]


@pytest.mark.parametrize("model", [Model, WithLocal, WithBias, WithNames, Tied, Multimodal, MultimodalWithBias])
def test_a_model_that_does_no_more_than_apply_its_head_computes_a_ranks_columns(of_group, model):
    runner, rows = of_rank(1, "probabilistic", model=model), torch.randn(3, VOCAB).bfloat16()
    whole = runner.model.compute_logits(rows)
    assert runner.gathered == 1
    with runner.columns.in_place_of_rows(runner.model):
        assert runner.model.compute_logits(rows).equal(whole[:, 2048:])
    assert runner.gathered == 1
    assert runner.model.compute_logits(rows).equal(whole)  # as before
    assert runner.gathered == 2
    assert hasattr(runner.model, "asked") == (model is WithLocal)


def test_a_bias_that_is_replaced_later_is_the_one_that_is_added(of_group):
    runner, rows = of_rank(1, "probabilistic", model=WithBias), torch.zeros(1, VOCAB)
    columns = runner.columns
    runner.model.lm_head.bias = torch.full((VOCAB,), 3.0)
    assert columns(rows).unique().tolist() == [3]


OTHERS = {
    "scales logits": lambda self, rows: self.logits_processor(self.lm_head, rows) * 0.5,
    "masks logits": lambda self, rows: self.logits_processor(self.lm_head, rows).index_fill_(1, self.ids, -torch.inf),
    "scales hidden states": lambda self, rows: self.logits_processor(self.lm_head, rows * 0.5),
    "has an option": lambda self, rows: (
        self.logits_processor(self.lm_head, rows) if getattr(self, "masks", None) is None else self.masks
    ),
    "has another input": lambda self, rows: self.logits_processor(self.lm_head, self.lm_head.bias),
    "applies it twice": lambda self, rows: [self.logits_processor(self.lm_head, rows) for _ in range(2)][1],
    "has a head that is not vLLM's": lambda self, rows: self.logits_processor(self.dense, rows),
    "has a processor that is not vLLM's": lambda self, rows: self.dense.logits_processor(self.lm_head, rows),
    "asks its parent": lambda self, rows: super(WithLocal, self).compute_logits(rows),
    "applies none": lambda self, rows: rows,
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in another model"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_model_that_does_more_keeps_gathering(of_group, caplog, other, wrapped):
    language = type("Capped", (WithLocal,), {"compute_logits": OTHERS[other]})
    model = type("Capped", (Multimodal,), {"language": language}) if wrapped else language
    assert of_rank(1, "probabilistic", model=model).columns is None
    assert "on every rank, with Capped, whose compute_logits does more than apply a head" in caplog.text


class LogitsProcessorWithLoRA(LogitsProcessor):
    def _get_logits(self, hidden_states, lm_head, embedding_bias, skip_gather=False):
        return self.punica_wrapper.add_lora_logits(hidden_states)


def set_in(path, **members):
    """Return what sets members of a part of a runner."""
    return lambda runner: vars(attrgetter(path)(runner)).update(members) if path else vars(runner).update(members)


def with_lora(runner):
    runner.model.logits_processor = LogitsProcessorWithLoRA()


CHANGES = {
    "batch-sharded sampling": set_in("", batch_sharder=object()),
    "LogitsProcessorWithLoRA, which does more than is known here (add_lora_logits, punica_wrapper)": with_lora,
    "return_sampling_mask": set_in("sampler", return_sampling_mask=True),
    "a head that is not divided": set_in("model.lm_head", tp_size=1),
    "a head of other tokens than the vocabulary's": set_in("model.lm_head", org_vocab_size=VOCAB + 1),
    "columns that do not start at a multiple of 1024": set_in("model.lm_head", num_embeddings_per_partition=1500),
    "a draft model of fewer tokens": set_in("speculator", draft_logits=torch.zeros(SLOTS, DRAFTS, VOCAB - 1)),
    "rejection_sample_method 'fly'": set_in("rejection_sampler", fly_window_size=3),
}


@pytest.mark.parametrize("why", CHANGES)
@pytest.mark.parametrize("model", [Model, WithLocal])
def test_what_keeps_vllm_gathering_is_logged(of_group, caplog, why, model):
    runner = of_rank(1, "probabilistic", model=model)
    CHANGES[why](runner)
    assert runner.columns is None
    assert f"vLLM gathers the logits of all steps on every rank, with {why}" in caplog.text


# ---- Vocabularies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_truncated_rows_are_not_gathered_a_second_time(is_symmetric):
    shard = Namespace(transport_on=lambda device: Namespace(is_symmetric=is_symmetric))
    assert (columns.why_not_cut(shard, Namespace(is_cuda=True, device="cuda")) is None) == is_symmetric


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
    monkeypatch.setattr(sys.modules[contract.PARALLEL], "get_tensor_model_parallel_world_size", lambda: size)
    environment, config = ModuleType("vllm.envs"), ModuleType("vllm.config")
    environment.compile_factors = lambda: {"VLLM_OTHER": "1"}
    load = Namespace(load_format="sharded_state")
    config.get_current_vllm_config_or_none = lambda: load and Namespace(load_config=load)
    for module in (environment, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    columns.pad_to_blocks()
    assert ParallelLMHead(vocab).padded - vocab < 64  # as in the files
    assert environment.compile_factors() == {"VLLM_OTHER": "1"}
    load = None
    each, rest = divmod(ParallelLMHead(vocab).padded, size)
    assert rest == each % 1024 == 0
    assert each * size - vocab < 1024 * size
    assert environment.compile_factors() == {"VLLM_OTHER": "1", "SPECDECODE_VOCAB_PADDING": 1024 * size}
    assert VocabParallelEmbedding(vocab, 8, disable_tp=True).padded - vocab < 64
    assert VocabParallelEmbedding(vocab, 8, padding_size=128).padded - vocab < 128
