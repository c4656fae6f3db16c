"""Run one ``bridge-memory`` command in a child process, with a timeout."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteReceiveStream, Process

import bridge_memory
from bridge_memory.processes import ENDS_WITH_STDIN
from bridge_memory.spec import SpecError, show
from bridge_memory.spec.errors import bounded

#: Exit codes of an answer: 0; 1 of ``compare --tolerance``, 3 of ``estimate --require-fit``.
_ANSWERED = (0, 1, 3)
#: Flags of a command that this server decides: they write files, or change the form of the answer.
_RESERVED = ("--output", "--force", "--format", "--json", "--cache", "--jobs", "--backend", "--brief", "--unit",
             "--verbose", "--help", "--help-all", "--emit", "--row")  # fmt: skip
#: Characters of a refusal that are passed on, and seconds that a caller may allow one command.
_LONGEST, MOST_SECONDS = 2000, 600.0


def check_flags(flags: Sequence[str]) -> None:
    """Raise SpecError for a flag that is the server's own to set."""
    for word in flags:
        name = word.partition("=")[0]
        if name in _RESERVED or re.fullmatch("-[hv]+", name):
            raise SpecError(f"flags ({show(word)}) writes a file or changes the form of the answer; drop {name}")


def check_seconds(seconds: float) -> None:
    """Raise SpecError for a time limit that is none."""
    if not 0 < seconds <= MOST_SECONDS:
        raise SpecError(f"timeout_seconds ({seconds:g}) is not in (0, {MOST_SECONDS:g}]; give a number of seconds")


async def answer(words: Sequence[str], *, seconds: float) -> Any:
    """The JSON that ``bridge-memory WORDS --json`` prints.

    Raises SpecError with the command's own refusal, or where it takes more than ``seconds``. The process is killed
    with its children on timeout, when the caller stops waiting, or when this process ends.
    """
    folder = str(Path(bridge_memory.__file__).resolve().parents[1])
    path = os.pathsep.join(part for part in (folder, os.environ.get("PYTHONPATH")) if part)
    try:
        process = await anyio.open_process(
            [sys.executable, "-m", "bridge_memory", *words, "--json"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, ENDS_WITH_STDIN: "1"},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # an argument that is too long, or holds a zero byte
        longest = max(words, key=lambda word: ("\0" in word, len(word)))
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError(f"{show(longest)} cannot be passed to a process ({reason}); give less") from None
    try:
        with anyio.fail_after(seconds):
            out, err = await _communicate(process)
            code = await process.wait()
    except TimeoutError:
        raise SpecError(
            f"timeout_seconds ({seconds:g}) is over before `bridge-memory {words[0]}` had an answer; allow more, or "
            "ask for less (a search: fix sizes such as tp and pp)"
        ) from None
    finally:
        _kill(process)
        with anyio.CancelScope(shield=True):
            await process.aclose()
    if code not in _ANSWERED:
        lines = [line for line in err.splitlines() if line.startswith("bridge-memory:")] or err.splitlines()[-1:]
        said = lines[-1] if lines else f"bridge-memory {words[0]} ended with {code}"
        raise SpecError(bounded(said.removeprefix("bridge-memory: ").removeprefix("error: "), _LONGEST))
    return json.loads(out)


async def _communicate(process: Process) -> tuple[str, str]:
    """What the process printed on stdout and stderr."""
    found = {"out": b"", "err": b""}

    async def read(name: str, stream: ByteReceiveStream) -> None:
        async for chunk in stream:
            found[name] += chunk

    async with anyio.create_task_group() as tasks:
        assert process.stdout is not None and process.stderr is not None
        tasks.start_soon(read, "out", process.stdout)
        tasks.start_soon(read, "err", process.stderr)
    return found["out"].decode(errors="replace"), found["err"].decode(errors="replace")


def _kill(process: Process) -> None:
    """End the process and its children where it has not ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
