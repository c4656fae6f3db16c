"""Work spread over processes that share what this one has worked out so far.

Processes are forked, so that recordings and models are theirs without being sent; where the system cannot fork, all is
done here.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

#: What forked processes do, set before they are.
_work: Callable[[Any], Any] | None = None


def can_fork() -> bool:
    """Whether several processes can be had here."""
    return "fork" in multiprocessing.get_all_start_methods()


def spread(jobs: int, work: Callable[[Any], T], tasks: Iterable[Any]) -> Iterator[T]:
    """``work`` of every task, in order, by ``jobs`` processes. Tasks and results are pickled, ``work`` is not."""
    if jobs == 1 or not can_fork():
        yield from map(work, tasks)
        return
    global _work
    _work = work
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _deaf)
    try:
        yield from pool.map(_do, tasks)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        _work = None


def _deaf() -> None:
    """Ctrl-C is for the process that shows what was found."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _do(task: Any) -> Any:
    assert _work is not None
    return _work(task)
