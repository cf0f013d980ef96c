"""Acceptance statistics over many verification steps, to compare drafters.

Everything is derived from three counts per position i, summed over all requests and steps:

    drafted_i    requests that had a draft at position i
    accepted_i   requests whose drafts through position i were all accepted, and kept
    emitted_i    requests with a draft that emitted, and kept, a token at position i

so drafts = drafted_0, draft tokens = sum of drafted_i, accepted tokens = sum of accepted_i, and the acceptance length is the
sum of emitted_i / drafts. Only emitted_i has a position K, for the token after K accepted drafts.
"""

import math
import threading
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TypedDict

import torch

from specdecode.arguments import INTEGERS, MOST_DRAFT_TOKENS, check_count, check_tensor, check_values, on_host, shown
from specdecode.batch import SamplerOutput, TreeOutput

_LOCK = threading.Lock()
"""Held while counters are made or changed. One for all statistics, because an object that has a lock cannot be copied."""


class AcceptanceRecord(TypedDict):
    """The acceptance of one request, in the names of vLLM's `metrics.speculative_decoding` and AIPerf's record."""

    mean_acceptance_length: float
    """1 + num_accepted_draft_tokens / num_spec_steps."""

    draft_acceptance_rate: float
    """num_accepted_draft_tokens / num_draft_tokens."""

    acceptance_histogram: list[int]
    """num_spec_tokens + 1 ints: steps that accepted exactly j drafts."""

    num_spec_steps: int
    """Verifications of at least one draft token."""

    num_accepted_draft_tokens: int
    """Draft tokens accepted and kept."""

    num_draft_tokens: int
    """Draft tokens verified."""

    num_spec_tokens: int
    """K, the most draft tokens of a step."""


class AcceptanceStats:
    """Accumulate acceptance statistics on the device, and read them when wanted.

    `update` never synchronises: the counts stay on the device of the outputs until a property is read or the statistics
    are printed, which waits for the device. They are int64, so they are exact. Several threads may update the same
    statistics; on a GPU they must use the same stream.

    A *draft* is one request's proposal in one step: at least one draft token. A request that had none in a step is not
    counted in that step, neither as a draft nor in an average. Before the first draft all rates and the length are NaN.

    A request may keep fewer tokens than the step emitted, because of a stop token or a length limit: pass `num_tokens` to
    `update`. Tokens that are not kept count neither as accepted nor in the length. All draft tokens that were verified
    count as drafted, including those after the last kept token.

    Args:
        num_draft_tokens: K, the most draft tokens that an output may hold per request, at least 1.
        device: where the counters are. None means on the device of the first output; the first update then makes them.
            Give a device if the first update is captured in a CUDA graph: the counters must exist before the capture.
        per_request: whether to count each request by itself, for `records`. Then the first update makes the counters, for as
            many requests as its output has: `device` must be None, and the first update cannot be captured in a CUDA graph.

    Raises:
        TypeError: `num_draft_tokens` is not an int.
        ValueError: `num_draft_tokens` is less than 1 or more than 4,096, or PyTorch cannot use the device.

    Example:
        >>> import torch
        >>> from specdecode import AcceptanceStats, RejectionSampler
        >>> stats = AcceptanceStats(num_draft_tokens=2)
        >>> target_logits = torch.zeros(2, 3, 5)
        >>> target_logits[:, :, 3] = 1.0  # the greedy token is always 3
        >>> draft_token_ids = torch.tensor([[3, 4], [3, -1]])  # the second request has one draft token
        >>> stats.update(RejectionSampler("strict")(target_logits, draft_token_ids, temperature=0.0))
        >>> stats.drafts, stats.draft_tokens, stats.accepted_tokens
        (2, 3, 2)
        >>> stats.per_position
        [1.0, 0.0]
        >>> stats.draft_tokens_per_position
        [2, 1]
        >>> stats.acceptance_histogram
        [0, 2, 0]
        >>> print(stats)
        -------- Speculative decoding --------
        Acceptance rate (%):             66.67
        Acceptance length:                2.00
        Drafts:                              2
        Draft tokens:                        3
        Accepted tokens:                     2
        Per-position acceptance (%):
          Position 0:                   100.00
          Position 1:                     0.00
        --------------------------------------
    """

    def __init__(
        self, num_draft_tokens: int, device: torch.device | str | None = None, *, per_request: bool = False
    ) -> None:
        self.num_draft_tokens = check_count("num_draft_tokens", num_draft_tokens, MOST_DRAFT_TOKENS)
        if not isinstance(per_request, bool):
            raise TypeError(f"per_request: expected True or False, got {shown(per_request)}")
        if per_request and device is not None:
            raise ValueError(
                f"device: expected None with per_request, got {shown(device)}: the first update makes counters"
            )
        self.per_request = per_request
        try:
            self._counts = None if device is None else self._new_counts(torch.device(device))
        except (RuntimeError, TypeError, AssertionError) as error:  # PyTorch without CUDA fails an assertion
            raise ValueError(f"device: expected a device that PyTorch can use here, got {shown(device)}") from error

    def update(
        self,
        output: SamplerOutput | TreeOutput,
        num_tokens: torch.Tensor | None = None,
        requests: torch.Tensor | None = None,
    ) -> None:
        """Count one verification step, without synchronising.

        In a captured CUDA graph every replay counts its step again.

        Args:
            output: the result of a verification of at most `num_draft_tokens` draft tokens per request, or of trees that
                are no deeper.
            num_tokens: [batch] int32 or int64, on the device of the output: the number of emitted tokens that each request
                keeps, for example up to a stop token. More than were emitted means all of them. A step emits at least one
                token, so 0 or less means that the request had ended before the step: then neither it nor its draft tokens
                are counted. None = all emitted tokens.
            requests: [batch] int32 or int64, on the device of the output: the number of each request, from 0 to one less
                than the requests of the first update. Only used with `per_request`. None = 0, 1, ...

        Raises:
            TypeError: `output` is not a SamplerOutput or a TreeOutput, or a tensor is not of such integers.
            ValueError: `output` holds more draft tokens than `num_draft_tokens`, or is not where the counters are; a tensor
                has another shape or device; a number of `requests` is out of range. On a CUDA device such a request is not
                counted.
            RuntimeError: there are no counters yet and a CUDA graph is being captured.

        Example:
            Six tokens are emitted, five of them accepted drafts. The third is a stop token, here 9:

            >>> import torch
            >>> from specdecode import AcceptanceStats, RejectionSampler
            >>> target_logits = torch.zeros(1, 6, 10)
            >>> draft_token_ids = torch.tensor([[4, 4, 9, 4, 4]])
            >>> target_logits[0, [0, 1, 2, 3, 4], draft_token_ids[0]] = 1.0  # greedy decoding emits the drafts
            >>> output = RejectionSampler("strict")(target_logits, draft_token_ids, temperature=0.0)
            >>> up_to_stop = 1 + ((output.token_ids == 9).cumsum(1) == 0).sum(1)  # 7 without a stop token, which means all
            >>> stats = AcceptanceStats(num_draft_tokens=5)
            >>> stats.update(output, up_to_stop)
            >>> stats.acceptance_length, stats.accepted_tokens, stats.draft_tokens
            (3.0, 3, 5)
        """
        if not isinstance(output, SamplerOutput | TreeOutput):
            raise TypeError(f"output: expected a SamplerOutput or TreeOutput, got {type(output).__name__}")
        width = output.token_ids.shape[1] - 1
        if width > self.num_draft_tokens:
            raise ValueError(
                f"output: expected at most num_draft_tokens = {self.num_draft_tokens} draft tokens per request, "
                f"got {width} (token_ids of shape {list(output.token_ids.shape)})"
            )
        accepted, drafted, kept = output.num_accepted, output.num_draft_tokens, output.num_tokens
        if num_tokens is not None:
            check_tensor("num_tokens", num_tokens, INTEGERS, tuple(accepted.shape), accepted.device)
            kept = torch.minimum(num_tokens, kept).to(kept.dtype)
            accepted = torch.minimum(accepted, kept)
        is_counted = (drafted > 0) & (kept > 0)
        reached = torch.stack((accepted, drafted, kept)) * is_counted  # [3, batch]
        with _exclusively():
            counts = self._counts_for(reached.device, reached.shape[1])
            is_reached = reached[:, :, None] > torch.arange(counts.shape[2], device=counts.device)
            if not self.per_request:
                counts += is_reached.sum(dim=1, keepdim=True)
                return
            num_requests = counts.shape[1]
            if requests is None:
                requests = torch.arange(len(accepted), device=counts.device)
            check_tensor("requests", requests, INTEGERS, tuple(accepted.shape), counts.device)
            is_known = (requests >= 0) & (requests < num_requests)
            if on_host(requests):
                check_values("requests", requests, is_known, f"numbers in [0, {num_requests})")
            counts.index_add_(1, requests.clamp(0, num_requests - 1), (is_reached & is_known[:, None]).to(counts.dtype))

    def reset(self) -> None:
        """Set the counters to zero, for example after a warm-up. Captured CUDA graphs keep counting into them."""
        with _exclusively():
            if self._counts is not None:
                self._counts.zero_()

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        """Return the sum of two statistics, such as statistics of several runs or workers. Synchronises.

        The sum counts all requests together: it has no `records`, even if both statistics were made with `per_request`.

        Raises:
            ValueError: they are not for the same `num_draft_tokens`.
        """
        if not isinstance(other, AcceptanceStats):
            return NotImplemented
        if other.num_draft_tokens != self.num_draft_tokens:
            expected, got = self.num_draft_tokens, other.num_draft_tokens
            raise ValueError(f"other: expected statistics for num_draft_tokens = {expected}, got {got}")
        total = AcceptanceStats(self.num_draft_tokens, device="cpu")
        total._counts = self._total().unsqueeze(1) + other._total().unsqueeze(1)
        return total

    def __radd__(self, other: int) -> "AcceptanceStats":
        """Return the statistics themselves: `sum` begins with 0."""
        return self if other == 0 else NotImplemented

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens, in [0, 1]; NaN before the first draft. Synchronises."""
        accepted, drafted, _ = self._read()
        return _ratio(sum(accepted), sum(drafted))

    @property
    def acceptance_length(self) -> float:
        """Mean number of kept tokens per draft, recovered or bonus token included.

        1 + accepted tokens / drafts if every emitted token is kept. NaN before the first draft. Synchronises.
        """
        _, drafted, emitted = self._read()
        return _ratio(sum(emitted), drafted[0])

    @property
    def per_position(self) -> list[float]:
        """The joint rate of each position i: drafts accepted (and kept) through i / all drafts, shorter ones included.

        `num_draft_tokens` floats in [0, 1], non-increasing; NaN before the first draft. Synchronises.
        """
        accepted, drafted, _ = self._read()
        return [_ratio(count, drafted[0]) for count in accepted]

    @property
    def draft_tokens_per_position(self) -> list[int]:
        """Draft tokens verified at each position i: the drafts that had more than i tokens. Synchronises.

        `num_draft_tokens` ints, non-increasing; they add up to `draft_tokens`, and the first is `drafts`. A smaller number
        means shorter drafts, which `per_position` counts as not accepted there.
        """
        return self._read()[1]

    @property
    def drafts(self) -> int:
        """Verifications of at least one draft token, summed over requests and steps. Synchronises."""
        return self._read()[1][0]

    @property
    def draft_tokens(self) -> int:
        """Draft tokens verified, those after the last kept token included. Synchronises."""
        return sum(self._read()[1])

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens accepted and kept; recovered and bonus tokens are not drafts. Synchronises."""
        return sum(self._read()[0])

    @property
    def acceptance_histogram(self) -> list[int]:
        """Verifications that accepted (and kept) exactly j drafts, for j from 0 to `num_draft_tokens`. Synchronises.

        One that accepted j drafts emitted j + 1 tokens, if all of them were kept.
        """
        return _record(*self._read()[:2])["acceptance_histogram"]

    @property
    def records(self) -> list[AcceptanceRecord | None]:
        """The acceptance of each request; None for one without drafts so far. Synchronises.

        Raises:
            RuntimeError: the statistics were made without `per_request`.
        """
        if not self.per_request:
            raise RuntimeError("records: need AcceptanceStats(..., per_request=True), got per_request=False")
        accepted, drafted, _ = self._cpu_counts()[:, :, :-1].tolist()
        return [_record(*counts) if counts[1][0] else None for counts in zip(accepted, drafted)]

    def __str__(self) -> str:
        """Return a table to paste into a report. Synchronises once."""
        accepted, drafted, emitted = self._read()
        rows = [
            ("Acceptance rate (%):", f"{100 * _ratio(sum(accepted), sum(drafted)):.2f}"),
            ("Acceptance length:", f"{_ratio(sum(emitted), drafted[0]):.2f}"),
            ("Drafts:", f"{drafted[0]}"),
            ("Draft tokens:", f"{sum(drafted)}"),
            ("Accepted tokens:", f"{sum(accepted)}"),
            ("Per-position acceptance (%):", ""),
            *((f"  Position {i}:", f"{100 * _ratio(n, drafted[0]):.2f}") for i, n in enumerate(accepted)),
        ]
        lines = [f"{label:<28}{value:>10}".rstrip() for label, value in rows]
        width = max(map(len, lines))
        return "\n".join([" Speculative decoding ".center(width, "-"), *lines, "-" * width])

    def _counts_for(self, device: torch.device, num_requests: int) -> torch.Tensor:
        """Return the counters for outputs on a device; the first call makes them."""
        if self._counts is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                if self.per_request:
                    raise RuntimeError(
                        "per_request: expected an update before the capture, got none: the first update makes the counters"
                    )
                raise RuntimeError(
                    "device: AcceptanceStats needs one if its first update is captured in a CUDA graph, got None; "
                    "counters made inside a capture would start from zero at every replay"
                )
            self._counts = self._new_counts(device, num_requests if self.per_request else 1)
        if device != self._counts.device:
            raise ValueError(f"output: expected on {self._counts.device}, where the counters are, got {device}")
        return self._counts

    def _new_counts(self, device: torch.device, num_requests: int = 1) -> torch.Tensor:
        """Return zeros for accepted_i, drafted_i and emitted_i, [3, num_requests, num_draft_tokens + 1] int64.

        Without `per_request` all requests are counted as one.
        """
        with torch.inference_mode(False):  # an inference tensor could only be updated in inference mode
            return torch.zeros(3, num_requests, self.num_draft_tokens + 1, dtype=torch.int64, device=device)

    def _read(self) -> tuple[list[int], list[int], list[int]]:
        """Return accepted_i and drafted_i for every draft position, and emitted_i, waiting for the device."""
        accepted, drafted, emitted = self._total().tolist()
        return accepted[:-1], drafted[:-1], emitted

    def _total(self) -> torch.Tensor:
        """Return the counters of all requests together on the CPU, [3, num_draft_tokens + 1], waiting for the device."""
        return self._cpu_counts().sum(dim=1)

    def _cpu_counts(self) -> torch.Tensor:
        """Return the counters on the CPU, waiting for the device; zeros if there are none yet."""
        return self._new_counts(torch.device("cpu")) if self._counts is None else self._counts.cpu()


def _exclusively() -> AbstractContextManager[object]:
    """Return a lock against other threads that change counters; torch.compile cannot trace a lock, and gets none."""
    return nullcontext() if torch.compiler.is_compiling() else _LOCK


def _record(accepted: list[int], drafted: list[int]) -> AcceptanceRecord:
    """Return the record of one request, given accepted_i and drafted_i for every draft position."""
    num_steps, num_accepted, num_drafted = drafted[0], sum(accepted), sum(drafted)
    return {
        "mean_acceptance_length": 1 + _ratio(num_accepted, num_steps),
        "draft_acceptance_rate": _ratio(num_accepted, num_drafted),
        "acceptance_histogram": [more - fewer for more, fewer in pairwise([num_steps, *accepted, 0])],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": len(accepted),
    }


def _ratio(count: int, total: int) -> float:
    return count / total if total else math.nan
