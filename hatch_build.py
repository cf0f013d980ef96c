"""The web addresses in the metadata of a built distribution: the project's URLs, and the README with absolute links.

The addresses come from two environment variables, which the release workflow sets: REPOSITORY_URL and SITE_URL. Without them
a distribution has no addresses, and the README's links stay relative.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r'(\]\(|src=")(?![a-z]+:|#)([^)"\s]+)')


def project_urls(repository: str, site: str, version: str) -> dict[str, str]:
    """Return the known addresses, by the labels of PyPI.

    >>> project_urls("", "", "0.1.0")
    {}
    """
    urls = {}
    if site:
        urls["Documentation"] = f"{site}/{version}/"
    if repository:
        urls |= {
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        }
    return urls


def with_whole_links(text: str, repository: str, site: str, version: str) -> str:
    """Return Markdown with absolute links to the site of this version, or, without a site, to the repository at its tag.

    >>> with_whole_links("[use](docs/use/quickstart.md#install)", "https://host/repository", "https://site", "0.1.0")
    '[use](https://site/0.1.0/use/quickstart/#install)'
    >>> with_whole_links('<img src="docs/demo.svg">', "https://host/repository", "", "0.1.0")
    '<img src="https://host/repository/raw/v0.1.0/docs/demo.svg">'
    """

    def whole(match: re.Match[str]) -> str:
        before, target = match.groups()
        if site and target.startswith("docs/"):
            page = re.sub(r"(?:(?<=/)index)?\.md(?=#|$)", "/", target.removeprefix("docs"))
            return f"{before}{site}/{version}{page.replace('//', '/')}"
        if repository:
            return f"{before}{repository}/{'raw' if before.startswith('src') else 'blob'}/v{version}/{target}"
        return match[0]

    if site:
        text = text.replace("](#the-site)", f"]({site}/{version}/)")  # otherwise the section on building the site
    return LINK.sub(whole, text)


class AddressHook(MetadataHookInterface):
    """Sets `project.urls` and `project.readme`, unless the sdist already has them."""

    def update(self, metadata: dict) -> None:
        """Set the missing metadata."""
        version = re.search(r'^__version__ = "(.+)"$', (Path(self.root) / "specdecode/__init__.py").read_text(), re.M)[
            1
        ]
        repository, site = (os.environ.get(name, "").rstrip("/") for name in ("REPOSITORY_URL", "SITE_URL"))
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_whole_links(readme, repository, site, version)
        metadata.setdefault("readme", {"content-type": "text/markdown", "text": text})
        if urls := project_urls(repository, site, version):
            metadata.setdefault("urls", urls)
