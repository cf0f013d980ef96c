"""Inline SVG: bars from zero, in groups, each with a number."""

from collections.abc import Sequence
from typing import NamedTuple

from docs._tools.svg import WIDTH, picture, rect, text

LEFT, RIGHT, STEP = 150, WIDTH - 66, 24


class Bar(NamedTuple):
    """A bar: its label, its length, its number as text, and whether it belongs to this package."""

    title: str
    value: float
    shown: str
    own: bool = False


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], title: str, unit: str) -> str:
    """Return bars with one scale, below the headings of their groups."""
    longest = max(bar.value for _, group in groups for bar in group)
    parts, y, described = [], 16.0, []
    for heading, group in groups:
        parts.append(text(0, y, heading, "label", "start"))
        y += 8
        for bar in group:
            width = max(1.0, (RIGHT - LEFT) * bar.value / longest)
            parts += [
                text(LEFT - 8, y + 15, bar.title, "small", "end"),
                rect(LEFT, y + 3, width, STEP - 8, "bar new" if bar.own else "bar", 0),
                text(LEFT + width + 6, y + 15, bar.shown, "small", "start"),
            ]
            y += STEP
        described.append(f"{heading}: {', '.join(f'{bar.title} {bar.shown}' for bar in group)}")
        y += 22
    return picture(parts, y - 18, title, f"{unit}. {'; '.join(described)}")
