"""Blocks of a report as plain text of a given width; the terminal shares the layout.

Numbers are never broken or cut: columns that exceed the width go into a further table with the same first column. Text
wraps between words, dotted names of tensors after a dot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bridge_memory.report.document import Block, Bullets, Grid, Pairs, Words

#: Characters between two columns; the second where the first does not fit.
GAP, NARROW_GAP = 2, 1
#: A column of words takes at least this (or its longest word) before a table is split.
WORDS_WIDTH = 14


@dataclass(frozen=True, slots=True)
class Laid:
    """A part of a grid laid out for a width: widths of its columns, whether they are ``bars``, and each row's lines of
    padded cells."""

    gap: int
    widths: tuple[int, ...]
    bars: tuple[bool, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def unbroken(self) -> bool:
        """Whether every row is one line."""
        return all(len(row) == 1 for row in self.rows)


def render(blocks: Iterable[Block], width: int) -> str:
    """All blocks in lines of at most ``width`` characters; a longer word without a dot is not broken."""
    return "\n\n".join("\n".join(_lines(block, width)) for block in blocks) + "\n"


def _lines(block: Block, width: int) -> list[str]:
    lines = wrap(block.title, width) if block.title else []
    if isinstance(block, Pairs):
        return lines + pair_lines(block, width)
    if isinstance(block, Bullets):
        return lines + bullet_lines(block, width)
    if isinstance(block, Words):
        return lines + word_lines(block, width)
    for n, laid in enumerate(lay_out(block, width)):
        between = " " * laid.gap
        lines += [""] * bool(n)
        lines.append(between.join(laid.header).rstrip())
        lines.append(between.join("-" * w for w in laid.widths))
        lines += [between.join(cells).rstrip() for row in laid.rows for cells in row]
    for note in block.notes:
        lines += wrap(note, width)
    return lines


def pair_lines(block: Pairs, width: int) -> list[str]:
    """"  name  value", values wrapped under themselves."""
    indent = 4 + max(len(name) for name, _ in block.pairs)
    return [
        line for name, value in block.pairs for line in wrap(value, width, f"  {name}".ljust(indent), " " * indent)
    ]


def bullet_lines(block: Bullets, width: int) -> list[str]:
    """"  - item", wrapped under itself."""
    return [line for item in block.items for line in wrap(item, width, "  - ", "    ")]


def word_lines(block: Words, width: int) -> list[str]:
    """The lines, wrapped."""
    return [line for words in block.lines for line in wrap(words, width)]


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most ``width``, broken between words, and after a dot in a word that is wider than a line."""
    lines, line, empty = [], first, True
    for word in text.split():
        if not empty:
            if len(line) + 1 + len(word) <= width:
                line += " " + word
                continue
            lines.append(line)
            line = rest
        while len(line) + len(word) > width and "." in word[:-1]:
            cut = word.rfind(".", 0, max(0, width - len(line))) + 1 or word.index(".") + 1
            lines.append(line + word[:cut])
            line, word = rest, word[cut:]
        line, empty = line + word, False
    return [*lines, line.rstrip()]


def _widest_atom(cells: Iterable[str]) -> int:
    """The longest piece that ``wrap`` does not break."""
    return max((len(atom) for cell in cells for atom in cell.replace(".", ". ").split()), default=0)


def lay_out(grid: Grid, width: int) -> list[Laid]:
    """Cut ``grid`` into tables of at most ``width``, each beginning with its first column."""
    natural, least = [], []
    for i, column in enumerate(grid.columns):
        widest = max(len(column.title), *(len(row[i]) for row in grid.rows), 0)
        natural.append(widest)
        atom = _widest_atom(row[i] for row in grid.rows) if column.words else widest
        least.append(max(len(column.title), atom, min(widest, WORDS_WIDTH)))
    everything = range(len(grid.columns))
    for gap in (GAP, NARROW_GAP):
        if _total((least[i] for i in everything), gap) <= width:
            return [_table(grid, list(everything), natural, least, width, gap)]
    tables: list[list[int]] = [[0]]
    for i in everything[1:]:
        if len(tables[-1]) > 1 and _total((least[j] for j in [*tables[-1], i]), GAP) > width:
            tables.append([0])
        tables[-1].append(i)
    return [_table(grid, indices, natural, least, width, GAP) for indices in tables]


def _table(
    grid: Grid, indices: Sequence[int], natural: Sequence[int], least: Sequence[int], width: int, gap: int
) -> Laid:
    widths = {i: least[i] for i in indices}
    spare = max(0, width - _total(widths.values(), gap))
    for i in indices:  # columns of words share the remaining width, leftmost first
        more = min(natural[i] - widths[i], spare)
        widths[i] += more
        spare -= more

    def pad(i: int, text: str) -> str:
        return text.ljust(widths[i]) if grid.columns[i].words else text.rjust(widths[i])

    rows = []
    for row in grid.rows:
        cells = {i: wrap(row[i], widths[i]) if grid.columns[i].words else [row[i]] for i in indices}
        height = max(map(len, cells.values()))
        rows.append(
            tuple(tuple(pad(i, "".join(cells[i][n : n + 1])) for i in indices) for n in range(height))
        )
    header = tuple(pad(i, grid.columns[i].title) for i in indices)
    bars = tuple(grid.columns[i].bars for i in indices)
    return Laid(gap, tuple(widths.values()), bars, header, tuple(rows))


def _total(widths: Iterable[int], gap: int) -> int:
    values = list(widths)
    return sum(values) + gap * (len(values) - 1)
