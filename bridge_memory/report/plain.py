"""A document as plain text: nothing is cut off; what is too wide for a table becomes a list."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from bridge_memory.report.document import Document, Facts, Grid, Notes, Part, Title

WIDTH = 80


def render(document: Document, width: int = WIDTH) -> str:
    """The whole document, lines of at most ``width`` characters (longer only where one word is longer)."""
    return "\n\n".join("\n".join(_lines(part, width)) for part in document) + "\n"


def _lines(part: Part, width: int) -> Iterator[str]:
    if isinstance(part, Title):
        yield from _wrap(part.text, width, "", "  ")
    elif isinstance(part, Facts):
        label_width = max(len(label) for label, _ in part.rows)
        for label, text in part.rows:
            yield from _wrap(text, width, f"{label:<{label_width}}  ", " " * (label_width + 2))
    elif isinstance(part, Notes):
        yield from _wrap(part.title, width, "", "  ")
        for text in part.lines:
            yield from _wrap(text, width, "  - ", "    ")
    else:
        if part.title:
            yield from _wrap(part.title, width, "", "  ")
        yield from grid_lines(part, width)


def _wrap(text: str, width: int, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    ) or [first.rstrip()]


def grid_lines(grid: Grid, width: int) -> Iterator[str]:
    """The grid as aligned columns, or, where they are wider than ``width``, row by row as facts."""
    gap = 2 if grid.width(2) <= width else 1
    if grid.width(gap) > width:
        label_width = max(len(c.head) for c in grid.columns)
        for i, row in enumerate(grid.rows):
            for column, cell in zip(grid.columns, row, strict=True):
                yield from _wrap(cell, width, f"  {column.head:<{label_width}}  ", " " * (label_width + 4))
            if i + 1 < len(grid.rows):
                yield ""
        return
    widths = grid.widths()
    for row in (tuple(c.head for c in grid.columns), *grid.rows):
        cells = (
            f"{cell:<{w}}" if c.left else f"{cell:>{w}}"
            for c, cell, w in zip(grid.columns, row, widths, strict=True)
        )
        yield (" " * gap).join(cells).rstrip()
