"""Guards: a failing report never stops training."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_warned: set[str] = set()

#: Consecutive slow failures after which a report skips the failing step.
TRIES = 2
#: Seconds: a failure faster than this is cheap, and the step is tried again.
QUICK = 0.1
#: Seconds beyond which a step that succeeds is slow too; how often it may be; how many times its time must pass after
#: that before it is taken again (2 % of training).
SLOW, OFTEN, SPARED = 0.5, 3, 50.0


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


def pass_on(error: Exception) -> None:
    """Raise ``error`` again where the handler of a signal raised it: it is not of the report that it interrupted, but
    for training (a preemption, a timeout)."""
    trace, caller = error.__traceback__, None
    while trace is not None:
        frame = trace.tb_frame
        # Python calls a handler with the signal and the frame that it interrupts.
        given = list(frame.f_locals.values())
        given += [one for value in given if type(value) is tuple for one in value]
        of_caller = caller is not None and any(one is caller for one in given)
        if of_caller and any(isinstance(one, int) and one in signal.valid_signals() for one in given):
            raise error
        trace, caller = trace.tb_next, frame


class Alone:
    """A lock that is not waited for. Copies and pickles as a new one."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self.taken = functools.partial(lock.acquire, blocking=False)
        self.release = lock.release

    def __reduce__(self) -> tuple[type[Alone], tuple[()]]:
        return Alone, ()


def never_raises(function: F) -> F:
    """Wrap ``function``: an Exception becomes one warning and the result None. KeyboardInterrupt, SystemExit
    and those of a signal's handler pass."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            pass_on(error)
            warn_once(function.__qualname__, error)
            return None

    return guarded  # type: ignore[return-value]


class Attempts:
    """A step of every report that may fail each time: a file, a logger, the store.

    An Exception becomes one warning. After ``TRIES`` consecutive slow failures the step is skipped for good; a step
    that fails quickly (a full disk, say) is tried at every report. One that succeeds slowly is taken ``OFTEN`` times,
    then so rarely that training loses 2 % of its time to it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._slow_failures = self._slow_successes = 0
        self._not_before = 0.0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of ``function``; None where it fails or is skipped. KeyboardInterrupt and SystemExit pass."""
        started = time.monotonic()
        if self._slow_failures >= TRIES or started < self._not_before:
            return None
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            pass_on(error)
            warn_once(self._what, error)
            if time.monotonic() - started > QUICK:
                self._slow_failures += 1
            return None
        self._slow_failures = 0
        took = time.monotonic() - started
        self._slow_successes = self._slow_successes + 1 if took > SLOW else 0
        if self._slow_successes >= OFTEN:
            self._not_before = time.monotonic() + SPARED * took
            warn_once(f"{self._what} at every report", TimeoutError(f"it takes {took:.1f} s, so some are left out"))
        return result
