"""Doctests in the middle of a docstring's text, rendered as code and not as nested quotations."""

import re

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

FENCE = re.compile(r"\s*(```+|~~~+)")


class DoctestProcessor(Preprocessor):
    """Add a fence around every doctest without one."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the lines of a text with fences added."""
        result: list[str] = []
        fence, in_doctest = "", False
        for line in [*lines, ""]:
            if in_doctest and not line.strip():
                result.append("```")
                in_doctest = False
            match = FENCE.match(line)
            if match and not fence:
                fence = match[1]
            elif fence and line.strip() == fence:
                fence = ""
            elif line.startswith(">>> ") and not fence and not in_doctest:
                result += ["", "```pycon"]
                in_doctest = True
            result.append(line)
        return result[:-1]


class DoctestExtension(Extension):
    """Register the preprocessor before fences are parsed."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register it."""
        md.preprocessors.register(DoctestProcessor(md), "doctests", 29)


def makeExtension(**options: object) -> DoctestExtension:
    """Return the extension; Markdown calls this function."""
    return DoctestExtension(**options)
