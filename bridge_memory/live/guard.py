"""Guards: a failing report never stops training."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_warned: set[str] = set()

#: Consecutive slow failures after which a report skips the failing step.
TRIES = 2
#: Seconds: a failure faster than this is cheap, and the step is tried again.
QUICK = 0.1


def error_words(error: BaseException) -> str:
    """The error's kind and message on one line of at most 200 characters, whatever the error is."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "no message"
    return f"{type(error).__name__}: {text}"[:200]


def warn_once(what: str, error: BaseException) -> None:
    """One line on stderr the first time ``what`` fails in this process."""
    if what in _warned:
        return
    _warned.add(what)
    try:
        print(f"bridge-memory: {what} failed ({error_words(error)})", file=sys.stderr, flush=True)
    except Exception:  # a closed stderr must not stop training either
        return


def never_raises(function: F) -> F:
    """Wrap ``function``: an Exception becomes one warning and the result None. KeyboardInterrupt and SystemExit
    pass."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            warn_once(function.__qualname__, error)
            return None

    return guarded  # type: ignore[return-value]


class Attempts:
    """A step of every report that may fail each time: a file, a logger, the store.

    An Exception becomes one warning. After ``TRIES`` consecutive slow failures the step is skipped for good; a step
    that fails quickly (a full disk, say) is tried at every report.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._slow_failures = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of ``function``; None where it fails or is skipped. KeyboardInterrupt and SystemExit pass."""
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
