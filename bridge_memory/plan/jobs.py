"""Work spread over processes that share what this one has worked out so far, or over whatever joblib reaches.

Processes are forked, so that recordings and models are theirs without being sent; where the system cannot fork, all is
done here. A backend of joblib (its own, or a Dask or Ray cluster) is sent the work, and works out the rest itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from threading import Lock
from typing import Any, TypeVar

from bridge_memory.processes import end_with_parent
from bridge_memory.spec import SpecError, show

T = TypeVar("T")

#: One thread forks at a time: what packages do before and after a fork may be theirs alone (filelock, which
#: huggingface_hub imports, raises RuntimeError).
_forking = Lock()
#: What this process does, where it is a fork of ``spread``.
_work: Callable[[Any], Any] | None = None


def can_fork() -> bool:
    """Whether several processes can be had here."""
    import multiprocessing

    return "fork" in multiprocessing.get_all_start_methods()


def spread(jobs: int, work: Callable[[Any], T], tasks: Iterable[Any], backend: str | None = None) -> Iterator[T]:
    """``work`` of every task, in order, by ``jobs`` processes. Tasks and results are pickled; so is ``work`` where a
    ``backend`` does it. Raises SpecError for a backend that is not there."""
    if backend is not None:
        yield from _by_joblib(backend, jobs, work, tasks)
        return
    if jobs == 1 or not can_fork():
        yield from map(work, tasks)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # A fork has the arguments of its initializer without their being sent.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _begin, (work, os.getpid()))
    try:
        with _forking:
            done = pool.map(_do, tasks)  # it begins all processes and takes all tasks at once
        yield from done
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    """In a fork. Ctrl-C is for the process that shows what was found; its other signals are not for this one."""
    import signal

    global _work, _forking
    _work, _forking = work, Lock()  # the one of before the fork is held
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for ends in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, ends), signal.SIG_DFL)
    end_with_parent(parent)


def _do(task: Any) -> Any:
    assert _work is not None
    return _work(task)


def _by_joblib(backend: str, jobs: int, work: Callable[[Any], T], tasks: Iterable[Any]) -> Iterator[T]:
    """``backend``: a name that joblib knows, and after "=" the address of a Dask scheduler."""
    name, _, address = backend.partition("=")
    with ExitStack() as stack:
        try:
            import joblib

            stack.enter_context(_cluster(name, address))
            stack.enter_context(joblib.parallel_config(backend=name, n_jobs=jobs))
            parallel = joblib.Parallel(return_as="generator")
        except ImportError as error:
            raise SpecError(
                f"--backend ({show(backend)}) needs {error.name}, which is not installed; `pip install {error.name}`, "
                "or drop it"
            ) from None
        except (OSError, ValueError) as error:
            raise SpecError(
                f"--backend ({show(backend)}) is not to be had ({show(str(error))}); give loky, dask, dask=ADDRESS or "
                "ray"
            ) from None
        yield from parallel(joblib.delayed(work)(task) for task in tasks)


def _cluster(name: str, address: str) -> AbstractContextManager[Any]:
    """The cluster that a backend sends work to, for as long as it does. Raises ImportError, OSError."""
    if name == "ray":
        from ray.util.joblib import register_ray

        register_ray()
    if name != "dask":
        return nullcontext()
    from distributed import Client, get_client

    client: AbstractContextManager[Any]
    if address:
        client = Client(address, timeout=10)
    else:
        try:
            client = nullcontext(get_client())
        except ValueError:  # none yet: that of DASK_SCHEDULER_ADDRESS, or one on this machine
            client = Client()
    return client
