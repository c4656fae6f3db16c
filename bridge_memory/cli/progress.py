"""How far a search is, on a terminal, by rich: nothing where stderr is a file or a pipe, or rich is not installed."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

#: Seconds that a search takes before it says how far it is: most are done by then, and rich takes its time to import.
PATIENCE = 0.5
#: Seconds between two looks.
EVERY = 0.1


class Progress:
    """Called with how many were evaluated and how many fit; gone when it ends, so that the answer follows.

    Drawn when it is called and by no thread: a search may fork processes meanwhile.
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._drawn: Any = None
        self._began = time.monotonic()
        self._next = self._began + PATIENCE
        self._part: float | None = None

    def __enter__(self) -> Progress:
        return self

    def done(self, part: float) -> None:
        """``part`` of all is done: the next look says of how many, and the time left."""
        self._part = part

    def __call__(self, looked_at: int, fitting: int) -> None:
        now = time.monotonic()
        if now < self._next or not sys.stderr.isatty():
            return
        self._next = now + EVERY
        if self._drawn is None:
            self._drawn = _bar()
            if self._drawn is None:
                self._next = float("inf")
                return
            self._drawn.start()
            self._drawn.add_task("", total=None)
        total = left = ""
        if self._part:
            total = f" of about {_rounded(looked_at / self._part):,}"
            left = f", {(now - self._began) * (1 / self._part - 1):,.0f} s left"
        said = f"{looked_at:,}{total} {self._noun}s, {fitting:,} fit{left} (Ctrl-C shows what was found)"
        self._drawn.update(self._drawn.task_ids[0], description=said)
        self._drawn.refresh()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._drawn is not None:
            self._drawn.stop()


def _rounded(number: float) -> int:
    """To two digits."""
    return int(float(f"{number:.2g}"))


def _bar() -> Any:
    """rich's display, or None without rich."""
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn
    except ImportError:
        return None
    return Bar(
        SpinnerColumn(), TextColumn("{task.description}", markup=False),
        console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
