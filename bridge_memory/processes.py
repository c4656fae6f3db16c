"""Processes that end with the one that started them, and locks that a fork finds free."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Protocol, TypeVar

#: The environment variable by which the server of ``mcp`` asks ``python -m bridge_memory`` for ``end_with_stdin``.
ENDS_WITH_STDIN = "BRIDGE_MEMORY_ENDS_WITH_STDIN"
#: Seconds between two looks at the parent.
_EVERY = 0.5


def end_with_stdin() -> None:
    """From now on, kill this process's group at the end of standard input. The command itself reads an empty one.

    The parent holds the other end, and the system closes that end however the parent dies.
    """
    parent = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.read(parent, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def end_with_parent(parent: int) -> None:
    """From now on, end this process when it is no longer a child of ``parent``. For forks, which have copies of all
    ends of pipes."""
    threading.Thread(target=_end_without, args=(parent,), daemon=True).start()


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_EVERY)
    os._exit(1)


class _Lock(Protocol):
    def acquire(self) -> bool: ...
    def release(self) -> None: ...


LockT = TypeVar("LockT", bound=_Lock)


def whole_in_forks(lock: LockT) -> LockT:
    """``lock``, for which every fork waits: no child has what it guards half done, held by a thread that the child does
    not have. Hold it for moments alone."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
