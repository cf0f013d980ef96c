"""Stand-ins for what vLLM's classes hold, with the names, shapes and dtypes of vLLM 0.33, and the arguments of `_verify`."""

import logging
from types import SimpleNamespace as Namespace
from unittest.mock import Mock

import numpy as np
import torch

from specdecode import RejectionSampler, SamplerOutput
from specdecode.integrations.adapters import Fallbacks
from specdecode.integrations.vllm import DraftVerification

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

    def _get_logprobs_tensors(self, sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs):
        return None


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


def packed_arguments(method, states, case, draft_logits=None, num_draft_tokens=4):
    """Return what the sampler's `packed` is called with."""
    verifier = Mock(method=method, backend="auto", shard=None)
    verifier.packed.return_value = SamplerOutput(*[torch.zeros(1)] * len(SamplerOutput._fields))
    rejection_sampler(method, states, num_draft_tokens, verifier=verifier)._verify(draft_logits=draft_logits, **case)
    return verifier.packed.call_args.kwargs


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def counted_output(accepted, drafted, invalid=None):
    zeros = torch.zeros(len(accepted), dtype=torch.bool)
    counts = [torch.tensor(each, dtype=torch.int32) for each in (accepted, drafted)]
    return SamplerOutput(
        torch.zeros(len(accepted), 5, dtype=torch.int64), *counts, zeros if invalid is None else invalid
    )
