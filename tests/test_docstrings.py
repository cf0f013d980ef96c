"""Docstrings name the thing: the first line says a verb and a noun, and no relative chain leans on another sentence."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted(file for folder in ("specdecode", "reference") for file in (ROOT / folder).rglob("*.py"))
NO_NOUN = re.compile(r"(?i)\breturn ((by|for|from|in|on) )?(what|how|which|where|why|that|who|when|as|those|the one)\b")
CHAIN = re.compile(r"(?i)\b(of which|that of|those of|what of what|what it takes to|likewise)\b|, and so are\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> list[tuple[str, str]]:
    """Return the names and the docstrings of a module, its classes and its functions."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    return [(getattr(node, "name", "module"), ast.get_docstring(node) or "") for node in nodes]


def badly_said(docstring: str) -> list[str]:
    """Return the phrases of a docstring that have to be replaced by nouns."""
    first_line, prose = docstring.partition("\n")[0], " ".join(docstring.split())
    return [found.group() for found in (*NO_NOUN.finditer(first_line), *CHAIN.finditer(prose))]


def test_docstrings_name_what_functions_return():
    found = [
        f"{file.relative_to(ROOT)}: {name}: {phrase!r}"
        for file in FILES
        for name, docstring in docstrings(file.read_text(encoding="utf-8"))
        for phrase in badly_said(docstring)
    ]
    assert FILES
    assert not found, "\n".join(found)


def test_a_phrase_without_a_noun_is_found():
    assert badly_said("Return what it costs.") == ["Return what"]
    assert badly_said("Return 1.\n\nThe value is that\n    of the row.") == ["that of"]
