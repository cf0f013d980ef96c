"""Check the contents of the wheel and the sdist: `python -m tests.tools.check_distributions WHEEL SDIST`."""

import sys
import tarfile
import zipfile
from pathlib import Path

REQUIRED = {
    "specdecode/py.typed",
    "specdecode/demo/target/model.safetensors",
    "specdecode/demo/draft/model.safetensors",
}


def main(wheel: str, sdist: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    assert {name.split("/")[0].split("-")[0] for name in files} == {"specdecode"}, "the wheel holds specdecode alone"
    assert files >= REQUIRED, REQUIRED - files
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        citation = archive.extractfile(f"{Path(sdist).name.removesuffix('.tar.gz')}/CITATION.cff").read().decode()
    required = REQUIRED | {"reference/probabilistic.py", "tests/test_probabilistic.py", "LICENSE", "pyproject.toml"}
    assert names >= required, required - names
    version = Path(sdist).name.removesuffix(".tar.gz").rpartition("-")[2]
    assert f"\nversion: {version}\n" in citation, f"CITATION.cff names another version than {version}"
    strays = {name for name in names | files if "__pycache__" in name or "/." in name}
    assert not strays, strays
    print(f"{len(files)} files in the wheel, {len(names)} in the sdist")


if __name__ == "__main__":
    main(*sys.argv[1:])
