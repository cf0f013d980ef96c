"""The common part of the plug-ins of serving engines: calls, warm-up, fallbacks, and the metrics in the log.

A plug-in adapts an engine's step to a sampler's call by three functions: `as_call` translates the engine's arguments,
`why_not` returns the reason to leave a step to the engine, or None, and `as_result` translates the output.
"""

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from specdecode import RejectionSampler, SamplerOutput, Sampling, backends
from specdecode.batch import Packing, Truncation, VerificationBatch

EngineMethod = Literal["probabilistic", "block", "strict"]

MOST_OUTPUTS = 256
"""Steps whose outputs `StepMetrics` keeps before it adds them up."""


def method_of(switch: str) -> EngineMethod:
    """Return the method that an environment variable names.

    Raises:
        ValueError: the variable names no method.
    """
    value = os.environ.get(switch, "")
    if value not in get_args(EngineMethod):
        choices = ", ".join(map(repr, get_args(EngineMethod)))
        raise ValueError(f"{switch}: expected one of {choices}, or unset to leave the engine as it is, got {value!r}")
    return cast(EngineMethod, value)


# ---- Fallbacks -------------------------------------------------------------------------------------------------------


def switched_on(values: Mapping[str, object]) -> list[str]:
    """Return the names whose value is neither None, False nor 0."""
    return [name for name, value in values.items() if value is not None and not is_zero(value)]


def is_zero(value: object) -> bool:
    """Return whether a value is 0 or False."""
    return isinstance(value, (int, float)) and value == 0


def unknown_reason(what: str, names: Iterable[str]) -> str | None:
    """Return the reason for a fallback if an engine has names that are unknown here, or None."""
    found = ", ".join(names)
    return f"{what} this version of specdecode does not know ({found})" if found else None


class Fallbacks(Counter[str]):
    """Number of steps left to the engine, by reason. The 1st, 10th, 100th, ... step of each reason is logged.

    Example:
        >>> import logging
        >>> from specdecode.integrations.engine import Fallbacks
        >>> fallbacks = Fallbacks(logging.getLogger("example"))
        >>> fallbacks.add("watermarks", "vLLM verifies such a step")
        >>> fallbacks.add("watermarks", "vLLM verifies such a step")
        >>> fallbacks
        Fallbacks({'watermarks': 2})
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.logger = logger

    def add(self, reason: str, consequence: str) -> None:
        """Count one step; log the 1st, 10th, 100th, ... of its reason, and the consequence."""
        self[reason] += 1
        # Not only the first: an engine's own warm-up makes steps with every feature before the first request.
        if str(self[reason]).strip("0") == "1":
            self.logger.warning("specdecode: step %d with %s: %s", self[reason], reason, consequence)


# ---- Calls -----------------------------------------------------------------------------------------------------------


def verify(sampler: RejectionSampler, call: dict[str, Any], kind: Hashable, checked: set[Hashable]) -> SamplerOutput:
    """Return the output of a call; its arguments are checked only in the first step of each kind.

    An engine's tensors have the same types and matching shapes in all steps of a kind.

    Args:
        sampler: verifies.
        call: the arguments of `sampler.packed` if they have `row_starts`, otherwise of `sampler`.
        kind: the same for all steps with arguments of the same types.
        checked: the kinds of earlier steps; `kind` is added.
    """
    if kind not in checked:
        checked.add(kind)
        return sampler.packed(**call) if "row_starts" in call else sampler(**call)
    batch = unchecked(**call)
    output: SamplerOutput = backends.verifier_of(sampler.backend, sampler.method, batch).verify(
        sampler.method, batch, None
    )
    return output


def unchecked(
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_sampling: Sampling | None = None,
    row_starts: Tensor | None = None,
    num_draft_tokens: int = 0,
    slots: Tensor | None = None,
    row_positions: Tensor | None = None,
    **others: Any,
) -> VerificationBatch:
    """Return the batch that a sampler passes to a backend after checking these arguments.

    The arguments are as for `check_verification`. All or none of `top_k`, `top_p` and `min_p` are given. `draft_sampling`
    has only a temperature. `others` are fields of the batch.
    """
    absent = {"draft_logits": None, "draft_logsumexp": None, "positions": None}
    rows = None
    if row_starts is not None:
        rows = Packing(row_starts, num_draft_tokens, slots, len(temperature), False, row_positions)
    return VerificationBatch(
        **absent | others,
        temperature=temperature,
        truncation=None if top_p is None else Truncation(top_k, top_p, min_p),
        draft_temperature=None if draft_sampling is None else draft_sampling.temperature,
        packing=rows,
    )


def warm_up(
    sampler: RejectionSampler, calls: Sequence[dict[str, Any]], share: Callable[[], tuple[Any, ...]] = tuple
) -> None:
    """Compile the kernels of some calls before a server needs them; on a GPU, all of them in parallel.

    Args:
        sampler: makes the calls.
        calls: arguments of `sampler.warmup`.
        share: returns the fields of a `Share`, if several processes need the same kernels.
    """
    warmups = [functools.partial(sampler.warmup, **call) for call in calls]
    if calls and calls[0]["target_logits"].is_cuda:
        kernels = backends.kernels()
        kernels.compile_ahead(warmups, kernels.Share(*share()))
    else:
        for warmup in warmups:
            warmup()


@functools.lru_cache(maxsize=1024)
def first_integers(count: int, device: torch.device) -> Tensor:
    """Return the integers 0 to count - 1, made once."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


@functools.lru_cache(maxsize=1024)
def zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return zeros in float32, made once."""
    with torch.inference_mode(False):
        return torch.zeros(shape, device=device)


# ---- Metrics in the log ----------------------------------------------------------------------------------------------


def log_interval(variable: str) -> float:
    """Return the seconds between two log lines, set by an environment variable; 60 by default, 0 for no lines.

    Raises:
        ValueError: the variable is not a number >= 0.
    """
    value = os.environ.get(variable, "") or "60"
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{variable}: expected a number of seconds, 0 for no lines, got {value!r}")
    return seconds


class Interval(NamedTuple):
    """The counts of an interval that has ended."""

    seconds: float
    steps: int  # that were verified here
    left: Counter[str]  # steps left to the engine, by reason
    sums: Tensor  # [3] int64, on the host: requests with drafts, accepted drafts, invalid requests
    copied: Any = None  # the event recorded after the copy of the sums; None: no copy

    def line(self, how: str) -> str:
        """Return the log line, with the words `how` about the steps in `left`."""
        drafts, accepted, invalid = self.sums.tolist()
        length = f"{1 + accepted / drafts:.2f}" if drafts else "-"
        reasons = "; ".join(f"{steps} with {reason}" for reason, steps in self.left.most_common())
        return (
            f"specdecode: in {self.seconds:.0f} s {self.steps} steps verified, "
            f"{self.left.total()} {how}{reasons and f' ({reasons})'}, acceptance length {length}, {invalid} invalid requests"
        )


class StepMetrics:
    """Counts steps, and logs them once in an interval.

    The host never waits: the outputs of steps, a few bytes for each request, are kept and added up on the device, and the
    sums are logged in the first step after their copy to the host has completed.

    Args:
        fallbacks: the steps left to the engine; lines go to their logger.
        interval: seconds between two lines; 0: no lines.
        how: the words of the line about the steps in `fallbacks`.
        invalid_warning: the format of the warning of invalid requests, which takes their number.
        clock: seconds.
    """

    def __init__(
        self,
        fallbacks: Fallbacks,
        interval: float,
        how: str,
        invalid_warning: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fallbacks, self.interval, self.how, self.invalid_warning = fallbacks, interval, how, invalid_warning
        self.clock, self.begun = clock, clock()
        self.steps, self.left_before = 0, Counter[str]()
        self.outputs: list[tuple[Tensor, ...]] = []
        self.sums: Tensor | None = None
        self.ended: Interval | None = None
        """The interval whose sums are being copied."""

    def verified(self, output: SamplerOutput) -> None:
        """Count a step that was verified here."""
        self.steps += 1
        self.outputs.append((output.num_draft_tokens, output.num_accepted, output.invalid))
        if len(self.outputs) == MOST_OUTPUTS:
            self.add_up()
        self.tick()

    def tick(self) -> None:
        """Log the ended interval once its sums are copied; end the current interval if it is time. Called in every step."""
        if self.ended is not None and (self.ended.copied is None or self.ended.copied.query()):
            self.log(self.ended)
            self.ended = None
        now = self.clock()
        if self.ended is None and now - self.begun >= (self.interval or 60):
            self.ended = self.end(now)

    def add_up(self) -> None:
        """Replace the outputs by their sums, on the device."""
        if self.outputs:
            drafted, accepted, invalid = [torch.cat(each) for each in zip(*self.outputs)]
            new = torch.stack([each.sum() for each in (drafted > 0, accepted, invalid)])
            self.sums = new if self.sums is None else self.sums + new
            self.outputs = []

    def end(self, now: float) -> Interval:
        """Return the interval until now, and begin the next one."""
        self.add_up()
        sums, copied = torch.zeros(3, dtype=torch.int64) if self.sums is None else self.sums, None
        if sums.is_cuda:
            sums = torch.empty(3, dtype=torch.int64, pin_memory=True).copy_(sums, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        ended = Interval(now - self.begun, self.steps, self.fallbacks - self.left_before, sums, copied)
        self.begun, self.steps, self.sums, self.left_before = now, 0, None, Counter(self.fallbacks)
        return ended

    def log(self, interval: Interval) -> None:
        """Log the line of an interval, and a warning if requests in it were invalid."""
        if self.interval:
            self.fallbacks.logger.info("%s", interval.line(self.how))
        if invalid := int(interval.sums[2]):
            self.fallbacks.logger.warning(self.invalid_warning, invalid)
