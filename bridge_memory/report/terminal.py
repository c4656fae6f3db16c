"""Blocks of a report on a terminal with rich: the plain layout with headings, rules and colour."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bridge_memory.report.document import Block, Grid, Pairs, Words
from bridge_memory.report.plain import NARROW_GAP, Laid, bullet_lines, lay_out, pair_lines, word_lines, wrap

_TITLE = "bold cyan"
_HEADER = "bold"
_EMPHASIS = "bold yellow"
_NOTE = "dim"
_TONES = {"good": "bold green", "bad": "bold red", "open": "bold yellow"}
#: Letter of a bar (``short.LETTERS``) -> colour.
_COLOURS = {
    "W": "reverse blue", "G": "reverse magenta", "O": "reverse green", "B": "reverse bright_black",
    "A": "reverse yellow", "T": "reverse red", "|": "bold", ".": "dim",
}


def print_rich(blocks: Iterable[Block], stream: TextIO, width: int) -> None:
    """Write ``blocks`` to a terminal of ``width`` columns. Text is never read as markup."""
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)

    def lines(texts: Iterable[str], style: str = "") -> None:
        for line in texts:
            console.print(Text(line, style=style), no_wrap=True, overflow="ignore", crop=False)

    for n, block in enumerate(blocks):
        if n:
            console.print()
        if block.title:
            lines(wrap(block.title, width), _TITLE)
        if isinstance(block, Grid):
            for m, laid in enumerate(lay_out(block, width)):
                if m:
                    console.print()
                console.print(_table(block, laid), no_wrap=True, overflow="ignore", crop=False)
            for note in block.notes:
                lines(wrap(note, width), _NOTE)
        elif isinstance(block, Words):
            for number, words in enumerate(block.lines):
                style = _TONES.get(block.tone, "") if not number else _NOTE
                lines(word_lines(Words("", (words,)), width), style)
        else:
            lines(pair_lines(block, width) if isinstance(block, Pairs) else bullet_lines(block, width))


def _table(grid: Grid, laid: Laid) -> Table:
    # The box draws one space between columns; padding adds the rest of the gap.
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, laid.gap - NARROW_GAP, 0, 0),
        header_style=_HEADER,
    )
    for title, width in zip(laid.header, laid.widths, strict=True):
        table.add_column(Text(title), width=width, no_wrap=True, overflow="ignore")
    for n, row in enumerate(laid.rows):
        for cells in row:
            shown = [_bar(cell) if bars else Text(cell) for cell, bars in zip(cells, laid.bars, strict=True)]
            table.add_row(*shown, style=_EMPHASIS if n == grid.emphasis else "")
    return table


def _bar(cell: str) -> Text:
    """A bar with its letters coloured."""
    text = Text()
    for letter in cell:
        text.append(letter, style=_COLOURS.get(letter, ""))
    return text
