"""Imports between modules of the package: no cycles, including late imports; backends do not import shards."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import specdecode

FOLDER = Path(specdecode.__file__).parent


def modules(folder: Path) -> dict[str, str]:
    """Return the source of each module of a package, by name."""
    files = {".".join(file.relative_to(folder.parent).with_suffix("").parts): file for file in folder.rglob("*.py")}
    return {name.removesuffix(".__init__"): file.read_text("utf-8") for name, file in files.items()}


def imported(source: str) -> Iterator[tuple[str, ...]]:
    """Return the imports of a module, also in functions, for type checkers and by name, each with its parent packages."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield (ast.unparse(node.args[0]).strip("'"),)


def circle(sources: dict[str, str]) -> list[str]:
    """Return a cycle of modules, each importing the next, with the first again at the end; [] if there is none."""
    graph = {
        name: {next((each for each in names if each in sources), name) for names in imported(source)} - {name}
        for name, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_module_imports_one_that_imports_it():
    assert circle(modules(FOLDER)) == []


@pytest.mark.parametrize(
    "line",
    [
        "import house.kitchen",
        "from house import kitchen",
        "from house.kitchen import table",
        "def f():\n    from house.kitchen import table",
        "if TYPE_CHECKING:\n    from house.kitchen import table",
        "importlib.import_module('house.kitchen')",
    ],
)
def test_circles_are_seen_however_they_are_hidden(line):
    rooms = {"house": "", "house.garden": "import os", "house.kitchen": "from house.garden import herbs"}
    assert circle(rooms) == []
    assert set(circle(rooms | {"house.garden": line})) == {"house.kitchen", "house.garden"}


def test_backends_know_nothing_of_shards():
    for name, source in modules(FOLDER).items():
        if name.startswith(("specdecode.eager", "specdecode.kernels", "specdecode.batch")):
            assert not any("sharding" in module for found in imported(source) for module in found), name
