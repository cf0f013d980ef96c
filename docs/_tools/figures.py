"""Drawings that explain, as a fence.

`step` is one verification step, `launches` the launches of a step, `schedule` the order in which rows are read, `packed`
the rows and slots of requests, `shards` a step on two ranks, `level` the candidates for the last kept token.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from pymdownx.superfences import SuperFencesException

from docs._tools.svg import WIDTH, mark, path, picture, rect, text
from reference import greedy  # noqa: TID251 - the reference computes what figures show
from reference.block import running_ratio  # noqa: TID251
from reference.oracle import accepts  # noqa: TID251
from reference.philox import Domain, uniform  # noqa: TID251
from reference.probabilistic import acceptance_probability, residual  # noqa: TID251
from reference.truncation import token_order  # noqa: TID251


def figure_fence(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **kwargs: Any) -> str:
    """Return the drawing that a fence names."""
    try:
        return FIGURES[source.strip()]()
    except LookupError as error:
        raise SuperFencesException(f"figure: {error!r}; there are {sorted(FIGURES)}") from error


def step_figure() -> str:
    """Draw one verification step: three drafts, two of them accepted."""
    drafts, emitted = ["sat", "on", "my"], ["sat", "on", "the"]
    left, pitch, width = 64, 74, 66
    columns = [left + pitch * i for i in range(4)]
    parts = []
    rows = {"draft\nproposes": 48, "target\nscores": 108, "verified": 168, "step\nemits": 228}
    for label, y in rows.items():
        parts.append(text(0, y + 5, label, "label", "start"))
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
    ("strict, probabilistic: small batch", {0: ("read", "every row"), 4: ("emit", "decides")}),
    ("the same: large batch", {0: ("read", "decides"), 4: ("emit", "one token")}),
    (
        "block",
        {
            0: ("read", "every row"),
            1: ("ratio", "p / q"),
            2: ("decide", "most"),
            3: ("sum", "the rest"),
            4: ("emit", "decides"),
        },
    ),
    ("sample, draft", {0: ("read", "the row"), 4: ("emit", "one token")}),
]
"""The kinds of steps; for each, the name and the task of its launches, by column."""


def launches_figure() -> str:
    """Draw the launches of each kind of step, and their results for the next launch."""
    left, pitch, width, height = 1, 73, 64, 40
    parts = [text(left + width / 2, 14, "read", "tick"), text(left + pitch * 2 + width / 2, 14, "decide", "tick")]
    parts.append(text(left + pitch * 4 + width / 2, 14, "emit", "tick"))
    passed = ["statistics", "rejections, statistics", "", "statistics"]
    for row, (title, launches) in enumerate(LAUNCHES):
        y = 40 + row * 74
        parts.append(text(left, y - 8, title, "label", "start"))
        columns = sorted(launches)
        for column, following in zip(columns, [*columns[1:], None]):
            x = left + pitch * column
            name, what = launches[column]
            parts += [rect(x, y, width, height, "box"), text(x + width / 2, y + 17, name)]
            parts.append(text(x + width / 2, y + 33, what, "small"))
            if following is not None:
                end = left + pitch * following
                parts.append(path([(x + width, y + height / 2), (end, y + height / 2)], "arrow"))
                parts.append(path([(end - 5, y + height / 2 - 4), (end, y + height / 2)], "arrow"))
                parts.append(path([(end - 5, y + height / 2 + 4), (end, y + height / 2)], "arrow"))
        if passed[row]:
            parts.append(text(left + pitch * 2 + width / 2, y + height / 2 - 6, passed[row], "small"))
    return picture(
        parts,
        40 + len(LAUNCHES) * 74 - 26,
        "The launches of a step",
        "A launch that reads leaves statistics for a launch that emits. In a large batch the first one decides too, and "
        "publishes the first rejected row of each request. Block verification has three launches between them: one "
        "computes ratios, one decides about most drafts, one sums the residuals that decide about the rest.",
    )


@dataclass
class Schedule:
    """Simulate the launch that reads a large batch: the order in which rows are read, and the rows that are not read.

    A program reads half a row in two ticks. The GPU starts programs in order as lanes become free. A program exits at once
    if an earlier row of its request is known to be rejected, and its lane starts the next program in the same tick.
    """

    first_rejected: tuple[int, ...] = (3, 0, 1, 2, 0, 3)  # the offset of the first rejected row of each request
    offsets: int = 4  # three drafts and the bonus row
    halves: int = 2
    lanes: int = 10
    ticks: int = 2
    # (request, offset, half): "reading", "read" or "left"
    states: dict[tuple[int, int, int], str] = field(default_factory=dict)
    # request: its first rejected row, once published
    published: dict[int, int] = field(default_factory=dict)

    def frames(self) -> list[tuple[dict[tuple[int, int, int], str], dict[int, int]]]:
        """Return the states and the published rejections after each tick."""
        waiting = [
            (request, offset, half)
            for offset in range(self.offsets)
            for request in range(len(self.first_rejected))
            for half in range(self.halves)
        ]
        running: dict[tuple[int, int, int], int] = {}
        result = []
        while waiting or running:
            while waiting and len(running) < self.lanes:
                program = waiting.pop(0)
                if program[1] > self.published.get(program[0], self.offsets):
                    self.states[program] = "left"
                else:
                    self.states[program] = "reading"
                    running[program] = self.ticks
            result.append((dict(self.states), dict(self.published)))
            for program in list(running):
                running[program] -= 1
                if running[program] == 0:
                    del running[program]
                    self.states[program] = "read"
                    request, offset, _ = program
                    done = all(self.states.get((request, offset, half)) == "read" for half in range(self.halves))
                    if done and offset == self.first_rejected[request]:
                        self.published[request] = offset
        result.append((dict(self.states), dict(self.published)))
        return [frame for i, frame in enumerate(result) if i == 0 or frame != result[i - 1]]


def schedule_figure() -> str:
    """Draw the order of reading, one picture a tick, to be stepped through."""
    schedule = Schedule()
    frames = schedule.frames()
    inputs, pictures = [], []
    for number, (states, published) in enumerate(frames):
        checked = " checked" if number == 0 else ""
        button = f'<input type="radio" name="schedule" value="{number}"{checked}/>'
        inputs.append(f"<label>{button}<span>{number + 1}</span></label>")
        pictures.append(f"<div>{schedule_frame(schedule, states, published, number, len(frames))}</div>")
    return (
        '<div class="steps"><fieldset><legend>Moment</legend>'
        f'{"".join(inputs)}</fieldset><div class="frames">{"".join(pictures)}</div></div>'
    )


def schedule_frame(
    schedule: Schedule, states: dict[tuple[int, int, int], str], published: dict[int, int], number: int, total: int
) -> str:
    """Draw the rows of all requests at one moment."""
    left, top, pitch_x, pitch_y, width, height = 68, 44, 73, 36, 67, 28
    parts = []
    for offset in range(schedule.offsets):
        name = f"draft {offset}" if offset < schedule.offsets - 1 else "bonus"
        parts.append(text(left + pitch_x * offset + width / 2, 34, name, "tick"))
    for request, stop in enumerate(schedule.first_rejected):
        y = top + pitch_y * request
        parts.append(text(0, y + 19, f"request {request}", "label", "start"))
        for offset in range(schedule.offsets):
            x = left + pitch_x * offset
            for half in range(schedule.halves):
                state = states.get((request, offset, half), "waiting")
                parts.append(rect(x + half * width / 2, y, width / 2 - 2, height, f"box {state}", 2))
            if published.get(request) == offset:
                final = offset == schedule.offsets - 1
                parts.append(text(x + width / 2 - 1, y + 20, "emits" if final else "stop", "verdict"))
            elif (
                all(states.get((request, offset, half)) == "read" for half in range(schedule.halves)) and offset < stop
            ):
                parts.append(text(x + width / 2 - 1, y + 20, "accepted", "verdict"))
    count = {state: sum(value == state for value in states.values()) for state in ("reading", "read", "left")}
    programs = len(schedule.first_rejected) * schedule.offsets * schedule.halves
    caption = (
        f"{count['read']} of {programs} half rows read,\n{count['reading']} being read, {count['left']} left unread"
    )
    y = top + pitch_y * len(schedule.first_rejected) + 18
    parts.append(text(0, y + 6, caption, "label", "start"))
    return picture(parts, y + 20, f"Which rows are read, moment {number + 1} of {total}", caption.replace("\n", " "))


def packed_figure() -> str:
    """Draw a packed call of three requests: the request of each row, and the slot of each request."""
    row_starts, slots, num_slots = [0, 4, 5, 8], [3, 0, 4], 5
    left, top, pitch, height = 1, 58, 44.5, 30
    starts = ", ".join(map(str, row_starts))
    parts = [text(left, 21, f"by row: target_logits, draft_token_ids\nrow_starts = [{starts}]", "label", "start")]
    for request, (first, end) in enumerate(itertools.pairwise(row_starts)):
        middle = left + pitch * (first + end) / 2
        for row in range(first, end):
            x = left + pitch * row
            parts.append(rect(x, top, pitch - 4, height, "box row" if row < end - 1 else "box good"))
            parts.append(text(x + pitch / 2 - 2, top + 19, "draft" if row < end - 1 else "bonus", "small"))
            parts.append(text(x + pitch / 2 - 2, top - 6, str(row), "tick"))
        parts.append(path([(left + pitch * first, top + 38), (left + pitch * end - 4, top + 38)], "axis"))
        parts.append(text(middle - 2, top + 54, f"request {request}", "small"))
        slot_x = left + 72 * slots[request] + 34
        parts.append(path([(middle - 2, top + 60), (slot_x, top + 126)], "arrow"))
    parts.append(text(left + 146, top + 118, f"slots = {slots}", "label"))
    for slot in range(num_slots):
        x, unused = left + 72 * slot, "" if slot in slots else " unread"
        parts.append(rect(x, top + 126, 68, height, f"box read{unused}"))
        parts.append(text(x + 34, top + 145, f"slot {slot}", "muted" if unused else "small"))
    by_slot = "by slot: draft_logits, draft_logsumexp,\ntemperature, seeds, top_k, …"
    parts.append(text(left, top + 183, by_slot, "label", "start"))
    return picture(
        parts,
        top + 198,
        "A packed call",
        "Three requests with three, no and two drafts have eight rows. Request 0 has rows 0 to 3, request 1 row 4, "
        "request 2 rows 5 to 7, as row_starts = 0, 4, 5, 8 says. The last row of each gives its bonus token. Their "
        "state is in slots 3, 0 and 4; slots 1 and 2 are not used.",
    )


def timeline_figure() -> str:
    """Draw equal times with and without drafts. A draft is a tenth as long as a call of the target."""
    left, call, height = 1, 89, 40
    parts = [text(left, 14, "one token for each call of the target: 4 tokens", "label", "start")]
    for i, word in enumerate(["sat", "on", "the", "mat"]):
        x = left + call * i
        parts += [rect(x, 22, call, height, "box row"), text(x + call / 2, 46, "target\n1 row", "small")]
        parts.append(text(x + call / 2, 80, word))
    parts.append(text(left, 116, "three drafts before each call: 8 tokens", "label", "start"))
    steps = [(["sat", "on"], "the"), ([], "mat"), (["and", "then", "it"], "slept")]
    for i, (accepted, last) in enumerate(steps):
        x = left + 1.3 * call * i
        parts += [rect(x + 0.1 * call * draft, 124, 0.1 * call, height, "box read", 2) for draft in range(3)]
        x += 0.3 * call
        parts += [rect(x, 124, call, height, "box row"), text(x + call / 2, 148, "target\n4 rows", "small")]
        words = [*((word, "good") for word in accepted), (last, "new")]
        parts.append(colored_text(x + call * (0.35 if i == 2 else 0.5), 182, words))
    end = left + 4 * call
    parts += [path([(left, 200), (end, 200)], "arrow"), path([(end - 6, 196), (end, 200), (end - 6, 204)], "arrow")]
    parts.append(text(end, 218, "time", "label", "end"))
    parts.append(rect(left, 231, 10.6, 11, "box read", 2))
    parts.append(text(left + 16, 241, "a draft", "small", "start"))
    parts.append(text(left + 88, 241, "accepted", "small good", "start"))
    parts.append(text(left + 170, 241, "recovered or bonus token", "small new", "start"))
    return picture(
        parts,
        248,
        "The same time with and without drafts",
        "Four calls of the target without drafts give four tokens: sat, on, the, mat. With three drafts before each call, "
        "three calls fit into that time. The first accepts sat and on and adds the; the second accepts nothing and adds "
        "mat; the third accepts and, then, it and adds slept. That is eight tokens. The lengths are schematic.",
    )


def runs_figure() -> str:
    """Draw ten drafts with the frequencies of q, the outcome of each, and the emitted tokens with the frequencies of p."""
    words = ["the", "a", "my"]
    p, q, runs = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6]), 10
    accepted = [runs * q[i] * acceptance_probability(p[i], q[i]) for i in range(3)]
    rejected = runs * q - accepted
    recovered = residual(p, q) * rejected.sum()
    kept = [word for word, count in zip(words, accepted) for _ in range(round(count))]
    lost = [word for word, count in zip(words, rejected) for _ in range(round(count))]
    new = [word for word, count in zip(words, recovered) for _ in range(round(count))]
    drafts, emitted = kept + lost, kept + new
    left, pitch, width = 3, 35.2, 32
    gap = 6  # between the accepted and the rejected
    parts = [text(left, 13, f"drafted as q says: {count_words(drafts, words)}", "label", "start")]
    for i, (draft, word) in enumerate(zip(drafts, emitted)):
        good = i < len(kept)
        x = left + pitch * i + (0 if good else gap) - gap / 2
        middle = x + width / 2
        parts += [rect(x, 22, width, 28, "box"), text(middle, 41, draft)]
        parts.append(path([(middle, 50), (middle, 60)], "arrow"))
        parts.append(path([(middle, 78), (middle, 88)], "arrow"))
        parts += [rect(x, 88, width, 28, f"box {'good' if good else 'new'}"), text(middle, 107, word)]
    split = left + pitch * len(kept) - gap / 2
    parts.append(text(split / 2, 74, f"{len(kept)} accepted", "good"))
    parts.append(text((split + gap + WIDTH) / 2, 74, f"{len(lost)} rejected", "bad"))
    parts.append(text(split / 2, 132, "the drafts", "small good"))
    parts.append(text((split + gap + WIDTH) / 2, 132, "recovered", "small new"))
    parts.append(text(left, 156, f"emitted as p says: {count_words(emitted, words)}", "label", "start"))
    return picture(
        parts,
        164,
        "Ten drafts, on average",
        f"Drafted: {count_words(drafts, words)}. Accepted: {count_words(kept, words)}. The rejected ones are replaced by "
        f"{count_words(new, words)}. Emitted: {count_words(emitted, words)}.",
    )


def count_words(found: list[str], words: list[str]) -> str:
    """Return the count of each word as text."""
    return ", ".join(f"{found.count(word)} “{word}”" for word in words if word in found)


def greedy_figure() -> str:
    """Draw greedy verification of the drafts 1, 2 over the rows of the example by hand."""
    rows, drafts = [[0.0, 9.0, 1.0], [5.0, 0.0, 1.0], [0.0, 1.0, 2.0]], [1, 2]
    emitted = greedy.verify(rows, drafts)
    left, pitch, width, base = 66, 98, 92, 76
    parts = []
    labels = {"target's\nlogits": 56, "argmax": 116, "draft": 152, "compare": 186, "emitted": 222}
    for label, y in labels.items():
        parts.append(text(0, y, label, "label", "start"))
    for i, row in enumerate(rows):
        x, middle = left + pitch * i, left + pitch * i + width / 2
        used = i < len(emitted)
        best = greedy.argmax(row)
        parts.append(text(middle, 14, f"row {i}" if used else "not needed", "small" if used else "small muted"))
        parts.append(path([(x, base), (x + width, base)], "axis"))
        for token, logit in enumerate(row):
            height = 3 + 5.2 * logit
            look = " new" if token == best and used else ""
            parts.append(rect(x + 8 + 30 * token, base - height, 20, height, f"bar{look}", 1))
            parts.append(text(x + 18 + 30 * token, base + 14, str(token), "tick"))
        if not used:
            continue
        parts += [rect(middle - 18, 98, 36, 26, "box new"), text(middle, 116, str(best))]
        parts += [rect(middle - 18, 134, 36, 26, "box"), text(middle, 152, str(drafts[i]))]
        same = drafts[i] == best
        parts.append(text(middle, 186, "same" if same else "first difference", "good" if same else "bad"))
        look = "good" if same else "new"
        parts += [rect(middle - 18, 204, 36, 26, f"box {look}"), text(middle, 222, str(emitted[i]))]
        parts.append(text(middle, 246, "the draft" if same else "the argmax", f"small {look}"))
    return picture(
        parts,
        254,
        "Greedy verification of the drafts 1, 2",
        "Three rows of logits. The argmax of row 0 is 1, the same as the first draft. The argmax of row 1 is 0, the draft "
        f"is 2: the first difference. Emitted are {', '.join(map(str, emitted))}. Row 2 is not needed.",
    )


def race_figure() -> str:
    """Draw two races: one where target and draft select the same token, one where they differ."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    left, right, top, pitch, panel, seed = 92, 344, 46, 40, 160, 0
    parts, told = [], []
    for number, position in enumerate(RACES):
        exponentials = -np.log1p(-uniform(seed, position, np.arange(3), Domain.SELECT_TOKEN))
        y = top + panel * number
        lines = {"target: E / p": exponentials / p, "the noise: E": exponentials, "draft: E / q": exponentials / q}
        picks = int(np.argmin(exponentials / p)), int(np.argmin(exponentials / q))
        verdict = f"both select token {picks[0]}" if picks[0] == picks[1] else "they select different tokens"
        parts.append(
            text(0, y - 32, f"position {position}: {verdict}", "good" if picks[0] == picks[1] else "bad", "start")
        )
        scale = (right - left) / max(times.max() for times in lines.values())
        placed = [[left + scale * time for time in times] for times in lines.values()]
        for token in range(3):
            steps = [(placed[line][token], y + pitch * line) for line in range(3)]
            parts.append(path(steps, f"line thread s{token + 1}"))
        for line, label in enumerate(lines):
            height = y + pitch * line
            parts.append(text(0, height + 4, label, "label", "start"))
            parts.append(path([(left, height), (right, height)], "axis"))
            for token in range(3):
                x = placed[line][token]
                first = line != 1 and token == picks[line // 2]
                if first:
                    parts.append(f'<circle cx="{x:.1f}" cy="{height:.1f}" r="9" class="ring"/>')
                parts.append(mark(x, height, f"s{token + 1}"))
                if line == 1:
                    continue
                parts.append(text(x, height + (-12 if line == 0 else 22), str(token), "verdict" if first else "small"))
        told.append(
            f"Position {position}: E is {numbers(exponentials)}, E / p is {numbers(exponentials / p)}, E / q is "
            f"{numbers(exponentials / q)}; target and draft select {picks[0]} and {picks[1]}"
        )
    return picture(
        parts,
        top + panel * (len(RACES) - 1) + 2 * pitch + 32,
        "The same noise for target and draft",
        f"Each takes the token with the smallest time. {'. '.join(told)}.",
    )


RACES = (30, 53)
"""Positions whose noise shows both outcomes."""


def numbers(values: Any) -> str:
    """Return numbers as text."""
    return ", ".join(f"{value:.2f}" for value in values)


def strict_step_figure() -> str:
    """Draw one step of strict verification: the noise of each position determines the draft and the target's own sample."""
    drafts, samples = ["sat", "on", "my"], ["sat", "on", "the"]
    left, pitch, width = 64, 74, 66
    parts = []
    rows = {
        "draft,\nfrom q": 42,
        "noise, by\nposition": 96,
        "target's\nsample": 150,
        "compare": 190,
        "step\nemits": 236,
    }
    for label, y in rows.items():
        parts.append(text(0, y + 5, label, "label", "start"))
    for i in range(4):
        x, middle = left + pitch * i, left + pitch * i + width / 2
        last = i == 3
        parts.append(text(middle, 14, f"position {12 + i}", "small muted"))
        unread = " unread" if last else ""
        look = "muted" if last else ""
        if not last:
            parts += [rect(x, 26, width, 32, "box"), text(middle, 47, drafts[i])]
            parts.append(path([(middle, 82), (middle, 60), (middle - 4, 65)], "arrow"))
            parts.append(path([(middle, 60), (middle + 4, 65)], "arrow"))
        parts += [
            rect(x, 82, width, 28, f"box noise{unread}", 14),
            text(middle, 101, f"noise {12 + i}", f"small {look}"),
        ]
        parts.append(path([(middle, 110), (middle, 132), (middle - 4, 127)], f"arrow{unread}"))
        parts.append(path([(middle, 132), (middle + 4, 127)], "arrow"))
        parts += [rect(x, 134, width, 32, f"box row{unread}"), text(middle, 155, "" if last else samples[i])]
        if last:
            parts.append(text(middle, 195, "not needed", "muted"))
            continue
        same = drafts[i] == samples[i]
        parts.append(text(middle, 195, "the same" if same else "different", "good" if same else "bad"))
        look = "good" if same else "new"
        parts += [rect(x, 220, width, 32, f"box {look}"), text(middle, 241, samples[i])]
    return picture(
        parts,
        260,
        "One step of strict verification",
        "The noise of positions 12, 13 and 14 selects the drafts sat, on, my from q and the target's own samples sat, on, "
        "the from p. The first two are the same, the third differs. The step emits the target's samples sat, on, the. "
        "Position 15 is not needed.",
    )


def noise_figure() -> str:
    """Draw the counter, and the numbers of one seed by domain and position."""
    parts = []
    fields = [("seed", 2, "key"), ("index", 1, "counter"), ("position", 2, ""), ("domain", 1.2, "")]
    x, word, height = 1, 44, 30
    for name, count, group in fields:
        if group:
            parts.append(text(x, 14, group, "label", "start"))
        parts += [rect(x, 22, word * count, height, "box row"), text(x + word * count / 2, 41, name, "small")]
        for i in range(1, round(count)):
            parts.append(path([(x + word * i, 22), (x + word * i, 22 + 6)], "axis"))
            parts.append(path([(x + word * i, 46), (x + word * i, 22 + height)], "axis"))
        x += word * count + (10 if name == "seed" else 0)
    end = x
    parts += [
        path([(end, 37), (end + 40, 37)], "arrow"),
        path([(end + 35, 33), (end + 40, 37), (end + 35, 41)], "arrow"),
    ]
    parts.append(text(end + 20, 28, "Philox", "small"))
    parts += [rect(end + 42, 22, 30, height, "box new"), text(end + 57, 41, "u")]
    seed, positions, token = 7, (12, 13, 14), 0
    columns = [116 + 40 * i for i in range(3)]
    parts.append(text(0, 66, f"u at seed {seed}, index {token}", "label", "start"))
    parts.append(text(columns[1] + 10, 66, "position", "small muted"))
    for column, position in zip(columns, positions):
        parts.append(text(column, 84, str(position), "small muted"))
    uses = [252, 317]
    parts += [text(uses[0], 84, "probabilistic", "small muted"), text(uses[1], 84, "strict", "small muted")]
    parts.append(path([(0, 92), (WIDTH, 92)], "axis"))
    table = {
        Domain.ACCEPT: ("accepts", "bad", "", ""),
        Domain.SELECT_BLOCK: ("emits", "new", "drafts, emits", "new"),
        Domain.SELECT_TOKEN: ("emits", "new", "drafts, emits", "new"),
        Domain.DRAFT_BLOCK: ("drafts", "good", "", ""),
        Domain.DRAFT_TOKEN: ("drafts", "good", "", ""),
    }
    told = []
    for row, (domain, (use, look, strict_use, strict_look)) in enumerate(table.items()):
        y = 111 + 24 * row
        found = [f"{uniform(seed, position, token, domain):.3f}" for position in positions]
        parts.append(text(0, y, domain.name, "small", "start"))
        parts += [text(column, y, value, "small") for column, value in zip(columns, found)]
        parts.append(text(uses[0], y, use, f"small {look}"))
        parts.append(text(uses[1], y, strict_use or "not used", f"small {strict_look or 'muted'}"))
        told.append(f"{domain.name}: {', '.join(found)}; probabilistic {use}; strict {strict_use or 'does not use it'}")
    return picture(
        parts,
        111 + 24 * len(table) - 8,
        "The counter and the domains",
        "The seed is the key, two words; index, position (two words) and domain are the counter. Philox turns them into a "
        f"uniform number u. At seed {seed}, index {token}, positions 12, 13 and 14: {'. '.join(told)}.",
    )


def colored_text(x: float, y: float, words: list[tuple[str, str]]) -> str:
    """Return one line of words, each with its class."""
    spans = " ".join(f'<tspan class="{look}">{word}</tspan>' for word, look in words)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{spans}</text>'


BLOCK_PAIR = ((Fraction(2, 5), Fraction(3, 5)), (Fraction(4, 5), Fraction(1, 5)))
"""p and q of the example on the page about block verification: the same at each offset."""


class DraftPath(NamedTuple):
    """A path of drafts, and its acceptance probabilities."""

    drafts: tuple[int, ...]
    proposed: Fraction  # the probability that these drafts are proposed
    by_token: Fraction  # the probability that all are accepted, given them: by token verification
    by_block: Fraction  # the same by block verification: the running ratio


def draft_paths(length: int) -> list[DraftPath]:
    """Return every path of the example with this many drafts."""
    paths = [DraftPath((), Fraction(1), Fraction(1), Fraction(1))]
    for _ in range(length):
        paths = [
            DraftPath(
                (*before.drafts, token),
                before.proposed * q,
                before.by_token * acceptance_probability(p, q),
                Fraction(running_ratio(before.by_block, p, q)),
            )
            for before in paths
            for token, (p, q) in enumerate(zip(*BLOCK_PAIR))
        ]
    return paths


def short(value: Fraction) -> str:
    """Return a number without trailing zeros."""
    return f"{float(value):.4g}"


def block_tree_figure() -> str:
    """Draw the four paths of two drafts: the probability of each, and its acceptance probability given the path."""
    ratios = [p / q for p, q in zip(*BLOCK_PAIR)]
    indent, tall, gap, width, columns = 26, 58, 8, 184, (254, 326)
    parts = [
        text(1, 14, "first draft", "label", "start"),
        text(indent, 30, "second draft", "label", "start"),
        text(sum(columns) / 2, 14, "both accepted", "label"),
        text(columns[0], 30, "by token", "small"),
        text(columns[1], 30, "by block", "small"),
    ]
    told, y = [], 38.0
    for first in draft_paths(1):
        token = first.drafts[0]
        lines = [
            f"token {token}: λ = {short(ratios[token])}",
            f"c₁ = {product(Fraction(1), ratios[token])}",
            f"proposed: {short(first.proposed)}",
        ]
        parts += node(1, y, width, tall, lines)
        start = y + tall
        for second, path_of_two in enumerate(draft_paths(2)[2 * token : 2 * token + 2]):
            y += tall + gap
            parts.append(path([(indent / 2, start), (indent / 2, y + tall / 2), (indent, y + tall / 2)], "arrow"))
            gains = path_of_two.by_block > path_of_two.by_token
            lines = [
                f"token {second}: λ = {short(ratios[second])}",
                f"c₂ = {product(first.by_block, ratios[second])}",
                f"proposed: {short(path_of_two.proposed)}",
            ]
            parts += node(indent, y, width, tall, lines, "box good" if gains else "box")
            parts.append(text(columns[0], y + tall / 2 + 5, short(path_of_two.by_token)))
            parts.append(text(columns[1], y + tall / 2 + 5, short(path_of_two.by_block), "good" if gains else ""))
            told.append(
                f"Drafts {token}, {second}: proposed with {short(path_of_two.proposed)}; given them, both are accepted with "
                f"{short(path_of_two.by_token)} by token, {short(path_of_two.by_block)} by block"
            )
        y += tall + 2 * gap
    return picture(parts, y - 2 * gap + 2, "The four paths of two drafts", f"{'. '.join(told)}.")


def product(before: Fraction, ratio: Fraction) -> str:
    """Return the formula of the next running ratio as text, with the minimum where it matters."""
    after = Fraction(running_ratio(before, ratio, 1))
    factors = f"{short(before)} · {short(ratio)}"
    return f"{factors} = {short(after)}" if before * ratio <= 1 else f"min(1, {factors}) = {short(after)}"


def node(x: float, y: float, width: float, height: float, lines: list[str], look: str = "box") -> list[str]:
    """Draw a box with lines of text."""
    first, *others = lines
    parts = [rect(x, y, width, height, look), text(x + width / 2, y + 17, first)]
    return parts + [text(x + width / 2, y + 32 + 15 * i, line, "small") for i, line in enumerate(others)]


def block_bars_figure() -> str:
    """Draw a bar for each path of two drafts: its width is the path's probability, its height the acceptance probability."""
    left, right, top, bottom = 46, WIDTH - 14, 34, 214
    paths = draft_paths(2)
    parts = [text(4, 14, "both drafts accepted, given these drafts", "label", "start")]
    for level in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - (bottom - top) * level
        parts.append(path([(left, y), (right, y)], "grid" if level else "axis"))
        parts.append(text(left - 6, y + 4, f"{level:g}", "tick", "end"))
    start = Fraction(0)
    for each in paths:
        x, width = left + (right - left) * float(start), (right - left) * float(each.proposed)
        start += each.proposed
        low, high = (float((bottom - top) * share) for share in (each.by_token, each.by_block))
        middle = x + width / 2
        parts.append(rect(x + 1, bottom - high, width - 2, high, "mark s3", 0))
        parts.append(rect(x + 1, bottom - low, width - 2, low, "mark s1", 0))
        parts.append(text(middle, bottom - high - 6, short(each.by_block)))
        if high > low:
            inside = text(middle, bottom - low + 17, short(each.by_token))
            parts.append(inside.replace("<text ", '<text style="fill: var(--md-default-bg-color)" '))
        parts.append(text(x + width / 2, bottom + 16, ", ".join(map(str, each.drafts)), "tick"))
    areas = [sum(each.proposed * each[method] for each in paths) for method in (2, 3)]
    parts.append(text((left + right) / 2, bottom + 34, "the two drafts; width: how often proposed", "label"))
    told = ". ".join(
        f"Drafts {', '.join(map(str, each.drafts))}, proposed with {short(each.proposed)}: {short(each.by_token)} by token, "
        f"{short(each.by_block)} by block"
        for each in paths
    )
    drawn = picture(
        parts,
        bottom + 40,
        "The probability that both drafts are accepted, given the path",
        f"{told}. The areas, which are joint rates, are {short(areas[0])} and {short(areas[1])}.",
    )
    names = (
        f"by token verification: area {short(areas[0])}",
        f"by block verification only: area {short(areas[1] - areas[0])}",
    )
    legend = "".join(
        f'<li><svg viewBox="0 0 24 12" class="key" aria-hidden="true">{rect(5, 1, 14, 10, f"mark {look}", 0)}</svg>'
        f"{name}</li>"
        for look, name in zip(("s1", "s3"), names)
    )
    return f'{drawn}<ul class="legend">{legend}</ul>'


def band_figure() -> str:
    """Draw accept decisions by margin, and the band in which another backend may differ."""
    middle, reach, y = WIDTH / 2, 165, 92
    band = 1e-4

    def x_of(slack: float) -> float:  # logarithmic on both sides; within a millionth of 0 nothing is shown
        return middle + math.copysign(reach * math.log10(max(abs(slack), 1e-6) / 1e-6) / 6.5, slack)

    parts = [rect(x_of(-band), 40, x_of(band) - x_of(-band), 52, "box new"), path([(0, y), (WIDTH, y)], "axis")]
    parts.append(text(middle, 30, "rounding band: may differ", "small new"))
    parts += [text(4, 30, "rejected", "small bad", "start"), text(WIDTH - 4, 30, "accepted", "small good", "end")]
    for power in (0, -2, -4):
        for sign, name in ((-1, "−"), (1, "")):
            x = x_of(sign * 10.0**power)
            parts += [path([(x, y), (x, y + 5)], "axis"), text(x, y + 20, f"{name}{10.0**power:g}", "tick")]
    told = []
    for log_uniform in (np.log(0.9), np.log(0.2) + 2e-5, np.log(0.2) - 3e-3, np.log(0.05)):
        decision = accepts(log_uniform, np.log(0.1), np.log(0.5))
        slack = decision.margin if decision.index else -decision.margin
        inside = abs(slack) < band
        label = (f"{slack:.5f}" if inside else f"{slack:.2g}").replace("-", "−")
        x = x_of(slack) + (18 if inside else 0)  # otherwise the label crosses the edge of the band
        parts += [mark(x_of(slack), y - 14, "s1"), text(x, y - 26, label, "small")]
        told.append(f"{'accepted' if decision.index else 'rejected'} by {decision.margin:.2g} nats")
    parts.append(text(middle, y + 47, "log p(x) − log q(x) − log u, in nats\n(logarithmic on both sides)", "label"))
    return picture(
        parts,
        y + 60,
        "Accept decisions and the rounding band",
        f"Four decisions about a draft with p = 0.1 and q = 0.5: {', '.join(told)}. Only the one within 0.0001 nats of 0 "
        "may be different in another backend.",
    )


LEVEL_ROW = ((3, 1, 0, 2), (7, 2, 6, 1), (2, 4, 1, 0), (1, 8, 3, 5), (5.5, 0, 2, 1), (1, 2, 2.5, 0))
"""Logits in blocks of four."""


def level_figure() -> str:
    """Draw the maxima of blocks, the level that k maxima reach, and the tokens at or above the level."""
    k, left, pitch, width, bottom, unit = 3, 20, 56, 51, 170, 16
    level = sorted(map(max, LEVEL_ROW))[-k]
    logits = np.array(LEVEL_ROW, dtype=float).ravel()
    *_, last = kept = token_order(logits)[:k].tolist()
    parts = [text(0, 14, f"top_k = {k}; bars: largest logit of each block", "label", "start")]
    for logit in (0, 4, 8):
        parts += [text(left - 8, bottom - unit * logit + 4, str(logit), "tick", "end")]
    for block, row in enumerate(LEVEL_ROW):
        x, height, is_read = left + pitch * block, unit * max(row), max(row) >= level
        parts.append(rect(x, bottom - height, width, height, "box row" if is_read else "box unread", 1))
        parts.append(text(x + width / 2, bottom + 15, f"block {block}", "tick"))
        parts.append(text(x + width / 2, bottom + 30, *(("read", "small") if is_read else ("not read", "small muted"))))
        for index, logit in enumerate(row):
            if logit < level:
                continue
            token, at, y = len(row) * block + index, x + 9 + 12 * index, bottom - unit * logit
            parts.append(mark(at, y, "s1" if token in kept else "s3"))
            if token == last:
                parts.append(f'<circle cx="{at:.1f}" cy="{y:.1f}" r="8" class="ring"/>')
    y, end = bottom - unit * level, left + pitch * len(LEVEL_ROW)
    parts += [path([(left, bottom), (end, bottom)], "axis"), path([(left, y), (end, y)], "line s0")]
    parts.append(text(end, y - 6, f"level θ = {level:g}", "small", "end"))
    candidates = [token for token in range(logits.size) if logits[token] >= level]
    y = bottom + 52
    parts += [mark(left, y, "s1"), text(left + 9, y + 4, "kept", "small", "start")]
    parts += [mark(left + 66, y, "s3"), text(left + 75, y + 4, "candidate, not kept", "small", "start")]
    y += 22
    parts += [f'<circle cx="{left}" cy="{y}" r="7" class="ring"/>']
    parts.append(text(left + 12, y + 4, f"cutoff: token {last}, logit {logits[last]:g}", "small", "start"))
    return picture(
        parts,
        y + 10,
        "A level, and the candidates above it",
        f"Six blocks of four tokens. {k} block maxima are at least {level:g}; these blocks are read. The candidates, with "
        f"logits of {level:g} or more, are the tokens {', '.join(map(str, candidates))}; the first {k} in the order are "
        f"kept, and token {last} with the logit {logits[last]:g} is the cutoff.",
    )


SHARD_STEPS = [
    ("half of each row,\nof all requests", "all-to-all: rows of logits"),
    ("whole rows\nof its requests", ""),
    ("tokens\nof its requests", "all-gather: tokens and counts"),
    ("tokens\nof all requests", ""),
]
"""The data of each rank, and the exchanges."""


def shards_figure() -> str:
    """Draw a step of verification on two ranks: the data of each, and the exchanges."""
    left, gap, width, height = 1, 12, 172, 42
    columns = [left, left + width + gap]
    parts, y = [], 12.0
    for rank, x in enumerate(columns):
        parts.append(text(x + width / 2, y, f"rank {rank}", "label"))
    for held, exchanged in SHARD_STEPS:
        for x in columns:
            middle = x + width / 2
            parts.append(path([(middle, y + 2), (middle, y + 16)], "arrow"))
            look = "box good" if not exchanged else "box"
            parts += [rect(x, y + 16, width, height, look), text(middle, y + 41, held, "small")]
        y += 16 + height
        if exchanged:
            parts += [path([(x + width / 2, y + 2), (x + width / 2, y + 12)], "arrow") for x in columns]
            parts += [rect(left, y + 12, 2 * width + gap, 24, "box read"), text(WIDTH / 2, y + 28, exchanged, "small")]
            y += 36
    return picture(
        parts,
        y + 6,
        "A step on two ranks",
        " ".join(
            f"Each rank has {held}. {exchanged and f'Then {exchanged}.'}" for held, exchanged in SHARD_STEPS
        ).replace("\n", " "),
    )


FIGURES: dict[str, Callable[[], str]] = {
    "step": step_figure,
    "launches": launches_figure,
    "schedule": schedule_figure,
    "packed": packed_figure,
    "timeline": timeline_figure,
    "runs": runs_figure,
    "greedy": greedy_figure,
    "race": race_figure,
    "strict": strict_step_figure,
    "noise": noise_figure,
    "block-tree": block_tree_figure,
    "block-bars": block_bars_figure,
    "band": band_figure,
    "level": level_figure,
    "shards": shards_figure,
}
