"""A document on a terminal, through rich."""

from __future__ import annotations

from typing import TextIO

from bridge_memory.report.document import Document, Facts, Grid, Notes, Title
from bridge_memory.report.plain import grid_lines

#: What rich's box adds to a column: its two spaces and one line.
_FRAME = 3


def print_document(document: Document, stream: TextIO) -> None:
    """Print to a terminal, in its width. Raises ImportError where rich is missing."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for i, part in enumerate(document):
        if i:
            console.print()
        if isinstance(part, Title):
            console.print(Text(part.text, "bold"))
        elif isinstance(part, Facts):
            facts = Table.grid(padding=(0, 2))
            for label, text in part.rows:
                facts.add_row(Text(label, "dim"), Text(text))
            console.print(facts)
        elif isinstance(part, Notes):
            console.print(Text(part.title, "bold"))
            notes = Table.grid(padding=(0, 1))
            for line in part.lines:
                notes.add_row(" -", Text(line))
            console.print(notes)
        else:
            _print_grid(part, console, Table, box.SIMPLE_HEAD, escape)


def _print_grid(grid: Grid, console, table_type, box, escape) -> None:  # type: ignore[no-untyped-def]
    from rich.text import Text

    if grid.title:
        console.print(Text(grid.title, "bold"))
    if grid.width(_FRAME) + _FRAME > console.width:
        # Rich would fold or cut cells; the plain layout does neither.
        for line in grid_lines(grid, console.width):
            console.print(Text(line), soft_wrap=True)
        return
    table = table_type(box=box, padding=(0, 1), pad_edge=False, show_edge=False, header_style="dim")
    for column in grid.columns:
        table.add_column(escape(column.head), justify="left" if column.left else "right", no_wrap=True)
    for i, row in enumerate(grid.rows):
        table.add_row(*(Text(cell) for cell in row), style="bold green" if i == grid.marked else "")
    console.print(table)
