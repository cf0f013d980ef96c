"""Penalties and biases of requests, which the sampler applies from vLLM's own state by slot.

vLLM keeps them in two of its logits processors, and applies them to a float32 copy of a step's logits. Here they are
`specdecode.Adjustments`, and nothing is copied. What else these processors may do to a request (allowed tokens, stop tokens
before a minimum length), and all other processors, need vLLM's copy.
"""

from typing import Any, NamedTuple

import torch

from specdecode import Adjustments
from specdecode.integrations.vllm.contract import unknown_attributes


class Known(NamedTuple):
    """The two logits processors of vLLM whose work is done here."""

    penalties: Any  # its `PenaltiesState`
    bias: Any  # its `LogitBiasState`

    def add_request(self, slot: int, params: Any) -> tuple[bool, bool]:
        """Let both know a request; return whether it has penalties or biases, and whether it needs vLLM's copy."""
        has_penalties = bool(self.penalties.add_request(slot, params))
        self.bias.add_request(slot, params)
        has_bias = self.bias.num_logit_bias.np[slot] > 0
        others = self.bias.num_allowed_token_ids.np[slot] > 0 or self.bias.num_stop_token_ids.np[slot] > 0
        return has_penalties or bool(has_bias), bool(others)

    def adjustments(self) -> Adjustments:
        """Return what requests ask for, by slot; small values are copied, because vLLM keeps them in the host's memory.

        All of it is passed if any request of a step needs any: each selection would need kernels of its own.
        """
        penalties: Any = [
            getattr(self.penalties, name).gpu.clone()
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        ]
        most = max(1, int(self.bias.num_logit_bias.np.max()))
        ids, bias = self.bias.logit_bias_token_ids.gpu[:, :most], self.bias.logit_bias.gpu[:, :most]
        is_there = torch.arange(most, device=ids.device) < self.bias.num_logit_bias.gpu[:, None]
        ids = ids.masked_fill(~is_there, -1)  # behind them are those of requests that were in the slot before
        seen = self.penalties.prompt_bin_mask, self.penalties.output_bin_counts
        return Adjustments._make([*penalties, *seen, ids, bias.clone(), None])


def known_processors(sampler: Any) -> Known | None:
    """Return vLLM's states of penalties and biases, or None if they are not what they were in the versions that were run."""
    penalties = getattr(sampler, "penalties_state", None)
    biases = [each for each in getattr(sampler, "logits_processors", ()) if type(each).__name__ == "LogitBiasState"]
    if penalties is None or len(biases) != 1:
        return None
    unknown = [*unknown_attributes(penalties, "PenaltiesState"), *unknown_attributes(biases[0], "LogitBiasState")]
    is_whole = penalties.output_bin_counts.shape[1] == sampler.sampling_states.vocab_size
    return None if unknown or not is_whole else Known(penalties, biases[0])
