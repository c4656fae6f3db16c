"""``bridge-memory models``: the embedded models."""

from __future__ import annotations

import argparse

from bridge_memory.cli.output import add_output_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("pattern", nargs="?", default="", help="show only names that contain this")
    add_output_arguments(parser, "a list of {name, model_type, parameters, ...}")


def run(args: argparse.Namespace) -> int:
    """List presets with their parameters. Returns 0, or 2 (through SpecError) when nothing matches."""
    from bridge_memory.inventory.counts import model_parameters
    from bridge_memory.readers import list_presets, resolve_model
    from bridge_memory.spec import SpecError

    names = [n for n in list_presets() if args.pattern.lower() in n.lower()]
    if not names:
        raise SpecError(f"pattern {args.pattern!r} matches no preset; `bridge-memory models` lists all of them")
    rows = []
    for name in names:
        model = resolve_model(name)
        parameters, mtp = model_parameters(model)
        rows.append(
            {
                "name": name, "model_type": model.model_type, "num_layers": model.num_layers,
                "hidden_size": model.hidden_size, "parameters": parameters,
                "mtp_parameters": mtp,
            }
        )
    if args.json:
        import json

        print(json.dumps(rows, indent=2))
        return 0
    from bridge_memory.report.document import Column, Grid
    from bridge_memory.report.printing import print_blocks

    columns = (Column("model", words=True), Column("parameters"), Column("layers"), Column("hidden"))
    cells = [
        (str(row["name"]), f"{row['parameters']:,}", str(row["num_layers"]), str(row["hidden_size"])) for row in rows
    ]
    print_blocks([Grid("", columns, tuple(cells))])
    return 0
