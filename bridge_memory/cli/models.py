"""``bridge-memory models``: the embedded models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bridge_memory.cli.output import add_output_arguments

if TYPE_CHECKING:
    from bridge_memory.report.document import Grid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("pattern", nargs="?", default="", metavar="NAME",
                        help="list those whose names contain this (/: all)")
    add_output_arguments(parser, "a list of {name, model_type, parameters, ...}")


def run(args: argparse.Namespace) -> int:
    """Presets by organisation, or those of a pattern with their sizes. Returns 0, or 2 (through SpecError) when nothing
    matches."""
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
    from bridge_memory.report.printing import print_blocks

    print_blocks([_with_sizes(rows) if args.pattern else _by_organisation(rows)])
    return 0


def _with_sizes(rows: Sequence[dict[str, Any]]) -> Grid:
    from bridge_memory.report.document import Column, Grid

    columns = (Column("model", words=True), Column("parameters"), Column("layers"), Column("hidden"))
    cells = [(row["name"], f"{row['parameters']:,}", str(row["num_layers"]), str(row["hidden_size"])) for row in rows]
    return Grid("", columns, tuple(cells))


def _by_organisation(rows: Sequence[dict[str, Any]]) -> Grid:
    """One row each: how many, from which size to which, and their names."""
    from bridge_memory.report.document import Column, Grid
    from bridge_memory.report.units import format_count

    of: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of.setdefault(row["name"].partition("/")[0], []).append(row)
    cells = []
    for organisation, models in of.items():
        least, most = (format_count(end(row["parameters"] for row in models)) for end in (min, max))
        names = ", ".join(row["name"].partition("/")[2] for row in models)
        cells.append((organisation, str(len(models)), least if least == most else f"{least} to {most}", names))
    columns = (Column("organisation", words=True), Column("models"), Column("parameters", words=True),
               Column("names", words=True))  # fmt: skip
    note = (
        "`bridge-memory models NAME` lists layers, hidden size and parameters of those whose names contain NAME (/: of "
        "all). Any other model: its Hub id, or its config.json."
    )
    return Grid(f"{len(rows)} models that need no file", columns, tuple(cells), None, (note,))
