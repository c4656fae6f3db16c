"""What a person sees without asking for more: a report cut to one screen, whatever the terminal's width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from bridge_memory.report.document import Chart, Drawn
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
