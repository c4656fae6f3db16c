"""What a person sees without asking for more: a report cut to one screen, whatever the terminal's width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from bridge_memory.report.document import Bullets, Chart, Drawn, Grid
from bridge_memory.report.plain import render

#: A screen, in lines and in characters of a line.
LINES, WIDTH = 40, 100

B = TypeVar("B", bound=Drawn)


def height(blocks: Iterable[Drawn]) -> int:
    """Lines of ``blocks`` at the width of a screen."""
    text = [block for block in blocks if not isinstance(block, Chart)]
    return render(text, WIDTH).count("\n") if text else 0


def first_that_fits(versions: Iterable[Sequence[B]], after: Sequence[Drawn] = ()) -> list[B]:
    """Of ``versions``, each shorter than the one before, the first that with ``after`` below it is one screen; else the
    last."""
    blocks: Sequence[B] = ()
    for blocks in versions:
        if height([*blocks, *after]) <= LINES:
            break
    return list(blocks)


def shortened(block: B, most: int, more: str) -> B:
    """A list or a table of ``most`` items and how many more there are; ``more``: how to see them."""
    number = len(block.items) if isinstance(block, Bullets) else len(block.rows) if isinstance(block, Grid) else 0
    if number <= most + 1:  # the sentence takes a line too
        return block
    words = f"{number - most} more ({more})"
    if isinstance(block, Bullets):
        return block._replace(items=(*block.items[:most], words))
    assert isinstance(block, Grid)
    return block._replace(rows=block.rows[:most], notes=(*block.notes, words))
