"""Processed log-probabilities and sampling masks of a step's rows, in vLLM's form.

vLLM computes both from a copy of the step's logits. Here a call lists the likeliest tokens and the kept set of each row.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdecode import SamplerOutput
from specdecode.batch import MOST_TOP_LOGPROBS
from specdecode.integrations.vllm.grammars import apply_grammar
from specdecode.integrations.vllm.sampling import LISTED_MODE, LOGPROBS, TokenSampling


class ListedRows:
    """Mixed into vLLM's `RejectionSampler`: it returns the lists of a call in vLLM's form."""

    listed: SamplerOutput | None = None
    """The output of the last step if it lists anything; None if it was left to vLLM."""

    num_listed: int = -1
    """The number of likeliest tokens that vLLM returns for each row in addition to the emitted one; -1: no
    log-probabilities."""

    mask_outputs: list[SamplerOutput] | None = None
    """The outputs from which sampling masks are made; None: vLLM makes them itself, or returns none."""

    # What vLLM's class has:
    sampler: TokenSampling
    num_speculative_steps: int

    @property
    def can_list(self) -> bool:
        """Whether calls can list the row data that vLLM returns, as far as this depends on the whole step."""
        return 0 <= self.num_listed <= MOST_TOP_LOGPROBS and not self.sampler.return_sampling_mask

    def listing_of(self, needs: int) -> dict[str, Any]:
        """Return the arguments for the lists of a call, given its requests' needs in bits."""
        listing: dict[str, Any] = {}
        if needs & LOGPROBS and self.sampler.logprobs_mode == LISTED_MODE and self.can_list:
            listing = {"logprobs": "processed", "top_logprobs": self.num_listed}
        return listing if self.mask_outputs is None else listing | {"kept_sets": True}

    def keep(self, output: SamplerOutput) -> None:
        """Keep a listing output until vLLM asks for it."""
        self.listed = output
        if self.mask_outputs is not None:
            self.mask_outputs.append(output)

    def _get_logprobs_tensors(
        self,
        sampled: Tensor,
        num_sampled: Tensor,
        logits: Tensor,
        cu_num_logits: Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> Any:
        """Return log-probabilities, with vLLM's arguments and results.

        vLLM computes each token's rank in the model's row: excluded tokens with the same logit count, unless the number
        of kept tokens is known.
        """
        given = sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np
        of_vllm = super()._get_logprobs_tensors  # type: ignore[misc]
        if max_num_logprobs >= 0:
            apply_grammar(self.sampler)
        if self.listed is None or self.listed.logprobs is None or max_num_logprobs < 0:
            return of_vllm(*given, max_num_logprobs)
        return with_listed(of_vllm(*given, 0), self.listed, cu_num_logits, max_num_logprobs)

    @contextmanager
    def making_sampling_masks(self, can_list: bool) -> Iterator[None]:
        """Make calls list kept sets if they can, and keep vLLM from computing sampling masks."""
        if not can_list:
            yield
            return
        self.mask_outputs, self.sampler.return_sampling_mask = [], False
        try:
            yield
        finally:
            self.mask_outputs, self.sampler.return_sampling_mask = None, True

    def with_sampling_masks(self, result: Any, slots: np.ndarray) -> Any:
        """Return the result of vLLM's `_verify_in_chunks`, with the sampling masks of all chunks if they were listed."""
        if self.mask_outputs is None:
            return result
        kind = importlib.import_module("vllm.v1.worker.gpu.sample.output").SamplingMaskTensors
        vocab_size = self.sampler.sampling_states.vocab_size
        width = int(self.sampler.sampling_states.top_k.np[slots].max(initial=1))
        more = vocab_size, self.num_speculative_steps + 1
        parts = [kind(*sampling_mask(output, vocab_size, width), *more) for output in self.mask_outputs]
        return *result[:3], parts[0] if len(parts) == 1 else kind.cat(parts)


def with_listed(tensors: Any, output: SamplerOutput, cu_num_logits: Tensor, count: int) -> Any:
    """Return vLLM's log-probabilities with the listed ones in their place.

    Args:
        tensors: vLLM's tensors for each row's own token only; the token is 0 after a request's last.
        output: lists the likeliest tokens.
        cu_num_logits: [batch + 1] each request's first row.
        count: number of requested likeliest tokens.
    """
    assert output.logprobs is not None
    starts, token_ids = cu_num_logits.long(), tensors.logprob_token_ids[:, :1]
    rows = torch.arange(len(token_ids), device=starts.device)
    requests = torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp(max=len(starts) - 2)
    places = requests, (rows - starts[requests]).clamp(max=output.token_ids.shape[1] - 1)
    logprobs = output.logprobs[places][:, None]
    if count > 0:
        assert output.top_token_ids is not None
        assert output.top_logprobs is not None
        likeliest = without_gaps(output.top_token_ids[places], token_ids)
        token_ids = torch.cat([token_ids, likeliest.to(token_ids.dtype)], dim=1)
        logprobs = torch.cat([logprobs, output.top_logprobs[places]], dim=1)
    logprobs = logprobs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # NaN of rows that vLLM does not return
    ranks = tensors.selected_token_ranks
    if output.num_kept is not None:
        ranks = ranks.minimum(output.num_kept[places])
    return tensors._replace(logprob_token_ids=token_ids, logprobs=logprobs, selected_token_ranks=ranks)


def without_gaps(likeliest: Tensor, token_ids: Tensor) -> Tensor:
    """Return lists of likeliest tokens whose gaps are filled with other tokens: vLLM lists them with -inf.

    Args:
        likeliest: [rows, count] ids, all different, then -1.
        token_ids: [rows, 1] the rows' own tokens.
    """
    count = likeliest.shape[1]
    others = torch.arange(2 * count + 1, device=likeliest.device)  # at most count + 1 of them are listed
    is_listed = (torch.cat([token_ids, likeliest], dim=1)[:, :, None] == others).any(dim=1)
    free = is_listed.to(torch.uint8).argsort(dim=1, stable=True)
    is_gap = likeliest < 0
    return torch.where(is_gap, free.gather(1, (is_gap.cumsum(dim=1) - 1).clamp(min=0)), likeliest)


def sampling_mask(output: SamplerOutput, vocab_size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return kept sets of at most 1,024 tokens as vLLM's `SamplingMaskTensors` has them, given a call's output.

    Returns:
        For all rows that requests may have: [rows, width] int32 ids in order, then -1; [rows, ceil(vocab_size / 8)] uint8
        with a bit for each token, the lowest first; [rows] int32, the number of kept tokens.
    """
    assert output.kept_token_ids is not None
    assert output.num_kept is not None
    token_ids = output.kept_token_ids.flatten(0, 1)
    bits = torch.where(token_ids < 0, 0, 1 << (token_ids & 7)).to(torch.uint8)
    packed = bits.new_zeros(len(token_ids), -(-vocab_size // 8))
    packed.scatter_add_(1, (token_ids >> 3).clamp(min=0).long(), bits)
    return token_ids[:, :width].contiguous(), packed, output.num_kept.flatten()
