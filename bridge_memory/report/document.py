"""A report as records: paragraphs, facts, grids. ``plain`` and ``terminal`` show the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Title:
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels and what they say, one a line."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Column:
    head: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. ``marked`` is the row that matters most."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None

    def width(self, gap: int) -> int:
        """Characters of a line, with ``gap`` between columns."""
        return sum(self.widths()) + gap * (len(self.columns) - 1)

    def widths(self) -> list[int]:
        return [max(len(c.head), *(len(r[i]) for r in self.rows), 0) for i, c in enumerate(self.columns)]


@dataclass(frozen=True, slots=True)
class Notes:
    """A heading and one sentence a line under it."""

    title: str
    lines: tuple[str, ...]


Part = Title | Facts | Grid | Notes
Document = Sequence[Part]


def one_line(text: str) -> str:
    """``text`` with line breaks and control characters escaped, so that it stays one line on any terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
