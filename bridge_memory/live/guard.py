"""Training goes on whatever happens to its report."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_warned: set[str] = set()

#: Failures in a row after which a report no longer spends time on what fails.
TRIES = 2
#: Seconds: what fails faster than this costs nothing, and is tried again.
QUICK = 0.1


def said(error: BaseException) -> str:
    """The error's kind and message on one line of at most 200 characters, whatever the error is."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "it has no message"
    return f"{type(error).__name__}: {text}"[:200]


def warn_once(what: str, error: BaseException) -> None:
    """One line on stderr the first time ``what`` fails in this process."""
    if what in _warned:
        return
    _warned.add(what)
    try:
        print(f"bridge-memory: {what} failed ({said(error)})", file=sys.stderr, flush=True)
    except Exception:  # a closed stderr is no reason to stop training either
        return


def never_raises(function: F) -> F:
    """An Exception inside becomes one warning, and the result None. KeyboardInterrupt and SystemExit pass."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            warn_once(function.__qualname__, error)
            return None

    return guarded  # type: ignore[return-value]


class Attempts:
    """One thing that every report does, and that may fail each time: a file, a logger, the store.

    An Exception inside becomes one warning. After ``TRIES`` failures in a row that took their time it is left out for
    good; what fails at once (a full disk, say) is tried at every report.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._slow_failures = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``function`` returns; None where it fails or is left out. KeyboardInterrupt and SystemExit pass."""
        if self._slow_failures >= TRIES:
            return None
        started = time.monotonic()
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            warn_once(self._what, error)
            if time.monotonic() - started > QUICK:
                self._slow_failures += 1
            return None
        self._slow_failures = 0
        return result
