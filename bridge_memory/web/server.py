"""HTTP: access checks, limits and routes.

The page is for people who can open it on this machine. Other sites open in their browser can reach it too, therefore:

- a request must name this host (``Host``): another name pointed at 127.0.0.1 (DNS rebinding) is refused;
- a request from another site (``Origin``, ``Sec-Fetch-Site``) is refused; requests with effects are POSTs of JSON or
  octets, which another site cannot send without a preflight;
- bodies, headers, connections and seconds are limited; the only files served are the page's own, held in memory.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge_memory.files import parse_json
from bridge_memory.report.page.one_file import asset
from bridge_memory.spec.errors import show
from bridge_memory.web.api import Api, Refused, plain_refusal
from bridge_memory.web.jobs import Jobs
from bridge_memory.web.openapi import document as openapi

#: Largest JSON body, and largest log or snapshot with its question, bytes.
MOST_JSON, MOST_FILE = 4 << 20, 256 << 20
#: Concurrent connections; seconds within which the next bytes of a request must arrive.
MOST_CONNECTIONS, SECONDS = 64, 20.0
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
        self.assets |= {f"report/{name}": asset(name).encode() for name in ("charts.js", "plots.js", "style.css")}
        self._connections = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

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
    timeout = SECONDS
    #: Small answers leave at once.
    disable_nagle_algorithm = True

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
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:  # a bug here, not in the request
            message = f"{type(error).__name__}: {show(str(error))} (a bug in bridge-memory)"
            if os.environ.get("BRIDGE_MEMORY_TRACEBACK"):
                raise
            self._json(plain_refusal(message), 500)

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

    def _body(self, most: int, kind: str) -> bytes:
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
        self._body_read = True
        data = self.rfile.read(length)
        if len(data) < length:
            raise ConnectionError("the body ended early")
        return data

    def _question(self) -> Any:
        return self._parsed(self._body(MOST_JSON, "application/json"))

    def _parsed(self, data: bytes) -> Any:
        try:
            return parse_json(data.decode("utf-8"))
        except ValueError:
            self._refuse("the body is not valid JSON in UTF-8; give an object", 400)

    # ---- answers ----

    def _get(self, path: str) -> None:
        server = self.server
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
        if path == "/api/report":
            return self._json(server.api.report(self._question()))
        if path == "/api/search":
            return self._json(server.jobs.start(self._search(self._question())).as_json(), 202)
        if path.startswith("/api/search/") and path.endswith("/cancel"):
            job = server.jobs.get(path.removeprefix("/api/search/").removesuffix("/cancel"))
            job.cancel()
            job.done.wait(5.0)
            return self._json(job.as_json())
        if path == "/api/compare":
            return self._json(self._compare())
        return self._refuse(f"nothing is asked at {show(path)}; /api/openapi.json lists what is", 404)

    def _search(self, asked: Any) -> dict[str, Any]:
        from bridge_memory.plan.megatron.space import AXES

        if not isinstance(asked, dict) or not isinstance(asked.get("question"), dict):
            self._refuse("question is missing; give {question, vary, top}", 400)
        vary, top = asked.get("vary", list(AXES)), asked.get("top", 20)
        if not isinstance(vary, list) or not vary or not all(type(a) is str and a in AXES for a in vary):
            self._refuse(f"vary ({show(vary)}) is no list of axes; give some of {', '.join(AXES)}", 422)
        if type(top) is not int or not 1 <= top <= _TOP:
            self._refuse(f"top ({show(top)}) is no number of rows; give 1 to {_TOP}", 422)
        return {"job": "search", "question": asked["question"], "vary": vary, "top": top, "hub": self.server.api.hub}

    def _compare(self) -> dict[str, Any]:
        """The body: one line of JSON, {question or null, name, stage}, then the file."""
        head, _, data = self._body(MOST_FILE, "application/octet-stream").partition(b"\n")
        if len(head) > MOST_JSON:
            self._refuse("the first line is too long; give {question, name, stage} and the file behind it", 413)
        asked = self._parsed(head)
        if not isinstance(asked, dict) or not isinstance(asked.get("question"), (dict, type(None))):
            self._refuse("the first line is not {question, name, stage}; give it before the file", 400)
        name, stage = asked.get("name", "the file"), asked.get("stage", 0)
        if type(name) is not str or type(stage) is not int or stage < 0:
            self._refuse("name is a text and stage a number of 0 or more; give these", 422)
        with tempfile.NamedTemporaryFile(prefix="bridge-memory-") as file:
            file.write(data)
            file.flush()
            del data
            job = self.server.jobs.start(
                {"job": "compare", "question": asked["question"], "name": name[:120], "stage": stage,
                 "path": file.name, "hub": self.server.api.hub}
            )  # fmt: skip
            while not job.done.wait(5.0):
                self.server.jobs.get(job.id)  # keeps the job alive
        if job.refused is not None:
            raise Refused(job.refused)
        return job.result or {}

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
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        if not self._body_read and self.command == "POST":
            self._drain()

    def _drain(self) -> None:
        """Read a little of a refused body, so that the sender gets to read the answer."""
        self.wfile.flush()
        self.connection.settimeout(0.5)
        left = 2 * MOST_JSON
        try:
            while left > 0 and (part := self.rfile.read1(1 << 16)):
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
