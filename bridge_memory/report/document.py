"""What a printed report is made of. Knows nothing of memory; ``plain`` and ``terminal`` show the same blocks,
``printing`` chooses between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A heading, and whether its cells are ``words`` (left, may wrap) or numbers (right, whole). Cells of ``bars`` are
    words without blanks whose letters stand for parts, which a terminal shows as colours."""

    title: str
    words: bool = False
    bars: bool = False


class Grid(NamedTuple):
    """A table. ``emphasis``: the index of the row that matters, if any."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasis: int | None = None
    notes: tuple[str, ...] = ()


class Pairs(NamedTuple):
    """Names and values, one a line."""

    title: str
    pairs: tuple[tuple[str, str], ...]


class Words(NamedTuple):
    """Lines of words, the first of which may matter: ``tone`` is "good", "bad", "open" or nothing."""

    title: str
    lines: tuple[str, ...]
    tone: str = ""


class Bullets(NamedTuple):
    """A list of sentences."""

    title: str
    items: tuple[str, ...]


class Chart(NamedTuple):
    """What a page draws and text leaves to the table beside it: ``kind``, "plot", "pairs" or "stages", is who draws
    ``data``, JSON, in ``page/plots.js``."""

    title: str
    kind: str
    data: Mapping[str, Any]


Block = Grid | Pairs | Bullets | Words
#: What a page is made of.
Drawn = Block | Chart


def one_line(text: str) -> str:
    """``text`` with line breaks and control characters escaped, so that it stays one line on any terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
