"""``bridge-memory serve``: the web page, on this machine."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from typing import Any

from bridge_memory.cli.output import add_output_arguments
from bridge_memory.cli.threads import multiply_in_one_thread
from bridge_memory.garbage import collections_when_idle
from bridge_memory.spec import SpecError

SCHEMA = "bridge-memory/serve/1"
DEFAULT_PORT = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_output_arguments(parser, f"the page's address, by the schema {SCHEMA}")
    group = parser.add_argument_group("server")
    group.add_argument("--port", type=int, default=DEFAULT_PORT, metavar="N",
                       help=f"port (default: {DEFAULT_PORT}; 0: any free one)")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                       help="address to listen at (default: 127.0.0.1, this machine only)")
    group.add_argument("--hub", action="store_true",
                       help="let the page fetch config.json files from the Hugging Face Hub, with this machine's token")
    group.add_argument("--open", action="store_true", help="open the page in the browser")
    group.add_argument("--check", action="store_true", help="start, compute one estimate, and exit")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. Returns 0."""
    from bridge_memory.web.server import Server, is_loopback

    multiply_in_one_thread()
    if not 0 <= args.port < 65536:
        raise SpecError(f"--port ({args.port}) is no port; give 0 to 65535")
    if not args.host.strip():
        raise SpecError("--host is empty; give an address, such as 127.0.0.1, or 0.0.0.0 for all of this machine")
    try:
        server = Server(args.host, args.port, hub=args.hub)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(
            f"cannot listen at {args.host} port {args.port} ({why}); give another --port or --host"
        ) from None
    before = _stop_at_signals()
    try:
        if not is_loopback(args.host):
            print(
                f"bridge-memory: warning: --host {args.host} lets everybody who reaches this machine use the page, "
                "without password or encryption", file=sys.stderr,
            )  # fmt: skip
        if args.json:
            print(json.dumps({"schema": SCHEMA, "url": server.url, "hub": args.hub}), flush=True)
        else:
            print(f"bridge-memory is at {server.url} (Ctrl-C to stop)", flush=True)
        if args.check:
            server.api.estimate({"model": "meta-llama/Llama-3.2-1B"})
            return 0
        if args.open:
            import webbrowser

            webbrowser.open(server.url)
        with collections_when_idle(lambda: server.answered):
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        server.server_close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _stop_at_signals() -> dict[int, Any]:
    """Make SIGTERM and SIGHUP what Ctrl-C is, so that searches end too. Returns their handlers so far. A signal that is
    ignored (``nohup``) stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, signal.default_int_handler)
    return before
