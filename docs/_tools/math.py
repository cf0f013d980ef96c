r"""Mathematics as MathML, made when the site is built: no script runs in the reader's browser.

`pymdownx.arithmatex`, in its generic mode, finds `$...$` and `$$...$$` and leaves elements of the class `arithmatex` that
hold TeX. This Markdown extension converts this TeX. The build fails if TeX cannot be converted, or is in a heading (where
tables of contents and the search would show it raw).
"""

import re
from html import unescape
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from math_core import LatexError, LatexToMathML

from docs._tools.font import write_font

MACROS = {
    "E": r"\operatorname{E}",
    "TV": r"\operatorname{TV}",
    "argmax": r"\operatorname*{arg\,max}",
}
"""Additional commands for pages, beyond LaTeX's own."""


class MathProcessor(Treeprocessor):
    """Convert the TeX of all `arithmatex` elements."""

    def __init__(self, md: Markdown) -> None:
        super().__init__(md)
        self.converter = LatexToMathML(macros=MACROS, fancy_error=False)

    def run(self, root: Element) -> None:
        """Convert a page's elements in place."""
        for heading in root.iter():
            if heading.tag in ("h1", "h2", "h3", "h4", "h5", "h6") and any(map(is_math, heading.iter())):
                raise ValueError(f"mathematics in a heading: {''.join(heading.itertext())!r}")
        before = {child: (parent, i) for parent in root.iter() for i, child in enumerate(parent)}
        for element in filter(is_math, root.iter()):
            tex = unescape(element.text or "").strip()[2:-2].strip()
            try:
                mathml = self.converter.convert_with_local_state(tex, displaystyle=element.tag == "div")
            except LatexError as error:
                raise ValueError(f"TeX that cannot be converted: {tex!r}: {error}") from error
            element.text = self.md.htmlStash.store(mathml)
            if element.tag == "span":  # no line breaks between a formula and an adjacent comma or bracket
                tail = element.tail or ""
                after = re.match(r"[.,;:!?)\]]*", tail).group()
                element.text = take_brackets(*before[element]) + element.text + after
                element.tail = tail.removeprefix(after)


def take_brackets(parent: Element, index: int) -> str:
    """Remove opening brackets at the end of the text before a child, and return them."""
    holder, name = (parent[index - 1], "tail") if index else (parent, "text")
    text = getattr(holder, name) or ""
    setattr(holder, name, text.rstrip("([“"))
    return text[len(text.rstrip("([“")) :]


def is_math(element: Element) -> bool:
    """Return whether an element holds TeX."""
    return "arithmatex" in element.get("class", "").split()


class MathExtension(Extension):
    """Convert the elements of arithmatex, and write the font."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register after the inline patterns."""
        write_font()
        md.treeprocessors.register(MathProcessor(md), "mathml", 12)


def makeExtension(**options: object) -> MathExtension:
    """Return the extension; Markdown calls this function."""
    return MathExtension(**options)
