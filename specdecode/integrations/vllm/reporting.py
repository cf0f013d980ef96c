"""The log lines for operators: one at the start, one in each interval.

The host waits for nothing. A step's outputs, a few bytes for each request, are kept. After many steps, or at the end of an
interval, they are added up on the device, and the sums are copied to the host. They are read once that has happened.
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdecode.batch import SamplerOutput
from specdecode.integrations.adapters import Fallbacks
from specdecode.integrations.vllm.compat import group_of

logger = logging.getLogger("vllm.specdecode")  # below vLLM's logger, so that its handlers and level hold

INTERVAL = "SPECDECODE_VLLM_LOG_INTERVAL"

MOST_KEPT = 256
"""Steps whose outputs are kept until they are added up."""

NO_FINITE_LOGIT = (
    "specdecode: %d requests had a row without a finite logit, all NaN or masked, and emitted token 0 there; "
    "VLLM_COMPUTE_NANS_IN_LOGITS=1 lets vLLM count NaN, VLLM_RAISE_ON_LOGIT_NANS=1 lets it stop"
)

GATHERED = (
    "specdecode: vLLM gathers the logits of all requests on each of %d GPUs; --enable-batch-sharded-sampling saves the "
    "gather: each GPU then verifies its own requests"
)


def log_interval() -> float:
    """Return the seconds between two lines of the log that `SPECDECODE_VLLM_LOG_INTERVAL` asks for: 60; 0: no lines.

    Raises:
        ValueError: the variable is not such a number.
    """
    value = os.environ.get(INTERVAL, "") or "60"
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{INTERVAL}: expected a number of seconds, 0 for no lines, got {value!r}")
    return seconds


class Sums(NamedTuple):
    """What steps add up to: drafts, draft tokens, accepted tokens and invalid requests, on their way to the host."""

    values: Tensor  # [4] int64, on the host
    copied: Any  # the event after the copy; None: they are there

    def are_there(self) -> bool:
        """Return whether the copy has happened, without waiting for it."""
        return self.copied is None or bool(self.copied.query())


class Report:
    """Counts steps, and logs them once in an interval.

    Args:
        left: the steps left to vLLM, by reason.
        interval: seconds between two lines; 0: no lines.
        how: what happens to the steps that are left.
        clock: seconds.
    """

    def __init__(
        self,
        left: Fallbacks,
        interval: float,
        how: str = "left to vLLM",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.left, self.interval, self.how, self.clock = left, interval, how, clock
        self.begun = self.now = clock()
        self.steps = self.steps_logged = 0
        self.left_logged: Counter[str] = Counter()
        self.kept: list[tuple[Tensor, ...]] = []
        self.sums: deque[Sums] = deque()
        self.totals = [0, 0, 0, 0]
        self.ending: tuple[float, int, Counter[str]] | None = None

    def verified(self, output: SamplerOutput) -> None:
        """Count a step that was verified here."""
        self.steps += 1
        self.kept.append((output.num_accepted, output.num_draft_tokens, output.invalid))
        if len(self.kept) == MOST_KEPT:
            self.add_up()
        self.tick()

    def tick(self) -> None:
        """End the interval if it is time, and log it once its sums are there. Called in every step."""
        while self.sums and self.sums[0].are_there():
            self.totals = [total + new for total, new in zip(self.totals, self.sums.popleft().values.tolist())]
        if self.ending is not None:
            if not self.sums:
                self.log(*self.ending)
            return
        now = self.clock()
        if now - self.begun >= (self.interval or 60):
            self.add_up()
            self.ending = now, self.steps, Counter(self.left)

    def add_up(self) -> None:
        """Add up the outputs that were kept, and start to copy the sums to the host."""
        if not self.kept:
            return
        accepted, drafted, invalid = [torch.cat(each) for each in zip(*self.kept)]
        self.kept = []
        sums = torch.stack([each.sum() for each in (drafted > 0, drafted, accepted, invalid)])
        if sums.is_cuda:
            values = torch.empty(4, dtype=torch.int64, pin_memory=True).copy_(sums, non_blocking=True)
            self.sums.append(Sums(values, recorded(sums.device)))
        else:
            self.sums.append(Sums(sums, None))

    def log(self, now: float, steps: int, left: Counter[str]) -> None:
        """Log an interval that has ended."""
        new_left, invalid = left - self.left_logged, self.totals[-1]
        if self.interval:
            logger.info("%s", self.line(now - self.begun, steps - self.steps_logged, new_left))
        if invalid:
            logger.warning(NO_FINITE_LOGIT, invalid)
        self.begun, self.steps_logged, self.left_logged = now, steps, left
        self.totals, self.ending = [0, 0, 0, 0], None

    def line(self, seconds: float, steps: int, left: Counter[str]) -> str:
        """Return the line of an interval, in which so many steps were verified."""
        drafts, _, accepted, invalid = self.totals
        length = f"{1 + accepted / drafts:.2f}" if drafts else "-"
        reasons = "; ".join(f"{steps} with {reason}" for reason, steps in left.most_common())
        return (
            f"specdecode: in {seconds:.0f} s {steps} steps verified, "
            f"{left.total()} {self.how}{reasons and f' ({reasons})'}, acceptance length {length}, {invalid} invalid requests"
        )


def recorded(device: torch.device) -> Any:
    """Return an event that is recorded in the device's current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def reports_here(sampler: Any) -> bool:
    """Return whether this rank reports: the first one, or each, if each verifies other requests."""
    group = group_of(sampler)
    return group is None or bool(group.rank_in_group == 0)


class AdvisedRunner:
    """Mixed into vLLM's V2 model runner: it logs that a flag of vLLM saves the gather of logits, where that is so."""

    # What vLLM's class has:
    model: Any
    rejection_sampler: Any
    sampler: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, with vLLM's arguments."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        group, reports = group_of(self.sampler), getattr(self.rejection_sampler, "report", None) is not None
        # Without this method of the model vLLM gathers in spite of the flag.
        can_shard = hasattr(self.model, "compute_logits_local")
        if reports and can_shard and group is not None and group.world_size > 1:
            logger.info(GATHERED, group.world_size)
