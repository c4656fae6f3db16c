"""The server under those who are slow, many, large or gone, and when it is ended itself."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import heeds_signals, is_there

from bridge_memory.plan.megatron.space import AXES
from bridge_memory.web import connections, jobs
from bridge_memory.web import server as serving
from bridge_memory.web.connections import Budget
from bridge_memory.web.server import Server

ROOT = Path(__file__).resolve().parents[2]
LLAMA: dict[str, Any] = {"model": "meta-llama/Llama-3.2-1B", "gpu": "H100", "options": {"num-gpus": 2}}
SEARCH = {"question": {"model": "deepseek-ai/DeepSeek-V3", "gpu": "H100", "options": {"num-gpus": 2048}}}
LOG = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1000.0 | max allocated: 2000.0 | reserved: 2100.0\n"
#: Of whatever takes a moment on an idle machine.
BOUND = 60.0


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("127.0.0.1", 0) as one:
        threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield one
        one.shutdown()


def until(true: Callable[[], object]) -> bool:
    end = time.monotonic() + BOUND
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def ask(port: int, path: str, document: Any = None) -> tuple[int, Any, str | None]:
    """(status, answer, Retry-After)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND)
    try:
        body = None if document is None else json.dumps(document).encode()
        connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), answer.headers["Retry-After"]
    finally:
        connection.close()


def begun(port: int, data: bytes) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=BOUND)
    one.sendall(data)
    return one


def upload(port: int, length: int, sent: bytes = b"", question: Any = LLAMA) -> socket.socket:
    """A comparison of ``length`` bytes beside its question, of which ``sent`` are sent."""
    head = json.dumps({"question": question, "name": "a log"}).encode() + b"\n"
    return begun(port, (
        f"POST /api/compare HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        f"Content-Length: {len(head) + length}\r\n\r\n"
    ).encode() + head + sent)  # fmt: skip


def status_of(one: socket.socket) -> int:
    with one, one.makefile("rb") as answer:
        return int(answer.readline().split()[1])


# ---- slow ----


@pytest.mark.parametrize("data", [
    b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n",
    b"POST /api/estimate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
], ids=["silent", "line", "headers", "body", "idle"])  # fmt: skip
def test_those_who_are_slow_to_ask_make_room(
    server: Server, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """80 of them once shut the page for everybody else."""
    monkeypatch.setattr(connections, "PATIENCE", 0.05)
    port = server.server_address[1]
    slow = [begun(port, data) for _ in range(80)]
    try:
        time.sleep(0.2)
        assert [ask(port, "/api/health")[0] for _ in range(20)] == [200] * 20
    finally:
        for one in slow:
            one.close()


@pytest.mark.slow
@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n",
    b"POST /api/estimate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 99999\r\n\r\n",
], ids=["headers", "body"])  # fmt: skip
def test_the_limit_is_of_the_whole_request(server: Server, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """A header line, or a byte, at a time: each read once had 20 s of its own."""
    monkeypatch.setattr(serving, "SECONDS", 0.5)
    with begun(server.server_address[1], data) as one:
        end = time.monotonic() + BOUND
        with suppress(ConnectionError):
            while time.monotonic() < end:
                one.sendall(b"X-Slow: 1\r\n")
                time.sleep(0.1)
        assert time.monotonic() < end


def test_an_upload_that_does_not_come_is_ended(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SECONDS", 0.5)
    assert status_of(upload(server.server_address[1], 1 << 19)) == 408
    assert server.files.take(serving.MOST_FILE)


# ---- many ----


@pytest.mark.slow
def test_everybody_of_many_at_once_is_answered(server: Server) -> None:
    """Of 200 questions 64 were once dropped without a word."""
    port = server.server_address[1]
    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(lambda _: ask(port, "/api/estimate", LLAMA), range(200)))
    assert {status for status, *_ in found} <= {200, 503} and found[0][0] in (200, 503)
    for status, answer, again in found:
        assert status == 200 or ("ask again" in answer["fix"] and again == "1")
    assert sum(status == 200 for status, *_ in found) >= connections.MOST_CONNECTIONS // 2
    assert ask(port, "/api/health")[0] == 200


def test_a_question_waits_for_its_turn_and_no_longer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge_memory.web.api.WAIT", 0.2)
    port = server.server_address[1]
    with server.api._desk.turn():
        assert ask(port, "/api/estimate", LLAMA)[0] == 503
    assert ask(port, "/api/estimate", LLAMA)[0] == 200


# ---- large ----


def test_questions_share_the_memory_that_there_is(server: Server) -> None:
    port = server.server_address[1]
    server.questions = Budget(10_000)
    status, answer, again = ask(port, "/api/estimate", {"config": "x" * 20_000})
    assert (status, again) == (503, "1") and "too much to do" in answer["message"]
    for question, expected in ((LLAMA, 200), ({"options": {"x": 1}}, 422), ({"config": "y" * 9_000}, 422)):
        assert ask(port, "/api/estimate", question)[0] == expected
    assert until(lambda: server.questions.take(10_000))  # all of it is given back, whatever became of the question


def test_files_share_the_space_that_there_is(server: Server) -> None:
    """64 of 256 MiB were once taken into memory, and then told that three are compared at a time."""
    port = server.server_address[1]
    with upload(port, 200 << 20):
        assert until(lambda: not server.files.take(100 << 20) or server.files.give_back(100 << 20))
        assert status_of(upload(port, 100 << 20)) == 503
        assert status_of(upload(port, len(LOG), LOG.encode())) == 200
    assert until(lambda: server.files.take(serving.MOST_FILE))


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks for processes in /proc")


@pytest.mark.slow
@needs_proc
def test_uploads_are_not_held_in_memory(tmp_path: Path) -> None:
    process, port = started(tmp_path)
    with process:
        try:
            before = _highest(process.pid)
            data = (LOG.encode() * ((80 << 20) // len(LOG) + 1))[: 80 << 20]
            with ThreadPoolExecutor(3) as pool:
                found = list(pool.map(lambda _: status_of(upload(port, len(data), data)), range(3)))
            assert set(found) == {200}
            assert _highest(process.pid) - before < 40 << 20
        finally:
            process.kill()


def _highest(pid: int) -> int:
    """The most memory that a process has had, bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.slow
@needs_proc
def test_a_snapshot_that_is_larger_in_memory_than_any_is_refused(server: Server) -> None:
    """64 bytes for each of a million empty lists a MiB."""
    data = b"\x80\x04" + b"]" * (24 << 20) + b"."
    with upload(server.server_address[1], len(data), data) as one, one.makefile("rb") as answer:
        text = answer.read1(1 << 16)
        while b"}" not in text.partition(b"\r\n\r\n")[2]:
            text += answer.read1(1 << 16)
    assert b" 422 " in text.partition(b"\r\n")[0] and b"memory" in text


# ---- gone ----


def _children(pid: int) -> list[int]:
    found = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return [*found, *(one for child in found for one in _children(child))]


def started(folder: Path) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge_memory", "serve", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True,
        cwd=ROOT, env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}, preexec_fn=heeds_signals,
    )  # fmt: skip
    assert process.stdout is not None
    return process, int(json.loads(process.stdout.readline())["url"].rstrip("/").rpartition(":")[2])


@needs_proc
@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP", "SIGINT", "SIGKILL"])
def test_nothing_is_left_of_a_server_that_is_ended(tmp_path: Path, how: str) -> None:
    """Its searches once went on at full speed, and uploads stayed in TMPDIR."""
    process, port = started(tmp_path)
    with process, upload(port, 1 << 20, b"x" * 1000):
        try:
            for _ in range(2):
                assert ask(port, "/api/search", SEARCH)[0] == 202
            assert until(lambda: len(_children(process.pid)) == 2)
            searches = _children(process.pid)
            # Some of them have begun; another is still importing.
            process.send_signal(getattr(signal, how))
            assert process.wait(BOUND) == (-9 if how == "SIGKILL" else 0)
            assert until(lambda: not any(map(is_there, searches)))
            assert list(tmp_path.iterdir()) == []
        finally:
            process.kill()


def test_a_signal_that_is_ignored_stays_so() -> None:
    """``nohup bridge-memory serve``: the end of the terminal is not that of the page."""
    from bridge_memory.cli.serve import _stop_at_signals

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in _stop_at_signals() and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Stuck(jobs.Job):
    """A comparison that never ends."""

    made: list[Stuck]

    def __init__(self, question: Any, files: Any = ()) -> None:
        self.made.append(self)
        super().__init__({**question, "job": "search", **SEARCH, "vary": list(AXES), "top": 5}, files)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stuck]]:
    Stuck.made = []
    monkeypatch.setattr(jobs, "Job", Stuck)
    yield Stuck.made


def test_a_comparison_ends_when_its_asker_is_gone(server: Server, stuck: list[Stuck]) -> None:
    with upload(server.server_address[1], len(LOG), LOG.encode()):
        assert until(lambda: stuck)
    assert until(lambda: stuck[0].done.is_set()) and stuck[0].cancelled


def test_a_comparison_that_takes_too_long_is_refused(
    server: Server, stuck: list[Stuck], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LONGEST", 0.5)
    assert status_of(upload(server.server_address[1], len(LOG), LOG.encode())) == 422
    assert until(lambda: stuck[0].done.is_set())


def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The empty one once was all addresses, with a warning that named none."""
    from bridge_memory.cli import main

    for host in ("", "  "):
        assert main(["serve", "--host", host, "--port", "0", "--check"]) == 2
        assert "--host is empty; give an address" in capsys.readouterr().err
