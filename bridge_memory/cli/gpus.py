"""``bridge-memory gpus``: the known GPUs and what of their memory torch can use."""

from __future__ import annotations

import argparse

from bridge_memory.cli.output import add_output_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_output_arguments(parser, "a list of {name, description, capacity_bytes, arch, capability}")


def run(args: argparse.Namespace) -> int:
    """List the GPUs. Returns 0."""
    from bridge_memory.cards.gpu import capability_words
    from bridge_memory.cards.rows import GPUS

    if args.json:
        import json

        keys = ("name", "description", "capacity_bytes", "arch", "capability")
        print(json.dumps([{key: getattr(gpu, key) for key in keys} for gpu in GPUS.values()], indent=2))
        return 0
    from bridge_memory.report.document import Column, Grid
    from bridge_memory.report.printing import print_blocks
    from bridge_memory.report.units import format_ticks, ticks

    rows = tuple(
        (g.name, format_ticks(ticks(g.capacity_bytes, "GiB"), "GiB"), capability_words(g), g.description)
        for g in GPUS.values()
    )
    columns = (Column("GPU", words=True), Column("usable GiB"), Column("capability"), Column("card", words=True))
    note = "usable: total_memory as torch reports it; a run can take less of it by the margin that its estimate states"
    print_blocks([Grid("Known GPUs (names for --gpu)", columns, rows, None, (note,))])
    return 0
