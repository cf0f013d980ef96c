"""Inline SVG: a logarithmic plot, and the basic shapes of the drawings.

Colours are classes, which the stylesheet sets from the theme's variables, so pictures follow the palette. Pictures have
the width of a phone's column: one unit is one pixel there, and text has at least 12.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, LEADING = 358, 15


class Series(NamedTuple):
    """Points with one name and one style."""

    title: str
    look: str  # a class of the stylesheet, such as s1
    points: Sequence[tuple[float, float]]
    line: bool = True
    mark: bool = True


def text(x: float, y: float, content: str, css: str = "", anchor: str = "middle") -> str:
    """Return a text element. Several lines are centred around y."""
    first, *others = escape(content).split("\n")
    spans = "".join(f'<tspan x="{x:.1f}" dy="{LEADING}">{line}</tspan>' for line in others)
    y -= LEADING / 2 * len(others)
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{first}{spans}</text>'


def rect(x: float, y: float, width: float, height: float, css: str, radius: float = 4) -> str:
    """Return a rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" class="{css}"/>'


def path(points: Sequence[tuple[float, float]], css: str) -> str:
    """Return a line through points."""
    steps = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    return f'<path d="{steps}" class="{css}"/>'


def picture(parts: Sequence[str], height: float, title: str, description: str, width: float = WIDTH) -> str:
    """Return an SVG element with an alternative text."""
    label = escape(f"{title}. {description}", quote=True)
    return (
        f'<svg class="picture" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def mark(x: float, y: float, look: str) -> str:
    """Return a point's mark. Its shape depends on its style, so series differ also without colours."""
    shape = int(look[1:]) % 4
    if shape == 1:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="mark {look}"/>'
    if shape == 2:
        return rect(x - 3.5, y - 3.5, 7, 7, f"mark {look}", 0)
    corners = [(0, -5), (5, 4), (-5, 4)] if shape == 3 else [(0, -5), (5, 0), (0, 5), (-5, 0)]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" class="mark {look}"/>'


def ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5 and 10 times powers of ten in a range, or only the powers if the range is wide."""
    steps = (1,) if high / low > 200 else (1, 2, 5)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for power in powers for step in steps if low <= (value := step * 10.0**power) <= high]


def plot(
    series: Sequence[Series],
    x_title: str,
    y_title: str,
    title: str,
    x_ticks: Sequence[float] | None = None,
    height: float = 300,
) -> str:
    """Return a plot with logarithmic axes and its legend."""
    points = [point for each in series for point in each.points]
    if not points:
        raise LookupError(f"nothing to plot for {title!r}")
    left, right, top, bottom = 46, WIDTH - 14, 24, height - 44
    x_low, x_high = (pick(x for x, _ in points) * factor for pick, factor in ((min, 0.8), (max, 1.25)))
    y_low, y_high = (pick(y for _, y in points) * factor for pick, factor in ((min, 0.7), (max, 1.4)))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (right - left) * math.log(x / x_low) / math.log(x_high / x_low),
            bottom - (bottom - top) * math.log(y / y_low) / math.log(y_high / y_low),
        )

    parts = []
    for value in x_ticks or ticks(x_low, x_high):
        x, _ = place(value, y_low)
        parts += [path([(x, top), (x, bottom)], "grid"), text(x, bottom + 16, f"{value:,g}", "tick")]
    for value in ticks(y_low, y_high):
        _, y = place(x_low, value)
        parts += [path([(left, y), (right, y)], "grid"), text(left - 6, y + 4, f"{value:,g}", "tick", "end")]
    parts += [path([(left, top), (left, bottom), (right, bottom)], "axis")]
    parts += [text((left + right) / 2, height - 8, x_title, "label"), text(4, 12, y_title, "label", "start")]
    for each in series:
        placed = [place(*point) for point in each.points]
        if each.line:
            parts.append(path(placed, f"line {each.look}"))
        if each.mark:
            parts += [mark(x, y, each.look) for x, y in placed]
    legend = "".join(
        f'<li><svg viewBox="0 0 24 12" class="key" aria-hidden="true">'
        f"{path([(0, 6), (24, 6)], f'line {each.look}') if each.line else ''}"
        f"{mark(12, 6, each.look) if each.mark else ''}</svg>{escape(each.title)}</li>"
        for each in series
    )
    described = "; ".join(
        f"{each.title}: {', '.join(f'{y:,.4g} at {x:,.4g}' for x, y in each.points)}" for each in series
    )
    figure = picture(parts, height, title, f"{y_title}, by {x_title}. {described}")
    return f'{figure}<ul class="legend">{legend}</ul>'
