"""Limits of all connections together: how many, how long one may take to ask, how many bytes they hold.

A server that can take no more says so (503) and is never silent. Who is slow to ask makes room for who is not.
"""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from bridge_memory.web.api import BUSY, plain_refusal

#: Concurrent connections that are answered, and that are refused at a time.
MOST_CONNECTIONS, MOST_REFUSED = 64, 32
#: Seconds for a whole request without its file; and for an answer.
SECONDS = 20.0
#: Seconds after which a request that is not complete may have to make room, and until it has.
PATIENCE, ROOM = 1.0, 0.5
#: Seconds for the refusal of a connection.
_REFUSING = 1.0
_BODY = json.dumps(plain_refusal(BUSY)).encode()
_ANSWER = (
    f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(_BODY)}\r\n"
    "Cache-Control: no-store\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
).encode() + _BODY


class Budget:
    """So many bytes, over all threads."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        """Whether there were ``count`` more."""
        with self._lock:
            if count > self._left:
                return False
            self._left -= count
            return True

    def give_back(self, count: int) -> None:
        with self._lock:
            self._left += count


class Sender(io.RawIOBase):
    """What a client sends, until ``ends``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        #: On the clock of ``time.monotonic``.
        self.ends = 0.0

    def give(self, seconds: float) -> None:
        """From now on."""
        self.ends = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request takes too long")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class Connections:
    """The connections of one server."""

    def __init__(self) -> None:
        self._answered = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._refused = threading.BoundedSemaphore(MOST_REFUSED)
        self._lock = threading.Lock()
        #: Connections whose request is not complete, and since when.
        self._asking: dict[socket.socket, float] = {}

    def enter(self) -> bool:
        """Whether one more can be answered; the slowest that is asking goes, where there are too many."""
        if self._answered.acquire(blocking=False):
            return True
        with self._lock:
            slowest = min(self._asking, key=lambda one: self._asking[one], default=None)
            if slowest is None or time.monotonic() - self._asking[slowest] < PATIENCE:
                return False
            del self._asking[slowest]
            with suppress(OSError):
                slowest.shutdown(socket.SHUT_RDWR)
        return self._answered.acquire(timeout=ROOM)

    def leave(self) -> None:
        self._answered.release()

    def asks(self, connection: socket.socket) -> None:
        """A request begins."""
        with self._lock:
            self._asking[connection] = time.monotonic()

    def asked(self, connection: socket.socket) -> None:
        """It is complete, or ended."""
        with self._lock:
            self._asking.pop(connection, None)

    def refuse(self, connection: socket.socket) -> None:
        """Answer 503 in a thread and close."""
        if not self._refused.acquire(timeout=_REFUSING):
            connection.close()
            return

        def refuse() -> None:
            try:
                with connection, suppress(OSError):
                    sender = Sender(connection)
                    sender.give(_REFUSING)
                    head = b""
                    while b"\r\n\r\n" not in head[-4096:] and len(head) < 1 << 16 and (part := _some(sender)):
                        head += part
                    connection.settimeout(_REFUSING)
                    connection.sendall(_ANSWER)
                    connection.shutdown(socket.SHUT_WR)
                    while _some(sender):  # or the end of the connection overtakes the answer
                        pass
            finally:
                self._refused.release()

        threading.Thread(target=refuse, daemon=True).start()


def _some(sender: Sender) -> bytes:
    return sender.read(1 << 12) or b""
