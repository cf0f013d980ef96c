"""Source code on a page, taken from its file when the site is built and found by name, never by line.

    ```source
    reference/probabilistic.py: acceptance_probability, residual
    ```

A name is a function, a class, a method (`Class.method`) or a constant; the words `without docstring` on a further line
omit docstrings. The build fails if a file or name does not exist.
"""

import ast
import itertools
from pathlib import Path
from typing import Any

from markdown import Markdown
from pymdownx.superfences import SuperFencesException

ROOT = Path(__file__).parent.parent.parent


def source_fence(
    source: str, language: str, css_class: str, options: dict[str, Any], md: Markdown, **kwargs: Any
) -> str:
    """Return the definitions of a fence, as highlighted code under the path of their file."""
    first, *others = source.strip().splitlines()
    path, _, names = first.partition(":")
    with_docstring = "without docstring" not in [line.strip() for line in others]
    try:
        text = (ROOT / path.strip()).read_text()
        parts = [extract(text, name.strip(), with_docstring) for name in names.split(",")]
    except (OSError, LookupError, SyntaxError) as error:
        raise SuperFencesException(f"source: {first}: {error}") from error
    code = "\n\n\n".join(parts)
    fences = md.preprocessors["fenced_code_block"]
    return fences.highlight(code, "python", {"title": path.strip()}, md, classes=[], id_value="", attrs={})


def extract(text: str, name: str, with_docstring: bool = True) -> str:
    """Return the source of one definition, decorators and all, or of an assignment with the string below it."""
    body: list[ast.stmt] = ast.parse(text).body
    lines = text.splitlines()
    *scopes, last = name.split(".")
    for scope in scopes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == scope), [])
    for node, following in itertools.zip_longest(body, body[1:]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            shown = list(range(start, (node.end_lineno or start) + 1))
            if not with_docstring and ast.get_docstring(node) is not None:
                doc = node.body[0]
                shown = [number for number in shown if not doc.lineno <= number <= (doc.end_lineno or doc.lineno)]
            indent = len(lines[start - 1]) - len(lines[start - 1].lstrip())
            return "\n".join(lines[number - 1][indent:] for number in shown)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Name) and each.id == last for target in targets for each in ast.walk(target)):
                said = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                return "\n".join(lines[node.lineno - 1 : (following if said else node).end_lineno])
    raise LookupError(f"no {name} there")
