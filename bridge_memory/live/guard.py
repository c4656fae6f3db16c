"""Training goes on whatever happens to its report."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_warned: set[str] = set()


def warn_once(what: str, error: BaseException) -> None:
    """One line on stderr the first time ``what`` fails in this process."""
    if what in _warned:
        return
    _warned.add(what)
    text = " ".join(str(error).split())[:300]
    try:
        print(f"bridge-memory: {what} failed ({type(error).__name__}: {text})", file=sys.stderr, flush=True)
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
