"""Python's searches for reference cycles: seldom while a command runs, which makes a hundred thousand small objects and
few cycles; in a server while nobody asks; of new objects alone where many exist."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

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


@contextmanager
def existing_objects_frozen() -> Iterator[None]:
    """Exclude existing objects from ``gc.collect``: with torch, or a server's caches, they take tenths of a second each
    time."""
    mine = not gc.get_freeze_count()
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


#: Questions after which a server searches all of its objects, once nobody has asked for so many seconds.
QUESTIONS, IDLE = 100, 2.0
#: Searches of the youngest objects that a server makes before one of the next older too, and of these before one of
#: all: more than it gets to.
_MIDDLE, _YOUNG = 2, 1_000_000


@contextmanager
def collections_when_idle(answered: Callable[[], tuple[int, float]]) -> Iterator[None]:
    """Search only young objects for cycles while somebody waits for an answer: with a server's caches a search of all
    takes tenths of a second. ``answered``: how many questions there were so far, and when the last one was, by
    ``time.monotonic``."""
    before = gc.get_threshold()
    gc.set_threshold(SELDOM, _MIDDLE, _YOUNG)
    ended = Event()

    def collect() -> None:
        searched = 0
        while not ended.wait(IDLE / 4):
            number, last = answered()
            if number - searched >= QUESTIONS and time.monotonic() - last >= IDLE:
                searched = number
                gc.collect()

    Thread(target=collect, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        gc.set_threshold(*before)
