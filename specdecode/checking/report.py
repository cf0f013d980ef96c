"""The report of a run: a table that can be pasted into a bug report."""

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from specdecode.checking.cases import DEFAULT_REQUESTS, GREEDY

WIDTH = 110


@dataclass(frozen=True)
class Check:
    """One question and its answer."""

    name: str
    passed: bool
    p_value: float | None
    """None: it was decided without statistics."""

    detail: str
    answered: bool = True
    """False: there were too few requests to test anything."""

    def lines(self, width: int) -> list[str]:
        """Return the lines of the table, with the name padded to a width."""
        p_value = "" if self.p_value is None or not self.answered else f"p = {self.p_value:.2g}"
        first, *others = self.detail.splitlines() or [""]
        result = "FAIL" if not self.passed else "ok  " if self.answered else "--  "
        line = f"{result}  {self.name:{width}}  {p_value:12}  {first}"
        return [line.rstrip(), *(f"      {line}" for line in others)]


@dataclass(frozen=True)
class Report:
    """The answers of one run.

    Attributes:
        checks: each question, most telling first.
        suspects: ids of known mistakes that fit what was seen, likeliest first.
        notes: what is reported without being required, and what was not asked.
        subject: what was checked.
        settings: the arguments of the run.
        threshold: a check fails if its p-value is below.
        seconds: how long it took.
        lossiness: lower bound, estimate and upper bound of the total variation that the verifier adds to a token, with
            probability .999 each; None without `allow`.
        nan: the first place in the caller's code that computed NaN in a check that failed, or "".
    """

    checks: list[Check]
    suspects: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    subject: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    threshold: float = 0.0
    seconds: float = 0.0
    nan: str = ""
    lossiness: tuple[float, float, float] | None = None

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def raise_if_wrong(self) -> None:
        """Raise an exception with the report as its text if a check failed.

        Raises:
            AssertionError: a check failed.
        """
        if not self.passed:
            raise AssertionError(str(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary that JSON can hold."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        """Return the table."""
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [
            f"specdecode check {self.subject}: {'right' if self.passed else 'WRONG'}",
            ", ".join(
                f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
                for name, value in self.settings.items()
            ),
            "",
        ]
        for check in self.checks:
            lines += check.lines(width)
        lines.append("")
        if self.nan:
            lines += wrapped(f"The code that was called computed NaN: {self.nan}.")
        lines += wrapped(self.verdict())
        lines += self.suspect_lines()
        for note in self.notes:
            lines += wrapped(f"Note: {note}", "      ", first="")
        return "\n".join(lines)

    def suspect_lines(self) -> list[str]:
        """Return the lines that describe the suspects, or say that a failure has none."""
        if self.suspects:
            from specdecode.checking.mistakes import MISTAKES  # not where a report is only read

            lines = ["", "This looks like:"]
            for number, name in enumerate(self.suspects, 1):
                mistake = MISTAKES[name]
                lines += wrapped(f"{number}. {name}: {mistake.sentence}", "   ", first="")
                lines += wrapped(f"Remedy: {mistake.remedy} Seen: {mistake.source}.", "   ")
            statistical = any(not check.passed and check.p_value is not None for check in self.checks)
            if statistical and self.settings.get("requests", DEFAULT_REQUESTS) < DEFAULT_REQUESTS:
                lines.append(f"Names are hints with fewer than the default {DEFAULT_REQUESTS:,} requests.")
            return lines
        if any(not check.passed and (check.p_value is not None or check.name == GREEDY) for check in self.checks):
            return ["", "No mistake in the list fits what was seen."]
        return []

    def verdict(self) -> str:
        """Return the sentences on false alarms and on errors that may pass."""
        if not self.passed and all(check.p_value is None for check in self.checks):
            return "No statistics are needed to see this, and nothing else was asked."
        alarm = f"A check fails if its p-value is below {self.threshold:.1g}. A right verifier fails once in a million runs."
        if self.lossiness is not None:
            return (
                f"A check fails if its p-value is below {self.threshold:.1g}: a total variation of more than "
                f"{self.settings['allow']:g} is certain, or requests are not independent. Bounds hold with probability .999."
            )
        if not self.passed:
            return alarm
        seen = "An error of the total variation in the table is seen with probability .999; a smaller one may pass."
        return f"{alarm} {seen}"


def wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """Break a text into lines."""
    start = indent if first is None else first
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
