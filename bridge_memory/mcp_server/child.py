"""In the process of one command: it ends, with its children, when the server that started it is gone.

The server holds the other end of standard input, and the system closes that end however the server dies.
"""

from __future__ import annotations

import os
import signal
import threading

#: The environment variable by which the server asks ``python -m bridge_memory`` for ``end_with_stdin``.
ENDS_WITH_STDIN = "BRIDGE_MEMORY_ENDS_WITH_STDIN"


def end_with_stdin() -> None:
    """From now on, kill this process's group at the end of standard input. The command itself reads an empty one."""
    server = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    threading.Thread(target=_end_with, args=(server,), daemon=True).start()


def _end_with(server: int) -> None:
    while os.read(server, 1):
        pass
    os.killpg(0, signal.SIGKILL)
