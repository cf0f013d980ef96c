"""The site's widgets, and their expected results by enumeration."""

import json
import re
from fractions import Fraction
from itertools import product
from pathlib import Path

from reference import block
from reference import probabilistic as reference

DOCS = Path(__file__).parents[2] / "docs"
MATH, WIDGETS = DOCS / "javascripts/math.js", DOCS / "javascripts/widgets.js"


def row_constants(name: str) -> list[float]:
    """Return a list of numbers from widgets.js, by name."""
    return json.loads(re.search(rf"const {name} = (\[.*?\])", WIDGETS.read_text(encoding="utf-8"))[1])


def block_tokens(target: list[Fraction], draft: list[Fraction], drafts: int) -> Fraction:
    """Return the mean tokens of a step of block verification: over all paths, sum the acceptance probabilities."""
    total = Fraction(1)
    for path in product(range(len(draft)), repeat=drafts):
        reach, ratio, heights = Fraction(1), Fraction(1), []
        for i, token in enumerate(path, start=1):
            reach *= draft[token]
            if not reach:
                break
            ratio = min(Fraction(1), ratio * target[token] / draft[token])
            area = sum(max(Fraction(0), ratio * p - q) for p, q in zip(target, draft))
            rest = area + 1 - ratio
            heights.append(ratio if i == drafts else area / rest if rest else Fraction(1))
        if not reach:
            continue
        none_longer = Fraction(1)
        for length, height in reversed(list(enumerate(heights, start=1))):
            total += reach * none_longer * height * length
            none_longer *= 1 - height
    return total


def enumerated_paths(target: list, draft: list, length: int) -> list[tuple]:
    """Return (drafts, their probability, acceptance by token, acceptance by block), by the reference's formulas."""
    paths = [((), Fraction(1), Fraction(1), Fraction(1))]
    for _ in range(length):
        paths = [
            (
                (*drafts, v),
                proposed * q,
                token * reference.acceptance_probability(p, q),
                Fraction(block.running_ratio(ratio, p, q)),
            )
            for drafts, proposed, token, ratio in paths
            for v, (p, q) in enumerate(zip(target, draft))
            if q
        ]
    return paths


def enumerated_joint_rates(target: list, draft: list, num_draft_tokens: int) -> list[tuple[Fraction, Fraction]]:
    """Return the joint rates (by token, by block) by offset."""
    rates = []
    for length in range(1, num_draft_tokens + 1):
        paths = enumerated_paths(target, draft, length)
        rates.append(tuple(sum(path[1] * path[method] for path in paths) for method in (2, 3)))
    return rates
