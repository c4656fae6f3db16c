"""Blocks of a printed report, independent of memory. ``plain`` and ``terminal`` render them; ``printing`` chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column: its title, and whether its cells are ``words`` (left-aligned, may wrap) or numbers (right-aligned,
    never broken). Cells of ``bars`` are words whose letters a terminal shows as colours."""

    title: str
    words: bool = False
    bars: bool = False


class Grid(NamedTuple):
    """A table. ``emphasis``: the index of the highlighted row, if any."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasis: int | None = None
    notes: tuple[str, ...] = ()


class Pairs(NamedTuple):
    """Names and values, one per line."""

    title: str
    pairs: tuple[tuple[str, str], ...]


class Words(NamedTuple):
    """Lines of text; ``tone`` ("good", "bad", "open" or "") colours the first."""

    title: str
    lines: tuple[str, ...]
    tone: str = ""


class Bullets(NamedTuple):
    """A list of sentences."""

    title: str
    items: tuple[str, ...]


class Chart(NamedTuple):
    """A chart of a page, left out of text. ``kind`` ("plot", "pairs", "stages" or "rollout"): the function of
    ``page/plots.js`` that draws ``data``, JSON."""

    title: str
    kind: str
    data: Mapping[str, Any]


Block = Grid | Pairs | Bullets | Words
#: A block of a page.
Drawn = Block | Chart


def one_line(text: str) -> str:
    """``text`` with line breaks and control characters escaped, so that it stays one line on any terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
