"""The files for publishing are consistent: versions, dates, addresses, and the commands of the gate."""

import importlib
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

import specdecode
from tests.support.examples import fences, run_docstrings

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="not in a checkout")


def read(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def workflow(name: str) -> dict:
    return yaml.safe_load(read(".github", "workflows", name))


@pytest.fixture(scope="module")
def hatch_build():
    """The build's hook. It needs hatchling; here its base class is replaced."""
    name = "hatchling.metadata.plugin.interface"
    interface = ModuleType(name)
    interface.MetadataHookInterface = object
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, interface)
        return importlib.import_module("hatch_build")


def test_changelog_and_citation_name_this_version_and_one_date():
    citation = yaml.safe_load(read("CITATION.cff"))
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", read("CHANGELOG.md"), flags=re.M)
    assert headings[:2] == [("Unreleased", ""), (specdecode.__version__, str(citation["date-released"]))]
    assert citation["version"] == specdecode.__version__
    (bibtex,) = (block.code for block in fences(ROOT / "README.md") if block.language == "bibtex")
    fields = dict(re.findall(r"(\w+) = \{+(.*?)\}", bibtex))
    authors = " and ".join(author["name"] for author in citation["authors"])
    assert fields == {
        "author": authors,
        "title": citation["title"],
        "version": citation["version"],
        "date": str(citation["date-released"]),
    }


def test_every_python_version_that_is_classified_is_tested():
    jobs = workflow("ci.yml")["jobs"]
    tested = {case["python"] for case in jobs["tests"]["strategy"]["matrix"]["include"]}
    tested |= {
        step["with"]["python-version"] for step in jobs["gate"]["steps"] if "python-version" in step.get("with", {})
    }
    classifiers = tomllib.loads(read("pyproject.toml"))["project"]["classifiers"]
    assert tested == {text.rpartition(" ")[2] for text in classifiers if re.search(r":: 3\.\d+$", text)}


def test_the_release_builds_and_tests_with_the_files_of_the_gate():
    jobs = workflow("release.yml")["jobs"]
    assert any(step.get("run") == "bash .ci/distributions dist" for step in jobs["build"]["steps"])
    assert "bash .ci/distributions " in read(".ci", "run")
    assert jobs["gate"]["uses"] == "./.github/workflows/ci.yml"
    assert {"run": "bash .ci/run"} in workflow("ci.yml")["jobs"]["gate"]["steps"]
    assert jobs["publish"]["needs"] == ["gate", "build"]


def test_a_commit_is_checked_by_the_commands_of_the_gate():
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    for hook in repository["hooks"]:
        command = rf"^{re.escape(hook['entry'])}$"
        assert re.search(command, read(".ci", "run"), flags=re.M), hook["entry"]


def test_every_file_that_a_workflow_calls_exists():
    for page in (GITHUB / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(page.read_text(encoding="utf-8"))["jobs"].values()
        for step in (step for job in jobs for step in [job, *job.get("steps", [])]):
            for path in re.findall(r"\./(\S+\.yml)|bash (\S+)", f"{step.get('uses', '')} {step.get('run', '')}"):
                assert (ROOT / "".join(path)).is_file(), (page, path)


def test_forms_for_issues_are_complete():
    for page in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(page.read_text(encoding="utf-8"))
        if page.name == "config.yml":
            continue
        assert form["name"]
        assert form["description"]
        ids = [part["id"] for part in form["body"]]
        assert len(ids) == len(set(ids))
        assert all(part["type"] in ("input", "textarea") and part["attributes"]["label"] for part in form["body"])


def test_the_command_that_the_form_asks_for_prints_the_versions(capsys):
    form = yaml.safe_load(read(".github", "ISSUE_TEMPLATE", "bug.yml"))
    (versions,) = (part for part in form["body"] if part["id"] == "versions")
    exec(re.search(r'python -c "(.+)"', versions["attributes"]["description"])[1], {})
    assert f"specdecode {specdecode.__version__}" in capsys.readouterr().out


def test_the_examples_of_the_build_hook_hold(hatch_build):
    run_docstrings(hatch_build, "hatch_build", hatch_build, "from hatch_build import project_urls, with_whole_links")


@pytest.mark.parametrize("site", ["", "https://site.invalid"])
def test_on_pypi_every_link_of_the_readme_is_whole_and_no_example_changes(hatch_build, tmp_path, monkeypatch, site):
    monkeypatch.setenv("REPOSITORY_URL", "https://host.invalid/repository")
    monkeypatch.setenv("SITE_URL", site)
    hook, metadata = hatch_build.AddressHook(), {}
    hook.root = str(ROOT)
    hook.update(metadata)
    text = metadata["readme"]["text"]
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert [block.code for block in fences(tmp_path / "README.md")] == [
        block.code for block in fences(ROOT / "README.md")
    ]
    targets = re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', text)
    assert len(targets) > 5
    assert [target for target in map("".join, targets) if not target.startswith(("https://", "#"))] == []
    assert ("Documentation" in metadata["urls"]) == bool(site)
    assert ("[the site](https://site.invalid/0.1.0/)" in text) == bool(site)


def test_without_addresses_none_is_made_up(hatch_build, monkeypatch):
    monkeypatch.delenv("REPOSITORY_URL", raising=False)
    monkeypatch.delenv("SITE_URL", raising=False)
    hook, metadata = hatch_build.AddressHook(), {}
    hook.root = str(ROOT)
    hook.update(metadata)
    assert metadata == {"readme": {"content-type": "text/markdown", "text": read("README.md")}}


def test_what_an_sdist_says_is_kept(hatch_build):
    hook, metadata = SimpleNamespace(root=str(ROOT)), {"readme": "its own", "urls": {"Source": "its own"}}
    hatch_build.AddressHook.update(hook, metadata)
    assert metadata == {"readme": "its own", "urls": {"Source": "its own"}}
