"""``bridge-memory gpus``: the known GPUs and what of their memory a process can use."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="a JSON list of {name, description, usable_bytes}")


def run(args: argparse.Namespace) -> int:
    """List every GPU. Returns 0."""
    from bridge_memory.gpus import all_gpus
    from bridge_memory.report.document import Column, Grid, Notes
    from bridge_memory.report.show import print_document
    from bridge_memory.report.units import GIB_UNIT

    gpus = all_gpus()
    if args.json:
        import json

        rows = [{"name": g.name, "description": g.description, "usable_bytes": g.usable_bytes} for g in gpus]
        print(json.dumps(rows, indent=2))
        return 0
    grid = Grid(
        "",
        (Column("name", left=True), Column("usable GiB"), Column("card", left=True)),
        tuple((g.name, GIB_UNIT.format(g.usable_bytes), g.description) for g in gpus),
    )
    notes = Notes(
        "usable: total_memory as torch reports it; a run can take that less the margin that `estimate` states", ()
    )
    print_document([grid, notes], sys.stdout)
    return 0
