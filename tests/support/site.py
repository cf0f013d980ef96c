"""The site, built once per process, served to a browser that contacts no other host."""

import contextlib
import functools
import http.server
import importlib.util
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None  # importing either fails
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--site-dir", sys.argv[1]])
"""
BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)


class Site(NamedTuple):
    """The built site, and the time to build it."""

    folder: Path
    cpu_seconds: float
    kept: tempfile.TemporaryDirectory  # removed with the process

    def pages(self) -> list[Path]:
        return sorted(self.folder.rglob("*.html"))


class Server(NamedTuple):
    """The built site behind a loopback address, and a browser."""

    address: str
    browser: Any


@functools.cache
def built_site() -> Site:
    """Build the site strictly, without torch; skip the test if a requirement is not installed."""
    for module in ("mkdocs", "material", "mkdocstrings", "math_core", "ziamath"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module}, which building the site needs, is not installed")
    folder = tempfile.TemporaryDirectory(prefix="site-")
    before = child_seconds()
    command = [sys.executable, "-c", BUILD, folder.name]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return Site(Path(folder.name), child_seconds() - before, folder)


def child_seconds() -> float:
    """Return the CPU seconds of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Server]:
    """Serve the site to a browser. Leave this context before the next: Playwright allows one driver per process."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        pytest.skip(f"no browser is installed: looked for {', '.join(BROWSERS)}")
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as host, playwright.sync_playwright() as driver:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        arguments = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        try:
            with contextlib.closing(driver.chromium.launch(executable_path=chromium, args=arguments)) as browser:
                yield Server(f"http://127.0.0.1:{host.server_port}/", browser)
        finally:
            host.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serve files without logging. The browser keeps connections open and files in its cache."""

    protocol_version = "HTTP/1.1"

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "max-age=3600")
        super().end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def opened(server: Server, width: int = 1440) -> Iterator[tuple[Any, list[str]]]:
    """Open a tab; collect its errors and its requests to other hosts, which fail.

    The browser's resolver blocks other hosts: a route would pass every request through this process, without cache.
    """
    complaints: list[str] = []

    def note(request: Any) -> None:
        if not request.url.startswith((server.address, "data:", "blob:")):
            complaints.append(f"asked for {request.url}")

    with contextlib.closing(server.browser.new_context(viewport={"width": width, "height": 800})) as context:
        context.on("request", note)
        page = context.new_page()
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page, complaints
