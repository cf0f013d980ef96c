"""Stand-ins for vLLM's model, its head and its model runner on each of two ranks, which are threads."""

import sys
import threading
from types import ModuleType
from types import SimpleNamespace as Namespace

import torch
from torch import nn

from specdecode.integrations.vllm import columns, contract
from specdecode.integrations.vllm.grammars import GrammarSteps
from tests.support.ranks import groups, on_ranks
from tests.support.vllm import arguments, rejection_sampler, sampling_states

VOCAB, PADDED, BOUNDS, DRAFTS, SLOTS = 3000, 4096, [0, 2048, 3000], 4, 64


class LogitsProcessor(nn.Module):
    """VLLM's, of hidden states that are the logits; it counts how often it gathers."""

    logits_as_input, org_vocab_size, gathered = False, VOCAB, 0

    def forward(self, lm_head, hidden_states, embedding_bias=None, skip_gather=False):
        return self._get_logits(hidden_states, lm_head, embedding_bias, skip_gather)

    def _get_logits(self, hidden_states, lm_head, embedding_bias, skip_gather=False):
        if not skip_gather:
            self._gather_logits()
        return self._apply_head(lm_head, hidden_states, embedding_bias, skip_gather)

    def _apply_head(self, lm_head, hidden_states, embedding_bias, is_part):
        start = lm_head.shard_indices.org_vocab_start_index
        logits = hidden_states if embedding_bias is None else hidden_states + embedding_bias
        return nn.functional.pad(logits, (0, PADDED - VOCAB))[:, start : start + 2048] if is_part else logits

    def _gather_logits(self):
        self.gathered += 1


class Model(nn.Module):
    """A model of vLLM's, as most are."""

    def __init__(self, start, end):
        super().__init__()
        self.logits_processor, self.lm_head = LogitsProcessor(), nn.Module()
        self.lm_head.shard_indices = Namespace(org_vocab_start_index=start, org_vocab_end_index=end)
        self.lm_head.num_embeddings_per_partition, self.lm_head.tp_size = 2048, 2
        self.dense = nn.Linear(1, 1)
        self.dense.logits_processor = nn.Identity()
        self.lm_head.org_vocab_size, self.lm_head.bias = VOCAB, torch.arange(VOCAB, dtype=torch.bfloat16)

    def compute_logits(self, hidden_states):
        logits = self.logits_processor(self.lm_head, hidden_states)
        return logits


class PlainRunner:
    """What vLLM's model runner does."""

    structured_outputs_worker = None

    def sample(self, hidden_states, input_batch, grammar_output):
        logits = self.model.compute_logits(hidden_states)
        if self.structured_outputs_worker is not None:
            given = grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
            self.structured_outputs_worker.apply_grammar_bitmask(logits, input_batch, *given)
        return self.rejection_sampler._verify(logits, self.speculator.draft_logits, *arguments(input_batch.case))


class Runner(GrammarSteps, columns.ColumnSampling, PlainRunner):
    @property
    def gathered(self):
        return next(each for each in self.model.modules() if isinstance(each, LogitsProcessor)).gathered


def of_rank(rank, method, draft_logits=None, model=Model, **limits):
    """The model runner of a rank of two."""
    result, states = Runner(), sampling_states(SLOTS, VOCAB, temperature=0.8, **limits)
    result.rejection_sampler = rejection_sampler(method, states, DRAFTS)
    result.sampler, result.model = result.rejection_sampler.sampler, model(BOUNDS[rank], BOUNDS[rank + 1])
    result.sampler.compute_nans = False
    result.speculator = Namespace(draft_logits=draft_logits)
    return result


def group_by_thread(monkeypatch):
    """Each thread is a rank, whose group vLLM returns; return where a thread says which it is."""
    local = threading.local()
    module = ModuleType(contract.PARALLEL)
    module.get_tp_group = lambda: Namespace(world_size=2, device_group=local.group, rank_in_group=local.group.rank())
    module.get_tensor_model_parallel_world_size = lambda: 2
    monkeypatch.setitem(sys.modules, contract.PARALLEL, module)
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
    where = {name: case[name] for name in ("idx_mapping", "idx_mapping_np", "cu_num_logits")}
    names = [f"request {i}" for i in range(len(case["idx_mapping"]))]
    return Namespace(case=case, num_draft_tokens=1, req_ids=names, **where)
