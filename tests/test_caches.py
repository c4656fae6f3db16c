"""What estimates of a process share: one owner, a bound, safe under threads."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from bridge_memory import clear_caches, estimate, peaks, resolve_model
from bridge_memory.spec import BatchSpec, ParallelSpec, RunSpec
from bridge_memory.tapes import context

MODELS = ("meta-llama/Llama-3.2-1B", "deepseek-ai/DeepSeek-V2-Lite")
RUNS = [
    RunSpec(
        model=resolve_model(name),
        parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=tp, expert_model_parallel_size=ep),
        batch=BatchSpec(seq_length=seq, global_batch_size=64),
    )
    for name, tp, seq in product(MODELS, (1, 2, 4), (512, 2048, 4096))
    for ep in ((1,) if name == MODELS[0] else (1, 2))
]


@pytest.fixture(autouse=True)
def no_cache_is_left_behind() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


def test_threads_get_what_one_alone_gets() -> None:
    """Eight of them from a cold cache, switched as often as the interpreter can."""
    expected = [estimate(run) for run in RUNS]
    clear_caches()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(estimate, RUNS * 3)) == expected * 3
    finally:
        sys.setswitchinterval(before)


def test_traces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the bound the cache is emptied, runs in progress keep their traces, and estimates do not change."""
    expected = [peaks(run) for run in RUNS]
    clear_caches()
    monkeypatch.setattr(context, "MOST_TRACES", 5)
    for run, stages in zip(RUNS, expected, strict=True):
        assert peaks(run) == stages
        assert context.TRACE_CACHE.traced <= 5


def test_clear_caches_empties_the_cache() -> None:
    assert context.TRACE_CACHE.traced == 0
    estimate(RUNS[0])
    assert context.TRACE_CACHE.traced > 0
    clear_caches()
    assert context.TRACE_CACHE.traced == 0


def test_equal_layouts_trace_nothing_new() -> None:
    """A longer sequence, another pipeline, another data-parallel size: the sizes differ, the traces do not."""
    peaks(RUNS[0])
    before = context.TRACE_CACHE.traced
    for parallel, seq in (
        (ParallelSpec(world_size=64), 512), (ParallelSpec(world_size=8, pipeline_model_parallel_size=4), 8192),
        (ParallelSpec(world_size=4, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=4), 1024),
    ):  # fmt: skip
        peaks(RunSpec(model=resolve_model(MODELS[0]), parallel=parallel, batch=BatchSpec(seq_length=seq)))
    # The last of several stages owns a copy of the tied embedding: its output layer is another block.
    assert context.TRACE_CACHE.traced <= before + 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_estimates_whatever_another_thread_does_meanwhile() -> None:
    """A fork once had the lock of a thread that it does not have."""
    held = threading.Event()

    def hold() -> None:
        with context.TRACE_CACHE.lock:
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if not child:
        signal.alarm(30)
        os._exit(0 if estimate(RUNS[0]).peak_stage.peak_bytes else 1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_sweeps_whatever_another_thread_sweeps() -> None:
    many = pytest.importorskip("bridge_memory.plan.megatron.many")
    with many._sweeping:
        child = os.fork()
        if not child:
            os._exit(not many._sweeping.acquire(blocking=False))
    assert os.waitpid(child, 0)[1] == 0
