"""``scripts/build_static_site.py``: the page without a server. The interpreter is the npm package ``pyodide``, which
the variable PYODIDE names; without it only what the script refuses is tried."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_browser import needs_browser
from with_browser import settled

from bridge_memory import ParallelSpec, RunSpec, estimate

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_static_site.py"
PYODIDE = os.environ.get("PYODIDE", "")
needs_pyodide = pytest.mark.skipif(not os.path.exists(PYODIDE), reason="PYODIDE names no npm package of Pyodide")


def build(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)


@pytest.mark.parametrize("kind", ["nothing", "a text", "a folder"])
def test_what_is_no_interpreter_is_refused(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    if kind == "a text":
        source.write_text("no archive")
    elif kind == "a folder":
        source.mkdir()
    done = build("--pyodide", str(source), "--output", str(tmp_path / "site"))
    assert done.returncode == 2 and done.stderr.startswith("error: --pyodide") and done.stderr.count("\n") == 1
    assert not (tmp_path / "site").exists()


def test_a_folder_that_holds_something_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = build("--pyodide", str(tmp_path), "--output", str(tmp_path))
    assert done.returncode == 2 and "not an empty folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("static") / "site"
    done = build("--pyodide", PYODIDE, "--output", str(folder))
    assert done.returncode == 0, done.stderr
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@needs_pyodide
@needs_browser
@pytest.mark.slow
def test_python_in_the_browser_says_what_python_says(browser: Any, site: str) -> None:
    page = browser.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{site}#model=meta-llama/Llama-3.2-1B&gpu=H100&num-gpus=4&tp=2")
    settled(page, 120)
    shown = page.evaluate("globalThis.page.shown.answer.fit.peak_bytes")
    parallel = ParallelSpec(world_size=4, tensor_model_parallel_size=2)
    run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=parallel)
    assert shown == estimate(run).peak_stage.peak_bytes
    page.fill("#f-tp", "3")
    settled(page, 60)
    assert "cannot run" in page.inner_text("#verdict")
    page.locator("#verdict .fix").first.click()
    settled(page, 60)
    log = b"[Rank 0] (after 2 iterations) memory (MB) | allocated: 1000.0 | max allocated: 2000.0 | reserved: 2100.0\n"
    page.set_input_files("#f-file", files=[{"name": "x.log", "mimeType": "text/plain", "buffer": log}])
    page.locator("#measured table").wait_for(timeout=120_000)
    assert "1.95" in page.inner_text("#measured table")
    page.evaluate("globalThis.page.searching.vary = ['tp']; globalThis.page.search()")
    page.locator("#search table").wait_for(timeout=120_000)
    assert complaints == [] and all(url.startswith(site) or url.startswith("blob:") for url in asked)
    page.close()
