"""Fetching a config.json from the Hugging Face Hub. huggingface_hub is imported here, when called, only."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from bridge_memory.spec import SpecError, show

#: One line of why for the errors huggingface_hub raises, most specific first.
_REASONS = (
    ("GatedRepoError", "it is gated: accept its terms on the Hub and log in (hf auth login, or HF_TOKEN)"),
    ("DisabledRepoError", "its repository is disabled"),
    ("RepositoryNotFoundError", "the Hub has no such repository, or it is private (set HF_TOKEN)"),
    ("EntryNotFoundError", "its repository has no config.json"),
    ("HFValidationError", "it is not a valid Hub id"),
)
#: Seconds until a connection is open; and until the config.json is here, with every retry of huggingface_hub, whose own
#: timeouts are for one read each.
_CONNECT_TIMEOUT = 5.0
_DEADLINE = 6.0


class _NoAnswer(Exception):
    """The Hub took longer than ``_DEADLINE``."""


def fetch_config(repo: str, suggestions: str = "") -> str:
    """The local path of ``repo``'s config.json, from the cache or the Hub. Raises SpecError of one line."""
    _check_endpoint()
    try:
        from huggingface_hub import constants, hf_hub_download
    except ImportError:
        raise SpecError(
            f"{repo} is no preset; fetching it needs `pip install huggingface_hub`{suggestions}"
        ) from None
    except Exception as error:  # it reads its variables when it is imported
        why = f"huggingface_hub does not start ({type(error).__name__}: {error})"
        raise SpecError(f"{repo} is no preset; {why}; look at your HF_* variables") from None
    offline = bool(constants.HF_HUB_OFFLINE)
    try:
        with _quiet():
            try:
                return _in_time(lambda: _download(repo, cached_only=offline))
            except _NoAnswer:
                # Fetched before, perhaps.
                return str(hf_hub_download(repo, "config.json", local_files_only=True))
    except Exception as error:  # network stacks raise far too many kinds; each must end as one line
        reason = _reason(error, offline, constants.ENDPOINT)
        raise SpecError(f"{repo} is no preset and could not be fetched: {reason}{suggestions}") from None


def _check_endpoint() -> None:
    """huggingface_hub does not import with an endpoint that is no URL."""
    endpoint = os.environ.get("HF_ENDPOINT", "")
    try:
        url = urlsplit(endpoint)
        good = not endpoint or (url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0)
    except ValueError:
        good = False
    if not good:
        raise SpecError(f"HF_ENDPOINT ({show(endpoint)}) is no URL; unset it, or set it to one such as https://HOST")


def _download(repo: str, cached_only: bool) -> str:
    from huggingface_hub import constants, hf_hub_download

    # Without this test an offline laptop waits half a minute for huggingface_hub's retries.
    cached_only = cached_only or not _reachable(constants.ENDPOINT)
    return str(hf_hub_download(repo, "config.json", local_files_only=cached_only))


def _in_time(work: Callable[[], str]) -> str:
    """What ``work`` returns or raises; ``_NoAnswer`` where it takes longer. What is left of it then ends with the
    process, or by its own timeouts."""
    done: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        except BaseException as error:  # handed over
            done.put(error)

    threading.Thread(target=run, daemon=True, name="bridge-memory-hub").start()
    try:
        answer = done.get(timeout=_DEADLINE)
    except queue.Empty:
        raise _NoAnswer(f"no answer in {_DEADLINE:g} s") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _reachable(endpoint: str) -> bool:
    """Whether a connection to the endpoint opens. True behind a proxy: only the request can tell."""
    import socket
    from urllib.request import getproxies, proxy_bypass

    url = urlsplit(endpoint)
    host = url.hostname or ""
    proxies = getproxies()
    if (url.scheme in proxies or "all" in proxies) and not proxy_bypass(host):
        return True
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        with socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT):
            return True
    except (OSError, ValueError):
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no retry warnings: the outcome is one line of our own."""
    from logging import ERROR

    from huggingface_hub.utils.logging import get_verbosity, set_verbosity
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    verbosity, bars = get_verbosity(), not are_progress_bars_disabled()
    set_verbosity(ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        set_verbosity(verbosity)
        if bars:
            enable_progress_bars()


def _reason(error: BaseException, offline: bool, endpoint: str) -> str:
    """huggingface_hub wraps what happened in a cache miss; the cause is behind it."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    names = {cls.__name__ for e in causes for cls in type(e).__mro__}
    for name, reason in _REASONS:
        # A cache miss is an EntryNotFoundError by inheritance alone.
        if name in names and not (name == "EntryNotFoundError" and "LocalEntryNotFoundError" in names):
            return reason
    if any(isinstance(e, _NoAnswer) for e in causes):
        return f"{endpoint} gave no usable answer in {_DEADLINE:g} s; give a config.json instead"
    if offline:
        return "HF_HUB_OFFLINE is set and its config.json is not in the cache"
    for e in causes:
        status = getattr(getattr(e, "response", None), "status_code", None)
        if status is not None:
            return f"{endpoint} answered {status}"
    return f"{endpoint} cannot be reached; give a config.json instead"
