"""Docstrings name the thing: the first line says a verb and a noun, and no relative chain leans on another sentence."""

import ast
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("specdecode", "reference", "tests", "docs/_tools")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
NO_NOUN = re.compile(r"(?i)\breturn ((by|for|from|in|on) )?(what|how|which|where|why|that|who|when|as|those|the one)\b")
PRONOUN = re.compile(
    r"(by |for |from |in |of |on )?(what|how|which|where|why|whose|whoever|those|likewise)\b", re.IGNORECASE
)
CHAIN = re.compile(r"(?i)\b(of which|that of|those of|what of what|what it takes to|likewise)\b|, and so are\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> list[tuple[str, str]]:
    """Return the names and docstrings of a module, its classes, functions and attributes."""
    result = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            name = getattr(node, "name", "module")
            result.append((name, ast.get_docstring(node) or ""))
            result += [(f"attribute of {name}", text) for text in attribute_docstrings(node.body)]
    return result


def attribute_docstrings(body: list[ast.stmt]) -> list[str]:
    """Return the strings that follow assignments."""
    return [
        text.value.value
        for assignment, text in itertools.pairwise(body)
        if isinstance(assignment, ast.Assign | ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    ]


def badly_said(docstring: str) -> list[str]:
    """Return the phrases of a docstring that have to be replaced by nouns."""
    first_line, prose = docstring.partition("\n")[0], " ".join(docstring.split())
    pronoun = PRONOUN.match(first_line)
    found = [pronoun] if pronoun else []
    return [each.group() for each in (*found, *NO_NOUN.finditer(first_line), *CHAIN.finditer(prose))]


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
    assert badly_said("Of what top-p leaves out, the part.") == ["Of what"]
    assert badly_said("Return 1.\n\nThe value is that\n    of the row.") == ["that of"]
    assert docstrings('WIDTH = 8\n"""What is read at once."""')[1:] == [
        ("attribute of module", "What is read at once.")
    ]
    assert badly_said("Return whether the row is truncated.") == []
