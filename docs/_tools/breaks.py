"""Line breaks: long names in code may break on phones, intervals in tables do not break elsewhere (see site.css)."""

import re

from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

INLINE_CODE = re.compile(r"(?<!</span>)<code>[^<]+</code>")  # the code of a block follows an empty span
LONG_NAME = re.compile(r"[\w./]{17,}")
INTERVAL = re.compile(r"\([\d.]+–[\d.]+\)(?=</td>)")


class BreakProcessor(Postprocessor):
    """Add places for line breaks to the long names of inline code, and mark intervals."""

    def run(self, text: str) -> str:
        """Return the HTML of a page with both marked."""
        text = INLINE_CODE.sub(lambda code: LONG_NAME.sub(breakable, code[0]), text)
        return INTERVAL.sub(r'<span class="interval">\g<0></span>', text)


def breakable(name: re.Match[str]) -> str:
    """Return a name with a `<wbr>` after every underscore, slash and dot, but whole file names.

    >>> breakable(LONG_NAME.match("tests/check_servers.py"))
    'tests/<wbr>check_<wbr>servers.py'
    """
    return re.sub(r"(?<=\w)([_/]|\.(?!py|md|json))(?=\w)", r"\1<wbr>", name[0])


class BreakExtension(Extension):
    """Register the postprocessor after raw HTML has been inserted."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register it."""
        md.postprocessors.register(BreakProcessor(md), "breaks", 5)


def makeExtension(**options: object) -> BreakExtension:
    """Return the extension; Markdown calls this function."""
    return BreakExtension(**options)
