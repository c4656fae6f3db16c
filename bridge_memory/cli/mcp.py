"""``bridge-memory mcp``: a Model Context Protocol server over stdio."""

from __future__ import annotations

import argparse

from bridge_memory.cli.output import add_output_arguments
from bridge_memory.spec import SpecError

SCHEMA = "bridge-memory/mcp/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_output_arguments(parser, f"its tools, by the schema {SCHEMA}, and no server")
    group = parser.add_argument_group("server")
    group.add_argument("--check", action="store_true", help="list the tools and exit")


def run(args: argparse.Namespace) -> int:
    """Serve until the client closes standard input. Returns 0."""
    try:
        from bridge_memory.mcp_server.server import server
    except ImportError as error:
        raise SpecError(
            f"mcp needs {error.name or 'the mcp package'}, which is not installed; pip install 'bridge-memory[mcp]'"
        ) from None
    if not (args.check or args.json):
        server.run("stdio")
        return 0
    import asyncio
    import json

    tools = asyncio.run(server.list_tools())
    if args.json:
        print(json.dumps({"schema": SCHEMA, "tools": [tool.model_dump(mode="json", by_alias=True) for tool in tools]}))
    else:
        from bridge_memory.report.document import Pairs
        from bridge_memory.report.printing import print_blocks

        first = tuple((tool.name, (tool.description or "").splitlines()[0]) for tool in tools)
        print_blocks([Pairs("Tools", first)])
    return 0
