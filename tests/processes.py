"""Processes that tests start and end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from pathlib import Path


def is_there(pid: int) -> bool:
    """Not as a zombie either, which nobody may reap where there is no init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: Iterable[int], seconds: float = 20.0) -> bool:
    """Whether they all end; the bound is for a busy machine."""
    end = time.monotonic() + seconds
    pids = list(pids)
    while any(map(is_there, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def heeds_signals() -> None:
    """Popen's ``preexec_fn``: under nohup, or in the background of a script, pytest ignores these signals, and what it
    starts would as well."""
    for name in (signal.SIGHUP, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
