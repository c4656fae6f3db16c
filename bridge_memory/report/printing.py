"""Prints a report: with rich on a terminal, as plain text elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from bridge_memory.report.document import Block, Bullets, Chart, Drawn, Grid, Pairs, Words, one_line
from bridge_memory.report.plain import render

#: Default line width, characters.
WIDTH = 80
#: Largest line width.
WIDEST = 10_000
#: Smallest line width: narrower text is not readable.
NARROWEST = 40


def print_blocks(blocks: Iterable[Drawn], stream: TextIO | None = None) -> None:
    """Write ``blocks`` to ``stream`` (default: stdout): with rich on a terminal, as plain text elsewhere. Charts are
    skipped: they are for pages.
    """
    if stream is None and _collected:
        blocks = [block if isinstance(block, Chart) else _clean(block) for block in blocks]
        _note(blocks)
        _collected[-1].extend(blocks)
        return
    blocks = list(blocks)
    _note(blocks)
    out = sys.stdout if stream is None else stream
    terminal, width = out.isatty(), line_width(out)
    clean = [_clean(block) for block in blocks if not isinstance(block, Chart)]
    if terminal and os.environ.get("TERM") != "dumb":
        try:
            from bridge_memory.report.terminal import print_rich  # importing rich is slow
        except ImportError:
            pass  # a clone that is not installed may lack rich
        else:
            print_rich(clean, out, width)
            return
    out.write(render(clean, width))


def line_width(out: TextIO) -> int:
    """Characters of a line of ``out``: COLUMNS where it is set, else the terminal's on a terminal, else 80."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns if out.isatty() else _columns()
    return min(max(NARROWEST, width), WIDEST)


_collected: list[list[Drawn]] = []
_answers: list[list[str]] = []


@contextlib.contextmanager
def answers() -> Iterator[list[str]]:
    """The first words of what is printed within the context: the answer, where a report begins with it."""
    found: list[str] = []
    _answers.append(found)
    try:
        yield found
    finally:
        _answers.remove(found)


def _note(blocks: Iterable[Drawn]) -> None:
    for found in _answers:
        if not found:
            found += [line for block in blocks if isinstance(block, Words) for line in block.lines]


@contextlib.contextmanager
def collected() -> Iterator[list[Drawn]]:
    """Collects the blocks that are printed to standard output within the context."""
    blocks: list[Drawn] = []
    _collected.append(blocks)
    try:
        yield blocks
    finally:
        _collected.remove(blocks)


def _columns() -> int:
    """COLUMNS or 80: output to a file does not depend on the terminal's width."""
    columns = os.environ.get("COLUMNS", "")
    return (int(columns) if columns.isdecimal() and len(columns) < 10 else 0) or WIDTH


def _clean(block: Block) -> Block:
    """Escapes control characters: names come from files, and terminals interpret them."""
    if isinstance(block, Pairs):
        return Pairs(one_line(block.title), tuple((one_line(n), one_line(v)) for n, v in block.pairs))
    if isinstance(block, Bullets):
        return Bullets(one_line(block.title), tuple(map(one_line, block.items)))
    if isinstance(block, Words):
        return Words(one_line(block.title), tuple(map(one_line, block.lines)), block.tone)
    return Grid(
        one_line(block.title), block.columns, tuple(tuple(map(one_line, row)) for row in block.rows),
        block.emphasis, tuple(map(one_line, block.notes)),
    )
