"""Long or untrusted work in separate processes: searches, and files to compare.

A process can be stopped at any time, does not block other answers, and returns its memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from bridge_memory.web.api import BUSY, Refused, plain_refusal

#: Concurrent jobs; seconds for which an answer is kept; seconds without a request after which a job is killed.
MOST, KEPT, FORGOTTEN = 3, 600, 30
#: Seconds of a comparison.
LONGEST = 300
#: The package's root, for the PYTHONPATH of the processes.
_ROOT = str(Path(__file__).resolve().parents[2])
_START = "from bridge_memory.web.worker import main; main()"


class Job:
    """One process and its last message. It ends with this one, however that ends."""

    def __init__(self, question: Mapping[str, Any], files: tuple[int, ...] = ()) -> None:
        """``files``: open ones that it has too, by the same numbers."""
        self.id = uuid.uuid4().hex
        self.asked_at = self.started = time.monotonic()
        self.progress: dict[str, Any] = {}
        self.result: dict[str, Any] | None = None
        self.refused: dict[str, Any] | None = None
        self.cancelled = False
        self.done = threading.Event()
        path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": path}, text=True, start_new_session=True, pass_fds=files,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        threading.Thread(target=self._talk, args=(self._process.stdin, self._process.stdout, question),
                         daemon=True).start()  # fmt: skip

    def _talk(self, to: IO[str], of: IO[str], question: Mapping[str, Any]) -> None:
        with suppress(ValueError, BrokenPipeError), to, of:  # ``to`` stays open: its end ends the process
            to.write(f"{json.dumps(question)}\n")
            to.flush()
            for line in of:
                message = json.loads(line)
                self.progress = message.get("progress", self.progress)
                self.result = message.get("result", self.result)
                self.refused = message.get("refused", self.refused)
        self._process.wait()
        if self.result is None and self.refused is None and not self.cancelled:
            self.refused = plain_refusal("it ended without an answer, perhaps out of memory; try a smaller one")
        self.done.set()

    def cancel(self) -> None:
        """Stop it; a search reports what it found so far."""
        self.cancelled = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it with all that it started."""
        self.cancelled = True
        if self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def as_json(self) -> dict[str, Any]:
        state = "running" if not self.done.is_set() else "cancelled" if self.cancelled else "done"
        if self.refused is not None and self.done.is_set():
            state = "refused"
        return {
            "id": self.id, "state": state, "seconds": round(time.monotonic() - self.started, 1),
            "progress": self.progress, "result": self.result, "refused": self.refused,
        }  # fmt: skip


class Jobs:
    """The jobs of one server."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._sweep, daemon=True).start()

    def check_free(self) -> None:
        """Raise Refused where ``MOST`` are running."""
        if self._closed.is_set():
            raise Refused(plain_refusal(BUSY), 503)
        if sum(not job.done.is_set() for job in list(self._jobs.values())) >= MOST:
            raise Refused(plain_refusal(f"{MOST} searches or comparisons are running; cancel one of them"), 429)

    def start(self, question: Mapping[str, Any], files: tuple[int, ...] = ()) -> Job:
        """Start a job. Raises Refused where ``MOST`` are running."""
        with self._lock:
            self.check_free()
            job = Job(question, files)
            self._jobs[job.id] = job
            return job

    def get(self, name: str) -> Job:
        """The job with this id. Raises Refused for an unknown one."""
        job = self._jobs.get(name)
        if job is None:
            raise Refused(plain_refusal("there is no such search (any more); start it again"), 404)
        job.asked_at = time.monotonic()
        return job

    def close(self) -> None:
        """Kill all jobs."""
        self._closed.set()
        with self._lock:
            for job in self._jobs.values():
                job.kill()

    def _sweep(self) -> None:
        while not self._closed.wait(1.0):
            now = time.monotonic()
            with self._lock:
                for name, job in list(self._jobs.items()):
                    if now - job.asked_at > (KEPT if job.done.is_set() else FORGOTTEN):
                        job.kill()
                        del self._jobs[name]
