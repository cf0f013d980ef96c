"""Drawings that explain, as a fence.

`step` is one verification step, `launches` what a step launches, `schedule` the order in which rows are read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pymdownx.superfences import SuperFencesException

from docs._tools.svg import path, picture, rect, text


def figure_fence(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **kwargs: Any) -> str:
    """Return the drawing that a fence names."""
    try:
        return FIGURES[source.strip()]()
    except LookupError as error:
        raise SuperFencesException(f"figure: {error!r}; there are {sorted(FIGURES)}") from error


def step_figure() -> str:
    """Draw one verification step: three drafts, of which two are accepted."""
    drafts, emitted = ["sat", "on", "my"], ["sat", "on", "the"]
    left, pitch, width = 118, 80, 70
    columns = [left + pitch * i for i in range(4)]
    parts = []
    rows = {"the draft proposes": 48, "the target scores": 108, "verification": 168, "the step emits": 228}
    for label, y in rows.items():
        parts.append(text(left - 10, y + 5, label, "label", "end"))
    parts.append(text(left, 18, "text so far: “The cat …”", "label", "start"))
    for i, x in enumerate(columns):
        middle = x + width / 2
        accepted = i < 2
        if i < 3:
            parts += [rect(x, 32, width, 32, "box"), text(middle, 53, drafts[i])]
            parts.append(path([(middle, 64), (middle, 92)], "arrow"))
        unread = " unread" if i == 3 else ""
        parts += [rect(x, 92, width, 32, f"box row{unread}"), text(middle, 113, f"row {i}", "muted" if unread else "")]
        parts.append(path([(middle, 124), (middle, 148)], f"arrow{unread}"))
        decision = ("accepted", "good") if accepted else ("rejected", "bad") if i == 2 else ("not needed", "muted")
        parts.append(text(middle, 173, decision[0], decision[1]))
        if i < 3:
            parts.append(path([(middle, 182), (middle, 212)], "arrow"))
            look = "good" if accepted else "new"
            parts += [rect(x, 212, width, 32, f"box {look}"), text(middle, 233, emitted[i])]
            parts.append(text(middle, 260, "draft" if accepted else "recovered", f"small {look}"))
    return picture(
        parts,
        270,
        "One verification step",
        "The draft model proposed sat, on, my. The target model scored all three in one pass, which gave four rows of "
        "logits. Verification accepts sat and on, rejects my, and emits the instead, drawn from row 2. Row 3 would have "
        "given a bonus token and is not needed.",
    )


LAUNCHES = [
    ("strict, probabilistic: small batch", {0: ("read_kernel", "every row"), 3: ("emit_kernel", "decides, draws")}),
    ("the same: large batch", {0: ("read_kernel", "reads, decides"), 3: ("emit_kernel", "draws")}),
    (
        "block",
        {
            0: ("read_kernel", "every row"),
            1: ("ratio_kernel", "decides some"),
            2: ("bound_kernel", "large batch"),
            3: ("emit_kernel", "sums, draws"),
        },
    ),
    ("sample, draft", {0: ("read_kernel", "the row"), 3: ("emit_kernel", "draws")}),
]
"""Of each kind of step: its launches by column, each with what it does."""


def launches_figure() -> str:
    """Draw the launches of each kind of step, and what one leaves for the next."""
    left, pitch, width, height = 4, 110, 102, 40
    parts = [text(left + width / 2, 14, "read", "tick"), text(left + pitch * 1.5 + width / 2, 14, "search", "tick")]
    parts.append(text(left + pitch * 3 + width / 2, 14, "emit", "tick"))
    passed = ["statistics", "stops, statistics", "", "statistics"]
    for row, (title, launches) in enumerate(LAUNCHES):
        y = 40 + row * 74
        parts.append(text(left, y - 8, title, "label", "start"))
        columns = sorted(launches)
        for column, following in zip(columns, [*columns[1:], None]):
            x = left + pitch * column
            name, what = launches[column]
            dashed = " waiting" if column == 2 else ""
            parts += [rect(x, y, width, height, f"box{dashed}"), text(x + width / 2, y + 17, name)]
            parts.append(text(x + width / 2, y + 33, what, "small"))
            if following is not None:
                end = left + pitch * following
                parts.append(path([(x + width, y + height / 2), (end, y + height / 2)], "arrow"))
                parts.append(path([(end - 5, y + height / 2 - 4), (end, y + height / 2)], "arrow"))
                parts.append(path([(end - 5, y + height / 2 + 4), (end, y + height / 2)], "arrow"))
        if passed[row]:
            parts.append(text(left + pitch * 1.5 + width / 2, y + height / 2 - 6, passed[row], "small"))
    return picture(
        parts,
        40 + len(LAUNCHES) * 74 - 26,
        "The launches of a step",
        "A launch that reads leaves statistics for a launch that emits. In a large batch the first one decides too, and "
        "leaves where each request stops. Block verification has one launch between them that computes ratios and, in a "
        "large batch, another that bounds residual masses.",
    )


@dataclass
class Schedule:
    """Play the programs of the launch that reads a large batch: in which order rows are read, and which never are.

    A program reads half a row in two ticks. The GPU starts programs in order as lanes become free. One whose request is
    known to have stopped before its offset exits at once, and its lane takes the next in the same tick.
    """

    stops: tuple[int, ...] = (3, 0, 1, 2, 0, 3)  # the offset that each request stops at
    offsets: int = 4  # three drafts and the bonus row
    halves: int = 2
    lanes: int = 10
    ticks: int = 2
    # Of (request, offset, half): "reading", "read" or "left".
    states: dict[tuple[int, int, int], str] = field(default_factory=dict)
    # Of a request: the offset that it is known to stop at.
    posted: dict[int, int] = field(default_factory=dict)

    def frames(self) -> list[tuple[dict[tuple[int, int, int], str], dict[int, int]]]:
        """Return the states and the stops that are posted after each tick."""
        waiting = [
            (request, offset, half)
            for offset in range(self.offsets)
            for request in range(len(self.stops))
            for half in range(self.halves)
        ]
        running: dict[tuple[int, int, int], int] = {}
        result = []
        while waiting or running:
            while waiting and len(running) < self.lanes:
                program = waiting.pop(0)
                if program[1] > self.posted.get(program[0], self.offsets):
                    self.states[program] = "left"
                else:
                    self.states[program] = "reading"
                    running[program] = self.ticks
            result.append((dict(self.states), dict(self.posted)))
            for program in list(running):
                running[program] -= 1
                if running[program] == 0:
                    del running[program]
                    self.states[program] = "read"
                    request, offset, _ = program
                    done = all(self.states.get((request, offset, half)) == "read" for half in range(self.halves))
                    if done and offset == self.stops[request]:
                        self.posted[request] = offset
        result.append((dict(self.states), dict(self.posted)))
        return [frame for i, frame in enumerate(result) if i == 0 or frame != result[i - 1]]


def schedule_figure() -> str:
    """Draw the order of reading, one picture a tick, to be stepped through."""
    schedule = Schedule()
    frames = schedule.frames()
    inputs, pictures = [], []
    for number, (states, posted) in enumerate(frames):
        checked = " checked" if number == 0 else ""
        button = f'<input type="radio" name="schedule" value="{number}"{checked}/>'
        inputs.append(f"<label>{button}<span>{number + 1}</span></label>")
        pictures.append(f"<div>{schedule_frame(schedule, states, posted, number, len(frames))}</div>")
    return (
        '<div class="steps"><fieldset><legend>Moment</legend>'
        f'{"".join(inputs)}</fieldset><div class="frames">{"".join(pictures)}</div></div>'
    )


def schedule_frame(
    schedule: Schedule, states: dict[tuple[int, int, int], str], posted: dict[int, int], number: int, total: int
) -> str:
    """Draw the rows of all requests at one moment."""
    left, top, pitch_x, pitch_y, width, height = 92, 44, 86, 36, 78, 28
    parts = []
    for offset in range(schedule.offsets):
        name = f"draft {offset}" if offset < schedule.offsets - 1 else "bonus"
        parts.append(text(left + pitch_x * offset + width / 2, 34, name, "tick"))
    for request, stop in enumerate(schedule.stops):
        y = top + pitch_y * request
        parts.append(text(left - 10, y + 19, f"request {request}", "label", "end"))
        for offset in range(schedule.offsets):
            x = left + pitch_x * offset
            for half in range(schedule.halves):
                state = states.get((request, offset, half), "waiting")
                parts.append(rect(x + half * width / 2, y, width / 2 - 2, height, f"box {state}", 2))
            if posted.get(request) == offset:
                final = offset == schedule.offsets - 1
                parts.append(text(x + width / 2 - 1, y + 20, "emits" if final else "stop", "verdict"))
            elif (
                all(states.get((request, offset, half)) == "read" for half in range(schedule.halves)) and offset < stop
            ):
                parts.append(text(x + width / 2 - 1, y + 20, "accepted", "verdict"))
    count = {state: sum(value == state for value in states.values()) for state in ("reading", "read", "left")}
    programs = len(schedule.stops) * schedule.offsets * schedule.halves
    caption = (
        f"{count['read']} of {programs} half rows read, {count['reading']} being read, {count['left']} left unread"
    )
    y = top + pitch_y * len(schedule.stops) + 18
    parts.append(text(left - 82, y, caption, "label", "start"))
    return picture(parts, y + 10, f"Which rows are read, moment {number + 1} of {total}", caption)


FIGURES: dict[str, Callable[[], str]] = {"step": step_figure, "launches": launches_figure, "schedule": schedule_figure}
