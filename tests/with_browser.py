"""A browser and a server of the page, for the tests, the screenshots and the benchmark of pages.

Needs playwright and a Chromium (Debian: ``apt-get install chromium``); importing this needs neither.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

#: Chromium without network access of its own.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: axe-core's ``axe.min.js``, for accessibility, as the variable AXE_CORE names it; "" without.
AXE = os.environ.get("AXE_CORE", "")


def missing() -> str:
    """The package that is missing and how to install it; "" where nothing is missing."""
    if find_spec("playwright") is None:
        return "playwright is missing: pip install playwright"
    return "" if CHROMIUM else "a Chromium is missing: apt-get install chromium"


@contextlib.contextmanager
def browser(executable: str | None = None) -> Iterator[Any]:
    """Playwright's browser; ``executable``: which Chromium (default: the one on the path)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=executable or CHROMIUM, args=list(FLAGS))
        try:
            yield one
        finally:
            one.close()


def start_server(port: int = 0) -> tuple[subprocess.Popen[str], str]:
    """Start ``bridge-memory serve``: the process and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge_memory", "serve", "--port", str(port), "--json"], stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


@contextlib.contextmanager
def server(port: int = 0) -> Iterator[str]:
    """The address of a server that runs inside this block."""
    process, url = start_server(port)
    try:
        yield url
    finally:
        process.terminate()
        process.wait()


def settled(page: Any, seconds: float = 20.0) -> None:
    """Wait until the page of ``serve`` shows the answer to its last request. The page's policy forbids
    ``wait_for_function``, which evaluates code inside of the page."""
    until = time.monotonic() + seconds
    state: dict[str, str] = {}
    while time.monotonic() < until:
        state = page.evaluate("({...document.body.dataset})")
        if state.get("asked") and state["asked"] == state.get("answered"):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"not answered: {state}")


def serious(page: Any) -> list[Any]:
    """Serious and critical findings of axe-core on a page: (rule, impact, elements)."""
    with open(AXE, encoding="utf-8") as file:
        page.evaluate(file.read() + "; 0")
    found = page.evaluate(
        "axe.run(document, { resultTypes: ['violations'] }).then((r) => r.violations.map((v) => "
        "[v.id, v.impact, v.nodes.map((n) => n.html)]))"
    )
    return [v for v in found if v[1] in ("serious", "critical")]
