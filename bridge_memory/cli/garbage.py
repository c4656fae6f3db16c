"""Python's search for cycles, seldom while a command runs: it makes a hundred thousand small objects and few cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects that are made between two searches; Python's own is 700.
SELDOM = 50_000


@contextmanager
def few_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
