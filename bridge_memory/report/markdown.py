"""Blocks of a report as Markdown, and its first table as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from bridge_memory.report.document import Block, Bullets, Grid, Pairs, Words

#: Characters with a meaning in Markdown.
_ESCAPED = str.maketrans({c: f"\\{c}" for c in "\\`*_[]<>|#"})


def markdown(blocks: Iterable[Block], text: str = "") -> str:
    """Headings, tables and lists; ``text`` unchanged, indented."""
    parts = ["\n".join(_lines(block)) for block in blocks]
    if text:
        parts.append("\n".join(f"    {line}".rstrip() for line in text.splitlines()))
    return "\n\n".join(parts) + "\n"


def _lines(block: Block) -> list[str]:
    title = [f"## {_escaped(block.title)}", ""] if block.title else []
    if isinstance(block, Pairs):
        return title + [f"- {_escaped(name)}: {_escaped(words)}" for name, words in block.pairs]
    if isinstance(block, Bullets):
        return title + [f"- {_escaped(item)}" for item in block.items]
    if isinstance(block, Words):
        return title + [text for i, line in enumerate(block.lines) for text in [*[""] * bool(i), _escaped(line)]]
    rules = [" --- |" if column.words else " ---: |" for column in block.columns]
    lines = [_row(column.title for column in block.columns), "|" + "".join(rules)]
    lines += [_row(row) for row in block.rows]
    return [*title, *lines, *(text for note in block.notes for text in ("", _escaped(note)))]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(_escaped, cells)) + " |"


def _escaped(text: str) -> str:
    return text.translate(_ESCAPED)


def first_table(blocks: Iterable[Block]) -> str:
    """The first table as CSV; "" where there is none."""
    grid = next((block for block in blocks if isinstance(block, Grid)), None)
    if grid is None:
        return ""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(column.title for column in grid.columns)
    writer.writerows(grid.rows)
    return text.getvalue()
