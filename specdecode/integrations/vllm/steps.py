"""A step of vLLM as one bundle, and parts of it.

A request's tokens depend on no other request. So a step may be verified by two calls with the same method and noise: one
call uses vLLM's copy of logits, for the requests that need it, and the other uses the model's logits.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdecode import Adjustments
from specdecode.adjustments import WORD

OF_ROWS = "logits", "draft_sampled", "pos", "expanded_idx_mapping", "expanded_local_pos", "verify_draft_sampled"
"""The tensors of a step with one entry for each row."""


class Requests(NamedTuple):
    """Some requests of a step."""

    indices: Tensor  # [requests] int64, in the step
    rows: Tensor  # [rows] int64, in the step
    row_starts: Tensor  # [requests + 1] int64, in `rows`
    on_host: np.ndarray  # [requests] the indices

    @classmethod
    def of(cls, selected: np.ndarray, starts: np.ndarray, device: torch.device) -> "Requests":
        """Return the selected requests, given a mask [batch] and the first row of each request."""
        indices = np.flatnonzero(selected)
        counts = np.diff(starts)[indices]
        rows = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in indices])
        parts = [indices, rows, np.concatenate([[0], np.cumsum(counts)])]
        values = torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device, non_blocking=True)  # in one copy
        return cls._make([*torch.split(values, [len(part) for part in parts]), indices])


class StepInputs(NamedTuple):
    """The arguments of vLLM's `_verify`; also the context that its logits processors take."""

    logits: Tensor  # [num_rows, vocab] in the model's dtype; grammar masks are applied, or kept by the sampler
    draft_logits: Tensor | None  # [num_slots, num_draft_tokens, vocab], by the draft model; None: point masses
    draft_sampled: Tensor  # [num_rows] the token fed at each row: a request's last, then its drafts
    pos: Tensor  # [num_rows] the positions of these tokens
    cu_num_logits: Tensor  # [batch + 1] the first row of each request; only the device may know the values
    idx_mapping: Tensor  # [batch] the slot of each request
    idx_mapping_np: np.ndarray  # the same on the host
    expanded_idx_mapping: Tensor  # [num_rows] the slot of each row's request
    expanded_local_pos: Tensor  # [num_rows] the index of each row in its request
    seq_lens_upper_bound_np: np.ndarray  # [batch] for vLLM's logits processors
    verify_draft_sampled: Tensor  # [num_rows] `draft_sampled`, with -1 for drafts that vLLM excludes

    @property
    def input_ids(self) -> Tensor:
        """The tokens fed, as vLLM's logits processors name them."""
        return self.draft_sampled

    @property
    def kind(self) -> tuple[torch.dtype, torch.dtype | None]:
        """The kind of the step, see `kind_of`."""
        return kind_of(self.logits, self.draft_logits)

    def part(self, requests: Requests) -> "StepInputs":
        """Return the step of some requests; draft logits stay by slot."""
        indices, rows, row_starts, on_host = requests
        return self._replace(
            **{name: getattr(self, name)[rows] for name in OF_ROWS},
            cu_num_logits=row_starts,
            idx_mapping=self.idx_mapping[indices].long(),
            idx_mapping_np=self.idx_mapping_np[on_host],
            seq_lens_upper_bound_np=self.seq_lens_upper_bound_np[on_host],
        )

    def without_rows(self) -> "StepInputs":
        """Return an empty step with tensors of the same types."""
        of_requests = "idx_mapping", "idx_mapping_np", "seq_lens_upper_bound_np"
        return self._replace(**{name: getattr(self, name)[:0] for name in (*OF_ROWS, *of_requests)})

    def processed(self, sampler: Any) -> Tensor:
        """Return the logits that vLLM's sampler has processed, a float32 copy."""
        slots = self.expanded_idx_mapping, self.idx_mapping, self.idx_mapping_np
        tokens = self.pos, self.draft_sampled, self.expanded_local_pos, self.seq_lens_upper_bound_np
        logits: Tensor = sampler.apply_sampling_params(self.logits, *slots, *tokens)
        return logits

    def drafts(self, adjustments: Adjustments | None) -> Tensor:
        """Return the draft that each row except the last judges, -1 for none, [num_rows - 1].

        vLLM excludes a draft if a grammar forbids it. A drawn draft that is excluded because of its value must be
        rejected like any other draft, so that the next token comes from the residual. So a drawn draft keeps its id if
        its row masks it, and p(x) = 0 rejects it. Other drafts that vLLM excludes, such as drafts after the first masked
        one, remain -1.
        """
        judged, drawn = self.verify_draft_sampled[1:], self.draft_sampled[1:]
        if self.draft_logits is None or self.verify_draft_sampled.data_ptr() == self.draft_sampled.data_ptr():
            return judged
        ids = drawn.long().clamp(min=0)
        own = ids.clamp(max=self.logits.shape[1] - 1)
        is_masked = self.logits[:-1].gather(1, own[:, None]).squeeze(1) == -torch.inf
        if adjustments is not None and adjustments.allowed_mask is not None:
            own = ids.clamp(max=WORD * adjustments.allowed_mask.shape[1] - 1)
            words = adjustments.allowed_mask[:-1].gather(1, own[:, None] // WORD).squeeze(1)
            is_masked |= (words >> own % WORD) & 1 == 0
        return torch.where(is_masked, drawn, judged)


def kind_of(logits: Tensor, draft_logits: Tensor | None) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtypes of a step's logits; steps with the same dtypes are verified by the same kernels."""
    return logits.dtype, None if draft_logits is None else draft_logits.dtype
