"""Stand-ins for vLLM's classes, with the names, shapes and dtypes of vLLM 0.33, and the arguments of `_verify`."""

import logging
import sys
from types import SimpleNamespace as Namespace
from typing import get_args
from unittest.mock import Mock

import numpy as np
import torch

from specdecode import RejectionSampler, SamplerOutput
from specdecode.integrations.engine import EngineMethod, Fallbacks
from specdecode.integrations.vllm import DraftVerification, TokenSampling
from specdecode.integrations.vllm.compat import PARALLEL
from specdecode.integrations.vllm.grammars import KeptGrammars
from specdecode.integrations.vllm.sampling import SlotValues
from specdecode.integrations.vllm.steps import StepInputs

METHODS = list(get_args(EngineMethod))
LEFT = object()
"""The result of the stand-in for vLLM's own verification."""


class PlainRejectionSampler:
    """The base class of the adapter's class: it records the calls that are left to it."""

    def _verify(self, *arguments):
        self.left = arguments
        return LEFT

    def _verify_in_chunks(self, *arguments):
        return arguments

    def _get_logprobs_tensors(self, sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs):
        return None


class Verifying(DraftVerification, PlainRejectionSampler):
    """The adapter's class over the stand-in."""


def mirrored(values, dtype):
    """Return values by slot as vLLM keeps them, for the device (`gpu`) and for the host (`np`)."""
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


NEUTRAL = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


class PenaltiesState:
    def __init__(self, slots, vocab):
        for name, neutral in NEUTRAL.items():
            setattr(self, name, mirrored(np.full(slots, neutral), torch.float32))
        self.use_penalty = np.zeros(slots, dtype=bool)
        self.prompt_bin_mask = torch.randint(-(2**31), 2**31, (slots, -(-vocab // 32))).to(torch.int32)
        self.output_bin_counts = torch.randint(0, 3, (slots, vocab), dtype=torch.int32)

    def add_request(self, slot, params):
        for name, neutral in NEUTRAL.items():
            getattr(self, name).np[slot] = getattr(params, name, neutral)
        self.use_penalty[slot] = any(hasattr(params, name) for name in NEUTRAL)
        return self.use_penalty[slot]


def numbers_of(slots, *names):
    return {name: mirrored(np.zeros(slots), torch.int32) for name in names}


class LogitBiasState:
    """Biases and lists of ids by slot. Entries beyond a request's number are not cleared: they have random ids here.

    The parameter `least_length` counts all tokens of the text, the prompt included.
    """

    def __init__(self, slots, vocab, most=32):
        names = "num_allowed_token_ids", "num_logit_bias", "num_stop_token_ids", "min_lens", "restore_when_all_masked"
        self.__dict__ |= numbers_of(slots, *names)
        for name in ("allowed_token_ids", "logit_bias_token_ids", "stop_token_ids"):
            setattr(self, name, Namespace(gpu=torch.randint(0, vocab, (slots, most), dtype=torch.int32)))
        self.logit_bias = Namespace(gpu=torch.full((slots, most), 99.0))

    def add_request(self, slot, params):
        biases = getattr(params, "logit_bias", {})
        lists = {"allowed_token_ids": [], "stop_token_ids": [], "logit_bias_token_ids": list(biases)} | vars(params)
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias_token_ids"):
            getattr(self, "num_logit_bias" if "bias" in name else f"num_{name}").np[slot] = len(lists[name])
            getattr(self, name).gpu[slot, : len(lists[name])] = torch.tensor(lists[name], dtype=torch.int32)
        self.logit_bias.gpu[slot, : len(biases)] = torch.tensor(list(biases.values()))
        self.min_lens.np[slot] = getattr(params, "least_length", 0)
        self.restore_when_all_masked.np[slot] = hasattr(params, "structured_outputs")
        return True


class BadWordsState:
    def __init__(self, states, slots):
        self.req_states, self.num_bad_words = states, mirrored(np.zeros(slots), torch.int32)
        self.bad_word_token_ids, self.bad_word_offsets = (
            Namespace(gpu=torch.zeros(slots, count, dtype=torch.int32)) for count in (30, 9)
        )

    def add_request(self, slot, params):
        words = getattr(params, "bad_words", [])
        tokens, ends = [token for word in words for token in word], np.cumsum([0, *map(len, words)])
        self.num_bad_words.np[slot] = len(words)
        self.bad_word_token_ids.gpu[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.bad_word_offsets.gpu[slot, : len(ends)] = torch.from_numpy(ends)
        return bool(words)


class ThinkingBudgetState:
    """The thinking budgets by slot; without lists of ids they are switched off, as in vLLM."""

    def __init__(self, states, slots, start_ids=(), end_ids=(), forced_ids=()):
        self.req_states, self.enabled = states, bool(start_ids)
        if not self.enabled:
            return
        self.thinking_token_budget = mirrored(np.full(slots, -1), torch.int32)
        self.cached_last_start, self.cached_last_end = torch.full((2, slots), -7, dtype=torch.int32)
        self.reasoning_start_token_ids = torch.tensor(start_ids, dtype=torch.int32)
        self.natural_reasoning_end_token_ids = torch.tensor(end_ids, dtype=torch.int32)
        self.reasoning_end_token_ids = torch.tensor(forced_ids, dtype=torch.int32)

    def add_request(self, slot, params):
        if self.enabled:
            self.thinking_token_budget.np[slot] = getattr(params, "thinking_token_budget", -1)
        return self.enabled and hasattr(params, "thinking_token_budget")

    def apply(self, logits, context):
        """Record where thinking last began and ended in each request's committed text; `logits` has no rows to change."""
        assert len(logits) == 0
        for slot in context.idx_mapping_np if self.enabled else ():
            if self.thinking_token_budget.np[slot] >= 0:
                text = self.req_states.all_token_ids.gpu[slot, : self.req_states.total_len.gpu[slot]].tolist()
                self.cached_last_start[slot] = last_in(text, self.reasoning_start_token_ids.tolist())
                self.cached_last_end[slot] = last_in(text, self.natural_reasoning_end_token_ids.tolist())


def last_in(text, ids):
    """Return the last index of `ids` in a text, -1 if absent."""
    return max((i for i in range(len(text) - len(ids) + 1) if text[i : i + len(ids)] == ids), default=-1)


def request_states(slots, most=40):
    """The texts of requests."""
    return Namespace(
        all_token_ids=Namespace(gpu=torch.zeros(slots, most, dtype=torch.int32)),
        prompt_len=mirrored(np.ones(slots), torch.int32),
        total_len=Namespace(gpu=torch.ones(slots, dtype=torch.int32)),
    )


class Custom:
    """A custom processor, for requests that enable it."""

    def add_request(self, slot, params):
        return hasattr(params, "custom")


class PlainSampler:
    """The attributes of vLLM's `Sampler`."""

    def __init__(self, slots=64, vocab=50, thinking=()):
        self.needs_logits_processing = np.zeros(slots, dtype=bool)
        self.sampling_states = sampling_states(slots, vocab, temperature=0.0)
        self.sampling_states.add_request = lambda slot, params: False
        self.req_states, self.penalties_state = request_states(slots), PenaltiesState(slots, vocab)
        bad_words = BadWordsState(self.req_states, slots)
        self.logits_processors = [LogitBiasState(slots, vocab), self.penalties_state, bad_words, Custom()]
        self.thinking_budget_state = ThinkingBudgetState(self.req_states, slots, *thinking)
        self.logprobs_mode, self.return_sampling_mask = "raw_logprobs", False

    def add_request(self, slot, params):
        needs = self.sampling_states.add_request(slot, params) | self.thinking_budget_state.add_request(slot, params)
        for processor in self.logits_processors:
            needs |= processor.add_request(slot, params)
        self.needs_logits_processing[slot] = needs


LimitedSampler = type("Sampler", (TokenSampling, PlainSampler), {})


class PlainWorker:
    """A stand-in for vLLM's `StructuredOutputsWorker`."""

    def __init__(self, most_rows, vocab, mask_stride):
        self.logits_indices = torch.zeros(most_rows, dtype=torch.int32)
        self.grammar_bitmask = torch.zeros(most_rows, -(-vocab // 32), dtype=torch.int32)
        self.mask_stride, self.copy_stream, self.applied = mask_stride, None, []

    def apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask):
        indices = [input_batch.req_ids.index(each) for each in grammar_req_ids]
        mapping = [index * self.mask_stride + offset for index in indices for offset in range(self.mask_stride)]
        self.grammar_bitmask[: len(mapping)] = torch.from_numpy(grammar_bitmask)
        self.logits_indices[: len(mapping)] = torch.tensor(mapping)
        starts, bits = input_batch.cu_num_logits.tolist(), grammar_bitmask[:, :, None] >> np.arange(32) & 1
        is_masked = torch.from_numpy(bits.reshape(len(mapping), -1)[:, : logits.shape[1]] == 0)
        for each, where in zip(is_masked, mapping):
            row = starts[where // self.mask_stride] + where % self.mask_stride
            if row < starts[where // self.mask_stride + 1]:
                logits[row].masked_fill_(each, -torch.inf)
        self.applied.append(logits.shape[1])


Worker = type("StructuredOutputsWorker", (KeptGrammars, PlainWorker), {})


def grammar_of(requests, mask_stride, vocab, seed=0, share=0.5):
    """Return a step's grammar masks as vLLM's scheduler sends them: `mask_stride` rows for each of some requests.

    A row allows each token with probability `share`.
    """
    numbers = torch.rand(
        len(requests) * mask_stride, -(-vocab // 32), 32, generator=torch.Generator().manual_seed(seed)
    )
    words = ((numbers < share).numpy().astype(np.int64) << np.arange(32)).sum(2)  # bit v % 32: token v is allowed
    ids = [f"request {index}" for index in requests]
    return Namespace(structured_output_request_ids=ids, grammar_bitmask=words.astype(np.uint32).view(np.int32))


def processed(states):
    """Return vLLM's processing: the rows as float32, divided by the temperature, without truncation."""

    def apply_sampling_params(logits, expanded_idx_mapping, *_):
        temperature = states.temperature.gpu[expanded_idx_mapping.long(), None]
        return logits.float() / torch.where(temperature == 0, 1, temperature)

    return apply_sampling_params


class BareSampler(TokenSampling):
    """A sampler to which no request was added: needs and values are read from the slots of its states."""

    known = None

    @property
    def needs(self):
        return (self.noted | self.sampling_needs(slice(None))).astype(np.uint8)

    def slot_values(self):
        return SlotValues(*[getattr(self.sampling_states, name).gpu for name in SlotValues._fields])


def bare_sampler(states, method="strict", kind=BareSampler):
    """Return a sampler with the given states, made without vLLM's constructor."""
    with_verifier = type("Sampler", (kind,), {"verifier": RejectionSampler(method)})
    sampler, slots = with_verifier.__new__(with_verifier), len(states.seeds.np)
    sampler.__dict__ |= {
        "sampling_states": states,
        "noted": np.zeros(slots, dtype=np.uint8),
        "needs_logits_processing": np.ones(slots, dtype=bool),  # also processes temperatures; unused
        "logprobs_mode": "raw_logprobs",
        "return_sampling_mask": False,
        "apply_sampling_params": processed(states),
    }
    return sampler


def rejection_sampler(method, states, num_draft_tokens, **members):
    """Return a `Verifying` with the given states, made without vLLM's constructor; `members` replace attributes."""
    result = Verifying.__new__(Verifying)
    result.__dict__ |= {
        "sampler": bare_sampler(states, method),
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
    """Return the arguments of vLLM's `_verify` without draft_logits, given ragged drafts and padded rows."""
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
        "idx_mapping": torch.tensor(slots),
        "idx_mapping_np": np.array(slots),
        "expanded_idx_mapping": torch.tensor(slots)[requests],
        "expanded_local_pos": torch.tensor(offsets, dtype=torch.int32),
        "seq_lens_upper_bound_np": np.array(positions) + 9,
        "verify_draft_sampled": fed,
    }


def step_of_rows(row_slots, slots, slots_np, positions, fed, offsets):
    """Return a `StepInputs` with the fields that masks depend on; the other fields are empty."""
    none = fed[:0]
    return StepInputs(none, None, fed, positions, none, slots, slots_np, row_slots, offsets, slots_np, fed)


def emitted(token_ids, num_tokens):
    """Return the emitted tokens of each request as lists."""
    return [row[:count] for row, count in zip(token_ids.tolist(), num_tokens.tolist())]


def ragged_case(seed=0, batch=40, slots=64, vocab=50, num_draft_tokens=4, scale=1.0):
    """Return (arguments of `_verify`, drafts, logits) of a step with 0 to K drafts a request, in random slots.

    Most drafts are the argmax, some are -1.
    """
    random = np.random.default_rng(seed)
    logits = torch.tensor(scale * random.normal(size=(batch, num_draft_tokens + 1, vocab)), dtype=torch.bfloat16)
    drafts = []
    for row in logits[:, :-1].argmax(dim=-1).tolist():
        ids = [token if random.random() < 0.7 else int(random.integers(-1, vocab)) for token in row]
        drafts.append(ids[: random.integers(0, num_draft_tokens + 1)])
    own_slots = random.permutation(slots)[:batch].tolist()
    return step(drafts, logits, own_slots, random.integers(1, 500, size=batch).tolist()), drafts, logits


def arguments(case):
    """Return the arguments of a case in the order of vLLM's `_verify`, without logits and draft_logits."""
    return [value for name, value in case.items() if name != "logits"]


def packed_arguments(method, states, case, draft_logits=None, num_draft_tokens=4):
    """Return the arguments with which `_verify` calls the verifier's `packed` for a case."""
    verifier = Mock(method=method, backend="auto")
    verifier.packed.return_value = SamplerOutput(*[torch.zeros(1)] * len(SamplerOutput._fields))
    rejection_sampler(method, states, num_draft_tokens, verifier=verifier)._verify(draft_logits=draft_logits, **case)
    return verifier.packed.call_args.kwargs


def group_of_ranks(monkeypatch, rank, size):
    """Make vLLM return a rank's group, and return the group. Its barrier does not wait, and it exchanges nothing."""
    ranks = Namespace(rank_in_group=rank, world_size=size, barrier=Mock())
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, Namespace(__path__=[]))
    monkeypatch.setitem(sys.modules, PARALLEL, Namespace(get_tp_group=lambda: ranks))
    return ranks


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def counted_output(accepted, drafted, invalid=None):
    """Return an output with the given numbers of accepted and drafted tokens of each request."""
    zeros = torch.zeros(len(accepted), dtype=torch.bool)
    counts = [torch.tensor(each, dtype=torch.int32) for each in (accepted, drafted)]
    return SamplerOutput(
        torch.zeros(len(accepted), 5, dtype=torch.int64), *counts, zeros if invalid is None else invalid
    )
