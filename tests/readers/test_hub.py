"""The real huggingface_hub against a local server: what is fetched, what is cached, what each refusal says.

huggingface_hub reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE once, at import, so each case is a process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bridge_memory.readers.presets import preset_path

pytest.importorskip("huggingface_hub")

CONFIG = Path(preset_path("Qwen/Qwen3-0.6B")).read_bytes()
SCRIPT = """
import sys
from bridge_memory.readers import hub, resolve_model
hub._DEADLINE = float(sys.argv[2]) if sys.argv[2:] else hub._DEADLINE
from bridge_memory.spec import SpecError
try:
    print("layers", resolve_model(sys.argv[1]).num_layers)
except SpecError as error:
    print("refused", error)
"""


class Hub(BaseHTTPRequestHandler):
    """/acme/tiny is public, /acme/private needs the token "sesame", /acme/gated and /acme/bare say no."""

    asked: list[str]
    #: Set when the test is over.
    done: threading.Event

    def trickle(self, text: bytes) -> None:
        """A byte now and then, so that no single read takes long."""
        for byte in text:
            if self.done.wait(0.5):
                return
            self.wfile.write(bytes([byte]))
            self.wfile.flush()

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        repo = "/".join(self.path.split("/")[1:3])
        token = self.headers.get("authorization")
        if repo == "acme/tiny" or (repo == "acme/private" and token == "Bearer sesame"):
            self.reply(200, {"ETag": '"1"', "X-Repo-Commit": "a" * 40}, CONFIG if body else None)
        elif repo == "acme/gated":
            self.reply(403, {"X-Error-Code": "GatedRepo"})
        elif repo == "acme/bare":
            self.reply(404, {"X-Error-Code": "EntryNotFound"})
        elif repo == "acme/teapot":
            self.reply(418, {})
        elif repo == "acme/broken":
            self.reply(500, {})
        elif repo == "acme/silent":
            self.done.wait(60)
        elif repo == "acme/slow-headers":
            self.trickle(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 1000)
        elif repo == "acme/stalled" and body:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONFIG)))
            self.end_headers()
            self.trickle(CONFIG)
        elif repo == "acme/stalled":
            self.reply(200, {"ETag": '"1"', "X-Repo-Commit": "a" * 40})
        else:
            self.reply(404, {"X-Error-Code": "RepoNotFound"})

    def reply(self, status: int, headers: dict[str, str], body: bytes | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(CONFIG) if status == 200 else 0))
        self.end_headers()
        if body is not None:
            self.wfile.write(body)

    def handle(self) -> None:
        with suppress(ConnectionError):  # whoever asked does not wait for the end
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    done = threading.Event()
    handler = type("Handler", (Hub,), {"asked": asked, "done": done})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    done.set()
    server.shutdown()
    server.server_close()


def resolve(source: str, endpoint: str, home: Path, *deadline: str, **extra: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}
    env = kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)} | extra
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, source, *deadline],
        env=env, capture_output=True, text=True, timeout=60, check=True,
    )
    assert done.stderr == "", done.stderr
    assert done.stdout.count("\n") == 1
    return done.stdout.strip()


def test_a_hub_id_is_fetched_once_and_then_served_from_the_cache(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    assert resolve("acme/tiny", endpoint, tmp_path) == "layers 28"
    assert "GET /acme/tiny/resolve/main/config.json" in asked
    # Nothing listens on the discard port; the cache answers, offline mode or not.
    dead = "http://127.0.0.1:9"
    assert resolve("acme/tiny", dead, tmp_path) == "layers 28"
    assert resolve("acme/tiny", dead, tmp_path, HF_HUB_OFFLINE="1") == "layers 28"


def test_the_token_is_sent(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, _ = hub
    assert resolve("acme/private", endpoint, tmp_path, HF_TOKEN="sesame") == "layers 28"
    assert "private" in resolve("acme/private", endpoint, tmp_path / "other")


@pytest.mark.parametrize(
    ("repo", "word"), [("acme/gated", "gated"), ("acme/bare", "no config.json"), ("acme/teapot", "418")]
)
def test_each_refusal_of_the_hub_is_one_line(
    hub: tuple[str, list[str]], tmp_path: Path, repo: str, word: str
) -> None:
    line = resolve(repo, hub[0], tmp_path)
    assert line.startswith(f"refused {repo} is no preset and could not be fetched") and word in line


def test_a_repository_that_does_not_exist_is_answered_with_near_presets(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    line = resolve("Qwen/Qwen3-0.7B", hub[0], tmp_path)
    assert "no such repository" in line and "Qwen/Qwen3-0.6B" in line


def test_without_a_network_the_answer_comes_at_once(tmp_path: Path) -> None:
    assert "cannot be reached" in resolve("acme/tiny", "http://127.0.0.1:9", tmp_path)
    assert "HF_HUB_OFFLINE" in resolve("acme/tiny", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")


def test_a_preset_never_asks_the_hub(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    assert resolve("Qwen/Qwen3-0.6B", endpoint, tmp_path) == "layers 28"
    assert asked == []


@pytest.mark.slow
@pytest.mark.parametrize("repo", ["acme/silent", "acme/slow-headers", "acme/stalled", "acme/broken"])
def test_a_hub_that_hangs_is_given_up(hub: tuple[str, list[str]], tmp_path: Path, repo: str) -> None:
    """6 s and the start of a process; a silent Hub once took more than 45 s, a broken one 25 s. The broken one here has
    the whole time, the others half a second."""
    deadline = [] if repo == "acme/broken" else ["0.5"]
    started = time.monotonic()
    line = resolve(repo, hub[0], tmp_path, *deadline)
    assert time.monotonic() - started < 20
    assert line.startswith(f"refused {repo} is no preset and could not be fetched: {hub[0]} ")
    assert "no usable answer in" in line or "500" in line


@pytest.mark.slow
def test_a_proxy_that_hangs_is_given_up(tmp_path: Path) -> None:
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections, answers nothing
        proxy = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        line = resolve("acme/tiny", "http://hub.invalid", tmp_path, "0.5", http_proxy=proxy)
    assert time.monotonic() - started < 20
    assert "no usable answer in 0.5 s" in line


@pytest.mark.slow
def test_what_was_fetched_before_is_used_where_the_hub_hangs(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    assert resolve("acme/tiny", hub[0], tmp_path) == "layers 28"
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        assert resolve("acme/tiny", f"http://127.0.0.1:{deaf.getsockname()[1]}", tmp_path, "0.5") == "layers 28"


def test_variables_that_huggingface_hub_cannot_read_are_told(tmp_path: Path) -> None:
    line = resolve("acme/tiny", "http://127.0.0.1:9", tmp_path, HF_HUB_ETAG_TIMEOUT="soon")
    assert line.startswith("refused acme/tiny is no preset; huggingface_hub does not start") and "HF_*" in line


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:99999", "no url", "ftp://x", "http://[", "http://x:y"])
def test_an_endpoint_that_is_no_url_is_refused(tmp_path: Path, endpoint: str) -> None:
    assert resolve("acme/tiny", endpoint, tmp_path).startswith("refused HF_ENDPOINT (")
