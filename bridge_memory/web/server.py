"""HTTP: access checks, limits and routes.

The page is for people who can open it on this machine. Other sites open in their browser can reach it too, therefore:

- a request must name this host (``Host``): another name pointed at 127.0.0.1 (DNS rebinding) is refused;
- a request from another site (``Origin``, ``Sec-Fetch-Site``) is refused; requests with effects are POSTs of JSON or
  octets, which another site cannot send without a preflight;
- bodies, headers, connections and seconds are limited; the only files served are the page's own, held in memory.
"""

from __future__ import annotations

import hashlib
import io
import ipaddress
import json
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from bridge_memory.files import parse_json
from bridge_memory.report.page.one_file import asset
from bridge_memory.spec.errors import show
from bridge_memory.web.api import BUSY, Api, Refused, plain_refusal
from bridge_memory.web.connections import SECONDS, Budget, Connections, Sender
from bridge_memory.web.jobs import LONGEST, Job, Jobs
from bridge_memory.web.openapi import document as openapi

#: Largest JSON body, and all that are being read and answered, bytes.
MOST_JSON, MOST_QUESTIONS = 1 << 20, 8 << 20
#: Largest log or snapshot, and all that are being compared, bytes; they are kept on disk. Bytes of one that must arrive
#: in a second.
MOST_FILE, SLOWEST = 256 << 20, 1 << 20
_CHUNK = 1 << 16
#: Bytes of a refused body that are read, and seconds, so that its sender gets to read the answer.
_DRAINED, _DRAINING = 8 << 20, 1.0
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
          ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}  # fmt: skip
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE = Path(__file__).resolve().parent / "page"
#: Rows of a search, at most.
_TOP = 50


class Server(ThreadingHTTPServer):
    """One page and its API."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, host: str, port: int, *, hub: bool = False) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.api, self.jobs = Api(hub=hub), Jobs()
        self.hosts = _own_names(host)
        self.assets = {path.relative_to(_PAGE).as_posix(): path.read_bytes() for path in sorted(_PAGE.rglob("*"))
                       if path.suffix in _TYPES}  # fmt: skip
        of_report = ("charts.js", "plots.js", "rollout.js", "style.css")
        self.assets |= {f"report/{name}": asset(name).encode() for name in of_report}
        self.connections = Connections()
        #: Requests so far, and when the last one was answered (``time.monotonic``).
        self.answered = (0, time.monotonic())
        self.questions, self.files = Budget(MOST_QUESTIONS), Budget(MOST_FILE + MOST_JSON)
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.enter():
            self.connections.refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.connections.leave()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.leave()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        self.jobs.close()
        super().server_close()


def _own_names(host: str) -> frozenset[str]:
    """Host names of this server. IP addresses are always allowed: a browser with an address was given no name."""
    names = {"localhost", host.lower()}
    if not is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "bridge-memory", ""
    #: Small answers leave at once.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.sender = Sender(self.connection)
        self.rfile = io.BufferedReader(self.sender)

    def handle_one_request(self) -> None:
        self.sender.give(SECONDS)
        self.server.connections.asks(self.connection)
        #: Bytes of the question that are held.
        self._held = 0
        try:
            super().handle_one_request()
        finally:
            self.server.connections.asked(self.connection)
            self.server.questions.give_back(self._held)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, answer: Callable[[str], None]) -> None:
        self._body_read = False
        try:
            self._check_who()
            answer(urlsplit(self.path).path)
        except Refused as refused:
            self._json(refused.document, refused.status)
        except TimeoutError:
            self._body_read, self.close_connection = False, True
            self._json(plain_refusal("the request takes too long to arrive; send it faster"), 408)
        except ConnectionError:
            self.close_connection = True
        except Exception as error:  # a bug here, not in the request
            message = f"{type(error).__name__}: {show(str(error))} (a bug in bridge-memory)"
            if os.environ.get("BRIDGE_MEMORY_TRACEBACK"):
                raise
            self._json(plain_refusal(message), 500)
        finally:
            self.server.answered = (self.server.answered[0] + 1, time.monotonic())

    # ---- access ----

    def _check_who(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            self._refuse(f"Host ({show(', '.join(hosts))}) is not this server; open {self.server.url}", 421)
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != hosts[0].lower():
            self._refuse(f"Origin ({show(origin)}) is another site; open {self.server.url}", 403)
        if self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none") and self.path.startswith("/api"):
            self._refuse(f"the request comes from another site; open {self.server.url}", 403)

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
            _ = urlsplit(f"//{host}").port
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return name in self.server.hosts

    def _refuse(self, message: str, status: int) -> None:
        raise Refused(plain_refusal(message), status)

    # ---- requests ----

    def _length(self, most: int, kind: str) -> int:
        """Bytes of the body."""
        if self.headers.get("Transfer-Encoding") is not None:
            self._refuse("bodies come whole; give a Content-Length", 411)
        given = self.headers.get_all("Content-Length") or []
        if len(given) != 1 or not (given[0].isascii() and given[0].isdecimal() and len(given[0]) < 16):
            self._refuse("the length of the body is missing; give one Content-Length", 411)
        length = int(given[0])
        if length > most:
            self._refuse(f"{length:,} bytes are more than the {most >> 20} MiB that are read; give less", 413)
        if (self.headers.get("Content-Type") or "").partition(";")[0].strip().lower() != kind:
            self._refuse(f"the body is no {kind}; say so in Content-Type", 415)
        return length

    def _parts(self, length: int) -> Iterator[bytes]:
        """The body, as it comes."""
        self._body_read = True
        while length:
            part = self.rfile.read1(min(length, _CHUNK))
            if not part:
                raise ConnectionError("the body ended early")
            length -= len(part)
            yield part

    def _hold(self, count: int) -> None:
        """So many bytes of the question more are in memory. Raises Refused."""
        if not self.server.questions.take(count):
            self._body_read = False
            raise Refused(plain_refusal(BUSY), 503)
        self._held += count

    def _question(self) -> Any:
        data = bytearray()
        for part in self._parts(self._length(MOST_JSON, "application/json")):
            self._hold(len(part))
            data += part
        return self._parsed(bytes(data))

    def _parsed(self, data: bytes) -> Any:
        self.server.connections.asked(self.connection)
        try:
            return parse_json(data.decode("utf-8"))
        except ValueError:
            self._refuse("the body is not valid JSON in UTF-8; give an object", 400)

    # ---- answers ----

    def _get(self, path: str) -> None:
        server = self.server
        server.connections.asked(self.connection)
        if path == "/api/options":
            return self._json(server.api.options())
        if path == "/api/models":
            return self._json(server.api.models())
        if path == "/api/openapi.json":
            return self._json(openapi())
        if path == "/api/health":
            return self._json({"ok": True})
        if path.startswith("/api/search/"):
            return self._json(server.jobs.get(path.removeprefix("/api/search/")).as_json())
        name = path.removeprefix("/") or "index.html"
        data = server.assets.get(name)
        if data is None:
            self._refuse(f"there is no {show(path)} here; open {server.url}", 404)
        assert data is not None
        tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        if self.headers.get("If-None-Match") == tag:
            return self._send(304, b"", _TYPES[Path(name).suffix], tag)
        return self._send(200, data, _TYPES[Path(name).suffix], tag)

    def _post(self, path: str) -> None:
        server = self.server
        if path == "/api/estimate":
            return self._json(server.api.estimate(self._question()))
        if path == "/api/whatif":
            return self._json(server.api.whatif(self._question()))
        if path == "/api/phases":
            return self._json(server.api.phases(self._question()))
        if path == "/api/rollout":
            return self._json(server.api.rollout(self._question()))
        if path == "/api/report":
            return self._json(server.api.report(self._question()))
        if path == "/api/search":
            return self._json(server.jobs.start(self._search(self._question())).as_json(), 202)
        if path == "/api/fit":
            question = self._question()
            if not isinstance(question, dict):
                self._refuse("the question is not an object; give that of /api/estimate", 400)
            asked = {"job": "fit", "question": question, "hub": server.api.hub}
            return self._json(server.jobs.start(asked).as_json(), 202)
        if path.startswith("/api/search/") and path.endswith("/cancel"):
            job = server.jobs.get(path.removeprefix("/api/search/").removesuffix("/cancel"))
            job.cancel()
            job.done.wait(5.0)
            return self._json(job.as_json())
        if path == "/api/compare":
            return self._json(self._compare())
        return self._refuse(f"nothing is asked at {show(path)}; /api/openapi.json lists what is", 404)

    def _search(self, asked: Any) -> dict[str, Any]:
        from bridge_memory.web.options import search_axes

        known = list(dict.fromkeys(axis for axes, _ in search_axes().values() for axis in axes))
        if not isinstance(asked, dict) or not isinstance(asked.get("question"), dict):
            self._refuse("question is missing; give {question, vary, top}", 400)
        vary, top = asked.get("vary"), asked.get("top", 20)
        some = isinstance(vary, list) and vary and all(type(a) is str and a in known for a in vary)
        if vary is not None and not some:
            self._refuse(f"vary ({show(vary)}) is no list of axes; give some of {', '.join(known)}", 422)
        if type(top) is not int or not 1 <= top <= _TOP:
            self._refuse(f"top ({show(top)}) is no number of rows; give 1 to {_TOP}", 422)
        return {"job": "search", "question": asked["question"], "vary": vary, "top": top, "hub": self.server.api.hub}

    def _compare(self) -> dict[str, Any]:
        """The body: one line of JSON, {question or null, name, stage}, then the file."""
        length = self._length(MOST_FILE + MOST_JSON, "application/octet-stream")
        self.server.jobs.check_free()
        if not self.server.files.take(length):
            raise Refused(plain_refusal(BUSY), 503)
        try:
            # A file without a name: nothing is left of it, however this process ends.
            with tempfile.TemporaryFile(prefix="bridge-memory-") as file:
                return self._compared(self._received(length, file), file.fileno())
        finally:
            self.server.files.give_back(length)

    def _received(self, length: int, file: IO[bytes]) -> Any:
        """The first line of the body, parsed; what follows it goes to ``file``."""
        self.server.connections.asked(self.connection)  # it makes room for nobody: there are few, and it has its time
        self.sender.give(SECONDS + length / SLOWEST)
        head, at_head = bytearray(), True
        for part in self._parts(length):
            if at_head:
                line, newline, part = part.partition(b"\n")
                self._hold(len(line))
                head += line
                at_head = not newline
                if len(head) > MOST_JSON:
                    self._body_read = False
                    self._refuse("the first line is too long; give {question, name, stage} and the file behind it", 413)
            file.write(part)
        file.seek(0)
        return self._parsed(bytes(head))

    def _compared(self, asked: Any, file: int) -> dict[str, Any]:
        if not isinstance(asked, dict) or not isinstance(asked.get("question"), (dict, type(None))):
            self._refuse("the first line is not {question, name, stage}; give it before the file", 400)
        name, stage = asked.get("name", "the file"), asked.get("stage", 0)
        if type(name) is not str or type(stage) is not int or stage < 0:
            self._refuse("name is a text and stage a number of 0 or more; give these", 422)
        question = {"job": "compare", "question": asked["question"], "name": name[:120], "stage": stage,
                    "path": f"/dev/fd/{file}", "hub": self.server.api.hub}  # fmt: skip
        job = self.server.jobs.start(question, (file,))
        while not job.done.wait(1.0):
            self.server.jobs.get(job.id)  # keeps the job alive
            self._check_worth(job)
        if job.refused is not None:
            raise Refused(job.refused)
        return job.result or {}

    def _check_worth(self, job: Job) -> None:
        """End a job that takes too long, or whose asker is gone."""
        if time.monotonic() - job.started > LONGEST:
            job.kill()
            self._refuse(f"comparing it takes more than {LONGEST} s; give less of it", 422)
        if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
            job.kill()
            raise ConnectionError("the asker is gone")

    def _json(self, document: Any, status: int = 200) -> None:
        self._send(status, json.dumps(document, allow_nan=False).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str, tag: str | None = None) -> None:
        if not self._body_read and self.command == "POST":
            self.close_connection = True  # An unread body must not be read as the next request.
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-cache" if tag else "no-store")
        if tag:
            self.send_header("ETag", tag)
        if status == 503:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.connection.settimeout(SECONDS)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        if not self._body_read and self.command == "POST":
            self._drain()

    def _drain(self) -> None:
        """Read a little of a refused body, so that the sender gets to read the answer."""
        self.wfile.flush()
        self.sender.give(_DRAINING)
        left = _DRAINED
        try:
            while left > 0 and (part := self.rfile.read1(_CHUNK)):
                left -= len(part)
        except OSError:
            pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refusals of the standard library (unknown method, header too long), as JSON."""
        self._body_read, self.close_connection = False, True
        if not hasattr(self, "command") or self.command is None:
            self.command = "GET"
        if not hasattr(self, "request_version") or not self.request_version:
            self.request_version = "HTTP/1.1"
        self._json(plain_refusal(f"{message or 'this request is not understood'}; see /api/openapi.json"), code)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line per change on the page helps nobody."""
